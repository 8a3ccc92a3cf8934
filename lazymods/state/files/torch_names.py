"""How many names the mappings of a PyTorch file make, before any of them is made."""

from __future__ import annotations

from typing import Any

from lazymods.state.files.torch_pickle import MAX_DEPTH, Malformed

MIN_NAMES = 10_000
"""How many names any pickle may make; a longer one may make as many as it has room to tell."""


def check_names(tree: Any, length: int) -> None:
    """Refuse mappings that share their parts, so that few bytes name many tensors.

    Args:
        tree: What a pickle describes.
        length: The pickle's length in bytes.

    Raises:
        Malformed: If there are more names than anyone could have written in that many bytes.
    """
    limit = MIN_NAMES + length // 4  # a name and a value, both told before, take four bytes
    counts: dict[int, int] = {}

    def count(value: Any, depth: int) -> int:
        if not isinstance(value, dict) or depth > MAX_DEPTH:
            return 1
        if id(value) not in counts:
            counts[id(value)] = 1  # of what holds itself, which is refused when it is named
            counts[id(value)] = sum(count(v, depth + 1) for v in value.values())
        return counts[id(value)]

    found = count(tree, 0)
    if found > limit:
        raise Malformed(f"mappings with over {limit:,} names in a pickle of {length:,} bytes", "each name written once")
