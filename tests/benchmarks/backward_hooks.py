"""What a compiled training step costs whose modules have backward hooks, against the same step without any.

The rows take turns in one process, a slot of steps each; a ratio is the median of the ratios round by round. ``seen``
hooks look at the gradients and change nothing, ``scaled`` ones return new ones. ``layer`` has hooks on one layer,
``all`` on every one and on the model. Before that, the gradients of ``seen`` are compared with those without hooks.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import nnx

import lazymods as lm


class Net(nnx.Module):
    """Layers with batch norm and dropout."""

    def __init__(self, layers: int, width: int) -> None:
        rngs = nnx.Rngs(0)
        self.linear = nnx.List([nnx.Linear(width, width, rngs=rngs) for _ in range(layers)])
        self.norm = nnx.List([nnx.BatchNorm(width, rngs=rngs) for _ in range(layers)])
        self.drop = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        for linear, norm in zip(self.linear, self.norm, strict=True):
            x = x + self.drop(jax.nn.relu(norm(linear(x))))
        return x


HOOKS: dict[str, Callable[..., Any]] = {
    "seen": lambda module, grad_input, grad_output: None,
    "scaled": lambda module, grad_input, grad_output: tuple(None if g is None else g * 0.5 for g in grad_input),
}


def step(hook: str, where: str, layers: int, width: int, x: jax.Array) -> Callable[[], Any]:
    """Return a compiled step of a model with hooks."""
    model = Net(layers, width)
    modules = {"": [], "layer": [model.linear[layers // 2]], "all": [model.drop, *model.linear, *model.norm, model]}
    for module in modules[where]:
        returned = HOOKS["seen" if module is model else hook]  # the model's input is not differentiated
        lm.autograd.register_full_backward_hook(module, returned)
    gradient = lm.jit(lambda model, x: nnx.grad(lambda m: (m(x) ** 2).mean())(model))
    return lambda: jax.block_until_ready(gradient(model, x))


def main() -> None:
    """Print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    x = jax.random.normal(jax.random.key(0), (128, options.width))
    names = [("", ""), *((hook, where) for hook in HOOKS for where in ("layer", "all"))]
    rows = {name: step(*name, options.layers, options.width, x) for name in names}
    first = {name: jax.tree.leaves(row()) for name, row in rows.items()}
    for name in (("seen", "layer"), ("seen", "all")):
        for a, b in zip(first[name], first["", ""], strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    times: dict[Any, list[float]] = {name: [] for name in names}
    for _ in range(options.rounds):
        for name, row in rows.items():
            begun = time.perf_counter()
            for _ in range(options.steps):
                row()
            times[name].append((time.perf_counter() - begun) / options.steps)
    print(f"{'without hooks':<16}{1e3 * statistics.median(times['', '']):8.3f} ms")
    for name in names[1:]:
        ratio = statistics.median(a / b for a, b in zip(times[name], times["", ""], strict=True))
        print(f"{' '.join(name):<16}{1e3 * statistics.median(times[name]):8.3f} ms, ratio {ratio:.3f}")


if __name__ == "__main__":
    main()
