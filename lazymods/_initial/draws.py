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

import dataclasses
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from lazymods import _compat
from lazymods._errors import ConfigurationError, Problem
from lazymods._initial.ledger import Ledger, Move, is_unused, key_data, key_data_of


class Turn(NamedTuple):
    """A layer's place among the draws from one stream.

    Attributes:
        ledger: That of the stream.
        number: How many of the layers in it came before.
        draws: How often it is expected to draw, if it is one of those that are in it; else None.
        known: By how much these were known to draw more than expected when it was built.
    """

    ledger: Ledger
    number: int
    draws: int | None
    known: int

    def off(self) -> int:
        """Return by how much the layer's counter is off."""
        return self.ledger.shift(self.number) - self.known


@dataclasses.dataclass(frozen=True)
class TurnsOfBlocks:
    """The turns of equal layers of which a stack has made one, in the order of its blocks."""

    each: tuple[Turns | None, ...]


TurnsOfOne = tuple["Turn | None", ...]  # for each stream of a layer; None where all draws are sure
Turns = TurnsOfOne | TurnsOfBlocks

LEDGERS: dict[int, tuple[Any, Ledger]] = {}  # by the stream's id, with a weak reference to it


def take_turns(streams: Mapping[str, nnx.RngStream], draws: Mapping[str, int] | None) -> TurnsOfOne | None:
    """Note that a layer is about to draw.

    Args:
        streams: The streams of its rngs.
        draws: How often it was read to draw from each, if it may draw otherwise at other sizes; None: if it may not.

    Returns:
        Its turns; None where nothing is unsure.
    """
    if draws is None and not LEDGERS:
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


def have_drawn(turns: TurnsOfOne | None, streams: Mapping[str, nnx.RngStream]) -> None:
    """Note that a layer has drawn, after :func:`take_turns`."""
    for turn, stream in zip(turns or (), streams.values(), strict=False):
        if turn is not None:
            turn.ledger.after(_compat.value_of(stream.count))


def of_blocks(turns: Sequence[Turns | None]) -> Turns | None:
    """Return the turns of layers of which a stack makes one; None where nothing is unsure."""
    return TurnsOfBlocks(tuple(turns)) if any(t is not None for t in turns) else None


def of_each(turns: Turns | None, n: int) -> Sequence[Turns | None]:
    """Return what :func:`of_blocks` was given, for so many blocks."""
    return turns.each if isinstance(turns, TurnsOfBlocks) else [turns] * n


def all_of(turns: Turns | None) -> Iterator[Turn]:
    """Go through the turns of a layer, or of each of those that are stacked."""
    for turn in turns.each if isinstance(turns, TurnsOfBlocks) else turns or ():
        if isinstance(turn, Turn):
            yield turn
        elif turn is not None:
            yield from all_of(turn)


def _off(turns: Turns | None, stream: int) -> Any:
    """Return by how much the counter of a stream is off, for each of the layers that are stacked."""
    if isinstance(turns, TurnsOfBlocks):
        return np.stack(np.broadcast_arrays(*[_off(t, stream) for t in turns.each]))
    turn = None if turns is None else turns[stream]
    return np.int64(0 if turn is None else turn.off())


def _ledger_of(stream: nnx.RngStream, make: bool) -> Ledger | None:
    key = id(stream)
    if key not in LEDGERS and make:
        LEDGERS[key] = weakref.ref(stream, lambda _: LEDGERS.pop(key, None)), Ledger(stream)
    return LEDGERS[key][1] if key in LEDGERS else None


def shifted(keys: tuple[Any, ...], turns: Turns | None) -> tuple[Any, ...]:
    """Return the keys and counters that a layer draws from, by what is known of those before it."""
    for i in range(len(keys) // 2) if are_off(turns) else ():
        count, off = keys[2 * i + 1], _off(turns, i)
        if off.any() and hasattr(count, "aval"):  # else it has no value, in a model that nnx.eval_shape made
            off = np.expand_dims(off, tuple(range(off.ndim, count.ndim))) % 2**32
            keys = (*keys[: 2 * i + 1], _compat.counted(count, off if off.ndim else int(off)), *keys[2 * i + 2 :])
    return keys


def are_off(turns: Turns | None) -> bool:
    """Whether a layer gets other keys than it was built with."""
    return any(turn.off() for turn in all_of(turns))


def use(turns: Turns | None, *, is_sure: bool = True) -> None:
    """Note that a layer's keys have been used; if not sure, as it was thought to draw, which it then has to."""
    for turn in all_of(turns):
        turn.ledger.use(turn.number if is_sure or turn.draws is None else turn.number + 1)


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
    for own in turns.each if isinstance(turns, TurnsOfBlocks) else [turns]:
        if isinstance(own, TurnsOfBlocks):
            settle(own, draws, names, streams, where)
        elif own is not None:
            _settle(own, draws, names, streams, where)


def _settle(
    turns: TurnsOfOne,
    draws: Mapping[str, int],
    names: Sequence[str],
    streams: Callable[[], Sequence[Any]],
    where: Callable[[], str] | None,
) -> None:
    problems, changes = [], []
    for name, turn in zip(names, turns, strict=True):
        if turn is None or turn.draws is None:
            continue
        ledger, extra = turn.ledger, draws.get(name, 0) - turn.draws
        known = ledger.extra[turn.number]  # if a copy has its sizes
        before = known or 0
        if known == extra:
            moved = ledger.moves_of_copy(turn.number, streams()) if extra else []
        else:
            moved = _to_move(turn, turns, streams(), extra - before) if extra != before else []
        late = extra != before and (known is not None or turn.number < ledger.settled)
        if where is not None and (moved is None or late):
            problems.append(_refused(where(), name, draws.get(name, 0), turn.draws + before, ledger))
        if where is not None or known in (None, extra):  # else a copy goes on with what it knows
            changes.append((turn, extra, moved or []))
    if problems:
        raise ConfigurationError(*problems)
    for turn, extra, moved in changes:
        turn.ledger.correct(turn.number, extra)
        for move in moved:
            turn.ledger.move(turn.number, move)


def _to_move(turn: Turn, turns: TurnsOfOne, streams: Sequence[Any], more: int) -> list[Move] | None:
    """Find what others made of the keys that they drew after a layer, if those are streams that nobody has used.

    Returns:
        What these would be had the layer drawn so many more keys, and what copies of the stream itself would be, in a
        copy of the model; None if somebody made anything else, or if that can't be told in a transform.
    """
    ledger = turn.ledger
    wanted = [count for o in ledger.others_after(turn.number) for count in range(o.start, o.stop)]
    traced = [s for s in streams if ledger.is_named_as(s) and _compat.is_tracer(_compat.value_of(s.count))]
    if traced and any(known is ledger for _, known in LEDGERS.values()):  # one of them may be the stream itself
        return None
    unused = [s for s in streams if is_unused(s)] if wanted else []
    twice = [t for t in turns if t is not None and t is not turn and key_data(t.ledger.key) == key_data(ledger.key)]
    if len(wanted) > len(unused) or (wanted and twice):  # two streams of one key: a fork may be of either
        return None
    copies = ledger.copies(streams)
    found = [Move(s.count, _compat.counted(_compat.value_of(s.count), more % 2**32)) for s in copies]
    for count in wanted:
        data = key_data(jax.random.fold_in(ledger.key, np.uint32(count)))
        same = [s for s in unused if key_data_of(s) == data]
        if not same:
            return None
        key = jax.random.fold_in(ledger.key, np.uint32((count + more) % 2**32))
        found += [Move(s.key, key) for s in same]
    return found


def _refused(where: str, name: str, draws: int, thought: int, ledger: Ledger) -> Problem:
    stream = f"the stream {name!r} of its rngs" if name else "its rngs"
    got = f"sizes at which it draws {draws} keys from {stream}, after others drew from it as if it had drawn {thought}"
    needed = "the keys that each would get after the explicit layer; what has its value keeps the key that it got"
    write = "rngs=rngs.fork()  # for this layer"
    if ledger.key is not None:  # it was not built under a transform
        write = f"lm.materialize(model, x)  # before anything else draws; or {write}"
    return Problem(where, got, needed, write)
