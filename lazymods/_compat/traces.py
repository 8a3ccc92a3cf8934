"""Which trace operations go to: by public names alone. :mod:`lazymods._compat.fast_traces` is the faster twin.

Seen with jax 0.10.2, 0.11.2 and 0.12.0.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np
from jax.core import ShapedArray, Tracer, eval_context
from jax.extend.core import set_current_trace, take_current_trace

from lazymods import _compat

with eval_context(), take_current_trace() as EVAL:
    """The trace that executes operations."""

_NO_MESH = jax.sharding.AbstractMesh((), ())
_COUNTER = ShapedArray((), np.dtype(np.uint32))


def current_trace() -> Any:
    """Return the trace that operations now go to."""
    with take_current_trace() as trace:
        return trace


def eval_trace() -> Any:
    """Return the trace that executes operations."""
    return EVAL


def at_trace(trace: Any) -> contextlib.AbstractContextManager[Any]:
    """Send operations to ``trace``.

    At the executing trace there are no manual mesh axes (as inside ``shard_map``, which
    ``jax.ensure_compile_time_eval`` does not leave): what is made there is whole.
    """
    return set_current_trace(trace) if trace is not EVAL else _executing()


@contextlib.contextmanager
def _executing() -> Iterator[None]:
    manual = bool(jax.sharding.get_abstract_mesh().manual_axes)
    with no_mesh() if manual else contextlib.nullcontext(), set_current_trace(EVAL):
        yield


def no_mesh() -> contextlib.AbstractContextManager[Any]:
    """Leave the mesh."""
    return jax.sharding.use_abstract_mesh(_NO_MESH)


def home_trace(node: Any) -> Any:
    """Return the trace in which an nnx object or Variable was born, or the current one if that has ended."""
    return _compat.birth_trace(node) or _compat.current_trace()


def weak(trace: Any) -> Any:
    """Return a weak reference to a trace."""
    return weakref.ref(trace)


def executing() -> bool:
    """Whether operations are executed at once, outside of any mesh."""
    return _compat.current_trace() is EVAL and jax.sharding.get_abstract_mesh().empty


def plain_device() -> Any:
    """Return where operations are executed at once, uncommitted; None in a trace, in a mesh, or if one was chosen."""
    default = jax.config.jax_default_device  # type: ignore[attr-defined]
    return jax.local_devices()[0] if executing() and default is None else None


def are_concrete(arrays: Iterable[Any]) -> bool:
    """Whether all of them are arrays with values, none a tracer."""
    return not any(isinstance(x, Tracer) for x in arrays)


def is_tracer(value: Any) -> bool:
    """Whether a value is a tracer."""
    return isinstance(value, Tracer)


def dtype_of(value: Any) -> Any:
    """Return the dtype that JAX gives a value, also where it is a typed Python scalar."""
    return jax.typeof(value).dtype


@functools.cache
def threefry_dtype() -> Any:
    """Return the dtype of threefry keys."""
    with _compat.at_trace(EVAL):
        return jax.eval_shape(lambda: jax.random.key(0, impl="threefry2x32")).dtype


def counted(count: Any, draws: Any) -> Any:
    """Return ``count + draws`` for the counter of a random stream, made on the host where that is the same.

    For those of a stack, ``draws`` has its axes. A fresh process would compile the addition, for longer than a hundred
    layers take. It is the same for an array that is bound to no device, if programs run where it is.
    """
    array = isinstance(count, jax.Array) and not isinstance(count, Tracer)
    device = plain_device()
    if array and device and not count.committed and count.dtype == np.uint32 and not (count.shape or count.weak_type):
        if count.devices() == {device}:
            value = np.array((int(np.asarray(count)) + draws) % 2**32, np.uint32)
            return _compat.put(_COUNTER, count.sharding, value)
    return count + np.uint32(draws)


def asked_for_gradient() -> bool:
    """Whether ``jax.grad`` or ``jax.value_and_grad`` is looking at what it is to differentiate by, in a caller.

    Looks for the frame of ``value_and_grad_f`` in ``jax._src.api``, which checks the dtype of each of the leaves. Where
    it is not found, JAX's own error says that keys can't be differentiated by. (jax 0.10.2 and 0.12.0)
    """
    asked = sys._getframe(2)
    asking = asked.f_back
    return (
        asking is not None
        and asked.f_code.co_name == "tree_leaves"
        and asking.f_code.co_name == "value_and_grad_f"
        and asking.f_globals.get("__name__") == "jax._src.api"
    )
