"""What a 12-layer transformer keeps between forward and backward, and what its step costs, with blocks and without.

Prints the bytes that are kept, in all and without parameters, the bytes that a compiled step takes beside its arguments
and results, in the device's memory and in that of the host (on a GPU), and its time. The layers are a list, then a
``lm.Stack``, which is a scan.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import lazymods as lm

ag = lm.autograd


class Layer(nnx.Module):
    def __init__(self, width: int, rngs: nnx.Rngs) -> None:
        self.norm1, self.norm2 = nnx.LayerNorm(width, rngs=rngs), nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, width, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(width, 4 * width, rngs=rngs), nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm1(x))
        return x + self.down(jax.nn.gelu(self.up(self.norm2(x))))


class Transformer(nnx.Module):
    def __init__(self, layers: int, width: int, rngs: nnx.Rngs, stacked: bool) -> None:
        if stacked:
            self.layers: Any = lm.Stack(lambda rngs: Layer(width, rngs), layers, rngs=rngs)
        else:
            self.layers = nnx.List([Layer(width, rngs) for _ in range(layers)])


def loss_of(call: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """Return a loss whose layers are called in some way."""

    def loss(model: Transformer, x: jax.Array) -> jax.Array:
        for layer in model.layers:
            x = call(layer, x)
        return (x**2).mean()

    return loss


def in_block(block: Any) -> Callable[..., Any]:
    """Return the loss in a block."""
    loss = loss_of(lambda layer, x: layer(x))

    def run(model: Transformer, x: jax.Array) -> jax.Array:
        with block:
            return loss(model, x)

    return run


def loss_of_stack(model: Transformer, x: jax.Array) -> jax.Array:
    """Return the loss of layers that are one."""
    return (model.layers(x) ** 2).mean()


def on_cpu(model: Transformer, x: jax.Array) -> jax.Array:
    """Return the loss of layers that are one, in a block."""
    with ag.save_on_cpu():
        return loss_of_stack(model, x)


LOSSES = {
    "none": loss_of(lambda layer, x: layer(x)),
    "save_as(bfloat16)": in_block(ag.save_as(jnp.bfloat16)),
    "save_on_cpu": in_block(ag.save_on_cpu()),
    "recompute": loss_of(lambda layer, x: ag.recompute(layer)(x)),
    "nnx.remat": loss_of(nnx.remat(lambda layer, x: layer(x))),
}
LOSSES_OF_STACKS = {"stack": loss_of_stack, "stack, save_on_cpu": on_cpu}


def measured(loss: Callable[..., Any], model: Transformer, x: jax.Array, repeats: int) -> tuple[int, int, float]:
    """Return the bytes of a compiled gradient on the device and on the host, and its least time in seconds."""
    graph, state = nnx.split(model)
    gradient = jax.jit(lambda state, x: jax.grad(lambda state: loss(nnx.merge(graph, state), x))(state))
    step = gradient.lower(state, x).compile()
    memory: Any = step.memory_analysis()
    jax.block_until_ready(step(state, x))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(step(state, x))
        times.append(time.perf_counter() - start)
    return memory.temp_size_in_bytes, memory.host_temp_size_in_bytes, min(times)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"layers": 12, "width": 64, "batch": 4, "length": 64, "repeats": 10}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    rows = [(name, loss, False) for name, loss in LOSSES.items()]
    rows += [(name, loss, True) for name, loss in LOSSES_OF_STACKS.items()]
    models = {stacked: Transformer(options.layers, options.width, nnx.Rngs(0), stacked) for stacked in (False, True)}
    x = jax.random.normal(jax.random.key(0), (options.batch, options.length, options.width))
    reports = {name: ag.saved_bytes(loss, models[stacked], x) for name, loss, stacked in rows}
    whole = reports["none"].total
    print(f"{'':20}{'bytes':>14}{'of none':>9}{'no parameters':>15}{'device':>15}{'host':>15}{'step':>9}")
    for name, loss, stacked in rows:
        report = reports[name]
        device, host, seconds = measured(loss, models[stacked], x, options.repeats)
        beside = report.total - report.of_arguments
        bytes_kept = f"{report.total:14,}{report.total / whole:9.3f}{beside:15,}"
        print(f"{name:20}{bytes_kept}{device:15,}{host:15,}{seconds * 1e3:6.1f} ms")
    assert reports["save_as(bfloat16)"].total <= 0.55 * whole
    assert reports["recompute"].total <= reports["nnx.remat"].total


if __name__ == "__main__":
    main()
