"""The trace in which an nnx object or a Variable was born, which flax keeps to tell who may change it.

Flax keeps an object of its own class for it, that has jax's public ``OpaqueTraceState``, that has a weak reference to
the trace. Each is found by its class, not by its name. Seen with flax 0.12.8, 0.12.10, 0.12.12 and jax 0.10.2, 0.11.2,
0.12.0.
"""

from __future__ import annotations

import operator
import weakref
from typing import Any

from flax import nnx
from jax.extend.core import get_opaque_trace_state

from lazymods._compat.objects import STATE, new_state
from lazymods._compat.variables import BIRTH

OpaqueState: Any = type(get_opaque_trace_state(convention="nnx"))


def _name_of(holder: Any, kind: Any) -> str:
    """Return the name of the attribute of ``holder`` that is a ``kind``."""
    for name in dir(holder):
        if not name.startswith("__") and isinstance(getattr(holder, name), kind):
            return name
    raise AttributeError(f"{type(holder).__module__}.{type(holder).__qualname__} has no {kind.__name__}")


_variable_state: Any = BIRTH.__get__
_OWN = _name_of(new_state(), type(_variable_state(nnx.Variable(0, hijax=False, ref=False))))
_own = operator.attrgetter(_OWN)
_OPAQUE = _name_of(_own(new_state()), OpaqueState)
opaque_of: Any = operator.attrgetter(_OPAQUE)
opaque_of_own: Any = operator.attrgetter(f"{_OWN}.{_OPAQUE}")  # of what an nnx object keeps under STATE
reference_of: Any = operator.attrgetter(_name_of(get_opaque_trace_state(convention="nnx"), weakref.ref))


def state_of(node: Any) -> Any:
    """Return what flax keeps of the birth of an nnx object or a Variable."""
    return _variable_state(node) if issubclass(type(node), nnx.Variable) else _own(vars(node)[STATE])


def set_opaque(state: Any, opaque: Any) -> None:
    """Change the trace in what flax keeps of a birth."""
    setattr(state, _OPAQUE, opaque)


def birth_trace(node: Any) -> Any:
    """Return the trace in which an nnx object or Variable was born, or None if that trace has ended."""
    return reference_of(opaque_of(state_of(node)))()


def current_home() -> Any:
    """Return the trace in which an nnx object or Variable that is made now is born."""
    return reference_of(get_opaque_trace_state(convention="nnx"))()


_TRANSFORMS = {
    "BatchTrace": "jax.vmap",
    "JVPTrace": "jax.jvp (or jax.grad)",
    "LinearizeTrace": "jax.grad (or jax.linearize)",
    "jit": "jax.jit (or an eval_shape)",
    "checkpoint / remat": "jax.checkpoint",
    "scan": "jax.lax.scan",
}


def transform_of(trace: Any) -> str:
    """Say in words which transform a trace belongs to; a name that is unknown takes no more than that word."""
    traced_for = getattr(getattr(getattr(trace, "frame", None), "debug_info", None), "traced_for", None)
    return _TRANSFORMS.get(traced_for or type(trace).__name__, "a JAX transform")
