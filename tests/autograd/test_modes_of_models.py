"""no_grad and the others around models: statistics, rngs, lazy layers, loads; stop_gradient by hand is the oracle."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import lazymods as lm

ag = lm.autograd
X = jnp.array([1.0, -2.0, 3.0])
constant = jax.lax.stop_gradient


def assert_same(got: Any, want: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


class Net(nnx.Module):
    """Two linear layers, one of them lazy if asked for, a batch norm and a dropout."""

    def __init__(self, lazy: bool = False) -> None:
        rngs = nnx.Rngs(0)
        self.first = lm.LazyLinear(5, rngs=rngs) if lazy else nnx.Linear(3, 5, rngs=rngs)
        self.norm = nnx.BatchNorm(5, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.dropout(self.norm(self.first(x)))


BATCH = jnp.arange(12.0).reshape(4, 3)


def to_itself(model: Net, x: jax.Array) -> jax.Array:
    with ag.no_grad():
        target = model(x)
    return ((model(x) - target) ** 2).mean()


def to_itself_by_hand(model: Net, x: jax.Array) -> jax.Array:
    target = constant(model(x))
    return ((model(x) - target) ** 2).mean()


JITS: dict[str, Callable[[Any], Any]] = {
    "plain": lambda f: f,
    "nnx.jit": nnx.jit,
    "lm.jit": lm.jit,
    "lm.jit, checked": lambda f: lm.jit(f, check=True),
    "lazy": lambda f: lm.lazytensor.lazy()(f),
}


@pytest.mark.slow
@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("jit", JITS)
def test_statistics_and_rngs_go_on_in_a_block(jit: str, lazy: bool) -> None:
    model, other = Net(lazy), Net()
    if lazy and jit != "lm.jit":
        lm.materialize(model, BATCH)
    got = JITS[jit](nnx.grad(to_itself))(model, BATCH)
    want = JITS[jit](nnx.grad(to_itself_by_hand))(other, BATCH)
    assert_same(got, want)
    assert_same(nnx.state(model, nnx.Not(nnx.RngKey)), nnx.state(other, nnx.Not(nnx.RngKey)))
    assert model.dropout.rngs is not None and int(model.dropout.rngs.count[...]) == 2


@pytest.mark.slow
def test_a_decision_on_a_value_in_a_block() -> None:
    def f(x: jax.Array) -> jax.Array:
        with ag.no_grad():
            y = x * 3
            large = bool(y.sum() > 0)
        return (x * y).sum() if large else x.sum()

    for jit in (lm.jit, lambda f: lm.jit(f, check=True)):
        gradient = jit(lambda x: jax.grad(f)(x))
        for x in (X, -X, X):
            assert_same(gradient(x), 3 * x if float(x.sum()) > 0 else jnp.ones(3))


@pytest.mark.slow
@pytest.mark.parametrize("jit", [lambda f: f, jax.jit])
def test_a_model_that_is_built_and_called_first_in_a_block(jit: Any) -> None:
    def f(x: jax.Array, lazy: bool) -> jax.Array:
        with ag.no_grad():
            model = Net(lazy)
            target = model(x)
        model.norm.mean[...] = jnp.ones(5)  # made in the block, changed after it
        model.norm.scale = nnx.Param(jnp.full(5, 2.0))
        return (model(x) * target).sum()

    gradients = [jit(jax.grad(lambda x, lazy=lazy: f(x, lazy)))(BATCH) for lazy in (False, True)]
    np.testing.assert_array_equal(*gradients)


def test_a_lazy_layer_that_is_closed_over_is_called_first_in_a_block() -> None:
    layer, other = lm.LazyLinear(5, rngs=nnx.Rngs(0)), nnx.Linear(3, 5, rngs=nnx.Rngs(0))
    with ag.no_grad():
        pass

    def f(x: jax.Array) -> jax.Array:
        with ag.no_grad():
            target = layer(x)
        return (layer(x) * target).sum()

    want = jax.grad(lambda x: (other(x) * constant(other(x))).sum())(BATCH)
    np.testing.assert_array_equal(jax.grad(f)(BATCH), want)
    assert type(layer) is nnx.Linear


def test_a_load_in_a_block_takes_traced_values() -> None:
    entries = lm.state_dict(nnx.Linear(3, 5, rngs=nnx.Rngs(0)))

    @jax.jit
    def f(entries: Any, x: jax.Array) -> jax.Array:
        model = nnx.Linear(3, 5, rngs=nnx.Rngs(1))
        with ag.no_grad():
            lm.load_state_dict(model, entries)
        return model(x)

    assert_same(f(entries, BATCH), nnx.Linear(3, 5, rngs=nnx.Rngs(0))(BATCH))
