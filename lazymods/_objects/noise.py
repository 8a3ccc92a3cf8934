"""Copies of the arrays of a call for runs in plain Python, exact or with noise in the last bit.

How much rounding can change a result depends on the function: Adam divides a gradient by its own size, so a gradient
that is 0 except for rounding moves a weight by any part of a step. No fixed tolerance is right there, but it can be
measured: a run whose inputs differ in the last bit gives about what another order of the same operations would give.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lazymods._compat import jit as _compat_jit
from lazymods._objects.comparing import is_identical, is_value


def own(value: Any) -> Any:
    """Return a copy of an array, which nobody else writes to or donates; other values as they are."""
    if _compat_jit.is_reference(value):
        return jax.new_ref(value[...]) if isinstance(value, jax.Ref) else value.copy()
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, jax.Array) and not jnp.issubdtype(value.dtype, jax.dtypes.extended):
        return jnp.array(value, copy=True)
    return value


class Noise:
    """Makes what :func:`own` makes, with each float moved up or down by some units of its last place.

    Whole numbers stay: a mask, a count, a class are meant, and a function may ask which one it is.

    Args:
        units: How many. Another order of a sum is off by one to some, and where a function asks for no more than the
            sign of what is left, one may be too few to change it.
    """

    def __init__(self, units: int) -> None:
        self._random = np.random.default_rng(units)
        self._units = units

    def __call__(self, value: Any) -> Any:
        """Return a copy of an array with noise; other values as they are."""
        found = own(value)
        if _compat_jit.is_reference(found):
            found[...] = self._moved(found[...])
            return found
        return self._moved(found) if isinstance(found, (np.ndarray, jax.Array)) else found

    def _moved(self, array: Any) -> Any:
        if not jnp.issubdtype(array.dtype, np.inexact) or array.dtype.itemsize < 2 or getattr(array, "weak_type", 0):
            return array
        if isinstance(array, jax.Array) and len(array.devices()) > 1:
            return array
        old = np.asarray(array)
        directions = self._random.choice((-1.0, 1.0), old.shape) * self._units * float(jnp.finfo(old.dtype).eps)
        with np.errstate(all="ignore"):  # the largest number overflows, nan is invalid
            new = np.where(old == np.round(old), old, old * (1 + directions)).astype(old.dtype)
        return new if isinstance(array, np.ndarray) else jax.device_put(new, array.sharding)


def exact_and_noisy() -> list[Callable[[Any], Any]]:
    """Return what makes the arrays of the runs that measure rounding: one exact, then some with more and more noise."""
    return [own, *map(Noise, (1, 2, 16))]


def near(want: Any, found: Sequence[Any]) -> Sequence[Any]:
    """Return what runs with noise gave; nothing if the exact one, which is the first, did not give the same again."""
    return found[1:] if found and is_value(found[0]) and is_identical(want, found[0]) else []
