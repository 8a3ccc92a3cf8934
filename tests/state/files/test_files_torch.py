"""PyTorch files: read bit for bit and mapped, without PyTorch, and run never."""

import argparse
import io
import os
import pickle
import signal
import tarfile
import zipfile
from collections import Counter, OrderedDict
from pathlib import Path, PurePosixPath
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from checkpoint_files import archive_of, assert_same, is_mapped, refusal, stream_of, values, zipped
from flax import nnx

import lazymods as lm
from lazymods.state.files.opening import open_checkpoint
from lazymods.state.files.torch_calls import Global, Opaque

torch = pytest.importorskip("torch", reason="torch is an extra")

GOOD = {
    "a.kernel": np.arange(12, dtype=np.float32).reshape(3, 4),
    "a.bias": np.arange(4, dtype=np.float32),
    "b": np.arange(3, dtype=np.int64),
}
LEGACY = {"_use_new_zipfile_serialization": False}
both = pytest.mark.parametrize("options", [{}, LEGACY], ids=["zip", "stream"])


def tensors() -> dict[str, Any]:
    return {name: torch.from_numpy(value.copy()) for name, value in GOOD.items()}


def saved(path: Path, value: Any, **options: Any) -> Path:
    torch.save(value, path, **options)
    return path


# ---------------------------------------------------------------- good files


@both
@pytest.mark.parametrize("suffix", [".pt", ".pth", ".bin", ".ckpt", ".pth.tar"])
def test_state_dicts(tmp_path: Path, suffix: str, options: dict[str, Any]) -> None:
    assert_same(values(saved(tmp_path / f"m{suffix}", tensors(), **options)), GOOD)


@both
def test_a_module_s_own_state_dict(tmp_path: Path, options: dict[str, Any]) -> None:
    """An OrderedDict with an attribute, _metadata."""
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    want = {name: value.numpy() for name, value in module.state_dict().items()}
    assert_same(values(saved(tmp_path / "m.pt", module.state_dict(), **options)), want)


@both
@pytest.mark.parametrize(
    "kind",
    "float64 float32 float16 bfloat16 int64 int32 int16 int8 uint64 uint32 uint16 uint8 bool complex64 complex128"
    " float8_e4m3fn float8_e5m2".split(),
)
def test_dtypes(tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    dtype = np.dtype(getattr(ml_dtypes, kind, None) or kind)
    bits = np.random.default_rng(0).integers(0, 2, 6 * dtype.itemsize).astype(np.uint8)
    value = bits.view(dtype).reshape(2, 3)
    tensor = torch.from_numpy(bits.copy()).view(getattr(torch, kind)).reshape(2, 3)
    path = saved(tmp_path / "m.pt", {"x": tensor, "scalar": tensor[0, 0], "empty": tensor[:0]}, **options)
    want = {"x": value, "scalar": value[0, 0], "empty": value[:0]}
    assert_same(values(path), want)


@both
def test_views_parameters_and_bits(tmp_path: Path, options: dict[str, Any]) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    wave = torch.complex(torch.arange(3.0), torch.arange(3.0) + 1)
    tree = {
        "transposed": base.t(),
        "part": base[1:3, ::2],
        "parameter": torch.nn.Parameter(base[0]),
        "conjugate": wave.conj(),
        "negative": torch.complex(torch.arange(3.0), torch.arange(3.0) + 1).conj().imag,
        "expanded": torch.ones(1).expand(5),
        "half": base.bfloat16().t(),
    }
    want = {name: tensor.detach().resolve_conj().resolve_neg() for name, tensor in tree.items()}
    got = values(saved(tmp_path / "m.pt", tree, **options))
    assert list(got) == list(want)
    for name, tensor in want.items():
        assert got[name].shape == tuple(tensor.shape), name
        if name == "half":
            assert got[name].dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(np.asarray(got[name], np.complex64), tensor.to(torch.complex64).numpy())


def test_a_parameter_with_attributes(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.arange(3.0))
    parameter.kind = "expert"
    tensor = torch.arange(4.0)
    tensor.kind = "buffer"
    got = values(saved(tmp_path / "m.pt", {"p": parameter, "t": tensor}))
    assert_same(got, {"p": np.arange(3, dtype=np.float32), "t": np.arange(4, dtype=np.float32)})


def test_zip_archives_are_mapped(tmp_path: Path) -> None:
    path = saved(tmp_path / "m.pt", {"x": torch.arange(3.0), "h": torch.ones(3, dtype=torch.bfloat16)})
    assert all(map(is_mapped, values(path).values()))


def test_archives_without_alignment(tmp_path: Path) -> None:
    saved(tmp_path / "good.pt", tensors())
    with zipfile.ZipFile(tmp_path / "good.pt") as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    assert_same(values(zipped(tmp_path / "m.pt", entries)), GOOD)


def test_big_endian_archives(tmp_path: Path) -> None:
    def swapped(name: str, raw: bytes) -> bytes:
        return np.frombuffer(raw, "<f4").astype(">f4").tobytes() if "/data/" in name else raw

    saved(tmp_path / "good.pt", {"x": torch.arange(3.0)})
    with zipfile.ZipFile(tmp_path / "good.pt") as archive:
        entries = {name: swapped(name, archive.read(name)) for name in archive.namelist()}
    entries = {name: b"big" if name.endswith("byteorder") else raw for name, raw in entries.items()}
    path = zipped(tmp_path / "m.pt", entries)
    raw = path.read_bytes()
    assert_same(values(path), {"x": np.arange(3, dtype=np.float32)})
    assert path.read_bytes() == raw


@both
def test_parts_of_a_file(tmp_path: Path, options: dict[str, Any]) -> None:
    """What training scripts save: which mapping is a model's is told by the model."""
    optimizer = {"state": {0: {"m": torch.ones(2)}}, "param_groups": [{"lr": 0.1}]}
    path = saved(tmp_path / "m.pt", {"epoch": 3, "optimizer": optimizer, "net": tensors()}, **options)
    names = ["epoch", "optimizer.state.0.m", "optimizer.param_groups", *(f"net.{name}" for name in GOOD)]
    assert list(values(path)) == names
    assert open_checkpoint(path).roots == ("optimizer", "net")
    assert open_checkpoint(saved(path, {"model": tensors(), "mean": torch.ones(1)}, **options)).roots == ("model",)


def test_nested_mappings_and_other_values(tmp_path: Path) -> None:
    tree = {
        "a": {"b": {0: torch.ones(1)}, "n": None},
        "step": 3,
        "texts": ["x", {"y": b"z"}],
        "config": {"lr": 1e-3},
        "size": torch.Size([1, 2]),
        "counts": Counter("aab"),
        "set": {1, 2},
        "bytes": bytearray(b"ab"),
        "wave": 1 + 2j,
        "dtype": torch.float16,
        "device": torch.device("cpu"),
        "ordered": OrderedDict(x=1),
    }
    got = values(saved(tmp_path / "m.pt", tree))
    names = ["a.b.0", "a.n", *list(tree)[1:]]
    assert list(got) == names
    assert got["a.n"] is None
    assert got["step"] == 3
    assert got["config"] == {"lr": 1e-3}
    for name in ("size", "set", "bytes", "wave", "counts", "ordered"):
        assert got[name] == tree[name]
    assert got["dtype"] == Global("torch.float16")


def test_tied_mappings_stand_under_both_names(tmp_path: Path) -> None:
    shared = {"x": torch.ones(1)}
    assert list(values(saved(tmp_path / "m.pt", {"a": shared, "b": shared}))) == ["a.x", "b.x"]


class Settings(dict[str, Any]):
    """A class of dicts, as configurations are."""


FOREIGN = {
    "a configuration": argparse.Namespace(lr=0.1),
    "a version": torch.torch_version.TorchVersion("2.1"),
    "a path": PurePosixPath("x"),
    "a number of numpy's": np.float64(1),
    "an array of numpy's": np.arange(3),
    "a class": argparse.Namespace,
    "a module": torch.nn.Linear(3, 4),
    "a dict of a class": Settings(a=1),
    "a function": argparse.ArgumentTypeError,
    "a dict of classes": {argparse.Namespace: {"best": torch.tensor(0.5)}, torch.float16: 1},  # callbacks of Lightning
    "a dict of objects": {signal.SIGINT: 1, b"bytes": 2, (signal.SIGINT, torch.int8): torch.tensor(3)},
}


@both
@pytest.mark.parametrize("what", FOREIGN)
def test_objects_beside_the_tensors(tmp_path: Path, what: str, options: dict[str, Any]) -> None:
    """They are inert: nothing is imported, and nothing is called."""
    got = values(saved(tmp_path / "m.pt", {"state_dict": tensors(), "extra": FOREIGN[what]}, **options))
    assert_same({name: got[f"state_dict.{name}"] for name in GOOD}, GOOD)
    if what == "a configuration":
        assert got["extra"] == Opaque("argparse.Namespace")
    if what == "a dict of classes":
        assert got["extra.argparse.Namespace.best"] == 0.5 and got["extra.torch.float16"] == 1


class Net(torch.nn.Module):
    """What a module can hold: modules in modules, ties, buffers of both kinds, tensors that are no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU())
        self.lstm = torch.nn.LSTM(4, 5, 2, bidirectional=True)
        self.tied, self.other = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4, bias=False)
        self.other.weight = self.tied.weight
        self.small = torch.nn.Linear(2, 2).bfloat16()
        self.scale = torch.nn.Parameter(torch.randn(3))
        self.register_buffer("places", torch.arange(4))
        self.register_parameter("nothing", None)

    def forward(self, x):  # TorchScript takes what has no annotation for a tensor
        return self.body(x)


class Hiding(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("hidden", torch.ones(2), persistent=False)


def assert_is_state_of(net: Any, got: dict[str, Any], prefix: str = "") -> None:
    state = net.state_dict()
    assert {name for name, value in got.items() if isinstance(value, np.ndarray)} == {prefix + name for name in state}
    for name, value in state.items():
        bits = value.view(torch.int16) if value.dtype == torch.bfloat16 else value
        assert got[prefix + name].tobytes() == bits.contiguous().numpy().tobytes(), name


@both
@pytest.mark.parametrize("place", ["alone", "in a dict"])
def test_a_whole_module(tmp_path: Path, place: str, options: dict[str, Any]) -> None:
    net = Hiding()
    alone = place == "alone"
    path = saved(tmp_path / "m.pt", net if alone else {"net": net, "epoch": 3}, **options)
    assert_is_state_of(net, values(path), "" if alone else "net.")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # TorchScript is deprecated, and its files are there
@pytest.mark.parametrize("how", ["script", "trace"])
def test_torchscript(tmp_path: Path, how: str) -> None:
    net = Net().eval()
    made = torch.jit.script(net) if how == "script" else torch.jit.trace(net, torch.randn(1, 3, 5, 5))
    made.save(tmp_path / "m.pt")
    assert_is_state_of(net, values(tmp_path / "m.pt"))


PARAMETERLESS = [
    *(torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Identity(), torch.nn.Flatten(), torch.nn.MaxPool2d(2)),
    *(torch.nn.ModuleList(), torch.nn.Sequential(torch.nn.GELU()), torch.nn.LayerNorm(3, elementwise_affine=False)),
]


class Acting(torch.nn.Module):
    def __init__(self, act: Any) -> None:
        super().__init__()
        self.a, self.act, self.b = torch.nn.Linear(3, 3), act, torch.nn.Linear(3, 3)


def two_linears() -> Any:
    return nnx.Dict(a=lm.LazyLinear(3, rngs=nnx.Rngs(0)), b=lm.LazyLinear(3, rngs=nnx.Rngs(0)))


def assert_loads(path: Path, net: Any, **options: Any) -> None:
    model = two_linears()
    assert tuple(lm.load(model, path, layout="torch", **options)) == ([], [], [])
    for name in ("a", "b"):
        np.testing.assert_array_equal(model[name].kernel[...], getattr(net, name).weight.detach().numpy().T)


FUNCTIONS = [torch.nn.functional.relu, torch.nn.functional.gelu, torch.relu, torch.tanh, torch.sigmoid]


@pytest.mark.parametrize("act", [*PARAMETERLESS, *FUNCTIONS], ids=lambda act: getattr(act, "__name__", str(act)))
def test_a_whole_module_that_has_parts_without_tensors(tmp_path: Path, act: Any) -> None:
    net = Acting(act)
    assert_loads(saved(tmp_path / "m.pt", net), net)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("how", ["script", "trace"])
def test_torchscript_of_parts_without_tensors(tmp_path: Path, how: str) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU(), torch.nn.Linear(3, 3))
    made = torch.jit.script(net) if how == "script" else torch.jit.trace(net, torch.randn(1, 3))
    made.save(tmp_path / "m.pt")
    model = nnx.Sequential(lm.LazyLinear(3, rngs=nnx.Rngs(0)), nnx.relu, lm.LazyLinear(3, rngs=nnx.Rngs(0)))
    assert tuple(lm.load(model, tmp_path / "m.pt", layout="torch")) == ([], [], [])


BESIDE = {
    "a loss": {"loss": torch.tensor(0.5), "epoch": 3},
    "a parameter": {"loss": torch.nn.Parameter(torch.tensor(0.5))},
    "a random state": {"rng_state": torch.get_rng_state(), "cuda": [torch.get_rng_state()]},
}


@pytest.mark.parametrize("beside", BESIDE)
@pytest.mark.parametrize("key", ["model_state_dict", "model", "net"])
def test_a_state_dict_beside_tensors_that_are_none_of_it(tmp_path: Path, key: str, beside: str) -> None:
    net = Acting(torch.nn.ReLU())
    optimizer = torch.optim.Adam(net.parameters())
    path = saved(tmp_path / "m.pt", {key: net.state_dict(), "optimizer": optimizer.state_dict()} | BESIDE[beside])
    assert_loads(path, net)


def test_two_state_dicts_beside_a_tensor_are_not_chosen_from(tmp_path: Path) -> None:
    net, other = Acting(torch.nn.ReLU()), Acting(torch.nn.ReLU())
    state = {"model": net.state_dict(), "model_ema": other.state_dict(), "loss": torch.tensor(0.5)}
    path = saved(tmp_path / "m.pt", state)
    with pytest.raises(lm.CheckpointError, match="several state dicts that fit the model: model, model_ema"):
        lm.load(two_linears(), path, layout="torch", strict=False)
    assert_loads(path, net, root="model")


def test_a_module_that_holds_itself(tmp_path: Path) -> None:
    net = torch.nn.Linear(3, 4)
    net._modules["again"] = net  # its own state_dict() never ends
    assert list(values(saved(tmp_path / "m.pt", net))) == ["weight", "bias"]


def test_values_outlive_the_file(tmp_path: Path) -> None:
    path = saved(tmp_path / "m.pt", tensors())
    got = values(path)
    path.unlink()
    assert_same(got, GOOD)


# ---------------------------------------------------------------- no torch file


def test_no_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path / "m.pt", tensors())
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    assert_same(values(path), GOOD)
    for raw, word in OTHERS.values():
        path.write_bytes(raw)
        refusal(path, word)


def tar() -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("storages"), io.BytesIO(b""))
    return out.getvalue()


OTHERS = {
    "empty": (b"", "an empty file"),
    "text": (b"epoch 3, loss 0.1\n", "none of PyTorch's"),
    "LFS": (b"version https://git-lfs.github.com/spec/v1\nsize 4\n", "Git LFS pointer"),
    "HTML": (b"<!doctype html>", "HTML page"),
    "tar": (tar(), "tar archive"),
    "empty zip": (archive_of(), "without a data.pkl"),
    "zip": (archive_of(a__readme=b"nothing"), "without a data.pkl"),
    "zip without a folder": (archive_of(data_pkl=pickle.dumps({}, 2)), "outside the folder"),
    "cut zip": (archive_of(a__data_pkl=pickle.dumps({}, 2))[:-9], "zip archive's directory"),
    "pickle": (pickle.dumps({"a": 1}), "not run"),
    "joblib": (pickle.dumps({"a": 1}, 2), "not run"),
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("suffix", [".pt", ".bin"])
def test_other_files(tmp_path: Path, name: str, suffix: str) -> None:
    raw, word = OTHERS[name]
    path = tmp_path / f"m{suffix}"
    path.write_bytes(raw)
    refusal(path, word)


@both
@pytest.mark.parametrize("value", [torch.ones(3), [torch.ones(3)], 3, None, "text"])
def test_no_mapping(tmp_path: Path, value: Any, options: dict[str, Any]) -> None:
    refusal(saved(tmp_path / "m.pt", value, **options), "a state dict: a mapping from names to tensors")


def test_cut_anywhere(tmp_path: Path) -> None:
    for options in ({}, LEGACY):
        raw = saved(tmp_path / "good.pt", {"x": torch.arange(50.0)}, **options).read_bytes()
        path = tmp_path / "m.pt"
        for length in range(0, len(raw), 13):
            path.write_bytes(raw[:length])
            refusal(path)


# ---------------------------------------------------------------- kinds without an array

KINDS = {
    "sparse": lambda: torch.eye(3).to_sparse(),
    "compressed": lambda: torch.eye(3).to_sparse_csr(),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    "meta": lambda: torch.ones(3, device="meta"),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "half complex": lambda: torch.ones(3, dtype=torch.complex32),
}


@pytest.mark.filterwarnings("ignore")  # these kinds warn that they are experimental
@pytest.mark.parametrize("kind", KINDS)
def test_kinds_without_an_array(tmp_path: Path, kind: str) -> None:
    path = saved(tmp_path / "m.pt", {"fc": {"x": torch.ones(1), "odd": KINDS[kind]()}})
    refusal(path, "m.pt: fc.odd\n", {"compressed": "sparse", "half complex": "complex32"}.get(kind, kind))


# ---------------------------------------------------------------- code


class Touch:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path, function: Any) -> None:
        self.path, self.function = path, function

    def __reduce__(self) -> Any:
        return self.function, ((str(self.path), "w") if self.function is open else (f"touch {self.path}",))


@pytest.mark.parametrize("function", [open, os.system], ids=["open", "system"])
@pytest.mark.parametrize("place", ["zip", "stream", "bare", "first of a stream", "last of a stream"])
def test_no_code_runs(tmp_path: Path, function: Any, place: str) -> None:
    marker = tmp_path / "marker"
    bad = pickle.dumps({"x": Touch(marker, function)}, 2)
    raw = {
        "zip": archive_of(a__data_pkl=bad, a__version=b"3"),
        "stream": stream_of(bad, pickle.dumps([], 2)),
        "bare": bad,
        "first of a stream": stream_of()[:15] + bad,
        "last of a stream": stream_of(pickle.dumps({}, 2), bad),
    }[place]
    for suffix in (".pt", ".pth", ".bin", ".ckpt", ".npz", ".safetensors", ".dat", ""):
        path = tmp_path / f"m{suffix}"
        path.write_bytes(raw)
        message = refusal(path)
        if suffix == ".pt" and place != "bare":
            assert f"the global {function.__module__}.{function.__name__}" in message
    assert not marker.exists()


def test_a_refusal_in_full(tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    path.write_bytes(archive_of(a__data_pkl=pickle.dumps({"x": Touch(tmp_path, os.system)}, 2)))
    assert refusal(path) == (
        "m.pt\n"
        f"  got:    the global {os.system.__module__}.system\n"
        "  needed: tensors and plain values: other names are not imported, and nothing is run\n"
        "  write:  safetensors.torch.save_file(model.state_dict(), path)  # where the file comes from"
    )
