"""The types of ``lazymods.nn.attention``.

Written by tests/types/make_stubs.py; edit that, not this file.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import nnx
from flax.typing import DotGeneralT, Dtype, PrecisionLike, PromoteDtypeFn

from lazymods._layer.mixin import LazyModuleMixin

class LazyMultiHeadAttention(LazyModuleMixin, nnx.MultiHeadAttention):
    """Multi-head attention without input sizes; becomes ``nnx.MultiHeadAttention``.

    Inferred: ``in_features``, the last axis of the queries ``(batch, length, in_features)``, and
    ``in_kv_features``, that of the keys. ``qkv_features`` and ``out_features`` are ``in_features`` unless given.

    Options: qkv_features, out_features, num_kv_heads, in_kv_features, dtype, param_dtype, broadcast_dropout,
        dropout_rate, deterministic, precision, kernel_init, out_kernel_init, bias_init, out_bias_init, use_bias,
        attention_fn, decode, normalize_qk, qkv_promote_dtype, out_promote_dtype, ln_promote_dtype, qkv_dot_general,
        out_dot_general, qkv_dot_general_cls, out_dot_general_cls, keep_rngs, kernel_metadata, out_kernel_metadata,
        bias_metadata, out_bias_metadata, query_ln_scale_metadata, key_ln_scale_metadata, rngs.
    """

    def __init__(
        self,
        num_heads: int,
        *,
        qkv_features: int | None = None,
        out_features: int | None = None,
        num_kv_heads: int | None = None,
        in_kv_features: int | None = None,
        dtype: Dtype | None = None,
        param_dtype: Dtype = ...,
        broadcast_dropout: bool = True,
        dropout_rate: float = 0.0,
        deterministic: bool | None = None,
        precision: PrecisionLike = None,
        kernel_init: nnx.Initializer = ...,
        out_kernel_init: nnx.Initializer | None = None,
        bias_init: nnx.Initializer = ...,
        out_bias_init: nnx.Initializer | None = None,
        use_bias: bool = True,
        attention_fn: Callable[..., jax.Array] = ...,
        decode: bool | None = None,
        normalize_qk: bool = False,
        qkv_promote_dtype: PromoteDtypeFn = ...,
        out_promote_dtype: PromoteDtypeFn = ...,
        ln_promote_dtype: PromoteDtypeFn = ...,
        qkv_dot_general: DotGeneralT | None = None,
        out_dot_general: DotGeneralT | None = None,
        qkv_dot_general_cls: Any = None,
        out_dot_general_cls: Any = None,
        keep_rngs: bool = True,
        kernel_metadata: Mapping[str, Any] = ...,
        out_kernel_metadata: Mapping[str, Any] = ...,
        bias_metadata: Mapping[str, Any] = ...,
        out_bias_metadata: Mapping[str, Any] = ...,
        query_ln_scale_metadata: Mapping[str, Any] = ...,
        key_ln_scale_metadata: Mapping[str, Any] = ...,
        rngs: nnx.Rngs,
    ) -> None: ...
