"""The comparison of shadow mode: every kind of difference is found and named, and copies are equal."""

import collections
import copy
import dataclasses
import functools
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import lazymods as lm
from lazymods.compile.shadow import compare


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass
class Plain:
    count: Any = 1
    items: Any = dataclasses.field(default_factory=list)


class Loss(float):
    pass


class Slotted:
    __slots__ = ("a", "b")

    def __init__(self) -> None:
        self.a, self.b = jnp.ones(2), 3


class Noted(dict[str, Any]):
    note: Any


class Model(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.fc = nnx.Linear(2, 3, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.scale: Any = 2
        self.table = {"a": 1, "b": 2.0}
        self.act: Any = jnp.tanh
        self.seen = nnx.Variable(jnp.zeros((), jnp.int32), tag="x")


def noted() -> Noted:
    made = Noted(a=1)
    made.note = 1
    return made


def adam() -> nnx.Optimizer[Any]:
    return nnx.Optimizer(Model(), optax.chain(optax.clip(1.0), optax.adam(0.1)), wrt=nnx.Param)


def closing(value: Any) -> Callable[[], Any]:
    return lambda: value


def found(want: Any, got: Any) -> str:
    with pytest.raises(lm.LazyError) as caught:
        compare("f", [("output", want)], [("output", got)])
    return str(caught.value)


EQUAL: dict[str, Callable[[], Any]] = {
    "model": Model,
    "optimizer": adam,
    "lazy model": lambda: lm.nn.LazyLinear(3, rngs=nnx.Rngs(0)),
    "state": lambda: nnx.state(Model()),
    "graphdef": lambda: nnx.graphdef(Model()),
    "key": lambda: jax.random.key(1),
    "keys in a dict": lambda: {"k": jax.random.split(jax.random.key(1))},
    "numbers": lambda: (1, 1.0, True, 1j, float("nan"), -0.0, None, "a", b"b", ...),
    "numbers of a class": lambda: [Loss(3.0), Loss("nan"), Loss(-0.0), {Loss(1.0): 1}],
    "numpy": lambda: [np.float32(1.5), np.arange(3), np.array(["a", None], object), np.zeros(2, jax.dtypes.float0)],
    "narrow": lambda: [jnp.ones(2, jnp.bfloat16), jnp.ones(2, jnp.float8_e4m3fn), jnp.ones(2, jnp.int4)],
    "special": lambda: jnp.array([jnp.nan, jnp.inf, -jnp.inf, 1.0]),
    "complex": lambda: jnp.array([1 + 2j, complex("nan")]),
    "empty": lambda: jnp.zeros((0, 3)),
    "named tuple": lambda: Pair(1, jnp.ones(2)),
    "dataclass": Plain,
    "slots": Slotted,
    "namespace": lambda: types.SimpleNamespace(a=1, b=[2]),
    "set": lambda: {1, "a", (2, None)},
    "frozen set": lambda: frozenset({1, 2.0}),
    "set of objects": lambda: {Slotted()},
    "queue": lambda: collections.deque([1, 2], maxlen=3),
    "bytes": lambda: bytearray(b"ab"),
    "dict with attributes": noted,
    "partial": lambda: functools.partial(max, 1, key=None),
    "jax partial": lambda: jax.tree_util.Partial(jnp.add, jnp.ones(2)),
    "method": lambda: Plain().__repr__,
    "closure": lambda: closing(jnp.ones(2)),
    "opaque": lambda: [object(), iter([1]), np.random.default_rng(0), slice(1, 2), np.dtype("f4"), int, jnp],
    "struct": lambda: jax.ShapeDtypeStruct((2,), jnp.float32),
    "reference": lambda: jax.new_ref(jnp.ones(2)),
}


@pytest.mark.parametrize("make", EQUAL.values(), ids=EQUAL)
def test_what_was_made_twice_is_equal(make: Callable[[], Any]) -> None:
    compare("f", [("output", make())], [("output", make())])


def ring() -> list[Any]:
    model = Model()
    made: list[Any] = [model, model.fc.kernel]
    made.append(made)
    return made


def test_cycles_and_long_chains_are_equal() -> None:
    chain: Any = None
    for _ in range(3000):
        chain = Plain(chain)
    compare("f", [("a", ring()), ("b", chain)], [("a", ring()), ("b", chain)])


def of_model(change: Callable[[Model], Any]) -> Callable[[], tuple[Any, Any]]:
    def make() -> tuple[Any, Any]:
        want, got = Model(), Model()
        change(got)
        return want, got

    return make


def reordered(model: Model) -> None:
    scale = model.scale
    del model.scale
    model.scale = scale


DIFFERENT: dict[str, tuple[Callable[[], tuple[Any, Any]], str]] = {
    "value": (of_model(lambda m: m.fc.kernel.set_value(m.fc.kernel[...].at[1, 2].add(1e-2))), "output.fc.kernel (f)"),
    "count": (of_model(lambda m: m.seen.set_value(m.seen[...] + 1)), "output.seen (f)"),
    "rngs": (of_model(lambda m: m.drop.rngs and m.drop.rngs()), "output.drop.rngs.count (f)"),
    "static attribute": (of_model(lambda m: setattr(m, "scale", 2.0)), "output.scale (f)"),
    "flag": (of_model(lambda m: setattr(m, "scale", True)), "output.scale (f)"),
    "function": (of_model(lambda m: setattr(m, "act", jnp.sin)), "output.act (f)"),
    "attribute added": (of_model(lambda m: setattr(m, "more", 1)), "'more' more"),
    "attribute removed": (of_model(lambda m: delattr(m, "act")), "'act' less"),
    "order of attributes": (of_model(reordered), "in this order"),
    "order of a dict": (of_model(lambda m: setattr(m, "table", {"b": 2.0, "a": 1})), "output.table (f)"),
    "metadata": (of_model(lambda m: m.seen.set_metadata("tag", "y")), "output.seen.get_metadata()['tag'] (f)"),
    "metadata type": (of_model(lambda m: m.seen.set_metadata("n", 1)), "'n' more"),
    "variable class": (of_model(lambda m: setattr(m, "seen", nnx.Param(0))), "output.seen (f)"),
    "module class": (of_model(lambda m: setattr(m, "fc", nnx.LinearGeneral(2, 3, rngs=nnx.Rngs(0)))), "output.fc (f)"),
    "shared": (of_model(lambda m: setattr(m, "fc2", m.fc)), "'fc2' more"),
    "int and float": (lambda: (1, 1.0), "output (f)"),
    "int and bool": (lambda: ({"a": [1]}, {"a": [True]}), "output['a'][0] (f)"),
    "zeros": (lambda: (0.0, -0.0), "-0.0"),
    "zeros of a class": (lambda: (Loss(0.0), Loss(-0.0)), "-0.0"),
    "number of a class": (lambda: (Loss(1.0), Loss(2.0)), "2.0"),
    "number of no class": (lambda: (Loss(1.0), 1.0), "float"),
    "key of a dict": (lambda: ({1: 0}, {1.0: 0}), "1.0 more"),
    "length": (lambda: ([1, 2], [1]), "1 items"),
    "number": (lambda: (1.0, 1.0 + 1e-3), "output (f)"),
    "complex number": (lambda: (1j, 1j + 1e-3), "output (f)"),
    "not a number": (lambda: (float("nan"), 1.0), "output (f)"),
    "float": (lambda: (jnp.ones(3), jnp.ones(3).at[2].add(1e-3)), "at [2], 1 of 3 wrong"),
    "integer": (lambda: (jnp.int32(2**30), jnp.int32(2**30 + 1)), "1073741825"),
    "boolean": (lambda: (jnp.array(True), jnp.array(False)), "False"),
    "nan": (lambda: (jnp.array([1.0, jnp.nan]), jnp.array([1.0, 2.0])), "at [1]"),
    "infinity": (lambda: (jnp.array(jnp.inf), jnp.array(-jnp.inf)), "-inf"),
    "imaginary": (lambda: (jnp.array(1 + 2j), jnp.array(1 + 3j)), "3"),
    "bfloat16": (lambda: (jnp.ones(2, jnp.bfloat16), jnp.ones(2, jnp.bfloat16) * 2), "bf16[2]"),
    "shape": (lambda: (jnp.ones((2, 1)), jnp.ones(2)), "f32[2,1]"),
    "dtype": (lambda: (jnp.ones(2), jnp.ones(2, jnp.int32)), "i32[2]"),
    "weak type": (lambda: (jnp.asarray(1.0), jnp.float32(1.0)), "not weakly typed"),
    "key": (lambda: (jax.random.key(0), jax.random.key(1)), "output (f)"),
    "key impl": (lambda: (jax.random.key(0, impl="rbg"), jax.random.key(0)), "fry"),
    "number for a number": (lambda: (2, jnp.asarray(3)), "3"),
    "number of another dtype": (lambda: (2, jnp.asarray(2.0)), "i32[]"),
    "array for numpy": (lambda: (np.ones(2), jnp.zeros(2)), "f32[2]"),
    "numpy for an array": (lambda: (jnp.ones(2), np.ones(2, np.float32)), "numpy.ndarray"),
    "numpy scalar": (lambda: (np.float32(1), np.float64(1)), "numpy.float64"),
    "none": (lambda: (None, jnp.ones(2)), "None"),
    "tuple and list": (lambda: ((1,), [1]), "list"),
    "named tuple": (lambda: (Pair(1, 2), Pair(1, 3)), "output.second (f)"),
    "tuple of names": (lambda: (Pair(1, 2), (1, 2)), "tuple"),
    "set": (lambda: ({1, 2}, {1, 2.0}), "2.0 more"),
    "queue": (lambda: (collections.deque([1], 2), collections.deque([1], 3)), "output.maxlen (f)"),
    "bytes": (lambda: (bytearray(b"ab"), bytearray(b"ac")), "output[1] (f)"),
    "slot": (lambda: (Slotted(), types.SimpleNamespace(a=1)), "SimpleNamespace"),
    "partial": (lambda: (functools.partial(max, 1), functools.partial(max, 2)), "output.args[0] (f)"),
    "closure": (lambda: (closing(1), closing(2)), "output (its value) (f)"),
    "struct": (lambda: (jax.ShapeDtypeStruct((2,), "f4"), jax.ShapeDtypeStruct((3,), "f4")), "f32[3]"),
    "reference": (lambda: (jax.new_ref(jnp.ones(2)), jax.new_ref(jnp.zeros(2))), "at [0]"),
    "jax partial": (lambda: (jax.tree_util.Partial(max, 1), jax.tree_util.Partial(max, 2)), "output.args[0] (f)"),
    "graphdef": (lambda: (nnx.graphdef(Model()), nnx.graphdef(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))), "output"),
    "opaque class": (lambda: (object(), iter([1])), "list_iterator"),
    "type": (lambda: (int, float), "<class 'float'>"),
    "placeholder": (lambda: (lazy(3), lazy(4)), "f32[?,4]"),
}


def lazy(features: int) -> nnx.Module:
    return lm.nn.LazyLinear(features, rngs=nnx.Rngs(0))


@pytest.mark.parametrize(("make", "said"), DIFFERENT.values(), ids=DIFFERENT)
def test_a_difference_is_found_and_named(make: Callable[[], tuple[Any, Any]], said: str) -> None:
    want, got = make()
    assert said in found(want, got)


def test_sharing_is_compared_over_all_places() -> None:
    one = [1]
    shared, apart = [("a", {"x": one}), ("b", one)], [("a", {"x": [1]}), ("b", [1])]
    compare("f", shared, copy.deepcopy(shared))
    compare("f", apart, copy.deepcopy(apart))
    for want, got in ((shared, apart), (apart, shared)):
        with pytest.raises(lm.LazyError, match=r"the object of a\['x'\]") as caught:
            compare("f", want, got)
        assert caught.value.problems[0].where == "b (f)"


def test_numpy_arrays_and_variables_are_shared_too() -> None:
    for make in (lambda: np.ones(2), lambda: nnx.Param(jnp.ones(2)), lambda: jax.new_ref(jnp.ones(2))):
        one = make()
        assert "an object of its own" in found([one, one], [make(), make()])


def test_rounding_is_no_difference() -> None:
    for dtype in (jnp.float32, jnp.bfloat16, jnp.float16, jnp.complex64):
        want = jnp.array([1.0, 1e-8, 0.0, 300.0], dtype)
        compare("f", [("output", want)], [("output", want * (1 + 2 * float(jnp.finfo(dtype).eps)))])
    compare("f", [("output", [0.1, 1j])], [("output", [0.1 + 1e-8, 1j + 1e-8])])  # of float(loss)


def test_a_number_may_have_become_an_array() -> None:
    model, other = Model(), Model()
    model.scale, other.scale = nnx.data(1.5), nnx.data(jnp.asarray(1.5))
    compare(
        "f",
        [("output", (1, True, np.float32(2), model))],
        [("output", (jnp.int32(1), jnp.array(True), 2.0 * jnp.ones(()), other))],
    )


def test_the_message_has_four_parts() -> None:
    said = found({"loss": jnp.float32(1.0)}, {"loss": jnp.float32(2.0)})
    assert said == (
        "output['loss'] (f)\n"
        "  got:    f32[] 2.0, in the compiled run\n"
        "  needed: 1.0, as in plain Python\n"
        "  write:  f(x)  # without lm.jit, if it depends on what no program can see (time, files, random numbers of "
        "Python); else report it as a fault of lazymods, with f"
    )


def test_a_donated_array_that_is_left_is_a_difference() -> None:
    gone = jnp.ones(2)
    gone.delete()
    assert "deleted" in found(jnp.ones(2), gone)
