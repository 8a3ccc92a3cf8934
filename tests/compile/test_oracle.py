"""Random programs: what lm.jit returns and leaves behind equals plain Python, whatever changes between two calls."""

import gc
import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

import lazymods as lm


class Block(nnx.Module):
    """A layer with static attributes of every kind, statistics, a counter and random numbers."""

    def __init__(self, width: int, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(width, width, rngs=rngs)
        self.norm = nnx.BatchNorm(width, rngs=rngs)
        self.drop = nnx.Dropout(0.25, rngs=rngs)
        self.seen = nnx.Variable(jnp.zeros((), jnp.int32))
        self.scale: Any = 2
        self.names = ["a"]
        self.table = {"shift": 0.5}
        self.act: Any = jnp.tanh

    def __call__(self, x: jax.Array) -> jax.Array:
        self.seen[...] += 1
        h = self.drop(self.norm(self.linear(x)))
        sign = -1.0 if str(self.scale).startswith("-") else 1.0
        h = h * 2 if isinstance(self.table["shift"], bool) else h
        h = self.act(h) * jnp.float32(float(self.scale)) * sign + self.table["shift"]
        return h + len(self.names) + (1.0 if isinstance(self.scale, bool) else 0.0)


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.blocks = nnx.List([Block(3, rngs), Block(3, rngs)])
        self.head = nnx.Linear(3, 2, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Louder(nnx.Linear):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs) * 3


def scale(value: Any) -> Callable[[Model], None]:
    return lambda m: setattr(m.blocks[0], "scale", value)


def tie(m: Model) -> None:
    m.blocks[1].linear.kernel = m.blocks[0].linear.kernel


def untie(m: Model) -> None:
    m.blocks[1].linear.kernel = nnx.Param(m.blocks[0].linear.kernel[...] + 1)


def swap(m: Model) -> None:
    m.blocks[0], m.blocks[1] = m.blocks[1], m.blocks[0]


def grow(m: Model) -> None:
    if len(m.blocks) < 4:
        m.blocks.append(Block(3, nnx.Rngs(len(m.blocks))))


def shrink(m: Model) -> None:
    if len(m.blocks) > 2:
        m.blocks.pop()


def around_flax(m: Model) -> None:
    vars(m.blocks[0])["scale"] = 7


def class_around_flax(m: Model) -> None:
    object.__setattr__(m.head, "__class__", Louder)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda m: None,
    "int": scale(1),
    "bool": scale(True),
    "float": scale(1.0),
    "zero": scale(0.0),
    "negative zero": scale(-0.0),
    "numpy": scale(np.float32(1)),
    "list in place": lambda m: m.blocks[0].names.append("b"),
    "dict in place": lambda m: m.blocks[0].table.update(shift=1.5),
    "dict of int": lambda m: m.blocks[0].table.update(shift=1),
    "dict of bool": lambda m: m.blocks[0].table.update(shift=True),
    "function": lambda m: setattr(m.blocks[0], "act", jnp.sin),
    "function back": lambda m: setattr(m.blocks[0], "act", jnp.tanh),
    "train": lambda m: m.train(),
    "eval": lambda m: m.eval(),
    "rate": lambda m: setattr(m.blocks[0].drop, "rate", 0.0),
    "value": lambda m: m.head.kernel.set_value(m.head.kernel[...] * 0.5),
    "variable": lambda m: setattr(m.head, "bias", nnx.Param(jnp.ones(2))),
    "other variable type": lambda m: setattr(m.head, "bias", nnx.BatchStat(jnp.ones(2))),
    "metadata": lambda m: m.head.bias.set_metadata("note", 1),
    "dtype": lambda m: m.head.bias.set_value(m.head.bias[...].astype(jnp.float16)),
    "dtype back": lambda m: m.head.bias.set_value(m.head.bias[...].astype(jnp.float32)),
    "layer": lambda m: setattr(m, "head", nnx.Linear(3, 2, rngs=nnx.Rngs(5))),
    "class": lambda m: setattr(m, "head", Louder(3, 2, rngs=nnx.Rngs(6))),
    "width": lambda m: setattr(m, "head", nnx.Linear(3, 4, rngs=nnx.Rngs(7))),
    "tie": tie,
    "untie": untie,
    "swap": swap,
    "grow": grow,
    "shrink": shrink,
    "around flax": around_flax,
    "class around flax": class_around_flax,
    "new key": lambda m: m.blocks[0].drop.rngs.key.set_value(jax.random.key(9)),
}  # fmt: skip


def arrays(tree: Any) -> list[np.ndarray[Any, Any]]:
    out = []
    for leaf in jax.tree.leaves(tree):
        key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        out.append(np.asarray(jax.random.key_data(leaf) if key else leaf))
    return out


def check_same(got: Any, want: Any) -> None:
    for a, b in zip(arrays(got), arrays(want), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(a.astype(np.float64), b.astype(np.float64), rtol=2e-2, atol=2e-3)


def step(m: Model, x: jax.Array) -> jax.Array:
    out = m(x)
    m.head.kernel[...] -= 0.01
    return out


@pytest.mark.slow
@pytest.mark.parametrize("closed", [False, True], ids=["argument", "closed_over"])
@given(changes=st.lists(st.sampled_from(sorted(CHANGES)), min_size=1, max_size=5), rows=st.sampled_from([2, 3]))
@settings(deadline=None, max_examples=12, derandomize=True, database=None)
def test_any_changes_between_calls(closed: bool, changes: list[str], rows: int) -> None:
    mine, plain = Model(nnx.Rngs(0)), Model(nnx.Rngs(0))
    compiled = lm.jit(lambda x: step(mine, x)) if closed else lm.jit(step)
    x = jnp.linspace(-1.0, 1.0, 3 * rows).reshape(rows, 3)
    for change in ["nothing", *changes]:
        CHANGES[change](mine), CHANGES[change](plain)
        for _ in range(2):
            with jax.numpy_dtype_promotion("standard"):  # a float16 bias
                got = compiled(x) if closed else compiled(mine, x)  # pyright: ignore[reportCallIssue]
                want = step(plain, x)
            check_same(got, want)
        check_same(nnx.state(mine), nnx.state(plain))


class Counter(nnx.Module):
    def __init__(self) -> None:
        self.total = nnx.Variable(jnp.zeros(()))
        self.factor: Any = 1
        self.extra = nnx.List([])

    def __call__(self, x: jax.Array) -> jax.Array:
        kind = {bool: 3, int: 5, float: 7}[type(self.factor)]
        self.total[...] += x * float(self.factor) * kind + len(self.extra)
        return self.total[...]


def live_bytes() -> int:
    gc.collect()
    return sum(a.nbytes for a in jax.live_arrays())


@pytest.mark.slow
def test_many_calls_with_random_changes_are_never_stale_and_keep_nothing() -> None:
    rng, model, x = random.Random(0), Counter(), jnp.float32(1.0)
    compiled, expected = lm.jit(lambda m, x: m(x)), 0.0
    previous = lm.set_cache_size(24)
    before = objects = 0
    try:
        for call in range(10_000):
            match rng.randrange(8):
                case 0:
                    model.factor = rng.choice([True, 1, 1.0, 2, False, 0, 0.0])
                case 1 if len(model.extra) < 3:
                    model.extra.append(nnx.Variable(jnp.zeros(())))
                case 2 if len(model.extra):
                    model.extra.pop()
                case 3:
                    model.total = nnx.Variable(jnp.float32(0.0))
                    expected = 0.0
            kind = {bool: 3, int: 5, float: 7}[type(model.factor)]
            expected = float(np.float32(expected) + np.float32(float(model.factor) * kind + len(model.extra)))
            got: Any = compiled(model, x)
            if call % 10 == 0:
                assert float(got) == expected
            if call == 2000:
                before, objects = live_bytes(), len(gc.get_objects())
        assert compiled.cache_info().currsize <= 24
        got = None  # the array of the last call
        assert live_bytes() <= before + 64
        assert len(gc.get_objects()) < objects + 2000
    finally:
        lm.set_cache_size(previous)
