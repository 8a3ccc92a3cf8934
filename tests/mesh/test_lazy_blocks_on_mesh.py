"""Lazy blocks with arrays on meshes: the values and places that operations have when they are run one by one."""

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import raw
from jax.sharding import AxisType, NamedSharding
from on_mesh import P, arrays, mesh_of
from steps_on_mesh import put

import lazymods as lm


def rows(number):
    return np.random.default_rng(number).standard_normal((8, 4)).astype(np.float32)


@pytest.mark.slow
@pytest.mark.parametrize("check", [False, True], ids=["", "check"])
def test_training_in_blocks(check):
    mesh = mesh_of(data=4, model=2)

    def train(model, optimizer, x):
        loss, grads = nnx.value_and_grad(lambda m: (m(x) ** 2).mean())(model)
        optimizer.update(model, grads)
        return loss * 2 if loss > 0.3 else loss

    ends = []
    for is_lazy in (True, False):
        model = nnx.Linear(4, 16, rngs=nnx.Rngs(0))
        place = NamedSharding(mesh, P("data")) if is_lazy else None
        if is_lazy:
            model.kernel.set_value(put(mesh, P(None, "model"), model.kernel[...]))
            assert model.bias is not None
            model.bias.set_value(put(mesh, P("model"), model.bias[...]))
        optimizer, losses = nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param), []
        for number in range(3):
            with lm.lazytensor.lazy(check=check) if is_lazy else contextlib.nullcontext():
                losses.append(train(model, optimizer, jax.device_put(rows(number), place)))
        ends.append([*losses, *arrays(model).values(), *arrays(optimizer).values()])
    for got, want in zip(*ends, strict=True):
        np.testing.assert_allclose(raw(got), raw(want), rtol=1e-5, atol=1e-6)
    bias, kernel = ends[0][3:5]
    assert bias.sharding.is_equivalent_to(NamedSharding(mesh, P("model")), 1)
    assert kernel.sharding.is_equivalent_to(NamedSharding(mesh, P(None, "model")), 2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_blocks_under_set_mesh(kind):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind, kind))

    def run():
        x = put(mesh, P("data"), rows(0))
        y = (x + jnp.ones((8, 4))) @ jnp.ones((4, 2))
        return y, jnp.zeros(8) + y[:, 0], jax.random.normal(jax.random.key(0), (8, 4)) + x

    with jax.set_mesh(mesh):
        with lm.lazytensor.lazy():
            got = run()
        want = run()
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)
        assert one.sharding.is_equivalent_to(other.sharding, one.ndim)
        assert jax.typeof(one) == jax.typeof(other)


@pytest.mark.slow
@pytest.mark.parametrize("check", [False, True], ids=["", "check"])
def test_operations_that_name_devices(check):
    mesh = mesh_of(data=4, model=2)
    total = jax.shard_map(
        lambda x: x * jax.lax.psum(x.sum(), "data"), mesh=mesh, in_specs=P("data"), out_specs=P("data")
    )
    with lm.lazytensor.lazy(check=check):
        x = jax.device_put(jnp.asarray(rows(0)) * 2, NamedSharding(mesh, P("data")))
        y = total(x + 1) * 2
        z = jax.lax.with_sharding_constraint(y - 1, NamedSharding(mesh, P(None, "model"))) + x
    before = rows(0) * 2
    after = (before + 1) * (before + 1).sum() * 2
    np.testing.assert_allclose(x, before, rtol=1e-6)
    np.testing.assert_allclose(y, after, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(z, after - 1 + before, rtol=1e-4, atol=1e-4)


def test_two_meshes_in_one_block():
    one, other = (jax.sharding.Mesh(np.array(jax.devices()[n : n + 4]), ("x",)) for n in (0, 4))
    x, y, z = put(one, P("x"), jnp.arange(8.0)), put(other, P("x"), jnp.arange(8.0)), jnp.arange(8.0)
    with lm.lazytensor.lazy():
        found = x * 2, y * 3, z + 1
    wanted = (2 * np.arange(8), 3 * np.arange(8), np.arange(8) + 1)
    for array, want, place in zip(found, wanted, (x, y, z), strict=True):
        np.testing.assert_array_equal(array, want)
        assert array.sharding.device_set == place.sharding.device_set
    twice, wrong = None, None
    with pytest.raises(ValueError, match="incompatible devices"), lm.lazytensor.lazy():
        twice, wrong = x * 2, x + y
    np.testing.assert_array_equal(twice, 2 * np.arange(8))
    with pytest.raises(ValueError, match="incompatible devices"):
        np.asarray(wrong)


@pytest.mark.slow
def test_a_lazy_layer_in_a_block_under_set_mesh():
    mesh = mesh_of(data=4, model=2)
    metadata: Any = {"kernel_metadata": {"out_sharding": (None, "model")}}
    with jax.set_mesh(mesh):
        want = nnx.Linear(4, 16, rngs=nnx.Rngs(0), **metadata)
        model = lm.LazyLinear(16, rngs=nnx.Rngs(0), **metadata)
        with lm.lazytensor.lazy():
            y = model(put(mesh, P("data"), rows(0)))
        np.testing.assert_allclose(y, want(put(mesh, P("data"), rows(0))), rtol=1e-5, atol=1e-6)
    for name, array in arrays(model).items():
        assert array.sharding == arrays(want)[name].sharding
        np.testing.assert_array_equal(array, arrays(want)[name])
