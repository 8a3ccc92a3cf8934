"""What NNX transforms carry out of their trace is on the mesh of ``jax.set_mesh`` where a plain call puts it."""

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType
from on_mesh import P, arrays, assert_placed, assert_same_on_mesh, mesh_of

import lazymods as lm

SHARDED = {"kernel": P(None, "model"), "bias": P("model"), "w": P("data", "model")}
METADATA: dict[str, Any] = {
    "kernel_metadata": {"out_sharding": (None, "model")},
    "bias_metadata": {"out_sharding": ("model",)},
}


class ByHand(lm.LazyModuleMixin, nnx.Module):
    """A layer that makes its parameter itself."""

    def __init__(self, rngs: nnx.Rngs, **metadata: Any) -> None:
        self.w = lm.UninitializedParameter(init=nnx.initializers.lecun_normal(), key=rngs.params(), **metadata)

    def initialize_parameters(self, x: jax.Array) -> None:
        self.w.materialize((x.shape[-1], 8))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x @ self.w[...]


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, is_spread: bool) -> None:
        self.first = lm.LazyLinear(8, rngs=rngs, **METADATA if is_spread else {})
        self.own = ByHand(rngs, **{"out_sharding": ("data", "model")} if is_spread else {})
        self.norm = lm.LazyBatchNorm(use_bias=False, use_scale=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.norm(self.own(self.first(x)))


def call(model: Any, x: jax.Array) -> jax.Array:
    return model(x)


def sized(model: Any, x: jax.Array) -> None:
    lm.materialize(model, x)


WAYS: dict[str, Any] = {
    "nnx.jit": nnx.jit(call),
    "nnx.jit in nnx.jit": nnx.jit(nnx.jit(call)),
    "nnx.remat in nnx.jit": nnx.jit(nnx.remat(call)),
    "nnx.jit in nnx.remat": nnx.remat(nnx.jit(call)),
    "lm.jit in nnx.jit": nnx.jit(lm.jit(call)),
    "materialize in nnx.jit": nnx.jit(sized),
}


def place_of(name: str, _: Any) -> jax.sharding.PartitionSpec:
    return SHARDED[name.rpartition(".")[2]]


@pytest.mark.slow
@pytest.mark.parametrize("spread", [P(), P("data"), P("data", "model")], ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_metadata_count_for_an_argument_of_a_transform(way: str, spread: Any) -> None:
    mesh, x = mesh_of(data=4, model=2), np.ones((8, 4), np.float32)
    want = Net(nnx.Rngs(0), is_spread=False)
    (sized if "materialize" in way else call)(want, jnp.asarray(x))
    with jax.set_mesh(mesh):
        model = Net(nnx.Rngs(0), is_spread=True)
        WAYS[way](model, jax.device_put(x, jax.NamedSharding(mesh, spread)))
    for name, array in arrays(want).items():
        if name in arrays(want, nnx.Param):  # where XLA leaves what it computes, as statistics, is its own choice
            assert_placed(arrays(model)[name], mesh, place_of(name, ()), name)
        np.testing.assert_allclose(arrays(model)[name], array, rtol=1e-5, atol=1e-6)
    assert_same_on_mesh(model.own, want.own, mesh, place_of)


def test_the_optimizer_follows_them() -> None:
    mesh = mesh_of(data=4, model=2)

    @nnx.jit
    def step(model: Any, optimizer: Any, x: jax.Array) -> None:
        model(x)
        optimizer.update(model, nnx.grad(lambda model: model(x).sum())(model))

    with jax.set_mesh(mesh):
        model = lm.LazyLinear(8, rngs=nnx.Rngs(0), **METADATA)
        optimizer = lm.LazyOptimizer(model, optax.sgd(1e-3, momentum=0.9), wrt=nnx.Param)
        step(model, optimizer, jnp.ones((8, 4)))
    assert_placed(optimizer.opt_state[0].trace["kernel"].get_raw_value(), mesh, P(None, "model"))


@pytest.mark.parametrize("given", [False, True], ids=["set_mesh", "given"])
def test_a_load_inside_a_transform(given: bool) -> None:
    mesh, where = mesh_of(data=4, model=2), {}
    values = {"kernel": np.arange(32, dtype=np.float32).reshape(4, 8), "bias": np.arange(8, dtype=np.float32)}
    if given:
        where = {"mesh": mesh, "rules": [("kernel", P(None, "model")), ("bias", P("model"))]}
    with contextlib.nullcontext() if given else jax.set_mesh(mesh):
        model = lm.LazyLinear(8, rngs=nnx.Rngs(0), **{} if given else METADATA)
        nnx.jit(lambda model: lm.load(model, values, **where) and None)(model)
    for name, value in values.items():
        assert_placed(arrays(model)[name], mesh, SHARDED[name], name)
        np.testing.assert_array_equal(arrays(model)[name], value)


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.fc = lm.LazyLinear(16, rngs=rngs)
        self.out = lm.LazyLinear(8, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.out(self.fc(x))


def stack(seed: int) -> Any:
    return nnx.Dict(blocks=lm.Stack(Block, 4, rngs=nnx.Rngs(seed)))


@pytest.mark.slow
@pytest.mark.parametrize("spec", [P("layers", None, "model"), P(None, "model"), P()], ids=str)
@pytest.mark.parametrize("way", ["lazy", "ready", "where it is"])
def test_a_load_of_a_stack_inside_a_transform(way: str, spec: Any) -> None:
    mesh, x = mesh_of(layers=2, model=4), jnp.ones((4, 8))
    want, model = stack(3), stack(0)
    want["blocks"](x)
    values = {name: np.asarray(value) for name, value in lm.state_dict(want).items()}
    where: dict[str, Any] = {"mesh": mesh, "rules": [("fc.kernel", spec)]}
    if way != "lazy":
        lm.materialize(model["blocks"], x, **where if way == "where it is" else {})
    nnx.jit(lambda m: lm.load(m, values, **{} if way == "where it is" else where) and None)(model)
    assert_placed(model["blocks"].blocks_as_one.fc.kernel.get_value(), mesh, spec)
    for name, value in lm.state_dict(model).items():
        np.testing.assert_array_equal(value, values[name])


@pytest.mark.parametrize("how", [nnx.jit, lm.jit], ids=["nnx.jit", "lm.jit"])
@pytest.mark.parametrize("blocks", [(0, 1, 2, 3), (1,), (0, 2)], ids=str)
@pytest.mark.parametrize("kinds", ["aa", "ee"])
@pytest.mark.parametrize("spec", [P("layers"), P(("layers", "model")), P(None, None, "model")], ids=str)
def test_some_blocks_get_values_inside_a_transform(spec: Any, kinds: str, blocks: tuple[int, ...], how: Any) -> None:
    types = tuple([AxisType.Auto if kind == "a" else AxisType.Explicit for kind in kinds])
    mesh = jax.make_mesh((2, 2), ("layers", "model"), axis_types=types, devices=jax.devices()[:4])
    want, model, x = stack(3), stack(0), jnp.ones((4, 8))
    lm.materialize(want["blocks"], x)
    lm.materialize(model["blocks"], x, mesh=mesh, rules=[("fc.kernel", spec)])
    before = {name: np.asarray(value) for name, value in lm.state_dict(model).items()}
    after = {name: np.asarray(value) for name, value in lm.state_dict(want).items()}
    given = {f"blocks.{i}.fc.kernel": after[f"blocks.{i}.fc.kernel"] for i in blocks}
    how(lambda m: lm.load_state_dict(m, given, strict=False) and None)(model)
    assert_placed(model["blocks"].blocks_as_one.fc.kernel.get_value(), mesh, spec)
    for name, value in lm.state_dict(model).items():
        np.testing.assert_array_equal(value, (before | given)[name])


@pytest.mark.parametrize("how", [nnx.jit, lm.jit], ids=["nnx.jit", "lm.jit"])
@pytest.mark.parametrize("kinds", ["aa", "ee", "ae", "ea"])
@pytest.mark.parametrize("make", [np.asarray, jnp.asarray])
def test_a_parameter_gets_a_value_inside_a_transform(make: Any, kinds: str, how: Any) -> None:
    types = tuple([AxisType.Auto if kind == "a" else AxisType.Explicit for kind in kinds])
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=types)
    model, value = nnx.Linear(4, 8, rngs=nnx.Rngs(0)), make(np.arange(32, dtype=np.float32).reshape(4, 8))
    lm.materialize(model, jnp.ones((2, 4)), mesh=mesh, rules=[("kernel", P("data", "model")), ("bias", P("model"))])
    how(lambda m: lm.load_state_dict(m, {"kernel": value}, strict=False) and None)(model)
    for name, spec in {"kernel": P("data", "model"), "bias": P("model")}.items():
        assert_placed(arrays(model)[name], mesh, spec)
    np.testing.assert_array_equal(model.kernel[...], value)
