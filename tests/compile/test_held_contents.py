"""What is inside of containers, buffers and the like that a model holds, changed as it is, as plain Python sees it."""

import array
import collections
import functools
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import lazymods as lm

X = jnp.arange(3.0)


class Options:
    def __init__(self, k: float) -> None:
        self.k = k


class Numbers(array.array):  # type: ignore[type-arg]
    """Numbers with attributes."""


class Slotted(list[float]):
    __slots__ = ("k",)


class Level(int):
    """A number with attributes."""


def with_k(thing: Any) -> Any:
    thing.k = 1.0
    return thing


def first(items: Any) -> Any:
    return next(iter(items))


class Proxied:
    """A dict, and a view of it."""

    def __init__(self) -> None:
        self.dict = {"k": 1.0}
        self.view = types.MappingProxyType(self.dict)


KINDS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any, float], Any]]] = {
    "array": (lambda: array.array("d", [1.0]), lambda h: h[0], lambda h, v: h.__setitem__(0, v)),
    "longer array": (lambda: array.array("d", [1e300]), lambda h: float(len(h)), lambda h, v: h.append(v)),
    "class of arrays": (lambda: Numbers("f", [1.0]), lambda h: h[0], lambda h, v: h.__setitem__(0, v)),
    "memoryview": (lambda: memoryview(bytearray(2)), lambda h: h[0], lambda h, v: h.__setitem__(0, int(v))),
    "view of a dict": (Proxied, lambda h: h.view["k"], lambda h, v: h.dict.update(k=v)),
    "default of a dict": (
        lambda: collections.defaultdict(lambda: 1.0),
        lambda h: h.default_factory(),
        lambda h, v: setattr(h, "default_factory", lambda: v),
    ),
    "object in a set": (lambda: {Options(1.0)}, lambda h: first(h).k, lambda h, v: setattr(first(h), "k", v)),
    "key of a dict": (lambda: {Options(1.0): 1}, lambda h: first(h).k, lambda h, v: setattr(first(h), "k", v)),
    "slot of a list": (lambda: with_k(Slotted()), lambda h: h.k, lambda h, v: setattr(h, "k", v)),
    "attribute of a number": (lambda: with_k(Level(2)), lambda h: h.k, lambda h, v: setattr(h, "k", v)),
    "numpy in a partial function": (
        lambda: functools.partial(np.add, np.ones(1)),
        lambda h: h(1.0)[0],
        lambda h, v: h.args[0].__setitem__(0, v),
    ),
    "texts": (lambda: np.array(["1", "2"]), lambda h: float(h[0]), lambda h, v: h.__setitem__(0, str(int(v)))),
    "objects": (lambda: np.array([1.0, None]), lambda h: h[0], lambda h, v: h.__setitem__(0, v)),
    "records": (lambda: np.zeros(1, [("k", "f8")]), lambda h: h["k"][0], lambda h, v: h["k"].__setitem__(0, v)),
    "numpy": (lambda: np.ones(1), lambda h: h[0], lambda h, v: h.__setitem__(0, v)),
}


class Model(nnx.Module):
    def __init__(self, held: Any) -> None:
        self.weight, self.held = nnx.Param(jnp.ones(3)), held


class Plain:
    def __init__(self, held: Any) -> None:
        self.weight, self.held = nnx.Param(jnp.ones(3)), held


class WithSlots:
    __slots__ = ("held", "weight")

    def __init__(self, held: Any) -> None:
        self.weight, self.held = nnx.Param(jnp.ones(3)), held


class InMetadata(nnx.Module):
    def __init__(self, held: Any) -> None:
        self.weight = nnx.Param(jnp.ones(3), own=held)

    @property
    def held(self) -> Any:
        return self.weight.get_metadata("own")


@pytest.mark.parametrize("holder", [Model, Plain, WithSlots, InMetadata])
@pytest.mark.parametrize("kind", KINDS)
def test_a_change_of_what_is_held_is_seen(kind: str, holder: Any) -> None:
    make, read, change = KINDS[kind]
    model = holder(make())
    f = lm.jit(lambda x: x * model.weight[...] * read(model.held))
    for value in (1.0, 5.0, 7.0, 7.0, 1.0):
        change(model.held, value)
        np.testing.assert_allclose(f(X), X * read(model.held))


# ---------------------------------------------------------------- what a function itself changes


class Trainer:
    """Beside layers: what is found by them, and containers of numbers."""

    def __init__(self) -> None:
        self.first, self.second = (nnx.Linear(3, 3, rngs=nnx.Rngs(n)) for n in (0, 1))
        self.numbers: Any = array.array("d", [1.0])
        self.rates: dict[Any, Any] = {self.first: 2.0, self.second: jnp.ones(3)}
        self.pairs: dict[Any, Any] = {(self.first, "x"): jnp.ones(3)}
        self.chosen: set[Any] = {self.first}
        self.dict: dict[str, Any] = {"n": 1, "sum": jnp.zeros(3)}
        self.view = types.MappingProxyType(self.dict)
        self.layers = types.MappingProxyType({"a": self.first})

    def state(self) -> list[Any]:
        """Return all of it, with names for the layers."""
        name = {self.first: "first", self.second: "second", "x": "x"}
        pairs = [((name[key[0]], key[1]), np.asarray(v)) for key, v in self.pairs.items()]
        rates = [(name[key], np.asarray(v)) for key, v in self.rates.items()]
        bias = [np.asarray(layer.bias) for layer in (self.first, self.second)]
        chosen, numbers = sorted(map(name.__getitem__, self.chosen)), (self.numbers.typecode, [*self.numbers])
        held = [(k, np.asarray(v)) for k, v in self.view.items()]
        return [pairs, rates, bias, chosen, numbers, held, self.layers["a"] is self.first]


def array_in_place(t: Trainer, x: jax.Array) -> Any:
    t.numbers[0] += 1
    t.numbers.append(0.5)
    return t.first(x) * sum(t.numbers)


def another_array(t: Trainer, x: jax.Array) -> Any:
    t.numbers = array.array("i", [len(t.numbers), 3])
    return t.first(x) * t.numbers[0]


def found_by_layer(t: Trainer, x: jax.Array) -> Any:
    return t.first(x) * t.rates.get(t.first, 7.0) + t.second(x) * t.rates.get(t.second, 9.0)


def written_by_layer(t: Trainer, x: jax.Array) -> Any:
    t.rates[t.first] *= 2
    t.rates[t.second] = t.rates[t.second] + x
    t.pairs[t.first, "x"] = t.pairs[t.first, "x"] * 2
    t.pairs[t.second, "x"] = 1.0
    return found_by_layer(t, x)


def order_of_layers(t: Trainer, x: jax.Array) -> Any:
    layer = next(iter(t.rates))
    t.rates[layer] = t.rates.pop(layer)
    return layer(x)


def in_a_set(t: Trainer, x: jax.Array) -> Any:
    t.chosen ^= {t.second}
    return sum(layer(x) * 2 if layer in t.chosen else layer(x) for layer in (t.first, t.second))


def by_a_view(t: Trainer, x: jax.Array) -> Any:
    t.dict["n"] += 1
    t.dict["sum"] = t.dict["sum"] + x
    layer = t.layers["a"]
    layer.bias = nnx.Param(layer.bias + 1)  # type: ignore[operator]
    return t.first(x) * t.view["n"] + t.view["sum"]


CHANGES = (array_in_place, another_array, found_by_layer, written_by_layer, order_of_layers, in_a_set, by_a_view)


@pytest.mark.parametrize("check", [False, True], ids=["", "checked"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_a_function_changes_is_changed(change: Any, check: bool) -> None:
    compiled, plain = Trainer(), Trainer()
    f = lm.jit(lambda x: change(compiled, x), check=check)
    for n in range(4):
        x = jnp.full(3, n + 1.0)
        np.testing.assert_allclose(f(x), change(plain, x), rtol=1e-5)
        jax.tree.map(same, compiled.state(), plain.state())


def same(got: Any, want: Any) -> None:
    if isinstance(want, (str, bool)):
        assert got == want
    else:
        np.testing.assert_allclose(got, want, rtol=1e-5)


def test_views_and_arrays_are_results() -> None:
    trainer = Trainer()
    f = lm.jit(lambda x: (trainer.view, types.MappingProxyType({"y": trainer.first(x)}), array.array("h", [3])))
    for _ in range(2):
        old, new, numbers = f(X)
        assert old["n"] == 1 and type(new) is types.MappingProxyType and numbers == array.array("h", [3])
        assert type(numbers) is array.array
        np.testing.assert_allclose(new["y"], trainer.first(X), rtol=1e-6)
