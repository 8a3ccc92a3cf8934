"""Lazy layers of one's own, adapters and hooks in blocks of a lm.Stack; lazy stacks in loops and abstract models."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from stacks import WIDTH, assert_same, through

import lazymods as lm

Y = jax.random.normal(jax.random.key(5), (4, WIDTH))


def run(model: Any, x: jax.Array) -> jax.Array:
    return model(x)


# ---------------------------------------------------------------- classes that may decide by a size how often they draw


class Residual(nnx.Module):
    """Has a shortcut only where widths differ."""

    def __init__(self, n: int, out: int, *, rngs: nnx.Rngs) -> None:
        self.fc = nnx.Linear(n, out, rngs=rngs)
        self.short = None if n == out else nnx.Linear(n, out, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.tanh(self.fc(x) + (x if self.short is None else self.short(x)))


LazyResidual = lm.lazy(Residual, infer=lambda config, x: {"n": x.shape[-1]})


class Two(nnx.Module):
    """Two of these among other layers: one draws as it was read, the other does not."""

    def __init__(self, rngs: nnx.Rngs, lazy: bool, drop: bool = False) -> None:
        linear: Any = lm.LazyLinear if lazy else lambda n, **given: nnx.Linear(WIDTH, n, **given)
        residual: Any = LazyResidual if lazy else lambda *, out, n, rngs: Residual(n, out, rngs=rngs)
        self.first = linear(WIDTH, rngs=rngs)
        self.same = residual(out=WIDTH, rngs=rngs, **({} if lazy else {"n": WIDTH}))
        self.wide = residual(out=16, rngs=rngs, **({} if lazy else {"n": WIDTH}))
        self.last = lm.LazyLinear(WIDTH, rngs=rngs) if lazy else nnx.Linear(16, WIDTH, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs) if drop else jnp.tanh

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.drop(self.last(self.wide(self.same(self.first(x)))))


class Model(nnx.Module):
    def __init__(self, lazy: bool, **options: Any) -> None:
        rngs = nnx.Rngs(0)
        if lazy:
            self.blocks: Any = lm.Stack(lambda rngs: Two(rngs, True, **options), 3, rngs=rngs)
        else:
            self.blocks = nnx.List([Two(rngs, False, **options) for _ in range(3)])
        self.out: Any = lm.LazyLinear(2, rngs=rngs) if lazy else nnx.Linear(WIDTH, 2, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(through(self.blocks, x))


@pytest.mark.slow
@pytest.mark.parametrize("way", ["call", "spec", "nnx.jit", "lm.jit", "clone", "load", "each"])
def test_what_comes_after_a_layer_that_draws_less_gets_its_own_keys(way: str) -> None:
    model, want = Model(True), Model(False)
    compile: Callable[..., Any] = {"nnx.jit": nnx.jit, "lm.jit": lm.jit}.get(way, lambda f: f)
    if way == "spec":
        lm.materialize(model, Y)
    elif way == "clone":
        model = nnx.clone(model)
    elif way == "load":
        lm.load_state_dict(model, lm.state_dict(want))
    elif way == "each":
        model.blocks.each(lambda block: None)
    np.testing.assert_allclose(compile(run)(model, Y), want(Y), rtol=1e-5, atol=1e-6)
    assert_same(model, want, rounding=True)


@pytest.mark.slow
def test_what_drew_other_keys_in_the_blocks_is_refused() -> None:
    model, want = Model(True, drop=True), Model(False, drop=True)
    with pytest.raises(lm.ConfigurationError, match=r"blocks\.same \(LazyResidual\)"):
        model(Y)
    assert lm.has_uninitialized_params(model)
    lm.load_state_dict(model, lm.state_dict(want))
    np.testing.assert_allclose(model(Y), want(Y), rtol=1e-5, atol=1e-6)
    assert_same(model, want)


# ---------------------------------------------------------------- a lazy layer that was given another


class Adapted(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, lazy: bool) -> None:
        init = nnx.initializers.normal(1.0)
        if lazy:
            base = lm.LazyLinear(WIDTH, rngs=rngs)
            self.lora: Any = lm.LazyLoRA(2, WIDTH, base_module=base, b_initializer=init, rngs=rngs)
        else:
            linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
            self.lora = nnx.LoRA(WIDTH, 2, WIDTH, base_module=linear, b_initializer=init, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.tanh(self.lora(x))


def adapted() -> tuple[Any, Any]:
    rngs = nnx.Rngs(0)
    stack = lm.Stack(lambda rngs: Adapted(rngs, True), 3, rngs=nnx.Rngs(0))
    return stack, nnx.List([Adapted(rngs, False) for _ in range(3)])


@pytest.mark.slow
@pytest.mark.parametrize("compile", [nnx.jit, lm.jit], ids=["nnx.jit", "lm.jit"])
def test_adapters_as_an_argument(compile: Any) -> None:
    stack, want = adapted()
    np.testing.assert_allclose(compile(run)(stack, Y), through(want, Y), rtol=1e-5, atol=1e-6)
    assert_same(stack, want, rounding=True)


@pytest.mark.slow
def test_adapters_in_an_abstract_model() -> None:
    _, want = adapted()
    stack = nnx.eval_shape(lambda: adapted()[0])
    [row] = [row for row in lm.infer_shapes(stack, Y).rows if row.path == "lora"]
    assert {p.name: p.shape for p in row.parameters} == {"lora_a": (3, WIDTH, 2), "lora_b": (3, 2, WIDTH)}
    lm.materialize(stack, Y)
    assert stack.blocks_as_one.lora.lora_a.shape == (3, WIDTH, 2)
    for made in (stack, nnx.eval_shape(lambda: adapted()[0])):
        lm.load_state_dict(made, lm.state_dict(want))
        np.testing.assert_allclose(made(Y), through(want, Y), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("n", [1, 3])
def test_a_lazy_layer_that_all_blocks_share_has_the_names_of_the_list(n: int) -> None:
    class Sharing(nnx.Module):
        def __init__(self, rngs: nnx.Rngs, kept: Any) -> None:
            self.kept, self.fc = kept, nnx.Linear(WIDTH, WIDTH, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.kept(self.fc(x))

    for way in ("call", "load"):
        kept, other, rngs = (
            lm.LazyLinear(WIDTH, rngs=nnx.Rngs(1)),
            nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(1)),
            nnx.Rngs(0),
        )
        stack = lm.Stack(functools.partial(Sharing, kept=kept), n, rngs=nnx.Rngs(0))
        want = nnx.List([Sharing(rngs, other) for _ in range(n)])
        assert list(lm.state_dict(stack)) == list(lm.state_dict(want))
        if way == "load":
            lm.load_state_dict(stack, lm.state_dict(want))
        np.testing.assert_allclose(stack(Y), through(want, Y), rtol=1e-5, atol=1e-6)
        assert stack.blocks_as_one.kept is kept
        assert_same(stack, want)


# ---------------------------------------------------------------- hooks


def scaled(factor: float, module: Any, args: Any) -> Any:
    return (args[0] * factor,)


class Hooked(nnx.Module):
    """Registers hooks when it is built; ``own`` ones hold the block."""

    def __init__(self, rngs: nnx.Rngs, own: bool = False) -> None:
        self.fc = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        lm.register_forward_hook(self.fc, self.added if own else lambda module, args, output: jnp.tanh(output + 1.0))
        lm.register_forward_pre_hook(self.fc, functools.partial(scaled, 0.5))
        if own:
            self.act = lambda x: self.fc(x)

    def added(self, module: Any, args: Any, output: jax.Array) -> jax.Array:
        return output * self.fc.kernel[...].sum()

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.fc(x)


@pytest.mark.parametrize("compile", [lambda f: f, nnx.jit, lm.jit], ids=["plain", "nnx.jit", "lm.jit"])
def test_hooks_of_a_constructor_run_in_each_block(compile: Any) -> None:
    rngs = nnx.Rngs(0)
    stack, want = lm.Stack(Hooked, 3, rngs=nnx.Rngs(0)), nnx.List([Hooked(rngs) for _ in range(3)])
    for _ in range(2):
        np.testing.assert_allclose(compile(run)(stack, Y), through(want, Y), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("n", [1, 3])
def test_functions_that_hold_their_block_are_refused(n: int) -> None:
    """They would go on with the block that was built, whatever becomes of the stack."""
    with pytest.raises(lm.LazyError) as caught:
        lm.Stack(functools.partial(Hooked, own=True), n, rngs=nnx.Rngs(0))
    needed = (
        "  needed: functions that get all they need as arguments: one serves all blocks, none of which stays as it is"
    )
    assert str(caught.value).splitlines() == [
        "These blocks are not equal, so they can't be one:",
        "act",
        "  got:    Hooked.__init__.<locals>.<lambda>, which holds a Hooked of its block",
        needed,
        "  write:  def act(self, x): ...  # a method of the class of the block",
        "fc.hooks.forward",
        "  got:    Hooked.added, which holds a Hooked of its block",
        needed,
        "  write:  lm.register_forward_hook(layer, hook)  # with a function that is the same for all blocks",
    ]


@pytest.mark.parametrize("numbers", [(1, 2), (1, 1)])
def test_hooks_must_be_equal(numbers: tuple[int, int]) -> None:
    left = iter(numbers)

    def make(rngs: nnx.Rngs) -> Any:
        block, number = nnx.Linear(WIDTH, WIDTH, rngs=rngs), next(left)
        for _ in range(number):
            lm.register_forward_hook(block, lambda module, args, output: output + number)
        return block

    if numbers == (1, 2):
        with pytest.raises(lm.LazyError, match="hooks\n  got:    1 hooks in the first block, and others in another"):
            lm.Stack(make, 2, rngs=nnx.Rngs(0))
        return
    rngs = nnx.Rngs(0)
    want = [nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in numbers]
    np.testing.assert_allclose(
        lm.Stack(make, 2, rngs=nnx.Rngs(0))(Y), want[1](want[0](Y) + 1.0) + 1.0, rtol=1e-5, atol=1e-6
    )


# ---------------------------------------------------------------- what can't be


class Growing(lm.LazyModuleMixin, nnx.Module):
    """Makes a lazy layer when it is initialized."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.rngs = rngs
        self.scale: Any = lm.UninitializedParameter(init=nnx.initializers.ones)

    def initialize_parameters(self, x: jax.Array) -> None:
        self.scale.materialize((x.shape[-1],))
        self.fc = lm.LazyLinear(WIDTH, rngs=self.rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        fc: Any = self.fc
        return fc(x * self.scale)


def test_lazy_layers_that_one_makes_for_all_are_refused() -> None:
    stack = lm.Stack(Growing, 3, rngs=nnx.Rngs(0))
    with pytest.raises(lm.LazyError) as caught:
        stack(Y)
    assert str(caught.value).splitlines()[:4] == [
        "fc.bias in the blocks of a Stack",
        "  got:    a lazy layer for all blocks at once: set on the stack, or made by initialize_parameters",
        "  needed: one that each block makes for itself, with keys of its own",
        "  write:  self.layer = lm.LazyLinear(4, rngs=rngs)  # in the constructor of the block",
    ]
    assert lm.is_lazy(stack.blocks_as_one)


def lazy_stack(rngs: nnx.Rngs | None = None) -> Any:
    return lm.Stack(lambda rngs: lm.LazyLinear(WIDTH, rngs=rngs), 3, rngs=rngs or nnx.Rngs(0))


@pytest.mark.parametrize("loop", ["scan", "fori_loop"])
def test_a_lazy_stack_that_a_loop_carries(loop: str) -> None:
    def carried(stack: Any, x: jax.Array) -> Any:
        if loop == "fori_loop":
            return nnx.fori_loop(0, 2, lambda i, c: (c[0], c[0](c[1])), (stack, x))[1]
        step = nnx.scan(lambda c, _: ((c[0], c[0](c[1])), None), in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
        results: Any = step((stack, x), jnp.zeros(2))
        return results[0][1]

    stack = lazy_stack()
    with pytest.raises(lm.UninitializedError, match="its first call inside an NNX loop"):
        carried(stack, Y)
    assert lm.has_uninitialized_params(stack)
    lm.materialize(stack, Y)
    np.testing.assert_allclose(carried(stack, Y), stack(stack(Y)), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_lazy_stacks_one_after_the_other() -> None:
    stacks = nnx.split_rngs(splits=2)(nnx.vmap(lazy_stack))(nnx.Rngs(0))
    each = nnx.split_rngs(splits=2)(
        nnx.vmap(lambda rngs: nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in "123"]))
    )
    want = each(nnx.Rngs(0))
    got = nnx.scan(lambda x, stack: stack(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(Y, stacks)
    expected = nnx.scan(lambda x, blocks: through(blocks, x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(Y, want)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
