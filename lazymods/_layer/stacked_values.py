"""Arrays along a new first axis, and apart again: on a CPU by a copy in host memory, for which nothing is compiled."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lazymods import _compat, _memory
from lazymods._errors import describe as _describe
from lazymods._initial import shards
from lazymods._initial.keys import is_key


def describe(value: Any) -> str:
    """Say shape and dtype of an array, or of a number as JAX has it."""
    return _describe(value if hasattr(value, "dtype") else jnp.asarray(value))


def stack(values: Sequence[Any], place: Any = None) -> Any:
    """Stack arrays of one shape and dtype along a new first axis: also keys, those of numpy, and shapes alone.

    Args:
        values: The arrays.
        place: Where the result goes, a sharding; None: where they are.
    """
    if isinstance(getattr(place, "mesh", None), jax.sharding.AbstractMesh):  # of a type, in a program
        whole = stack(values)
        return shards.of_type(whole, place) if isinstance(whole, jax.Array) and not is_key(whole) else whole
    level = _compat.eval_trace() if _compat.are_concrete(values) else _compat.current_trace()
    with _compat.at_trace(level):
        return _stacked(values, place)


def _stacked(values: Sequence[Any], place: Any) -> Any:
    first = values[0]
    if not isinstance(first, jax.Array) or is_key(first):
        place = None
    elif not _compat.are_concrete(values):
        whole = jnp.stack(values)
        return shards.told(whole, place) if isinstance(place, jax.sharding.NamedSharding) else whole
    elif place is None:
        place = _common_place(values)
    if isinstance(place, jax.sharding.NamedSharding):
        each = shards.of_each(place, (len(values),))
        return stack_at([shards.put(v, s) for v, s in zip(values, each, strict=True)], (len(values),), place)
    if place is not None:
        return jax.device_put(stack([jax.device_put(v, place) for v in values]), place)
    if isinstance(first, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct((len(values), *first.shape), first.dtype)
    if all(isinstance(v, np.ndarray) for v in values):
        return np.stack(values)
    if not all(map(_is_on_host, values)):
        return jnp.stack(values)
    if is_key(first):
        data = np.stack([np.asarray(jax.random.key_data(k)) for k in values])
        return jax.random.wrap_key_data(_put(data, first), impl=jax.random.key_impl(first))
    whole = _memory.empty((len(values), *first.shape), first.dtype)
    return _put(np.stack([np.asarray(v) for v in values], out=whole), first)


def stack_at(arrays: Sequence[jax.Array], sizes: Sequence[int], place: Any = None) -> jax.Array:
    """Stack arrays along new first axes of some sizes.

    Args:
        arrays: The arrays, each where ``shards.of_each`` says.
        sizes: The lengths of the axes.
        place: Where the result goes, a ``NamedSharding``: each device stacks what it holds. None: where they are.
    """
    shape = (*sizes, *arrays[0].shape)
    if place is None:
        return stack(arrays).reshape(shape)
    held: dict[Any, list[Any]] = {}
    for array in arrays:
        for device, part in shards.held_by_each(array):
            held.setdefault(device, []).append(part)
    own = place.shard_shape(shape)
    pieces = [stack(held[device]).reshape(own) for device in place.addressable_devices]
    return shards.assembled(shape, arrays[0].dtype, place, pieces)


def parts(tree: Any, n: int, *, abstract: bool = False) -> list[Any]:
    """Return what lies along the first axis of the arrays of a pytree, one by one; ``abstract``: their shapes."""
    leaves, structure = jax.tree.flatten(tree)
    found = [_parts(leaf, n, abstract) for leaf in leaves]
    return [structure.unflatten(row) for row in zip(*found, strict=True)] if leaves else [tree] * n


def _parts(array: Any, n: int, abstract: bool) -> list[Any]:
    if isinstance(array, jax.ShapeDtypeStruct) or (abstract and isinstance(array, jax.Array) and not is_key(array)):
        return [jax.ShapeDtypeStruct(array.shape[1:], array.dtype, sharding=s) for s in _places_of_parts(array, n)]
    if isinstance(array, np.ndarray):
        return [array[i].copy() for i in range(n)]
    level = _compat.eval_trace() if _compat.are_concrete([array]) else _compat.current_trace()
    with _compat.at_trace(level):
        if _is_spread(array):
            return _spread_parts(array, n)
        if not _is_on_host(array):
            return [array[i] for i in range(n)] if is_key(array) else list(jnp.unstack(on_all_devices(array)))
        if is_key(array):
            data, impl = np.asarray(jax.random.key_data(array)), jax.random.key_impl(array)
            return [jax.random.wrap_key_data(_put(d.copy(), array), impl=impl) for d in data]
        host = np.asarray(array)
        where = array.sharding if array.committed else None
        return _memory.transfer([_memory.Incoming(host[i], host.dtype, where, False) for i in range(n)])


def rows(tree: Any, n: int) -> list[Any]:
    """Return what lies along the first axis, each part on all devices of its mesh, as what is computed with it is.

    A part of an axis that is split is on some of the devices only.
    """

    def everywhere(whole: Any, part: Any) -> Any:
        place = place_of(whole)
        if not isinstance(place, jax.sharding.NamedSharding) or not any(place.spec[:1]):
            return part
        own = jax.sharding.PartitionSpec(*place.spec[1:])
        return jax.device_put(part, jax.sharding.NamedSharding(place.mesh, own, memory_kind=place.memory_kind))

    return [jax.tree.map(everywhere, tree, part) for part in parts(tree, n)]


def split_layers(value: Any) -> Any:
    """Return the sharding that an array has in its type, on explicit axes, if that splits the axis of the layers."""
    sharding = getattr(jax.typeof(value), "sharding", None)
    return sharding if sharding is not None and any(sharding.spec[:1]) else None


def on_all_devices(value: Any) -> Any:
    """Return the values for all layers as operations go along that axis that want each device to have it whole."""
    place = split_layers(value)
    if place is None:
        return value
    spec = jax.sharding.PartitionSpec(None, *place.spec[1:])
    return jax.sharding.reshard(value, jax.sharding.NamedSharding(place.mesh, spec))


def place_of(value: Any) -> Any:
    """Return the sharding that an array is bound to; None if it is bound to none, or in a trace."""
    is_here = isinstance(value, jax.Array) and _compat.are_concrete([value]) and not is_key(value)
    return value.sharding if is_here and not value.is_deleted() and value.committed else None


def _common_place(values: Sequence[jax.Array]) -> Any:
    """Return where a stack of arrays on a mesh is: where they all are, and on each device all that it holds."""
    place = place_of(values[0])
    if not isinstance(place, jax.sharding.NamedSharding) or any(place_of(v) != place for v in values):
        return None
    return jax.sharding.NamedSharding(place.mesh, jax.sharding.PartitionSpec(None, *place.spec))


def place_of_parts(values: Sequence[Any], places: Iterable[Any]) -> Any:
    """Return where a stack of arrays goes that lie each where a layer does of a stack that is spread over devices.

    Args:
        values: The arrays.
        places: Where stacks of as many layers lie, ``NamedSharding`` among them.

    Returns:
        A sharding whose parts lie where the arrays do; None where all lie on the same devices, or as in no other stack.
    """
    own = [place_of(v) for v in values]
    if None in own or len({frozenset(p.device_set) for p in own}) == 1:
        return None
    for place in places:
        each = shards.of_each(place, (len(values),)) if isinstance(place, jax.sharding.NamedSharding) else []
        if each and all(a.device_set == b.device_set for a, b in zip(own, each, strict=True)):
            is_named = all(
                isinstance(a, jax.sharding.NamedSharding) and a.mesh == b.mesh for a, b in zip(own, each, strict=True)
            )
            spec = jax.sharding.PartitionSpec(*place.spec[:1], *(own[0].spec if is_named else ()))
            return jax.sharding.NamedSharding(place.mesh, spec, memory_kind=place.memory_kind)
    return None


def _places_of_parts(array: Any, n: int) -> list[Any]:
    """Return where the parts of an array are to be; None where nobody has said where it is to be."""
    if _compat.is_tracer(array) or array.sharding is None or not getattr(array, "committed", True):
        return [None] * n
    is_named = isinstance(array.sharding, jax.sharding.NamedSharding)
    return shards.of_each(array.sharding, (n,)) if is_named else [array.sharding] * n


def _is_spread(array: Any) -> bool:
    """Whether an array has values that lie on a mesh, of one device or more."""
    if not isinstance(array, jax.Array) or not _compat.are_concrete([array]) or is_key(array):
        return False
    return isinstance(array.sharding, jax.sharding.NamedSharding)


def _spread_parts(array: jax.Array, n: int) -> list[jax.Array]:
    """Return the parts of an array on a mesh, each on the devices that hold it: nothing is brought to others."""
    held = {device: parts(part, part.shape[0]) for device, part in shards.held_by_each(array)}
    out = []
    for i, place in enumerate(shards.of_each(array.sharding, (n,))):
        pieces = [held[device][i % len(held[device])] for device in place.addressable_devices]
        out.append(shards.assembled(array.shape[1:], array.dtype, place, pieces))
    return out


def _is_on_host(array: Any) -> bool:
    """Whether an array has a value in the memory of the host, and is of a type that numpy holds as it is."""
    if not isinstance(array, jax.Array) or not _compat.are_concrete([array]) or getattr(array, "weak_type", False):
        return False
    return not array.is_deleted() and len(array.devices()) == 1 and next(iter(array.devices())).platform == "cpu"


def _put(array: Any, like: jax.Array) -> Any:
    """Bring an array of the host to where another lies, bound to it as that is."""
    where = like.sharding if like.committed else None
    return _memory.transfer([_memory.Incoming(array, array.dtype, where, True)])[0]
