"""What the tests of all formats need: reading everything, refusals, archives written byte by byte."""

import io
import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lazymods as lm
from lazymods.state.files.opening import open_checkpoint
from lazymods.state.files.stored import StoredTensor


def values(path: Path) -> dict[str, Any]:
    """Open a checkpoint and read it all; check what every format promises."""
    checkpoint = open_checkpoint(path)
    checkpoint.check_unpacked(checkpoint.tensors.values())
    out = {}
    for name, tensor in checkpoint.tensors.items():
        if isinstance(tensor, StoredTensor):
            value = tensor.read()
            assert (value.shape, value.dtype) == (tensor.shape, tensor.dtype)
            assert value.nbytes == tensor.nbytes
            assert not value.flags.writeable
            tensor = value
        out[name] = tensor
    return out


def assert_same(got: dict[str, Any], want: dict[str, np.ndarray]) -> None:
    """Names in order, shapes, dtypes and bits."""
    assert list(got) == list(want)
    for name, value in want.items():
        assert got[name].shape == value.shape, name
        assert got[name].dtype == value.dtype, name
        assert got[name].tobytes() == value.tobytes(), name


def refusal(path: Path, *words: str, named: str | None = None) -> str:
    """Opening or reading the checkpoint is refused, with the file's name and these words. Returns the message."""
    with pytest.raises(lm.CheckpointError) as caught:
        values(path)
    message = str(caught.value)
    assert (named or path.name) in message
    for word in words:
        assert word in message, message
    return message


def is_mapped(value: np.ndarray) -> bool:
    """Whether an array is a view of memory that a file is mapped to."""
    address = value.__array_interface__["data"][0]
    with open("/proc/self/maps") as file:
        for line in file:
            span, *_, name = line.split(maxsplit=5) if line.count("/") else (line.split()[0], "")
            begin, end = (int(part, 16) for part in span.split("-"))
            if begin <= address < end:
                return "/" in name
    return False


def npy(value: Any, **options: Any) -> bytes:
    out = io.BytesIO()
    np.save(out, value, **options)
    return out.getvalue()


def npy_with_header(header: str, data: bytes, version: tuple[int, int] = (1, 0)) -> bytes:
    raw = header.encode()
    raw += b" " * (-(len(raw) + 11) % 64) + b"\n"
    return b"\x93NUMPY" + bytes(version) + struct.pack("<H" if version[0] == 1 else "<I", len(raw)) + raw + data


def zipped(path: Path, entries: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> Path:
    """An archive with these entries, written by zipfile."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in entries.items():
            archive.writestr(zipfile.ZipInfo(name), data, method)
    return path


def patched(path: Path, old: bytes, new: bytes, *, last: bool = False) -> Path:
    """Replace the first, or last, occurrence of some bytes in a file by as many."""
    raw = path.read_bytes()
    at = raw.rindex(old) if last else raw.index(old)
    assert len(old) == len(new)
    path.write_bytes(raw[:at] + new + raw[at + len(old) :])
    return path


def archive_of(**entries: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, raw in entries.items():
            archive.writestr(name.replace("__", "/").replace("_pkl", ".pkl"), raw)
    return out.getvalue()


def stream_of(*pickles: bytes) -> bytes:
    head = (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True})
    return b"".join([*(pickle.dumps(value, 2) for value in head), *pickles])
