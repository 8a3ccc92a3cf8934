"""Arrays over several devices: what goes where, and their values on the host, without more of them than is needed."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from lazymods._memory import empty

Array = np.ndarray[Any, Any]
Index = tuple[slice, ...]
Part = tuple[tuple[int, int], ...]  # where a part begins and ends along each axis


def is_spread(value: Any) -> bool:
    """Whether it is an array of JAX that is bound to several devices."""
    return isinstance(value, jax.Array) and not isinstance(value, Tracer) and goes_to_several(value.sharding)


def goes_to_several(sharding: Any) -> bool:
    """Whether what has this sharding lies on several devices, or on one of another process."""
    return sharding is not None and (len(sharding.device_set) > 1 or not sharding.is_fully_addressable)


def part_at(index: Index, shape: tuple[int, ...]) -> Part:
    """Return where an index begins and ends, in a form that can be a key."""
    return tuple([(i.start or 0, n if i.stop is None else i.stop) for i, n in zip(index, shape, strict=True)])


@functools.lru_cache(1000)  # many arrays are alike
def parts_here(sharding: Any, shape: tuple[int, ...]) -> Mapping[Part, Index]:
    """Return the parts of an array that devices of this process hold, each once."""
    return {part_at(index, shape): index for index in sharding.addressable_devices_indices_map(shape).values()}


def put_together(shape: tuple[int, ...], dtype: Any, sharding: Any, parts: Mapping[Part, Array]) -> jax.Array:
    """Make an array of the parts that devices of this process hold; no other process is waited for.

    Args:
        shape: The shape of the whole.
        dtype: Its dtype, which the parts have.
        sharding: Where they go.
        parts: The values of each; JAX may take their memory over.
    """
    return jax.make_array_from_callback(shape, sharding, lambda index: parts[part_at(index or (), shape)], dtype=dtype)


def on_host(array: Any) -> Array:
    """Return the values of an array, in memory that is freed with them.

    JAX keeps what ``numpy.asarray`` has gathered from several devices, or copied from one, for as long as the array
    lives. So each part is brought here by itself.
    """
    if not isinstance(array, jax.Array) or not array.is_fully_addressable:
        return np.asarray(array)
    if not goes_to_several(array.sharding):
        return _host_view(array)
    out = empty(array.shape, array.dtype)
    for shard in array.addressable_shards:
        if shard.replica_id == 0:
            out[shard.index] = _host_view(shard.data)
    return out


def _host_view(array: jax.Array) -> Array:
    [device] = array.devices()
    if device.platform != "cpu":
        try:
            array = jax.device_put(array, jax.local_devices(backend="cpu")[0])
        except RuntimeError:  # JAX was told to do without a CPU
            pass
    return np.asarray(array)
