"""Low-rank adapters without input sizes."""

from __future__ import annotations

from typing import Any

from flax import nnx

from lazymods._layer.factory import make
from lazymods._layer.sizing import LazyClassSpec
from lazymods.nn._shapes import Config, last_axis


def _infer(config: Config, x: Any, *_: Any, **__: Any) -> dict[str, Any]:
    return {"in_features": last_axis(x)}


LazyLoRA = make(
    LazyClassSpec(nnx.LoRA, _infer, ("in_features",)),
    name="LazyLoRA",
    module=__name__,
    doc="""A low-rank adapter without ``in_features``; becomes ``nnx.LoRA``.

    Inferred: ``in_features``, the last axis of the input ``(..., in_features)``.

    Args:
        lora_rank: The rank of the adapter.
        out_features: The number of output features.
        base_module: The module whose output it is added to; it may be lazy.
        **options: Those of ``nnx.LoRA``, by keyword.
        rngs: The random streams.

    Raises:
        ShapeInferenceError: At the first call, if the input has no axes or no features.
    """,
)

LazyLoRALinear = make(
    LazyClassSpec(nnx.LoRALinear, _infer, ("in_features",)),
    name="LazyLoRALinear",
    module=__name__,
    doc="""A linear map with a low-rank adapter, without ``in_features``; becomes ``nnx.LoRALinear``.

    Inferred: ``in_features``, the last axis of the input ``(..., in_features)``.

    Args:
        out_features: The number of output features.
        lora_rank: The rank of the adapter.
        **options: Those of ``nnx.LoRALinear`` and ``nnx.Linear``, by keyword.
        rngs: The random streams.

    Raises:
        ShapeInferenceError: At the first call, if the input has no axes or no features.
    """,
)
