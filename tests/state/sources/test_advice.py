"""Lines of errors, followed: each leads to PyTorch's numbers, or to the next error, never to others."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import lazymods as lm

torch = pytest.importorskip("torch", reason="PyTorch is the oracle here")

R = nnx.Rngs(0)
LEAVES = ("weight", "bias")


def linear(features: int) -> Any:
    return lm.LazyLinear(features, rngs=R)


def refused(model: Any, state: Any, **options: Any) -> list[Any]:
    with pytest.raises(lm.StateDictError) as caught:
        lm.load(model, state, layout="torch", **options)
    return list(caught.value.problems)


def lines(model: Any, state: Any, **options: Any) -> dict[str, str]:
    return {problem.where.partition(" ")[0]: problem.write for problem in refused(model, state, **options)}


def options_of(line: str) -> dict[str, Any]:
    return eval(f"dict({line.partition('  #')[0]})", {"lm": lm})


def random_state(module: Any) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(0)
    return {name: torch.randn(value.shape, generator=draw) for name, value in module.state_dict().items()}


# ---------------------------------------------------------------- one part of a file, the others ignored


def tower() -> nnx.Dict:
    layers = nnx.List([nnx.Dict(fc1=linear(4), fc2=linear(3)) for _ in range(2)])
    return nnx.Dict(layers=layers, norm=lm.LazyLayerNorm(rngs=R))


TOWER: dict[str, tuple[int, ...]] = {"norm.weight": (3,), "norm.bias": (3,)}
for i in range(2):
    TOWER |= {f"layers.{i}.fc1.weight": (4, 3), f"layers.{i}.fc1.bias": (4,)}
    TOWER |= {f"layers.{i}.fc2.weight": (3, 4), f"layers.{i}.fc2.bias": (3,)}


def towers(*prefixes: str) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)
    return {p + name: draw.random(size, np.float32) for p in prefixes for name, size in TOWER.items()}


@pytest.mark.parametrize("wrapper", ["", "model.", "clip."])
@pytest.mark.parametrize("wanted", ["text", "vision"])
def test_the_prefix_of_what_is_not_ignored(wrapper: str, wanted: str) -> None:
    state = towers(f"{wrapper}text.", f"{wrapper}vision.") | {f"{wrapper}scale": np.ones((), np.float32)}
    assert refused(tower(), state)
    other = {"text": "vision", "vision": "text"}[wanted]
    model = tower()
    result = lm.load(model, state, layout="torch", ignore=[rf"\b{other}[.]", r"\bscale$"])
    assert {re.findall("text|vision", name)[0] for (name,) in result.matched.values()} == {wanted}
    np.testing.assert_array_equal(model["norm"].scale[...], state[f"{wrapper}{wanted}.norm.weight"])


def test_what_is_ignored_is_loaded_all_the_same_if_the_model_has_it() -> None:
    state = towers("bert.")
    for pattern in ("bert", "layers", "norm"):
        model = tower()
        assert len(lm.load(model, state, layout="torch", ignore=pattern).matched) == len(TOWER)
        np.testing.assert_array_equal(model["norm"].scale[...], state["bert.norm.weight"])


# ---------------------------------------------------------------- entries that are left out


def test_the_line_leaves_out_no_more_than_it_names() -> None:
    """``strict=False`` would also let go what the model misses."""
    state = towers("") | {"aux.head.weight": np.ones((2, 2)), "layers.1.gate.scale": np.ones(2), "step": np.ones(())}
    state["layers.0.fc.weight"] = state.pop("layers.0.fc1.weight")
    found = lines(tower(), state)
    assert found == {
        "aux.head.weight": 'ignore=r"^aux[.]"  # leaves it out',
        "layers.1.gate.scale": r'ignore=r"^layers[.]\d+[.]gate[.]"  # leaves it out',
        "step": 'ignore=r"^step$"  # leaves it out',
        "layers.0.fc.weight": r'ignore=r"^layers[.]\d+[.]fc[.]"  # leaves it out',
        "layers.0.fc1.kernel": found["layers.0.fc1.kernel"],
    }
    ignored = [options_of(line)["ignore"] for name, line in found.items() if name != "layers.0.fc1.kernel"]
    assert list(lines(tower(), state, ignore=ignored)) == ["layers.0.fc1.kernel"]
    with pytest.raises(lm.StateDictError, match="strict=False  # leaves it out"):
        lm.load_state_dict(nnx.Dict(fc=nnx.Linear(2, 2, rngs=R)), {"other": jnp.ones(2)})


class MaskedLinear(torch.nn.Linear):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.register_buffer("mask", torch.tril(torch.ones(outputs, inputs), -1))

    def forward(self, x: Any) -> Any:
        return torch.nn.functional.linear(x, self.weight * self.mask, self.bias)


def test_masks_of_weights(tmp_path: Any) -> None:
    net = torch.nn.Sequential(MaskedLinear(3, 4), torch.nn.ReLU(), MaskedLinear(4, 5))
    torch.save(net.state_dict(), tmp_path / "made.pt")
    made = lambda: nnx.Sequential(linear(4), nnx.relu, linear(5))  # noqa: E731
    found = lines(made(), tmp_path / "made.pt")
    assert set(found) == {"layers.0.mask", "layers.2.mask"} and len(set(found.values())) == 1
    given: dict[str, Any] = {"o": lm.open(tmp_path / "made.pt")}
    exec(next(iter(found.values())), given)
    model = made()
    lm.load(model, given["source"], layout="torch")
    x = torch.randn(2, 3)
    with jax.default_matmul_precision("highest"):
        np.testing.assert_allclose(model(jnp.asarray(x.numpy())), net(x).detach().numpy(), atol=1e-6)


# ---------------------------------------------------------------- lists in lists


def nested(n: int, m: int, *, sequential: bool = False) -> nnx.Dict:
    many = (lambda layers: nnx.Sequential(*layers)) if sequential else nnx.List
    return nnx.Dict(e=many([nnx.Dict(f=many([nnx.Linear(2, 2, rngs=R) for _ in range(m)])) for _ in range(n)]))


@pytest.mark.parametrize("sequential", [False, True])
@pytest.mark.parametrize(("file", "model"), [((3, 3), (2, 2)), ((2, 2), (3, 3)), ((3, 2), (2, 3)), ((2, 3), (2, 2))])
def test_lists_of_another_length_in_lists(file: tuple[int, int], model: tuple[int, int], sequential: bool) -> None:
    """Followed from the outside, the lines end in a model that the file fits."""
    state = {f"e.{i}.f.{j}.{leaf}": np.ones(size, np.float32) for i in range(file[0]) for j in range(file[1])
             for leaf, size in (("weight", (2, 2)), ("bias", (2,)))}  # fmt: skip
    n, m = model
    while (n, m) != file:
        found = set(lines(nested(n, m, sequential=sequential), state).values())
        assert all(line.startswith("n_layers = ") for line in found)
        outer = [line for line in found if " of e:" in line]
        (said, *_) = {int(re.match(r"n_layers = (\d+)", line)[1]) for line in outer or found}  # type: ignore[index]
        n, m = (said, m) if outer else (n, said)
    lm.load(nested(n, m, sequential=sequential), state, layout="torch")


def test_one_layer_for_all_in_the_file() -> None:
    """ALBERT has one layer, which it calls several times."""
    state = {"layers.0.weight": np.ones((2, 2), np.float32), "layers.0.bias": np.ones(2, np.float32)}
    model = nnx.Dict(layers=nnx.List([nnx.Linear(2, 2, rngs=R) for _ in range(3)]))
    assert set(lines(model, state).values()) == {
        "n_layers = 1  # of layers: the file has 1, the model 3; or nnx.List([layer] * 3), if all are one, as in ALBERT"
    }
    layer = linear(2)
    shared = nnx.Dict(layers=nnx.List([layer] * 3))
    lm.load(shared, state, layout="torch")
    assert shared["layers"][2] is shared["layers"][0]


# ---------------------------------------------------------------- one table for several


class Apart(nnx.Module):
    """Encoder, decoder and head with tables of their own."""

    def __init__(self, *, head: bool = True, shared: bool = False) -> None:
        norms = [lm.LazyRMSNorm(rngs=R) for _ in range(2)]
        self.encoder, self.decoder = (nnx.Dict(embed_tokens=nnx.Embed(7, 3, rngs=R), norm=norm) for norm in norms)
        self.encoder.embed_positions = nnx.Embed(7, 3, rngs=R)
        if head:
            self.lm_head = lm.LazyLinear(7, use_bias=False, rngs=R)
        if shared:
            self.shared = nnx.Embed(7, 3, rngs=R)


@pytest.mark.parametrize("head", [True, False])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("prefix", ["", "model."])
def test_shared_weight(prefix: str, shared: bool, head: bool) -> None:
    table, positions = (np.random.default_rng(i).random((7, 3), np.float32) for i in range(2))
    one = np.ones(3, np.float32)
    state = {"shared.weight": table, "encoder.norm.weight": one, "decoder.norm.weight": one}
    state = {f"{prefix}{n}": v for n, v in (state | {"encoder.embed_positions.weight": positions}).items()}
    (line,) = set(lines(Apart(head=head, shared=shared), state).values())
    model = Apart(head=head, shared=shared)
    lm.load(model, state, layout="torch", **options_of(line))
    parts: list[Any] = [model.encoder, model.decoder]
    for part in parts:
        np.testing.assert_array_equal(part["embed_tokens"].embedding[...], table)
    np.testing.assert_array_equal(parts[0]["embed_positions"].embedding[...], positions)
    if head:
        np.testing.assert_array_equal(model.lm_head.kernel[...], table.T)


@pytest.mark.parametrize("file", [{"wte.weight": 1}, {"transformer.wte.weight": 1}])
def test_the_copy_for_a_head_names_the_entry_of_the_file(file: dict[str, int]) -> None:
    """Also where the model's name of it is a longer one."""
    table = np.random.default_rng(0).random((7, 3), np.float32)
    state = dict.fromkeys(file, table)
    made = lambda: nnx.Dict(net=nnx.Dict(wte=nnx.Embed(7, 3, rngs=R)), lm_head=lm.LazyLinear(7, use_bias=False, rngs=R))  # noqa: E731
    rename = {} if "wte.weight" in file else {"rename": [("^transformer", "net")]}
    (line,) = set(lines(made(), state, **rename).values())
    model: Any = made()
    rules = [*options_of(line)["rename"], *rename.get("rename", [])]
    lm.load(model, state, layout="torch", rename=rules)
    np.testing.assert_array_equal(model["lm_head"].kernel[...], table.T)


def test_the_copy_for_a_head_of_a_file_of_flax(tmp_path: Any) -> None:
    tied: Any = nnx.Dict(wte=nnx.Embed(7, 3, rngs=R))
    lm.save(tied, tmp_path / "tied.safetensors")
    made = lambda: nnx.Dict(wte=nnx.Embed(7, 3, rngs=R), lm_head=lm.LazyLinear(7, use_bias=False, rngs=R))  # noqa: E731
    with pytest.raises(lm.StateDictError) as caught:
        lm.load(made(), tmp_path / "tied.safetensors")
    (problem,) = caught.value.problems
    model: Any = made()
    lm.load(model, tmp_path / "tied.safetensors", **options_of(problem.write))
    np.testing.assert_array_equal(model["lm_head"].kernel[...], tied["wte"].embedding[...].T)


# ---------------------------------------------------------------- one level more, or one less


class Graph(torch.nn.Module):
    """A layer of graphs, whose bias is no part of its Linear."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.bias = torch.nn.Linear(3, 4, bias=False), torch.nn.Parameter(torch.ones(4))


def test_names_one_level_apart() -> None:
    """To leave the one out and go without the other would load, with other numbers."""
    stem = torch.nn.ModuleDict({"proj": torch.nn.Linear(3, 3)})
    net = torch.nn.ModuleDict({"stem": stem, "convs": torch.nn.ModuleList([Graph() for _ in range(12)])})
    state = random_state(net)
    model = nnx.Dict(stem=linear(3), convs=nnx.List([nnx.Dict(lin=linear(4)) for _ in range(12)]))
    found = set(lines(model, state).values())
    assert found == {
        r'rename=[(r"\bstem[.]proj[.]", r"stem.")]',
        r'rename=[(r"\bconvs[.](\d+)[.]bias$", r"convs.\1.lin.bias")]',
    }
    lm.load(model, state, layout="torch", rename=[pair for line in found for pair in options_of(line)["rename"]])
    np.testing.assert_array_equal(model["stem"].kernel[...], state["stem.proj.weight"].T)
    for i in range(12):
        np.testing.assert_array_equal(model["convs"][i]["lin"].bias[...], state[f"convs.{i}.bias"])


def test_modules_less_in_the_model() -> None:
    """BERT has a norm in ``attention.output``; if that is ignored, the model's is not told to be a plain one."""
    norms = [f"layer.{i}.{name}" for i in range(2) for name in ("attention.output.norm", "out.norm")]
    draw = np.random.default_rng(0)
    state = {f"{norm}.{leaf}": draw.random(3, np.float32) for norm in norms for leaf in LEAVES}

    def model() -> Any:
        norms = [lm.LazyLayerNorm(rngs=R) for _ in range(4)]
        return nnx.Dict(layer=nnx.List([nnx.Dict(norm=norms[i], out=nnx.Dict(norm=norms[i + 2])) for i in range(2)]))

    (line,) = set(lines(model(), state).values())
    assert line == r'rename=[(r"\blayer[.](\d+)[.]attention[.]output[.]norm[.]", r"layer.\1.norm.")]'
    loaded = model()
    lm.load(loaded, state, layout="torch", **options_of(line))
    np.testing.assert_array_equal(loaded["layer"][1]["norm"].scale[...], state["layer.1.attention.output.norm.weight"])
    assert not any("use_" in line for line in lines(model(), state, ignore="attention").values())


def test_numbers_that_the_model_has_not() -> None:
    net = torch.nn.ModuleDict({f"a_{i}": torch.nn.Linear(3, 3) for i in range(2)})
    names = {"a_0": "a.0.b.0", "a_1": "a.1.b.7"}
    state = {names[name[:3]] + name[3:]: value for name, value in random_state(net).items()}
    model = nnx.Dict(a=nnx.List([nnx.Dict(b=linear(3)) for _ in range(2)]))
    found = set(lines(model, state).values())
    assert r'rename=[(r"\ba[.]1[.]b[.]7[.]", r"a.1.b.")]' in found
    lm.load(model, state, layout="torch", rename=[pair for line in found for pair in options_of(line)["rename"]])
    np.testing.assert_array_equal(model["a"][1]["b"].kernel[...], state["a.1.b.7.weight"].T)


def test_of_two_names_that_come_near_none_is_said() -> None:
    several = torch.nn.ModuleDict({name: torch.nn.Linear(3, 3) for name in "ab"})
    state = random_state(torch.nn.ModuleDict({"fc": several}))
    found = lines(nnx.Dict(fc=linear(3)), state)
    assert not any("rename" in line for line in found.values())
    with pytest.raises(lm.StateDictError) as caught:
        lm.load(tower(), towers("text.", "vision."), layout="torch")
    line = r"""rename=[(r"^text\.", "")]  # or 'vision.': whichever part is meant"""
    assert str(caught.value).splitlines()[2] == f"  write:  {line}"


# ---------------------------------------------------------------- recurrent layers


def test_more_recurrent_layers_than_the_model_has() -> None:
    state = random_state(torch.nn.ModuleDict({"lstm": torch.nn.LSTM(3, 4, 3, bidirectional=True)}))

    def model(n: int) -> nnx.Dict:
        cells = [[nnx.RNN(lm.LazyLSTMCell(4, rngs=R)) for _ in range(2)] for _ in range(n)]
        return nnx.Dict(lstm=nnx.List([nnx.Bidirectional(*pair, rngs=R) for pair in cells]))

    assert set(lines(model(2), state).values()) == {"n_layers = 3  # of lstm: the file has 3, the model 2"}
    lm.load(model(3), state, layout="torch")


@pytest.mark.parametrize("layers", [1, 2])
def test_the_layers_of_a_decoder_in_bare_cells(layers: int) -> None:
    """A decoder that runs step by step has cells, where PyTorch's has an ``nn.GRU``."""
    gru = torch.nn.GRU(3, 4, layers, batch_first=True)
    state = {f"decoder.rnn.{name}": value for name, value in random_state(gru).items()}
    gru.load_state_dict({name.removeprefix("decoder.rnn."): value for name, value in state.items()})
    cells = [lm.LazyResetAfterGRUCell(4, rngs=R) for _ in range(layers)]
    model = nnx.Dict(decoder=nnx.Dict(rnn=cells[0] if layers == 1 else nnx.List(cells)))
    out = lm.export_torch(model, like=lm.load(model, state, layout="torch"))
    assert out.keys() == state.keys() and all(np.array_equal(out[name], state[name]) for name in state)
    x, carry = torch.randn(2, 5, 3), [jnp.zeros((2, 4))] * layers
    got = []
    with jax.default_matmul_precision("highest"):
        for step in jnp.asarray(x.numpy()).swapaxes(0, 1):
            for i, cell in enumerate(cells):
                carry[i], step = cell(carry[i], step)
            got.append(step)
    np.testing.assert_allclose(jnp.stack(got, 1), gru(x)[0].detach().numpy(), atol=1e-5)


# ---------------------------------------------------------------- convolutions


def test_the_mask_of_a_convolution_lies_as_its_kernel() -> None:
    """Also where all axes are equally long."""
    mask = np.triu(np.ones((3, 3), np.float32)) * np.ones((3, 3, 1, 1), np.float32)
    weight = np.random.default_rng(0).random((3, 3, 3, 3), np.float32)
    state = {"conv.weight": weight, "conv.mask": mask}
    conv = lm.LazyConv(3, (3, 3), use_bias=False, mask=jnp.zeros((3, 3, 3, 3)), rngs=R)
    model = nnx.Dict(conv=conv)
    out = lm.export_torch(model, like=lm.load(model, state, layout="torch"))
    np.testing.assert_array_equal(conv.mask, mask.transpose(2, 3, 1, 0))
    assert out.keys() == state.keys() and all(np.array_equal(out[name], state[name]) for name in state)


def test_groups_of_a_transposed_convolution() -> None:
    up = torch.nn.ConvTranspose2d(4, 6, 4, stride=2, padding=1, groups=2)
    state = {f"up.{name}": value for name, value in random_state(up).items()}
    up.load_state_dict({name.removeprefix("up."): value for name, value in state.items()})

    def layer(features: int) -> Any:
        return lm.LazyConvTranspose(features, (4, 4), strides=(2, 2), padding=((2, 2), (2, 2)), rngs=R)

    found = lines(nnx.Dict(up=layer(6)), state)
    model = nnx.Dict(up=nnx.List([layer(3), layer(3)]))
    lm.load(model, state, layout="torch", **options_of(found["up.weight"]))
    x = torch.randn(1, 4, 5, 5)
    parts = jnp.split(jnp.moveaxis(jnp.asarray(x.numpy()), 1, -1), 2, axis=-1)
    with jax.default_matmul_precision("highest"):
        got = jnp.concatenate([part(y) for part, y in zip(model["up"], parts, strict=True)], -1)
    np.testing.assert_allclose(jnp.moveaxis(got, -1, 1), up(x).detach().numpy(), atol=1e-5)


def test_a_codebook_is_no_output_layer() -> None:
    """VQ-VAE keeps averages of the shape of its embedding."""
    table = np.ones((7, 3), np.float32)
    state = {"vq.embedding.weight": table, "vq.embed_avg": table + 1}
    found = lines(nnx.Dict(vq=nnx.Dict(embedding=nnx.Embed(7, 3, rngs=R))), state)
    assert found == {"vq.embed_avg": 'ignore=r"^vq[.]embed_avg$"  # leaves it out'}
