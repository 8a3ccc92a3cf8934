"""What the kernels of ``lazymods._initial`` compute of many placeholders, those of stacked layers one by one."""

from __future__ import annotations

import collections
import contextlib
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from lazymods import _compat
from lazymods._graph import Path
from lazymods._initial import placement, shards
from lazymods._initial.pending import PendingInit
from lazymods._layer import stacked_values
from lazymods._layer.abstract_module import AbstractModule


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
        places = [(i, path, own[path].pending) for i, (_, own) in enumerate(layers) for path in own]
        self._places = [(i, path) for i, path, pending in places if _is_whole_or_in_front(pending)]
        with self._context():
            self._plan = self._planned() if self._places and _compat.executing() else None

    def _planned(self) -> Any:
        from lazymods._initial.fill import InitBatch
        from lazymods._layer.init_requests import request  # on first use: a model that is loaded never draws

        known: dict[int, Any] = {}
        requests, alive = [], []
        for i, path in self._places:
            abstract, own = self.layers[i]
            pending = own[path].pending
            for keys in pending.keys_of_each():
                alive.append(keys)  # known has their identities
                requests.append(request(abstract, abstract.slots[path], keys, pending.dtype, known, self._placed))
        return InitBatch(requests, self._calling)

    def describe(self) -> tuple[dict[int, tuple[str, bool]], int]:
        """Say how each value is made, and whether as a whole, by its placeholder's id; and how many kernels draw."""
        if self._plan is None:
            return {}, 0
        said = self._each(zip(self._plan.describe(), self._plan.made_whole(), strict=True))
        return {id(self.layers[i][1][path]): found[0] for i, path, found in said}, len(self._plan.kernels())

    def _each(self, found: Iterable[Any]) -> Iterator[tuple[int, Path, list[Any]]]:
        """Return what was found for the values of each place: several, where layers are stacked."""
        rest = iter(found)
        for i, path in self._places:
            count = math.prod(self.layers[i][1][path].pending.stacking.sizes)
            yield i, path, list(itertools.islice(rest, count))

    def run(self) -> list[dict[Path, Any]]:
        """Compute what is known to come out as the layers themselves would make it, by layer and path."""
        out: list[dict[Path, Any]] = [{} for _ in self.layers]
        variables = [self.layers[i][1][path] for i, path in self._places]
        places = [(placement.place_of(v), v.pending.stacking.sizes) for v in variables]
        shardings = [s for place, sizes in places for s in shards.of_each(place, sizes)]
        with self._context():
            made = self._plan.fill(shardings) if self._plan is not None else ()
        made = collections.deque(made)  # what has been stacked is given up before the next is
        for i, path, arrays in self._each(_popped(made)) if made else ():
            if not any(array is None for array in arrays):
                variable = self.layers[i][1][path]
                sizes, place = variable.pending.stacking.sizes, placement.place_of(variable)
                out[i][path] = stacked_values.stack_at(arrays, sizes, place) if sizes else arrays[0]
        return out


def _popped(found: collections.deque[Any]) -> Iterator[Any]:
    while found:
        yield found.popleft()


def _is_whole_or_in_front(pending: PendingInit) -> bool:
    """Whether a value is that of one layer, or those of several lie along the first axes, none of which is empty."""
    stacking = pending.stacking
    return all(stacking.marks[: len(stacking.sizes)]) and _compat.are_concrete(pending.leaves)
