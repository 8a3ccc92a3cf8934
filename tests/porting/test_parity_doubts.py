"""``lm.parity`` where it could be content too soon: other axes, weights of modules inside, values that a mask fills."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import lazymods as lm

torch = pytest.importorskip("torch")
nn = torch.nn
R = nnx.Rngs


class Held(nnx.Module):
    def __init__(self, layer: nnx.Module, after: Any = None) -> None:
        self.a, self.after = layer, after

    def __call__(self, x: jax.Array) -> jax.Array:
        out = self.a(x)
        return out if self.after is None else self.after(out)


class HeldByTorch(nn.Module):
    def __init__(self, layer: Any, after: Any = None) -> None:
        super().__init__()
        self.a, self.after = layer, after

    def forward(self, x: Any) -> Any:
        out = self.a(x)
        out = out[0] if isinstance(out, tuple) else out
        return out if self.after is None else self.after(out)


@pytest.mark.parametrize("length", [3, 5], ids=["square", "oblong"])
def test_axes_in_another_order_need_a_layer_with_channels(length: int) -> None:
    theirs = HeldByTorch(nn.Linear(3, 3)).eval()
    x = torch.randn(2, length, 3)
    for after, agrees in ((None, True), (lambda out: jnp.swapaxes(out, 1, 2), False)):
        model = Held(lm.LazyLinear(3, rngs=R(0)), after)
        assert lm.parity(model, theirs, x, lm.load(model, theirs, layout="torch")).agrees is agrees


def test_a_layer_with_channels_before_moves_them() -> None:
    theirs = HeldByTorch(nn.Conv1d(4, 6, 3, padding=1), torch.relu).eval()
    model = Held(lm.LazyConv(6, (3,), rngs=R(0)), nnx.relu)
    assert lm.parity(model, theirs, torch.randn(2, 4, 6), lm.load(model, theirs, layout="torch")).agrees


def lstm() -> Any:
    return nnx.RNN(lm.LazyLSTMCell(4, rngs=R(0)))


def both_ways() -> Any:
    forward, backward = (nnx.RNN(lm.LazyResetAfterGRUCell(4, rngs=R(n))) for n in range(2))
    return nnx.Bidirectional(forward, backward, rngs=R(0))


def normed() -> Any:
    return lm.LazyWeightNorm(lm.LazyLinear(4, rngs=R(0)), rngs=R(0))


def torch_normed() -> Any:
    return nn.utils.parametrizations.weight_norm(nn.Linear(3, 4))


@pytest.mark.parametrize(
    ("make", "twin", "name", "told"),
    [
        (lstm, lambda: nn.LSTM(3, 4, batch_first=True), "a.cell.ii.kernel", "weight_ih_l0"),
        (
            both_ways,
            lambda: nn.GRU(3, 4, batch_first=True, bidirectional=True),
            "a.backward_rnn.cell.dense_i.kernel",
            "weight_ih_l0_reverse",
        ),
        (normed, torch_normed, "a.layer_instance.bias", "bias"),
        (normed, torch_normed, "a.layer_instance.kernel", "parametrizations.weight.original1"),
    ],
)
def test_a_wrong_weight_of_a_module_inside_is_told(make: Any, twin: Any, name: str, told: str) -> None:
    theirs, model = HeldByTorch(twin()).eval(), Held(make())
    result = lm.load(model, theirs, layout="torch")
    x = torch.randn(2, 5, 3)
    assert lm.parity(model, theirs, x, result).agrees
    value = np.array(lm.state_dict(model)[name])
    value.flat[0] += 1
    lm.load_state_dict(model, {name: value}, strict=False)
    report = lm.parity(model, theirs, x, result)
    assert report.reason == f"its {told} is not PyTorch's: they differ by 1"


def test_weights_that_are_right_are_not_blamed() -> None:
    theirs = HeldByTorch(nn.LSTM(3, 4, batch_first=True)).eval()
    model = Held(lstm())
    result = lm.load(model, theirs, layout="torch")
    theirs.a.register_forward_hook(lambda module, args, out: (out[0] * 2 + 1, out[1]))
    assert "parameters are PyTorch's" in lm.parity(model, theirs, torch.randn(2, 5, 3), result).reason


@pytest.mark.slow
@pytest.mark.parametrize("fill", [float("-inf"), float(np.finfo(np.float32).min), -1e9, -65504.0])
def test_a_mask_hides_no_difference(fill: float) -> None:
    mask = np.tri(4, dtype=bool)[None]

    def masked(out: jax.Array, shift: float) -> jax.Array:
        return jnp.where(mask, out + shift, fill)

    theirs = HeldByTorch(nn.Linear(3, 4), lambda out: out.masked_fill(~torch.tensor(mask), fill)).eval()
    for shift, agrees in ((0.0, True), (0.25, False)):
        model = Held(lm.LazyLinear(4, rngs=R(0)), lambda out, shift=shift: masked(out, shift))
        report = lm.parity(model, theirs, torch.randn(2, 4, 3), lm.load(model, theirs, layout="torch"))
        assert report.agrees is agrees


def test_another_fill_is_a_difference() -> None:
    theirs = HeldByTorch(nn.Linear(3, 4), lambda out: out.index_fill(1, torch.tensor([0]), -1e9)).eval()
    model = Held(lm.LazyLinear(4, rngs=R(0)), lambda out: out.at[:, 0].set(-2e9))
    assert not lm.parity(model, theirs, torch.randn(2, 4, 3), lm.load(model, theirs, layout="torch")).agrees
