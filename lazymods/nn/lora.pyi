"""The types of ``lazymods.nn.lora``.

Written by tests/types/make_stubs.py; edit that, not this file.
"""

from collections.abc import Mapping
from typing import Any

from flax import nnx
from flax.typing import DotGeneralT, Dtype, PrecisionLike, PromoteDtypeFn

from lazymods._layer.mixin import LazyModuleMixin

class LazyLoRA(LazyModuleMixin, nnx.LoRA):
    """A low-rank adapter without ``in_features``; becomes ``nnx.LoRA``.

    Inferred: ``in_features``, the last axis of the input ``(..., in_features)``.

    Options: base_module, dtype, param_dtype, a_initializer, b_initializer, lora_param_type, promote_dtype, a_metadata,
        b_metadata, rngs.
    """

    def __init__(
        self,
        lora_rank: int,
        out_features: int,
        *,
        base_module: nnx.Module | None = None,
        dtype: Dtype | None = None,
        param_dtype: Dtype = ...,
        a_initializer: nnx.Initializer = ...,
        b_initializer: nnx.Initializer = ...,
        lora_param_type: type[nnx.Variable[Any]] = ...,
        promote_dtype: PromoteDtypeFn = ...,
        a_metadata: Mapping[str, Any] = ...,
        b_metadata: Mapping[str, Any] = ...,
        rngs: nnx.Rngs,
    ) -> None: ...


class LazyLoRALinear(LazyModuleMixin, nnx.LoRALinear):
    """A linear map with a low-rank adapter, without ``in_features``; becomes ``nnx.LoRALinear``.

    Inferred: ``in_features``, the last axis of the input ``(..., in_features)``.

    Options: lora_rank, lora_dtype, lora_param_dtype, a_initializer, b_initializer, lora_param_type, lora_promote_dtype,
        a_metadata, b_metadata, use_bias, dtype, param_dtype, precision, kernel_init, bias_init, dot_general,
        promote_dtype, preferred_element_type, kernel_metadata, bias_metadata, rngs.
    """

    def __init__(
        self,
        out_features: int,
        *,
        lora_rank: int,
        lora_dtype: Dtype | None = None,
        lora_param_dtype: Dtype = ...,
        a_initializer: nnx.Initializer = ...,
        b_initializer: nnx.Initializer = ...,
        lora_param_type: type[nnx.Variable[Any]] = ...,
        lora_promote_dtype: PromoteDtypeFn = ...,
        a_metadata: Mapping[str, Any] = ...,
        b_metadata: Mapping[str, Any] = ...,
        use_bias: bool = True,
        dtype: Dtype | None = None,
        param_dtype: Dtype = ...,
        precision: PrecisionLike = None,
        kernel_init: nnx.Initializer = ...,
        bias_init: nnx.Initializer = ...,
        dot_general: DotGeneralT = ...,
        promote_dtype: PromoteDtypeFn = ...,
        preferred_element_type: Dtype | None = None,
        kernel_metadata: Mapping[str, Any] = ...,
        bias_metadata: Mapping[str, Any] = ...,
        rngs: nnx.Rngs,
    ) -> None: ...
