"""Lazy layers that nnx.vmap stacks, sized in every way: the explicit stack, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import lazymods as lm

X = jax.ShapeDtypeStruct((2, 4), jnp.float32)


class Stack(nnx.Module):
    """Four layers of four features: every size is the same, so that no shape can tell by itself what is wrong."""

    def __init__(self, make: Callable[..., Any]) -> None:
        self.blocks = nnx.split_rngs(splits=4)(nnx.vmap(make))(nnx.Rngs(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        return nnx.scan(lambda b, x: b(x), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(self.blocks, x)


def lazy() -> Stack:
    return Stack(lambda rngs: lm.LazyLinear(4, rngs=rngs))


def explicit() -> Stack:
    return Stack(lambda rngs: nnx.Linear(4, 4, rngs=rngs))


WAYS: dict[str, Callable[[Any], Any]] = {
    "call": lambda m: m(jnp.ones((2, 4))),
    "jit": lambda m: nnx.jit(lambda m: m(jnp.ones((2, 4))))(m),
    "materialize": lambda m: lm.materialize(m, X),
    "load": lambda m: lm.load_state_dict(m, lm.state_dict(explicit())),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_gives_the_explicit_stack(way: str) -> None:
    model, want = lazy(), explicit()
    WAYS[way](model)
    for name in ("kernel", "bias"):
        np.testing.assert_array_equal(getattr(model.blocks, name)[...], getattr(want.blocks, name)[...])
    assert not lm.is_lazy(model.blocks)


def test_a_placeholder_has_the_stacked_axis() -> None:
    model = lazy()
    assert model.blocks.kernel.shape == (4, None, 4)
    assert model.blocks.bias.shape == (4, 4)


def test_the_report_counts_the_whole_stack() -> None:
    assert lm.infer_shapes(lazy(), X).total_parameters == lm.infer_shapes(explicit(), X).total_parameters == 80
