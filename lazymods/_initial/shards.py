"""The parts of a value that the devices of a mesh hold: which elements each has, for the kernels that draw them.

The elements of a part are numbered in its own order. From one to the next the number in the whole value goes up by one,
and by what is left out of an axis whenever the part's end of that axis is passed: so it follows from a few
:class:`Skip`, whatever the shape. The kernels compute it, and each part is drawn alone.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from lazymods import _compat
from lazymods._initial.keys import is_key
from lazymods._initial.stacking import Shape
from lazymods._shardings import names_in


class Skip(NamedTuple):
    """After each ``period`` elements of a part, ``width`` elements of the whole value are left out."""

    period: int
    width: int


class Part(NamedTuple):
    """A part of a value, and the devices that each hold a copy of it.

    Attributes:
        request: The number of the value.
        shape: The shape of the part.
        start: The number of its first element in the whole value.
        skips: How the numbers go on.
        devices: The devices of this process that hold it.
    """

    request: int
    shape: Shape
    start: int
    skips: tuple[Skip, ...]
    devices: tuple[Any, ...]


def parts_of(request: int, shape: Shape, sharding: Any, device: Any) -> list[Part]:
    """Return the parts of a value that the devices of this process hold; without a sharding, ``device`` holds it."""
    if sharding is None:
        return [Part(request, shape, 0, (), (device,))]
    holders: dict[tuple[tuple[int, int], ...], list[Any]] = {}
    for holder, index in sharding.addressable_devices_indices_map(shape).items():
        ends = tuple([s.indices(n)[:2] for s, n in zip(index, shape, strict=True)])
        holders.setdefault(ends, []).append(holder)
    return [_part(request, shape, ends, tuple(devices)) for ends, devices in holders.items()]


def _part(request: int, shape: Shape, ends: Sequence[tuple[int, int]], devices: tuple[Any, ...]) -> Part:
    start, skips = 0, []
    inside = whole = 1  # elements that one step along the axis passes: in the part, and in the value
    for n, (first, last) in zip(reversed(shape), reversed(ends), strict=True):
        start += first * whole
        if last - first < n:
            skips.append(Skip((last - first) * inside, (n - last + first) * whole))
        inside, whole = inside * (last - first), whole * n
    skips = [skip for skip in skips if skip.period < inside]  # the others are not reached
    return Part(request, tuple([last - first for first, last in ends]), start, tuple(skips), devices)


def of_each(sharding: Any, sizes: Sequence[int]) -> list[Any]:
    """Return where each of several values goes that are to lie along the first axes of one.

    Args:
        sharding: Where that one goes, a ``NamedSharding``; None: to the default device, as each of them does.
        sizes: The lengths of these axes.
    """
    count = math.prod(sizes)
    if sharding is None:
        return [None] * count
    spec = (*sharding.spec, *[None] * (len(sizes) - len(sharding.spec)))
    split = list(map(names_in, spec[: len(sizes)]))
    return [_of_one(sharding, spec[len(sizes) :], split, sizes, np.unravel_index(i, sizes)) for i in range(count)]


def _of_one(sharding: Any, rest: Any, split: Sequence[Any], sizes: Sequence[int], at: Sequence[Any]) -> Any:
    """Return where one of several values goes: to the devices that hold it, whose mesh has the other axes."""
    mesh = sharding.mesh
    chosen: dict[str, int] = {}
    for names, size, number in zip(split, sizes, at, strict=True):
        lengths = [mesh.shape[name] for name in names]
        block = int(number) * math.prod(lengths) // size
        chosen |= dict(zip(names, map(int, np.unravel_index(block, lengths)), strict=True)) if names else {}
    if not chosen:
        return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*rest), memory_kind=sharding.memory_kind)
    devices = mesh.devices[tuple([chosen.get(name, slice(None)) for name in mesh.axis_names])]
    left = tuple([name for name in mesh.axis_names if name not in chosen])
    own = jax.sharding.Mesh(devices if left else np.array([devices]), left or ("one",))
    return jax.sharding.NamedSharding(own, jax.sharding.PartitionSpec(*rest), memory_kind=sharding.memory_kind)


def held_by_each(array: jax.Array) -> list[tuple[Any, jax.Array]]:
    """Return each device of this process and what it holds of a value, bound to that device alone.

    JAX gives the whole array for a mesh of one device, and the array is still bound to the mesh.
    """
    found = []
    for shard in array.addressable_shards:
        alone = jax.sharding.SingleDeviceSharding(shard.device, memory_kind=array.sharding.memory_kind)
        found.append((shard.device, jax.device_put(shard.data, alone)))
    return found


def assembled(shape: Shape, dtype: Any, sharding: Any, arrays: Sequence[jax.Array]) -> jax.Array:
    """Return the value whose parts on the devices of this process are these."""
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays, dtype=dtype)


def put(value: Any, sharding: Any) -> Any:
    """Bring a value that each process has to its place on a mesh; what is no array, or is there already, stays.

    No process asks another for anything. Of an array without values it is noted where it goes.
    """
    if isinstance(value, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding)
    if not isinstance(value, (jax.Array, np.ndarray)) or _compat.is_tracer(value):
        return value
    if isinstance(value, jax.Array) and value.committed and is_at(value, sharding):
        return value
    if sharding.is_fully_addressable or not getattr(value, "is_fully_addressable", True):
        return jax.device_put(value, sharding)
    if isinstance(value, jax.Array) and is_key(value):
        return _put_keys(value, sharding)
    whole = np.asarray(value)
    return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])


def _put_keys(keys: jax.Array, sharding: Any) -> jax.Array:
    data, impl = np.asarray(jax.random.key_data(keys)), str(jax.random.key_impl(keys))
    indices = sharding.addressable_devices_indices_map(keys.shape)
    parts = [jax.random.wrap_key_data(jax.device_put(data[index], d), impl=impl) for d, index in indices.items()]
    return jax.make_array_from_single_device_arrays(keys.shape, sharding, parts)


def told(value: Any, sharding: Any) -> Any:
    """Say in a program where a value goes on a mesh: along explicit axes by its type, along others by a constraint."""
    mesh = sharding.mesh
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    explicit = {name for name, kind in kinds.items() if kind is jax.sharding.AxisType.Explicit}
    if explicit:
        value = jax.sharding.reshard(value, _along(sharding, explicit))
    others = kinds.keys() - explicit
    return jax.lax.with_sharding_constraint(value, _along(sharding, others)) if others else value


def type_of(value: Any) -> Any:
    """Return the sharding that a traced value has in its type; None where no axis of a mesh is explicit."""
    sharding = getattr(jax.typeof(value), "sharding", None) if _compat.is_tracer(value) else None
    is_explicit = sharding is not None and jax.sharding.AxisType.Explicit in sharding.mesh.axis_types
    return sharding if is_explicit else None


def of_type(value: Any, kind: Any) -> Any:
    """Bring a value in a program to a sharding that :func:`type_of` has returned; None: it stays."""
    return value if kind is None else jax.sharding.reshard(value, kind)


def _along(sharding: Any, axes: Collection[str]) -> Any:
    """Return a sharding over some of the axes of its mesh."""
    spec = [tuple([name for name in names_in(part) if name in axes]) for part in sharding.spec]
    spec = jax.sharding.PartitionSpec(*spec)
    return jax.sharding.NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)


def is_at(value: jax.Array, sharding: Any) -> bool:
    """Whether an array lies as a sharding says, in the same words."""
    here: Any = value.sharding
    if not isinstance(here, jax.sharding.NamedSharding) or here.mesh != sharding.mesh:
        return False
    return here.memory_kind == sharding.memory_kind and _words(here.spec) == _words(sharding.spec)


def _words(spec: Any) -> tuple[Any, ...]:
    """A spec without what makes no difference: Nones at its end, and tuples of one name."""
    words = [part[0] if isinstance(part, tuple) and len(part) == 1 else part or None for part in spec]
    while words and words[-1] is None:
        words.pop()
    return tuple(words)
