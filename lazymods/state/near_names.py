"""What to write where a module hangs deeper in the file than in the model, or one level less deep.

``stem.proj.weight`` is the kernel of a model's ``stem``, ``conv.bias`` the bias of its ``conv.lin``: each of the two
is left over, and no other name comes near.
"""

from __future__ import annotations

import collections
import itertools
import re
from collections.abc import Mapping, Sequence

_LEAVES = {"kernel": "weight", "scale": "weight", "embedding": "weight", "mean": "running_mean", "var": "running_var"}
_DEEPEST = 20  # modules in a name: what lacks some of them is sought in the square of their number


def lines(lacking: Sequence[str], unexpected: Sequence[str], sources: Mapping[str, tuple[str, ...]]) -> dict[str, str]:
    """Return the line to write for names of the model and of the file that come near each other.

    Args:
        lacking: Names of the model without an entry.
        unexpected: Names of entries without a parameter.
        sources: The names in the file.
    """
    ours = {_as_in_torch(name): name for name in lacking}
    deeper: dict[str, list[str]] = {}  # by the name without its last module
    for name in ours:
        *module, leaf = name.split(".")
        deeper.setdefault(".".join([*module[:-1], leaf]), []).append(name)
    pairs = {theirs: near for theirs in unexpected if (near := _near(theirs, ours, deeper))}
    counts = collections.Counter(near for several in pairs.values() for near in several)
    out: dict[str, str] = {}
    for theirs, (near, *others) in pairs.items():
        if not others and counts[near] == 1:
            (source, *_) = sources.get(theirs) or (theirs,)
            out[theirs] = out[ours[near]] = _line(theirs if source.endswith(theirs) else source, theirs, near)
    return out


def _as_in_torch(name: str) -> str:
    module, dot, leaf = name.rpartition(".")
    return f"{module}{dot}{_LEAVES.get(leaf, leaf)}"


def _near(theirs: str, ours: Mapping[str, str], deeper: Mapping[str, Sequence[str]]) -> list[str]:
    """Return which names lack some modules in a row, or have one more before the last part."""
    *module, leaf = theirs.split(".")
    if len(module) > _DEEPEST:
        return []
    ends = [(i, j) for j in range(1, len(module) + 1) for i in range(j) if i or j < len(module)]
    shorter = [".".join([*module[:i], *module[j:], leaf]) for i, j in ends]
    return [name for name in dict.fromkeys((*shorter, *deeper.get(theirs, ()))) if name in ours]


def _line(source: str, theirs: str, near: str) -> str:
    *module, leaf = source.split(".")
    *target, _ = near.split(".")
    if len(target) < theirs.count("."):  # the file has a module more, or several
        return _pair([*module, ""], [*target, ""])
    return _pair([*module, leaf], [*module, target[-1], leaf], end="$")


def _pair(theirs: Sequence[str], ours: Sequence[str], end: str = "") -> str:
    """Return a rename for all layers at once, if both names have the same numbers."""
    numbers = [part for part in theirs if part.isdecimal()]
    is_of_all = numbers == [part for part in ours if part.isdecimal()]
    pattern = "[.]".join(r"(\d+)" if is_of_all and part.isdecimal() else re.escape(part) for part in theirs)
    groups = itertools.count(1)
    new = ".".join(rf"\{next(groups)}" if is_of_all and part.isdecimal() else part for part in ours)
    return rf'rename=[(r"\b{pattern}{end}", r"{new}")]'
