"""FLOPs of a summary, counted by hand: a loop has those of all its steps."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import lazymods as lm

X = jnp.ones((16, 8))
ONE = 2 * 16 * 8 * 8  # of one layer: a product and a sum for each of its elements


def layer(rngs: nnx.Rngs) -> nnx.Module:
    return nnx.Linear(8, 8, use_bias=False, rngs=rngs)


def nested(rngs: nnx.Rngs) -> nnx.Module:
    return lm.Stack(layer, 3, rngs=rngs)


class Scanned(nnx.Module):
    """A layer that is called several times by ``nnx.scan``, or as often as a value says."""

    def __init__(self, steps: int | None) -> None:
        self.layer, self.steps = layer(nnx.Rngs(0)), steps

    def __call__(self, x: jax.Array) -> jax.Array:
        if self.steps is None:
            return jax.lax.while_loop(lambda x: x.sum() > 1e6, self.layer, x)
        run = nnx.scan(lambda x, layer: layer(x), length=self.steps, in_axes=(nnx.Carry, None), out_axes=nnx.Carry)
        return run(x, self.layer)


@pytest.mark.parametrize(
    ("make", "want"),
    [
        (lambda: lm.Stack(layer, 1, rngs=nnx.Rngs(0)), ONE),
        (lambda: lm.Stack(layer, 24, rngs=nnx.Rngs(0)), 24 * ONE),
        (lambda: lm.Stack(nested, 4, rngs=nnx.Rngs(0)), 12 * ONE),
        (lambda: nnx.Sequential(layer(nnx.Rngs(0)), lm.Stack(layer, 5, rngs=nnx.Rngs(0))), 6 * ONE),
        (lambda: Scanned(7), 7 * ONE),
        (lambda: Scanned(None), None),
    ],
    ids=["one", "stack", "nested", "part", "scan", "unknown"],
)
def test_a_loop_has_the_operations_of_all_its_steps(make: Any, want: float | None) -> None:
    found = lm.summary(make(), X).flops
    assert found is None if want is None else found == pytest.approx(want, rel=0.02)  # and the loop's own counter
