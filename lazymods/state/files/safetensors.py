"""safetensors: a length, a JSON header, and the bytes of every tensor without holes between them.

The header is checked against the file, by the rules of the safetensors library, before anything is made of it. The
file is mapped: reading a tensor copies nothing.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from lazymods._errors import CheckpointError
from lazymods._recipe import Shape
from lazymods.state.files.stored import (
    Array,
    Checkpoint,
    StoredTensor,
    byte_count,
    known_as,
    map_file,
    possible,
    printable,
    read_json,
    refuse,
    view,
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


class _Span(NamedTuple):
    begin: int
    end: int
    shape: Shape
    dtype: np.dtype[Any]


def open_safetensors(path: Path) -> Checkpoint:
    """Open a file and check all of its header.

    Raises:
        CheckpointError: If the file is not what its header says, or no safetensors file.
    """
    data = map_file(path)
    header, start = _read_header(path, data)
    metadata = _metadata(path, header.pop(METADATA, None))
    spans = {name: _check_entry(path, name, entry, len(data) - start) for name, entry in header.items()}
    _check_spans(path, spans, len(data) - start)
    tensors = {name: _tensor(path, data, start, name, span) for name, span in spans.items()}
    aliases = {alias: kept for alias, kept in metadata.items() if kept in tensors and alias not in tensors}
    return Checkpoint(path, "safetensors", tensors, aliases, metadata)


def looks_like_safetensors(head: bytes) -> bool:
    """Say whether a file begins with a length and a JSON object.

    To be asked before whether it is something else: lengths such as 640 begin like a pickle.
    """
    return head[4:9] == b"\0\0\0\0{"


def _tensor(path: Path, data: Array, start: int, name: str, span: _Span) -> StoredTensor:
    read = partial(view, data, start + span.begin, span.shape, span.dtype)  # files have a million: half of a closure
    return StoredTensor(name, span.shape, span.dtype, path, read)


# ---------------------------------------------------------------- header


def _read_header(path: Path, data: Array) -> tuple[dict[str, Any], int]:
    size = len(data)
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
    raw = data[8 : 8 + length].tobytes()
    if not raw.startswith(b"{"):
        raise refuse(path, f"a header {printable(repr(raw[:20]))}", "a JSON object of tensors, from its first byte on")
    return read_json(path, raw, "a header"), 8 + length


def _metadata(path: Path, metadata: Any) -> dict[str, str]:
    if metadata is None:
        return {}
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise refuse(path, f"the metadata {printable(repr(metadata))}", "an object of texts", tensor=METADATA)
    return metadata


def _check_entry(path: Path, name: str, entry: Any, length: int) -> _Span:
    def wrong(got: str, needed: str) -> CheckpointError:
        return refuse(path, got, needed, tensor=name)

    if not isinstance(entry, dict) or not ("dtype" in entry and "shape" in entry and "data_offsets" in entry):
        raise wrong(f"the entry {printable(repr(entry))}", "an object with dtype, shape and data_offsets")
    kind, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(kind, str) or kind not in DTYPES:
        raise wrong(f"dtype {printable(repr(kind))}", f"a dtype that JAX has an array for: {', '.join(DTYPES)}")
    if not _whole_numbers(shape):
        raise wrong(f"shape {printable(repr(shape))}", "a list of whole numbers")
    if not _whole_numbers(offsets) or len(offsets) != 2:
        raise wrong(f"data_offsets {printable(repr(offsets))}", "two whole numbers, begin and end")
    begin, end = offsets
    if not begin <= end <= length:
        got = f"bytes {begin} to {end}"
        raise wrong(got, f"bytes inside the file's {length:,} of data: it is truncated, or its header is wrong")
    lengths, dtype = tuple(shape), DTYPES[kind]
    if not possible(lengths, dtype):
        raise wrong(f"shape {printable(repr(shape))}", "a shape that an array can have")
    wanted = byte_count(lengths, dtype)
    if wanted != end - begin:
        raise wrong(f"{end - begin:,} bytes", f"{wanted:,} bytes for {kind}{shape}")
    return _Span(begin, end, lengths, dtype)


def _whole_numbers(value: Any) -> bool:
    return isinstance(value, list) and all([type(d) is int and d >= 0 for d in value])


def _check_spans(path: Path, spans: Mapping[str, _Span], length: int) -> None:
    position = 0
    for name, span in sorted(spans.items(), key=lambda item: item[1][:2]):
        if span.begin != position:
            what = "overlap those of another tensor" if span.begin < position else "leave a hole before them"
            got = f"bytes {span.begin:,} to {span.end:,}, which {what}"
            raise refuse(path, got, "tensors one after the other", tensor=name)
        position = span.end
    if position != length:
        got = f"{length:,} bytes of data where the header describes {position:,}"
        raise refuse(path, got, "no bytes but the tensors': the file is incomplete or has a tail")
