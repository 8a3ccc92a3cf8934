"""The first call of a layer as an argument of an NNX transform, for every family, equals that of the explicit layer."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from helpers import ON_CPU, assert_same_bits, raw
from layers import MAIN, WRITERS, Row, twice

import lazymods as lm

TOLERANCE = 2e-6 if ON_CPU else 1e-4  # an accelerator's matrix units round to tf32


def assert_close(got: Any, want: Any) -> None:
    """Equal but for the last bits."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert raw(a).dtype == raw(b).dtype
        np.testing.assert_allclose(raw(a), raw(b), rtol=TOLERANCE, atol=TOLERANCE)


def check_as_argument(row: Row, run: Callable[..., Any], same: Callable[[Any, Any], None]) -> None:
    layer, want = row.twins()
    for seed in (0, 1):
        args = row.inputs(seed)
        same(run(layer, *args), run(want, *args))
        assert not lm.has_uninitialized_params(layer)
        assert nnx.graphdef(layer) == nnx.graphdef(want)
        same(nnx.state(layer), nnx.state(want))


@pytest.mark.slow
@pytest.mark.parametrize("row", [*MAIN, *WRITERS], ids=str)
def test_argument_of_remat(row: Row) -> None:
    check_as_argument(row, nnx.remat(lambda m, *args: m(*args, **row.kwargs)), assert_same_bits)


@pytest.mark.slow
@pytest.mark.parametrize("row", MAIN, ids=str)
def test_argument_of_vmap(row: Row) -> None:
    run = nnx.vmap(lambda m, *args: m(*args, **row.kwargs), in_axes=(None, *(0 for _ in row.args)))
    check_as_argument(row, lambda m, *args: run(m, *twice(args)), assert_same_bits)


@pytest.mark.parametrize("row", [*MAIN, *WRITERS], ids=str)
def test_argument_of_jit(row: Row) -> None:
    """One trace of the lazy layer; from then on it shares the explicit layer's, as does one materialized before.

    XLA folds parameters that are made while it traces: outputs of that trace may differ in the last bits.
    """
    traces = 0

    @nnx.jit
    def run(model: Any, *args: Any) -> Any:
        nonlocal traces
        traces += 1
        return model(*args, **row.kwargs)

    check_as_argument(row, run, assert_close)
    assert traces == 2
    ready = row.lazy(nnx.Rngs(0))
    lm.materialize(ready, *row.args, **row.kwargs)
    for seed in (0, 1):
        run(ready, *row.inputs(seed))
    assert traces == 2
