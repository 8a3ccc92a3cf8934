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
        assert lm.load(model, tmp_path / "m.pt", layout="torch", root=part).root == part
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
        "  write:  root='model'"
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


# ---------------------------------------------------------------- ties


class Two(nnx.Module):
    def __init__(self, *, is_lazy: bool) -> None:
        make = lazy if is_lazy else ready
        self.a, self.b = make(), make()


def tied() -> dict[str, Any]:
    weight = weights(1)["weight"]
    return {"a.weight": weight, "a.bias": torch.zeros(2), "b.weight": weight, "b.bias": torch.zeros(2)}


@pytest.mark.parametrize("is_lazy", [True, False])
@pytest.mark.parametrize("layout", ["torch", "flax"])
@pytest.mark.parametrize("root", [None, "model"])
@pytest.mark.parametrize("zipped", [True, False])
def test_one_tensor_for_two_parameters(
    tmp_path: Path, layout: str, root: str | None, zipped: bool, is_lazy: bool
) -> None:
    state = tied()
    if layout == "flax":
        state = {name.replace("weight", "kernel"): value.t().contiguous() for name, value in state.items()}
        state["b.kernel"] = state["a.kernel"]
    # an optimizer's state that has the same memory is no parameter
    tree = state if root is None else {"first": {"master": state["a.bias"], "other": next(iter(state.values()))}} | {
        root: state
    }
    torch.save(tree, tmp_path / "m.pt", _use_new_zipfile_serialization=zipped)
    model = Two(is_lazy=is_lazy)
    with pytest.warns(UserWarning) as caught:
        lm.load(model, tmp_path / "m.pt", layout=layout)
    assert [str(w.message) for w in caught] == [
        "m.pt: b.kernel and a.kernel are one parameter in the file and two in the model; both are filled, and will "
        "train apart. To tie them: model.b.kernel = model.a.kernel"
    ]
    np.testing.assert_array_equal(model.b.kernel[...], np.ones((3, 2)))


def test_tied_in_the_model_as_well(tmp_path: Path) -> None:
    torch.save(tied(), tmp_path / "m.pt")
    model = Two(is_lazy=False)
    model.b.kernel = model.a.kernel
    lm.load(model, tmp_path / "m.pt", layout="torch")
    assert model.b.kernel is model.a.kernel


def test_an_embedding_and_a_head(tmp_path: Path) -> None:
    weight = torch.arange(6.0).reshape(2, 3)
    torch.save({"wte.weight": weight, "head.weight": weight}, tmp_path / "m.pt")
    rngs = nnx.Rngs(0)
    model: Any = nnx.Dict(wte=nnx.Embed(2, 3, rngs=rngs), head=nnx.Linear(3, 2, use_bias=False, rngs=rngs))
    with pytest.warns(UserWarning, match=r"head\.kernel and wte\.embedding .* for both: nnx\.Embed\.attend$"):
        lm.load(model, tmp_path / "m.pt", layout="torch")
    np.testing.assert_array_equal(model.head.kernel[...], model.wte.embedding[...].T)


def test_parts_of_one_storage_are_not_tied(tmp_path: Path) -> None:
    both = torch.arange(12.0).reshape(4, 3)
    square = torch.arange(9.0).reshape(3, 3)
    tree = {"x": both[:2], "y": both[2:], "s": square, "t": square.T, "e": both[:0], "f": both[:0]}
    torch.save(tree, tmp_path / "m.pt")
    shapes = {"x": (2, 3), "y": (2, 3), "s": (3, 3), "t": (3, 3), "e": (0, 3), "f": (0, 3)}
    model = nnx.Dict(**{name: nnx.Param(jnp.zeros(shape)) for name, shape in shapes.items()})
    lm.load(model, tmp_path / "m.pt")
    np.testing.assert_array_equal(model.t[...], square.numpy().T)
