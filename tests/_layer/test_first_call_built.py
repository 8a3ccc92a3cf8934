"""Models that are built under a transform, stacked by nnx.vmap, scanned over, or nested in transforms of transforms."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import MLP, array, assert_same_bits, assert_same_model, lazy_mlp, plain_mlp, raw, spec

import lazymods as lm

X = array(2, 8)
Build = Callable[[], Any]


def called(model: Any) -> Any:
    model(X)
    return model


def assert_close_model(got: Any, want: Any) -> None:
    """The same model, up to rounding: compiled initializers round differently."""
    assert not lm.has_uninitialized_params(got) and nnx.graphdef(got) == nnx.graphdef(want)
    a, b = (dict(nnx.to_flat_state(nnx.state(m))) for m in (got, want))
    assert list(a) == list(b)
    for path in b:
        assert type(a[path]) is type(b[path]) and raw(a[path]).dtype == raw(b[path]).dtype
        np.testing.assert_allclose(raw(a[path]), raw(b[path]), rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------- built and called inside

INSIDE: dict[str, Callable[[Build], Any]] = {
    "nnx.jit": lambda build: nnx.jit(lambda: called(build()))(),
    "jax.jit": lambda build: jax.jit(lambda: called(build()))(),
    "jax.jit-state": lambda build: nnx.merge(nnx.graphdef(plain_mlp()), jax.jit(lambda: nnx.state(called(build())))()),
    "nnx.jit-nnx.remat": lambda build: nnx.jit(lambda: nnx.remat(lambda: called(build()))())(),
    "nnx.jit-jax.jit": lambda build: nnx.jit(lambda: jax.jit(lambda: called(build()))())(),
    "nnx.jit-jax.grad": lambda build: nnx.jit(lambda: grads_then_return(build()))(),
}


def grads_then_return(model: Any) -> Any:
    jax.grad(lambda x: model(x).sum())(X)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("context", INSIDE.values(), ids=INSIDE)
def test_built_and_called_inside(context: Callable[[Build], Any]) -> None:
    lazy, want = context(lazy_mlp), context(plain_mlp)
    assert_close_model(lazy, want)
    np.testing.assert_allclose(lazy(X), want(X), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("context", [
    lambda build: jax.jit(lambda x: build()(x))(X),
    lambda build: jax.vmap(lambda r: build()(r))(X),
    lambda build: jax.grad(lambda x: build()(x).sum())(X),
    lambda build: jax.lax.scan(lambda c, r: (c, build()(r)), 0, X)[1],
    lambda build: jax.checkpoint(lambda x: build()(x))(X),
    lambda build: nnx.jit(lambda x: build()(x))(X),
    lambda build: nnx.jit(lambda x: nnx.grad(lambda m: m(x).sum())(called(build()))["fc1"]["kernel"].get_value())(X)],
    ids=["jit", "vmap", "grad", "scan", "checkpoint", "nnx.jit", "nnx.jit-nnx.grad"])
def test_built_called_and_forgotten_inside(context: Callable[[Build], Any]) -> None:
    np.testing.assert_allclose(context(lazy_mlp), context(plain_mlp), rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------- built inside, called outside

OUTSIDE: dict[str, Callable[[Build], Any]] = {
    "nnx.jit": lambda build: nnx.jit(build)(),
    "jax.jit": lambda build: jax.jit(build)(),
    "nnx.jit-split": lambda build: nnx.merge(*nnx.jit(lambda: nnx.split(build()))()),
    "jax.jit-split": lambda build: nnx.merge(*jax.jit(lambda: nnx.split(build()))()),
    "nnx.remat": lambda build: nnx.remat(lambda: build())(),
}
FIRST: dict[str, Callable[[Any], Any]] = {
    "call": lambda m: m(X),
    "materialize": lambda m: lm.materialize(m, spec(2, 8)),
    "nnx.jit": lambda m: nnx.jit(lambda m, x: m(x))(m, X),
    "jax.jit": lambda m: jax.jit(lambda x: m(x))(X),
}


@pytest.mark.parametrize("first", FIRST.values(), ids=FIRST)
@pytest.mark.parametrize("context", OUTSIDE.values(), ids=OUTSIDE)
def test_built_inside_called_outside(context: Callable[[Build], Any], first: Callable[[Any], Any]) -> None:
    lazy, want = context(lazy_mlp), context(plain_mlp)
    paths = ["fc1.kernel", "fc1.bias", "fc2.kernel", "fc2.bias"]
    assert sorted(lm.uninitialized_paths(lazy)) == sorted(paths)
    first(lazy)
    assert_close_model(lazy, want)
    np.testing.assert_allclose(lazy(X), want(X), rtol=1e-5, atol=1e-6)


def test_built_under_nnx_jit_and_loaded() -> None:
    lazy, want = nnx.jit(lazy_mlp)(), plain_mlp(seed=5)
    assert not any(lm.load_state_dict(lazy, lm.state_dict(want)))
    assert_same_bits(lazy(X), want(X))
    assert_same_bits(nnx.state(lazy), nnx.state(want))


# ---------------------------------------------------------------- nnx.eval_shape


def shapes(model: Any) -> Any:
    return jax.tree.map(lambda a: (a.shape, a.dtype), nnx.state(model))


def test_built_and_called_under_nnx_eval_shape() -> None:
    lazy, want = (nnx.eval_shape(lambda b=build: called(b())) for build in (lazy_mlp, plain_mlp))
    assert nnx.graphdef(lazy) == nnx.graphdef(want) and shapes(lazy) == shapes(want)


def test_built_under_nnx_eval_shape_and_materialized_inside() -> None:
    def build() -> Any:
        model = lazy_mlp()
        lm.materialize(model, spec(2, 8))
        return model

    lazy, want = nnx.eval_shape(build), nnx.eval_shape(plain_mlp)
    assert nnx.graphdef(lazy) == nnx.graphdef(want) and shapes(lazy) == shapes(want)


def test_built_under_nnx_eval_shape_and_loaded_outside() -> None:
    lazy, want = nnx.eval_shape(lazy_mlp), plain_mlp(seed=5)
    assert lm.has_uninitialized_params(lazy)
    assert lm.infer_shapes(lazy, spec(2, 8)).output.shape == (2, 4)
    assert not any(lm.load_state_dict(lazy, lm.state_dict(want)))
    assert_same_bits(lazy(X), want(X))
    assert_same_bits(nnx.state(lazy), nnx.state(want))


def test_a_first_call_of_a_model_made_abstract_is_refused_or_works() -> None:
    """Its keys are abstract: there is nothing to draw from."""
    lazy = nnx.eval_shape(lazy_mlp)
    with pytest.raises(lm.LazyError, match="fc1"):
        lazy(X)
    assert len(lm.uninitialized_paths(lazy)) == 4


# ---------------------------------------------------------------- stacked by nnx.vmap


def stacked(*size: int) -> Any:
    make = nnx.split_rngs(splits=3)(nnx.vmap(lambda rngs: MLP(*size, hidden=8, out=8, rngs=rngs)))
    return make(nnx.Rngs(0))


def over_layers(model: Any, x: jax.Array) -> Any:
    return nnx.scan(lambda m, x: m(x), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(model, x)


def over_layers_keeping(model: Any, x: jax.Array) -> Any:
    return nnx.scan(lambda x, m: (m(x), x), in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))(x, model)


STACKED: dict[str, Callable[[Any, jax.Array], Any]] = {
    "nnx.vmap": lambda m, x: nnx.vmap(lambda m, x: m(x), in_axes=(0, None))(m, x),
    "nnx.scan": over_layers,
    "nnx.scan-ys": over_layers_keeping,
    "nnx.jit-nnx.vmap": lambda m, x: nnx.jit(lambda m, x: nnx.vmap(lambda m, x: m(x), in_axes=(0, None))(m, x))(m, x),
    "nnx.jit-nnx.scan": lambda m, x: nnx.jit(over_layers)(m, x),
    "nnx.scan-nnx.remat": lambda m, x: nnx.scan(nnx.remat(lambda m, x: m(x)), in_axes=(0, nnx.Carry),
                                                out_axes=nnx.Carry)(m, x),
}


@pytest.mark.slow
@pytest.mark.parametrize("run", STACKED.values(), ids=STACKED)
def test_layers_stacked_by_nnx_vmap(run: Callable[[Any, jax.Array], Any]) -> None:
    lazy, want = stacked(), stacked(8)
    assert lazy.fc1.kernel.shape == (3, None, 8)
    got, expected = run(lazy, X), run(want, X)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, expected)
    assert lazy.fc1.kernel.shape == (3, 8, 8)
    assert_close_model(lazy, want)
    again = run(lazy, X)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), again, expected)


def test_a_model_mapped_over_its_parameters_made_once_is_refused() -> None:
    lazy = lazy_mlp()
    with pytest.raises((lm.UninitializedError, ValueError), match=r"fc1|vmap"):
        nnx.vmap(lambda m, x: m(x), in_axes=(0, None))(lazy, X)
    assert lm.uninitialized_paths(lazy) == ["fc1.kernel", "fc1.bias", "fc2.kernel", "fc2.bias"]
    assert_same_bits(lazy(X), plain_mlp()(X))


@pytest.mark.slow
def test_stacked_models_fail_and_retry() -> None:
    lazy, want = stacked(), stacked(8)
    run = STACKED["nnx.vmap"]
    with pytest.raises((ValueError, TypeError)):
        run(lazy, X > 0)
    assert len(lm.uninitialized_paths(lazy)) == 4
    run(lazy, X)
    assert_close_model(lazy, want)


# ---------------------------------------------------------------- train steps


def train(model: Any, make_step: Callable[[Callable[..., Any]], Callable[..., Any]]) -> list[float]:
    optimizer = lm.LazyOptimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)

    def step(model: Any, optimizer: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        model(x)
        loss, grads = nnx.value_and_grad(lambda m: ((m(x) - y) ** 2).mean())(model)
        optimizer.update(model, grads)
        return loss

    run = make_step(step)
    return [float(run(model, optimizer, X, jnp.ones((2, 4)))) for _ in range(4)]


@pytest.mark.parametrize("make_step", [lambda f: f, nnx.jit, lambda f: nnx.jit(nnx.jit(f))],
                         ids=["python", "nnx.jit", "nnx.jit-nnx.jit"])
def test_a_train_step_that_begins_lazy(make_step: Any) -> None:
    lazy, want = lazy_mlp(), plain_mlp()
    losses, expected = train(lazy, make_step), train(want, make_step)
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    assert losses[-1] < losses[0]
    assert_close_model(lazy, want)


def test_dropout_in_a_first_call_under_nnx_jit() -> None:
    def build(linear: Callable[..., Any]) -> Any:
        rngs = nnx.Rngs(0, dropout=1)
        return nnx.Sequential(linear(rngs=rngs), nnx.Dropout(0.5, rngs=rngs))

    lazy, want = build(lambda rngs: lm.LazyLinear(4, rngs=rngs)), build(lambda rngs: nnx.Linear(8, 4, rngs=rngs))
    step = nnx.jit(lambda m, x: m(x))
    for _ in range(3):
        np.testing.assert_allclose(step(lazy, X), step(want, X), rtol=1e-5, atol=1e-6)
    assert_same_model(lazy, want)


def test_shared_layers_inside_nnx_jit() -> None:
    class Shared(nnx.Module):
        def __init__(self, layer: Any):
            self.a = layer
            self.b = layer
            self.c = nnx.List([layer])

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.c[0](self.b(self.a(x)))

    lazy, want = Shared(lm.LazyLinear(8, rngs=nnx.Rngs(0))), Shared(nnx.Linear(8, 8, rngs=nnx.Rngs(0)))
    np.testing.assert_allclose(nnx.jit(lambda m, x: m(x))(lazy, X), want(X), rtol=1e-4, atol=1e-5)
    assert lazy.a is lazy.b is lazy.c[0]
    assert_same_model(lazy, want)


# ---------------------------------------------------------------- failures inside transforms

FAILING: dict[str, Callable[[Any, jax.Array], Any]] = {
    "python": lambda m, x: m(x),
    "jax.jit": lambda m, x: jax.jit(lambda x: m(x))(x),
    "vmap": lambda m, x: jax.vmap(lambda r: m(r))(x),
    "scan": lambda m, x: jax.lax.scan(lambda c, r: (c, m(r)), 0, x),
    "checkpoint": lambda m, x: jax.checkpoint(lambda x: m(x))(x),
    "eval_shape": lambda m, x: jax.eval_shape(lambda x: m(x), x),
    "nnx.jit": lambda m, x: nnx.jit(lambda m, x: m(x))(m, x),
    "nnx.vmap": lambda m, x: nnx.vmap(lambda m, x: m(x), in_axes=(None, 0))(m, x),
    "nnx.remat": lambda m, x: nnx.remat(lambda m, x: m(x))(m, x),
    "nnx.jit-nnx.remat": lambda m, x: nnx.jit(lambda m, x: nnx.remat(lambda m, x: m(x))(m, x))(m, x),
}


@pytest.mark.parametrize("context", FAILING.values(), ids=FAILING)
def test_a_forward_that_fails_leaves_the_layer_lazy(context: Callable[[Any, jax.Array], Any]) -> None:
    lazy, want = lazy_mlp(), plain_mlp()
    for _ in range(2):
        with pytest.raises(lm.ShapeInferenceError, match=r"LazyLinear(.|\n)*bool\["):
            context(lazy, X > 0)
        assert lm.uninitialized_paths(lazy) == ["fc1.kernel", "fc1.bias", "fc2.kernel", "fc2.bias"]
        assert type(lazy.fc1) is lm.LazyLinear and lazy.fc1.kernel.shape == (None, 16)
    context(lazy, X)
    assert_same_model(lazy, want)


@pytest.mark.parametrize("context", FAILING.values(), ids=FAILING)
def test_a_model_that_fails_after_its_first_layer(context: Callable[[Any, jax.Array], Any]) -> None:
    """The law holds layer by layer; with an argument of a transform nothing comes out."""

    class Stops(nnx.Module):
        def __init__(self, lazy: bool):
            self.fc: Any = lm.LazyLinear(4, rngs=nnx.Rngs(0)) if lazy else nnx.Linear(8, 4, rngs=nnx.Rngs(0))

        def __call__(self, x: jax.Array) -> jax.Array:
            y = self.fc(x)
            if stop:
                raise OSError("later")
            return y

    stop = [1]
    lazy, want = Stops(True), Stops(False)
    with pytest.raises(OSError, match="later"):
        context(lazy, X)
    if lm.is_lazy(lazy.fc):
        assert lm.uninitialized_paths(lazy) == ["fc.kernel", "fc.bias"] and type(lazy.fc) is lm.LazyLinear
    else:
        assert_same_model(lazy.fc, want.fc)
    stop.clear()
    context(lazy, X)
    assert_same_model(lazy, want)
