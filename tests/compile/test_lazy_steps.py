"""A training step as the first call of a lazy model, and classes that change inside a compiled function."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.core import Tracer

import lazymods as lm

X = jax.random.normal(jax.random.key(0), (6, 4))


class Net(nnx.Module):
    """Layers with parameters, statistics and random state."""

    def __init__(self, lazy: bool) -> None:
        rngs = nnx.Rngs(0)
        self.first = lm.LazyLinear(5, rngs=rngs) if lazy else nnx.Linear(4, 5, rngs=rngs)
        self.norm = lm.LazyBatchNorm(rngs=rngs) if lazy else nnx.BatchNorm(5, rngs=rngs)
        self.drop = nnx.Dropout(0.3, rngs=rngs)
        self.last = lm.LazyLinear(2, rngs=rngs) if lazy else nnx.Linear(5, 2, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(self.drop(jnp.tanh(self.norm(self.first(x)))))


def loss(model: Net, x: jax.Array) -> jax.Array:
    return ((model(x) - 1) ** 2).mean()


def step(model: Net, optimizer: nnx.Optimizer[Any], x: jax.Array) -> jax.Array:
    value, grads = nnx.value_and_grad(loss)(model, x)
    optimizer.update(model, grads)
    return value


def leaves(model: Any) -> list[Any]:
    state = nnx.state(model)
    return [
        jax.random.key_data(v) if jnp.issubdtype(v.dtype, jax.dtypes.prng_key) else v for v in jax.tree.leaves(state)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("tx", [optax.sgd(0.1, momentum=0.9), optax.sgd(0.1)], ids=["momentum", "sgd"])
@pytest.mark.parametrize("sized", ["before", "in the step"])
def test_the_first_step_of_a_lazy_model(tx: Any, sized: str) -> None:
    model, want = Net(lazy=True), Net(lazy=False)
    optimizer, other = lm.LazyOptimizer(model, tx, wrt=nnx.Param), nnx.Optimizer(want, tx, wrt=nnx.Param)
    if sized == "before":
        lm.materialize(model, X)
    ours, plain = lm.jit(step), nnx.jit(step)
    for _ in range(3):
        np.testing.assert_allclose(ours(model, optimizer, X), plain(want, other, X), rtol=1e-6)
    assert type(optimizer) is nnx.Optimizer
    assert not any(isinstance(v, Tracer) for v in leaves((model, optimizer)))
    for a, b in zip(leaves((model, optimizer)), leaves((want, other)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
    assert nnx.graphdef(model) == nnx.graphdef(want)


@pytest.mark.parametrize("transform", [nnx.remat, nnx.jit, lambda f: nnx.vmap(f, in_axes=(None, 0))])
def test_a_lazy_model_inside_another_transform(transform: Any) -> None:
    def call(model: nnx.Sequential, x: jax.Array) -> jax.Array:
        return transform(lambda model, x: model(x))(model, x)

    model = nnx.Sequential(lm.LazyLinear(3, rngs=nnx.Rngs(0)), jnp.tanh, lm.LazyLinear(2, rngs=nnx.Rngs(1)))
    want = nnx.Sequential(nnx.Linear(4, 3, rngs=nnx.Rngs(0)), jnp.tanh, nnx.Linear(3, 2, rngs=nnx.Rngs(1)))
    np.testing.assert_allclose(lm.jit(call)(model, X), call(want, X), rtol=1e-6)
    assert nnx.graphdef(model) == nnx.graphdef(want)


class Trainer(nnx.Module):
    """Holds its model, and has a compiled method."""

    def __init__(self, lazy: bool) -> None:
        self.net = Net(lazy)

    @lm.jit
    def slopes(self, x: jax.Array) -> Any:
        return nnx.grad(loss)(self.net, x)


@pytest.mark.slow
def test_a_compiled_method_of_a_lazy_model() -> None:
    trainer, want = Trainer(lazy=True), Trainer(lazy=False)
    got, expected = trainer.slopes(X), want.slopes(X)
    assert not lm.has_uninitialized_params(trainer)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
    bound = Trainer(lazy=True)
    assert len(jax.tree.leaves(lm.jit(bound.slopes.__func__.__wrapped__)(bound, X))) == 6  # type: ignore[attr-defined]


def test_a_step_that_fails_leaves_the_model_lazy() -> None:
    model = Net(lazy=True)

    @lm.jit
    def fails(model: Net, x: jax.Array) -> None:
        nnx.grad(loss)(model, x)
        raise KeyError("the step's own")

    with pytest.raises(KeyError, match="the step's own"):
        fails(model, X)
    assert lm.has_uninitialized_params(model)
    assert type(model.first) is lm.LazyLinear
    model(X)


def test_an_error_of_the_function_itself_is_raised_as_it_is() -> None:
    model = Net(lazy=True)

    @lm.jit
    def fails(model: Net, x: jax.Array) -> None:
        raise ValueError("no transform is involved")

    with pytest.raises(ValueError, match="no transform is involved") as error:
        fails(model, X)
    assert type(error.value) is ValueError


@pytest.mark.slow
def test_a_lazy_model_that_is_closed_over_is_sized_as_an_argument_is() -> None:
    model, explicit = Net(lazy=True), Net(lazy=False)
    slopes = lm.jit(lambda x: nnx.grad(loss)(model, x))
    want = nnx.grad(loss)(explicit, X)
    got = slopes(X)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, want)
    assert type(model.first) is type(model.last) is nnx.Linear


def test_layers_that_are_not_reached_stay_lazy_and_have_no_gradient() -> None:
    model, plain = Net(lazy=True), Net(lazy=True)

    def slopes(model: Net, x: jax.Array) -> Any:
        return nnx.grad(lambda model: model.first(x).sum())(model)

    plain.first(X)
    want, got = slopes(plain, X), lm.jit(slopes)(model, X)
    assert type(model.first) is nnx.Linear
    assert type(model.last) is lm.LazyLinear
    for name in ("kernel", "bias"):
        np.testing.assert_allclose(got["first"][name][...], want["first"][name][...], rtol=1e-6)
        assert lm.is_lazy(got["last"][name])
        assert lm.is_lazy(want["last"][name])


# ---------------------------------------------------------------- classes


class Plain(nnx.Module):
    """Adds."""

    def __init__(self) -> None:
        self.weight = nnx.Param(jnp.ones(2))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.weight[...]


class Other(Plain):
    """Multiplies."""

    def __call__(self, x: jax.Array) -> jax.Array:
        return x * self.weight[...]


@pytest.mark.parametrize("jit", [lambda f: f, lm.jit], ids=["plain", "lm.jit"])
def test_a_class_that_changes_inside_stays_changed(jit: Any) -> None:
    model = Plain()

    def turn(model: Plain, x: jax.Array) -> jax.Array:
        y = model(x)
        object.__setattr__(model, "__class__", Other)
        return y

    f = jit(turn)
    x = jnp.array([2.0, 3.0])
    np.testing.assert_array_equal(f(model, x), x + 1)
    assert type(model) is Other
    np.testing.assert_array_equal(f(model, x), x)
    np.testing.assert_array_equal(f(model, x), x)
