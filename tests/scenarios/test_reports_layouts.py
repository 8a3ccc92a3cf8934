"""Rows and reports that the PyTorch layouts and the files answer."""
# pyright: reportAttributeAccessIssue=false, reportOptionalSubscript=false

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from helpers import assert_same_bits, lazy_mlp
from safetensors.numpy import save_file

import lazymods as lm

RNG = np.random.default_rng(0)


def values(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def load(folder: Path, model: Any, tensors: dict[str, Any], **options: Any) -> Any:
    save_file({n: np.ascontiguousarray(v) for n, v in tensors.items()}, folder / "t.safetensors")
    lm.load(model, folder / "t.safetensors", layout="torch", **options)
    return model


def rngs() -> nnx.Rngs:
    return nnx.Rngs(0)


@pytest.mark.parametrize("suffix", [".safetensors", ".npz", ""])
def test_lazy_models_are_not_written(tmp_path: Path, suffix: str) -> None:
    with pytest.raises(lm.UninitializedError) as caught:
        lm.save(lazy_mlp(), tmp_path / f"m{suffix}")
    assert all(name in str(caught.value) for name in ("fc1.kernel", "fc1.bias", "fc2.kernel", "fc2.bias"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("tracked", [True, False])
def test_num_batches_tracked_is_taken_and_not_needed(tmp_path: Path, tracked: bool) -> None:
    tensors = {f"m.{n}": values(5) for n in ("weight", "bias", "running_mean", "running_var")}
    extra = {"m.num_batches_tracked": np.array(7)} if tracked else {}
    model = load(tmp_path, nnx.Dict(m=lm.LazyBatchNorm(rngs=rngs())), tensors | extra)
    for ours, theirs in (("scale", "weight"), ("bias", "bias"), ("mean", "running_mean"), ("var", "running_var")):
        assert_same_bits(getattr(model.m, ours)[...], tensors[f"m.{theirs}"])


@pytest.mark.parametrize(
    "torch_options, padding",
    [
        ({"kernel_size": 4, "stride": 4}, ((3, 3), (3, 3))),
        ({"kernel_size": 3, "stride": 2, "padding": 1, "output_padding": 1}, ((1, 2), (1, 2))),
    ],
    ids=["k4s4", "k3s2p1o1"],
)
def test_a_transposed_convolution_is_torch_s(
    tmp_path: Path, torch_options: dict[str, int], padding: Any
) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch tells the values")
    theirs = torch.nn.ConvTranspose2d(3, 2, **torch_options)
    size, stride = torch_options["kernel_size"], torch_options["stride"]
    ours = lm.LazyConvTranspose(2, (size, size), strides=(stride, stride), padding=padding, rngs=rngs())
    tensors = {f"m.{n}": v.detach().numpy() for n, v in theirs.state_dict().items()}
    model = load(tmp_path, nnx.Dict(m=ours), tensors)
    x = values(2, 5, 4, 3)
    want = theirs(torch.from_numpy(x.transpose(0, 3, 1, 2))).detach().numpy().transpose(0, 2, 3, 1)
    with jax.default_matmul_precision("highest"):
        np.testing.assert_allclose(np.asarray(model.m(jnp.asarray(x))), want, atol=1e-5)


class Raw(nnx.Module):
    def __init__(self) -> None:
        self.weight = nnx.Param(jnp.zeros((2, 3, 4)))


def test_the_module_s_type_tells_the_layout(tmp_path: Path) -> None:
    """Not the rank: a three-dimensional weight of another module stays as it is."""
    model = nnx.Dict(
        fc=lm.LazyLinear(4, use_bias=False, rngs=rngs()),
        conv1=lm.LazyConv(4, (2,), use_bias=False, rngs=rngs()),
        conv2=lm.LazyConv(4, (2, 3), use_bias=False, rngs=rngs()),
        conv3=lm.LazyConv(4, (2, 3, 1), use_bias=False, rngs=rngs()),
        table=lm.LazyEmbed(rngs=rngs()),
        raw=Raw(),
    )
    shapes = {"fc": (4, 3), "conv1": (4, 3, 2), "conv2": (4, 3, 2, 3), "conv3": (4, 3, 2, 3, 1), "table": (6, 5)}
    tensors = {f"{name}.weight": values(*shape) for name, shape in (shapes | {"raw": (2, 3, 4)}).items()}
    load(tmp_path, model, tensors)
    for name in ("fc", "conv1", "conv2", "conv3"):
        weight = tensors[f"{name}.weight"]
        assert_same_bits(model[name].kernel[...], np.ascontiguousarray(np.moveaxis(weight, (0, 1), (-1, -2))))
    assert_same_bits(model.table.embedding[...], tensors["table.weight"])
    assert_same_bits(model.raw.weight[...], tensors["raw.weight"])


def test_square_weights_by_value(tmp_path: Path) -> None:
    model = nnx.Dict(
        fc=lm.LazyLinear(8, rngs=rngs()), table=lm.LazyEmbed(8, 8, rngs=rngs()), norm=lm.LazyLayerNorm(rngs=rngs())
    )
    tensors = {"fc.weight": values(8, 8), "fc.bias": values(8), "table.weight": values(8, 8)}
    tensors |= {"norm.weight": values(8), "norm.bias": values(8)}
    load(tmp_path, model, tensors)
    assert_same_bits(model.fc.kernel[...], np.ascontiguousarray(tensors["fc.weight"].T))
    assert_same_bits(model.table.embedding[...], tensors["table.weight"])
    assert_same_bits(model.norm.scale[...], tensors["norm.weight"])


def test_dtype_names_are_kept_beside_the_bytes(tmp_path: Path) -> None:
    value = np.arange(8).astype(ml_dtypes.bfloat16)
    lm.save(nnx.Dict(a=nnx.Param(jnp.asarray(value))), tmp_path / "m.npz")
    model = nnx.Dict(a=nnx.Param(jnp.zeros(8, jnp.bfloat16)))
    lm.load(model, tmp_path / "m.npz")
    assert_same_bits(model.a[...], value)


def test_a_file_holds_names_and_arrays_only(tmp_path: Path) -> None:
    """No GraphDef, no version of Flax: what was written by one is read by the other."""
    from safetensors import safe_open

    lm.save(nnx.Linear(3, 4, rngs=rngs()), tmp_path / "m.safetensors")
    with safe_open(tmp_path / "m.safetensors", "numpy") as file:
        assert (file.metadata(), sorted(file.keys())) == (None, ["bias", "kernel"])


def test_rename_maps_names_and_tells_what_is_left(tmp_path: Path) -> None:
    save_file({"block_1/w": values(3, 4), "block_1/b": values(4), "step": values(1)}, tmp_path / "m.safetensors")
    model = nnx.Dict(fc=lm.LazyLinear(4, rngs=rngs()))
    pairs = [("^block_1/", "fc."), (r"w$", "kernel"), (r"b$", "bias")]
    result = lm.load(model, tmp_path / "m.safetensors", rename=pairs, strict=False)
    assert result == ([], ["step"], [])
    assert result.matched == {"fc.kernel": ("block_1/w",), "fc.bias": ("block_1/b",)}
