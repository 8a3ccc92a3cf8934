"""Containers among the arguments: their order counts, and what a function does to them is done, as in plain Python."""

import copy
import dataclasses
import functools
import sys
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import lazymods as lm
from lazymods._snapshot import refill


def same(got: Any, want: Any) -> None:
    """Compare with the order of dicts, which ``==`` does not."""
    if isinstance(want, dict):
        assert type(got) is type(want)
        assert list(got) == list(want)
        for key in want:
            same(got[key], want[key])
    elif isinstance(want, (list, tuple)):
        assert type(got) is type(want)
        assert len(got) == len(want)
        for mine, other in zip(got, want, strict=True):
            same(mine, other)
    elif want is None:
        assert got is None
    else:
        np.testing.assert_allclose(got, want)


def batch() -> dict[str, Any]:
    return {"x": jnp.arange(3.0), "a": 2, "inner": {"q": [jnp.ones(2)], "b": None}}


def writes(d: dict[str, Any]) -> None:
    d["x"] = d["x"] * 2


def adds(d: dict[str, Any]) -> None:
    d["new"] = {"z": d["x"] + 1, "c": [d["a"]]}


def removes(d: dict[str, Any]) -> None:
    d.pop("a")
    del d["inner"]["b"]


def appends(d: dict[str, Any]) -> None:
    d["inner"]["q"].append(d["x"])
    d["inner"]["q"].insert(0, 5)


def moves(d: dict[str, Any]) -> None:
    d["moved"] = d.pop("inner")
    d["moved"]["q"].reverse()


def rebuilds(d: dict[str, Any]) -> None:
    kept = dict(reversed(d.items()))
    d.clear()
    d.update(kept)


def decides(d: dict[str, Any]) -> None:
    if d["x"].sum() > 0:
        d["positive"] = d["x"]
    else:
        d.pop("a", None)


def stops_half_way(d: dict[str, Any]) -> None:
    d["x"] = d["x"] + 1
    d["inner"]["q"].clear()


@pytest.mark.parametrize("change", [writes, adds, removes, appends, moves, rebuilds, decides, stops_half_way])
@pytest.mark.parametrize("outer", [lm.jit, lambda f: lm.jit(lambda d: lm.jit(f)(d)), lambda f: lm.jit(f, check=True)])
def test_what_is_written_to_a_container_is_written(change: Callable[[Any], None], outer: Callable[[Any], Any]) -> None:
    call = outer(change)
    for factor in (1.0, -2.0, 3.0):
        mine, plain = batch(), batch()
        for d in (mine, plain):
            d["x"] = d["x"] * factor
        inner = mine["inner"]
        call(mine)
        change(plain)
        same(mine, plain)
        assert mine.get("inner", inner) is inner


def test_several_calls_on_one_container() -> None:
    @lm.jit
    def count(model: nnx.Linear, log: list[Any], x: jax.Array) -> jax.Array:
        log.append(model(x).sum())
        model.kernel[...] += 1
        return log[-1]

    model, log = nnx.Linear(2, 1, rngs=nnx.Rngs(0)), list[Any]()
    twin = nnx.clone(model)
    for n in range(3):
        count(model, log, jnp.ones((1, 2)))
        assert len(log) == n + 1
        np.testing.assert_allclose(log[-1], twin(jnp.ones((1, 2))).sum(), rtol=1e-5)
        twin.kernel[...] += 1


def test_donation_and_a_write_to_an_argument() -> None:
    @lm.jit(donate_state=True)
    def step(model: nnx.Linear, out: dict[str, Any], x: jax.Array) -> None:
        out["before"] = model(x)
        model.kernel[...] *= 2.0

    model, out = nnx.Linear(2, 1, use_bias=False, rngs=nnx.Rngs(0)), dict[str, Any]()
    first = np.asarray(model(jnp.ones((1, 2))))
    for n in range(3):
        step(model, out, jnp.ones((1, 2)))
        np.testing.assert_allclose(out["before"], first * 2**n, rtol=1e-6)


def test_an_error_leaves_containers_alone() -> None:
    @lm.jit
    def fails(d: dict[str, Any], n: int) -> None:
        d["x"] = d["x"] + 1
        if n > 1:
            raise ValueError("two")

    d = batch()
    with pytest.raises(ValueError, match="two"):
        fails(d, 2)
    same(d, batch())


@pytest.mark.parametrize("kind", [dict, OrderedDict, lambda d: defaultdict(int, d)])
def test_the_order_of_keys_is_the_callers(kind: Callable[[Any], Any]) -> None:
    @lm.jit
    def first(d: Any) -> Any:
        return next(iter(d.values())) * 1

    for d in ({"b": 1.0, "a": 2.0}, {"a": 2.0, "b": 1.0}, {"b": 3.0, "a": 4.0}):
        for _ in range(2):
            assert float(first(kind(d))) == next(iter(d.values()))


def test_the_order_of_keywords_is_the_callers() -> None:
    def first(**named: Any) -> Any:
        return next(iter(named.values())) * 1

    call = lm.jit(first)
    assert [float(call(b=1.0, a=2.0)), float(call(a=2.0, b=1.0)), float(call(b=1.0, a=2.0))] == [1.0, 2.0, 1.0]
    assert lm.jit(lambda x, y: x - y)(y=1.0, x=3.0) == 2.0


def test_results_keep_their_order() -> None:
    def f(x: jax.Array) -> Any:
        return {"y": x, "b": {"n": 3, "f": 0.5}, "a": [{"z": x, "c": 1}]}

    call = lm.jit(f)
    for _ in range(2):
        same(call(jnp.ones(2)), f(jnp.ones(2)))


def test_a_container_that_comes_back_is_the_same_one() -> None:
    @lm.jit
    def f(model: Any, d: dict[str, Any]) -> Any:
        model.kept = nnx.data(d)
        return d["inner"], model.table

    model: Any = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    d = batch()
    model.table = {"a": 1}
    inner, table = f(model, d)
    assert inner is d["inner"]
    assert table is model.table
    assert model.kept is d


def test_a_container_in_two_places_is_not_written_to() -> None:
    @lm.jit
    def f(a: dict[str, Any], b: dict[str, Any]) -> Any:
        a["x"] = a["x"] + 1
        return b["x"]

    assert float(f({"x": 1.0}, {"x": 1.0})) == 1.0
    d = {"x": 1.0}
    with pytest.raises(lm.LazyError) as caught:
        f(d, d)
    assert str(caught.value) == (
        "argument 0\n"
        "  got:    a container in several places, and a function that writes to it in one of them\n"
        "  needed: one place: a compiled function has a container for each, and sees a write in one only\n"
        "  write:  copy.copy(container)  # in all places but one"
    )
    assert d == {"x": 1.0}
    model: Any = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    model.table = {"a": 1}
    with pytest.raises(lm.LazyError, match="in several places"):
        lm.jit(lambda m, d: d.update(a=2))(model, model.table)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Loop:
    count: Any


def test_a_write_to_another_pytree_is_refused() -> None:
    def f(loop: Loop) -> None:
        loop.count = loop.count + 1

    loop = Loop(jnp.ones(()))
    with pytest.raises(lm.LazyError) as caught:
        lm.jit(f)(loop)
    assert str(caught.value) == (
        "argument 0\n"
        "  got:    a function that writes to a Loop among its arguments\n"
        "  needed: a write to a dict, a list or an nnx object: of another pytree the function has a copy\n"
        "  write:  return new  # the new object as a result of the function"
    )
    assert float(loop.count) == 1


def test_a_static_list_is_written_to_at_every_call() -> None:
    @lm.jit(static_argnames="log")
    def f(x: jax.Array, log: list[str]) -> jax.Array:
        log.append("call")
        return x * len(log)

    log: list[str] = []
    assert [float(f(jnp.ones(()), log)) for _ in range(3)] == [1.0, 2.0, 3.0]
    assert log == ["call"] * 3


def test_what_decides_inside_of_another_trace_runs_in_plain_python() -> None:
    def f(model: Any, x: jax.Array, n: int) -> jax.Array:
        model.calls[...] += 1
        return nnx.jit(lambda m, v: m(v) if n != 1 else v[:, :1])(model, x)

    model: Any = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    model.calls = nnx.Variable(jnp.zeros((), jnp.int32))
    twin, x = copy.deepcopy(model), jnp.ones((1, 2))
    call = lm.jit(f)
    for n in (2, 1, 3):
        np.testing.assert_allclose(call(model, x, n), f(twin, x, n), rtol=1e-6)
    assert int(model.calls[...]) == 3


def test_such_a_call_that_fails_changes_nothing() -> None:
    @lm.jit
    def f(model: Any, d: dict[str, Any], n: int) -> None:
        model.extra = nnx.Param(jnp.ones(1))
        model.kernel[...] *= 2
        d["x"] = n
        nnx.jit(lambda m: [][0] if n == 1 else m.kernel[...])(model)

    model: Any = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    d = {"x": 0}
    before = np.asarray(model.kernel[...])
    with pytest.raises(IndexError):
        f(model, d, 1)
    assert not hasattr(model, "extra")
    assert d == {"x": 0}
    np.testing.assert_array_equal(model.kernel[...], before)


def test_a_function_that_decides_inside_of_a_trace_runs_once_there() -> None:
    def f(model: Any, lazy: Any, flag: bool) -> Any:
        model.extra.append(1)
        return 2 if flag else 3

    model: Any = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    lazy = lm.nn.LazyLinear(3, rngs=nnx.Rngs(0))
    model.extra = nnx.List([])
    inner = lm.jit(f)
    assert lm.jit(lambda m, z, flag: inner(m, z, flag))(model, lazy, True) == 2
    assert len(model.extra) == 1


def test_no_other_thread_finds_a_container_empty_whose_items_are_sorted() -> None:
    held, found, done = {str(i): i for i in range(30)}, set[int](), threading.Event()

    def look() -> None:
        while not done.is_set():
            found.add(len(held))

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    threads = [threading.Thread(target=look) for _ in range(3)]
    try:
        for thread in threads:
            thread.start()
        names = list(held)
        for _ in range(5_000):
            names.reverse()
            refill(held, {name: held[name] for name in names})
    finally:
        done.set()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(before)
    assert found == {30}
    assert list(held) == names


@functools.partial(jax.tree_util.register_dataclass, data_fields=["x", "y"], meta_fields=[])
@dataclasses.dataclass
class Batch:
    """Looks at its parts when it is made."""

    x: jax.Array
    y: jax.Array

    def __post_init__(self) -> None:
        if self.x.shape[0] != self.y.shape[0]:
            raise ValueError("x and y are of different lengths")


@jax.tree_util.register_pytree_node_class
class Packed:
    """Packs its parts each time that it is taken apart."""

    def __init__(self, x: Any, y: Any) -> None:
        self.x, self.y = x, y

    def tree_flatten(self) -> tuple[Any, None]:
        return ({"x": self.x}, [self.y]), None

    @classmethod
    def tree_unflatten(cls, _: None, parts: Any) -> "Packed":
        return cls(parts[0]["x"], *parts[1])


@pytest.mark.parametrize("cls", [Batch, Packed])
@pytest.mark.parametrize("decides", [False, True])
def test_pytrees_that_look_at_their_parts_or_pack_them(cls: Any, decides: bool) -> None:
    @lm.jit
    def f(pair: Any) -> Any:
        return cls(pair.x * 2, pair.y) if not decides or pair.x.sum() > 0 else pair

    x, y = jnp.ones((2, 3)), jnp.arange(2.0)
    for sign in (1, -1, 1):
        out = f(cls(sign * x, y))
        np.testing.assert_array_equal(out.x, sign * x * (1 if decides and sign < 0 else 2))
        np.testing.assert_array_equal(out.y, y)


class Options:
    scale = 1.0


def test_an_object_that_is_a_static_argument_is_written_to_at_every_call() -> None:
    @lm.jit(static_argnames="options")
    def f(x: jax.Array, options: Options) -> jax.Array:
        options.scale = 3.0
        return x * options.scale

    options = Options()
    for _ in range(2):
        for _ in range(3):
            assert float(f(jnp.ones(()), options)) == options.scale == 3
        del options.scale
