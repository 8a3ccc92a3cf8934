"""What is beneath ``jax.grad``, ``jax.jvp`` and ``jax.vmap``: where operations really run, and on which arrays.

Private: ``JVPTrace``, ``LinearizeTrace``, ``BatchTrace`` with ``parent_trace``, and the tracers' ``primal`` and
``val``. Seen with jax 0.10.2 and 0.12.0.
"""

from __future__ import annotations

from typing import Any

from jax._src.interpreters.ad import JVPTrace, JVPTracer, LinearizeTrace, LinearizeTracer
from jax._src.interpreters.batching import BatchTrace, BatchTracer

from lazymods._compat.abstract import OperationByOperation
from lazymods._compat.finding import require
from lazymods._compat.traces import EVAL

require(JVPTracer, "primal")
require(LinearizeTracer, "primal")
require(BatchTracer, "val")

_TRACES = (JVPTrace, LinearizeTrace, BatchTrace)


def _hands_on(trace: Any) -> bool:
    return isinstance(trace, _TRACES) or (isinstance(trace, OperationByOperation) and hasattr(trace, "parent_trace"))


def base_trace(trace: Any) -> Any:
    """Return the trace beneath derivatives and vmap, and blocks in which gradients are off (:mod:`.grad_modes`)."""
    while _hands_on(trace):
        trace = trace.parent_trace  # set in the constructor of each
    return trace


def base_value(value: Any) -> Any:
    """Return the array that a tracer of a derivative or of vmap stands for."""
    while True:
        if isinstance(value, (JVPTracer, LinearizeTracer)):
            value = value.primal
        elif isinstance(value, BatchTracer):
            value = value.val
        else:
            return value


def runs_at_once(trace: Any) -> bool:
    """Whether operations that go to a trace are executed at once, also if they are differentiated or mapped."""
    return base_trace(trace) is EVAL
