"""``export_torch(model, like=result)``: PyTorch's strict ``load_state_dict`` takes what a load's way back gives."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import lazymods as lm
from lazymods import rules

torch = pytest.importorskip("torch", reason="torch writes the files and takes them back")

R = nnx.Rngs


def linear(size: int, bias: bool = True) -> Any:
    return lm.LazyLinear(size, use_bias=bias, rngs=R(0))


def lstm() -> Any:
    return nnx.RNN(lm.LazyOptimizedLSTMCell(4, rngs=R(0)))


def both_ways() -> Any:
    return nnx.Bidirectional(lstm(), lstm(), rngs=R(0))


def attention(heads: int = 2) -> Any:
    return lm.LazyMultiHeadAttention(heads, decode=False, rngs=R(0))


class Projections(torch.nn.Module):
    """As most published transformers have them: layers of their own."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        for name in names:
            setattr(self, name, torch.nn.Linear(6, 6))


def named(**modules: Any) -> Any:
    return torch.nn.ModuleDict(modules)


def normed(new: bool) -> Any:
    norm = torch.nn.utils.parametrizations.weight_norm if new else torch.nn.utils.weight_norm
    return norm(torch.nn.Conv1d(3, 4, 2))


CASES: dict[str, tuple[Callable[[], Any], Callable[[], Any], Any]] = {
    "Sequential": (
        lambda: torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2)),
        lambda: nnx.Sequential(linear(4), nnx.relu, linear(2)),
        None,
    ),
    "a prefix": (
        lambda: named(bert=named(fc=torch.nn.Linear(3, 4)), head=torch.nn.Linear(4, 2)),
        lambda: nnx.Dict(fc=linear(4), head=linear(2)),
        None,
    ),
    "a prefix of the model's": (
        lambda: named(fc=torch.nn.Linear(3, 4), head=torch.nn.Linear(4, 2)),
        lambda: nnx.Dict(body=nnx.Dict(fc=linear(4)), head=linear(2)),
        None,
    ),
    "fused attention": (
        lambda: named(a=torch.nn.MultiheadAttention(6, 2)),
        lambda: nnx.Dict(a=attention()),
        None,
    ),
    "attention of layers": (
        lambda: named(a=Projections("q_proj", "k_proj", "v_proj", "out_proj")),
        lambda: nnx.Dict(a=attention()),
        None,
    ),
    "attention of layers, o_proj": (
        lambda: named(a=Projections("q_proj", "k_proj", "v_proj", "o_proj")),
        lambda: nnx.Dict(a=attention()),
        None,
    ),
    "attention by Flax's words": (
        lambda: named(a=Projections("query", "key", "value", "out")),
        lambda: nnx.Dict(a=attention()),
        None,
    ),
    "stacked LSTM": (
        lambda: named(lstm=torch.nn.LSTM(3, 4, 2)),
        lambda: nnx.Dict(lstm=nnx.List([lstm(), lstm()])),
        None,
    ),
    "LSTM without biases, both ways": (
        lambda: named(lstm=torch.nn.LSTM(3, 4, 2, bias=False, bidirectional=True)),
        lambda: nnx.Dict(lstm=nnx.Sequential(both_ways(), both_ways())),
        None,
    ),
    "BatchNorm": (
        lambda: torch.nn.Sequential(torch.nn.Conv2d(3, 4, 2), torch.nn.BatchNorm2d(4)),
        lambda: nnx.Sequential(lm.LazyConv2d(4, (2, 2), rngs=R(0)), lm.LazyBatchNorm2d(rngs=R(0))),
        None,
    ),
    "weight norm": (lambda: named(c=normed(True)), lambda: nnx.Dict(c=lm.LazyConv1d(4, 2, rngs=R(0))), None),
    "bfloat16": (
        lambda: named(fc=torch.nn.Linear(3, 4)).bfloat16(),
        lambda: nnx.Dict(fc=linear(4)),
        None,
    ),
    "a rename, and a fused projection": (
        lambda: named(block=named(qkv=torch.nn.Linear(6, 18), proj=torch.nn.Linear(6, 6))),
        lambda: nnx.Dict(attn=nnx.Dict(q=linear(6), k=linear(6), v=linear(6)), proj=linear(6)),
        [("^block[.]", ""), rules.Split("^qkv", into=("attn.q", "attn.k", "attn.v"))],
    ),
}


def trained(net: Any) -> Any:
    """Give a module's statistics and counters values that nobody would guess."""
    with torch.no_grad():
        for name, value in net.state_dict().items():
            value.copy_(torch.randn(value.shape) if value.is_floating_point() else torch.full(value.shape, 7))
            if "original0" in name or name.endswith("_var"):
                value.abs_()
    return net


@pytest.mark.parametrize("source", ["module", "file", "tensors"])
@pytest.mark.parametrize("name", CASES)
def test_pytorch_takes_it_back(tmp_path: Path, name: str, source: str) -> None:
    make, build, rename = CASES[name]
    net = trained(make())
    torch.save(net.state_dict(), tmp_path / "m.pt")
    given = {"module": net, "file": tmp_path / "m.pt", "tensors": net.state_dict()}[source]
    model = build()
    result = lm.load(model, given, layout="torch", rename=rename)
    out = lm.export_torch(model, like=result)
    assert list(out) == list(net.state_dict())
    twin = make()
    twin.load_state_dict({key: tensor(value) for key, value in out.items()})
    for key, value in effective(net).items():
        torch.testing.assert_close(effective(twin)[key], value, rtol=1e-6, atol=1e-7)


def tensor(array: np.ndarray) -> Any:
    """Return an array as a tensor, of bfloat16 too."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def effective(net: Any) -> dict[str, Any]:
    """Return what a module computes with: Flax adds a recurrent layer's two biases, and norms any directions."""
    state = net.state_dict()
    out = {key: value for key, value in state.items() if "bias_" not in key and "original1" not in key}
    out |= {key: value + state[key.replace("bias_ih", "bias_hh")] for key, value in state.items() if "bias_ih" in key}
    return out | {name: module.weight for name, module in net.named_modules() if hasattr(module, "parametrizations")}


# ---------------------------------------------------------------- what no module of the model holds


def loaded(model: Any, arrays: dict[str, Any], **options: Any) -> lm.LoadResult:
    return lm.load(model, arrays, layout="torch", **options)


WEIGHT = {"fc.weight": np.arange(12, dtype=np.float32).reshape(4, 3), "fc.bias": np.ones(4, np.float32)}


def model_of(**modules: Any) -> Any:
    return nnx.Dict(modules or {"fc": linear(4)})


def test_known_buffers_are_the_file_s_again() -> None:
    mask = np.tril(np.ones((1, 1, 5, 5), np.uint8))
    arrays = WEIGHT | {"attn.bias": mask, "inv_freq": np.ones(3, np.float32)}
    model = model_of()
    result = loaded(model, arrays)
    assert sorted(result.ignored) == ["attn.bias", "inv_freq"]
    mask[:] = 9  # the caller's array is the caller's
    out = lm.export_torch(model, like=result)
    assert list(out) == list(arrays)
    np.testing.assert_array_equal(out["attn.bias"], np.tril(np.ones((1, 1, 5, 5), np.uint8)))


def test_what_was_dropped_is_left_out_unless_it_is_tied() -> None:
    embedding = torch.arange(12.0).reshape(4, 3)
    arrays = {"embed.weight": embedding, "head.weight": embedding, "old.weight": torch.ones(4, 3)}
    model = model_of(embed=lm.LazyEmbed(rngs=R(0)))
    result = lm.load(model, arrays, layout="torch", rename={"head.weight": None, "old.weight": None})
    model.embed.embedding[...] += 1
    out = lm.export_torch(model, like=result)
    assert list(out) == ["embed.weight", "head.weight"]
    np.testing.assert_array_equal(out["head.weight"], embedding.numpy() + 1)


def test_a_head_that_is_stored_twice_and_left_out(tmp_path: Path) -> None:
    """Files of safetensors know of no ties; the entry that is as the embedding is written as the embedding is now."""
    embedding = np.arange(12, dtype=np.float32).reshape(4, 3)
    for head, is_tied in ((embedding, True), (embedding[::-1], False)):
        arrays = {"embed.weight": embedding, "head.weight": np.ascontiguousarray(head)}
        model = model_of(embed=lm.LazyEmbed(rngs=R(0)))
        result = loaded(model, arrays, ignore="^head")
        model.embed.embedding[...] += 1
        with contextlib.nullcontext() if is_tied else pytest.warns(UserWarning, match="head.weight is left out"):
            out = lm.export_torch(model, like=result)
        assert list(out) == (["embed.weight", "head.weight"] if is_tied else ["embed.weight"])
        assert all(np.array_equal(value, embedding + 1) for value in out.values())


def test_what_was_trained_goes_back_in_the_file_s_dtype() -> None:
    model = model_of()
    result = loaded(model, {name: value.astype(np.float16) for name, value in WEIGHT.items()})
    model.fc.kernel[...] += 0.5
    out = lm.export_torch(model, like=result)
    assert out["fc.weight"].dtype == np.float16
    np.testing.assert_array_equal(out["fc.weight"], WEIGHT["fc.weight"].astype(np.float16) + np.float16(0.5))
    model.fc.kernel[...] *= 1e6
    with pytest.raises(lm.StateDictError, match=r"fc\.weight[^$]*numbers of a size that f16 has"):
        lm.export_torch(model, like=result)


def test_a_new_parameter_keeps_its_name() -> None:
    model = model_of(fc=linear(4), head=nnx.Linear(4, 2, rngs=R(0)))
    result = loaded(model, {f"bert.{n}": v for n, v in WEIGHT.items()}, missing="^head")
    assert list(lm.export_torch(model, like=result)) == ["bert.fc.weight", "bert.fc.bias", "head.weight", "head.bias"]


EYE = np.eye(4, dtype=np.float32)
FUSED = {"net.in_proj_weight": np.tile(EYE, (3, 1)), "net.out_proj.weight": EYE}
APART = {f"net.{n}_proj.weight": EYE for n in "qkv"} | {"net.out_proj.weight": EYE}
RECURRENT = {"LSTM": lm.LazyOptimizedLSTMCell, "GRU": lm.LazyResetAfterGRUCell, "RNN": lm.LazySimpleCell}
BOTH = {"net.bias_ih_l0", "net.bias_hh_l0"}
NEW_BIASES: dict[str, tuple[Any, Any, set[str]]] = {
    "linear": (lambda: linear(4), {"net.weight": EYE}, {"net.bias"}),
    "fused": (attention, FUSED, {"net.in_proj_bias", "net.out_proj.bias"}),
    "apart": (attention, APART, {f"net.{n}_proj.bias" for n in ("q", "k", "v", "out")}),
    "all but one": (attention, APART | {f"net.{n}_proj.bias": EYE[0] for n in ("q", "v", "out")}, {"net.k_proj.bias"}),
    **{
        kind: (
            lambda cell=cell: nnx.RNN(cell(4, rngs=R(0))),
            {f"net.{n}": v.detach().numpy() for n, v in getattr(torch.nn, kind)(3, 4, bias=False).state_dict().items()},
            BOTH,
        )
        for kind, cell in RECURRENT.items()
    },
    "normed": (
        lambda: lm.LazyWeightNorm(linear(4), rngs=R(0)),
        {"net.weight_g": np.ones((4, 1), np.float32), "net.weight_v": EYE},
        {"net.bias"},
    ),
}


@pytest.mark.parametrize("name", NEW_BIASES)
def test_biases_that_the_file_lacks_are_written_once_they_are_trained(name: str) -> None:
    make, file, names = NEW_BIASES[name]
    model = model_of(net=make())
    result = loaded(model, file, missing="bias$")
    assert set(lm.export_torch(model, like=result)) == file.keys()
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        if path[-1] == "bias":
            variable[...] += 1
    out = lm.export_torch(model, like=result)
    assert set(out) - file.keys() == names
    again = model_of(net=make())
    lm.load(again, out, layout="torch")
    for key, value in lm.state_dict(model).items():
        np.testing.assert_array_equal(lm.state_dict(again)[key], value, err_msg=key)


def test_a_copy_that_differs_has_no_way_back() -> None:
    model = model_of(embed=lm.LazyEmbed(rngs=R(0)), head=linear(4, False))
    rename = [rules.Copy("^embed", into="head")]
    result = loaded(model, {"embed.weight": WEIGHT["fc.weight"]}, rename=rename)
    assert list(lm.export_torch(model, like=result)) == ["embed.weight"]
    model.head.kernel[...] += 1
    with pytest.raises(lm.StateDictError, match="two parameters that differ now"):
        lm.export_torch(model, like=result)


@pytest.mark.parametrize("changed", ["^head", "^embed", "^(embed|head)"])
def test_a_copy_to_which_a_number_was_added(changed: str) -> None:
    """A difference is rounded again, so that it alone does not give the file's bits, nor twice the same."""
    weight = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    rename = [rules.Copy("^embed", into="head"), rules.Add(changed, 1.0)]
    model = model_of(embed=lm.LazyEmbed(rngs=R(0)), head=linear(4, False))
    result = loaded(model, {"embed.weight": weight}, rename=rename)
    changed_too = weight + np.float32(1)
    np.testing.assert_array_equal(model.head.kernel[...].T, changed_too if "head" in changed else weight)
    out = lm.export_torch(model, like=result)
    assert list(out) == ["embed.weight"]
    np.testing.assert_array_equal(out["embed.weight"], weight)
    model.head.kernel[0, 0] += 1
    with pytest.raises(lm.StateDictError, match="two parameters that differ now"):
        lm.export_torch(model, like=result)


def test_what_was_trained_beside_what_was_not() -> None:
    weight = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float16)
    model = model_of(fc=linear(4, False))
    result = loaded(model, {"fc.weight": weight}, rename=[rules.Add("weight$", 0.1)])
    model.fc.kernel[1, 2] += 0.5
    out = lm.export_torch(model, like=result)["fc.weight"]
    expected = weight.copy()
    expected[2, 1] = np.float16(np.float32(weight[2, 1]) + np.float32(0.5))
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize(("head", "text"), [(5, "parts of the shapes (4, 4), (5, 4)"), (None, "without the part k")])
def test_parts_that_the_model_has_otherwise_have_no_way_back(head: int | None, text: str) -> None:
    given = {"qk.weight": np.ones((8, 4), np.float32)}
    model = nnx.Dict(q=linear(4, False))
    if head is not None:
        model.k = nnx.Linear(4, head, use_bias=False, rngs=R(0))
    result = loaded(model, given, rename=rules.Split("qk", into=("q", "k")), strict=False, mismatched="skip")
    with pytest.raises(lm.StateDictError) as caught:
        lm.export_torch(model, like=result)
    assert text in str(caught.value)


def test_what_was_computed_has_no_way_back_once_it_was_trained() -> None:
    net = torch.nn.utils.parametrizations.spectral_norm(torch.nn.Linear(3, 4)).eval()
    model = linear(4)
    result = lm.load(model, net, layout="torch")
    out = lm.export_torch(model, like=result)
    assert list(out) == list(net.state_dict())
    for name, value in net.state_dict().items():
        np.testing.assert_array_equal(out[name], value)
    model.kernel[0, 0] += 1
    with pytest.raises(lm.StateDictError, match="computed from"):
        lm.export_torch(model, like=result)


def test_old_weight_norm() -> None:
    g, v = np.array([[2.0], [3.0], [1.0], [5.0]], np.float32), WEIGHT["fc.weight"] + 1
    model = model_of()
    result = loaded(model, {"fc.weight_g": g, "fc.weight_v": v, "fc.bias": WEIGHT["fc.bias"]})
    out = lm.export_torch(model, like=result)
    assert set(out) == {"fc.weight_g", "fc.weight_v", "fc.bias"}
    np.testing.assert_allclose(out["fc.weight_g"], g, rtol=1e-6)
    lengths = np.linalg.norm(out["fc.weight_v"], axis=1, keepdims=True)
    np.testing.assert_allclose(out["fc.weight_v"] / lengths, v / np.linalg.norm(v, axis=1, keepdims=True), rtol=1e-6)


def test_weights_that_are_too_large_for_the_scales() -> None:
    rename = [rules.Dequantize(r"\.q$", scale=".s", into=".weight")]
    model = model_of(fc=linear(4, False))
    result = loaded(model, {"fc.q": np.full((4, 3), 100, np.int8), "fc.s": np.float32(0.5)}, rename=rename)
    np.testing.assert_array_equal(model.fc.kernel[...], np.full((3, 4), 50))
    model.fc.kernel[...] *= 2
    with pytest.raises(lm.StateDictError, match="too large for the file's scales"):
        lm.export_torch(model, like=result)


def test_like_is_a_result_of_a_load() -> None:
    layer = nnx.Linear(3, 4, rngs=R(0))
    with pytest.raises(TypeError, match=r"result of lm\.load"):
        lm.export_torch(layer, like=lm.load_state_dict(layer, lm.state_dict(layer)))


def test_a_load_of_flax_s_names_has_a_way_back(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    lm.save(nnx.Dict(x_0=nnx.Linear(3, 4, rngs=R(0))), path)
    model = nnx.Dict(x=nnx.List([linear(4)]))
    result = lm.load(model, path)
    out = lm.export_torch(model, like=result)
    assert list(out) == ["x_0.kernel", "x_0.bias"]
    np.testing.assert_array_equal(out["x_0.kernel"], jnp.asarray(model.x[0].kernel[...]))


OWN_NAMES: dict[str, tuple[Callable[[], Any], dict[str, tuple[int, ...]], Any]] = {
    "Conv1D's kernel": (lambda: linear(4), {"weight": (3, 4), "bias": (4,)}, (r"weight$", "kernel")),
    "a convolution of TensorFlow": (
        lambda: lm.LazyConv(4, (2, 2), use_bias=False, rngs=R(0)), {"weight": (2, 2, 3, 4)}, ("weight", "kernel"),
    ),
    "half of a norm": (
        lambda: lm.LazyBatchNorm(rngs=R(0)),
        {"weight": (3,), "bias": (3,), "running_mean": (3,), "running_var": (3,)},
        ("weight", "scale"),
    ),
    "a table": (lambda: lm.LazyEmbed(rngs=R(0)), {"weight": (5, 3)}, ("weight", "embedding")),
    "attention's heads": (
        lambda: lm.LazyMultiHeadAttention(2, use_bias=False, decode=False, rngs=R(0)),
        {"q.w": (4, 2, 2), "k.w": (4, 2, 2), "v.w": (4, 2, 2), "o.w": (2, 2, 4)},
        lambda name: f"m.{dict(q='query', k='key', v='value', o='out')[name[2]]}.kernel",
    ),
}


@pytest.mark.parametrize("name", OWN_NAMES)
def test_what_a_rename_has_given_flax_s_names(name: str) -> None:
    make, shapes, change = OWN_NAMES[name]
    draw = np.random.default_rng(0)
    file = {f"m.{leaf}": draw.normal(size=shape).astype(np.float32) for leaf, shape in shapes.items()}
    model = model_of(m=make())
    rename: Any = change if callable(change) else [change]
    out = lm.export_torch(model, like=lm.load(model, file, layout="torch", rename=rename))
    assert list(out) == list(file) and all(np.array_equal(out[key], file[key]) for key in file)
