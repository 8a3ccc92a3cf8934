"""Llama and Qwen2: a folder that transformers has saved into lazy layers, and text with a KV cache under `lm.jit`."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import lazymods as lm


def rotated(x: jax.Array, at: Any, theta: float) -> jax.Array:
    """Turn the features i and i + half of `(batch, time, heads, features)` by their positions."""
    half = x.shape[-1] // 2
    angles = (at + jnp.arange(x.shape[1]))[:, None, None] * theta ** (-jnp.arange(half) / half)
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([a * jnp.cos(angles) - b * jnp.sin(angles), b * jnp.cos(angles) + a * jnp.sin(angles)], -1)


class Attention(nnx.Module):
    def __init__(self, c: Any, *, rngs: nnx.Rngs):
        sizes = [n * c.head_dim for n in (c.num_attention_heads, c.num_key_value_heads, c.num_key_value_heads)]
        self.q_proj, self.k_proj, self.v_proj = (lm.LazyLinear(n, use_bias=c.qkv_bias, rngs=rngs) for n in sizes)
        self.o_proj = lm.LazyLinear(c.hidden_size, use_bias=False, rngs=rngs)
        self.head_dim, self.theta = c.head_dim, c.rope_parameters["rope_theta"]

    def __call__(self, x: jax.Array, cache: Any, at: Any) -> Any:
        q, k, v = (f(x).reshape(*x.shape[:2], -1, self.head_dim) for f in (self.q_proj, self.k_proj, self.v_proj))
        kv = rotated(k, at, self.theta), v
        k, v = (jax.lax.dynamic_update_slice(old, new, (0, at, 0, 0)) for old, new in zip(cache, kv, strict=True))
        mask = jnp.arange(k.shape[1]) <= at + jnp.arange(x.shape[1])[:, None]
        y = jax.nn.dot_product_attention(rotated(q, at, self.theta), k, v, mask=mask[None, None])
        return self.o_proj(y.reshape(*x.shape[:2], -1)), (k, v)


class MLP(nnx.Module):
    def __init__(self, c: Any, *, rngs: nnx.Rngs):
        sizes = c.intermediate_size, c.intermediate_size, c.hidden_size
        self.gate_proj, self.up_proj, self.down_proj = (lm.LazyLinear(n, use_bias=False, rngs=rngs) for n in sizes)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down_proj(nnx.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nnx.Module):
    def __init__(self, c: Any, *, rngs: nnx.Rngs):
        norms = (lm.LazyRMSNorm(epsilon=c.rms_norm_eps, rngs=rngs) for _ in range(2))
        self.input_layernorm, self.post_attention_layernorm = norms
        self.self_attn, self.mlp = Attention(c, rngs=rngs), MLP(c, rngs=rngs)

    def __call__(self, x: jax.Array, cache: Any, at: Any) -> Any:
        y, cache = self.self_attn(self.input_layernorm(x), cache, at)
        return x + y + self.mlp(self.post_attention_layernorm(x + y)), cache


class Llama(nnx.Module):
    def __init__(self, c: Any, *, rngs: nnx.Rngs):
        self.embed_tokens = lm.LazyEmbed(rngs=rngs)
        self.layers = nnx.List([Block(c, rngs=rngs) for _ in range(c.num_hidden_layers)])
        self.norm = lm.LazyRMSNorm(epsilon=c.rms_norm_eps, rngs=rngs)
        if not c.tie_word_embeddings:
            self.lm_head = lm.LazyLinear(c.vocab_size, use_bias=False, rngs=rngs)
        self.cached, self.tied = (c.num_key_value_heads, c.head_dim), c.tie_word_embeddings

    def cache(self, batch: int, length: int) -> Any:
        return [(jnp.zeros((batch, length, *self.cached)),) * 2 for _ in self.layers]

    def __call__(self, ids: jax.Array, cache: Any = None, at: Any = 0) -> Any:
        x, caches = self.embed_tokens(ids), []
        for block, kept in zip(self.layers, cache or self.cache(*ids.shape), strict=True):
            x, kept = block(x, kept, at)
            caches.append(kept)
        return (self.embed_tokens.attend if self.tied else self.lm_head)(self.norm(x)), caches


@lm.jit
def step(model: Llama, ids: jax.Array, cache: Any, at: int) -> Any:
    logits, cache = model(ids, cache, at)
    return logits[:, -1:].argmax(-1), cache


def generate(model: Llama, ids: jax.Array, count: int) -> jax.Array:
    """Return the ids and `count` more, each the likeliest one."""
    parts, cache = [ids], model.cache(len(ids), ids.shape[1] + count)
    for i in range(count):
        new, cache = step(model, parts[-1], cache, ids.shape[1] + i - 1 if i else 0)
        parts.append(new)
    return jnp.concatenate(parts, 1)


def load(folder: str) -> Llama:
    """Return the model of a folder; positions are rotated without scaling (`rope_type` is `default`)."""
    c = SimpleNamespace(**json.loads((Path(folder) / "config.json").read_text()))
    c.head_dim, c.qkv_bias = getattr(c, "head_dim", c.hidden_size // c.num_attention_heads), c.model_type == "qwen2"
    if c.rope_parameters["rope_type"] != "default":
        raise NotImplementedError(f"rope_type={c.rope_parameters['rope_type']}")
    model = Llama(c, rngs=nnx.Rngs(0))
    lm.load(model, folder, layout="torch")
    return model


if __name__ == "__main__":
    print(generate(load(sys.argv[1]), jnp.array([[int(n) for n in sys.argv[2:]]]), 20))
