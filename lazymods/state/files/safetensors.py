"""safetensors: a length, a JSON header, and the bytes of every tensor without holes between them.

The header is checked against the file, by the rules of the safetensors library, before anything is made of it. The
file is mapped: reading a tensor copies nothing.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from lazymods._errors import CheckpointError
from lazymods._initial.stacking import Shape
from lazymods.state.files.json_text import read_json, read_texts
from lazymods.state.files.stored import (
    WEAK,
    Array,
    Checkpoint,
    StoredTensor,
    byte_count,
    known_as,
    map_file,
    possible,
    printable,
    refuse,
    will_need,
)

MAX_HEADER_BYTES = 100_000_000
"""The longest header that is read, as in the safetensors library; raise it for files of over a million tensors."""

DTYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    **{f"{'U' if u else 'I'}{8 * n}": np.dtype(f"{'u' if u else ''}int{8 * n}") for n in (1, 2, 4, 8) for u in (0, 1)},
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
    "C64": np.dtype(np.complex64),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "F8_E4M3FNUZ": np.dtype(ml_dtypes.float8_e4m3fnuz),
    "F8_E5M2FNUZ": np.dtype(ml_dtypes.float8_e5m2fnuz),
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
METADATA = "__metadata__"


def open_safetensors(path: Path) -> Checkpoint:
    """Open a file and check all of its header.

    Raises:
        CheckpointError: If the file is not what its header says, or no safetensors file.
    """
    data = map_file(path)
    tensors, start = _read_header(path, data)  # first of entries, then of what these say: there may be a million
    metadata = _metadata(path, tensors.pop(METADATA, None))
    length = len(data) - start
    for name, entry in tensors.items():
        begin, _, shape, dtype = _check_entry(path, name, entry, length)
        tensors[name] = StoredTensor(name, shape, dtype, path, data, start + begin)
    _check_spans(path, tensors, start, length)
    aliases = {alias: kept for alias, kept in metadata.items() if kept in tensors and alias not in tensors}
    return Checkpoint(path, "safetensors", tensors, aliases, _weak(path, metadata), metadata)


def looks_like_safetensors(head: bytes) -> bool:
    """Say whether a file begins with a length and a JSON object.

    To be asked before whether it is something else: lengths such as 640 begin like a pickle.
    """
    return head[4:9] == b"\0\0\0\0{"


# ---------------------------------------------------------------- header


def _read_header(path: Path, data: Array) -> tuple[dict[str, Any], int]:
    size = len(data)
    will_need(data, 0, min(size, 512))
    head = data[:512].tobytes()
    known = None if looks_like_safetensors(head) else known_as(head)
    if size < 8 or known is not None:
        what = known or ("an empty file, 0 bytes" if size == 0 else f"{size} bytes")
        raise refuse(path, what, "a safetensors file: 8 bytes of length, a JSON header, the tensors")
    (length,) = struct.unpack("<Q", head[:8])
    if length > size - 8 or length > MAX_HEADER_BYTES:
        limit = f"at most {MAX_HEADER_BYTES:,} bytes of header" if length <= size - 8 else "a header inside the file"
        got = f"a header of {length:,} bytes by its first 8 bytes, in a file of {size:,} bytes"
        raise refuse(path, got, f"{limit}: the file is truncated, or no safetensors file")
    will_need(data, 8, 8 + length)
    begin = data[8 : 8 + min(length, 20)].tobytes()
    if not begin.startswith(b"{"):
        raise refuse(path, f"a header {printable(repr(begin))}", "a JSON object of tensors, from its first byte on")
    header = read_json(path, data[8 : 8 + length].tobytes(), "a header", short=_short)
    if not isinstance(header, dict):
        raise refuse(path, "a header that is a tensor's entry", "a JSON object of such entries, by name")
    return header, 8 + length


def _metadata(path: Path, metadata: Any) -> dict[str, str]:
    if metadata is None:
        return {}
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise refuse(path, f"the metadata {printable(repr(metadata))}", "an object of texts", tensor=METADATA)
    return metadata


def _weak(path: Path, metadata: Mapping[str, str]) -> Collection[str]:
    """Return the names of the tensors of weak type, which :func:`lazymods.save` notes in the metadata."""
    return read_texts(path, metadata[WEAK].encode(), WEAK).keys() if WEAK in metadata else ()


def _short(entry: dict[str, Any]) -> Any:
    """Return the four parts of an entry that has them as a tuple, which JSON has none of; anything else as it is."""
    if "data_offsets" not in entry or "shape" not in entry or "dtype" not in entry:
        return entry
    kind, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(kind, str) or kind not in DTYPES or not _whole_numbers(shape) or not _whole_numbers(offsets):
        return entry
    return (*offsets, tuple(shape), DTYPES[kind]) if len(offsets) == 2 else entry


def _check_entry(path: Path, name: str, entry: Any, length: int) -> tuple[int, int, Shape, np.dtype[Any]]:
    """Return where a tensor begins and ends among the data, its shape and its dtype."""
    if type(entry) is not tuple:
        raise _no_entry(path, name, entry)
    begin, end, shape, dtype = entry
    if not begin <= end <= length:
        got = f"bytes {begin} to {end}"
        needed = f"bytes inside the file's {length:,} of data: it is truncated, or its header is wrong"
        raise refuse(path, got, needed, tensor=name)
    if not possible(shape, dtype):
        got = f"shape {printable(repr(list(shape)))}"
        raise refuse(path, got, "a shape that an array can have", tensor=name)
    wanted = byte_count(shape, dtype)
    if wanted != end - begin:
        needed = f"{wanted:,} bytes for {NAMES[dtype]}{list(shape)}"
        raise refuse(path, f"{end - begin:,} bytes", needed, tensor=name)
    return entry


def _no_entry(path: Path, name: str, entry: Any) -> CheckpointError:
    """Say what is wrong with what stands for a tensor."""
    if not isinstance(entry, dict) or not entry.keys() >= {"dtype", "shape", "data_offsets"}:
        got, needed = f"the entry {printable(repr(entry))}", "an object with dtype, shape and data_offsets"
    elif not isinstance(entry["dtype"], str) or entry["dtype"] not in DTYPES:
        got = f"dtype {printable(repr(entry['dtype']))}"
        needed = f"a dtype that JAX has an array for: {', '.join(DTYPES)}"
    elif not _whole_numbers(entry["shape"]):
        got, needed = f"shape {printable(repr(entry['shape']))}", "a list of whole numbers"
    else:
        got, needed = f"data_offsets {printable(repr(entry['data_offsets']))}", "two whole numbers, begin and end"
    return refuse(path, got, needed, tensor=name)


def _whole_numbers(value: Any) -> bool:
    return isinstance(value, list) and all([type(d) is int and d >= 0 for d in value])


def _check_spans(path: Path, tensors: Mapping[str, StoredTensor], start: int, length: int) -> None:
    """Refuse tensors that overlap or leave holes, by where each begins and ends among the data."""
    begins = np.fromiter((tensor.begin - start for tensor in tensors.values()), np.int64, len(tensors))
    ends = begins + np.fromiter((tensor.nbytes for tensor in tensors.values()), np.int64, len(tensors))
    order = np.lexsort((ends, begins))
    positions = np.concatenate([[0], ends[order]])  # where one ends the next one begins
    for i in np.flatnonzero(begins[order] != positions[:-1])[:1]:
        begin, end = int(begins[order[i]]), int(ends[order[i]])
        what = "overlap those of another tensor" if begin < positions[i] else "leave a hole before them"
        got = f"bytes {begin:,} to {end:,}, which {what}"
        raise refuse(path, got, "tensors one after the other", tensor=list(tensors)[order[i]])
    if positions[-1] != length:
        got = f"{length:,} bytes of data where the header describes {positions[-1]:,}"
        raise refuse(path, got, "no bytes but the tensors': the file is incomplete or has a tail")
