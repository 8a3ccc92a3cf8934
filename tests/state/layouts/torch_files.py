"""Files in memory: tensors as a format gives them, and a load from them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx

import lazymods as lm
from lazymods.state.files.stored import StoredTensor
from lazymods.state.layouts import Imported, from_torch


def stored(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Tensors whose values are read-only; what is no array stays as it is."""
    return {name: _tensor(name, value) if isinstance(value, np.ndarray) else value for name, value in arrays.items()}


def _tensor(name: str, value: np.ndarray) -> StoredTensor:
    value = value.view()
    value.flags.writeable = False
    return StoredTensor(name, value.shape, value.dtype, Path("file"), lambda: value)


def imported(model: Any, arrays: Mapping[str, Any], flatten: Mapping[str, Sequence[int]] | None = None) -> Imported:
    """What the file is to the model."""
    return from_torch(model, stored(arrays), flatten)


def load(model: nnx.Module, arrays: Mapping[str, Any], flatten: Mapping[str, Sequence[int]] | None = None) -> None:
    """Load what must load without a remark."""
    found = imported(model, arrays, flatten)
    assert not found.problems, "\n".join(map(str, found.problems))
    entries = {name: v.read() if isinstance(v, StoredTensor) else v for name, v in found.entries.items()}
    lm.load_state_dict(model, entries)


def problems(model: Any, arrays: Mapping[str, Any], flatten: Mapping[str, Sequence[int]] | None = None) -> str:
    """The problems as a user reads them, in order of their names."""
    found = sorted(imported(model, arrays, flatten).problems, key=lambda p: p.where)
    return "\n".join(map(str, found))


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    """Random numbers."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
