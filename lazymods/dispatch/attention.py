"""``dot_product_attention``: softmax attention, by cuDNN where that serves, else by XLA.

cuDNN's kernel never makes the table of weights, so that its lead grows with the square of the length. It is taken for
half precision, heads of up to 128 numbers in steps of 8, no bias and no mask (a causal one is told by ``is_causal``)
and long sequences; XLA's, which is ``jax.nn.dot_product_attention``, for everything else.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes

from lazymods.dispatch.operator import Operator

FROM_TOKENS = 1024
"""The shortest sequences, of queries and of keys, for which cuDNN is taken: see ``tests/benchmarks/dispatch.py``."""

_MOST_FEATURES = 128  # of a head: what cuDNN takes on every GPU that it serves, with its gradient

dot_product_attention: Operator = Operator("dot_product_attention")
"""Attention of ``query`` ``(batch, queries, heads, features)`` to ``key`` and ``value`` ``(batch, keys, heads, ...)``.

The further arguments are ``bias=None``, ``mask=None``, ``is_causal=False`` and ``scale=None``, with the meaning that
``jax.nn.dot_product_attention`` gives them.
"""


@dot_product_attention.register("CompositeImplicitAutograd")
def by_xla(
    query: Any, key: Any, value: Any, bias: Any = None, mask: Any = None, is_causal: bool = False, scale: Any = None
) -> Any:
    """Compute attention by operations of XLA."""
    options = {"bias": bias, "mask": mask, "is_causal": is_causal, "scale": scale}
    return jax.nn.dot_product_attention(query, key, value, implementation="xla", **options)


@dot_product_attention.register("CUDA")
def by_cudnn(
    query: Any, key: Any, value: Any, bias: Any = None, mask: Any = None, is_causal: bool = False, scale: Any = None
) -> Any:
    """Compute attention by cuDNN, if it serves these arguments and is there."""
    number = scale is None or isinstance(scale, (int, float))
    if number and bias is None and mask is None and fits_cudnn(query, key, value, is_causal):
        try:
            options = {"is_causal": is_causal, "scale": scale}
            return jax.nn.dot_product_attention(query, key, value, implementation="cudnn", **options)
        except (RuntimeError, NotImplementedError):  # compiled for CUDA where cuDNN is not, or not for this GPU
            pass
    return by_xla(query, key, value, bias, mask, is_causal, scale)


def fits_cudnn(query: Any, key: Any, value: Any, is_causal: bool) -> bool:
    """Whether cuDNN serves such arrays, faster than XLA and with the same meaning.

    Args:
        query: ``(batch, queries, heads, features)``.
        key: ``(batch, keys, heads, features)``.
        value: The same.
        is_causal: With that, queries and keys are to be as many: else the two put the diagonal elsewhere.

    Returns:
        Whether it does.
    """
    arrays = (query, key, value)
    if any(x.ndim != 4 or x.dtype != query.dtype or not all(isinstance(n, int) for n in x.shape) for x in arrays):
        return False
    (_, queries, _, features), keys = query.shape, key.shape[1]
    half = query.dtype in (jnp.bfloat16, jnp.float16)
    small = features % 8 == 0 and features <= _MOST_FEATURES and value.shape == key.shape
    return half and small and min(queries, keys) >= FROM_TOKENS and (queries == keys or not is_causal)


def attention_fn(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    broadcast_dropout: bool = True,
    dropout_rng: Any = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Any = None,
    precision: Any = None,
    module: Any = None,
    promote_dtype: Any = dtypes.promote_dtype,
    is_causal: bool = False,
) -> Any:
    """Compute attention as ``nnx.dot_product_attention`` does; a value for ``nnx.MultiHeadAttention(attention_fn=)``.

    What the operator has no argument for is left to Flax's function: dropout, weights that are to be sown, a precision,
    and other than one axis for the batch.

    Args:
        query: ``(batch, queries, heads, features)``.
        key: ``(batch, keys, heads, features)``.
        value: The same.
        bias: Added to the weights before the softmax.
        mask: False where a query does not look.
        broadcast_dropout: As Flax's, as all that follow.
        dropout_rng: Of dropout.
        dropout_rate: Of dropout.
        deterministic: Whether nothing is dropped.
        dtype: That of the computation.
        precision: Of the products.
        module: What weights are sown into.
        promote_dtype: Gives the arrays one dtype.
        is_causal: Whether a query looks at no later key.

    Returns:
        ``(batch, queries, heads, features)``.
    """
    dropping = dropout_rate > 0 and not deterministic
    if query.ndim != 4 or dropping or module is not None or precision is not None:
        return nnx.dot_product_attention(
            *(query, key, value, bias, mask, broadcast_dropout, dropout_rng, dropout_rate, deterministic),
            *(dtype, precision, module, promote_dtype, is_causal),
        )
    query, key, value = promote_dtype((query, key, value), dtype=dtype)
    mask = None if mask is None else mask.astype(bool)
    return dot_product_attention(query, key, value, bias, mask, is_causal=is_causal)
