"""What a train step costs as lazy tensors, beside the same code executed operation by operation.

"step" is the plain step, "one node" the same with ``lm.lazytensor.value_and_grad``; both mark the step and fetch the
loss, as the eager one does. "operators" and those below it are 200 elementwise operations and one cut: Python's, the
same ones through ``jnp``, those of ``jnp`` that are ufuncs and those that are jitted functions half and half, each
alone, and functions of ``jax.nn``. "if" is a step that decides on its loss, through ``lazymods.compile.paths``, beside
the step rewritten with ``jax.lax.cond`` and jitted. All take turns in one process; a ratio is the median of those of
the rounds, a time the least one.
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
from lazymods.compile.paths import Paths

Run = Callable[[int], Any]
RANDOM = np.random.default_rng(0)
IMAGES = RANDOM.normal(size=(16, 64, 8, 8, 1)).astype(np.float32)
LABELS = RANDOM.integers(0, 10, size=(16, 64))


class Mlp(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.layers = nnx.List([nnx.Linear(64, 64, rngs=rngs), nnx.Linear(64, 64, rngs=rngs)])
        self.out = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        x = x.reshape(x.shape[0], -1)
        for layer in self.layers:
            x = nnx.relu(layer(x))
        return self.out(x)


class Conv(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.conv1 = nnx.Conv(1, 16, (3, 3), rngs=rngs)
        self.conv2 = nnx.Conv(16, 32, (3, 3), rngs=rngs)
        self.fc = nnx.Linear(512, 10, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        x = nnx.relu(self.conv2(nnx.relu(self.conv1(x))))
        return self.fc(nnx.max_pool(x, (2, 2), strides=(2, 2)).reshape(x.shape[0], -1))


def made(model: Callable[[nnx.Rngs], Any]) -> tuple[Any, nnx.Optimizer[Any]]:
    """Return a model and its optimizer."""
    module = model(nnx.Rngs(0))
    return module, nnx.Optimizer(module, optax.adam(1e-3), wrt=nnx.Param)


def loss_of(x: Any, y: Any) -> Callable[[Any], Any]:
    """Return the loss as a function of the model."""
    return lambda model: optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()


def steps(model: Callable[[nnx.Rngs], Any], transform: Any, mark: Callable[[], None]) -> Run:
    """Return a function that does some steps."""
    module, optimizer = made(model)

    def run(n: int) -> None:
        for i in range(n):
            loss, grads = transform(loss_of(jnp.asarray(IMAGES[i % 16]), jnp.asarray(LABELS[i % 16])))(module)
            optimizer.update(module, grads)
            mark()
            float(loss)

    return run


def with_a_decision(model: Callable[[nnx.Rngs], Any], rewritten: bool) -> Run:
    """Return a function that does some steps that halve the gradients if the loss is above a limit."""
    graph, state = nnx.split(made(model))
    leaves, tree = jax.tree.flatten(state)

    def body(values: Any) -> Any:
        x, y, limit, *rest = values
        module, optimizer = nnx.merge(graph, jax.tree.unflatten(tree, rest))
        loss, grads = nnx.value_and_grad(loss_of(x, y))(module)
        if rewritten:
            grads = jax.lax.cond(loss > limit, lambda g: jax.tree.map(lambda a: a * 0.5, g), lambda g: g, grads)
        elif loss > limit:
            grads = jax.tree.map(lambda a: a * 0.5, grads)
        optimizer.update(module, grads)
        return [loss, *jax.tree.leaves(nnx.state((module, optimizer)))], None

    call = jax.jit(lambda values: body(values)[0]) if rewritten else None
    paths = Paths(body)

    def run(n: int) -> None:
        nonlocal leaves
        for i in range(n):
            limit = jnp.asarray(np.float32(-1 if i % 2 else 1e9))
            values = [jnp.asarray(IMAGES[i % 16]), jnp.asarray(LABELS[i % 16]), limit, *leaves]
            loss, *leaves = call(values) if call is not None else paths(values)[0]
            float(loss)

    return run


FOUR = {
    "operators": lambda y: (y * 1.01 + 0.5 - 0.25) / 1.01,
    "jnp the same": lambda y: jnp.divide(jnp.subtract(jnp.add(jnp.multiply(y, 1.01), 0.5), 0.25), 1.01),
    "jnp half": lambda y: jnp.abs(jnp.tanh(jnp.add(jnp.multiply(y, 1.01), 0.5))),
    "jnp ufuncs": lambda y: jnp.maximum(jnp.subtract(jnp.add(jnp.multiply(y, 1.01), 0.5), 0.25), 0.0),
    "jnp jitted": lambda y: jnp.cos(jnp.sin(jnp.tanh(jnp.sqrt(y)))),
    "nn": lambda y: jax.nn.relu(jnp.where(y, jax.nn.sigmoid(jax.nn.softplus(y)), 1.0)),
}


def elementwise(four: Callable[[Any], Any]) -> Run:
    """Return a function that does 200 operations some times."""
    x = jnp.ones(1000)

    def run(n: int) -> None:
        for _ in range(n):
            y = x
            for _ in range(50):
                y = four(y)
            lm.lazytensor.mark_step()
            jax.block_until_ready(y)

    return run


def nothing() -> None:
    """Mark no step."""


def compare(name: str, rows: dict[str, Run], rounds: int, n: int) -> None:
    """Print a line for each row: time of a step, and the ratio to the first row."""
    for run in rows.values():
        run(6)
    times: dict[str, list[float]] = {row: [] for row in rows}
    for _ in range(rounds):
        for row, run in rows.items():
            start = time.perf_counter()
            run(n)
            times[row].append((time.perf_counter() - start) / n)
    first = times[next(iter(rows))]
    for row, taken in times.items():
        ratio = statistics.median(a / b for a, b in zip(taken, first, strict=True))
        print(f"{name:14}{row:12}{min(taken) * 1e3:10.3f} ms{ratio:8.3f}")


def main(rounds: int, n: int) -> None:
    """Compare everything."""
    lazy = lm.lazytensor.lazy()
    mark = lm.lazytensor.mark_step
    for model in (Mlp, Conv):
        rows = {
            "eager": steps(model, nnx.value_and_grad, nothing),
            "lazy": lazy(steps(model, nnx.value_and_grad, mark)),
            "one node": lazy(steps(model, lm.lazytensor.value_and_grad, mark)),
        }
        compare(f"{model.__name__} step", rows, rounds, n)
        compare(
            f"{model.__name__} if",
            {"lax.cond": with_a_decision(model, True), "paths": with_a_decision(model, False)},
            rounds,
            4 * n,
        )
    for name, four in FOUR.items():
        compare(name, {"eager": elementwise(four), "lazy": lazy(elementwise(four))}, rounds, n)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=5, help="steps in one slot")
    arguments = parser.parse_args()
    main(arguments.rounds, arguments.steps)
