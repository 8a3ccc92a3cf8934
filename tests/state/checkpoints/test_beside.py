"""What ``config.json`` beside a file says, and what a load leaves to chance: told, refused, or put right.

The numbers are those of PyTorch: ``tests/data/hf/llama_tied`` is a tiny random model as transformers 5.24 saves it, and
``llama_tied.io.npz`` has an input and its logits.
"""

import functools
import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

import lazymods as lm

DATA = Path(__file__).parents[2] / "data" / "hf"
WIDTH, VOCABULARY = 48, 101


def linear(features: int) -> Any:
    return lm.LazyLinear(features, use_bias=False, rngs=nnx.Rngs(0))


def rotated(x: jax.Array) -> jax.Array:
    half = x.shape[-1] // 2
    angles = np.arange(x.shape[1])[:, None] * 10000.0 ** (-np.arange(half) / half)
    cos, sin = (f(angles).astype(np.float32)[None, :, None] for f in (np.cos, np.sin))
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


class Attention(nnx.Module):
    def __init__(self, num_heads: int, num_kv_heads: int) -> None:
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.q_proj, self.k_proj, self.v_proj = linear(48), linear(24), linear(24)
        self.o_proj = linear(WIDTH)

    def __call__(self, x: jax.Array) -> jax.Array:
        heads = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (f(x).reshape(*x.shape[:2], n, -1) for f, n in zip(projections, heads, strict=True))
        y = jax.nn.dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
        return self.o_proj(y.reshape(*x.shape[:2], -1))


class MLP(nnx.Module):
    def __init__(self, act: Any) -> None:
        self.act_fn = act
        self.gate_proj, self.up_proj, self.down_proj = linear(80), linear(80), linear(WIDTH)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Block(nnx.Module):
    def __init__(self, heads: int, kv: int, epsilon: float, act: Any) -> None:
        self.self_attn, self.mlp = Attention(heads, kv), MLP(act)
        self.input_layernorm, self.post_attention_layernorm = (
            lm.LazyRMSNorm(epsilon=epsilon, rngs=nnx.Rngs(0)) for _ in range(2)
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nnx.Module):
    def __init__(
        self, heads: int = 4, kv: int = 2, epsilon: float = 1e-6, act: Any = jax.nn.silu, head: bool = False
    ) -> None:
        self.embed_tokens = lm.LazyEmbed(rngs=nnx.Rngs(0))
        self.layers = nnx.List([Block(heads, kv, epsilon, act) for _ in range(2)])
        self.norm = lm.LazyRMSNorm(epsilon=epsilon, rngs=nnx.Rngs(0))
        self.lm_head = linear(VOCABULARY) if head else None

    def __call__(self, ids: jax.Array) -> jax.Array:
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return (self.embed_tokens.attend if self.lm_head is None else self.lm_head)(self.norm(x))


def check_logits(model: Llama) -> None:
    given = np.load(DATA / "llama_tied.io.npz")
    out = jax.jit(model)(jnp.asarray(given["ids"], jnp.int32))
    assert np.abs(np.asarray(out) - given["out"]).max() < 1e-4 * max(1, np.abs(given["out"]).max())


def folder(tmp_path: Path, change: Callable[[dict[str, Any]], None] = lambda config: None) -> Path:
    """A copy of the folder, with another configuration."""
    shutil.copytree(DATA / "llama_tied", tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    change(config)
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    return tmp_path / "model"


# ---------------------------------------------------------------- the configuration


@pytest.mark.parametrize("path", ["llama_tied", "llama_tied/model.safetensors"])
def test_a_model_that_is_as_its_configuration_says(path: str) -> None:
    model = Llama()
    assert repr(lm.load(model, DATA / path, layout="torch")) == "<All keys matched successfully>"
    check_logits(model)


@pytest.mark.parametrize(
    ("heads", "kv", "got"),
    [(2, 2, ["num_heads=2"]), (4, 1, ["num_kv_heads=1"]), (8, 4, ["num_heads=8", "num_kv_heads=4"])],
)
def test_a_number_of_heads_that_divides_and_is_not_the_files(heads: int, kv: int, got: list[str]) -> None:
    model = Llama(heads, kv)
    with pytest.raises(lm.StateDictError) as caught:
        lm.load(model, DATA / "llama_tied", layout="torch")
    places = [f"layers.{i}.self_attn (Attention)" for i in range(2)]
    assert sorted((p.where, p.got) for p in caught.value.problems) == [(p, g) for p in places for g in got]
    assert lm.uninitialized_paths(model) == lm.uninitialized_paths(Llama(heads, kv))


def test_the_error_says_what_to_write() -> None:
    with pytest.raises(lm.StateDictError) as caught:
        lm.load(Llama(2).layers[0].self_attn, DATA / "llama_tied", layout="torch", rename=[
            (r"model[.]layers[.]0[.]self_attn[.]", ""), (r"^model", None)
        ])  # fmt: skip
    assert str(caught.value.problems[0]) == (
        "Attention\n"
        "  got:    num_heads=2\n"
        "  needed: 4, as config.json beside the file says (num_attention_heads): others see other parts of the "
        "features\n"
        "  write:  num_heads=4  # or the file in a folder without it, if it is not the file's"
    )


def test_heads_of_flax_of_a_config_object_and_of_a_width(tmp_path: Path) -> None:
    class Own(nnx.Module):
        def __init__(self, **attributes: Any) -> None:
            self.fc = linear(4)
            for name, value in attributes.items():
                setattr(self, name, value)

    eye = np.eye(4, dtype=np.float32)
    tensors = {"fc.weight": eye, "in_proj_weight": np.tile(eye, (3, 1)), "out_proj.weight": eye}
    save_file(tensors, tmp_path / "m.safetensors")
    config = {"model_type": "bert", "hidden_size": 4, "num_attention_heads": 4, "vision_config": {"num_heads": 1}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    told = []
    attention = functools.partial(lm.LazyMultiHeadAttention, use_bias=False, rngs=nnx.Rngs(0))
    for model, ignore in (
        (attention(2), "fc"),
        (attention(4), "fc"),
        (attention(1), "fc"),
        (Own(config={"n_head": 2}), "proj"),
        (Own(head_dim=2), "proj"),
        (Own(head_dim=1), "proj"),
        (Own(num_heads=True), "proj"),
    ):
        try:
            lm.load(model, tmp_path / "m.safetensors", layout="torch", ignore=ignore)
            told.append("")
        except lm.StateDictError as error:
            told.append(" ".join(sorted({p.got for p in error.problems})))
    assert told == ["num_heads=2", "", "", "config.n_head=2", "head_dim=2", "", ""]


def test_what_is_no_configuration_of_the_file_is_not_asked(tmp_path: Path) -> None:
    path = folder(tmp_path)
    lm.load(Llama(2), dict(lm.open(path)), layout="torch")
    for text in ("", "{", "[1]", "3", '{"heads_of": 4}', '{"attention_head_dim": 8, "_class_name": "Net"}'):
        (path / "config.json").write_text(text)
        model = Llama(2)
        lm.load(model, path, layout="torch")
        assert not lm.has_uninitialized_params(model)
    (path / "config.json").unlink()
    lm.load(Llama(2), path, layout="torch")


@pytest.mark.parametrize("more", [{}, {"model_type": 3}, {"architectures": ["Mine"]}], ids=str)
def test_fields_are_compared_without_a_type(tmp_path: Path, more: dict[str, Any]) -> None:
    """Not only transformers writes them."""

    def load(**says: Any) -> list[str]:
        (path / "config.json").write_text(json.dumps(says | more))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            lm.load(Llama(), path, layout="torch")
        return [str(warning.message) for warning in caught]

    path = folder(tmp_path)
    assert load(num_attention_heads=4, n_kv_heads=2, layer_norm_eps=1e-6, hidden_act="silu") == []
    for says, got in (
        ({"n_head": 8}, "num_heads=4"),
        ({"num_key_value_heads": 4}, "num_kv_heads=2"),
        ({"net": {"attention": {"num_heads": 8}}}, "num_heads=4"),
    ):
        with pytest.raises(lm.StateDictError, match=got):
            load(**says)
    assert load(net={"encoder": {"num_heads": 8}, "decoder": {"num_heads": 4}}) == []
    (told,) = load(rms_norm_eps=1e-3)
    assert "where config.json says rms_norm_eps=0.001" in told
    (told,) = load(hidden_act="gelu")
    assert "another function than hidden_act='gelu'" in told


def of_two(text: dict[str, Any], vision: dict[str, Any]) -> dict[str, Any]:
    text, vision = {"model_type": "mistral"} | text, {"model_type": "siglip_vision_model"} | vision
    return {"model_type": "gemma3", "text_config": text, "vision_config": vision}


QWEN = {"model_type": "qwen2_vl", "num_attention_heads": 4}
UNET = {"_class_name": "UNet2DConditionModel", "num_attention_heads": None}
SILENT: dict[str, dict[str, Any]] = {  # as published: of an inner model transformers writes no default of its type
    "heads": of_two({}, {"num_attention_heads": 8}),
    "kv": of_two({"num_attention_heads": 4, "num_key_value_heads": 1}, {"num_attention_heads": 2}),
    "kv, without a type": QWEN | {"num_key_value_heads": 1, "vision_config": {"num_heads": 2}},
    "widths": QWEN | {"hidden_size": 16, "vision_config": {"embed_dim": 4, "num_heads": 2, "hidden_size": 16}},
    "a width": of_two({"num_attention_heads": 2, "head_dim": 8}, {"num_attention_heads": 2, "hidden_size": 4}),
    "diffusers": UNET | {"addition_embed_type_num_heads": 64, "attention_head_dim": 2},
}


@pytest.mark.parametrize("name", SILENT)
def test_what_an_inner_configuration_leaves_to_its_type_is_not_known(tmp_path: Path, name: str) -> None:
    eye = np.eye(4, dtype=np.float32)
    save_file({"in_proj_weight": np.tile(eye, (3, 1)), "out_proj.weight": eye}, tmp_path / "m.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(SILENT[name]))
    ready = nnx.MultiHeadAttention(2, 4, use_bias=False, decode=False, rngs=nnx.Rngs(0))
    for model in (ready, lm.LazyMultiHeadAttention(2, use_bias=False, rngs=nnx.Rngs(0))):
        assert tuple(lm.load(model, tmp_path / "m.safetensors", layout="torch")) == ([], [], [])


def test_what_all_inner_configurations_say_is_compared(tmp_path: Path) -> None:
    eye = np.eye(4, dtype=np.float32)
    save_file({"in_proj_weight": np.tile(eye, (3, 1)), "out_proj.weight": eye}, tmp_path / "m.safetensors")
    config = of_two({"num_attention_heads": 4}, {"num_attention_heads": 1})
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(lm.StateDictError, match=r"num_heads=2\n  needed: 4 or 1, as config\.json"):
        attention = lm.LazyMultiHeadAttention(2, use_bias=False, rngs=nnx.Rngs(0))
        lm.load(attention, tmp_path / "m.safetensors", layout="torch")


def test_what_is_not_loaded_from_the_file_may_have_other_heads(tmp_path: Path) -> None:
    class Probe(nnx.Module):
        def __init__(self) -> None:
            self.model = Llama()
            self.pool = Attention(3, 3)

    lm.load(Probe(), DATA / "llama_tied", layout="torch", missing="^pool[.]")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"epsilon": 1e-5},
            "model.safetensors: layers.0.input_layernorm and 4 more: epsilon=1e-05, where config.json says "
            "rms_norm_eps=1e-06; write epsilon=1e-06",
        ),
        (
            {"act": jax.nn.gelu},
            "model.safetensors: layers.0.mlp.act_fn and 1 more: gelu, another function than hidden_act='silu' of "
            "config.json; write nnx.silu",
        ),
    ],
)
def test_another_epsilon_and_another_function_are_told(options: dict[str, Any], text: str) -> None:
    with pytest.warns(UserWarning) as caught:
        lm.load(Llama(**options), DATA / "llama_tied", layout="torch")
    assert [str(w.message) for w in caught] == [text]


def test_a_warning_that_is_an_error_undoes_the_load() -> None:
    model = Llama(epsilon=1e-5)
    with warnings.catch_warnings(), pytest.raises(UserWarning):
        warnings.simplefilter("error")
        lm.load(model, DATA / "llama_tied", layout="torch")
    assert lm.uninitialized_paths(model) == lm.uninitialized_paths(Llama())


GELU = functools.partial(jax.nn.gelu, approximate=False)


@pytest.mark.parametrize(
    ("said", "act", "fits"),
    [
        ("gelu", GELU, True),
        ("gelu", jax.nn.gelu, False),
        ("gelu", "gelu_new", False),
        ("gelu_new", jax.nn.gelu, True),
        ("gelu_pytorch_tanh", GELU, False),
        ("quick_gelu", lambda x: x * jax.nn.sigmoid(1.702 * x), True),
        ("quick_gelu", GELU, False),
        ("relu", jax.nn.relu, True),
        ("swish", "silu", True),
        ("an_own_one", jax.nn.relu, True),  # nobody knows
        ("relu", lambda x, y: x, True),  # no activation function
    ],
)
def test_activation_functions_are_told_by_their_values(tmp_path: Path, said: str, act: Any, fits: bool) -> None:
    path = folder(tmp_path, lambda config: config.update(hidden_act=said))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        lm.load(Llama(act=act), path, layout="torch")
    assert bool(caught) is not fits


def test_epsilons_are_those_of_the_norms_that_the_configuration_means(tmp_path: Path) -> None:
    ones = np.ones(4, np.float32)
    names = ("ln.weight", "ln.bias", "rms.weight", "gn.weight", "gn.bias")
    save_file(dict.fromkeys(names, ones), tmp_path / "m.safetensors")
    told = {}
    for config in (
        {"model_type": "bert", "layer_norm_eps": 1e-12},
        {"model_type": "t5", "layer_norm_epsilon": 1e-6},
        {"model_type": "x", "layer_norm_eps": 1e-5, "rms_norm_eps": 1e-6},
        {"model_type": "convnext", "layer_norm_eps": 1e-12},
        {"model_type": "clip", "text_config": {"layer_norm_eps": 1e-5}, "vision_config": {"layer_norm_eps": 1e-6}},
        {
            "model_type": "idefics3",  # layer_norm_eps of the images is left to its type
            "text_config": {"model_type": "llama", "rms_norm_eps": 1e-6},
            "vision_config": {"model_type": "idefics3_vision"},
        },
    ):
        (tmp_path / "config.json").write_text(json.dumps(config))
        model = nnx.Dict(
            ln=lm.LazyLayerNorm(epsilon=1e-5, rngs=nnx.Rngs(0)),
            rms=lm.LazyRMSNorm(epsilon=1e-6, rngs=nnx.Rngs(0)),
            gn=lm.LazyGroupNorm(num_groups=2, epsilon=1e-3, rngs=nnx.Rngs(0)),
        )
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            lm.load(model, tmp_path / "m.safetensors", layout="torch")
        told[config["model_type"]] = [str(w.message).partition(": ")[2].partition(":")[0] for w in caught]
    wanted = {"bert": ["ln", "rms"], "t5": ["ln"], "x": [], "convnext": [], "clip": [], "idefics3": []}
    assert told == wanted


@pytest.mark.parametrize("kind", ["gemma2", "llama", ["gemma2"]])
@pytest.mark.parametrize("rename", [[], [(r"^m[.]", "")]])
def test_scales_less_one_are_told(tmp_path: Path, kind: Any, rename: list[Any]) -> None:
    scales = np.random.default_rng(0).normal(size=(2, 3)).astype(np.float32)
    file = {"m.q_norm.weight": scales[0], "m.norm.weight": scales[1], "m.other.weight": scales[0]}
    save_file(file, tmp_path / "m.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "x", "text_config": {"model_type": kind}}))

    def made() -> Any:
        norms = {name: lm.LazyRMSNorm(rngs=nnx.Rngs(0)) for name in ("q_norm", "norm")}
        return nnx.Dict(**norms, other=nnx.Dict(weight=lm.UninitializedParameter()))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        lm.load(made(), tmp_path / "m.safetensors", layout="torch", rename=rename)
    texts = [str(w.message) for w in caught]
    line = 'rename=[lm.rules.Add(r"(^|[.])(q_norm|norm)[.]weight$", 1.0)]'
    told = "q_norm and 1 more: model_type='gemma2' of config.json adds 1 to the file's scale; write "
    assert texts == ([f"m.safetensors: {told}{line}"] if kind == "gemma2" else [])
    model, rules = made(), eval(f"dict({line})", {"lm": lm})["rename"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lm.load(model, tmp_path / "m.safetensors", layout="torch", rename=rename + rules)
    np.testing.assert_array_equal(model.norm.scale[...], scales[1] + 1)
    np.testing.assert_array_equal(model.other.weight[...], scales[0])


# ---------------------------------------------------------------- output layers


def test_a_tied_file_fills_the_output_layer_that_a_model_has_of_its_own() -> None:
    model = Llama(head=True)
    with pytest.warns(UserWarning) as caught:
        result = lm.load(model, DATA / "llama_tied", layout="torch")
    assert [str(w.message) for w in caught] == [
        "model.safetensors: lm_head.kernel and embed_tokens.embedding are one parameter in the file "
        "(tie_word_embeddings) and two in the model; both are filled, and will train apart. To use one for both: "
        "nnx.Embed.attend"
    ]
    assert result == ([], [], []) and result.matched["lm_head.kernel"] == ("model.embed_tokens.weight",)
    check_logits(model)
    written, file = lm.export_torch(model, like=result), load_file(DATA / "llama_tied" / "model.safetensors")
    assert written.keys() == file.keys() and all(np.array_equal(written[name], file[name]) for name in file)
    model.lm_head.kernel[...] += 1  # pyright: ignore[reportOptionalMemberAccess]
    with pytest.raises(lm.StateDictError, match="two parameters that differ now"):
        lm.export_torch(model, like=result)


def test_a_table_that_is_no_vocabulary_is_no_output_layer(tmp_path: Path) -> None:
    file = {"words.weight": np.ones((5, 4), np.float32), "places.weight": np.ones((3, 4), np.float32)}
    save_file(file, tmp_path / "m.safetensors")
    config = {"model_type": "x", "tie_word_embeddings": True, "vocab_size": 5}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tables = {"words": lm.LazyEmbed(rngs=nnx.Rngs(0)), "places": lm.LazyEmbed(rngs=nnx.Rngs(0))}
    with pytest.raises(lm.StateDictError) as caught:
        lm.load(nnx.Dict(**tables, score=linear(3)), tmp_path / "m.safetensors", layout="torch")
    assert caught.value.missing == ["score.kernel"]
    model = nnx.Dict(**tables, score=linear(5))
    with pytest.warns(UserWarning, match="score.kernel and words.embedding are one parameter in the file"):
        lm.load(model, tmp_path / "m.safetensors", layout="torch")


@pytest.mark.parametrize("name", ["wpe", "pos_emb", "embed_positions", "token_type_embeddings", "rel_embeddings"])
@pytest.mark.parametrize("config", [None, {"tie_word_embeddings": True}])
def test_a_table_of_positions_is_no_output_layer_by_its_name(tmp_path: Path, name: str, config: Any) -> None:
    save_file({f"m.{name}.weight": np.ones((3, 4), np.float32)}, tmp_path / "m.safetensors")
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    table = nnx.Dict({name: lm.LazyEmbed(rngs=nnx.Rngs(0))})
    with pytest.raises(lm.StateDictError) as caught:
        lm.load(nnx.Dict(m=table, score=linear(3)), tmp_path / "m.safetensors", layout="torch")
    assert caught.value.missing == ["score.kernel"] and "Copy" not in str(caught.value)


def test_without_that_word_the_line_to_write_is_told(tmp_path: Path) -> None:
    path = folder(tmp_path, lambda config: config.pop("tie_word_embeddings"))
    with pytest.raises(lm.StateDictError) as caught:
        lm.load(Llama(head=True), path, layout="torch")
    assert [str(p) for p in caught.value.problems] == [
        "lm_head.kernel\n"
        "  got:    no output layer in the file, whose embedding (embed_tokens.embedding) fits it: they are tied there\n"
        "  needed: an entry for each parameter of the model\n"
        '  write:  rename=[lm.rules.Copy(r"embed_tokens[.]weight$", '
        'into="lm_head.weight")]  # for both; or embed_tokens.attend(x) in its place'
    ]
    with pytest.warns(UserWarning, match="lm_head.kernel is left as it is: no output layer in the file"):
        assert lm.load(Llama(head=True), path, layout="torch", strict=False).missing == ["lm_head.kernel"]
    model = Llama(head=True)
    copied = lm.rules.Copy(r"^model[.]embed_tokens[.]weight$", into="lm_head.weight")
    lm.load(model, path, layout="torch", rename=[copied, (r"^model[.]", "")])
    check_logits(model)
    lm.load(Llama(head=True), path, layout="torch", missing="lm_head")  # nothing is told: it is asked for


def test_an_output_layer_of_the_file_is_not_dropped_in_silence(tmp_path: Path) -> None:
    table = np.arange(12, dtype=np.float32).reshape(4, 3)
    save_file({"embed.weight": table, "head.weight": table + 1}, tmp_path / "untied.safetensors")
    save_file({"embed.weight": table, "head.weight": table}, tmp_path / "both.safetensors")
    model = nnx.Dict(embed=lm.LazyEmbed(rngs=nnx.Rngs(0)), other=linear(2))
    told = {}
    for name in ("untied", "both"):
        with pytest.raises(lm.StateDictError) as caught:
            lm.load(model, tmp_path / f"{name}.safetensors", layout="torch", missing="other")
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            lm.load(model, tmp_path / f"{name}.safetensors", layout="torch", strict=False)
        told[name] = (caught.value.problems[0].write, len(warned))
    assert told == {
        "untied": ("lm.LazyLinear(..., use_bias=False)  # for it", 1),
        "both": ('ignore=r"^head[.]"  # leaves it out', 0),
    }


def test_statistics_that_a_file_does_not_have(tmp_path: Path) -> None:
    ones = np.ones(4, np.float32)
    save_file({"bn.weight": ones, "bn.bias": ones}, tmp_path / "m.safetensors")
    model = nnx.Dict(bn=lm.LazyBatchNorm(rngs=nnx.Rngs(0)))
    with pytest.raises(lm.StateDictError) as caught:
        lm.load(model, tmp_path / "m.safetensors", layout="torch")
    line = "strict=False  # and use_running_average=False: such a layer always normalizes by its batch"
    assert [(p.where, p.write) for p in caught.value.problems] == [("bn.mean", line), ("bn.var", line)]
    with pytest.warns(UserWarning) as warned:
        lm.load(model, tmp_path / "m.safetensors", layout="torch", strict=False)
    assert sorted(str(w.message).split()[1] for w in warned) == ["bn.mean", "bn.var"]
    with pytest.raises(lm.StateDictError) as caught:  # the file has other names: nobody knows what it tracks
        other = nnx.Dict(bn=lm.LazyBatchNorm(rngs=nnx.Rngs(0)))
        lm.load(other, {"norm_1.weight": ones, "norm_1.bias": ones}, layout="torch")
    assert not any("track_running_stats" in p.got for p in caught.value.problems)
