"""Packed tensors: what a model has an array for is read, however well it is packed; the rest of a file has a limit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import lazymods as lm
from lazymods.__main__ import main
from lazymods.state.files import stored

SIZE = 500


def write_npz(path: Path, **arrays: Any) -> Path:
    path = path.with_suffix(".npz")
    np.savez_compressed(path, **arrays)
    return path


def write_orbax(path: Path, **arrays: np.ndarray) -> Path:
    lm.save(arrays, path)
    return path


@pytest.fixture(params=[write_npz, write_orbax])
def write(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Write arrays packed; a megabyte of zeros is over the limit."""
    monkeypatch.setattr(stored, "MAX_UNPACKED_BYTES", 10_000)
    monkeypatch.setattr(stored, "MAX_UNPACKED_RATIO", 1)
    return request.param


def zeros() -> dict[str, np.ndarray]:
    return {"kernel": np.zeros((SIZE, SIZE), np.float32), "bias": np.zeros(SIZE, np.float32)}


@pytest.mark.parametrize("model", [zeros, lambda: nnx.Linear(SIZE, SIZE, rngs=nnx.Rngs(0))])
def test_arrays_of_the_model_are_no_bomb(write: Callable[..., Path], tmp_path: Path, model: Callable[[], Any]) -> None:
    given = model()
    lm.load(given, write(tmp_path / "m", kernel=np.ones((SIZE, SIZE), np.float32), bias=np.ones(SIZE, np.float32)))
    assert all(np.all(np.asarray(value) == 1) for value in lm.state_dict(given).values())


def test_shapes_without_values_are_asked_for(write: Callable[..., Path], tmp_path: Path) -> None:
    model = nnx.eval_shape(lambda: nnx.Linear(SIZE, SIZE, rngs=nnx.Rngs(0)))
    lm.load(model, write(tmp_path / "m", **zeros()))
    assert not jnp.any(model.kernel[...])


def test_a_file_does_not_size_a_model_beyond_the_limit(write: Callable[..., Path], tmp_path: Path) -> None:
    path = write(tmp_path / "m", **zeros())
    model = lm.LazyLinear(SIZE, rngs=nnx.Rngs(0))
    with pytest.raises(lm.CheckpointError, match="1,000,000 bytes when unpacked") as caught:
        lm.load(model, path)
    assert lm.is_lazy(model)
    exec(caught.value.problems[0].write)
    lm.load(model, path)
    assert not jnp.any(model.kernel[...])


def test_entries_without_a_place_have_the_limit(write: Callable[..., Path], tmp_path: Path) -> None:
    numbers = np.zeros((SIZE, SIZE), np.int32)  # as a buffer is, whose values a load keeps for the way back
    path = write(tmp_path / "m", **zeros(), buffer=numbers)
    with pytest.raises(lm.CheckpointError, match="1,000,000 bytes when unpacked"):
        lm.load(nnx.Linear(SIZE, SIZE, rngs=nnx.Rngs(0)), path, strict=False)
    with pytest.raises(lm.CheckpointError, match="1,000,000 bytes when unpacked"):
        lm.load(zeros(), path, strict=False)


def test_an_opened_checkpoint_has_the_limit_for_each_array(write: Callable[..., Path], tmp_path: Path) -> None:
    path = write(tmp_path / "m", **zeros(), small=np.ones(3))
    with lm.open(path) as opened:
        assert opened.spec("kernel").shape == (SIZE, SIZE)
        assert list(opened["small"]) == [1, 1, 1]
        with pytest.raises(lm.CheckpointError, match="1,000,000 bytes when unpacked"):
            opened["kernel"]
    assert main(["inspect", str(path)]) == 0
    assert main(["check", str(path)]) == (0 if path.suffix == ".npz" else 1)  # which is unpacked part by part


def test_an_optimizer_that_was_never_used_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "MAX_UNPACKED_BYTES", 10_000)
    monkeypatch.setattr(stored, "MAX_UNPACKED_RATIO", 1)

    def make() -> nnx.Optimizer:
        return nnx.Optimizer(nnx.Linear(SIZE, SIZE, rngs=nnx.Rngs(0)), optax.adam(0.1), wrt=nnx.Param)

    lm.save(make(), tmp_path / "m")
    used = make()
    used.opt_state[0].mu["kernel"][...] += 1
    lm.load(used, tmp_path / "m")
    assert not jnp.any(used.opt_state[0].mu["kernel"][...])


def test_what_is_packed_is_checked_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(stored, "MAX_UNPACKED_BYTES", 10_000)
    monkeypatch.setattr(stored, "MAX_UNPACKED_RATIO", 1)
    numbers = np.zeros(3_000_000, np.uint8)
    path = write_npz(tmp_path / "m", mask=numbers.view(np.bool_), zeros=np.zeros((1000, 1000)), none=np.zeros((0, 3)))
    assert main(["check", str(path)]) == 0
    raw = bytearray(path.read_bytes())
    raw[raw.find(b"zeros.npy") + 2_000] ^= 1
    path.write_bytes(raw)
    assert main(["check", str(path)]) == 1 and "zeros" in capsys.readouterr().err
    numbers[-1] = 2
    assert main(["check", str(write_npz(tmp_path / "m", mask=numbers.view(np.bool_)))]) == 1
    assert "m.npz: mask\n  got:    bytes other than 0 and 1" in capsys.readouterr().err
