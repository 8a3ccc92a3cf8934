"""What a user's or Flax's own code raises while a layer is sized passes as it is; a note says where, without a call.

The model is as before afterwards: lazy, with the same keys, and a corrected retry gives the explicit model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import lazymods as lm


class OwnError(Exception):
    """An error that no library knows."""


ERRORS: dict[str, Exception] = {
    "own": OwnError("mine"),
    "runtime": RuntimeError("no"),
    "key": KeyError("name"),
    "value": ValueError("a word of the user's"),
    "assertion": AssertionError("not so"),
    "zero": ZeroDivisionError("by nothing"),
}
SWITCH: dict[str, Exception | None] = {"error": None}


class Fails(nnx.Module):
    """Raises what the switch says, in its forward, after a lazy layer was sized."""

    def __init__(self, rngs: nnx.Rngs, fc: Any) -> None:
        self.first, self.fc = fc(rngs), fc(rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.first(x)
        error = SWITCH["error"]
        if error is not None:
            raise error
        return self.fc(y)


class Nested(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, fc: Any) -> None:
        self.blocks = nnx.List([fc(rngs), Fails(rngs, fc)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = block(x)
        return x


class Stacked(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, fc: Any) -> None:
        self.inner = nnx.split_rngs(splits=3)(nnx.vmap(lambda rngs: Fails(rngs, fc)))(rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return nnx.vmap(lambda m, x: m(x), in_axes=(0, None))(self.inner, x)


MODELS: dict[str, tuple[Callable[..., Any], str]] = {
    "root": (Fails, "Fails"),
    "nested": (Nested, "blocks.1 (Fails)"),
    "stacked": (Stacked, "inner (Fails)"),
}
WAYS: dict[str, Callable[[Any, jax.Array], Any]] = {
    "call": lambda m, x: m(x),
    "infer_shapes": lm.infer_shapes,
    "materialize": lm.materialize,
    "summary": lm.summary,
    "lm.jit": lambda m, x: lm.jit(lambda m, x: m(x))(m, x),
}


def lazy(rngs: nnx.Rngs) -> Any:
    return lm.LazyLinear(4, rngs=rngs)


def explicit(rngs: nnx.Rngs) -> Any:
    return nnx.Linear(4, 4, rngs=rngs)


def values(model: Any) -> list[Any]:
    return [np.asarray(v.get_raw_value()) for _, v in nnx.to_flat_state(nnx.state(model))]


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_an_error_of_the_forward_is_passed_on(name: str, way: str, error: str) -> None:
    make, place = MODELS[name]
    model, x = make(nnx.Rngs(0), lazy), jnp.ones((2, 4))
    before = lm.uninitialized_paths(model)
    raised = SWITCH["error"] = type(ERRORS[error])(*ERRORS[error].args)
    try:
        with pytest.raises(type(raised)) as caught:
            WAYS[way](model, x)
    finally:
        SWITCH["error"] = None
    assert caught.value is raised and not isinstance(raised, lm.LazyError)
    if way != "call":  # a plain call has no hook at the root: there each layer is all or nothing
        assert lm.uninitialized_paths(model) == before
    if way in ("infer_shapes", "materialize", "summary"):  # else Python's own traceback says where
        assert f"in an abstract run of the model, at {place}" in getattr(raised, "__notes__", [])
    model(x)
    want = make(nnx.Rngs(0), explicit)
    assert nnx.graphdef(model) == nnx.graphdef(want)
    for a, b in zip(values(model), values(want), strict=True):
        np.testing.assert_array_equal(a, b)


class NeedsMode(nnx.Module):
    """Flax asks for ``deterministic``: its own words, which blame no input."""

    def __init__(self, rngs: nnx.Rngs, fc: Any) -> None:
        self.fc, self.drop = fc(rngs), nnx.Dropout(0.5)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.drop(self.fc(x))


@pytest.mark.parametrize("way", WAYS)
def test_an_error_of_flax_is_passed_on(way: str) -> None:
    model, want = NeedsMode(nnx.Rngs(0), lazy), NeedsMode(nnx.Rngs(0), explicit)
    with pytest.raises(Exception) as expected:
        want(jnp.ones((2, 4)))
    with pytest.raises(type(expected.value)) as caught:
        WAYS[way](model, jnp.ones((2, 4)))
    assert str(caught.value) == str(expected.value) and type(caught.value) is type(expected.value)
    assert lm.is_lazy(model.fc) or way == "call"


class Constructor(nnx.Module):
    """Raises at some sizes what no layer raises."""

    def __init__(self, n: int, *, rngs: nnx.Rngs) -> None:
        if n == 5:
            raise OwnError("not five")
        self.fc = nnx.Linear(n, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.fc(x)


@pytest.mark.parametrize("way", WAYS)
def test_an_error_of_a_constructor_is_passed_on(way: str) -> None:
    layer = lm.lazy(Constructor, infer=lambda config, x: {"n": x.shape[-1]})(rngs=nnx.Rngs(0))
    model = nnx.Sequential(layer)
    with pytest.raises(OwnError, match="not five"):
        WAYS[way](model, jnp.ones((2, 5)))
    assert lm.is_lazy(layer)
    model(jnp.ones((2, 4)))
    np.testing.assert_array_equal(layer.fc.kernel, Constructor(4, rngs=nnx.Rngs(0)).fc.kernel)
