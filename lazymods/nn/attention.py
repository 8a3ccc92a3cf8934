"""Attention without input sizes."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from lazymods._layer.factory import make
from lazymods._layer.sizing import LazyClassSpec
from lazymods.nn._shapes import Config, last_axis


def _infer(config: Config, inputs_q: Any, inputs_k: Any = None, inputs_v: Any = None, **_: Any) -> dict[str, Any]:
    found = {"in_features": last_axis(inputs_q, least=2)}
    if config["in_kv_features"] is None:
        found["in_kv_features"] = last_axis(inputs_q if inputs_k is None else inputs_k, least=2)
    return found


def _structure(config: Config) -> dict[str, Any]:
    unknown: dict[str, Any] = {"in_features": None}
    return unknown if config["in_kv_features"] is not None else unknown | {"in_kv_features": None}


def _init_cache(config: Config, input_shape: Any, *_: Any, **__: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (jax.ShapeDtypeStruct(tuple(input_shape), config["param_dtype"]),), {}


LazyMultiHeadAttention = make(
    LazyClassSpec(nnx.MultiHeadAttention, _infer, ("in_features",), _structure, entries={"init_cache": _init_cache}),
    name="LazyMultiHeadAttention",
    module=__name__,
    doc="""Multi-head attention without input sizes; becomes ``nnx.MultiHeadAttention``.

    Inferred: ``in_features``, the last axis of the queries ``(batch, length, in_features)``, and
    ``in_kv_features``, that of the keys. ``qkv_features`` and ``out_features`` are ``in_features`` unless given.

    Args:
        num_heads: The number of heads.
        **options: Those of ``nnx.MultiHeadAttention``, by keyword.
        rngs: The random streams.

    Raises:
        ShapeInferenceError: At the first call, if the heads do not divide the features or an input has no features.
    """,
)
