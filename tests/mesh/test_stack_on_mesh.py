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


def test_a_load_leaves_a_stack_where_it_is() -> None:
    mesh, want, model = mesh_of(layers=2, model=4), ready(seed=3), Model()
    lm.materialize(model, X, mesh=mesh, rules=lambda name, *_: SPECS["both"](name))
    lm.load_state_dict(model, lm.state_dict(want))
    assert_same_on_mesh(model, want, mesh, lambda name, shape: SPECS["both"](name))
    model.blocks.each(lambda block: block.fc.bias.set_value(block.fc.bias[...] + 1))
    assert_placed(model.blocks.blocks_as_one.fc.kernel.get_value(), mesh, P("layers", None, "model"))
    np.testing.assert_array_equal(model.blocks.blocks_as_one.fc.bias[...], want.blocks.blocks_as_one.fc.bias[...] + 1)


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
