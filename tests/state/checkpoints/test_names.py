"""From the file's names to the model's: ``rename``, and what needs none."""
# pyright: reportIndexIssue=false

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flax import nnx
from helpers import assert_same_bits
from safetensors.numpy import save_file

import lazymods as lm

RNG = np.random.default_rng(0)
KERNEL, BIAS = RNG.standard_normal((3, 4)).astype(np.float32), RNG.standard_normal(4).astype(np.float32)


class Net(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([lm.LazyLinear(4, rngs=rngs), lm.LazyLinear(4, rngs=rngs)])
        self.norm = lm.LazyBatchNorm(rngs=rngs)


def tensors() -> dict[str, np.ndarray]:
    square = RNG.standard_normal((4, 4)).astype(np.float32)
    out = {"layers.0.kernel": KERNEL, "layers.0.bias": BIAS, "layers.1.kernel": square, "layers.1.bias": BIAS + 1}
    return out | {f"norm.{k}": BIAS + i for i, k in enumerate(("mean", "var", "scale", "bias"), 2)}


def write(folder: Path, values: dict[str, Any]) -> Path:
    save_file(values, folder / "weights.safetensors")
    return folder / "weights.safetensors"


def assert_holds(model: Any, values: dict[str, np.ndarray]) -> None:
    state = lm.state_dict(model)
    assert set(state) == set(values)
    for name, value in values.items():
        assert_same_bits(state[name], value)


# ---------------------------------------------------------------- without a rename


@pytest.mark.parametrize(
    "spell",
    [
        lambda n: n.replace("layers.", "layers_"),
        lambda n: n.replace(".", "/"),
        lambda n: f"module.{n}",
        lambda n: f"module._orig_mod.model.{n}",
        lambda n: n.replace("norm.mean", "norm.running_mean").replace("norm.var", "norm.running_var"),
        lambda n: n.replace("norm.scale", "norm.weight"),
        lambda n: (f"batch_stats/{n}" if n in ("norm.mean", "norm.var") else f"params/{n}").replace(
            "layers.", "layers_"
        ),
    ],
    ids=["suffix", "slashes", "module", "wrapped", "running", "weight", "linen"],
)
def test_the_frequent_differences_need_no_rename(tmp_path: Path, spell: Any) -> None:
    values = tensors()
    model = Net()
    result = lm.load(model, write(tmp_path, {spell(n): v for n, v in values.items()}))
    assert_holds(model, values)
    assert result.matched == {n: (spell(n),) for n in values}
    assert tuple(result) == ([], [], [])


def test_a_model_with_suffixes_reads_a_file_with_dots(tmp_path: Path) -> None:
    model = nnx.Dict(layers_0=lm.LazyLinear(4, rngs=nnx.Rngs(0)))
    result = lm.load(model, write(tmp_path, {"layers.0.kernel": KERNEL, "layers.0.bias": BIAS}))
    assert_holds(model, {"layers_0.kernel": KERNEL, "layers_0.bias": BIAS})
    assert result.matched == {"layers_0.kernel": ("layers.0.kernel",), "layers_0.bias": ("layers.0.bias",)}


def test_a_sequential_has_the_numbers_of_pytorch_s(tmp_path: Path) -> None:
    model = nnx.Dict(
        net=nnx.Sequential(lm.LazyLinear(4, rngs=nnx.Rngs(0)), np.tanh, lm.LazyLayerNorm(rngs=nnx.Rngs(0)))
    )
    names = {"net.0.weight": KERNEL.T.copy(), "net.0.bias": BIAS, "net.2.weight": BIAS + 1, "net.2.bias": BIAS + 2}
    lm.load(model, write(tmp_path, names), layout="torch")
    values = [KERNEL, BIAS, BIAS + 1, BIAS + 2]
    holds = ("net.layers.0.kernel", "net.layers.0.bias", "net.layers.2.scale", "net.layers.2.bias")
    assert_holds(model, dict(zip(holds, values, strict=True)))


def test_a_doubt_is_left_to_the_user(tmp_path: Path) -> None:
    """Two modules of the model could be meant: the name stays unexpected."""

    def layer() -> Any:
        return lm.LazyLinear(4, rngs=nnx.Rngs(0))

    model = nnx.Dict({"x_1_2": layer(), "x": nnx.Dict({"1_2": layer()})})
    path = write(tmp_path, {"module.x_1_2.kernel": KERNEL, "x_1.2.kernel": KERNEL, "x/1_2/kernel": KERNEL})
    result = lm.load(model, path, strict=False)
    assert result.unexpected == ["x_1.2.kernel"]
    assert result.matched == {"x_1_2.kernel": ("module.x_1_2.kernel",), "x.1_2.kernel": ("x/1_2/kernel",)}


def test_a_matrix_called_weight_is_no_kernel(tmp_path: Path) -> None:
    """PyTorch's is transposed: a square one would load in silence."""
    model = nnx.Dict(fc=lm.LazyLinear(4, rngs=nnx.Rngs(0)))
    with pytest.raises(lm.StateDictError, match=r"fc\.weight") as caught:
        lm.load(model, write(tmp_path, {"fc.weight": np.eye(4, dtype=np.float32), "fc.bias": BIAS}))
    assert 'layout="torch"' in str(caught.value)
    assert lm.has_uninitialized_params(model)


def test_a_model_that_has_the_prefix_keeps_it(tmp_path: Path) -> None:
    model = nnx.Dict(model=lm.LazyLinear(4, rngs=nnx.Rngs(0)))
    lm.load(model, write(tmp_path, {"model.kernel": KERNEL, "model.bias": BIAS}))
    assert_holds(model, {"model.kernel": KERNEL, "model.bias": BIAS})


# ---------------------------------------------------------------- rename


class Wrapped(nnx.Module):
    """A model with a child that is called as a wrapper is, and a head beside it."""

    def __init__(self, child: str) -> None:
        rngs = nnx.Rngs(0)
        setattr(self, child, nnx.Dict(fc=lm.LazyLinear(4, rngs=rngs)))
        self.head = lm.LazyLinear(4, rngs=rngs)


@pytest.mark.parametrize("child", ["model", "module", "_orig_mod"])
@pytest.mark.parametrize("prefix", ["", "{}.", "module._orig_mod.{}."])
def test_a_child_that_is_called_as_a_wrapper(tmp_path: Path, child: str, prefix: str) -> None:
    values = {
        f"{child}.fc.kernel": KERNEL,
        f"{child}.fc.bias": BIAS,
        "head.kernel": KERNEL[:, :4] + 1,
        "head.bias": BIAS + 1,
    }
    model = Wrapped(child)
    lm.load(model, write(tmp_path, {prefix.format(child) + name: value for name, value in values.items()}))
    assert_holds(model, values)


def test_one_wrapper_or_two_is_no_doubt(tmp_path: Path) -> None:
    """Where the names lead as far with the prefix as without it, they are taken as they are."""
    rngs = nnx.Rngs(0)
    model = nnx.Dict(model=nnx.Dict(model=nnx.Dict(fc=lm.LazyLinear(4, rngs=rngs)), fc=lm.LazyLinear(4, rngs=rngs)))
    values = {"model.model.fc.kernel": KERNEL, "model.model.fc.bias": BIAS}
    result = lm.load(model, write(tmp_path, values), strict=False)
    assert set(result.matched) == set(values)
    assert lm.is_lazy(model["model"]["fc"]) and not lm.is_lazy(model["model"]["model"]["fc"])


@pytest.mark.parametrize(
    "rename",
    [
        {"old.kernel": "fc.kernel", "old.bias": "fc.bias", "extra": None},
        [(r"^old\.", "fc."), (r"^ext", None)],
        lambda name: None if name == "extra" else name.replace("old", "fc"),
    ],
    ids=["mapping", "pairs", "function"],
)
def test_none_drops_an_entry(tmp_path: Path, rename: Any) -> None:
    model = nnx.Dict(fc=lm.LazyLinear(4, rngs=nnx.Rngs(0)))
    result = lm.load(model, write(tmp_path, {"old.kernel": KERNEL, "old.bias": BIAS, "extra": BIAS}), rename=rename)
    assert_holds(model, {"fc.kernel": KERNEL, "fc.bias": BIAS})
    assert result.matched == {"fc.kernel": ("old.kernel",), "fc.bias": ("old.bias",)}


def test_pairs_apply_one_after_the_other(tmp_path: Path) -> None:
    model = nnx.Dict(fc=lm.LazyLinear(4, rngs=nnx.Rngs(0)))
    path = write(tmp_path, {"a.kernel": KERNEL, "a.bias": BIAS})
    lm.load(model, path, rename=[(r"^a\.", "b."), (r"^b\.", "fc.")])
    assert_holds(model, {"fc.kernel": KERNEL, "fc.bias": BIAS})


@pytest.mark.parametrize("rename", ["fc", [("one",)], 3], ids=repr)
def test_what_is_no_rename(tmp_path: Path, rename: Any) -> None:
    path = write(tmp_path, {"kernel": KERNEL, "bias": BIAS})
    with pytest.raises(TypeError, match="rename"):
        lm.load(lm.LazyLinear(4, rngs=nnx.Rngs(0)), path, rename=rename)


def test_a_function_that_gives_no_name(tmp_path: Path) -> None:
    path = write(tmp_path, {"kernel": KERNEL, "bias": BIAS})
    with pytest.raises(TypeError, match="it gave 7"):
        lm.load(lm.LazyLinear(4, rngs=nnx.Rngs(0)), path, rename=lambda name: 7)  # type: ignore[arg-type]
