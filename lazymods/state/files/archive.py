"""Zip archives, as npz and PyTorch files are: where the bytes of every entry lie, checked against the file.

The directory at the file's end and the header before each entry say the same things twice, and readers differ in what
they believe. Here both must agree, no two entries may share a byte, and nothing but one directory is looked at: what
has been checked is what any other reader finds.
"""

from __future__ import annotations

import struct
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from lazymods._memory import empty
from lazymods.state.files.stored import Array, known_as, refuse

MAGIC = b"PK\x03\x04"
EMPTY_MAGIC = b"PK\x05\x06"  # the end record, with which an archive of no entries begins

_END = struct.Struct("<4s4H2LH")
_END64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR64 = struct.Struct("<4sLQL")
_LENGTHS = struct.Struct("<3H").unpack_from  # of an entry's name, extra data and comment
_EXTRA = struct.Struct("<2H")

# an entry's header before its bytes, and the one in the directory; without versions, times and attributes
_FIELDS = ["magic", "flags", "method", "crc", "stored", "size", "name_length", "extra_length"]
_FORMATS = ["<u4", "<u2", "<u2", "<u4", "<u4", "<u4", "<u2", "<u2"]
_OWN = np.dtype({"names": _FIELDS, "formats": _FORMATS, "offsets": [0, 6, 8, 14, 18, 22, 26, 28], "itemsize": 30})
_LISTED = np.dtype(
    {
        "names": [*_FIELDS, "disk", "header"],
        "formats": [*_FORMATS, "<u2", "<u4"],
        "offsets": [0, 8, 10, 16, 20, 24, 28, 30, 34, 42],
        "itemsize": 46,
    }
)
_UTF8_AT, _UTF8_BIT = 9, 0x8  # in the flags: whether the name is in UTF-8
_LENGTHS_AT = 28

_STORED, _DEFLATED = 0, 8
_UNREADABLE_FLAGS = 0x1 | 0x20 | 0x40 | 0x2000  # encrypted, a patch, strongly encrypted, a masked header
_SIZES_FOLLOW_FLAG = 0x8  # the header before the entry was written before its size was known
_FULL16, _FULL32 = 0xFFFF, 0xFFFFFFFF  # the true number stands in a 64-bit field
_CHUNK = 1 << 20


class Entry(NamedTuple):
    """One entry of an archive.

    Attributes:
        name: Its name.
        compressed: Whether its bytes are deflated.
        begin: Where its bytes begin in the file.
        stored: How many bytes it has in the file.
        size: How many bytes it unpacks to.
        crc: Their CRC-32.
    """

    name: str
    compressed: bool
    begin: int
    stored: int
    size: int
    crc: int


class _Directory(NamedTuple):
    begin: int
    end: int
    entries: int


def read_directory(path: Path, data: Array) -> dict[str, Entry]:
    """Return the entries by name, in the file's order.

    Raises:
        CheckpointError: If the file is no archive, or contradicts itself.
    """
    directory = _find_directory(path, data)
    raw = data[directory.begin : directory.end]
    names, positions = _names(path, raw.tobytes(), directory.entries)

    def refuse_where(is_wrong: Array, got: str, needed: str, *values: Array) -> None:
        if is_wrong.any():
            at = int(is_wrong.argmax())
            got = got.format(*(int(column[at]) for column in values))
            raise refuse(path, got, needed, tensor=list(names)[at])

    listed = _listed(refuse_where, raw, positions, directory.begin)
    begin = _begins(refuse_where, data, listed, directory.begin)
    header, stored = listed.header, listed.stored
    order = np.argsort(header, kind="stable")
    is_shared = np.zeros(len(order), bool)
    is_shared[order[1:]] = header[order[1:]] < (begin + stored)[order[:-1]]
    refuse_where(is_shared, "bytes that belong to another entry as well", "entries that do not overlap")

    entries: dict[str, Entry] = {}
    file = data.data
    is_deflated = listed.method == _DEFLATED
    columns = (header + _OWN.itemsize, is_deflated, begin, stored, listed.size, listed.crc)
    for (name, raw_name), at, *rest in zip(names.items(), *(column.tolist() for column in columns), strict=True):
        if file[at : at + len(raw_name)] != raw_name:
            got = "a header that differs from the directory's"
            raise refuse(path, got, "the same twice: the file is damaged", tensor=name)
        entries[name] = tuple.__new__(Entry, (name, *rest))  # faster than its own constructor
    return entries


# ---------------------------------------------------------------- the directory


def _find_directory(path: Path, data: Array) -> _Directory:
    size = len(data)
    tail_begin = max(0, size - _END.size - _FULL16)
    at = data[tail_begin:].tobytes().rfind(EMPTY_MAGIC) + tail_begin
    if at < tail_begin or at + _END.size > size:
        known = known_as(data[:512].tobytes()) if size else "an empty file, 0 bytes"
        got = (
            known if known and "zip" not in known else f"{size:,} bytes without a zip archive's directory at their end"
        )
        raise refuse(path, got, "a zip archive: the file is truncated, or no such archive")
    _, disk, first_disk, here, entries, length, begin, comment = _END.unpack(data[at : at + _END.size].tobytes())
    if at + _END.size + comment != size:
        raise refuse(path, "bytes after the archive's directory", "a zip archive and nothing else: the file is damaged")
    if disk or first_disk or here != entries:
        raise refuse(path, "one part of a zip archive in several", "a whole archive")
    end = at
    wide = _read_wide_end(path, data, at)
    if wide is not None:
        wide_entries, wide_length, wide_begin, end = wide
        pairs = ((entries, wide_entries, _FULL16), (length, wide_length, _FULL32), (begin, wide_begin, _FULL32))
        if any(narrow not in (w, full) for narrow, w, full in pairs):
            raise refuse(path, "two directories that differ", "one directory")
        entries, length, begin = wide_entries, wide_length, wide_begin
    if begin + length != end:
        got = f"a directory of {length:,} bytes from byte {begin:,} on"
        raise refuse(path, got, f"one that ends at byte {end:,}: the file is truncated or damaged")
    return _Directory(begin, end, entries)


def _read_wide_end(path: Path, data: Array, at: int) -> tuple[int, int, int, int] | None:
    """Return entries, length, begin of the directory, and the begin of its 64-bit end record, if there is one."""
    locator = at - _LOCATOR64.size
    if locator < 0 or data[locator : locator + 4].tobytes() != b"PK\x06\x07":
        return None
    _, disk, begin, disks = _LOCATOR64.unpack(data[locator:at].tobytes())
    if disk or disks > 1 or begin + _END64.size > locator:
        raise refuse(path, "a 64-bit directory outside the file", "a directory inside it: the file is damaged")
    record = _END64.unpack(data[begin : begin + _END64.size].tobytes())
    magic, length_of_record, _, _, disk, first_disk, here, entries, length, directory = record
    if magic != b"PK\x06\x06" or begin + 12 + length_of_record != locator or disk or first_disk or here != entries:
        raise refuse(path, "a 64-bit directory that is none", "a directory: the file is damaged")
    return entries, length, directory, begin


def _names(path: Path, raw: bytes, count: int) -> tuple[dict[str, bytes], Array]:
    """Return the names of the entries, each as text and as it is written, and where each begins in the directory."""
    names: dict[str, bytes] = {}
    positions: list[int] = []
    position = 0
    for _ in range(count):
        begin = position + _LISTED.itemsize
        if begin > len(raw) or not raw.startswith(b"PK\x01\x02", position):
            raise refuse(path, "a directory with fewer entries than it says", "all its entries: the file is damaged")
        name_length, extra_length, comment_length = _LENGTHS(raw, position + _LENGTHS_AT)
        raw_name = raw[begin : begin + name_length]
        end = begin + name_length + extra_length + comment_length
        if end > len(raw):
            raise refuse(path, "an entry longer than the directory", "one inside it: the file is damaged")
        name = _decode(path, raw_name, is_utf8=bool(raw[position + _UTF8_AT] & _UTF8_BIT))
        if name in names:
            raise refuse(path, "two entries of this name", "each name once", tensor=name)
        names[name] = raw_name
        positions.append(position)
        position = end
    if position != len(raw):
        got = f"a directory of {len(raw):,} bytes whose entries take {position:,}"
        raise refuse(path, got, "a directory of its entries only")
    return names, np.array(positions, np.int64)


def _decode(path: Path, raw: bytes, *, is_utf8: bool) -> str:
    try:
        name = raw.decode("utf-8" if is_utf8 else "cp437")
    except UnicodeDecodeError as error:
        raise refuse(path, f"the name {raw[:100]!r}", "a name in UTF-8, as the archive says it is") from error
    if not name or "\0" in name:
        raise refuse(path, f"the name {raw[:100]!r}", "a name without zero bytes")
    return name


_RefuseWhere = Callable[..., None]
"""Refuses the first entry of which an array is true; given it, what was got, with fields, what is needed, and arrays of
the fields' numbers."""


class _Listed(NamedTuple):
    """What the directory says of its entries, an array of each; ``header`` is where an entry's own header begins."""

    flags: Array
    method: Array
    name_length: Array
    crc: Array
    stored: Array
    size: Array
    header: Array


def _listed(refuse_where: _RefuseWhere, raw: Array, positions: Array, end: int) -> _Listed:
    """Return what the directory says; ``end`` is where it begins, before which all entries lie."""
    found = _headers(raw, positions, _LISTED)
    flags, method = found["flags"], found["method"]
    size, stored, header = _wide(raw, positions + _LISTED.itemsize, found, "size", "stored", "header")
    is_lacking = (header < 0) | ((found["disk"] != 0) & (found["disk"] != _FULL16))
    refuse_where(is_lacking, "an entry without its 64-bit sizes", "its sizes: the file is damaged")
    refuse_where(flags & _UNREADABLE_FLAGS != 0, "an encrypted entry", "one that can be read without a password")
    is_other = (method != _STORED) & (method != _DEFLATED)
    refuse_where(is_other, "an entry compressed by method {}", "one that is stored as it is, or deflated", method)
    is_outside = header > end - _OWN.itemsize
    refuse_where(is_outside, "an entry that begins at byte {:,}", f"one before byte {end:,}", header)
    is_packed = (method == _STORED) & (stored != size)
    refuse_where(is_packed, "{:,} bytes that unpack to {:,}", "as many: it is not compressed", stored, size)
    return _Listed(flags, method, found["name_length"], found["crc"], stored, size, header)


def _begins(refuse_where: _RefuseWhere, data: Array, listed: _Listed, end: int) -> Array:
    """Return where the bytes of each entry begin, behind its own header, which must say what the directory says."""
    own = _headers(data, listed.header, _OWN)
    size, stored = _wide(data, listed.header + _OWN.itemsize, own, "size", "stored")
    is_same = (own["magic"] == int.from_bytes(MAGIC, "little")) & (size >= 0)
    for field in ("flags", "method", "name_length"):
        is_same &= own[field] == getattr(listed, field)
    refuse_where(~is_same, "a header that differs from the directory's", "the same twice: the file is damaged")
    is_same = (own["crc"] == listed.crc) & (size == listed.size) & (stored == listed.stored)
    is_later = (listed.flags & _SIZES_FOLLOW_FLAG != 0) & (own["crc"] == 0) & (size == 0) & (stored == 0)
    is_other = ~(is_same | is_later)
    refuse_where(is_other, "sizes that differ from the directory's", "the same twice: the file is damaged")
    begin = listed.header + _OWN.itemsize + own["name_length"] + own["extra_length"]
    needed = f"one that ends before byte {end:,}: the file is truncated or damaged"
    refuse_where(listed.stored > end - begin, "an entry of {:,} bytes from byte {:,} on", needed, listed.stored, begin)
    return begin


def _headers(data: Array, positions: Array, dtype: np.dtype[Any]) -> Array:
    """Return the headers that lie there."""
    if not len(positions):
        return np.empty(0, dtype)
    return sliding_window_view(data, dtype.itemsize)[positions].view(dtype)[:, 0]


def _wide(data: Array, names_at: Array, headers: Array, *fields: str) -> list[Array]:
    """Return fields of headers, with the 64-bit ones of the extra data where they are full; -1 where these lack.

    Args:
        data: Where the headers lie.
        names_at: Where each entry's name does, which its extra data follows.
        headers: The headers.
        fields: The names of the fields, in the order of the 64-bit ones.
    """
    columns = [headers[field].astype(np.int64) for field in fields]
    for at in np.flatnonzero(np.any([column == _FULL32 for column in columns], axis=0)):
        begin = int(names_at[at]) + int(headers["name_length"][at])
        extra = data[begin : begin + int(headers["extra_length"][at])].tobytes()
        wide = _wide_fields(extra, [int(column[at]) for column in columns]) or [-1] * len(fields)
        for column, value in zip(columns, wide, strict=True):
            column[at] = value
    return columns


def _wide_fields(extra: bytes, fields: list[int]) -> list[int] | None:
    """Replace 32-bit fields that are full by the 64-bit ones of an entry's extra data; None if these are no sizes."""
    position = 0
    wide = b""
    while position + 4 <= len(extra):
        kind, length = _EXTRA.unpack_from(extra, position)
        if kind == 1:
            wide = extra[position + 4 : position + 4 + length]
            break
        position += 4 + length
    out = []
    for field in fields:
        if field == _FULL32:
            if len(wide) < 8:
                return None
            field, wide = int.from_bytes(wide[:8], "little"), wide[8:]
            if field > sys.maxsize:
                return None
        out.append(field)
    return out


# ---------------------------------------------------------------- an entry


def check_sum(path: Path, data: Array, entry: Entry) -> None:
    """Compute the CRC of an entry that is stored as it is.

    Raises:
        CheckpointError: If it is not the one that the directory has.
    """
    crc = zlib.crc32(data[entry.begin : entry.begin + entry.stored].data)
    if crc != entry.crc:
        raise refuse(path, f"CRC {crc:08x}", f"{entry.crc:08x}: the bytes are damaged", tensor=entry.name)


def check_sums(path: Path, data: Array, entries: Iterable[Entry]) -> None:
    """Compute the CRC of every entry that is stored as it is; the others' are computed when they are unpacked."""
    for entry in entries:
        if not entry.compressed:
            check_sum(path, data, entry)


def read_entry(path: Path, data: Array, entry: Entry, limit: int | None = None) -> Array:
    """Return the bytes of an entry: a view of the file if they are stored as they are, else unpacked ones.

    Args:
        path: The file.
        data: Its bytes.
        entry: The entry.
        limit: Give the first bytes only, unchecked; None: all of them, and their CRC is checked if they are unpacked.

    Raises:
        CheckpointError: If they do not unpack to what the directory says.
    """
    wanted = entry.size if limit is None else min(limit, entry.size)
    if not entry.compressed:
        return data[entry.begin : entry.begin + wanted]
    out = empty((wanted,), data.dtype)
    position = 0
    for part in unpacked(path, data, entry, limit):
        out[position : position + len(part)] = memoryview(part)
        position += len(part)
    return out


def unpacked(path: Path, data: Array, entry: Entry, limit: int | None = None) -> Iterator[bytes]:
    """Unpack an entry that is compressed, part by part, as :func:`read_entry` does.

    Raises:
        CheckpointError: If its bytes do not unpack to what the directory says.
    """
    wanted = entry.size if limit is None else min(limit, entry.size)
    raw = data[entry.begin : entry.begin + entry.stored]
    engine = zlib.decompressobj(-zlib.MAX_WBITS)
    position, crc, pending = 0, 0, raw.data
    try:
        while position < wanted:
            part = engine.decompress(pending[:_CHUNK], min(_CHUNK, wanted - position))
            used = min(_CHUNK, len(pending)) - len(engine.unconsumed_tail)
            pending = pending[used:]
            if not part and not used:
                break
            position += len(part)
            crc = zlib.crc32(part, crc)
            yield part
        more = limit is None and not engine.eof and engine.decompress(pending, 1)
    except zlib.error as error:
        raise refuse(path, f"bytes that do not unpack ({error})", "deflated bytes", tensor=entry.name) from error
    if position < wanted or more or (limit is None and (not engine.eof or engine.unused_data)):
        got = f"{position:,} bytes" if position < wanted else f"more than {entry.size:,} bytes"
        raise refuse(path, got, f"{entry.size:,} bytes, as the directory says", tensor=entry.name)
    if limit is None and crc != entry.crc:
        raise refuse(path, f"CRC {crc:08x}", f"{entry.crc:08x}: the bytes are damaged", tensor=entry.name)
