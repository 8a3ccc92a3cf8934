"""Keras on JAX: models of its functional interface, the step by ``train_on_batch``."""

import importlib
import os
from typing import Any

from peers import RATE, Size, Trainer, stages

os.environ["KERAS_BACKEND"] = "jax"
keras: Any = importlib.import_module("keras")
layers, ops = keras.layers, keras.ops


class Attention(layers.Layer):
    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads

    def call(self, qkv: Any) -> Any:
        _, tokens, width = qkv.shape
        q, k, v = ops.split(ops.reshape(qkv, (-1, tokens, 3 * self.heads, width // 3 // self.heads)), 3, axis=2)
        return ops.reshape(ops.dot_product_attention(q, k, v, is_causal=True), (-1, tokens, width // 3))


class Embedding(layers.Layer):
    """The sum of both embeddings; ``attend`` is the output layer, which is tied to the first."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.token = layers.Embedding(size.vocabulary, size.width)
        self.position = layers.Embedding(size.positions, size.width)

    def build(self, shape: Any) -> None:
        self.token.build(shape)
        self.position.build(shape)

    def call(self, ids: Any) -> Any:
        return self.token(ids) + self.position(ops.arange(ids.shape[1]))


class Attend(layers.Layer):
    def __init__(self, embedding: Embedding) -> None:
        super().__init__()
        self.embedding = embedding

    def call(self, x: Any) -> Any:
        return ops.matmul(x, ops.transpose(self.embedding.token.embeddings))


def resnet(size: Size) -> Any:
    def conv(x: Any, filters: int, k: int, stride: int = 1) -> Any:
        x = layers.Conv2D(filters, k, strides=stride, padding="same", use_bias=False)(x)
        return layers.BatchNormalization()(x)

    given = layers.Input((size.image, size.image, 3))
    x = layers.MaxPooling2D(3, 2, padding="same")(ops.relu(conv(given, size.filters, 7, 2)))
    for _, filters, stride, project in stages(size):
        y = ops.relu(conv(ops.relu(conv(x, filters, 1)), filters, 3, stride))
        y = conv(y, 4 * filters, 1)
        x = ops.relu(y + (conv(x, 4 * filters, 1, stride) if project else x))
    return keras.Model(given, layers.Dense(size.classes)(ops.mean(x, (1, 2))))


def gpt2(size: Size) -> Any:
    given = layers.Input((size.tokens,), dtype="int32")
    embedding = Embedding(size)
    x = embedding(given)
    for _ in range(size.blocks):
        y = Attention(size.heads)(layers.Dense(3 * size.width)(layers.LayerNormalization()(x)))
        x = x + layers.Dense(size.width)(y)
        y = ops.gelu(layers.Dense(4 * size.width)(layers.LayerNormalization()(x)))
        x = x + layers.Dense(size.width)(y)
    return keras.Model(given, Attend(embedding)(layers.LayerNormalization()(x)))


def build(name: str, size: Size) -> Any:
    return {"resnet50": resnet, "gpt2": gpt2}[name](size)


def finish(built: Any, inputs: Any) -> Trainer:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.Adam(RATE)
    built.compile(optimizer, loss)
    optimizer.build(built.trainable_variables)
    return Trainer(built, optimizer)


def step(trainer: Trainer, inputs: Any, labels: Any) -> Any:
    model: Any = trainer.model
    return model.train_on_batch(inputs, labels)


def arrays(trainer: Trainer) -> Any:
    model, optimizer = vars(trainer)["model"], vars(trainer)["optimizer"]
    return [variable.value for variable in [*model.variables, *optimizer.variables]]


def count(trainer: Trainer) -> int:
    model: Any = trainer.model
    return sum(int(variable.value.size) for variable in model.trainable_variables)
