"""The first call of a layer that a transform closes over, for every family, equals that of the explicit layer."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.errors import TraceContextError
from helpers import assert_same_bits, assert_same_model
from layers import MAIN, WRITERS, Row, twice

import lazymods as lm

Forward = Callable[..., Any]


def total(out: Any) -> jax.Array:
    """A scalar to differentiate."""
    return sum((jnp.sum(leaf, dtype=jnp.float32) for leaf in jax.tree.leaves(out)), jnp.float32(0))


def gradient(f: Forward, args: Any) -> Any:
    """The gradient with respect to the inputs."""
    return jax.grad(lambda *a: total(f(*a)), tuple(range(len(args))), allow_int=True)(*args)


CLOSED_OVER: dict[str, Callable[[Forward, Any], Any]] = {
    "jax.jit": lambda f, args: jax.jit(f)(*args),
    "nnx.jit": lambda f, args: nnx.jit(f)(*args),
    "jax.grad": gradient,
    "jax.vmap": lambda f, args: jax.vmap(f)(*twice(args)),
    "lax.scan": lambda f, args: jax.lax.scan(lambda c, _: (c, f(*c)), args, length=2),
    "jax.checkpoint": lambda f, args: jax.checkpoint(f)(*args),
    "jax.eval_shape": lambda f, args: jax.eval_shape(f, *args),
}
closed_over = pytest.mark.parametrize("context", CLOSED_OVER.values(), ids=CLOSED_OVER)


def of_row(row: Row) -> tuple[Any, Any, Forward, Forward]:
    """The lazy and the explicit layer, and both as functions of the inputs."""

    def forward(model: Any) -> Forward:
        return lambda *args: model(*args, **row.kwargs)

    layer, want = row.twins()
    return layer, want, forward(layer), forward(want)


def as_arrays(out: Any) -> Any:
    """Zeros in place of shapes and dtypes, so that those can be compared as outputs are."""
    return jax.tree.map(lambda a: np.zeros(a.shape, a.dtype) if isinstance(a, jax.ShapeDtypeStruct) else a, out)


@closed_over
@pytest.mark.parametrize("row", [r for r in MAIN if not r.mutates], ids=str)
def test_closed_over(row: Row, context: Callable[[Forward, Any], Any]) -> None:
    layer, want, forward, explicit_forward = of_row(row)
    got = context(forward, row.inputs())
    assert_same_model(layer, want)
    assert_same_bits(as_arrays(got), as_arrays(context(explicit_forward, row.inputs())))


@pytest.mark.slow
@closed_over
@pytest.mark.parametrize("row", [*(r for r in MAIN if r.mutates), *WRITERS], ids=str)
def test_closed_over_writers_are_refused_as_by_flax(row: Row, context: Callable[[Forward, Any], Any]) -> None:
    """Flax's own error for a forward that writes Variables, after which the layer is as lazy as before."""
    layer, want, forward, explicit_forward = of_row(row)
    before = nnx.graphdef(layer), lm.uninitialized_paths(layer)
    for f in (explicit_forward, forward):
        with pytest.raises(TraceContextError, match="Cannot mutate"):
            context(f, row.inputs())
    assert (nnx.graphdef(layer), lm.uninitialized_paths(layer)) == before
    assert_same_bits(forward(*row.inputs()), explicit_forward(*row.inputs()))
    assert_same_model(layer, want)
