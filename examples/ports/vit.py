"""A vision transformer: a folder that transformers has saved into lazy layers."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import lazymods as lm


class Block(nnx.Module):
    def __init__(self, c: dict[str, Any], *, rngs: nnx.Rngs):
        self.attn = lm.LazyMultiHeadAttention(c["num_attention_heads"], decode=False, rngs=rngs)
        self.up, self.down = (lm.LazyLinear(c[size], rngs=rngs) for size in ("intermediate_size", "hidden_size"))
        self.norm1, self.norm2 = (lm.LazyLayerNorm(epsilon=c["layer_norm_eps"], rngs=rngs) for _ in range(2))

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attn(self.norm1(x))
        return x + self.down(nnx.gelu(self.up(self.norm2(x)), approximate=False))


class ViT(nnx.Module):
    def __init__(self, c: dict[str, Any], *, rngs: nnx.Rngs):
        patch = (c["patch_size"],) * 2
        self.patches = lm.LazyConv(c["hidden_size"], patch, strides=patch, padding="VALID", rngs=rngs)
        self.cls_token, self.position = lm.UninitializedParameter(), lm.UninitializedParameter()  # shapes: the file's
        self.layer = nnx.List([Block(c, rngs=rngs) for _ in range(c["num_hidden_layers"])])
        self.norm = lm.LazyLayerNorm(epsilon=c["layer_norm_eps"], rngs=rngs)
        self.classifier = lm.LazyLinear(len(c["id2label"]), rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Return the logits `(batch, classes)` of images `(batch, height, width, channels)`."""
        x = self.patches(images).reshape(len(images), -1, self.patches.out_features)
        token = jnp.broadcast_to(self.cls_token[...], (len(x), 1, x.shape[-1]))
        x = jnp.concatenate([token, x], 1) + self.position[...]
        for block in self.layer:
            x = block(x)
        return self.classifier(self.norm(x)[:, 0])


NAMES = [(r"^vit\.", ""), (r"^(embeddings|encoder)\.", ""), (r"patch_embeddings\.projection", "patches"),
         ("position_embeddings", "position"), (r"attention\.attention", "attn"),
         (r"attention\.output\.dense", "attn.out"), (r"intermediate\.dense", "up"), (r"output\.dense", "down"),
         ("layernorm_before", "norm1"), ("layernorm_after", "norm2"), ("^layernorm", "norm")]  # fmt: skip


def load(folder: str) -> ViT:
    """Return the model of a folder."""
    model = ViT(json.loads((Path(folder) / "config.json").read_text()), rngs=nnx.Rngs(0))
    lm.load(model, folder, layout="torch", rename=NAMES)
    return model
