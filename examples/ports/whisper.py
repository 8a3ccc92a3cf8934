"""Whisper: a folder that transformers has saved into lazy layers, without a single rename."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import lazymods as lm


class Attention(nnx.Module):
    def __init__(self, width: int, heads: int, *, rngs: nnx.Rngs):
        self.k_proj = lm.LazyLinear(width, use_bias=False, rngs=rngs)
        self.q_proj, self.v_proj, self.out_proj = (lm.LazyLinear(width, rngs=rngs) for _ in range(3))
        self.heads = heads

    def __call__(self, x: jax.Array, of: jax.Array, *, causal: bool = False) -> jax.Array:
        pairs = (self.q_proj, x), (self.k_proj, of), (self.v_proj, of)
        q, k, v = (layer(a).reshape(*a.shape[:2], self.heads, -1) for layer, a in pairs)
        return self.out_proj(jax.nn.dot_product_attention(q, k, v, is_causal=causal).reshape(x.shape))


class Block(nnx.Module):
    def __init__(self, c: dict[str, Any], side: str, *, rngs: nnx.Rngs):
        heads, inner = c[f"{side}_attention_heads"], c[f"{side}_ffn_dim"]
        self.self_attn, self.self_attn_layer_norm = Attention(c["d_model"], heads, rngs=rngs), norm(rngs)
        if side == "decoder":
            self.encoder_attn, self.encoder_attn_layer_norm = Attention(c["d_model"], heads, rngs=rngs), norm(rngs)
        self.fc1, self.fc2 = lm.LazyLinear(inner, rngs=rngs), lm.LazyLinear(c["d_model"], rngs=rngs)
        self.final_layer_norm = norm(rngs)

    def __call__(self, x: jax.Array, heard: jax.Array | None = None) -> jax.Array:
        y = self.self_attn_layer_norm(x)
        x = x + self.self_attn(y, y, causal=heard is not None)
        if heard is not None:
            x = x + self.encoder_attn(self.encoder_attn_layer_norm(x), heard)
        return x + self.fc2(nnx.gelu(self.fc1(self.final_layer_norm(x)), approximate=False))


class Encoder(nnx.Module):
    def __init__(self, c: dict[str, Any], *, rngs: nnx.Rngs):
        self.conv1 = lm.LazyConv(c["d_model"], (3,), padding=((1, 1),), rngs=rngs)
        self.conv2 = lm.LazyConv(c["d_model"], (3,), strides=2, padding=((1, 1),), rngs=rngs)
        self.embed_positions = lm.LazyEmbed(rngs=rngs)
        self.layers = nnx.List([Block(c, "encoder", rngs=rngs) for _ in range(c["encoder_layers"])])
        self.layer_norm = norm(rngs)

    def __call__(self, mel: jax.Array) -> jax.Array:
        x = nnx.gelu(self.conv2(nnx.gelu(self.conv1(mel), approximate=False)), approximate=False)
        x = x + self.embed_positions(jnp.arange(x.shape[1]))
        for block in self.layers:
            x = block(x)
        return self.layer_norm(x)


class Decoder(nnx.Module):
    def __init__(self, c: dict[str, Any], *, rngs: nnx.Rngs):
        self.embed_tokens, self.embed_positions = lm.LazyEmbed(rngs=rngs), lm.LazyEmbed(rngs=rngs)
        self.layers = nnx.List([Block(c, "decoder", rngs=rngs) for _ in range(c["decoder_layers"])])
        self.layer_norm = norm(rngs)

    def __call__(self, ids: jax.Array, heard: jax.Array) -> jax.Array:
        x = self.embed_tokens(ids) + self.embed_positions(jnp.arange(ids.shape[1]))
        for block in self.layers:
            x = block(x, heard)
        return self.embed_tokens.attend(self.layer_norm(x))


class Whisper(nnx.Module):
    def __init__(self, c: dict[str, Any], *, rngs: nnx.Rngs):
        self.encoder, self.decoder = Encoder(c, rngs=rngs), Decoder(c, rngs=rngs)

    def __call__(self, mel: jax.Array, ids: jax.Array) -> jax.Array:
        """Return the logits `(batch, length, vocabulary)` of ids for what is heard, `(batch, time, bins)`."""
        return self.decoder(ids, self.encoder(mel))


def norm(rngs: nnx.Rngs) -> Any:
    return lm.LazyLayerNorm(epsilon=1e-5, rngs=rngs)


def load(folder: str) -> Whisper:
    """Return the model of a folder."""
    model = Whisper(json.loads((Path(folder) / "config.json").read_text()), rngs=nnx.Rngs(0))
    lm.load(model, folder, layout="torch")
    return model
