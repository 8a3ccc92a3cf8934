"""What is drawn from one stream of random keys, in so far as it is not sure: see :mod:`lazymods._initial.draws`."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from lazymods import _compat
from lazymods._initial.keys import is_key


class Others(NamedTuple):
    """Draws of somebody else.

    Attributes:
        turn: How many layers had their turn before.
        start: The counter at the first of them.
        stop: The counter after the last.
    """

    turn: int
    start: int
    stop: int


class Move(NamedTuple):
    """A key or a counter of a stream, and what it would be."""

    variable: Any
    value: Any


class Ledger:
    """The draws from one stream, in so far as they are not sure.

    Attributes:
        key: The stream's key; None if it has no value.
        extra: For each layer that may draw otherwise, in order: how many keys more than expected, None if its sizes
            are not known. A negative number: fewer.
        settled: So many of these can't be changed any more: what was drawn after them has its value.
        others: What others drew after one of them.
    """

    def __init__(self, stream: nnx.RngStream) -> None:
        self.extra: list[int | None] = []
        self.settled = 0
        self.others: list[Others] = []
        self._moved: list[tuple[int, Any, Any, Any]] = []  # of the streams that moved, and what they were
        self._expected: Any = None  # the counter, if nobody else has drawn: a number, or a tracer for as long as it is
        self._count: Any = stream.count  # None when it can't be asked any more
        self.key: Any = _compat.value_of(stream.key)
        self._traced = not _compat.are_concrete([self.key, _compat.value_of(stream.count)])
        if self._traced:  # of the trace nothing may be kept for longer than the stream
            self.key = self._count = None
            weakref.finalize(stream, _look_at_the_end, weakref.ref(self), stream.count).atexit = False

    def before(self, value: Any) -> None:
        """Note that a layer is about to draw, and what the counter is."""
        if not self.extra or self._is_expected(value):
            return
        turn, count = len(self.extra), None if self._traced or _compat.is_tracer(value) else _number(value)
        if count is None or self._expected is None or count < self._expected:
            self.settled = turn
            return
        self.others = [*self.others, Others(turn, self._expected, count)]
        self._expected = count

    def after(self, value: Any) -> None:
        """Note what the counter is when a layer has drawn."""
        self._expected = weakref.ref(value) if self._traced else _number(value)

    def shift(self, turn: int) -> int:
        """Return by how much the counter is off for what comes after so many turns."""
        return sum(e or 0 for e in self.extra[:turn])

    def use(self, turn: int) -> None:
        """Note that keys were used of a layer before which so many others had their turn."""
        self.settled = max(self.settled, turn)

    def others_after(self, turn: int) -> list[Others]:
        """Return what others drew after the turn of a layer."""
        if self._count is not None:
            self.before(_compat.value_of(self._count))
        return [o for o in self.others if o.turn > turn]

    def copies(self, streams: Sequence[nnx.RngStream]) -> list[nnx.RngStream]:
        """Find copies of the stream, as a copy of a model has them: as far as the stream itself, in its place."""
        if self._count is None or any(s.count is self._count for s in streams):
            return []
        now = _number(_compat.value_of(self._count))
        return [s for s in self._same(streams) if _number(_compat.value_of(s.count)) == now]

    def _same(self, streams: Sequence[nnx.RngStream]) -> list[nnx.RngStream]:
        """The streams of this key and name."""
        return [s for s in streams if self.is_named_as(s) and key_data_of(s) == key_data(self.key)]

    def is_named_as(self, stream: nnx.RngStream) -> bool:
        """Whether a stream has the name of this one, as its copies have."""
        return self._count is not None and stream.tag == self._count.tag

    def correct(self, turn: int, extra: int) -> None:
        """Note by how much a layer draws more than expected; the stream goes on from there."""
        more, self.extra[turn] = extra - (self.extra[turn] or 0), extra
        if not more:
            return
        self.others = [o if o.turn <= turn else Others(o.turn, o.start + more, o.stop + more) for o in self.others]
        if self._count is not None:
            value = _compat.value_of(self._count)
            if self._is_expected(value):
                self._expected = (self._expected + more) % 2**32
            _compat.SET_RAW(self._count, _compat.counted(value, more % 2**32))

    def move(self, turn: int, move: Move) -> None:
        """Let a stream that was forked from this one, or is a copy of it, be what it would be."""
        before = move.variable.get_raw_value()
        self._moved = [*self._moved, (turn, move.variable, before, move.value)]
        _compat.SET_RAW(move.variable, move.value)

    def moves_of_copy(self, turn: int, streams: Sequence[nnx.RngStream]) -> list[Move]:
        """Return the moves that were made in a model when a layer got its sizes, as in a copy of that model."""
        own = {id(v) for s in streams for v in (s.key, s.count)}
        if any(number == turn and id(variable) in own for number, variable, _, _ in self._moved):
            return []  # it is that model
        made = [(before, value) for number, _, before, value in self._moved if number == turn]
        keys = {key_data(before): value for before, value in made if is_key(before)}
        counts = {int(before): value for before, value in made if not is_key(before)}
        forked = [(s, keys[key_data_of(s)]) for s in streams if is_unused(s) and key_data_of(s) in keys]
        return [Move(s.key, value) for s, value in forked] + [
            Move(s.count, counts[int(_compat.value_of(s.count))])
            for s in self._same(streams)
            if int(_compat.value_of(s.count)) in counts
        ]

    def _is_expected(self, value: Any) -> bool:
        if self._traced:
            return self._expected is not None and self._expected() is value
        return not _compat.is_tracer(value) and _number(value) == self._expected

    def saved(self) -> Any:
        """Return all that may change, to :meth:`restore`."""
        count = None if self._count is None else self._count.get_raw_value()
        return self.extra.copy(), self.settled, self.others, self._expected, count, len(self._moved)

    def restore(self, saved: Any) -> None:
        """Be as when it was :meth:`saved`."""
        extra, self.settled, others, self._expected, count, moved = saved
        self.extra[: len(extra)] = extra  # layers that were built since stay
        self.others = others
        if count is not None:
            _compat.SET_RAW(self._count, count)
        for _, variable, before, _ in reversed(self._moved[moved:]):
            _compat.SET_RAW(variable, before)
        self._moved = self._moved[:moved]

    def __eq__(self, other: object) -> bool:
        """Whether nothing tells them apart: models that were built alike are one to a cache, as copies are."""
        if self is other or not isinstance(other, Ledger) or self._traced or other._traced:
            return self is other
        with _compat.at_trace(_compat.eval_trace()):  # comparisons happen inside traces as well
            return self._content() == other._content() and key_data(self.key) == key_data(other.key)

    def _content(self) -> Any:
        return self.extra, self.settled, self.others, self._expected

    def __hash__(self) -> int:
        return hash(Ledger)

    def __deepcopy__(self, memo: dict[int, Any]) -> Ledger:
        return self  # Flax copies what a model holds in two parts: only what both share stays one

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (), {**vars(self), "_expected": None if self._traced else self._expected, "_moved": []}


def _restored() -> Ledger:
    return object.__new__(Ledger)


def _number(value: Any) -> int | None:
    """A counter's value; None if it has none any more."""
    if value.shape != () or (hasattr(value, "is_deleted") and value.is_deleted()):
        return None
    return int(value)


def _look_at_the_end(ledger: Any, count: nnx.RngCount) -> None:
    """When a stream of a trace ends, see whether others have drawn from it."""
    ledger = ledger()
    if ledger is not None:
        ledger.before(_compat.value_of(count))


def is_unused(stream: Any) -> bool:
    """Whether nobody has drawn from a stream of one key that has a value."""
    key, count = _compat.value_of(stream.key), _compat.value_of(stream.count)
    known = isinstance(key, jax.Array) and _compat.are_concrete([key, count])
    return known and key.shape == () and int(count) == 0


def key_data_of(stream: Any) -> bytes:
    """Return :func:`key_data` of a stream's key."""
    return key_data(_compat.value_of(stream.key))


def key_data(key: Any) -> bytes:
    """Return the bytes of a key; of none, or of a tracer, no bytes."""
    return b"" if key is None or _compat.is_tracer(key) else np.asarray(jax.random.key_data(key)).tobytes()
