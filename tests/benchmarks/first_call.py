"""What a lazy model's first calls cost under ``nnx.jit``, and that a finished model's calls cost what Flax's do.

"first" is construction and two calls, since ``nnx.jit`` compiles a lazy model's second call anew: its classes are
others then. Lazy and explicit models take turns in one process, each time with a new model and a new compiled function.
The ratio of later calls is the median of ratios taken round by round.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from construct import MODELS
from flax import nnx


def timed(run: Callable[[], Any]) -> float:
    """The seconds until the result of a call is there."""
    start = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - start


def first_calls(name: str, lazy: bool) -> tuple[float, Callable[[], Any]]:
    """Construct a model and call it twice: the seconds until the last result, and a function to call it again."""
    make, shape = MODELS[name]
    x = jnp.ones(shape)
    call = nnx.jit(lambda model, x: model(x))
    models = []

    def run() -> Any:
        models.append(make(lazy, nnx.Rngs(0)))
        return call(models[0], x), call(models[0], x)

    return timed(run), lambda: call(models[0], x)


def main(models: list[str], rounds: int, calls: int) -> None:
    """Print a line for each model."""
    print(f"{'':12}{'first s':>9}{'explicit':>10}{'ratio':>7}{'later us':>12}{'explicit':>10}{'ratio':>7}")
    for name in models:
        for lazy in (True, False):  # compiles the initializers
            first_calls(name, lazy)
        first: dict[bool, list[float]] = {True: [], False: []}
        again: dict[bool, Callable[[], Any]] = {}
        for _ in range(rounds):
            for lazy, seconds in first.items():
                spent, again[lazy] = first_calls(name, lazy)
                seconds.append(spent)
        later: dict[bool, list[float]] = {True: [], False: []}
        for slot in range(6 * rounds):
            for lazy in (slot % 2 == 0, slot % 2 == 1):  # neither kind is always the first
                seconds = timed(lambda run=again[lazy]: [run() for _ in range(calls)])
                later[lazy].append(seconds / calls * 1e6)
        ratio = statistics.median(a / b for a, b in zip(later[True], later[False], strict=True))
        a, b, c, d = (statistics.median(times[lazy]) for times in (first, later) for lazy in (True, False))
        print(f"{name:12}{a:9.3f}{b:10.3f}{a / b:7.2f}{c:12.0f}{d:10.0f}{ratio:7.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=5, help="first calls of each kind")
    parser.add_argument("--calls", type=int, default=50, help="later calls in one slot")
    arguments = parser.parse_args()
    main(arguments.models, arguments.rounds, arguments.calls)
