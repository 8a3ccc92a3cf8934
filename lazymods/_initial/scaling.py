"""JAX's own initializers that draw, whatever the shape, and multiply by a scalar that follows from the shape.

JAX traces a sampler anew for every shape, for longer than it takes to fill a small layer. So they are run with
something else in place of the modules that they use: a ``jax.random`` that draws a single element, to read what they
do; and then one that draws nothing, with numpy in place of ``jax.numpy``, to find the scalar alone.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lazymods import _compat
from lazymods._initial.stacking import Shape

_ONE = (1,)


class _OneShape:
    """Stands for the module ``jax.random``: its samplers draw one element, whatever the shape."""

    @functools.cache  # noqa: B019  there is one instance
    def __getattr__(self, name: str) -> Any:
        sample = getattr(jax.random, name)
        signature = inspect.signature(sample)

        def draw_one(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.arguments["shape"] = _ONE
            return sample(*bound.args, **bound.kwargs)

        return draw_one


class _One:
    """Stands for what was drawn: a product with it is the other factor."""

    def __mul__(self, factor: Any) -> Any:
        return factor


class _Nothing:
    """Stands for the module ``jax.random``: its samplers draw nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: _one


class _Numpy:
    """Stands for the module ``jax.numpy``: computes scalars, where both give the same bits."""

    @staticmethod
    def array(value: Any, dtype: Any) -> Any:
        return _normal(np.asarray(value, dtype)[()])

    @staticmethod
    def sqrt(value: Any) -> Any:
        return _normal(np.sqrt(value))


_one_shape, _one, _nothing, _numpy = _OneShape(), _One(), _Nothing(), _Numpy()


def is_normal(value: Any) -> bool:
    """Whether a value is zero, infinite or large enough to have all its digits; others XLA takes for zero."""
    x = float(value.reshape(()))
    return x == 0 or math.isinf(x) or abs(x) >= float(jnp.finfo(value.dtype).tiny)


def _normal(value: Any) -> Any:
    if not is_normal(value):
        raise FloatingPointError
    return value


def drawing_one(init: Callable[..., Any]) -> Callable[..., Any] | None:
    """Return one of these initializers as one that draws a single element; None for any other initializer."""
    return _compat.with_modules(init, random=_one_shape)


def factor(init: Callable[..., Any], shape: Shape, dtype: Any) -> Any:
    """Return the scalar by which one of these initializers multiplies.

    Raises:
        FloatingPointError: If XLA takes it, or a number on the way to it, for zero.
        Exception: Whatever the initializer raises; and if it does more than these were seen to do.
    """
    alone: Any = _compat.with_modules(init, random=_nothing, jnp=_numpy)
    with np.errstate(all="raise"):
        return _normal(alone(None, shape, dtype))
