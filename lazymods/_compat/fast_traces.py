"""Which trace operations go to, faster, and without the named axes that jax keeps besides.

Private: ``jax._src.core.trace_ctx`` with ``trace``, ``axis_env`` and ``set_axis_env``; ``jax._src.core.top_axis_env``.
Seen with jax 0.10.2, 0.11.2 and 0.12.0.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
from jax._src.core import top_axis_env, trace_ctx
from jax.extend.core import set_current_trace

from lazymods._compat.finding import require
from lazymods._compat.traces import EVAL, no_mesh

require(trace_ctx, "trace", "axis_env", "set_axis_env")
_HERE = contextlib.nullcontext()


def current_trace() -> Any:
    """Return the trace that operations now go to."""
    return trace_ctx.trace


def executing() -> bool:
    """Whether operations are executed at once, outside of any mesh."""
    return trace_ctx.trace is EVAL and jax.sharding.get_abstract_mesh().empty


def at_trace(trace: Any) -> contextlib.AbstractContextManager[Any]:
    """Send operations to ``trace``.

    At the executing trace there are no named axes and no manual mesh axes (as inside ``shard_map``, which
    ``jax.ensure_compile_time_eval`` does not leave): what is made there is whole.
    """
    if trace is not EVAL:
        return _HERE if trace_ctx.trace is trace else set_current_trace(trace)
    manual = bool(jax.sharding.get_abstract_mesh().manual_axes)
    here = trace_ctx.trace is trace and trace_ctx.axis_env is top_axis_env and not manual
    return _HERE if here else _executing(manual)


@contextlib.contextmanager
def _executing(manual: bool) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        if manual:
            stack.enter_context(no_mesh())
        stack.callback(trace_ctx.set_axis_env, trace_ctx.axis_env)
        trace_ctx.set_axis_env(top_axis_env)
        stack.enter_context(set_current_trace(EVAL))
        yield
