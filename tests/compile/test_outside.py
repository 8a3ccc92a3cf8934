"""What is not a model's: objects beside it hold inputs, constants hold no tracer, iterators are not used up."""

import argparse
import array
import collections
import functools
import itertools
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.core import Tracer

import lazymods as lm

X = jnp.arange(6.0).reshape(2, 3)


def beside(**held: Any) -> Any:
    return types.SimpleNamespace(model=nnx.Linear(3, 3, rngs=nnx.Rngs(0)), **held)


# ---------------------------------------------------------------- arrays beside a model are inputs


class Trainer:
    """Holds arrays in an attribute, a dict, a list, a tuple, and numpy's."""

    def __init__(self) -> None:
        self.model = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
        self.average, self.key = jnp.zeros(()), jax.random.key(0)
        self.table, self.queue = {"a": jnp.ones((2, 3))}, collections.deque([jnp.zeros((2, 3))], maxlen=1)
        self.pair, self.history = (jnp.ones((2, 3)), 2.0), np.zeros(2, np.float32)

    def step(self, x: jax.Array) -> jax.Array:
        self.key, sub = jax.random.split(self.key)
        y = self.model(x) * self.table["a"] + self.pair[0] * self.pair[1] + self.history[0] + self.queue[0]
        self.average = 0.9 * self.average + y.mean() + jax.random.normal(sub)
        self.table["a"] = self.table["a"] + 1
        self.queue.append(self.average * jnp.ones((2, 3)))
        self.pair = (self.pair[0] * 0.5, self.pair[1])
        COUNT.append(1)
        return y


COUNT: list[int] = []


@pytest.mark.parametrize("form", ["method", "closure", "decides"])
def test_arrays_beside_a_model_are_inputs(form: str) -> None:
    plain, compiled = Trainer(), Trainer()

    def bind(trainer: Trainer) -> Callable[[jax.Array], jax.Array]:
        if form == "method":
            return trainer.step

        def step(x: jax.Array) -> jax.Array:
            y = trainer.step(x)
            return y * 2 if form == "decides" and bool(trainer.average > 1e6) else y

        return step

    f, g = bind(plain), lm.jit(bind(compiled))
    traces = []
    for i in range(4):
        for trainer in (plain, compiled):
            trainer.history[0] = i  # in place
        want = f(X)
        before = len(COUNT)
        np.testing.assert_allclose(g(X), want, rtol=1e-5)
        traces.append(len(COUNT) - before)
        np.testing.assert_allclose(compiled.average, plain.average, rtol=1e-5)
        np.testing.assert_allclose(compiled.table["a"], plain.table["a"])
        np.testing.assert_allclose(compiled.pair[0], plain.pair[0])
        assert compiled.pair[1] == 2.0 and compiled.queue.maxlen == 1
        assert jax.random.key_data(compiled.key).tolist() == jax.random.key_data(plain.key).tolist()
    assert traces[1:] == [0, 0, 0] or (form == "decides" and traces[2:] == [0, 0])


def test_an_array_beside_a_model_is_not_donated() -> None:
    held = beside(average=jnp.zeros(3), kept=[])
    model = held.model

    def step(x: jax.Array) -> jax.Array:
        model.bias[...] = model.bias[...] + 1
        held.average = held.average + model(x).mean(0)
        return held.average * 1

    f = lm.jit(step, donate_state=True)
    for _ in range(3):
        held.kept.append(held.average)
        f(X)
    assert not any(array.is_deleted() for array in held.kept)
    np.testing.assert_array_equal(held.kept[0], np.zeros(3))
    assert model.bias[...].tolist() == [3, 3, 3]


def test_a_write_into_an_array_of_numpy_is_refused() -> None:
    held = beside(counts=np.zeros(2))

    def count(x: jax.Array) -> jax.Array:
        held.counts[0] += 1
        return held.model(x)

    with pytest.raises(TypeError, match="immutable"):
        lm.jit(count)(X)
    assert held.counts.tolist() == [0, 0]


# ---------------------------------------------------------------- containers of any class


class History(dict[Any, Any]):
    """Writes an attribute at each item."""

    n, last = 0, None

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        self.last = key
        self.n += 1


class AttrDict(dict[str, Any]):
    """Answers any attribute with an item."""

    __getattr__ = dict.__getitem__


CONTAINERS: dict[str, tuple[Callable[[], Any], Callable[[Any, Any], None], Callable[[Any], Any]]] = {
    "set": (set, lambda c, y: c.add(len(c)), sorted),
    "UserDict": (collections.UserDict, lambda c, y: c.update({len(c): y}), lambda c: list(c.values())),
    "UserList": (collections.UserList, lambda c, y: c.append(y), list),
    "ChainMap": (lambda: collections.ChainMap({}), lambda c, y: c.update({len(c): y}), lambda c: list(c.values())),
    "Namespace": (argparse.Namespace, lambda c, y: setattr(c, "last", y), lambda c: [c.last]),
    "attributes": (History, lambda c, y: c.__setitem__(len(c), y), lambda c: [*c.values(), c.n, c.last]),
    "deque": (lambda: collections.deque(maxlen=2), lambda c, y: c.append(y), lambda c: [*c, c.maxlen]),
}


@pytest.mark.parametrize("kind", CONTAINERS)
def test_containers_beside_a_model_change_as_in_plain_python(kind: str) -> None:
    make, write, look = CONTAINERS[kind]
    plain, compiled = beside(c=make()), beside(c=make())

    def bind(held: Any) -> Callable[[jax.Array], jax.Array]:
        def f(x: jax.Array) -> jax.Array:
            y = held.model(x).sum()
            write(held.c, y)
            return y

        return f

    f, g = bind(plain), lm.jit(bind(compiled))
    for i in range(4):
        np.testing.assert_allclose(g(X * i), f(X * i), rtol=1e-5)
        np.testing.assert_allclose(np.array(look(compiled.c), float), np.array(look(plain.c), float), rtol=1e-5)


class Step(int):
    """A number of the user's."""


class Name(str):
    """A text of the user's."""

    __slots__ = ()


VALUES: dict[str, Any] = {
    "int": Step(3),
    "str": Name("a"),
    "float": type("Temperature", (float,), {})(1.5),
    "bytes": type("Raw", (bytes,), {})(b"ab"),
    "frozenset": type("Ids", (frozenset,), {})({1, 2}),
    "complex": type("Wave", (complex,), {})(1j),
}


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_values_of_classes_that_derive_from_pythons_own(value: Any) -> None:
    held = beside(kept=None)

    @lm.jit
    def f(x: jax.Array) -> Any:
        held.kept = value
        return held.model(x), value, {"v": value}

    for _ in range(2):
        _, out, inside = f(X)
        for found in (out, inside["v"], held.kept):
            assert type(found) is type(value) and found == value


def test_what_a_function_makes_and_returns() -> None:
    model = nnx.Linear(3, 3, rngs=nnx.Rngs(0))

    @lm.jit
    def f(x: jax.Array) -> Any:
        return collections.deque([x], maxlen=2), AttrDict(a=model(x)), {1, 2}

    for i in range(2):
        queue, attributes, numbers = f(X * i)
        assert queue.maxlen == 2 and type(queue) is collections.deque and numbers == {1, 2}
        np.testing.assert_allclose(attributes.a, model(X * i), rtol=1e-5)


DEFAULTS = {"lr": 1.0, "deep": [1]}


def test_a_constant_that_is_stored_or_returned_stays_the_object_that_it_is() -> None:
    held = beside(config=None)

    @lm.jit
    def f(x: jax.Array) -> Any:
        held.config = DEFAULTS
        return held.model(x), DEFAULTS["deep"], {"d": DEFAULTS}

    for _ in range(2):
        _, deep, inside = f(X)
        assert held.config is DEFAULTS and deep is DEFAULTS["deep"] and inside["d"] is DEFAULTS
        held.config = None


# ---------------------------------------------------------------- no tracer is left anywhere


class Stats:
    """Has a list, and one of its class."""

    shared: ClassVar[list[Any]] = []

    def __init__(self) -> None:
        self.losses: list[Any] = []


class Net(nnx.Module):
    """Writes to its class."""

    calls, last = 0, None

    def __init__(self) -> None:
        self.layer = nnx.Linear(3, 3, rngs=nnx.Rngs(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.layer(x)
        type(self).last = y
        return y


def helper() -> None:
    """Holds attributes."""


@functools.cache
def mask(n: int) -> jax.Array:
    return jnp.tril(jnp.ones((n, n)))


LEAKS: dict[str, Callable[[], tuple[Any, Callable[[], Any]]]] = {}


def leak(make: Callable[[], tuple[Any, Callable[[], Any]]]) -> None:
    LEAKS[make.__name__] = make


@leak
def list_in_an_object() -> Any:
    stats, model = Stats(), nnx.Linear(3, 3, rngs=nnx.Rngs(0))
    return lambda x: stats.losses.append(model(x).sum()), lambda: stats.losses


@leak
def list_of_a_class() -> Any:
    stats, model = Stats(), nnx.Linear(3, 3, rngs=nnx.Rngs(0))
    return lambda x: stats.shared.append(model(x).sum()), lambda: Stats.shared


@leak
def attribute_of_a_class() -> Any:
    return Net(), lambda: [Net.last]


@leak
def dict_in_a_list() -> Any:
    deep: list[Any] = [{"a": {}}]
    return lambda x: deep[0]["a"].update(b=x * 2), lambda: list(deep[0]["a"].values())


@leak
def attribute_of_a_function() -> Any:
    return lambda x: setattr(helper, "last", x * 2), None


@leak
def cached_helper() -> Any:
    mask.cache_clear()
    return lambda x: mask(2) @ x, None


@leak
def closure_of_a_generator() -> Any:
    kept: dict[str, Any] = {}

    def values(y: jax.Array) -> Iterator[Any]:
        yield y

    return lambda x: kept.update(g=values(x * 2)), None


@pytest.mark.slow
@pytest.mark.skipif(jax.config.jax_check_tracer_leaks, reason="JAX's own checker raises first")  # type: ignore[attr-defined]
@pytest.mark.parametrize("decides", [False, True], ids=["traced", "decides"])
@pytest.mark.parametrize("name", LEAKS)
def test_an_array_stored_in_a_constant_is_refused(name: str, decides: bool) -> None:
    f, look = LEAKS[name]()

    def g(x: jax.Array) -> Any:
        return f(x) if not decides or x.sum() > -1 else None

    with pytest.raises(lm.LazyError, match="stores an array"):
        lm.jit(g)(X)
    if look is not None:
        assert not any(isinstance(v, Tracer) for v in look())
    vars(helper).pop("last", None)
    mask.cache_clear()


def test_functions_that_refer_to_themselves_are_no_leak() -> None:
    def f(x: jax.Array) -> jax.Array:
        def down(n: int) -> jax.Array:
            return x if n == 0 else down(n - 1) * 2

        return down(3)

    np.testing.assert_array_equal(lm.jit(f)(X), X * 8)


def test_a_counter_of_traces_counts_traces() -> None:
    count, numbers = [], array.array("d")

    @lm.jit
    def f(x: jax.Array) -> jax.Array:
        count.append(1)
        numbers.append(1.0)
        return x * 2

    f(X), f(X), f(X[0])
    assert len(count) == len(numbers) == 2


# ---------------------------------------------------------------- what can be used once


def batches() -> Iterator[np.ndarray]:
    yield from (np.full((2, 3), i, np.float32) for i in range(1, 5))


ITERATORS: dict[str, Callable[[], Any]] = {
    "generator": batches,
    "list": lambda: iter([*batches()]),
    "zip": lambda: zip(batches(), strict=True),
    "map": lambda: map(np.abs, batches()),
    "enumerate": lambda: enumerate(batches()),
    "islice": lambda: itertools.islice(batches(), 3),
    "count": lambda: itertools.count(1),
}


@pytest.mark.parametrize("where", ["object", "closure", "list"])
@pytest.mark.parametrize("kind", ITERATORS)
def test_an_iterator_that_a_trace_uses_up_is_refused(kind: str, where: str) -> None:
    iterator, model = ITERATORS[kind](), nnx.Linear(3, 3, rngs=nnx.Rngs(0))
    held = beside(batches=iterator)
    listed = [iterator]
    take = {
        "object": lambda: next(held.batches),
        "closure": lambda: next(iterator),
        "list": lambda: next(listed[0]),
    }[where]

    @lm.jit
    def f(x: jax.Array) -> jax.Array:
        take()
        return model(x)

    with pytest.raises(lm.ArgumentError, match="used once"):
        f(X)


@pytest.mark.parametrize("kind", ITERATORS)
def test_an_iterator_that_no_trace_uses_may_be_there(kind: str) -> None:
    held = beside(batches=ITERATORS[kind]())
    f = lm.jit(lambda x: held.model(x) if held.batches is not None else x)
    for _ in range(2):
        next(held.batches)
        np.testing.assert_allclose(f(X), held.model(X), rtol=1e-5)


def test_a_coroutine_is_refused() -> None:
    async def f(x: jax.Array) -> jax.Array:
        return x * 2

    with pytest.raises(lm.LazyError, match="a coroutine"):
        lm.jit(f)(X)  # pyright: ignore[reportUnusedCoroutine]


def test_a_weak_reference_to_a_copy_is_refused_and_to_what_stays_is_stored() -> None:
    held, stays = beside(ref=None), Stats()

    @lm.jit
    def to_model(x: jax.Array) -> jax.Array:
        held.ref = weakref.ref(held.model)
        return held.model(x)

    @lm.jit
    def to_constant(x: jax.Array) -> jax.Array:
        held.ref = weakref.ref(stays)
        return held.model(x)

    with pytest.raises(lm.LazyError, match="a copy that was made for the trace"):
        to_model(X)
    assert held.ref is None
    to_constant(X)
    assert isinstance(held.ref, weakref.ref) and held.ref() is stays


# ---------------------------------------------------------------- what a function raises


class DivergedError(Exception):
    """Holds a value."""

    def __init__(self, loss: Any) -> None:
        super().__init__(loss)
        self.loss = loss


@pytest.mark.parametrize("check", [False, True], ids=["", "check"])
@pytest.mark.parametrize("always", [True, False], ids=["always", "decides"])
def test_an_exception_holds_values(always: bool, check: bool) -> None:
    held = beside(steps=0)

    @lm.jit(check=check)
    def f(x: jax.Array) -> jax.Array:
        loss = (held.model(x) ** 2).sum()
        held.steps += 1
        if always or loss > 100:
            raise DivergedError(loss)
        return loss

    for scale in (1.0, 100.0, 1.0, 200.0, 100.0):
        want, steps = float((held.model(X * scale) ** 2).sum()), held.steps
        if always or want > 100:
            with pytest.raises(DivergedError) as found:
                f(X * scale)
            np.testing.assert_allclose([found.value.loss, found.value.args[0]], [want, want], rtol=1e-5)
            assert held.steps == steps
        else:
            np.testing.assert_allclose(f(X * scale), want, rtol=1e-5)
            assert held.steps == steps + 1


def test_a_mutable_array_that_is_closed_over_is_written() -> None:
    ref = jax.new_ref(jnp.zeros(3))

    @lm.jit
    def f(x: jax.Array) -> jax.Array:
        ref[...] += x
        return ref[...] * 2

    for i in range(1, 4):
        np.testing.assert_array_equal(f(jnp.ones(3)), np.full(3, 2.0 * i))
    np.testing.assert_array_equal(ref[...], np.full(3, 3.0))


def test_a_large_container_is_not_walked_and_a_model_far_inside_is_refused() -> None:
    data: list[Any] = [(i, float(i)) for i in range(3_000)]
    f = lm.jit(lambda x: x * data[3][1])
    np.testing.assert_array_equal(f(X), X * 3)
    hidden = [*data, nnx.Linear(3, 3, rngs=nnx.Rngs(0))]
    with pytest.raises(lm.LazyError, match="finds in a way of its own"):
        lm.jit(lambda x: hidden[-1](x))(X)
