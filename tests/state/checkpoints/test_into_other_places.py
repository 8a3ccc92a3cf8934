"""What a file has, and what a state has there: the value comes, or an error says what is wrong, in every format.

What is expected is said by plain Python: which kinds fit which places, and numpy's cast of the number.
"""

import cmath
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import lazymods as lm

VALUES: dict[str, Any] = {
    "bool": True,
    "int": 3,
    "long": 2**40,
    "longer": 2**70,
    "longest": -(10**5000),
    "float": 1.5,
    "nan": float("nan"),
    "large": 1e300,
    "complex": 3j,
    "text": "text",
    "bytes": b"bytes",
    "f32": np.float32(2.5),
    "u64": np.uint64(2**63),
    "i32[]": jnp.int32(5),
    "f32[3]": jnp.arange(3.0),
    "u8[4]": np.arange(4, dtype=np.uint8),
    "b1[3]": np.array([True, False, True]),
    "c64[3]": jnp.full(3, 1j, jnp.complex64),
    "key": jax.random.key(3),
}
PLACES: dict[str, Any] = {
    "int": 7,
    "float": 0.5,
    "i8": np.int8(7),
    "text": "old",
    "bytes": b"old",
    "f32[]": jnp.float32(0.5),
    "i32[]": jnp.int32(7),
    "f64[]": np.array(0.5),
    "f32[3]": jnp.ones(3),
    "i64[3]": np.ones(3, np.int64),
    "u8[4]": np.ones(4, np.uint8),
    "c64[3]": jnp.ones(3, jnp.complex64),
    "key": jax.random.key(0),
}


def is_key(value: Any) -> bool:
    return isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key)


def expected(value: Any, place: Any) -> Any:
    """What a place holds after the load, or None if the value does not fit."""
    if isinstance(place, (str, bytes)) or isinstance(value, (str, bytes)):
        return value if type(value) is type(place) else None
    if is_key(place) or is_key(value):
        return value if is_key(value) and is_key(place) else None
    if isinstance(place, (int, float, np.generic)):
        whole_place = isinstance(place, (int, np.integer))
        fits = np.shape(value) == () and not (whole_place and isinstance(value, float) and not cmath.isfinite(value))
        return value if fits else None
    if np.shape(value) != np.shape(place) or (type(value) is int and abs(value) >= 2**64):
        return None
    numbers, kind = np.asarray(value).reshape(-1).tolist(), place.dtype.kind
    if kind != "c" and any(isinstance(n, complex) for n in numbers):
        return None
    with np.errstate(all="ignore"):
        cast = np.asarray(value).astype(place.dtype)
    if kind in "iu":
        ends = np.iinfo(place.dtype)
        whole = all(cmath.isfinite(n) and n == int(n) and ends.min <= n <= ends.max for n in numbers)
        return cast if whole else None
    lost = any(cmath.isfinite(n) and not np.isfinite(c) for n, c in zip(numbers, cast.reshape(-1), strict=True))
    return None if lost else cast


def assert_equal(got: Any, want: Any) -> None:
    if is_key(want):
        got, want = jax.random.key_data(got), jax.random.key_data(want)
    if isinstance(want, (str, bytes, int)):
        assert got == want
    else:
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


def old(place: Any) -> Any:
    return place.copy() if isinstance(place, (np.ndarray, jax.Array)) else place


NOT_HELD = {(".safetensors", "complex")}  # the format has no complex128: save says so
CASES = [(s, n) for n in VALUES for s in (".safetensors", ".npz", "", "state dict") if (s, n) not in NOT_HELD]


@pytest.mark.parametrize("suffix, name", CASES)
def test_every_value_in_every_place(suffix: str, name: str, tmp_path: Path) -> None:
    value = VALUES[name]
    saved = {"v": value, "w": 1}
    if suffix != "state dict":
        lm.save(saved, tmp_path / f"saved{suffix}")
    loaded = refused = 0
    for place in PLACES.values():
        state = {"v": old(place), "w": 0}
        want = expected(value, place)

        def load(state: Any = state) -> None:
            if suffix == "state dict":
                lm.load_state_dict(state, lm.state_dict(saved, include_rng=True))
            else:
                lm.load(state, tmp_path / f"saved{suffix}")

        if want is None:
            with pytest.raises(lm.StateDictError) as caught:
                load()
            problem = next(p for p in caught.value.problems if p.where.startswith("v ("))
            assert "no entry" not in problem.got and problem.needed
            assert_equal(state["v"], place)
            assert state["w"] == 0
            refused += 1
        else:
            load()
            assert_equal(state["v"], want)
            assert state["w"] == 1
            loaded += 1
    assert loaded and refused


def test_a_number_that_no_array_holds(tmp_path: Path) -> None:
    lm.save({"v": 2**70}, tmp_path / "s.npz")
    with pytest.raises(lm.StateDictError) as caught:
        lm.load({"v": jnp.int32(0)}, tmp_path / "s.npz")
    assert str(caught.value).partition("\n")[2] == (
        "v (ArrayImpl)\n"
        "  got:    1180591620717411303424\n"
        "  needed: a number of at most 64 bits: an array has no longer ones\n"
        "  write:  state['v'] = jnp.asarray(value)"
    )


def test_a_text_for_an_array(tmp_path: Path) -> None:
    lm.save({"v": "off"}, tmp_path / "s.npz")
    told = r"v \(Param\)\n  got:    a value of type str\n  needed: an array of numbers"
    with pytest.raises(lm.StateDictError, match=told):
        lm.load(nnx.Dict(v=nnx.Param(jnp.ones(2))), tmp_path / "s.npz", strict=False)


NO_NUMBERS = [np.str_("a"), np.bytes_(b"a"), np.datetime64("2020"), np.timedelta64(3, "D"), np.void(b"a")]


@pytest.mark.parametrize("value", NO_NUMBERS, ids=lambda value: type(value).__name__)
def test_scalars_of_numpy_that_are_no_numbers(value: Any) -> None:
    arrays = (jnp.float32(1), jnp.int32(1), np.ones(()), jax.random.key(0), lm.UninitializedParameter())
    for place in (*arrays, 5, 0.5, True):
        with pytest.raises(lm.StateDictError, match=r"v \("):
            lm.load_state_dict({"v": place}, {"v": value})


def test_more_bits_than_jax_has() -> None:
    value = np.longdouble(3)
    if value.dtype == np.float64:
        pytest.skip("numpy's longdouble is a double here")
    with pytest.raises(lm.StateDictError, match="needed: numbers that JAX has an array for"):
        lm.load_state_dict({"v": lm.UninitializedParameter()}, {"v": value})
    state = {"v": nnx.Param(jnp.float32(1))}
    lm.load_state_dict(state, {"v": value})
    assert state["v"].get_value() == 3


def test_long_values_are_told_in_a_line() -> None:
    shown = {10**5000: "an integer of 16,610 bits", "y" * 5000: f"'{'y' * 1000}'..., a text of 5,000 characters"}
    for value, got in shown.items():
        with pytest.raises(lm.StateDictError) as caught:
            lm.load_state_dict({"v": b""}, {"v": value})
        assert f"got:    {got}" in str(caught.value)
    with pytest.raises(lm.StateDictError, match="one number, as an integer of 16,610 bits is"):
        lm.load_state_dict({"v": 10**5000}, {"v": np.ones(3)})
