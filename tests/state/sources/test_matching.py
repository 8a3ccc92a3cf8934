"""Which of a file's names are a model's: prefixes, stacked recurrent layers, buffers, adapters; and what is told."""

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

import lazymods as lm
from lazymods import rules

R = nnx.Rngs
RNG = np.random.default_rng(1)
F32 = np.float32


def linear(size: int = 4) -> Any:
    return lm.LazyLinear(size, use_bias=False, rngs=R(0))


def weight(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape or (4, 4)).astype(F32)


def load(model: Any, arrays: dict[str, Any], **options: Any) -> lm.LoadResult:
    return lm.load(model, arrays, **{"layout": "torch", **options})


def kernel(model: Any, name: str) -> np.ndarray:
    return np.asarray(lm.state_dict(model)[name])


def body(count: int = 2) -> Any:
    return nnx.List([nnx.Dict(q=linear(), up=linear()) for _ in range(count)])


def body_arrays(prefix: str, count: int = 2) -> dict[str, np.ndarray]:
    return {f"{prefix}{i}.{n}.weight": weight() for i in range(count) for n in ("q", "up")}


# ---------------------------------------------------------------- prefixes

MODELS: dict[str, Callable[[], Any]] = {
    "flat": lambda: nnx.Dict(layers=body(), norm=lm.LazyRMSNorm(rngs=R(0))),
    "with a head": lambda: nnx.Dict(layers=body(), norm=lm.LazyRMSNorm(rngs=R(0)), head=linear()),
    "in a child": lambda: nnx.Dict(inner=MODELS["flat"](), head=linear()),
    "a child of that name": lambda: nnx.Dict(bert=MODELS["flat"](), head=linear()),
}


PREFIXES = ("", "bert.", "vit.encoder.", "module.backbone.")
READINGS = [(which, prefix) for which in ("flat", "with a head") for prefix in PREFIXES]
READINGS += [("in a child", ""), ("a child of that name", ""), ("a child of that name", "bert.")]


@pytest.mark.parametrize("rename", [None, [], [("^nothing", "x")]], ids=["none", "empty", "unused"])
@pytest.mark.parametrize(("which", "prefix"), READINGS)
def test_any_one_prefix(which: str, prefix: str, rename: Any) -> None:
    model = MODELS[which]()
    arrays = body_arrays(f"{prefix}layers.") | {f"{prefix}norm.weight": weight(4)}
    if which != "flat":
        arrays["head.weight" if prefix != "module.backbone." else "module.head.weight"] = weight()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if rename else "error")
        result = load(model, arrays, rename=rename)
    assert tuple(result) == ([], [], [])
    inside = {"in a child": "inner.", "a child of that name": "bert."}.get(which, "")
    for name, value in arrays.items():
        if name.endswith("q.weight"):
            new = inside + name.removeprefix(prefix).replace("weight", "kernel")
            np.testing.assert_array_equal(kernel(model, new), value.T)
            assert result.matched[new] == (name,)
    assert set(lm.export_torch(model, like=result)) == set(arrays)


@pytest.mark.parametrize("prefix", ["encoder.", "vision.encoder."])
def test_one_prefix_never_stands_for_another(prefix: str) -> None:
    """An encoder's weights would fit a decoder of its shapes."""
    with pytest.raises(lm.StateDictError, match="that the model has no parameter for"):
        load(nnx.Dict(decoder=nnx.Dict(layers=body())), body_arrays(f"{prefix}layers."))


def test_two_prefixes_that_would_do_are_left_to_the_user() -> None:
    arrays = body_arrays("text.layers.") | body_arrays("vision.layers.")
    model = nnx.Dict(layers=body())
    with pytest.raises(lm.StateDictError):
        load(model, arrays)
    result = load(model, arrays, root="vision")
    np.testing.assert_array_equal(kernel(model, "layers.1.q.kernel"), arrays["vision.layers.1.q.weight"].T)
    assert result.root == "vision"
    assert result.matched["layers.1.q.kernel"] == ("vision.layers.1.q.weight",)


def test_a_prefix_never_takes_another_entry_s_place() -> None:
    arrays = {"fc.weight": weight(), "old.fc.weight": weight()}
    model = nnx.Dict(fc=linear())
    result = load(model, arrays, strict=False)
    assert result.unexpected == ["old.fc.weight"]
    np.testing.assert_array_equal(kernel(model, "fc.kernel"), arrays["fc.weight"].T)


def test_a_root_that_is_not_there() -> None:
    with pytest.raises(lm.CheckpointError, match="no entries below 'ema', but below a, b"):
        load(nnx.Dict(fc=linear()), {"a.fc.weight": weight(), "b.fc.weight": weight()}, root="ema")


def test_a_root_of_a_file_with_ties(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="torch is an extra")
    shared = torch.ones(4, 4)
    torch.save({"ema": {"a.weight": shared, "b.weight": shared}, "model": {"a.weight": shared * 2}}, tmp_path / "m.pt")
    model = nnx.Dict(a=linear(), b=linear())
    with pytest.warns(UserWarning, match="a and b|are one parameter in the file"):
        result = lm.load(model, tmp_path / "m.pt", layout="torch", root="ema")
    assert result.root == "ema" and "beside model" in repr(result)

STUDENT = {"fc.weight": weight(4, 4), "out.weight": weight(4, 4)}
TEACHER = {name: weight(*value.shape) for name, value in STUDENT.items()}


def student() -> Any:
    return nnx.Dict(fc=lm.LazyLinear(4, rngs=R(0)), out=linear())


@pytest.mark.parametrize("layout", ["torch", "flax"])
@pytest.mark.parametrize("options", [{}, {"ignore": "^teacher"}, {"ignore": "^teacher", "missing": "fc.bias"}], ids=str)
def test_another_module_of_the_file_gives_nothing_to_one_that_has_entries(layout: str, options: dict[str, Any]) -> None:
    teacher = TEACHER | {"fc.bias": weight(4)}
    given = STUDENT | {f"teacher.{name}": value for name, value in teacher.items()}
    if layout == "flax":
        given = {name.replace("weight", "kernel"): value for name, value in given.items()}
    model = student()
    if "missing" in options:
        assert lm.load(model, given, layout=layout, **options).missing == ["fc.bias"]
        assert not model["fc"].bias[...].any()
        return
    with pytest.raises(lm.StateDictError, match=r"fc\.bias\n  got:    no entry in the mapping"):
        lm.load(model, given, layout=layout, **options)


@pytest.mark.parametrize("name", ["bias", "weight"])
def test_an_entry_of_the_root_is_no_module_s(name: str) -> None:
    model = nnx.Dict(fc=lm.LazyLinear(4, rngs=R(0)), norm=lm.LazyRMSNorm(rngs=R(0)))
    given = {"fc.weight": weight(4, 4), "fc.bias": weight(4), "norm.weight": weight(4)}
    del given[{"bias": "fc.bias", "weight": "norm.weight"}[name]]
    with pytest.raises(lm.StateDictError) as caught:
        load(model, given | {name: weight(4)})
    assert caught.value.unexpected == [name]


def test_what_a_prefix_does_not_bring_to_a_place_keeps_its_name() -> None:
    arrays = body_arrays("bert.layers.") | {"bert.norm.weight": weight(4), "loss": weight(1)}
    arrays["bert.pooler.x"] = weight(2)
    result = load(MODELS["flat"](), arrays, strict=False)
    assert (result.missing, sorted(result.unexpected)) == ([], ["bert.pooler.x", "loss"])


def test_a_weight_normed_layer_that_is_the_model() -> None:
    model = nnx.WeightNorm(nnx.Linear(6, 4, rngs=R(0)), rngs=R(0))
    given = {
        "parametrizations.weight.original0": weight(4, 1),
        "parametrizations.weight.original1": weight(4, 6),
        "bias": weight(4),
    }
    load(model, given)
    v = given["parametrizations.weight.original1"]
    x = weight(2, 6)
    want = x @ (given["parametrizations.weight.original0"] * v / np.linalg.norm(v, axis=1, keepdims=True)).T
    np.testing.assert_allclose(np.asarray(model(x)), want + given["bias"], rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------- names in modules


@pytest.mark.parametrize("new", [("gamma", "beta"), ("weight", "bias")])
def test_a_norm_s_words(new: tuple[str, str]) -> None:
    model = nnx.Dict(LayerNorm=lm.LazyLayerNorm(rngs=R(0)))
    scale, bias = weight(4), weight(4)
    result = load(model, {f"LayerNorm.{new[0]}": scale, f"LayerNorm.{new[1]}": bias})
    np.testing.assert_array_equal(kernel(model, "LayerNorm.scale"), scale)
    np.testing.assert_array_equal(kernel(model, "LayerNorm.bias"), bias)
    assert set(lm.export_torch(model, like=result)) == {f"LayerNorm.{n}" for n in new}


@pytest.mark.parametrize("both_ways", [False, True])
@pytest.mark.parametrize("between", [False, True])
@pytest.mark.parametrize("prefix", ["", "lstm.", "net.lstm."])
def test_stacked_recurrent_layers(prefix: str, between: bool, both_ways: bool) -> None:
    torch = pytest.importorskip("torch", reason="torch is an extra")
    net = torch.nn.LSTM(3, 4, 3, bidirectional=both_ways, batch_first=True)

    def layer() -> Any:
        one, other = (nnx.RNN(lm.LazyOptimizedLSTMCell(4, rngs=R(0))) for _ in range(2))
        return nnx.Bidirectional(one, other, rngs=R(0)) if both_ways else one

    layers = [layer() for _ in range(3)]
    stack = nnx.Sequential(layers[0], np.tanh, layers[1], layers[2]) if between else nnx.List(layers)
    model = nnx.Dict(lstm=stack) if prefix == "lstm." else nnx.Dict(net=nnx.Dict(lstm=stack)) if prefix else stack
    if not prefix and not between:
        model = nnx.Sequential(*layers)
    arrays = {prefix + name: value.detach().numpy() for name, value in net.state_dict().items()}
    result = load(model, arrays)
    assert tuple(result) == ([], [], [])
    x = np.asarray(weight(2, 5, 3))
    want = net(torch.from_numpy(x))[0].detach().numpy()
    got: Any = x
    for one in layers:
        got = one(got)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------- buffers, ignore, missing

MASK = np.tril(np.ones((1, 1, 6, 6), F32))
BUFFERS: dict[str, np.ndarray] = {
    "h.attn.bias": MASK,
    "h.attn.masked_bias": np.array(-1e4, F32),
    "h.mask": np.triu(np.full((6, 6), -np.inf, F32), 1),
    "embeddings.position_ids": np.arange(6)[None],
    "embeddings.token_type_ids": np.zeros((1, 6), np.int64),
    "rotary.inv_freq": np.ones(3, F32),
    "bn.num_batches_tracked": np.array(3),
    "blocks.1.attn_mask": np.where(weight(4, 3, 3) > 0, F32(-100), F32(0)),  # of Swin
    "attn.relative_coords_table": weight(1, 5, 5, 2),
}


@pytest.mark.parametrize("name", BUFFERS)
def test_known_buffers_are_ignored_and_said(name: str) -> None:
    model = nnx.Dict(fc=linear())
    result = load(model, {"fc.weight": weight(), name: BUFFERS[name]})
    assert result.ignored == [name] and tuple(result) == ([], [], [])
    assert f"ignored {name}" in repr(result)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("h.attn.bias", MASK + weight(6, 6)[None, None]),
        ("h.attn.bias", weight(6)),
        ("h.attn_mask", weight(4, 3, 3)),
        ("embeddings.position_ids", np.arange(6)[None] + 1),
        ("embeddings.position_ids", weight(1, 6)),
        ("h.masked_bias", weight(3)),
    ],
)
def test_what_is_called_as_a_buffer_and_is_none(name: str, value: np.ndarray) -> None:
    with pytest.raises(lm.StateDictError, match=name):
        load(nnx.Dict(fc=linear()), {"fc.weight": weight(), name: value})


def test_a_buffer_that_the_model_has_is_loaded() -> None:
    model = nnx.Dict(fc=linear())
    model.inv_freq = nnx.BatchStat(np.zeros(3, F32))
    result = load(model, {"fc.weight": weight(), "inv_freq": np.ones(3, F32)})
    assert result.ignored == []
    np.testing.assert_array_equal(kernel(model, "inv_freq"), np.ones(3))


def test_ignore_and_missing_take_patterns() -> None:
    model = nnx.Dict(fc=linear(), head=nnx.Linear(4, 2, rngs=R(0)), other=linear())
    arrays = {"fc.weight": weight(), "pooler.dense.weight": weight(), "pooler.dense.bias": weight(4)}
    with pytest.raises(lm.StateDictError) as caught:
        load(model, arrays, ignore="pooler", missing=["^head"])
    assert list(caught.value.missing) == ["head.kernel", "head.bias", "other.kernel"]
    assert [problem.where for problem in caught.value.problems] == ["other.kernel"]
    before = kernel(model, "head.kernel")
    result = load(model, arrays, ignore=["dense[.]weight", "dense[.]bias"], missing=["^head", "^other"])
    assert result.ignored == ["pooler.dense.weight", "pooler.dense.bias"]
    assert (result.missing, result.unexpected) == (["head.kernel", "head.bias", "other.kernel"], [])
    np.testing.assert_array_equal(kernel(model, "head.kernel"), before)
    assert lm.is_lazy(model.other)


def test_ignore_takes_no_entry_that_has_a_place() -> None:
    model = nnx.Dict(fc=linear())
    result = load(model, {"fc.weight": weight()}, ignore=".")
    assert result.ignored == [] and list(result.matched) == ["fc.kernel"]


@pytest.mark.parametrize("name", ["ignore", "missing"])
def test_what_is_no_pattern(name: str) -> None:
    with pytest.raises(lm.ArgumentError, match=f"lm.load: {name}\n  got:    3\n  needed: a regular expression"):
        load(linear(), {"weight": weight()}, **{name: [3]})


# ---------------------------------------------------------------- what a rename has to say

UNUSED = [
    ({"weigth": None}, "'weigth': None"),
    ([("^weigth$", "weight")], r"('^weigth$', 'weight')"),
    ([("inv_freq", None)], "('inv_freq', None)"),
    (rules.Transpose("c_attn"), "Transpose(pattern='c_attn', axes=None)"),
    ([rules.Stack(r"layers[.](\d+)", into="layers")], r"Stack(pattern='layers[.](\\d+)', into='layers', axis=0)"),
]


@pytest.mark.parametrize(("rename", "text"), UNUSED, ids=[text for _, text in UNUSED])
def test_a_part_of_a_rename_that_fits_nothing_is_told(rename: Any, text: str) -> None:
    with pytest.warns(UserWarning, match="the mapping: nothing fits") as caught:
        load(linear(), {"weight": weight()}, rename=rename)
    assert text in str(caught[0].message)
    with pytest.raises(lm.StateDictError) as error:
        load(nnx.Dict(fc=linear()), {"weight": weight(), "x": weight()}, rename=rename)
    assert f"\n  note:   nothing of the file fits {text}, of rename" in str(error.value)


def test_a_warning_that_is_an_error_loads_nothing() -> None:
    layer = linear()
    with warnings.catch_warnings(), pytest.raises(UserWarning, match="nothing fits"):
        warnings.simplefilter("error")
        load(layer, {"weight": weight()}, rename={"x": None})
    assert lm.is_lazy(layer)


@pytest.mark.parametrize(
    ("rename", "by"),
    [
        ([("attn[.]bias$", None)], "('attn[.]bias$', None)"),
        ({"c_attn.bias": None}, "'c_attn.bias': None"),
        (lambda n: None if n.endswith("bias") else n, "the function"),
    ],
    ids=["pairs", "mapping", "function"],
)
def test_what_a_rename_drops_and_the_model_misses(rename: Any, by: str) -> None:
    model = nnx.Dict(c_attn=lm.LazyLinear(4, rngs=R(0)))
    arrays = {"c_attn.weight": weight(), "c_attn.bias": weight(4)}
    with pytest.raises(lm.StateDictError) as caught:
        load(model, arrays, rename=rename)
    assert str(caught.value).splitlines()[1:] == [
        "c_attn.bias",
        f"  got:    no entry: {by} of rename has dropped c_attn.bias of the mapping",
        "  needed: an entry for each parameter of the model",
        "  write:  rename=[(r'^model[.]head', None)]  # a narrower pattern",
    ]
    with pytest.warns(UserWarning, match="has dropped c_attn.bias, and the model has no c_attn.bias now"):
        load(model, arrays, rename=rename, strict=False)


RULES_THAT_FAIL = {
    "an axis that can't be cut": (
        rules.Split("^w", into=("a", "b")),
        {"w": weight(5, 2)},
        "an axis of length 5",
    ),
    "groups that don't fit": (
        rules.Split("^w", into=("a", "b"), groups=4),
        {"w": weight(4, 2)},
        "one that can be cut into 4 groups of parts as 1 : 1",
    ),
    "no such axis": (rules.Split("^w", into=("a", "b"), axis=2), {"w": weight(4, 2)}, "an axis 2"),
    "axes of another rank": (rules.Transpose("^w", (0, 2, 1)), {"w": weight(4, 2)}, "with the axes (0, 2, 1)"),
    "another number of elements": (rules.Reshape("^w", (3, -1)), {"w": weight(4, 2)}, "as many numbers as (3, -1) has"),
    "whole numbers": (rules.Add("^w", 1.0), {"w": np.arange(3)}, "floating-point numbers"),
    "a part that is missing": (rules.Merge(("^q", "^k"), into="w"), {"q": weight()}, "only q: nothing for ^k"),
    "parts that differ": (
        rules.Merge(("^q", "^k"), into="w"),
        {"q": weight(4, 2), "k": weight(4, 3)},
        "f32[4,2] beside f32[4,3]",
    ),
    "a number that is missing": (
        rules.Stack(r"l(\d)", into="l"),
        {"l0": weight(), "l2": weight()},
        "the numbers 0, 2, which are not all from 0 on",
    ),
    "layers that differ": (
        rules.Stack(r"l(\d)", into="l"),
        {"l0": weight(), "l1": weight(4, 3)},
        "f32[4,4] and f32[4,3]",
    ),
    "no number": (rules.Stack(r"l(.)", into="l"), {"lx": weight()}, "'x', where the first group is a number"),
    "no scale": (rules.Dequantize("^w$", scale="s", into="w"), {"w": np.ones(3, np.int8)}, "no entry s beside it"),
    "a scale of another shape": (
        rules.Dequantize("^w$", scale="s", into="w"),
        {"w": np.ones((4, 4), np.int8), "s": weight(3)},
        "s of shape (3,) for a weight of shape (4, 4)",
    ),
    "two that become one": (
        [("^a", "w"), ("^b", "w")],
        {"a": weight(), "b": weight()},
        "two entries of the file, a and b",
    ),
}


@pytest.mark.parametrize("name", RULES_THAT_FAIL)
def test_what_a_rule_cannot_do_is_told_and_nothing_is_loaded(name: str) -> None:
    rename, arrays, text = RULES_THAT_FAIL[name]
    model = nnx.Dict(fc=linear())
    with pytest.raises(lm.StateDictError) as caught:
        load(model, arrays | {"fc.weight": weight()}, rename=rename, strict=False)
    assert text in str(caught.value)
    assert lm.has_uninitialized_params(model)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: rules.Split("x", into=("a",)), "two or more"),
        (lambda: rules.Split("x", into="ab"), "two or more"),  # type: ignore[arg-type]
        (lambda: rules.Split("x", into=("a", "b"), ratio=(1, 2, 3)), "ratio is 2 positive whole numbers"),
        (lambda: rules.Split("x", into=("a", "b"), ratio=(1, 0)), "ratio is positive whole numbers"),
        (lambda: rules.Split("x", into=("a", "b"), groups=0), "groups is positive whole numbers"),
        (lambda: rules.Merge(("a", "b"), into="x", groups=-1), "groups is positive whole numbers"),
        (lambda: rules.Stack("x", into="y"), "has a group for the number"),
        (lambda: rules.Unstack("x", into="y"), r"into has \{i\} for the number"),
        (lambda: rules.Dequantize("x", scale=r"\2", into="y"), "invalid group reference 2"),
        (lambda: rules.Dequantize("x", scale="s", into="y", axis="0"), "axis is whole numbers"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_rule(make: Callable[[], Any], text: str) -> None:
    with pytest.raises(lm.ArgumentError, match=text):
        make()


# ---------------------------------------------------------------- adapters

A, B = weight(2, 3), weight(4, 2)


def adapter(folder: Path, config: dict[str, Any] | None, style: str) -> Path:
    names = {"PEFT": "base_model.model.q_proj.{}.weight", "with the adapter's name": "q_proj.{}.default.weight"}[style]
    base = names.format("base_layer").replace(".default", "")
    arrays = {names.format("lora_A"): A, names.format("lora_B"): B, base: weight(4, 3)}
    save_file(arrays, folder / "adapter_model.safetensors")
    if config is not None:
        (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("style", ["PEFT", "with the adapter's name"])
@pytest.mark.parametrize("config", [None, {"r": 2, "lora_alpha": 8}, {"r": 2, "lora_alpha": 8, "use_rslora": True}])
@pytest.mark.parametrize("kind", ["LoRALinear", "LoRA"])
def test_adapters(tmp_path: Path, kind: str, config: dict[str, Any] | None, style: str) -> None:
    if kind == "LoRA":
        layer: Any = lm.LazyLoRA(2, 4, base_module=linear(), rngs=R(0))
    else:
        layer = lm.LazyLoRALinear(4, lora_rank=2, use_bias=False, rngs=R(0))
    model = nnx.Dict(q_proj=layer)
    path = adapter(tmp_path, config, style)
    result = lm.load(model, path, layout="torch")
    assert tuple(result) == ([], [], [])
    factor = 1 if config is None else 8 / np.sqrt(2) if config.get("use_rslora") else 4
    lora = layer if kind == "LoRA" else layer.lora
    np.testing.assert_array_equal(lora.lora_a[...], A.T)
    np.testing.assert_allclose(lora.lora_b[...], B.T * F32(factor), rtol=1e-6)
    assert ("no adapter_config.json tells lora_alpha" in repr(result)) == (config is None)
    out = lm.export_torch(model, like=result)
    with lm.open(path) as opened:
        assert set(out) == set(opened)
        for name, value in opened.items():
            np.testing.assert_allclose(out[name], value, rtol=1e-6)


@pytest.mark.parametrize("rank", [2, 4])
def test_adapters_that_a_rename_gives_flax_s_names(rank: int) -> None:
    """They lie as PEFT has them; where the rank is the width, nothing else would tell."""
    first, second = weight(rank, 4), weight(4, rank)
    pairs = [("lora_A.weight", "lora.lora_a"), ("lora_B.weight", "lora.lora_b"), ("base_layer.", "")]
    arrays = {"q.lora_A.weight": first, "q.lora_B.weight": second, "q.base_layer.weight": weight()}
    model = nnx.Dict(q=lm.LazyLoRALinear(4, lora_rank=rank, use_bias=False, rngs=R(0)))
    result = load(model, arrays, rename=pairs)
    np.testing.assert_array_equal(kernel(model, "q.lora.lora_a"), first.T)
    np.testing.assert_array_equal(kernel(model, "q.lora.lora_b"), second.T)
    assert set(lm.export_torch(model, like=result)) == set(arrays)


def test_an_adapter_whose_configuration_cannot_be_followed(tmp_path: Path) -> None:
    model = nnx.Dict(q_proj=lm.LazyLoRALinear(4, lora_rank=2, use_bias=False, rngs=R(0)))
    for config, text in (
        ({"r": 2, "lora_alpha": 8, "alpha_pattern": {"q": 4}}, "a rank or lora_alpha for single modules"),
        ({"r": 0, "lora_alpha": 8}, "r=0, lora_alpha=8"),
        ({"r": 2}, "r=2, lora_alpha=None"),
    ):
        with pytest.raises(lm.CheckpointError, match=text):
            lm.load(model, adapter(tmp_path, config, "PEFT"), layout="torch")
