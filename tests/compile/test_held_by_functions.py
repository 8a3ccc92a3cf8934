"""Layers that a model's attributes hold in functions, objects and the like are inputs of a compiled program."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from held_kinds import CACHED, KINDS, Holder, Seen, explicit, lazy
from helpers import array, assert_same_bits

import lazymods as lm

X = array(3, 4)
SOME = ["closure", "keyword default", "list in a closure", "partial", "bound method", "plain object", "nnx.vmap"]
every_kind = pytest.mark.parametrize("hold", (KINDS | CACHED).values(), ids=KINDS | CACHED)
some_kinds = pytest.mark.parametrize("hold", [KINDS[kind] for kind in SOME], ids=SOME)


def forward(model: Any, x: jax.Array) -> jax.Array:
    return model(x)


def want(change: Callable[[Any], None] = lambda held: None) -> Any:
    """What Flax computes where it sees the layer."""
    model = Seen()
    change(model.held)
    return nnx.jit(forward)(model, X)


def new_values(held: Any) -> None:
    held.kernel[...] = jnp.full((4, 4), 0.5)
    held.bias = nnx.Param(jnp.arange(4.0))


def assert_close(got: Any, wanted: Any) -> None:
    np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-6)


# ---------------------------------------------------------------- every kind of holding


@every_kind
@pytest.mark.parametrize("make", [explicit, lazy])
def test_a_held_layer_is_an_input(make: Any, hold: Any) -> None:
    model, held = make(hold)
    step = lm.jit(forward)
    assert_close(step(model, X), want())
    assert_close(step(model, X), want())
    assert type(held) is nnx.Linear
    new_values(held)
    assert_close(step(model, X), want(new_values))


@every_kind
def test_gradients_of_what_flax_sees_are_those_of_the_model(hold: Any) -> None:
    def gradient(model: Any, x: jax.Array) -> Any:
        return nnx.grad(lambda m: (m(x) ** 2).sum())(model)["out"]

    model, held = explicit(hold)
    step = lm.jit(gradient)
    for change in (lambda held: None, new_values):
        twin = Seen()
        change(held)
        change(twin.held)
        jax.tree.map(assert_close, step(model, X), nnx.jit(gradient)(twin, X))


@some_kinds
def test_a_held_layer_is_trained_in_the_program(hold: Any) -> None:
    def step(model: Any, held: Any, x: jax.Array) -> jax.Array:
        gradient = nnx.grad(lambda q: (model.out(x + q(x)) ** 2).sum())(held)
        nnx.update(held, jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(held), gradient))
        return model(x)

    model, held = explicit(hold)
    twin = Seen()
    mine, flax = lm.jit(step), nnx.jit(step)
    for _ in range(3):
        got, wanted = mine(model, held, X), flax(twin, twin.held, X)
        assert_close(got, wanted)
    jax.tree.map(assert_close, nnx.state(held), nnx.state(twin.held))


@some_kinds
def test_the_shadow_mode_agrees(hold: Any) -> None:
    model, held = explicit(hold)
    step = lm.jit(forward, check=True)
    step(model, X)
    new_values(held)
    assert_close(step(model, X), want(new_values))


def test_it_is_compiled_once_while_values_change() -> None:
    traces: list[int] = []

    def count(model: Any, x: jax.Array) -> jax.Array:
        traces.append(1)
        return model(x)

    model, held = explicit(KINDS["closure"])
    step = lm.jit(count)
    for value in range(4):
        held.kernel[...] = jnp.full((4, 4), float(value))
        step(model, X)
    assert len(traces) == 1


# ---------------------------------------------------------------- what a function holds may change


def test_a_layer_in_a_cell_that_is_bound_anew_is_seen() -> None:
    held: Any = nnx.Linear(4, 4, rngs=nnx.Rngs(5))

    def residual(x: jax.Array) -> jax.Array:
        return x + held(x)

    model = Holder(lambda _: residual, None, nnx.Linear(4, 2, rngs=nnx.Rngs(1)))
    step = lm.jit(forward)
    step(model, X)
    held = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    assert_close(step(model, X), want())
    held = None
    with pytest.raises(TypeError, match="not callable"):
        step(model, X)


@pytest.mark.parametrize("kind", ["default", "keyword default", "attribute of a function"])
def test_a_layer_in_a_default_or_attribute_that_is_another_is_seen(kind: str) -> None:
    model, _ = explicit(KINDS[kind])
    step = lm.jit(forward)
    step(model, X)
    other = nnx.Linear(4, 4, rngs=nnx.Rngs(7))
    function = model.residual
    if kind == "default":
        function.__defaults__ = (other,)
    elif kind == "keyword default":
        function.__kwdefaults__["layer"] = other
    else:
        function.layer = other
    assert_close(step(model, X), model(X))
    assert float(abs(model(X) - want()).max()) > 1e-3


def test_a_number_beside_the_layer_is_seen_when_it_changes() -> None:
    held, scale = nnx.Linear(4, 4, rngs=nnx.Rngs(0)), 1.0

    def residual(x: jax.Array) -> jax.Array:
        return x + held(x) * scale

    model = Holder(lambda _: residual, None, nnx.Linear(4, 2, rngs=nnx.Rngs(1)))
    step = lm.jit(forward)
    assert_close(step(model, X), want())
    scale = 2.0
    assert_close(step(model, X), model(X))
    assert float(abs(model(X) - want()).max()) > 1e-3


def test_statistics_in_a_held_layer_are_written_back() -> None:
    def build() -> tuple[Holder, Any]:
        norm = nnx.BatchNorm(4, rngs=nnx.Rngs(0))
        return Holder(KINDS["closure"], norm, nnx.Linear(4, 2, rngs=nnx.Rngs(1))), norm

    (model, norm), (twin, other) = build(), build()
    step = lm.jit(forward)
    for _ in range(3):
        assert_close(step(model, X), twin(X))
        assert_close(norm.mean[...], other.mean[...])
    assert float(abs(norm.mean[...]).max()) > 0


def test_random_streams_in_a_function_go_on() -> None:
    def build() -> tuple[Any, Any]:
        rngs = nnx.Rngs(3)
        return Holder(lambda _: lambda x: x + rngs.normal(x.shape), None, lambda x: x), rngs

    (model, rngs), (twin, other) = build(), build()
    step = lm.jit(forward)
    for _ in range(3):
        assert_close(step(model, X), twin(X))
    assert_same_bits(nnx.state(rngs), nnx.state(other))


def test_a_function_that_reaches_the_model_itself() -> None:
    class Own(nnx.Module):
        def __init__(self) -> None:
            self.out = nnx.Linear(4, 2, rngs=nnx.Rngs(1))
            self.again = lambda x: self.out(x)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.again(x)

    model, step = Own(), lm.jit(forward)
    assert_close(step(model, X), model.out(X))
    model.out = nnx.Linear(4, 2, rngs=nnx.Rngs(2))
    assert_close(step(model, X), model.out(X))


def test_functions_that_hold_each_other() -> None:
    held = nnx.Linear(4, 4, rngs=nnx.Rngs(0))

    def even(x: jax.Array, n: int) -> jax.Array:
        return x + held(x) if n == 0 else odd(x, n - 1)

    def odd(x: jax.Array, n: int) -> jax.Array:
        return even(x, n - 1)

    model = Holder(lambda _: lambda x: even(x, 2), None, nnx.Linear(4, 2, rngs=nnx.Rngs(1)))
    step = lm.jit(forward)
    assert_close(step(model, X), want())
    new_values(held)
    assert_close(step(model, X), want(new_values))


def test_functions_in_lists_and_dicts_of_a_model_and_of_a_closure() -> None:
    held = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    table = {"residual": KINDS["closure"](held)}

    class Table(nnx.Module):
        def __init__(self) -> None:
            self.table = nnx.static(table)
            self.out = nnx.Linear(4, 2, rngs=nnx.Rngs(1))

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.out(self.table["residual"](x))

    out = nnx.Linear(4, 2, rngs=nnx.Rngs(1))
    steps = [lm.jit(forward), lm.jit(lambda _, x: out(table["residual"](x)))]
    model = Table()
    for step in steps:
        assert_close(step(model, X), want())
    new_values(held)
    for step in steps:
        assert_close(step(model, X), want(new_values))


def test_an_optimizer_trains_a_model_with_functions() -> None:
    def step(model: Any, optimizer: Any, x: jax.Array) -> jax.Array:
        loss, gradient = nnx.value_and_grad(lambda m: (m(x) ** 2).mean())(model)
        optimizer.update(model, gradient)
        return loss

    def run(compiled: Any) -> list[Any]:
        model, _ = explicit(KINDS["closure"])
        optimizer = nnx.Optimizer(model, optax.sgd(1e-1, momentum=0.9), wrt=nnx.Param)
        return [compiled(model, optimizer, X) for _ in range(4)]

    jax.tree.map(assert_close, run(lm.jit(step)), run(nnx.jit(step)))


def test_a_model_with_functions_is_not_kept() -> None:
    model, held = explicit(KINDS["closure"])
    lm.jit(forward)(model, X)
    gone = weakref.ref(held)
    del model, held
    gc.collect()
    assert gone() is None
