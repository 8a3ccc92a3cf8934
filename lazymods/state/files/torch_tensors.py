"""The tensors of PyTorch: those of a file, named by dots and found in it, and those in memory."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lazymods.state.files import torch_pickle
from lazymods.state.files.stored import (
    MAX_RANK,
    Array,
    StoredTensor,
    check_unpacked,
    dtype_named,
    printable,
    refuse,
    small_dtype_named,
)
from lazymods.state.files.torch_calls import Tensor
from lazymods.state.files.torch_objects import ModuleState, Opaque

MAX_NAMES = 100_000_000
"""How many characters the names of all tensors may have together: nested mappings can share their parts."""

_DTYPES = {
    name: dtype
    for name in (
        "float64 float32 float16 bfloat16 int64 int32 int16 int8 uint64 uint32 uint16 uint8 bool complex64 complex128"
        " float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu"
    ).split()
    if (dtype := dtype_named(name)) is not None
}
_NEEDED = "what torch.save writes of a state dict"


class Named(NamedTuple):
    """What a file holds.

    Attributes:
        tensors: The tensors and other values by name.
        roots: Which of the tree's values are mappings that have tensors; none, if the tree is a module.
        ties: Names of tensors that share all of their memory, in groups.
    """

    tensors: dict[str, Any]
    roots: Sequence[str]
    ties: Collection[Sequence[str]]


def named(path: Path, data: Array, tree: Any, places: Mapping[str, int], *, is_swapped: bool) -> Named:
    """Name by dots what a file holds, nested as it may be.

    Args:
        path: The file.
        data: Its bytes.
        tree: What its pickle describes.
        places: Where the bytes of each storage begin, by the storage's key.
        is_swapped: Whether its numbers have their first byte first.

    Raises:
        CheckpointError: If the tree is no mapping, or holds a tensor that has no array.
    """
    if not isinstance(tree, Mapping):
        raise refuse(path, f"a {_called(tree)}", "a state dict: a mapping from names to tensors")
    names = _Names(path, data, places, is_swapped)
    names.add("", tree, 0)
    check_unpacked(path, names.nbytes, len(data))
    is_module = isinstance(tree, ModuleState)
    roots = () if is_module else tuple(str(key) for key, value in tree.items() if names.holds_tensors(value))
    return Named(names.found, roots, names.ties.values())


def _called(value: Any) -> str:
    return "tensor" if isinstance(value, Tensor) else value.what if isinstance(value, Opaque) else type(value).__name__


class _Names:
    """What has been named so far."""

    def __init__(self, path: Path, data: Array, places: Mapping[str, int], is_swapped: bool) -> None:
        self.path, self.data, self.places, self.is_swapped = path, data, places, is_swapped
        self.holding: dict[int, bool] = {}
        self.found: dict[str, Any] = {}
        self.first: dict[Any, str] = {}
        self.ties: dict[str, list[str]] = {}
        self.characters = self.nbytes = 0

    def holds_tensors(self, value: Any, depth: int = 0) -> bool:
        """Say whether a value is a mapping that has a tensor anywhere in it."""
        if not isinstance(value, dict):
            return False
        if depth > torch_pickle.MAX_DEPTH:
            raise refuse(self.path, f"mappings in mappings, over {torch_pickle.MAX_DEPTH} deep", _NEEDED)
        if id(value) not in self.holding:
            self.holding[id(value)] = False  # also for what holds itself
            self.holding[id(value)] = any(
                type(v) is Tensor or self.holds_tensors(v, depth + 1) for v in value.values()
            )
        return self.holding[id(value)]

    def add(self, prefix: str, tree: Mapping[Any, Any], depth: int) -> None:
        for key, value in tree.items():
            name = f"{prefix}{key}"
            self.characters += len(name)
            if self.characters > MAX_NAMES:
                raise refuse(self.path, f"names of over {MAX_NAMES:,} characters", _NEEDED)
            if isinstance(value, dict) and self.holds_tensors(value, depth + 1):
                self.add(f"{name}.", value, depth + 1)
                continue
            if name in self.found:
                raise refuse(self.path, "two values of this name", "each name once", tensor=name)
            self.found[name] = self.stored(name, value) if type(value) is Tensor else value

    def stored(self, name: str, tensor: Tensor) -> StoredTensor:
        storage, dtype_name, itemsize, offset, layout, is_conjugate, is_negative = tensor
        shape, _, extent, room, is_contiguous = layout
        dtype = _DTYPES.get(dtype_name)
        if dtype is None or (is_negative and dtype.kind in "biu"):
            raise refuse(self.path, f"dtype {dtype_name}", f"one of {', '.join(_DTYPES)}", tensor=name)
        nbytes = room * itemsize
        if len(shape) > MAX_RANK or nbytes > sys.maxsize:
            raise refuse(self.path, f"shape {printable(str(shape))}", "a shape that an array can have", tensor=name)
        begin = self.places[storage.key if storage.root is None else storage.root] + storage.begin
        if extent:
            self.nbytes += nbytes
            begin += offset * itemsize
            first = self.first.setdefault((begin, dtype_name, layout), name)
            if first is not name:
                self.ties.setdefault(first, [first]).append(name)
        if is_contiguous and not (is_conjugate or is_negative or self.is_swapped):
            return StoredTensor(name, shape, dtype, self.path, self.data, begin)
        read = partial(_read, self.data, begin, tensor, dtype, self.is_swapped)
        return StoredTensor(name, shape, dtype, self.path, read)


def _read(data: Array, begin: int, tensor: Tensor, dtype: np.dtype[Any], is_swapped: bool) -> Array:
    """Return the numbers of a tensor: a view of the file, unless they have to be computed from what is there."""
    shape, strides, *_ = tensor.layout
    strides = [step * tensor.itemsize if n > 1 else 0 for n, step in zip(shape, strides, strict=True)]
    kind = dtype
    if is_swapped:  # what numpy has no name for is swapped as integers of its size
        kind = (dtype if small_dtype_named(dtype.name) is None else np.dtype(f"u{dtype.itemsize}")).newbyteorder(">")
    array = np.ndarray(shape, kind, data, begin, strides)
    if is_swapped:
        array = array.astype(kind.newbyteorder("=")).view(dtype)
    array = np.conjugate(array) if tensor.is_conjugate and dtype.kind == "c" else array
    array = np.negative(array) if tensor.is_negative else array
    array.flags.writeable = False
    return array


# ---------------------------------------------------------------- in memory


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
