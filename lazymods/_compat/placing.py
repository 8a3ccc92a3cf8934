"""Arrays of numpy on a device, in a fifth of the time of ``jax.device_put``, which is the other way.

Private: ``jax._src.interpreters.pxla.batched_device_put``, ``Sharding._device_assignment`` and
``jax._src.config.explicit_device_put_scope``, which a ``jax.transfer_guard`` asks for. Seen with jax 0.10.2,
0.11.2 and 0.12.0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax._src.config import explicit_device_put_scope
from jax._src.interpreters.pxla import batched_device_put
from jax.core import ShapedArray

from lazymods import _compat
from lazymods._compat.finding import require

require(jax.sharding.SingleDeviceSharding, "_device_assignment")


def put(aval: Any, sharding: Any, array: np.ndarray[Any, Any]) -> jax.Array:
    """Return an array of numpy, of type ``aval``, on the one device of a sharding, uncommitted, as ``jax.jit`` does."""
    return batched_device_put(aval, sharding, [array], sharding._device_assignment, committed=False)


def device_put(arrays: Sequence[np.ndarray[Any, Any]], device: Any) -> list[jax.Array]:
    """Return ``jax.device_put(array)`` of each, uncommitted.

    In a trace the public function is called. The dtypes must be ones that JAX has arrays of.
    """
    if _compat.current_trace() is not _compat.eval_trace():
        return jax.device_put(list(arrays))
    sharding = jax.sharding.SingleDeviceSharding(device)
    devices = sharding._device_assignment
    avals: dict[Any, Any] = {}
    out = []
    with explicit_device_put_scope():
        for array in arrays:
            kind = (array.shape, array.dtype)
            aval = avals.get(kind)
            if aval is None:
                aval = avals[kind] = ShapedArray(*kind)
            out.append(batched_device_put(aval, sharding, [array], devices, committed=False))
    return out
