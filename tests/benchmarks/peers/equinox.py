"""Equinox, with all sizes written: models of one example under ``jax.vmap``, the step by ``eqx.filter_jit``."""

import importlib
from typing import Any

import jax
import jax.numpy as jnp
import optax

from peers import RATE, Size, Trainer, stages

eqx: Any = importlib.import_module("equinox")
adam = optax.adam(RATE)


class ConvNorm(eqx.Module):
    conv: Any
    norm: Any

    def __init__(self, before: int, filters: int, k: int, stride: int, key: Any) -> None:
        self.conv = eqx.nn.Conv2d(before, filters, k, stride, padding="SAME", use_bias=False, key=key)
        self.norm = eqx.nn.BatchNorm(filters, axis_name="batch", mode="batch")

    def __call__(self, x: Any, state: Any) -> Any:
        return self.norm(self.conv(x), state)


class Bottleneck(eqx.Module):
    layers: list[Any]
    shortcut: Any

    def __init__(self, before: int, filters: int, stride: int, project: bool, key: Any) -> None:
        keys = jax.random.split(key, 4)
        shapes = [(before, filters, 1, 1), (filters, filters, 3, stride), (filters, 4 * filters, 1, 1)]
        self.layers = [ConvNorm(*shape, key) for shape, key in zip(shapes, keys, strict=False)]
        self.shortcut = ConvNorm(before, 4 * filters, 1, stride, keys[3]) if project else None

    def __call__(self, x: Any, state: Any) -> Any:
        y, state = self.layers[0](x, state)
        y, state = self.layers[1](jax.nn.relu(y), state)
        y, state = self.layers[2](jax.nn.relu(y), state)
        if self.shortcut is not None:
            x, state = self.shortcut(x, state)
        return jax.nn.relu(y + x), state


class ResNet(eqx.Module):
    stem: Any
    pool: Any
    blocks: list[Any]
    out: Any

    def __init__(self, size: Size, key: Any) -> None:
        shapes = stages(size)
        keys = jax.random.split(key, len(shapes) + 2)
        self.stem = ConvNorm(3, size.filters, 7, 2, keys[0])
        self.pool = eqx.nn.MaxPool2d(3, 2, padding=1)
        self.blocks = [Bottleneck(*shape, key) for shape, key in zip(shapes, keys[2:], strict=True)]
        self.out = eqx.nn.Linear(4 * shapes[-1][1], size.classes, key=keys[1])

    def __call__(self, x: Any, state: Any) -> Any:
        x, state = self.stem(x.transpose(2, 0, 1), state)
        x = self.pool(jax.nn.relu(x))
        for block in self.blocks:
            x, state = block(x, state)
        return self.out(x.mean((1, 2))), state


class Block(eqx.Module):
    norms: list[Any]
    qkv: Any
    out: Any
    up: Any
    down: Any
    heads: int

    def __init__(self, size: Size, key: Any) -> None:
        width, keys, linear = size.width, jax.random.split(key, 4), eqx.nn.Linear
        self.norms, self.heads = [eqx.nn.LayerNorm(width) for _ in range(2)], size.heads
        self.qkv, self.out = linear(width, 3 * width, key=keys[0]), linear(width, width, key=keys[1])
        self.up, self.down = linear(width, 4 * width, key=keys[2]), linear(4 * width, width, key=keys[3])

    def __call__(self, x: Any) -> Any:
        qkv = jax.vmap(self.qkv)(jax.vmap(self.norms[0])(x)).reshape(len(x), 3 * self.heads, -1)
        y = jax.nn.dot_product_attention(*jnp.split(qkv, 3, 1), is_causal=True)
        x = x + jax.vmap(self.out)(y.reshape(x.shape))
        return x + jax.vmap(self.down)(jax.nn.gelu(jax.vmap(self.up)(jax.vmap(self.norms[1])(x))))


class GPT2(eqx.Module):
    token: Any
    position: Any
    blocks: list[Any]
    norm: Any

    def __init__(self, size: Size, key: Any) -> None:
        keys = jax.random.split(key, size.blocks + 2)
        self.token = eqx.nn.Embedding(size.vocabulary, size.width, key=keys[0])
        self.position = eqx.nn.Embedding(size.positions, size.width, key=keys[1])
        self.blocks = [Block(size, key) for key in keys[2:]]
        self.norm = eqx.nn.LayerNorm(size.width)

    def __call__(self, ids: Any, state: Any) -> Any:
        x = jax.vmap(self.token)(ids) + jax.vmap(self.position)(jnp.arange(len(ids)))
        for block in self.blocks:
            x = block(x)
        return jax.vmap(self.norm)(x) @ self.token.weight.T, state


@eqx.filter_jit
def compiled(model: Any, state: Any, moments: Any, x: Any, y: Any) -> Any:
    def loss(model: Any) -> Any:
        call = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
        logits, changed = call(x, state)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), changed

    (value, changed), grads = eqx.filter_value_and_grad(loss, has_aux=True)(model)
    updates, moments = adam.update(grads, moments, eqx.filter(model, eqx.is_inexact_array))
    return value, eqx.apply_updates(model, updates), changed, moments


def build(name: str, size: Size) -> Any:
    return eqx.nn.make_with_state({"resnet50": ResNet, "gpt2": GPT2}[name])(size, jax.random.key(0))


def finish(built: Any, inputs: Any) -> Trainer:
    return Trainer(built[0], adam.init(eqx.filter(built[0], eqx.is_inexact_array)), built[1])


def step(trainer: Trainer, inputs: Any, labels: Any) -> Any:
    found = compiled(trainer.model, trainer.extra, trainer.optimizer, inputs, labels)
    value, trainer.model, trainer.extra, trainer.optimizer = found
    return value


def arrays(trainer: Trainer) -> Any:
    return eqx.filter((trainer.model, trainer.extra, trainer.optimizer), eqx.is_array)


def count(trainer: Trainer) -> int:
    return sum(x.size for x in jax.tree.leaves(eqx.filter(trainer.model, eqx.is_inexact_array)))
