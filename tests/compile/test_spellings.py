"""An argument is one input of one program, whether it is given by position or by keyword."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import lazymods as lm
from tests.helpers import array

X = array(2, 3)


def traces(call: Callable[[], Any]) -> int:
    before = lm.metrics()["traces"]
    call()
    return round(lm.metrics()["traces"] - before)


def weighted(model: Any, x: Any, scale: Any, *, shift: Any = 0.0) -> Any:
    return model(x) * scale - shift


SPELLINGS: list[Callable[..., Any]] = [
    lambda f, m, x, s: f(m, x, s, shift=3.0),
    lambda f, m, x, s: f(m, x, scale=s, shift=3.0),
    lambda f, m, x, s: f(m, scale=s, shift=3.0, x=x),
    lambda f, m, x, s: f(shift=3.0, scale=s, x=x, model=m),
    lambda f, m, x, s: f(m, shift=3.0, x=x, scale=s),
]


@pytest.mark.parametrize("first", range(len(SPELLINGS)))
def test_all_ways_of_giving_the_same_are_one_program(first: int) -> None:
    model, call = nnx.Linear(3, 4, rngs=nnx.Rngs(0)), lm.jit(weighted)
    order = [*SPELLINGS[first:], *SPELLINGS[:first]]
    want = np.asarray(model(X)) * 2.0 - 3.0

    def all_twice() -> None:
        for spelling in order:
            for _ in range(3):  # the fast path too
                np.testing.assert_allclose(spelling(call, model, X, 2.0), want, rtol=1e-6)

    assert traces(all_twice) == 1 and call.cache_info().currsize == 1


def test_two_alike_are_not_mixed_up() -> None:
    call = lm.jit(lambda b, a: b - 2 * a)
    for _ in range(3):
        got = call(5.0, 1.0), call(b=5.0, a=1.0), call(a=1.0, b=5.0), call(5.0, a=1.0), call(b=1.0, a=5.0)
        assert [float(v) for v in got] == [3, 3, 3, 3, -9]
    pair = lm.jit(lambda z, y, m, k: (z["x"] - m.kernel[...] * y) / k.kernel[...])
    one, two = (nnx.Linear(1, 1, rngs=nnx.Rngs(n)) for n in range(2))
    want = (7 - np.asarray(one.kernel[...]) * 2) / np.asarray(two.kernel[...])
    for _ in range(3):
        np.testing.assert_allclose(pair({"x": 7.0}, 2.0, one, two), want, rtol=1e-6)
        np.testing.assert_allclose(pair(k=two, y=2.0, m=one, z={"x": 7.0}), want, rtol=1e-6)
        np.testing.assert_allclose(pair({"x": 7.0}, k=two, m=one, y=2.0), want, rtol=1e-6)


def test_static_arguments() -> None:
    call = lm.jit(lambda x, times, base: x * times + base, static_argnames="times")

    def all_ways() -> None:
        got = call(X, 2, 1.0), call(X, times=2, base=1.0), call(base=1.0, times=2, x=X), call(X, 2, base=1.0)
        for value in got:
            np.testing.assert_allclose(value, np.asarray(X) * 2 + 1, rtol=1e-6)

    assert traces(all_ways) == 1
    assert traces(lambda: call(X, times=3, base=1.0)) == 1


def test_a_module_and_methods() -> None:
    class Net(nnx.Module):
        def __init__(self) -> None:
            self.layer = nnx.Linear(3, 4, rngs=nnx.Rngs(0))

        def __call__(self, x: Any, scale: Any = 1.0) -> Any:
            return self.layer(x) * scale

        @lm.jit
        def method(self, x: Any, scale: Any) -> Any:
            return self(x, scale)

    net, want = Net(), np.asarray(Net().layer(X)) * 2.0
    for call in (lm.jit(net), lm.jit(net.__call__), net.method):
        values: list[Any] = []

        def ways(call: Any = call, values: Any = values) -> None:
            values.extend([call(X, 2.0), call(X, scale=2.0), call(scale=2.0, x=X)])

        assert traces(ways) == 1
        for value in values:
            np.testing.assert_allclose(value, want, rtol=1e-6)


def test_arguments_that_are_left_out_stay_so() -> None:
    call = lm.jit(lambda x, y=2.0, z=3.0: x + 10 * y + 100 * z)
    assert [float(call(1.0)), float(call(1.0, z=5.0)), float(call(z=5.0, x=1.0))] == [321, 521, 521]
    assert [float(call(1.0, y=4.0)), float(call(1.0, z=5.0, y=4.0))] == [341, 541]


def test_code_that_sees_how_it_is_called_is_called_so() -> None:
    def inner(x: Any, y: Any = 1.0) -> Any:
        return x - y

    @functools.wraps(inner)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return inner(*args, **kwargs) * (10 if kwargs else 1)

    def with_rest(x: Any, *rest: Any, **more: Any) -> Any:
        return x + 10 * len(rest) + sum(more.values(), 0.0)

    def only(x: Any, /, **more: Any) -> Any:
        return x - more["x"]

    for function in (wrapper, with_rest, functools.partial(inner, y=3.0)):
        call = lm.jit(function)
        for _ in range(2):
            for args, kwargs in (((5.0,), {}), ((), {"x": 5.0}), ((5.0,), {"y": 2.0})):
                assert float(call(*args, **kwargs)) == float(function(*args, **kwargs))
    assert float(lm.jit(only)(5.0, x=2.0)) == 3


def test_calls_that_python_refuses() -> None:
    call: Any = lm.jit(lambda x, y: x + y)
    for _ in range(2):
        with pytest.raises(TypeError, match="multiple values for argument 'x'"):
            call(1.0, x=2.0)
        with pytest.raises(TypeError, match="missing 1 required positional argument: 'x'"):
            call(y=2.0)
        with pytest.raises(TypeError, match="unexpected keyword argument 'z'"):
            call(1.0, 2.0, z=3.0)
        assert float(call(y=1.0, x=2.0)) == 3


def test_a_class_whose_call_is_another_one_now() -> None:
    class One(nnx.Module):
        def __call__(self, x: Any, y: Any) -> Any:
            return x - y

    class Other(nnx.Module):
        def __call__(self, y: Any, x: Any) -> Any:
            return 10 * (x - y)

    model = One()
    call = lm.jit(model)
    assert float(call(x=5.0, y=3.0)) == 2
    object.__setattr__(model, "__class__", Other)
    assert float(call(x=5.0, y=3.0)) == 20 and float(call(3.0, 5.0)) == 20


def test_a_lazy_module_compiles_once() -> None:
    layer = lm.LazyLinear(4, rngs=nnx.Rngs(0))
    call = lm.jit(layer)
    want = nnx.Linear(3, 4, rngs=nnx.Rngs(0))(X)

    def twice() -> None:
        for _ in range(3):
            np.testing.assert_allclose(call(inputs=X), want, rtol=1e-6)

    assert traces(twice) == 1


def test_messages_name_what_was_given() -> None:
    with pytest.raises(lm.ArgumentError, match=r"argument options\['mode'\]\n"):
        lm.jit(lambda x, options: x)(X, options={"mode": "fast"})
    call = lm.jit(lambda x, y: x + y)
    call(X, y=X)
    call(X, y=X[:1])
    assert "  y: f32[2,3] -> f32[1,3]" in str(lm.explain())


def test_lowering_exporting_and_checking() -> None:
    pytest.importorskip("flatbuffers")
    model = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    want = np.asarray(model(X)) * 2.0 - 3.0
    call = lm.jit(weighted)
    compiled = call.lower(shift=3.0, scale=2.0, x=X, model=model).compile()
    np.testing.assert_allclose(compiled(model, X, 2.0, shift=3.0), want, rtol=1e-6)
    np.testing.assert_allclose(compiled(model, scale=2.0, x=X, shift=3.0), want, rtol=1e-6)
    arguments: Any = {"shift": jnp.float32(3), "x": X, "scale": jnp.float32(2)}
    blob = lm.export(call, model, platforms=("cpu", "cuda"), **arguments)
    exported = jax.export.deserialize(bytearray(blob))
    np.testing.assert_allclose(exported.call(**arguments), want, rtol=1e-6)
    checked = lm.jit(weighted, check=True)
    np.testing.assert_allclose(checked(shift=3.0, scale=2.0, x=X, model=model), want, rtol=1e-6)


def test_python_decides() -> None:
    call = lm.jit(lambda b, a: b - 2 * a if a > 0 else b)
    for _ in range(3):
        assert [float(call(5.0, 1.0)), float(call(a=1.0, b=5.0)), float(call(5.0, a=-1.0))] == [3, 3, 5]


def test_a_static_argument_by_keyword_alone() -> None:
    seen = []

    @lm.jit(static_argnames="mode")
    def call(x: Any, *rest: Any, mode: str) -> Any:
        seen.append(mode)
        for one in rest:
            x = one(x) if callable(one) else x + one
        return x if mode == "sum" else x - 1

    model = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
    for number in range(3):  # the second argument by position is not the parameter of that number
        np.testing.assert_allclose(call(X, 1.0, X * number, mode="sum"), np.asarray(X) * (number + 1) + 1)
    assert len(seen) == 1
    for mode in ("sum", "less", "sum"):
        model.kernel[...] = model.kernel[...] * 2
        np.testing.assert_allclose(call(X, X, model, mode=mode), model(X + X) - float(mode != "sum"), rtol=1e-5)
    with pytest.raises(lm.ConfigurationError, match="which are x, mode"):
        lm.jit(lambda x, *rest, mode: x, static_argnames="rest")


@pytest.mark.parametrize("n", [3, 2.5, (3, "a"), "abc"], ids=repr)
def test_static_arguments_are_no_arguments_of_what_is_exported(n: Any) -> None:
    pytest.importorskip("flatbuffers")

    class Scale(nnx.Module):
        def __init__(self) -> None:
            self.by = nnx.Variable(jnp.float32(5))

    def times(m: Any, x: Any, n: Any, b: Any, a: Any) -> Any:
        return x * m.by[...] * (n[0] if isinstance(n, tuple) else len(n) if isinstance(n, str) else n) + b - 2 * a

    call, model, want = lm.jit(times, static_argnames="n"), Scale(), times(Scale(), X, n, 1.0, 2.0)
    export = functools.partial(lm.export, platforms=("cpu", "cuda"))
    for exported in (export(call, model, X, n, a=2.0, b=1.0), export(call, model, X, n=n, b=1.0, a=2.0)):
        back = jax.export.deserialize(bytearray(exported))
        np.testing.assert_allclose(back.call(X, a=2.0, b=1.0), want, rtol=1e-6)


def difference(a: float = 0.0, b: float = 0.0) -> Any:
    return a - b


@functools.wraps(difference)
def in_order(**numbers: Any) -> Any:
    return difference(*numbers.values())


def test_a_wrapper_may_see_the_order_of_keywords_that_what_it_wraps_does_not() -> None:
    f = lm.jit(in_order)
    for _ in range(2):
        assert float(f(a=1.0, b=2.0)) == -1
        assert float(f(b=2.0, a=1.0)) == 1
