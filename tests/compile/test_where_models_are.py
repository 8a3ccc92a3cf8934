"""Where a function finds models: by names that come later, by functions of modules and classes, in several threads."""

import functools
import threading
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import lazymods as lm

X = jnp.arange(6.0).reshape(2, 3)


def linear(seed: int = 0) -> nnx.Linear:
    return nnx.Linear(3, 4, rngs=nnx.Rngs(seed))


def close(got: Any, want: Any) -> None:
    np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=1e-5, atol=1e-6)



@lm.jit
def names_later(x: jax.Array) -> jax.Array:
    return later_helper(x) + LATER(x)


def later_helper(x: jax.Array) -> jax.Array:
    return ALSO_LATER(x)


LATER, ALSO_LATER = linear(), linear(1)


def test_models_and_helpers_may_be_defined_after_the_function() -> None:
    settings = types.ModuleType("settings")

    @lm.jit
    def step(x: jax.Array) -> jax.Array:
        return helper(x) + settings.model(x)

    def helper(x: jax.Array) -> jax.Array:
        return model(x)

    model: Any = linear()
    settings.model = linear(1)  # type: ignore[attr-defined]
    for scale in (1.0, 2.0):
        for one in (model, settings.model, LATER, ALSO_LATER):
            one.kernel[...] = one.kernel[...] * scale
        close(step(X), model(X) + settings.model(X))
        close(names_later(X), LATER(X) + ALSO_LATER(X))


def test_a_name_may_get_a_function_that_holds_a_model() -> None:
    act: Any = None
    f = lm.jit(lambda x: x if act is None else act(x))
    close(f(X), X)
    for seed in (0, 1):
        model = linear(seed)
        act = functools.partial(lambda model, x: model(x), model) if seed else lambda x, model=model: model(x)
        close(f(X), model(X))


SHARED = linear(3)


class Store:
    model = linear(4)

    @staticmethod
    def shared(x: jax.Array) -> jax.Array:
        return SHARED(x)

    @classmethod
    def own(cls, x: jax.Array) -> jax.Array:
        return cls.model(x)


def test_functions_of_modules_and_classes_are_helpers() -> None:
    helpers = types.ModuleType("helpers")
    source = "class Twice:\n    @staticmethod\n    def call(x): return model(x) * 2\ndef call(x): return model(x)"
    exec(source, vars(helpers))
    found: Any = helpers
    found.model = linear(5)
    before = dict(vars(Store))
    step = lm.jit(lambda x: (Store.shared(x), Store.own(x), found.call(x), found.Twice.call(x)))
    for _ in range(3):
        want = SHARED(X), Store.model(X), found.model(X), found.model(X) * 2
        for got, expected in zip(step(X), want, strict=True):
            close(got, expected)
        for model in (SHARED, Store.model, found.model):
            model.kernel[...] = model.kernel[...] * 1.5
    assert dict(vars(Store)) == before


@pytest.mark.slow
def test_two_threads_trace_with_the_same_attribute() -> None:
    original, began, results = Store.model, threading.Event(), {}

    @lm.jit
    def slow(x: jax.Array) -> jax.Array:
        began.set()
        ends.wait(1.0)  # the other thread waits meanwhile
        return Store.model(x)

    ends = threading.Event()
    quick = lm.jit(lambda x: Store.model(x) + 1)

    def second() -> None:
        began.wait(60)
        results["quick"] = quick(X)
        ends.set()

    threads = [threading.Thread(target=second), threading.Thread(target=lambda: results.update(slow=slow(X)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert Store.model is original
    close(results["slow"], original(X))
    close(results["quick"], original(X) + 1)


def by_default() -> Any:
    def f(x: jax.Array, model: Any = linear(0)) -> jax.Array:  # noqa: B008
        return model(x)

    return f, lambda model: setattr(f, "__defaults__", (model,))


def by_keyword_default() -> Any:
    def f(x: jax.Array, *, model: Any = linear(0)) -> jax.Array:  # noqa: B008
        return model(x)

    return f, lambda model: setattr(f, "__kwdefaults__", {"model": model})


def by_default_of_a_helper() -> Any:
    helper, change = by_default()
    return lambda x: helper(x) * 2, change


def by_partial() -> Any:
    f = functools.partial(lambda x, model: model(x), model=linear(0))
    return f, lambda model: f.keywords.update(model=model)


def by_attribute_of_the_function() -> Any:
    def f(x: jax.Array) -> jax.Array:
        return vars(f)["model"](x)

    vars(f)["model"] = linear(0)
    return f, lambda model: vars(f).update(model=model)


HELD = (by_default, by_keyword_default, by_default_of_a_helper, by_partial, by_attribute_of_the_function)


@pytest.mark.parametrize("hold", HELD, ids=lambda hold: hold.__name__)
def test_another_model_in_the_place_of_one_is_seen(hold: Any) -> None:
    f, change = hold()
    compiled = lm.jit(f)
    for seed in (0, 1, 2):
        change(linear(seed))
        for _ in range(2):
            close(compiled(X), f(X))


SHARED, COUNTING = linear(2), nnx.BatchNorm(3, rngs=nnx.Rngs(0))


class ByMethods(nnx.Module):
    """Its methods name models of this file."""

    def __init__(self) -> None:
        self.weight = nnx.Param(jnp.ones(()))

    @property
    def shared(self) -> nnx.Linear:
        return SHARED

    @staticmethod
    def normed(x: jax.Array) -> jax.Array:
        return COUNTING(x)

    def helper(self, x: jax.Array) -> jax.Array:
        return later_helper(self.normed(x * self.weight))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.helper(x) + self.shared(x)


class AroundMethods(nnx.Module):
    def __init__(self) -> None:
        self.inner = ByMethods()

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.inner(x) * 2


class Steps:
    """No module."""

    def __init__(self) -> None:
        self.model = AroundMethods()

    def step(self, x: jax.Array) -> jax.Array:
        return self.model(x) + SHARED(x)


BY_METHODS: dict[str, Any] = {
    "module": lambda jit: jit(ByMethods()),
    "submodule": lambda jit: jit(AroundMethods()),
    "method": lambda jit: jit(Steps().step),
    "argument": lambda jit: functools.partial(jit(lambda m, x: m(x)), ByMethods()),
}


@pytest.mark.parametrize("check", [False, True], ids=["", "checked"])
@pytest.mark.parametrize("form", BY_METHODS)
def test_models_that_methods_name_are_inputs(form: str, check: bool) -> None:
    found = []
    for jit in (lambda f: f, functools.partial(lm.jit, check=check)):
        call = BY_METHODS[form](jit)
        COUNTING.mean[...], COUNTING.var[...] = jnp.zeros(3), jnp.ones(3)
        for n in range(4):
            SHARED.kernel[...] = jnp.full((3, 4), float(n // 2))
            found.append([np.asarray(call(X + n)), np.asarray(COUNTING.mean), np.asarray(COUNTING.var)])
    jax.tree.map(close, found[4:], found[:4])


def test_what_is_lowered_has_models_that_methods_name() -> None:
    model = AroundMethods()
    COUNTING.mean[...], COUNTING.var[...] = jnp.zeros(3), jnp.ones(3)
    compiled = lm.jit(model).lower(X).compile()
    SHARED.kernel[...] = SHARED.kernel[...] + 1
    close(compiled(X), model(X))
