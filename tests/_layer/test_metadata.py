"""Every metadata that a caller gives arrives, in whatever way the layer gets its sizes: as in Flax's explicit layer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import lazymods as lm

normal = nnx.initializers.lecun_normal()


def doubled(variable: Any, value: Any) -> Any:
    return value * 2


def unchanged(variable: Any, value: Any) -> Any:
    return value


def given() -> dict[str, dict[str, Any]]:
    mesh = jax.make_mesh((1, 1), ("a", "b"))
    names = ("a", "b")
    return {
        "names": {"kernel_metadata": {"out_sharding": names, "mesh": mesh}},
        "not eager": {"kernel_metadata": {"out_sharding": names, "eager_sharding": False}},
        "eager": {"kernel_metadata": {"out_sharding": names, "eager_sharding": True, "mesh": mesh}},
        "rules": {
            "kernel_metadata": {
                "out_sharding": ("x", "y"),
                "sharding_rules": (("x", "a"), ("y", "b")),
                "mesh": mesh,
            }
        },
        "keys of one's own": {"kernel_metadata": {"mine": 3}, "bias_metadata": {"other": "x"}},
        "hook": {"kernel_metadata": {"on_set_value": doubled}},
        "hooks": {"kernel_metadata": {"on_set_value": (doubled, unchanged)}},
        "dtype": {"param_dtype": jnp.bfloat16},
        "with_partitioning": {"kernel_init": nnx.with_partitioning(normal, names, mesh=mesh)},
        "with_partitioning, not eager": {"kernel_init": nnx.with_partitioning(normal, names, eager_sharding=False)},
        "with_metadata": {"kernel_init": nnx.with_metadata(normal, mine=4)},
    }


class Own(nnx.Module):
    """A class of somebody's own, which hands on what it gets."""

    def __init__(
        self,
        n: int,
        m: int,
        *,
        param_dtype: Any = jnp.float32,
        kernel_init: Any = normal,
        kernel_metadata: Any = None,
        bias_metadata: Any = None,
        rngs: nnx.Rngs,
    ) -> None:
        self.w = nnx.Param(kernel_init(rngs.params(), (n, m), param_dtype), **(kernel_metadata or {}))
        self.b = nnx.Param(jnp.zeros((m,), param_dtype), **(bias_metadata or {}))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x @ self.w + self.b[None]


LazyOwn = lm.lazy(Own, infer=lambda config, x: {"n": x.shape[-1]})
Make = Callable[..., Any]
LAYERS: dict[str, tuple[Make, Make, tuple[int, ...]]] = {
    "Linear": (lambda **k: lm.LazyLinear(4, **k), lambda **k: nnx.Linear(4, 4, **k), (2, 4)),
    "Conv": (lambda **k: lm.LazyConv(4, (3,), **k), lambda **k: nnx.Conv(4, 4, (3,), **k), (2, 5, 4)),
    "LinearGeneral": (
        lambda **k: lm.LazyLinearGeneral((4,), **k),
        lambda **k: nnx.LinearGeneral((4,), (4,), **k),
        (2, 4),
    ),
    "Einsum": (
        lambda **k: lm.LazyEinsum("nk,km->nm", sizes={"m": 4}, **k),
        lambda **k: nnx.Einsum("nk,km->nm", (4, 4), **k),
        (2, 4),
    ),
    "own": (lambda **k: LazyOwn(m=4, **k), lambda **k: Own(4, 4, **k), (2, 4)),
}
WAYS: dict[str, Callable[[Any, Any, jax.Array], Any]] = {
    "call": lambda model, want, x: (model(x), want(x)),
    "spec": lambda model, want, x: lm.materialize(model, jax.ShapeDtypeStruct(x.shape, x.dtype)),
    "load": lambda model, want, x: lm.load_state_dict(model, lm.state_dict(want)),
    "lm.jit": lambda model, want, x: [lm.jit(lambda m, x: m(x))(m, x) for m in (model, want)],
    "nnx.jit": lambda model, want, x: [nnx.jit(lambda m, x: m(x))(m, x) for m in (model, want)],
}
CONTEXTS: dict[str, Callable[[Any], Any]] = {
    "plain": lambda mesh: contextlib.nullcontext(),
    "set_mesh": lambda mesh: jax.set_mesh(mesh),
    "eager_sharding off": lambda mesh: nnx.use_eager_sharding(False),
}


CASES = [(layer, way) for layer in LAYERS for way in WAYS if way == "spec" or layer in ("Linear", "own")]


def described(model: Any) -> dict[Any, Any]:
    return {p: (type(v), v.get_metadata(), v.dtype) for p, v in nnx.to_flat_state(nnx.state(model))}


def assert_same(model: Any, want: Any) -> None:
    assert nnx.graphdef(model) == nnx.graphdef(want)
    assert described(model) == described(want)
    for (_, a), (_, b) in zip(*(nnx.to_flat_state(nnx.state(m)) for m in (model, want)), strict=True):
        x, y = a.get_raw_value(), b.get_raw_value()
        assert x.sharding.is_equivalent_to(y.sharding, x.ndim)
        np.testing.assert_array_equal(x, y)


@pytest.mark.slow  # by the number of its cases
@pytest.mark.filterwarnings("ignore:Variable hooks are deprecated")
@pytest.mark.parametrize("what", given())
@pytest.mark.parametrize(("layer", "way"), CASES)
def test_all_metadata_arrive(layer: str, what: str, way: str) -> None:
    lazy, explicit, shape = LAYERS[layer]
    for context in CONTEXTS.values():
        arguments = given()[what]
        with context(jax.make_mesh((1, 1), ("a", "b"))):
            x = jnp.ones(shape, arguments.get("param_dtype", jnp.float32))
            model, want = lazy(**arguments, rngs=nnx.Rngs(0)), explicit(**arguments, rngs=nnx.Rngs(0))
            before = {p: (m, d) for p, (_, m, d) in described(model).items()}
            assert before == {p: (m, d) for p, (_, m, d) in described(want).items()}  # while it is lazy, too
            WAYS[way](model, want, x)
            assert_same(model, want)


# ---------------------------------------------------------------- stacks


def axes_of(axis: int) -> Any:
    return nnx.StateAxes({nnx.PathContains("kernel"): axis, nnx.PathContains("w"): axis, ...: 0})


STACKS: dict[str, Callable[[Any], Any]] = {
    "vmap": lambda make: nnx.vmap(make, transform_metadata={nnx.PARTITION_NAME: "layers"}),
    "vmap, second": lambda make: nnx.vmap(make, out_axes=axes_of(1), transform_metadata={nnx.PARTITION_NAME: "layers"}),
    "vmap, spmd": lambda make: nnx.vmap(
        make, spmd_axis_name="a", axis_size=4, transform_metadata={nnx.PARTITION_NAME: "layers"}
    ),
}


class Stack(nnx.Module):
    def __init__(self, layers: Any, how: str) -> None:
        self.layers, self.how = layers, how

    def __call__(self, x: jax.Array) -> jax.Array:
        names = {nnx.PARTITION_NAME: "layers"}
        if self.how == "scan":
            step = nnx.scan(lambda x, m: m(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry, transform_metadata=names)
            return step(x, self.layers)
        axis = axes_of(1) if self.how == "vmap, second" else 0
        spmd: dict[str, Any] = {"spmd_axis_name": "a"} if self.how == "vmap, spmd" else {}
        return nnx.vmap(lambda m, x: m(x), in_axes=(axis, None), transform_metadata=names, **spmd)(self.layers, x)


@pytest.mark.slow  # by the number of its cases
@pytest.mark.parametrize("way", ["call", "spec", "load", "lm.jit"])
@pytest.mark.parametrize("what", ["not eager", "keys of one's own", "with_partitioning, not eager", "dtype"])
@pytest.mark.parametrize("how", [*STACKS, "scan"])
@pytest.mark.parametrize("layer", ["Linear", "own"])
def test_stacks_have_the_name_of_their_axis(layer: str, how: str, what: str, way: str) -> None:
    lazy, explicit, shape = LAYERS[layer]
    arguments = given()[what]
    x = jnp.ones(shape, arguments.get("param_dtype", jnp.float32))

    def build(make: Make) -> Any:
        def one(rngs: nnx.Rngs) -> Any:
            return make(**arguments, rngs=rngs)

        stacked = STACKS["vmap" if how == "scan" else how](one)
        return Stack(nnx.split_rngs(splits=4)(stacked)(nnx.Rngs(0)), how)

    mesh = jax.make_mesh((1, 1), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    with jax.set_mesh(mesh), nnx.use_eager_sharding(False):
        model, want = build(lazy), build(explicit)
        before = {p: metadata for p, (_, metadata, _) in described(model).items()}
        assert before == {p: metadata for p, (_, metadata, _) in described(want).items()}
        WAYS[way](model, want, x)
        assert nnx.graphdef(model) == nnx.graphdef(want)
        assert described(model) == described(want)
        for (_, a), (_, b) in zip(*(nnx.to_flat_state(nnx.state(m)) for m in (model, want)), strict=True):
            np.testing.assert_array_equal(a.get_raw_value(), b.get_raw_value())
