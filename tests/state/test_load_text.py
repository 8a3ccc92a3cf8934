"""The full text of what ``load_state_dict`` says."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import lazymods as lm


def linear(lazy: bool = False) -> Any:
    return lm.LazyLinear(4, rngs=nnx.Rngs(0)) if lazy else nnx.Linear(3, 4, rngs=nnx.Rngs(0))


def entries(**changes: Any) -> dict[str, Any]:
    return {"kernel": jnp.ones((3, 4)), "bias": jnp.zeros(4)} | changes


def part(where: str, got: str, needed: str, write: str) -> str:
    return f"{where}\n  got:    {got}\n  needed: {needed}\n  write:  {write}"


def heading(kind: str) -> str:
    return f"the state dict does not fit {kind}; nothing was loaded"


def tied() -> Any:
    model = nnx.List([linear(), linear()])
    model[1].kernel = model[0].kernel
    return model


def hooked() -> Any:
    layer = linear()

    def refuse(module: Any, sd: Any, prefix: str, *rest: Any) -> None:
        rest[-1].append(f"no {prefix!r} today")

    lm.register_load_state_dict_pre_hook(layer, refuse)
    return nnx.List([layer])


class Odd(nnx.Module):
    """An axis of an odd length."""

    def __init__(self, n: int, *, rngs: nnx.Rngs):
        self.w = nnx.Param(jnp.zeros(2 * n + 1))

    def __call__(self, x: Any) -> Any:
        return x


class Shaped(nnx.Module):
    """A shape of any rank, so that the structure of ``shape`` is guessed."""

    def __init__(self, shape: tuple[int, ...], *, rngs: nnx.Rngs):
        self.w = nnx.Param(jnp.zeros(tuple(shape)))
        self.b = nnx.Param(jnp.zeros(tuple(shape)))

    def __call__(self, x: Any) -> Any:
        return x


class Even(nnx.Module):
    """A constructor that asserts instead of raising a ValueError."""

    def __init__(self, n: int, *, rngs: nnx.Rngs):
        if n % 2:
            raise AssertionError("n is even")
        self.w = nnx.Param(jnp.zeros((n, 3)))

    def __call__(self, x: Any) -> Any:
        return x


SKIP = 'mismatched="skip"  # leaves it out'
AGREE = "entries that agree on the layer's sizes"
SAME_LAYER = "lm.load_state_dict(layer, lm.state_dict(other))  # entries of one and the same layer"

TEXTS: dict[str, tuple[Callable[[], Any], dict[str, Any], str]] = {
    "shape-lazy": (
        lambda: linear(lazy=True),
        entries(kernel=jnp.ones((7, 3))),
        f"{heading('LazyLinear')}\n"
        + part("kernel (UninitializedParameter)", "f32[7,3]", "shape (?, 4), without broadcasting", SKIP),
    ),
    "shape-ready": (
        linear,
        entries(kernel=jnp.ones((1, 4))),
        f"{heading('Linear')}\n" + part("kernel (Param)", "f32[1,4]", "shape (3, 4), without broadcasting", SKIP),
    ),
    "complex": (
        linear,
        entries(kernel=jnp.ones((3, 4), jnp.complex64)),
        f"{heading('Linear')}\n"
        + part("kernel (Param)", "c64[3,4]", "a real array, for c64[3,4] would lose its imaginary part",
               "array.astype('complex64')  # of what is in the model, before the load"),
    ),
    "range": (
        lambda: nnx.Dict(n=nnx.Param(jnp.zeros(2, jnp.int8))),
        {"n": np.array([1, 200])},
        f"{heading('Dict')}\n"
        + part("n (Param)", "i64[2]", "numbers from -128 to 127, for i8",
               "array.astype('int64')  # of what is in the model, before the load"),
    ),
    "no-array": (
        linear,
        entries(bias="zeros"),
        f"{heading('Linear')}\n"
        + part("bias (Param)", "a value of type str", "an array of numbers", "state['bias'] = jnp.asarray(value)"),
    ),
    "ties": (
        tied,
        {"0.kernel": jnp.ones((3, 4)), "1.kernel": jnp.zeros((3, 4)), "0.bias": jnp.ones(4), "1.bias": jnp.ones(4)},
        f"{heading('List')}\n"
        + part("1.kernel (Param)", "another value than 0.kernel, to which it is tied in the model",
               "one value for what is one parameter", "state.pop('1.kernel')  # or an equal entry"),
    ),
    "missing-and-unexpected": (
        linear,
        {"kernel": jnp.ones((3, 4)), "weight": jnp.ones(1)},
        f"{heading('Linear')}\n"
        "  cause:  PyTorch's names, such as weight\n"
        '  write:  lm.load(model, source, layout="torch")  # if PyTorch wrote it; source: the file, or the state dict\n'
        + part("bias", "no entry in the state dict", "an entry for each parameter of the model",
               "lm.load_state_dict(model, lm.state_dict(other))  # or a checkpoint, of a model like this one")
        + "\n"
        + part("weight", "f32[1], an entry that the model has no parameter for", "only entries of the model",
               'lm.load(model, source, layout="torch")  # if PyTorch wrote it; source: the file, or the state dict'),
    ),
    "uninitialized": (
        linear,
        lm.state_dict(linear(lazy=True)),
        f"{heading('Linear')}\n"
        + part("bias (Param)", "an uninitialized entry of shape (4,)",
               "a value: the model's parameter has one, f32[4]",
               "lm.materialize(other, x)  # before lm.state_dict(other)")
        + "\n"
        + part("kernel (Param)", "an uninitialized entry of shape (?, 4)",
               "a value: the model's parameter has one, f32[3,4]",
               "lm.materialize(other, x)  # before lm.state_dict(other)"),
    ),
    "uninitialized-of-unknown-rank": (
        lambda: nnx.Dict(w=nnx.Param(jnp.ones(2))),
        {"w": lm.UninitializedParameter()},
        f"{heading('Dict')}\n"
        + part("w (Param)", "an uninitialized entry of shape ?", "a value: the model's parameter has one, f32[2]",
               "lm.materialize(other, x)  # before lm.state_dict(other)"),
    ),
    "sizes-disagree": (
        lambda: nnx.Dict(norm=lm.LazyLayerNorm(rngs=nnx.Rngs(0))),
        {"norm.scale": jnp.ones(3), "norm.bias": jnp.ones(4)},
        f"{heading('Dict')}\n"
        + part("norm (LazyLayerNorm)", "axis 0 of bias is 4, but other entries make it 3", AGREE, SAME_LAYER),
    ),
    "no-whole-size": (
        lambda: lm.lazy(Odd, infer=lambda config, x: {"n": x.shape[-1]})(rngs=nnx.Rngs(0)),
        {"w": jnp.ones(4)},
        f"{heading('LazyOdd')}\n" + part("LazyOdd", "n would be 3/2 by w of shape (4,)", AGREE, SAME_LAYER),
    ),
    "sizes-refused": (
        lambda: lm.LazyGroupNorm(num_groups=4, rngs=nnx.Rngs(0)),
        {"scale": jnp.ones(6), "bias": jnp.ones(6)},
        f"{heading('LazyGroupNorm')}\n"
        + part("LazyGroupNorm", "num_features=6, which GroupNorm refuses: Number of groups (4) does not divide the "
               "number of channels (6).", AGREE, SAME_LAYER),
    ),
    "assertion": (
        lambda: lm.lazy(Even, infer=lambda config, x: {"n": x.shape[-1]})(rngs=nnx.Rngs(0)),
        {"w": jnp.ones((5, 3))},
        f"{heading('LazyEven')}\n" + part("LazyEven", "n=5, which Even refuses: n is even", AGREE, SAME_LAYER),
    ),
    "guessed-structure": (
        lambda: lm.lazy(Shaped, infer=lambda config, x: {"shape": x.shape})(rngs=nnx.Rngs(0)),
        {"w": jnp.ones((2, 3)), "b": jnp.ones((5, 3))},
        f"{heading('LazyShaped')}\n"
        + part("LazyShaped", "axis 0 of b is 5, but other entries make it 2", "entries that fit the layer", SAME_LAYER),
    ),
    "hook": (
        hooked,
        {"0.kernel": jnp.ones((3, 4)), "0.bias": jnp.zeros(4)},
        "a hook refuses the state dict for List\n"
        + part("List", "no '0.' today", "entries that the hook accepts",
               "lm.load_state_dict(model, lm.state_dict(other))"),
    ),
    "key-implementation": (
        lambda: nnx.Dropout(0.5, rngs=nnx.Rngs(0)),
        {"rngs.key": np.zeros(2, np.uint32), "rngs.key.impl": np.frombuffer(b"rbg", np.uint8)},
        f"{heading('Dropout')}\n"
        + part("rngs.key (RngKey)", "u32[2] of a rbg key", "the data of a threefry2x32 key, uint32",
               "lm.state_dict(model, include_rng=True)"),
    ),
    "key-shape": (
        lambda: nnx.Dropout(0.5, rngs=nnx.Rngs(0)),
        {"rngs.key": np.zeros(4, np.uint32)},
        f"{heading('Dropout')}\n" + part("rngs.key (RngKey)", "u32[4]", "shape (2,)", SKIP),
    ),
}


@pytest.mark.parametrize("make, given, expected", TEXTS.values(), ids=TEXTS)
def test_full_text(make: Callable[[], Any], given: dict[str, Any], expected: str) -> None:
    model = make()
    with pytest.raises(lm.LazyError) as caught:
        lm.load_state_dict(model, given)
    assert type(caught.value) is (lm.UninitializedError if "uninitialized" in expected else lm.StateDictError)
    assert str(caught.value) == expected


# ---------------------------------------------------------------- options that the file decides


def options_of(name: str, **options: Any) -> Any:
    layers = {
        "fc": lambda: lm.LazyLinear(4, rngs=nnx.Rngs(0), **options),
        "norm": lambda: lm.LazyLayerNorm(rngs=nnx.Rngs(0), **options),
        "bn": lambda: lm.LazyBatchNorm(rngs=nnx.Rngs(0), **options),
        "attn": lambda: lm.LazyMultiHeadAttention(2, decode=False, rngs=nnx.Rngs(0), **options),
    }
    return nnx.Dict({name: layers[name]()})


EYE, ONES = np.eye(4, dtype=np.float32), np.ones(4, np.float32)
PROJECTIONS = {f"attn.{n}_proj.weight": EYE for n in ("q", "k", "v", "out")}
BIASES = {name.replace("weight", "bias"): ONES for name in PROJECTIONS}
WITHOUT_ONE = {name: value for name, value in BIASES.items() if "k_proj" not in name}
ALL = [f"attn.{n}.bias" for n in ("query", "key", "value", "out")]
KEPT = r'lm.load(model, source, missing=r"attn\.key\.bias$")  # it stays as it is: zeros, if it is new'
OPTIONS: dict[str, tuple[dict[str, bool], dict[str, np.ndarray], dict[str, str]]] = {
    "fc": ({}, {"fc.weight": EYE}, {"fc.bias": "use_bias=False  # of fc"}),
    "fc with": ({"use_bias": False}, {"fc.weight": EYE, "fc.bias": ONES}, {"fc.bias": "use_bias=True  # of fc"}),
    "norm": ({}, {"norm.weight": ONES}, {"norm.bias": "use_bias=False  # of norm"}),
    "bn": (
        {},
        {"bn.running_mean": ONES, "bn.running_var": ONES},
        {"bn.scale": "use_scale=False  # of bn", "bn.bias": "use_bias=False  # of bn"},
    ),
    "attn": ({}, PROJECTIONS, dict.fromkeys(ALL, "use_bias=False  # of attn")),
    "attn with": (
        {"use_bias": False},
        PROJECTIONS | BIASES,
        dict.fromkeys(ALL, "use_bias=True  # of attn"),
    ),
    "attn but one": ({}, PROJECTIONS | WITHOUT_ONE, {"attn.key.bias": KEPT}),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_a_bias_that_one_side_lacks(case: str) -> None:
    options, file, wanted = OPTIONS[case]
    name = case.split()[0]
    with pytest.raises(lm.StateDictError) as caught:
        lm.load(options_of(name, **options), file, layout="torch")
    assert {p.where: p.write for p in caught.value.problems} == wanted
    said = dict(line.partition("  #")[0].split("=") for line in wanted.values() if line != KEPT)
    model = options_of(name, **{option: value == "True" for option, value in said.items()})
    missing = [] if said else r"attn\.key\.bias$"
    assert tuple(lm.load(model, file, layout="torch", missing=missing))[1:] == ([], [])  # the line is right
    assert said or not model["attn"].key.bias[...].any()


def test_a_norm_that_is_not_affine_in_pytorch() -> None:
    def made(**options: Any) -> Any:
        norm = lm.LazyGroupNorm(num_groups=2, rngs=nnx.Rngs(0), **options)
        return nnx.Dict(norm=norm, fc=lm.LazyLinear(4, use_bias=False, rngs=nnx.Rngs(0)))

    with pytest.raises(lm.StateDictError) as caught:
        lm.load(made(), {"fc.weight": EYE}, layout="torch")
    assert [(p.where, p.write) for p in caught.value.problems] == [
        (f"norm.{kind}", f"use_{kind}=False  # of norm, if PyTorch's is not affine") for kind in ("bias", "scale")
    ]
    lm.load(made(use_bias=False, use_scale=False), {"fc.weight": EYE}, layout="torch")
    with pytest.raises(lm.StateDictError) as caught:  # the entries of another name may be the norm's
        lm.load(made(), {"fc.weight": EYE, "ln.weight": ONES}, layout="torch")
    assert "affine" not in str(caught.value)


def test_a_bias_of_another_name_is_not_left_out() -> None:
    with pytest.raises(lm.StateDictError) as caught:
        lm.load(options_of("fc"), {"fc.weight": EYE, "fc.b": ONES}, layout="torch")
    assert not any("use_bias" in problem.write for problem in caught.value.problems)


class Windows(nnx.Module):
    """A size that is an int or a pair, whose rank the constructor takes as it comes."""

    def __init__(self, window: Any, *, rngs: nnx.Rngs) -> None:
        self.conv = nnx.Conv(3, 4, window, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.conv(x)


@pytest.mark.slow
def test_a_size_that_is_an_int_or_a_pair() -> None:
    lazy = lm.lazy(Windows, infer=lambda config, x: {"window": (3, 2)})
    explicit = Windows((3, 2), rngs=nnx.Rngs(1))
    with pytest.raises(lm.StateDictError) as caught:
        lm.load_state_dict(lazy(rngs=nnx.Rngs(0)), lm.state_dict(explicit))
    line = "LazyWindows(window=...)  # the sizes of the file; or model(x) before the load"
    assert [(p.where, p.write) for p in caught.value.problems] == [("conv.kernel (UninitializedParameter)", line)]
    ready, given = lazy(rngs=nnx.Rngs(0)), lazy(window=(3, 2), rngs=nnx.Rngs(0))
    lm.materialize(ready, jnp.ones((1, 5, 5, 3)))
    for model in (ready, given):
        lm.load_state_dict(model, lm.state_dict(explicit))
        np.testing.assert_array_equal(model.conv.kernel[...], explicit.conv.kernel[...])


@pytest.mark.parametrize(("in_file", "in_model"), [(4, 2), (2, 4)])
def test_a_list_of_another_length_is_told(tmp_path: Path, in_file: int, in_model: int) -> None:
    """To leave the file's other layers out, or to keep new ones, would give other numbers."""

    def net(n: int) -> nnx.Dict:
        layers = nnx.List([nnx.Linear(3, 3, rngs=nnx.Rngs(i)) for i in range(n)])
        return nnx.Dict(encoder=nnx.Dict(layers=layers), head=nnx.Linear(3, 1, rngs=nnx.Rngs(0)))

    lm.save(net(in_file), tmp_path / "m.safetensors")
    with pytest.raises(lm.StateDictError) as caught:
        lm.load(net(in_model), tmp_path / "m.safetensors")
    cause = f"  cause:  {in_file} layers in 'encoder.layers' of the file, {in_model} in the model's\n"
    line = f"n_layers = {in_file}  # of encoder.layers: the file has {in_file}, the model {in_model}"
    cause += f"  write:  {line}\n"
    assert str(caught.value).partition("\n")[2].startswith(cause)
    lines = {problem.write for problem in caught.value.problems}
    assert lines == {line}
    assert {problem.where.split(" ")[0] for problem in caught.value.problems} == {
        f"encoder.layers.{i}.{leaf}" for i in (2, 3) for leaf in ("kernel", "bias")
    }


def test_an_entry_that_a_layer_lacks_is_no_list_of_another_length() -> None:
    """Fewer layers would leave the file's own out."""
    layers = nnx.List([nnx.Linear(3, 3, rngs=nnx.Rngs(i)) for i in range(3)])
    given = lm.state_dict(nnx.Dict(layers=layers))
    del given["layers.2.bias"]
    with pytest.raises(lm.StateDictError) as caught:
        lm.load_state_dict(nnx.Dict(layers=layers), given)
    assert "n_layers" not in str(caught.value)


@pytest.mark.parametrize("make", [lambda: jnp.ones(2), lambda: np.ones(2), lambda: 1.0], ids=["jax", "numpy", "number"])
def test_a_dict_that_is_in_two_places_gets_two_values_by_the_line(make: Callable[[], Any], tmp_path: Path) -> None:
    """A target network begins as the very dict of the other's parameters, and is another one later."""

    def begun() -> dict[str, Any]:
        params = {"w": make(), "key": jax.random.key(0)}
        return {"params": params, "run": [{"target": params}]}

    trained = jax.tree.map(copy.copy, begun())
    trained["run"][0]["target"]["w"] = trained["run"][0]["target"]["w"] * 3
    lm.save(trained, tmp_path / "s.npz")
    state = begun()
    with pytest.raises(lm.StateDictError, match="one value for what is one and the same dict") as told:
        lm.load(state, tmp_path / "s.npz")
    exec(told.value.problems[0].write, {"state": state, "jax": jax, "copy": copy})
    lm.load(state, tmp_path / "s.npz")
    assert np.all(state["params"]["w"] == 1) and np.all(state["run"][0]["target"]["w"] == 3)
