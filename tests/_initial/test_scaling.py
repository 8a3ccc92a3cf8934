"""The scalar by which an initializer multiplies, found without drawing."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.nn import initializers as I  # noqa: N812

from lazymods._initial import program, scaling

TRUNCATED = 0.87962566103423978  # the deviation of a normal distribution within two of its deviations
DTYPES = ["float32", "bfloat16", "float16"]


def expected(name: str, fan_in: int, fan_out: int, dtype: Any) -> Any:
    """The formulas of Glorot and Bengio (2010), He et al. (2015), LeCun et al. (1998), executed by JAX one by one."""
    kind, _, distribution = name.partition("_")
    variance = {"lecun": 1.0 / fan_in, "he": 2.0 / fan_in, "glorot": 1.0 / ((fan_in + fan_out) / 2)}[kind]
    variance = jnp.array(variance, dtype)
    return jnp.sqrt(3 * variance) if distribution == "uniform" else jnp.sqrt(variance) / jnp.array(TRUNCATED, dtype)


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_the_factor_is_that_of_the_formula(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from([f"{k}_{d}" for k in ("lecun", "he", "glorot") for d in ("normal", "uniform")]))
    field, *fans = (data.draw(st.integers(1, top)) for top in (9, 800, 800))
    dtype = np.dtype(data.draw(st.sampled_from(DTYPES)))
    found = scaling.factor(getattr(I, name)(), (field, *fans), dtype)
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        wanted = expected(name, field * fans[0], field * fans[1], dtype)
    assert np.asarray(found).tobytes() == np.asarray(wanted).tobytes()
    assert found.dtype == dtype


def test_factors_of_the_plain_ones_are_what_they_were_given() -> None:
    for init in (I.uniform(0.3), I.truncated_normal(0.3)):
        assert scaling.factor(init, (7,), np.dtype("float32")) == np.float32(0.3)


def test_a_factor_that_xla_takes_for_zero_is_refused() -> None:
    with pytest.raises(FloatingPointError):
        scaling.factor(I.lecun_normal(), (70000, 2), np.dtype("float16"))  # a variance of 1.4e-5
    with pytest.raises(ValueError, match="Must be at least 2D"):
        scaling.factor(I.lecun_normal(), (3,), np.dtype("float32"))


def mine(key: Any, shape: Any, dtype: Any) -> Any:
    return jax.random.normal(key, shape, dtype) * 2


@pytest.mark.parametrize("init", [mine, I.orthogonal(), I.zeros, functools.partial(I.lecun_normal(), dtype="float32")])
def test_no_other_initializer_is_taken_for_one_of_these(init: Callable[..., Any]) -> None:
    assert scaling.drawing_one(init) is None


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sampler_is_traced_for_two_shapes_and_no_more(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read, shapes = program._read_anew, []
    monkeypatch.setattr(
        program, "_read_anew", lambda init, shape, *a, **k: shapes.append(shape) or read(init, shape, *a, **k)
    )
    init = I.variance_scaling(1.3, "fan_avg", "uniform")
    for width in range(2, 40):
        assert program.read(init, (width, 3), np.dtype(dtype)).program is not None
    assert len(shapes) == (2 if jax.default_backend() == "cpu" else 38)
