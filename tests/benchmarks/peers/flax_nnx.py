"""Flax NNX, with all sizes written."""

from types import SimpleNamespace
from typing import Any

from flax import nnx

from peers import Size, Trainer, _networks
from peers._networks import arrays as arrays
from peers._networks import count as count

LAYERS = SimpleNamespace(
    linear=nnx.Linear,
    conv=nnx.Conv,
    batch_norm=nnx.BatchNorm,
    layer_norm=nnx.LayerNorm,
    embed=nnx.Embed,
    blocks=_networks.InTurn,
)
compiled = nnx.jit(_networks.train_step)


def build(name: str, size: Size) -> nnx.Module:
    return _networks.build_of(LAYERS, name, size)


def finish(built: nnx.Module, inputs: Any) -> Trainer:
    return _networks.optimizer_of(built)


def step(trainer: Trainer, inputs: Any, labels: Any) -> Any:
    return compiled(trainer.model, trainer.optimizer, inputs, labels)
