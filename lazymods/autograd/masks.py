"""Functions that are finite at some elements alone, and their gradients there.

``jnp.where(mask, fn(x), 0)`` has the right value, and a gradient of ``nan`` where ``fn`` has no finite derivative: what
the mask drops is multiplied by zero, and zero times infinity is not zero. So ``fn`` must not see those elements.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lazymods._errors import Problem, describe
from lazymods._refusals import ArgumentError, refuse_uncallable

_NUMBERS = (bool, int, float, complex)


def safe_where(mask: Any, fn: Callable[..., Any], *args: Any, fill: Any = 0.0) -> Any:
    """Return ``jnp.where(mask, fn(*args), fill)``, with finite derivatives of every order where ``fn`` has none.

    Where ``mask`` is False, ``fn`` gets the arguments of the first element where it is True instead, and nothing is
    differentiated. So masked elements get the gradient 0, and ``fn`` is never called where it is not finite, unless
    ``mask`` is False everywhere; then what ``fn`` closes over has a gradient of ``nan`` if ``fn`` is not finite at 0.
    An array that ``fn`` closes over it sees as it is, masked elements too: pass it as an argument.

    Args:
        mask: Where to use ``fn``; a bool array, or what broadcasts with the arguments.
        fn: A function that works element by element, such as ``jnp.log`` or a formula of such functions. What it
            returns has the shape of its arguments; it may be a pytree.
        *args: Arrays, or pytrees of arrays, that broadcast with each other and with ``mask``. Python numbers are handed
            on as they are.
        fill: What is there instead, where ``mask`` is False: a number or an array. It has a gradient there.

    Returns:
        An array of the shape to which ``mask`` and the arguments broadcast, of the dtype that ``jnp.where`` gives.

    Raises:
        ArgumentError: If ``fn`` can't be called, or returns another shape.

    Example:
        >>> import jax, jax.numpy as jnp, lazymods as lm
        >>> x = jnp.array([0.0, 2.0])
        >>> jax.grad(lambda x: jnp.where(x > 0, jnp.log(x), 0.0).sum())(x)
        Array([nan, 0.5], dtype=float32)
        >>> jax.grad(lambda x: lm.autograd.safe_where(x > 0, jnp.log, x).sum())(x)
        Array([0. , 0.5], dtype=float32)
    """
    refuse_uncallable("lm.autograd.safe_where", fn)
    arrays = [x for x in jax.tree.leaves(args) if type(x) not in _NUMBERS]
    shape = jnp.broadcast_shapes(np.shape(mask), *map(np.shape, arrays))
    mask = jnp.broadcast_to(jnp.asarray(mask), shape).astype(bool)
    first = mask & (_positions(shape) == jnp.min(_positions(shape), where=mask, initial=_LAST))

    def safe(value: Any) -> Any:
        if type(value) in _NUMBERS:
            return value
        value = jnp.broadcast_to(jnp.asarray(value), shape)
        if jnp.issubdtype(value.dtype, jax.dtypes.extended):
            return value
        return jnp.where(mask, value, _only(first, jax.lax.stop_gradient(value)))

    def filled(result: Any) -> Any:
        if np.shape(result) != shape:
            raise ArgumentError(_not_elementwise(result, shape))
        return jnp.where(mask, result, fill)

    return jax.tree.map(filled, fn(*jax.tree.map(safe, args)))


_LAST = np.iinfo(np.int32).max


def _positions(shape: tuple[Any, ...]) -> jax.Array:
    """Return a number for each element, without a reshape, which not every sharding can have."""
    position = jnp.zeros(shape, jnp.int32)
    for axis, size in enumerate(shape):
        position = position * size + jax.lax.broadcasted_iota(jnp.int32, shape, axis)
    return position


def _only(first: jax.Array, value: jax.Array) -> jax.Array:
    """Return the element of an array where ``first`` is True, or 0."""
    if value.dtype == bool:
        return jnp.any(value & first)
    return jnp.sum(value, where=first, dtype=value.dtype)


def _not_elementwise(result: Any, shape: tuple[Any, ...]) -> Problem:
    needed = f"an array of the shape {shape}, to which the mask and the arguments broadcast: one element for each"
    write = "a function that works element by element, such as jnp.log; reduce what safe_where returns"
    return Problem("lm.autograd.safe_where: what fn returned", describe(result), needed, write)
