"""From the names of a file to the names of a model: the ``rename`` argument, and the frequent differences.

Without a ``rename``, a name whose module is spelled otherwise than the model's (``layers_0`` for ``layers.0``,
slashes for dots, PyTorch's ``0`` for ``layers.0`` in an ``nnx.Sequential``) or has a wrapper's or collection's prefix
(``module.``, ``params.``) is matched to the one module that it can mean; so are Flax's names for what is the same array
in other libraries (``running_mean`` for ``mean``).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from flax import nnx

from lazymods._errors import Problem
from lazymods._graph import dotted
from lazymods.state.entries import Survey, base_name

Rename = Mapping[str, "str | None"] | Sequence[tuple[str, "str | None"]] | Callable[[str], "str | None"]

PREFIXES = ("module", "_orig_mod", "model", "params", "batch_stats")
_LEAVES = {"running_mean": "mean", "running_var": "var"}  # as PyTorch says; a norm's "weight" is told by its rank


def as_function(rename: Rename | None) -> Callable[[str], str | None]:
    """Return what gives the model's name, or None to drop an entry, for a name of the file.

    Raises:
        TypeError: If it is none of a mapping, pairs of regular expressions and a function.
    """
    if rename is None:
        return lambda name: name
    if callable(rename):
        return rename
    if isinstance(rename, Mapping):
        return lambda name: rename.get(name, name)
    pairs_given = isinstance(rename, Sequence) and not isinstance(rename, str)
    if not pairs_given or not all(isinstance(p, Sequence) and len(p) == 2 for p in rename):
        raise TypeError(f"rename is a mapping, a list of pairs (pattern, replacement) or a function, got {rename!r}")
    pairs = [(re.compile(pattern), replacement) for pattern, replacement in rename]

    def substitute(name: str) -> str | None:
        for pattern, replacement in pairs:
            if replacement is None:
                if pattern.search(name):
                    return None
            else:
                name = pattern.sub(replacement, name)
        return name

    return substitute


def renamed(names: Iterable[str], function: Callable[[str], str | None]) -> tuple[dict[str, str], list[Problem]]:
    """Rename, and find names that meet.

    Returns:
        The file's name for each new name, in the file's order, and what is wrong.

    Raises:
        TypeError: If the function returns neither a name nor None.
    """
    out: dict[str, str] = {}
    problems = []
    for name in names:
        new = function(name)
        if new is None:
            continue
        if not isinstance(new, str):
            raise TypeError(f"rename gives a name, or None to leave an entry out; for {name!r} it gave {new!r}")
        if new in out:
            got = f"two entries of the file, {out[new]} and {name}"
            problems.append(Problem(new, got, "one entry for a name", f"a rename that gives None for {name}"))
        else:
            out[new] = name
    return out, problems


def matched(survey: Survey, tensors: Mapping[str, Any], *, leaves: bool) -> dict[str, str]:
    """Find the model's spelling of the file's names, where there is no doubt.

    Args:
        survey: The model.
        tensors: What the file holds, by name.
        leaves: Whether the last part of a name may be Flax's word for it as well.

    Returns:
        The file's name for each new name; a name that cannot be matched is as it was.
    """
    known, nodes = survey.places, survey.nodes
    if tensors.keys() <= known.keys():
        return {name: name for name in tensors}
    paths = {dotted(path) for path, _ in nodes}
    sequential = {path for path, node in nodes if isinstance(node, nnx.Sequential)}
    spellings: dict[str, set[str]] = {}
    for path, _ in nodes:
        short = tuple(k for i, k in enumerate(path) if not (k == "layers" and path[:i] in sequential))
        for spelling in (path, short):
            spellings.setdefault(_canonical(dotted(spelling)), set()).add(dotted(path))
    out: dict[str, str] = {}
    wrapper = _wrapper(tensors, paths, spellings)
    for name, tensor in tensors.items():
        bare = name.removeprefix(wrapper)
        is_known = bare in known or base_name(bare) in known
        new = bare if is_known else _match(bare, tensor, paths, spellings, known if leaves else None)
        if new in out or (new != name and new in tensors):
            new = name
        out[new] = name
    return out


def _wrapper(names: Collection[str], paths: Collection[str], spellings: Mapping[str, set[str]]) -> str:
    """Return the prefixes of wrappers that all names have, where the model has a child of such a name or not.

    Without them no name may lead less far into the model than with them, and one must lead further.
    """
    parts = [name.split(".") for name in names]
    shared = zip(min(parts, default=()), max(parts, default=()), strict=False)  # what these share, all do
    left = [one for one, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], shared)]
    best = tried = ""
    while left and left[0] in PREFIXES:
        tried += f"{left.pop(0)}."
        more = tried.count(".") - best.count(".")
        gains = [
            _depth(name.removeprefix(tried), paths, spellings)
            - max(0, _depth(name.removeprefix(best), paths, spellings) - more)
            for name in names
        ]
        if min(gains) >= 0 and max(gains) > 0:
            best = tried
    return best


def _depth(name: str, paths: Collection[str], spellings: Mapping[str, set[str]]) -> int:
    """Return how many parts of a name lead to a module."""
    parts = name.split(".")
    return next(i for i in range(len(parts) - 1, -1, -1) if not i or _leads(".".join(parts[:i]), paths, spellings))


def _leads(path: str, paths: Collection[str], spellings: Mapping[str, set[str]]) -> bool:
    return path in paths or len(spellings.get(_canonical(path), ())) == 1


def _match(
    name: str, tensor: Any, paths: set[str], spellings: Mapping[str, set[str]], known: Collection[str] | None
) -> str:
    parts = re.split(r"[./]", name)
    while len(parts) > 1 and parts[0] in PREFIXES and parts[0] not in paths:
        parts = parts[1:]
    for i in range(len(parts) - 1, -1, -1):  # the longest module first
        found = spellings.get(_canonical(".".join(parts[:i])), set())
        literal = ".".join(parts[:i])
        if literal in paths or len(found) == 1:
            module = literal if literal in paths else min(found)
            prefix = f"{module}." if module else ""
            return prefix + _leaf(prefix, ".".join(parts[i:]), tensor, known)
    return name


def _leaf(prefix: str, leaf: str, tensor: Any, known: Collection[str] | None) -> str:
    if known is None or prefix + leaf in known:
        return leaf
    if leaf == "weight" and len(getattr(tensor, "shape", ())) == 1:
        other = "scale"
    else:
        other = _LEAVES.get(leaf, leaf)
    return other if prefix + other in known else leaf


def _canonical(path: str) -> str:
    """``layers_0`` and ``layers.0`` are one."""
    return re.sub(r"_(?=\d+([._]|$))", ".", path)
