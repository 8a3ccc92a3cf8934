"""Making a model: lazily and then ``lm.materialize``, beside Flax's constructor with all sizes written.

"first" is the first model of a fresh interpreter, with the compilation of the initializers; "next" is another one of
the same sizes. Interpreters are taken in turns, and the parameters of all must have the same bits.
"""

import argparse
import hashlib
import itertools
import json
import statistics
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import lazymods as lm


def mlp(lazy: bool, rngs: nnx.Rngs) -> nnx.Module:
    """Eight linear layers."""
    if lazy:
        return nnx.Sequential(*(lm.LazyLinear(256, rngs=rngs) for _ in range(8)))
    return nnx.Sequential(*(nnx.Linear(64 if i == 0 else 256, 256, rngs=rngs) for i in range(8)))


def conv_net(lazy: bool, rngs: nnx.Rngs) -> nnx.Module:
    """Six convolutions with batch norms, then flatten and linear."""
    layers = []
    widths = [3, 32, 32, 64, 64, 128, 128]
    for before, width in itertools.pairwise(widths):
        if lazy:
            layers += [lm.LazyConv(width, (3, 3), strides=2, rngs=rngs), lm.LazyBatchNorm(rngs=rngs)]
        else:
            layers += [nnx.Conv(before, width, (3, 3), strides=2, rngs=rngs), nnx.BatchNorm(width, rngs=rngs)]
    layers.append(flatten)
    layers.append(lm.LazyLinear(10, rngs=rngs) if lazy else nnx.Linear(128, 10, rngs=rngs))
    return nnx.Sequential(*layers)


def flatten(x: jax.Array) -> jax.Array:
    """Keep the batch axis only."""
    return x.reshape(len(x), -1)


class Block(nnx.Module):
    """Attention and two linear layers, each behind a layer norm."""

    def __init__(self, lazy: bool, width: int, rngs: nnx.Rngs):
        if lazy:
            self.norm1, self.norm2 = lm.LazyLayerNorm(rngs=rngs), lm.LazyLayerNorm(rngs=rngs)
            self.attention = lm.LazyMultiHeadAttention(8, decode=False, rngs=rngs)
            self.up, self.down = lm.LazyLinear(4 * width, rngs=rngs), lm.LazyLinear(width, rngs=rngs)
        else:
            self.norm1, self.norm2 = nnx.LayerNorm(width, rngs=rngs), nnx.LayerNorm(width, rngs=rngs)
            self.attention = nnx.MultiHeadAttention(8, width, decode=False, rngs=rngs)
            self.up, self.down = nnx.Linear(width, 4 * width, rngs=rngs), nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Run the block on ``(batch, length, width)``."""
        x = x + self.attention(self.norm1(x))
        return x + self.down(jax.nn.gelu(self.up(self.norm2(x))))


def transformer(lazy: bool, rngs: nnx.Rngs) -> nnx.Module:
    """Six blocks."""
    return nnx.Sequential(*(Block(lazy, 128, rngs) for _ in range(6)))


MODELS = {"mlp": (mlp, (2, 64)), "conv_net": (conv_net, (2, 64, 64, 3)), "transformer": (transformer, (2, 16, 128))}


def build(name: str, lazy: bool) -> tuple[float, str]:
    """Make a model: the seconds until its last array is there, and a digest of its arrays."""
    make, shape = MODELS[name]
    start = time.perf_counter()
    model = make(lazy, nnx.Rngs(0))
    if lazy:
        lm.materialize(model, jax.ShapeDtypeStruct(shape, jnp.float32))
    leaves = jax.block_until_ready(jax.tree.leaves(nnx.state(model, nnx.Not(nnx.RngState))))
    seconds = time.perf_counter() - start
    return seconds, hashlib.sha256(b"".join(np.asarray(leaf).tobytes() for leaf in leaves)).hexdigest()


def child(name: str, lazy: bool) -> None:
    """Print what one interpreter measures."""
    first, digest = build(name, lazy)
    print(json.dumps([first, statistics.median(build(name, lazy)[0] for _ in range(5)), digest]))


def main(models: list[str], rounds: int) -> None:
    """Print a line for each model."""
    print(f"{'seconds':12}{'first':>9}{'explicit':>10}{'ratio':>7}{'next':>12}{'explicit':>10}{'ratio':>7}")
    for name in models:
        found: dict[str, list[list[float]]] = {"lazy": [], "explicit": []}
        digests = set()
        for _ in range(rounds):
            for kind, times in found.items():
                command = [sys.executable, __file__, "--child", name, kind]
                *seconds, digest = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
                times.append(seconds)
                digests.add(digest)
        if len(digests) != 1:
            raise SystemExit(f"{name}: lazy and explicit parameters differ")
        (first, later), (first0, later0) = (
            [statistics.median(column) for column in zip(*times, strict=True)] for times in found.values()
        )
        print(
            f"{name:12}{first:9.3f}{first0:10.3f}{first / first0:7.2f}{later:12.4f}{later0:10.4f}{later / later0:7.2f}"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=3, help="interpreters of each kind")
    parser.add_argument("--child", nargs=2, metavar=("MODEL", "KIND"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.child[0], arguments.child[1] == "lazy")
    else:
        main(arguments.models, arguments.rounds)
