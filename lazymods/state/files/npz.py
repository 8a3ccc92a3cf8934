"""npz: a zip archive of npy files, each a header and the values of one array.

Every header is checked against its entry before anything is made of it; no pickle is read. Arrays that are stored as
they are (``numpy.savez``) are views of the mapped file. Their CRC is computed where a load copies them, and not where
they can stay mapped: aligned ones in C order; ``python -m lazymods check`` computes all of them. Compressed ones are
unpacked when they are read, checked by their CRC, and never to more than the archive's directory says.

numpy knows no name for bfloat16 and the other dtypes of ml_dtypes. :func:`lazymods.save` stores their bytes as they
are, under a dtype such as ``|V2``, and an entry ``__dtypes__``: the bytes of a JSON object
from tensor to dtype. ``__aliases__`` is another one, from further names of a tensor to the name that holds its values.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from lazymods._initial.stacking import Shape
from lazymods._memory import ALIGNMENT
from lazymods.state.files.archive import Entry, check_sum, check_sums, read_directory, read_entry, unpacked
from lazymods.state.files.json_text import read_texts
from lazymods.state.files.stored import (
    ALIASES,
    DTYPES,
    WEAK,
    Array,
    Checkpoint,
    Index,
    StoredTensor,
    byte_count,
    check_unpacked,
    map_file,
    possible,
    printable,
    refuse,
    small_dtype_named,
    view,
)

MAX_HEADER_BYTES = 10_000
"""The longest npy header that is read, as in numpy."""

_USUAL_HEADER_BYTES = 128  # up to here numpy writes one
_SUFFIX = ".npy"
_MAGIC = b"\x93NUMPY"
_READABLE = re.compile(r"[<>|=]?(?:b1|\?|[iu][1248]|f[248]|c8|c16)")
_VOID = re.compile(r"[|<]V(\d{1,3})|<f(1)")  # | for raw bytes, < for a dtype that numpy has no name for
_NAMED = {"<f1": "float8_e5m2"}  # the only dtype of ml_dtypes that says so much of itself

_STRING = r"'[^'\\]*'|\"[^\"\\]*\""
_TUPLE = r"\((?:\s*\d{1,19}L?\s*,)*(?:\s*\d{1,19}L?)?\s*\)"  # Python 2 wrote an L after its long integers
_PAIR = rf"['\"](descr|fortran_order|shape)['\"]\s*:\s*({_STRING}|True|False|{_TUPLE})"
_HEADER = re.compile(rf"\{{\s*{_PAIR}\s*,\s*{_PAIR}\s*,\s*{_PAIR}\s*,?\s*\}}\s*")
_STRUCTURED = re.compile(r"['\"]descr['\"]\s*:\s*[\[(]")


class _Header(NamedTuple):
    """What the header of an entry says.

    Attributes:
        descr: The dtype, as numpy writes it.
        order: The order of the axes.
        shape: The lengths of the axes.
        begin: Where the values begin in the entry.
        dtype: The dtype, if it is one of numpy's numbers and there can be an array of that shape.
        nbytes: How many bytes the array has then.
    """

    descr: str
    order: Literal["C", "F"]
    shape: Shape
    begin: int
    dtype: np.dtype[Any] | None
    nbytes: int


def open_npz(path: Path) -> Checkpoint:
    """Open an archive and check its directory and every header.

    Raises:
        CheckpointError: If the file is no archive, is damaged, or holds something that is no array of numbers.
    """
    data = map_file(path)
    entries = {name: entry for name, entry in read_directory(path, data).items() if not name.endswith("/")}
    notes = [entries[name] for key in (DTYPES, ALIASES, WEAK) if (name := f"{key}{_SUFFIX}") in entries]
    check_unpacked(path, sum(e.size for e in notes), len(data))
    headers = {_tensor_name(path, name): (_read_header(path, data, e), e) for name, e in entries.items()}
    texts = {key: _read_texts(path, data, key, *headers.pop(key)) for key in (DTYPES, ALIASES, WEAK) if key in headers}
    dtypes = texts.get(DTYPES, {})
    for name in dtypes:
        if name not in headers:
            raise refuse(path, f"no such entry, though {DTYPES} names it", "an entry of that name", tensor=name)
    tensors = {
        name: _tensor(path, data, name, header, entry, dtypes.get(name)) for name, (header, entry) in headers.items()
    }
    aliases = texts.get(ALIASES, {})
    for alias, kept in aliases.items():
        if kept not in tensors or alias in tensors:
            raise refuse(path, f"another name for {printable(kept)}", "another name for one tensor", tensor=alias)
    weak = texts.get(WEAK, {}).keys()
    packed_in = len(data) if any(e.compressed for e in entries.values()) else None

    def check() -> None:  # reads the directory anew: kept, it would be half of what an opened file takes
        check_sums(path, data, read_directory(path, data).values())

    return Checkpoint(path, "npz", tensors, aliases, weak, check_sums=check, packed_in=packed_in)


def _tensor_name(path: Path, name: str) -> str:
    if not name.endswith(_SUFFIX):
        raise refuse(path, "an entry that is no npy file", "entries whose names end with .npy", tensor=name)
    return name[: -len(_SUFFIX)]


def _tensor(path: Path, data: Array, name: str, header: _Header, entry: Entry, stored_as: str | None) -> StoredTensor:
    dtype, wanted = header.dtype, header.nbytes
    if dtype is None or stored_as is not None:
        dtype = _dtype(path, name, header, stored_as)
        if not possible(header.shape, dtype):
            raise refuse(path, f"shape {printable(str(header.shape))}", "a shape that an array can have", tensor=name)
        wanted = byte_count(header.shape, dtype)
    if entry.size - header.begin != wanted:
        got = f"{entry.size - header.begin:,} bytes"
        raise refuse(path, got, f"{wanted:,} bytes for {dtype.name}{list(header.shape)}", tensor=name)
    begin = entry.begin + header.begin  # a map begins where a page does
    if not entry.compressed and begin % ALIGNMENT == 0 and dtype.isnative and header.order == "C":
        return StoredTensor(name, header.shape, dtype, path, data, begin)
    native = dtype if dtype.isnative else dtype.newbyteorder("=")
    kind = _Packed if entry.compressed else _Unaligned
    return StoredTensor(name, header.shape, native, path, kind(path, data, entry, header, dtype))


class _Copied(NamedTuple):
    """The values of an entry that JAX can't take over as it lies in the file."""

    path: Path
    data: Array
    entry: Entry
    header: _Header
    dtype: np.dtype[Any]

    def __call__(self) -> Array:
        """Return all of them."""
        raw = read_entry(self.path, self.data, self.entry)
        array = _native(view(raw, self.header.begin, self.header.shape, self.dtype, self.header.order))
        array.flags.writeable = False
        return array


class _Packed(_Copied):
    """Those of an entry that is compressed."""

    def pieces(self) -> Iterator[Array]:
        """Return their bytes, or booleans, part by part, so that it takes no room to look at all of them."""
        left, dtype = self.header.begin, np.bool_ if self.dtype == np.bool_ else np.uint8
        for part in unpacked(self.path, self.data, self.entry):
            yield np.frombuffer(part, dtype)[left:]
            left = max(0, left - len(part))


class _Unaligned(_Copied):
    """Those of an entry that is stored as it is, but not aligned, or in another order of axes or bytes."""

    def __call__(self) -> Array:
        """Return all of them; they will be copied, so every byte is read anyway, and the CRC is computed."""
        check_sum(self.path, self.data, self.entry)
        return super().__call__()

    def part(self, index: Index) -> Array:
        """Return those at an index, of which there is no CRC."""
        begin = self.entry.begin + self.header.begin
        return _native(view(self.data, begin, self.header.shape, self.dtype, self.header.order)[index])


def _native(array: Array) -> Array:
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


# ---------------------------------------------------------------- headers


def _read_header(path: Path, data: Array, entry: Entry) -> _Header:
    def wrong(got: str, needed: str) -> Exception:
        return refuse(path, got, needed, tensor=entry.name.removesuffix(_SUFFIX))

    head = read_entry(path, data, entry, limit=_USUAL_HEADER_BYTES).tobytes()
    if len(head) < 10 or not head.startswith(_MAGIC):
        raise wrong(f"{len(head):,} bytes that are no npy file", "an npy file")
    major = head[6]
    if major not in (1, 2, 3) or head[7]:
        raise wrong(f"an npy file of version {major}.{head[7]}", "version 1.0, 2.0 or 3.0")
    begin = 10 if major == 1 else 12
    length = int.from_bytes(head[8:begin], "little")
    if _USUAL_HEADER_BYTES < begin + length <= 12 + MAX_HEADER_BYTES:
        head = read_entry(path, data, entry, limit=begin + length).tobytes()
    if length > MAX_HEADER_BYTES or begin + length > len(head):
        limit = f"at most {MAX_HEADER_BYTES:,}" if length > MAX_HEADER_BYTES else "a header inside the entry"
        raise wrong(f"a header of {length:,} bytes in an entry of {entry.size:,}", limit)
    text = head[begin : begin + length].decode("utf-8" if major == 3 else "latin-1", "replace")
    found = _parsed(text, begin + length)
    if isinstance(found, _Header):
        return found
    raise wrong(*found)


@functools.lru_cache(10_000)  # many arrays of a file are alike
def _parsed(text: str, end: int) -> _Header | tuple[str, str]:
    """Return what a header says, or what it is and what was needed."""
    if _STRUCTURED.search(text):
        return "an array of records, a structured dtype", "an array of numbers"
    match = _HEADER.fullmatch(text)
    fields = dict(zip(match.groups()[::2], match.groups()[1::2], strict=True)) if match else {}
    descr, fortran, shape = (fields.get(key, "") for key in ("descr", "fortran_order", "shape"))
    lengths = [int(part.rstrip("L")) for part in re.findall(r"\d+L?", shape)]
    is_tuple = shape.startswith("(") and (len(lengths) != 1 or "," in shape)
    if descr[:1] not in ("'", '"') or fortran not in ("True", "False") or not is_tuple:
        return f"the header {printable(text.strip())}", "one of numpy's, with descr, fortran_order and shape"
    dtype = np.dtype(descr[1:-1]) if _READABLE.fullmatch(descr[1:-1]) else None
    dtype = dtype if dtype is not None and possible(tuple(lengths), dtype) else None
    nbytes = 0 if dtype is None else byte_count(tuple(lengths), dtype)
    return _Header(descr[1:-1], "F" if fortran == "True" else "C", tuple(lengths), end, dtype, nbytes)


def _dtype(path: Path, name: str, header: _Header, stored_as: str | None) -> np.dtype[Any]:
    void = _VOID.fullmatch(header.descr)
    stored_as = stored_as or _NAMED.get(header.descr)
    if stored_as is not None:
        dtype = small_dtype_named(stored_as)
        if void is None or dtype is None or dtype.itemsize != int(void[1] or void[2]):
            got = f"dtype {printable(stored_as)} by {DTYPES}, {header.descr} by its header"
            raise refuse(path, got, "a dtype of ml_dtypes, of as many bytes", tensor=name)
        return dtype
    if void is not None:
        got = f"{void[1]} raw bytes a value, dtype {header.descr}: what numpy.savez makes of bfloat16 and its like"
        needed = "values whose dtype the file names"
        write = "np.savez(path, **{k: v.astype(np.float32) for k, v in arrays.items()})  # or lm.save(model, path)"
        raise refuse(path, got, needed, tensor=name, write=write)
    if not _READABLE.fullmatch(header.descr):
        kinds = {"O": "Python objects, which are pickles and are not read", "U": "texts", "S": "texts"}
        kind = kinds.get(header.descr.lstrip("<>|=")[:1])
        got = f"dtype {printable(header.descr)}{': ' + kind if kind else ''}"
        raise refuse(path, got, "numbers that JAX has an array for", tensor=name)
    return np.dtype(header.descr)


def _read_texts(path: Path, data: Array, key: str, header: _Header, entry: Entry) -> Mapping[str, str]:
    if header.descr not in ("|u1", "<u1") or len(header.shape) != 1 or header.shape[0] != entry.size - header.begin:
        raise refuse(path, f"{header.descr}{list(header.shape)}", "the bytes of a JSON object, |u1", tensor=key)
    return read_texts(path, read_entry(path, data, entry)[header.begin :].tobytes(), key)
