"""Parameters that are made by hand while transforms run: none is lost, and none is a tracer."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import array

import lazymods as lm

X = array(2, 8)


def by_hand(layer: Any, x: jax.Array) -> Any:
    layer.initialize_parameters(x)
    return layer(x).sum()


def placeholders_by_hand(layer: Any, x: jax.Array) -> Any:
    layer.kernel.materialize((8, 4))
    layer.bias.materialize((4,))
    return layer(x).sum()


def values_by_hand(layer: Any, x: jax.Array) -> Any:
    layer.kernel[...] = nnx.Linear(8, 4, rngs=nnx.Rngs(0)).kernel[...]
    layer.bias.materialize((4,), jnp.zeros(4))
    return layer(x).sum()


BY_HAND = [by_hand, placeholders_by_hand, values_by_hand]


@pytest.mark.parametrize("by_hand", BY_HAND)
@pytest.mark.parametrize("transform", [nnx.grad, nnx.value_and_grad, lm.autograd.grad, lambda f: nnx.jit(nnx.grad(f))])
def test_parameters_made_by_hand_are_not_lost_either(transform: Any, by_hand: Any) -> None:
    layer: Any = lm.LazyLinear(4, rngs=nnx.Rngs(0))
    with pytest.raises(lm.UninitializedError, match="LazyLinear"):
        transform(by_hand)(layer, X)
    assert lm.uninitialized_paths(layer) == ["kernel", "bias"]
    assert by_hand(layer, X) == nnx.Linear(8, 4, rngs=nnx.Rngs(0))(X).sum()


@pytest.mark.parametrize("by_hand", BY_HAND)
def test_parameters_made_by_hand_in_a_jit_are_carried_out(by_hand: Any) -> None:
    layer: Any = lm.LazyLinear(4, rngs=nnx.Rngs(0))
    nnx.jit(by_hand)(layer, X)
    np.testing.assert_array_equal(layer.kernel[...], nnx.Linear(8, 4, rngs=nnx.Rngs(0)).kernel[...])


def test_a_placeholder_of_a_copy_is_not_drawn_for_the_copy_alone() -> None:
    model = nnx.Dict(w=lm.UninitializedParameter((None,), init=nnx.initializers.ones, key=jax.random.key(0)))

    @jax.jit
    def total(model: Any) -> Any:
        model["w"].materialize((3,))
        return model["w"].sum()

    with pytest.raises(lm.UninitializedError, match=r"w \(UninitializedParameter\)(.|\n)*parameters that outlive"):
        total(model)
    assert lm.uninitialized_paths(model) == ["w"]


@pytest.mark.parametrize("fill", [
    lambda m, v: m["w"].materialize((3,), v), lambda m, v: lm.load_state_dict(m, {"w": v})], ids=["by hand", "load"])
def test_a_placeholder_without_a_lazy_layer_has_no_gradient_either(fill: Any) -> None:
    model = nnx.Dict(w=lm.UninitializedParameter((None,)))

    def total(model: Any) -> Any:
        fill(model, jnp.ones(3))
        return model["w"].sum()

    with pytest.raises(lm.UninitializedError, match=r"w \(UninitializedParameter\)"):
        nnx.grad(total)(model)
    assert lm.uninitialized_paths(model) == ["w"]


def test_no_tracer_is_written_into_a_placeholder_outside() -> None:
    one = lm.UninitializedParameter((None,))

    def fill(v: jax.Array) -> jax.Array:
        one[...] = v
        return one.sum()

    with pytest.raises(Exception, match="trace level"):
        jax.jit(fill)(jnp.ones(3))
    assert lm.is_lazy(one)
    assert fill(jnp.ones(3)) == 3
