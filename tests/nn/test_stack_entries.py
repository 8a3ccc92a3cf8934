"""The names and files of a lm.Stack, its blocks one by one, and what it refuses."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.core import Tracer
from stacks import WIDTH, Attending, Dense, H, Model, N, Normed, X, layered, loss, pair, run, through

import lazymods as lm

# ---------------------------------------------------------------- names and files


@pytest.mark.parametrize("name", ["m.safetensors", "m.npz", "m"])
@pytest.mark.parametrize("form", ["lazy", "ready"])
def test_checkpoints_go_both_ways(tmp_path: Any, form: str, name: str) -> None:
    want = Model(Normed, "list", seed=3)
    lm.save(want, tmp_path / name)
    model = Model(Normed, form)
    if form == "ready":
        lm.materialize(model, X)
    kernel = model.blocks.blocks_as_one.fc.kernel
    assert lm.load(model, tmp_path / name).matched["blocks.2.fc.kernel"] == ("blocks.2.fc.kernel",)
    assert model.blocks.blocks_as_one.fc.kernel is kernel
    for got, expected in zip(lm.state_dict(model).items(), lm.state_dict(want).items(), strict=True):
        assert got[0] == expected[0]
        np.testing.assert_array_equal(got[1], expected[1])
    lm.save(model, tmp_path / f"back-{name}")
    other = Model(Normed, "list")
    lm.load(other, tmp_path / f"back-{name}")
    np.testing.assert_array_equal(other.blocks[2].fc.kernel[...], want.blocks[2].fc.kernel[...])


@pytest.mark.slow
def test_an_export_to_pytorch() -> None:
    model, want = Model(Normed, "lazy"), Model(Normed, "list")
    lm.materialize(model, X)
    got, expected = lm.export_torch(model), lm.export_torch(want)
    assert list(got) == list(expected) and "blocks.2.fc.weight" in got
    for name, value in expected.items():
        np.testing.assert_array_equal(got[name], value)


@pytest.mark.parametrize("form", ["lazy", "ready"])
def test_a_file_of_pytorch(tmp_path: Any, form: str) -> None:
    torch = pytest.importorskip("torch")
    want = Model(Normed, "list", seed=3)
    torch.save({f"module.{k}": torch.tensor(v) for k, v in lm.export_torch(want).items()}, tmp_path / "m.pt")
    model = Model(Normed, form)
    if form == "ready":
        lm.materialize(model, X)
    lm.load(model, tmp_path / "m.pt", layout="torch")
    for name, value in lm.state_dict(want).items():
        np.testing.assert_array_equal(lm.state_dict(model)[name], value)


def test_names_of_a_lazy_stack() -> None:
    model, want = Model(Dense, "lazy"), Model(Dense, "list")
    entries = lm.state_dict(model)
    assert list(entries) == list(lm.state_dict(want))
    assert repr(entries["blocks.1.up.kernel"]) == "UninitializedParameter(shape=(?, 16), dtype=float32)"
    assert "blocks.up.kernel" in lm.uninitialized_paths(model)
    lm.load_state_dict(model, entries)
    assert lm.is_lazy(model.blocks.blocks_as_one.up)
    rows = {row.path: row for row in lm.infer_shapes(model, X).rows}
    assert {p.name: p.shape for p in rows["blocks.up"].parameters} == {"kernel": (N, 8, 16), "bias": (N, 16)}
    with pytest.raises(lm.UninitializedError, match=r"blocks\.up\.kernel"):
        lm.save(model, "never.safetensors")


def test_a_stack_that_gets_some_entries_is_sized_by_them() -> None:
    model, want, other = Model(Dense, "lazy"), Model(Dense, "list"), Model(Dense, "list", seed=3)
    some = {k: v for k, v in lm.state_dict(other).items() if not k.startswith("blocks.1.")}
    result = lm.load_state_dict(model, some, strict=False)
    assert result.missing == [k for k in lm.state_dict(want) if k.startswith("blocks.1.")]
    expected = lm.state_dict(want) | some
    for name, value in lm.state_dict(model).items():
        np.testing.assert_array_equal(value, expected[name], err_msg=name)


def test_a_ready_stack_keeps_what_a_load_leaves_out() -> None:
    model, want = Model(Dense, "ready"), Model(Dense, "list")
    lm.materialize(model, X)
    new = jnp.full((8, 16), 2.0)
    lm.load_state_dict(model, {"blocks.1.up.kernel": new}, strict=False)
    expected = lm.state_dict(want) | {"blocks.1.up.kernel": new}
    for name, value in lm.state_dict(model).items():
        np.testing.assert_array_equal(value, expected[name], err_msg=name)


@pytest.mark.parametrize("form", ["lazy", "ready"])
def test_a_load_that_fails_changes_nothing(form: str) -> None:
    model = Model(Dense, form)
    if form == "ready":
        lm.materialize(model, X)
    before = {k: v if lm.is_lazy(v) else np.asarray(v) for k, v in lm.state_dict(model).items()}
    entries = lm.state_dict(Model(Dense, "list", seed=3)) | {"blocks.2.up.kernel": jnp.ones((8, 17))}
    with pytest.raises(lm.StateDictError, match=r"blocks\.2\.up\.kernel"):
        lm.load_state_dict(model, entries)
    lm.register_load_state_dict_post_hook(model, lambda module, result: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        lm.load_state_dict(model, lm.state_dict(Model(Dense, "list", seed=3)))
    after = lm.state_dict(model)
    assert list(after) == list(before)
    for name, value in before.items():
        if lm.is_lazy(value):
            assert lm.is_lazy(after[name])
        else:
            np.testing.assert_array_equal(after[name], value)


def test_hooks_of_a_load_see_what_was_loaded() -> None:
    model, other = Model(Dense, "lazy"), Model(Dense, "list", seed=3)
    seen: dict[str, Any] = {}
    lm.register_load_state_dict_post_hook(model, lambda module, result: seen.update(lm.state_dict(module)))
    lm.load_state_dict(model, lm.state_dict(other))
    for name, value in lm.state_dict(other).items():
        np.testing.assert_array_equal(seen[name], value)


# ---------------------------------------------------------------- blocks


def test_blocks_are_copies() -> None:
    stack, blocks = pair(lambda rngs: nnx.Linear(WIDTH, WIDTH, rngs=rngs))
    assert len(stack) == len(list(stack)) == N and len(stack[1:]) == 2
    for i in (0, -1):
        np.testing.assert_array_equal(stack[i](H), blocks[i](H))
    with pytest.raises(IndexError):
        stack[N]
    kernel = stack.blocks_as_one.kernel
    block = stack[0]
    block.kernel[...] = block.kernel[...] * 2
    np.testing.assert_array_equal(stack[0].kernel[...], blocks[0].kernel[...])
    stack[1] = block
    assert stack.blocks_as_one.kernel is kernel
    np.testing.assert_array_equal(kernel[...], jnp.stack([b.kernel[...] for b in (blocks[0], block, blocks[2])]))
    stack.each(lambda b: setattr(b, "extra", nnx.Param(b.bias[...] + 1)))
    assert stack.blocks_as_one.extra.shape == (N, WIDTH)
    assert list(lm.state_dict(stack))[:3] == ["0.kernel", "0.bias", "0.extra"]


@pytest.mark.slow
def test_modes_and_frozen_parameters() -> None:
    model, want = Model(Dense, "lazy"), Model(Dense, "list")
    for m in (model, want):
        lm.autograd.requires_grad_(m.blocks, False)
        m.eval()
    lm.materialize(model, X)
    np.testing.assert_array_equal(model(X), want(X))
    got, expected = (lm.jit(lm.autograd.grad(loss))(m, X) for m in (model, want))
    assert [p for p, _ in nnx.to_flat_state(got)] == [p for p, _ in nnx.to_flat_state(expected)]
    layered(got, expected)


def test_shardings_get_an_axis_for_the_layers() -> None:
    def make(rngs: nnx.Rngs) -> Any:
        return nnx.Linear(WIDTH, WIDTH, kernel_metadata={"out_sharding": ("a", "b")}, rngs=rngs)

    with nnx.use_eager_sharding(False):
        stack = lm.Stack(make, N, rngs=nnx.Rngs(0))
        assert stack.blocks_as_one.kernel.out_sharding == (None, "a", "b")
        assert stack[0].kernel.out_sharding == ("a", "b")


# ---------------------------------------------------------------- refusals


def test_what_is_set_without_the_layers_is_refused() -> None:
    stack, _ = pair(lambda rngs: nnx.Linear(WIDTH, WIDTH, rngs=rngs))
    stack.blocks_as_one.bias = nnx.Param(jnp.zeros(WIDTH))
    with pytest.raises(lm.LazyError) as caught:
        stack(H)
    assert str(caught.value).splitlines() == [
        "bias in the blocks of a Stack",
        "  got:    a value of shape (8,)",
        "  needed: an axis of the 3 layers in front",
        "  write:  stack.each(lambda block: ...)  # sets it in each block",
    ]


class Odd(nnx.Module):
    built = 0

    def __init__(self, rngs: nnx.Rngs) -> None:
        Odd.built += 1
        self.fc = nnx.Linear(WIDTH, WIDTH + Odd.built, rngs=rngs)
        self.drop = nnx.Dropout(0.1 * Odd.built)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.drop(self.fc(x))


@pytest.mark.slow
def test_unequal_blocks_are_refused() -> None:
    Odd.built = 0
    with pytest.raises(lm.LazyError) as caught:
        lm.Stack(Odd, 2, rngs=nnx.Rngs(0))
    needed = "  needed: the same in each block: they may differ in the values of their Variables and arrays alone"
    write = "  write:  nnx.List([make_block(rngs) for _ in range(n)])"
    places = {
        "drop.rate": "0.1 and 0.2",
        "fc.bias": "f32[9] and f32[10]",
        "fc.kernel": "f32[8,9] and f32[8,10]",
        "fc.out_features": "9 and 10",
    }
    lines = [line for where, got in places.items() for line in (where, f"  got:    {got}", needed, write)]
    assert str(caught.value).splitlines() == ["These blocks are not equal, so they can't be one:", *lines]


@pytest.mark.parametrize("compile", [lambda f: f, nnx.jit], ids=["plain", "nnx.jit"])
@pytest.mark.parametrize("lazy", [False, True])
def test_a_block_must_return_what_it_takes(lazy: bool, compile: Any) -> None:
    def make(rngs: nnx.Rngs) -> Any:
        if lazy:
            return lm.LazyLinear(WIDTH, dtype=jnp.bfloat16, rngs=rngs)
        return nnx.Linear(WIDTH, WIDTH, dtype=jnp.bfloat16, rngs=rngs)

    stack = lm.Stack(make, 2, rngs=nnx.Rngs(0))
    with pytest.raises(lm.ShapeInferenceError) as caught:
        compile(run)(stack, H)
    assert str(caught.value).splitlines() == [
        f"a block ({'LazyLinear' if lazy else 'Linear'}) of a Stack",
        "  got:    bf16[2,5,8], from f32[2,5,8]",
        "  needed: an output of the structure, shape and dtype of the input: the next block takes it",
        "  write:  return y.astype(x.dtype)",
    ]
    assert lm.is_lazy(stack.blocks_as_one) is lazy
    assert stack(H.astype(jnp.bfloat16)).dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("n", "make", "lines"),
    [
        (0, Attending, ["n=", "  got:    0", "  needed: a number of blocks, at least one"]),
        (2.5, Attending, ["n=", "  got:    2.5", "  needed: a number of blocks, at least one"]),
        (
            2,
            lambda rngs: 0.5,
            [
                "make_block=",
                "  got:    a function that returns a float",
                "  needed: a function of rngs that returns a block, a module that can be called",
            ],
        ),
    ],
)
def test_arguments_that_make_no_stack(n: Any, make: Any, lines: list[str]) -> None:
    with pytest.raises(lm.ArgumentError) as caught:
        lm.Stack(make, n, rngs=nnx.Rngs(0))
    assert str(caught.value).splitlines()[:3] == lines


def test_a_first_call_that_fails_leaves_it_lazy() -> None:
    class Failing(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.fc: Any = lm.LazyLinear(WIDTH, rngs=rngs)
            self.fail = True

        def __call__(self, x: jax.Array) -> jax.Array:
            y = self.fc(x)
            if self.fail and not isinstance(y, Tracer):
                raise RuntimeError("now")
            return y

    stack, blocks = pair(Failing)
    with pytest.raises(RuntimeError, match="now"):
        stack(H)
    assert lm.is_lazy(stack.blocks_as_one.fc) and lm.has_uninitialized_params(stack)
    stack.blocks_as_one.fail = False
    for block in blocks:
        block.fail = False
    np.testing.assert_array_equal(stack(H), through(blocks, H))


@pytest.mark.parametrize("name", ["m.npz", "m"])
def test_a_parameter_of_several_arrays_loads_from_a_file(tmp_path: Any, name: str) -> None:
    """The blocks that a load has written into lose their values; it still looks at their shapes."""

    class Several(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            key = rngs.params()
            arrays = {"a": jax.random.normal(key, (3,)), "b": (jnp.ones(2), jax.random.normal(key, (2, 2)))}
            self.pair: Any = nnx.Param(arrays)
            self.table = nnx.Embed(4, 3, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return x * self.pair["a"]

    rngs = nnx.Rngs(0)
    blocks = nnx.Dict(blocks=nnx.List([Several(rngs) for _ in range(3)]))
    stacked = nnx.Dict(blocks=lm.Stack(Several, 3, rngs=nnx.Rngs(1)))
    lm.save(nnx.Dict(blocks=blocks["blocks"], other=nnx.Param(jnp.ones((4, 3)))), tmp_path / name)
    lm.load(stacked, tmp_path / name, strict=False)  # one is left over that looks like a table
    got, want = lm.state_dict(stacked), lm.state_dict(blocks)
    assert list(got) == list(want)
    for key, value in want.items():
        np.testing.assert_array_equal(got[key], value)
