"""What the operators of ``lm.dispatch`` gain on a GPU: against Flax's functions and layers, and against ``jax.nn``.

Attention is causal, bfloat16, 2 x 16 heads of 128, at 512 to 8,192 tokens; norms are over 2 x tokens rows of 2,048.
Forward, and forward with the gradient of all arguments. Before a row is timed, its values are compared with those of
the first column. The columns take turns; a time is the median of the rounds, and a ratio, how many times faster the
operator is, the median of the ratios round by round. ``--from-tokens`` shows where cuDNN begins to pay: 0 takes it
always (``lazymods/dispatch/attention.py: FROM_TOKENS`` is what users get).
"""

import argparse
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import lazymods as lm
from lazymods.dispatch import attention

WIDTH = 2048
Functions = dict[str, Callable[..., Any]]


def with_gradient(function: Callable[..., Any], count: int) -> Callable[..., Any]:
    """Return a function of the arguments and the gradient of the output: the output, and all gradients."""

    def both(*given: Any) -> Any:
        out, pull = jax.vjp(function, *given[:count])
        return out, pull(given[count])

    return both


def attentions() -> Functions:
    """The attention of each."""
    causal = functools.partial
    return {
        "flax": causal(nnx.dot_product_attention, is_causal=True),
        "jax.nn": causal(jax.nn.dot_product_attention, is_causal=True),
        "operator": causal(lm.dispatch.dot_product_attention, is_causal=True),
    }


def norms(kind: str) -> Functions:
    """The norm of each, of the inputs and a scale."""
    cls = nnx.LayerNorm if kind == "layer_norm" else nnx.RMSNorm
    graph, state = nnx.split(cls(WIDTH, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))

    def of_flax(x: Any, scale: Any) -> Any:
        layer: Any = nnx.merge(graph, jax.tree.map(lambda value: value, state))  # Variables of this trace
        layer.scale[...] = scale
        return layer(x)

    return {"flax": of_flax, "operator": getattr(lm.dispatch, kind)}


def measured(functions: Functions, given: Sequence[Any], rounds: int, calls: int) -> dict[str, list[float]]:
    """Return seconds a call, round by round, after a look at whether all compute the same."""
    compiled = {name: jax.jit(function) for name, function in functions.items()}
    want: Any = None
    for name, function in compiled.items():
        got = [np.asarray(x, np.float32) for x in jax.tree.leaves(function(*given))]
        want = got if want is None else want
        for one, other in zip(got, want, strict=True):
            assert np.abs(one - other).max() <= 0.04 * max(1.0, np.abs(other).max()), f"{name} computes something else"
    times: dict[str, list[float]] = {name: [] for name in compiled}
    for _ in range(rounds):
        for name, function in compiled.items():
            start = time.perf_counter()
            out = None
            for _ in range(calls):
                out = function(*given)
            jax.block_until_ready(out)
            times[name].append((time.perf_counter() - start) / calls)
    return times


def row(what: str, functions: Functions, given: Sequence[Any], rounds: int, calls: int) -> None:
    """Print the times and ratios of one case."""
    times = measured(functions, given, rounds, calls)
    ms = "  ".join(f"{name} {1e3 * statistics.median(t):8.3f} ms" for name, t in times.items())
    mine = times.pop("operator")
    ratios = {n: statistics.median(a / b for a, b in zip(t, mine, strict=True)) for n, t in times.items()}
    print(f"{what:34} {ms}  " + "  ".join(f"{r:6.2f} x {name}" for name, r in ratios.items()), flush=True)


def main() -> None:
    """Print a row for each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--calls", type=int, default=20, help="a round")
    parser.add_argument("--from-tokens", type=int, default=attention.FROM_TOKENS)
    options = parser.parse_args()
    attention.FROM_TOKENS = options.from_tokens
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}")
    for tokens in options.tokens:
        keys = jax.random.split(jax.random.key(0), 4)
        given = [jax.random.normal(k, (2, tokens, 16, 128), jnp.bfloat16) for k in keys]
        counts = (options.rounds, options.calls)
        row(f"attention {tokens}, forward", attentions(), given[:3], *counts)
        gradients = {name: with_gradient(f, 3) for name, f in attentions().items()}
        row(f"attention {tokens}, with gradient", gradients, given, *counts)
        x, cotangent = (y.reshape(2, tokens, WIDTH) for y in given[:2])
        scale = given[2].ravel()[:WIDTH]
        for kind in ("layer_norm", "rms_norm"):
            row(f"{kind} {tokens}, forward", norms(kind), [x, scale], *counts)
            gradients = {name: with_gradient(f, 2) for name, f in norms(kind).items()}
            row(f"{kind} {tokens}, with gradient", gradients, [x, scale, cotangent], *counts)


if __name__ == "__main__":
    main()
