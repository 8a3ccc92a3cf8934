"""Where a call runs: on a platform that is known already, or in a program that is compiled later."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Any

import jax

from lazymods import _compat
from lazymods.dispatch.keys import OTHER, PLATFORMS


def platform_key(operands: Sequence[Any]) -> str | None:
    """Return the key of the platform on which a call is executed now; None if its program is compiled later.

    Under ``jax.grad`` and ``jax.vmap`` alone operations are executed at once.
    """
    if not _compat.runs_at_once(_compat.current_trace()):
        return None
    arrays = [_compat.base_value(x) for x in operands]
    if not _compat.are_concrete(arrays):
        return None
    return _key_of(_device(arrays))


def key_here() -> str:
    """Return the key of the platform that this process runs on, if nothing else is said."""
    return _key_of(_default_device())


def in_lazy_block() -> bool:
    """Whether operations are recorded by a block of :func:`lazymods.lazytensor.lazy`."""
    if "lazymods.lazytensor.trace" not in sys.modules:  # then there is no block
        return False
    from lazymods.lazytensor.trace import session

    recording = session()
    return recording is not None and _compat.base_trace(_compat.current_trace()) is recording.trace


def is_auto_mesh() -> bool:
    """Whether the types of arrays say nothing of a mesh, as they do in ``jax.shard_map`` and on explicit axes."""
    return all(kind == jax.sharding.AxisType.Auto for kind in jax.sharding.get_abstract_mesh().axis_types)


def _device(values: Sequence[Any]) -> Any:
    """Return a device on which JAX would run an operation on these: of an array that is bound to one, if any is."""
    arrays = [x for x in values if isinstance(x, jax.Array)]  # a number beneath jax.grad is none
    bound = [x for x in arrays if x.committed]
    return next(iter((bound or arrays)[0].devices())) if arrays else _default_device()


def _default_device() -> Any:
    device = jax.config.jax_default_device  # type: ignore[attr-defined]
    if device is None:
        return jax.local_devices()[0]
    return jax.local_devices(backend=device)[0] if isinstance(device, str) else device


@functools.cache
def _key_of(device: Any) -> str:
    """Return the key of a device's platform; nothing is run for it, for a trace without values may be running."""
    name = device.platform
    if name == "gpu":  # what devices of CUDA and of ROCm are called alike
        name = "rocm" if "rocm" in device.client.platform_version.lower() else "cuda"
    return PLATFORMS.get(name, OTHER)
