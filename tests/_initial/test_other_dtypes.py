"""Initializers that return another dtype than they are asked for, or numpy: lazy layers hold what explicit ones do."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import lazymods as lm


def half(key: Any, shape: Any, dtype: Any = None) -> jax.Array:
    return jax.random.normal(key, shape, jnp.float16)


def half_ones(key: Any, shape: Any, dtype: Any = None) -> jax.Array:
    return jnp.ones(shape, jnp.bfloat16)


def of_numpy(key: Any, shape: Any, dtype: Any = None) -> np.ndarray:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def of_numpy_half(key: Any, shape: Any, dtype: Any = None) -> np.ndarray:
    return np.full(shape, 2, np.float16)


INITS: dict[str, Callable[..., Any]] = {f.__name__: f for f in (half, half_ones, of_numpy, of_numpy_half)}


class Held(nnx.Module):
    """Holds what an initializer returns in a Variable, and as it is."""

    def __init__(self, n: int, table_init: Any, *, rngs: nnx.Rngs) -> None:
        self.table = nnx.Param(table_init(rngs.params(), (n, 2), jnp.float32))
        self.raw = nnx.data(table_init(rngs.params(), (n,), jnp.float32))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x.astype(jnp.float32) @ jnp.asarray(self.table[...], jnp.float32)


LazyHeld = lm.lazy(Held, infer=lambda config, x: {"n": x.shape[-1]})


def pair(kind: str, init: Any) -> tuple[Any, Any]:
    if kind == "Linear":
        options = {"kernel_init": init, "bias_init": init, "dtype": jnp.float32}
        return lm.LazyLinear(3, **options, rngs=nnx.Rngs(0)), nnx.Linear(4, 3, **options, rngs=nnx.Rngs(0))
    return LazyHeld(table_init=init, rngs=nnx.Rngs(0)), Held(4, init, rngs=nnx.Rngs(0))


def values(model: Any) -> dict[Any, Any]:
    flat = nnx.to_flat_state(nnx.state(model))
    return {path: v.get_raw_value() if isinstance(v, nnx.Variable) else v for path, v in flat}


def assert_equal(model: Any, want: Any) -> None:
    assert not lm.is_lazy(model)
    assert nnx.graphdef(model) == nnx.graphdef(want)
    got, wanted = values(model), values(want)
    assert got.keys() == wanted.keys()
    for path, value in wanted.items():
        assert got[path].dtype == value.dtype, path
        assert isinstance(got[path], np.ndarray) == isinstance(value, np.ndarray), path
        np.testing.assert_array_equal(np.asarray(got[path]), np.asarray(value), err_msg=str(path))


@pytest.mark.parametrize("way", ["call", "spec", "lm.jit", "load", "file"])
@pytest.mark.parametrize("kind", ["Linear", "Held"])
@pytest.mark.parametrize("name", INITS)
def test_every_way_gives_what_the_constructor_holds(name: str, kind: str, way: str, tmp_path: Path) -> None:
    lazy, want = pair(kind, INITS[name])
    x = jnp.ones((2, 4))
    if way == "call":
        np.testing.assert_array_equal(lazy(x), want(x))
    elif way == "spec":
        lm.materialize(lazy, jax.ShapeDtypeStruct(x.shape, x.dtype))
    elif way == "lm.jit":
        np.testing.assert_array_equal(lm.jit(lambda m, x: m(x))(lazy, x), lm.jit(lambda m, x: m(x))(want, x))
    elif way == "load":
        lm.load_state_dict(lazy, lm.state_dict(want))
    else:
        lm.save(want, tmp_path / "m.safetensors")
        lm.load(lazy, tmp_path / "m.safetensors")
    assert_equal(lazy, want)


@pytest.mark.parametrize("report", [lm.infer_shapes, lm.summary, lm.materialize])
@pytest.mark.parametrize("name", INITS)
def test_reports_tell_the_dtypes_of_the_explicit_layer(name: str, report: Any) -> None:
    init, x = INITS[name], jnp.ones((2, 4), jnp.float32)
    lazy, want = pair("Linear", init)
    parameters = {p.name: p.dtype for p in report(lazy, x).rows[0].parameters}
    assert parameters == {"kernel": want.kernel[...].dtype, "bias": want.bias[...].dtype}


def test_one_that_may_have_a_state_is_not_asked() -> None:
    calls: list[Any] = []

    def counting(key: Any, shape: Any, dtype: Any) -> jax.Array:
        calls.append(shape)
        return jnp.ones(shape, jnp.float16)

    rng = np.random.default_rng(0)
    drawn = rng.bit_generator.state
    stateful = [counting, functools.partial(counting), lambda key, shape, dtype: rng.standard_normal(shape)]
    stateful.append(lambda key, shape, dtype: np.random.standard_normal(shape))
    everywhere = str(np.random.get_state())
    for init in stateful:
        lazy = lm.LazyLinear(3, kernel_init=init, rngs=nnx.Rngs(0))
        lm.infer_shapes(lazy, jnp.ones((2, 4)))
        lm.load_state_dict(lazy, lm.state_dict(nnx.Linear(4, 3, rngs=nnx.Rngs(0))))
    assert calls == [] and rng.bit_generator.state == drawn
    assert str(np.random.get_state()) == everywhere


@pytest.mark.parametrize("way", ["call", "spec"])
def test_an_initializer_with_a_state_of_its_own_is_called_once(way: str) -> None:
    def counting() -> Callable[..., Any]:
        rng = np.random.default_rng(0)
        return lambda key, shape, dtype: rng.standard_normal(shape).astype(np.float16)

    mine, its = counting(), counting()
    lazy = lm.LazyLinear(3, kernel_init=mine, bias_init=mine, dtype=jnp.float32, rngs=nnx.Rngs(0))
    want = nnx.Linear(4, 3, kernel_init=its, bias_init=its, dtype=jnp.float32, rngs=nnx.Rngs(0))
    if way == "call":
        lazy(jnp.ones((2, 4)))
    else:
        lm.materialize(lazy, jnp.ones((2, 4)))
    assert_equal(lazy, want)


def test_a_dtype_that_is_asked_for_later_is_what_the_value_gets() -> None:
    lazy, want = pair("Linear", half)
    lazy.kernel.dtype = jnp.bfloat16
    lazy(jnp.ones((2, 4)))
    assert lazy.kernel[...].dtype == jnp.bfloat16
    np.testing.assert_array_equal(lazy.kernel[...], want.kernel[...].astype(jnp.bfloat16))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_materialize_casts_to_the_dtype_that_it_is_given(dtype: Any) -> None:
    lazy, want = pair("Linear", half)
    lm.materialize(lazy, jnp.ones((2, 4)), dtype=dtype)
    assert lazy.kernel[...].dtype == dtype
    np.testing.assert_array_equal(lazy.kernel[...], want.kernel[...].astype(dtype))


def test_what_is_computed_from_such_a_value_is_refused_by_name() -> None:
    class Scaled(nnx.Module):
        def __init__(self, n: int, table_init: Any, *, rngs: nnx.Rngs) -> None:
            self.table = nnx.Param(2.0 * table_init(rngs.params(), (n, 2), jnp.float32))

        def __call__(self, x: jax.Array) -> jax.Array:
            return x @ self.table[...]

    lazy = lm.lazy(Scaled, infer=lambda config, x: {"n": x.shape[-1]})(table_init=half, rngs=nnx.Rngs(0))
    with pytest.raises(lm.ConfigurationError, match=r"an initializer that returns f16\[4,2\], from which"):
        lazy(jnp.ones((2, 4)))
    assert lm.is_lazy(lazy)
