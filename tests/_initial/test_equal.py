"""Drawn in blocks, every initializer gives the bits that it gives by itself."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.nn import initializers as I  # noqa: N812

from lazymods._initial import keys
from lazymods._initial.fill import InitBatch, InitRequest
from lazymods._initial.kernels import BLOCK, MANY

CHUNK = BLOCK * MANY[jax.default_backend()]

# name -> initializer, smallest rank
FAMILY: dict[str, tuple[Callable[..., Any], int]] = {
    "normal": (I.normal(), 0),
    "normal wide": (I.normal(3.0), 0),
    "truncated_normal": (I.truncated_normal(0.02), 0),
    "truncated_normal skewed": (I.truncated_normal(0.5, lower=-1.0, upper=3.0), 0),
    "uniform": (I.uniform(), 0),
    "uniform wide": (I.uniform(7.0), 0),
    "lecun_normal": (I.lecun_normal(), 2),
    "lecun_uniform": (I.lecun_uniform(), 2),
    "glorot_normal": (I.glorot_normal(), 2),
    "glorot_uniform": (I.glorot_uniform(), 2),
    "he_normal": (I.he_normal(), 2),
    "he_uniform": (I.he_uniform(), 2),
    "variance_scaling, other axes": (I.variance_scaling(2.3, "fan_avg", "truncated_normal", 0, 1), 2),
    "variance_scaling, geometric": (I.variance_scaling(0.7, "fan_geo_avg", "uniform", (0, 1), -1), 2),
    "variance_scaling, of embeddings": (I.variance_scaling(1.0, "fan_in", "normal", out_axis=0), 2),
    "zeros": (I.zeros, 0),
    "ones": (I.ones, 0),
    "constant": (I.constant(0.3), 0),
}
DTYPES = ["float32", "bfloat16", "float16", "float64"]
KEY = jax.random.key(7)
NORMAL_AT_ANY_SHAPE = jax.__version_info__ < (0, 11)


def in_blocks(init: Callable[..., Any], shapes: list[tuple[int, ...]], dtype: Any, key: Any = KEY) -> list[Any]:
    data = keys.host_value(key)
    assert isinstance(data, tuple)
    return InitBatch([InitRequest(init, data, shape, dtype, shape, dtype) for shape in shapes]).fill()


def assert_same(array: Any, expected: Any, what: Any) -> None:
    """The same bits on a CPU; on a GPU, whose compiler rounds as it likes, all but the last digits."""
    if jax.default_backend() == "cpu":
        assert np.asarray(array).tobytes() == np.asarray(expected).tobytes(), what
    else:
        np.testing.assert_allclose(np.asarray(array, float), np.asarray(expected, float), rtol=1e-6, err_msg=str(what))


def is_served(shape: tuple[int, ...]) -> bool:
    """From jax 0.12 on, XLA computes normal numbers in another way where the last axis is short."""
    lengths = [n for n in shape if n != 1]
    return NORMAL_AT_ANY_SHAPE or len(lengths) < 2 or lengths[-1] >= 8


def assert_equal(init: Callable[..., Any], shapes: list[tuple[int, ...]], dtype: Any, key: Any = KEY) -> None:
    """Each by itself and all in one go."""
    for got in (in_blocks(init, shapes, dtype, key), [in_blocks(init, [s], dtype, key)[0] for s in shapes]):
        for shape, array in zip(shapes, got, strict=True):
            if array is None:
                assert not is_served(shape), shape
                continue
            expected = init(key, shape, dtype)
            assert (array.shape, array.dtype) == (expected.shape, expected.dtype)
            assert (array.weak_type, array.committed) == (expected.weak_type, expected.committed)
            assert_same(array, expected, shape)


@st.composite
def some_shapes(draw: Any, rank: int) -> list[tuple[int, ...]]:
    """Thirty shapes: small ones, and one larger than what a kernel computes at a time."""
    small = st.lists(st.integers(1, 40), min_size=rank, max_size=4).map(tuple).filter(lambda s: math.prod(s) < 20000)
    shapes = draw(st.lists(small, min_size=29, max_size=29))
    return [*shapes, (draw(st.integers(500, 900)), draw(st.integers(500, 900)))]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FAMILY)
def test_every_initializer_at_thirty_shapes(name: str, dtype: str) -> None:
    init, rank = FAMILY[name]

    @settings(max_examples=1, derandomize=True, deadline=None, database=None)
    @given(some_shapes(rank), st.integers(0, 2**32 - 1))
    def check(shapes: list[tuple[int, ...]], seed: int) -> None:
        assert_equal(init, shapes, jnp.dtype(dtype), jax.random.key(seed))

    with jax.enable_x64(dtype == "float64"):
        check()


SHORT = [(n, k) for n in (3, 40, 1000) for k in range(1, 20)] + [(7, 5, k) for k in range(1, 9)] + [(300, 4, 1)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["normal", "truncated_normal", "uniform"])
def test_where_the_last_axis_is_short(name: str) -> None:
    for shape in SHORT:
        (array,) = in_blocks(FAMILY[name][0], [shape], jnp.dtype("float32"))
        assert array is not None or not is_served(shape)
        if array is not None:
            assert_same(array, FAMILY[name][0](KEY, shape, jnp.float32), shape)


STEADY = [jnp.sqrt, jnp.square, lambda x: x**3, lambda x: 0.3 * x, lambda x: x / 0.7]


@pytest.mark.slow
@pytest.mark.parametrize("index", range(len(STEADY)))
def test_single_operations_come_out_the_same_at_every_shape(index: int) -> None:
    def drawn(key: Any, shape: Any, dtype: Any) -> Any:
        return STEADY[index](jax.random.uniform(key, shape, dtype))

    for shape in [*SHORT[::3], *((n,) for n in range(5, 60, 7))]:
        (array,) = in_blocks(drawn, [shape], jnp.dtype("float32"))
        assert array is not None
        assert_same(array, drawn(KEY, shape, jnp.float32), shape)


EDGES = [(0,), (), (1,), (BLOCK - 1,), (BLOCK,), (BLOCK + 1,), (CHUNK - 1,), (CHUNK,), (3, CHUNK // 2 + 1)]


@pytest.mark.parametrize("name", ["normal", "truncated_normal", "uniform", "zeros"])
def test_at_the_borders_of_blocks(name: str) -> None:
    assert_equal(FAMILY[name][0], EDGES, jnp.dtype("float32"))


@pytest.mark.slow
def test_initializers_and_keys_are_mixed_in_one_go() -> None:
    inits = [FAMILY[n][0] for n in ("lecun_normal", "glorot_uniform", "zeros", "normal", "he_normal")]
    shapes = [(300, 200), (7, 8), (11, 9), (257, 256), (64, 1000)]
    wanted = [(i, jax.random.key(n), s) for n, (i, s) in enumerate((i, s) for s in shapes for i in inits)]
    requests = []
    for init, key, shape in wanted:
        data = keys.host_value(key)
        assert isinstance(data, tuple)
        requests.append(InitRequest(init, data, shape, jnp.dtype("float32"), shape, jnp.dtype("float32")))
    for (init, key, shape), array in zip(wanted, InitBatch(requests).fill(), strict=True):
        assert_same(array, init(key, shape, jnp.float32), shape)


@pytest.mark.parametrize("wanted", ["bfloat16", "float16"])
def test_a_cast_comes_after_the_draw(wanted: str) -> None:
    init, shape = I.lecun_normal(), (300, 70)
    data = keys.host_value(KEY)
    assert isinstance(data, tuple)
    (got,) = InitBatch([InitRequest(init, data, shape, jnp.dtype("float32"), (70, 300), jnp.dtype(wanted))]).fill()
    expected = init(KEY, shape, jnp.float32).astype(wanted).reshape(70, 300)
    assert_same(got, expected, wanted)


# ---------------------------------------------------------------- initializers that users write


def shifted(key: Any, shape: Any, dtype: Any) -> Any:
    return jax.random.normal(key, shape, dtype) * jnp.asarray(0.37, dtype) + jnp.asarray(1.013, dtype)


def log_normal(key: Any, shape: Any, dtype: Any) -> Any:
    return jnp.exp(jax.random.normal(key, shape, dtype))


def skewed(key: Any, shape: Any, dtype: Any) -> Any:
    return jnp.expm1(jax.random.uniform(key, shape, dtype, -2, 2) * jnp.asarray(0.7, dtype))


def tiny(key: Any, shape: Any, dtype: Any) -> Any:
    return jax.random.normal(key, shape, dtype) * jnp.asarray(1e-37, dtype)


def pruned(key: Any, shape: Any, dtype: Any) -> Any:
    drawn = jax.random.normal(key, shape, dtype)
    return jnp.maximum(drawn, jnp.asarray(0, dtype))


ELEMENTWISE = [shifted, log_normal, skewed, tiny, pruned, functools.partial(shifted)]


@pytest.mark.slow
@pytest.mark.parametrize("init", ELEMENTWISE, ids=lambda f: getattr(f, "__name__", "partial"))
def test_elementwise_initializers_of_users_are_served(init: Callable[..., Any]) -> None:
    assert_equal(init, [(5, 17), (301, 203), (600, 500)], jnp.dtype("float32"))


def two_draws(key: Any, shape: Any, dtype: Any) -> Any:
    first, second = jax.random.split(key)
    return jax.random.normal(first, shape, dtype) + jax.random.uniform(second, shape, dtype)


def transposed(key: Any, shape: Any, dtype: Any) -> Any:
    return jax.random.normal(key, shape[::-1], dtype).T


def ramp(key: Any, shape: Any, dtype: Any) -> Any:
    return jax.random.normal(key, shape, dtype) + jnp.arange(math.prod(shape), dtype=dtype).reshape(shape)


def centred(key: Any, shape: Any, dtype: Any) -> Any:
    drawn = jax.random.normal(key, shape, dtype)
    return drawn - drawn.mean()


def fused(key: Any, shape: Any, dtype: Any) -> Any:
    return jax.jit(lambda x: x * np.float32(0.37) + np.float32(1.013))(jax.random.normal(key, shape, dtype))


def of_numpy(key: Any, shape: Any, dtype: Any) -> Any:
    return jnp.asarray(np.linspace(0, 1, math.prod(shape)).reshape(shape), dtype)


def numpy_itself(key: Any, shape: Any, dtype: Any) -> Any:
    return np.full(shape, 0.5, dtype)


def decided(key: Any, shape: Any, dtype: Any) -> Any:
    return jnp.ones(shape, dtype) if jax.random.uniform(key) > 0.5 else jnp.zeros(shape, dtype)


def wrong(key: Any, shape: Any, dtype: Any) -> Any:
    return jnp.zeros((*shape, 1), dtype)


def failing(key: Any, shape: Any, dtype: Any) -> Any:
    raise ValueError("no")


OTHERS = [two_draws, transposed, ramp, centred, fused, of_numpy, numpy_itself, I.orthogonal()]
# at some shape, on some version or processor, they round in another way
UNSTEADY = [lax.erf, lax.logistic, lax.tanh, lax.log, lax.exp, lax.expm1, lax.log1p]
OTHERS += [lambda *a, f=f: f(jax.random.uniform(*a)) for f in UNSTEADY]
OTHERS += [jax.random.gumbel, jax.random.logistic]  # several operations that round, in one program


@pytest.mark.parametrize("init", OTHERS, ids=lambda f: getattr(f, "__qualname__", "partial"))
def test_everything_else_is_done_as_the_initializer_does_it(init: Callable[..., Any]) -> None:
    dtype = jnp.dtype("float32")
    plan = InitBatch([InitRequest(init, (0, 7), (6, 6), dtype, (6, 6), dtype)])
    assert not plan.made and not plan.kernels()
    (array,) = plan.fill()
    assert isinstance(array, np.ndarray if init is numpy_itself else jax.Array)
    assert_same(array, init(jax.random.key(7), (6, 6), dtype), init)


@pytest.mark.parametrize("init", [decided, failing, wrong, I.delta_orthogonal()])
def test_what_cannot_be_recorded_is_left_to_the_initializer(init: Callable[..., Any]) -> None:
    assert in_blocks(init, [(6, 6)], jnp.dtype("float32")) == [None]


@pytest.mark.slow
def test_an_initializer_with_a_state_of_its_own_is_called_once() -> None:
    for draw in (lambda rng, key, shape: rng.normal(size=shape), lambda rng, key, shape: float(rng.normal())):
        calls = []

        def init(key: Any, shape: Any, dtype: Any, rng: Any, draw: Any = draw, calls: Any = calls) -> Any:
            calls.append(shape)
            return jax.random.normal(key, shape, dtype) * jnp.asarray(draw(rng, key, shape), dtype)

        got = in_blocks(functools.partial(init, rng=np.random.default_rng(3)), [(5, 6), (7, 8)], jnp.dtype("float32"))
        assert calls == [(5, 6), (7, 8)]
        rng = np.random.default_rng(3)
        for array, shape in zip(got, calls[:2], strict=True):
            assert_same(array, init(KEY, shape, jnp.float32, rng=rng), shape)


def test_left_alone_where_bits_are_drawn_in_another_way() -> None:
    data = keys.host_value(KEY)
    assert isinstance(data, tuple)
    request = InitRequest(I.normal(), data, (3, 30), jnp.dtype("float32"), (3, 30), jnp.dtype("float32"))

    def one() -> Any:
        return InitBatch([request]).fill()[0]

    assert one() is not None
    with jax.threefry_partitionable(False):
        assert one() is None
    with jax.disable_jit():
        assert one() is None
    with jax.debug_nans(True):
        assert one() is None
    seen = []
    jax.eval_shape(lambda: seen.append(one()))
    assert seen == [None]


# ---------------------------------------------------------------- keys


@settings(max_examples=200, derandomize=True, deadline=None, database=None)
@given(st.integers(0, 2**31 - 1), st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=3))
def test_keys_fold_on_the_host(seed: int, counts: list[int]) -> None:
    key = jax.random.key(seed)
    data = keys.host_value(key)
    for count in counts:
        assert isinstance(data, tuple)
        key, data = jax.random.fold_in(key, np.uint32(count)), keys.fold_in(data, count)
    assert data == keys.host_value(key)


def test_other_keys_are_not_read() -> None:
    assert keys.host_value(jax.random.key(0, impl="rbg")) is None
    assert keys.host_value(jax.random.split(KEY)) is None
    assert keys.host_value(jax.device_put(KEY, jax.devices()[0])) is None
    assert keys.host_value(jnp.float32(1)) is None
    assert keys.host_value(jnp.uint32(3)) == 3


# ---------------------------------------------------------------- statistics


def moments(values: np.ndarray) -> tuple[float, float]:
    return float(values.mean()), float(values.var())


@pytest.mark.slow
def test_ten_million_values_are_distributed_as_they_should_be() -> None:
    n = 10**7
    erf = np.vectorize(math.erf)
    for name, cdf, mean, variance in [
        ("normal", lambda x: 0.5 * (1 + erf(x / math.sqrt(2))), 0.0, 1.0),
        ("uniform", lambda x: x, 0.5, 1 / 12),
    ]:
        init = I.normal(1.0) if name == "normal" else I.uniform(1.0)
        (drawn,) = in_blocks(init, [(n,)], jnp.dtype("float32"))
        values = np.asarray(drawn, np.float64)
        got = moments(values)
        assert abs(got[0] - mean) < 5 * math.sqrt(variance / n)
        assert abs(got[1] - variance) < 5 * math.sqrt(3 / n)
        probes = np.quantile(values, np.linspace(0.001, 0.999, 999))
        # Kolmogorov-Smirnov: a distance above 2.2 / sqrt(n) has a probability of 1e-4
        assert np.abs(cdf(probes) - np.linspace(0.001, 0.999, 999)).max() < 2.2 / math.sqrt(n)
