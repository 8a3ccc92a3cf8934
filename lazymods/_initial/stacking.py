"""Where the axes of a stack are: those that ``nnx.vmap`` has put among the axes of one model's value.

A placeholder that was built under a transform holds an array of no elements, its *marks*, of the rank that the value
of one model has. Whatever stacks or slices the models does the same to the marks, at the same axes, so their shape
tells where those are: an axis of the stack has its length, one of the model's own is empty. Where the rank is not
known, marks have more empty axes than any value, and an axis of the stack counts from the nearer end.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from lazymods._errors import Problem, ShapeInferenceError

Shape = tuple[int, ...]
_ENDS = 8  # so far from an end may a stack have its axis where the rank is not known


@dataclasses.dataclass(frozen=True)
class Stacking:
    """The axes of a stack among those of a value.

    Attributes:
        marks: The shape of the marks.
        exact: Whether they have the rank of one model's value.
    """

    marks: Shape = ()
    exact: bool = True

    @classmethod
    def of_one(cls, rank: int | None) -> Stacking:
        """No stack: a value of that rank, None if it is not known."""
        return cls((0,) * (2 * _ENDS), exact=False) if rank is None else cls((0,) * rank)

    @property
    def sizes(self) -> Shape:
        """How many models are stacked at each of the axes."""
        return tuple([n for n in self.marks if n])

    def axes(self, rank: int) -> Shape:
        """Return where the axes of the stack are, in the value of which one model's has that rank.

        Raises:
            ShapeInferenceError: If that is not to be told.
        """
        sizes = self.sizes
        own = len(self.marks) - len(sizes)
        found, before = [], 0
        for i, n in enumerate(self.marks):
            if not n:
                before += 1
            elif self.exact or before < _ENDS:
                found.append(i)
            elif before > _ENDS:
                found.append(rank + len(sizes) - len(self.marks) + i)
        counted = own == (rank if self.exact else 2 * _ENDS) and len(found) == len(sizes)
        if counted and found == sorted({*found}) and all(0 <= i < rank + len(sizes) for i in found):
            return tuple(found)
        got = f"a value of {rank} axes in each, and axes of the stack that can't be told from those"
        needed = "a stack of one layer at least, along an axis near an end"
        raise ShapeInferenceError(Problem("a stack of lazy layers", got, needed, "nnx.vmap(make, out_axes=0)"))

    def at_rank(self, rank: int | None) -> Stacking:
        """Describe the same stack of values of which one model's has that rank."""
        if rank is None:
            return self
        marks = [0] * (rank + len(self.sizes))
        for axis, n in zip(self.axes(rank), self.sizes, strict=True):
            marks[axis] = n
        return Stacking(tuple(marks))

    def whole(self, shape: Sequence[Any]) -> tuple[Any, ...]:
        """Return the shape of all that are stacked, from that of one model's value.

        Raises:
            ShapeInferenceError: If it is not to be told where the axes of the stack are.
        """
        if not self.marks:
            return tuple(shape)
        whole = list(shape)
        for axis, n in zip(self.axes(len(shape)), self.sizes, strict=True):
            whole.insert(axis, n)
        return tuple(whole)

    def repeat(self, value: jax.Array) -> jax.Array:
        """Return the values of all that are stacked, each equal to this one."""
        shape = self.whole(value.shape)
        return jnp.broadcast_to(jnp.expand_dims(value, self.axes(value.ndim)), shape)

    def part(self, shape: Sequence[int]) -> Shape | None:
        """Return the shape of one model's value, from that of all that are stacked; None if it is none of those."""
        sizes = self.sizes
        if not self.marks:
            return tuple(shape)
        if len(shape) < len(sizes) or (self.exact and len(shape) != len(self.marks)):
            return None
        try:
            axes = self.axes(len(shape) - len(sizes))
        except ShapeInferenceError:
            return None
        if any(shape[axis] != n for axis, n in zip(axes, sizes, strict=True)):
            return None
        return tuple([n for i, n in enumerate(shape) if i not in axes])


ONE = Stacking()
_ROOM = (0,) * (2 * _ENDS)


@dataclasses.dataclass(frozen=True)
class Stackings:
    """Those of the values of a layer, by path.

    Args:
        known: Those of its placeholders; a value that is no placeholder any more lies as they all do.
    """

    known: Mapping[Any, Stacking]

    @functools.cached_property
    def common(self) -> Stacking | None:
        """How all values lie whose placeholders are known, in front or at the end; None if they differ."""
        stackings = list(self.known.values())
        sizes = {s.sizes for s in stackings} or {()}
        if len(sizes) > 1:
            return None
        (stack,) = sizes
        for candidate in (Stacking((*stack, *_ROOM), exact=False), Stacking((*_ROOM, *stack), exact=False)):
            if all(_same(candidate, s) for s in stackings):
                return candidate
        return None

    def part(self, path: Any, shape: Shape, rank: int) -> Shape:
        """Return the shape of one model's value of that rank; the shape as it is where nothing is stacked like that."""
        stacking = self.known.get(path, self.common) if self.known else None
        if stacking is None and rank == 0 and any(s.sizes == shape for s in self.known.values()):
            return ()  # random state, mostly: there is but one way in which it can lie
        part = None if stacking is None else stacking.part(shape)
        return shape if part is None or len(part) != rank else part


def _same(candidate: Stacking, stacking: Stacking) -> bool:
    if not stacking.exact:
        return candidate.sizes == stacking.sizes and candidate.marks == stacking.marks
    rank = len(stacking.marks) - len(stacking.sizes)
    return candidate.axes(rank) == stacking.axes(rank)
