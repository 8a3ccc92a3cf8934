"""GPT-2: a folder that transformers has saved into lazy layers, and text with a KV cache under `lm.jit`."""

import json
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import lazymods as lm


class Block(nnx.Module):
    def __init__(self, width: int, heads: int, *, rngs: nnx.Rngs):
        self.ln_1, self.ln_2 = (lm.LazyLayerNorm(epsilon=1e-5, rngs=rngs) for _ in range(2))
        self.qkv, self.out, self.up, self.down = (lm.LazyLinear(n * width, rngs=rngs) for n in (3, 1, 4, 1))
        self.heads = heads

    def __call__(self, x: jax.Array, cache: Any, at: Any) -> Any:
        q, *kv = (a.reshape(*x.shape[:2], self.heads, -1) for a in jnp.split(self.qkv(self.ln_1(x)), 3, -1))
        k, v = (jax.lax.dynamic_update_slice(old, new, (0, at, 0, 0)) for old, new in zip(cache, kv, strict=True))
        mask = jnp.arange(k.shape[1]) <= at + jnp.arange(x.shape[1])[:, None]
        x = x + self.out(jax.nn.dot_product_attention(q, k, v, mask=mask[None, None]).reshape(x.shape))
        return x + self.down(nnx.gelu(self.up(self.ln_2(x)))), (k, v)


class GPT2(nnx.Module):
    def __init__(self, c: dict[str, Any], *, rngs: nnx.Rngs):
        self.wte, self.wpe = lm.LazyEmbed(rngs=rngs), lm.LazyEmbed(rngs=rngs)
        self.h = nnx.List([Block(c["n_embd"], c["n_head"], rngs=rngs) for _ in range(c["n_layer"])])
        self.ln_f = lm.LazyLayerNorm(epsilon=1e-5, rngs=rngs)
        self.heads, self.head_size = c["n_head"], c["n_embd"] // c["n_head"]

    def cache(self, batch: int, length: int) -> Any:
        return [(jnp.zeros((batch, length, self.heads, self.head_size)),) * 2 for _ in self.h]

    def __call__(self, ids: jax.Array, cache: Any = None, at: Any = 0) -> Any:
        x, caches = self.wte(ids) + self.wpe(at + jnp.arange(ids.shape[1])), []
        for block, kept in zip(self.h, cache or self.cache(*ids.shape), strict=True):
            x, kept = block(x, kept, at)
            caches.append(kept)
        return self.wte.attend(self.ln_f(x)), caches


@lm.jit
def step(model: GPT2, ids: jax.Array, cache: Any, at: int) -> Any:
    logits, cache = model(ids, cache, at)
    return logits[:, -1:].argmax(-1), cache


def generate(model: GPT2, ids: jax.Array, count: int) -> jax.Array:
    """Return the ids and `count` more, each the likeliest one."""
    parts, cache = [ids], model.cache(len(ids), ids.shape[1] + count)
    for i in range(count):
        new, cache = step(model, parts[-1], cache, ids.shape[1] + i - 1 if i else 0)
        parts.append(new)
    return jnp.concatenate(parts, 1)


# a Conv1D of transformers has its weight as an nnx.Linear has its kernel: nothing is transposed
NAMES = [(r"^transformer\.", ""), (r"\.attn\.c_proj", ".out"), (r"\.mlp\.c_proj", ".down"), (r"\.attn\.c_attn", ".qkv"),
         (r"\.mlp\.c_fc", ".up"), (r"(ln_\w)\.weight", r"\1.scale"), (r"(wte|wpe)\.weight", r"\1.embedding"),
         (r"weight$", "kernel")]  # fmt: skip


def load(folder: str) -> GPT2:
    """Return the model of a folder."""
    model = GPT2(json.loads((Path(folder) / "config.json").read_text()), rngs=nnx.Rngs(0))
    lm.load(model, folder, rename=NAMES)
    return model


if __name__ == "__main__":
    print(generate(load(sys.argv[1]), jnp.array([[int(n) for n in sys.argv[2:]]]), 20))
