"""What a model holds besides arrays: every change of it is seen, by type and value, however deep."""

import collections
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import lazymods as lm

X = jnp.arange(3.0)


@dataclasses.dataclass
class Options:
    scale: float = 2.0
    names: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    shift: float = 1.0


@dataclasses.dataclass(slots=True)
class Slotted:
    shift: float = 1.0
    inner: Any = None


class Hidden:
    """Its slot has another name than its declaration, and hides that of a base."""

    __slots__ = ("__factor",)

    def __init__(self, factor: float) -> None:
        self.__factor = factor

    def set(self, factor: float) -> None:
        self.__factor = factor

    def get(self) -> float:
        return self.__factor


class Both(Slotted):
    """Slots in its base, attributes of its own."""


class Level(int):
    """A number with attributes."""


class Names(list[str]):
    """A list with attributes."""

    weight = 1.0


class SaysYes:
    def __init__(self, value: float) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


class Model(nnx.Module):
    def __init__(self) -> None:
        self.options, self.odd, self.hidden = Options(), SaysYes(1.0), Hidden(3.0)
        self.slotted, self.frozen, self.both, self.level = Slotted(), Frozen(), Both(), Level(1)
        self.both.extra = 1.0  # type: ignore[attr-defined]
        self.names: Any = nnx.static(Names())
        self.pair: Any = (1, ("a", 2.0))
        self.queue: Any = nnx.static(collections.deque([1]))
        self.chosen, self.table = {1}, {"a": 1, "inner": {"b": 1}}
        self.act: Any = functools.partial(jnp.multiply, jnp.full(3, 2.0))
        self.weight = nnx.Param(jnp.ones(3), scale=jnp.float32(2))

    def __call__(self, x: jax.Array) -> jax.Array:
        factor = {bool: 3.0, int: 5.0, float: 7.0}
        parts = (self.pair[0], self.queue[-1], next(iter(self.chosen)), self.table["a"], self.table["inner"]["b"])
        kind = sum(3**n * factor[type(part)] for n, part in enumerate(parts))
        numbers = (self.slotted.shift, self.frozen.shift, self.both.shift, self.both.extra, self.hidden.get())  # type: ignore[attr-defined]
        numbers = (*numbers, self.level, self.names.weight, self.options.scale, self.odd.value)
        inner = 0.0 if self.slotted.inner is None else self.slotted.inner.sum()
        total = kind + sum(1.7**n * number for n, number in enumerate(numbers))
        return self.act(x) * total + len(self.options.names) + self.weight.get_metadata("scale") + inner


CHANGES: dict[str, Callable[[Any], Any]] = {
    "an attribute of a dataclass": lambda m: setattr(m.options, "scale", 3.0),
    "a list in a dataclass": lambda m: m.options.names.append("b"),
    "a slot": lambda m: setattr(m.slotted, "shift", 4.0),
    "an array in a slot": lambda m: setattr(m.slotted, "inner", X),
    "a frozen dataclass": lambda m: setattr(m, "frozen", Frozen(5.0)),
    "a slot of a base": lambda m: setattr(m.both, "shift", 5.0),
    "an attribute beside slots": lambda m: setattr(m.both, "extra", 5.0),
    "a private slot": lambda m: m.hidden.set(8.0),
    "a number of a class of its own": lambda m: setattr(m, "level", Level(2)),
    "an attribute of a list": lambda m: setattr(m.names, "weight", 6.0),
    "an object that equals everything": lambda m: setattr(m, "odd", SaysYes(2.0)),
    "its content": lambda m: setattr(m.odd, "value", 5.0),
    "a bool in a queue": lambda m: m.queue.append(True),
    "a bool for an int in a queue": lambda m: (m.queue.pop(), m.queue.append(True)),
    "a bool for an int in a set": lambda m: (m.chosen.clear(), m.chosen.add(True)),
    "a bool for an int in a dict": lambda m: m.table.update(a=True),
    "a float for an int in a dict": lambda m: m.table.update(a=1.0),
    "a bool for an int in an equal dict": lambda m: (m.table.update(inner={"b": 1}), m.table["inner"].update(b=True)),
    "a bool in a tuple": lambda m: setattr(m, "pair", (True, ("a", 2.0))),
    "a float in a tuple": lambda m: setattr(m, "pair", (1.0, ("a", 2.0))),
    "an array in a partial function": lambda m: setattr(m, "act", functools.partial(jnp.multiply, jnp.full(3, 7.0))),
    "an array in metadata": lambda m: m.weight.set_metadata("scale", jnp.float32(9)),
}


@pytest.mark.parametrize("held", [False, True], ids=["argument", "closure"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_inside_a_static_attribute_is_seen(change: Any, held: bool) -> None:
    model, plain = Model(), Model()
    compiled = lm.jit(lambda x: model(x)) if held else lm.jit(lambda m, x: m(x))
    call = compiled if held else lambda x: compiled(model, x)  # pyright: ignore[reportCallIssue]
    for step in (lambda m: None, change):
        step(model), step(plain)
        for _ in range(3):
            np.testing.assert_allclose(call(X), plain(X), rtol=1e-6)  # pyright: ignore[reportCallIssue]


def test_an_equal_dict_in_place_of_another_is_the_one_that_is_watched() -> None:
    model: Any = Model()
    call = lm.jit(lambda m, x: m(x))
    call(model, X), call(model, X)
    model.table["inner"] = {"b": 1}
    call(model, X), call(model, X)
    model.table["inner"]["b"] = 1.0
    np.testing.assert_allclose(call(model, X), model(X), rtol=1e-6)


def test_a_variable_of_one_element_in_place_of_an_equal_one_is_seen() -> None:
    class Holder(nnx.Module):
        def __init__(self) -> None:
            self.table = nnx.data({"a": nnx.Param(jnp.zeros(3))})

        def __call__(self) -> jax.Array:
            self.table["a"].set_value(self.table["a"].get_value()[:1] + 1)
            return self.table["a"].get_value()

    model = Holder()
    call = lm.jit(lambda m: m())
    call(model)  # the value has one element from here on, and two such Variables can be equal
    model.table["a"] = nnx.Param(model.table["a"].get_value())
    for n in range(2, 5):
        np.testing.assert_array_equal(call(model), [n])
        np.testing.assert_array_equal(model.table["a"].get_value(), [n])


def test_models_with_equal_static_parts_share_a_trace() -> None:
    class Net(nnx.Module):
        def __init__(self, options: Any) -> None:
            self.options, self.names, self.bias = options, nnx.static(Names()), nnx.Param(jnp.zeros(3))

        def __call__(self, x: jax.Array) -> jax.Array:
            return x * self.options.shift + self.bias

    runs: list[int] = []
    call = lm.jit(lambda m, x: (runs.append(1), m(x))[1])
    for _ in range(2):
        np.testing.assert_array_equal(call(Net(Frozen()), X), X)
        np.testing.assert_array_equal(call(Net(Frozen(2.0)), X), 2 * X)
    assert len(runs) == 2


def test_what_a_function_writes_to_slots_is_written() -> None:
    class Net(nnx.Module):
        def __init__(self) -> None:
            self.slotted, self.both, self.calls = Slotted(), Both(), 0
            self.bias = nnx.Param(jnp.zeros(3))

        def __call__(self, x: jax.Array) -> jax.Array:
            self.slotted.inner, self.both.extra = x + 1, "seen"  # type: ignore[attr-defined]
            object.__setattr__(self.both, "shift", 3.0)
            return x + self.bias

    model = Net()
    call = lm.jit(lambda m, x: m(x))
    for n in range(3):
        call(model, X + n)
        np.testing.assert_array_equal(model.slotted.inner, X + n + 1)
        assert (model.both.shift, model.both.extra) == (3.0, "seen")  # type: ignore[attr-defined]


def test_a_failed_trace_leaves_slots_as_they_were() -> None:
    class Net(nnx.Module):
        def __init__(self) -> None:
            self.slotted, self.frozen, self.bias = Slotted(), Frozen(), nnx.Param(jnp.zeros(3))

    def fail(model: Net, x: jax.Array) -> None:
        model.slotted.shift, model.slotted.inner = 9.0, x
        object.__setattr__(model.frozen, "shift", 9.0)
        raise RuntimeError("no")

    model = Net()
    with pytest.raises(RuntimeError, match="no"):
        lm.jit(fail)(model, X)
    assert (model.slotted, model.frozen) == (Slotted(), Frozen())


def test_static_arrays_are_told_apart() -> None:
    call = lm.jit(lambda x, table: x + table[0], static_argnames="table")
    ones, twos = [np.ones(3, np.float32)], [np.full(3, 2.0, np.float32)]
    for table in (ones, twos, ones):
        np.testing.assert_array_equal(call(X, table), X + table[0])
    ones[0][:] = 5  # static arguments count by value
    np.testing.assert_array_equal(call(X, ones), X + 5)


def test_times_of_two_units_are_told_apart() -> None:
    model, minute = nnx.Dict(step=nnx.static(np.timedelta64(1, "s"))), np.timedelta64(1, "m")
    call = lm.jit(lambda model, x: x * (model.step / np.timedelta64(1, "s")))
    np.testing.assert_array_equal(call(model, X), X)
    model.step = nnx.static(minute)
    np.testing.assert_array_equal(call(model, X), X * 60)
