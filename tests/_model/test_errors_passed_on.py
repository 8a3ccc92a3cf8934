"""What a user's or Flax's own code raises while a layer is sized passes as it is; a note says where, without a call.

The model is as before afterwards: lazy, with the same keys, and a corrected retry gives the explicit model.
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


# ---------------------------------------------------------------- what a lazy layer itself raises


class FailsItself(nnx.Module):
    """Raises what the switch says, in its forward."""

    def __init__(self, n: int, *, rngs: nnx.Rngs) -> None:
        self.fc = nnx.Linear(n, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.fc(x)
        error = SWITCH["error"]
        if error is not None:
            raise error
        return y


class Around(nnx.Module):
    """A lazy layer whose forward calls another: the inner one is named."""

    def __init__(self, n: int, inner: Any, *, rngs: nnx.Rngs) -> None:
        self.fc, self.inner = nnx.Linear(n, 4, rngs=rngs), inner

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.inner(self.fc(x))


def n_of_x(config: Any, x: Any) -> dict[str, int]:
    return {"n": x.shape[-1]}


LazyFailsItself, LazyAround = lm.lazy(FailsItself, infer=n_of_x), lm.lazy(Around, infer=n_of_x)


def chain() -> Any:
    return nnx.Sequential(nnx.relu, LazyFailsItself(rngs=nnx.Rngs(0)))


def around() -> Any:
    return nnx.Sequential(nnx.relu, LazyAround(inner=LazyFailsItself(rngs=nnx.Rngs(0)), rngs=nnx.Rngs(1)))


class OwnWordError(ValueError):
    """An error whose type is checked as it is."""


def by_a_step(model: Any, x: jax.Array) -> None:
    optimizer = lm.LazyOptimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    @lm.jit
    def step(model: Any, optimizer: Any, x: jax.Array) -> None:
        optimizer.update(model, nnx.grad(lambda m: m(x).sum())(model))

    step(model, optimizer, x)


RUNS: dict[str, Callable[[Any, jax.Array], Any]] = {
    "call": WAYS["call"],
    "lm.jit": WAYS["lm.jit"],
    "nnx.jit": lambda m, x: nnx.jit(lambda m, x: m(x))(m, x),
    "step": by_a_step,
}


@pytest.mark.parametrize("error", [OwnError("mine"), OwnWordError("mine"), TypeError("of the user's")], ids=repr)
@pytest.mark.parametrize("way", RUNS)
@pytest.mark.parametrize("make", [chain, around])
def test_the_layer_of_a_first_call_is_noted_once(make: Callable[[], Any], way: str, error: Exception) -> None:
    model, x = make(), jnp.ones((2, 4))
    raised = SWITCH["error"] = type(error)(*error.args)
    try:
        for _ in range(2):  # the same object may be raised again
            with pytest.raises(type(raised)) as caught:
                RUNS[way](model, x)
            assert caught.value is raised and not isinstance(raised, lm.LazyError)
    finally:
        SWITCH["error"] = None
    notes = [n for n in raised.__notes__ if n.startswith("in the first call")]
    place = "layers.1 (LazyFailsItself)" if make is chain else "layers.1.inner (LazyFailsItself)"
    assert notes == [f"in the first call of a lazy layer, at {place}"]
    assert lm.is_lazy(model.layers[1])
    model(x)
    SWITCH["error"] = again = OwnError("ready")
    try:
        with pytest.raises(OwnError) as ready:
            model(x)
    finally:
        SWITCH["error"] = None
    assert ready.value is again and not hasattr(again, "__notes__")


FLAX_ASKS: dict[str, tuple[Callable[[nnx.Rngs], Any], Callable[[nnx.Rngs], Any]]] = {
    "deterministic": (
        lambda r: lm.LazyMultiHeadAttention(num_heads=2, dropout_rate=0.1, decode=False, rngs=r),
        lambda r: nnx.MultiHeadAttention(2, 4, dropout_rate=0.1, decode=False, rngs=r),
    ),
    "decode": (
        lambda r: lm.LazyMultiHeadAttention(num_heads=2, rngs=r),
        lambda r: nnx.MultiHeadAttention(2, 4, rngs=r),
    ),
    "cache": (
        lambda r: lm.LazyMultiHeadAttention(num_heads=2, decode=True, rngs=r),
        lambda r: nnx.MultiHeadAttention(2, 4, decode=True, rngs=r),
    ),
    "rngs": (
        lambda r: lm.LazyMultiHeadAttention(
            num_heads=2, dropout_rate=0.1, decode=False, deterministic=False, keep_rngs=False, rngs=r
        ),
        lambda r: nnx.MultiHeadAttention(
            2, 4, dropout_rate=0.1, decode=False, deterministic=False, keep_rngs=False, rngs=r
        ),
    ),
    "use_running_average": (
        lambda r: lm.LazyBatchNorm(use_running_average=None, rngs=r),  # type: ignore[arg-type]
        lambda r: nnx.BatchNorm(4, use_running_average=None, rngs=r),  # type: ignore[arg-type]
    ),
}


@pytest.mark.parametrize("way", [*WAYS, "nnx.jit", "step"])
@pytest.mark.parametrize("name", FLAX_ASKS)
def test_what_flax_asks_a_lazy_layer_for_blames_no_input(name: str, way: str) -> None:
    lazily, explicitly = FLAX_ASKS[name]
    model, want = nnx.Sequential(lazily(nnx.Rngs(0))), nnx.Sequential(explicitly(nnx.Rngs(0)))
    x = jnp.ones((2, 3, 4))
    with pytest.raises(ValueError) as expected:
        want(x)
    with pytest.raises(ValueError) as caught:
        (WAYS | RUNS)[way](model, x)
    assert type(caught.value) is ValueError and str(caught.value) == str(expected.value)
    kind = type(model.layers[0]).__name__
    assert any(f"layers.0 ({kind})" in note for note in caught.value.__notes__)
    assert kind.startswith("Lazy")


@pytest.mark.parametrize("way", [*WAYS, "nnx.jit", "step"])
def test_an_input_that_flax_does_not_take_is_blamed(way: str) -> None:
    model = nnx.Sequential(lm.LazyLinear(4, rngs=nnx.Rngs(0)))
    with pytest.raises(lm.ShapeInferenceError, match="an input that the layer takes") as caught:
        (WAYS | RUNS)[way](model, jnp.ones((2, 4)) > 0)
    assert caught.value.problems[0].where == "layers.0 (LazyLinear)" and lm.is_lazy(model.layers[0])
