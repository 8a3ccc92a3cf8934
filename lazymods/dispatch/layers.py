"""``layer_norm``, ``rms_norm`` and ``linear_activation``: what XLA fuses by itself, open to kernels of others.

They have a composite kernel alone. Their reductions and sums are done in float32 at least, as Flax's layers do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from lazymods.dispatch.operator import Operator
from lazymods.dispatch.refusals import refused

layer_norm: Operator = Operator("layer_norm")
"""``x`` ``(..., features)`` less its mean over the last axis, by its deviation, times ``scale``, plus ``bias``.

The further arguments are ``scale=None``, ``bias=None``, each ``(features,)``, and ``epsilon=1e-6``.
"""

rms_norm: Operator = Operator("rms_norm")
"""``x`` ``(..., features)`` by the root of its mean square over the last axis, times ``scale``.

The further arguments are ``scale=None``, ``(features,)``, and ``epsilon=1e-6``.
"""

linear_activation: Operator = Operator("linear_activation")
"""``activation(x @ kernel + bias)`` for ``x`` ``(..., in_features)`` and ``kernel`` ``(in_features, out_features)``.

The further arguments are ``bias=None``, ``(out_features,)``, and ``activation="relu"``: a function, or the name of one
in ``jax.nn``.
"""


@layer_norm.register("CompositeImplicitAutograd")
def _layer_norm(x: Any, scale: Any = None, bias: Any = None, epsilon: float = 1e-6) -> Any:
    dtype = _dtype_of(x, scale, bias)
    wide = _wide(x, dtype)
    mean = wide.mean(-1, keepdims=True)
    variance = jnp.maximum(0.0, _square(wide).mean(-1, keepdims=True) - _square(mean))
    return _scaled(wide - mean, jax.lax.rsqrt(variance + epsilon), scale, bias, dtype)


@rms_norm.register("CompositeImplicitAutograd")
def _rms_norm(x: Any, scale: Any = None, epsilon: float = 1e-6) -> Any:
    dtype = _dtype_of(x, scale)
    wide = _wide(x, dtype)
    return _scaled(wide, jax.lax.rsqrt(_square(wide).mean(-1, keepdims=True) + epsilon), scale, None, dtype)


@linear_activation.register("CompositeImplicitAutograd")
def _linear_activation(x: Any, kernel: Any, bias: Any = None, activation: str | Callable[[Any], Any] = "relu") -> Any:
    function = getattr(jax.nn, activation, None) if isinstance(activation, str) else activation
    if not callable(function):
        needed = "a function, or the name of one in jax.nn"
        raise refused("linear_activation", f"activation={activation!r}", needed, "activation='gelu'")
    dtype = _dtype_of(x, kernel, bias)
    out = jnp.matmul(x.astype(dtype), kernel.astype(dtype))
    return function(out if bias is None else out + _last(bias.astype(dtype), out))


def _dtype_of(*arrays: Any) -> Any:
    """Return the dtype of the output: that of the arrays together; float32 for integers, as Flax's layers do."""
    dtype = jnp.result_type(*[x for x in arrays if x is not None])
    return dtype if jnp.issubdtype(dtype, jnp.inexact) else jnp.float32


def _wide(x: Any, dtype: Any) -> Any:
    return x.astype(jnp.float32 if jnp.finfo(dtype).bits < 32 else dtype)


def _square(x: Any) -> Any:
    return jax.lax.real(x * x.conj()) if jnp.iscomplexobj(x) else x * x


def _scaled(x: Any, factor: Any, scale: Any, bias: Any, dtype: Any) -> Any:
    """Multiply in the order of Flax's layers."""
    if scale is not None:
        factor = factor * _last(scale.astype(x.dtype), x)
    x = x * factor
    if bias is not None:
        x = x + _last(bias.astype(x.dtype), x)
    return x.astype(dtype)


def _last(parameter: Any, x: Any) -> Any:
    return parameter.reshape((1,) * (x.ndim - 1) + parameter.shape)
