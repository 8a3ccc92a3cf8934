"""Values from outside: what is an array, what casts to what, and the range of integers."""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from helpers import assert_same_bits

import lazymods as lm
from lazymods.state.values import same_values


def holder(lazy: bool, shape: tuple[int, ...], dtype: Any) -> Any:
    """A model of one parameter ``w``."""
    if lazy:
        return nnx.Dict(w=lm.UninitializedParameter(shape, dtype=dtype))
    return nnx.Dict(w=nnx.Param(jnp.zeros(shape, dtype)))


ready_or_lazy = pytest.mark.parametrize("lazy", [True, False], ids=["lazy", "ready"])

FLOATS = ["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]
INTEGERS = ["int8", "uint8", "int16", "uint16", "int32", "uint32"]


@pytest.mark.parametrize("given", [*FLOATS, *INTEGERS, "int64", "float64", "bool", "int4"])
@pytest.mark.parametrize("param", [*FLOATS, *INTEGERS, "bool", "complex64", "int4"])
@ready_or_lazy
def test_casts_to_the_dtype_of_the_parameter(lazy: bool, param: str, given: str) -> None:
    values = np.array([0, 1, 1, 0]).astype(jnp.dtype(given))
    model = holder(lazy, (4,), param)
    lm.load_state_dict(model, {"w": values})
    assert_same_bits(model.w.get_value(), jnp.array([0, 1, 1, 0]).astype(param))


@pytest.mark.parametrize("param, given", [("bfloat16", "float32"), ("float16", "float32"), ("float16", "bfloat16"),
                                          ("float32", "float64")])
@ready_or_lazy
def test_rounding_is_that_of_numpy(lazy: bool, param: str, given: str) -> None:
    values = np.random.default_rng(0).standard_normal(100).astype(jnp.dtype(given))
    model = holder(lazy, (100,), param)
    lm.load_state_dict(model, {"w": values})
    assert np.asarray(model.w.get_value()).tobytes() == values.astype(jnp.dtype(param)).tobytes()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int32", "complex64", "bool"])
def test_a_parameter_of_no_dtype_takes_that_of_the_value(dtype: str) -> None:
    model = nnx.Dict(w=lm.UninitializedParameter())
    lm.load_state_dict(model, {"w": jnp.ones((2, 3), dtype)})
    assert_same_bits(model.w.get_value(), jnp.ones((2, 3), dtype))


REFUSED: dict[str, tuple[str, Any, str]] = {
    "complex-float": ("float32", np.ones(2, np.complex64), "c64[2] would lose its imaginary part"),
    "complex-int": ("int32", np.ones(2, np.complex128), "c128[2] would lose its imaginary part"),
    "complex-bool": ("bool", np.ones(2, np.complex64), "c64[2] would lose its imaginary part"),
    "int8-high": ("int8", np.array([0, 128]), "numbers from -128 to 127, for i8"),
    "int8-low": ("int8", np.array([0, -129]), "numbers from -128 to 127, for i8"),
    "uint8-negative": ("uint8", np.array([0, -1]), "numbers from 0 to 255, for u8"),
    "uint8-float": ("uint8", np.array([0, 256.0]), "numbers from 0 to 255, for u8"),
    "int4": ("int4", np.array([0, 8]), "numbers from -8 to 7, for i4"),
    "int32-wide": ("int32", np.array([0, 2**40]), "numbers from -2147483648 to 2147483647, for i32"),
    "int32-uint32": ("int32", np.array([0, 2**31], np.uint32), "numbers from -2147483648 to 2147483647, for i32"),
    "uint32-uint64": ("uint32", np.array([0, 2**63], np.uint64), "numbers from 0 to 4294967295, for u32"),
    "int32-float": ("int32", np.array([0, 3e9], np.float32), "numbers from -2147483648 to 2147483647, for i32"),
    "fraction": ("int32", np.array([0, 0.5], np.float32), "whole numbers, for i32"),
    "nan": ("int32", np.array([0, np.nan], np.float32), "whole numbers, for i32"),
    "infinity": ("uint8", np.array([0, np.inf], np.float32), "whole numbers, for u8"),
    "bool-two": ("bool", np.array([0, 2]), "only zeros and ones, for a boolean"),
    "bool-nan": ("bool", np.array([0, np.nan], np.float32), "only zeros and ones, for a boolean"),
    "no cast": ("float8_e4m3fn", np.ones(2, ml_dtypes.float8_e8m0fnu), "of a dtype that numpy casts to f8_e4m3fn"),
}


@pytest.mark.parametrize("param, values, reason", REFUSED.values(), ids=REFUSED)
@ready_or_lazy
def test_what_would_be_lost_is_refused(lazy: bool, param: str, values: np.ndarray, reason: str) -> None:
    model = holder(lazy, (2,), param)
    with pytest.raises(lm.StateDictError) as caught:
        lm.load_state_dict(model, {"w": values})
    assert reason in str(caught.value)
    assert lm.is_lazy(model.w) if lazy else not np.asarray(model.w.get_value()).any()


def test_an_integer_out_of_range_of_any_dtype_is_not_cut() -> None:
    model = nnx.Dict(w=lm.UninitializedParameter())
    try:
        lm.load_state_dict(model, {"w": np.array([2**40, 1])})
    except lm.StateDictError as error:
        assert "numbers from" in str(error) and lm.is_lazy(model.w)
    else:
        assert np.asarray(model.w.get_value()).tolist() == [2**40, 1]


@pytest.mark.parametrize("edge", [np.iinfo(np.int32).min, np.iinfo(np.int32).max])
def test_the_edges_of_the_range_fit(edge: int) -> None:
    model = holder(False, (1,), "int32")
    lm.load_state_dict(model, {"w": np.array([edge], np.int64)})
    assert np.asarray(model.w.get_value()).tolist() == [edge]


def test_an_empty_array_casts_to_anything() -> None:
    for param in ("int8", "bool", "float16"):
        model = holder(False, (0, 3), param)
        lm.load_state_dict(model, {"w": np.zeros((0, 3), np.float64)})
        assert model.w.get_value().shape == (0, 3)


# ---------------------------------------------------------------- what is an array


class Foreign:
    """An array of another library: a shape, and a way to numpy."""

    shape = (2, 3)

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return np.full((2, 3), 2.0, np.float32)


ARRAYS: dict[str, Any] = {
    "jax": jnp.full((2, 3), 2.0),
    "numpy": np.full((2, 3), 2.0),
    "fortran": np.asfortranarray(np.full((2, 3), 2.0)),
    "view": np.full((3, 4), 2.0).T[::2],
    "big-endian": np.full((2, 3), 2.0, ">f4"),
    "read-only": np.broadcast_to(np.float32(2.0), (2, 3)),
    "bfloat16": np.full((2, 3), 2.0, ml_dtypes.bfloat16),
    "variable": nnx.Param(jnp.full((2, 3), 2.0)),
    "foreign": Foreign(),
}


@pytest.mark.parametrize("value", ARRAYS.values(), ids=ARRAYS)
@ready_or_lazy
def test_arrays_of_every_kind(lazy: bool, value: Any) -> None:
    model = holder(lazy, (2, 3), "float32")
    given = value[:, :3] if isinstance(value, np.ndarray) else value
    lm.load_state_dict(model, {"w": given})
    assert isinstance(model.w.get_value(), jax.Array)
    assert_same_bits(model.w.get_value(), jnp.full((2, 3), 2.0))


@pytest.mark.parametrize("value", [2.0, 2, True, np.float32(2.0), jnp.float32(2.0), np.array(2.0)], ids=repr)
def test_numbers_are_arrays_of_no_axes(value: Any) -> None:
    model = holder(False, (), "float32")
    lm.load_state_dict(model, {"w": value})
    assert_same_bits(model.w.get_value(), jnp.float32(value))


DELETED = jnp.ones((2, 3))
DELETED.delete()
NO_ARRAYS: dict[str, tuple[Any, str]] = {
    "list": ([[1.0] * 3] * 2, "a value of type list"),
    "text": ("ones", "a value of type str"),
    "none": (None, "a value of type NoneType"),
    "objects": (np.full((2, 3), None), "a value of type ndarray"),
    "texts": (np.full((2, 3), "a"), "a value of type ndarray"),
    "dates": (np.zeros((2, 3), "datetime64[s]"), "a value of type ndarray"),
    "record": (np.zeros((2, 3), [("a", "f4")]), "a value of type ndarray"),
    "spec": (jax.ShapeDtypeStruct((2, 3), jnp.float32), "a value of type ShapeDtypeStruct"),
    "module": (nnx.Linear(2, 3, rngs=nnx.Rngs(0)), "a value of type Linear"),
    "keys": (jax.random.split(jax.random.key(0), (2, 3)), "a value of type"),
    "deleted": (DELETED, "an array that was deleted or donated"),
}


@pytest.mark.parametrize("value, got", NO_ARRAYS.values(), ids=NO_ARRAYS)
@ready_or_lazy
def test_what_is_no_array(lazy: bool, value: Any, got: str) -> None:
    model = holder(lazy, (2, 3), "float32")
    with pytest.raises(lm.StateDictError, match=f"w \\((.|\n)*got:    {got}"):
        lm.load_state_dict(model, {"w": value})
    assert lm.is_lazy(model.w) if lazy else not np.asarray(model.w.get_value()).any()


SAME: dict[str, tuple[Any, Any, bool]] = {
    "equal": (jnp.ones(2), np.ones(2, np.float32), True),
    "nan": (np.array([np.nan]), np.array([np.nan]), True),
    "value": (np.ones(2), np.zeros(2), False),
    "zero-sign": (np.array([0.0]), np.array([-0.0]), False),
    "shape": (np.ones(2), np.ones((2, 1)), False),
    "dtype": (np.ones(2, np.float32), np.ones(2, np.float64), False),
    "no-array": (np.ones(2), "ones", False),
}


@pytest.mark.parametrize("a, b, same", SAME.values(), ids=SAME)
def test_same_values(a: Any, b: Any, same: bool) -> None:
    assert same_values(a, b) is same and same_values(b, a) is same and same_values(a, a)


# ---------------------------------------------------------------- random keys


def dropout(impl: str = "threefry2x32") -> Any:
    return nnx.Dropout(0.5, rngs=nnx.Rngs(jax.random.key(0, impl=impl)))


def test_typed_keys_are_taken() -> None:
    model = dropout()
    lm.load_state_dict(model, {"rngs.key": jax.random.key(7), "rngs.count": 3})
    assert_same_bits(model.rngs.key.get_value(), jax.random.key(7))
    assert int(model.rngs.count[...]) == 3 and model.rngs.count.dtype == jnp.uint32


def test_data_without_the_name_of_its_implementation() -> None:
    model = dropout()
    lm.load_state_dict(model, {"rngs.key": np.asarray(jax.random.key_data(jax.random.key(7)))})
    assert_same_bits(model.rngs.key.get_value(), jax.random.key(7))


KEYS: dict[str, tuple[dict[str, Any], str]] = {
    "other-implementation": (lm.state_dict(dropout("rbg"), include_rng=True), "u32[4] of a rbg key"),
    "other-typed": ({"rngs.key": jax.random.key(0, impl="rbg")}, "of a rbg key"),
    "dtype": ({"rngs.key": np.zeros(2, np.float32)}, "f32[2]\n"),
    "text": ({"rngs.key": "key"}, "got:    'key'"),
    "shape": ({"rngs.key": np.zeros(4, np.uint32)}, "u32[4]"),
    "many": ({"rngs.key": np.zeros((3, 2), np.uint32)}, "u32[3,2]"),
}


@pytest.mark.parametrize("entries, got", KEYS.values(), ids=KEYS)
def test_keys_that_do_not_fit(entries: dict[str, Any], got: str) -> None:
    model = dropout()
    key = model.rngs.key.get_value()
    with pytest.raises(lm.StateDictError) as caught:
        lm.load_state_dict(model, entries)
    assert got in str(caught.value) and "rngs.key (RngKey)" in str(caught.value)
    assert model.rngs.key.get_value() is key


def test_random_state_may_always_be_missing() -> None:
    assert lm.load_state_dict(dropout(), {}) == ([], [], [])
