"""Entries onto several devices: only what devices of this process hold is read, checked, cast and copied."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from lazymods._initial.shards import put
from lazymods._memory import Incoming, as_it_lies, prepared
from lazymods._spread import Index, Part, parts_here, put_together
from lazymods.state.files.orbax import OrbaxArray
from lazymods.state.files.stored import Array, Unread, check_booleans, read_ahead, will_need
from lazymods.state.values import cast_problem

_GROUP = 1 << 28  # bytes that are on the host at a time, of what is on its way to other devices
_UNPACKED = 1 << 33  # of an Orbax folder: each array, which may be over a gigabyte, is unpacked in one thread


class Spread(NamedTuple):
    """An entry that goes to several devices.

    Attributes:
        name: What it is called, if there is something wrong with it.
        value: An array of numpy, or one of a file.
        dtype: The dtype that it gets.
        sharding: Where it goes.
        owned: Whether JAX may take the memory over.
    """

    name: str
    value: Array | Unread
    dtype: Any
    sharding: Any
    owned: bool


Misfits = dict[str, str]  # why an entry cannot be cast, by its name


def load_spread(
    entries: Sequence[Spread], advance: Callable[[int], None] | None = None
) -> tuple[list[jax.Array], Misfits]:
    """Make the arrays of entries, and say which of them cannot be what they should.

    Args:
        entries: The entries.
        advance: Called with the number of bytes, from several threads, whenever some have been copied.

    Raises:
        CheckpointError: If a file cannot be read, or holds booleans that are none.
    """
    arrays: dict[str, jax.Array] = {}
    misfits: Misfits = {}
    for group in _groups([e for e in entries if _is_of_orbax(e)], _UNPACKED):
        arrays |= _restored([e for e in group if _is_restored(e)], misfits)
        arrays |= _from_parts([e for e in group if not _is_restored(e)], misfits, advance)
    for group in _groups([e for e in entries if not _is_of_orbax(e)], _GROUP):
        arrays |= _from_parts(group, misfits, advance)
    return [arrays[entry.name] for entry in entries], misfits


def _groups(entries: Sequence[Spread], limit: int) -> Iterator[list[Spread]]:
    """Cut a list, so that what is on the host at a time is limited; what is read as a whole may be over it, alone."""
    group: list[Spread] = []
    total = 0
    for entry in entries:
        size = _bytes_here(entry)
        if group and total + size > limit:
            yield group
            group, total = [], 0
        group.append(entry)
        total += size
    if group:
        yield group


def _bytes_here(entry: Spread) -> int:
    if _is_read_whole(entry) and not _is_restored(entry):
        return entry.value.nbytes
    parts = parts_here(entry.sharding, entry.value.shape)
    return sum(math.prod([end - begin for begin, end in part]) for part in parts) * entry.value.dtype.itemsize


# ---------------------------------------------------------------- parts of a file, or of an array of numpy


def _from_parts(
    entries: Sequence[Spread], misfits: Misfits, advance: Callable[[int], None] | None
) -> dict[str, jax.Array]:
    wanted: list[tuple[Spread, Part]] = []
    incoming: list[Incoming] = []
    wholes = read_ahead(e.value.stored for e in entries if isinstance(e.value, Unread) and _is_read_whole(e))
    for entry in entries:
        parts = parts_here(entry.sharding, entry.value.shape)
        values, owned = _read(entry, list(parts.values()), wholes)
        for part, value in zip(parts, values, strict=True):
            wanted.append((entry, part))
            incoming.append(Incoming(value, entry.dtype, None, owned))
            if value.flags.c_contiguous and not as_it_lies(incoming[-1]):
                will_need(value, 0, value.nbytes)
            _check(entry, value, misfits)
    made: dict[str, dict[Part, Array]] = {entry.name: {} for entry in entries}
    for (entry, part), array in zip(wanted, prepared(incoming, advance), strict=True):
        made[entry.name][part] = array
    out = {e.name: put_together(e.value.shape, e.dtype, e.sharding, made[e.name]) for e in entries}
    if any(device.platform != "cpu" for e in entries for device in e.sharding.addressable_devices):
        jax.block_until_ready(list(out.values()))  # so that the host has room for the next
    return out


def _is_read_whole(entry: Spread) -> bool:
    return isinstance(entry.value, Unread) and not entry.value.stored.is_read_in_parts


def _read(entry: Spread, indices: Sequence[Index], wholes: Iterator[Array]) -> tuple[list[Array], bool]:
    """Return the values at some indices, and whether JAX may take over their memory."""
    value = entry.value
    if not isinstance(value, Unread):
        return [value[index] for index in indices], entry.owned
    if value.stored.is_read_in_parts:
        return [value.stored.part(index) for index in indices], True
    whole = next(wholes)
    parts = [whole[index] for index in indices]
    return parts, len(parts) == 1 and parts[0].size == whole.size  # else the whole would stay, for some of its parts


def _check(entry: Spread, value: Array, misfits: Misfits) -> None:
    if isinstance(entry.value, Unread):
        check_booleans(entry.value.stored.file, entry.name, value)
    reason = cast_problem(value, entry.dtype)
    if reason is not None:
        misfits.setdefault(entry.name, reason)


# ---------------------------------------------------------------- by Orbax


def _is_of_orbax(entry: Spread) -> bool:
    return isinstance(entry.value, Unread) and isinstance(entry.value.stored.source, OrbaxArray)


def _is_restored(entry: Spread) -> bool:
    """Whether Orbax restores it: not what every device holds whole, which it would read for each of them.

    Nor where JAX has no arrays of its dtype, and it has to be cast on the host.
    """
    if not _is_of_orbax(entry) or entry.sharding.is_fully_replicated:
        return False
    return jax.dtypes.canonicalize_dtype(entry.value.dtype) == entry.value.dtype


def _restored(entries: Sequence[Spread], misfits: Misfits) -> dict[str, jax.Array]:
    if not entries:
        return {}
    from lazymods.state.files.orbax_restoring import restore

    sources: list[Any] = [e.value.stored.source for e in entries if isinstance(e.value, Unread)]
    arrays = restore(sources, [e.sharding for e in entries])
    out = {}
    for entry, array in zip(entries, arrays, strict=True):
        for shard in array.addressable_shards if array.dtype != entry.dtype or array.dtype == np.bool_ else ():
            if shard.replica_id == 0:
                _check(entry, np.asarray(shard.data), misfits)
        cast = array if array.dtype == entry.dtype else array.astype(entry.dtype)
        out[entry.name] = cast if cast.sharding == entry.sharding else put(cast, entry.sharding)
    return out
