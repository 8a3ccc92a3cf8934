"""Zip archives, as npz and PyTorch files are: where the bytes of every entry lie, checked against the file.

The directory at the file's end and the header before each entry say the same things twice, and readers differ in what
they believe. Here both must agree, no two entries may share a byte, and nothing but one directory is looked at: what
has been checked is what any other reader finds.
"""

from __future__ import annotations

import functools
import struct
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from lazymods._memory import empty
from lazymods.state.files.stored import Array, known_as, refuse

MAGIC = b"PK\x03\x04"
EMPTY_MAGIC = b"PK\x05\x06"  # the end record, with which an archive of no entries begins

_END = struct.Struct("<4s4H2LH")
_END64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR64 = struct.Struct("<4sLQL")
_CENTRAL = struct.Struct("<4s4x2H4x3L4H6xL")  # without versions, times and attributes
_LOCAL = struct.Struct("<4s2x2H4x3L2H")
_EXTRA = struct.Struct("<2H")

_STORED, _DEFLATED = 0, 8
_UNREADABLE_FLAGS = 0x1 | 0x20 | 0x40 | 0x2000  # encrypted, a patch, strongly encrypted, a masked header
_UTF8_FLAG = 0x800
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


_Central = tuple[bytes, str, int, int, int, int, int, int]
"""What the directory says of an entry: its name as it is written and as text, its flags, its method of compression, the
CRC-32 of its bytes, how many they are in the file and unpacked, and where the entry's own header begins."""


def read_directory(path: Path, data: Array) -> dict[str, Entry]:
    """Return the entries by name, in the file's order.

    Raises:
        CheckpointError: If the file is no archive, or contradicts itself.
    """
    directory = _find_directory(path, data)
    raw = data[directory.begin : directory.end].tobytes()
    file = data.data
    entries: dict[str, Entry] = {}
    spans = []
    position = 0
    for _ in range(directory.entries):
        central, position = _read_central(path, raw, position)
        _, name, _, _, _, stored, _, header = central
        if name in entries:
            raise refuse(path, "two entries of this name", "each name once", tensor=name)
        entries[name] = entry = _locate(path, file, directory.begin, central)
        spans.append((header, entry.begin + stored, name))
    if position != len(raw):
        got = f"a directory of {len(raw):,} bytes whose entries take {position:,}"
        raise refuse(path, got, "a directory of its entries only")
    end = 0
    for begin, next_end, name in sorted(spans):
        if begin < end:
            raise refuse(path, "bytes that belong to another entry as well", "entries that do not overlap", tensor=name)
        end = next_end
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


def _read_central(path: Path, raw: bytes, position: int) -> tuple[_Central, int]:
    if position + _CENTRAL.size > len(raw) or not raw.startswith(b"PK\x01\x02", position):
        raise refuse(path, "a directory with fewer entries than it says", "all its entries: the file is damaged")
    fields = _CENTRAL.unpack_from(raw, position)
    _, flags, method, crc, stored, size, name_length, extra_length, comment_length, disk, header = fields
    begin = position + _CENTRAL.size
    extra_begin = begin + name_length
    end = extra_begin + extra_length + comment_length
    if end > len(raw):
        raise refuse(path, "an entry longer than the directory", "one inside it: the file is damaged")
    raw_name = raw[begin:extra_begin]
    name = _decode(path, raw_name, flags)
    wide: list[int] | None = [size, stored, header]
    if _FULL32 in wide:
        wide = _wide_fields(raw[extra_begin : extra_begin + extra_length], wide)
    if wide is None or disk not in (0, _FULL16):
        raise refuse(path, "an entry without its 64-bit sizes", "its sizes: the file is damaged", tensor=name)
    size, stored, header = wide
    return (raw_name, name, flags, method, crc, stored, size, header), end


def _decode(path: Path, raw: bytes, flags: int) -> str:
    try:
        name = raw.decode("utf-8" if flags & _UTF8_FLAG else "cp437")
    except UnicodeDecodeError as error:
        raise refuse(path, f"the name {raw[:100]!r}", "a name in UTF-8, as the archive says it is") from error
    if not name or "\0" in name:
        raise refuse(path, f"the name {raw[:100]!r}", "a name without zero bytes")
    return name


def _wide_fields(extra: bytes, fields: list[int]) -> list[int] | None:
    """Replace 32-bit fields that are full by the 64-bit ones of an entry's extra data; None if they lack."""
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
        out.append(field)
    return out


# ---------------------------------------------------------------- an entry


def _locate(path: Path, file: memoryview, end: int, central: _Central) -> Entry:
    """Find the bytes of an entry, which end before the directory; its own header must say what the directory says."""
    raw_name, name, flags, method, crc, stored, size, header = central
    refused = functools.partial(refuse, path, tensor=name)
    if flags & _UNREADABLE_FLAGS:
        raise refused("an encrypted entry", "one that can be read without a password")
    if method not in (_STORED, _DEFLATED):
        raise refused(f"an entry compressed by method {method}", "one that is stored as it is, or deflated")
    begin = header + _LOCAL.size
    if begin > end:
        raise refused(f"an entry that begins at byte {header:,}", f"one before byte {end:,}")
    fields = _LOCAL.unpack_from(file, header)
    magic, own_flags, own_method, own_crc, own_stored, own_size, name_length, extra_length = fields
    texts = file[begin : begin + name_length + extra_length].tobytes()
    begin += name_length + extra_length
    wide: list[int] | None = [own_size, own_stored]
    if _FULL32 in wide:
        wide = _wide_fields(texts[name_length:], wide)
    is_same = magic == MAGIC and own_flags == flags and own_method == method and texts[:name_length] == raw_name
    if wide is None or not is_same:
        raise refused("a header that differs from the directory's", "the same twice: the file is damaged")
    own = (own_crc, *wide)
    if own != (crc, size, stored) and not (flags & _SIZES_FOLLOW_FLAG and own == (0, 0, 0)):
        raise refused("sizes that differ from the directory's", "the same twice: the file is damaged")
    if begin + stored > end:
        got = f"an entry of {stored:,} bytes from byte {begin:,} on"
        raise refused(got, f"one that ends before byte {end:,}: the file is truncated or damaged")
    if method == _STORED and stored != size:
        raise refused(f"{stored:,} bytes that unpack to {size:,}", "as many: it is not compressed")
    return Entry._make((name, method == _DEFLATED, begin, stored, size, crc))  # faster than by its name


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
