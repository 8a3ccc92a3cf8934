"""To PyTorch: a ready model's arrays by PyTorch's names, as PyTorch lays them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from lazymods import _graph
from lazymods._errors import Problem, UninitializedError, describe, located
from lazymods.state.entries import Place, named_places
from lazymods.state.flow import Slices
from lazymods.state.layouts.site import Refusal, Site
from lazymods.state.layouts.table import rule_for, torch_names


class Written(NamedTuple):
    """A model's arrays as PyTorch lays them.

    Attributes:
        entries: The arrays by PyTorch's names, where modules of an ``nnx.Sequential`` are below ``layers``; of stacked
            modules the :class:`~lazymods.state.flow.Slices`.
        counters: Names of entries that PyTorch has and the model does without.
        problems: What PyTorch cannot hold.
        held: By PyTorch's names, the model's names of what each entry holds.
    """

    entries: dict[str, Any]
    counters: set[str]
    problems: list[Problem]
    held: dict[str, list[str]]


def written(
    model: nnx.Module,
    found: Sequence[Site],
    *,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    stacked: Mapping[str, tuple[tuple[int, int], ...]] | None = None,
) -> Written:
    """Return a model's arrays as PyTorch lays them.

    Args:
        model: The model, initialized.
        found: Its modules.
        shapes: The entries that are to be written, where there is a choice, by PyTorch's names: their shapes.
        stacked: The stacks of what was loaded from layers of their own, by the model's names.

    Raises:
        UninitializedError: If a parameter has no value yet.
    """
    left = {name: place for name, place in named_places(model).items() if not place.is_rng}
    check_ready(model, left)
    out = Written({}, set(), [], {})
    for site in (dataclasses.replace(site, names=shapes) for site in found):
        try:
            entries, taken = _written(site, _levels(site, stacked or {}))
        except Refusal as refusal:
            whole = _as_in_file(site, shapes or {})
            if whole is None:
                out.problems.append(refusal.at(_where(site)))
                continue
            entries, taken = whole
        out.counters.update(site.torch_name(counter) for counter in getattr(rule_for(type(site.node)), "counters", ()))
        for name in taken:
            left.pop(name, None)
        for name, value in entries.items():
            _put(out, name, value)
            out.held[name] = rule_for(type(site.node)).held_in(site, name, taken)
    if not out.problems:
        refusals = [(site, rule_for(type(site.node)).refuse_left(site, left)) for site in found]
        out.problems.extend(refusal.at(_where(site)) for site, refusal in refusals if refusal)
    for name, torch in torch_names(found, left).items():
        _put(out, torch, np.asarray(left[name].value))
        out.held[torch] = [name]
    return out


def _levels(site: Site, stacked: Mapping[str, tuple[tuple[int, int], ...]]) -> tuple[tuple[int, int], ...]:
    prefix = site.name("")
    return next((levels for name, levels in stacked.items() if name.startswith(prefix)), ())


def _as_in_file(site: Site, shapes: Mapping[str, tuple[int, ...]]) -> tuple[dict[str, Any], list[str]] | None:
    """Write a module that the file has stacked as the model has; None if its layers do not give the file's shapes."""
    lengths = {shape[:1] for name, shape in shapes.items() if name.startswith(site.prefix)}
    if len(lengths) != 1:
        return None
    try:
        entries, taken = _written(site, [(0, length) for length in lengths.pop()])
    except (Refusal, IndexError):
        return None
    there = [(shapes[name], slices.parts) for name, slices in entries.items() if name in shapes]
    is_so = all(shape == (len(parts), *np.shape(parts[0])) for shape, parts in there)
    return (entries, taken) if is_so else None


def _written(site: Site, levels: Sequence[tuple[int, int]]) -> tuple[dict[str, Any], list[str]]:
    """Write a module, or each layer of a stacked one."""
    rule = rule_for(type(site.node))
    if not levels:
        return rule.write(site)
    (axis, length), *inner = levels
    layers = [_written(dataclasses.replace(site, index=(*site.index, (axis, i))), inner) for i in range(length)]
    return {name: Slices([layer[name] for layer, _ in layers]) for name in layers[0][0]}, layers[0][1]


def _where(site: Site) -> str:
    return located(_graph.dotted(site.path), type(site.node).__name__)


def without_layers(name: str, sequential: Sequence[str]) -> str:
    """Return a name as PyTorch has it: the modules of an ``nn.Sequential`` are its own attributes, ``0``, ``1``, ..."""
    for prefix in sorted(sequential, key=len, reverse=True):  # inner ones first: the names of outer ones stay
        if name.startswith(f"{prefix}layers."):
            name = prefix + name.removeprefix(f"{prefix}layers.")
    return name


def check_ready(model: Any, places: Mapping[str, Place]) -> None:
    """Refuse a model of which a parameter has no value yet.

    Raises:
        UninitializedError: If one has none.
    """
    problems = [
        Problem(
            located(name, type(place.owner).__name__),
            describe(place.value),
            "a value: only an initialized model can be exported",
            "lm.materialize(model, x)  # or lm.load(model, path), first",
        )
        for name, place in places.items()
        if _graph.is_placeholder(place.owner) or isinstance(place.value, jax.ShapeDtypeStruct)
    ]
    if problems:
        raise UninitializedError(*problems, heading=f"{type(model).__name__} is not initialized")


def _put(out: Written, name: str, value: Any) -> None:
    if name in out.entries:
        out.problems.append(second(name))
    out.entries[name] = value


def second(name: str) -> Problem:
    """Return the problem of two entries of one name."""
    line = "self.other = nnx.Linear(3, 4, rngs=rngs)  # attributes whose names do not meet in PyTorch's"
    return Problem(name, "two entries of that name", "one", line)
