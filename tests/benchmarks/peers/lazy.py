"""lazymods: the networks of Flax NNX without input sizes, sized by ``lm.materialize`` and compiled by ``lm.jit``."""

from types import SimpleNamespace
from typing import Any

import jax
from flax import nnx

import lazymods as lm
from peers import Size, Trainer, _networks
from peers._networks import arrays as arrays
from peers._networks import count as count

LAYERS = SimpleNamespace(
    linear=lambda i, o, **options: lm.LazyLinear(o, **options),
    conv=lambda i, o, k, **options: lm.LazyConv(o, k, **options),
    batch_norm=lambda features, **options: lm.LazyBatchNorm(**options),
    layer_norm=lambda features, **options: lm.LazyLayerNorm(**options),
    embed=lm.LazyEmbed,
    blocks=_networks.InTurn,
)
compiled = lm.jit(_networks.train_step)


def build(name: str, size: Size) -> nnx.Module:
    return _networks.build_of(LAYERS, name, size)


def finish(built: nnx.Module, inputs: Any) -> Trainer:
    lm.materialize(built, jax.ShapeDtypeStruct(inputs.shape, inputs.dtype))
    return _networks.optimizer_of(built)


def step(trainer: Trainer, inputs: Any, labels: Any) -> Any:
    return compiled(trainer.model, trainer.optimizer, inputs, labels)
