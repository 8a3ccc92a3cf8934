"""The types of ``lm.jit``: the function's signature, also of methods and modules."""
# pyright: reportUnnecessaryTypeIgnoreComment=true

from typing import assert_type

import jax
from flax import nnx

import lazymods as lm


@lm.jit
def step(model: nnx.Linear, x: jax.Array, *, rate: float = 0.1) -> tuple[jax.Array, float]:
    return model(x), rate


@lm.jit(static_argnames="times", donate_state=True)
def repeat(x: jax.Array, times: int) -> list[jax.Array]:
    return [x] * times


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = lm.LazyLinear(4, rngs=rngs)

    @lm.jit
    def loss(self, x: jax.Array, scale: float = 1.0) -> jax.Array:
        return self.linear(x).sum() * scale

    @lm.jit(max_paths=2)
    def shown(self, x: jax.Array) -> str:
        return str(x.shape)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.loss(x, scale=2.0)


class Decoder(nnx.Module):
    # What nnx.Module declares is a plain method. pyright says the same of nnx.jit, and binds no self there (1.1.414).
    @lm.jit
    def __call__(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, x: jax.Array, scale: float = 1.0
    ) -> tuple[jax.Array, float]:
        return x, scale


class Step:
    @lm.jit(max_paths=2)
    def __call__(self, x: jax.Array) -> str:
        return str(x.shape)


def plain(model: nnx.Linear, x: jax.Array) -> None:
    assert_type(step(model, x), tuple[jax.Array, float])
    assert_type(step(model, x=x, rate=0.2), tuple[jax.Array, float])
    assert_type(repeat(x, 3), list[jax.Array])
    assert_type(step.name, str)
    assert_type(step.cache_info().currsize, int)
    assert_type(lm.jit(lambda: 3)(), int)
    assert_type(lm.jit(step)(model, x), tuple[jax.Array, float])


def methods(model: Model, x: jax.Array) -> None:
    assert_type(model.loss(x), jax.Array)
    assert_type(model.loss(x, scale=3.0), jax.Array)
    assert_type(model.shown(x), str)
    assert_type(Model.loss(model, x), jax.Array)
    Model.loss.lower(model, x)
    assert_type(lm.jit(model.loss)(x), jax.Array)


def modules(model: Model, layer: lm.LazyLinear, x: jax.Array) -> None:
    assert_type(lm.jit(model)(x), jax.Array)
    assert_type(lm.jit(layer)(x), jax.Array)
    assert_type(lm.jit(nnx.Dropout(0.5), max_paths=1)(x, deterministic=True), jax.Array)


def compiled_calls(decoder: Decoder, run: Step, x: jax.Array) -> None:
    assert_type(decoder(x), tuple[jax.Array, float])
    assert_type(decoder(x, scale=2.0), tuple[jax.Array, float])
    assert_type(Decoder.__call__(decoder, x), tuple[jax.Array, float])
    assert_type(run(x), str)
    decoder()  # type: ignore[call-arg]
    run(x, 3)  # type: ignore[call-arg]


def wrong(model: Model, linear: nnx.Linear, x: jax.Array) -> None:
    step(linear)  # type: ignore[call-arg]
    step(linear, x, rete=0.1)  # type: ignore[call-arg]
    step(linear, x, rate="fast")  # type: ignore[arg-type]
    repeat(x, "3")  # type: ignore[arg-type]
    model.loss()  # type: ignore[call-arg]
    model.loss(x, "1")  # type: ignore[arg-type]
    model.shown(x, x)  # type: ignore[call-arg]
    lm.jit(model)(x, 1)  # type: ignore[call-arg]
    lm.jit(3)  # type: ignore[call-overload]
    lm.jit(step, max_path=3)  # type: ignore[call-overload]
    number: int = repeat(x, 3)  # type: ignore[assignment]
    del number
