"""A transformer of 70 billion parameters, planned for 64 devices without having them: try rules until it fits."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import lazymods as lm


class Block(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        def linear(features: int) -> lm.nn.LazyLinear:
            return lm.LazyLinear(features, use_bias=False, param_dtype=jnp.bfloat16, rngs=rngs)

        self.norm1, self.norm2 = lm.LazyRMSNorm(rngs=rngs), lm.LazyRMSNorm(rngs=rngs)
        self.q, self.k, self.v, self.o = linear(8192), linear(1024), linear(1024), linear(8192)
        self.gate, self.up, self.down = linear(28672), linear(28672), linear(8192)

    def __call__(self, x: jax.Array) -> jax.Array:
        h = self.norm1(x)
        q, k, v = (f(h).reshape(*h.shape[:2], -1, 128) for f in (self.q, self.k, self.v))
        h = jax.nn.dot_product_attention(q, k, v, is_causal=True)  # 64 heads share 8 keys and values
        x = x + self.o(h.reshape(x.shape))
        h = self.norm2(x)
        return x + self.down(jax.nn.silu(self.gate(h)) * self.up(h))


class Model(nnx.Module):
    def __init__(self, blocks: int, *, rngs: nnx.Rngs):
        self.embed = lm.LazyEmbed(128256, 8192, param_dtype=jnp.bfloat16, rngs=rngs)
        self.blocks = nnx.List([Block(rngs=rngs) for _ in range(blocks)])
        self.norm = lm.LazyRMSNorm(rngs=rngs)
        self.head = lm.LazyLinear(128256, use_bias=False, param_dtype=jnp.bfloat16, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def main(blocks: int = 80) -> tuple[list[int], str]:
    mesh = AbstractMesh((16, 4), ("data", "model"))
    model, tokens = Model(blocks, rngs=nnx.Rngs(0)), jax.ShapeDtypeStruct((8, 4096), jnp.int32)
    tries = {
        "a copy on each": [],
        "split in four": [(r"\.(q|k|v|gate|up)\.|head", P(None, "model")), (r"\.(o|down)\.|embed", P("model"))],
        "split in 64": [(r"\.(q|k|v|gate|up)\.|head", P("data", "model")), (r"\.(o|down)\.|embed", P("model", "data"))],
    }
    plans = [lm.infer_shapes(model, tokens, mesh=mesh, rules=r, optimizer=optax.adam(1e-4)) for r in tries.values()]
    told = [f"{name}: {plan.footer().split('; ')[1]}" for name, plan in zip(tries, plans, strict=True)]
    print("\n".join([*str(plans[-1]).splitlines()[:32], "...", *told]))
    return [plan.total_bytes_per_device for plan in plans], str(plans[-1])


if __name__ == "__main__":
    main()
