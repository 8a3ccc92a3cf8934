"""Whether a value from outside fits a parameter, and its cast: never complex to real, never out of range."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer

from lazymods._errors import describe, short_dtype
from lazymods._initial.keys import is_key
from lazymods._layer.placeholder import strongly_typed
from lazymods.state.files.stored import Unread


def unwrapped(value: Any) -> Any:
    """Return what a Variable holds, read out of its reference if it has one; anything else as it is."""
    if not isinstance(value, nnx.Variable):
        return value
    return value.get_value() if value.get_metadata("ref", False) else value.get_raw_value()


def as_array(value: Any) -> Any:
    """Return an array (or number) as JAX or numpy takes it, a tensor of PyTorch too, or None if it is neither.

    What has not been read stays so.
    """
    if type(value) is np.ndarray and value.dtype.kind in "biufc":
        return value
    value = unwrapped(value)
    if isinstance(value, np.ma.MaskedArray):  # without its mask it is another array
        return None
    if isinstance(value, (jax.Array, np.ndarray)):
        return value if _is_numeric(value) else None
    if isinstance(value, (bool, int, float, complex, np.generic)):
        array = np.asarray(value)  # of Python's objects for an integer of over 64 bits
        return array if _is_numeric(array) else None
    if isinstance(value, Unread):
        return value
    if hasattr(value, "shape") and hasattr(value, "__array__") and not isinstance(value, type):
        array = _converted(value)
        return array if array is not None and _is_numeric(array) else None
    return None


def _converted(value: Any) -> np.ndarray[Any, Any] | None:
    """Return what another library takes for an array; None if it has no such numbers, or does not hand them out."""
    torch = sys.modules.get("torch")
    try:
        if torch is not None and isinstance(value, torch.Tensor):
            from lazymods.state.files import torch_tensors

            return torch_tensors.array_of(value.cpu())
        return np.asarray(value)
    except Exception:  # as of a library that copies nothing from its device without being told
        return None


def _is_numeric(array: Any) -> bool:
    if jnp.issubdtype(array.dtype, jax.dtypes.extended):
        return False
    if array.dtype.kind == "m":  # a time, which numpy counts among the integers
        return False
    return jnp.issubdtype(array.dtype, np.number) or array.dtype == np.bool_


def is_storable(dtype: Any) -> bool:
    """Whether files have a name for a dtype: numpy's numbers of up to 8 bytes a part, and those of ml_dtypes."""
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        return False
    dtype = np.dtype(dtype)
    if dtype.kind in "biufc":
        return dtype.itemsize <= (16 if dtype.kind == "c" else 8)
    return dtype.isbuiltin == 2 and jnp.issubdtype(dtype, np.number)


def is_number(value: Any) -> bool:
    """Whether it is a number of Python's or numpy's, of exactly such a type: an enumeration's is none."""
    return type(value) in (bool, int, float, complex) or (isinstance(value, np.generic) and is_storable(value.dtype))


def is_text(value: Any) -> bool:
    """Whether it is what a JSON entry can hold."""
    return type(value) in (str, bytes, int)


def is_deleted(array: Any) -> bool:
    """Whether it is a JAX array that was deleted or donated."""
    if isinstance(array, np.ndarray):  # isinstance() of a JAX array takes longer
        return False
    return isinstance(array, jax.Array) and not isinstance(array, Tracer) and array.is_deleted()


def cast_problem(array: Any, dtype: Any) -> str | None:
    """Say why an array cannot be cast to a dtype, or return None."""
    source = array.dtype
    if source == dtype:
        return None
    if kind_problem(array, dtype) is not None:
        return kind_problem(array, dtype)
    if jnp.issubdtype(dtype, np.integer):
        return _integer_problem(np.asarray(array), dtype)
    if dtype == np.bool_ and not bool(np.all((np.asarray(array) == 0) | (np.asarray(array) == 1))):
        return "only zeros and ones, for a boolean"
    if jnp.issubdtype(dtype, jnp.inexact) and not isinstance(array, Tracer) and not _stays_finite(array, dtype):
        return f"numbers of a size that {short_dtype(dtype)} has"
    return None


def kind_problem(array: Any, dtype: Any) -> str | None:
    """Say why no array of this kind of numbers can be cast to a dtype, or return None."""
    if jnp.issubdtype(array.dtype, np.complexfloating) and not jnp.issubdtype(dtype, np.complexfloating):
        return f"a real array, for {describe(array)} would lose its imaginary part"
    if np.dtype(array.dtype).isbuiltin == np.dtype(dtype).isbuiltin == 2 and not _has_cast(array.dtype, dtype):
        return f"an array of a dtype that numpy casts to {short_dtype(dtype)}"
    return None


@functools.cache
def _has_cast(source: Any, dtype: Any) -> bool:
    """Whether numpy casts from one to another of the dtypes of ml_dtypes: it has not all of these casts."""
    try:
        np.zeros(1, source).astype(dtype)
    except TypeError:
        return False
    return True


def _stays_finite(array: Any, dtype: Any) -> bool:
    """Whether no finite number of an array becomes infinite, or none, in another dtype."""
    if jnp.issubdtype(array.dtype, jnp.inexact):
        source, target = jnp.finfo(array.dtype), jnp.finfo(dtype)
        if target.min <= source.min and source.max <= target.max:
            return True
    array = np.asarray(array)
    with np.errstate(all="ignore"):
        if array.dtype.kind == "f" and array.size:
            ends = np.array([array.min(), array.max()])
            if np.isfinite(ends).all():
                return bool(np.isfinite(ends.astype(dtype)).all())
        return bool((np.isfinite(array.astype(dtype)) | ~np.isfinite(array)).all())


def _integer_problem(array: np.ndarray[Any, Any], dtype: Any) -> str | None:
    info = jnp.iinfo(dtype)
    if array.size == 0 or array.dtype == np.bool_:
        return None
    if not jnp.issubdtype(array.dtype, np.integer):
        array = array.astype(np.float64)
        if not bool(np.all(np.isfinite(array) & (np.trunc(array) == array))):
            return f"whole numbers, for {short_dtype(dtype)}"
    if int(array.min()) < int(info.min) or int(array.max()) > int(info.max):
        return f"numbers from {info.min} to {info.max}, for {short_dtype(dtype)}"
    return None


def own(arrays: Sequence[Any]) -> list[Any]:
    """Return JAX arrays that share no memory with those given, which somebody may donate or write to."""
    out = [np.array(a) if isinstance(a, np.ndarray) else a for a in arrays]
    kept = {i for i, a in enumerate(out) if isinstance(a, Tracer)}
    spread = {i for i, a in enumerate(out) if i not in kept and isinstance(a, jax.Array) and not a.is_fully_addressable}
    here = [i for i in range(len(out)) if i not in kept | spread]
    for i, copied in zip(here, jax.device_put([out[i] for i in here], may_alias=False), strict=True):
        out[i] = copied
    return [a.copy() if i in spread else a for i, a in enumerate(out)]


def cast(array: jax.Array, dtype: Any, like: Any) -> jax.Array:
    """Return a JAX array of a dtype, placed as the array that it replaces is.

    Args:
        array: A JAX array.
        dtype: The dtype.
        like: The array that it replaces, or anything else.
    """
    out = strongly_typed(array) if array.dtype == dtype else array.astype(dtype)
    if isinstance(like, jax.Array) and not isinstance(like, Tracer):
        if like.committed and out.sharding != like.sharding:
            out = jax.device_put(out, like.sharding)
    return out


def is_weak(value: Any) -> bool:
    """Whether it is an array, or a spec of one, of weak type; a random key has none."""
    return bool(getattr(value, "weak_type", False))


def weakly_typed(array: jax.Array) -> jax.Array:
    """Return an array of weak type, as Python's numbers make them; of a dtype that these do not have, as it is."""
    like = {"f": 0.0, "i": 0, "c": 0j}.get(array.dtype.kind)
    with jax.transfer_guard("allow"):  # of this number, which nobody asked for
        weak = None if like is None else jnp.full(array.shape, like)
        if weak is None or weak.dtype != array.dtype:
            return array
        out = weak.at[...].set(array)
    placed = not isinstance(array, Tracer) and array.committed and out.sharding != array.sharding
    return jax.device_put(out, array.sharding) if placed else out


def same_values(a: Any, b: Any) -> bool:
    """Whether two entries hold the same bits, or are the same text."""
    if a is b:
        return True
    if is_text(a) and type(a) is type(b):
        return a == b
    a, b = _known(a), _known(b)
    if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype:
        return False
    left, right = (np.ascontiguousarray(x).reshape(-1).view(np.uint8) for x in (a, b))
    return np.array_equal(left, right)


def same_numbers(a: Any, b: Any) -> bool:
    """Whether two entries hold the same numbers in two dtypes, one of which has all that the other has."""
    a, b = _known(a), _known(b)
    if a is None or b is None or a.shape != b.shape:
        return False
    is_wider = np.can_cast(a.dtype, b.dtype) or np.can_cast(b.dtype, a.dtype)
    return is_wider and np.array_equal(np.asarray(a), np.asarray(b))


def _known(value: Any) -> Any:
    """Return an entry as an array, a random key as its data; None if it has no numbers, or they are not known."""
    value = unwrapped(value)
    array = jax.random.key_data(value) if is_key(value) and not is_deleted(value) else as_array(value)
    return None if isinstance(array, Tracer) or is_deleted(array) else array
