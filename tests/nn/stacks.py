"""Blocks in a lm.Stack, and the nnx.List of explicit blocks that it stands for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import lazymods as lm

N, WIDTH = 3, 8


class Dense(nnx.Module):
    """Norm, two layers of other widths, dropout, a residual."""

    def __init__(self, rngs: nnx.Rngs, lazy: bool) -> None:
        self.norm: Any = lm.LazyLayerNorm(rngs=rngs) if lazy else nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up: Any = lm.LazyLinear(16, rngs=rngs) if lazy else nnx.Linear(WIDTH, 16, rngs=rngs)
        self.act = lambda x: jax.nn.relu(x)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.down: Any = lm.LazyLinear(WIDTH, rngs=rngs) if lazy else nnx.Linear(16, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(self.drop(self.act(self.up(self.norm(x)))))


class Normed(nnx.Module):
    """Statistics."""

    def __init__(self, rngs: nnx.Rngs, lazy: bool) -> None:
        init = nnx.initializers.normal(0.3)  # another function in each block
        linear: Any = lm.LazyLinear if lazy else lambda n, **given: nnx.Linear(WIDTH, n, **given)
        self.fc = linear(WIDTH, kernel_init=init, rngs=rngs)
        self.bn: Any = lm.LazyBatchNorm(rngs=rngs) if lazy else nnx.BatchNorm(WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.bn(self.fc(x))


class Keeping(nnx.Module):
    """Rngs that all blocks share, and parameters in containers."""

    def __init__(self, rngs: nnx.Rngs, lazy: bool) -> None:
        linear: Any = lm.LazyLinear if lazy else lambda n, **given: nnx.Linear(WIDTH, n, **given)
        self.layers = nnx.List([linear(WIDTH, rngs=rngs), linear(WIDTH, use_bias=False, rngs=rngs)])
        self.pair = nnx.data({"a": nnx.Param(jax.random.normal(rngs.params(), (WIDTH,))), "b": jnp.ones(())})
        self.drop = nnx.Dropout(0.25)
        self.rngs = rngs

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = layer(x)
        return self.drop(x * self.pair["a"][None] * self.pair["b"], rngs=self.rngs)


class Attending(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.attention = nnx.MultiHeadAttention(2, WIDTH, decode=False, rngs=rngs)
        self.drop = nnx.Dropout(0.3)

    def __call__(self, x: Any, mask: Any = None, *, rngs: Any = None, scale: Any = None, decode: bool = False) -> Any:
        y = self.attention(x, mask=mask, decode=decode)
        y = y if scale is None else y * scale
        return x + (y if rngs is None else self.drop(y, rngs=rngs))


BLOCKS: dict[str, Callable[..., Any]] = {"dense": Dense, "normed": Normed, "keeping": Keeping}


class Model(nnx.Module):
    """A stack or a list of blocks between other layers."""

    def __init__(self, block: Callable[..., Any], form: str, *, remat: bool = False, seed: int = 0) -> None:
        rngs = nnx.Rngs(seed)
        is_list = form == "list"
        self.first: Any = nnx.Linear(5, WIDTH, rngs=rngs) if is_list else lm.LazyLinear(WIDTH, rngs=rngs)
        if is_list:
            self.blocks: Any = nnx.List([block(rngs, False) for _ in range(N)])
        else:
            self.blocks = lm.Stack(lambda rngs: block(rngs, form == "lazy"), N, remat=remat, rngs=rngs)
        self.last: Any = nnx.Linear(WIDTH, 2, rngs=rngs) if is_list else lm.LazyLinear(2, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(through(self.blocks, self.first(x)))


def through(blocks: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a stack, or the blocks of a list in turn."""
    if isinstance(blocks, lm.Stack):
        return blocks(x, *args, **kwargs)
    for block in blocks:
        x = block(x, *args, **kwargs)
    return x


X = jax.random.normal(jax.random.key(1), (4, 5))
H = jax.random.normal(jax.random.key(2), (2, 5, WIDTH))


def run(model: Any, x: jax.Array) -> jax.Array:
    return model(x)


def loss(model: Any, x: jax.Array) -> jax.Array:
    return jnp.mean(model(x) ** 2)


def pair(make: Callable[[nnx.Rngs], Any], n: int = N, **options: Any) -> tuple[Any, Any]:
    """A stack, and the list of the same blocks."""
    rngs = nnx.Rngs(0)
    return lm.Stack(make, n, rngs=nnx.Rngs(0), **options), nnx.List([make(rngs) for _ in range(n)])


def assert_same(model: Any, want: Any, *, rounding: bool = False) -> None:
    """All entries, random state among them, are those of the list."""
    got, expected = (lm.state_dict(m, include_rng=True) for m in (model, want))
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert got[name].dtype == value.dtype
        if rounding:
            np.testing.assert_allclose(got[name], value, rtol=1e-4, atol=1e-5, err_msg=name)
        else:
            np.testing.assert_array_equal(got[name], value, err_msg=name)


def layered(state: Any, want: Any) -> None:
    """A state of a stack is that of the list, stacked."""
    flat = nnx.to_flat_state(want)
    for path, value in nnx.to_flat_state(state):
        at = path.index("blocks_as_one") if "blocks_as_one" in path else None
        where = [path] if at is None else [(*path[:at], i, *path[at + 1 :]) for i in range(N)]
        expected = [dict(flat)[p][...] for p in where]
        expected = expected[0] if at is None else jnp.stack(expected)
        np.testing.assert_allclose(value[...], expected, rtol=1e-4, atol=1e-5, err_msg=str(path))
