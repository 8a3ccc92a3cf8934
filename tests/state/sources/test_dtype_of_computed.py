"""``dtype="file"``: what is computed from entries of half precision has their dtype, rounded once."""

from typing import Any

import numpy as np
import pytest
from flax import nnx

import lazymods as lm

torch = pytest.importorskip("torch", reason="PyTorch makes the modules")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_biases_and_normed_kernels(dtype: str) -> None:
    weight: Any = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(3, 3))
    net = torch.nn.ModuleDict({"r": torch.nn.LSTM(3, 3), "w": weight}).to(getattr(torch, dtype))
    rngs = nnx.Rngs(0)
    model: Any = nnx.Dict(r=nnx.RNN(lm.LazyOptimizedLSTMCell(3, rngs=rngs)), w=lm.LazyLinear(3, rngs=rngs))
    lm.load(model, net, layout="torch", dtype="file")
    assert {str(value.dtype) for value in lm.state_dict(model).values()} == {dtype}
    total = (net["r"].bias_ih_l0.float() + net["r"].bias_hh_l0.float()).to(getattr(torch, dtype)).float()
    np.testing.assert_array_equal(np.asarray(model.r.cell.dense_h.bias[...], np.float32), total.detach().numpy())
