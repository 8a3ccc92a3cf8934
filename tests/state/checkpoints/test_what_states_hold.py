"""What a training state may hold, what is refused by its name, and loads that fail late."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import lazymods as lm


@pytest.mark.parametrize(
    "held", [{1, 2}, print, np.array(["a"]), np.ma.masked_array([1.0], [True]), np.longdouble(1), object()]
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
