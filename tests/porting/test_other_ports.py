"""Ports of kinds that the gallery does not have: numbers of PyTorch, the file's bits back, a planted error named."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import lazymods as lm

torch = pytest.importorskip("torch", reason="the networks are PyTorch's")

import published_nets as nets  # noqa: E402

R = nnx.Rngs


def conv(features: int, size: int, rank: int = 2, **options: Any) -> Any:
    return lm.LazyConv(features, (size,) * rank, rngs=R(0), **options)


def linear(features: int) -> Any:
    return lm.LazyLinear(features, rngs=R(0))


class ResidualBlock(nnx.Module):
    def __init__(self, features: int, *, skip: bool):
        self.norm, self.conv = lm.LazyGroupNorm(num_groups=4, epsilon=1e-5, rngs=R(0)), conv(features, 3, padding=1)
        slopes: Any = jnp.full((1, 1, 1, features), 0.25)
        self.act, self.skip = nnx.PReLU(slopes), conv(features, 1) if skip else None

    def __call__(self, x: Any) -> Any:
        return self.act(self.conv(nnx.silu(self.norm(x)))) + (x if self.skip is None else self.skip(x))


class UNet(nnx.Module):
    def __init__(self, *, added: int = 1) -> None:
        self.stem, self.pool = conv(8, 3, padding=1, use_bias=False), conv(8, 4, strides=2, padding=1)
        self.down = nnx.List([ResidualBlock(8, skip=False), ResidualBlock(16, skip=True)])
        norm = lm.LazyGroupNorm(num_groups=4, epsilon=1e-5, rngs=R(0))
        self.mid = nnx.Sequential(conv(16, 3, padding=2, kernel_dilation=2), norm, nnx.silu)
        pads = ((1, 1 + added), (1, 2)) if added else ((2, 1), (2, 1))  # dilation * (kernel_size - 1) - padding
        self.up = lm.LazyConvTranspose(8, (3, 3), strides=(2, 2), padding=pads, rngs=R(0))
        self.wide = lm.LazyConvTranspose(
            8, (5, 5), padding=((7, 7), (7, 7)), kernel_dilation=2, use_bias=False, rngs=R(0)
        )
        self.norm, self.head = lm.LazyInstanceNorm(epsilon=1e-5, rngs=R(0)), conv(2, 1)

    def __call__(self, x: Any) -> Any:
        skip = self.down[0](self.stem(x))
        y = jnp.concatenate([self.up(self.mid(self.down[1](self.pool(skip)))), skip], -1)
        return self.head(y), self.norm(self.wide(y[..., :8]))


def normed(features: int, size: int, **options: Any) -> list[Any]:
    return [conv(features, size, padding=size // 2, use_bias=False, **options), lm.LazyBatchNorm(rngs=R(0))]


class InvertedResidual(nnx.Module):
    def __init__(self, inputs: int, outputs: int, stride: int, factor: int, act: Any):
        width = inputs * factor
        self.is_residual = stride == 1 and inputs == outputs
        depthwise = normed(width, 3, strides=stride, feature_group_count=width)
        self.conv = nnx.Sequential(*normed(width, 1), act, *depthwise, act, *normed(outputs, 1))

    def __call__(self, x: Any) -> Any:
        return x + self.conv(x) if self.is_residual else self.conv(x)


class MobileNet(nnx.Module):
    def __init__(self, act: Any = nnx.relu6) -> None:
        blocks = [InvertedResidual(*sizes, act) for sizes in ((8, 8, 1, 2), (8, 12, 2, 3), (12, 12, 1, 2))]
        self.features = nnx.Sequential(nnx.Sequential(*normed(8, 3, strides=2), nnx.relu6), *blocks)
        head = [linear(16), lm.LazyBatchNorm(rngs=R(0)), nnx.hard_swish, linear(5)]
        self.classifier = nnx.Sequential(nnx.Dropout(0.2, rngs=R(0)), *head)

    def __call__(self, x: Any) -> Any:
        x = self.features(x)
        n, height, width, c = x.shape
        x = x.reshape(n, 2, height // 2, 2, width // 2, c).mean((2, 4))
        return self.classifier(x.reshape(n, -1))


def attention(heads: int = 4) -> Any:
    return lm.LazyMultiHeadAttention(heads, decode=False, rngs=R(0))


def norm() -> Any:
    return lm.LazyLayerNorm(epsilon=1e-5, rngs=R(0))


class Layer(nnx.Module):
    """A layer of the encoder, or of the decoder, which attends to the encoder's output as well."""

    def __init__(self, *, decodes: bool, heads: int = 4):
        self.self_attn, self.norm1, self.norm2 = attention(heads), norm(), norm()
        self.linear1, self.linear2 = linear(24), linear(16)
        if decodes:
            self.multihead_attn, self.norm3 = attention(), norm()

    def __call__(self, x: Any, memory: Any = None) -> Any:
        mask = None if memory is None else nnx.make_causal_mask(jnp.ones(x.shape[:2]))
        x = self.norm1(x + self.self_attn(x, mask=mask))
        last = self.norm2
        if memory is not None:
            x, last = self.norm2(x + self.multihead_attn(x, memory)), self.norm3
        return last(x + self.linear2(nnx.gelu(self.linear1(x), approximate=False)))


class Layers(nnx.Module):
    def __init__(self, *, decodes: bool, heads: int = 4):
        self.layers, self.norm = nnx.List([Layer(decodes=decodes, heads=heads) for _ in range(2)]), norm()

    def __call__(self, x: Any, *memory: Any) -> Any:
        for layer in self.layers:
            x = layer(x, *memory)
        return self.norm(x)


class Seq2Seq(nnx.Module):
    def __init__(self, *, heads: int = 4):
        self.src, self.tgt = lm.LazyEmbed(rngs=R(0)), lm.LazyEmbed(rngs=R(0))
        self.net = nnx.Dict(encoder=Layers(decodes=False), decoder=Layers(decodes=True, heads=heads))
        self.look, self.out = attention(), linear(13)

    def __call__(self, source: Any, target: Any, image: Any) -> Any:
        x = self.net.decoder(self.tgt(target), self.net.encoder(self.src(source)))
        return self.out(x + self.look(x, image))


class WaveNet(nnx.Module):
    def __init__(self, *, dilation: int = 2) -> None:
        one = {"rank": 1}
        self.emb, self.inp = lm.LazyEmbed(rngs=R(0)), conv(8, 1, **one)
        self.dilations = [1, dilation, 4]
        self.filters = nnx.List([conv(16, 2, kernel_dilation=n, padding="VALID", **one) for n in self.dilations])
        self.cond, self.skip = nnx.List([linear(16) for _ in "abc"]), nnx.List([conv(8, 1, **one) for _ in "abc"])
        self.bn = lm.LazyBatchNorm(rngs=R(0))
        self.up = lm.LazyConvTranspose(4, (4,), strides=(2,), padding=((2, 2),), rngs=R(0))
        self.depth, self.act = conv(4, 3, padding=1, feature_group_count=4, **one), nnx.PReLU()
        self.post = nnx.Sequential(lambda x: nnx.leaky_relu(x, 0.1), conv(2, 1, **one), nnx.tanh)
        cells = [lm.LazyOptimizedLSTMCell(3, rngs=R(0)) for _ in range(4)]
        pairs = (cells[:2], cells[2:])
        self.rnn = nnx.List([nnx.Bidirectional(*map(nnx.RNN, pair), rngs=R(0)) for pair in pairs])

    def __call__(self, x: Any, ids: Any) -> Any:
        c, x, total = self.emb(ids).sum(1), self.inp(x), 0
        for n, filters, cond, skip in zip(self.dilations, self.filters, self.cond, self.skip, strict=True):
            a, b = jnp.split(filters(jnp.pad(x, ((0, 0), (n, 0), (0, 0)))) + cond(c)[:, None], 2, -1)
            y = skip(nnx.tanh(a) * nnx.sigmoid(b))
            total, x = total + y, x + y
        x = self.post(self.act(self.depth(self.up(self.bn(total)))))
        for layer in self.rnn:
            x = layer(x)
        return x


class Port(NamedTuple):
    """A network of PyTorch, its port, what both are called with, and a port with an error that parity is to name."""

    net: Callable[[], Any]
    model: Callable[[], Any]
    inputs: tuple[Any, ...]
    wrong: Callable[[], Any]
    named: str
    flatten: Any = None


IMAGE, WAVE = torch.randn(2, 3, 16, 16), torch.randn(2, 3, 12)
IDS = [torch.arange(2 * n).reshape(2, n) % 9 for n in (4, 5, 7)]
NORMS = torch.nn.utils
FLAT = {"classifier.1": (2, 2, 12)}
PORTS = {
    "U-Net": Port(nets.UNet, UNet, (IMAGE,), lambda: UNet(added=0), "^up"),
    "MobileNet": Port(
        nets.MobileNet, MobileNet, (IMAGE,), lambda: MobileNet(nnx.silu), "silu, PyTorch relu, or relu6, which", FLAT
    ),
    "Seq2Seq": Port(
        nets.Seq2Seq,
        Seq2Seq,
        (IDS[1], IDS[2], torch.randn(2, 7, 6)),
        lambda: Seq2Seq(heads=2),
        r"net\.decoder\.layers\.0\.self_attn.*num_heads",
    ),
    "WaveNet": Port(
        lambda: nets.WaveNet(NORMS.parametrizations.weight_norm),
        WaveNet,
        (WAVE, IDS[0]),
        lambda: WaveNet(dilation=3),
        r"filters\.1.*dilation",
    ),
    "WaveNet, old": Port(
        lambda: nets.WaveNet(NORMS.weight_norm), WaveNet, (WAVE, IDS[0]), lambda: WaveNet(dilation=1), r"filters\.1"
    ),
}


def made(port: Port) -> Any:
    """A network with statistics and magnitudes that nobody would guess."""
    torch.manual_seed(0)
    net = port.net().eval()
    with torch.no_grad():
        for name, value in net.state_dict().items():
            if value.is_floating_point():
                value.add_(0.1 * torch.rand(value.shape))
            elif name.endswith("num_batches_tracked"):
                value.fill_(7)
    return net


def last(x: Any) -> Any:
    """What the model takes: channels last."""
    array = jnp.asarray(x.numpy())
    return jnp.moveaxis(array, 1, -1) if x is IMAGE or x is WAVE else array


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")
@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize("name", PORTS)
def test_a_port(tmp_path: Path, name: str, suffix: str) -> None:
    port = PORTS[name]
    net, path = made(port), tmp_path / f"m{suffix}"
    stored = net.state_dict()
    if suffix == ".pt":
        torch.save(stored, path)
    else:
        lm.save({n: v.numpy() for n, v in stored.items()}, path)
    model, inputs = port.model(), [last(x) for x in port.inputs]
    result = lm.load(model, path, layout="torch", mode="eval", flatten=port.flatten)
    wanted = net(*port.inputs)
    for ours, theirs in zip(*([x] if not isinstance(x, tuple) else x for x in (model(*inputs), wanted)), strict=True):
        array = theirs.detach().numpy()
        array = np.moveaxis(array, 1, -1) if array.shape != ours.shape else array
        np.testing.assert_allclose(ours, array, atol=1e-5 * max(1, np.abs(array).max()))
    out = lm.export_torch(model, like=result)
    assert out.keys() == stored.keys()
    for n, value in out.items():
        np.testing.assert_array_equal(value, stored[n], err_msg=n)  # each bit, also of what was computed from several
    port.net().load_state_dict({n: torch.from_numpy(value) for n, value in out.items()})
    report = lm.parity(model, net, port.inputs, result, model_inputs=tuple(inputs))
    assert report.agrees, str(report)


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")
@pytest.mark.parametrize("name", PORTS)
def test_a_planted_error_is_named(name: str) -> None:
    port = PORTS[name]
    net, model = made(port), port.wrong()
    result = lm.load(model, net, layout="torch", mode="eval", flatten=port.flatten)
    report = lm.parity(model, net, port.inputs, result, model_inputs=tuple(last(x) for x in port.inputs))
    assert not report.agrees and report.first is not None
    assert re.search(port.named, f"{report.first.path}: {report.reason} {report.write}"), str(report)
