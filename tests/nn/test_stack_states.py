"""Training states of a list of blocks that are loaded into one with a lm.Stack of them, and the other way."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from stacks import WIDTH, Normed, X, through

import lazymods as lm


class Model(nnx.Module):
    """A stack or a list of blocks, and a list of that name in another object."""

    def __init__(self, form: str, seed: int = 0) -> None:
        rngs = nnx.Rngs(seed)
        self.first = nnx.Linear(5, WIDTH, rngs=rngs)
        if form == "list":
            self.blocks: Any = nnx.List([Normed(rngs, False) for _ in range(3)])
        else:
            self.blocks = lm.Stack(lambda rngs: Normed(rngs, form == "lazy"), 3, rngs=rngs)
        self.inner = nnx.Dict(blocks=nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(2)]))

    def __call__(self, x: jax.Array) -> jax.Array:
        return through(self.inner["blocks"], through(self.blocks, self.first(x)))


def state_of(form: str, tx: Any, seed: int = 0) -> dict[str, Any]:
    model = Model(form, seed)
    optimizer = lm.LazyOptimizer if form == "lazy" else nnx.Optimizer
    return {"model": model, "optimizer": optimizer(model, tx, wrt=nnx.Param)}


def step(state: dict[str, Any]) -> jax.Array:
    value, gradient = nnx.value_and_grad(lambda model: (model(X) ** 2).mean())(state["model"])
    state["optimizer"].update(state["model"], gradient)
    return value


@pytest.mark.slow
@pytest.mark.parametrize("name", ["state.safetensors", "state.npz", "state"])
@pytest.mark.parametrize(("old", "new"), [("list", "ready"), ("list", "lazy"), ("ready", "list"), ("list", "list")])
def test_training_goes_on(tmp_path: Any, old: str, new: str, name: str) -> None:
    tx = optax.sgd(1e-2, momentum=0.9)
    want, got = state_of(old, tx), state_of(new, tx, seed=1)
    step(want)
    lm.save(want, tmp_path / name)
    result = lm.load(got, tmp_path / name)
    assert not result.missing and not result.unexpected
    if new == "ready":
        sources = tuple(f"optimizer.opt_state.0.trace.blocks.{i}.fc.kernel" for i in range(3))
        assert result.matched["optimizer.opt_state.0.trace.blocks.fc.kernel"] == sources
    for _ in range(3):
        np.testing.assert_allclose(step(got), step(want), rtol=1e-4)
    entries = lm.state_dict(want["model"])
    for key, value in lm.state_dict(got["model"]).items():
        np.testing.assert_allclose(value, entries[key], rtol=1e-3, atol=1e-4, err_msg=key)


def test_what_an_optimizer_has_of_another_shape_for_a_stack_is_refused(tmp_path: Any) -> None:
    """Adafactor keeps one number for each vector of a list, and factors the matrix that these are in a stack."""
    tx = optax.adafactor(1e-2)
    lm.save(state_of("list", tx), tmp_path / "state.safetensors")
    state = state_of("ready", tx)
    before = lm.state_dict(state)
    with pytest.raises(lm.StateDictError, match=r"v_col\.blocks\.bn\.bias"):
        lm.load(state, tmp_path / "state.safetensors")
    for key, value in lm.state_dict(state).items():
        np.testing.assert_array_equal(value, before[key])


def pair_of(forms: tuple[str, str], seed: int) -> dict[str, Any]:
    """Two models with blocks of one name and number, each with an optimizer: a generator and a critic, say."""
    state: dict[str, Any] = {}
    for i, form in enumerate(forms):
        state |= {f"{key}_{i}": value for key, value in state_of(form, optax.sgd(1e-2, momentum=0.9), seed + i).items()}
    return state


PAIRS = list(itertools.product(("list", "ready"), repeat=2))


@pytest.mark.slow
@pytest.mark.parametrize("new", PAIRS)
@pytest.mark.parametrize("old", PAIRS)
def test_the_form_of_one_model_says_nothing_of_another(tmp_path: Any, old: Any, new: Any) -> None:
    want, got = pair_of(old, 0), pair_of(new, 2)

    def steps(state: dict[str, Any]) -> list[jax.Array]:
        return [step({"model": state[f"model_{i}"], "optimizer": state[f"optimizer_{i}"]}) for i in range(2)]

    steps(want)
    lm.save(want, tmp_path / "state.safetensors")
    result = lm.load(got, tmp_path / "state.safetensors")
    assert not result.missing and not result.unexpected
    for _ in range(2):
        np.testing.assert_allclose(steps(got), steps(want), rtol=1e-4)
