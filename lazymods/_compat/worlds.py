"""Traces of our own that flax is to take for the trace in which they began.

flax lets a Variable be changed in the trace in which it was made, and compares weak references to traces
(``OpaqueTraceState``). Seen with jax 0.10.2, 0.11.2 and 0.12.0.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any

from jax.extend.core import get_opaque_trace_state


class _SameWorld(weakref.ref[Any]):
    """A weak reference to the trace in which another was begun, in the eyes of flax; to jax another thing.

    What is done in either is done in the same world. ``jax.jit`` has such a reference in the key of its compiled
    programs: there it has to differ, or the operations would be run past the trace that was begun.
    """

    __slots__ = ()
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        if sys._getframe(1).f_code is _TRACE_STATE_EQ:
            return self() is (other() if isinstance(other, weakref.ref) else None)
        return self is other


_TRACE_STATE_EQ = type(get_opaque_trace_state()).__eq__.__code__


def same_world(trace: Any) -> Any:
    """Return what is to be the ``_weakref`` of a trace in which things are done as in another."""
    return _SameWorld(trace)
