"""The networks of Flax NNX, of layers from a table: that of ``flax_nnx.py`` uses sizes, that of ``lazy.py`` none."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from peers import RATE, Size, Trainer, stages


class Bottleneck(nnx.Module):
    def __init__(self, of: Any, before: int, filters: int, stride: int, project: bool, rngs: nnx.Rngs) -> None:
        def conv(i: int, o: int, k: int, stride: int = 1) -> Any:
            return of.conv(i, o, (k, k), strides=stride, use_bias=False, rngs=rngs)

        self.conv1, self.norm1 = conv(before, filters, 1), of.batch_norm(filters, rngs=rngs)
        self.conv2, self.norm2 = conv(filters, filters, 3, stride), of.batch_norm(filters, rngs=rngs)
        self.conv3, self.norm3 = conv(filters, 4 * filters, 1), of.batch_norm(4 * filters, rngs=rngs)
        self.project = project
        if project:
            self.conv0, self.norm0 = conv(before, 4 * filters, 1, stride), of.batch_norm(4 * filters, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        y = nnx.relu(self.norm1(self.conv1(x)))
        y = nnx.relu(self.norm2(self.conv2(y)))
        y = self.norm3(self.conv3(y))
        return nnx.relu(y + (self.norm0(self.conv0(x)) if self.project else x))


class ResNet(nnx.Module):
    def __init__(self, of: Any, size: Size, rngs: nnx.Rngs) -> None:
        self.stem = of.conv(3, size.filters, (7, 7), strides=2, use_bias=False, rngs=rngs)
        self.norm = of.batch_norm(size.filters, rngs=rngs)
        self.blocks = nnx.List([Bottleneck(of, *arguments, rngs) for arguments in stages(size)])
        self.out = of.linear(size.filters * 4 * 2 ** (len(size.stages) - 1), size.classes, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        x = nnx.max_pool(nnx.relu(self.norm(self.stem(x))), (3, 3), (2, 2), padding="SAME")
        for block in self.blocks:
            x = block(x)
        return self.out(x.mean((1, 2)))


class Block(nnx.Module):
    def __init__(self, of: Any, size: Size, rngs: nnx.Rngs) -> None:
        width = size.width
        self.heads = size.heads
        self.norm1, self.norm2 = of.layer_norm(width, rngs=rngs), of.layer_norm(width, rngs=rngs)
        self.qkv, self.out = of.linear(width, 3 * width, rngs=rngs), of.linear(width, width, rngs=rngs)
        self.up, self.down = of.linear(width, 4 * width, rngs=rngs), of.linear(4 * width, width, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        texts, tokens, width = x.shape
        qkv = self.qkv(self.norm1(x)).reshape(texts, tokens, 3 * self.heads, width // self.heads)
        y = jax.nn.dot_product_attention(*jnp.split(qkv, 3, 2), is_causal=True)
        x = x + self.out(y.reshape(x.shape))
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class GPT2(nnx.Module):
    def __init__(self, of: Any, size: Size, rngs: nnx.Rngs) -> None:
        self.token = of.embed(size.vocabulary, size.width, rngs=rngs)
        self.position = of.embed(size.positions, size.width, rngs=rngs)
        self.blocks = of.blocks(lambda rngs: Block(of, size, rngs), size.blocks, rngs)
        self.norm = of.layer_norm(size.width, rngs=rngs)

    def __call__(self, ids: Any) -> Any:
        x = self.token(ids) + self.position(jnp.arange(ids.shape[1]))
        return self.token.attend(self.norm(self.blocks(x)))


class InTurn(nnx.Module):
    def __init__(self, make: Any, count: int, rngs: nnx.Rngs) -> None:
        self.blocks = nnx.List([make(rngs) for _ in range(count)])

    def __call__(self, x: Any) -> Any:
        for block in self.blocks:
            x = block(x)
        return x


def build_of(of: SimpleNamespace, name: str, size: Size) -> nnx.Module:
    """Call the constructor."""
    return {"resnet50": ResNet, "gpt2": GPT2}[name](of, size, nnx.Rngs(0))


def optimizer_of(model: nnx.Module) -> Trainer:
    """Add an optimizer."""
    return Trainer(model, nnx.Optimizer(model, optax.adam(RATE), wrt=nnx.Param))


def train_step(model: Any, optimizer: Any, x: Any, y: Any) -> jax.Array:
    """Train once."""

    def loss(model: Any) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()

    value, grads = nnx.value_and_grad(loss)(model)
    optimizer.update(model, grads)
    return value


def arrays(trainer: Trainer) -> Any:
    """All that a step writes."""
    return nnx.state((trainer.model, trainer.optimizer), nnx.Not(nnx.RngState))


def count(trainer: Trainer) -> int:
    """The number of trained parameters."""
    return sum(x.size for x in jax.tree.leaves(nnx.state(trainer.model, nnx.Param)))
