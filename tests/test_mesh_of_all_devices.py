"""A mesh of whatever devices this process has: one CPU as a rule, one GPU or more where there are any.

``tests/mesh`` runs on eight virtual CPU devices. These few tests are for real ones.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import raw
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import lazymods as lm

WIDTH = 16 * len(jax.devices())
RULES = [
    ("up.kernel", P(None, None, "model")),
    ("down.kernel", P(None, "model", None)),
    ("head.kernel", P("model", None)),
]
SPEC = jax.ShapeDtypeStruct((4, WIDTH), jnp.float32)


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = lm.LazyLayerNorm(rngs=rngs)
        self.up = lm.LazyLinear(4 * WIDTH, rngs=rngs)
        self.down = lm.LazyLinear(WIDTH, kernel_init=nnx.initializers.orthogonal(), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(jax.nn.relu(self.up(self.norm(x))))


class Model(nnx.Module):
    def __init__(self, seed: int) -> None:
        rngs = nnx.Rngs(seed)
        self.blocks = lm.Stack(Block, 3, rngs=rngs)
        self.head = lm.LazyLinear(8, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(self.blocks(x))


def mesh_of_all() -> Mesh:
    return Mesh(np.array(jax.devices()), ("model",))


def on_mesh(seed: int) -> Model:
    model = Model(seed)
    lm.materialize(model, SPEC, mesh=mesh_of_all(), rules=RULES)
    return model


def on_one(seed: int) -> Model:
    model = Model(seed)
    lm.materialize(model, SPEC)
    return model


def values(model: Any) -> dict[str, np.ndarray[Any, Any]]:
    return {name: raw(value) for name, value in lm.state_dict(model).items()}


def places(model: Any) -> list[Any]:
    return [leaf.sharding for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))]


def assert_close(got: dict[str, Any], want: dict[str, Any], tolerance: float) -> None:
    assert list(got) == list(want)
    for name, value in got.items():
        np.testing.assert_allclose(value, want[name], rtol=tolerance, atol=tolerance, err_msg=name)


@pytest.mark.slow
def test_born_on_the_mesh_with_the_values_of_one_device() -> None:
    model = on_mesh(0)
    assert_close(values(model), values(on_one(0)), 1e-6)
    assert model.head.kernel.sharding == NamedSharding(mesh_of_all(), P("model", None))
    x = jax.random.normal(jax.random.key(1), SPEC.shape)
    np.testing.assert_allclose(raw(lm.jit(lambda m, x: m(x))(model, x)), raw(on_one(0)(x)), rtol=1e-2, atol=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["model.safetensors", "model.npz", "folder"])
def test_saved_and_loaded_from_one_device_and_back(tmp_path: Path, name: str) -> None:
    lm.save(on_mesh(0), tmp_path / name)
    single, spread = Model(1), Model(2)
    lm.load(single, tmp_path / name)
    lm.load(spread, tmp_path / name, mesh=mesh_of_all(), rules=RULES)
    want = values(on_mesh(0))
    for model in (single, spread):
        got = values(model)
        assert list(got) == list(want)
        assert all(np.array_equal(got[key], want[key]) for key in want)
    assert places(spread) == places(on_mesh(0))


@pytest.mark.slow
@pytest.mark.parametrize("donate", [False, True])
def test_steps_keep_places_and_give_the_values_of_one_device(donate: bool) -> None:
    def step(model: Model, optimizer: Any, x: jax.Array) -> jax.Array:
        value, grads = nnx.value_and_grad(lambda model: (model(x) ** 2).mean())(model)
        optimizer.update(model, grads)
        return value

    def trained(model: Model) -> tuple[Model, list[float]]:
        optimizer = lm.LazyOptimizer(model, optax.sgd(0.05), wrt=nnx.Param)
        run = lm.jit(step, donate_state=donate)
        return model, [float(run(model, optimizer, x)) for _ in range(4)]

    x: Any = raw(jax.random.normal(jax.random.key(1), SPEC.shape))
    with jax.default_matmul_precision("highest"):
        (spread, losses), (single, want) = trained(on_mesh(0)), trained(on_one(0))
    np.testing.assert_allclose(losses, want, rtol=1e-4)
    assert_close(values(spread), values(single), 1e-4)
    assert places(spread) == places(on_mesh(0))


def test_the_plan_says_what_each_device_holds() -> None:
    mesh, model = mesh_of_all(), on_mesh(0)
    abstract = jax.sharding.AbstractMesh(mesh.axis_sizes, mesh.axis_names)
    plan = lm.infer_shapes(Model(0), SPEC, mesh=abstract, rules=RULES)
    held = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
    assert plan.total_bytes_per_device == held
