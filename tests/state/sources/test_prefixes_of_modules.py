"""A prefix that the model lacks is seen for the names of every kind of module, and of the parts of its weights."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flax import nnx

import lazymods as lm

torch = pytest.importorskip("torch", reason="PyTorch's modules have the names")
prune = pytest.importorskip("torch.nn.utils.prune", reason="PyTorch prunes")
old_norm, new_norm = torch.nn.utils.weight_norm, torch.nn.utils.parametrizations.weight_norm


def cell() -> Any:
    return lm.LazyOptimizedLSTMCell(4, rngs=nnx.Rngs(0))


def attention() -> Any:
    return lm.LazyMultiHeadAttention(2, decode=False, rngs=nnx.Rngs(0))


def linear() -> Any:
    return lm.LazyLinear(4, rngs=nnx.Rngs(0))


def of_all(norm: Any, module: Any, *names: str) -> Any:
    for name in names:
        module = norm(module, name)
    return module


KINDS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "a cell": (lambda: torch.nn.LSTMCell(3, 4), cell),
    "a normed cell": (lambda: new_norm(torch.nn.LSTMCell(3, 4), "weight_hh"), cell),
    "an LSTM": (lambda: torch.nn.LSTM(3, 4), lambda: nnx.RNN(cell())),
    "an old normed LSTM of two layers": (
        lambda: of_all(old_norm, torch.nn.LSTM(3, 4, 2), "weight_hh_l0", "weight_hh_l1"),
        lambda: nnx.List([nnx.RNN(cell()) for _ in range(2)]),
    ),
    "a normed LSTM both ways": (
        lambda: of_all(new_norm, torch.nn.LSTM(3, 4, bidirectional=True), "weight_hh_l0", "weight_hh_l0_reverse"),
        lambda: nnx.Bidirectional(nnx.RNN(cell()), nnx.RNN(cell()), rngs=nnx.Rngs(0)),
    ),
    "attention": (lambda: torch.nn.MultiheadAttention(8, 2), attention),
    "attention to another width": (lambda: torch.nn.MultiheadAttention(8, 2, kdim=6, vdim=6), attention),
    "normed attention": (lambda: new_norm(torch.nn.MultiheadAttention(8, 2), "in_proj_weight"), attention),
    "spectral norm": (lambda: torch.nn.utils.parametrizations.spectral_norm(torch.nn.Linear(3, 4)), linear),
    "pruning": (lambda: prune.random_unstructured(torch.nn.Linear(3, 4), "weight", 0.5), linear),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated:FutureWarning")
@pytest.mark.parametrize("prefix", ["", "net.", "module.net."])
@pytest.mark.parametrize("name", KINDS)
def test_a_prefix(name: str, prefix: str) -> None:
    make, ours = KINDS[name]
    torch.manual_seed(0)
    file = {f"{prefix}x.{key}": value for key, value in make().state_dict().items()}
    file |= {f"{prefix}fc.{key}": value for key, value in torch.nn.Linear(3, 4).state_dict().items()}
    plain, model = (nnx.Dict(x=ours(), fc=linear()) for _ in range(2))
    lm.load(plain, {key.removeprefix(prefix): value for key, value in file.items()}, layout="torch")
    out = lm.export_torch(model, like=lm.load(model, file, layout="torch"))
    assert list(out) == list(file)
    assert all(np.array_equal(out[key], value.numpy()) for key, value in file.items() if "bias_" not in key)
    for one, other in zip(lm.state_dict(plain).values(), lm.state_dict(model).values(), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
