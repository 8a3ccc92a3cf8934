"""The GRU cell with a bias in the reset gate's product: PyTorch's GRU whole, there and back; own cells both ways."""

from pathlib import Path
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


def close(got: Any, want: Any) -> None:
    np.testing.assert_allclose(got, want, atol=1e-6, rtol=1e-6)


def sigmoid(a: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-a))


def both_ways(lazy: bool) -> nnx.Bidirectional:
    cells = [lm.LazyResetAfterGRUCell(4, rngs=R(i)) if lazy else lm.ResetAfterGRUCell(3, 4, rngs=R(i)) for i in (0, 1)]
    return nnx.Bidirectional(*map(nnx.RNN, cells))


def test_a_cell_is_its_formula():
    file = {"weight_ih": normal(12, 3), "weight_hh": normal(12, 4, seed=1)}
    file |= {"bias_ih": normal(12, seed=2), "bias_hh": normal(12, seed=3)}
    cell: Any = lm.LazyResetAfterGRUCell(4, rngs=R(0))
    load(cell, file)
    assert type(cell) is lm.ResetAfterGRUCell
    h, x = normal(2, 4, seed=4), normal(2, 3, seed=5)
    i = np.split(x @ file["weight_ih"].T + file["bias_ih"], 3, axis=-1)
    j = np.split(h @ file["weight_hh"].T + file["bias_hh"], 3, axis=-1)
    r, z = sigmoid(i[0] + j[0]), sigmoid(i[1] + j[1])
    want = (1 - z) * np.tanh(i[2] + r * j[2]) + z * h
    for got in cell(jnp.asarray(h), jnp.asarray(x)):
        close(got, want)
    for name, value in export_torch(cell).items():
        np.testing.assert_array_equal(value, file[name])


def test_without_the_bias_it_is_flax_s():
    cell: Any
    cell, flax = lm.ResetAfterGRUCell(3, 4, rngs=R(0)), nnx.GRUCell(3, 4, rngs=R(0))
    h, x = jnp.asarray(normal(2, 4)), jnp.asarray(normal(2, 3, seed=1))
    np.testing.assert_array_equal(cell(h, x)[0], flax(h, x)[0])  # of equal rngs, with zeros as biases
    cell.dense_h.bias[...] = jnp.ones(12)
    assert abs(cell(h, x)[0] - flax(h, x)[0]).max() > 0.05


@pytest.mark.parametrize("lazy", [True, False])
def test_all_of_pytorch_s_gru(lazy: bool, tmp_path: Path):
    torch = pytest.importorskip("torch", reason="PyTorch is the oracle here")
    torch.manual_seed(0)
    gru = torch.nn.GRU(3, 4, batch_first=True, bidirectional=True)
    path = tmp_path / "gru.pt"
    torch.save({f"m.{k}": v for k, v in gru.state_dict().items()}, path)
    net = Net(both_ways(lazy))
    assert repr(lm.load(net, path, layout="torch")) == "<All keys matched successfully>"
    x = normal(2, 7, 3)
    with torch.no_grad():
        want, last = gru(torch.from_numpy(x))
    got = net.m(jnp.asarray(x), rngs=R(0))
    close(got, want)
    close(got[:, -1, :4], last[0])
    again = torch.nn.GRU(3, 4, batch_first=True, bidirectional=True)
    again.load_state_dict({k[2:]: torch.from_numpy(v) for k, v in export_torch(net).items()}, strict=True)
    for a, b in zip(again.parameters(), gru.parameters(), strict=True):
        np.testing.assert_array_equal(a.detach().numpy(), b.detach().numpy())


def test_gradients_are_pytorch_s():
    torch = pytest.importorskip("torch", reason="PyTorch is the oracle here")
    torch.manual_seed(0)
    gru = torch.nn.GRU(3, 4, batch_first=True)
    net = Net(nnx.RNN(lm.LazyResetAfterGRUCell(4, rngs=R(0))))
    load(net, {f"m.{k}": v.detach().numpy() for k, v in gru.state_dict().items()})
    x = normal(2, 5, 3)
    gru(torch.from_numpy(x))[0].square().sum().backward()
    grads: Any = nnx.grad(lambda net: (net.m(jnp.asarray(x), rngs=R(0)) ** 2).sum())(net)
    for name, value in export_torch(nnx.merge(nnx.graphdef(net), grads, nnx.state(net, nnx.Not(nnx.Param)))).items():
        want = dict(gru.named_parameters())[name.removeprefix("m.")].grad
        np.testing.assert_allclose(value, want, atol=1e-5, rtol=1e-5)


def test_it_becomes_the_explicit_one_inside_a_compiled_call():
    lazy, explicit = both_ways(lazy=True), both_ways(lazy=False)
    x = jnp.asarray(normal(2, 5, 3))
    got = lm.jit(lambda model, x: model(x, rngs=R(0)))(lazy, x)
    close(got, explicit(x, rngs=R(0)))
    assert nnx.graphdef(lazy) == nnx.graphdef(explicit)


def test_one_bias_of_two_is_missed():
    file = {"weight_ih": normal(12, 3), "weight_hh": normal(12, 4), "bias_ih": normal(12)}
    assert "dense_h.bias" not in imported(lm.LazyResetAfterGRUCell(4, rngs=R(0)), file).entries


# ---------------------------------------------------------------- cells of one's own


class Cell(nnx.RNNCellBase):
    """A cell that no table knows."""

    def __init__(self, size: int, *, rngs: nnx.Rngs):
        self.size = size
        self.ih, self.hh = lm.LazyLinear(size, rngs=rngs), lm.LazyLinear(size, rngs=rngs)

    def __call__(self, carry: Any, x: Any) -> Any:
        h = jnp.tanh(self.ih(x) + self.hh(carry))
        return h, h

    def initialize_carry(self, input_shape: Any, rngs: Any = None, carry_init: Any = None) -> jax.Array:
        return jnp.zeros((*input_shape[:-1], self.size))

    @property
    def num_feature_axes(self) -> int:
        return 1


def test_own_cells_have_the_names_of_their_directions():
    net = Net(nnx.Bidirectional(*(nnx.RNN(Cell(4, rngs=R(i))) for i in (0, 1))))
    file = {
        f"m.{direction}_rnn.cell.{part}.{entry}": normal(*shape, seed=seed)
        for seed, direction in enumerate(("forward", "backward"))
        for part, size in (("ih", 3), ("hh", 4))
        for entry, shape in (("weight", (4, size)), ("bias", (4,)))
    }
    load(net, file)
    x = normal(2, 5, 3)
    want = []
    for direction, step in (("forward", 1), ("backward", -1)):
        kept = {k.removeprefix(f"m.{direction}_rnn.cell."): v for k, v in file.items() if direction in k}
        h, steps = np.zeros((2, 4), np.float32), []
        for t in range(5)[::step]:
            bias = kept["ih.bias"] + kept["hh.bias"]
            h = np.tanh(x[:, t] @ kept["ih.weight"].T + h @ kept["hh.weight"].T + bias)
            steps.append(h)
        want.append(np.stack(steps[::step], 1))
    np.testing.assert_allclose(net.m(jnp.asarray(x), rngs=R(0)), np.concatenate(want, -1), atol=1e-5, rtol=1e-5)
    back = export_torch(net)
    assert back.keys() == file.keys()
    for name, value in file.items():
        np.testing.assert_array_equal(back[name], value)


def test_one_own_cell_beside_one_of_pytorch_s():
    net = Net(nnx.Bidirectional(nnx.RNN(lm.LazyResetAfterGRUCell(4, rngs=R(0))), nnx.RNN(Cell(4, rngs=R(1)))))
    file = {"m.weight_ih_l0": normal(12, 3), "m.weight_hh_l0": normal(12, 4)}
    file |= {"m.bias_ih_l0": normal(12), "m.bias_hh_l0": normal(12)}
    file |= {f"m.backward_rnn.cell.{part}.weight": normal(4, size) for part, size in (("ih", 3), ("hh", 4))}
    file |= {f"m.backward_rnn.cell.{part}.bias": normal(4) for part in ("ih", "hh")}
    load(net, file)
    assert export_torch(net).keys() == file.keys()
