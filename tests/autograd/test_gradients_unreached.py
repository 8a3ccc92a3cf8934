"""Gradients by lazy layers that the function does not call: as of explicit layers, or an error that names them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import lazymods as lm

ag = lm.autograd
X = jnp.ones((2, 4))


class Net(nnx.Module):
    """Two layers, of which one is called."""

    def __init__(self, called: Any, unused: Any) -> None:
        self.called, self.unused = called, unused

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.called(x)


def lazy(sized: bool) -> Net:
    rngs = nnx.Rngs(0)
    called = lm.LazyLinear(3, rngs=rngs)
    return Net(called, lm.LazyEmbed(5, 2, rngs=rngs) if sized else lm.LazyLinear(2, rngs=rngs))


def explicit() -> Net:
    rngs = nnx.Rngs(0)
    return Net(nnx.Linear(4, 3, rngs=rngs), nnx.Embed(5, 2, rngs=rngs))


def loss(model: Net) -> jax.Array:
    return (model(X) ** 2).sum()


GRADIENTS: dict[str, Callable[[], Any]] = {
    "grad": lambda: ag.grad(loss),
    "value_and_grad": lambda: lambda m: ag.value_and_grad(loss)(m)[1],
    "lm.jit": lambda: lm.jit(lambda m: ag.grad(loss)(m)),
    "lm.jit of it": lambda: lm.jit(ag.grad(loss)),
    "check": lambda: lm.jit(lambda m: ag.grad(loss)(m), check=True),
    "nnx.jit": lambda: nnx.jit(lambda m: ag.grad(loss)(m)),
    "all": lambda: ag.grad(loss, argnums=nnx.DiffState(0, nnx.Param)),
    "several": lambda: lambda m: ag.grad(lambda m, x: loss(m) * x, argnums=(0, 1))(m, 1.0)[0],
    "a list": lambda: lambda m: ag.grad(lambda ms: loss(ms["m"][0]))({"m": [m]})["m"][0],
}


def ready(model: Net, how: str) -> Net:
    if "lm.jit" not in how and how != "check":
        lm.materialize(model, X)
    return model


@pytest.mark.parametrize("how", GRADIENTS)
def test_a_layer_with_all_its_sizes_has_a_gradient_of_zeros(how: str) -> None:
    model = ready(lazy(True), how)
    got, want = GRADIENTS[how]()(model), ag.grad(loss)(explicit())
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert lm.uninitialized_paths(model) == ["unused.embedding"]


@pytest.mark.parametrize("how", GRADIENTS)
def test_one_without_is_named(how: str) -> None:
    model = ready(lazy(False), how)
    before = sorted(lm.uninitialized_paths(model))  # NNX transforms sort attributes
    with pytest.raises(lm.UninitializedError) as caught:
        GRADIENTS[how]()(model)
    assert "unused.bias" not in str(caught.value)  # its shape is known
    assert "unused.kernel\n  got:    a lazy parameter that the function does not reach" in str(caught.value)
    assert sorted(lm.uninitialized_paths(model)) == before


def test_the_error_says_what_to_write() -> None:
    model = ready(lazy(False), "grad")
    with pytest.raises(lm.UninitializedError) as caught:
        ag.grad(loss)(model)
    assert str(caught.value) == (
        "lm.autograd.grad: unused.kernel\n"
        "  got:    a lazy parameter that the function does not reach, so that its shape is not known\n"
        "  needed: a shape: the gradient by what is not reached is zeros of it\n"
        "  write:  lm.materialize(layer, x)  # before; or remove the layer; or freeze it: "
        "lm.autograd.requires_grad_(layer, False)"
    )
    ag.requires_grad_(model.unused, False)
    assert set(ag.grad(loss)(model)) == {"called"}
    ag.requires_grad_(model.unused)
    model.unused(X)
    np.testing.assert_array_equal(ag.grad(loss)(model)["unused"]["kernel"][...], np.zeros((4, 2)))


def test_a_layer_that_is_called_later_in_the_same_program() -> None:
    def step(model: Net) -> Any:
        gradient = ag.grad(loss)(model)
        return gradient, model.unused(X)

    model = lazy(False)
    gradient, out = lm.jit(step)(model)
    np.testing.assert_array_equal(gradient["unused"]["kernel"][...], np.zeros((4, 2)))
    assert out.shape == (2, 2) and not lm.has_uninitialized_params(model)


@pytest.mark.parametrize("compiled", [True, False])
def test_training_with_one(compiled: bool) -> None:
    def step(model: Any, optimizer: Any) -> jax.Array:
        value, gradient = ag.value_and_grad(loss)(model)
        optimizer.update(model, gradient)
        return value

    model, want, tx = lazy(True), explicit(), optax.sgd(1e-2, momentum=0.9)
    optimizer, other = lm.LazyOptimizer(model, tx, wrt=lm.trainable), nnx.Optimizer(want, tx, wrt=lm.trainable)
    if not compiled:
        lm.materialize(model, X)
    run = lm.jit(step) if compiled else step
    assert [float(run(model, optimizer)) for _ in range(3)] == [float(run(want, other)) for _ in range(3)]
    assert nnx.graphdef(model) == nnx.graphdef(want) and nnx.graphdef(optimizer) == nnx.graphdef(other)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(model), nnx.state(want))
