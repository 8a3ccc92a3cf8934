"""What a save refuses by name, and what it does while another one is faster."""

import os
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

import lazymods as lm
from lazymods.state.files import orbax

each_format = pytest.mark.parametrize("suffix", [".safetensors", ".npz", ""])


def _donate(array: Any) -> None:
    jax.jit(lambda x: x, donate_argnums=0)(array)
    array.delete()


@each_format
def test_donated_arrays_are_refused_by_names(suffix: str, tmp_path: Path) -> None:
    model: Any = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    key = jax.random.key(0)
    for array in (model.kernel.get_value(), model.bias.get_value(), key):
        _donate(array)
    with pytest.raises(lm.CheckpointError) as told:
        lm.save({"model": model, "deep": [key], "good": jnp.ones(2)}, tmp_path / f"s{suffix}")
    text = str(told.value)
    assert all(f"s{suffix}: {name}\n" in text for name in ("model.kernel", "model.bias", "deep.0"))
    assert "good" not in text and "deleted or donated" in text and not list(tmp_path.iterdir())


def test_a_donated_key_is_refused_by_its_name() -> None:
    key = jax.random.key(0)
    key.delete()
    with pytest.raises(lm.StateDictError, match=r"r\.key\n.*deleted or donated"):
        lm.state_dict({"r": {"key": key}}, include_rng=True)


@each_format
def test_traced_values_are_refused_by_names(suffix: str, tmp_path: Path) -> None:
    def save(x: jax.Array) -> None:
        lm.save({"good": np.ones(2), "traced": x}, tmp_path / f"s{suffix}")

    with pytest.raises(lm.CheckpointError, match=rf"s{suffix}: traced\n.*f32\[3\], a traced value"):
        jax.jit(save)(jnp.ones(3))
    assert not list(tmp_path.iterdir())


def test_a_donated_model_can_be_loaded_into(tmp_path: Path) -> None:
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    kernel = np.array(model.kernel[...])
    lm.save(model, tmp_path / "s.npz")
    _donate(model.kernel.get_value())
    lm.load(model, tmp_path / "s.npz")
    np.testing.assert_array_equal(model.kernel[...], kernel)


@pytest.mark.parametrize("state", [{}, {"list": []}, {"best": None}, nnx.Dropout(0.5, rngs=nnx.Rngs(0))], ids=repr)
def test_an_orbax_folder_without_entries_is_refused_with_the_reason(state: Any, tmp_path: Path) -> None:
    with pytest.raises(lm.CheckpointError, match=r"s\n.*nothing: .*\n.*Orbax stores no folder without one"):
        lm.save(state, tmp_path / "s")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("vanishes", [False, True], ids=["half removed", "not there"])
def test_a_save_looks_again_at_what_another_one_replaces(
    vanishes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, other, looks = tmp_path / "s", tmp_path / "other", []
    lm.save({"a": np.ones(2)}, path)
    lm.save({"a": np.zeros(2)}, other)
    ordinary = orbax.refuse_to_replace

    def looks_late(folder: Path) -> str | None:
        looks.append(folder)
        if len(looks) > 1:
            return ordinary(folder)
        shutil.rmtree(folder)
        os.rename(other, folder)
        if vanishes:
            raise FileNotFoundError(folder)
        return "an Orbax folder that does not open"

    monkeypatch.setattr(orbax, "refuse_to_replace", looks_late)
    lm.save({"a": np.full(2, 7.0)}, path)
    state = {"a": np.zeros(2)}
    lm.load(state, path)
    assert state["a"].tolist() == [7, 7] and len(looks) > 1


@pytest.mark.parametrize(
    ("suffix", "held"),
    [
        (".safetensors", {"c": np.ones(2, ml_dtypes.uint4), "__metadata__": np.ones(2)}),
        (".npz", {"__dtypes__": np.ones(2), "n" * 70_000: np.ones(1)}),
        ("", {"c": np.ones(2, ml_dtypes.uint4), "a..b": np.ones(2), "empty": np.ones(0)}),
    ],
)
def test_all_that_is_wrong_is_told_at_once(suffix: str, held: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(lm.CheckpointError) as told:
        lm.save({"good": 1, "call": print, **held}, tmp_path / f"s{suffix}")
    assert len(told.value.problems) == 1 + len(held) and not list(tmp_path.iterdir())


def test_all_names_that_meet_are_told_at_once() -> None:
    with pytest.raises(lm.StateDictError) as told:
        lm.state_dict({"a.b": 1, "a": {"b": 2}, "c.d": 3, "c": {"d": 4}})
    assert [problem.where for problem in told.value.problems] == ["a.b", "c.d"]
