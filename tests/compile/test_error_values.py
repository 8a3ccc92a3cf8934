"""Errors with errors or many parts inside: what they tell are values, never arrays of a trace."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import lazymods as lm


class DivergedError(Exception):
    """Holds a value."""

    def __init__(self, loss: Any) -> None:
        super().__init__(loss)
        self.loss = loss


@pytest.mark.parametrize("check", [False, True], ids=["", "check"])
@pytest.mark.parametrize("wrap", ["cause", "causes", "context", "group", "attribute"])
def test_an_exception_inside_of_an_exception_holds_values(wrap: str, check: bool) -> None:
    def raises(model: Any, x: jax.Array) -> None:
        model.bias[...] += 1.0
        inner = DivergedError(x.sum())
        vars(inner)["model"] = model
        error = ValueError("diverged", [inner] if wrap == "group" else 1)
        if wrap == "attribute":
            vars(error)["inner"] = {"it": inner}
        if wrap == "causes":
            between = KeyError("between")
            between.__cause__ = inner
            raise error from between
        if wrap == "context":
            try:
                raise inner
            except DivergedError:
                raise error  # noqa: B904  what it follows is the case
        if wrap == "cause":
            raise error from inner
        raise error

    model: Any = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="diverged") as found:
        lm.jit(raises, check=check)(model, jnp.ones((2, 3)))
    error: Any = found.value
    inner = {
        "cause": lambda: error.__cause__,
        "context": lambda: error.__context__,
        "causes": lambda: error.__cause__.__cause__,
        "group": lambda: error.args[1][0],
        "attribute": lambda: error.inner["it"],
    }[wrap]()
    assert float(inner.loss) == 6.0
    assert inner.model is model
    np.testing.assert_array_equal(model.bias[...], np.zeros(3))


@pytest.mark.parametrize("at", [0, 10_000, 29_999])
def test_an_exception_with_many_parts_holds_values(at: int) -> None:
    @lm.jit
    def f(x: jax.Array) -> jax.Array:
        parts: list[Any] = [[n] for n in range(30_000)]
        parts[at].append(x.sum())
        raise DivergedError(parts)

    with pytest.raises(DivergedError) as found:
        f(jnp.ones(3))
    number, value = found.value.loss[at]
    assert number == at
    assert float(value) == 3.0


@pytest.mark.parametrize("at", [0, 29_999])
def test_a_result_with_many_parts_is_refused_if_it_holds_an_array(at: int) -> None:
    def f(x: jax.Array) -> Any:
        parts: list[Any] = [[n] for n in range(30_000)]
        parts[at].append(x.sum())
        return lambda: parts

    for _ in range(2):
        with pytest.raises(lm.LazyError, match="every call computes anew"):
            lm.jit(f)(jnp.ones(3))


def test_a_caught_error_as_result_is_refused_since_its_traceback_holds_the_trace() -> None:
    def f(x: jax.Array) -> Any:
        doubled = 2 * x
        try:
            raise ValueError("no array in it")
        except ValueError as error:
            return error, doubled

    with pytest.raises(lm.LazyError, match="a ValueError: there are arrays inside"):
        lm.jit(f)(jnp.ones(3))
