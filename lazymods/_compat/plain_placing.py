"""Arrays of numpy on a device by ``jax.device_put``: the twin of :mod:`lazymods._compat.placing`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np


def put(aval: Any, sharding: Any, array: np.ndarray[Any, Any]) -> jax.Array:
    """Return an array of numpy on the one device of a sharding, uncommitted."""
    [device] = sharding.device_set
    return device_put([array], device)[0]


def device_put(arrays: Sequence[np.ndarray[Any, Any]], device: Any) -> list[jax.Array]:
    """Return ``jax.device_put(array)`` of each, uncommitted."""
    with jax.default_device(device):
        return jax.device_put(list(arrays))
