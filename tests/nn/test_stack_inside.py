"""A lm.Stack in other things: in another's blocks, in a lazy class of the user's own, in abstract models, hooked."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from layers import TABLE
from stacks import WIDTH, Model, Normed, X, assert_same, loss, pair, through

import lazymods as lm

Y = jax.random.normal(jax.random.key(5), (4, WIDTH))


class Outer(nnx.Module):
    """A layer and a stack, or a list."""

    def __init__(self, rngs: nnx.Rngs, form: str) -> None:
        stacked = form == "stack"
        self.first: Any = lm.LazyLinear(WIDTH, rngs=rngs) if stacked else nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        if stacked:
            self.inner: Any = lm.Stack(lambda rngs: Normed(rngs, True), 2, rngs=rngs)
        else:
            self.inner = nnx.List([Normed(rngs, False) for _ in range(2)])

    def __call__(self, x: jax.Array) -> jax.Array:
        return through(self.inner, self.first(x))


@pytest.mark.slow
@pytest.mark.parametrize("way", ["call", "spec", "load"])
def test_stacks_of_stacks(way: str) -> None:
    stack = lm.Stack(lambda rngs: Outer(rngs, "stack"), 3, rngs=nnx.Rngs(0))
    rngs = nnx.Rngs(0)
    want = nnx.List([Outer(rngs, "list") for _ in range(3)])
    assert list(lm.state_dict(stack)) == list(lm.state_dict(want))
    if way == "call":
        np.testing.assert_array_equal(stack(Y), through(want, Y))
    elif way == "spec":
        lm.materialize(stack, Y)
    else:
        lm.load_state_dict(stack, lm.state_dict(want))
    assert_same(stack, want)
    assert stack.blocks_as_one.inner.blocks_as_one.fc.kernel.shape == (3, 2, WIDTH, WIDTH)
    new = {name: value + 1 for name, value in lm.state_dict(want).items()}
    lm.load_state_dict(stack, new)
    np.testing.assert_array_equal(stack[1].inner[0].fc.kernel[...], new["1.inner.0.fc.kernel"])


@pytest.mark.slow
def test_in_abstract_models() -> None:
    want = Model(Normed, "list", seed=1)
    for make in (lambda: Model(Normed, "lazy"), lambda: Model(Normed, "ready")):
        model = nnx.eval_shape(make)
        lm.load_state_dict(model, lm.state_dict(want))
        for name, value in lm.state_dict(want).items():
            np.testing.assert_array_equal(lm.state_dict(model)[name], value)


@pytest.mark.slow
def test_in_a_lazy_class_of_the_users_own() -> None:
    """While that is lazy, its constructor says how values are made, so the stack has no blocks yet."""

    class Net(nnx.Module):
        def __init__(self, n: int, *, rngs: nnx.Rngs) -> None:
            self.first = nnx.Linear(n, WIDTH, rngs=rngs)
            self.blocks = lm.Stack(lambda rngs: Normed(rngs, False), 2, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.blocks(self.first(x))

    lazy = lm.lazy(Net, infer=lambda config, x: {"n": x.shape[-1]})(rngs=nnx.Rngs(0))
    want = Net(5, rngs=nnx.Rngs(0))
    assert list(lm.state_dict(lazy))[2] == "blocks.fc.kernel"
    with pytest.raises(lm.StateDictError, match=r"blocks\.fc\.kernel"):
        lm.load_state_dict(lazy, lm.state_dict(want))
    np.testing.assert_array_equal(lazy(X), want(X))
    assert_same(lazy, want)


@pytest.mark.slow
def test_hooks_of_a_stack_and_of_layers_in_it() -> None:
    model, want = Model(Normed, "ready"), Model(Normed, "list")
    lm.materialize(model, X)
    calls: list[str] = []
    lm.register_forward_hook(model.blocks, lambda module, args, output: calls.append("stack"))
    for fc in (model.blocks.blocks_as_one.fc, *(block.fc for block in want.blocks)):
        lm.register_forward_hook(fc, lambda module, args, output: output + 1.0)
    np.testing.assert_array_equal(model(X), want(X))
    assert calls == ["stack"]
    np.testing.assert_allclose(lm.jit(lambda m, x: m(x))(model, X), want(X), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_training_states(tmp_path: Any) -> None:
    """The state of an optimizer has one entry for all layers, as the optimizer has."""
    def step(model: Any, optimizer: Any, x: jax.Array) -> None:
        optimizer.update(model, nnx.grad(loss)(model, x))

    models = [Model(Normed, "lazy", seed=seed) for seed in range(2)]
    tx = optax.sgd(1e-2, momentum=0.9)
    states = [{"model": m, "optimizer": lm.LazyOptimizer(m, tx, wrt=nnx.Param)} for m in models]
    lm.jit(step)(states[0]["model"], states[0]["optimizer"], X)
    lm.save(states[0], tmp_path / "state.safetensors")
    lm.load(states[1], tmp_path / "state.safetensors")
    got, want = (lm.state_dict(s, include_rng=True) for s in reversed(states))
    assert "optimizer.opt_state.0.trace.blocks.fc.kernel" in want and "model.blocks.2.fc.kernel" in want
    for name, value in want.items():
        np.testing.assert_array_equal(got[name], value)


ROWS = [row for row in TABLE if not row.sized_by_file and not row.name.endswith("-net")]  # a net in a wrapper: refused


class Beside(nnx.Module):
    """Adds something of a layer's output to a number."""

    def __init__(self, row: Any, lazy: bool, rngs: nnx.Rngs) -> None:
        self.layer = (row.lazy if lazy else row.explicit)(rngs)
        self.kwargs = nnx.static(dict(row.kwargs))

    def __call__(self, x: jax.Array, args: Any) -> jax.Array:
        leaves = jax.tree.leaves(self.layer(*args, **self.kwargs))
        return x + sum(jnp.sum(v.astype(jnp.float32)) for v in leaves if jnp.issubdtype(v.dtype, jnp.floating))


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_every_layer(row: Any) -> None:
    stack = lm.Stack(lambda rngs: Beside(row, True, rngs), 2, rngs=nnx.Rngs(0))
    rngs = nnx.Rngs(0)
    want = nnx.List([Beside(row, False, rngs) for _ in range(2)])
    x, args = jnp.float32(0.0), row.inputs()
    lm.materialize(stack, x, args)
    assert_same(stack, want)
    np.testing.assert_array_equal(stack(x, args), through(want, x, args))
    assert_same(stack, want)


def test_one_block() -> None:
    stack, blocks = pair(lambda rngs: Normed(rngs, False), n=1)
    np.testing.assert_array_equal(stack(Y), through(blocks, Y))
    assert stack.blocks_as_one.fc.kernel.shape == (1, WIDTH, WIDTH)
    assert_same(stack, blocks)


class Tied(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, part: nnx.Module) -> None:
        self.part, self.fc = part, nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        part: Any = self.part
        return self.fc(part(x))


class Holding(nnx.Module):
    def __init__(self, form: str, n: int) -> None:
        rngs = nnx.Rngs(0)
        self.a = nnx.Linear(4, 4, rngs=rngs)
        make = functools.partial(Tied, part=self.a)
        self.blocks: Any = lm.Stack(make, n, rngs=rngs) if form == "stack" else nnx.List([make(rngs) for _ in range(n)])

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.a(x)
        if isinstance(self.blocks, lm.Stack):
            return self.blocks(x)
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 2])
def test_what_all_blocks_share_with_the_model_stays_tied_to_it(n: int) -> None:
    x = jax.random.normal(jax.random.key(0), (3, 4))
    got, want = Holding("stack", n), Holding("list", n)
    assert got.blocks.blocks_as_one.part is got.a
    gradients = [nnx.grad(lambda m: (m(x) ** 2).sum())(m) for m in (got, want)]
    np.testing.assert_allclose(gradients[0]["a"]["kernel"][...], gradients[1]["a"]["kernel"][...], rtol=1e-5)
    assert len(jax.tree.leaves(nnx.state(got))) == 4  # the part's two, and the two of all blocks


@pytest.mark.slow
def test_a_part_of_the_model_for_each_block_is_refused() -> None:
    rngs = nnx.Rngs(0)
    parts = [nnx.Linear(4, 4, rngs=rngs) for _ in range(3)]
    given = iter(parts)
    with pytest.raises(lm.LazyError, match="tied to something outside"):
        lm.Stack(lambda rngs: Tied(rngs, next(given)), 3, rngs=rngs)
    ready = iter([Tied(rngs, nnx.Linear(4, 4, rngs=rngs)) for _ in range(3)])  # blocks as such are taken over
    assert lm.Stack(lambda rngs: next(ready), 3, rngs=rngs).blocks_as_one.part.kernel.shape == (3, 4, 4)
