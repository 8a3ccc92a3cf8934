"""Where the outputs of a program go on a mesh: what takes the place of an array goes where that array is.

XLA chooses where outputs go, and a model would drift: a bias with a copy on every device comes back split over them,
because its gradient is. So a new value that a function writes in the place of another gets its sharding. One that is
on a single device only because nobody has said where it should be, a counter as Flax makes it, is copied to all devices
of the mesh where the other arrays are. Everything else is left to XLA.

Explicit axes of a mesh are part of an array's type. A function that writes another type has said where the value goes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from lazymods import _compat
from lazymods._compat import jit as _compat_jit
from lazymods.compile.records import Effects, arrays_of


class Stay(NamedTuple):
    """An output that takes the place of a leaf: the numbers of both, and how many axes the output has."""

    leaf: int
    output: int
    ndim: int


class Placement(NamedTuple):
    """Where some outputs go.

    Attributes:
        before: Where the leaf of each is to be first; None: it is somewhere.
        after: Where each goes; None: as XLA likes.
    """

    before: tuple[Any, ...]
    after: tuple[Any, ...]


def stays_of(
    record: Effects, places: Mapping[int, Sequence[int]], leaves: Sequence[Any], outputs: Sequence[Any]
) -> tuple[Stay, ...]:
    """Find the outputs that take the place of a leaf, by their types.

    Args:
        record: What the function does with its outputs.
        places: By number of a target: the numbers of the leaves that it holds.
        leaves: The types of the leaves.
        outputs: The types of the outputs.
    """
    found: dict[int, Stay] = {}
    for target, part in [*record.writes, *record.written_anew]:
        arrays, held = list(arrays_of(part)), places.get(target, ())
        if len(arrays) == len(held):
            for out, leaf in zip(arrays, held, strict=True):
                if _can_stay(leaves[leaf], outputs[out.number]):
                    found[out.number] = Stay(leaf, out.number, outputs[out.number].ndim)
    return tuple(found.values())


def _can_stay(before: Any, after: Any) -> bool:
    """Whether a value can be where another is, and its type does not say that it is elsewhere."""
    shape, spec = before.shape, tuple(before.sharding.spec)
    if jnp.issubdtype(after.dtype, jax.dtypes.prng_key):  # the leaf is its data
        shape, spec = shape[: after.ndim], spec[: after.ndim]
    return shape == after.shape and spec == tuple(after.sharding.spec) and before.memory_space == after.memory_space


def placement_of(leaves: Sequence[Any], stays: Sequence[Stay], named: Any = None) -> Placement | None:
    """Return where the outputs go that take the place of these leaves; None if no mesh is in play.

    Args:
        leaves: What a program is called with.
        stays: Its outputs that take the place of a leaf.
        named: A mesh that the program itself names.
    """
    held = [getattr(leaf, "sharding", None) if _is_placed(leaf) else None for leaf in leaves]
    mesh = _mesh_of(leaves, held, named)
    if mesh is None:
        return None
    everywhere = NamedSharding(mesh, PartitionSpec())
    before, after = [], []
    for stay in stays:
        at = held[stay.leaf]
        is_free = not isinstance(at, NamedSharding) and not getattr(leaves[stay.leaf], "committed", False)
        before.append(everywhere if is_free else None)
        after.append(everywhere if is_free else _cut(at, stay.ndim))
    return Placement(tuple(before), tuple(after))


def _is_placed(leaf: Any) -> bool:
    """Whether a leaf tells where it is: an array, or a spec of one, but no tracer."""
    return type(leaf) is _compat_jit.ARRAY or isinstance(leaf, jax.ShapeDtypeStruct)


def _mesh_of(leaves: Sequence[Any], held: Sequence[Any], named: Any) -> Any:
    """Return the mesh where leaves are; if they are nowhere in particular, the one that is named, if any is."""
    for sharding in held:
        if isinstance(sharding, NamedSharding):
            return sharding.mesh
    if _compat.current_trace() is not _compat.eval_trace():
        return None
    mesh = named or jax.sharding.get_mesh()
    return None if mesh.empty or any(getattr(leaf, "committed", False) for leaf in leaves) else mesh


def _cut(sharding: Any, ndim: int) -> Any:
    """Return a sharding for an output of so many axes, of which the leaf may have more; None if it is one device's."""
    if not isinstance(sharding, NamedSharding):
        return sharding if sharding is not None and sharding.num_devices > 1 else None
    if len(sharding.spec) <= ndim:
        return sharding
    return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[:ndim]), memory_kind=sharding.memory_kind)


def spec_of(kind: Any) -> jax.ShapeDtypeStruct:
    """Return the spec of an array of a type; it says where the array is if the type does."""
    weak = getattr(kind, "weak_type", False)
    return jax.ShapeDtypeStruct(kind.shape, kind.dtype, weak_type=weak, sharding=sharding_in(kind))


def sharding_in(kind: Any) -> NamedSharding | None:
    """Return what a type says of where its arrays are; None if nothing."""
    return kind.sharding if any(kind.sharding.spec) else None


def settled(leaves: Sequence[Any], outputs: Sequence[Any], stays: Sequence[Stay]) -> Sequence[Any]:
    """Return outputs of which those that take the place of a leaf are where it was."""
    found = (outputs[stay.output].sharding for stay in stays)
    placement = placement_of(leaves, stays, next((s.mesh for s in found if isinstance(s, NamedSharding)), None))
    if placement is None:
        return outputs
    moved = list(outputs)
    for stay, sharding in zip(stays, placement.after, strict=True):
        if sharding is not None and moved[stay.output].sharding != sharding:
            moved[stay.output] = jax.device_put(moved[stay.output], sharding)
    return moved
