"""Files whose shapes all fit and whose numbers would be wrong: square matrices of GPT-2's Conv1D, per-head queries."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

import lazymods as lm

Transpose, Split = lm.rules.Transpose, lm.rules.Split
RNG = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


GPT2 = {  # Conv1D has (in, out), the head (out, in)
    "transformer.h.0.attn.c_attn.weight": normal(4, 12),
    "transformer.h.0.attn.c_proj.weight": normal(4, 4),
    "transformer.h.0.mlp.c_fc.weight": normal(4, 16),
    "transformer.h.0.mlp.c_proj.weight": normal(16, 4),
    "lm_head.weight": normal(7, 4),
}
SQUARE = GPT2["transformer.h.0.attn.c_proj.weight"]


def linear(features: int) -> Any:
    return lm.LazyLinear(features, use_bias=False, rngs=nnx.Rngs(0))


def gpt2() -> nnx.Dict:
    attention, mlp = nnx.Dict(c_attn=linear(12), c_proj=linear(4)), nnx.Dict(c_fc=linear(16), c_proj=linear(4))
    return nnx.Dict(h=nnx.List([nnx.Dict(attn=attention, mlp=mlp)]), lm_head=linear(7))


def saved(folder: Path, tensors: dict[str, np.ndarray]) -> Path:
    save_file(tensors, folder / "m.safetensors")
    return folder / "m.safetensors"


def refused(model: Any, path: Path, **options: Any) -> list[str]:
    before = lm.uninitialized_paths(model)
    with pytest.raises(lm.StateDictError) as caught:
        lm.load(model, path, layout="torch", **options)
    assert lm.uninitialized_paths(model) == before
    return sorted({p.where.partition(" ")[0] for p in caught.value.problems})


# ---------------------------------------------------------------- square matrices


def test_a_square_matrix_beside_others_that_fit_only_untransposed(tmp_path: Path) -> None:
    path = saved(tmp_path, GPT2)
    everything = ["h.0.attn.c_attn.weight", "h.0.attn.c_proj.weight", "h.0.mlp.c_fc.weight", "h.0.mlp.c_proj.weight"]
    assert refused(gpt2(), path) == everything
    assert refused(gpt2(), path, mismatched="skip") == everything
    assert refused(gpt2(), path, rename=[Transpose("c_attn|c_fc|mlp[.]c_proj")]) == ["h.0.attn.c_proj.weight"]
    assert refused(gpt2(), path, rename=[Transpose("c_attn")], mismatched="skip") == everything[1:]


def test_the_error_has_the_line_that_mends_it(tmp_path: Path) -> None:
    path = saved(tmp_path, GPT2)
    with pytest.raises(lm.StateDictError) as caught:
        lm.load(gpt2(), path, layout="torch", rename=[Transpose("c_attn|c_fc|mlp[.]c_proj")])
    assert str(caught.value.problems[0]) == (
        "h.0.attn.c_proj.weight (LazyLinear h.0.attn.c_proj)\n"
        "  got:    shape (4, 4), square, which fits either way, beside transformer.h.0.attn.c_attn.weight, "
        "transformer.h.0.mlp.c_fc.weight, transformer.h.0.mlp.c_proj.weight\n"
        "  needed: to know how it lies: those are stored as (in, out), as Conv1D of GPT-2; torch.nn.Linear has "
        "(out, in)\n"
        r'  write:  rename=[lm.rules.Transpose(r"(^|\.)(attn\.c_proj)\.weight$"), ...]  # or '
        r'[lm.rules.Transpose(r"(^|\.)(attn\.c_proj)\.weight$", axes=(0, 1)), ...], for what is as in torch.nn.Linear'
    )
    with pytest.raises(lm.StateDictError) as caught:
        lm.load(gpt2(), path, layout="torch")
    line = r'rename=[lm.rules.Transpose(r"(^|\.)(c_proj|c_attn|c_fc)\.weight$"), ...]'
    assert all(p.write.startswith(line) for p in caught.value.problems)
    model = gpt2()
    lm.load(model, path, layout="torch", rename=[Transpose(r"(^|\.)(c_proj|c_attn|c_fc)\.weight$")])
    for module, kernel in (("attn", "c_attn"), ("attn", "c_proj"), ("mlp", "c_fc"), ("mlp", "c_proj")):
        found = model["h"][0][module][kernel].kernel[...]
        assert np.array_equal(found, GPT2[f"transformer.h.0.{module}.{kernel}.weight"])
    assert np.array_equal(model["lm_head"].kernel[...], GPT2["lm_head.weight"].T)


def test_a_rule_that_leaves_the_axes_settles_it(tmp_path: Path) -> None:
    model = gpt2()
    rename = [Transpose("c_attn|c_fc|mlp[.]c_proj"), Transpose("attn[.]c_proj", axes=(0, 1))]
    lm.load(model, saved(tmp_path, GPT2), layout="torch", rename=rename)
    assert np.array_equal(model["h"][0]["attn"]["c_proj"].kernel[...], SQUARE.T)


THIRDS = GPT2["transformer.h.0.attn.c_attn.weight"]


@pytest.mark.parametrize(
    ("rename", "fits"),
    [
        ([Split("transformer.h.0.attn.c_attn", into=("q", "k", "v"), axis=-1)], False),
        ([Split("transformer.h.0.attn.c_attn", into=("q", "k", "v"), axis=-1), Transpose("^[qkv][.]")], True),
        ([Transpose("c_attn"), Split("transformer.h.0.attn.c_attn", into=("q", "k", "v"))], True),
        ([Transpose("c_attn", (0, 1)), Split("transformer.h.0.attn.c_attn", into=("q", "k", "v"), axis=-1)], False),
    ],
)
def test_what_was_cut_out_of_columns(tmp_path: Path, rename: Any, fits: bool) -> None:
    path, model = saved(tmp_path, GPT2), nnx.Dict(q=linear(4), k=linear(4), v=linear(4))
    if not fits and len(rename) == 1:
        assert refused(model, path, rename=rename, ignore="transformer|lm_head") == ["k.weight", "q.weight", "v.weight"]
        return
    lm.load(model, path, layout="torch", rename=rename, ignore="transformer|lm_head")
    for i, name in enumerate("qkv"):
        part = THIRDS[:, 4 * i : 4 * i + 4]
        assert np.array_equal(model[name].kernel[...], part if fits else part.T)


def test_the_output_of_an_attention_of_flax(tmp_path: Path) -> None:
    tensors = {"attn.c_attn.weight": normal(4, 12), "attn.c_proj.weight": normal(4, 4)}
    path = saved(tmp_path, tensors)
    names = [("c_attn", "in_proj"), (r"in_proj[.]weight", "in_proj_weight"), ("c_proj", "out_proj")]

    def model() -> nnx.Dict:
        return nnx.Dict(attn=lm.LazyMultiHeadAttention(2, use_bias=False, rngs=nnx.Rngs(0)))

    assert refused(model(), path, rename=names) == ["attn.in_proj_weight", "attn.out_proj.weight"]
    assert refused(model(), path, rename=[Transpose("c_attn"), *names]) == ["attn.out_proj.weight"]
    loaded = model()
    lm.load(loaded, path, layout="torch", rename=[Transpose("c_attn|c_proj"), *names])
    assert np.array_equal(loaded["attn"].out.kernel[...], tensors["attn.c_proj.weight"].reshape(2, 2, 4))
    query = tensors["attn.c_attn.weight"][:, :4].reshape(4, 2, 2)
    assert np.array_equal(loaded["attn"].query.kernel[...], query)


def test_layers_that_are_stacked_for_a_scan(tmp_path: Path) -> None:
    class Block(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.c_attn, self.c_proj = (lm.LazyLinear(n, use_bias=False, rngs=rngs) for n in (12, 4))

    def model() -> nnx.Dict:
        return nnx.Dict(h=nnx.split_rngs(splits=2)(nnx.vmap(Block, axis_size=2))(nnx.Rngs(0)))

    tensors = {f"h.{i}.{n}.weight": normal(4, m) for i in range(2) for n, m in (("c_attn", 12), ("c_proj", 4))}
    path, stack = saved(tmp_path, tensors), lm.rules.Stack(r"h[.](\d+)[.]", into="h.")
    assert refused(model(), path, rename=[stack]) == ["h.c_attn.weight", "h.c_proj.weight"]
    assert refused(model(), path, rename=[Transpose("c_attn"), stack]) == ["h.c_proj.weight"]
    loaded = model()
    lm.load(loaded, path, layout="torch", rename=[Transpose("c_attn|c_proj"), stack])
    wanted = np.stack([tensors[f"h.{i}.c_proj.weight"] for i in range(2)])
    assert np.array_equal(loaded["h"].c_proj.kernel[...], wanted)


def test_square_matrices_of_other_kinds_are_not_in_doubt(tmp_path: Path) -> None:
    tensors = {f"enc.{i}.{n}.weight": normal(4, 4) for i in range(2) for n in ("q", "k")}
    path = saved(tmp_path, tensors | {"head.0.out.weight": normal(4, 7)})
    model = nnx.Dict(
        enc=nnx.List([nnx.Dict(q=linear(4), k=linear(4)) for _ in range(2)]),
        head=nnx.List([nnx.Dict(out=linear(7))]),
    )
    assert refused(model, path) == ["head.0.out.kernel"]  # of another shape, and no more
    lm.load(model, path, layout="torch", rename=[Transpose("head")])
    assert np.array_equal(model["enc"][1]["k"].kernel[...], tensors["enc.1.k.weight"].T)


def test_square_matrices_alone_are_those_of_linear(tmp_path: Path) -> None:
    model = nnx.Dict(c_proj=linear(4))
    assert repr(lm.load(model, saved(tmp_path, {"c_proj.weight": SQUARE}), layout="torch")) == (
        "<All keys matched successfully>"
    )
    assert np.array_equal(model["c_proj"].kernel[...], SQUARE.T)


# ---------------------------------------------------------------- queries, keys and values head by head

HEADS, SIZE, WIDTH = 2, 4, 8
FUSED = {
    "attn.query_key_value.weight": normal(3 * WIDTH, WIDTH),
    "attn.query_key_value.bias": normal(3 * WIDTH),
    "attn.dense.weight": normal(WIDTH, WIDTH),
    "attn.dense.bias": normal(WIDTH),
}
NAMES = [(r"query_key_value[.]", "in_proj_"), ("dense", "out_proj")]


def attention(heads: int = HEADS) -> nnx.Dict:
    return nnx.Dict(attn=lm.LazyMultiHeadAttention(heads, rngs=nnx.Rngs(0)))


def test_what_alternates_head_by_head_is_no_in_proj_weight(tmp_path: Path) -> None:
    path = saved(tmp_path, FUSED)
    assert refused(attention(), path, rename=NAMES) == ["attn.in_proj_bias", "attn.in_proj_weight"]
    with pytest.raises(lm.StateDictError) as caught:
        lm.load(attention(), path, layout="torch", rename=NAMES)
    assert str(caught.value.problems[1]) == (
        "attn.in_proj_weight (LazyMultiHeadAttention attn)\n"
        "  got:    f32[24,8], attn.query_key_value.weight of the file, where queries, keys and values alternate head "
        "by head\n"
        "  needed: all queries, then all keys, then all values, as in_proj_weight has them: the shape is the same\n"
        '  write:  rename=[lm.rules.Split("query_key_value", into=("q_proj", "k_proj", "v_proj"), groups=2), ...]  '
        "# in place of a rename to in_proj_weight"
    )


def test_the_line_that_it_gives_loads_them_right(tmp_path: Path) -> None:
    model = attention()
    rule = Split("query_key_value", into=("q_proj", "k_proj", "v_proj"), groups=HEADS)
    lm.load(model, saved(tmp_path, FUSED), layout="torch", rename=[rule, NAMES[1]])
    weights = FUSED["attn.query_key_value.weight"].reshape(HEADS, 3, SIZE, WIDTH)
    biases = FUSED["attn.query_key_value.bias"].reshape(HEADS, 3, SIZE)
    for i, name in enumerate(("query", "key", "value")):
        part = getattr(model["attn"], name)
        assert np.array_equal(part.kernel[...], weights[:, i].transpose(2, 0, 1))
        assert np.array_equal(part.bias[...], biases[:, i])


def test_thirds_and_one_head_are_taken(tmp_path: Path) -> None:
    thirds = {name.replace("query_key_value", "qkv"): value for name, value in FUSED.items()}
    model = attention()
    lm.load(model, saved(tmp_path, thirds), layout="torch", rename=[("qkv[.]", "in_proj_"), NAMES[1]])
    query = FUSED["attn.query_key_value.weight"][:WIDTH].reshape(HEADS, SIZE, WIDTH).transpose(2, 0, 1)
    assert np.array_equal(model["attn"].query.kernel[...], query)
    lm.load(attention(1), saved(tmp_path, FUSED), layout="torch", rename=NAMES)


# ---------------------------------------------------------------- the groups of CodeGen


def test_the_four_groups_of_codegen(tmp_path: Path) -> None:
    """Queries, values and keys in each group; other files have thirds under that name."""
    heads, width = 8, 16
    weight = normal(3 * width, width)
    others = {"h.0.attn.out_proj.weight": normal(width, width), "h.0.mlp.fc_in.weight": normal(32, width)}
    path = saved(tmp_path, {"h.0.attn.qkv_proj.weight": weight} | others)

    def model(*, mlp: bool = True) -> Any:
        attn = lm.LazyMultiHeadAttention(heads, decode=False, use_bias=False, rngs=nnx.Rngs(0))
        return nnx.Dict(h=nnx.List([nnx.Dict(attn=attn, **({"mlp": nnx.Dict(fc_in=linear(32))} if mlp else {}))]))

    with pytest.raises(lm.StateDictError) as caught:
        lm.load(model(), path, layout="torch", rename=[(r"qkv_proj[.]weight", "in_proj_weight")])
    (problem,) = caught.value.problems
    assert problem.write == (
        'rename=[lm.rules.Split("qkv_proj", into=("q_proj", "v_proj", "k_proj"), groups=4), ...]  # in place of a '
        "rename to in_proj_weight"
    )
    loaded = model()
    lm.load(loaded, path, layout="torch", rename=[Split("qkv_proj", into=("q_proj", "v_proj", "k_proj"), groups=4)])
    query, value, key = np.split(weight.reshape(4, 3 * width // 4, width), 3, axis=1)
    attn = loaded["h"][0]["attn"]
    for found, wanted in ((attn.query, query), (attn.key, key), (attn.value, value)):
        np.testing.assert_array_equal(found.kernel[...], wanted.reshape(width, width).T.reshape(width, heads, 2))
    del others["h.0.mlp.fc_in.weight"]  # as Phi-3
    path = saved(tmp_path, {"h.0.attn.qkv_proj.weight": weight} | others)
    lm.load(model(mlp=False), path, layout="torch", rename=[(r"qkv_proj[.]weight", "in_proj_weight")])
