"""Threefry keys folded on the host: ``jax.random.fold_in`` would run a program for each."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lazymods import _compat

Key = tuple[int, int]
_MASK = 0xFFFFFFFF
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


def is_key(value: Any) -> bool:
    """Whether a value is an array of random keys."""
    dtype = getattr(value, "dtype", None)
    if dtype is None or isinstance(dtype, np.dtype):  # numpy has no such dtype, and JAX takes its time to see that
        return False
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)


def host_value(value: Any, placed: bool = False) -> Key | int | None:
    """Return a threefry key, or a counter, as Python numbers; None for anything else.

    Nothing is returned for an array that is bound to a device, since what is made from it would be bound as well; but
    if that is ``placed``, it is no matter.
    """
    if not isinstance(value, jax.Array) or not _compat.are_concrete([value]) or value.shape:
        return None
    if value.committed and not placed:
        return None
    if not is_key(value):
        return int(np.asarray(value)) if value.dtype == np.uint32 else None
    if str(jax.random.key_impl(value)) != "threefry2x32":
        return None
    first, second = np.asarray(jax.random.key_data(value)).tolist()
    return first, second


def fold_in(key: Key, count: int) -> Key:
    """Return the data of ``jax.random.fold_in(key, count)`` for an unsigned 32-bit count.

    It encrypts the block ``(0, count)`` by Threefry-2x32 with 20 rounds.

    References:
        Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3 (2011).
    """
    schedule = (*key, key[0] ^ key[1] ^ 0x1BD11BDA)
    a, b = key[0], (count + key[1]) & _MASK
    for i in range(5):
        for r in _ROTATIONS[i % 2]:
            a = (a + b) & _MASK
            b = a ^ (((b << r) | (b >> (32 - r))) & _MASK)
        a = (a + schedule[(i + 1) % 3]) & _MASK
        b = (b + schedule[(i + 2) % 3] + i + 1) & _MASK
    return a, b
