"""Models that are called by their methods: infer_shapes, summary and materialize take one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import lazymods as lm

X = jnp.ones((2, 4))
XS = jnp.ones((3, 2, 4))


class Cell(nnx.Module):
    """Has a step and loops over it, and no call."""

    def __init__(self, first: Any, second: Any) -> None:
        self.scale = nnx.Param(jnp.ones(()))
        self.first, self.second = first, second

    def _private(self, x: jax.Array) -> jax.Array:
        return x

    def step(self, x: jax.Array, double: bool = False) -> jax.Array:
        y = self.second(jax.nn.relu(self.first(x))) * self.scale[...]
        return y * 2 if double else y

    def unroll(self, xs: jax.Array) -> jax.Array:
        def body(cell: Cell, carry: Any, x: jax.Array) -> Any:
            return carry, cell.step(x)

        return nnx.scan(body, in_axes=(None, nnx.Carry, 0))(self, jnp.zeros(()), xs)[1]

    @nnx.remat
    def again(self, x: jax.Array) -> jax.Array:
        return self.step(x)


    @nnx.jit
    def compiled(self, x: jax.Array) -> jax.Array:
        return self.step(x)


class CalledToo(Cell):
    """Has a call as well, which uses one layer."""

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.first(x)


def lazy(cls: Any = Cell) -> Any:
    rngs = nnx.Rngs(0)
    return cls(lm.LazyLinear(3, rngs=rngs), lm.LazyLinear(2, rngs=rngs))


def explicit(cls: Any = Cell) -> Any:
    rngs = nnx.Rngs(0)
    return cls(nnx.Linear(4, 3, rngs=rngs), nnx.Linear(3, 2, rngs=rngs))


def assert_same(model: Any, want: Any) -> None:
    assert nnx.graphdef(model) == nnx.graphdef(want)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(model), nnx.state(want))


METHODS: dict[str, tuple[Callable[[Any], Any], tuple[Any, ...], dict[str, Any]]] = {
    "step": (lambda m: m.step, (X,), {}),
    "keyword": (lambda m: m.step, (X,), {"double": True}),
    "loop": (lambda m: m.unroll, (XS,), {}),
    "remat": (lambda m: m.again, (X,), {}),
    "nnx.jit": (lambda m: m.compiled, (X,), {}),
    "partial": (lambda m: functools.partial(Cell.step, m), (X,), {}),
}


@pytest.mark.parametrize("cls", [Cell, CalledToo])
@pytest.mark.parametrize("name", METHODS)
def test_a_method_stands_for_its_model(name: str, cls: Any) -> None:
    method, args, kwargs = METHODS[name]
    spec = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in args]
    model, want = lazy(cls), explicit(cls)
    for report in (lm.infer_shapes, lm.summary):
        got, expected = report(method(model), *spec, **kwargs), report(method(want), *spec, **kwargs)
        assert [row.path for row in got.rows] == ["", "first", "second"]
        assert (got.output, got.total_parameters, got.flops) == (expected.output, 24, expected.flops)
        assert [row.inputs for row in got.rows] == [row.inputs for row in expected.rows]
    assert got.output.shape == method(want)(*args, **kwargs).shape
    assert got.rows[0].inputs is not None and got.rows[1].inputs == "f32[2,4]"
    assert lm.is_lazy(model.first)
    materialized = lm.materialize(method(model), *spec, **kwargs)
    assert materialized.unreached == ()
    assert_same(model, want)
    np.testing.assert_array_equal(method(model)(*args, **kwargs), method(want)(*args, **kwargs))


def test_layers_that_the_method_does_not_call_are_told_by_their_paths() -> None:
    model = lazy(CalledToo)
    assert lm.materialize(model.__call__, X).unreached == ("second",)
    assert lm.uninitialized_paths(model) == ["second.kernel", "second.bias"]
    lm.materialize(model.step, X)
    assert_same(model, explicit(CalledToo))
    assert str(lm.summary(model.step)) == str(lm.summary(explicit(CalledToo)))


def test_a_method_that_fails_leaves_the_model_as_it_was() -> None:
    model = lazy()
    with pytest.raises(lm.LazyError):
        lm.materialize(model.step, jnp.float32(1))
    assert len(lm.uninitialized_paths(model)) == 4
    lm.materialize(model.step, X)
    assert_same(model, explicit())


@pytest.mark.parametrize("function", [lm.infer_shapes, lm.materialize, lm.summary])
def test_a_model_without_a_call_is_told(function: Any) -> None:
    model = lazy()
    with pytest.raises(lm.ArgumentError) as caught:
        function(model, X)
    assert str(caught.value) == (
        "Cell\n  got:    a module without a __call__\n"
        "  needed: what can be called: it is run without values, to see which layer gets what\n"
        "  write:  lm.materialize(model.step, x)  # a method of it"
    )
    assert len(lm.uninitialized_paths(model)) == 4
    assert lm.summary(model).total_parameters == 1 + 3 + 2  # without arguments nothing is called


def test_one_without_methods_is_told_as_well() -> None:
    class Holder(nnx.Module):
        def __init__(self) -> None:
            self.layer = lm.LazyLinear(2, rngs=nnx.Rngs(0))

    with pytest.raises(lm.ArgumentError, match=r"lm\.materialize\(model\.method, x\)"):
        lm.materialize(Holder(), X)
