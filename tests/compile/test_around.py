"""What stands around models that a function closes over: closures, containers, objects of the user's own."""

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
