"""What a training state may hold, what is refused by its name, and loads that fail late."""

import time
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import lazymods as lm


@pytest.mark.parametrize(
    "held",
    [{1, 2}, print, np.array(["a"]), np.ma.masked_array([1.0], [True]), np.longdouble(1), object(), time.gmtime(0)],
)
@pytest.mark.parametrize("suffix", [".safetensors", ".npz", ""])
def test_what_no_file_holds_is_refused_by_name(tmp_path: Path, held: Any, suffix: str) -> None:
    with pytest.raises(lm.CheckpointError, match=r"deep\.1\.odd"):
        lm.save({"model": nnx.Linear(2, 2, rngs=nnx.Rngs(0)), "deep": [0, {"odd": held}]}, tmp_path / f"s{suffix}")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("number", [np.float64("nan"), np.float32("inf")])
def test_a_number_that_does_not_fit_leaves_all_as_it_was(tmp_path: Path, number: Any) -> None:
    lm.save({"model": nnx.Linear(2, 2, rngs=nnx.Rngs(0)), "step": number}, tmp_path / "s.npz")
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(5))
    before = np.array(model.kernel[...])
    with pytest.raises(lm.StateDictError, match=r"step \(int\)"):
        lm.load({"model": model, "step": 0}, tmp_path / "s.npz")
    np.testing.assert_array_equal(model.kernel[...], before)


def test_names_that_a_file_needs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(lm.CheckpointError, match="note"):
        lm.save({"note": "text", "note.json": jnp.ones(2)}, tmp_path / "s.npz")


@pytest.mark.parametrize("suffix", [".safetensors", ".npz", ""])
def test_texts_and_large_numbers_in_a_list_that_is_there_twice_come_back(tmp_path: Path, suffix: str) -> None:
    def make(k: int) -> dict[str, Any]:
        shared = ["ab" * k, b"cd" * k, 2**70 * k, 0.5 * k, jnp.ones(2) * k]
        return {"x": shared, "y": shared}

    lm.save(make(2), tmp_path / f"s{suffix}")
    state = make(1)
    lm.load(state, tmp_path / f"s{suffix}")
    assert state["x"] is state["y"] and state["x"][:4] == ["abab", b"cdcd", 2**71, 1.0]
    assert state["x"][4].tolist() == [2, 2]


class _Net(nnx.Module):
    def __init__(self, stack: bool, k: int) -> None:
        def block(rngs: nnx.Rngs) -> nnx.Linear:
            return nnx.Linear(3, 3, rngs=rngs)

        rngs = nnx.Rngs(k)
        self.blocks = lm.Stack(block, 2, rngs=rngs) if stack else nnx.List([block(rngs), block(rngs)])


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".safetensors", ".npz"])
@pytest.mark.parametrize("stack", [False, True], ids=["list", "stack"])
def test_what_is_called_as_the_blocks_of_a_model_comes_back(stack: bool, tmp_path: Path, suffix: str) -> None:
    """An optimizer's arrays for blocks are brought from a list to a stack and back; what has a place is left alone."""

    def make(k: int) -> dict[str, Any]:
        held = {"flat": {"blocks": {"mean": np.full((2, 3), k)}}, "deep": {"blocks": [np.full(3, k), np.full(3, -k)]}}
        return {"model": _Net(stack, k), **held}

    lm.save(make(1), tmp_path / f"s{suffix}")
    state = make(2)
    assert not any(lm.load(state, tmp_path / f"s{suffix}"))
    assert state["flat"]["blocks"]["mean"].tolist() == [[1] * 3] * 2
    assert [part.tolist() for part in state["deep"]["blocks"]] == [[1] * 3, [-1] * 3]
