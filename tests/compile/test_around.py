"""What stands around models that a function closes over: closures, containers, objects of the user's own."""

import functools
import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import lazymods as lm

X = jnp.arange(3.0)


def test_what_stands_beside_a_model_in_a_closure_is_seen_and_not_kept() -> None:
    class Held(nnx.Module):
        def __init__(self) -> None:
            self.weight = nnx.Param(jnp.ones(3))

    model: Any = Held()
    shift: Any = jnp.zeros(3)
    act: Any = lambda v: v  # noqa: E731

    def run(x: jax.Array) -> jax.Array:
        return act(x * model.weight + shift)

    call = lm.jit(run)

    def check(count: int) -> None:
        for _ in range(3):
            np.testing.assert_allclose(call(X), run(X), rtol=1e-6)
        assert call.cache_info().currsize == count

    check(1)
    model.weight.set_value(model.weight.get_value() * 5)
    check(1)
    shift = jnp.ones(3)
    check(2)
    act = jnp.sin
    check(3)
    gone, model = weakref.ref(model), Held()
    check(3)  # another model of the same structure
    gc.collect()
    assert gone() is None


def test_a_closure_that_cannot_be_traced_fails_at_every_call() -> None:
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))

    def fail(value: jax.Array) -> jax.Array:
        raise RuntimeError("no")

    act: Any = jnp.sin

    def run(x: jax.Array) -> jax.Array:
        return act(model(x))

    call = lm.jit(run)
    call(X), call(X)
    act = fail
    for _ in range(3):  # not the program of the act before
        with pytest.raises(RuntimeError, match="no"):
            call(X)
    act = jnp.cos
    np.testing.assert_allclose(call(X), run(X), rtol=1e-6)


class Trainer:
    """What people write around a model."""

    def __init__(self) -> None:
        self.models: dict[str, Any] = {"main": nnx.Linear(3, 2, rngs=nnx.Rngs(0))}
        self.scales: list[Any] = [1, jnp.ones(2)]
        self.options = SimpleNamespace(shift=1.0)

    def step(self, x: jax.Array) -> jax.Array:
        factor = 10.0 if isinstance(self.scales[0], bool) else 1.0
        out = sum(model(x) for model in self.models.values())
        return out * factor * float(self.scales[0]) + self.scales[1] + self.options.shift


AROUND: dict[str, Callable[[Trainer], Any]] = {
    "another model": lambda t: t.models.update(main=nnx.Linear(3, 2, rngs=nnx.Rngs(1))),
    "a model more": lambda t: t.models.update(more=nnx.Linear(3, 2, rngs=nnx.Rngs(1))),
    "the model twice": lambda t: t.models.update(more=t.models["main"]),
    "another value": lambda t: t.models["main"].bias.set_value(jnp.ones(2)),
    "no bias": lambda t: vars(t.models["main"]).update(use_bias=False, bias=None),
    "a bool for an int": lambda t: t.scales.__setitem__(0, True),
    "another number": lambda t: t.scales.__setitem__(0, 2),
    "another array": lambda t: t.scales.__setitem__(1, jnp.zeros(2)),
    "an attribute": lambda t: setattr(t.options, "shift", 3.0),
    "another dict": lambda t: setattr(t, "models", {"other": nnx.Linear(3, 2, rngs=nnx.Rngs(2))}),
}


@pytest.mark.parametrize("change", AROUND.values(), ids=AROUND)
def test_a_change_around_models_is_seen(change: Any) -> None:
    trainer = Trainer()
    call = lm.jit(trainer.step)
    for step in (lambda t: None, change):
        step(trainer)
        for _ in range(3):
            np.testing.assert_allclose(call(X), trainer.step(X), rtol=1e-6)


def test_a_model_that_a_container_lets_go_is_not_kept() -> None:
    trainer = Trainer()
    call = lm.jit(trainer.step)
    call(X), call(X)
    gone = weakref.ref(trainer.models.pop("main"))
    gc.collect()
    assert gone() is None


def test_two_shapes_in_turn_are_traced_twice() -> None:
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    runs: list[int] = []
    call = lm.jit(lambda m, x: (runs.append(1), m(x))[1])
    for rows in (1, 2, 1, 2, 1, 1, 2):
        x = jnp.ones((rows, 3))
        np.testing.assert_allclose(call(model, x), model(x), rtol=1e-6)
    assert len(runs) == 2


# ---------------------------------------------------------------- functions that are made of compiled ones


def _decorated(function: Any) -> Any:
    @functools.wraps(function)
    def tripled(*args: Any) -> Any:
        return function(*args) * 3.0

    return tripled


MADE: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {  # and what it does to sum(x ** 3)
    "grad": (jax.grad, lambda x: 3 * x**2),
    "value and grad": (lambda f: lambda x: jax.value_and_grad(f)(x)[1], lambda x: 3 * x**2),
    "grad of nnx": (nnx.grad, lambda x: 3 * x**2),
    "grad of ours": (lm.autograd.grad, lambda x: 3 * x**2),
    "grad of grad": (lambda f: jax.grad(lambda x: jax.grad(f)(x).sum()), lambda x: 6 * x),
    "grad of a block": (lambda f: lm.lazytensor.value_and_grad(f), lambda x: (np.sum(x**3), 3 * x**2)),
    "vmap": (jax.vmap, lambda x: x**3),
    "forward": (jax.jacfwd, lambda x: 3 * x**2),
    "jit": (jax.jit, lambda x: np.sum(x**3)),
    "jit of nnx": (nnx.jit, lambda x: np.sum(x**3)),
    "checkpoint": (jax.checkpoint, lambda x: np.sum(x**3)),
    "no grad": (lm.autograd.no_grad(), lambda x: np.sum(x**3)),
    "decorator": (_decorated, lambda x: 3 * np.sum(x**3)),
}


TRACED = ("vmap", "jit", "jit of nnx", "checkpoint", "forward", "grad of grad")  # there is no value to decide on


@pytest.mark.parametrize("options", [{}, {"check": True}], ids=["", "checked"])
@pytest.mark.parametrize("name, decides", [(n, d) for n in MADE for d in (False, True) if not d or n not in TRACED])
def test_a_function_that_is_made_of_a_compiled_one_is_itself(name: str, options: Any, decides: bool) -> None:
    def cubes(x: Any) -> Any:
        return (x**3).sum() if not decides or x.sum() > -100 else x.sum()

    make, want = MADE[name]
    made = lm.jit(make(lm.jit(cubes, **options)), **options)
    for x in (np.array([1.0, 2.0, 3.0], np.float32), np.array([0.5, -1.0, 2.0], np.float32)):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), made(jnp.asarray(x)), want(x))


def test_attributes_of_a_function_are_those_of_the_compiled_one() -> None:
    def f(x: Any) -> Any:
        return x

    f.note = "kept"  # type: ignore[attr-defined]
    compiled: Any = lm.jit(f)
    assert compiled.note == "kept" and compiled.__wrapped__ is f and compiled.__name__ == "f"
