"""Classes of the user's own: their types, static fields, containers and what those have besides items."""

import collections
import copy
import decimal
import threading
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx, struct

import lazymods as lm

X = jnp.arange(6.0).reshape(2, 3)

pytestmark = pytest.mark.usefixtures("standard_promotion")


def net() -> nnx.Linear:
    return nnx.Linear(3, 2, rngs=nnx.Rngs(0))


class Options:
    best: Any

    def __init__(self) -> None:
        self.scale, self.model, self.calls = 2.0, net(), 0

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.scale == other.scale  # type: ignore[attr-defined]

    __hash__ = None  # type: ignore[assignment]


def test_objects_have_their_own_type_while_reads_are_noted() -> None:
    options, table, traces = Options(), {Options: 3.0}, []

    @lm.jit
    def f(x: jax.Array) -> jax.Array:
        traces.append(1)
        fresh = Options.__new__(Options)
        fresh.scale = 2.0
        factor = (2.0 if type(options) is Options else 0.0) * table[type(options)] * (options == fresh)
        return options.model(x) * factor

    for calls in range(3):
        options.calls = calls  # which the function does not read
        np.testing.assert_allclose(f(X), options.model(X) * 6, rtol=1e-5)
    assert len(traces) == 1
    options.scale = 3.0
    np.testing.assert_array_equal(f(X), np.zeros((2, 2)))
    assert "__getattribute__" not in vars(Options)


def test_reads_are_noted_in_two_threads_at_once() -> None:
    both, options, got, waits = threading.Barrier(2), [Options(), Options()], {}, {0, 1}

    def call(number: int) -> None:
        @lm.jit
        def f(x: jax.Array) -> jax.Array:
            if number in waits:  # its first trace
                both.wait(60)
            y = options[number].model(x) * options[number].scale
            if number in waits:
                waits.remove(number)
                both.wait(60)
            return y

        for scale in (1.0, 2.0 + number, 1.0):
            options[number].scale = scale
            got[number, scale] = f(X)

    threads = [threading.Thread(target=call, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 4
    for (number, scale), value in got.items():
        np.testing.assert_allclose(value, options[number].model(X) * scale, rtol=1e-5)
    assert "__getattribute__" not in vars(Options)


# ---------------------------------------------------------------- numbers in pytrees of the user's


@struct.dataclass
class Scaled:
    x: Any
    by: Any = struct.field(pytree_node=False, default=1)


class Scale(nnx.Module):
    def __init__(self, by: Any) -> None:
        self.x, self.by = nnx.Variable(jnp.ones(3, jnp.int32)), by


def test_static_fields_of_pytrees_count_by_type_and_value() -> None:
    ints = jnp.ones(3, jnp.int32)
    scaled, merged = lm.jit(lambda s: s.x * s.by), lm.jit(lambda d, s: nnx.merge(d, s).x[...] * nnx.merge(d, s).by)
    keys = lm.jit(lambda d: dict(d))
    for by in (1, 1.0, True, 1):
        assert scaled(Scaled(ints, by)).dtype == (ints * by).dtype
        assert merged(*nnx.split(Scale(by))).dtype == (ints * by).dtype
        assert [type(key) for key in keys({by: ints})] == [type(by)]
    inverse = lm.jit(lambda s: s.x / s.by)
    assert [float(inverse(Scaled(jnp.float32(1), by))) for by in (0.0, -0.0, 0.0)] == [np.inf, -np.inf, np.inf]


# ---------------------------------------------------------------- containers of the user's own classes


class Named(dict[str, Any]):
    def __init__(self, items: dict[str, Any], name: str) -> None:
        super().__init__(items)
        self.name = name


class Losses(list[Any]):
    pass


class Latest(collections.deque[Any]):
    pass


class Pair(tuple[Any, Any]):
    def __new__(cls, a: Any, b: Any) -> Any:
        return super().__new__(cls, (a, b))


class Items(dict[str, Any]):
    """Its attributes are its items."""

    def __init__(self, **items: Any) -> None:
        super().__init__(**items)
        self.__dict__ = self


class FailedError(Exception):
    pass


class Money(decimal.Decimal):
    pass


def made(x: Any) -> dict[str, Any]:
    losses, latest = Losses([x]), Latest([1, x], maxlen=2)
    losses.unit, latest.mean = "nats", x.mean()  # type: ignore[attr-defined]
    groups: Any = collections.defaultdict(list)
    groups["a"].append(x)
    found = {"named": Named({"x": x}, "first"), "losses": losses, "latest": latest, "pair": Pair(x, 2)}
    return found | {"items": Items(x=x), "groups": groups, "error": FailedError("no", 3), "money": Money("1.5")}


@pytest.mark.parametrize("stored", [False, True], ids=["returned", "stored"])
def test_what_a_function_makes_is_whole(stored: bool) -> None:
    options: Any = Options()

    @lm.jit
    def f(x: jax.Array) -> Any:
        options.made = made(x)
        return options.model(x), None if stored else made(x)

    for scale in (1.0, 2.0):
        _, out = f(X * scale)
        found, want = options.made if stored else out, made(X * scale)
        for name, value in want.items():
            assert type(found[name]) is type(value)
            if name not in ("error", "money"):
                for got, expected in zip(jax.tree.leaves([*found[name]]), jax.tree.leaves([*value]), strict=True):
                    assert got == expected if isinstance(expected, str) else np.array_equal(got, expected)
        assert found["named"].name == "first" and found["losses"].unit == "nats" and found["latest"].maxlen == 2
        np.testing.assert_allclose(found["latest"].mean, (X * scale).mean(), rtol=1e-6)
        assert found["items"].x is found["items"]["x"] and found["error"].args == ("no", 3) and found["money"] == 1.5
        found["groups"]["b"].append(1)
        assert list(found["groups"]) == ["a", "b"]
        np.testing.assert_array_equal(found["named"]["x"], X * scale)


def test_a_dict_whose_attributes_are_its_items_is_reached() -> None:
    ours: Any = Items(model=net(), total=jnp.zeros(()), calls=0)
    theirs: Any = Items(model=net(), total=jnp.zeros(()), calls=0)

    def step(state: Any, x: jax.Array) -> jax.Array:
        state["total"] = state.total + x.sum()
        state.calls += 1
        return state["model"](x) * state["calls"] + state.total

    f = lm.jit(lambda x: step(ours, x))
    for _ in range(3):
        np.testing.assert_allclose(f(X), step(theirs, X), rtol=1e-5)
        assert ours["calls"] == ours.calls == theirs.calls
        np.testing.assert_array_equal(ours["total"], theirs["total"])


class AnyName(dict[str, Any]):
    """Has any attribute: None, if it is no item."""

    __getattr__ = dict.get
    __setattr__ = dict.__setitem__


def test_a_dict_that_has_any_attribute_is_reached() -> None:
    state: Any = AnyName(model=net(), total=jnp.zeros(()))

    @lm.jit
    def f(x: jax.Array) -> Any:
        state.total = state.total + x.sum()
        state.seen = "seen"
        return state.model(x) + state.total

    for calls in (1, 2):
        np.testing.assert_allclose(f(X), state["model"](X) + 15 * calls, rtol=1e-5)
        assert state.seen == "seen" and float(state["total"]) == 15 * calls


def test_a_shape_and_dtype_is_a_static_value() -> None:
    class Padded(nnx.Module):
        def __init__(self) -> None:
            self.layer, self.spec, self.last = net(), jax.ShapeDtypeStruct((2, 2), jnp.float32), None

        def __call__(self, x: jax.Array) -> Any:
            self.last = jax.ShapeDtypeStruct(x.shape, x.dtype)
            return self.layer(x) + jnp.ones(self.spec.shape, self.spec.dtype), self.spec

    model: Any = Padded()
    f = lm.jit(model)
    for shape in ((2, 2), (2, 2), (1, 2)):
        model.spec = jax.ShapeDtypeStruct(shape, jnp.float32)
        y, spec = f(X)
        np.testing.assert_allclose(y, model.layer(X) + 1, rtol=1e-6)
        assert spec == model.spec and model.last == jax.ShapeDtypeStruct((2, 3), jnp.float32)
    assert f.cache_info().currsize <= 3


@pytest.mark.parametrize("before", [False, True], ids=["", "called before"])
def test_what_an_inner_function_reads_counts_for_the_outer_one(before: bool) -> None:
    helpers: Any = types.ModuleType("helpers")
    helpers.options, plain = Options(), Options()

    @lm.jit
    def inner(x: jax.Array) -> jax.Array:
        helpers.options.best = x.sum()
        return helpers.options.model(x) * helpers.options.scale

    if before:
        inner(X)
    outer = lm.jit(lambda x: inner(x) + 1)
    for scale in (1.0, 3.0, 1.0):
        helpers.options.scale = plain.scale = scale
        np.testing.assert_allclose(outer(X * scale), plain.model(X * scale) * scale + 1, rtol=1e-5)
        np.testing.assert_allclose(helpers.options.best, (X * scale).sum(), rtol=1e-6)


@pytest.mark.parametrize("shared", [False, True])
def test_an_inner_function_shares_a_variable(shared: bool) -> None:
    options, model = Options(), net()

    def step(model: Any, x: jax.Array) -> jax.Array:
        if shared:
            options.model.bias = model.bias
        return options.model(x)

    outer = lm.jit(lambda model, x: lm.jit(step)(model, x))
    for _ in range(2):
        np.testing.assert_allclose(outer(model, X), options.model(X), rtol=1e-6)
        assert (options.model.bias is model.bias) is shared


COPIES: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickled state": lambda options: types.SimpleNamespace(**options.__getstate__()),
    "around its class": lambda options: types.SimpleNamespace(
        model=object.__getattribute__(options, "model"), scale=object.__getattribute__(options, "scale")
    ),
}


@pytest.mark.parametrize("make", COPIES.values(), ids=COPIES)
def test_what_is_read_of_an_object_in_c_is_seen(make: Callable[[Any], Any]) -> None:
    options = Options()

    def f(x: jax.Array) -> jax.Array:
        own = make(options)
        return own.model(x) * own.scale

    g = lm.jit(f)
    for change in ({}, {"scale": 5.0}, {"model": nnx.Linear(3, 2, rngs=nnx.Rngs(1))}):
        vars(options).update(change)
        want = options.model(X) * options.scale
        assert np.abs(want).sum() > 0
        np.testing.assert_allclose(g(X), want, rtol=1e-5)
