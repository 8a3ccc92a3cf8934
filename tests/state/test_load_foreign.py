"""Arrays of other libraries in a state dict: their numbers, or a refusal by name."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from flax import nnx

import lazymods as lm

NUMBERS = [[1.0, -2.5], [0.0, 3.0]]


def _load(kernel: Any, **more: Any) -> nnx.Linear:
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    lm.load_state_dict(model, {"kernel": kernel, "bias": np.zeros(2)} | more)
    return model


def test_tensors_of_pytorch() -> None:
    torch = pytest.importorskip("torch", reason="torch is an extra")
    tensor = torch.tensor(NUMBERS)
    conjugated = torch.complex(tensor, torch.ones(2, 2)).conj()
    kinds = {
        "bfloat16": tensor.bfloat16(),
        "float8": tensor.to(torch.float8_e5m2),
        "of a gradient": tensor.clone().requires_grad_(),
        "a parameter": torch.nn.Parameter(tensor),
        "strided": tensor.T.contiguous().T,
        "strided bfloat16": tensor.T.contiguous().T.bfloat16(),
        "real part": conjugated.real,
        "negated": -conjugated.imag * tensor,
    }
    for kernel in kinds.values():
        np.testing.assert_array_equal(_load(kernel).kernel[...], NUMBERS)
    complex_model = nnx.Linear(2, 2, rngs=nnx.Rngs(0), param_dtype=np.complex64)
    lm.load_state_dict(complex_model, {"kernel": conjugated, "bias": np.zeros(2)})
    np.testing.assert_array_equal(complex_model.kernel[...], np.array(NUMBERS) - 1j)


def test_a_tensor_is_copied() -> None:
    torch = pytest.importorskip("torch", reason="torch is an extra")
    big = torch.ones(256, 256)
    model = nnx.Linear(256, 256, rngs=nnx.Rngs(0))
    lm.load_state_dict(model, {"kernel": big, "bias": np.zeros(256)})
    big.zero_()
    assert float(model.kernel[...].sum()) == 256 * 256


def test_a_whole_module_of_pytorch_is_refused_by_names() -> None:
    torch = pytest.importorskip("torch", reason="torch is an extra")
    with pytest.raises(lm.StateDictError, match=r"weight\n.*torch\.float32\[2,2\], an entry"):
        _load(np.ones((2, 2)), weight=torch.ones(2, 2))


@pytest.mark.parametrize("kind", ["sparse", "meta"])
def test_a_tensor_that_is_no_array_is_refused_by_name(kind: str) -> None:
    torch = pytest.importorskip("torch", reason="torch is an extra")
    tensor = torch.ones(2, 2).to_sparse() if kind == "sparse" else torch.ones(2, 2, device="meta")
    with pytest.raises(lm.StateDictError, match=r"kernel \(Param\)\n.*type Tensor\n"):
        _load(tensor)


class Foreign:
    """An array that is not handed out, as of a library that copies nothing from its device by itself."""

    shape, dtype = (2, 2), np.dtype(np.float32)

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError("not allowed")


@pytest.mark.parametrize("odd", [np.ma.masked_array(np.array(NUMBERS), np.eye(2, dtype=bool)), Foreign()])
def test_what_would_lose_something_is_refused_by_name(odd: Any) -> None:
    with pytest.raises(lm.StateDictError, match=r"kernel \(Param\)\n.*type (MaskedArray|Foreign)\n"):
        _load(odd)


def test_arrays_of_other_classes() -> None:
    np.testing.assert_array_equal(_load(np.array(NUMBERS, ml_dtypes.bfloat16)).kernel[...], NUMBERS)
    np.testing.assert_array_equal(_load(nnx.Param(np.array(NUMBERS))).kernel[...], NUMBERS)
