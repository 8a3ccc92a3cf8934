"""``lm.parity`` and the shapes of arrays: layouts of either framework, and settings that change a shape."""

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


def port(net: Any, model: Any, folder: Path, x: Any, **options: Any) -> lm.ParityReport:
    """Load what one has into the other, and compare."""
    path = folder / "net.pt"
    torch.save(net.state_dict(), path)
    result = lm.load(model, path, layout="torch", **options)
    return lm.parity(model, net, x, result)


def sequential(**layers: Any) -> Any:
    net = nn.Sequential()
    for name, layer in layers.items():
        net.add_module(name, layer)
    return net.eval()


class Sequence(nnx.Module):
    """Layers by name, one after the other."""

    def __init__(self, **layers: Any) -> None:
        self.names = tuple(layers)
        for name, layer in layers.items():
            setattr(self, name, layer)

    def __call__(self, x: jax.Array) -> jax.Array:
        for name in self.names:
            x = getattr(self, name)(x)
        return x


@pytest.mark.parametrize("shape", [(3, 9, 8), (2, 3, 9, 8)])
def test_maps_without_a_batch(tmp_path: Path, shape: tuple[int, ...]):
    net = sequential(conv=nn.Conv2d(3, 8, 3))
    model = Sequence(conv=lm.LazyConv(8, (3, 3), padding="VALID", rngs=R(0)))
    report = port(net, model, tmp_path, torch.randn(shape))
    assert report.agrees
    assert [row.shape for row in report.rows] == [f"f32[{'2,' * (len(shape) == 4)}7,6,8]"] * 2


TRANSPOSED = [
    ("SAME", {"stride": 2, "padding": 1}, ((0, 1), (0, 1)), ((1, 1), (1, 1))),
    ("VALID", {"stride": 2}, None, ((2, 2), (2, 2))),
    ("VALID", {"stride": 3, "output_padding": 1}, ((2, 2), (2, 2)), ((2, 3), (2, 3))),
    (((2, 2), (2, 2)), {"stride": 2}, None, ((2, 2), (2, 2))),
    (((1, 1), (1, 1)), {"stride": 2}, ((1, 1), (1, 1)), ((2, 2), (2, 2))),
    ("SAME", {"stride": 1, "padding": 1}, None, ((1, 1), (1, 1))),
]


@pytest.mark.parametrize("padding, options, given, wanted", TRANSPOSED)
def test_padding_of_transposed_convolutions(tmp_path: Path, padding: Any, options: Any, given: Any, wanted: Any):
    net = sequential(conv=nn.ConvTranspose2d(3, 8, 3, **options))
    strides = (options["stride"],) * 2
    model = Sequence(conv=lm.LazyConvTranspose(8, (3, 3), strides=strides, padding=padding, rngs=R(0)))
    report = port(net, model, tmp_path, torch.randn(2, 3, 9, 8))
    assert report.agrees is (given is None)
    if given is None:
        assert report.notes == ()
    else:
        assert report.reason.startswith(f"padding={padding!r} pads ")
        assert report.reason.endswith(f"of a transposed convolution {wanted}")
        model = Sequence(conv=lm.LazyConvTranspose(8, (3, 3), strides=strides, padding=wanted, rngs=R(0)))
        assert report.write == f"padding={wanted}"
        assert port(net, model, tmp_path, torch.randn(2, 3, 9, 8)).agrees  # what it says to write is right


@pytest.mark.slow
def test_settings_that_the_file_does_not_tell(tmp_path: Path):
    class Torch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn, self.norm = nn.MultiheadAttention(8, 2, batch_first=True), nn.GroupNorm(4, 8)

        def forward(self, x: Any) -> Any:
            return self.norm(self.attn(x, x, x)[0].transpose(1, 2))

    heads = lm.LazyMultiHeadAttention(4, decode=False, rngs=R(0))
    model = Sequence(attn=heads, norm=lm.LazyGroupNorm(num_groups=2, epsilon=1e-5, rngs=R(0)))
    report = port(Torch(), model, tmp_path, torch.randn(2, 5, 8))
    assert report.first is not None
    assert (report.first.path, report.reason) == ("attn", "num_heads=4, PyTorch has num_heads=2")
    assert report.notes == (
        "attn: num_heads=4, PyTorch has num_heads=2; write num_heads=2",
        "norm: num_groups=2, PyTorch has num_groups=4; write num_groups=4",
    )


def test_a_flatten_of_an_oblong_map_after_a_pool(tmp_path: Path):
    net = sequential(conv=nn.Conv2d(3, 4, 3, padding=1), pool=nn.MaxPool2d(2), flat=nn.Flatten(), fc=nn.Linear(60, 6))

    class Own(Sequence):
        def __call__(self, x: jax.Array) -> jax.Array:
            x = nnx.max_pool(self.conv(x), (2, 2), strides=(2, 2))  # type: ignore[attr-defined]
            return self.fc(x.reshape(len(x), -1))  # type: ignore[attr-defined]

    def model() -> Own:
        return Own(conv=lm.LazyConv(4, (3, 3), rngs=R(0)), fc=lm.LazyLinear(6, rngs=R(0)))

    x = torch.randn(2, 3, 6, 10)
    with pytest.warns(UserWarning, match="flattened channels last"):  # the load tells it, too
        report = port(net, model(), tmp_path, x)
    assert report.reason == (
        "the map before it is flattened channels last here, channels first in PyTorch; H * W is 15"
    )
    assert report.write == 'lm.load(..., layout="torch", flatten={"fc": (H, W, 4)})'
    assert port(net, model(), tmp_path, x, flatten={"fc": (3, 5, 4)}).agrees


def test_positions_of_one_row_and_outputs_besides(tmp_path: Path):
    class Torch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.places = nn.Embedding(11, 4), nn.Embedding(5, 4)

        def forward(self, ids: Any) -> Any:
            return self.tokens(ids) + self.places(torch.arange(5).expand(len(ids), 5))

    class Own(nnx.Module):
        def __init__(self) -> None:
            self.tokens, self.places = lm.LazyEmbed(rngs=R(0)), lm.LazyEmbed(rngs=R(0))

        def __call__(self, ids: jax.Array) -> Any:
            x = self.tokens(ids) + self.places(jnp.arange(5))[None]
            return x, {"cache": jnp.zeros((7, 7))}

    report = port(Torch(), Own(), tmp_path, np.array([[1, 2, 3, 4, 5], [10, 9, 8, 7, 6]]))
    assert report.agrees
    assert [(row.path, row.shape) for row in report.rows] == [
        ("tokens", "f32[2,5,4]"), ("places", "f32[5,4]"), ("", "f32[2,5,4], f32[7,7]"),
    ]  # fmt: skip


def test_heads_apart_are_heads_joined(tmp_path: Path):
    """Projections of ``nnx.MultiHeadAttention`` beside linear layers."""

    class Torch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(8, 8) for _ in range(4))

        def forward(self, x: Any) -> Any:
            q, k, v = (f(x).unflatten(-1, (2, 4)).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj))
            return self.out_proj(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    report = port(Torch(), lm.LazyMultiHeadAttention(2, decode=False, rngs=R(0)), tmp_path, torch.randn(2, 5, 8))
    assert report.agrees
    assert [(row.path, row.torch_path) for row in report.rows] == [
        ("query", "q_proj"), ("key", "k_proj"), ("value", "v_proj"), ("out", "out_proj"), ("", ""),
    ]  # fmt: skip


def test_a_lazy_module_of_pytorch_is_refused():
    with pytest.raises(lm.UninitializedError) as caught:
        lm.parity(nnx.Linear(3, 4, rngs=R(0)), nn.LazyLinear(4), np.ones((2, 3), "f4"))
    assert str(caught.value).startswith("""\
bias (PyTorch)
  got:    no value yet
  needed: a value: only an initialized model can be compared
  write:  torch_module(x)  # once, before lm.load and lm.parity""")


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
def test_padding_by_other_than_zeros(tmp_path: Path, mode: str):
    net = sequential(conv=nn.Conv1d(3, 4, 3, padding=1, padding_mode=mode))
    x = torch.randn(2, 3, 8)
    model = Sequence(conv=lm.LazyConv(4, (3,), padding=((1, 1),), rngs=R(0)))
    report = port(net, model, tmp_path, x)
    assert report.reason == f"padding=((1, 1),) pads by zeros, PyTorch has padding_mode={mode!r}"
    pad = {"reflect": "reflect", "replicate": "edge", "circular": "wrap"}[mode]
    assert report.write == f'jnp.pad(x, ..., mode="{pad}") before it, and padding="VALID"'

    class Padded(Sequence):
        def __call__(self, x: jax.Array) -> jax.Array:
            return super().__call__(jnp.pad(x, ((0, 0), (1, 1), (0, 0)), mode=pad))  # type: ignore[arg-type]

    padded = Padded(conv=lm.LazyConv(4, (3,), padding="VALID", rngs=R(0)))
    report = port(net, padded, tmp_path, x)
    assert report.agrees  # what it says to write is right
    assert report.notes == ()
    if mode == "circular":
        circular = Sequence(conv=lm.LazyConv(4, (3,), padding="CIRCULAR", rngs=R(0)))
        report = port(net, circular, tmp_path, x)
        assert report.agrees
        assert report.notes == ()


def test_the_epsilon_that_pytorch_takes_by_default(tmp_path: Path):
    net = sequential(norm=nn.RMSNorm(5))
    x = 1e-3 * torch.randn(2, 4, 5)
    report = port(net, Sequence(norm=lm.LazyRMSNorm(rngs=R(0))), tmp_path, x)
    assert report.reason == "epsilon=1e-06, PyTorch has eps=1.19209e-07"
    exact = Sequence(norm=lm.LazyRMSNorm(epsilon=float(np.finfo(np.float32).eps), rngs=R(0)))
    assert port(net, exact, tmp_path, x).agrees


def test_inside_of_a_trace_there_is_nothing_to_compare():
    net, model = nn.Linear(3, 4), nnx.Linear(3, 4, rngs=R(0))
    x = np.ones((2, 3), np.float32)

    def inside(x: Any) -> Any:
        lm.parity(model, net, x)
        return x

    def with_model(model: Any, x: Any) -> Any:
        lm.parity(model, net, np.ones((2, 3), np.float32))
        return x

    def in_a_block(x: Any) -> Any:
        with lm.lazytensor.lazy():
            return inside(x)

    for call in (jax.jit(inside), lambda x: nnx.jit(with_model)(model, x), in_a_block):
        with pytest.raises(lm.LazyError) as caught:
            call(x)
        assert str(caught.value) == """\
lm.parity
  got:    a call inside a transform, or a block of lazy tensors
  needed: values: PyTorch has to run on the same ones
  write:  lm.parity(model, torch_module, x)  # outside of it"""
    not_a_module: Any = lambda x: x  # noqa: E731
    with pytest.raises(TypeError, match=r"lm\.parity: model\n  got:    function\n  needed: an nnx\.Module"):
        lm.parity(not_a_module, net, x)


def test_slopes_of_channels_that_come_first() -> None:
    """A PReLU with several slopes takes the second axis for channels, of sequences as well."""

    class Theirs(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.act = torch.nn.Linear(3, 4), torch.nn.PReLU(4)

        def forward(self, x: Any) -> Any:
            return self.act(self.fc(x).transpose(1, 2)).transpose(1, 2)

    class Ours(nnx.Module):
        def __init__(self) -> None:
            slopes: Any = jnp.full((1, 1, 4), 0.25)
            self.fc, self.act = lm.LazyLinear(4, rngs=nnx.Rngs(0)), nnx.PReLU(slopes)

        def __call__(self, x: Any) -> Any:
            return self.act(self.fc(x))

    net, model = Theirs(), Ours()
    net.act.weight.data = torch.tensor([0.1, 0.2, 0.3, 0.4])
    result = lm.load(model, net, layout="torch")
    report = lm.parity(model, net, torch.randn(2, 5, 3), result)
    assert report.agrees and [row.path for row in report.rows] == ["fc", "act", ""], str(report)


class Cut(nn.Module):
    """Takes off what a causal convolution is padded with at its end."""

    def forward(self, x: Any) -> Any:
        return x[..., :-2]


def test_a_causal_convolution_whose_end_pytorch_cuts_off(tmp_path: Path) -> None:
    net = sequential(conv=nn.Conv1d(3, 4, 3, padding=2), cut=Cut(), act=nn.GELU("tanh"), out=nn.Conv1d(4, 2, 1))
    x = torch.randn(2, 3, 6)

    def model(padding: Any) -> Any:
        layers = [lm.LazyConv(4, (3,), padding=padding, rngs=R(0)), lm.LazyConv(2, (1,), rngs=R(0))]
        return Sequence(conv=layers[0], act=nnx.gelu, out=layers[1])

    report = port(net, model("CAUSAL"), tmp_path, x)
    assert report.agrees and [row.path for row in report.rows] == ["out", ""]
    assert report.notes == ("conv is not compared: its output is f32[2,6,4], PyTorch's f32[2,4,8]",)
    report = port(net, model("SAME"), tmp_path, x)
    assert report.first is not None and report.first.path == "conv" and not report.agrees
