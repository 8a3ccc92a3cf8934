"""Weights that PyTorch stores as what they are computed from: weight norm, spectral norm, pruning."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from torch_cases import Net
from torch_files import imported, load, normal

import lazymods as lm
from lazymods.state.exporting import export_torch

R = nnx.Rngs
SPELLINGS = pytest.mark.parametrize(
    ("g", "v"), [("weight_g", "weight_v"), ("parametrizations.weight.original0", "parametrizations.weight.original1")]
)


def norm(v: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    return np.sqrt((v * v).sum(axes, keepdims=True))


def layer_of(net: Net) -> Any:
    return net.m.layer_instance


def scales_of(layer: Any) -> np.ndarray:
    return np.asarray(lm.state_dict(layer)["scales.kernel"])


@SPELLINGS
@pytest.mark.parametrize("lazy", [True, False])
def test_weight_norm_keeps_magnitudes_and_directions(g: str, v: str, lazy: bool):
    file = {f"m.{g}": abs(normal(4, 1)), f"m.{v}": normal(4, 4, seed=1), "m.bias": normal(4)}
    layer = lm.LazyLinear(4, rngs=R(0)) if lazy else nnx.Linear(4, 4, rngs=R(0))
    net = Net(lm.LazyWeightNorm(layer, rngs=R(0)) if lazy else nnx.WeightNorm(layer, rngs=R(0)))
    load(net, file)
    assert type(net.m) is nnx.WeightNorm
    assert np.array_equal(scales_of(net.m), file[f"m.{g}"][:, 0])
    assert np.array_equal(layer_of(net).kernel[...], file[f"m.{v}"].T)
    w, x = file[f"m.{g}"] * file[f"m.{v}"] / norm(file[f"m.{v}"], (1,)), normal(2, 4, seed=2)
    for _ in range(2):
        np.testing.assert_allclose(np.asarray(net.m(x)), x @ w.T + file["m.bias"], atol=1e-5)


@SPELLINGS
def test_weight_norm_is_folded_into_a_plain_layer(g: str, v: str):
    file = {g: normal(4, 1), v: normal(4, 4, seed=1), "bias": normal(4)}
    layer = lm.LazyLinear(4, rngs=R(0))
    found = imported(layer, file)
    assert found.sources["kernel"] == (g, v)
    load(layer, file)
    np.testing.assert_allclose(np.asarray(layer.kernel[...]).T, file[g] * file[v] / norm(file[v], (1,)), rtol=1e-6)


def test_weight_norm_of_the_whole_matrix():
    file = {"m.weight_g": np.array(2, np.float32), "m.weight_v": normal(3, 3), "m.bias": normal(3)}
    net = Net(lm.LazyWeightNorm(lm.LazyLinear(3, rngs=R(0)), feature_axes=None, rngs=R(0)))
    load(net, file)
    w, x = 2 * file["m.weight_v"] / norm(file["m.weight_v"], (0, 1)), normal(2, 3, seed=2)
    np.testing.assert_allclose(np.asarray(net.m(x)), x @ w.T + file["m.bias"], atol=1e-5)
    assert export_torch(net)["m.parametrizations.weight.original0"].shape == ()


def test_a_negative_magnitude_gives_one_output_at_every_call():
    """nnx.WeightNorm keeps the product as the next direction; a negative scale would turn it at every call."""
    file = {"m.weight_g": np.array([[-2.0], [1.0]], np.float32), "m.weight_v": normal(2, 3), "m.bias": normal(2)}
    net = Net(lm.LazyWeightNorm(lm.LazyLinear(2, rngs=R(0)), rngs=R(0)))
    load(net, file)
    w, x = file["m.weight_g"] * file["m.weight_v"] / norm(file["m.weight_v"], (1,)), normal(2, 3, seed=2)
    for _ in range(3):
        np.testing.assert_allclose(np.asarray(net.m(x)), x @ w.T + file["m.bias"], atol=1e-5)


def test_weight_norm_of_a_conv():
    file = {"m.weight_g": abs(normal(4, 1, 1)), "m.weight_v": normal(4, 2, 3, seed=1), "m.bias": normal(4)}
    net, plain = (Net(m) for m in (_normed_conv(), lm.LazyConv(4, (3,), rngs=R(0))))
    load(net, file)
    load(plain, file)
    x = normal(1, 5, 2)
    np.testing.assert_allclose(np.asarray(net.m(x)), np.asarray(plain.m(x)), atol=1e-5)


def _normed_conv() -> Any:
    return lm.LazyWeightNorm(lm.LazyConv(4, (3,), rngs=R(0)), rngs=R(0))


@pytest.mark.parametrize(("transposed", "axis"), [(False, -2), (True, -1)])
def test_weight_norm_of_a_transposed_conv_goes_along_its_inputs(transposed: bool, axis: int):
    file = {"m.weight_g": abs(normal(3, 1, 1)), "m.weight_v": normal(3, 3, 2, seed=1), "m.bias": normal(3)}
    layer = lm.LazyConvTranspose(3, (2,), transpose_kernel=transposed, rngs=R(0))
    net = Net(lm.LazyWeightNorm(layer, feature_axes=axis, rngs=R(0)))
    plain = Net(lm.LazyConvTranspose(3, (2,), transpose_kernel=transposed, rngs=R(0)))
    load(net, file)
    load(plain, file)
    x = normal(1, 5, 3)
    np.testing.assert_allclose(np.asarray(net.m(x)), np.asarray(plain.m(x)), atol=1e-5)


def test_weight_norm_after_a_flatten():
    sizes, x = (2, 3, 4), normal(1, 2, 3, 4)
    file = {"m.weight_g": abs(normal(5, 1)), "m.weight_v": normal(5, 24, seed=1), "m.bias": normal(5)}
    w = file["m.weight_g"] * file["m.weight_v"] / norm(file["m.weight_v"], (1,))
    want = np.moveaxis(x, -1, 1).reshape(1, -1) @ w.T + file["m.bias"]
    for layer in (lm.LazyLinear(5, rngs=R(0)), lm.LazyWeightNorm(lm.LazyLinear(5, rngs=R(0)), rngs=R(0))):
        net = Net(layer)
        load(net, file, {"m": sizes})
        np.testing.assert_allclose(np.asarray(net.m(x.reshape(1, -1))), want, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"feature_axes": None}, {"feature_axes": 0}, {"use_scale": False}])
@pytest.mark.parametrize("flatten", [None, {"m": (2, 3)}])
def test_weight_norm_comes_back_bit_for_bit(options: dict[str, Any], flatten: Any):
    def make(seed: int) -> Net:
        return Net(nnx.WeightNorm(nnx.Linear(6, 6, rngs=R(seed)), **options, rngs=R(seed)))

    net, twin = make(0), make(1)
    state = lm.state_dict(net)
    if "m.scales.kernel" in state:
        lm.load_state_dict(net, {"m.scales.kernel": abs(normal(*state["m.scales.kernel"].shape))}, strict=False)
    out = export_torch(net, flatten=flatten)
    assert list(out) == [f"m.parametrizations.weight.original{i}" for i in (0, 1)] + ["m.bias"]
    load(twin, out, flatten)
    for name, value in lm.state_dict(net).items():
        assert np.array_equal(np.asarray(value), np.asarray(lm.state_dict(twin)[name])), name


def test_spectral_norm_is_folded_as_in_eval_mode():
    u, w = normal(4), normal(4, 4, seed=2)
    v = u @ w / np.linalg.norm(u @ w)
    for file in (
        {"weight_orig": w, "weight_u": u, "weight_v": v},
        {f"parametrizations.weight.{n}": a for n, a in {"original": w, "0._u": u, "0._v": v}.items()},
    ):
        layer = lm.LazyLinear(4, use_bias=False, rngs=R(0))
        load(layer, file)
        np.testing.assert_allclose(np.asarray(layer.kernel[...]).T, w / (u @ w @ v), rtol=1e-5)


def test_pruned_weights_are_masked():
    file = {"weight_orig": normal(3, 3), "weight_mask": np.eye(3, dtype=np.float32)}
    layer = lm.LazyLinear(3, use_bias=False, rngs=R(0))
    load(layer, file)
    assert np.array_equal(layer.kernel[...], (normal(3, 3) * np.eye(3)).T)


def test_a_computed_weight_of_a_recurrent_layer():
    file = {"m.weight_ih_l0": normal(3, 3), "m.weight_hh_l0_g": normal(3, 1), "m.weight_hh_l0_v": normal(3, 3)}
    net = Net(nnx.RNN(lm.LazySimpleCell(3, rngs=R(0))))
    load(net, file)
    want = file["m.weight_hh_l0_g"] * normal(3, 3) / norm(normal(3, 3), (1,))
    np.testing.assert_allclose(np.asarray(net.m.cell.dense_h.kernel[...]).T, want, rtol=1e-6)


# ---------------------------------------------------------------- against PyTorch


def _torch_file(module: Any) -> dict[str, np.ndarray]:
    return {f"m.{k}": t.detach().numpy().copy() for k, t in module.state_dict().items()}


def _normed(torch: Any, old: bool, layer: Any, **options: Any) -> Any:
    if not old:
        return torch.nn.utils.parametrizations.weight_norm(layer, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # deprecated, but what old files were written with
        return torch.nn.utils.weight_norm(layer, **options)


@pytest.mark.parametrize("old", [True, False])
@pytest.mark.parametrize("kind", ["linear", "conv", "transposed", "whole", "lstm"])
def test_weight_norm_against_pytorch(kind: str, old: bool):
    torch = pytest.importorskip("torch", reason="PyTorch is the oracle here")
    nn, x = torch.nn, normal(2, 4, 5)
    module, plain, wrapped = {
        "linear": (_normed(torch, old, nn.Linear(5, 5)), lm.LazyLinear(5, rngs=R(0)), {}),
        "whole": (_normed(torch, old, nn.Linear(5, 5), dim=None), lm.LazyLinear(5, rngs=R(0)), {"feature_axes": None}),
        "conv": (
            _normed(torch, old, nn.Conv1d(5, 6, 3)),
            lm.LazyConv(6, (3,), padding="VALID", rngs=R(0)),
            {},
        ),
        "transposed": (
            _normed(torch, old, nn.ConvTranspose1d(5, 5, 2, stride=2)),
            lm.LazyConvTranspose(5, (2,), strides=2, padding=((1, 1),), rngs=R(0)),
            {"feature_axes": -2},
        ),
        "lstm": (
            _normed(torch, old, nn.LSTM(5, 3, batch_first=True), name="weight_hh_l0"),
            nnx.RNN(lm.LazyOptimizedLSTMCell(3, rngs=R(0))),
            None,
        ),
    }[kind]
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith(("_g", "original0")):
                parameter.uniform_(-1.5, 1.5)
        turned = kind in ("conv", "transposed")
        y = module(torch.tensor(x.swapaxes(1, 2).copy() if turned else x))
    want = (y[0] if kind == "lstm" else y).numpy()
    want = want.swapaxes(1, 2) if turned else want
    nets = [Net(plain)]
    if wrapped is not None:
        nets.append(Net(lm.LazyWeightNorm(nnx.clone(plain), **wrapped, rngs=R(0))))
    for net in nets:
        load(net, _torch_file(module))
        with jax.default_matmul_precision("highest"):
            np.testing.assert_allclose(np.asarray(net.m(jnp.asarray(x))), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("old", [True, False])
@pytest.mark.parametrize("kind", ["linear", "conv", "transposed"])
def test_spectral_norm_against_pytorch(kind: str, old: bool):
    torch = pytest.importorskip("torch", reason="PyTorch is the oracle here")
    nn, x = torch.nn, normal(2, 4, 5)
    spectral = nn.utils.spectral_norm if old else nn.utils.parametrizations.spectral_norm
    layer, plain = {
        "linear": (nn.Linear(5, 5), lm.LazyLinear(5, rngs=R(0))),
        "conv": (nn.Conv1d(5, 5, 1), lm.LazyConv(5, (1,), rngs=R(0))),
        "transposed": (nn.ConvTranspose1d(5, 5, 1), lm.LazyConvTranspose(5, (1,), rngs=R(0))),
    }[kind]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch.nn.utils.spectral_norm is deprecated in newer versions
        module = spectral(layer).train()
    inputs = torch.tensor(x if kind == "linear" else x.swapaxes(1, 2).copy())
    module(inputs)  # one step of the power iteration: far from converged
    with torch.no_grad():
        want = module.eval()(inputs).numpy()
    net = Net(plain)
    load(net, _torch_file(module))
    with jax.default_matmul_precision("highest"):
        got = np.asarray(net.m(jnp.asarray(x)))
    np.testing.assert_allclose(got, want if kind == "linear" else want.swapaxes(1, 2), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("old", [True, False])
@pytest.mark.parametrize("shape", [(6, 6), (4, 6)])
@pytest.mark.parametrize("dim", [0, 1])
def test_spectral_norm_over_the_axis_that_the_vectors_tell(old: bool, shape: tuple[int, int], dim: int):
    torch = pytest.importorskip("torch", reason="PyTorch is the oracle here")
    torch.manual_seed(1)
    layer, x = torch.nn.Linear(shape[1], shape[0]), normal(2, shape[1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        utils = torch.nn.utils
        module = (utils.spectral_norm if old else utils.parametrizations.spectral_norm)(layer, dim=dim)
    module.train()(torch.from_numpy(x))
    with torch.no_grad():
        next(p for n, p in module.named_parameters() if "orig" in n).mul_(1 + 0.01 * torch.randn(shape))  # a step
        want = module.eval()(torch.from_numpy(x)).numpy()
    net = Net(lm.LazyLinear(shape[0], rngs=R(0)))
    load(net, _torch_file(module))
    with jax.default_matmul_precision("highest"):
        np.testing.assert_allclose(net.m(jnp.asarray(x)), want, atol=1e-5, rtol=1e-4)


def test_vectors_that_fit_no_axis_of_a_square_weight_are_refused():
    file = {"weight_orig": normal(4, 4, seed=2), "weight_u": normal(4), "weight_v": normal(4, seed=1)}
    found = imported(lm.LazyLinear(4, use_bias=False, rngs=R(0)), file)
    assert ["vectors that fit neither" in str(problem) for problem in found.problems] == [True]


def test_pruning_against_pytorch():
    torch = pytest.importorskip("torch", reason="PyTorch is the oracle here")
    prune = pytest.importorskip("torch.nn.utils.prune", reason="PyTorch is the oracle here")
    module = prune.random_unstructured(torch.nn.Linear(5, 5), name="weight", amount=0.5)
    net = Net(lm.LazyLinear(5, rngs=R(0)))
    load(net, _torch_file(module))
    assert np.array_equal(net.m.kernel[...], module.weight.detach().numpy().T)
