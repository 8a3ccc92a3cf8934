"""Of a PyTorch file with several mappings of tensors, the one that fits the model is taken, or none if two do."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import lazymods as lm

torch = pytest.importorskip("torch", reason="torch writes the files")


def weights(value: float, shape: tuple[int, ...] = (2, 3)) -> dict[str, Any]:
    return {"weight": torch.full(shape, value), "bias": torch.zeros(shape[0])}


def lazy() -> Any:
    return lm.LazyLinear(2, rngs=nnx.Rngs(0))


def ready() -> Any:
    return nnx.Linear(3, 2, rngs=nnx.Rngs(0))


OPTIMIZER = {"state": {0: {"exp_avg": torch.ones(2, 3)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
FITTING = {
    "any name": ({"epoch": 3, "teacher": weights(1)}, "teacher.weight"),
    "a wrapper's name": ({"optimizer": OPTIMIZER, "state_dict": weights(1)}, "state_dict.weight"),
    "a wrapper's name that is another": ({"model": weights(9, (5, 7)), "small": weights(1)}, "small.weight"),
    "DataParallel": ({"net": {f"module.{k}": v for k, v in weights(1).items()}}, "net.module.weight"),
    "a part of it": ({"model": weights(1), "ema": {"bias": torch.ones(2)}}, "model.weight"),
    "one part by two names": ({"model": (one := weights(1)), "ema": one}, "model.weight"),
    "numbers for keys": ({0: weights(1)}, "0.weight"),
}


@pytest.mark.parametrize("make", [lazy, ready])
@pytest.mark.parametrize("name", FITTING)
def test_the_part_that_fits(tmp_path: Path, name: str, make: Callable[[], Any]) -> None:
    tree, said = FITTING[name]
    torch.save(tree, tmp_path / "m.pt")
    model = make()
    result = lm.load(model, tmp_path / "m.pt", layout="torch")
    np.testing.assert_array_equal(model.kernel[...], np.ones((3, 2)))
    assert result.matched["kernel"] == (said,)
    assert not result.missing and not result.unexpected


@pytest.mark.parametrize("make", [lazy, ready])
@pytest.mark.parametrize("names", [("state_dict", "model"), ("model", "ema"), ("params", "params_ema"), ("a", "b")])
def test_two_parts_that_fit(tmp_path: Path, names: tuple[str, str], make: Callable[[], Any]) -> None:
    first, second = names
    torch.save({"epoch": 3, first: weights(1), second: weights(2)}, tmp_path / "m.pt")
    model = make()
    for strict in (True, False):
        with pytest.raises(lm.CheckpointError, match=f"several state dicts that fit the model: {first}, {second}"):
            lm.load(model, tmp_path / "m.pt", layout="torch", strict=strict)
    for value, part in enumerate(names, 1):  # the line that the error says to write
        rename = eval(f'lambda name: name.removeprefix("{part}.") if name.startswith("{part}.") else None')
        lm.load(model, tmp_path / "m.pt", layout="torch", rename=rename)
        np.testing.assert_array_equal(model.kernel[...], np.full((3, 2), value))
        model = ready()


def test_the_refusal_of_two_in_full(tmp_path: Path) -> None:
    torch.save({"model": weights(1), "ema": weights(2)}, tmp_path / "m.pt")
    with pytest.raises(lm.CheckpointError) as caught:
        lm.load(lazy(), tmp_path / "m.pt", layout="torch")
    assert str(caught.value) == (
        "m.pt\n"
        "  got:    several state dicts that fit the model: model, ema\n"
        "  needed: the one to load\n"
        '  write:  rename=lambda name: name.removeprefix("model.") if name.startswith("model.") else None'
    )


def test_a_model_of_several_parts(tmp_path: Path) -> None:
    """What are parts of the file are parts of the model."""
    torch.save({"model": weights(1), "ema": weights(2)}, tmp_path / "m.pt")
    both = nnx.Dict(model=lazy(), ema=lazy())
    lm.load(both, tmp_path / "m.pt", layout="torch")
    assert (float(both.model.kernel[0, 0]), float(both.ema.kernel[0, 0])) == (1, 2)


def test_a_training_state(tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.ones(3)}, "step": 7, "best": {"w": torch.zeros(3)}}, tmp_path / "m.pt")
    state = {"model": {"w": jnp.full(3, 5.0)}, "step": 0, "best": {"w": jnp.full(3, 5.0)}}
    lm.load(state, tmp_path / "m.pt")
    assert state["step"] == 7
    np.testing.assert_array_equal(state["model"]["w"], np.ones(3))
    np.testing.assert_array_equal(state["best"]["w"], np.zeros(3))


def test_a_rename_that_knows_the_names_of_one_part_only(tmp_path: Path) -> None:
    torch.save({"state_dict": weights(1), "optimizer": OPTIMIZER}, tmp_path / "m.pt")
    model = ready()
    names = {"weight": "weight", "bias": "bias"}
    lm.load(model, tmp_path / "m.pt", layout="torch", rename=names.__getitem__)
    np.testing.assert_array_equal(model.kernel[...], np.ones((3, 2)))


def test_nothing_that_fits_is_told_by_its_names(tmp_path: Path) -> None:
    torch.save({"state_dict": {"fc.weight": torch.ones(2)}, "optimizer": OPTIMIZER}, tmp_path / "m.pt")
    with pytest.raises(lm.StateDictError) as caught:
        lm.load(ready(), tmp_path / "m.pt")
    assert sorted(caught.value.missing) == ["bias", "kernel"]
    assert list(caught.value.unexpected) == ["fc.weight"]
    torch.save({"state_dict": {"x": torch.ones(2)}, "model": {"x": torch.ones(2)}}, tmp_path / "m.pt")
    with pytest.raises(lm.CheckpointError, match="several state dicts that may be meant: state_dict, model"):
        lm.load(ready(), tmp_path / "m.pt", strict=False)
