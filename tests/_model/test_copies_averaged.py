"""Copies of a lazy model that a step averages into and never calls: a teacher, a target network, an average of weights.

The twin is the explicit model, with Flax's own jit and optimizer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import lazymods as lm

X = jnp.linspace(0.0, 1.0, 20).reshape(5, 4)


class Scale(nnx.Module):
    def __init__(self, n: int, *, rngs: nnx.Rngs) -> None:
        self.w = nnx.Param(nnx.initializers.normal()(rngs.params(), (n,)))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x * self.w[None]


class LazyScale(lm.LazyModuleMixin, Scale):
    cls_to_become = Scale

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.w = lm.UninitializedParameter(init=nnx.initializers.normal(), key=rngs.params())

    def initialize_parameters(self, x: jax.Array) -> None:
        self.w.materialize((x.shape[-1],))


class Maker:
    """Makes layers, lazy or explicit."""

    def __init__(self, lazy: bool) -> None:
        self.is_lazy = lazy

    def linear(self, n: int, m: int, rngs: nnx.Rngs) -> Any:
        return lm.LazyLinear(m, rngs=rngs) if self.is_lazy else nnx.Linear(n, m, rngs=rngs)

    def norm(self, n: int, rngs: nnx.Rngs) -> Any:
        return lm.LazyBatchNorm(rngs=rngs) if self.is_lazy else nnx.BatchNorm(n, rngs=rngs)

    def scale(self, n: int, rngs: nnx.Rngs) -> Any:
        return LazyScale(rngs=rngs) if self.is_lazy else Scale(n, rngs=rngs)


def plain(make: Maker) -> Any:
    rngs = nnx.Rngs(0)
    return nnx.Sequential(make.linear(4, 8, rngs), nnx.relu, make.linear(8, 2, rngs))


def of_one_seed(make: Maker) -> Any:  # each layer is made as the next one: only its place tells which is its copy
    return nnx.Sequential(*(make.linear(n, 6, nnx.Rngs(0)) for n in (4, 6, 6)))


def with_statistics(make: Maker) -> Any:
    rngs = nnx.Rngs(0)
    return nnx.Sequential(make.linear(4, 3, rngs), make.norm(3, rngs), make.scale(3, rngs))


def one_layer(make: Maker) -> Any:
    return make.linear(4, 2, nnx.Rngs(0))


MODELS: dict[str, Callable[[Maker], Any]] = {f.__name__: f for f in (plain, of_one_seed, with_statistics, one_layer)}


def by_optax(model: Any, average: Any) -> None:
    nnx.update(average, optax.incremental_update(nnx.state(model, nnx.Param), nnx.state(average, nnx.Param), 0.1))


def by_hand(model: Any, average: Any) -> None:
    new, old = (nnx.to_flat_state(nnx.state(m, nnx.Param)) for m in (model, average))
    for (_, a), (_, b) in zip(new, old, strict=True):
        b[...] = 0.5 * a[...] + 0.5 * b[...]
    nnx.update(average, nnx.from_flat_state(list(old)))


def by_map(model: Any, average: Any) -> None:
    states = nnx.state(model), nnx.state(average)
    nnx.update(average, jax.tree.map(lambda a, b: a + b, *states))


WAYS = {f.__name__: f for f in (by_optax, by_hand, by_map)}


def trained(lazy: bool, model: str, way: str) -> list[Any]:
    student = MODELS[model](Maker(lazy))
    average = nnx.clone(student)
    optimizer = (lm.LazyOptimizer if lazy else nnx.Optimizer)(student, optax.sgd(0.1), wrt=nnx.Param)

    def step(model: Any, average: Any, optimizer: Any, x: jax.Array) -> jax.Array:
        loss, grads = nnx.value_and_grad(lambda m: (m(x) ** 2).mean())(model)
        optimizer.update(model, grads)
        WAYS[way](model, average)
        return loss

    compiled = (lm.jit if lazy else nnx.jit)(step)
    losses = [compiled(student, average, optimizer, X) for _ in range(3)]
    assert not lm.has_uninitialized_params(average)
    return [losses, nnx.state(student), nnx.state(average), average(X)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("model", MODELS)
def test_an_average_starts_as_the_explicit_copy(model: str, way: str) -> None:
    got, want = trained(True, model, way), trained(False, model, way)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


class WithTeacher(nnx.Module):
    """A model that holds its own average."""

    def __init__(self, make: Maker) -> None:
        self.student = plain(make)
        self.teacher = nnx.clone(self.student)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.student(x)
        by_map(self.student, self.teacher)
        return y


@pytest.mark.slow
@pytest.mark.parametrize("size", [lm.infer_shapes, lm.summary, lm.materialize])
def test_a_model_that_holds_its_average_is_sized(size: Callable[..., Any]) -> None:
    model, want = WithTeacher(Maker(True)), WithTeacher(Maker(False))
    report = size(model, X)
    assert report.total_parameters == 2 * (4 * 8 + 8 + 8 * 2 + 2)
    assert lm.has_uninitialized_params(model) == (size is not lm.materialize)
    lm.materialize(model, X)
    np.testing.assert_array_equal(model(X), want(X))
    assert nnx.graphdef(model) == nnx.graphdef(want)
    for a, b in zip(jax.tree.leaves(nnx.state(model)), jax.tree.leaves(nnx.state(want)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_copy_that_is_called_takes_its_own_sizes() -> None:
    model = one_layer(Maker(True))
    copy = nnx.clone(model)
    lm.jit(lambda m, c, x: (m(x), c(x[:, :3])))(model, copy, X)
    assert model.kernel.shape == (4, 2) and copy.kernel.shape == (3, 2)


def test_what_is_no_copy_is_named() -> None:
    model, other = plain(Maker(True)), nnx.Sequential(lm.LazyLinear(8, rngs=nnx.Rngs(5)))
    optimizer = lm.LazyOptimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    @lm.jit
    def step(model: Any, other: Any, optimizer: Any, x: jax.Array) -> None:
        optimizer.update(model, nnx.grad(lambda m: m(x).sum())(model))
        jax.tree.map(jnp.add, nnx.state(model.layers[0]), nnx.state(other.layers[0]))

    with pytest.raises(ValueError, match="UninitializedParameter") as caught:
        step(model, other, optimizer, X)
    assert not isinstance(caught.value, lm.LazyError)
    note = (
        "no layer of these models had been called: layers.0 (LazyLinear), ...; if it is for want of their values, "
        "lm.materialize(model, x) before"
    )
    assert note in caught.value.__notes__
    assert lm.has_uninitialized_params(model) and lm.has_uninitialized_params(other)
