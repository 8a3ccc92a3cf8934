"""Published networks with LSTMs: Resemblyzer's voice encoder with its weights, and the CRNN of EasyOCR."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import lazymods as lm

torch = pytest.importorskip("torch", reason="the numbers to compare with are PyTorch's")


@pytest.fixture(autouse=True)
def exactly():
    """PyTorch's float32, and the promotion that Flax's LSTM relies on."""
    with jax.default_matmul_precision("highest"), jax.numpy_dtype_promotion("standard"):
        yield


# ---------------------------------------------------------------- a voice encoder


class VoiceEncoder(nnx.Module):
    """Three LSTMs, whose last state becomes a vector of length 1."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.lstm = nnx.List([nnx.RNN(lm.LazyLSTMCell(256, rngs=rngs)) for _ in range(3)])
        self.linear = lm.LazyLinear(256, rngs=rngs)

    def __call__(self, mels: jax.Array) -> jax.Array:
        for layer in self.lstm:
            rnn: Any = layer
            mels = rnn(mels)
        embedding = jax.nn.relu(self.linear(mels[:, -1]))
        return embedding / jnp.linalg.norm(embedding, axis=1, keepdims=True)


def test_resemblyzer() -> None:
    spec = importlib.util.find_spec("resemblyzer")  # finds it without importing what it needs
    if spec is None or spec.origin is None:
        pytest.skip("resemblyzer is not installed: pip install --no-deps resemblyzer")
    file = Path(spec.origin).parent / "pretrained.pt"
    model: Any = VoiceEncoder(rngs=nnx.Rngs(0))
    result = lm.load(model, file, layout="torch", root="model_state", ignore=["similarity_.*"])
    assert (result.missing, result.unexpected, result.root) == ([], [], "model_state")
    assert model.lstm[0].cell.in_features == 40

    weights = torch.load(file, map_location="cpu", weights_only=False)["model_state"]
    lstm, linear = torch.nn.LSTM(40, 256, 3, batch_first=True), torch.nn.Linear(256, 256)
    torch.nn.ModuleDict({"lstm": lstm, "linear": linear}).load_state_dict(weights, strict=False)
    mels = np.random.default_rng(0).random((2, 30, 40), np.float32)
    with torch.no_grad():
        _, (hidden, _) = lstm(torch.from_numpy(mels))
        want = torch.nn.functional.normalize(torch.relu(linear(hidden[-1]))).numpy()
    np.testing.assert_allclose(np.asarray(model(mels)), want, atol=1e-5)


# ---------------------------------------------------------------- reading text

CHANNELS = (4, 8, 16, 16, 32, 32, 32)


def torch_crnn(hidden: int, classes: int) -> Any:
    """The network of EasyOCR's models of the second generation, with its names."""
    from torch import nn

    def conv(inputs: int, features: int, **options) -> Any:
        return nn.Conv2d(inputs, features, 3, 1, 1, **options)

    class Features(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            a, b, c, d, e, f, g = CHANNELS
            self.ConvNet = nn.Sequential(
                *(conv(1, a), nn.ReLU(True), nn.MaxPool2d(2, 2), conv(a, b), nn.ReLU(True), nn.MaxPool2d(2, 2)),
                *(conv(b, c), nn.ReLU(True), conv(c, d), nn.ReLU(True), nn.MaxPool2d((2, 1), (2, 1))),
                *(conv(d, e, bias=False), nn.BatchNorm2d(e), nn.ReLU(True)),
                *(conv(e, f, bias=False), nn.BatchNorm2d(f), nn.ReLU(True), nn.MaxPool2d((2, 1), (2, 1))),
                *(nn.Conv2d(f, g, 2, 1, 0), nn.ReLU(True)),
            )

    class Bidirectional(nn.Module):
        def __init__(self, inputs: int) -> None:
            super().__init__()
            self.rnn = nn.LSTM(inputs, hidden, bidirectional=True, batch_first=True)
            self.linear = nn.Linear(2 * hidden, hidden)

        def forward(self, x):
            return self.linear(self.rnn(x)[0])

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.FeatureExtraction = Features()
            self.SequenceModeling = nn.Sequential(Bidirectional(CHANNELS[-1]), Bidirectional(hidden))
            self.Prediction = nn.Linear(hidden, classes)

        def forward(self, x):
            x = self.FeatureExtraction.ConvNet(x).permute(0, 3, 1, 2).mean(3)
            return self.Prediction(self.SequenceModeling(x))

    return Model()


def pool(x: jax.Array, window: tuple[int, int]) -> jax.Array:
    return nnx.max_pool(x, window, window)


class Features(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.ConvNet = nnx.Dict()
        for number, features in zip((0, 3, 6, 8, 11, 14), CHANNELS, strict=False):
            use_bias = number < 11
            self.ConvNet[str(number)] = lm.LazyConv2d(features, 3, padding=1, use_bias=use_bias, rngs=rngs)
        self.ConvNet["12"], self.ConvNet["15"] = lm.LazyBatchNorm(rngs=rngs), lm.LazyBatchNorm(rngs=rngs)
        self.ConvNet["18"] = lm.LazyConv2d(CHANNELS[-1], 2, padding="VALID", rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        net, relu = self.ConvNet, jax.nn.relu
        x = pool(relu(net["3"](pool(relu(net["0"](x)), (2, 2)))), (2, 2))
        x = pool(relu(net["8"](relu(net["6"](x)))), (2, 1))
        x = relu(net["12"](net["11"](x)))
        x = pool(relu(net["15"](net["14"](x))), (2, 1))
        return relu(net["18"](x))


class Bidirectional(nnx.Module):
    def __init__(self, hidden: int, *, rngs: nnx.Rngs) -> None:
        forward, backward = (nnx.RNN(lm.LazyLSTMCell(hidden, rngs=rngs)) for _ in range(2))
        self.rnn: Any = nnx.Bidirectional(forward, backward, rngs=rngs)
        self.linear = lm.LazyLinear(hidden, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.linear(self.rnn(x))


class CRNN(nnx.Module):
    def __init__(self, hidden: int, classes: int, *, rngs: nnx.Rngs) -> None:
        self.FeatureExtraction = Features(rngs=rngs)
        self.SequenceModeling = nnx.List([Bidirectional(hidden, rngs=rngs) for _ in range(2)])
        self.Prediction = lm.LazyLinear(classes, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.FeatureExtraction(x).mean(1)  # over the height
        for layer in self.SequenceModeling:
            x = layer(x)
        return self.Prediction(x)


@pytest.mark.slow
@pytest.mark.parametrize("wrapped", ["", "module."])
def test_easyocr_crnn(tmp_path: Path, wrapped: str) -> None:
    torch.manual_seed(0)
    theirs = torch_crnn(24, 11)
    for module in theirs.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
    theirs.eval()
    torch.save({wrapped + name: value for name, value in theirs.state_dict().items()}, tmp_path / "crnn.pth")
    model = CRNN(24, 11, rngs=nnx.Rngs(0))
    result = lm.load(model, tmp_path / "crnn.pth", layout="torch", mode="eval")
    assert (result.missing, result.unexpected) == ([], [])
    image = np.random.default_rng(0).standard_normal((2, 1, 64, 48), np.float32)
    with torch.no_grad():
        want = theirs(torch.from_numpy(image)).numpy()
    got = np.asarray(model(jnp.asarray(image.transpose(0, 2, 3, 1))))
    assert got.shape == want.shape
    np.testing.assert_allclose(got, want, atol=1e-5)
    given, back = theirs.state_dict(), {n: torch.tensor(v) for n, v in lm.export_torch(model, like=result).items()}
    assert list(back) == [wrapped + name for name in given]
    lstm_biases = [name for name in given if "bias_ih" in name or "bias_hh" in name]  # of which Flax has the sum
    assert all(torch.equal(back[wrapped + name], given[name]) for name in given if name not in lstm_biases)
    for name in lstm_biases:
        other = name.replace("bias_ih", "bias_hh") if "bias_ih" in name else name.replace("bias_hh", "bias_ih")
        torch.testing.assert_close(back[wrapped + name] + back[wrapped + other], given[name] + given[other])
