"""Loads from memory, and checkpoints as mappings."""

import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

import lazymods as lm
from lazymods.state.files.stored import StoredTensor

KERNEL = np.arange(12, dtype=np.float32).reshape(3, 4)
BIAS = np.arange(4, dtype=np.float32)


def lazy() -> Any:
    return lm.LazyLinear(4, rngs=nnx.Rngs(0))


def assert_loaded(layer: Any, kernel: np.ndarray = KERNEL, bias: np.ndarray = BIAS) -> None:
    np.testing.assert_array_equal(layer.kernel[...], kernel)
    np.testing.assert_array_equal(layer.bias[...], bias)
    assert type(layer) is nnx.Linear and layer.in_features == 3


# ---------------------------------------------------------------- mappings

MAKERS = {
    "numpy": np.asarray,
    "jax": jnp.asarray,
    "Variables": lambda a: nnx.Param(jnp.asarray(a)),
    "bfloat16": lambda a: np.asarray(a, ml_dtypes.bfloat16),
    "strided": lambda a: np.asarray(np.repeat(a, 2, 0)[::2]),
    "float64": lambda a: np.asarray(a, np.float64),
}


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("layout", ["flax", "torch"])
@pytest.mark.parametrize("make", MAKERS)
def test_a_mapping(make: str, layout: str, nested: bool) -> None:
    if layout == "flax":
        arrays: dict[str, Any] = {"kernel": MAKERS[make](KERNEL), "bias": MAKERS[make](BIAS)}
    else:
        arrays = {"weight": MAKERS[make](np.ascontiguousarray(KERNEL.T)), "bias": MAKERS[make](BIAS)}
    model = nnx.Dict(fc=lazy())
    given = {"fc": arrays} if nested else {f"fc.{name}": value for name, value in arrays.items()}
    result = lm.load(model, given, layout=layout)
    assert_loaded(model.fc)
    assert tuple(result) == ([], [], [])
    assert result.matched["fc.bias"] == ("fc.bias",)


@pytest.mark.parametrize("layout", ["flax", "torch"])
def test_the_caller_s_arrays_stay_the_caller_s(layout: str) -> None:
    """They may be written to, and given away to a step that donates, after a load."""
    kernel, bias = np.ones((64, 64), np.float32), np.ones(64, np.float32)
    layer = lm.LazyLinear(64, rngs=nnx.Rngs(0))
    lm.load(layer, {"kernel" if layout == "flax" else "weight": kernel, "bias": bias}, layout=layout)
    kernel[:], bias[:] = 2, 2
    assert float(layer.kernel[...].sum()) == 64 * 64 and float(lm.state_dict(layer)["bias"].sum()) == 64
    array = jnp.ones((64, 64))
    lm.load(layer, {"kernel": array, "bias": jnp.ones(64)})
    array.delete()
    assert float(layer.kernel[...].sum()) == 64 * 64


def test_numbers_of_a_training_state() -> None:
    state = {"model": lazy(), "step": 0}
    lm.load(state, {"model": {"kernel": KERNEL, "bias": BIAS}, "step": 7})
    assert_loaded(state["model"])
    assert state["step"] == 7


def test_random_keys() -> None:
    model, other = nnx.Dropout(0.5, rngs=nnx.Rngs(1)), nnx.Dropout(0.5, rngs=nnx.Rngs(2))
    lm.load(model, lm.state_dict(other, include_rng=True))
    state, want = (lm.state_dict(m, include_rng=True) for m in (model, other))
    assert state.keys() == want.keys() and all(np.array_equal(state[n], want[n]) for n in state)


def test_a_traced_value() -> None:
    """In a transform, a load by Flax's names is a load of a state dict; numpy lays nothing anew there."""

    @nnx.jit
    def scaled(layer: Any, factor: Any) -> None:
        lm.load(layer, {"kernel": KERNEL * factor, "bias": BIAS * factor})

    layer = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    scaled(layer, jnp.float32(2))
    np.testing.assert_array_equal(layer.kernel[...], KERNEL * 2)

    @jax.jit
    def laid(value: Any) -> Any:
        lm.load(nnx.Linear(3, 4, rngs=nnx.Rngs(0)), {"weight": value, "bias": value[0]}, layout="torch")

    with pytest.raises(lm.StateDictError, match="laid anew by numpy, outside of any transform"):
        laid(jnp.ones((4, 4)))


class Holder(dict[str, Any]):
    """A mapping of somebody's."""


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (3, "needed: a path, a mapping from names to arrays, or a torch.nn.Module"),
        (np.ones(3), r"got:    f64\[3\]\n  needed: a path, a mapping"),
        ([("kernel", KERNEL)], "needed: a path, a mapping"),
        (nnx.Linear(3, 4, rngs=nnx.Rngs(0)), r"lm\.load_state_dict\(model, lm\.state_dict\(other\)\)"),
        ({3.5: KERNEL}, "the name 3.5 of type float\n  needed: texts or whole numbers"),
        ({"a.b": BIAS, "a": {"b": BIAS}}, "two entries of the name 'a.b'"),
        ({"1": BIAS, 1: BIAS}, "two entries of the name '1'"),
    ],
    ids=["number", "array", "pairs", "model", "float name", "nested twice", "number twice"],
)
def test_what_is_no_source(source: Any, text: str) -> None:
    with pytest.raises(lm.ArgumentError, match=text):
        lm.load(lazy(), source)


def test_a_mapping_that_holds_itself() -> None:
    mapping: dict[str, Any] = {"kernel": KERNEL}
    mapping["more"] = Holder(x=mapping)
    with pytest.raises(TypeError, match="a mapping that holds itself"):
        lm.load(lazy(), mapping)


def test_an_error_says_what_was_loaded() -> None:
    with pytest.raises(lm.StateDictError) as caught:
        lm.load(lazy(), {"weight": KERNEL.T[:, :2].copy()}, layout="torch", missing="x", ignore=["y"])
    assert str(caught.value).splitlines()[0] == "the mapping does not fit LazyLinear; nothing was loaded"
    assert "no entry in the mapping" in str(caught.value)


# ---------------------------------------------------------------- PyTorch, in memory


def test_without_pytorch_there_are_no_modules_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    lm.load(layer := lazy(), {"weight": KERNEL.T.copy(), "bias": BIAS}, layout="torch")
    assert_loaded(layer)
    assert "torch" not in sys.modules


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("kind", ["module", "state dict", "parameters", "strided"])
def test_tensors(kind: str, dtype: str) -> None:
    torch = pytest.importorskip("torch", reason="torch is an extra")
    net = torch.nn.Linear(3, 4).to(getattr(torch, dtype))
    with torch.no_grad():
        net.weight.copy_(torch.from_numpy(KERNEL.T.copy()))
        net.bias.copy_(torch.from_numpy(BIAS))
    source = {
        "module": lambda: net,
        "state dict": net.state_dict,
        "parameters": lambda: dict(net.named_parameters()),
        "strided": lambda: {"weight": net.weight.T.contiguous().T, "bias": torch.stack([net.bias] * 2, 1)[:, 0]},
    }[kind]()
    layer = lazy()
    lm.load(layer, source, layout="torch")
    assert_loaded(layer)
    with torch.no_grad():
        net.weight.zero_()
    assert_loaded(layer)


def test_tensors_that_are_no_arrays() -> None:
    torch = pytest.importorskip("torch", reason="torch is an extra")
    for tensor in (torch.ones(4, 3, device="meta"), torch.eye(4).to_sparse()):
        with pytest.raises(lm.StateDictError, match="which has no array of numbers in memory"):
            lm.load(lazy(), {"weight": tensor, "bias": torch.ones(4)}, layout="torch")


def test_tied_tensors_of_a_module() -> None:
    torch = pytest.importorskip("torch", reason="torch is an extra")
    net = torch.nn.ModuleDict({"embed": torch.nn.Embedding(4, 3), "head": torch.nn.Linear(3, 4, bias=False)})
    net["head"].weight = net["embed"].weight
    model = nnx.Dict(embed=lm.LazyEmbed(rngs=nnx.Rngs(0)), head=lm.LazyLinear(4, use_bias=False, rngs=nnx.Rngs(0)))
    with pytest.warns(UserWarning, match="are one parameter in the file and two in the model"):
        lm.load(model, net, layout="torch")
    head = lm.state_dict(model)["head.kernel"]
    np.testing.assert_array_equal(head, net["embed"].weight.detach().numpy().T)


# ---------------------------------------------------------------- lm.open


def saved(folder: Path) -> Path:
    path = folder / "m.safetensors"
    save_file({"kernel": KERNEL, "bias": BIAS}, path, metadata={"made by": "a test"})
    return path


def test_open_reads_nothing_before_it_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    before = StoredTensor.read

    def counted(self: StoredTensor) -> Any:
        read.append(self.name)
        return before(self)

    monkeypatch.setattr(StoredTensor, "read", counted)
    with lm.open(saved(tmp_path)) as opened:
        assert list(opened) == ["bias", "kernel"] and len(opened) == 2 and "bias" in opened and "x" not in opened
        assert opened.spec("kernel") == jax.ShapeDtypeStruct((3, 4), jnp.float32)
        assert opened.metadata == {"made by": "a test"}
        assert "kernel: f32[3,4]" in repr(opened) and not read
        np.testing.assert_array_equal(opened["kernel"], KERNEL)
        assert read == ["kernel"]


def test_open_is_read_only_and_closes(tmp_path: Path) -> None:
    with lm.open(saved(tmp_path)) as opened:
        kernel = opened["kernel"]
    with pytest.raises(ValueError, match="read-only"):
        kernel[0, 0] = 1
    with pytest.raises(TypeError, match="does not support item assignment"):
        opened["kernel"] = KERNEL  # type: ignore[index]
    with pytest.raises(ValueError, match="an open checkpoint: 'kernel' can't be read any more"):
        opened["kernel"]
    with pytest.raises(KeyError, match="x"):
        opened["x"]
    with pytest.raises(ValueError, match="an open checkpoint: it can't be read any more"):
        lm.load(lazy(), opened)
    assert "closed" in repr(opened) and list(opened) == ["bias", "kernel"]
    np.testing.assert_array_equal(kernel, KERNEL)


@pytest.mark.parametrize("suffix", [".npz", ".safetensors", ""])
def test_every_format_opens(tmp_path: Path, suffix: str) -> None:
    model = nnx.Dict(a=nnx.Linear(3, 4, rngs=nnx.Rngs(0)))
    model.b = model.a
    lm.save(model, tmp_path / f"m{suffix}")
    want = lm.state_dict(model)
    with lm.open(tmp_path / f"m{suffix}") as opened:
        assert set(opened) == set(want)
        for name, value in opened.items():
            assert not value.flags.writeable
            np.testing.assert_array_equal(value, want[name])


def test_what_is_computed_from_an_open_checkpoint(tmp_path: Path) -> None:
    with lm.open(saved(tmp_path)) as opened:
        lm.load(first := lazy(), opened)
        lm.load(second := lazy(), {name: opened[name] * 2 for name in opened})
        lm.load(third := lazy(), dict(opened))
    assert_loaded(first)
    assert_loaded(second, KERNEL * 2, BIAS * 2)
    assert_loaded(third)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="other devices have their own memory")
def test_the_map_of_an_open_checkpoint_is_the_parameter(tmp_path: Path) -> None:
    lm.save(nnx.Linear(64, 64, rngs=nnx.Rngs(0)), tmp_path / "m.safetensors")
    with lm.open(tmp_path / "m.safetensors") as opened:
        arrays = dict(opened)
        for source in (opened, arrays):
            layer = lm.LazyLinear(64, rngs=nnx.Rngs(1))
            lm.load(layer, source)
            address = layer.kernel[...].unsafe_buffer_pointer()
            assert address == arrays["kernel"].__array_interface__["data"][0]


@pytest.mark.skipif(sys.platform == "win32", reason="a folder in use is not replaced there")
def test_a_folder_that_was_replaced_is_told(tmp_path: Path) -> None:
    """An Orbax folder is read by the names of its files, which are another checkpoint's then."""
    lm.save(nnx.Linear(3, 4, rngs=nnx.Rngs(0)), tmp_path / "m")
    opened = lm.open(tmp_path / "m")
    lm.save(nnx.Linear(3, 4, rngs=nnx.Rngs(1)), tmp_path / "m")
    for read in (lambda: opened["kernel"], lambda: lm.load(lazy(), opened)):
        with pytest.raises(lm.CheckpointError, match="which a save has put in its place"):
            read()
    opened.close()


def test_what_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        lm.open(tmp_path / "nothing")
    (tmp_path / "bad.safetensors").write_bytes(b"no")
    with pytest.raises(lm.CheckpointError):
        lm.open(tmp_path / "bad.safetensors")


# ---------------------------------------------------------------- what nobody asks for


def test_what_is_dropped_need_not_be_an_array() -> None:
    torch = pytest.importorskip("torch", reason="torch is an extra")
    odd = {"meta": torch.ones(3, device="meta"), "sparse": torch.eye(3).to_sparse(), "text": "x", "none": None}
    given = {"weight": KERNEL.T.copy(), "bias": BIAS} | odd
    lm.load(layer := lazy(), given, layout="torch", rename=dict.fromkeys(odd))
    assert_loaded(layer)
    result = lm.load(layer, given, layout="torch", ignore=list(odd))
    assert result.ignored == list(odd)


def test_a_state_of_flax() -> None:
    other = nnx.Dict(fc=nnx.Linear(3, 4, rngs=nnx.Rngs(1)))
    for source in (nnx.state(other), nnx.to_pure_dict(nnx.state(other))):
        lm.load(model := nnx.Dict(fc=lazy()), source)
        assert_loaded(model.fc, *(np.asarray(lm.state_dict(other)[f"fc.{n}"]) for n in ("kernel", "bias")))


def test_stacked_weights_are_laid_layer_by_layer() -> None:
    """Square ones would fit as they are."""

    class Block(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.fc = lm.LazyLinear(3, rngs=rngs)

    model = nnx.Dict(blocks=nnx.vmap(Block, axis_size=3)(nnx.Rngs(0).split(3)))
    weight = np.arange(27, dtype=np.float32).reshape(3, 3, 3)
    lm.load(model, {"blocks.fc.weight": weight, "blocks.fc.bias": weight[0]}, layout="torch")
    np.testing.assert_array_equal(lm.state_dict(model)["blocks.fc.kernel"], weight.transpose(0, 2, 1))
