"""The GRU cell that Flax lacks: the reset gate acts after the recurrent product, which has a bias of its own.

It is PyTorch's ``GRUCell``, and Keras's with ``reset_after=True``. What ``nnx.GRUCell`` computes is the same but for
the bias of the hidden state, so the cell is that class with a bias in its ``dense_h``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes
from flax.nnx.nn.linear import default_kernel_init
from flax.typing import Dtype, PromoteDtypeFn

_NO_METADATA: Mapping[str, Any] = MappingProxyType({})


class ResetAfterGRUCell(nnx.GRUCell):
    r"""A GRU cell with a bias for the hidden state, as PyTorch's and as Keras's with ``reset_after=True``.

    .. math::
        r &= \sigma(W_{ir} x + b_{ir} + W_{hr} h + b_{hr}) \\
        z &= \sigma(W_{iz} x + b_{iz} + W_{hz} h + b_{hz}) \\
        n &= \tanh(W_{in} x + b_{in} + r * (W_{hn} h + b_{hn})) \\
        h' &= (1 - z) * n + z * h

    The gates stand side by side in ``dense_i`` and ``dense_h``, in the order r, z, n of PyTorch; Keras has z, r, n. It
    goes into ``nnx.RNN`` and ``nnx.Bidirectional`` as ``nnx.GRUCell`` does, and its call is that class's.

    Args:
        in_features: The number of input features.
        hidden_features: The number of hidden features.
        gate_fn: The activation of the gates r and z.
        activation_fn: The activation of the candidate n.
        kernel_init: The initializer of the input's kernel.
        recurrent_kernel_init: That of the hidden state's.
        bias_init: That of both biases.
        dtype: The dtype of the computation; None: that of inputs and parameters together.
        param_dtype: The dtype of the parameters.
        carry_init: As in ``nnx.GRUCell``.
        promote_dtype: As in ``nnx.GRUCell``.
        keep_rngs: As in ``nnx.GRUCell``.
        kernel_metadata: Metadata of the input's kernel.
        recurrent_kernel_metadata: Metadata of the hidden state's.
        bias_metadata: Metadata of both biases.
        rngs: The random streams.

    Example:
        >>> import jax.numpy as jnp, lazymods as lm
        >>> from flax import nnx
        >>> cell = lm.ResetAfterGRUCell(3, 4, rngs=nnx.Rngs(0))
        >>> nnx.RNN(cell)(jnp.ones((2, 5, 3)), rngs=nnx.Rngs(0)).shape
        (2, 5, 4)
        >>> sorted(lm.state_dict(cell))
        ['dense_h.bias', 'dense_h.kernel', 'dense_i.bias', 'dense_i.kernel']

    References:
        Cho et al., "Learning Phrase Representations using RNN Encoder-Decoder", 2014, arXiv:1406.1078v1: version 1 has
        the reset gate after the product, version 3 before it.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        *,
        gate_fn: Callable[..., Any] = nnx.sigmoid,
        activation_fn: Callable[..., Any] = nnx.tanh,
        kernel_init: nnx.Initializer = default_kernel_init,
        recurrent_kernel_init: nnx.Initializer = nnx.initializers.orthogonal(),  # noqa: B008  as in Flax
        bias_init: nnx.Initializer = nnx.initializers.zeros_init(),  # noqa: B008  as in Flax
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        carry_init: nnx.Initializer | None = None,
        promote_dtype: PromoteDtypeFn = dtypes.promote_dtype,
        keep_rngs: bool = False,
        kernel_metadata: Mapping[str, Any] = _NO_METADATA,
        recurrent_kernel_metadata: Mapping[str, Any] = _NO_METADATA,
        bias_metadata: Mapping[str, Any] = _NO_METADATA,
        rngs: nnx.Rngs,
    ) -> None:
        super().__init__(
            in_features,
            hidden_features,
            gate_fn=gate_fn,
            activation_fn=activation_fn,
            kernel_init=kernel_init,
            recurrent_kernel_init=recurrent_kernel_init,
            bias_init=bias_init,
            dtype=dtype,
            param_dtype=param_dtype,
            carry_init=carry_init,
            promote_dtype=promote_dtype,
            keep_rngs=keep_rngs,
            kernel_metadata=kernel_metadata,
            recurrent_kernel_metadata=recurrent_kernel_metadata,
            bias_metadata=bias_metadata,
            rngs=rngs,
        )
        value = bias_init(rngs.params(), (3 * hidden_features,), param_dtype)
        self.dense_h.bias = nnx.Param(value, **bias_metadata)
        self.dense_h.use_bias = True
