"""Values that no program can take: each is named at the first call, and nothing has happened then."""

import collections
import dataclasses
import datetime
import enum
import functools
import io
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import lazymods as lm
from lazymods.compile import plain

X = jnp.arange(6.0).reshape(3, 2)


class Plain:
    def __init__(self) -> None:
        self.x = jnp.ones(2)


@dataclasses.dataclass
class Data:
    x: Any


class Mode(enum.Enum):
    FAST = 1


def generator() -> Any:
    yield jnp.ones(1)


STATIC = "lm.jit(fn, static_argnames=...)  # with the parameter's name, if it is part of the program"
ITERATOR = "list(iterator)  # or next(iterator): an iterator can be used once"
NUMBERS = "array.astype(np.float32)  # in the machine's byte order"
PYTREE = "class Class(nnx.Pytree): ...  # if it holds arrays; static_argnames=... if it is part of the program"
CASES: dict[str, tuple[Callable[[], Any], str, str]] = {
    "iterator": (lambda: iter([jnp.ones(2)]), "a list_iterator", ITERATOR),
    "generator": (generator, "a generator", ITERATOR),
    "map": (lambda: map(abs, [1.0]), "a map", ITERATOR),
    "file": (io.BytesIO, "a BytesIO", "np.frombuffer(file.read(), np.uint8)  # what it holds"),
    "set": (lambda: {1.0}, "a set", "sorted(values)  # a set has no order"),
    "frozenset": (lambda: frozenset([1.0]), "a frozenset", "sorted(values)  # a set has no order"),
    "object": (Plain, "a Plain", PYTREE),
    "dataclass": (
        lambda: Data(jnp.ones(2)),
        "a Data",
        "jax.tree_util.register_dataclass(Class)  # for its class; or an nnx.Pytree for its base",
    ),
    "text": (lambda: "fast", "'fast'", STATIC),
    "bytes": (lambda: b"fast", "a bytes", STATIC),
    "enum": (lambda: Mode.FAST, "a Mode", STATIC),
    "function": (lambda: generator, "a function", STATIC),
    "class": (lambda: int, "a type", STATIC),
    "range": (lambda: range(3), "a range", STATIC),
    "lock": (threading.Lock, "a lock", STATIC),
    "deque": (lambda: collections.deque([1.0]), "a deque", STATIC),
    "date": (lambda: datetime.date(2020, 1, 1), "a date", STATIC),
    "array of objects": (lambda: np.array([None]), "a ndarray: Dtype object is not a valid JAX array type", NUMBERS),
    "array of texts": (lambda: np.array(["a"]), "a ndarray: Dtype <U1 is not a valid JAX array type", NUMBERS),
    "records": (lambda: np.zeros(2, [("a", "f4")]), "a ndarray: Dtype [('a', '<f4')] is not a valid", NUMBERS),
    "byte order": (lambda: np.ones(2, ">f4"), "a ndarray: Dtype >f4 is not a valid JAX array type", NUMBERS),
    "numpy date": (lambda: np.datetime64("2020-01-01"), "a datetime64: Argument '2020-01-01' of type", NUMBERS),
    "masked": (
        lambda: np.ma.array([1.0, 2.0], mask=[True, False]),
        "a MaskedArray: ",
        "array.filled(0)  # and its mask as an argument of its own",
    ),
    "large number": (
        lambda: 2**70,
        "an int: Python int 1180591620717411303424 too large to convert to int32",
        "jnp.asarray(float(number))  # or another dtype that holds it",
    ),
}


def state_of(model: Any) -> list[Any]:
    return [np.asarray(leaf).tolist() for leaf in jax.tree.leaves(nnx.state(model))]


@pytest.mark.parametrize("name", CASES)
def test_it_is_named_at_the_first_call_and_nothing_has_happened(name: str) -> None:
    make, got, write = CASES[name]
    model, runs = nnx.BatchNorm(2, rngs=nnx.Rngs(0)), []
    value = make()
    call = lm.jit(lambda m, x, options: (runs.append(1), m(x))[1])
    before = state_of(model)
    places: list[tuple[Callable[[], Any], str]] = [
        (lambda: call(model, X, {"k": [1.0, value]}), "argument 2['k'][1]"),
        (lambda: call(model, X, options=value), "argument options"),
        (lambda: call.lower(model, X, value), "argument 2"),
    ]
    for run, where in places:
        with pytest.raises(lm.ArgumentError) as caught:
            run()
        lines = str(caught.value).splitlines()
        needed = "arrays, numbers and nnx objects, in any pytree: they are the inputs of the compiled program"
        assert lines[0] == where and lines[1].startswith(f"  got:    {got}")
        assert lines[2:] == [f"  needed: {needed}", f"  write:  {write}"]
    assert not runs and state_of(model) == before and call.cache_info().currsize == 0
    twin = nnx.BatchNorm(2, rngs=nnx.Rngs(0))
    np.testing.assert_allclose(call(model, X, 1.0), twin(X), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(model.mean[...], twin.mean[...], rtol=1e-6)


def test_an_iterator_is_not_advanced() -> None:
    items = iter([1.0, 2.0])
    for names in ((), ("it",)):
        with pytest.raises(lm.ArgumentError):
            lm.jit(lambda x, it: x + next(it), static_argnames=names)(X, items)
    assert list(items) == [1.0, 2.0]


def test_a_static_argument_that_is_used_up() -> None:
    def add(x: Any, it: Any) -> Any:
        return x + next(it)

    with pytest.raises(lm.ArgumentError) as caught:
        lm.jit(add, static_argnames="it")(X, it=iter([1.0]))
    assert str(caught.value) == (
        "a static argument of test_a_static_argument_that_is_used_up.<locals>.add\n"
        "  got:    a list_iterator\n"
        "  needed: a value that stays what it is: the program is compiled with it, and would go on with what it gave "
        "first\n"
        "  write:  list(iterator)  # or next(iterator): an iterator can be used once"
    )


def test_a_dict_that_jax_can_not_take_apart() -> None:
    for run, where in (
        (lambda c: c(X, {1: 1.0, "a": 2.0}), "argument 1"),
        (lambda c: c(X, options={1: 1.0, "a": 2.0}), "argument options"),
    ):
        with pytest.raises(lm.ArgumentError) as caught:
            run(lm.jit(lambda x, options: x))
        assert str(caught.value) == (
            f"{where}\n"
            "  got:    a dict: Comparator raised exception while sorting pytree dictionary keys.\n"
            "  needed: a pytree that JAX can take apart\n"
            "  write:  {str(k): v for k, v in d.items()}  # keys of one type, or nodes that flatten"
        )


def test_a_lazy_model_stays_lazy() -> None:
    model = lm.LazyLinear(2, rngs=nnx.Rngs(0))
    with pytest.raises(lm.ArgumentError):
        lm.jit(lambda m, x, options: m(x))(model, X, functools.partial(abs))
    assert lm.is_lazy(model)


NOT_CALLABLE: dict[str, tuple[Callable[[Any], Any], str]] = {
    "lm.jit": (lm.jit, "lm.jit"),
    "lm.jit with options": (lm.jit(static_argnames="n", donate_state=True), "lm.jit"),
    "lm.lower": (lambda f: lm.lower(f, X), "lm.lower"),
    "lm.export": (lambda f: lm.export(f, X), "lm.export"),
    "lm.autograd.grad": (lm.autograd.grad, "lm.autograd.grad"),
    "lm.autograd.value_and_grad": (lm.autograd.value_and_grad, "lm.autograd.value_and_grad"),
    "lm.lazytensor.value_and_grad": (lm.lazytensor.value_and_grad, "lm.lazytensor.value_and_grad"),
    "lm.lazytensor.lazy": (lambda f: lm.lazytensor.lazy()(f), "lm.lazytensor.lazy"),
    "lm.jit without what it needs": (plain.jit, "lm.jit"),
}


@pytest.mark.parametrize(("decorate", "where"), NOT_CALLABLE.values(), ids=NOT_CALLABLE)
def test_what_can_not_be_called_is_refused_at_once(decorate: Callable[[Any], Any], where: str) -> None:
    call = f"{where}()" if where == "lm.lazytensor.lazy" else where
    for value, got in ((3, "an int"), ("f", "a str"), (X, "an array"), (nnx.Module(), "a Module")):
        with pytest.raises(lm.ArgumentError) as caught:
            decorate(value)
        assert str(caught.value) == (
            f"{where}\n"
            f"  got:    {got}\n"
            "  needed: what can be called: a function, a method, or a module with a __call__\n"
            f"  write:  {call}(f)  # the function itself, and not what it returned; options by their names"
        )
