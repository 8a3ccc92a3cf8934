"""``lazytensor.value_and_grad`` of functions that reach models, numbers and code in all ways: changes are seen."""

import contextlib
import dataclasses
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from held_kinds import CACHED, KINDS

from lazymods import lazytensor

X = jnp.ones((2, 4))


def linear(seed: int) -> nnx.Linear:
    return nnx.Linear(4, 4, rngs=nnx.Rngs(seed))


def agree(f: Callable[..., Any], model: Any) -> None:
    want = nnx.value_and_grad(f)(model, X)
    with lazytensor.lazy():
        got = lazytensor.value_and_grad(f)(model, X)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5)
    np.testing.assert_allclose(got[1]["kernel"][...], want[1]["kernel"][...], rtol=1e-5)


@pytest.mark.parametrize("hold", [*KINDS.values(), *CACHED.values()], ids=[*KINDS, *CACHED])
def test_a_layer_that_is_held_anyhow(hold: Callable[[Any], Any]) -> None:
    layer, model = linear(0), linear(1)
    held = hold(layer)

    def loss(m: Any, x: jax.Array) -> jax.Array:
        return (held(m(x)) ** 2).sum()

    agree(loss, model)
    layer.kernel[...] = layer.kernel[...] * 2.0
    agree(loss, model)
    layer.bias, layer.use_bias = None, False  # type: ignore[assignment]
    agree(loss, model)
    layer.kernel[...] = layer.kernel[...] * 2.0
    agree(loss, model)


def noted(v: Any) -> Any:
    return v


class Holder:
    scale: Any = 2.0
    n = 3

    @staticmethod
    def times(v: Any) -> Any:
        return v * Holder.scale

    @classmethod
    def of_class(cls, v: Any) -> Any:
        return v * cls.scale

    def own(self, v: Any) -> Any:
        return v * self.scale


class Below(Holder):
    pass


@functools.wraps(noted)
def wrapper(v: Any) -> Any:
    return noted(v) * vars(noted)["scale"]


partial = functools.partial(noted)
space = types.SimpleNamespace(scale=2.0)
holder = Holder()
jitted = jax.jit(noted)
scale: Any = 2.0
numbers = [2.0]


def by_global(m: Any, x: Any) -> Any:
    return (m(x) * scale).sum()


def by_list(m: Any, x: Any) -> Any:
    return (m(x) * numbers[0]).sum()


def by_attribute(m: Any, x: Any) -> Any:
    return (m(x) * noted.scale).sum()  # type: ignore[attr-defined]


def by_attribute_of_itself(m: Any, x: Any) -> Any:
    return (m(x) * by_attribute_of_itself.scale).sum()  # type: ignore[attr-defined]


def by_attribute_of_a_partial(m: Any, x: Any) -> Any:
    return (m(x) * partial.scale).sum()  # type: ignore[attr-defined]


def by_wrapper(m: Any, x: Any) -> Any:
    return wrapper(m(x)).sum()


def by_class(m: Any, x: Any) -> Any:
    return (m(x) * Holder.scale).sum()


def by_base_class(m: Any, x: Any) -> Any:
    return (m(x) * Below.scale).sum()


def by_static_method(m: Any, x: Any) -> Any:
    return Holder.times(m(x)).sum()


def by_class_method(m: Any, x: Any) -> Any:
    return Below.of_class(m(x)).sum()


def by_method(m: Any, x: Any) -> Any:
    return holder.own(m(x)).sum()


def by_object(m: Any, x: Any) -> Any:
    return (m(x) * space.scale).sum()


FUNCTIONS = [
    *(by_global, by_list, by_attribute, by_attribute_of_itself, by_attribute_of_a_partial, by_wrapper, by_class),
    *(by_base_class, by_static_method, by_class_method, by_method, by_object),
]


def put(value: Any) -> None:
    global scale
    scale = numbers[0] = Holder.scale = space.scale = value
    for function in (noted, partial, by_attribute_of_itself):
        function.scale = value  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def numbers_as_before() -> Iterator[None]:
    put(2.0)
    yield
    put(2.0)


@pytest.mark.parametrize("f", FUNCTIONS, ids=lambda f: f.__name__)
def test_a_number_that_changes(f: Callable[..., Any]) -> None:
    model = linear(1)
    nnx.value_and_grad(f)(model, X)  # which sorts its attributes
    for value in (2.0, 3.0, 3, jnp.float32(5.0), 2.0):
        put(value)
        with jax.numpy_dtype_promotion("standard"):
            agree(f, model)


def test_code_that_changes() -> None:
    model = linear(1)
    nnx.value_and_grad(by_static_method)(model, X)
    before = Holder.times
    try:
        for times in (before, lambda v: v + 1.0, lambda v: v - 1.0):
            Holder.times = staticmethod(times)  # type: ignore[assignment, method-assign]
            agree(by_static_method, model)
    finally:
        Holder.times = staticmethod(before)  # type: ignore[assignment, method-assign]


def test_a_name_is_a_default_or_an_attribute() -> None:
    model = linear(1)
    nnx.value_and_grad(by_global)(model, X)

    def make(default: bool) -> Callable[..., Any]:
        def helper(v: Any, k: Any = 3.0) -> Any:
            return v * k

        if not default:
            helper.__defaults__ = None
            vars(helper)["k"] = 3.0
            return lambda m, x: helper(m(x), 2.0).sum()
        return lambda m, x: helper(m(x)).sum()

    for default in (True, False, True):
        agree(make(default), model)


def test_functions_that_reach_each_other() -> None:
    def even(v: Any, n: int) -> Any:
        return v if n == 0 else odd(v, n - 1)

    def odd(v: Any, n: int) -> Any:
        return v * 2.0 if n == 0 else even(v, n - 1)

    class Chooses:
        @staticmethod
        def of(v: Any) -> Any:
            return even(v, 3)

    model = linear(1)
    agree(lambda m, x: even(m(x), 3).sum(), model)
    agree(lambda m, x: Chooses.of(m(x)).sum(), model)


class Noisy(nnx.Module):
    def __init__(self) -> None:
        self.w = nnx.Param(jnp.ones(3))

    def __call__(self) -> jax.Array:
        return (self.w[...] * np.random.normal()).sum()


def test_random_numbers_of_numpy_are_drawn_at_each_call() -> None:
    numpy, model = np, Noisy()
    losses: list[Callable[[Any], Any]] = [
        lambda m: (m.w[...] * np.random.normal()).sum(),
        lambda m: (m.w[...] * numpy.random.normal()).sum(),
        lambda m: m(),
    ]
    for loss in losses:
        np.random.seed(0)
        want = [float(loss(model)) for _ in range(3)]
        np.random.seed(0)
        got = [float(lazytensor.value_and_grad(loss)(model)[0]) for _ in range(3)]
        np.testing.assert_allclose(got, want, rtol=1e-6)


RATE = 0.25


@pytest.mark.parametrize("block", [False, True])
def test_a_function_that_decides_on_values(block: bool) -> None:
    def loss(w: jax.Array, rate: float) -> jax.Array:
        y = (w * 2 if RATE > 0 else w).sum()
        return y * rate if rate > 0.5 and y > 0 else -y

    for w, rate, want in ((1.0, 0.75, 4.5), (-1.0, 0.75, 6.0), (1.0, 0.25, -6.0)):
        with lazytensor.lazy() if block else contextlib.nullcontext():
            value, gradient = lazytensor.value_and_grad(loss)(w * jnp.ones(3), rate)
        assert float(value) == want
        np.testing.assert_allclose(gradient, np.full(3, want / w / 3), rtol=1e-6)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Scaled:
    x: jax.Array
    scale: Any = dataclasses.field(metadata={"static": True})


KIND_OF = {bool: 2.0, int: 3.0, float: 5.0}


def test_equal_numbers_of_other_types_are_told_apart() -> None:
    model, found = linear(0), []

    def of_metadata(m: Any) -> jax.Array:
        return m(X).sum() * 0 + KIND_OF[type(m.kernel.get_metadata("scale"))]

    def of_field(given: Scaled) -> jax.Array:
        return given.x.sum() * 0 + KIND_OF[type(given.scale)]

    for scale in (1, 1.0, True, 1):
        model.kernel.set_metadata("scale", scale)
        with lazytensor.lazy():
            for f, given in ((of_metadata, model), (of_field, Scaled(X, scale))):
                found.append(float(lazytensor.value_and_grad(f)(given)[0]))
    assert found == [3.0, 3.0, 5.0, 5.0, 2.0, 2.0, 3.0, 3.0]
