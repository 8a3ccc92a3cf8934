"""Sizing what is lazy before a function is traced: a run without values, and the parameters that it asks for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lazymods import _graph
from lazymods._errors import NOT_TRACEABLE, ShapeInferenceError
from lazymods._inference import initialize
from lazymods._optimizer import LazyOptimizer
from lazymods.compile.arguments import Arguments
from lazymods.compile.binding import Binding
from lazymods.compile.copies import Copies
from lazymods.compile.picture import Picture, held_by
from lazymods.compile.tokens import Kind, kind_of


def has_optimizer(call: Binding) -> bool:
    """Whether a call reaches a ``LazyOptimizer`` without state: its model is sized first, then its state is made."""
    return any(_graph.is_lazy_node(n) and isinstance(n, LazyOptimizer) for n in Picture(call.reach).nodes)


def size(function: Any, arguments: Arguments, call: Binding, attributes: Sequence[tuple[Any, str]]) -> None:
    """Initialize the lazy layers that a call of a function would reach, as ``lm.materialize`` does.

    Args:
        function: The function.
        arguments: Its arguments.
        call: What it reaches.
        attributes: Attributes of modules and classes, by which it finds some of that.

    Raises:
        jax.errors.ConcretizationTypeError: Or another error of ``NOT_TRACEABLE``: it decides on the values of arrays.
    """
    roots = [*call.roots, *call.loose]
    picture = Picture(call.reach)
    updated: list[tuple[Any, Any]] = []
    originals: dict[int, Any] = {}

    def run(twins: Sequence[Any], arrays: Sequence[Any]) -> Any:
        updated.clear()
        known: dict[int, Any] = {}
        for root, twin in zip(roots, twins, strict=True):
            _pair(root, twin, known)
        originals.clear()
        originals.update({id(known[id(thing)]): thing for thing in picture.nodes if id(thing) in known})
        copies = Copies(picture, None, known)
        for owner, name in attributes:
            copies.swap(owner, name)
        args, kwargs = arguments.rebuild(arrays, copies.of)
        with copies.swapped():
            return copies.of(function)(*args, **kwargs)

    before, _graph.LOCAL.updated = _graph.LOCAL.updated, updated
    try:
        initialize(run, (tuple(roots), list(arguments.arrays)), {})
    except ShapeInferenceError as error:
        if isinstance(error.__cause__, NOT_TRACEABLE):
            raise error.__cause__ from None
        raise
    finally:
        _graph.LOCAL.updated = before
    for optimizer, model in updated:
        optimizer, model = originals.get(id(optimizer)), originals.get(id(model))
        if optimizer is not None and model is not None and _graph.is_lazy_node(optimizer):
            optimizer.make_state(model)


def _pair(value: Any, twin: Any, known: dict[int, Any]) -> None:
    """Note which object of a copy stands for which of a model."""
    kind = kind_of(value)
    if value is twin or kind <= Kind.ARRAY or id(value) in known:
        return
    if kind is Kind.TUPLE:
        for part, other in zip(value, twin, strict=True):
            _pair(part, other, known)
        return
    if kind not in (Kind.NODE, Kind.VARIABLE, Kind.DICT, Kind.LIST):
        return
    known[id(value)] = twin
    if kind is Kind.VARIABLE:
        return
    held, other = held_by(value, kind), held_by(twin, kind)
    items = held.items() if isinstance(held, dict) else enumerate(held)
    for key, part in items:
        if isinstance(other, dict) and key not in other:
            continue
        _pair(part, other[key], known)
