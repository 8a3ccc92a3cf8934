"""What happens when operations fail: what can be computed is, and the rest says why not, every time."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import lazymods as lm
from lazymods.lazytensor import executor

lt = lm.lazytensor
X: Any = jnp.arange(8.0) - 3


def failing(x):
    def fail(_):
        raise ValueError("bad callback")

    return jax.pure_callback(fail, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def shown(x):
    return jax.pure_callback(np.asarray, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


@pytest.fixture(autouse=True)
def forgotten():
    """Let JAX forget what a callback failed with: it keeps that, and raises it when any test waits for effects."""
    yield
    jax.block_until_ready(shown(X))


def test_a_value_that_does_not_fail_survives_one_that_does():
    good: Any = None
    broken: Any = None
    with pytest.raises(Exception, match="bad callback"), lt.lazy():
        good, broken = X * 3, failing(X + 1)
        np.testing.assert_array_equal(good, X * 3)  # everything fails together, so it is computed alone
        lt.mark_step()
        jax.block_until_ready(broken)  # on a GPU nothing is known of a failure before
    np.testing.assert_array_equal(good + 1, X * 3 + 1)
    for _ in range(2):
        with pytest.raises(Exception, match="bad callback"):
            np.asarray(broken)
    with pytest.raises(Exception, match="bad callback"):
        np.asarray(broken + 1)


def test_what_depends_on_a_failure_fails_too():
    with lt.lazy():
        broken = failing(X + 1)
        with pytest.raises(Exception, match="bad callback"):
            np.asarray(broken)
        later = broken * 2
        with pytest.raises(Exception, match="bad callback"):
            np.asarray(later)
        good = X + 5
    np.testing.assert_array_equal(good, X + 5)


def test_a_block_that_raises_does_not_hide_why():
    good: Any = None
    broken: Any = None
    with pytest.raises(KeyError, match="why"), lt.lazy():
        broken, good = failing(X), X * 3
        raise KeyError("why")
    np.testing.assert_array_equal(good, X * 3)
    assert isinstance(broken, jax.Array)


def unknown(x):
    """Fail when it is compiled: there is nothing of that name."""
    return jax.ffi.ffi_call("lazymods_nothing", jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


UNKNOWN = pytest.raises(jax.errors.JaxRuntimeError, match="lazymods_nothing")


def test_what_fails_in_a_cut_takes_nothing_with_it():
    with lt.lazy():
        before, broken, after = X + 1, unknown(X), X * 5
        both = broken + after
        with UNKNOWN:
            lt.mark_step()
        lt.mark_step()  # what failed is not tried again until somebody wants it
        with UNKNOWN:
            np.asarray(both)
        new = before - after
        lt.mark_step()
        np.testing.assert_array_equal(new, (X + 1) - X * 5)
        more = broken * 2  # of which nothing was asked yet
        with UNKNOWN:
            lt.mark_step()
        later = X * 6
    np.testing.assert_array_equal(before, X + 1)
    np.testing.assert_array_equal(after, X * 5)
    np.testing.assert_array_equal(later, X * 6)
    for value in (broken, both, more):
        for _ in range(2):
            with UNKNOWN:
                np.asarray(value)


def test_what_fails_in_a_sync_takes_nothing_with_it():
    with lt.lazy():
        shared = X + 1
        good, broken = shared * 2, unknown(shared)
        with UNKNOWN:
            lt.sync([good, broken])
        np.testing.assert_array_equal(good, (X + 1) * 2)
        with UNKNOWN:
            lt.sync([broken])
        np.testing.assert_array_equal(shared, X + 1)
        lt.mark_step()


def test_what_failed_is_not_tried_at_every_operation_of_a_large_graph():
    with lt.lazy(max_ops=20):
        broken, good = unknown(X), X * 5
        before = lt.metrics.counters().get("AutomaticCut", 0)
        for _ in range(120):
            good = good + 1  # which does not fail: it has nothing to do with what is broken
        assert 1 <= lt.metrics.counters()["AutomaticCut"] - before <= 6
        with UNKNOWN:
            np.asarray(broken)
    np.testing.assert_array_equal(good, X * 5 + 120)


def test_other_settings_do_not_let_an_operation_fail_for_another():
    with lt.lazy():
        with jax.debug_nans(True):
            broken, good = jnp.log(X), X * 5
        other = X + 1  # what is pending has to run first, with the settings that it was recorded in
        with pytest.raises(FloatingPointError, match="nan"):
            np.asarray(broken)
        np.testing.assert_array_equal(good, X * 5)
        np.testing.assert_array_equal(other, X + 1)


def test_an_effect_that_fails_is_raised_by_the_operation_that_makes_it_run():
    with lt.lazy():
        with jax.debug_nans(True):
            io_callback(_fails, None, X * 2)
        with pytest.raises(Exception, match="on purpose"):
            _ = X + 1
        np.testing.assert_array_equal(X + 1, np.asarray(X) + 1)


def _fails(_):
    raise ValueError("on purpose")


@pytest.mark.parametrize("inside", [False, True], ids=["callback", "jitted callback"])
def test_a_callback_that_fails_while_its_program_runs_takes_no_value_with_it(inside):
    def call(x):
        return jax.pure_callback(_fails, jax.ShapeDtypeStruct((8,), jnp.float32), x)

    with lt.lazy():
        weights = X * 3
        broken = (jax.jit(call) if inside else call)(weights)
        other = weights + 1
        for _ in range(2):
            with pytest.raises(Exception, match="on purpose"):
                jax.block_until_ready(broken)
        np.testing.assert_array_equal(weights, X * 3)
        np.testing.assert_array_equal(other, X * 3 + 1)


def test_what_depends_on_a_failure_does_not_hinder_a_cut():
    with lt.lazy():
        broken, good = unknown(X), X * 5
        with UNKNOWN:
            lt.sync([broken])
        long: Any = broken + good
        for _ in range(2000):
            long = long + 1
        lt.mark_step()
        counters = lt.metrics.counters()
        jax.block_until_ready(good)
        assert lt.metrics.counters() == counters  # it was known
        np.testing.assert_array_equal(good, X * 5)
        with UNKNOWN:
            np.asarray(long)


def test_an_effect_that_fails_is_not_passed_over():
    def fail(_):
        raise ValueError("bad effect")

    with lt.lazy():
        good = X * 5
        io_callback(fail, None, X, ordered=True)
        with pytest.raises(Exception, match="bad effect"):
            float(good.sum())
        lt.mark_step()  # it has run
        np.testing.assert_array_equal(good, X * 5)
        result = io_callback(fail, jax.ShapeDtypeStruct((), X.dtype), X)
        good = X * 6
        with pytest.raises(Exception, match="bad effect"):
            np.asarray(good)
        for _ in range(2):
            with pytest.raises(Exception, match="bad effect"):
                np.asarray(result + 1)
        np.testing.assert_array_equal(good, X * 6)


def test_an_interrupt_loses_nothing(monkeypatch):
    def interrupted(*args):
        raise KeyboardInterrupt

    with lt.lazy():
        a, b = X + 1, X * 5
        for ask in (lt.mark_step, lambda: lt.sync([a]), lambda: np.asarray(a)):
            with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                patch.setattr(executor, "execute", interrupted)
                ask()
    np.testing.assert_array_equal(a - b, (X + 1) - X * 5)


def test_errors_of_shapes_come_at_the_operation():
    with lt.lazy():
        y = X + 1
        with pytest.raises(TypeError, match="dot_general"):
            _ = y @ jnp.ones((3, 3))
        with pytest.raises(TypeError):
            bool(y + jnp.ones((3,)))
        with pytest.raises(ValueError, match="truth value"):
            bool(y)


F16 = jax.lax.DotAlgorithmPreset.F16_F16_F32
HALF: Any = jnp.asarray([[1.0, 2.0], [3.0, 4.0]], jnp.float16)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="other devices have the algorithm")
@pytest.mark.parametrize(
    "product",
    [
        lambda x: jnp.dot(x, x, precision=F16, preferred_element_type=jnp.float32),
        lambda x: jnp.einsum("ij,jk->ik", x, x, precision=F16, preferred_element_type=jnp.float32),
        lambda x: jax.vmap(lambda y: jnp.dot(y, y, precision=F16))(x),
        lambda x: jax.lax.dot(x, x, precision="F16_F16_F32"),
    ],
)
def test_a_product_that_the_device_cannot_do_fails_at_the_operation(product):
    with lt.lazy():
        for _ in range(3):
            with pytest.raises(ValueError, match="F16_F16_F32"):
                product(HALF * 1)


@pytest.mark.slow
def test_what_is_done_instead_is_done_in_a_block_too():
    query = jax.random.normal(jax.random.key(0), (1, 4, 2, 3), jnp.float16)

    def attended(x):  # jax tries an algorithm, and takes another one where it fails
        return jax.nn.dot_product_attention(x, x, x)

    def loss(x):
        return jnp.sum(attended(x).astype(jnp.float32))

    with jax.numpy_dtype_promotion("standard"):
        want = attended(query), jax.grad(loss)(query)
        with lt.lazy():
            got = attended(query * 1), jax.grad(loss)(query * 1)
    for g, w in zip(got, want, strict=True):
        assert g.dtype == w.dtype
        np.testing.assert_allclose(np.asarray(g, np.float32), np.asarray(w, np.float32), rtol=2e-3, atol=2e-3)


def test_a_product_by_an_algorithm_that_the_device_has_is_recorded():
    x = jnp.asarray([[1.0, 2.0], [3.0, 4.0]])
    with lt.lazy():
        y = jnp.dot(x, x, precision=jax.lax.DotAlgorithmPreset.F32_F32_F32)
        assert isinstance(y, lt.LazyTensor) and not y.is_ready()
    np.testing.assert_array_equal(y, np.array([[7, 10], [15, 22]], np.float32))
