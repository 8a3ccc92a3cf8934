"""The types of ``lazymods.nn.linear``.

Written by tests/types/make_stubs.py; edit that, not this file.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from flax import nnx
from flax.typing import (
    ConvGeneralDilatedT,
    DotGeneralT,
    Dtype,
    EinsumT,
    PaddingLike,
    PrecisionLike,
    PromoteDtypeFn,
    Shape,
)

from lazymods._layer.mixin import LazyModuleMixin

class LazyConv(LazyModuleMixin, nnx.Conv):
    """A convolution without ``in_features``; becomes ``nnx.Conv``.

    Inferred: ``in_features``, the last axis of the input ``(batch, space..., features)``.

    Options: strides, padding, input_dilation, kernel_dilation, feature_group_count, use_bias, mask, dtype, param_dtype,
        precision, kernel_init, bias_init, conv_general_dilated, promote_dtype, preferred_element_type, kernel_metadata,
        bias_metadata, rngs.
    """

    def __init__(
        self,
        out_features: int,
        kernel_size: int | Sequence[int],
        *,
        strides: int | Sequence[int] | None = 1,
        padding: PaddingLike = 'SAME',
        input_dilation: int | Sequence[int] | None = 1,
        kernel_dilation: int | Sequence[int] | None = 1,
        feature_group_count: int = 1,
        use_bias: bool = True,
        mask: jax.Array | None = None,
        dtype: Dtype | None = None,
        param_dtype: Dtype = ...,
        precision: PrecisionLike = None,
        kernel_init: nnx.Initializer = ...,
        bias_init: nnx.Initializer = ...,
        conv_general_dilated: ConvGeneralDilatedT = ...,
        promote_dtype: PromoteDtypeFn = ...,
        preferred_element_type: Dtype | None = None,
        kernel_metadata: Mapping[str, Any] = ...,
        bias_metadata: Mapping[str, Any] = ...,
        rngs: nnx.Rngs,
    ) -> None: ...


class LazyConv1d(LazyModuleMixin, nnx.Conv):
    """A convolution without ``in_features`` over 1 axes, whose input's rank is checked; becomes ``nnx.Conv``.

    Inferred: ``in_features``, the last axis of the input ``(batch, length, features)``.

    Options: strides, padding, input_dilation, kernel_dilation, feature_group_count, use_bias, mask, dtype, param_dtype,
        precision, kernel_init, bias_init, conv_general_dilated, promote_dtype, preferred_element_type, kernel_metadata,
        bias_metadata, rngs.
    """

    def __init__(
        self,
        out_features: int,
        kernel_size: int | Sequence[int],
        *,
        strides: int | Sequence[int] | None = 1,
        padding: PaddingLike = 'SAME',
        input_dilation: int | Sequence[int] | None = 1,
        kernel_dilation: int | Sequence[int] | None = 1,
        feature_group_count: int = 1,
        use_bias: bool = True,
        mask: jax.Array | None = None,
        dtype: Dtype | None = None,
        param_dtype: Dtype = ...,
        precision: PrecisionLike = None,
        kernel_init: nnx.Initializer = ...,
        bias_init: nnx.Initializer = ...,
        conv_general_dilated: ConvGeneralDilatedT = ...,
        promote_dtype: PromoteDtypeFn = ...,
        preferred_element_type: Dtype | None = None,
        kernel_metadata: Mapping[str, Any] = ...,
        bias_metadata: Mapping[str, Any] = ...,
        rngs: nnx.Rngs,
    ) -> None: ...


class LazyConv2d(LazyModuleMixin, nnx.Conv):
    """A convolution without ``in_features`` over 2 axes, whose input's rank is checked; becomes ``nnx.Conv``.

    Inferred: ``in_features``, the last axis of the input ``(batch, height, width, features)``.

    Options: strides, padding, input_dilation, kernel_dilation, feature_group_count, use_bias, mask, dtype, param_dtype,
        precision, kernel_init, bias_init, conv_general_dilated, promote_dtype, preferred_element_type, kernel_metadata,
        bias_metadata, rngs.
    """

    def __init__(
        self,
        out_features: int,
        kernel_size: int | Sequence[int],
        *,
        strides: int | Sequence[int] | None = 1,
        padding: PaddingLike = 'SAME',
        input_dilation: int | Sequence[int] | None = 1,
        kernel_dilation: int | Sequence[int] | None = 1,
        feature_group_count: int = 1,
        use_bias: bool = True,
        mask: jax.Array | None = None,
        dtype: Dtype | None = None,
        param_dtype: Dtype = ...,
        precision: PrecisionLike = None,
        kernel_init: nnx.Initializer = ...,
        bias_init: nnx.Initializer = ...,
        conv_general_dilated: ConvGeneralDilatedT = ...,
        promote_dtype: PromoteDtypeFn = ...,
        preferred_element_type: Dtype | None = None,
        kernel_metadata: Mapping[str, Any] = ...,
        bias_metadata: Mapping[str, Any] = ...,
        rngs: nnx.Rngs,
    ) -> None: ...


class LazyConv3d(LazyModuleMixin, nnx.Conv):
    """A convolution without ``in_features`` over 3 axes, whose input's rank is checked; becomes ``nnx.Conv``.

    Inferred: ``in_features``, the last axis of the input ``(batch, depth, height, width, features)``.

    Options: strides, padding, input_dilation, kernel_dilation, feature_group_count, use_bias, mask, dtype, param_dtype,
        precision, kernel_init, bias_init, conv_general_dilated, promote_dtype, preferred_element_type, kernel_metadata,
        bias_metadata, rngs.
    """

    def __init__(
        self,
        out_features: int,
        kernel_size: int | Sequence[int],
        *,
        strides: int | Sequence[int] | None = 1,
        padding: PaddingLike = 'SAME',
        input_dilation: int | Sequence[int] | None = 1,
        kernel_dilation: int | Sequence[int] | None = 1,
        feature_group_count: int = 1,
        use_bias: bool = True,
        mask: jax.Array | None = None,
        dtype: Dtype | None = None,
        param_dtype: Dtype = ...,
        precision: PrecisionLike = None,
        kernel_init: nnx.Initializer = ...,
        bias_init: nnx.Initializer = ...,
        conv_general_dilated: ConvGeneralDilatedT = ...,
        promote_dtype: PromoteDtypeFn = ...,
        preferred_element_type: Dtype | None = None,
        kernel_metadata: Mapping[str, Any] = ...,
        bias_metadata: Mapping[str, Any] = ...,
        rngs: nnx.Rngs,
    ) -> None: ...


class LazyConvTranspose(LazyModuleMixin, nnx.ConvTranspose):
    """A transposed convolution without ``in_features``; becomes ``nnx.ConvTranspose``.

    Inferred: ``in_features``, the last axis of the input ``(batch, space..., features)``.

    Options: strides, padding, kernel_dilation, use_bias, mask, dtype, param_dtype, precision, kernel_init, bias_init,
        transpose_kernel, promote_dtype, preferred_element_type, kernel_metadata, bias_metadata, rngs.
    """

    def __init__(
        self,
        out_features: int,
        kernel_size: int | Sequence[int],
        *,
        strides: int | Sequence[int] | None = None,
        padding: PaddingLike = 'SAME',
        kernel_dilation: int | Sequence[int] | None = None,
        use_bias: bool = True,
        mask: jax.Array | None = None,
        dtype: Dtype | None = None,
        param_dtype: Dtype = ...,
        precision: PrecisionLike | None = None,
        kernel_init: nnx.Initializer = ...,
        bias_init: nnx.Initializer = ...,
        transpose_kernel: bool = False,
        promote_dtype: PromoteDtypeFn = ...,
        preferred_element_type: Dtype | None = None,
        kernel_metadata: Mapping[str, Any] = ...,
        bias_metadata: Mapping[str, Any] = ...,
        rngs: nnx.Rngs,
    ) -> None: ...


class LazyConvTranspose1d(LazyModuleMixin, nnx.ConvTranspose):
    """A transposed convolution without ``in_features`` over 1 axes, whose input's rank is checked; becomes ``nnx.ConvTranspose``.

    Inferred: ``in_features``, the last axis of the input ``(batch, length, features)``.

    Options: strides, padding, kernel_dilation, use_bias, mask, dtype, param_dtype, precision, kernel_init, bias_init,
        transpose_kernel, promote_dtype, preferred_element_type, kernel_metadata, bias_metadata, rngs.
    """

    def __init__(
        self,
        out_features: int,
        kernel_size: int | Sequence[int],
        *,
        strides: int | Sequence[int] | None = None,
        padding: PaddingLike = 'SAME',
        kernel_dilation: int | Sequence[int] | None = None,
        use_bias: bool = True,
        mask: jax.Array | None = None,
        dtype: Dtype | None = None,
        param_dtype: Dtype = ...,
        precision: PrecisionLike | None = None,
        kernel_init: nnx.Initializer = ...,
        bias_init: nnx.Initializer = ...,
        transpose_kernel: bool = False,
        promote_dtype: PromoteDtypeFn = ...,
        preferred_element_type: Dtype | None = None,
        kernel_metadata: Mapping[str, Any] = ...,
        bias_metadata: Mapping[str, Any] = ...,
        rngs: nnx.Rngs,
    ) -> None: ...


class LazyConvTranspose2d(LazyModuleMixin, nnx.ConvTranspose):
    """A transposed convolution without ``in_features`` over 2 axes, whose input's rank is checked; becomes ``nnx.ConvTranspose``.

    Inferred: ``in_features``, the last axis of the input ``(batch, height, width, features)``.

    Options: strides, padding, kernel_dilation, use_bias, mask, dtype, param_dtype, precision, kernel_init, bias_init,
        transpose_kernel, promote_dtype, preferred_element_type, kernel_metadata, bias_metadata, rngs.
    """

    def __init__(
        self,
        out_features: int,
        kernel_size: int | Sequence[int],
        *,
        strides: int | Sequence[int] | None = None,
        padding: PaddingLike = 'SAME',
        kernel_dilation: int | Sequence[int] | None = None,
        use_bias: bool = True,
        mask: jax.Array | None = None,
        dtype: Dtype | None = None,
        param_dtype: Dtype = ...,
        precision: PrecisionLike | None = None,
        kernel_init: nnx.Initializer = ...,
        bias_init: nnx.Initializer = ...,
        transpose_kernel: bool = False,
        promote_dtype: PromoteDtypeFn = ...,
        preferred_element_type: Dtype | None = None,
        kernel_metadata: Mapping[str, Any] = ...,
        bias_metadata: Mapping[str, Any] = ...,
        rngs: nnx.Rngs,
    ) -> None: ...


class LazyConvTranspose3d(LazyModuleMixin, nnx.ConvTranspose):
    """A transposed convolution without ``in_features`` over 3 axes, whose input's rank is checked; becomes ``nnx.ConvTranspose``.

    Inferred: ``in_features``, the last axis of the input ``(batch, depth, height, width, features)``.

    Options: strides, padding, kernel_dilation, use_bias, mask, dtype, param_dtype, precision, kernel_init, bias_init,
        transpose_kernel, promote_dtype, preferred_element_type, kernel_metadata, bias_metadata, rngs.
    """

    def __init__(
        self,
        out_features: int,
        kernel_size: int | Sequence[int],
        *,
        strides: int | Sequence[int] | None = None,
        padding: PaddingLike = 'SAME',
        kernel_dilation: int | Sequence[int] | None = None,
        use_bias: bool = True,
        mask: jax.Array | None = None,
        dtype: Dtype | None = None,
        param_dtype: Dtype = ...,
        precision: PrecisionLike | None = None,
        kernel_init: nnx.Initializer = ...,
        bias_init: nnx.Initializer = ...,
        transpose_kernel: bool = False,
        promote_dtype: PromoteDtypeFn = ...,
        preferred_element_type: Dtype | None = None,
        kernel_metadata: Mapping[str, Any] = ...,
        bias_metadata: Mapping[str, Any] = ...,
        rngs: nnx.Rngs,
    ) -> None: ...


class LazyEinsum(LazyModuleMixin, nnx.Einsum):
    """An einsum with a learned kernel whose shape follows from the input; becomes ``nnx.Einsum``.

    Inferred: ``kernel_shape``, the size of every kernel letter that the input carries.

    Options: bias_shape, dtype, param_dtype, precision, kernel_init, bias_init, promote_dtype, einsum_op,
        preferred_element_type, kernel_metadata, bias_metadata, sizes, rngs.
    """

    def __init__(
        self,
        einsum_str: str,
        *,
        bias_shape: Shape | None = None,
        dtype: Dtype | None = None,
        param_dtype: Dtype = ...,
        precision: PrecisionLike = None,
        kernel_init: nnx.Initializer = ...,
        bias_init: nnx.Initializer = ...,
        promote_dtype: PromoteDtypeFn = ...,
        einsum_op: EinsumT = ...,
        preferred_element_type: Dtype | None = None,
        kernel_metadata: Mapping[str, Any] = ...,
        bias_metadata: Mapping[str, Any] = ...,
        sizes: Mapping[str, int] = ...,
        rngs: nnx.Rngs,
    ) -> None: ...


class LazyEmbed(LazyModuleMixin, nnx.Embed):
    """An embedding that is not initialized before it is used; becomes ``nnx.Embed``.

    Inferred: nothing from the input. Sizes are given, or read from a checkpoint; a table that is loaded is never
    initialized.

    Options: dtype, param_dtype, embedding_init, promote_dtype, embedding_metadata, rngs.
    """

    def __init__(
        self,
        num_embeddings: int | None = None,
        features: int | None = None,
        *,
        dtype: Dtype | None = None,
        param_dtype: Dtype = ...,
        embedding_init: nnx.Initializer = ...,
        promote_dtype: PromoteDtypeFn = ...,
        embedding_metadata: Mapping[str, Any] = ...,
        rngs: nnx.Rngs,
    ) -> None: ...


class LazyLinear(LazyModuleMixin, nnx.Linear):
    """A linear map without ``in_features``; becomes ``nnx.Linear``.

    Inferred: ``in_features``, the last axis of the input ``(..., in_features)``.

    Options: use_bias, dtype, param_dtype, precision, kernel_init, bias_init, dot_general, promote_dtype,
        preferred_element_type, kernel_metadata, bias_metadata, rngs.
    """

    def __init__(
        self,
        out_features: int,
        *,
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


class LazyLinearGeneral(LazyModuleMixin, nnx.LinearGeneral):
    """A linear map over several axes without ``in_features``; becomes ``nnx.LinearGeneral``.

    Inferred: ``in_features``, the input's sizes at ``axis``; the sizes at ``batch_axis`` if that is a tuple of axes.

    Options: axis, batch_axis, use_bias, dtype, param_dtype, kernel_init, bias_init, precision, promote_dtype,
        dot_general, dot_general_cls, preferred_element_type, kernel_metadata, bias_metadata, rngs.
    """

    def __init__(
        self,
        out_features: int | Sequence[int],
        *,
        axis: int | Sequence[int] = -1,
        batch_axis: Mapping[int, int] | Sequence[int] = ...,
        use_bias: bool = True,
        dtype: Dtype | None = None,
        param_dtype: Dtype = ...,
        kernel_init: nnx.Initializer = ...,
        bias_init: nnx.Initializer = ...,
        precision: PrecisionLike = None,
        promote_dtype: PromoteDtypeFn = ...,
        dot_general: DotGeneralT | None = None,
        dot_general_cls: Any = None,
        preferred_element_type: Dtype | None = None,
        kernel_metadata: Mapping[str, Any] = ...,
        bias_metadata: Mapping[str, Any] = ...,
        rngs: nnx.Rngs,
    ) -> None: ...
