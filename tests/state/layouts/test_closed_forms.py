"""Every layout against formulas written out in numpy, without PyTorch."""
# pyright: reportArgumentType=false

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from torch_cases import Net
from torch_files import imported, load, normal

import lazymods as lm
from lazymods.state.exporting import export_torch

R = nnx.Rngs


def close(got, want) -> None:
    np.testing.assert_allclose(np.asarray(got), want, atol=2e-5, rtol=1e-5)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def test_linear():
    w, b, x = normal(3, 3), normal(3), normal(2, 3, seed=1)
    layer = lm.LazyLinear(3, rngs=R(0))
    load(layer, {"weight": w, "bias": b})
    close(layer(x), x @ w.T + b)


def test_embedding_is_not_transposed():
    layer = lm.LazyEmbed(rngs=R(0))
    load(layer, {"weight": normal(4, 4)})
    close(layer(jnp.array([2, 0])), normal(4, 4)[[2, 0]])


@pytest.mark.parametrize("groups", [1, 2])
def test_conv(groups: int):
    w, b, x = normal(4, 4 // groups, 3), normal(4), normal(1, 6, 4, seed=1)
    layer = lm.LazyConv(4, (3,), padding="VALID", feature_group_count=groups, rngs=R(0))
    load(layer, {"weight": w, "bias": b})
    want = np.zeros((1, 4, 4))
    for o in range(4):
        first = o // (4 // groups) * (4 // groups)
        for t in range(4):
            want[0, t, o] = b[o] + sum(
                w[o, i, k] * x[0, t + k, first + i] for i in range(4 // groups) for k in range(3)
            )
    close(layer(x), want)


@pytest.mark.parametrize("transpose_kernel", [False, True])
def test_transposed_conv_scatters_its_kernel(transpose_kernel: bool):
    w, x = normal(2, 2, 2), normal(1, 3, 2, seed=1)
    layer = lm.LazyConvTranspose(
        2, (2,), strides=2, padding=((1, 1),), use_bias=False, transpose_kernel=transpose_kernel, rngs=R(0)
    )
    load(layer, {"weight": w})
    want = np.zeros((1, 6, 2))
    for t in range(3):
        for k in range(2):
            want[0, 2 * t + k] += x[0, t] @ w[:, :, k]
    close(layer(x), want)


def test_batch_norm():
    names = ("weight", "bias", "running_mean", "running_var")
    file = {name: abs(normal(3, seed=i)) for i, name in enumerate(names)} | {"num_batches_tracked": np.array(7)}
    layer = lm.LazyBatchNorm(use_running_average=True, epsilon=1e-5, rngs=R(0))
    load(layer, file)
    x = normal(4, 3, seed=9)
    scale, bias, mean, var = (file[name] for name in names)
    close(layer(x), (x - mean) / np.sqrt(var + 1e-5) * scale + bias)


def test_attention():
    width, heads = 4, 2
    file = {
        "in_proj_weight": normal(12, 4),
        "in_proj_bias": normal(12, seed=1),
        "out_proj.weight": normal(4, 4, seed=2),
        "out_proj.bias": normal(4, seed=3),
    }
    layer = lm.LazyMultiHeadAttention(heads, decode=False, rngs=R(0))
    load(layer, file)
    x = normal(1, 3, 4, seed=4)
    q, k, v = np.split(x[0] @ file["in_proj_weight"].T + file["in_proj_bias"], 3, axis=-1)
    mixed = []
    for h in range(heads):
        part = slice(h * width // heads, (h + 1) * width // heads)
        weights = np.exp(q[:, part] @ k[:, part].T / np.sqrt(width // heads))
        mixed.append(weights / weights.sum(-1, keepdims=True) @ v[:, part])
    close(layer(x), (np.concatenate(mixed, -1) @ file["out_proj.weight"].T + file["out_proj.bias"])[None])


@pytest.mark.parametrize("spelling", ["{}_proj", "{}"])
def test_attention_with_a_linear_for_each_projection(spelling: str):
    names = {"query": "q", "key": "k", "value": "v"}
    file = {"in_proj_weight": normal(12, 4), "in_proj_bias": normal(12)}
    file |= {"out_proj.weight": normal(4, 4), "out_proj.bias": normal(4)}
    apart = {k: v for k, v in file.items() if k.startswith("out")}
    for i, (long, short) in enumerate(names.items()):
        name = spelling.format(short if "_" in spelling else long)
        apart[f"{name}.weight"] = file["in_proj_weight"][4 * i : 4 * i + 4]
        apart[f"{name}.bias"] = file["in_proj_bias"][4 * i : 4 * i + 4]
    fused, separate = (lm.LazyMultiHeadAttention(2, decode=False, rngs=R(0)) for _ in range(2))
    load(fused, file)
    load(separate, apart)
    x = normal(1, 3, 4)
    close(separate(x), np.asarray(fused(x)))


def test_attention_with_fewer_heads_of_keys():
    file = {f"{p}_proj.weight": normal(4 if p in "kv" else 8, 8) for p in "qkv"} | {"out_proj.weight": normal(8, 8)}
    layer = lm.LazyMultiHeadAttention(4, num_kv_heads=2, use_bias=False, decode=False, rngs=R(0))
    load(layer, file)
    assert layer.key.kernel.shape == (8, 2, 2)
    assert np.array_equal(layer.key.kernel[...], file["k_proj.weight"].T.reshape(8, 2, 2))


@pytest.mark.parametrize("lazy", [lm.LazyLSTMCell, lm.LazyOptimizedLSTMCell])
def test_lstm(lazy):
    hidden = 3
    file = {"weight_ih": normal(12, 3), "weight_hh": normal(12, 3, seed=1)}
    file |= {"bias_ih": normal(12, seed=2), "bias_hh": normal(12, seed=3)}
    cell = lazy(hidden, rngs=R(0))
    load(cell, file)
    c, h, x = normal(2, 3, seed=4), normal(2, 3, seed=5), normal(2, 3, seed=6)
    gates = x @ file["weight_ih"].T + h @ file["weight_hh"].T + file["bias_ih"] + file["bias_hh"]
    i, f, g, o = np.split(gates, 4, axis=-1)
    new = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
    close(cell((c, h), x)[1], sigmoid(o) * np.tanh(new))


def test_gru():
    file = {"weight_ih": normal(9, 3), "weight_hh": normal(9, 3, seed=1)}
    file |= {"bias_ih": normal(9, seed=2), "bias_hh": np.r_[normal(6, seed=3), np.zeros(3, np.float32)]}
    cell = lm.LazyGRUCell(3, rngs=R(0))
    load(cell, file)
    h, x = normal(2, 3, seed=4), normal(2, 3, seed=5)
    i = np.split(x @ file["weight_ih"].T + file["bias_ih"], 3, axis=-1)
    j = np.split(h @ file["weight_hh"].T + file["bias_hh"], 3, axis=-1)
    r, z = sigmoid(i[0] + j[0]), sigmoid(i[1] + j[1])
    close(cell(h, x)[1], (1 - z) * np.tanh(i[2] + r * j[2]) + z * h)


def test_rnn_without_biases():
    file = {"m.weight_ih_l0": normal(4, 3), "m.weight_hh_l0": normal(4, 4)}
    net = Net(nnx.RNN(lm.LazySimpleCell(4, rngs=R(0))))
    found = imported(net, file)
    assert found.entries["m.cell.dense_i.bias"].tolist() == [0] * 4 and found.sources["m.cell.dense_i.bias"] == ()
    load(net, file)
    x, h = normal(1, 3, 3), np.zeros((1, 4), np.float32)
    for t in range(3):
        h = np.tanh(x[:, t] @ file["m.weight_ih_l0"].T + h @ file["m.weight_hh_l0"].T)
    close(net.m(x)[:, -1], h)


@pytest.mark.parametrize("sizes", [(2, 3, 4), (6, 4), (1, 2, 3, 4), (24,)])
@pytest.mark.parametrize("make", [lambda: lm.LazyLinear(5, rngs=R(0)), lambda: nnx.Linear(24, 5, rngs=R(0))])
def test_flatten(sizes: tuple[int, ...], make):
    w, x = normal(5, 24), normal(1, *sizes, seed=1)
    net = Net(make())
    load(net, {"m.weight": w, "m.bias": np.zeros(5, np.float32)}, {"m": sizes})
    close(net.m(x.reshape(1, -1)), np.moveaxis(x, -1, 1).reshape(1, -1) @ w.T)
    assert np.array_equal(export_torch(net, flatten={"m": sizes})["m.weight"], w)


def test_layer_norm_over_several_axes():
    shape = (2, 3, 4)  # height, width, channels
    x, w, b = normal(2, *shape), normal(4, 2, 3, seed=1), normal(4, 2, 3, seed=2)
    net = Net(lm.LazyLayerNorm(feature_axes=(1, 2, 3), reduction_axes=(1, 2, 3), epsilon=1e-5, rngs=R(0)))
    load(net, {"m.weight": w, "m.bias": b}, {"m": shape})
    y = (x - x.mean((1, 2, 3), keepdims=True)) / np.sqrt(x.var((1, 2, 3), keepdims=True) + 1e-5)
    close(net.m(x), y * w.transpose(1, 2, 0) + b.transpose(1, 2, 0))
    assert np.array_equal(export_torch(net, flatten={"m": shape})["m.weight"], w)


def test_layer_norm_over_several_axes_in_their_order():
    net = Net(lm.LazyLayerNorm(feature_axes=(1, 2), reduction_axes=(1, 2), use_bias=False, rngs=R(0)))
    load(net, {"m.weight": normal(2, 3)}, {"m": (6,)})
    assert np.array_equal(net.m.scale[...], normal(6))


def test_linear_general_over_several_axes():
    w, x = normal(5, 24), normal(1, 2, 3, 4, seed=1)
    net = Net(nnx.LinearGeneral((2, 3, 4), 5, axis=(1, 2, 3), use_bias=False, rngs=R(0)))
    load(net, {"m.weight": w}, {"m": (2, 3, 4)})
    close(net.m(x), np.moveaxis(x, -1, 1).reshape(1, -1) @ w.T)
    assert np.array_equal(export_torch(net, flatten={"m": (2, 3, 4)})["m.weight"], w)
    load(net, {"m.weight": w}, {"m": (24,)})
    close(net.m(x), x.reshape(1, -1) @ w.T)


@pytest.mark.parametrize(("file", "model"), [((1,), ()), ((1,), (1,)), ((3,), (3,)), ((3,), (1, 1, 3))])
def test_prelu(file: tuple[int, ...], model: tuple[int, ...]):
    layer = nnx.PReLU(jnp.ones(model))  # pyright: ignore[reportArgumentType]
    load(layer, {"weight": normal(*file)})
    assert np.array_equal(layer.negative_slope[...], normal(*file).reshape(model))
    assert np.array_equal(export_torch(layer)["weight"], normal(*file))
