"""Sizing lazy layers before a function is traced: an abstract evaluation, then the parameters that it asks for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lazymods import _graph
from lazymods._errors import NOT_TRACEABLE, ShapeInferenceError
from lazymods._model.inference import initialize
from lazymods._model.optimizer import LazyOptimizer
from lazymods._objects.copies import Copies
from lazymods._objects.traced_state import TracedState
from lazymods.compile.arguments import Arguments
from lazymods.compile.binding import Binding


def has_optimizer(call: Binding) -> bool:
    """Whether a call reaches a ``LazyOptimizer`` without state: its model is sized first, then its state is made."""
    return any(_graph.is_lazy_node(n) and isinstance(n, LazyOptimizer) for n in TracedState(call.reach).nodes)


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
    updated: list[tuple[Any, Any]] = []
    found: list[tuple[Any, Any]] = []

    def run(copies: Copies, arrays: Sequence[Any]) -> Any:
        updated.clear()
        for owner, name in attributes:
            copies.swap(owner, name)
        args, kwargs = arguments.rebuild(arrays, copies.of)
        with copies.swapped():
            out = copies.of(function)(*args, **kwargs)
        found[:] = [(copies.original(optimizer), copies.original(model)) for optimizer, model in updated]
        return out

    before, _graph.LOCAL.updated = _graph.LOCAL.updated, updated
    try:
        initialize(list(call.reach), run, list(arguments.arrays))
    except ShapeInferenceError as error:
        if isinstance(error.__cause__, NOT_TRACEABLE):
            raise error.__cause__ from None
        raise
    finally:
        _graph.LOCAL.updated = before
    known = set(map(id, TracedState(call.reach).nodes))
    for optimizer, model in found:
        if id(optimizer) in known and id(model) in known and _graph.is_lazy_node(optimizer):
            optimizer.make_state(model)
