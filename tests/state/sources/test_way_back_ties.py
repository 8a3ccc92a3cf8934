"""``export_torch(model, like=result)`` of entries that the load has left out: tied ones, copies, buffers."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flax import nnx

import lazymods as lm

torch = pytest.importorskip("torch", reason="torch writes the files and takes them back")

R = nnx.Rngs


def linear(size: int) -> Any:
    return lm.LazyLinear(size, rngs=R(0))


def source_of(net: Any, kind: str, folder: Path) -> Any:
    if kind == "module":
        return net
    if kind == "pt":
        torch.save(net.state_dict(), folder / "m.pt")
        return folder / "m.pt"
    arrays = {name: value.numpy().copy() for name, value in net.state_dict().items()}
    if kind == "safetensors":
        lm.save(arrays, folder / "m.safetensors")
    return arrays if kind == "arrays" else folder / "m.safetensors"


KINDS = ("module", "pt", "safetensors", "arrays")


@pytest.mark.parametrize("options", [{"rename": [("^target", None)]}, {"ignore": "^target"}, {"strict": False}])
@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_is_no_tie(tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    """A target network begins as the other one; when that has been trained, the file's would be other numbers."""
    online = torch.nn.ModuleDict({"e": torch.nn.Embedding(3, 2), "head": torch.nn.Linear(2, 3)})
    net = torch.nn.ModuleDict({"online": online})
    net["online"]["head"].weight.data = net["online"]["e"].weight.data.clone()
    net["target"] = copy.deepcopy(net["online"])
    model = nnx.Dict(online=nnx.Dict(e=lm.LazyEmbed(rngs=R(0)), head=linear(3)))
    result = lm.load(model, source_of(net, kind, tmp_path), layout="torch", **options)
    model.online.e.embedding[...] += 1
    out = lm.export_torch(model, like=result)
    assert list(out) == ["online.e.weight", "online.head.weight", "online.head.bias"]
    np.testing.assert_array_equal(out["online.head.weight"], net["online"]["head"].weight.detach().numpy())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tied", [True, False])
def test_a_head_of_an_embedding_s_numbers(tmp_path: Path, kind: str, tied: bool) -> None:
    """PyTorch's files tell what is one tensor; in others an output layer of the very numbers counts as tied."""
    net = torch.nn.ModuleDict({"wte": torch.nn.Embedding(3, 2), "lm_head": torch.nn.Linear(2, 3, bias=False)})
    weight = net["wte"].weight
    net["lm_head"].weight = weight if tied else torch.nn.Parameter(weight.detach().clone())
    model = nnx.Dict(wte=lm.LazyEmbed(rngs=R(0)))
    result = lm.load(model, source_of(net, kind, tmp_path), layout="torch", ignore="^lm_head")
    model.wte.embedding[...] += 1
    out = lm.export_torch(model, like=result)
    assert ("lm_head.weight" in out) == (tied or kind in ("safetensors", "arrays"))
    for value in out.values():
        np.testing.assert_array_equal(value, weight.detach().numpy() + 1)


@pytest.mark.parametrize("options", [{"ignore": "steps|scale|^old|is_set"}, {"strict": False}])
@pytest.mark.parametrize("kind", KINDS)
def test_buffers_that_were_left_out_are_the_file_s(tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    net = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 3), "old": torch.nn.Linear(2, 2)})
    net.register_buffer("steps", torch.tensor(7))
    net.register_buffer("scale", torch.full((2,), 0.5))  # a file does not say that these are no parameter
    net["a"].register_buffer("is_set", torch.tensor([True, False]))
    model = nnx.Dict(a=linear(3))
    result = lm.load(model, source_of(net, kind, tmp_path), layout="torch", **options)
    out = lm.export_torch(model, like=result)
    floats = {"scale"} if kind == "module" else set()
    assert set(out) == {"steps", "a.weight", "a.bias", "a.is_set"} | floats
    assert out["steps"] == 7
    np.testing.assert_array_equal(out["a.is_set"], [True, False])
    for name in floats:
        np.testing.assert_array_equal(out[name], [0.5, 0.5])
