"""Where the values of a stack's layers are put together, no more than one parameter is there twice."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import lazymods as lm
from lazymods._layer import stacked_values
from lazymods.state.files.orbax import OrbaxArray

LINEARS, LAYERS, WIDTH = 6, 4, 32
TOTAL = LINEARS * LAYERS * WIDTH * WIDTH * 4
SPEC = jax.ShapeDtypeStruct((2, WIDTH), jnp.float32)


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linears = nnx.List([lm.LazyLinear(WIDTH, use_bias=False, rngs=rngs) for _ in range(LINEARS)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for linear in self.linears:
            x = linear(x)
        return x


def live_bytes() -> int:
    gc.collect()
    return sum(a.nbytes for a in jax.live_arrays() if a.ndim >= 2 and a.dtype == jnp.float32)


@pytest.fixture
def most(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of kernels that were there whenever layers had just been put together, less those before the test."""
    before, found, stack_at, stack = live_bytes(), [0], stacked_values.stack_at, stacked_values.stack

    def watched(function):
        def call(*args, **kwargs):
            made = function(*args, **kwargs)
            found[0] = max(found[0], live_bytes() - before)
            return made

        return call

    monkeypatch.setattr(stacked_values, "stack_at", watched(stack_at))
    monkeypatch.setattr(stacked_values, "stack", watched(stack))
    return found


def stack_of(seed: int) -> nnx.Dict:
    return nnx.Dict(blocks=lm.Stack(Block, LAYERS, rngs=nnx.Rngs(seed)))


@pytest.mark.slow
def test_when_it_is_materialized(most: list[int]) -> None:
    stack = lm.Stack(Block, LAYERS, rngs=nnx.Rngs(0))
    lm.materialize(stack, SPEC)
    assert TOTAL < most[0] <= TOTAL * (1 + 1.5 / LINEARS)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["stack.safetensors", "folder"])
def test_when_it_is_loaded(name: str, tmp_path: Path, most: list[int]) -> None:
    made = lm.Stack(Block, LAYERS, rngs=nnx.Rngs(0))
    lm.materialize(made, SPEC)
    lm.save(nnx.Dict(blocks=made), tmp_path / name)
    want = jax.tree.map(jax.device_get, nnx.state(made, nnx.Param))
    del made
    most[0], model = 0, stack_of(1)
    lm.load(model, tmp_path / name)
    assert TOTAL < most[0] <= TOTAL * (1 + 1.5 / LINEARS)
    got = nnx.state(model["blocks"], nnx.Param)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), got, want))


@pytest.mark.slow
def test_a_training_state_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def state_of(seed: int) -> dict[str, Any]:
        model = stack_of(seed)
        return {"model": model, "optimizer": lm.LazyOptimizer(model, optax.adam(1e-3), wrt=nnx.Param)}

    saved = state_of(0)
    lm.materialize(saved["model"]["blocks"], SPEC)
    grads = jax.tree.map(jnp.ones_like, nnx.state(saved["model"], nnx.Param))
    with jax.numpy_dtype_promotion("standard"):  # Adam counts in integers
        saved["optimizer"].update(saved["model"], grads)
    lm.save(saved, tmp_path / "state")
    read, start = [], OrbaxArray.start

    def noted(array: OrbaxArray):
        read.append(array.name)
        return start(array)

    monkeypatch.setattr(OrbaxArray, "start", noted)
    fresh = state_of(1)
    result = lm.load(fresh, tmp_path / "state")
    assert (result.missing, result.unexpected) == ([], [])
    read = [name for name in read if not name.startswith("__")]
    assert sorted(read) == sorted(set(read))
    assert len(read) == LINEARS * LAYERS + 2 * LINEARS + 2  # parameters, two moments of all layers, and two counts
    for key in ("model", "optimizer"):
        got, want = nnx.state(fresh[key]), nnx.state(saved[key])
        assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), got, want))


def test_layers_that_nothing_is_written_into_stay_as_they_are() -> None:
    model = stack_of(0)
    lm.materialize(model["blocks"], SPEC)
    kept = model["blocks"].blocks_as_one.linears[1].kernel.get_raw_value()
    entries = {name: value for name, value in lm.state_dict(model).items() if ".linears.0." in name}
    lm.load_state_dict(model, {name: value + 1 for name, value in entries.items()}, strict=False)
    assert model["blocks"].blocks_as_one.linears[1].kernel.get_raw_value() is kept
    for name, value in entries.items():
        assert (lm.state_dict(model)[name] == value + 1).all()


def test_a_hook_after_the_load_sees_the_values() -> None:
    saved = stack_of(0)
    lm.materialize(saved["blocks"], SPEC)
    seen: list[dict[str, jax.Array]] = []
    model = stack_of(1)
    lm.register_load_state_dict_post_hook(model, lambda module, result: seen.append(lm.state_dict(module)))
    lm.load_state_dict(model, lm.state_dict(saved))
    assert len(seen) == 1
    assert all((seen[0][name] == value).all() for name, value in lm.state_dict(saved).items())


def test_a_policy_says_what_of_a_block_is_kept() -> None:
    asked = []

    def policy(primitive: Any, *_: Any, **__: Any) -> bool:
        asked.append(primitive.name)
        return False

    def of(remat: Any) -> Any:
        stack = lm.Stack(lambda rngs: nnx.Linear(4, 4, rngs=rngs), 3, remat=remat, rngs=nnx.Rngs(0))
        return nnx.state(nnx.grad(lambda m, x: jnp.tanh(m(x)).sum())(stack, jnp.ones((5, 4))))

    want = of(False)
    assert not asked
    for remat in (policy, jax.checkpoint_policies.everything_saveable, True):
        got = of(remat)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got, want)
    assert "dot_general" in asked
