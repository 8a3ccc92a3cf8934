"""A lazy model loaded as an argument of a transform: it is loaded outside too, or it is refused and as it was."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import assert_same_bits

import lazymods as lm


class Net(nnx.Module):
    """Two layers, lazy or not."""

    def __init__(self, seed: int, *, lazy: bool) -> None:
        rngs = nnx.Rngs(seed)
        self.inner = lm.LazyLinear(3, rngs=rngs) if lazy else nnx.Linear(2, 3, rngs=rngs)
        self.norm = lm.LazyBatchNorm(rngs=rngs) if lazy else nnx.BatchNorm(3, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.norm(self.inner(x))


Load = Callable[[Any], None]


@pytest.fixture(params=["file", "state dict"])
def load(request: pytest.FixtureRequest, tmp_path: Path) -> Load:
    """Load the parameters of another model."""
    other = Net(1, lazy=False)
    lm.save(other, tmp_path / "net.safetensors")
    if request.param == "file":
        return lambda model: lm.load(model, tmp_path / "net.safetensors") and None
    return lambda model: lm.load_state_dict(model, lm.state_dict(other)) and None


def assert_is_other(model: Any) -> None:
    other = Net(1, lazy=False)
    assert nnx.graphdef(model) == nnx.graphdef(other)
    for name, value in lm.state_dict(other).items():
        assert_same_bits(lm.state_dict(model)[name], value)


@pytest.mark.parametrize("transform", [nnx.jit, nnx.remat])
def test_what_carries_the_model_out(transform: Any, load: Load) -> None:
    model = Net(0, lazy=True)

    @transform
    def run(model: Any, x: Any) -> Any:
        load(model)
        return model.inner(x)

    x = jnp.ones((4, 2))
    np.testing.assert_allclose(run(model, x), Net(1, lazy=False).inner(x), rtol=1e-6)
    assert_is_other(model)


def test_a_model_whose_layers_are_partly_there(load: Load) -> None:
    model = Net(0, lazy=True)
    model.inner(jnp.ones((1, 2)))
    nnx.jit(load)(model)
    assert_is_other(model)


def grad(load: Load, model: Any) -> None:
    nnx.grad(lambda model: (load(model), model.inner(jnp.ones((1, 2))).sum())[1])(model)


def vmap(load: Load, model: Any) -> None:
    nnx.vmap(lambda model, _: load(model), in_axes=(0, 0))(model, jnp.ones(2))


def cond(load: Load, model: Any) -> None:
    nnx.cond(jnp.bool_(True), load, lambda model: None, model)


def loop(load: Load, model: Any) -> None:
    nnx.fori_loop(0, 2, lambda _, model: (load(model), model)[1], model)


REFUSED = {"nnx.grad": grad, "nnx.vmap": vmap, "nnx.cond": cond, "an NNX loop": loop}


@pytest.mark.parametrize("name", REFUSED)
def test_what_carries_no_new_parameters(name: str, load: Load) -> None:
    model = Net(0, lazy=True)
    with pytest.raises(lm.UninitializedError) as caught:
        REFUSED[name](load, model)
    assert f"a load of it inside {name}" in str(caught.value)
    assert "write:  " in str(caught.value)
    assert isinstance(model.inner, lm.LazyLinear) and isinstance(model.norm, lm.LazyBatchNorm)
    load(model)
    assert_is_other(model)
