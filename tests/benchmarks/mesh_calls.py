"""What a call costs on a mesh of eight virtual devices: ``lm.jit`` against ``jax.jit`` on a flat list.

The models of ``call_overhead.py``, each with its kernels split over a mesh axis, and the batch over the other. The flat
rows are told the shardings that the state shall have; ``lm.jit`` keeps those that it finds. The rows take turns, a slot
of calls each; a ratio is the median of the ratios round by round. ``short`` says whether the calls of ``lm.jit`` pass
``jax.jit``'s look at each argument by.
"""

import argparse
import functools
import os
import statistics
import time
from typing import Any

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
from call_overhead import MODELS, STEPS, flat, objects
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import lazymods as lm


def spread(array: jax.Array, mesh: Mesh) -> jax.Array:
    """Split kernels over the axis ``model``, and put all else on each device."""
    return jax.device_put(array, NamedSharding(mesh, P(None, "model") if array.ndim == 2 else P()))


def on_mesh(name: str, training: bool, mesh: Mesh) -> tuple[Any, ...]:
    """Make what a step takes besides the batch, on the mesh."""
    held = objects(name, training)
    for thing in held:
        nnx.update(thing, jax.tree.map(lambda array: spread(array, mesh), nnx.state(thing)))
    return held


def main(models: list[str], rounds: int, calls: int) -> None:
    """Print a line for each model and mode."""
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    batch = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
    x = jax.device_put(batch, NamedSharding(mesh, P("data")))
    print(f"{'':14}{'flat us':>9}{'lm.jit':>9}{'lm/flat':>9}  short")
    for name in models:
        for training in (False, True):
            held, step = on_mesh(name, training, mesh), lm.jit(STEPS[training])
            on_list = flat(on_mesh(name, training, mesh), training, x, placed=True)
            rows = {"flat": on_list, "lm": functools.partial(step, *held, x)}
            times: dict[str, list[float]] = {row: [] for row in rows}
            for number in range(rounds + 1):
                for row, call in rows.items():
                    start = time.perf_counter()
                    for _ in range(calls):
                        jax.block_until_ready(call())
                    if number:  # the first round compiles
                        times[row].append((time.perf_counter() - start) * 1e6 / calls)
            a, b = (statistics.median(times[row]) for row in rows)
            ratio = statistics.median(one / other for one, other in zip(times["lm"], times["flat"], strict=True))
            short = step._fast is not None and step._fast.plan._launch._ready is not None
            print(f"{name} {'train' if training else 'fwd':8}{a:9.1f}{b:9.1f}{ratio:9.3f}  {'yes' if short else 'no'}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--calls", type=int, default=20)
    options = parser.parse_args()
    main(options.models, options.rounds, options.calls)
