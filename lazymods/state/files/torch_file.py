"""PyTorch files, zip archives or the older streams, through PyTorch's ``weights_only`` loader.

lazymods runs no pickle, and there is no way back to the loader that does. Before PyTorch gets to see a file, its pickle
is followed without being run (:mod:`lazymods.state.files.torch_pickle`) and every storage that it declares is looked up
in the file: PyTorch itself takes what is too short, and reads past its end.
"""

from __future__ import annotations

import tarfile
import warnings
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from lazymods._errors import one_line
from lazymods.state.files import archive, torch_names, torch_pickle
from lazymods.state.files.stored import (
    Array,
    Checkpoint,
    StoredTensor,
    check_unpacked,
    dtype_named,
    known_as,
    map_file,
    possible,
    printable,
    refuse,
    small_dtype_named,
)

SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".pth.tar", ".pt.tar")
"""The names under which a pickle is opened at all."""

WRAPPERS = ("state_dict", "model_state_dict", "model", "module", "params_ema", "params")
"""Where training scripts put the state dict in a file that holds more."""

MAX_NAMES = 100_000_000
"""How many characters the names of all tensors may have together: nested mappings can share their parts."""

_STREAM_MAGIC = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # the pickle of a number, the first of five
_PICKLES = tuple(b"\x80" + bytes([version]) for version in range(2, 6))
_DTYPES = (
    "float64 float32 float16 bfloat16 int64 int32 int16 int8 uint64 uint32 uint16 uint8 bool complex64 complex128"
    " float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu"
).split()
_NEEDED = "what torch.save writes of a state dict"


def has_torch_name(path: Path) -> bool:
    """Say whether a file has a name that PyTorch files have."""
    return path.name.endswith(SUFFIXES)


def is_pickle(head: bytes) -> bool:
    """Say whether a file that begins like this is a pickle of a protocol from 2 on."""
    return head.startswith(_PICKLES)


def open_torch(path: Path) -> Checkpoint:
    """Open a PyTorch file.

    Raises:
        CheckpointError: If it is none, is damaged, holds anything but tensors and plain values, or holds a tensor of a
            kind that has no array: sparse, quantized, nested, without values.
        ImportError: If it may be one and torch is not installed.
    """
    data = map_file(path)
    head = data[:512].tobytes()
    is_zip = head.startswith((archive.MAGIC, archive.EMPTY_MAGIC))
    entries = _read_archive(path, data) if is_zip else {}
    if not is_zip:
        _refuse_other_files(path, head)
    torch = _import_torch(path)
    trusted = _trusted_names(torch)
    tree = _check_archive(path, data, entries, trusted) if is_zip else _check_stream(path, data, trusted)
    for name, what in torch_pickle.refused_tensors(tree):
        raise refuse(
            path, what, "an ordinary tensor with values", tensor=name, write="tensor.dequantize() or .to_dense()"
        )
    loaded = _load(torch, path, is_mapped=is_zip)
    tensors = _Flattened(path, torch).run(loaded)

    def check_sums() -> None:  # reads the directory anew: kept, it would be a third of what an opened file takes
        archive.check_sums(path, data, _read_archive(path, data).values() if is_zip else ())

    return Checkpoint(path, "PyTorch", tensors, check_sums=check_sums)


def _import_torch(path: Path) -> Any:
    try:
        import torch
    except ImportError as error:
        raise ImportError(f"{path.name} is a PyTorch file, which needs torch: pip install lazymods[torch]") from error
    return torch


def _trusted_names(torch: Any) -> set[str]:
    """Return the names of what the user has told PyTorch to trust; nested tensors have no array all the same."""
    pairs = [item if isinstance(item, tuple) else (item, "") for item in torch.serialization.get_safe_globals()]
    names = {name or f"{item.__module__}.{item.__qualname__}" for item, name in pairs}
    return {name for name in names if not name.startswith("torch.nested.")}


def _load(torch: Any, path: Path, *, is_mapped: bool) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of old protocols and of storages that PyTorch is about to rename
            return torch.load(path, map_location="cpu", weights_only=True, mmap=is_mapped)
    except MemoryError:
        raise
    except Exception as error:  # an OSError too: PyTorch raises it for what a file holds
        got = printable(one_line(error), 300) or type(error).__name__
        raise refuse(path, f"a file that PyTorch does not load ({got})", _NEEDED) from error


# ---------------------------------------------------------------- zip archives


def _read_archive(path: Path, data: Array) -> dict[str, archive.Entry]:
    """Return the entries of a PyTorch archive by their names in its one folder."""
    entries = archive.read_directory(path, data)
    # PyTorch takes the first entry's folder for the archive's, and compares names without regard to case
    folder = next(iter(entries), "").partition("/")[0]
    inside: dict[str, archive.Entry] = {}
    for name, entry in entries.items():
        key = name.removeprefix(f"{folder}/")
        if key == name:
            raise refuse(path, f"an entry outside the folder {printable(folder)}", "one folder", tensor=name)
        if entry.compressed:
            raise refuse(path, "a compressed entry", "entries as torch.save writes them, not compressed", tensor=name)
        inside[key] = entry
    if len({name.lower() for name in entries}) != len(entries):
        raise refuse(path, "entries whose names differ in their case only", "each name once")
    if "constants.pkl" in inside:
        raise refuse(
            path, "a TorchScript archive, which holds a program", _NEEDED, write="torch.save(m.state_dict(), path)"
        )
    if "data.pkl" not in inside:
        raise refuse(path, "a zip archive without a data.pkl", _NEEDED)
    return inside


def _check_archive(path: Path, data: Array, entries: Mapping[str, archive.Entry], trusted: Collection[str]) -> Any:
    pickle = entries["data.pkl"]
    order = entries.get("byteorder")
    if order is not None and archive.read_entry(path, data, order).tobytes() not in (b"little", b"big"):
        raise refuse(path, "a byte order that is none", "little or big")
    walked = _walk(path, data[pickle.begin : pickle.begin + pickle.size], 0, trusted)
    for storage in walked.storages.values():
        record = entries.get(f"data/{storage.key}")
        if record is None:
            raise refuse(path, f"no entry data/{printable(storage.key)}", "every storage that data.pkl declares")
        if record.size < storage.nbytes:
            got = f"{record.size:,} bytes in data/{printable(storage.key)}"
            raise refuse(path, got, f"{storage.nbytes:,}, as data.pkl declares: the file is damaged")
    return walked.value


def _walk(path: Path, data: Array, begin: int, trusted: Collection[str]) -> torch_pickle.Pickle:
    try:
        walked = torch_pickle.walk(data, begin, allowed=trusted)
        torch_names.check_names(walked.value, walked.end - begin)
        return walked
    except torch_pickle.Malformed as error:
        write = "safetensors.torch.save_file(model.state_dict(), path), where the file comes from"
        raise refuse(path, error.got, error.needed, write=write) from error


# ---------------------------------------------------------------- streams


def _refuse_other_files(path: Path, head: bytes) -> None:
    if head.startswith(_STREAM_MAGIC) and not _is_tar(head):
        return
    if _is_tar(head):
        got = "a tar archive, as PyTorch wrote before 0.1.10"
    elif is_pickle(head):
        got = "a pickle that torch.save did not write, and that is not run"
    else:
        got = known_as(head) or ("a file that is none of PyTorch's" if head else "an empty file, 0 bytes")
    raise refuse(path, got, _NEEDED)


def _is_tar(head: bytes) -> bool:
    """Say whether PyTorch would take a file for a tar archive, whatever else it may be."""
    try:
        tarfile.TarInfo.frombuf(head.ljust(tarfile.BLOCKSIZE, b"\0"), "utf-8", "surrogateescape")
    except tarfile.TarError:
        return False
    return True


def _check_stream(path: Path, data: Array, trusted: Collection[str]) -> Any:
    """Check an older file: a number, a version, the writer's system, the tree, the keys, then the storages by key."""
    position = 0
    for _ in range(3):
        position = _walk(path, data, position, ()).end
    walked = _walk(path, data, position, trusted)
    keys = _walk(path, data, walked.end, ())
    storages = {key: storage for key, storage in walked.storages.items() if not storage.is_view}
    listed = keys.value
    if (
        not isinstance(listed, list)
        or not all(isinstance(key, str) for key in listed)
        or len(set(listed)) != len(listed)
    ):
        raise refuse(path, "a list of storages that is none", _NEEDED)
    if set(listed) != set(storages):
        raise refuse(path, "storages that are declared and not stored, or stored and not declared", _NEEDED)
    position = keys.end
    for key in listed:
        numel = int.from_bytes(data[position : position + 8].tobytes(), "little", signed=True)
        if numel != storages[key].numel or position + 8 > len(data):
            got = f"{numel:,} elements of storage {printable(key)}"
            raise refuse(
                path, got, f"{storages[key].numel:,}, as the pickle declares: the file is truncated or damaged"
            )
        position += 8 + storages[key].nbytes
        if position > len(data):
            got = f"{len(data):,} bytes, which end inside storage {printable(key)}"
            raise refuse(path, got, f"at least {position:,}: the file is truncated")
    return walked.value


# ---------------------------------------------------------------- tensors


class _Flattened:
    """Names by dots what a file holds, nested as it may be."""

    def __init__(self, path: Path, torch: Any) -> None:
        self.path, self.torch = path, torch
        self.holding: dict[int, bool] = {}
        self.tensors: dict[str, Any] = {}
        self.characters = 0

    def run(self, tree: Any) -> dict[str, Any]:
        if not isinstance(tree, Mapping):
            raise refuse(self.path, f"a {type(tree).__name__}", "a state dict: a mapping from names to tensors")
        if not any(isinstance(value, self.torch.Tensor) for value in tree.values()):
            tree = next((tree[key] for key in WRAPPERS if self.holds_tensors(tree.get(key))), tree)
        self.add("", tree, 0)
        expanded = [t for t in self.tensors.values() if isinstance(t, StoredTensor)]
        check_unpacked(self.path, sum(t.nbytes for t in expanded), self.path.stat().st_size)
        return self.tensors

    def holds_tensors(self, value: Any, depth: int = 0) -> bool:
        """Say whether a value is a mapping that has a tensor anywhere in it."""
        if not isinstance(value, Mapping):
            return False
        if depth > torch_pickle.MAX_DEPTH:
            raise refuse(self.path, f"mappings in mappings, over {torch_pickle.MAX_DEPTH} deep", _NEEDED)
        if id(value) not in self.holding:
            self.holding[id(value)] = False  # also for what holds itself
            self.holding[id(value)] = any(
                isinstance(v, self.torch.Tensor) or self.holds_tensors(v, depth + 1) for v in value.values()
            )
        return self.holding[id(value)]

    def add(self, prefix: str, tree: Mapping[Any, Any], depth: int) -> None:
        for key, value in tree.items():
            name = f"{prefix}{key}"
            self.characters += len(name)
            if self.characters > MAX_NAMES:
                raise refuse(self.path, f"names of over {MAX_NAMES:,} characters", _NEEDED)
            if self.holds_tensors(value, depth + 1):
                self.add(f"{name}.", value, depth + 1)
                continue
            if name in self.tensors:
                raise refuse(self.path, "two values of this name", "each name once", tensor=name)
            self.tensors[name] = self.stored(name, value) if isinstance(value, self.torch.Tensor) else value

    def stored(self, name: str, tensor: Any) -> StoredTensor:
        torch = self.torch
        what = _other_kind(torch, tensor)
        if what is not None:
            raise refuse(self.path, f"a tensor of the kind {what}", "an ordinary tensor with values", tensor=name)
        kind = str(tensor.dtype).removeprefix("torch.")
        dtype = dtype_named(kind) if kind in _DTYPES else None
        if dtype is None:
            raise refuse(self.path, f"dtype {kind}", f"one of {', '.join(_DTYPES)}", tensor=name)
        if not possible(tuple(tensor.shape), dtype):
            got = f"shape {printable(str(tuple(tensor.shape)))}"
            raise refuse(self.path, got, "a shape that an array can have", tensor=name)
        return StoredTensor(name, tuple(tensor.shape), dtype, self.path, partial(_as_array, torch, tensor, dtype))


def array_of(tensor: Any) -> Array | None:
    """Return the numbers of a tensor in memory, also one that has a gradient; None if JAX has no such array."""
    import torch

    dtype = dtype_named(str(tensor.dtype).removeprefix("torch."))
    if _other_kind(torch, tensor) is not None or dtype is None:
        return None
    return _as_array(torch, tensor.contiguous(), dtype)


def _other_kind(torch: Any, tensor: Any) -> str | None:
    """Name the kind of a tensor that is no array of numbers in memory."""
    if tensor.layout is not torch.strided:
        return str(tensor.layout)
    return "quantized" if tensor.is_quantized else "nested" if tensor.is_nested else "meta" if tensor.is_meta else None


def _as_array(torch: Any, tensor: Any, dtype: np.dtype[Any]) -> Array:
    """Return a tensor's memory as an array; a conjugated or negated view is the only kind that is computed."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if small_dtype_named(dtype.name) is None:
        array = tensor.numpy()
    else:  # what numpy has no name for goes as integers of its size
        array = tensor.view({1: torch.uint8, 2: torch.int16}[dtype.itemsize]).numpy().view(dtype)
    array.flags.writeable = False
    return array
