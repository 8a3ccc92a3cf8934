"""Recurrent layers that two lists of a model share: loaded, and written back, under the names of both."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import lazymods as lm

torch = pytest.importorskip("torch", reason="torch writes the files and takes them back")

R = nnx.Rngs
X = np.random.default_rng(0).normal(size=(2, 5, 3)).astype(np.float32)


def cell() -> Any:
    return lm.LazyOptimizedLSTMCell(4, rngs=R(0))


def layer() -> Any:
    return nnx.RNN(cell())


def both_ways() -> Any:
    return nnx.Bidirectional(layer(), layer(), rngs=R(0))


def of_one_list() -> Any:
    layers = nnx.List([layer(), layer()])
    return nnx.Dict(a=layers, b=layers)


def of_layers() -> Any:
    layers = [layer(), layer()]
    return nnx.Dict(a=nnx.List(layers), b=nnx.List(layers))


def of_cells() -> Any:
    cells = [cell(), cell()]
    return nnx.Dict(a=nnx.List([nnx.RNN(c) for c in cells]), b=nnx.List([nnx.RNN(c) for c in cells]))


def of_directions() -> Any:
    layers = [both_ways(), both_ways()]
    return nnx.Dict(a=nnx.List(layers), b=nnx.Sequential(*layers))


def of_the_first_layer() -> Any:
    first = layer()
    return nnx.Dict(a=nnx.List([first, layer()]), b=nnx.List([first, layer()]))


MODELS = {f.__name__: f for f in (of_one_list, of_layers, of_cells, of_directions)}


class Shared(torch.nn.Module):
    """The same in PyTorch."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.a = self.b = torch.nn.LSTM(3, 4, 2, batch_first=True, **options)


def run(layers: Any) -> Any:
    x = jnp.asarray(X)
    for one in getattr(layers, "layers", layers):
        x = one(x)
    return x


@pytest.mark.parametrize("names", ["ab", "a", "b"])
@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("model", MODELS)
def test_shared_layers_of_two_lists(tmp_path: Path, model: str, bias: bool, suffix: str, names: str) -> None:
    net = Shared(bias=bias, bidirectional=model == "of_directions")
    stored = {n: v for n, v in net.state_dict().items() if n[0] in names}
    path = tmp_path / f"m{suffix}"
    if suffix == ".pt":
        torch.save(stored, path)
    else:
        lm.save({n: v.numpy() for n, v in stored.items()}, path)
    ours = MODELS[model]()
    result = lm.load(ours, path, layout="torch")
    for name in "ab":
        np.testing.assert_allclose(run(ours[name]), net.a(torch.tensor(X))[0].detach(), atol=1e-6)
    out = lm.export_torch(ours, like=result)
    assert out.keys() == stored.keys()
    twin = Shared(bias=bias, bidirectional=model == "of_directions")
    twin.load_state_dict({n: torch.from_numpy(v) for n, v in out.items()}, strict=names == "ab")
    torch.testing.assert_close(twin.a(torch.tensor(X))[0], net.a(torch.tensor(X))[0])
    for name, value in out.items():
        if "weight" in name:
            np.testing.assert_array_equal(value, stored[name])


def test_a_layer_that_is_shared_and_one_that_is_not() -> None:
    net = torch.nn.ModuleDict({"a": torch.nn.LSTM(3, 4, 2), "b": torch.nn.LSTM(3, 4, 2)})
    with pytest.raises(lm.StateDictError, match=r"another value than a\.0\.cell\.dense_h\.kernel, to which it is tied"):
        lm.load(of_the_first_layer(), net, layout="torch")
    for name in ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0"):
        getattr(net["b"], name).data = getattr(net["a"], name).data
    model = of_the_first_layer()
    result = lm.load(model, net, layout="torch")
    assert result.matched["b.1.cell.dense_i.kernel"] == ("b.weight_ih_l1",)
    out = lm.export_torch(model, like=result)
    assert list(out) == list(net.state_dict())
    np.testing.assert_array_equal(out["b.weight_hh_l1"], net["b"].weight_hh_l1.detach())


def test_a_prefix_is_put_on_under_the_first_name_of_a_shared_module() -> None:
    """A second name is no second reading, and brings nothing to a module that has entries."""
    body = nnx.Dict(fc=lm.LazyLinear(4, rngs=R(0)))
    model: Any = nnx.Dict(body=body, same=body, head=lm.LazyLinear(2, rngs=R(0)))
    net = torch.nn.ModuleDict({"fc": torch.nn.Linear(3, 4), "head": torch.nn.Linear(4, 2)})
    assert lm.load(model, net, layout="torch").matched["body.fc.kernel"] == ("fc.weight",)
    np.testing.assert_array_equal(model.same.fc.kernel[...], net["fc"].weight.detach().T)
