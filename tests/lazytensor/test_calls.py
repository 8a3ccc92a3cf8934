"""Calls of jitted functions, recorded without asking jax again: eager JAX is the oracle."""

import functools
import gc
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.core import Tracer

import lazymods as lm
from lazymods._compat import calls
from lazymods.lazytensor import operators

lt = lm.lazytensor
pjit: Any = calls.pjit
untyped: Any = jnp
X: Any = jnp.asarray(np.linspace(-2, 2, 12, dtype=np.float32).reshape(3, 4))
Y: Any = jnp.asarray(np.linspace(0.5, 3, 12, dtype=np.float32).reshape(3, 4))
I = jnp.arange(12).reshape(3, 4)  # noqa: E741
nothing, empty, emptied = jax.jit(lambda x: None), jax.jit(lambda x: ()), jax.jit(lambda x: {"b": {}})
TIMES = 3  # the first is jax's way, the others are not


@pytest.fixture
def asked(monkeypatch):
    """How often jax was asked for the jaxpr of a call that was recorded."""
    count = []
    real = pjit._infer_params

    def infer_params(fun, ji, args, kwargs):
        if type(calls._CURRENT.value) is calls.CallRecorder:
            count.append(fun)
        return real(fun, ji, args, kwargs)

    monkeypatch.setattr(pjit, "_infer_params", infer_params)
    return count


def same(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert jax.typeof(g) == jax.typeof(w)  # shape, dtype, weak type
        np.testing.assert_allclose(np.asarray(g), np.asarray(w), rtol=1e-5, atol=1e-6)


@jax.jit
def tree_of(x, more):
    return {"a": x * more["b"], "c": [x - n for n in more["d"]], "none": more["none"]}


scaled = jax.jit(lambda x, n, name="multiply": getattr(jnp, name)(x, n), static_argnums=1, static_argnames="name")
CASES = {
    "sin": lambda: jnp.sin(X),
    "of_what_was_recorded": lambda: jnp.tanh(jnp.sin(X)),
    "number": lambda: jnp.add(jnp.sin(X), 1.5),
    "number_first": lambda: jnp.subtract(2, jnp.sin(X)),
    "bool": lambda: jnp.multiply(jnp.sin(X), True),
    "complex": lambda: jnp.multiply(jnp.sin(X), 1j),
    "integers": lambda: jnp.maximum(I, 3),
    "where": lambda: jnp.where(X > 0, jnp.sin(X), -1.0),
    "relu": lambda: jax.nn.relu(jnp.sin(X)),
    "relu_of_a_number": lambda: (jax.nn.relu(2.0), jax.nn.relu(jnp.asarray(-1)), jax.nn.relu(True)),
    "relu_of_a_keyword": lambda: jax.nn.relu(x=jnp.sin(X)),
    "grad_of_relu": lambda: jax.grad(lambda x: jnp.sum(jax.nn.relu(jnp.multiply(x, x))))(X),
    "gelu": lambda: jax.nn.gelu(jnp.sin(X)),
    "sum": lambda: jnp.sum(jnp.sin(X), axis=1, keepdims=True),
    "clip": lambda: jnp.clip(X, -0.5, 1),
    "matmul": lambda: jnp.matmul(X, Y.T),
    "concatenate": lambda: jnp.concatenate([jnp.sin(X), Y], axis=1),
    "weak": lambda: jnp.add(jnp.asarray(1.0), 2),
    "tree": lambda: tree_of(jnp.sin(X), {"b": Y, "d": (1, 2.5, I), "none": None}),
    "static": lambda: scaled(jnp.sin(X), 3, name="power"),
    "twice_the_same": lambda: jax.jit(lambda x: (x + 1, x, (x,)))(X),
    "no_result": lambda: [nothing(X), nothing(jnp.sin(X)), empty(X), emptied({"a": X})],
    "no_operand": lambda: jax.jit(lambda: jnp.arange(3.0))(),
    "constant_result": lambda: jax.jit(lambda x: (1.0, np.float32(2), x))(X),
    "vmap": lambda: jax.vmap(jnp.sin)(X),
    "vmap_inside": lambda: jax.jit(jax.vmap(lambda x: jnp.dot(x, x)))(X),
    "grad": lambda: jax.grad(lambda x: jnp.sum(jnp.tanh(jnp.multiply(x, 2.0))))(X),
    "grad_inside": lambda: jax.jit(jax.grad(lambda x: jnp.sum(jnp.sin(x) ** 2)))(X),
    "jit_of_jit": lambda: jax.jit(lambda x: jax.jit(jnp.sin)(x) + jnp.cos(x))(X),
    "scan": lambda: jax.lax.scan(lambda c, x: (jnp.add(c, x), jnp.sin(c)), X[0], X),
    "keys": lambda: jax.random.normal(jax.random.fold_in(jax.random.key(0), 3), (4,)),
    "lower": lambda: np.asarray(jax.jit(jnp.sin).lower(X).compile()(np.asarray(X))),
}


@pytest.mark.parametrize("name", CASES)
def test_equal_to_eager(name):
    run = CASES[name]
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        want = run()
        for _ in range(TIMES):
            with lt.lazy():
                first, again = run(), run()
            same(first, want)
            same(again, want)


@pytest.mark.parametrize("name", ["sin", "number", "where", "relu", "sum", "tree", "static", "concatenate", "weak"])
def test_jax_is_not_asked_again(name, asked):
    with jax.numpy_dtype_promotion("standard"), lt.lazy():
        kept = [CASES[name]() for _ in range(2)]
        before = len(asked)
        kept += [CASES[name]() for _ in range(3)]
        assert len(asked) == before
    del kept


def test_one_operation_each_and_the_same_graph():
    with lt.lazy():
        texts = []
        for _ in range(TIMES):
            texts.append(lt.dump(jnp.add(jnp.sin(X), 1.0)))
    assert set(texts) == {"%0 = sin(array: f32[3,4]) -> f32[3,4]\n%1 = add(%0, number: f32[]) -> f32[3,4]\nreturn %1"}


# ---------------------------------------------------------------- what is part of a call


def test_the_value_of_a_number_is_not():
    with lt.lazy():
        got = [jnp.add(jnp.sin(X), float(n)) for n in range(5)]
    for n, g in enumerate(got):
        np.testing.assert_allclose(g, np.sin(X) + n, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("x", [X, I, X.astype(jnp.complex64)], ids=lambda x: str(x.dtype))
def test_powers(x, monkeypatch):
    exponents = [0, 1, 2, 3, 2.0, 0.5, True, 1.5, *([] if x.dtype == jnp.int32 else [-1, -2])]
    with jax.numpy_dtype_promotion("standard"):
        want = [x**n for n in exponents]
        with lt.lazy():
            for _ in range(TIMES):
                same([(+x) ** n for n in exponents], want)
                same(2 ** jnp.abs(+x), 2 ** jnp.abs(x))
                same((+x) ** abs(x), x ** abs(x))
            y = +x
            monkeypatch.setattr(operators, "_learn", None)  # what becomes one operation is known
            same([y**n for n in (2, 3)], [x**n for n in (2, 3)])


def test_numbers_that_do_not_fit():
    with lt.lazy():
        for _ in range(TIMES):
            jnp.multiply(jnp.asarray(1), 7)
            with pytest.raises(OverflowError, match="overflow was encountered while parsing an argument to a jitted"):
                jnp.multiply(jnp.asarray(1), 1 << 40)
            assert np.isinf(jnp.multiply(jnp.asarray(1.0), 1e300))
            assert np.isnan(jnp.multiply(jnp.asarray(1.0), float("nan")))


def test_static_arguments_are_told_apart_by_type():
    seen = []

    def f(x, n):
        seen.append(n)
        return x * n if type(n) is int else x + 1 if type(n) is bool else x - n

    f = jax.jit(f, static_argnums=1)
    with lt.lazy():
        x = jnp.sin(X)
        got = [[f(x, 1), f(x, True), f(x, 1.0)] for _ in range(TIMES)]
    s = np.sin(X)
    for one, true, point in got:
        np.testing.assert_allclose(one, s, rtol=1e-5)
        np.testing.assert_allclose(true, s + 1, rtol=1e-5)
        np.testing.assert_allclose(point, s - 1, rtol=1e-5, atol=1e-6)
    assert len(seen) == 3


def test_static_arguments_that_change():
    f = jax.jit(lambda x, *, axis: jnp.sum(x, axis), static_argnames="axis")
    with lt.lazy():
        got = [f(jnp.sin(X), axis=axis) for axis in (0, 1, None, 0, 1, None)]
    for g, axis in zip(got, (0, 1, None) * 2, strict=True):
        np.testing.assert_allclose(g, np.sum(np.sin(X), axis), rtol=1e-5, atol=1e-6)


def test_types_of_operands():
    f = jax.jit(lambda x, y: (x + y, x.shape, x.dtype == y.dtype))
    pairs = [(X, Y), (X[0], Y[0]), (X.astype(jnp.bfloat16), Y.astype(jnp.bfloat16)), (I, I), (X, X)]
    with lt.lazy():
        got = [[f(x, y) for x, y in pairs] for _ in range(TIMES)]
    for one in got:
        for g, (x, y) in zip(one, pairs, strict=True):
            assert g[1] == x.shape and g[0].dtype == x.dtype
            np.testing.assert_array_equal(g[0], x + y)


@pytest.mark.slow
def test_functions_that_are_defined_anew():
    with lt.lazy():
        got = []
        for n in range(20):
            got.append(jax.jit(lambda x, n=n: jnp.sin(x) * n)(X))
            gc.collect()  # so that the next one may have the address of this one
    for n, g in enumerate(got):
        np.testing.assert_allclose(g, np.sin(X) * n, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_the_same_function_jitted_anew():
    def f(x, n):
        return x * n

    with lt.lazy():
        got = []
        for n in range(6):
            static = n % 2
            got.append(jax.jit(f, static_argnums=(1,) if static else ())(X, n))
            gc.collect()
    for n, g in enumerate(got):
        np.testing.assert_allclose(g, X * n, rtol=1e-6)


def test_what_a_function_closes_over():
    with lt.lazy():
        for n in range(4):
            t = jnp.sin(X) + n
            f = jax.jit(lambda x, t=t: x + t)
            g = jax.jit(lambda x: x * t)  # noqa: B023
            for _ in range(TIMES):
                np.testing.assert_allclose(f(Y), Y + np.sin(X) + n, rtol=1e-5)
                np.testing.assert_allclose(g(Y), Y * (np.sin(X) + n), rtol=1e-5, atol=1e-6)


def test_arrays_of_numpy_are_copied_when_it_is_recorded():
    with lt.lazy():
        for _ in range(TIMES):
            a = np.ones((3, 4), np.float32)
            y = jnp.add(jnp.sin(X), a)
            b = np.full((3, 4), 2, np.float32)
            z = jax.jit(lambda x, more: x * more["a"])(jnp.sin(X), {"a": b})
            a[:], b[:] = 100, 100
            np.testing.assert_allclose(y, np.sin(X) + 1, rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(z, np.sin(X) * 2, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("x64", [False, True])
def test_scalars_of_numpy(x64):
    kinds = (np.float16, np.float32, np.float64, np.int8, np.uint8, np.int32, np.int64, np.bool_, np.complex64)
    with jax.numpy_dtype_promotion("standard"), jax.enable_x64(x64):
        for kind in kinds:
            want = [jnp.multiply(X, kind(n)) for n in range(TIMES)]
            with lt.lazy():
                got = [jnp.multiply(jnp.add(X, 0), kind(n)) for n in range(TIMES)]
            same(got, want)


def test_scalars_of_numpy_that_do_not_fit():
    with np.errstate(over="ignore"):
        want = [jnp.multiply(jnp.asarray(1.0), np.float64(1e300)) for _ in range(TIMES)]
        with lt.lazy():
            got = [jnp.multiply(jnp.asarray(1.0), np.float64(1e300)) for _ in range(TIMES)]
    same(got, want)


def test_functions_with_a_rule_of_their_own():
    inner = jax.jit(lambda x, n: x * n)
    bare = jax.custom_jvp(inner)
    ruled = jax.custom_jvp(inner)
    ruled.defjvp(lambda primals, tangents: (inner(*primals), 7 * tangents[0]))
    static = jax.custom_jvp(inner, nondiff_argnums=(1,))
    static.defjvp(lambda n, primals, tangents: (inner(*primals, n), 8 * tangents[0]))
    renamed = jax.custom_jvp(functools.wraps(inner)(lambda x, n: x + n))
    renamed.defjvp(lambda primals, tangents: (renamed(*primals), tangents[0]))
    with lt.lazy():
        for _ in range(TIMES):
            x = jnp.sin(X)
            np.testing.assert_allclose(inner(x, 3.0), np.sin(X) * 3, rtol=1e-5)
            np.testing.assert_allclose(ruled(x, 3.0), np.sin(X) * 3, rtol=1e-5)
            np.testing.assert_allclose(static(x, 3.0), np.sin(X) * 3, rtol=1e-5)
            np.testing.assert_allclose(renamed(x, 3.0), np.sin(X) + 3, rtol=1e-5, atol=1e-6)
            with pytest.raises(AttributeError, match="No JVP defined for custom_jvp function"):
                bare(x, 3.0)
            for f, factor in ((ruled, 7), (static, 8), (renamed, 1)):
                got = jax.grad(lambda x, f=f: jnp.sum(f(x, 3.0)))(x)
                np.testing.assert_allclose(got, np.full((3, 4), factor), rtol=1e-6)


# ---------------------------------------------------------------- settings


def test_x64():
    with lt.lazy():
        for _ in range(TIMES):
            y = jnp.multiply(jnp.sin(X), 3)
            with jax.enable_x64(True):
                z = jnp.multiply(jnp.arange(3), 3)
                assert z.dtype == np.int64
                assert int(jnp.multiply(z, 1 << 40)[1]) == 3 << 40
            assert jnp.multiply(jnp.arange(3), 3).dtype == np.int32
            np.testing.assert_allclose(y, np.sin(X) * 3, rtol=1e-5, atol=1e-6)


def test_matmul_precision():
    with lt.lazy():
        for _ in range(TIMES):
            plain = lt.dump(jnp.dot(X, Y.T), format="hlo")
            with jax.default_matmul_precision("highest"):
                highest = lt.dump(jnp.dot(X, Y.T), format="hlo")
            assert "highest" in highest and "highest" not in plain


def test_promotion():
    with lt.lazy():
        for _ in range(TIMES):
            with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
                want = X + np.asarray(Y[0]) + np.asarray(I)
                np.testing.assert_allclose(jnp.add(jnp.add(X, Y[0]), I), want, rtol=1e-5)
            with jax.numpy_rank_promotion("raise"), pytest.raises(ValueError, match="numpy_rank_promotion"):
                jnp.add(X, Y[0])
            with jax.numpy_dtype_promotion("strict"), pytest.raises(jax.dtypes.TypePromotionError, match="int32"):
                jnp.add(X, I)


def test_disable_jit():
    inside = []
    f = jax.jit(lambda x: (inside.append(isinstance(x, Tracer)), jnp.sin(x))[1])
    with lt.lazy():
        for _ in range(TIMES):
            f(X)
        assert len(inside) == 1
        with jax.disable_jit():
            for _ in range(TIMES):
                np.testing.assert_allclose(f(X), np.sin(X), rtol=1e-5)
        assert len(inside) == 1 + TIMES


def test_meshes():
    f = jax.jit(lambda x: jax.lax.with_sharding_constraint(x + 1, jax.sharding.PartitionSpec("i")))
    meshes = [jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,)) for _ in range(2)]
    for _ in range(TIMES):
        for mesh in meshes:
            with jax.set_mesh(mesh), lt.lazy():
                for _ in range(TIMES):
                    np.testing.assert_allclose(f(X), X + 1)
        with lt.lazy(), pytest.raises(RuntimeError, match="requires a non-empty mesh"):
            f(X)


def test_no_tracing():
    with lt.lazy():
        for f in (lambda: jnp.sin(X), lambda: jnp.add(X, Y), lambda: jax.nn.relu(X)):
            kept = [f() for _ in range(TIMES)]
            with jax.no_tracing(), pytest.raises(RuntimeError, match="but 'no_tracing' is set"):
                f()
            del kept


# ---------------------------------------------------------------- errors, effects, modules


def test_errors_are_those_of_jax():
    wrong = [
        lambda: jnp.add(X, jnp.ones(7)),
        lambda: untyped.add(X, "text"),
        lambda: untyped.sin(X, X),
        lambda: untyped.add(X, out=X),
        lambda: untyped.add(X, Y, where=X),
        lambda: scaled(X, [1]),
        lambda: scaled(X, 1, name=[]),
        lambda: jax.jit(lambda x: x + x.undefined)(X),
        lambda: tree_of(X, {"b": object(), "d": (), "none": None}),
    ]
    for f in wrong:
        with pytest.raises(Exception) as want:
            f()
        for _ in range(TIMES):
            with lt.lazy():
                kept = jnp.add(X, Y), jnp.sin(X), scaled(X, 2)
                with pytest.raises(type(want.value)) as got:
                    f()
            assert str(got.value).split(" of type")[0] == str(want.value).split(" of type")[0]
            del kept


def test_effects_run_as_often_as_they_are_called(capfd):
    @jax.jit
    def f(x):
        jax.debug.print("ran")
        return x + 1

    with lt.lazy():
        for _ in range(4):
            f(X)
    jax.effects_barrier()
    assert capfd.readouterr().out.count("ran") == 4


def test_references_that_a_function_closes_over():
    ref = jax.new_ref(jnp.zeros(()))

    @jax.jit
    def f(x):
        ref[...] += 1.0
        return x * ref[...]

    with lt.lazy():
        got = [f(jnp.sin(X)) for _ in range(4)]
    for n, g in enumerate(got, 1):
        np.testing.assert_allclose(g, np.sin(X) * n, rtol=1e-5, atol=1e-6)
    assert float(ref[...]) == 4


def test_donated_arguments_stay():
    f = jax.jit(lambda x: x * 2, donate_argnums=0)
    with lt.lazy():
        for _ in range(TIMES):
            x = jnp.sin(X)
            np.testing.assert_allclose(f(x), 2 * np.sin(X), rtol=1e-5)
            np.testing.assert_allclose(x, np.sin(X), rtol=1e-5)


def test_a_cut_within():
    with lt.lazy(max_ops=1):
        for n in range(TIMES):
            np.testing.assert_allclose(jnp.add(jnp.sin(X), float(n)), np.sin(X) + n, rtol=1e-5, atol=1e-6)
    with lt.lazy(max_ops=3):
        y = X
        for _ in range(10):
            y = jnp.add(jnp.sin(y), 0.5)
    want = np.asarray(X)
    for _ in range(10):
        want = np.sin(want) + 0.5
    np.testing.assert_allclose(y, want, rtol=1e-5)


def test_a_module():
    model = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
    want = nnx.relu(model(X))
    with lt.lazy():
        got = [nnx.relu(model(X)) for _ in range(TIMES)]
    for g in got:
        np.testing.assert_allclose(g, want, rtol=1e-5)
