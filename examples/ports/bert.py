"""BERT for classifying texts: a folder that transformers has saved into lazy layers."""

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

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        x = self.norm1(x + self.attn(x, mask=mask))
        return self.norm2(x + self.down(nnx.gelu(self.up(x), approximate=False)))


class Bert(nnx.Module):
    def __init__(self, c: dict[str, Any], *, classes: int, rngs: nnx.Rngs):
        self.word, self.position, self.token_type = (lm.LazyEmbed(rngs=rngs) for _ in range(3))
        self.norm = lm.LazyLayerNorm(epsilon=c["layer_norm_eps"], rngs=rngs)
        self.layer = nnx.List([Block(c, rngs=rngs) for _ in range(c["num_hidden_layers"])])
        self.pooler, self.classifier = lm.LazyLinear(c["hidden_size"], rngs=rngs), lm.LazyLinear(classes, rngs=rngs)

    def __call__(self, ids: jax.Array, mask: jax.Array) -> jax.Array:
        """Return the logits `(batch, classes)` of token ids; mask is 0 or False where there is no token."""
        x = self.norm(self.word(ids) + self.position(jnp.arange(ids.shape[1])) + self.token_type(jnp.zeros_like(ids)))
        for block in self.layer:
            x = block(x, mask[:, None, None, :] != 0)
        return self.classifier(jnp.tanh(self.pooler(x[:, 0])))


NAMES = [(r"^bert\.|(?<=pooler)\.dense", ""), (r"^(embeddings|encoder)\.", ""), ("_embeddings", ""),
         (r"attention\.self", "attn"), (r"attention\.output\.dense", "attn.out"), (r"intermediate\.dense", "up"),
         (r"attention\.output\.LayerNorm", "norm1"), (r"output\.LayerNorm", "norm2"), (r"output\.dense", "down"),
         ("^LayerNorm", "norm")]  # fmt: skip


def load(folder: str, classes: int = 2) -> Bert:
    """Return the model of a folder."""
    model = Bert(json.loads((Path(folder) / "config.json").read_text()), classes=classes, rngs=nnx.Rngs(0))
    lm.load(model, folder, layout="torch", rename=NAMES)
    return model
