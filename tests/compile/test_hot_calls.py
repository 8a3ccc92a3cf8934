"""The small parts that a call is made of: picking values by number, and what objects hold."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import lazymods as lm
from lazymods._objects.attributes import Attributes, has_hidden_state, slots_of
from lazymods.compile.program import getter

LETTERS = list("abcdef")


@pytest.mark.parametrize(
    ("numbers", "picked"),
    [([], ""), ([0], "a"), ([5], "f"), ([1, 2, 3], "bcd"), ([0, 2], "ac"), ([3, 2], "dc"), ([1, 1], "bb")],
)
def test_values_are_picked_by_number(numbers: list[int], picked: str) -> None:
    assert "".join(getter(numbers)(LETTERS)) == picked
    assert "".join(getter(numbers)(tuple(LETTERS))) == picked


class Base:
    __slots__ = ("__own", "shared")


class Derived(Base):
    __slots__ = ("shared",)


class Open(Derived):
    pass


class Plain:
    pass


class Number(float):
    pass


class Text(str):
    __slots__ = ("tag",)


def test_slots_are_found_by_their_declarations() -> None:
    assert list(slots_of(Derived)) == ["shared", "_Base__own", "Base.shared"]
    assert list(slots_of(Plain)) == []


@pytest.mark.parametrize(
    ("cls", "hidden"),
    [
        (Plain, False),
        (Derived, False),
        (Open, False),
        (Number, True),
        (Text, True),
        (ValueError, True),
        (nnx.State, False),
    ],
)
def test_classes_with_state_that_python_does_not_show(cls: type, hidden: bool) -> None:
    assert has_hidden_state(cls) is hidden


def test_slots_and_attributes_are_read_and_written_as_one_dict() -> None:
    thing: Any = Open()
    thing.shared, thing.free = 1, 2
    Base.shared.__set__(thing, 3)  # type: ignore[attr-defined]
    held = Attributes(thing)
    assert held == {"shared": 1, "Base.shared": 3, "free": 2}
    held.clear()
    assert not hasattr(thing, "shared") and not hasattr(thing, "free") and held == {}
    held.update({"_Base__own": 4, "shared": 5, "free": 6})
    assert (thing._Base__own, thing.shared, thing.free) == (4, 5, 6)
    assert Attributes(thing) == held


def test_frozen_slots_are_written() -> None:
    @dataclasses.dataclass(frozen=True, slots=True)
    class Frozen:
        x: int = 1

    thing = Frozen()
    Attributes(thing).update({"x": 2})
    assert thing == Frozen(2)


@pytest.mark.parametrize("donate", [False, True])
def test_writes_that_are_not_in_a_row_reach_their_variables(donate: bool) -> None:
    class Model(nnx.Module):
        def __init__(self) -> None:
            self.a, self.b, self.c, self.d = (nnx.Variable(jnp.full(2, n)) for n in (1.0, 2.0, 3.0, 4.0))

        def __call__(self, x: jax.Array) -> jax.Array:
            self.d.set_value(self.a.get_value() + x)
            self.b.set_value(self.b.get_value() * 2)
            return self.c.get_value()

    model = Model()
    call = lm.jit(lambda m, x: m(x), donate_state=donate)
    for n in range(1, 4):
        np.testing.assert_array_equal(call(model, jnp.full(2, float(n))), [3.0, 3.0])
        values = [model.a, model.b, model.c, model.d]
        np.testing.assert_array_equal([v.get_value()[0] for v in values], [1.0, 2.0 * 2**n, 3.0, 1.0 + n])


def test_an_argument_may_be_what_is_donated() -> None:
    class Model(nnx.Module):
        def __init__(self) -> None:
            self.total = nnx.Variable(jnp.ones(3))

    def add(model: Model, x: jax.Array) -> jax.Array:
        model.total.set_value(model.total.get_value() + x)
        return x * 2

    holder, call = Model(), lm.jit(add, donate_state=True)
    for n in range(4):
        x = holder.total.get_value() if n else jnp.ones(3)
        np.testing.assert_array_equal(call(holder, x), jnp.full(3, 2.0 ** (n + 1)))
        np.testing.assert_array_equal(holder.total.get_value(), jnp.full(3, 2.0 ** (n + 1)))
        np.testing.assert_array_equal(x, jnp.full(3, 2.0**n))  # the caller's own array is still there
