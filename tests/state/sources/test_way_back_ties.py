"""``export_torch(model, like=result)`` of entries that the load has left out: tied ones, copies, buffers."""

import contextlib
import copy
from collections.abc import Iterator
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


@contextlib.contextmanager
def left_out(*names: str) -> Iterator[None]:
    """Expect a warning that names entries of the file which are not written; none without names."""
    if not any(names):
        yield
        return
    with pytest.warns(UserWarning, match="left out, as by the load") as caught:
        yield
    assert all(name in str(caught[0].message) for name in names)


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
    with left_out("target.e.weight" if "rename" not in options else ""):
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
    is_there = tied or kind in ("safetensors", "arrays")
    with left_out("" if is_there else "lm_head.weight is left out"):
        out = lm.export_torch(model, like=result)
    assert ("lm_head.weight" in out) == is_there
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
    floats = {"scale"} if kind == "module" else set()
    with left_out(*("scale" for _ in range(not floats)), "old.weight", "old.bias"):
        out = lm.export_torch(model, like=result)
    assert set(out) == {"steps", "a.weight", "a.bias", "a.is_set"} | floats
    assert out["steps"] == 7
    np.testing.assert_array_equal(out["a.is_set"], [True, False])
    for name in floats:
        np.testing.assert_array_equal(out[name], [0.5, 0.5])


# ---------------------------------------------------------------- what the model ties, and the file has once


class Twice(nnx.Module):
    """One module under two names, and a parameter of it in a third one."""

    def __init__(self, layer: Any, other: Any) -> None:
        self.a, self.b, self.c = layer, layer, other


CELLS = {
    "linear": (lambda: torch.nn.Linear(3, 3), lambda: lm.LazyLinear(3, rngs=R(0))),
    "batch norm": (lambda: torch.nn.BatchNorm1d(3), lambda: lm.LazyBatchNorm1d(rngs=R(0))),
    "lstm": (lambda: torch.nn.LSTM(3, 3), lambda: nnx.RNN(lm.LazyOptimizedLSTMCell(3, rngs=R(0)))),
    "attention": (
        lambda: torch.nn.MultiheadAttention(4, 2),
        lambda: lm.LazyMultiHeadAttention(2, decode=False, rngs=R(0)),
    ),
}


@pytest.mark.parametrize("name", CELLS)
def test_the_model_s_other_names_of_a_tie_are_not_added(name: str) -> None:
    make, build = CELLS[name]
    net = torch.nn.ModuleDict({"a": make()})
    model = Twice(build(), build())
    lm.load(model.c, make(), layout="torch")
    result = lm.load(model, net, layout="torch", missing="^c")
    out = lm.export_torch(model, like=result)
    own = {n for n in out if n.startswith("c.")}
    assert own  # what the file does not have at all is written
    twin = torch.nn.ModuleDict({"a": make()})
    twin.load_state_dict({n: torch.from_numpy(v) for n, v in out.items() if n not in own})


def test_one_parameter_of_a_layer_is_tied_by_the_model() -> None:
    net = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 3)})
    model = nnx.Dict(a=linear(3), c=nnx.Linear(3, 3, rngs=R(0)))
    lm.load(model.a, net["a"], layout="torch")
    model.c.kernel = model.a.kernel
    result = lm.load(model, net, layout="torch", missing="^c[.]bias")
    assert list(lm.export_torch(model, like=result)) == ["a.weight", "a.bias", "c.bias"]


# ---------------------------------------------------------------- Flax's names and layouts


FLAX = {"x.kernel": np.arange(6, dtype=np.float16).reshape(2, 3), "x.bias": np.arange(3, dtype=np.float64)}


@pytest.mark.parametrize("kind", ["arrays", "nested", "tensors", "file"])
@pytest.mark.parametrize("rename", [None, {"x.kernel": "fc.kernel", "x.bias": "fc.bias"}, [("^x", "fc")]])
def test_a_load_of_flax_s_layout_is_written_as_it_was(tmp_path: Path, kind: str, rename: Any) -> None:
    lm.save(FLAX, tmp_path / "m.safetensors")
    source = {
        "arrays": FLAX,
        "nested": {"x": {"kernel": FLAX["x.kernel"], "bias": FLAX["x.bias"]}},
        "tensors": {name: torch.from_numpy(value) for name, value in FLAX.items()},
        "file": tmp_path / "m.safetensors",
    }[kind]
    model = nnx.Dict({"x" if rename is None else "fc": linear(3)})
    result = lm.load(model, source, rename=rename)
    out = lm.export_torch(model, like=result)
    assert {name: value.dtype for name, value in out.items()} == {name: value.dtype for name, value in FLAX.items()}
    for name, value in FLAX.items():
        np.testing.assert_array_equal(out[name], value)


def test_random_state_that_the_file_has_is_written(tmp_path: Path) -> None:
    model = nnx.Dict(fc=nnx.Linear(2, 3, rngs=R(0)), drop=nnx.Dropout(0.5, rngs=R(7)))
    for include in (True, False):
        lm.save(model, tmp_path / "m.safetensors", include_rng=include)
        twin = nnx.clone(model)
        out = lm.export_torch(twin, like=lm.load(twin, tmp_path / "m.safetensors"))
        stored = lm.open(tmp_path / "m.safetensors")
        assert set(out) == set(stored)
        for name in stored:
            np.testing.assert_array_equal(out[name], stored[name])


def test_a_model_without_values_has_no_way_back_to_flax_s_names() -> None:
    model = nnx.Dict(x=linear(3))
    result = lm.load(model, FLAX)
    with pytest.raises(lm.UninitializedError):
        lm.export_torch(nnx.Dict(x=linear(3)), like=result)
