"""What a load takes beside a path: arrays in memory by name, nested or not, and PyTorch's modules.

PyTorch is never imported here: whoever has a module or a tensor of its has imported it.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
from flax import nnx
from jax.core import Tracer

from lazymods._errors import Problem, StateDictError, describe
from lazymods._initial.keys import is_key
from lazymods._refusals import ArgumentError, wrong_argument
from lazymods.state.files.opening import read_checkpoint
from lazymods.state.files.stored import IN_MEMORY, Checkpoint, StoredTensor, dtype_named
from lazymods.state.opened import OpenCheckpoint
from lazymods.state.values import as_array, is_deleted, unwrapped

T = TypeVar("T")

_SOURCE, _NAMES = "lm.load: source", '{"fc1.weight": ..., "fc1.bias": ...}'


def read_source(
    source: Any, read: Callable[[Checkpoint], T], *, as_stored: bool, variant: str | None = None
) -> T:
    """Return what ``read`` makes of a source.

    Args:
        source: A path, what :func:`lazymods.open` gives, a mapping of arrays, or a ``torch.nn.Module``.
        read: What is to be done with it.
        as_stored: Whether arrays of a mapping have to be as a file's are: they will be laid anew.
        variant: As of :func:`lazymods.load`.

    Raises:
        ArgumentError: If it is none of these.
        Exception: What opening the file raises, or ``read``.
    """
    if isinstance(source, (str, bytes, os.PathLike)):
        return read_checkpoint(os.fsdecode(source), read, variant=variant)
    if variant is not None:
        needed = "None: it names files of a folder, and the source is none"
        raise wrong_argument("variant", variant, needed, "lm.load(model, source)")
    if isinstance(source, OpenCheckpoint):
        return source.read(read)
    return read(_in_memory(source, as_stored=as_stored))


def _in_memory(source: Any, *, as_stored: bool) -> Checkpoint:
    torch = sys.modules.get("torch")
    buffers = None
    if torch is not None and isinstance(source, torch.nn.Module):
        buffers = [name for name, _ in source.named_buffers(remove_duplicate=False)]
        title, named = f"the torch module {type(source).__name__}", dict(source.state_dict())
    elif isinstance(source, Mapping):
        title, named = "the mapping", dict(_flattened("", source, ()))
    else:
        needed = "a path, a mapping from names to arrays, or a torch.nn.Module"
        is_model = isinstance(source, nnx.Pytree)
        line = "lm.load_state_dict(model, lm.state_dict(other))" if is_model else "lm.load(model, path)"
        raise wrong_argument("lm.load: source", type(source) if is_model else source, needed, line)
    path = Path(title)
    if torch is not None:
        _check_sized(torch, named)
    ties = _ties(torch, named) if torch is not None else ()
    roots: list[str] = []
    if as_stored:
        named = {name: _stored(name, value, path) for name, value in named.items()}
        parts = [str(key) for key, value in source.items() if isinstance(value, Mapping)] if buffers is None else []
        tensors = [name for name, value in named.items() if isinstance(value, StoredTensor)] if parts else []
        roots = [part for part in parts if any(name.startswith(f"{part}.") for name in tensors)]
    return Checkpoint(path, IN_MEMORY, named, roots=roots, ties=ties, buffers=buffers)


def _check_sized(torch: Any, named: Mapping[str, Any]) -> None:
    """Refuse what a lazy module of PyTorch has no shape of yet."""
    lazy = [name for name, value in named.items() if isinstance(value, torch.nn.parameter.UninitializedTensorMixin)]
    if lazy:
        got = f"{', '.join(lazy[:8])} without a shape"
        needed = "tensors with values: PyTorch's lazy modules have none before their first call"
        raise ArgumentError(Problem(_SOURCE, got, needed, "torch_module(x)  # once, before lm.load"))


def _flattened(prefix: str, mapping: Mapping[Any, Any], above: tuple[int, ...]) -> Iterator[tuple[str, Any]]:
    if id(mapping) in above:
        where = prefix.rstrip(".")
        raise ArgumentError(Problem(_SOURCE, f"a mapping that holds itself, at {where!r}", "names of arrays", _NAMES))
    seen: set[str] = set()
    for key, value in mapping.items():
        if not isinstance(key, (str, int)) or isinstance(key, bool):
            got = f"the name {key!r} of type {type(key).__name__}"
            raise ArgumentError(Problem(_SOURCE, got, "texts or whole numbers for names", _NAMES))
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and not isinstance(value, nnx.Variable):
            below = list(_flattened(f"{name}.", value, (*above, id(mapping))))
        else:
            below = [(name, value)]
        for found, _ in below:
            if found in seen:
                got = f"two entries of the name {found!r}, one of them in a mapping of the mapping"
                raise ArgumentError(Problem(_SOURCE, got, "one entry a name", _NAMES))
            seen.add(found)
        yield from below


def _stored(name: str, value: Any, path: Path) -> Any:
    """Return an array of the memory as if it were in a file; what is no array at all stays as it is."""
    value = unwrapped(value)
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        return value
    if isinstance(value, Tracer):
        needed = "a value: it is laid anew by numpy, outside of any transform"
        line = "lm.load(model, source)  # before the transform; in it, lm.load_state_dict"
        problem = Problem(name, describe(value), needed, line)
        return StoredTensor(name, tuple(value.shape), np.dtype(value.dtype), path, partial(_refuse, problem, path))
    if isinstance(value, jax.Array):
        if is_key(value) or is_deleted(value):
            return value  # the load says what is wrong with it, or takes it
        return StoredTensor(name, tuple(value.shape), np.dtype(value.dtype), path, partial(np.asarray, value))
    array = as_array(value)
    if array is not None:
        array = np.asarray(array)
        return StoredTensor(name, array.shape, array.dtype, path, lambda: array)
    is_quantized = bool(getattr(value, "is_quantized", False))  # PyTorch's own, with its scale
    dtype = np.dtype(np.float32) if is_quantized else dtype_named(str(value.dtype).removeprefix("torch."))
    if dtype is None or isinstance(value, np.ndarray):
        return value
    got = f"{describe(value)}, which has no array of numbers in memory"  # it matters if it is asked for
    problem = Problem(name, got, "an array of numbers", _line_for(name, value))
    return StoredTensor(name, tuple(value.shape), dtype, path, partial(_refuse, problem, path))


def _line_for(name: str, tensor: Any) -> str:
    if getattr(tensor, "is_meta", False):
        return "torch_module.load_state_dict(state, assign=True)  # a tensor on meta has no numbers"
    ready = "dequantize" if getattr(tensor, "is_quantized", False) else "to_dense"
    return f"source[{name!r}] = source[{name!r}].{ready}()"


def _refuse(problem: Problem, path: Path) -> Any:
    raise StateDictError(problem, heading=f"{path} can't be laid anew")


def _ties(torch: Any, named: Mapping[str, Any]) -> Collection[Sequence[str]]:
    """Return the names of PyTorch's tensors that share all of their memory, in groups."""
    groups: dict[Any, list[str]] = {}
    for name, value in named.items():
        if isinstance(value, torch.Tensor) and value.layout is torch.strided and value.numel():
            with contextlib.suppress(RuntimeError):  # one without memory
                key = (value.device, value.data_ptr(), value.dtype, tuple(value.shape), value.stride())
                groups.setdefault(key, []).append(name)
    return [group for group in groups.values() if len(group) > 1 and not _is_nowhere(named[group[0]])]


def _is_nowhere(tensor: Any) -> bool:
    return tensor.is_meta or tensor.data_ptr() == 0
