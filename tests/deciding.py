"""Layers whose constructors decide by a size, for several files of tests."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx


class Shortcut(nnx.Module):
    """A residual block: a shortcut only where widths differ."""

    def __init__(self, n: int, m: int, *, rngs: nnx.Rngs) -> None:
        self.fc = nnx.Linear(n, m, rngs=rngs)
        self.short = nnx.Linear(n, m, use_bias=False, rngs=rngs) if n != m else None

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.fc(x) + (x if self.short is None else self.short(x))


class Default(nnx.Module):
    """A size that has a default, on which more depends than one shape."""

    def __init__(self, n: int = 3, m: int = 2, *, rngs: nnx.Rngs) -> None:
        self.n = n
        self.fc = nnx.Linear(n, m, rngs=rngs)
        self.bias = nnx.Param(jnp.zeros((n,)))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.fc(x + self.bias[None])
