"""What tests on several devices need: meshes, where arrays are, and comparison shard by shard."""

import gc
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from helpers import raw
from jax.sharding import Mesh, NamedSharding, PartitionSpec

P = PartitionSpec


def mesh_of(**axes: int) -> Mesh:
    """A mesh of the first devices: ``mesh_of(data=4, model=2)``."""
    count = math.prod(axes.values())
    return Mesh(np.array(jax.devices()[:count]).reshape(*axes.values()), tuple(axes))


def arrays(model: Any, *filters: Any) -> dict[str, jax.Array]:
    """Every array of a model by its dotted name, random state left out unless other filters are given."""
    state: Any = nnx.state(model, *(filters or (nnx.Not(nnx.RngState),)))
    pairs = nnx.to_flat_state(state)
    return {".".join(map(str, path)): v.get_raw_value() if isinstance(v, nnx.Variable) else v for path, v in pairs}


def by_pairs(rules: Sequence[tuple[str, PartitionSpec]]) -> Callable[..., PartitionSpec]:
    """What pairs mean where there is no metadata."""
    return lambda name, *_: next((spec for pattern, spec in rules if re.search(pattern, name)), P())


def trimmed(spec: PartitionSpec) -> tuple[Any, ...]:
    """A spec without what makes no difference: Nones at its end, tuples of one name."""
    parts = [p[0] if isinstance(p, tuple) and len(p) == 1 else p or None for p in spec]
    while parts and parts[-1] is None:
        parts.pop()
    return tuple(parts)


def assert_placed(array: Any, mesh: Mesh, spec: PartitionSpec, what: Any = "") -> None:
    """It lies on the mesh as the spec says, in shards that are no larger than that."""
    assert isinstance(array.sharding, NamedSharding), (what, array.sharding)
    assert array.sharding.mesh == mesh, (what, array.sharding.mesh)
    assert trimmed(array.sharding.spec) == trimmed(spec), (what, array.sharding.spec, spec)
    where = NamedSharding(mesh, spec)
    for shard in array.addressable_shards:
        assert shard.data.shape == where.shard_shape(array.shape), what
        assert shard.index == where.devices_indices_map(array.shape)[shard.device], what


def assert_same_on_mesh(model: Any, want: Any, mesh: Mesh, spec_of: Callable[..., PartitionSpec]) -> None:
    """The model has the arrays of another that is on one device, bit for bit, where ``spec_of(name, shape)`` says."""
    got, expected = arrays(model), arrays(want)
    assert list(got) == list(expected)
    for name, array in got.items():
        assert_placed(array, mesh, spec_of(name, array.shape), name)
        whole = raw(expected[name])
        assert (array.shape, array.dtype) == (whole.shape, whole.dtype), name
        for shard in array.addressable_shards:
            assert np.asarray(shard.data).tobytes() == whole[shard.index].tobytes(), name


def live_bytes() -> dict[int, int]:
    """Bytes on one device of every live array, by its id."""
    gc.collect()
    return {id(a): math.prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize for a in jax.live_arrays()}
