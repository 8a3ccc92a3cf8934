"""``lm.parity`` on other shapes of models: other names, shared layers, recurrent ones, attention, several inputs."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import lazymods as lm

torch = pytest.importorskip("torch", reason="parity compares with PyTorch")
nn = torch.nn
R = nnx.Rngs


@pytest.fixture(autouse=True)
def same_numbers_each_time() -> None:
    """A function is told by its values, and few of them may be those of two."""
    torch.manual_seed(0)


def saved(net: Any, folder: Path, prefix: str = "") -> Path:
    """Write what a module holds."""
    path = folder / "net.pt"
    torch.save({prefix + name: value for name, value in net.state_dict().items()}, path)
    return path


def columns(report: lm.ParityReport) -> list[tuple[str, str, int]]:
    return [(row.path, row.torch_path, row.call) for row in report.rows]


class Flat(nnx.Module):
    """Layers by name, called one after the other."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)

    def __init__(self, **layers: Any) -> None:
        for name, layer in layers.items():
            setattr(self, name, layer)
        self.order = tuple(layers)

    def __call__(self, x: Any) -> Any:
        for name in self.order:
            x = getattr(self, name)(x)
        return x


def test_other_names_are_paired_by_the_load(tmp_path: Path):
    net = nn.Sequential(nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4)), nn.Sequential(nn.Linear(4, 5)))
    path = saved(net, tmp_path, prefix="backbone.")
    model = Flat(one=lm.LazyLinear(4, rngs=R(0)), two=lm.LazyLayerNorm(epsilon=1e-5, rngs=R(0)),
                 three=lm.LazyLinear(5, rngs=R(0)))  # fmt: skip
    names = [(r"^backbone\.0\.0", "one"), (r"^backbone\.0\.1", "two"), (r"^backbone\.1\.0", "three")]
    result = lm.load(model, path, layout="torch", rename=names)
    report = lm.parity(model, net, torch.randn(2, 3), result)
    assert report.agrees
    assert columns(report) == [("one", "0.0", 0), ("two", "0.1", 0), ("three", "1.0", 0), ("", "", 0)]
    alone = lm.parity(model, net, torch.randn(2, 3))  # names say nothing, the values do
    assert alone.agrees
    assert columns(alone) == columns(report)
    model.one.kernel[...] += 1  # nor do they now: one is found by its bias
    assert columns(lm.parity(model, net, torch.randn(2, 3))) == columns(report)
    model.one.bias[...] += 1
    lost = lm.parity(model, net, torch.randn(2, 3))
    assert columns(lost) == columns(report)[1:]
    assert lost.notes == ("not compared by themselves: one",)


def test_sequentials_are_paired_by_name(tmp_path: Path):
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 5))
    model = nnx.Sequential(lm.LazyLinear(4, rngs=R(0)), jax.nn.relu, lm.LazyLinear(5, rngs=R(0)))
    lm.load(model, saved(net, tmp_path), layout="torch")
    report = lm.parity(model, net, torch.randn(2, 3))
    assert report.agrees
    assert columns(report) == [("layers.0", "0", 0), ("layers.2", "2", 0), ("", "", 0)]


class TorchTwice(nn.Module):
    def __init__(self, times: int = 2) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.again = self.fc
        self.times = times

    def forward(self, x: Any) -> Any:
        for i in range(self.times):
            x = torch.tanh(self.fc(x) if i % 2 else self.again(x))
        return x


class Twice(nnx.Module):
    def __init__(self, times: int = 2, functions: Any = (jnp.tanh, jnp.tanh)) -> None:
        self.fc = self.again = lm.LazyLinear(4, rngs=R(0))
        self.times, self.functions = times, functions

    def __call__(self, x: jax.Array) -> jax.Array:
        for i in range(self.times):
            x = self.functions[i]((self.fc, self.again)[i % 2](x))
        return x


@pytest.mark.slow
def test_a_shared_layer_has_a_row_for_each_call(tmp_path: Path):
    net, model = TorchTwice(), Twice()
    result = lm.load(model, saved(net, tmp_path), layout="torch")
    report = lm.parity(model, net, torch.randn(16, 4), result)
    assert report.agrees
    assert [(row.path, row.call) for row in report.rows] == [("fc", 0), ("fc", 1), ("", 0)]
    wrong = Twice(functions=(jax.nn.relu, jnp.tanh))
    lm.load(wrong, tmp_path / "net.pt", layout="torch")
    report = lm.parity(wrong, net, torch.randn(16, 4))
    assert report.first is not None
    assert report.first.where == "fc (Linear, call 2)"
    assert report.reason == "of the output of fc (Linear) the model takes relu, PyTorch tanh"
    once = Twice(times=1)
    lm.load(once, tmp_path / "net.pt", layout="torch")
    assert "fc is called once, fc in PyTorch 2 times" in "".join(lm.parity(once, net, torch.randn(16, 4)).notes)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("both", [True, False])
@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_recurrent_layers_are_compared_whole(tmp_path: Path, kind: str, both: bool, batch_first: bool):
    class Torch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = getattr(nn, kind)(3, 4, batch_first=batch_first, bidirectional=both)

        def forward(self, x: Any) -> Any:
            return self.rnn(x if batch_first else x.swapaxes(0, 1))[0]

    class Own(nnx.Module):
        def __init__(self) -> None:
            cell = lm.LazyResetAfterGRUCell if kind == "GRU" else lm.LazyOptimizedLSTMCell
            layers = [nnx.RNN(cell(4, rngs=R(i))) for i in range(1 + both)]
            self.rnn = nnx.Bidirectional(*layers) if both else layers[0]

        def __call__(self, x: jax.Array) -> jax.Array:
            y: Any = self.rnn(x, rngs=R(0))
            return y if batch_first else y.swapaxes(0, 1)

    net, model = Torch(), Own()
    result = lm.load(model, saved(net, tmp_path), layout="torch")
    report = lm.parity(model, net, torch.randn(2, 5, 3), result)
    assert report.agrees
    assert columns(report) == [("rnn", "rnn", 0), ("", "", 0)]
    assert report.rows[0].shape == f"f32[2,5,{4 + 4 * both}]"


@pytest.mark.parametrize("separate", [True, False])
def test_attention_is_compared_whole(tmp_path: Path, separate: bool):
    class Torch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn, self.fc = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 3)

        def forward(self, x: Any) -> Any:
            return self.fc(self.attn(x, x, x)[0])

    class Apart(nnx.Module):
        def __init__(self) -> None:
            self.query, self.key, self.value = (lm.LazyLinear(8, rngs=R(0)) for _ in range(3))
            self.out = lm.LazyLinear(8, rngs=R(0))

        def __call__(self, x: jax.Array) -> jax.Array:
            q, k, v = (layer(x).reshape(*x.shape[:2], 2, 4) for layer in (self.query, self.key, self.value))
            return self.out(jax.nn.dot_product_attention(q, k, v).reshape(x.shape))

    net = Torch()
    attention = Apart() if separate else lm.LazyMultiHeadAttention(2, decode=False, rngs=R(0))
    model = Flat(attn=attention, fc=lm.LazyLinear(3, rngs=R(0)))
    x = torch.randn(2, 5, 8)
    if separate:
        state = {k: v.detach().numpy() for k, v in net.state_dict().items()}
        thirds = np.split(state["attn.in_proj_weight"], 3), np.split(state["attn.in_proj_bias"], 3)
        entries = {}
        for i, name in enumerate(("query", "key", "value")):
            entries |= {f"attn.{name}.kernel": thirds[0][i].T, f"attn.{name}.bias": thirds[1][i]}
        entries |= {"attn.out.kernel": state["attn.out_proj.weight"].T, "attn.out.bias": state["attn.out_proj.bias"]}
        lm.load_state_dict(model, entries | {"fc.kernel": state["fc.weight"].T, "fc.bias": state["fc.bias"]})
        came = {n: ("attn.in_proj_" + ("weight" if "kernel" in n else "bias"),) for n in entries if "out" not in n}
        came |= {"attn.out.kernel": ("attn.out_proj.weight",), "attn.out.bias": ("attn.out_proj.bias",)}
        came |= {"fc.kernel": ("fc.weight",), "fc.bias": ("fc.bias",)}
        result = lm.LoadResult([], [], [], came)
    else:
        result = lm.load(model, saved(net, tmp_path), layout="torch")
    report = lm.parity(model, net, x, result)
    assert report.agrees
    assert columns(report) == [("attn", "attn", 0), ("fc", "fc", 0), ("", "", 0)]


def test_several_inputs_and_outputs(tmp_path: Path):
    class Torch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.fc = nn.Embedding(11, 4), nn.Linear(4, 4)

        def forward(self, ids: Any, scale: Any, shift: float = 0.0) -> Any:
            x = self.fc(self.embed(ids)) * scale + shift
            return {"logits": x, "pooled": (x.mean(1), None), "name": "any"}

    class Own(nnx.Module):
        def __init__(self) -> None:
            self.embed, self.fc = lm.LazyEmbed(rngs=R(0)), lm.LazyLinear(4, rngs=R(0))
            self.wrong = False

        def __call__(self, ids: jax.Array, scale: jax.Array, shift: float = 0.0) -> Any:
            x = self.fc(self.embed(ids)) * scale + shift
            return x, (x.sum(1) if self.wrong else x.mean(1))

    net, model = Torch(), Own()
    result = lm.load(model, saved(net, tmp_path), layout="torch")
    ids, scale = np.array([[1, 2, 10], [0, 3, 4]]), np.full((2, 3, 4), 3.0)
    assert lm.parity(model, net, (ids, scale), result).agrees
    report = lm.parity(model, net, {"ids": torch.tensor(ids), "scale": scale, "shift": 0.5}, result)
    assert report.agrees
    assert columns(report) == [("embed", "embed", 0), ("fc", "fc", 0), ("", "", 0)]
    model.wrong = True
    report = lm.parity(model, net, (ids, scale), result)
    assert report.first is not None
    assert (report.first.path, report.reason) == ("", "it gets 3 times what it gets in PyTorch")


def test_layers_inside_transforms_are_left_out(tmp_path: Path):
    class Own(Flat):
        def __call__(self, x: Any) -> Any:
            return self.two(nnx.jit(lambda layer, x: layer(x))(self.one, x))

    net = nn.Sequential()
    net.one, net.two = nn.Linear(3, 4), nn.Linear(4, 5)
    model = Own(one=lm.LazyLinear(4, rngs=R(0)), two=lm.LazyLinear(5, rngs=R(0)))
    result = lm.load(model, saved(net, tmp_path), layout="torch")
    report = lm.parity(model, net, torch.randn(2, 3), result)
    assert report.agrees
    assert columns(report) == [("two", "two", 0), ("", "", 0)]
    assert report.notes == ("not compared by themselves: one",)


def test_weight_norm_and_narrow_dtypes(tmp_path: Path):
    net = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)), nn.Linear(4, 5))
    layers = lm.LazyWeightNorm(lm.LazyLinear(4, rngs=R(0)), rngs=R(0)), lm.LazyLinear(5, rngs=R(0))
    model = nnx.Sequential(*layers)
    result = lm.load(model, saved(net, tmp_path), layout="torch")
    report = lm.parity(model, net, torch.randn(2, 3), result)
    assert report.agrees
    assert columns(report) == [("layers.0", "0", 0), ("layers.1", "1", 0), ("", "", 0)]
    net, narrow = nn.Sequential(nn.Linear(64, 64)), nnx.Sequential(lm.LazyLinear(64, dtype=jnp.bfloat16, rngs=R(0)))
    result = lm.load(narrow, saved(net, tmp_path), layout="torch")
    x = torch.randn(2, 64)
    assert lm.parity(narrow, net, x, result).agrees  # to the rounding of bfloat16
    assert lm.parity(narrow, net.bfloat16(), x.bfloat16(), result).agrees


@pytest.mark.slow
def test_what_is_no_number_is_compared_as_well(tmp_path: Path):
    class Torch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 3)

        def forward(self, x: Any) -> Any:
            return self.fc(x).masked_fill(torch.eye(3, dtype=torch.bool), -torch.inf)

    class Own(Flat):
        def __call__(self, x: Any) -> Any:
            return jnp.where(jnp.eye(3, dtype=bool), self.fill, self.fc(x))

    net, model = Torch(), Own(fill=-jnp.inf, fc=lm.LazyLinear(3, rngs=R(0)))
    result = lm.load(model, saved(net, tmp_path), layout="torch")
    for fill, agrees in ((-jnp.inf, True), (-1e9, False), (jnp.nan, False)):
        setattr(model, "fill", fill)  # noqa: B010
        report = lm.parity(model, net, torch.randn(3, 3), result)
        assert report.agrees is agrees
        assert report.rows[0].agrees
