"""Which keys a layer gets, when a layer before it may draw more or fewer of them than was known.

A lazy layer draws from its rngs when it is built, as the explicit one would, so that what comes after it gets its own
keys. But a constructor may decide by a size how often it draws: a residual block makes a shortcut only where widths
differ. Such a layer is counted as it was read at the probes' sizes, and takes a :class:`Turn` in the :class:`Ledger` of
the stream. When its sizes are known the ledger says by how much the keys of all that came after it are off: lazy layers
then take others, and the stream goes on from where it would be. So do streams that were forked from it and are unused,
as a Dropout has one, if they are found in the model. What has a value already can't be put right: if anything else has
drawn from the stream in the meantime, the sizes are refused.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from lazymods import _compat
from lazymods._errors import ConfigurationError, Problem


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


class Ledger:
    """The draws from one stream, in so far as they are not sure.

    Attributes:
        key: The stream's key; None if it has no value.
        extra: For each layer that may draw otherwise, in order: how many keys more than was thought, None if its sizes
            are not known. A negative number: fewer.
        settled: So many of these can't be changed any more: what was drawn after them has its value.
        others: What others drew after one of them.
    """

    def __init__(self, stream: nnx.RngStream) -> None:
        self._name = os.urandom(16)  # that of its pickles as well
        self.extra: list[int | None] = []
        self.settled = 0
        self.others: list[Others] = []
        self._moved: list[tuple[Any, Any]] = []  # of the streams that moved, and what they were
        self._expected: Any = None  # the counter, if nobody else has drawn: a number, or a tracer for as long as it is
        self._count: Any = stream.count  # None when it can't be asked any more
        self.key = _compat.value_of(stream.key)
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
        same = [s for s in streams if s.tag == self._count.tag and _data(_compat.value_of(s.key)) == _data(self.key)]
        return [s for s in same if _number(_compat.value_of(s.count)) == _number(_compat.value_of(self._count))]

    def correct(self, turn: int, extra: int) -> None:
        """Note by how much a layer draws more than was thought; the stream goes on from there."""
        more, self.extra[turn] = extra - (self.extra[turn] or 0), extra
        if not more:
            return
        self.others = [
            o if o.turn <= turn else Others(o.turn, o.start + more, o.stop + more) for o in self.others
        ]
        if self._count is not None:
            value = _compat.value_of(self._count)
            if self._is_expected(value):
                self._expected = (self._expected + more) % 2**32
            _compat.SET_RAW(self._count, _compat.counted(value, more % 2**32))

    def move(self, stream: nnx.RngStream, count: int | None, more: int) -> None:
        """Let a stream be what it would be had so many more keys been drawn before.

        Args:
            stream: One that was forked from this one, or a copy of this one.
            count: The counter at which it was forked; None for a copy.
            more: How many.
        """
        variable = stream.count if count is None else stream.key
        self._moved = [*self._moved, (variable, variable.get_raw_value())]
        if count is None:
            _compat.SET_RAW(variable, _compat.counted(_compat.value_of(variable), more % 2**32))
        else:
            _compat.SET_RAW(variable, jax.random.fold_in(self.key, np.uint32((count + more) % 2**32)))

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
        for key, raw in reversed(self._moved[moved:]):
            _compat.SET_RAW(key, raw)
        self._moved = self._moved[:moved]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ledger) and self._name == other._name

    def __hash__(self) -> int:
        return hash(self._name)

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


class Turn(NamedTuple):
    """A layer's place among the draws from one stream.

    Attributes:
        ledger: That of the stream.
        number: How many of the layers in it came before.
        draws: How often it was thought to draw, if it is one of those that are in it; else None.
        known: By how much these were known to draw more than was thought when it was built.
    """

    ledger: Ledger
    number: int
    draws: int | None
    known: int

    def off(self) -> int:
        """Return by how much the layer's counter is off."""
        return self.ledger.shift(self.number) - self.known


Turns = tuple["Turn | None", ...]  # for each stream of a layer; None where all draws are sure

_LEDGERS: dict[int, tuple[Any, Ledger]] = {}  # by the stream's id, with a weak reference to it


def take_turns(streams: Mapping[str, nnx.RngStream], draws: Mapping[str, int] | None) -> Turns | None:
    """Note that a layer is about to draw.

    Args:
        streams: The streams of its rngs.
        draws: How often it was read to draw from each, if it may draw otherwise at other sizes; None: if it may not.

    Returns:
        Its turns; None where nothing is unsure.
    """
    if draws is None and not _LEDGERS:
        return None
    turns: list[Turn | None] = []
    for name, stream in streams.items():
        ledger = _ledger_of(stream, draws is not None)
        if ledger is None:
            turns.append(None)
            continue
        ledger.before(_compat.value_of(stream.count))
        number = len(ledger.extra)
        if draws is not None:
            ledger.extra.append(None)
        thought = None if draws is None else draws.get(name, 0)
        turns.append(Turn(ledger, number, thought, ledger.shift(number)))
    return tuple(turns) if any(turns) else None


def have_drawn(turns: Turns | None, streams: Mapping[str, nnx.RngStream]) -> None:
    """Note that a layer has drawn, after :func:`take_turns`."""
    for turn, stream in zip(turns or (), streams.values(), strict=False):
        if turn is not None:
            turn.ledger.after(_compat.value_of(stream.count))


def _ledger_of(stream: nnx.RngStream, make: bool) -> Ledger | None:
    key = id(stream)
    if key not in _LEDGERS and make:
        _LEDGERS[key] = weakref.ref(stream, lambda _: _LEDGERS.pop(key, None)), Ledger(stream)
    return _LEDGERS[key][1] if key in _LEDGERS else None


def shifted(keys: tuple[Any, ...], turns: Turns | None) -> tuple[Any, ...]:
    """Return the keys and counters that a layer draws from, by what is known of those before it."""
    for i, turn in enumerate(turns or ()):
        off = 0 if turn is None or 2 * i >= len(keys) else turn.off()
        count = keys[2 * i + 1] if off else None
        if hasattr(count, "aval"):  # else it is one that has no value, of a model that nnx.eval_shape made
            keys = (*keys[: 2 * i + 1], _compat.counted(count, off % 2**32), *keys[2 * i + 2 :])
    return keys


def use(turns: Turns | None) -> None:
    """Note that a layer's keys have been used."""
    for turn in turns or ():
        if turn is not None:
            turn.ledger.use(turn.number)


def settle(
    turns: Turns,
    draws: Mapping[str, int],
    names: Sequence[str],
    streams: Callable[[], Sequence[Any]],
    where: Callable[[], str] | None,
) -> None:
    """Note how often a layer draws at the sizes that it has now.

    Args:
        turns: Its turns.
        draws: How often it draws, by stream.
        names: The streams, in the order of ``turns``.
        streams: Finds those of the model, among them perhaps some that were forked from these.
        where: Says which layer it is. None: what has drawn other keys than it should have is let be.

    Raises:
        ConfigurationError: If anything that came after it has its value, of another key than it should have.
    """
    problems, changes = [], []
    for name, turn in zip(names, turns, strict=True):
        if turn is None or turn.draws is None:
            continue
        ledger, extra = turn.ledger, draws.get(name, 0) - turn.draws
        before = ledger.extra[turn.number] or 0
        moved = [] if extra == before else _to_move(turn, turns, streams())
        if where is not None and (moved is None or (extra != before and turn.number < ledger.settled)):
            problems.append(_refused(where(), name, draws.get(name, 0), turn.draws + before, ledger))
        changes.append((turn, extra, extra - before, moved or []))
    if problems:
        raise ConfigurationError(*problems)
    for turn, extra, more, moved in changes:
        turn.ledger.correct(turn.number, extra)
        for stream, count in moved:
            turn.ledger.move(stream, count, more)


def _to_move(turn: Turn, turns: Turns, streams: Sequence[Any]) -> list[tuple[Any, int | None]] | None:
    """Find what others made of the keys that they drew after a layer, if those are streams that nobody has used.

    Returns:
        The streams, with the counter of each, and, with None, copies of the stream itself in a copy of the model; None
        if somebody made anything else, or if that can't be told in a transform.
    """
    ledger = turn.ledger
    wanted = [count for o in ledger.others_after(turn.number) for count in range(o.start, o.stop)]
    if ledger.key is not None and not all(_compat.are_concrete([_compat.value_of(s.count)]) for s in streams):
        return None
    unused = [s for s in streams if _is_unused(s)] if wanted else []
    twice = [t for t in turns if t is not None and t is not turn and _data(t.ledger.key) == _data(ledger.key)]
    if len(wanted) > len(unused) or (wanted and twice):  # two streams of one key: a fork may be of either
        return None
    found: list[tuple[Any, int | None]] = [(s, None) for s in ledger.copies(streams)]
    for count in wanted:
        data = _data(jax.random.fold_in(ledger.key, np.uint32(count)))
        same = [(s, count) for s in unused if _data(_compat.value_of(s.key)) == data]
        if not same:
            return None
        found += same
    return found


def _is_unused(stream: Any) -> bool:
    key, count = _compat.value_of(stream.key), _compat.value_of(stream.count)
    return isinstance(key, jax.Array) and _compat.are_concrete([key, count]) and key.shape == () and int(count) == 0


def _data(key: Any) -> bytes:
    return b"" if key is None else np.asarray(jax.random.key_data(key)).tobytes()


def _refused(where: str, name: str, draws: int, thought: int, ledger: Ledger) -> Problem:
    stream = f"the stream {name!r} of its rngs" if name else "its rngs"
    got = f"sizes at which it draws {draws} keys from {stream}, after others drew from it as if it had drawn {thought}"
    needed = "the keys that each would get after the explicit layer; what has its value keeps the key that it got"
    write = "rngs=rngs.fork() for this layer"
    if ledger.key is not None:  # it was not built under a transform
        write += ", or lm.materialize(model, x) before anything else draws"
    return Problem(where, got, needed, write)
