"""Checks that what a lazy layer already holds fits the sizes that its first call found."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from flax import nnx

from lazymods import _graph
from lazymods._errors import Problem, ShapeInferenceError, located
from lazymods._graph import STATE, Path, dotted
from lazymods._initial.stacking import Stackings
from lazymods._layer.abstract_module import AbstractModule
from lazymods._layer.config import ConstructorInit
from lazymods._layer.placeholder import UninitializedVariable, fits, show_shape


def shape_of(value: Any) -> tuple[int, ...]:
    """The shape of what a slot holds, a Variable with a value or a raw array."""
    return tuple(np.shape(value.get_raw_value() if isinstance(value, nnx.Variable) else value))


def stackings(layer: Any) -> Stackings:
    """The axes that the values of a layer have beside their own: it was built under ``nnx.vmap``."""
    return _stackings_of((e.path, e.value) for e in _graph.entries(layer))


def stackings_held(held: Mapping[Path, tuple[Any, Any, Any]]) -> Stackings:
    """The same, from what a layer holds at its slots."""
    return _stackings_of((path, value) for path, (_, _, value) in held.items())


def _stackings_of(values: Iterable[tuple[Path, Any]]) -> Stackings:
    known = {path: value.pending.stacking for path, value in values if _graph.is_placeholder(value)}
    return Stackings(known if any([stacking.sizes for stacking in known.values()]) else {})


def check_held(
    layer: Any, abstract: AbstractModule, held: Mapping[Path, tuple[Any, Any, Any]], stacked: Stackings
) -> None:
    """Refuse what the slots of a layer hold already, if it does not fit the sizes that were found.

    Args:
        layer: The layer.
        abstract: Its parts at these sizes.
        held: By path, the slots that hold something.
        stacked: The axes that a transform has put among those of its values.

    Raises:
        ShapeInferenceError: If a value or a placeholder has another shape.
    """
    problems = []
    for path, (_, _, value) in held.items():
        slot = abstract.slots[path]
        source = value.pending.source if isinstance(value, UninitializedVariable) else None
        if isinstance(source, ConstructorInit) and source.spec == vars(layer)[STATE].spec and source.path == path:
            continue  # the layer's own: what it knew before came from probes
        if isinstance(value, UninitializedVariable):
            known = value.pending.element
            wrong = not fits(known, slot.shape)
            got = "nothing known" if known is None else f"a placeholder of shape {show_shape(known)}"
        else:
            shape = shape_of(value)
            wrong, got = stacked.part(path, shape, len(slot.shape)) != slot.shape, f"a value of shape {shape}"
        if wrong:
            needed = f"shape {slot.shape}, by the sizes inferred"
            write = f"layer(x)  # with an input whose sizes give {dotted(path)} that shape"
            problems.append(Problem(_slot_place(layer, path, value), got, needed, write))
    if problems:
        raise ShapeInferenceError(*problems)


def _slot_place(layer: Any, path: Path, value: Any) -> str:
    kind = f"{type(value).__name__} of {vars(layer)[STATE].spec.name}"
    return _graph.place(value, kind, dotted(path)) if isinstance(value, nnx.Variable) else located(dotted(path), kind)
