"""lm.Stack on a mesh: rules see each parameter once, with the axis of the layers, and that axis can be split."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from on_mesh import P, assert_placed, assert_same_on_mesh, mesh_of

import lazymods as lm

X = jax.ShapeDtypeStruct((4, 8), jnp.float32)


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = lm.LazyLayerNorm(rngs=rngs)
        self.fc = lm.LazyLinear(16, rngs=rngs)
        self.out = lm.LazyLinear(8, kernel_init=nnx.initializers.orthogonal(), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.out(jax.nn.relu(self.fc(self.norm(x))))


class Model(nnx.Module):
    def __init__(self, seed: int = 0) -> None:
        rngs = nnx.Rngs(seed)
        self.blocks = lm.Stack(Block, 4, rngs=rngs)
        self.last = lm.LazyLinear(8, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(self.blocks(x))


SPECS = {
    "layers": lambda name: P("layers") if "blocks" in name else P(),
    "both": lambda name: P("layers", None, "model") if "kernel" in name and "blocks" in name else P(),
    "model": lambda name: P(None, "model") if "kernel" in name and "blocks" in name else P(),
    "joint": lambda name: P(("layers",), "model") if name.endswith("fc.kernel") else P(),
}


def ready(seed: int = 0) -> Model:
    model = Model(seed)
    lm.materialize(model, X)
    return model


def entries_of(model: Any) -> dict[str, np.ndarray[Any, Any]]:
    return {name: np.asarray(value) for name, value in lm.state_dict(model).items()}


@pytest.mark.slow
@pytest.mark.parametrize("kind", SPECS)
def test_born_in_parts(kind: str) -> None:
    mesh, seen = mesh_of(layers=2, model=4), {}

    def rules(name: str, shape: tuple[int, ...], dtype: Any) -> Any:
        seen[name] = shape
        return SPECS[kind](name)

    model = Model()
    report = lm.infer_shapes(model, X, mesh=mesh, rules=rules)
    lm.materialize(model, X, mesh=mesh, rules=rules)
    assert seen["blocks.fc.kernel"] == (4, 8, 16) and seen["last.kernel"] == (8, 8) and len(seen) == 8
    assert_same_on_mesh(model, ready(), mesh, lambda name, shape: SPECS[kind](name))
    [row] = [row for row in report.rows if row.path == "blocks.fc"]
    assert getattr(row.parameters[0].sharding, "spec", None) == SPECS[kind]("blocks.fc.kernel")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["m.safetensors", "m"])
@pytest.mark.parametrize("form", ["lazy", "ready"])
def test_loaded_in_parts(tmp_path: Any, form: str, name: str) -> None:
    mesh, want = mesh_of(layers=2, model=4), ready(seed=3)
    lm.save(want, tmp_path / name)
    model = ready() if form == "ready" else Model()
    rules = [(r"^blocks\..*kernel", P("layers", None, "model")), (r"^blocks", P("layers"))]
    lm.load(model, tmp_path / name, mesh=mesh, rules=rules)
    kernel = model.blocks.blocks_as_one.fc.kernel.get_value()
    assert_placed(kernel, mesh, P("layers", None, "model"))
    assert_placed(model.blocks.blocks_as_one.fc.bias.get_value(), mesh, P("layers"))
    for key, value in entries_of(want).items():
        np.testing.assert_array_equal(entries_of(model)[key], value)
    lm.save(model, tmp_path / f"again-{name}")
    other = ready()
    lm.load(other, tmp_path / f"again-{name}")
    for key, value in entries_of(want).items():
        np.testing.assert_array_equal(entries_of(other)[key], value)


@pytest.mark.slow
def test_a_load_leaves_a_stack_where_it_is() -> None:
    mesh, want, model = mesh_of(layers=2, model=4), ready(seed=3), Model()
    lm.materialize(model, X, mesh=mesh, rules=lambda name, *_: SPECS["both"](name))
    lm.load_state_dict(model, lm.state_dict(want))
    assert_same_on_mesh(model, want, mesh, lambda name, shape: SPECS["both"](name))
    model.blocks.each(lambda block: block.fc.bias.set_value(block.fc.bias[...] + 1))
    assert_placed(model.blocks.blocks_as_one.fc.kernel.get_value(), mesh, P("layers", None, "model"))
    np.testing.assert_array_equal(model.blocks.blocks_as_one.fc.bias[...], want.blocks.blocks_as_one.fc.bias[...] + 1)


@pytest.mark.slow
def test_a_step_on_a_mesh() -> None:
    mesh, want, model = mesh_of(layers=2, model=4), ready(), Model()
    lm.materialize(model, X, mesh=mesh, rules=lambda name, *_: SPECS["both"](name))
    x = jax.random.normal(jax.random.key(0), X.shape)
    step = lm.jit(nnx.grad(lambda m, x: jnp.mean(m(x) ** 2)))
    got, expected = step(model, x), step(want, x)
    np.testing.assert_allclose(
        got["blocks"]["blocks_as_one"]["fc"]["kernel"][...],
        np.asarray(expected["blocks"]["blocks_as_one"]["fc"]["kernel"][...]),
        rtol=1e-4,
        atol=1e-6,
    )
    assert_placed(model.blocks.blocks_as_one.fc.kernel.get_value(), mesh, P("layers", None, "model"))


class Counting(Block):
    """A block that keeps statistics as well."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        super().__init__(rngs)
        self.statistics = lm.LazyBatchNorm(rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.statistics(super().__call__(x))


def spread(kind: str) -> Any:
    model = nnx.Dict(blocks=lm.Stack(Counting, 4, rngs=nnx.Rngs(0)))
    rules = [("mean|var", P("layers"))] if kind == "layers" else []
    rules += [("kernel", SPECS[kind]("blocks.fc.kernel"))]
    lm.materialize(model["blocks"], X, mesh=mesh_of(layers=2, model=4), rules=rules)
    return model["blocks"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize("how", ["call", "vmap", "grad"])
def test_called_outside_of_jit(kind: str, how: str) -> None:
    got, want = spread(kind), lm.Stack(Counting, 4, rngs=nnx.Rngs(0))
    lm.materialize(want, X)
    places = [v.sharding for v in jax.tree.leaves(nnx.state(got, nnx.BatchStat))]
    x = jax.random.normal(jax.random.key(0), X.shape)

    def result(stack: Any) -> Any:
        if how == "vmap":
            stack.eval()
            return jax.vmap(stack)(x[None])
        if how == "grad":
            return nnx.to_pure_dict(nnx.grad(lambda stack: (stack(x) ** 2).sum())(stack))
        return stack(x)

    outputs = jax.tree.map(np.asarray, (result(got), result(want)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), *outputs)
    state = [jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(s, nnx.BatchStat))) for s in (got, want)]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), *state)
    if how == "call":
        now = jax.tree.leaves(nnx.state(got, nnx.BatchStat))
        assert all(v.sharding.is_equivalent_to(place, v.ndim) for v, place in zip(now, places, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("kind", SPECS)
def test_parameters_that_are_added_lie_with_their_layer(kind: str) -> None:
    def add(block: Any) -> None:
        block.double = nnx.Param(block.fc.kernel[...] * 2)
        block.ones = nnx.Param(jnp.ones(3))

    got, want = spread(kind), lm.Stack(Counting, 4, rngs=nnx.Rngs(0))
    lm.materialize(want, X)
    for stack in (got, want):
        stack.each(add)
    kernel, double = got.blocks_as_one.fc.kernel, got.blocks_as_one.double
    assert double.get_value().sharding.is_equivalent_to(kernel.get_value().sharding, 3)
    for name, value in entries_of(want).items():
        np.testing.assert_allclose(entries_of(got)[name], value, rtol=1e-6)


def test_values_on_devices_of_no_layer_are_refused() -> None:
    stack, devices = spread("model"), iter(jax.devices())
    with pytest.raises(lm.LazyError) as caught:
        stack.each(lambda block: setattr(block, "extra", nnx.Param(jax.device_put(jnp.ones(3), next(devices)))))
    assert str(caught.value).splitlines()[1:] == [
        "extra",
        "  got:    arrays that lie on other devices in each",
        "  needed: arrays on the devices of their layer, or all on the same",
        "  write:  jax.device_put(value, sharding)  # in each block",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("compile", [lambda f: f, nnx.jit, lm.jit], ids=["plain", "nnx.jit", "lm.jit"])
def test_explicit_axes(compile: Any) -> None:
    """A scan takes layers that are whole along their axis on each device: those are brought together and back."""
    mesh = jax.make_mesh((2, 4), ("layers", "model"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    stacks = [nnx.Dict(blocks=lm.Stack(Counting, 4, rngs=nnx.Rngs(0))) for _ in range(2)]
    got, want = (s["blocks"] for s in stacks)
    lm.materialize(got, X, mesh=mesh, rules=[(".", P("layers"))])
    lm.materialize(want, X)
    x = jax.random.normal(jax.random.key(0), X.shape)
    for _ in range(2):
        np.testing.assert_allclose(compile(lambda m, x: m(x))(got, x), want(x), rtol=1e-4, atol=1e-5)
    gradient = compile(nnx.grad(lambda m, x: (m(x) ** 2).sum()))
    with jax.set_mesh(mesh):
        found = gradient(got, x)
    pure = [jax.tree.map(np.asarray, nnx.to_pure_dict(g)) for g in (found, gradient(want, x))]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), *pure)
    for name, value in entries_of(want).items():
        np.testing.assert_allclose(entries_of(got)[name], value, rtol=1e-4, atol=1e-5)
    assert_placed(got.blocks_as_one.statistics.mean.get_value(), mesh, P("layers"))


@pytest.mark.slow
def test_a_second_mesh_of_partitioned_kernels() -> None:
    class Partitioned(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            init = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "model"))
            self.fc = lm.LazyLinear(8, kernel_init=init, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.fc(x)

    stack, rngs = lm.Stack(Partitioned, 4, rngs=nnx.Rngs(0)), nnx.Rngs(0)
    want = [nnx.Linear(8, 8, rngs=rngs) for _ in range(4)]
    for mesh in (mesh_of(layers=2, model=4), mesh_of(other=4, model=2)):
        lm.materialize(stack, X, mesh=mesh)
        assert_placed(stack.blocks_as_one.fc.kernel.get_value(), mesh, P(None, None, "model"))
        for block, layer in zip(stack, want, strict=True):
            np.testing.assert_array_equal(block.fc.kernel[...], layer.kernel[...])
