"""The way back of a load: from a model's arrays to those of the file, name by name and step by step.

A load notes what it did with each entry (:class:`~lazymods.state.noted.WayBack`); here it is undone from the end:
layout, matched names, rules and renames.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lazymods._errors import Problem, describe, short_dtype
from lazymods.state.entries import IMPL, named_places
from lazymods.state.files.stored import Array, StoredTensor
from lazymods.state.flow import Slices, Unfit
from lazymods.state.layouts.computed import norm_over
from lazymods.state.layouts.exporting import check_ready, written
from lazymods.state.layouts.importing import from_torch, with_sizes
from lazymods.state.layouts.site import Refusal
from lazymods.state.layouts.table import sites
from lazymods.state.noted import WayBack
from lazymods.state.state_dict import state_dict
from lazymods.state.values import as_array, cast_problem, same_values

_WITHOUT = "lm.export_torch(model)  # without like"
_NORMED = re.compile(r"(?:(.*\.)?parametrizations\.(\w+)\.original1|(.*\.)?(\w+)_v)")


# ---------------------------------------------------------------- back


def as_loaded(
    model: Any, way: WayBack, flatten: Mapping[str, Sequence[int]] | None, problems: list[Problem]
) -> dict[str, Array]:
    """Return a model's arrays as the file had them, and note what it cannot hold.

    Raises:
        UninitializedError: If a parameter has no value yet.
    """
    if way.layout == "torch":
        made, counters, held = _laid(model, way, flatten, problems)
    else:
        made, counters = _plain(model, way), set()
        held = {name: [name] for name in made}
    values = {id(way.final[name]): value for name, value in made.items() if name in way.final}
    lost = [name for name in way.loaded if id(way.final[name]) not in values]
    out = _originals(way, _undo(way, values, problems), problems)
    for name in lost if not problems else ():
        got = "an entry of the file that the model's parameters were computed from"
        needed = "a parameter that the file has as it is: from these parts there is no way back"
        problems.append(Problem(name, got, needed, _WITHOUT))
    out |= _new_names(model, way, {n: v for n, v in made.items() if n not in counters}, held, problems, out)
    return out


def _new_names(
    model: Any,
    way: WayBack,
    made: Mapping[str, Any],
    held: Mapping[str, list[str]],
    problems: list[Problem],
    out: Mapping[str, Array],
) -> dict[str, Array]:
    """Return what the file has under no name, as a tie of the model would be, without biases of zeros."""
    places = named_places(model)
    holds = {name: {places[n].identity for n in held.get(name, []) if n in places} for name in made}
    zeros = {name for name in made if _is_zero_bias(name, made, way)}
    there = {identity for name in made if name in way.loaded or name in zeros for identity in holds[name]}
    new: dict[str, Array] = {}
    for name, value in made.items():
        if name in way.final or name in zeros or (holds[name] and holds[name] <= there):
            continue
        if name in out:
            problems.append(Problem(name, "two entries of that name", "one", _WITHOUT))
        new[name] = _whole(value)
    return new


def _originals(way: WayBack, undone: Mapping[int, Any], problems: list[Problem]) -> dict[str, Array]:
    """Return the file's entries, in its order: those of the model, what was kept, and what is tied to these."""
    out: dict[str, Array] = {}
    for name, entry in way.originals.items():
        value = undone.get(id(entry))
        if name in way.kept:
            out[name] = way.kept[name]
        elif value is not None and isinstance(entry.tensor, StoredTensor):
            out[name] = _as_in_file(name, _whole(value), entry.tensor, problems)
    out |= {name: out[other] for name, other in way.tied.items() if name not in out and other in out}
    return {name: out[name] for name in way.originals if name in out}


def _plain(model: Any, way: WayBack) -> dict[str, Array]:
    """Return a model's arrays by their own names, and the random state that the file has."""
    places = named_places(model)
    check_ready(model, {name: place for name, place in places.items() if not place.is_rng})
    state = {name: as_array(value) for name, value in state_dict(model, include_rng=True).items()}
    is_random = {n for name, place in places.items() if place.is_rng for n in (name, f"{name}.{IMPL}")}
    return {
        name: np.asarray(value)
        for name, value in state.items()
        if value is not None and (name in way.final or name not in is_random)
    }


def _laid(
    model: Any, way: WayBack, flatten: Mapping[str, Sequence[int]] | None, problems: list[Problem]
) -> tuple[dict[str, Any], set[str], dict[str, list[str]]]:
    """Return a model's arrays as PyTorch lays them, under the names that the layout was given."""
    found, wrong = with_sizes(list(sites(model)), flatten)
    shapes = {name: tuple(np.shape(entry.tensor)) for name, entry in way.final.items()}
    made = written(model, found, shapes=shapes, stacked=way.stacked)
    problems += wrong + made.problems
    places = named_places(model)
    own = {name: np.asarray(places[name].value) for name in way.loaded if name in places and name not in made.entries}
    made.held.update((name, [name]) for name in own)  # by Flax's names in the file: they lie as Flax has them
    entries, done = _as_computed(model, way, made.entries | own, made.held, flatten)
    for name in way.final:
        if name not in way.loaded or name in done:
            continue
        match = _NORMED.fullmatch(name)
        if match is None:
            continue
        stem, entry = (match[1] or "", match[2]) if match[2] else (match[3] or "", match[4])
        magnitude = name[:-1] + ("0" if match[2] else "g")
        if f"{stem}{entry}" in entries and magnitude in way.final and name not in entries:
            value = entries.pop(f"{stem}{entry}")
            shape = way.final[magnitude].tensor.shape
            try:
                entries[magnitude], entries[name] = norm_over(_whole(value), shape).reshape(shape), value
            except Refusal as refusal:
                problems.append(refusal.at(name))
    return entries, made.counters, made.held


def _as_computed(
    model: Any,
    way: WayBack,
    entries: dict[str, Any],
    held: Mapping[str, list[str]],
    flatten: Mapping[str, Sequence[int]] | None,
) -> tuple[dict[str, Any], set[str]]:
    """Put the file's entries in the place of what was computed from several of them, if the model still has it.

    Returns:
        The entries, and the names of those that are the file's.
    """
    given = {name: way.final[name].tensor for name in way.computed}
    if not given:
        return entries, set()
    again = from_torch(model, given, flatten)
    places = named_places(model)
    same: dict[str, bool] = {}
    for name, sources in again.sources.items():
        now = as_array(places[name].value) if name in places else None
        value = again.entries[name]
        is_same = now is not None and same_values(np.asarray(value).astype(now.dtype), np.asarray(now))
        same |= {source: is_same and same.get(source, True) for source in sources}
    done = {name for name, is_same in same.items() if is_same and name in given}
    whole = {name for name, sources in again.sources.items() if sources and done.issuperset(sources)}
    out = {n: value for n, value in entries.items() if not held.get(n) or not whole.issuperset(held[n])}
    return out | {name: given[name].read() for name in done}, done


def _is_zero_bias(name: str, made: Mapping[str, Any], way: WayBack) -> bool:
    """Whether it is a bias of zeros, of recurrent layers as the other one, of a layer that has none in the file."""
    stem, dot, leaf = name.rpartition(".")
    weight = leaf.replace("bias", "weight")
    beside = (weight, f"{weight}_g", f"parametrizations.{weight}.original0")
    if name in way.final or "bias" not in leaf or not any(stem + dot + other in way.final for other in beside):
        return False
    both = {stem + dot + leaf.replace(*words) for words in (("_ih", "_hh"), ("_hh", "_ih"))} | {name}
    return not any(np.any(np.asarray(_whole(made[n])) != 0) for n in both if n in made)


def _undo(way: WayBack, values: dict[int, Any], problems: list[Problem]) -> dict[int, Any]:
    """Undo the rules, the last first."""
    for rule, inputs, outputs in reversed(way.applied):
        results = [values.get(id(entry)) for entry in outputs]
        if all(result is None for result in results):
            continue  # the model has nothing of it
        given = [r if rule.takes_slices or r is None else _whole(r) for r in results]
        try:
            before = rule.backward(given, [entry.tensor for entry in inputs])
        except Unfit as unfit:
            where = " and ".join(dict.fromkeys(entry.name for entry in outputs))
            problems.append(Problem(where, unfit.got, f"{unfit.needed}: {rule!r} has no way back else", _WITHOUT))
            continue
        for entry, value in zip(inputs, before, strict=True):
            values[id(entry)] = value
    return values


def _whole(value: Any) -> Array:
    """Return an array; a stack that no rule has taken apart was stacked in the file along its first axis."""
    return np.stack([_whole(part) for part in value.parts]) if isinstance(value, Slices) else value


def _as_in_file(name: str, value: Array, like: StoredTensor, problems: list[Problem]) -> Array:
    """Return an array in the dtype that the file has it in, and in its shape if one of the two has all in one axis."""
    if value.shape != like.shape and value.size == math.prod(like.shape) and min(value.ndim, len(like.shape)) == 1:
        value = value.reshape(like.shape)
    if value.dtype == like.dtype:
        return value
    reason = cast_problem(value, like.dtype)
    if reason is not None:
        got = f"{describe(value)}, and {short_dtype(like.dtype)} in the file"
        problems.append(Problem(name, got, reason, _WITHOUT))
        return value
    with np.errstate(all="ignore"):
        return value.astype(like.dtype)
