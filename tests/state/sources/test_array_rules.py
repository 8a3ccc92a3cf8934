"""Array rules: what a file has as other arrays than the model, there and back; the numbers are numpy's own."""

import dataclasses
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from helpers import assert_same_bits
from safetensors.numpy import save_file

import lazymods as lm
from lazymods import rules

Arrays = dict[str, np.ndarray]
RNG = np.random.default_rng(0)
F32, BF16 = np.float32, ml_dtypes.bfloat16


def normal(*shape: int, dtype: Any = F32) -> np.ndarray:
    return RNG.normal(size=shape).astype(dtype)


def linear(size: int, bias: bool = True) -> Any:
    return lm.LazyLinear(size, use_bias=bias, rngs=nnx.Rngs(0))


def dense(*names: str, size: int = 4, bias: bool = True) -> Any:
    return nnx.Dict({name: linear(size, bias) for name in names})


@dataclasses.dataclass
class Case:
    """A file, the model, the rules, and what the model has then."""

    file: Arrays
    model: Callable[[], Any]
    rename: Any
    want: Arrays
    exact: bool = True


def qkv(parts: list[np.ndarray], heads: int) -> np.ndarray:
    """Fuse parts head by head, by loops."""
    rows = [row for h in range(heads) for p in parts for row in np.split(p, heads)[h]]
    return np.stack(rows)


Q, K, V = normal(8, 4), normal(8, 4), normal(8, 4)
SMALL_K, SMALL_V = normal(4, 4), normal(4, 4)
B = normal(8), normal(8), normal(8)
NAMES = ("q", "k", "v")
EXPERTS = [{w: normal(5, 4) for w in ("w1", "w3")} for _ in range(3)]
LAYERS = [(normal(4, 4), normal(4)) for _ in range(3)]
EMBED = normal(7, 4)
SCALE = normal(4)
GAMMA = normal(4, 1, 1)
INT8 = RNG.integers(-127, 128, (4, 3)).astype(np.int8)
FINE = np.abs(normal(4, 1)) + 0.1


class Scaled(nnx.Module):
    def __init__(self) -> None:
        self.layer_scale = lm.UninitializedParameter((None,))


def stacked_block() -> Any:
    class Block(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.fc = lm.LazyLinear(4, rngs=rngs)

    return nnx.Dict(layers=nnx.vmap(Block, axis_size=3)(nnx.Rngs(0).split(3)))


def experts() -> Any:
    return nnx.Dict(moe=nnx.Dict({w: lm.UninitializedParameter((None, None, None)) for w in ("w1", "w3")}))


def halves(name: str) -> tuple[str, str]:
    return f"{name}.kernel", f"{name}.bias"


CASES = {
    "GPT-2's Conv1D": Case(
        {"h.c_proj.weight": (w := normal(4, 4)), "h.c_proj.bias": (b := normal(4))},
        lambda: nnx.Dict(h=dense("c_proj")),
        [rules.Transpose(r"c_proj[.]weight$")],
        {"h.c_proj.kernel": w, "h.c_proj.bias": b},
    ),
    "GPT-2's Conv1D and its thirds": Case(
        {"c_attn.weight": np.concatenate([Q.T, K.T, V.T], 1), "c_attn.bias": np.concatenate(B)},
        lambda: dense(*NAMES, size=8),
        [rules.Split("c_attn", into=NAMES, axis=-1), rules.Transpose("weight$")],
        {"q.kernel": Q.T, "k.kernel": K.T, "v.kernel": V.T, "q.bias": B[0], "k.bias": B[1], "v.bias": B[2]},
    ),
    "thirds": Case(
        {"qkv.weight": np.concatenate([Q, K, V]), "qkv.bias": np.concatenate(B)},
        lambda: dense(*NAMES, size=8),
        [rules.Split("qkv", into=NAMES)],
        {"q.kernel": Q.T, "k.kernel": K.T, "v.kernel": V.T, "q.bias": B[0], "k.bias": B[1], "v.bias": B[2]},
    ),
    "head by head": Case(
        {"query_key_value.weight": qkv([Q, K, V], 2), "query_key_value.bias": qkv([b[:, None] for b in B], 2)[:, 0]},
        lambda: dense(*NAMES, size=8),
        rules.Split("query_key_value", into=NAMES, groups=2),
        {"q.kernel": Q.T, "k.kernel": K.T, "v.kernel": V.T, "q.bias": B[0], "k.bias": B[1], "v.bias": B[2]},
    ),
    "Falcon's groups": Case(
        {"query_key_value.weight": qkv([Q, SMALL_K, SMALL_V], 2)},
        lambda: nnx.Dict(q=linear(8, False), k=linear(4, False), v=linear(4, False)),
        [rules.Split("query_key_value", into=NAMES, groups=2, ratio=(2, 1, 1))],
        {"q.kernel": Q.T, "k.kernel": SMALL_K.T, "v.kernel": SMALL_V.T},
    ),
    "Phi-3's unequal parts": Case(
        {"qkv_proj.weight": np.concatenate([Q, SMALL_K, SMALL_V])},
        lambda: nnx.Dict(q=linear(8, False), k=linear(4, False), v=linear(4, False)),
        [rules.Split("qkv_proj", into=NAMES, ratio=(2, 1, 1))],
        {"q.kernel": Q.T, "k.kernel": SMALL_K.T, "v.kernel": SMALL_V.T},
    ),
    "a gate and what it opens": Case(
        {"gate_up_proj.weight": np.concatenate([Q, K])},
        lambda: dense("gate_proj", "up_proj", size=8, bias=False),
        [rules.Split("gate_up_proj", into=("gate_proj", "up_proj"))],
        {"gate_proj.kernel": Q.T, "up_proj.kernel": K.T},
    ),
    "three that are one": Case(
        {f"{n}_proj.weight": w for n, w in zip(NAMES, (Q, K, V), strict=True)}
        | {f"{n}_proj.bias": b for n, b in zip(NAMES, B, strict=True)},
        lambda: dense("qkv", size=24),
        [rules.Merge(("q_proj", "k_proj", "v_proj"), into="qkv")],
        {"qkv.kernel": np.concatenate([Q, K, V]).T, "qkv.bias": np.concatenate(B)},
    ),
    "three that are one, head by head": Case(
        {"q_proj.weight": Q, "k_proj.weight": SMALL_K, "v_proj.weight": SMALL_V},
        lambda: dense("qkv", size=16, bias=False),
        [rules.Merge(("q_proj", "k_proj", "v_proj"), into="qkv", groups=2)],
        {"qkv.kernel": qkv([Q, SMALL_K, SMALL_V], 2).T},
    ),
    "Mixtral's experts": Case(
        {f"moe.experts.{i}.{w}.weight": a for i, ws in enumerate(EXPERTS) for w, a in ws.items()},
        experts,
        [rules.Transpose("experts"), rules.Stack(r"experts[.](\d+)[.](w.)[.]weight$", into=r"\2")],
        {f"moe.{w}": np.stack([e[w].T for e in EXPERTS]) for w in ("w1", "w3")},
    ),
    "layers for nnx.scan": Case(
        {f"layers.{i}.fc.{n}": a for i, wb in enumerate(LAYERS) for n, a in zip(("weight", "bias"), wb, strict=True)},
        stacked_block,
        [rules.Stack(r"^layers[.](\d+)[.]", into="layers.")],
        {"layers.fc.kernel": np.stack([w.T for w, _ in LAYERS]), "layers.fc.bias": np.stack([b for _, b in LAYERS])},
    ),
    "a stack that is a list": Case(
        {"experts.down": np.stack([Q[:4], K[:4]])},
        lambda: nnx.Dict(experts=nnx.List([nnx.Dict(down=linear(4, False)) for _ in range(2)])),
        [rules.Unstack(r"experts[.]down$", into="experts.{i}.down.weight")],
        {"experts.0.down.kernel": Q[:4].T, "experts.1.down.kernel": K[:4].T},
    ),
    "a tied head": Case(
        {"embed.weight": EMBED},
        lambda: nnx.Dict(embed=lm.LazyEmbed(rngs=nnx.Rngs(0)), lm_head=linear(7, False)),
        [rules.Copy(r"^embed[.]", into="lm_head.")],
        {"embed.embedding": EMBED, "lm_head.kernel": EMBED.T},
    ),
    "Gemma's scale": Case(
        {"norm.weight": SCALE.astype(BF16)},
        lambda: nnx.Dict(norm=lm.LazyRMSNorm(rngs=nnx.Rngs(0))),
        [rules.Add(r"norm[.]weight$", 1.0)],
        {"norm.scale": SCALE.astype(BF16).astype(F32) + F32(1)},
    ),
    "a layer scale": Case(
        {"layer_scale": GAMMA}, Scaled, [rules.Reshape("layer_scale", (-1,))], {"layer_scale": GAMMA[:, 0, 0]}
    ),
    "int8 by row": Case(
        {"fc.weight.qweight": INT8, "fc.weight.scale": FINE, "fc.bias": SCALE},
        lambda: dense("fc"),
        [rules.Dequantize(r"[.]qweight$", scale=".scale", into="")],
        {"fc.kernel": (INT8.astype(F32) * FINE).T, "fc.bias": SCALE},
    ),
    "int8 with zero points, and a vector of scales": Case(
        {"fc.q": INT8, "fc.s": FINE[:, 0], "fc.z": (z := np.array([1, -2, 3, 0], np.int8))},
        lambda: dense("fc", bias=False),
        [rules.Dequantize(r"[.]q$", scale=".s", zero=".z", into=".weight")],
        {"fc.kernel": ((INT8.astype(F32) - z[:, None].astype(F32)) * FINE).T},
    ),
    "float8 by block": Case(
        {
            "fc.weight": (f8 := normal(4, 6).astype(ml_dtypes.float8_e4m3fn)),
            "fc.weight_scale_inv": (s := np.abs(normal(2, 3))),
        },
        lambda: dense("fc", bias=False),
        [rules.Dequantize("weight$", scale="weight_scale_inv", into="weight")],
        {"fc.kernel": (f8.astype(F32) * s.repeat(2, 0).repeat(2, 1)).T},
    ),
    "several after each other, with names": Case(
        {"m.attn.Wqkv.weight": qkv([Q, K, V], 2), "m.norm.w": SCALE},
        lambda: nnx.Dict(attn=dense(*NAMES, size=8, bias=False), norm=lm.LazyRMSNorm(rngs=nnx.Rngs(0))),
        [("^m[.]", ""), rules.Split("Wqkv", into=NAMES, groups=2), (r"norm\.w$", "norm.weight")],
        {"attn.q.kernel": Q.T, "attn.k.kernel": K.T, "attn.v.kernel": V.T, "norm.scale": SCALE},
    ),
    "per head, and then to experts": Case(
        {"x.weight": (x := normal(12, 4))},
        lambda: nnx.Dict(a=experts_of(2), b=experts_of(2)),
        [
            rules.Reshape("x", (2, 6, 4)),
            rules.Split("x", into=("a", "b"), axis=1),
            rules.Unstack("([ab])[.]weight", r"\1.{i}.weight"),
        ],
        {f"{n}.{i}.kernel": x.reshape(2, 2, 3, 4)[i, j].T for j, n in enumerate("ab") for i in range(2)},
    ),
}


def experts_of(count: int) -> Any:
    return nnx.List([linear(3, False) for _ in range(count)])


def write(folder: Path, arrays: Arrays) -> Path:
    save_file({name: np.ascontiguousarray(a) for name, a in arrays.items()}, folder / "m.safetensors")
    return folder / "m.safetensors"


def assert_holds(model: Any, want: Arrays) -> None:
    state = lm.state_dict(model)
    assert set(state) == set(want)
    for name, value in want.items():
        assert_same_bits(state[name], value)


def assert_same(got: Arrays, want: Arrays) -> None:
    assert set(got) == set(want)
    for name, value in want.items():
        assert got[name].dtype == value.dtype and got[name].shape == value.shape, name
        assert got[name].tobytes() == value.tobytes(), name


@pytest.mark.parametrize("source", ["file", "memory"])
@pytest.mark.parametrize("name", CASES)
def test_there_and_back(tmp_path: Path, name: str, source: str) -> None:
    case = CASES[name]
    model = case.model()
    path = write(tmp_path, case.file)
    given = path if source == "file" else dict(case.file)
    result = lm.load(model, given, layout="torch", rename=case.rename)
    assert tuple(result) == ([], [], [])
    assert_holds(model, case.want)
    assert {s for found in result.matched.values() for s in found} == set(case.file)
    if source == "file":
        path.unlink()
    for like in (result, pickle.loads(pickle.dumps(result))):
        assert_same(lm.export_torch(model, like=like), case.file)
