"""A function of lm.jit that raises inside of something else: all is as before the call, and the error holds values."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.core import Tracer

import lazymods as lm

X = jnp.arange(6.0).reshape(2, 3)


class DivergedError(Exception):
    def __init__(self, loss: Any, model: Any) -> None:
        super().__init__(loss)
        self.model = model


class Net(nnx.Module):
    extra: Any

    def __init__(self) -> None:
        self.fc: Any = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
        self.drop: Any = nnx.Dropout(0.5, rngs=nnx.Rngs(1))
        self.note: Any = "old"


def writes(model: Net, log: list[Any], x: jax.Array) -> jax.Array:
    loss = (model.drop(model.fc(x)) ** 2).sum()
    model.fc.bias[...] += 1.0
    model.note = "new"
    model.extra = nnx.Param(jnp.ones(1))
    del model.drop
    log.append(loss)
    return loss


def always(model: Net, log: list[Any], x: jax.Array) -> Any:
    raise DivergedError(writes(model, log, x), model)


def decides(model: Net, log: list[Any], x: jax.Array) -> Any:
    loss = writes(model, log, x)
    if loss > 0:
        raise DivergedError(loss, model)
    return loss


def without_values(model: Net, log: list[Any], x: jax.Array) -> Any:
    if writes(model, log, x) > 0:
        raise DivergedError("text", model)


def loss_of(step: Callable[..., Any], model: Net, log: list[Any], x: jax.Array) -> Any:
    """Call what raises; return what the error tells, and what is there after it."""
    try:
        step(model, log, x)
    except DivergedError as error:
        assert error.model is model
        told = error.args[0] if error.args[0] != "text" else x.sum()
    else:
        raise AssertionError
    assert model.note == "old" and not log and not hasattr(model, "extra") and hasattr(model, "drop")
    assert int(model.drop.rngs.count[...]) == 0 if not isinstance(x, Tracer) else True
    return told + model.fc.bias[...].sum() * 100.0


FUNCTIONS = {"always": always, "decides": decides, "without values": without_values}


def expected(f: Callable[..., Any], x: jax.Array) -> float:
    """Return what the error of plain Python tells; the bias is 0 before the call."""
    try:
        f(Net(), [], x)
    except DivergedError as error:
        return float(x.sum()) if error.args[0] == "text" else float(error.args[0])
    raise AssertionError


@pytest.mark.slow
@pytest.mark.parametrize("f", FUNCTIONS.values(), ids=FUNCTIONS)
@pytest.mark.parametrize("check", [False, True], ids=["", "check"])
def test_in_a_lazy_block(f: Callable[..., Any], check: bool) -> None:
    step, model, ready = lm.jit(f, check=check), Net(), X
    for x in (X, X + 1):
        with lm.lazytensor.lazy(check=check):
            for given in (x * 1.0, ready + (x - ready)):
                np.testing.assert_allclose(loss_of(step, model, [], given), expected(f, x), rtol=1e-4)
        np.testing.assert_array_equal(model.fc.bias[...], np.zeros(3))
        np.testing.assert_allclose(loss_of(step, model, [], x), expected(f, x), rtol=1e-4)


OUTER: dict[str, Callable[..., Any]] = {
    "lm.jit": lambda f, step, model: lm.jit(lambda x, m: f(step, m, [], x))(X, model),
    "lm.jit that closes over it": lambda f, step, model: lm.jit(lambda x: f(step, model, [], x))(X),
    "lm.jit that decides": lambda f, step, model: lm.jit(
        lambda x, m: f(step, m, [], x) * (1.0 if x.sum() > 0 else 2.0)
    )(X, model),
    "lm.jit with a check": lambda f, step, model: lm.jit(lambda x, m: f(step, m, [], x), check=True)(X, model),
    "lm.jit in lm.jit": lambda f, step, model: lm.jit(lambda x, m: lm.jit(lambda x, m: f(step, m, [], x))(x, m))(
        X, model
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("outer", OUTER.values(), ids=OUTER)
@pytest.mark.parametrize("f", [always, without_values], ids=["always", "without values"])
def test_an_outer_function_goes_on_with_the_value(f: Callable[..., Any], outer: Callable[..., Any]) -> None:
    model = Net()
    step = lm.jit(f)
    for _ in range(2):
        got = outer(loss_of, step, model)
        np.testing.assert_allclose(got, expected(f, X), rtol=1e-4)
        np.testing.assert_array_equal(model.fc.bias[...], np.zeros(3))
        assert model.note == "old" and not hasattr(model, "extra")


def test_a_value_that_a_transform_of_jax_goes_on_with() -> None:
    def inner(x: jax.Array) -> Any:
        raise ValueError((x**2).sum())

    step = lm.jit(inner)

    def outer(x: jax.Array) -> Any:
        try:
            return step(x)
        except ValueError as error:
            return error.args[0] * 3.0

    np.testing.assert_allclose(jax.jit(outer)(X), 3 * (np.asarray(X) ** 2).sum())
    np.testing.assert_allclose(jax.grad(outer)(X), 6 * np.asarray(X))
    np.testing.assert_allclose(jax.vmap(outer)(X), 3 * (np.asarray(X) ** 2).sum(1))
    np.testing.assert_allclose(lm.jit(jax.grad(outer))(X), 6 * np.asarray(X))
