"""``export_torch(model, like=result)`` of weight norm, and of norms after a flatten: the file's names and values."""

import warnings
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

import lazymods as lm

torch = pytest.importorskip("torch", reason="torch writes the files and takes them back")

R = nnx.Rngs


def normed(layer: Any, old: bool) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the older one is deprecated
        net = (torch.nn.utils.weight_norm if old else torch.nn.utils.parametrizations.weight_norm)(layer)
    with torch.no_grad():
        for value in net.parameters():
            value.copy_(torch.rand_like(value) + 0.5)
    return net


def check_same(net: Any, out: dict[str, np.ndarray]) -> None:
    state = net.state_dict()
    assert set(out) == set(state)
    for name, value in state.items():
        assert out[name].shape == tuple(value.shape)
        np.testing.assert_allclose(out[name], value.numpy(), rtol=1e-6)
    net.load_state_dict({name: torch.from_numpy(value) for name, value in out.items()})


@pytest.mark.parametrize("old", [True, False])
def test_weight_norm_by_the_file_s_names(old: bool) -> None:
    net = torch.nn.ModuleDict({"a": normed(torch.nn.Linear(6, 4), old), "c": normed(torch.nn.Conv1d(3, 4, 2), old)})
    inner = {"a": lm.LazyLinear(4, rngs=R(0)), "c": lm.LazyConv1d(4, 2, rngs=R(0))}
    model = nnx.Dict({name: lm.LazyWeightNorm(layer, rngs=R(0)) for name, layer in inner.items()})
    check_same(net, lm.export_torch(model, like=lm.load(model, net, layout="torch")))


@pytest.mark.parametrize("old", [True, False])
def test_weight_norm_of_a_stack(old: bool) -> None:
    net = torch.nn.ModuleDict({"bs": torch.nn.ModuleList([normed(torch.nn.Linear(4, 4), old) for _ in range(4)])})
    build = nnx.vmap(lambda k: nnx.WeightNorm(nnx.Linear(4, 4, rngs=R(k)), rngs=R(k)), in_axes=0, out_axes=0)
    model = nnx.Dict(bs=build(jax.random.split(jax.random.key(0), 4)))
    result = lm.load(model, net, layout="torch", rename=[lm.rules.Stack(r"^bs[.](\d+)[.]", into="bs.")])
    check_same(net, lm.export_torch(model, like=result))


@pytest.mark.parametrize("shape", [(64,), (4, 4, 4)])
@pytest.mark.parametrize("sizes", [(64,), (4, 4, 4)])
def test_a_norm_after_a_flatten_has_the_file_s_axes(shape: tuple[int, ...], sizes: tuple[int, ...]) -> None:
    net = torch.nn.ModuleDict({"ln": torch.nn.LayerNorm(shape)})
    with torch.no_grad():
        net["ln"].weight.copy_(torch.arange(64.0).reshape(shape))
    model = nnx.Dict(ln=lm.LazyLayerNorm(rngs=R(0)))
    check_same(net, lm.export_torch(model, like=lm.load(model, net, layout="torch", flatten={"ln": sizes})))
