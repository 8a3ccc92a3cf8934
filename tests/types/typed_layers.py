"""The types of built-in lazy layers: those of their Flax classes."""
# pyright: reportUnnecessaryTypeIgnoreComment=true

from typing import assert_type

import jax
from flax import nnx

import lazymods as lm


def instances(rngs: nnx.Rngs, x: jax.Array) -> None:
    layer = lm.LazyLinear(4, use_bias=False, rngs=rngs)
    assert_type(layer, lm.LazyLinear)
    assert_type(layer(x), jax.Array)
    assert_type(layer.in_features, int)
    assert_type(layer.has_uninitialized_params(), bool)
    as_flax: nnx.Linear = layer
    as_lazy: lm.LazyModuleMixin = layer
    del as_flax, as_lazy
    assert_type(lm.LazyConv2d(8, 3, padding="VALID", rngs=rngs)(x), jax.Array)
    assert_type(lm.LazyEinsum("nd,df->nf", sizes={"f": 4}, rngs=rngs)(x), jax.Array)
    assert_type(lm.LazyLinearGeneral(4, batch_axis=(0,), rngs=rngs).axis, tuple[int, ...])
    assert_type(lm.LazyBatchNorm(momentum=0.9, rngs=rngs).momentum, float)
    norm: nnx.WeightNorm = lm.LazyWeightNorm(layer, rngs=rngs)
    cell: nnx.LSTMCell = lm.LazyLSTMCell(8, rngs=rngs)
    table: nnx.Embed = lm.LazyEmbed(rngs=rngs)
    attention: nnx.MultiHeadAttention = lm.LazyMultiHeadAttention(8, in_kv_features=None, rngs=rngs)
    adapter: nnx.LoRA = lm.LazyLoRA(2, 4, base_module=layer, rngs=rngs)
    nnx.Sequential(norm, cell, table, attention, adapter)


class Named(lm.LazyLinear):
    def named(self, x: jax.Array) -> tuple[int, jax.Array]:
        return self.in_features, self(x)


class Scale(nnx.Module):
    def __init__(self, features: int) -> None:
        self.w = nnx.Param(jax.numpy.ones(features))

    def __call__(self, x: jax.Array) -> tuple[jax.Array, str]:
        return x * self.w, "scaled"


class LazyScale(lm.LazyModuleMixin, Scale):
    cls_to_become = Scale

    def __init__(self) -> None:
        self.w = lm.UninitializedParameter(init=nnx.initializers.ones)

    def initialize_parameters(self, x: jax.Array) -> None:
        self.w.materialize((x.shape[-1],))


def by_hand(x: jax.Array) -> None:
    layer = LazyScale()
    assert_type(layer, LazyScale)
    assert_type(layer(x), tuple[jax.Array, str])


def subclass(rngs: nnx.Rngs, x: jax.Array) -> None:
    assert_type(Named(4, rngs=rngs).named(x), tuple[int, jax.Array])


def wrong(rngs: nnx.Rngs, x: jax.Array) -> None:
    lm.LazyLinear("x", bais=3)  # type: ignore[call-arg, arg-type]
    lm.LazyLinear("x", rngs=rngs)  # type: ignore[arg-type]
    lm.LazyLinear(4, bais=3, rngs=rngs)  # type: ignore[call-arg]
    lm.LazyLinear(4)  # type: ignore[call-arg]
    lm.LazyLinear(3, 4, rngs=rngs)  # type: ignore[call-arg, arg-type]
    lm.LazyLinear(4, in_features=3, rngs=rngs)  # type: ignore[call-arg]
    lm.LazyLinear(4, rngs=rngs).kernle  # type: ignore[attr-defined]  # noqa: B018
    lm.LazyBatchNorm(3, rngs=rngs)  # type: ignore[call-arg, arg-type]
    lm.LazyConv(4, rngs=rngs)  # type: ignore[call-arg]
    text: str = lm.LazyLinear(4, rngs=rngs)(x)  # type: ignore[assignment]
    del text
    lm.LazyLiner  # type: ignore[attr-defined]  # noqa: B018
