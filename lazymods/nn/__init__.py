"""The lazy twins of Flax NNX's layers, one file for each family as in ``flax.nnx.nn``."""

from lazymods.nn.attention import LazyMultiHeadAttention as LazyMultiHeadAttention
from lazymods.nn.linear import LazyConv as LazyConv
from lazymods.nn.linear import LazyConv1d as LazyConv1d
from lazymods.nn.linear import LazyConv2d as LazyConv2d
from lazymods.nn.linear import LazyConv3d as LazyConv3d
from lazymods.nn.linear import LazyConvTranspose as LazyConvTranspose
from lazymods.nn.linear import LazyConvTranspose1d as LazyConvTranspose1d
from lazymods.nn.linear import LazyConvTranspose2d as LazyConvTranspose2d
from lazymods.nn.linear import LazyConvTranspose3d as LazyConvTranspose3d
from lazymods.nn.linear import LazyEinsum as LazyEinsum
from lazymods.nn.linear import LazyEmbed as LazyEmbed
from lazymods.nn.linear import LazyLinear as LazyLinear
from lazymods.nn.linear import LazyLinearGeneral as LazyLinearGeneral
from lazymods.nn.lora import LazyLoRA as LazyLoRA
from lazymods.nn.lora import LazyLoRALinear as LazyLoRALinear
from lazymods.nn.normalization import LazyBatchNorm as LazyBatchNorm
from lazymods.nn.normalization import LazyBatchNorm1d as LazyBatchNorm1d
from lazymods.nn.normalization import LazyBatchNorm2d as LazyBatchNorm2d
from lazymods.nn.normalization import LazyBatchNorm3d as LazyBatchNorm3d
from lazymods.nn.normalization import LazyGroupNorm as LazyGroupNorm
from lazymods.nn.normalization import LazyInstanceNorm as LazyInstanceNorm
from lazymods.nn.normalization import LazyInstanceNorm1d as LazyInstanceNorm1d
from lazymods.nn.normalization import LazyInstanceNorm2d as LazyInstanceNorm2d
from lazymods.nn.normalization import LazyInstanceNorm3d as LazyInstanceNorm3d
from lazymods.nn.normalization import LazyLayerNorm as LazyLayerNorm
from lazymods.nn.normalization import LazyRMSNorm as LazyRMSNorm
from lazymods.nn.normalization import LazySpectralNorm as LazySpectralNorm
from lazymods.nn.normalization import LazyWeightNorm as LazyWeightNorm
from lazymods.nn.recurrent import LazyGRUCell as LazyGRUCell
from lazymods.nn.recurrent import LazyLSTMCell as LazyLSTMCell
from lazymods.nn.recurrent import LazyOptimizedLSTMCell as LazyOptimizedLSTMCell
from lazymods.nn.recurrent import LazyResetAfterGRUCell as LazyResetAfterGRUCell
from lazymods.nn.recurrent import LazySimpleCell as LazySimpleCell

__all__ = [
    "LazyBatchNorm",
    "LazyBatchNorm1d",
    "LazyBatchNorm2d",
    "LazyBatchNorm3d",
    "LazyConv",
    "LazyConv1d",
    "LazyConv2d",
    "LazyConv3d",
    "LazyConvTranspose",
    "LazyConvTranspose1d",
    "LazyConvTranspose2d",
    "LazyConvTranspose3d",
    "LazyEinsum",
    "LazyEmbed",
    "LazyGRUCell",
    "LazyGroupNorm",
    "LazyInstanceNorm",
    "LazyInstanceNorm1d",
    "LazyInstanceNorm2d",
    "LazyInstanceNorm3d",
    "LazyLSTMCell",
    "LazyLayerNorm",
    "LazyLinear",
    "LazyLinearGeneral",
    "LazyLoRA",
    "LazyLoRALinear",
    "LazyMultiHeadAttention",
    "LazyOptimizedLSTMCell",
    "LazyRMSNorm",
    "LazyResetAfterGRUCell",
    "LazySimpleCell",
    "LazySpectralNorm",
    "LazyWeightNorm",
]
