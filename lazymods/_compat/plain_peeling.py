"""What can be told of where operations run without the private names of :mod:`lazymods._compat.peeling`.

Seen with jax 0.10.2 and 0.12.0.
"""

from __future__ import annotations

from typing import Any

from lazymods._compat.traces import EVAL


def base_trace(trace: Any) -> Any:
    """Return the trace itself: nothing is known of what is beneath."""
    return trace


def base_value(value: Any) -> Any:
    """Return the value itself: nothing is known of what is beneath."""
    return value


def runs_at_once(trace: Any) -> bool:
    """Whether operations that go to a trace are executed at once, neither differentiated nor mapped."""
    return trace is EVAL
