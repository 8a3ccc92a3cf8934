"""When recorded calls are forgotten, and the hooks that jax has while a block is open."""

import gc
import threading
import weakref
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.core import Tracer

import lazymods as lm
from lazymods._compat import calls

lt = lm.lazytensor
pjit: Any = calls.pjit
X: Any = jnp.asarray(np.linspace(-2, 2, 12, dtype=np.float32).reshape(3, 4))
TIMES = 3  # the first is jax's way, the others are not


# ---------------------------------------------------------------- forgetting


def with_a_rule(f):
    """``f`` inside of something that calls it."""
    rule = jax.custom_jvp(f)
    rule.defjvps(lambda t, out, x: t)
    return rule


@pytest.mark.parametrize("inside", [lambda f: f, with_a_rule], ids=["jit", "custom_jvp"])
@pytest.mark.parametrize("forget", ["clear_caches", "clear_cache", "in_another_thread"])
def test_what_jax_forgets(forget, inside):
    factor = 1

    @jax.jit
    def f(x):
        return x * factor

    g = inside(f)
    with lt.lazy():
        for factor in range(1, 5):
            for _ in range(TIMES):
                np.testing.assert_allclose(g(jnp.sin(X)), np.sin(X) * factor, rtol=1e-5, atol=1e-6)
            if forget == "in_another_thread":
                thread = threading.Thread(target=jax.clear_caches)
                thread.start()
                thread.join()
            else:
                forgets = {"clear_caches": jax.clear_caches, "clear_cache": f.clear_cache}  # pyright: ignore
                forgets[forget]()


def test_what_jax_forgets_while_it_is_asked():
    factor = 1

    @jax.jit
    def f(x):
        y = x * factor
        jax.clear_caches()
        return y

    with lt.lazy():
        for factor in range(1, 5):
            np.testing.assert_allclose(f(jnp.sin(X)), np.sin(X) * factor, rtol=1e-5, atol=1e-6)


def holding(thing):
    def f(x):
        return jnp.sin(x) if thing is not None else x

    return f


@pytest.mark.parametrize("inside", [lambda f: f, with_a_rule], ids=["jit", "custom_jvp"])
def test_a_function_is_not_kept(inside):
    class Big:
        pass

    big = Big()
    f = inside(jax.jit(holding(big)))
    gone = weakref.ref(big)
    with lt.lazy():
        kept = [f(X) for _ in range(TIMES)]
    del f, big, kept
    gc.collect()
    assert gone() is None


@pytest.mark.slow
def test_nothing_is_left_of_functions_that_are_gone():
    def call_new_ones():
        f, rule = jax.jit(holding(1)), with_a_rule(jax.jit(holding(1)))
        for _ in range(TIMES):
            np.testing.assert_allclose(f(X) + rule(X), 2 * np.sin(X), rtol=1e-5)
        assert len(calls._calls) > 3

    with lt.lazy():
        gc.collect()
        before = len(calls._calls)
        for _ in range(20):
            call_new_ones()
        gc.collect()
        assert len(calls._calls) <= before + 2  # jnp.sin and jnp.add stay


def test_there_is_an_end_to_what_is_kept(monkeypatch):
    monkeypatch.setattr(calls, "_MOST", 8)
    functions = [jax.jit(lambda x, n=n: x + n) for n in range(20)]
    with lt.lazy():
        for _ in range(TIMES):
            for n, f in enumerate(functions):
                np.testing.assert_allclose(f(jnp.sin(X)), np.sin(X) + n, rtol=1e-5, atol=1e-6)
                assert len(calls._calls) <= 8


# ---------------------------------------------------------------- hooks


def originals():
    return pjit._infer_params, pjit._run_python_pjit, jnp.ufunc.__call__, jax.custom_jvp.__call__


def test_the_hooks_are_there_while_a_block_is_open():
    before = originals()
    with lt.lazy():
        inside = originals()
        with lt.lazy():
            assert originals() == inside
        assert originals() == inside
    assert all(a is not b for a, b in zip(inside, before, strict=True))
    assert originals() == before
    with pytest.raises(KeyError), lt.lazy():
        raise KeyError
    assert originals() == before


def test_blocks_of_two_threads():
    before = originals()
    opened, close = threading.Event(), threading.Event()

    def other():
        with lt.lazy():
            opened.set()
            close.wait(10)

    thread = threading.Thread(target=other)
    with lt.lazy():
        thread.start()
        opened.wait(10)
    assert originals() != before  # the other one is still open
    np.testing.assert_allclose(jnp.sin(X), np.sin(X), rtol=1e-5)
    assert not isinstance(jnp.sin(X), Tracer)
    close.set()
    thread.join()
    assert originals() == before


def test_what_others_have_put_there_is_called_and_stays():
    seen = []
    before = pjit._infer_params

    def theirs(inner):
        return lambda fun, ji, args, kwargs: (seen.append(fun), inner(fun, ji, args, kwargs))[1]

    with mock.patch.object(pjit, "_infer_params", theirs(before)):
        outer = pjit._infer_params
        with lt.lazy():
            np.testing.assert_allclose(jax.jit(lambda x: x + 3)(X), X + 3)
            assert seen
        assert pjit._infer_params is outer
    with lt.lazy():
        patch = mock.patch.object(pjit, "_infer_params", theirs(pjit._infer_params))
        patch.start()
    for _ in range(TIMES):  # theirs is around a hook of a block that has ended
        f = lambda x: x + 4  # noqa: E731
        with lt.lazy():
            np.testing.assert_allclose(jax.jit(f)(X), X + 4)
        assert f in seen
    patch.stop()
    np.testing.assert_allclose(jax.jit(lambda x: x + 5)(X), X + 5)
    with lt.lazy():
        np.testing.assert_allclose(jax.jit(lambda x: x + 6)(X), X + 6)
    pjit._infer_params = before


def test_another_jax(monkeypatch):
    monkeypatch.setattr(calls, "_AS_SEEN", False)
    before = originals()
    with lt.lazy():
        assert originals() == before
        for _ in range(TIMES):
            np.testing.assert_allclose(jnp.add(jnp.sin(X), 1.0), np.sin(X) + 1, rtol=1e-5, atol=1e-6)


def test_this_jax():
    assert calls._AS_SEEN
    assert not calls._is_as_seen(pjit, "_no_such_name", ())
    assert not calls._is_as_seen(pjit, "_infer_params", ("fun", "args"))
    assert not calls._is_as_seen(pjit, "_infer_params_cached", ("fun",))  # not a function of Python


def test_a_thread_that_records_and_one_that_does_not():
    errors = []
    start = threading.Barrier(2)

    def run(lazily):
        try:
            start.wait(10)
            for n in range(60):
                if lazily:
                    with lt.lazy():
                        y = jnp.add(jnp.sin(X), float(n))
                else:
                    y = jnp.add(jnp.sin(X), float(n))
                    assert not isinstance(y, Tracer)
                np.testing.assert_allclose(y, np.sin(X) + n, rtol=1e-5, atol=1e-6)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(lazily,)) for lazily in (True, False)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def test_a_tensor_of_another_thread():
    made = []

    def other():
        with lt.lazy():
            made.append(jnp.sin(X))

    with lt.lazy():
        jnp.add(jnp.sin(X), jnp.sin(X))
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        np.testing.assert_allclose(jnp.add(jnp.sin(X), made[0]), 2 * np.sin(X), rtol=1e-5)
