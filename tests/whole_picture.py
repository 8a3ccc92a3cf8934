"""Everything about values that a test compares: contents, types, metadata, order, and what is shared."""

import dataclasses
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx


def seen(value: Any, known: dict[int, int] | None = None) -> Any:
    """Return everything about a value in plain containers and arrays of numpy."""
    known = {} if known is None else known
    if isinstance(value, jax.Array):
        if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            return ["key", str(value.dtype), np.array(jax.random.key_data(value))]
        return ["array", str(value.dtype), value.weak_type, np.array(value)]
    if isinstance(value, (np.ndarray, np.generic)):
        return ["array", str(value.dtype), False, np.array(value)]
    if isinstance(value, types.FunctionType):  # those of optax are made anew with each program
        return value.__qualname__
    if isinstance(value, (str, bool, int, float, type(None), type)):
        return [type(value), value]
    if isinstance(value, tuple):
        return [type(value).__name__, *(seen(v, known) for v in value)]
    if id(value) in known:
        return ["again", known[id(value)]]
    known[id(value)] = len(known)
    return _parts(value, known)


def _parts(value: Any, known: dict[int, int]) -> Any:
    if isinstance(value, nnx.Variable):
        told = [(k, seen(v, known)) for k, v in sorted(value.get_metadata().items())]
        return [type(value).__name__, told, seen(value.get_raw_value(), known)]
    if isinstance(value, dict):
        return ["dict", *([k, seen(v, known)] for k, v in value.items())]
    if isinstance(value, (list, set)):
        return [type(value).__name__, *(seen(v, known) for v in value)]
    if isinstance(value, nnx.Pytree) or dataclasses.is_dataclass(value):
        held = [(k, v) for k, v in vars(value).items() if not k.startswith("_pytree")]
        return [type(value).__name__, *([k, seen(v, known)] for k, v in held)]
    return [type(value).__name__]


def assert_same(got: Any, want: Any, where: str) -> None:
    """Compare what was seen: floats to rounding, all else exactly."""
    if isinstance(want, np.ndarray) and want.dtype.kind in "fcV":
        assert got.dtype == want.dtype and got.shape == want.shape, where
        got, want = (a.astype(complex if a.dtype.kind == "c" else np.float64) for a in (got, want))
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5, err_msg=where)
    elif isinstance(want, np.ndarray):
        np.testing.assert_array_equal(got, want, err_msg=where)
    elif isinstance(want, (list, tuple)):
        assert type(got) is type(want) and len(got) == len(want), (where, got, want)
        for number, (a, b) in enumerate(zip(got, want, strict=True)):
            label = want[0] if number and isinstance(want[0], str) else number
            assert_same(a, b, f"{where}, {label}")
    else:
        assert type(got) is type(want) and got == want, (where, got, want)
