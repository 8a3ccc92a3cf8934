"""What to write where a module hangs one level deeper in the file than in the model, or one less deep.

``stem.proj.weight`` is the kernel of a model's ``stem``, ``conv.bias`` the bias of its ``conv.lin``: each of the two
is left over, and no other name comes near.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

_LEAVES = {"kernel": "weight", "scale": "weight", "embedding": "weight", "mean": "running_mean", "var": "running_var"}


def lines(lacking: Sequence[str], unexpected: Sequence[str], sources: Mapping[str, tuple[str, ...]]) -> dict[str, str]:
    """Return the line to write for names of the model and of the file that are one level apart.

    Args:
        lacking: Names of the model without an entry.
        unexpected: Names of entries without a parameter.
        sources: The names in the file.
    """
    ours = {_as_in_torch(name): name for name in lacking}
    pairs: dict[str, list[str]] = {}
    for theirs in unexpected:
        for near in _near(theirs, ours):
            pairs.setdefault(theirs, []).append(near)
    found = [near for several in pairs.values() for near in several]
    out: dict[str, str] = {}
    for theirs, (near, *others) in pairs.items():
        if not others and found.count(near) == 1:
            (source, *_) = sources.get(theirs) or (theirs,)
            out[theirs] = out[ours[near]] = _line(theirs if source.endswith(theirs) else source, theirs, near)
    return out


def _as_in_torch(name: str) -> str:
    module, dot, leaf = name.rpartition(".")
    return f"{module}{dot}{_LEAVES.get(leaf, leaf)}"


def _near(theirs: str, ours: Mapping[str, str]) -> list[str]:
    """Return which names have a module more, or one less, before the last part or anywhere before it."""
    *module, leaf = theirs.split(".")
    shorter = [".".join([*module[:-1], leaf])] if len(module) > 1 else []
    stem, dots = "".join(f"{part}." for part in module), theirs.count(".") + 1
    longer = [n for n in ours if n.startswith(stem) and n.endswith(f".{leaf}") and n.count(".") == dots]
    return [name for name in (*shorter, *longer) if name in ours]


def _line(source: str, theirs: str, near: str) -> str:
    *module, leaf = source.split(".")
    if near.count(".") < theirs.count("."):  # the file has a module more
        return f"rename=[({_pattern(module)}[.]\", {_replacement([*module[:-1], ''])})]"
    inner = near.split(".")[-2]
    return f"rename=[({_pattern([*module, leaf])}$\", {_replacement([*module, inner, leaf])})]"


def _pattern(parts: Sequence[str]) -> str:
    """Return the beginning of a regular expression, to be closed, with a group for each number."""
    return 'r"\\b' + "[.]".join(r"(\d+)" if part.isdecimal() else re.escape(part) for part in parts)


def _replacement(parts: Sequence[str]) -> str:
    numbers = iter(range(1, len(parts) + 1))
    return 'r"' + ".".join(rf"\{next(numbers)}" if part.isdecimal() else part for part in parts) + '"'
