"""Functions with derivatives of their own, and others that JAX keeps in equations, may close over a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental.ode import odeint

import lazymods as lm

BACK = jnp.ones((3, 4))  # a derivative that no rule of JAX gives


def with_vjp(layer: Any, x: Any) -> Any:
    @jax.custom_vjp
    def f(v: Any) -> Any:
        return jnp.round(layer(v))

    f.defvjp(lambda v: (f(v), None), lambda _, g: (g @ BACK,))
    return f(x)


def with_jvp(layer: Any, x: Any) -> Any:
    @jax.custom_jvp
    def f(v: Any) -> Any:
        return jnp.round(layer(v))

    f.defjvp(lambda primals, tangents: (f(*primals), tangents[0] @ BACK.T))
    return f(x)


def with_gradient(layer: Any, x: Any) -> Any:
    return jax.custom_gradient(lambda v: (jnp.round(layer(v)), lambda g: (g @ BACK,)))(x)


def with_closure_convert(layer: Any, x: Any) -> Any:
    converted, hoisted = jax.closure_convert(lambda v: layer(v), x)
    return converted(x, *hoisted)


def with_ode(layer: Any, x: Any) -> Any:
    return odeint(lambda y, t: jnp.tanh(layer(jnp.pad(y, ((0, 0), (0, 1))))), x[:, :3], jnp.array([0.0, 0.5]))[-1]


RULES = {f.__name__: f for f in (with_vjp, with_jvp, with_gradient, with_closure_convert, with_ode)}
KEPT = pytest.mark.xfail(
    jax.config.jax_check_tracer_leaks,  # type: ignore[attr-defined]
    reason="JAX keeps a rule's functions in the jaxpr, with what they close over: a leak to it under jax.jit too",
    strict=False,  # not in every way of calling them
)
MARKED = [pytest.param(name, marks=[KEPT] * (name in ("with_vjp", "with_jvp", "with_gradient"))) for name in RULES]
X = jnp.linspace(-2.0, 2.0, 8).reshape(2, 4)


class Net(nnx.Module):
    def __init__(self, rule: str) -> None:
        self.rule, self.fc = rule, nnx.Linear(4, 3, rngs=nnx.Rngs(0))

    def __call__(self, x: Any) -> Any:
        return RULES[self.rule](self.fc, x)


@pytest.mark.parametrize("rule", MARKED)
@pytest.mark.parametrize("how", ["plain", "donated", "deciding", "checked"])
def test_a_model_that_such_a_function_closes_over_is_an_input(rule: str, how: str) -> None:
    def forward(model: Net, x: Any) -> Any:
        out = model(x)
        return out if how != "deciding" or out.sum() > -1e9 else -out

    compiled = lm.jit(forward, donate_state=how == "donated", check=how == "checked")
    model = Net(rule)
    for scale in (1.0, 3.0):
        model.fc.kernel[...] = model.fc.kernel[...] * scale
        expected = forward(nnx.clone(model), X)
        np.testing.assert_allclose(compiled(model, X), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("rule", MARKED)
def test_its_derivative_is_taken_inside(rule: str) -> None:
    def slope(model: Net, x: Any) -> Any:
        return jax.grad(lambda v: model(v).sum())(x)

    np.testing.assert_allclose(lm.jit(slope)(Net(rule), X), slope(Net(rule), X), rtol=1e-4, atol=1e-5)


class Store:
    pass


def in_a_list() -> Callable[[Any], None]:
    kept: list[Any] = []
    return kept.append


def in_an_attribute_of_a_function() -> Callable[[Any], None]:
    def keep(value: Any) -> None:
        keep.kept = value  # pyright: ignore[reportFunctionMemberAccess]

    return keep


def in_a_cell() -> Callable[[Any], None]:
    kept = None

    def keep(value: Any) -> None:
        nonlocal kept
        kept = value

    return keep


LEAKS = [in_a_list, in_an_attribute_of_a_function, in_a_cell, lambda: lambda value: setattr(Store, "kept", value)]


@pytest.mark.slow
@pytest.mark.skipif(jax.config.jax_check_tracer_leaks, reason="JAX's own checker raises first")  # type: ignore[attr-defined]
@pytest.mark.parametrize("rule", ["with_vjp", "with_jvp", "with_gradient"])
@pytest.mark.parametrize("leak", LEAKS)
@pytest.mark.parametrize("decides", [False, True])
def test_a_leak_beside_it_is_refused(rule: str, leak: Callable[[], Callable[[Any], None]], decides: bool) -> None:
    keep = leak()

    def stored(model: Net, x: Any) -> Any:
        keep(model.fc.kernel.get_raw_value())  # a tracer that the equations hold as well
        out = RULES[rule](lambda v: (keep, model.fc(v))[1], x)  # and so does the function in them, with what keeps it
        return out if not decides or out.sum() > -1e9 else -out

    with pytest.raises(lm.LazyError, match="stores an array"):
        lm.jit(stored)(Net(rule), X)
