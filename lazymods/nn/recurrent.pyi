"""The types of ``lazymods.nn.recurrent``.

Written by tests/types/make_stubs.py; edit that, not this file.
"""

from collections.abc import Callable, Mapping
from typing import Any

from flax import nnx
from flax.typing import Dtype, PromoteDtypeFn

from lazymods._gru_cell import ResetAfterGRUCell
from lazymods._layer.mixin import LazyModuleMixin

class LazyGRUCell(LazyModuleMixin, nnx.GRUCell):
    """A recurrent cell without ``in_features``; becomes ``nnx.GRUCell``.

    Inferred: ``in_features``, the last axis of the input ``(batch, in_features)`` of the first call, or of the
    shape that ``initialize_carry`` gets, which ``nnx.RNN`` calls first.

    Options: gate_fn, activation_fn, kernel_init, recurrent_kernel_init, bias_init, dtype, param_dtype, carry_init,
        promote_dtype, keep_rngs, kernel_metadata, recurrent_kernel_metadata, bias_metadata, rngs.
    """

    def __init__(
        self,
        hidden_features: int,
        *,
        gate_fn: Callable[..., Any] = ...,
        activation_fn: Callable[..., Any] = ...,
        kernel_init: nnx.Initializer = ...,
        recurrent_kernel_init: nnx.Initializer = ...,
        bias_init: nnx.Initializer = ...,
        dtype: Dtype | None = None,
        param_dtype: Dtype = ...,
        carry_init: nnx.Initializer | None = None,
        promote_dtype: PromoteDtypeFn = ...,
        keep_rngs: bool = False,
        kernel_metadata: Mapping[str, Any] = ...,
        recurrent_kernel_metadata: Mapping[str, Any] = ...,
        bias_metadata: Mapping[str, Any] = ...,
        rngs: nnx.Rngs,
    ) -> None: ...


class LazyLSTMCell(LazyModuleMixin, nnx.LSTMCell):
    """A recurrent cell without ``in_features``; becomes ``nnx.LSTMCell``.

    Inferred: ``in_features``, the last axis of the input ``(batch, in_features)`` of the first call, or of the
    shape that ``initialize_carry`` gets, which ``nnx.RNN`` calls first.

    Options: gate_fn, activation_fn, kernel_init, recurrent_kernel_init, bias_init, dtype, param_dtype, carry_init,
        promote_dtype, keep_rngs, kernel_metadata, recurrent_kernel_metadata, bias_metadata, rngs.
    """

    def __init__(
        self,
        hidden_features: int,
        *,
        gate_fn: Callable[..., Any] = ...,
        activation_fn: Callable[..., Any] = ...,
        kernel_init: nnx.Initializer = ...,
        recurrent_kernel_init: nnx.Initializer = ...,
        bias_init: nnx.Initializer = ...,
        dtype: Dtype | None = None,
        param_dtype: Dtype = ...,
        carry_init: nnx.Initializer | None = None,
        promote_dtype: PromoteDtypeFn = ...,
        keep_rngs: bool = False,
        kernel_metadata: Mapping[str, Any] = ...,
        recurrent_kernel_metadata: Mapping[str, Any] = ...,
        bias_metadata: Mapping[str, Any] = ...,
        rngs: nnx.Rngs,
    ) -> None: ...


class LazyOptimizedLSTMCell(LazyModuleMixin, nnx.OptimizedLSTMCell):
    """A recurrent cell without ``in_features``; becomes ``nnx.OptimizedLSTMCell``.

    Inferred: ``in_features``, the last axis of the input ``(batch, in_features)`` of the first call, or of the
    shape that ``initialize_carry`` gets, which ``nnx.RNN`` calls first.

    Options: gate_fn, activation_fn, kernel_init, recurrent_kernel_init, bias_init, dtype, param_dtype, carry_init,
        promote_dtype, keep_rngs, kernel_metadata, recurrent_kernel_metadata, bias_metadata, rngs.
    """

    def __init__(
        self,
        hidden_features: int,
        *,
        gate_fn: Callable[..., Any] = ...,
        activation_fn: Callable[..., Any] = ...,
        kernel_init: nnx.Initializer = ...,
        recurrent_kernel_init: nnx.Initializer = ...,
        bias_init: nnx.Initializer = ...,
        dtype: Dtype | None = None,
        param_dtype: Dtype = ...,
        carry_init: nnx.Initializer | None = None,
        promote_dtype: PromoteDtypeFn = ...,
        keep_rngs: bool = False,
        kernel_metadata: Mapping[str, Any] = ...,
        recurrent_kernel_metadata: Mapping[str, Any] = ...,
        bias_metadata: Mapping[str, Any] = ...,
        rngs: nnx.Rngs,
    ) -> None: ...


class LazyResetAfterGRUCell(LazyModuleMixin, ResetAfterGRUCell):
    """A recurrent cell without ``in_features``; becomes ``lm.ResetAfterGRUCell``.

    Inferred: ``in_features``, the last axis of the input ``(batch, in_features)`` of the first call, or of the
    shape that ``initialize_carry`` gets, which ``nnx.RNN`` calls first.

    Options: gate_fn, activation_fn, kernel_init, recurrent_kernel_init, bias_init, dtype, param_dtype, carry_init,
        promote_dtype, keep_rngs, kernel_metadata, recurrent_kernel_metadata, bias_metadata, rngs.
    """

    def __init__(
        self,
        hidden_features: int,
        *,
        gate_fn: Callable[..., Any] = ...,
        activation_fn: Callable[..., Any] = ...,
        kernel_init: nnx.Initializer = ...,
        recurrent_kernel_init: nnx.Initializer = ...,
        bias_init: nnx.Initializer = ...,
        dtype: Dtype | None = None,
        param_dtype: Dtype = ...,
        carry_init: nnx.Initializer | None = None,
        promote_dtype: PromoteDtypeFn = ...,
        keep_rngs: bool = False,
        kernel_metadata: Mapping[str, Any] = ...,
        recurrent_kernel_metadata: Mapping[str, Any] = ...,
        bias_metadata: Mapping[str, Any] = ...,
        rngs: nnx.Rngs,
    ) -> None: ...


class LazySimpleCell(LazyModuleMixin, nnx.SimpleCell):
    """A recurrent cell without ``in_features``; becomes ``nnx.SimpleCell``.

    Inferred: ``in_features``, the last axis of the input ``(batch, in_features)`` of the first call, or of the
    shape that ``initialize_carry`` gets, which ``nnx.RNN`` calls first.

    Options: dtype, param_dtype, carry_init, residual, activation_fn, kernel_init, recurrent_kernel_init, bias_init,
        promote_dtype, keep_rngs, kernel_metadata, recurrent_kernel_metadata, bias_metadata, rngs.
    """

    def __init__(
        self,
        hidden_features: int,
        *,
        dtype: Dtype = ...,
        param_dtype: Dtype = ...,
        carry_init: nnx.Initializer | None = None,
        residual: bool = False,
        activation_fn: Callable[..., Any] = ...,
        kernel_init: nnx.Initializer = ...,
        recurrent_kernel_init: nnx.Initializer = ...,
        bias_init: nnx.Initializer = ...,
        promote_dtype: PromoteDtypeFn = ...,
        keep_rngs: bool = False,
        kernel_metadata: Mapping[str, Any] = ...,
        recurrent_kernel_metadata: Mapping[str, Any] = ...,
        bias_metadata: Mapping[str, Any] = ...,
        rngs: nnx.Rngs,
    ) -> None: ...
