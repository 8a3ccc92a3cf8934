"""What a device holds of a value is drawn alone: the numbers of its elements, and their values."""

import itertools
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from on_mesh import P, mesh_of

from lazymods._initial.fill import InitBatch, InitRequest
from lazymods._initial.shards import parts_of, put

CUBE = {"a": 2, "b": 2, "c": 2}
SPECS = [P(), P("a"), P(None, "a"), P("a", "b"), P(("a", "b"), "c"), P(None, ("a", "b", "c")), P("b", None, "a")]
INITS = {
    "lecun_normal": jax.nn.initializers.lecun_normal(),
    "normal": jax.nn.initializers.normal(0.3),
    "uniform": jax.nn.initializers.uniform(2.0),
    "truncated_normal": jax.nn.initializers.truncated_normal(0.02),
    "ones": jax.nn.initializers.ones,
}


@pytest.mark.parametrize("shape", [(8,), (4, 6), (64, 48), (4, 2, 10), (6, 4, 10), (2, 4, 6, 8), (0, 4), (2, 0)])
def test_numbers_of_elements(shape):
    """As numpy cuts an array of all numbers."""
    mesh = mesh_of(**CUBE)
    whole = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    axes = ["a", "b", "c", None]
    for spec in itertools.product(axes, repeat=len(shape)):
        named = [name for name in spec if name]
        if len({*named}) < len(named) or any(n % 2 for n, name in zip(shape, spec, strict=True) if name):
            continue
        sharding = NamedSharding(mesh, P(*spec))
        parts = parts_of(3, shape, sharding, None)
        assert sorted(d.id for part in parts for d in part.devices) == [d.id for d in mesh.devices.flat]
        for part in parts:
            own = np.arange(np.prod(part.shape, dtype=int))
            numbers = own + part.start + sum((own // period * width for period, width in part.skips), np.array(0))
            for device in part.devices:
                want = whole[sharding.devices_indices_map(shape)[device]]
                np.testing.assert_array_equal(numbers.reshape(part.shape), want)


def drawn(init, shape, spec, dtype: Any = np.float32, mesh=None) -> tuple[Any, Any]:
    """An initial value that is drawn in parts, and the same by the initializer."""
    mesh, key = mesh or mesh_of(**CUBE), jax.random.key(7)
    data = tuple(np.asarray(jax.random.key_data(key)).tolist())
    request = InitRequest(init, data, shape, np.dtype(dtype), shape, np.dtype(dtype))
    [got] = InitBatch([request]).fill([NamedSharding(mesh, spec)])
    return got, np.asarray(init(key, shape, dtype))


def check(got, want):
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    for shard in got.addressable_shards:
        assert np.asarray(shard.data).tobytes() == want[shard.index].tobytes(), shard.index


@pytest.mark.slow
@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("shape", [(64, 48, 10), (104, 104, 12), (4, 8, 1030)], ids=str)
def test_values(shape, spec):
    check(*drawn(INITS["lecun_normal"], shape, spec))


@pytest.mark.slow
@pytest.mark.parametrize("name", INITS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_values_of_each_initializer(name, dtype):
    check(*drawn(INITS[name], (104, 208), P("a", ("b", "c")), jax.numpy.dtype(dtype)))


@pytest.mark.slow
def test_some_devices_in_another_order():
    mesh = jax.sharding.Mesh(np.array(jax.devices())[[6, 1, 4, 3]].reshape(2, 2), ("a", "b"))
    got, want = drawn(INITS["normal"], (8, 1030), P("b", "a"), mesh=mesh)
    check(got, want)
    assert {d.id for d in got.devices()} == {6, 1, 4, 3}


@pytest.mark.slow
def test_a_copy_that_is_donated_leaves_the_others():
    """They share their memory."""
    got, want = drawn(INITS["normal"], (512, 512), P("a"))
    [(_, first), *others] = [(shard.index, shard.data) for shard in got.addressable_shards]
    jax.block_until_ready(jax.jit(lambda x: x * 0, donate_argnums=0)(first))
    for index, data in others:
        assert np.asarray(data).tobytes() == want[index].tobytes()


def test_put_keeps_what_is_there():
    mesh = mesh_of(a=8)
    place = NamedSharding(mesh, P("a"))
    value = put(np.arange(16.0, dtype=np.float32), place)
    assert put(value, NamedSharding(mesh, P("a", None))) is value
    assert put(value, NamedSharding(mesh, P())) is not value
    assert put("a text", place) == "a text"
    keys = jax.random.split(jax.random.key(0), 8)
    moved = put(keys, place)
    assert moved.sharding.spec == P("a")
    np.testing.assert_array_equal(jax.random.key_data(moved), jax.random.key_data(keys))
