"""What depth costs: a train step of transformer blocks in a ``lm.Stack``, in an ``nnx.List``, and scanned by hand.

The blocks are built and have their parameters; a row then times the first call of a step of Adam under ``nnx.jit``,
which traces and compiles it, and the median of the calls after that. Each form and depth runs in a process of its own,
and the processes take turns. Losses of the first steps are compared. Ratios are medians of those round by round: the
first call and a step against the list, and tracing and compiling the deepest stack against the shallowest.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from typing import Any

FORMS = ("list", "stack", "hand")
BATCH, TOKENS, HEADS = 8, 32, 4


def model_of(form: str, depth: int, width: int) -> Any:
    """Build the blocks of one form."""
    import jax
    from flax import nnx

    import lazymods as lm

    class Block(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.norm1, self.norm2 = nnx.LayerNorm(width, rngs=rngs), nnx.LayerNorm(width, rngs=rngs)
            self.attention = nnx.MultiHeadAttention(HEADS, width, decode=False, rngs=rngs)
            self.up, self.down = nnx.Linear(width, 4 * width, rngs=rngs), nnx.Linear(4 * width, width, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            x = x + self.attention(self.norm1(x))
            return x + self.down(jax.nn.gelu(self.up(self.norm2(x))))

    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            if form == "stack":
                self.blocks: Any = lm.Stack(Block, depth, rngs=rngs)
            elif form == "list":
                self.blocks = nnx.List([Block(rngs) for _ in range(depth)])
            else:
                self.blocks = nnx.split_rngs(splits=depth)(nnx.vmap(Block))(rngs)

        def __call__(self, x: Any) -> Any:
            if form == "stack":
                return self.blocks(x)
            if form == "list":
                for block in self.blocks:
                    x = block(x)
                return x
            return nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.blocks)

    return Model(nnx.Rngs(0))


def measure(form: str, depth: int, width: int, calls: int) -> dict[str, Any]:
    """Time one form in this process."""
    import jax
    import jax.numpy as jnp
    import optax
    from flax import nnx

    def step(model: Any, optimizer: nnx.Optimizer[Any], x: jax.Array) -> jax.Array:
        loss, gradient = nnx.value_and_grad(lambda m: jnp.mean((m(x) - 1) ** 2))(model)
        optimizer.update(model, gradient)
        return loss

    started = time.perf_counter()
    model = model_of(form, depth, width)
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    x = jax.random.normal(jax.random.key(1), (BATCH, TOKENS, width))
    jax.block_until_ready((nnx.state(model), x))
    built = time.perf_counter() - started
    compiled = nnx.jit(step)
    losses, times = [], []
    for _ in range(calls + 1):
        start = time.perf_counter()
        losses.append(float(compiled(model, optimizer, x)))
        jax.block_until_ready(nnx.state(model))
        times.append(time.perf_counter() - start)
    return {"built": built, "first": times[0], "step": statistics.median(times[1:]), "losses": losses[:3]}


def in_a_process(form: str, depth: int, options: argparse.Namespace) -> dict[str, Any]:
    """Time one form in a process of its own."""
    arguments = ["--one", form, "--depths", str(depth), "--width", str(options.width), "--calls", str(options.calls)]
    done = subprocess.run([sys.executable, __file__, *arguments], check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Print a row for each depth."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depths", type=int, nargs="+", default=[12, 48, 96])
    parser.add_argument("--forms", nargs="+", default=["list", "stack"], choices=FORMS)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--calls", type=int, default=10)
    parser.add_argument("--one", choices=FORMS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one, options.depths[0], options.width, options.calls)))
        return
    found: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for _ in range(options.rounds):
        for depth in options.depths:
            for form in options.forms:
                found.setdefault((form, depth), []).append(in_a_process(form, depth, options))
    for (form, depth), rows in found.items():
        seconds = {what: statistics.median(r[what] for r in rows) for what in ("built", "first", "step")}
        text = "  ".join(f"{what} {value:7.3f} s" for what, value in seconds.items())
        for other in (o for o in options.forms[:1] if o != form):
            against = found[other, depth]
            for row, peer in zip(rows, against, strict=True):
                far = max(abs(a - b) for a, b in zip(row["losses"], peer["losses"], strict=True))
                assert far <= 1e-3 * max(peer["losses"]), f"{form} and {other} compute different losses"
            for what in ("first", "step"):
                ratio = statistics.median(r[what] / p[what] for r, p in zip(rows, against, strict=True))
                text += f"  {what} {ratio:5.2f} x {other}"
        print(f"{form:6} {depth:3} blocks  {text}", flush=True)
    ends = [found.get(("stack", depth), []) for depth in (min(options.depths), max(options.depths))]
    if ends[0] and ends[1] and ends[0] is not ends[1]:
        compiling = [[row["first"] - row["step"] for row in rows] for rows in ends]
        ratio = statistics.median(b / a for a, b in zip(*compiling, strict=True))
        print(f"tracing and compiling the deepest stack (its first call less a step): {ratio:.2f} x the shallowest")


if __name__ == "__main__":
    main()
