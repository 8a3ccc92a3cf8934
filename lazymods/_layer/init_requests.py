"""Which parameters one call of an initializer makes, with a random key that can be computed on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from lazymods._initial.fill import InitRequest
from lazymods._initial.keys import Key, fold_in, host_value
from lazymods._initial.program import Constant
from lazymods._layer.abstract_module import AbstractModule, Slot, fold_p, init_p


def request(
    abstract: AbstractModule, slot: Slot, keys: Sequence[Any], dtype: Any, known: dict[int, Any], placed: bool
) -> InitRequest | None:
    """Describe what computes a slot; None if that is more than an initializer and a change of shape.

    Args:
        abstract: The layer's constructor at its sizes.
        slot: One of its slots.
        keys: Key and counter of each stream that was given to the constructor.
        dtype: The dtype that the value gets in the end.
        known: Values of keys and counters on the host by id, filled as they are met; the arrays must stay alive.
        placed: Whether the value has a place on a mesh, wherever its key is.
    """
    equation, shape = abstract.producer_of(slot), slot.shape
    while equation is not None and equation.primitive.name == "reshape" and equation.params["dimensions"] is None:
        shape = equation.invars[0].aval.shape
        equation = abstract.producers.get(equation.invars[0])
    if equation is not None and equation.primitive.name == "broadcast_in_dim":
        return _full(equation, slot, dtype)
    if equation is None or equation.primitive is not init_p:
        return None
    given = dict(zip(abstract.program.jaxpr.invars, keys, strict=True))
    value = _on_host(abstract, equation.invars[0], given, known, placed)
    key = value if isinstance(value, tuple) else None
    return InitRequest(equation.params["call"], key, shape, equation.params["dtype"], slot.shape, dtype)


def _full(equation: Any, slot: Slot, dtype: Any) -> InitRequest | None:
    """Describe what ``jnp.zeros`` and the like make in a constructor."""
    source = equation.invars[0]
    aval = equation.outvars[0].aval
    if not hasattr(source, "val") or np.size(source.val) != 1 or aval.weak_type or equation.params["sharding"]:
        return None
    value = np.asarray(source.val, source.aval.dtype).reshape(())[()]
    return InitRequest(Constant(value), None, slot.shape, aval.dtype, slot.shape, dtype)


def _on_host(
    abstract: AbstractModule, variable: Any, given: dict[Any, Any], known: dict[int, Any], placed: bool
) -> Key | int | None:
    """Compute a key or a counter without JAX; None if it is not one fold after the other."""
    if hasattr(variable, "val"):
        return int(variable.val) if variable.aval.dtype == np.uint32 else None
    if variable in given:
        array = given[variable]
        if id(array) not in known:
            known[id(array)] = host_value(array, placed)
        return known[id(array)]
    equation = abstract.producers.get(variable)
    if equation is None or not (equation.primitive is fold_p or equation.primitive.name == "add"):
        return None
    first, second = (_on_host(abstract, v, given, known, placed) for v in equation.invars)
    if not isinstance(second, int):
        return None
    if equation.primitive is fold_p:
        return fold_in(first, second) if isinstance(first, tuple) else None
    return (first + second) % 2**32 if isinstance(first, int) and variable.aval.dtype == np.uint32 else None

