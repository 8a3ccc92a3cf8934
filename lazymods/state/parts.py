"""Which part of a file a model loads: training scripts put a state dict beside an optimizer's, averages and more.

The part is taken that has an entry for the most of the model's parameters, and ``LoadResult.matched`` says by the
names of the file which it was. Two parts that have as many are two sets of values: which is meant nobody knows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

from lazymods._initial.keys import is_key
from lazymods._layer.placeholder import fits
from lazymods.state.entries import IMPL, Place, Survey, base_name
from lazymods.state.files.stored import Checkpoint, StoredTensor, printable, refuse
from lazymods.state.prepared import Prepared

WRAPPERS = ("state_dict", "model_state_dict", "model", "module", "params_ema", "params")
"""Where training scripts put a model's state dict, in case that no part has an entry for the model."""

_MAX_KIND_BYTES = 100  # of the name of a key's kind

Reader = Callable[[Checkpoint], Prepared]


def part_of(
    survey: Survey, file: Checkpoint, read: Reader, root: str | None = None
) -> tuple[Checkpoint, Prepared, str]:
    """Return the part of a file that a model loads, its entries by the model's names, and what its names begin with.

    Args:
        survey: The model.
        file: The file.
        read: Returns the entries of a part.
        root: The part that is meant; None: the one that fits.

    Raises:
        CheckpointError: If two parts fit the model, or there is no such part.
        Exception: What ``read`` raises for the part that is taken.
    """
    if root is None:
        found = _root_of(survey, file, read) if file.roots else ""
    else:
        found = _root_named(file, root)
    part = _below(file, found)
    return part, read(part), found


def _root_named(file: Checkpoint, root: str) -> str:
    start = f"{root}." if root and not root.endswith(".") else root
    if start and not any(name.startswith(start) for name in file.tensors):
        tops = dict.fromkeys(name.partition(".")[0] for name in (file.roots or file.tensors))
        shown = printable(", ".join(list(tops)[:8]), 1000) + (", ..." if len(tops) > 8 else "")
        got = f"no entries below {printable(repr(root))}, but below {shown}"
        line = f"root={printable(next(iter(tops), ''))!r}"
        raise refuse(file.path, got, "the part of the file that is meant", write=line)
    return start


def may_fit(place: Place, name: str, value: Any) -> bool:
    """Say whether an entry fits a place by its shape, which is known before it is read."""
    if name != place.name:  # the name of a key's kind, or a text
        return not name.endswith(f".{IMPL}") or value.nbytes <= _MAX_KIND_BYTES
    shape = value.shape[:-1] if is_key(place.value) else value.shape
    return fits(place.value.pending.shape if place.lazy else tuple(np.shape(place.value)), shape)


def _below(file: Checkpoint, root: str) -> Checkpoint:
    """Return the part of a file whose names begin with ``root``, without it."""
    if not root:
        return file
    size = len(root)
    stored = dict(file.tensors) | {alias: file.tensors[kept] for alias, kept in file.aliases.items()}
    tensors = {name[size:]: tensor for name, tensor in stored.items() if name.startswith(root)}
    weak = [n[size:] for n in stored if n.startswith(root) and file.aliases.get(n, n) in file.weak]
    groups: dict[str, list[str]] = {}
    for alias, kept in file.aliases.items():
        groups.setdefault(kept, [kept]).append(alias)
    within = [[n[size:] for n in group if n.startswith(root)] for group in (*groups.values(), *file.ties)]
    ties = [group for group in within if group]
    buffers = None if file.buffers is None else [n[size:] for n in file.buffers if n.startswith(root)]
    return dataclasses.replace(file, tensors=tensors, aliases={}, weak=weak, roots=(), ties=ties, buffers=buffers)


def _root_of(survey: Survey, file: Checkpoint, read: Reader) -> str:
    found = {}
    for root in (*(f"{root}." for root in file.roots), ""):
        part = _below(file, root)
        found[root] = _fitting(survey.places, part, read)
    most = max(map(len, found.values()))
    if most:
        best: dict[str, Any] = {}  # one part may be found in two ways, as by a prefix that names are matched without
        for root, fitting in found.items():
            if len(fitting) == most and fitting not in best.values():
                best[root] = fitting
        candidates = [*best]
    else:
        candidates = [f"{root}." for root in WRAPPERS if root in file.roots] or [""]
    if len(candidates) > 1:
        raise _refuse_several(file, candidates, "fit the model" if most else "may be meant")
    return candidates[0]


def _fitting(places: Mapping[str, Place], part: Checkpoint, read: Reader) -> dict[str, Any]:
    """Return what would go where, if a part was taken; nothing if it can't be."""
    try:
        prepared = read(part)
        entries, sources = prepared.entries, prepared.sources
    except Exception:  # also of a function of the user's, which need not know the names of other parts
        return {}
    out = {}
    for name, value in entries.items():
        place = places.get(name) or places.get(base_name(name))
        if place is not None and hasattr(value, "shape") and may_fit(place, name, value):
            out[name] = [_location(part.tensors[n]) if n in part.tensors else n for n in sources.get(name, (name,))]
    return out


def _location(tensor: Any) -> Any:
    if isinstance(tensor, StoredTensor) and isinstance(tensor.source, np.ndarray):
        return tensor.begin, tensor.shape, tensor.dtype
    return id(tensor)


def _refuse_several(file: Checkpoint, roots: Collection[str], what: str) -> Exception:
    names = [printable(root[:-1]) or "the whole file" for root in roots]
    shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
    write = f"root={printable(max(roots)[:-1])!r}"
    return refuse(file.path, f"several state dicts that {what}: {shown}", "the one to load", write=write)
