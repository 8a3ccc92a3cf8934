"""An optimizer that was made for a lazy model, and is loaded from a file of its own."""

import copy
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import lazymods as lm

GRADIENT = 1.0  # of the sum of the outputs for ones, to each number of the kernel; the momentum after one step


def _save(folder: Path) -> None:
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)
    optimizer.update(model, nnx.grad(lambda m: m(jnp.ones((1, 3))).sum())(model))
    lm.save(model, folder / "model.npz")
    lm.save(optimizer, folder / "optimizer.npz")
    lm.save({"o": optimizer}, folder / "state.npz")


def _make() -> tuple[Any, Any]:
    model = lm.LazyLinear(2, rngs=nnx.Rngs(1))
    return model, lm.LazyOptimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)


def _check(optimizer: Any) -> None:
    assert type(optimizer) is nnx.Optimizer and int(optimizer.step[...]) == 1
    np.testing.assert_array_equal(optimizer.opt_state[0].trace["kernel"][...], np.full((3, 2), GRADIENT))


@pytest.mark.parametrize("alone", [True, False], ids=["alone", "in a dict"])
def test_an_optimizer_of_a_loaded_model(alone: bool, tmp_path: Path) -> None:
    _save(tmp_path)
    model, optimizer = _make()
    lm.load(model, tmp_path / "model.npz")
    if alone:
        lm.load(optimizer, tmp_path / "optimizer.npz")
    else:
        lm.load({"o": optimizer}, tmp_path / "state.npz")
    _check(optimizer)


def test_an_optimizer_of_a_loaded_model_from_a_state_dict(tmp_path: Path) -> None:
    _save(tmp_path)
    model, optimizer = _make()
    with np.load(tmp_path / "optimizer.npz") as file:
        entries = dict(file)
    lm.load(model, tmp_path / "model.npz")
    lm.load_state_dict(optimizer, entries)
    _check(optimizer)


@pytest.mark.parametrize("why", ["the model is lazy", "a copy"])
def test_an_optimizer_whose_model_is_not_there_is_refused_with_the_line(why: str, tmp_path: Path) -> None:
    _save(tmp_path)
    model, optimizer = _make()
    if why != "the model is lazy":
        lm.load(model, tmp_path / "model.npz")
    if why == "a copy":
        optimizer = copy.deepcopy(optimizer)
    line = r"lm\.load\(model, path\)  # of the module, then"
    with pytest.raises(lm.UninitializedError, match=rf"(?s)LazyOptimizer\n.*{line}"):
        lm.load(optimizer, tmp_path / "optimizer.npz")
    assert lm.is_lazy(optimizer)


def test_a_file_that_does_not_fit_leaves_the_optimizer_without_a_state(tmp_path: Path) -> None:
    _save(tmp_path)
    model, optimizer = _make()
    lm.load(model, tmp_path / "model.npz")
    with pytest.raises(lm.StateDictError, match="opt_state"):
        lm.load(optimizer, tmp_path / "model.npz")
    assert lm.is_lazy(optimizer)
    lm.load(optimizer, tmp_path / "optimizer.npz")
    _check(optimizer)
