"""``export_torch``: only a ready model, only what PyTorch can hold, in full text."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from torch_cases import Net
from torch_files import load, normal

import lazymods as lm
from lazymods.state.exporting import export_torch

R = nnx.Rngs
HEADING = "PyTorch cannot hold Net\n"


def text_of(error: type[Exception], net: Any, **options: Any) -> str:
    with pytest.raises(error) as caught:
        export_torch(net, **options)
    return str(caught.value)


def test_a_lazy_model_is_refused_by_path():
    assert text_of(lm.UninitializedError, Net(lm.LazyLinear(3, rngs=R(0)))) == (
        "Net is not initialized\n"
        "m.bias (UninitializedParameter)\n"
        "  got:    f32[3]\n"
        "  needed: a value: only an initialized model can be exported\n"
        "  write:  lm.materialize(model, x)  # or lm.load(model, path), first\n"
        "m.kernel (UninitializedParameter)\n"
        "  got:    f32[?,3]\n"
        "  needed: a value: only an initialized model can be exported\n"
        "  write:  lm.materialize(model, x)  # or lm.load(model, path), first"
    )


def test_an_abstract_model_is_refused_by_path():
    abstract = nnx.eval_shape(lambda: Net(nnx.Linear(2, 3, use_bias=False, rngs=R(0))))
    assert "m.kernel (Param)\n  got:    f32[2,3]\n" in text_of(lm.UninitializedError, abstract)


REFUSED: list[tuple[Callable[[], Any], str]] = [
    (
        lambda: nnx.SimpleCell(2, 2, residual=True, rngs=R(0)),
        "m (SimpleCell)\n"
        "  got:    residual=True\n"
        "  needed: residual=False: no cell of PyTorch adds the hidden state\n"
        "  write:  residual=False  # of nnx.SimpleCell",
    ),
    (
        lambda: nnx.MultiHeadAttention(4, 8, num_kv_heads=2, decode=False, rngs=R(0)),
        "m (MultiHeadAttention)\n"
        "  got:    in_features=8, qkv_features=8, out_features=8, num_heads=4, num_kv_heads=2, normalize_qk=False\n"
        "  needed: one embed_dim, one number of heads and no norms: torch.nn.MultiheadAttention has no more\n"
        "  write:  nnx.MultiHeadAttention(8, 64, rngs=rngs)  "
        "# no qkv_features, out_features, num_kv_heads, normalize_qk",
    ),
    (
        lambda: nnx.SpectralNorm(nnx.Linear(2, 2, use_bias=False, rngs=R(0)), rngs=R(0)),
        "m (SpectralNorm)\n"
        "  got:    spectral norm\n"
        "  needed: the normalized weight: PyTorch divides by the singular value of two stored vectors, "
        "nnx.SpectralNorm by one that it iterates to anew at every call\n"
        "  write:  self.layer = layer  # without nnx.SpectralNorm",
    ),
    (
        lambda: nnx.WeightNorm(nnx.Linear(2, 2, rngs=R(0)), feature_axes=(0, 1), rngs=R(0)),
        "m.layer_instance (Linear)\n"
        "  got:    feature_axes=(0, 1)\n"
        "  needed: magnitudes along the axis that the wrapper has scales for: dim=0 of PyTorch is feature_axes=-1 of "
        "nnx.WeightNorm (for ConvTranspose -2, with transpose_kernel -1), dim=None is feature_axes=None\n"
        "  write:  nnx.WeightNorm(..., feature_axes=...)  # that fit PyTorch's dim; or the layer without it, which "
        "gets the product",
    ),
    (
        lambda: nnx.WeightNorm(nnx.OptimizedLSTMCell(2, 2, rngs=R(0)), rngs=R(0)),
        "m (WeightNorm)\n"
        "  got:    scales of dense_h.kernel, dense_i.kernel\n"
        "  needed: weight norm of Linear, Conv and ConvTranspose only: PyTorch has other entries for the rest\n"
        "  write:  nnx.WeightNorm(layer)  # around each such layer",
    ),
    (
        lambda: nnx.LayerNorm(6, feature_axes=(1, 2), use_bias=False, rngs=R(0)),
        "m (LayerNorm)\n"
        "  got:    feature_axes=(1, 2), several axes in one\n"
        "  needed: their sizes, for PyTorch has as many axes\n"
        '  write:  flatten={"m": (height, width, channels)}  # written channels first',
    ),
    (
        lambda: nnx.LinearGeneral((2, 3), 4, axis=(-2, -1), rngs=R(0)),
        "m (LinearGeneral)\n"
        "  got:    several input axes, (-2, -1), in one axis of PyTorch's weight\n"
        "  needed: the order in which PyTorch flattened them, which the file does not hold\n"
        '  write:  flatten={"m": (height, width, channels)}  # if channels came first in PyTorch; flatten={"m": '
        "(features,)} if the order is the same",
    ),
]


@pytest.mark.parametrize(("make", "text"), REFUSED, ids=range(len(REFUSED)))
def test_what_pytorch_cannot_hold_is_refused_by_name(make: Callable[[], Any], text: str):
    assert text_of(lm.StateDictError, Net(make())) == HEADING + text


def test_stacked_layers_are_refused():
    @nnx.vmap(in_axes=0)
    def stacked(key: Any) -> nnx.Linear:
        return nnx.Linear(2, 2, rngs=R(key))

    assert text_of(lm.StateDictError, Net(stacked(jax.random.split(jax.random.key(0), 3)))) == (
        HEADING + "m (Linear)\n"
        "  got:    an array of shape (3, 2, 2)\n"
        "  needed: 2 axes, as PyTorch has: it has no stacked layers\n"
        "  write:  nnx.List([make_block(rngs) for _ in range(n)])  # layers that nnx.vmap has not stacked"
    )


def test_flatten_is_checked():
    text = text_of(lm.StateDictError, Net(nnx.Linear(6, 2, rngs=R(0))), flatten={"m": (2, 2), "n": (1,)})
    assert "m (Linear)\n  got:    flatten sizes (2, 2), a product of 4, for 6 features\n" in text
    assert "n\n  got:    flatten for it, and no layer of that name that can follow a flatten\n" in text


def test_unknown_types_keep_names_and_layouts():
    model = nnx.List([nnx.Einsum("ab,bc->ac", (2, 3), rngs=R(0)), nnx.Param(jnp.ones((2, 3)))])
    out = export_torch(model)  # pyright: ignore[reportArgumentType]
    assert {name: value.shape for name, value in out.items()} == {"0.kernel": (2, 3), "1": (2, 3)}


def test_dtypes_and_memory():
    net = Net(nnx.ConvTranspose(2, 2, (3,), param_dtype=jnp.bfloat16, rngs=R(0)))
    out = export_torch(net)
    assert all(v.dtype == ml_dtypes.bfloat16 for v in out.values())
    before = np.array(net.m.kernel[...])
    out["m.weight"][:] = 0  # the model's memory is its own
    assert np.array_equal(net.m.kernel[...], before)


def test_statistics_carry_a_counter_as_in_pytorch():
    out = export_torch(Net(nnx.BatchNorm(3, rngs=R(0))))
    assert list(out) == ["m.running_mean", "m.running_var", "m.weight", "m.bias", "m.num_batches_tracked"]
    assert out["m.num_batches_tracked"].dtype == np.int64 and out["m.num_batches_tracked"].shape == ()


def test_an_export_is_a_file_for_a_lazy_model():
    make = [lambda: nnx.Linear(3, 4, rngs=R(0)), lambda: lm.LazyLinear(4, rngs=R(1))]
    explicit, lazy = (Net(m()) for m in make)
    load(lazy, export_torch(explicit))
    assert np.array_equal(lazy.m(normal(2, 3)), explicit.m(normal(2, 3)))


@pytest.mark.slow
def test_stacked_attention_is_refused():
    @nnx.vmap(in_axes=0)
    def stacked(key: Any) -> nnx.MultiHeadAttention:
        return nnx.MultiHeadAttention(2, 4, decode=False, rngs=R(key))

    assert text_of(lm.StateDictError, Net(stacked(jax.random.split(jax.random.key(0), 3)))) == (
        HEADING + "m (MultiHeadAttention)\n"
        "  got:    query.kernel of shape (3, 4, 2, 2)\n"
        "  needed: a kernel with one axis of heads\n"
        "  write:  nnx.List([make_block(rngs) for _ in range(n)])  # layers that are not stacked"
    )


class Weighted(nnx.Linear):
    """A Linear with a parameter that has PyTorch's name of its kernel."""

    def __init__(self) -> None:
        super().__init__(2, 2, rngs=R(0))
        self.weight = nnx.Param(jnp.ones(2))


def test_names_that_meet_are_refused():
    assert text_of(lm.StateDictError, Net(Weighted())) == (
        HEADING + "m.weight\n"
        "  got:    two entries of that name\n"
        "  needed: one\n"
        "  write:  self.other = nnx.Linear(3, 4, rngs=rngs)  # attributes whose names do not meet in PyTorch's"
    )


class Deep(nnx.Module):
    """Sequentials at the top of a module and inside of one another."""

    def __init__(self, seed: int, lazy: bool = False) -> None:
        def linear(size: int, out: int) -> Any:
            return lm.LazyLinear(out, rngs=R(seed)) if lazy else nnx.Linear(size, out, rngs=R(seed))

        self.body = nnx.Sequential(linear(2, 3), jax.nn.relu, nnx.Sequential(linear(3, 4), nnx.LayerNorm(4, rngs=R(0))))
        self.layers = nnx.List([linear(4, 2)])


def test_names_in_a_sequential_are_those_of_pytorch(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="torch is an extra")

    class Twin(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            inner = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4, eps=1e-6))
            self.body = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), inner)
            self.layers = torch.nn.ModuleList([torch.nn.Linear(4, 2)])

        def forward(self, x: Any) -> Any:
            return self.layers[0](self.body(x))

    model, twin, x = Deep(0), Twin(), normal(5, 2)
    exported = export_torch(model)
    assert exported.keys() == twin.state_dict().keys()
    twin.load_state_dict({name: torch.from_numpy(value) for name, value in exported.items()})
    expected = twin(torch.from_numpy(x)).detach().numpy()
    np.testing.assert_allclose(model.layers[0](model.body(x)), expected, rtol=1e-5, atol=1e-6)
    lm.save(exported, tmp_path / "torch.npz")
    other: Any
    for other in (Deep(1), Deep(1, lazy=True)):
        lm.load(other, tmp_path / "torch.npz", layout="torch")
        np.testing.assert_array_equal(other.body.layers[2].layers[0].kernel[...], exported["body.2.0.weight"].T)
        np.testing.assert_array_equal(other.layers[0].kernel[...], exported["layers.0.weight"].T)
