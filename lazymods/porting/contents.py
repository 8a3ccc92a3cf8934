"""Which parameter is which of PyTorch's by its values: for modules whose names have nothing in common.

A library may have other names for its modules than for the entries of its files, as transformers has for some models.
Only values that one parameter alone has on either side count: fresh biases are all zero.
"""

from __future__ import annotations

import collections
import hashlib
from collections.abc import Container, Iterator
from typing import Any

import numpy as np
from flax import nnx

from lazymods import _graph
from lazymods.porting.comparing import Array
from lazymods.state.values import unwrapped


def by_content(model: Any, torch_module: Any, known: Container[str]) -> dict[str, tuple[str, ...]]:
    """Return the entry of PyTorch's that has a parameter's values, by the model's names.

    Args:
        model: The model.
        torch_module: The PyTorch module.
        known: Names of the model that need no search.
    """
    left = [e for e in _graph.entries(model) if isinstance(e.value, nnx.Variable) and e.name not in known]
    left = [entry for entry in left if not isinstance(entry.value, nnx.RngState)]
    if not left:
        return {}
    theirs: dict[bytes, list[str]] = collections.defaultdict(list)
    for name, tensor in torch_module.state_dict().items():
        if getattr(tensor, "dtype", None) is not None and tensor.is_floating_point() and tensor.numel():
            theirs[_digest(tensor.detach().cpu().float().numpy())].append(name)
    found: dict[str, str] = {}
    for entry in left:
        value = np.asarray(unwrapped(entry.value))
        matches = {name for laid in _as_torch_lays(value) for name in theirs.get(_digest(laid), ())}
        if len(matches) == 1:
            found[entry.name] = matches.pop()
    count = collections.Counter(found.values())
    return {name: (other,) for name, other in found.items() if count[other] == 1}


def _as_torch_lays(value: Array) -> Iterator[Array]:
    """Yield an array in the layouts that PyTorch may have it in."""
    if value.dtype.kind in "iubcO" or not value.size:
        return
    yield value
    if value.ndim == 2:
        yield value.T
    elif value.ndim > 2:
        yield np.moveaxis(value, (-1, -2), (0, 1))  # of a convolution
        yield value.reshape(len(value), -1).T  # of heads
        yield value.reshape(-1, value.shape[-1]).T


def _digest(value: Array) -> bytes:
    value = np.ascontiguousarray(value, np.float32)
    return hashlib.blake2b(value.data, digest_size=16, salt=str(value.shape).encode()[:16]).digest()
