"""Arrays along a new first axis, and apart again: on a CPU by a copy in host memory, for which nothing is compiled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lazymods import _compat, _memory
from lazymods._errors import describe as _describe
from lazymods._initial.keys import is_key


def describe(value: Any) -> str:
    """Say shape and dtype of an array, or of a number as JAX has it."""
    return _describe(value if hasattr(value, "dtype") else jnp.asarray(value))


def stack(values: Sequence[Any]) -> Any:
    """Stack arrays of one shape and dtype along a new first axis: also keys, those of numpy, and shapes alone."""
    first = values[0]
    if isinstance(first, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct((len(values), *first.shape), first.dtype)
    if all(isinstance(v, np.ndarray) for v in values):
        return np.stack(values)
    level = _compat.eval_trace() if _compat.are_concrete(values) else _compat.current_trace()
    with _compat.at_trace(level):
        if not all(map(_is_on_host, values)):
            return jnp.stack(values)
        if is_key(first):
            data = np.stack([np.asarray(jax.random.key_data(k)) for k in values])
            return jax.random.wrap_key_data(_put(data, first), impl=jax.random.key_impl(first))
        whole = _memory.empty((len(values), *first.shape), first.dtype)
        return _put(np.stack([np.asarray(v) for v in values], out=whole), first)


def parts(tree: Any, n: int, *, abstract: bool = False) -> list[Any]:
    """Return what lies along the first axis of the arrays of a pytree, one by one; ``abstract``: their shapes."""
    leaves, structure = jax.tree.flatten(tree)
    found = [_parts(leaf, n, abstract) for leaf in leaves]
    return [structure.unflatten(row) for row in zip(*found, strict=True)] if leaves else [tree] * n


def _parts(array: Any, n: int, abstract: bool) -> list[Any]:
    if isinstance(array, jax.ShapeDtypeStruct) or (abstract and isinstance(array, jax.Array)):
        return [jax.ShapeDtypeStruct(array.shape[1:], array.dtype) for _ in range(n)]
    if isinstance(array, np.ndarray):
        return [array[i].copy() for i in range(n)]
    level = _compat.eval_trace() if _compat.are_concrete([array]) else _compat.current_trace()
    with _compat.at_trace(level):
        if not _is_on_host(array):
            return [array[i] for i in range(n)] if is_key(array) else list(jnp.unstack(array))
        if is_key(array):
            data, impl = np.asarray(jax.random.key_data(array)), jax.random.key_impl(array)
            return [jax.random.wrap_key_data(_put(d.copy(), array), impl=impl) for d in data]
        host = np.asarray(array)
        where = array.sharding if array.committed else None
        return _memory.transfer([_memory.Incoming(host[i], host.dtype, where, False) for i in range(n)])


def _is_on_host(array: Any) -> bool:
    """Whether an array has a value in the memory of the host, and is of a type that numpy holds as it is."""
    if not isinstance(array, jax.Array) or not _compat.are_concrete([array]) or getattr(array, "weak_type", False):
        return False
    return not array.is_deleted() and len(array.devices()) == 1 and next(iter(array.devices())).platform == "cpu"


def _put(array: Any, like: jax.Array) -> Any:
    """Bring an array of the host to where another lies, bound to it as that is."""
    where = like.sharding if like.committed else None
    return _memory.transfer([_memory.Incoming(array, array.dtype, where, True)])[0]
