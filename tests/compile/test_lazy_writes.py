"""Lazy layers that write, in the first call, what they do not read: a compiled call writes it too."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import lazymods as lm

X = jax.random.normal(jax.random.key(0), (6, 4))
ROWS = [X, X + 1, X * 2]


class Remembering(nnx.Module):
    """A layer that keeps the mean of its last input, and never looks at it."""

    def __init__(self, features: int, *, rngs: nnx.Rngs) -> None:
        self.scale = nnx.Param(jax.random.normal(rngs.params(), (features,)))
        self.last = nnx.BatchStat(jnp.zeros(features))
        self.largest = nnx.data(jnp.zeros(features))  # an array that is no Variable's

    def __call__(self, x: jax.Array) -> jax.Array:
        self.last.set_value(x.mean(0))
        self.largest = x.max(0)
        return x * self.scale[...][None]


LazyRemembering = lm.lazy(Remembering, infer=lambda _, x: {"features": x.shape[-1]})


class Several(nnx.Module):
    def __init__(self, make: Any) -> None:
        self.layers = nnx.List([make(nnx.Rngs(number)) for number in range(3)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = layer(x)
        return x


def explicit(rngs: nnx.Rngs) -> nnx.Module:
    return Remembering(4, rngs=rngs)


def lazy(rngs: nnx.Rngs) -> nnx.Module:
    return LazyRemembering(rngs=rngs)


def spectral(rngs: nnx.Rngs) -> nnx.Module:
    return nnx.SpectralNorm(nnx.Linear(4, 4, rngs=rngs), rngs=rngs)


def lazy_spectral(rngs: nnx.Rngs) -> nnx.Module:
    return lm.LazySpectralNorm(lm.LazyLinear(4, rngs=rngs), rngs=rngs)


def call(model: Any, x: jax.Array) -> jax.Array:
    return model(x)


def deciding(model: Any, x: jax.Array) -> jax.Array:
    return model(x) if x.sum() > -1e6 else -model(x)


def gradient(model: Any, x: jax.Array) -> jax.Array:
    return nnx.value_and_grad(lambda model: model(x).sum())(model)[0]


def without_model(run: Any) -> Any:
    return lambda _, x: run(x)


WAYS: dict[str, Any] = {
    "plain": lambda _: lm.jit(call),
    "donated": lambda _: lm.jit(call, donate_state=True),
    "checked": lambda _: lm.jit(call, check=True),
    "deciding": lambda _: lm.jit(deciding),
    "gradient": lambda _: lm.jit(gradient),
    "the module": lambda model: without_model(lm.jit(model)),
    "closed over": lambda model: without_model(lm.jit(lambda x: model(x))),
    "inside nnx.jit": lambda _: nnx.jit(lm.jit(call)),
}


def states(model: nnx.Module) -> dict[str, Any]:
    return {"/".join(map(str, path)): value for path, value in nnx.to_flat_state(nnx.state(model))}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("make", "twin"), [(lazy, explicit), (lazy_spectral, spectral)], ids=["own", "spectral"])
@pytest.mark.parametrize("several", [False, True], ids=["one", "several"])
def test_what_is_written_and_not_read(way: str, make: Any, twin: Any, several: bool) -> None:
    model, want = (Several(make), Several(twin)) if several else (make(nnx.Rngs(0)), twin(nnx.Rngs(0)))
    run = WAYS[way](model)
    for x in ROWS:
        expected = gradient(want, x) if way == "gradient" else want(x)
        np.testing.assert_allclose(run(model, x), expected, rtol=2e-5, atol=1e-6)
        here, there = states(model), states(want)
        assert sorted(here) == sorted(there)
        for name, value in there.items():
            if not jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
                np.testing.assert_allclose(here[name], value, rtol=2e-5, atol=1e-6, err_msg=name)
