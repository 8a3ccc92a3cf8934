"""Cold starts: a fresh interpreter, from the constructor until the last array is there.

"first" is a convolutional net, lazily and then ``lm.materialize``, beside Flax's constructor with all sizes written;
"second" is the same once more in a new interpreter, when JAX's persistent cache has what the first one compiled (of
small programs JAX keeps none by default: the kernels are kept all the same). "widths" is a chain of linear layers, no
two of one width, beside one layer of as many parameters: what layers and shapes cost on top of the bytes.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

import jax
import jax.numpy as jnp
from flax import nnx

import lazymods as lm

CHANNELS = [32, 64, 96, 128, 192, 256]


def net(lazy: bool, rngs: nnx.Rngs) -> nnx.Module:
    """Six convolutions with batch norms, and a linear layer."""
    layers, before = [], 3
    for width in CHANNELS:
        if lazy:
            layers += [lm.LazyConv(width, (3, 3), strides=2, rngs=rngs), lm.LazyBatchNorm(rngs=rngs)]
        else:
            layers += [nnx.Conv(before, width, (3, 3), strides=2, rngs=rngs), nnx.BatchNorm(width, rngs=rngs)]
        before = width
    layers.append(lm.LazyLinear(10, rngs=rngs) if lazy else nnx.Linear(before, 10, rngs=rngs))
    return nnx.Sequential(*layers)


def chain(lazy: bool, n: int, rngs: nnx.Rngs) -> nnx.Module:
    """``n`` linear layers of different widths, or one as large."""
    if lazy:
        return nnx.Sequential(*(lm.LazyLinear(8 + i, rngs=rngs) for i in range(n)))
    return nnx.Sequential(lm.LazyLinear(sum((7 + i) * (8 + i) for i in range(n)) // 8, rngs=rngs))


def child(what: str, lazy: bool, n: int) -> None:
    """Print seconds and compiles of one interpreter."""
    compiled = []

    def listen(event: str, duration_secs: float, **_: object) -> None:
        if "backend_compile" in event:
            compiled.append(duration_secs)

    jax.block_until_ready(jax.device_put(1.0))
    jax.monitoring.register_event_duration_secs_listener(listen)
    start = time.perf_counter()
    model = net(lazy, nnx.Rngs(0)) if what == "net" else chain(lazy, n, nnx.Rngs(0))
    if lazy or what == "widths":
        shape = (2, 64, 64, 3) if what == "net" else (1, 8)
        lm.materialize(model, jax.ShapeDtypeStruct(shape, jnp.float32))
    jax.block_until_ready(jax.tree.leaves(nnx.state(model)))
    print(json.dumps([time.perf_counter() - start, len(compiled)]))


def measure(what: str, lazy: bool, n: int, cache: str = "") -> tuple[float, int]:
    """Run one interpreter."""
    environment = os.environ | ({"JAX_COMPILATION_CACHE_DIR": cache} if cache else {})
    command = [sys.executable, __file__, "--child", what, "lazy" if lazy else "other", str(n)]
    seconds, compiled = json.loads(subprocess.run(command, check=True, capture_output=True, env=environment).stdout)
    return seconds, compiled


def main(rounds: int, n: int) -> None:
    """Print a line for each comparison."""
    with tempfile.TemporaryDirectory() as cache:
        measure("net", True, n, cache)
        rows = {
            "first / explicit": lambda: (measure("net", True, n), measure("net", False, n)),
            "second / first": lambda: (measure("net", True, n, cache), measure("net", True, n)),
            f"{n} widths / one layer": lambda: (measure("widths", True, n), measure("widths", False, n)),
        }
        print(f"{'':26}{'seconds':>9}{'compiles':>10}{'beside':>9}{'compiles':>10}{'ratio':>8}")
        for name, run in rows.items():
            pairs = [run() for _ in range(rounds)]
            ours, beside = (statistics.median(pair[i][0] for pair in pairs) for i in (0, 1))
            counts = [max(pair[i][1] for pair in pairs) for i in (0, 1)]
            print(f"{name:26}{ours:9.3f}{counts[0]:10}{beside:9.3f}{counts[1]:10}{ours / beside:8.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="interpreters of each kind")
    parser.add_argument("--widths", type=int, default=300, help="number of layers of different widths")
    parser.add_argument("--child", nargs=3, metavar=("WHAT", "KIND", "N"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.child[0], arguments.child[1] == "lazy", int(arguments.child[2]))
    else:
        main(arguments.rounds, arguments.widths)
