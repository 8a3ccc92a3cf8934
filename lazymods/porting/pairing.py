"""Which module of the model is which of PyTorch's: those that hold the same entries.

A load says from which of PyTorch's entries each parameter came. Two modules are a pair if all that is in the one came
from all that is in the other, whatever their names and however they are divided inside.
"""

from __future__ import annotations

import collections
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path as FilePath
from typing import Any, NamedTuple

import numpy as np
from flax import nnx

from lazymods import _graph
from lazymods._graph import dotted
from lazymods.porting.contents import by_content
from lazymods.state import names
from lazymods.state.entries import Survey
from lazymods.state.files.stored import StoredTensor
from lazymods.state.layouts import from_torch
from lazymods.state.layouts.site import Site
from lazymods.state.layouts.table import sites

Matched = Mapping[str, tuple[str, ...]]


class Pair(NamedTuple):
    """A module of the model and its counterpart.

    Attributes:
        site: Where the model's hangs, and the module itself.
        name: PyTorch's name of its counterpart.
        module: The counterpart.
    """

    site: Site
    name: str
    module: Any

    @property
    def path(self) -> str:
        """The dotted path of the model's module."""
        return dotted(self.site.path)


def pairs(model: Any, torch_module: Any, matched: Matched | None) -> list[Pair]:
    """Pair the modules of a model with those of a PyTorch module.

    Args:
        model: The model, initialized.
        torch_module: The PyTorch module.
        matched: For each name of the model the entries that it was loaded from; None, or if they are none of the
            PyTorch module's: by the names, as a load matches them, and what has no name in common by its values.
    """
    entries = list(torch_module.state_dict())
    origins = _in_terms_of(entries, matched or {}) or _in_terms_of(entries, _by_name(model, torch_module))
    origins |= by_content(model, torch_module, origins)
    ours = _contents(origins.items())
    used = {name for found in origins.values() for name in found}
    theirs = _contents((name, (name,)) for name in used)
    modules = dict(torch_module.named_modules(remove_duplicate=False))
    counterpart: dict[frozenset[str], str] = {}
    for name in sorted(modules, key=lambda name: name.count(".")):  # the innermost of equal ones is the last
        if name in theirs and "parametrizations" not in name.split("."):
            counterpart[theirs[name]] = name
    groups: dict[frozenset[str], list[Site]] = collections.defaultdict(list)
    for site in _all_sites(model):
        name = dotted(site.path)
        if isinstance(site.node, nnx.Module) and callable(site.node) and name in ours:
            groups[ours[name]].append(site)
    found = []
    for contents, group in groups.items():
        site = _innermost(group)
        if site is not None and contents in counterpart:
            name = counterpart[contents]
            if type(modules[name]).__name__ == "EmbeddingBag":  # which reduces what nnx.Embed returns
                continue
            found.append(Pair(site, name, modules[name]))
    return found


def _all_sites(model: Any) -> list[Site]:
    """Return every module once, also those that are read and written with the module that holds them."""
    known = {}
    for site in sites(model):
        known.setdefault(id(site.node), site)
    return [known.get(id(node), Site(node, path, f"{dotted(path)}.")) for path, node in _graph.nodes(model)]


def _innermost(group: list[Site]) -> Site | None:
    """Return the innermost of modules in one another; None if they are beside each other, parts of one of PyTorch's.

    A module that is in its parent's name in PyTorch, as the cell of an ``nnx.RNN``, is a part of the parent.
    """
    chosen = group[0]
    for site in group[1:]:
        if site.path[: len(chosen.path)] != chosen.path:
            return None
        if site.prefix != chosen.prefix:
            chosen = site
    return chosen


def minimal(found: Iterable[Pair]) -> list[Pair]:
    """Leave out the pairs that have another one inside."""
    found = list(found)
    outer = {pair.site.path[:i] for pair in found for i in range(len(pair.site.path))}
    return [pair for pair in found if pair.site.path not in outer]


def _contents(items: Iterable[tuple[str, Iterable[str]]]) -> dict[str, frozenset[str]]:
    """Return for each module of dotted names what is in it."""
    inside: dict[str, set[str]] = collections.defaultdict(set)
    for name, found in items:
        parts = name.split(".")
        for i in range(len(parts)):
            inside[".".join(parts[:i])].update(found)
    return {name: frozenset(found) for name, found in inside.items()}


def _in_terms_of(entries: Collection[str], matched: Matched) -> dict[str, tuple[str, ...]]:
    """Return where each name came from, by the PyTorch module's own names: a file's may have a prefix, or lack one."""
    known = set(entries)
    used = {source for sources in matched.values() for source in sources}
    shifts = [("", "")]
    shifts += [(prefix, "") for prefix in _prefixes(used)] + [("", prefix) for prefix in _prefixes(known)]

    def moved(name: str, shift: tuple[str, str]) -> str | None:
        new = shift[1] + name.removeprefix(shift[0]) if name.startswith(shift[0]) else name
        return new if new in known else name if name in known else None

    best = max(shifts, key=lambda shift: sum(moved(name, shift) is not None for name in used))
    found = {}
    for name, sources in matched.items():
        new = [moved(source, best) for source in sources]
        if new and None not in new:
            found[name] = tuple(n for n in new if n is not None)
    return found


def _prefixes(found: Collection[str]) -> set[str]:
    split = [name.split(".") for name in found]
    return {".".join(parts[:i]) + "." for parts in split for i in range(1, min(len(parts), 4))}


def _by_name(model: Any, torch_module: Any) -> Matched:
    """Match a PyTorch module's entries as a load would, without their values."""
    stored = {
        name: StoredTensor(name, tuple(tensor.shape), np.dtype(np.float32), FilePath(), _zeros(tuple(tensor.shape)))
        for name, tensor in torch_module.state_dict().items()
        if hasattr(tensor, "shape")
    }
    survey = Survey(model)
    origins = names.matched(survey, stored, leaves=False)
    found = from_torch(model, {new: stored[name] for new, name in origins.items()}, None)
    return {
        name: tuple(origins[source] for source in found.sources.get(name, (name,)))
        for name in found.entries
        if name in survey.places
    }


def _zeros(shape: tuple[int, ...]) -> Any:
    return lambda: np.broadcast_to(np.zeros((), np.float32), shape)
