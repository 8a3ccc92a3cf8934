"""Flax Linen: parameters by one compiled ``init``, the step by ``jax.jit``."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from peers import RATE, Size, Trainer, stages

adam = optax.adam(RATE)


class ResNet(nn.Module):
    size: Size

    @nn.compact
    def __call__(self, x: Any) -> Any:
        def conv(x: Any, filters: int, k: int, stride: int = 1) -> Any:
            x = nn.Conv(filters, (k, k), strides=stride, use_bias=False)(x)
            return nn.BatchNorm(use_running_average=False)(x)

        x = nn.max_pool(nn.relu(conv(x, self.size.filters, 7, 2)), (3, 3), (2, 2), padding="SAME")
        for _, filters, stride, project in stages(self.size):
            y = nn.relu(conv(nn.relu(conv(x, filters, 1)), filters, 3, stride))
            y = conv(y, 4 * filters, 1)
            x = nn.relu(y + (conv(x, 4 * filters, 1, stride) if project else x))
        return nn.Dense(self.size.classes)(x.mean((1, 2)))


class GPT2(nn.Module):
    size: Size

    @nn.compact
    def __call__(self, ids: Any) -> Any:
        size, width = self.size, self.size.width
        token = nn.Embed(size.vocabulary, width)
        x = token(ids) + nn.Embed(size.positions, width)(jnp.arange(ids.shape[1]))
        for _ in range(size.blocks):
            qkv = nn.Dense(3 * width)(nn.LayerNorm()(x)).reshape(*ids.shape, 3 * size.heads, -1)
            y = jax.nn.dot_product_attention(*jnp.split(qkv, 3, 2), is_causal=True)
            x = x + nn.Dense(width)(y.reshape(x.shape))
            x = x + nn.Dense(width)(nn.gelu(nn.Dense(4 * width)(nn.LayerNorm()(x))))
        return token.attend(nn.LayerNorm()(x))


def build(name: str, size: Size) -> nn.Module:
    return {"resnet50": ResNet, "gpt2": GPT2}[name](size)


def finish(built: nn.Module, inputs: Any) -> Trainer:
    variables = jax.jit(built.init)(jax.random.key(0), inputs)

    @jax.jit
    def compiled(variables: Any, state: Any, x: Any, y: Any) -> Any:
        def loss(params: Any) -> Any:
            logits, changed = built.apply({**variables, "params": params}, x, mutable=["batch_stats"])
            return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), changed

        (value, changed), grads = jax.value_and_grad(loss, has_aux=True)(variables["params"])
        updates, state = adam.update(grads, state, variables["params"])
        return value, {**variables, **changed, "params": optax.apply_updates(variables["params"], updates)}, state

    return Trainer(variables, adam.init(variables["params"]), compiled)


def step(trainer: Trainer, inputs: Any, labels: Any) -> Any:
    compiled: Any = trainer.extra
    value, trainer.model, trainer.optimizer = compiled(trainer.model, trainer.optimizer, inputs, labels)
    return value


def arrays(trainer: Trainer) -> Any:
    return trainer.model, trainer.optimizer


def count(trainer: Trainer) -> int:
    variables: Any = trainer.model
    return sum(x.size for x in jax.tree.leaves(variables["params"]))
