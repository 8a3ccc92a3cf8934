"""One object in several places of a call's arguments: the check compares with plain Python, where it is one as well."""

import copy
import dataclasses
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import lazymods as lm


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Loop:
    parts: Any
    count: Any


class Reader(nnx.Module):
    def __init__(self) -> None:
        self.scale = nnx.Param(jnp.full(2, 3.0))
        self.table: Any = nnx.data({"x": [jnp.ones(2)]})

    def __call__(self, table: Any) -> jax.Array:
        self.scale[...] += 1.0
        return self.scale[...] * table["x"][0] + self.table["x"][0]


def total(*values: Any) -> jax.Array:
    return sum(jnp.sum(jnp.asarray(leaf, jnp.float32)) for leaf in jax.tree.leaves(values))  # type: ignore[return-value]


def of_two(make: Callable[[], Any]) -> Callable[[], tuple[Any, ...]]:
    def given() -> tuple[Any, ...]:
        thing = make()
        return thing, thing

    return given


def inside(wrap: Callable[[Any], Any]) -> Callable[[], tuple[Any, ...]]:
    def given() -> tuple[Any, ...]:
        thing = [jnp.arange(3.0), 2]
        return wrap(thing), thing, wrap(thing)

    return given


def twice_in_a_list(make: Callable[[], Any]) -> Callable[[], tuple[Any, ...]]:
    def given() -> tuple[Any, ...]:
        thing = make()
        return ([thing, thing], {"b": thing})

    return given


SHARED: dict[str, Callable[[], tuple[Any, ...]]] = {
    "list": of_two(lambda: [jnp.ones(2), 2]),
    "empty list": of_two(list),
    "unsorted dict": of_two(lambda: {"b": jnp.ones(2), "a": {"d": 1, "c": 2}}),
    "ordered dict": of_two(lambda: OrderedDict(b=jnp.ones(2), a=1)),
    "default dict": of_two(lambda: defaultdict(int, b=jnp.ones(2), a=1)),
    "in tuples": inside(lambda thing: (1, thing)),
    "in lists": inside(lambda thing: [[thing], thing]),
    "in unsorted dicts": inside(lambda thing: {"z": thing, "a": thing}),
    "in ordered dicts": inside(lambda thing: OrderedDict(z=thing, a=[thing])),
    "in objects that JAX knows": inside(lambda thing: Loop(thing, [thing])),
    "objects that JAX knows": twice_in_a_list(lambda: Loop([1], jnp.ones(2))),
    "array of numpy": twice_in_a_list(lambda: np.arange(3.0, dtype=np.float32)),
    "array": twice_in_a_list(lambda: jnp.arange(3.0)),
}


@pytest.mark.parametrize("make", SHARED.values(), ids=SHARED)
def test_what_is_shared_and_only_read_is_no_difference(make: Callable[[], tuple[Any, ...]]) -> None:
    call = lm.jit(total, check=True)
    for _ in range(2):
        args = make()
        np.testing.assert_allclose(call(*args), total(*make()))


def test_a_container_that_the_function_reaches_otherwise_too() -> None:
    model, table = Reader(), {"x": [jnp.ones(2)]}
    twin = copy.deepcopy(model)
    call = lm.jit(lambda m, d, x: m(d) + table["x"][0] + x, check=True)
    for _ in range(2):
        np.testing.assert_allclose(call(model, model.table, 1.0), twin(twin.table) + 2.0)
        np.testing.assert_allclose(call(model, table, 1.0), twin(table) + 2.0)
    inner = model.table["x"]
    np.testing.assert_allclose(call(model, {"x": inner}, 1.0), twin(twin.table) + 2.0)


def test_a_container_that_comes_back_twice() -> None:
    call = lm.jit(lambda a, b: {"first": a, "second": [b]}, check=True)
    for _ in range(2):
        thing = [jnp.ones(2)]
        got = call(thing, thing)
        assert got["first"] is got["second"][0] is thing


def test_a_write_is_refused_as_without_the_check() -> None:
    thing = [jnp.ones(2)]
    for check in (False, True):
        with pytest.raises(lm.LazyError, match="in several places"):
            lm.jit(lambda a, b: a.append(b[0]), check=check)(thing, thing)
        assert len(thing) == 1


def test_what_depends_on_whether_two_are_one_is_found() -> None:
    call = lm.jit(lambda a, b: a[0] * (2.0 if a is b else 1.0), check=True)
    thing = [jnp.ones(2)]
    np.testing.assert_allclose(call(thing, [jnp.ones(2)]), np.ones(2))
    with pytest.raises(lm.LazyError, match="as in plain Python"):
        call(thing, thing)


def test_what_plain_python_gets_is_never_the_callers() -> None:
    seen: list[int] = []

    def f(model: Any, parts: Any, call: Any) -> jax.Array:
        seen.extend(map(id, (parts, parts[0]["x"], call.args[0])))
        parts[0]["x"].clear()
        return model.scale[...] * call(2.0)

    model, parts = Reader(), ({"x": [jnp.ones(2)]}, 1)
    call = jax.tree_util.Partial(lambda a, b: a["x"] * b, {"x": jnp.ones(2)})
    np.testing.assert_allclose(lm.jit(f, check=True)(model, parts, call), [6.0, 6.0])
    assert len(seen) == 6
    assert not {id(parts), id(parts[0]["x"]), id(call.args[0])} & {*seen}
    assert parts[0]["x"] == []
