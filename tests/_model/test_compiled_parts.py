"""Models whose forward calls functions of ``lm.jit`` on parts of them: reports and sizes as without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import lazymods as lm

X = jnp.ones((2, 4))


class Plain(nnx.Module):
    def __init__(self, fc: Any) -> None:
        self.fc = fc

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.fc(x)


class Method(Plain):
    @lm.jit
    def run(self, x: jax.Array) -> jax.Array:
        return self.fc(x)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.run(x)


@lm.jit
def run(layer: Any, x: jax.Array) -> jax.Array:
    return layer(x)


class Function(Plain):
    def __call__(self, x: jax.Array) -> jax.Array:
        return run(self.fc, x)


class Lambda(Plain):
    def __call__(self, x: jax.Array) -> jax.Array:
        return lm.jit(lambda x: self.fc(x))(x)


LAYERS: dict[str, Callable[[], Any]] = {
    "ready": lambda: nnx.Linear(4, 3, rngs=nnx.Rngs(0)),
    "lazy": lambda: lm.LazyLinear(3, rngs=nnx.Rngs(0)),
}


@pytest.mark.parametrize("find", [lm.infer_shapes, lm.summary, lm.materialize])
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("cls", [Method, Function, Lambda])
def test_they_are_reported_as_without(cls: Any, layer: str, find: Any) -> None:
    model = nnx.Sequential(cls(LAYERS[layer]()), nnx.relu)
    want = nnx.Sequential(Plain(nnx.Linear(4, 3, rngs=nnx.Rngs(0))), nnx.relu)
    for _ in range(2):
        report = find(model, X)
        assert report.output == lm.infer_shapes(want, X).output and report.total_parameters == 15
        assert report.unreached == ()
    np.testing.assert_allclose(model(X), want(X), rtol=1e-6)
    find(model, X)
