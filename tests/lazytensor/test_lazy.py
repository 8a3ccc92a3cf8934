"""When operations run, how often, and with which settings."""

import copy
import gc
import pickle
import re
import threading
import tracemalloc
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.core import Tracer
from jax.experimental import io_callback

import lazymods as lm

lt = lm.lazytensor
X: Any = jnp.arange(8.0) - 3
W: Any = jnp.asarray(np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8))


def graphs():
    counters = lt.metrics.counters()
    return counters["CachedCompile"] + counters["UncachedCompile"]


def misses():
    return lt.metrics.counters()["UncachedCompile"]


def counted(runs, x):
    """``x``, through a function of Python that notes when it runs."""
    return jax.pure_callback(lambda v: (runs.append(1), np.asarray(v))[1], jax.ShapeDtypeStruct(x.shape, x.dtype), x)


# ---------------------------------------------------------------- cuts


def test_one_program_for_all_that_is_held():
    with lt.lazy():
        before = graphs()
        a, b = jnp.sin(X), jnp.cos(X)
        c = a * b
        assert float(c[0]) == pytest.approx(np.sin(-3) * np.cos(-3), rel=1e-5)
        assert np.asarray(a).shape == np.asarray(b).shape
        assert graphs() == before + 1


def test_sync_runs_no_more_than_is_needed():
    needed, other = [], []
    with lt.lazy():
        shared = counted(needed, X * 2)
        a, b = shared + 1, counted(other, shared) - 1
        out = lt.sync({"a": a, "n": 3})
        assert (len(needed), len(other)) == (1, 0)
        assert not isinstance(out["a"], Tracer) and out["n"] == 3
        np.testing.assert_array_equal(b, X * 2 - 1)
    assert (len(needed), len(other)) == (1, 1)


def test_what_waits_takes_each_of_the_values_that_were_synced():
    with lt.lazy():
        a, b = X + 1, X * 5
        c = a - b
        lt.sync([a, b])
        np.testing.assert_array_equal(c, (X + 1) - X * 5)


def test_functions_of_python_are_not_called_for_what_nobody_holds():
    runs = []

    def step(keep):
        with lt.lazy():
            a = counted(runs, X + 1)
            b = X * 2
            if not keep:
                del a
            lt.mark_step()
        return b

    step(True)
    assert len(runs) == 1
    step(False)
    assert len(runs) == 1
    step(True)
    assert len(runs) == 2


def test_effects_run_once_and_in_order():
    runs = []
    with lt.lazy():
        for i in range(3):
            io_callback(lambda v: runs.append(float(v)), None, X[i], ordered=True)
        y = X + 1
        lt.sync(y)
        lt.mark_step()
        lt.mark_step()
    jax.effects_barrier()
    assert runs == [-3.0, -2.0, -1.0]


def test_probes_of_jax_and_optax_do_not_cut():
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.cosine_decay_schedule(1e-2, 100)))
    with jax.numpy_dtype_promotion("standard"), lt.lazy():
        params: Any = W * 2
        state = tx.init(params)
        before = graphs()
        for _ in range(3):
            updates, state = tx.update(params * 0.1, state, params)
            params = optax.apply_updates(params, updates)
        assert graphs() == before
        lt.mark_step()
        assert graphs() == before + 1


def test_slices_and_indices_are_inputs():
    before = misses()
    for i in range(5):
        with lt.lazy():
            y = X[i : i + 3] + W[i, 0] + X[i] + X.at[i].set(2.0)[:3]
            lt.mark_step()
        want = np.asarray(X)[i : i + 3] + np.asarray(W)[i, 0] + np.asarray(X)[i]
        np.testing.assert_allclose(y, want + np.where(np.arange(3) == i, 2.0, np.asarray(X)[:3]), rtol=1e-6)
    assert misses() - before <= 2


def test_nothing_to_do():
    before = graphs()
    lt.mark_step()
    lt.wait_device_ops()
    with lt.lazy():
        lt.mark_step()
        assert lt.sync({"a": X, "b": None})["a"] is X
    assert graphs() == before


def test_inside_of_what_jax_traces_it_does_nothing():
    @jax.jit
    @lt.lazy()
    def f(x):
        y = x * 2
        assert not isinstance(y, lt.LazyTensor)
        return y

    np.testing.assert_array_equal(f(X), X * 2)
    np.testing.assert_array_equal(jax.grad(lambda x: lt.lazy()(jnp.sum)(x**2))(X), X * 2)


# ---------------------------------------------------------------- settings of the time of recording


def test_x64_belongs_to_the_operation():
    with lt.lazy():
        a = X + 1
        with jax.enable_x64(True):
            b = jnp.arange(3.0) * 1.5
        c = a * 2
    assert (b.dtype, c.dtype) == (jnp.float64, jnp.float32)
    np.testing.assert_array_equal(b, [0, 1.5, 3])
    np.testing.assert_array_equal(c, (X + 1) * 2)


def test_matmul_precision_belongs_to_the_operation():
    with lt.lazy():
        with jax.default_matmul_precision("float32"):
            a = W @ W
        b = W @ W
        assert "highest" in lt.dump(a, "hlo") and "highest" not in lt.dump(b, "hlo")
        assert lt.graph_hash(a) != lt.graph_hash(b)


def test_debug_nans_raises_what_jax_raises():
    y: Any = None
    with jax.debug_nans(True):
        with pytest.raises(FloatingPointError) as want:
            jnp.log(X)
        with pytest.raises(FloatingPointError) as got, lt.lazy():
            y = jnp.log(X)
            float(y[0])
    assert str(got.value) == str(want.value)
    del y  # the error's traceback keeps it pending


def test_disable_jit():
    with lt.lazy(), jax.disable_jit():
        y = jnp.sin(X) * 2
        z = y if y.sum() > 0 else -y
    np.testing.assert_allclose(z, np.abs(np.sin(X).sum()) / np.sin(X).sum() * 2 * np.sin(X), rtol=1e-5)


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")  # by JAX itself
@pytest.mark.parametrize("x", [1e300, -1e300, float("nan"), 2**31 - 1, -(2**31), True], ids=str)
def test_numbers_as_operands(x):
    with jax.numpy_dtype_promotion("standard"):
        with lt.lazy():
            once, twice = X * x, X * x
        want = X * x
    np.testing.assert_array_equal(once, want)
    np.testing.assert_array_equal(twice, want)
    assert once.dtype == want.dtype


def test_a_number_that_is_too_large():
    with lt.lazy():
        y = (X + 1) * 3
        for _ in range(2):
            with pytest.raises(OverflowError):
                _ = y * 2**40
    np.testing.assert_array_equal(y, (X + 1) * 3)


# ---------------------------------------------------------------- as an array


def test_is_an_array_to_those_who_ask():
    with lt.lazy():
        y: Any = X * 2
        assert isinstance(y, jax.Array) and y.shape == (8,) and y.dtype == jnp.float32
        assert isinstance(y, lt.LazyTensor) and not y.is_ready()
        assert y.devices() == X.devices() and y.sharding == X.sharding
        y.block_until_ready()
        assert y.is_ready() and not y.is_deleted() and y.is_fully_addressable
        assert (str(y), repr(y), f"{y[0]:.1f}") == (str(X * 2), repr(jnp.asarray(X * 2)), "-6.0")
        assert y.tolist() == (np.asarray(X) * 2).tolist() and y[1].item() == -4 and y.tobytes() == (X * 2).tobytes()
        assert [hex(y[7].astype(int)), oct(y[7].astype(int)), complex(y[7])] == ["0x8", "0o10", 8]
        assert [float(v) for v in reversed(y)] == [float(v) for v in y][::-1]
        assert copy.copy(y) is y and (copy.deepcopy(y) == y).all() and (pickle.loads(pickle.dumps(y)) == y).all()
        taking: Any = np if jax.default_backend() == "cpu" else jnp  # numpy takes no memory of a GPU
        np.testing.assert_array_equal(taking.from_dlpack(y), X * 2)


def test_used_by_jax_after_the_block():
    with lt.lazy():
        y = X * 3
    np.testing.assert_array_equal(jax.device_put(y), X * 3)
    np.testing.assert_array_equal(jax.jit(lambda a: a + y)(X), X * 4)
    np.testing.assert_array_equal(jax.vmap(lambda a: a + 1)(y), X * 3 + 1)
    np.testing.assert_array_equal(jax.grad(lambda a: (a * y).sum())(X), X * 3)
    assert not isinstance(jnp.sin(y), Tracer)


def test_variables_of_outside_and_inside():
    outside: Any = nnx.Linear(8, 2, rngs=nnx.Rngs(0))
    with lt.lazy():
        outside.bias[...] += 1.0
        inside: Any = nnx.Linear(8, 2, rngs=nnx.Rngs(0))
    inside.bias[...] += 1.0
    np.testing.assert_array_equal(outside(X), inside(X))


def test_mutable_references():
    with lt.lazy():
        ref = jax.new_ref(X * 2)
        ref[0] = 5.0
        y = ref[...] + 1
    np.testing.assert_array_equal(y, (X * 2).at[0].set(5.0) + 1)


def test_shard_map():
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("d")
    f = jax.shard_map(lambda a: a * 2 + jax.lax.psum(a, "d"), mesh=mesh, in_specs=spec, out_specs=spec)
    with lt.lazy():
        before = graphs()
        y, g = f(X + 1), jax.grad(lambda x: f(x).sum())(X)
        assert graphs() == before
    np.testing.assert_array_equal(y, 3 * X + 3)
    np.testing.assert_array_equal(g, jnp.full(8, 3.0))


# ---------------------------------------------------------------- threads and memory


def test_a_pending_value_is_computed_once_for_all_threads():
    runs, got = [], []
    with lt.lazy():
        y = counted(runs, X * 2) + 1
        threads = [threading.Thread(target=lambda: got.append(np.asarray(y))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(runs) == 1 and len(got) == 4
    np.testing.assert_array_equal(got, [X * 2 + 1] * 4)


def test_no_array_and_no_module_stays():
    x: Any
    loss: Any
    model: Any = nnx.Linear(8, 2, rngs=nnx.Rngs(0))
    with lt.lazy():
        x = X * 2
        loss, grads = lt.value_and_grad(lambda m: m(x).sum())(model)
        other = nnx.grad(lambda m: m(x).sum())(model)
        lt.mark_step()
    alive = [weakref.ref(a) for a in (model, x.cell.value, loss.cell.value, model.kernel.get_raw_value())]
    model = x = loss = None
    del grads, other
    gc.collect()
    assert [a() for a in alive] == [None] * 4


@pytest.mark.slow
def test_memory_stays_flat():
    def step(i, w):
        with lt.lazy():
            try:
                w = w - 0.01 * jax.grad(lambda w: (jnp.tanh(X @ w) ** 2).sum() * (i % 3))(w)
                if i % 5 == 0 and w.sum() > 0:
                    w = w * 0.99
                if i % 7 == 0:
                    raise KeyError(i)
            except KeyError:
                w = w + 0
            lt.mark_step()
        return w

    w = W
    for i in range(60):
        w = step(i, w)
    gc.collect()
    tracemalloc.start()
    start = tracemalloc.get_traced_memory()[0]
    for i in range(60, 260):
        w = step(i, w)
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0] - start
    tracemalloc.stop()
    assert grown < 300_000


# ---------------------------------------------------------------- metrics and dumps


def test_counters_timers_and_summary():
    lt.metrics.reset()
    for n in (3, 3, 4):
        with lt.lazy():
            y = jnp.sinh(jnp.ones(n)) * 2
            if y.sum() > 0:
                y = y + 1
            lt.mark_step()
    counters = lt.metrics.counters()
    assert (counters["MarkStep"], counters["Forced:bool"]) == (3, 3)
    assert counters["UncachedCompile"] + counters["CachedCompile"] == 6
    assert counters["CreateLazyTensor"] > counters["DestroyLazyTensor"] > 0
    assert {"MarkStep", "Forced:bool", "CachedCompile"} <= set(lt.metrics.counter_names())
    assert lt.metrics.timers()["Trace"] > 0
    text = lt.metrics.summary()
    assert re.search(r"3 x .*test_lazy\.py:\d+ \(bool\)", text)
    assert "ones() -> f32[3] became" in text or "broadcast_in_dim" in text
    lt.metrics.reset()
    assert not any(lt.metrics.counters().values()) and not any(lt.metrics.timers().values())


def test_dumps():
    with lt.lazy():
        y, other = jax.lax.mul(jax.lax.sin(X), X), jax.lax.cosh(X)
        text, dot = lt.dump([y]), lt.dump([y], "dot")
    assert text == "%0 = sin(array: f32[8]) -> f32[8]\n%1 = mul(%0, array: f32[8]) -> f32[8]\nreturn %1"
    assert dot == (
        "digraph program {\n"
        '  node [shape=box, fontname="monospace"];\n'
        '  n0 [label="sin\\nf32[8]"];\n'
        '  i0_0 [shape=ellipse, label="array: f32[8]"];\n'
        "  i0_0 -> n0;\n"
        '  n1 [label="mul\\nf32[8]"];\n'
        "  n0 -> n1;\n"
        '  i1_1 [shape=ellipse, label="array: f32[8]"];\n'
        "  i1_1 -> n1;\n"
        '  out0 [shape=ellipse, label="result 0"];\n'
        "  n1 -> out0;\n"
        "}"
    )
    del other


def test_dump_of_another_format():
    with pytest.raises(lm.LazyError) as caught:
        lt.dump(X, "svg")
    assert str(caught.value) == (
        "lm.lazytensor.dump\n"
        "  got:    format='svg'\n"
        '  needed: one of "text", "dot" and "hlo"\n'
        '  write:  lm.lazytensor.dump(tree, format="text")'
    )


def test_cache_size():
    before = lm.set_cache_size(2)
    try:
        for n in range(1, 6):
            with lt.lazy():
                np.testing.assert_array_equal(jnp.ones(n) * 2 + n, np.full(n, 2.0 + n))
        assert lt.cache_info() == (2, 2)
    finally:
        assert lm.set_cache_size(before) == 2
