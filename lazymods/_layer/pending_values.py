"""What the kernels of ``lazymods._initial`` compute of many placeholders, those of stacked layers one by one."""

from __future__ import annotations

import collections
import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from lazymods import _compat
from lazymods._graph import Path
from lazymods._initial import placement, shards
from lazymods._initial.fill import InitBatch, InitRequest
from lazymods._initial.keys import Key, fold_in, host_value
from lazymods._initial.pending import PendingInit
from lazymods._initial.program import Constant
from lazymods._layer import stacked_values
from lazymods._layer.abstract_module import AbstractModule, Slot, fold_p, init_p


class PendingValues:
    """What the kernels of ``lazymods._initial`` compute of the placeholders of some layers.

    Args:
        layers: AbstractModule and placeholders of each.
        calling: Whether initializers of users may be called.
        placed: Whether the values have places on a mesh.
    """

    def __init__(
        self,
        layers: Sequence[tuple[AbstractModule, Mapping[Path, Any]]],
        calling: bool = True,
        placed: bool = False,
    ) -> None:
        self.layers, self._calling, self._placed = layers, calling, placed
        self._context = placement.on_one_device if placed else contextlib.nullcontext
        places = [(i, path, variable) for i, (_, own) in enumerate(layers) for path, variable in own.items()]
        self._places = [place for place in places if _is_whole_or_in_front(place[2].pending)]
        with self._context():
            self._plan = self._planned() if self._places and _compat.executing() else None

    def _planned(self) -> InitBatch:
        known: dict[int, Any] = {}
        requests, alive = [], []
        for i, path, variable in self._places:
            abstract, pending = self.layers[i][0], variable.pending
            for keys in pending.keys_of_each():
                alive.append(keys)  # known has their identities
                requests.append(_request(abstract, abstract.slots[path], keys, pending.dtype, known, self._placed))
        return InitBatch(requests, self._calling)

    def describe(self) -> tuple[dict[int, tuple[str, bool]], int]:
        """Say how each value is made, and whether as a whole, by its placeholder's id; and how many kernels draw."""
        if self._plan is None:
            return {}, 0
        said = self._each(collections.deque(zip(self._plan.describe(), self._plan.made_whole(), strict=True)))
        return {id(variable): found[0] for _, _, variable, found in said}, len(self._plan.kernels())

    def _each(self, found: collections.deque[Any]) -> Iterator[tuple[int, Path, Any, list[Any]]]:
        """Take out what was found for the values of each place: several, where layers are stacked."""
        for i, path, variable in self._places:
            count = math.prod(variable.pending.stacking.sizes)
            yield i, path, variable, [found.popleft() for _ in range(count)]

    def run(self) -> list[dict[Path, Any]]:
        """Compute what is known to come out as the layers themselves would make it, by layer and path."""
        out: list[dict[Path, Any]] = [{} for _ in self.layers]
        places = [(placement.place_of(v), v.pending.stacking.sizes) for _, _, v in self._places]
        shardings = [s for place, sizes in places for s in shards.of_each(place, sizes)]
        with self._context():
            made = collections.deque(() if self._plan is None else self._plan.fill(shardings))
        # what has been stacked is given up before the next is
        for i, path, variable, arrays in self._each(made) if made else ():
            if not any(array is None for array in arrays):
                sizes, place = variable.pending.stacking.sizes, placement.place_of(variable)
                out[i][path] = stacked_values.stack_at(arrays, sizes, place) if sizes else arrays[0]
        return out


def _is_whole_or_in_front(pending: PendingInit) -> bool:
    """Whether a value is that of one layer, or those of several lie along the first axes, none of which is empty."""
    stacking = pending.stacking
    return all(stacking.marks[: len(stacking.sizes)]) and _compat.are_concrete(pending.leaves)


# ---------------------------------------------------------------- which values one call of an initializer makes


def _request(
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
