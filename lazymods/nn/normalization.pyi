"""The types of ``lazymods.nn.normalization``.

Written by tests/types/make_stubs.py; edit that, not this file.
"""

from collections.abc import Mapping
from typing import Any

from flax import nnx
from flax.nnx import filterlib
from flax.typing import Axes, Dtype, PromoteDtypeFn

from lazymods._layer.mixin import LazyModuleMixin

class LazyBatchNorm(LazyModuleMixin, nnx.BatchNorm):
    """``nnx.BatchNorm`` without ``num_features``.

    Inferred: ``num_features``, the input's size at ``axis``.

    Options: use_running_average, axis, momentum, epsilon, dtype, param_dtype, use_bias, use_scale, bias_init,
        scale_init, axis_name, axis_index_groups, use_fast_variance, promote_dtype, bias_metadata, scale_metadata, rngs.
    """

    def __init__(
        self,
        *,
        use_running_average: bool | None = False,
        axis: int = -1,
        momentum: float = 0.99,
        epsilon: float = 1e-05,
        dtype: Dtype | None = None,
        param_dtype: Dtype = ...,
        use_bias: bool = True,
        use_scale: bool = True,
        bias_init: nnx.Initializer = ...,
        scale_init: nnx.Initializer = ...,
        axis_name: str | None = None,
        axis_index_groups: Any = None,
        use_fast_variance: bool = True,
        promote_dtype: PromoteDtypeFn = ...,
        bias_metadata: Mapping[str, Any] = ...,
        scale_metadata: Mapping[str, Any] = ...,
        rngs: nnx.Rngs,
    ) -> None: ...


class LazyBatchNorm1d(LazyModuleMixin, nnx.BatchNorm):
    """``nnx.BatchNorm`` without ``num_features``, whose input is (batch, length, features).

    Inferred: ``num_features``, the input's size at ``axis``.

    Options: use_running_average, axis, momentum, epsilon, dtype, param_dtype, use_bias, use_scale, bias_init,
        scale_init, axis_name, axis_index_groups, use_fast_variance, promote_dtype, bias_metadata, scale_metadata, rngs.
    """

    def __init__(
        self,
        *,
        use_running_average: bool | None = False,
        axis: int = -1,
        momentum: float = 0.99,
        epsilon: float = 1e-05,
        dtype: Dtype | None = None,
        param_dtype: Dtype = ...,
        use_bias: bool = True,
        use_scale: bool = True,
        bias_init: nnx.Initializer = ...,
        scale_init: nnx.Initializer = ...,
        axis_name: str | None = None,
        axis_index_groups: Any = None,
        use_fast_variance: bool = True,
        promote_dtype: PromoteDtypeFn = ...,
        bias_metadata: Mapping[str, Any] = ...,
        scale_metadata: Mapping[str, Any] = ...,
        rngs: nnx.Rngs,
    ) -> None: ...


class LazyBatchNorm2d(LazyModuleMixin, nnx.BatchNorm):
    """``nnx.BatchNorm`` without ``num_features``, whose input is (batch, height, width, features).

    Inferred: ``num_features``, the input's size at ``axis``.

    Options: use_running_average, axis, momentum, epsilon, dtype, param_dtype, use_bias, use_scale, bias_init,
        scale_init, axis_name, axis_index_groups, use_fast_variance, promote_dtype, bias_metadata, scale_metadata, rngs.
    """

    def __init__(
        self,
        *,
        use_running_average: bool | None = False,
        axis: int = -1,
        momentum: float = 0.99,
        epsilon: float = 1e-05,
        dtype: Dtype | None = None,
        param_dtype: Dtype = ...,
        use_bias: bool = True,
        use_scale: bool = True,
        bias_init: nnx.Initializer = ...,
        scale_init: nnx.Initializer = ...,
        axis_name: str | None = None,
        axis_index_groups: Any = None,
        use_fast_variance: bool = True,
        promote_dtype: PromoteDtypeFn = ...,
        bias_metadata: Mapping[str, Any] = ...,
        scale_metadata: Mapping[str, Any] = ...,
        rngs: nnx.Rngs,
    ) -> None: ...


class LazyBatchNorm3d(LazyModuleMixin, nnx.BatchNorm):
    """``nnx.BatchNorm`` without ``num_features``, whose input is (batch, depth, height, width, features).

    Inferred: ``num_features``, the input's size at ``axis``.

    Options: use_running_average, axis, momentum, epsilon, dtype, param_dtype, use_bias, use_scale, bias_init,
        scale_init, axis_name, axis_index_groups, use_fast_variance, promote_dtype, bias_metadata, scale_metadata, rngs.
    """

    def __init__(
        self,
        *,
        use_running_average: bool | None = False,
        axis: int = -1,
        momentum: float = 0.99,
        epsilon: float = 1e-05,
        dtype: Dtype | None = None,
        param_dtype: Dtype = ...,
        use_bias: bool = True,
        use_scale: bool = True,
        bias_init: nnx.Initializer = ...,
        scale_init: nnx.Initializer = ...,
        axis_name: str | None = None,
        axis_index_groups: Any = None,
        use_fast_variance: bool = True,
        promote_dtype: PromoteDtypeFn = ...,
        bias_metadata: Mapping[str, Any] = ...,
        scale_metadata: Mapping[str, Any] = ...,
        rngs: nnx.Rngs,
    ) -> None: ...


class LazyGroupNorm(LazyModuleMixin, nnx.GroupNorm):
    """``nnx.GroupNorm`` without ``num_features``.

    Inferred: ``num_features``, the input's last axis.

    Options: num_groups, group_size, epsilon, dtype, param_dtype, use_bias, use_scale, bias_init, scale_init,
        reduction_axes, axis_name, axis_index_groups, use_fast_variance, promote_dtype, bias_metadata, scale_metadata,
        rngs.
    """

    def __init__(
        self,
        *,
        num_groups: int | None = 32,
        group_size: int | None = None,
        epsilon: float = 1e-06,
        dtype: Dtype | None = None,
        param_dtype: Dtype = ...,
        use_bias: bool = True,
        use_scale: bool = True,
        bias_init: nnx.Initializer = ...,
        scale_init: nnx.Initializer = ...,
        reduction_axes: Axes | None = None,
        axis_name: str | None = None,
        axis_index_groups: Any = None,
        use_fast_variance: bool = True,
        promote_dtype: PromoteDtypeFn = ...,
        bias_metadata: Mapping[str, Any] = ...,
        scale_metadata: Mapping[str, Any] = ...,
        rngs: nnx.Rngs,
    ) -> None: ...


class LazyInstanceNorm(LazyModuleMixin, nnx.InstanceNorm):
    """``nnx.InstanceNorm`` without ``num_features``.

    Inferred: ``num_features``, the input's size at ``feature_axes``.

    Options: epsilon, dtype, param_dtype, use_bias, use_scale, bias_init, scale_init, feature_axes, axis_name,
        axis_index_groups, use_fast_variance, promote_dtype, bias_metadata, scale_metadata, rngs.
    """

    def __init__(
        self,
        *,
        epsilon: float = 1e-06,
        dtype: Dtype | None = None,
        param_dtype: Dtype = ...,
        use_bias: bool = True,
        use_scale: bool = True,
        bias_init: nnx.Initializer = ...,
        scale_init: nnx.Initializer = ...,
        feature_axes: Axes = -1,
        axis_name: str | None = None,
        axis_index_groups: Any = None,
        use_fast_variance: bool = True,
        promote_dtype: PromoteDtypeFn = ...,
        bias_metadata: Mapping[str, Any] = ...,
        scale_metadata: Mapping[str, Any] = ...,
        rngs: nnx.Rngs,
    ) -> None: ...


class LazyInstanceNorm1d(LazyModuleMixin, nnx.InstanceNorm):
    """``nnx.InstanceNorm`` without ``num_features``, whose input is (batch, length, features).

    Inferred: ``num_features``, the input's size at ``feature_axes``.

    Options: epsilon, dtype, param_dtype, use_bias, use_scale, bias_init, scale_init, feature_axes, axis_name,
        axis_index_groups, use_fast_variance, promote_dtype, bias_metadata, scale_metadata, rngs.
    """

    def __init__(
        self,
        *,
        epsilon: float = 1e-06,
        dtype: Dtype | None = None,
        param_dtype: Dtype = ...,
        use_bias: bool = True,
        use_scale: bool = True,
        bias_init: nnx.Initializer = ...,
        scale_init: nnx.Initializer = ...,
        feature_axes: Axes = -1,
        axis_name: str | None = None,
        axis_index_groups: Any = None,
        use_fast_variance: bool = True,
        promote_dtype: PromoteDtypeFn = ...,
        bias_metadata: Mapping[str, Any] = ...,
        scale_metadata: Mapping[str, Any] = ...,
        rngs: nnx.Rngs,
    ) -> None: ...


class LazyInstanceNorm2d(LazyModuleMixin, nnx.InstanceNorm):
    """``nnx.InstanceNorm`` without ``num_features``, whose input is (batch, height, width, features).

    Inferred: ``num_features``, the input's size at ``feature_axes``.

    Options: epsilon, dtype, param_dtype, use_bias, use_scale, bias_init, scale_init, feature_axes, axis_name,
        axis_index_groups, use_fast_variance, promote_dtype, bias_metadata, scale_metadata, rngs.
    """

    def __init__(
        self,
        *,
        epsilon: float = 1e-06,
        dtype: Dtype | None = None,
        param_dtype: Dtype = ...,
        use_bias: bool = True,
        use_scale: bool = True,
        bias_init: nnx.Initializer = ...,
        scale_init: nnx.Initializer = ...,
        feature_axes: Axes = -1,
        axis_name: str | None = None,
        axis_index_groups: Any = None,
        use_fast_variance: bool = True,
        promote_dtype: PromoteDtypeFn = ...,
        bias_metadata: Mapping[str, Any] = ...,
        scale_metadata: Mapping[str, Any] = ...,
        rngs: nnx.Rngs,
    ) -> None: ...


class LazyInstanceNorm3d(LazyModuleMixin, nnx.InstanceNorm):
    """``nnx.InstanceNorm`` without ``num_features``, whose input is (batch, depth, height, width, features).

    Inferred: ``num_features``, the input's size at ``feature_axes``.

    Options: epsilon, dtype, param_dtype, use_bias, use_scale, bias_init, scale_init, feature_axes, axis_name,
        axis_index_groups, use_fast_variance, promote_dtype, bias_metadata, scale_metadata, rngs.
    """

    def __init__(
        self,
        *,
        epsilon: float = 1e-06,
        dtype: Dtype | None = None,
        param_dtype: Dtype = ...,
        use_bias: bool = True,
        use_scale: bool = True,
        bias_init: nnx.Initializer = ...,
        scale_init: nnx.Initializer = ...,
        feature_axes: Axes = -1,
        axis_name: str | None = None,
        axis_index_groups: Any = None,
        use_fast_variance: bool = True,
        promote_dtype: PromoteDtypeFn = ...,
        bias_metadata: Mapping[str, Any] = ...,
        scale_metadata: Mapping[str, Any] = ...,
        rngs: nnx.Rngs,
    ) -> None: ...


class LazyLayerNorm(LazyModuleMixin, nnx.LayerNorm):
    """``nnx.LayerNorm`` without ``num_features``.

    Inferred: ``num_features``, the input's size at ``feature_axes``.

    Options: epsilon, dtype, param_dtype, use_bias, use_scale, bias_init, scale_init, reduction_axes, feature_axes,
        axis_name, axis_index_groups, use_fast_variance, promote_dtype, bias_metadata, scale_metadata, rngs.
    """

    def __init__(
        self,
        *,
        epsilon: float = 1e-06,
        dtype: Dtype | None = None,
        param_dtype: Dtype = ...,
        use_bias: bool = True,
        use_scale: bool = True,
        bias_init: nnx.Initializer = ...,
        scale_init: nnx.Initializer = ...,
        reduction_axes: Axes = -1,
        feature_axes: Axes = -1,
        axis_name: str | None = None,
        axis_index_groups: Any = None,
        use_fast_variance: bool = True,
        promote_dtype: PromoteDtypeFn = ...,
        bias_metadata: Mapping[str, Any] = ...,
        scale_metadata: Mapping[str, Any] = ...,
        rngs: nnx.Rngs,
    ) -> None: ...


class LazyRMSNorm(LazyModuleMixin, nnx.RMSNorm):
    """``nnx.RMSNorm`` without ``num_features``.

    Inferred: ``num_features``, the input's size at ``feature_axes``.

    Options: epsilon, dtype, param_dtype, use_scale, scale_init, reduction_axes, feature_axes, axis_name,
        axis_index_groups, use_fast_variance, promote_dtype, scale_metadata, rngs.
    """

    def __init__(
        self,
        *,
        epsilon: float = 1e-06,
        dtype: Dtype | None = None,
        param_dtype: Dtype = ...,
        use_scale: bool = True,
        scale_init: nnx.Initializer = ...,
        reduction_axes: Axes = -1,
        feature_axes: Axes = -1,
        axis_name: str | None = None,
        axis_index_groups: Any = None,
        use_fast_variance: bool = True,
        promote_dtype: PromoteDtypeFn = ...,
        scale_metadata: Mapping[str, Any] = ...,
        rngs: nnx.Rngs,
    ) -> None: ...


class LazySpectralNorm(LazyModuleMixin, nnx.SpectralNorm):
    """``nnx.SpectralNorm`` around a layer that may be lazy.

    Inferred: nothing itself. The first call initializes the wrapped layer, then the singular vectors.

    Options: n_steps, epsilon, dtype, param_dtype, error_on_non_matrix, update_stats, rngs.
    """

    def __init__(
        self,
        layer_instance: nnx.Module,
        *,
        n_steps: int = 1,
        epsilon: float = 1e-12,
        dtype: Dtype | None = None,
        param_dtype: Dtype = ...,
        error_on_non_matrix: bool = False,
        update_stats: bool = True,
        rngs: nnx.Rngs,
    ) -> None: ...


class LazyWeightNorm(LazyModuleMixin, nnx.WeightNorm):
    """``nnx.WeightNorm`` around a layer that may be lazy.

    Inferred: nothing itself. The first call initializes the wrapped layer, then the scales.

    Options: feature_axes, use_scale, scale_init, epsilon, dtype, param_dtype, variable_filter, promote_dtype, rngs.
    """

    def __init__(
        self,
        layer_instance: nnx.Module,
        *,
        feature_axes: Axes | None = -1,
        use_scale: bool = True,
        scale_init: nnx.Initializer = ...,
        epsilon: float = 1e-12,
        dtype: Dtype | None = None,
        param_dtype: Dtype = ...,
        variable_filter: filterlib.Filter = ...,
        promote_dtype: PromoteDtypeFn = ...,
        rngs: nnx.Rngs,
    ) -> None: ...
