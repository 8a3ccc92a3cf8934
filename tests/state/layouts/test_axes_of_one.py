"""A 1x1 convolution of the file for a linear layer, and the other way: the error says the rule that loads it."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import lazymods as lm

torch = pytest.importorskip("torch", reason="PyTorch is the oracle here")


def linear() -> Any:
    return lm.LazyLinear(5, rngs=nnx.Rngs(0))


def conv(*size: int) -> Any:
    return lm.LazyConv(5, size, padding="VALID", rngs=nnx.Rngs(0))


CASES: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "a 1x1 convolution for a linear layer": (lambda: torch.nn.Conv2d(3, 5, 1), linear),
    "one of a single axis for one of given sizes": (
        lambda: torch.nn.Conv1d(3, 5, 1), lambda: nnx.Linear(3, 5, rngs=nnx.Rngs(0)),
    ),
    "a linear layer for a 1x1 convolution": (lambda: torch.nn.Linear(3, 5), lambda: conv(1, 1)),
    "a convolution of one axis for one of two": (lambda: torch.nn.Conv1d(3, 5, 2), lambda: conv(2, 1)),
}


def with_lines(make: Callable[[], Any], state: dict[str, Any]) -> tuple[Any, Any]:
    """Load with the lines of the error in the rename, and return the model and the result."""
    with pytest.raises(lm.StateDictError) as caught:
        lm.load(make(), state, layout="torch")
    rules = []
    for problem in caught.value.problems:
        rules += eval(f"dict({problem.write.partition('  #')[0]})", {"lm": lm})["rename"]
    model = make()
    return model, lm.load(model, state, layout="torch", rename=rules)


@pytest.mark.parametrize("prefix", ["", "backbone."])
@pytest.mark.parametrize("name", CASES)
def test_one_layer(name: str, prefix: str) -> None:
    make, ours = CASES[name]
    torch.manual_seed(0)
    layer = make()
    state = {f"{prefix}fc.{key}": value for key, value in layer.state_dict().items()}
    model, result = with_lines(lambda: nnx.Dict(fc=ours()), state)
    x = np.random.default_rng(0).normal(size=(2, 4, 6, 3)).astype(np.float32)
    image = torch.from_numpy(np.moveaxis(x, -1, 1).copy())
    weight = layer.weight.reshape(5, 3, *layer.weight.shape[2:], *(1,) * (4 - layer.weight.ndim))
    wanted = torch.nn.functional.conv2d(image, weight, layer.bias).detach().numpy()
    np.testing.assert_allclose(np.moveaxis(np.asarray(model.fc(jnp.asarray(x))), -1, 1), wanted, atol=1e-5)
    written = lm.export_torch(model, like=result)
    assert all(np.array_equal(written[key], value.numpy()) for key, value in state.items())


@pytest.mark.parametrize("axes", [1, 2])
def test_attention_of_convolutions(axes: int) -> None:
    """As in the decoders of diffusion models; with one axis more its shape is that of Flax's kernel."""
    draw = np.random.default_rng(0)
    names = [f"attn.{name}" for name in ("query", "key", "value", "out")]
    state = {f"{n}.weight": draw.normal(size=(8, 8, *(1,) * axes)).astype(np.float32) for n in names}
    state |= {f"{name}.bias": draw.normal(size=8).astype(np.float32) for name in names}

    def make() -> Any:
        return nnx.Dict(attn=lm.LazyMultiHeadAttention(8, decode=False, rngs=nnx.Rngs(0)))

    model, _ = with_lines(make, {f"net.{name}": value for name, value in state.items()})
    kernel = model.attn.query.kernel[...]
    np.testing.assert_array_equal(kernel.reshape(8, 8), state["attn.query.weight"].reshape(8, 8).T)


@pytest.mark.parametrize(
    ("given", "known"), [((4, 1, 1), (None,)), ((1, 4, 1, 1), (4,)), ((1, 5, 4), (5, 4)), ((5, 4), (1, 5, 4))]
)
def test_parameters_of_the_model_itself(given: tuple[int, ...], known: tuple[int | None, ...]) -> None:
    """Such as layer scales and positions; a size that the file tells is left to it."""
    scale = np.arange(np.prod(given), dtype=np.float32).reshape(given)
    model, result = with_lines(lambda: nnx.Dict(scale=lm.UninitializedParameter(known)), {"scale": scale})
    assert model.scale.shape == tuple(n or 4 for n in known)
    np.testing.assert_array_equal(model.scale[...].reshape(given), scale)
    np.testing.assert_array_equal(lm.export_torch(model, like=result)["scale"], scale)


@pytest.mark.parametrize(
    ("layer", "ours"),
    [
        (lambda: torch.nn.Conv2d(3, 5, 2), linear),  # patches, which a linear layer may take in another order
        (lambda: torch.nn.Conv2d(4, 5, 1), lambda: nnx.Linear(3, 5, rngs=nnx.Rngs(0))),
        (lambda: torch.nn.Linear(3, 5), lambda: conv(3, 3)),
    ],
)
def test_what_is_of_another_size_is_left_out_or_refused(layer: Callable[[], Any], ours: Callable[[], Any]) -> None:
    with pytest.raises(lm.StateDictError) as caught:
        lm.load(ours(), layer().state_dict(), layout="torch")
    assert 'mismatched="skip"' in str(caught.value) and "Reshape" not in str(caught.value)
