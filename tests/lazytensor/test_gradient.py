"""A gradient as one operation: equal to ``nnx.value_and_grad``, whatever the function holds."""

import contextlib
import functools
import gc
import types
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.core import Tracer

import lazymods as lm
from lazymods.lazytensor import gradient

lt = lm.lazytensor
X = jnp.asarray(np.linspace(-1, 1, 24, dtype=np.float32).reshape(4, 6))


class Net(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.fc = nnx.Linear(6, 3, rngs=rngs)
        self.norm = nnx.BatchNorm(3, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.norm(self.drop(self.fc(x)))


NET: Net = Net()


def of_a_global(model):
    return (model(X) * NET(X)).sum()


def in_a_closure(x):
    scale, power = 0.5, 2
    return lambda model: (jnp.abs(model(x) * scale) ** power).mean()


def losses():
    yield "closure", lambda i, net: in_a_closure(X * i)
    yield "partial", lambda i, net: functools.partial(lambda m, x, k=1.0: (m(x) * k).sum(), x=X * i, k=0.5 + i)
    yield "global", lambda i, net: of_a_global
    yield "closed_over_module", lambda i, net: lambda model: (model(X) + net(X)).sum()
    yield "default", lambda i, net: lambda model, x=X * i: model(x).sum()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "make"), list(losses()), ids=lambda v: v if isinstance(v, str) else "")
def test_equal_to_nnx(name, make):
    global NET
    results = []
    for transform in (nnx.value_and_grad, lt.value_and_grad):
        model, other = Net(), Net()
        other.eval()  # nnx refuses to change what is not an argument
        NET = other
        out = []
        for i in (1, 2, 3):
            with lt.lazy():
                value, grads = transform(make(i, other))(model)
                model.fc.kernel[...] -= 0.1 * grads["fc"]["kernel"][...]
                lt.mark_step()
            out.append(value)
        results.append((out, nnx.state((model, other))))
    for want, got in zip(*map(jax.tree.leaves, results), strict=True):
        if jnp.issubdtype(want.dtype, jax.dtypes.prng_key):
            want, got = map(jax.random.key_data, (want, got))
        assert want.dtype == got.dtype
        np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=2e-4, atol=1e-5)


def test_arrays_argnums_and_aux():
    def f(a, b):
        return (a * b).sum(), a + b

    b = jnp.ones((4, 6)) * 2
    for where, argnums in ((lt.lazy(), (0, 1)), (lt.lazy(max_ops=1), [0, 1])):
        with where:
            (value, aux), (da, db) = lt.value_and_grad(f, argnums=argnums, has_aux=True)(X, b)
        np.testing.assert_allclose(value, (X * b).sum(), atol=1e-5)
        np.testing.assert_array_equal(aux, X + b)
        np.testing.assert_array_equal(da, b)
        np.testing.assert_array_equal(db, X)
    value, grad = lt.value_and_grad(lambda a: (a**2).sum())(X)  # outside of a block it is a compiled function
    np.testing.assert_allclose(grad, 2 * X)
    assert not isinstance(value, Tracer)


def test_one_operation_traced_once_for_fresh_closures():
    model = Net()

    def loss_of(x):
        def scaled(y):
            return y * 2.0

        return lambda model: scaled(model(x)).sum()

    gradient._programs.clear()
    for i in range(4):
        with lt.lazy():
            value, _ = lt.value_and_grad(loss_of(X * i))(model)
            assert lt.dump(value).count("\n") <= 3
            lt.mark_step()
    assert len(gradient._programs) == 1


def test_static_parts_of_a_closure_are_part_of_the_program():
    def loss_of(power, flag):
        return lambda a: (a**power).sum() if flag else a.sum()

    for power, flag in ((2, True), (3, True), (2, False), (2, True)):
        _, grad = lt.value_and_grad(loss_of(power, flag))(X)
        np.testing.assert_allclose(grad, power * X ** (power - 1) if flag else jnp.ones_like(X), rtol=1e-5)


def test_bound_methods_are_refused_as_nnx_does():
    with pytest.raises(ValueError, match="bound methods"):
        lt.value_and_grad(Net().__call__)(X)


def test_a_function_that_changes_the_structure():
    def loss(model):
        model.extra = nnx.Param(jnp.ones(3))
        return model(X).sum()

    with pytest.raises(lm.LazyError) as caught:
        lt.value_and_grad(loss)(Net())
    assert str(caught.value) == (
        "lm.lazytensor.value_and_grad\n"
        "  got:    a function that adds attributes to a module, removes some, or changes static ones\n"
        "  needed: a function that changes values of Variables only: it is one operation, compiled once\n"
        "  write:  nnx.value_and_grad(f)"
    )


RATE, FLAG, TABLE = 1.0, True, {"rate": 1.0}
HELPERS = types.SimpleNamespace(rate=1.0)


class Rated(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.ones(2))
        self.names = {"rate": 1.0}

    def __call__(self, x):
        return x * self.w * RATE * self.names["rate"]


def _scaled(x):
    return x * RATE if FLAG else -x * RATE


def _losses():
    model, objects = Rated(), types.SimpleNamespace(rate=1.0, model=Rated())
    predict, counted = lm.jit(model), [1.0]
    scaled = functools.partial(lambda x, k: _scaled(x) * k, k=2.0)
    method = types.MethodType(lambda self, x: self.w * x, model)
    mapped = jax.vmap(lambda v: model(v))

    def change():
        global RATE, FLAG
        RATE, FLAG = RATE + 1.0, not FLAG
        TABLE["rate"] += 1.0
        HELPERS.rate += 1.0
        objects.rate += 1.0
        counted.append(2.0)
        model.names["rate"] += 1.0
        for one in (model, objects.model):
            one.w[...] = one.w[...] * 2

    return change, {
        "global number": lambda x: (x * RATE).sum(),
        "global flag": lambda x: x.sum() if FLAG else -x.sum(),
        "global dict": lambda x: (x * TABLE["rate"]).sum(),
        "global object": lambda x: (x * HELPERS.rate).sum(),
        "helper": lambda x: _scaled(x).sum(),
        "partial": lambda x: scaled(x).sum(),
        "method of a class": lambda x: model(x).sum(),
        "bound method": lambda x: method(x).sum(),
        "nested lambda": lambda x: jax.vmap(lambda v: model(v))(x[None]).sum(),
        "transformed": lambda x: mapped(x[None]).sum(),
        "lm.jit": lambda x: predict(x).sum(),
        "object": lambda x: (objects.model(x) * objects.rate).sum(),
        "list": lambda x: (x * counted[-1]).sum(),
        "global by name": lambda x: (x * globals()["RATE"]).sum(),
    }


@pytest.mark.parametrize("name", _losses()[1])
def test_whatever_a_function_reaches_is_seen(name):
    change, fs = _losses()
    x = jnp.asarray([1.0, 2.0])
    for _ in range(3):
        with lt.lazy():
            value, grad = map(np.asarray, lt.value_and_grad(fs[name])(x))
        want, want_grad = jax.value_and_grad(fs[name])(x)
        np.testing.assert_allclose(value, want, rtol=1e-6)
        np.testing.assert_allclose(grad, want_grad, rtol=1e-6)
        change()


def test_writes_of_a_function_are_done_at_every_call():
    count, seen = 0, []

    def loss(x):
        nonlocal count
        count += 1
        seen.append(count)
        return x.sum()

    for _ in range(3):
        lt.value_and_grad(loss)(X)
    assert (count, seen) == (3, [1, 2, 3])


def test_a_helper_defined_anew_is_the_same_and_keeps_nothing_alive():
    gradient._programs.clear()
    models = []
    for _ in range(3):
        model = nnx.Linear(6, 2, rngs=nnx.Rngs(0))
        models.append(weakref.ref(model))

        def loss(x, model=model):
            def forward(x):
                return model(x)

            return (forward(x) ** 2).sum()

        with lt.lazy():
            np.testing.assert_allclose(lt.value_and_grad(loss)(X)[0], (model(X) ** 2).sum(), rtol=1e-5)
        del model, loss
    gc.collect()
    assert len(gradient._programs) == 1
    assert [ref() for ref in models] == [None] * 3


# ---------------------------------------------------------------- what a function returns besides


class Thing:
    """No pytree: JAX lets a function return it, and no program can."""


def everything(x, rate):
    aux = {"text": "abc", "count": 3, "flag": True, "none": None, "nan": float("nan"), "shape": x.shape, "half": 0.5}
    return x.sum() * rate, aux | {"y": x * 2, "x": x, "rate": rate}


THING = Thing()
AUX = {
    "plain": everything,
    "numpy": lambda x, rate: (x.sum(), {"a": np.float32(2), "b": np.arange(3)}),
    "object": lambda x, rate: (x.sum(), [THING, x]),
    "model": lambda x, rate: (MODEL(x).sum(), (MODEL, MODEL.kernel[...])),
    "number": lambda x, rate: (x.sum(), rate),
    "nothing": lambda x, rate: (x.sum(), None),
}
MODEL = nnx.Linear(3, 2, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("block", [False, True], ids=["plain", "block"])
@pytest.mark.parametrize("rate", [0.5, np.float32(0.25), jnp.float32(0.125)], ids=["float", "numpy", "array"])
@pytest.mark.parametrize("kind", AUX)
def test_what_a_function_returns_besides_is_what_it_is(kind, rate, block):
    for x in (jnp.ones((2, 3)), jnp.ones((4, 3)), jnp.ones((2, 3)) * 2):
        (value, aux), gradient = nnx.value_and_grad(AUX[kind], has_aux=True)(x, rate)
        with lt.lazy() if block else contextlib.nullcontext():
            (got, found), slope = lt.value_and_grad(AUX[kind], has_aux=True)(x, rate)
        np.testing.assert_allclose(got, value, rtol=1e-6)
        np.testing.assert_allclose(slope, gradient, rtol=1e-6)
        want, structure = jax.tree.flatten(aux, is_leaf=lambda v: isinstance(v, (nnx.Pytree, nnx.Variable)))
        leaves, other = jax.tree.flatten(found, is_leaf=lambda v: isinstance(v, (nnx.Pytree, nnx.Variable)))
        assert structure == other
        for one, two in zip(leaves, want, strict=True):
            if isinstance(two, jax.Array):
                assert isinstance(one, jax.Array) and (one.dtype, one.weak_type) == (two.dtype, two.weak_type)
                np.testing.assert_allclose(one, two, rtol=1e-6)
            elif isinstance(two, (float, np.ndarray, np.generic)):
                assert type(one) is type(two)
                np.testing.assert_array_equal(one, two)
            elif isinstance(two, (nnx.Pytree, nnx.Variable)):  # of these nnx.value_and_grad returns copies
                assert type(one) is type(two)
                jax.tree.map(np.testing.assert_array_equal, nnx.state([one]), nnx.state([two]))
            else:
                assert one is two or (type(one) is type(two) and one == two)


def test_new_keys_are_of_the_implementation_that_is_set():
    def loss(x):
        return (x * jax.random.normal(jax.random.key(0), x.shape)).sum()

    for impl in ("threefry2x32", "rbg", "threefry2x32"):
        with jax.default_prng_impl(impl):
            np.testing.assert_allclose(lt.value_and_grad(loss)(X)[1], jax.grad(loss)(X))
