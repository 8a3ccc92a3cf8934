"""The mode of what was loaded: ``mode="eval"``, or a sentence in the result."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import lazymods as lm


class Net(nnx.Module):
    def __init__(self, rate: float = 0.5) -> None:
        self.fc = lm.LazyLinear(4, rngs=nnx.Rngs(0))
        self.bn = lm.LazyBatchNorm(epsilon=1e-5, rngs=nnx.Rngs(0))
        self.drop = nnx.Dropout(rate, rngs=nnx.Rngs(1))

    def __call__(self, x: Any) -> Any:
        return self.drop(self.bn(self.fc(x)))


RNG = np.random.default_rng(0)
FILE = {
    "fc.kernel": RNG.standard_normal((3, 4)).astype(np.float32),
    "fc.bias": RNG.standard_normal(4).astype(np.float32),
    "bn.scale": RNG.standard_normal(4).astype(np.float32),
    "bn.bias": RNG.standard_normal(4).astype(np.float32),
    "bn.mean": RNG.standard_normal(4).astype(np.float32),
    "bn.var": RNG.uniform(1, 2, 4).astype(np.float32),
}
X = RNG.standard_normal((8, 3)).astype(np.float32)


def by_numpy() -> np.ndarray:
    y = (X @ FILE["fc.kernel"] + FILE["fc.bias"] - FILE["bn.mean"]) / np.sqrt(FILE["bn.var"] + 1e-5)
    return y * FILE["bn.scale"] + FILE["bn.bias"]


def test_eval_gives_the_numbers_of_the_file_and_moves_no_statistics() -> None:
    model = Net()
    assert repr(lm.load(model, FILE, missing="drop", mode="eval")) == "<All keys matched successfully>"
    np.testing.assert_allclose(model(jnp.asarray(X)), by_numpy(), atol=1e-5)
    assert np.array_equal(model.bn.mean[...], FILE["bn.mean"])
    lm.load(model, FILE, missing="drop", mode="train")
    assert (model.bn.use_running_average, model.drop.deterministic) == (False, False)


def test_the_result_says_that_a_model_is_in_training_mode() -> None:
    result = lm.load(Net(), FILE, missing="drop")
    text = 'BatchNorm and Dropout are in training mode: model.eval(), or mode="eval", before inference'
    assert result.notes == [text] and repr(result) == f"<All keys matched successfully; {text}>"
    assert lm.load(Net(rate=0.0), FILE, missing="drop").notes == [
        'BatchNorm is in training mode: model.eval(), or mode="eval", before inference'
    ]
    ready = Net()
    lm.load(ready, FILE, missing="drop", mode="eval")
    assert lm.load(ready, FILE, missing="drop").notes == []


def test_layers_that_are_still_lazy_get_it_too() -> None:
    model = nnx.Dict(net=Net(), more=lm.LazyBatchNorm(rngs=nnx.Rngs(0)))
    lm.load(model, {f"net.{name}": value for name, value in FILE.items()}, missing="drop|more", mode="eval")
    assert lm.is_lazy(model["more"])
    model["more"](jnp.ones((2, 3)))
    assert model["more"].use_running_average is True  # pyright: ignore[reportAttributeAccessIssue]


def test_a_training_state_and_a_method_of_ones_own(tmp_path: Path) -> None:
    class Frozen(Net):
        def eval(self, **attributes: Any) -> None:
            super().eval(**attributes)
            self.told = True

    model = Frozen()
    state = {"model": model, "step": 0}
    lm.load(state, {f"model.{name}": value for name, value in FILE.items()} | {"step": 3}, missing="drop", mode="eval")
    assert (state["step"], model.told, model.bn.use_running_average) == (3, True, True)


def test_a_load_that_fails_leaves_the_mode(tmp_path: Path) -> None:
    class Broken(Net):
        def eval(self, **attributes: Any) -> None:
            super().eval(**attributes)
            raise ZeroDivisionError

    model = Broken()
    with pytest.raises(ZeroDivisionError):
        lm.load(model, FILE, missing="drop", mode="eval")
    assert lm.is_lazy(model.fc) and (model.bn.use_running_average, model.drop.deterministic) == (False, False)
    with pytest.raises(ValueError, match="needed: one of 'train', 'eval'"):
        lm.load(model, FILE, mode="test")
