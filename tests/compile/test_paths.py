"""Python decisions on values: equal to plain Python, each part computed once, each path recorded once."""

import gc
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.core import Tracer

import lazymods as lm
from lazymods.compile.paths import Paths

T = np.array([1.0, -2.0, 3.5], np.float32)
WEIGHTS = jnp.arange(9.0).reshape(3, 3) / 9


def halve(t, x):
    n = 0
    while jnp.abs(t).max() > 0.5:
        t, n = t * 0.5, n + 1
    return t, x * n


def nested(t, x):
    if t.sum() > 0:
        if (t > x).any():
            return t * x
        t = t - 1
    elif x < 0:
        return t + jnp.abs(x)
    return jnp.where(t > 0, t, -t) + x


def repeat(t, x):
    for _ in range(int(jnp.clip(jnp.abs(x), 0, 3))):
        t = t * 2 + 1
    return t


def shapes(t, x):
    size = int(t.size + jnp.round(jnp.clip(x, -2, 2)))
    return jnp.zeros(size, x.dtype) + x, t[: max(1, size)], jnp.arange(jnp.abs(x).astype(int))


def short_circuit(t, x):
    if not (x > 0 and t[0] < x):
        t = -t
    return t if all(v > -9 for v in t) else t + 9


def in_grad(t, x):
    def loss(t):
        y = t**2 * x
        return y.sum() if y.sum() > 1 else (t**3).sum()

    return jax.value_and_grad(loss)(t)


def in_hessian(t, x):
    return jax.hessian(lambda t: (t**3).sum() * x if (t * x).sum() > 1 else (t**4).sum())(t)


def in_vmap(t, x):
    return jax.vmap(lambda a: jnp.sin(a) if x > 0 else a - 1)(t)


def scalars(t, x):
    return t * float(x) + x.item(), jnp.sum(t) * int(x), t + complex(x).imag


def masks(t, x):
    return t[t > x], jnp.nonzero(t > 0)[0], jnp.unique(t)


def loops(t, x):
    return jax.grad(lambda t: jax.lax.fori_loop(0, jnp.int32(jnp.abs(x)) + 1, lambda i, a: a * t, t).sum())(t)


def closures(t, x):
    y = t @ WEIGHTS.astype(t.dtype)
    return jax.jit(lambda a: a + y)(t) if y.sum() > x else jax.jit(lambda a: a - y)(t)


def custom(t, x):
    y = jax.nn.relu(t) + jax.checkpoint(jnp.sin)(t)
    return jax.lax.scan(lambda c, a: (c + a, c * a), x, y) if y.max() > x else jax.nn.logsumexp(t)


def numpy_decides(t, x):
    return t + np.asarray(x).item() if np.sum(np.asarray(t)) > 0 else t.tolist()[0] + x


FLOW = [halve, nested, repeat, shapes, short_circuit, in_grad, in_hessian, in_vmap, scalars, masks, loops, closures]
FLOW += [custom, numpy_decides]


def paths_of(function, max_paths=100):
    def body(leaves):
        out, tree = jax.tree.flatten(function(*leaves))
        return out, tree

    paths = Paths(body, max_paths)

    def call(*args):
        out, tree = paths(list(args))
        return jax.tree.unflatten(tree, out)

    return call, paths


def check_same(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert not isinstance(g, Tracer)
        g, w = jnp.asarray(g), jnp.asarray(w)
        assert (g.shape, g.dtype, g.weak_type) == (w.shape, w.dtype, w.weak_type)
        tol = 2e-2 if g.dtype == jnp.bfloat16 else 1e-5
        np.testing.assert_allclose(np.asarray(g, np.complex64), np.asarray(w, np.complex64), rtol=tol, atol=tol)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("function", FLOW, ids=lambda f: f.__name__)
def test_equal_to_plain_python(function, dtype):
    call, _ = paths_of(function)
    for scale in (1.0, -1.0, 0.25, 1.0):
        for x in (0.5, -2.0, 2.0):
            args = jnp.array(T * scale, dtype), jnp.array(x, dtype)
            check_same(call(*args), function(*args))


@pytest.mark.parametrize("weak", [True, False])
def test_weak_types(weak):
    x = jnp.asarray(2.0) if weak else jnp.float32(2)
    assert x.weak_type is weak

    def function(h, x):
        return (h * x if x > 1 else h + x), x

    call, _ = paths_of(function)
    half = jnp.ones(2, jnp.bfloat16)
    with jax.numpy_dtype_promotion("standard"):
        check_same(call(half, x), function(half, x))
        check_same(call(half, x), function(half, x))


@pytest.mark.parametrize(
    ("convert", "values", "expected"),
    [
        (bool, [2.5, 3.5, 0.0], 2),  # only the truth is asked for
        (int, [2.5, 2.9, 3.0], 2),
        (float, [2.5, 2.9, 2.5], 2),
        (float, [0.0, -0.0, 0.0], 2),
        (float, [float("nan"), float("nan"), 1.0], 2),
    ],
)
def test_what_makes_another_path(convert, values, expected):
    call, paths = paths_of(lambda x: x + float(convert(x)))
    for value in map(jnp.float32, values):
        check_same(call(value), value + float(convert(value)))
    assert len(paths) == expected


def test_each_path_runs_its_python_once():
    seen = []

    def function(x):
        if x.sum() > 0:
            seen.append("plus")
            return x + 1
        seen.append("minus")
        return x - 1

    call, paths = paths_of(function)
    for sign in (1.0, -1.0, 1.0, -1.0, -1.0, 1.0):
        x = jnp.ones(3) * sign
        check_same(call(x), x + sign)
    assert sorted(seen) == ["minus", "plus"]
    assert len(paths) == 2


def test_nothing_runs_twice_in_a_call():
    runs = []

    def function(x):
        jax.debug.callback(lambda v: runs.append(("before", float(v))), x.sum())
        if jnp.sin(x).sum() > 0:
            jax.debug.callback(lambda v: runs.append(("between", float(v))), x.sum())
            if x.sum() > 5:
                return x * 3
            return x * 2
        return x - 1

    call, _ = paths_of(function)
    for value in (1.0, 1.0, -1.0, 3.0, -1.0, 1.0, 3.0):
        del runs[:]
        jax.block_until_ready(call(jnp.full(2, value)))
        jax.effects_barrier()
        between = [("between", 2 * value)] if jnp.sin(value) > 0 else []
        assert runs == [("before", 2 * value), *between]


def test_effects_alone():
    runs = []
    call, _ = paths_of(lambda x: jax.debug.callback(lambda v: runs.append(float(v)), x))
    call(jnp.float32(2))
    call(jnp.float32(3))
    jax.effects_barrier()
    assert runs == [2.0, 3.0]


def test_too_many_paths():
    call, paths = paths_of(lambda x: x + int(x), max_paths=2)
    assert [call(jnp.int32(k)).item() for k in (3, 4)] == [6, 8]
    with pytest.raises(lm.LazyError) as caught:
        call(jnp.int32(5))
    assert str(caught.value) == (
        "the function\n"
        "  got:    values that would make path 3 of its Python code\n"
        "  needed: at most max_paths=2 paths: each is compiled by itself, and more of them mostly means that Python "
        "decides on a number or loops until a value is reached\n"
        "  write:  jax.lax.cond(pred, then, otherwise, x)  # a loop: jax.lax.while_loop or jax.lax.fori_loop; "
        "or more paths: lm.jit(f, max_paths=...)"
    )
    assert len(paths) == 2
    assert [call(jnp.int32(k)).item() for k in (4, 3)] == [8, 6]


def test_function_that_changes_between_runs():
    runs = []

    def function(x):
        runs.append(1)
        y = x * 2 if len(runs) > 1 else jnp.sin(x)
        z = y + 1 if len(runs) > 1 else y
        return z if z > 0 else -z

    call, _ = paths_of(function)
    call(jnp.float32(1))
    with pytest.raises(lm.LazyError) as caught:
        call(jnp.float32(-1))
    assert str(caught.value) == (
        "the function\n"
        "  got:    other operations before decision 1 than when it was recorded first\n"
        "  needed: the same operations in every run: its Python may decide on values, on nothing that changes outside\n"
        "  write:  f(x, changing)  # what changes, as an argument"
    )


def test_errors_of_the_function_leave_the_paths():
    def function(x):
        if x < 0:
            raise KeyError("negative")
        return x * 2

    call, paths = paths_of(function)
    with pytest.raises(KeyError, match="negative"):
        call(jnp.float32(-1))
    assert len(paths) == 0
    assert call(jnp.float32(2)) == 4
    for _ in range(2):
        with pytest.raises(KeyError, match="negative"):
            call(jnp.float32(-1))
    assert len(paths) == 1
    assert call(jnp.float32(3)) == 6


@pytest.mark.slow
def test_a_value_that_escapes_is_refused():
    kept = []
    call, _ = paths_of(lambda x: (kept.append(x * 2), x)[1])
    with pytest.raises(lm.LazyError, match="stores an array"):
        call(jnp.float32(1))


def test_decisions_on_tracers_without_values_are_jax_own_errors():
    call, _ = paths_of(lambda t: jax.jit(lambda a: a if a.sum() > 0 else -a)(t))
    with pytest.raises(jax.errors.TracerBoolConversionError):
        call(jnp.ones(2))
    call, _ = paths_of(lambda t: jax.vmap(lambda a: a if a > 0 else -a)(t))
    with pytest.raises(jax.errors.TracerBoolConversionError):
        call(jnp.ones(2))


def test_inside_transforms():
    call, _ = paths_of(lambda t, x: t**2 * x if x > 0 else t**3)
    mapped, _ = paths_of(lambda t, x: t**2 * x if x > 0 else t**3)
    t = jnp.array(T)
    for x in (2.0, -1.0, 2.0):
        want = jax.grad(lambda t: (t**2 * x if x > 0 else t**3).sum())(t)  # noqa: B023
        check_same(jax.grad(lambda t: call(t, jnp.float32(x)).sum())(t), want)  # noqa: B023
        check_same(jax.vmap(lambda t: mapped(t, jnp.float32(x)))(t), t**2 * x if x > 0 else t**3)  # noqa: B023
    plain, _ = paths_of(lambda t: jnp.sin(t) * 2)
    check_same(jax.jit(plain)(t), jnp.sin(t) * 2)


def test_other_arguments_are_refused():
    call, _ = paths_of(lambda x: x * 2)
    call(jnp.ones(2))
    with pytest.raises(TypeError, match=r"a program of .*float32\[2\].* was called with .*float32\[3\]"):
        call(jnp.ones(3))


def test_probes_of_jax_are_no_decisions():
    calls = []

    def function(x, n):
        calls.append(1)
        return jnp.power(x, n), jax.lax.reduce(x, n, jax.lax.add, (0,)), x * 0.9**n

    call, paths = paths_of(function)
    for n in (2.0, 3.0):
        check_same(call(jnp.ones(3), jnp.float32(n)), function(jnp.ones(3), jnp.float32(n)))
    assert len(paths) == 1 and len(calls) == 3


def test_what_is_returned_besides_belongs_to_the_path():
    paths = Paths(lambda leaves: (leaves, "plus") if leaves[0] > 0 else ([1.5, leaves[0]], "minus"))
    for value in (1.0, -1.0, 2.0, -3.0):
        out, rest = paths([jnp.float32(value)])
        assert (out, rest) == (([value], "plus") if value > 0 else ([1.5, value], "minus"))


def test_no_array_stays():
    call, _ = paths_of(lambda x: jnp.sin(x) * 2 if x.sum() > 0 else x)
    args = [jnp.ones(100), -jnp.ones(100)]
    out = [call(a) for a in args for _ in range(2)]
    alive = [weakref.ref(a) for a in args + out]
    del args, out
    gc.collect()
    assert [a() for a in alive] == [None] * 6


@pytest.mark.xfail(
    jax.config.jax_check_tracer_leaks,  # type: ignore[attr-defined]
    reason="jax keeps no programs while it looks for leaks",
)
def test_equal_segments_share_a_program():
    compiles = []

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if "backend_compile" in event:
            compiles.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    call, _ = paths_of(halve)
    call(jnp.ones(3) * 7, jnp.float32(1))
    first = len(compiles)
    assert call(jnp.ones(3) * 7000, jnp.float32(1))[1] == 14
    assert len(compiles) <= first + 2  # the end has another number in it; every turn of the loop is the same program


def test_variables_of_outside_can_be_written_in_it():
    count = nnx.Variable(jnp.float32(0))

    def body(leaves):
        before = count.get_raw_value()
        count[...] = leaves[0] + 1
        out = count[...] * 2 if count[...] > 0 else count[...]
        count.set_raw_value(before)
        return [out], None

    assert Paths(body)([jnp.float32(3)])[0] == [8]
    assert count[...] == 0


@pytest.mark.slow
def test_threads():
    call, paths = paths_of(nested)
    errors = []

    def work(seed):
        try:
            for i in range(20):
                t, x = jnp.array(np.roll(T, i) * (-1) ** (i + seed)), jnp.float32(i % 3 - 1)
                check_same(call(t, x), nested(t, x))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert len(paths) <= 5
