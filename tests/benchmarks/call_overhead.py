"""What a call costs whose arithmetic costs nothing: ``lm.jit`` against ``jax.jit`` on a flat list, and ``nnx.jit``.

The rows take turns in one process, a slot of calls each; a ratio is the median of the ratios round by round. The flat
rows are made from the same model, split once: they are the floor, with nothing of NNX at call time. Before that,
the states after five steps are compared. ``guard`` is what ``lm.jit`` spends on seeing that the model is as it was.
``trainer`` is a step that is a method of an object, which counts its steps and keeps its losses beside the model;
``traces`` is how often it was traced in the 20 steps after its second one.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import lazymods as lm
from lazymods.compile.guards import graph_of


class Stack(nnx.Module):
    """Small layers, on request with statistics and random numbers."""

    def __init__(self, layers: int, noisy: bool) -> None:
        rngs = nnx.Rngs(0)
        self.linear = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(layers)])
        self.norm = nnx.List([nnx.BatchNorm(8, rngs=rngs) for _ in range(layers * noisy)])
        self.drop = nnx.List([nnx.Dropout(0.1, rngs=rngs) for _ in range(layers * noisy)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for number, layer in enumerate(self.linear):
            x = layer(x)
            if self.norm:
                x = self.drop[number](self.norm[number](x))
            x = jax.nn.relu(x)
        return x


MODELS = {"mlp10": (10, False), "mlp100": (100, False), "bn10": (10, True)}


def forward(model: Stack, x: jax.Array) -> jax.Array:
    """Call the model."""
    return model(x)


def train(model: Stack, optimizer: nnx.Optimizer, x: jax.Array) -> jax.Array:
    """Take a step of adam."""
    loss, grads = nnx.value_and_grad(lambda m: (m(x) ** 2).mean())(model)
    optimizer.update(model, grads)
    return loss


STEPS: dict[bool, Callable[..., Any]] = {False: forward, True: train}


def objects(name: str, training: bool) -> tuple[Any, ...]:
    """Make what a step takes besides the batch."""
    model = Stack(*MODELS[name])
    return (model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)) if training else (model,)


def flat(held: tuple[Any, ...], training: bool, x: jax.Array, *, placed: bool = False) -> Callable[[], Any]:
    """Return a step on a flat list of arrays, keys as their data; ``placed``: told where the state shall stay."""
    graphdef, state = nnx.split(held)
    leaves, treedef = jax.tree.flatten(state)
    keys = [jnp.issubdtype(v.dtype, jax.dtypes.prng_key) for v in leaves]
    start = [jax.random.key_data(v) if k else v for v, k in zip(leaves, keys, strict=True)]

    def body(arrays: list[jax.Array], x: jax.Array) -> tuple[Any, list[jax.Array]]:
        values = [jax.random.wrap_key_data(v) if k else v for v, k in zip(arrays, keys, strict=True)]
        made = nnx.merge(graphdef, jax.tree.unflatten(treedef, values))
        out = STEPS[training](*made, x)
        return out, jax.tree.leaves(nnx.state(made))

    jaxpr = jax.make_jaxpr(body)(start, x).jaxpr
    moving = [i for i, k in enumerate(keys) if not k and jaxpr.outvars[i + 1] is not jaxpr.invars[i]]

    def moved(arrays: list[jax.Array], x: jax.Array) -> tuple[Any, list[jax.Array]]:
        out, new = body(arrays, x)
        return out, [new[i] for i in moving]

    step = jax.jit(moved, out_shardings=(None, [start[i].sharding for i in moving])) if placed else jax.jit(moved)

    def call() -> Any:
        out, new = step(start, x)
        for number, value in zip(moving, new, strict=True):
            start[number] = value
        return out

    return call


def compiled(wrap: Callable[[Any], Any], name: str, training: bool, x: jax.Array) -> Callable[[], Any]:
    """Return a step on live objects."""
    held, step = objects(name, training), wrap(STEPS[training])
    return lambda: step(*held, x)


class Trainer:
    """Holds a model, an optimizer, and what changes at every step."""

    def __init__(self, name: str) -> None:
        self.model, self.optimizer = objects(name, True)
        self.steps, self.epoch = 0, 0
        self.losses: list[Any] = []
        self.step = lm.jit(self._step)

    def _step(self, x: jax.Array) -> jax.Array:
        return train(self.model, self.optimizer, x)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Take a step, count it, and keep its loss."""
        loss = self.step(x)
        self.steps += 1
        self.epoch = self.steps // 10
        self.losses.append(loss)
        return loss


def trainer(name: str, x: jax.Array) -> tuple[Callable[[], Any], int]:
    """Return a step of a trainer, and how often it was traced in the 20 steps after its second one."""
    made = Trainer(name)
    made(x), made(x)
    before = lm.metrics()["traces"]
    for _ in range(20):
        made(x)
    return lambda: made(x), int(lm.metrics()["traces"] - before)


def check(name: str, x: jax.Array) -> None:
    """Compare five steps with those of nnx.jit, bit for bit."""
    ends = []
    for wrap in (nnx.jit, lm.jit):
        held = objects(name, True)
        step: Any = wrap(train)
        losses = [step(*held, x + i) for i in range(5)]
        ends.append([np.asarray(v) for v in jax.tree.leaves((losses, nnx.state(held, nnx.Not(nnx.RngKey))))])
    for got, want in zip(*ends, strict=True):
        np.testing.assert_array_equal(got, want)


def main(models: list[str], rounds: int, calls: int, numpy: bool) -> None:
    """Print a line for each model and mode."""
    titles = f"{'':14}{'flat us':>9}{'lm.jit':>9}{'nnx.jit':>9}{'lm/flat':>9}{'lm/nnx':>9}{'guard us':>10}"
    print(f"{titles}{'trainer/flat':>14}{'traces':>8}")
    for name in models:
        batch = np.random.default_rng(0).normal(size=(2, 8)).astype(np.float32)
        x: Any = batch if numpy else jnp.asarray(batch)
        check(name, x)
        for training in (False, True):
            rows = {"flat": flat(objects(name, training), training, x), "lm": compiled(lm.jit, name, training, x)}
            rows["nnx"] = compiled(nnx.jit, name, training, x)
            traces = 0
            if training:
                rows["trainer"], traces = trainer(name, x)
            times: dict[str, list[float]] = {row: [] for row in rows}
            for number in range(rounds + 1):
                for row, call in rows.items():
                    start, out = time.perf_counter(), None
                    for _ in range(calls if row != "nnx" else max(calls // 20, 2)):
                        out = call()
                    jax.block_until_ready(out)
                    if number:  # the first round compiles
                        spent = time.perf_counter() - start
                        times[row].append(spent * 1e6 / (calls if row != "nnx" else max(calls // 20, 2)))
            ratio = {r: statistics.median(a / b for a, b in zip(times["lm"], times[r], strict=True)) for r in rows}
            a, b, c = (statistics.median(times[row]) for row in ("flat", "lm", "nnx"))
            label = f"{name} {'train' if training else 'fwd'}"
            ratios = f"{ratio['flat']:9.3f}{ratio['nnx']:9.3f}"
            last = ""
            if training:
                pairs = zip(times["trainer"], times["flat"], strict=True)
                last = f"{statistics.median(a / b for a, b in pairs):14.3f}{traces:8}"
            print(f"{label:14}{a:9.1f}{b:9.1f}{c:9.1f}{ratios}{guard(name, training):10.1f}{last}")


def guard(name: str, training: bool) -> float:
    """Return the microseconds that the guards of a call take."""
    held = objects(name, training)
    graphs = [(graph_of(thing)[0], thing) for thing in held]
    start = time.perf_counter()
    for _ in range(500):
        for graph, thing in graphs:
            graph.read(thing)
    return (time.perf_counter() - start) / 500 * 1e6


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--calls", type=int, default=100)
    parser.add_argument("--numpy", action="store_true", help="pass an array of numpy")
    options = parser.parse_args()
    main(options.models, options.rounds, options.calls, options.numpy)
