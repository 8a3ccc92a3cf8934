"""What blocks of a lm.Stack share with the rest of a model: it stays one object, or is refused."""

from __future__ import annotations

import functools
import gc
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from stacks import WIDTH, through

import lazymods as lm

Y = jax.random.normal(jax.random.key(5), (4, WIDTH))


class Coded(nnx.Module):
    """A block that ends with a table."""

    def __init__(self, rngs: nnx.Rngs, embed: nnx.Embed | None = None) -> None:
        self.embed = nnx.Embed(WIDTH, WIDTH, rngs=rngs) if embed is None else embed
        self.fc = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.tanh(self.fc(x) @ self.embed.embedding[...])


class Head(nnx.Module):
    def __init__(self, table: Any) -> None:
        self.table: Any = table

    def __call__(self, x: jax.Array) -> jax.Array:
        return x @ self.table[...]


class Model(nnx.Module):
    """A list of blocks; each has a table of its own, or all have one. The head has the first one's."""

    first: Any
    itself: Any

    def __init__(self, n: int, *, one: bool = False, tied: bool = True) -> None:
        rngs = nnx.Rngs(0)
        embed = nnx.Embed(WIDTH, WIDTH, rngs=rngs) if one else None
        self.blocks: Any = nnx.List([Coded(rngs, embed) for _ in range(n)])
        self.head: Any = Head(self.blocks[0].embed.embedding) if tied else jnp.tanh

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(through(self.blocks, x))


def stacked(blocks: Any) -> Any:
    left = iter(blocks)
    return lm.Stack(lambda rngs: next(left), len(blocks), rngs=nnx.Rngs(9))


def loss(model: Any) -> Any:
    return (model(Y) ** 2).sum()


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 3])
def test_blocks_of_a_list_keep_a_tie_that_all_have(n: int) -> None:
    got, want = Model(n, one=True), Model(n, one=True)
    got.blocks = stacked(got.blocks)
    assert got.blocks.blocks_as_one.embed.embedding is got.head.table
    np.testing.assert_allclose(got(Y), want(Y), rtol=1e-5, atol=1e-6)
    gradients = [nnx.grad(loss)(model) for model in (got, want)]
    table = gradients[0]["blocks"]["blocks_as_one"]["embed"]["embedding"][...]
    np.testing.assert_allclose(table, gradients[1]["blocks"][0]["embed"]["embedding"][...], rtol=1e-4, atol=1e-6)
    got.head.table[...] = want.head.table[...] = jnp.eye(WIDTH)
    np.testing.assert_allclose(got(Y), want(Y), rtol=1e-5, atol=1e-6)
    assert len(jax.tree.leaves(nnx.state(got))) == 3


@pytest.mark.slow
def test_ties_of_some_blocks_are_refused() -> None:
    model = Model(3)
    kernel = model.blocks[2].fc.kernel
    with pytest.raises(lm.LazyError) as caught:
        stacked(model.blocks)
    needed = "parts that the blocks make, or one that all of them share: the stack has one array for all blocks"
    assert str(caught.value).splitlines() == [
        "These blocks are not equal, so they can't be one:",
        "embed.embedding",
        "  got:    a Param in block 0 that is tied to something outside: Head.table",
        f"  needed: {needed}",
        "  write:  nnx.clone(embedding)  # for each block: a copy, tied to nothing",
        "fc.kernel",
        "  got:    a Param in block 2 that is tied to something outside: the variable kernel",
        f"  needed: {needed}",
        "  write:  nnx.clone(kernel)  # for each block: a copy, tied to nothing",
    ]
    assert isinstance(model.blocks, nnx.List) and model.head.table is model.blocks[0].embed.embedding
    del kernel
    copies = stacked([nnx.clone(block) for block in model.blocks])
    np.testing.assert_allclose(copies(Y), through(model.blocks, Y), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_ties_to_ordinary_objects_are_refused() -> None:
    model = Model(2, tied=False)
    trainer = types.SimpleNamespace(tables={"first": [model.blocks[0].embed]})
    with pytest.raises(lm.LazyError, match=r"the variable trainer.tables\['first'\]\[0\]"):
        stacked(model.blocks)
    assert trainer.tables


@pytest.mark.slow
def test_a_block_that_is_more_than_one_of_a_list() -> None:
    model = Model(2, tied=False)
    model.first = model.blocks[0]
    with pytest.raises(lm.LazyError, match=r"a Coded in block 0 that is tied to something outside: Model\.first"):
        stacked(model.blocks)
    model.blocks = stacked(model.blocks[:1])
    assert model.blocks.blocks_as_one is model.first
    np.testing.assert_array_equal(model.blocks(Y), model.first(Y))


@pytest.mark.slow
def test_what_is_dead_holds_nothing() -> None:
    def blocks_of_a_model_in_a_circle() -> list[nnx.Module]:
        model = Model(2)
        model.itself = nnx.data([model])
        return list(model.blocks)

    gc.disable()
    gc.freeze()
    try:
        for _ in range(2):
            stack = stacked(blocks_of_a_model_in_a_circle())
            assert stack.blocks_as_one.embed.embedding.shape == (2, WIDTH, WIDTH)
    finally:
        gc.enable()
        gc.unfreeze()


@pytest.mark.slow
def test_a_frozen_heap_is_looked_at() -> None:
    model = Model(2)
    gc.freeze()
    try:
        with pytest.raises(lm.LazyError, match=r"Head\.table"):
            stacked(model.blocks)
        parts = iter([nnx.Embed(WIDTH, WIDTH, rngs=nnx.Rngs(0)) for _ in range(2)])
        gc.freeze()
        with pytest.raises(lm.LazyError, match="it was there before"):
            lm.Stack(lambda rngs: Coded(rngs, next(parts)), 2, rngs=nnx.Rngs(0))
    finally:
        gc.unfreeze()


@pytest.mark.slow
@pytest.mark.parametrize("compile", [nnx.jit, lm.jit])
def test_a_list_that_was_compiled_becomes_a_stack(compile: Any) -> None:
    got, want = Model(3, tied=False), Model(3, tied=False)
    call = compile(lambda model, x: model(x))
    for _ in range(2):
        call(got, Y)
    got.blocks = stacked(got.blocks)
    for _ in range(2):
        np.testing.assert_allclose(call(got, Y), want(Y), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 3])
def test_what_each_block_is_given_later(n: int) -> None:
    kept = [nnx.Param(jnp.eye(WIDTH) * (i + 2)) for i in range(3)]
    stack = lm.Stack(lambda rngs: nnx.Linear(WIDTH, WIDTH, rngs=rngs), n, rngs=nnx.Rngs(0))
    if n > 1:
        left = iter(kept)
        with pytest.raises(lm.LazyError, match="a Param in each block that is tied to something outside"):
            stack.each(lambda block: setattr(block, "kernel", next(left)))
    stack.each(lambda block: setattr(block, "kernel", kept[0]))
    assert stack.blocks_as_one.kernel is kept[0]
    kept[0][...] = jnp.eye(WIDTH) * 3
    np.testing.assert_allclose(stack(Y), Y * 3.0**n, rtol=1e-6)


class Table(nnx.Module):
    """What is made at its first call, or counts its calls."""

    made: Any

    def __init__(self, way: str) -> None:
        self.way, self.calls, self.was_called, self.made = way, 0, False, nnx.data(None)

    def __call__(self, x: jax.Array) -> jax.Array:
        self.was_called = True
        if self.way == "counts":
            self.calls += 1
        elif self.way != "notes" and self.made is None:
            table = jnp.arange(1.0, WIDTH + 1)
            self.made = nnx.Variable(table) if self.way == "Variable" else table
        return x if self.made is None else x * jnp.sum(self.made[...])


@pytest.mark.parametrize("compile", [lambda f: f, nnx.jit, lm.jit], ids=["plain", "nnx.jit", "lm.jit"])
@pytest.mark.parametrize("way", ["Variable", "array", "counts", "notes"])
@pytest.mark.parametrize("given", [False, True])
def test_what_a_call_adds_to_what_blocks_share_is_refused(given: bool, way: str, compile: Any) -> None:
    table = Table(way)

    class Using(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.fc = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
            self.table: Any = None if given else table

        def __call__(self, x: jax.Array, other: Any = None) -> jax.Array:
            return self.fc((other or self.table)(x))

    stack = lm.Stack(Using, 3, rngs=nnx.Rngs(0))
    call = compile(lambda m, *args: m(*args))
    if way == "notes":  # once or three times is all the same
        call(stack, Y, *[table] * given)
        assert table.was_called
        return
    word = "which a call changes" if way == "counts" else "a new Variable or array in what the blocks share"
    before = lm.state_dict(stack)
    with pytest.raises(lm.LazyError, match=word):
        call(stack, Y, *[table] * given)
    assert (table.calls, table.was_called, table.made) == (0, False, None)
    for name, value in lm.state_dict(stack).items():
        np.testing.assert_array_equal(value, before[name])


class Once(nnx.Module):
    """What notes in attributes, for the calls after it, that it was called."""

    def __init__(self) -> None:
        self.is_new, self.factor, self.calls = True, 3.0, nnx.Variable(jnp.array(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        if self.is_new:
            self.calls[...] += 1
        x, self.factor, self.is_new = x * self.factor, 0.5, False
        return x


@pytest.mark.slow
@pytest.mark.parametrize("compile", [lambda f: f, nnx.jit, lm.jit], ids=["plain", "nnx.jit", "lm.jit"])
@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("n", [1, 2, 4])
def test_what_a_block_notes_in_what_all_share_is_there_for_the_next(n: int, remat: bool, compile: Any) -> None:
    class Using(nnx.Module):
        def __init__(self, rngs: nnx.Rngs, once: Once) -> None:
            self.fc, self.once = nnx.Linear(WIDTH, WIDTH, rngs=rngs), once

        def __call__(self, x: jax.Array) -> jax.Array:
            return jnp.tanh(self.fc(self.once(x)))

    got, want, rngs = Once(), Once(), nnx.Rngs(0)
    stack = lm.Stack(lambda rngs: Using(rngs, got), n, remat=remat, rngs=nnx.Rngs(0))
    blocks = nnx.List([Using(rngs, want) for _ in range(n)])
    for _ in range(2):
        result = compile(lambda m, x: m(x))(stack, Y)
        np.testing.assert_allclose(result, functools.reduce(lambda x, block: block(x), blocks, Y), rtol=1e-5, atol=1e-6)
    assert (got.is_new, got.factor, int(got.calls[...])) == (want.is_new, want.factor, int(want.calls[...]))


def test_what_not_all_blocks_do_at_once() -> None:
    """A change of what they share, made by one of them, is kept; a number that each has for itself is refused."""

    class Numbered(nnx.Module):
        def __init__(self, shared: nnx.Variable[Any], number: int) -> None:
            self.shared, self.number, self.last = shared, nnx.Variable(jnp.array(number)), 0.0

        def __call__(self, x: jax.Array, *, keeps: bool = False) -> jax.Array:
            if keeps:
                self.last = float(self.number[...])
            if int(self.number[...]) == 0:
                self.shared[...] += 1
            return x

    shared, numbers = nnx.Variable(jnp.array(5)), iter(range(3))
    stack = lm.Stack(lambda rngs: Numbered(shared, next(numbers)), 3, rngs=nnx.Rngs(0))
    stack(Y)
    assert int(shared[...]) == 6
    with pytest.raises(lm.LazyError, match="last in a block of a Stack"):
        stack(Y, keeps=True)
    assert int(shared[...]) == 6 and [block.last for block in stack] == [0.0] * 3
