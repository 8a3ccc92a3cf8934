"""The parts of a Variable, without what its methods do besides.

A Variable has three slots: its value, its metadata, and the trace in which it was born. They are found by what they
hold in a new one, not by their names. Seen with flax 0.12.8, 0.12.10, 0.12.12 and jax 0.10.2, 0.11.2, 0.12.0.
"""

from __future__ import annotations

import functools
import operator
import types
import weakref
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax.core import Tracer
from jax.extend.core import get_opaque_trace_state

from lazymods._compat.objects import STATE, new_state


def _slots() -> tuple[Any, Any, Any]:
    """Return the slots of a Variable: value, metadata, and the trace in which it was born."""
    value = object()
    new: Any = nnx.Variable(value, hijax=False, ref=False)
    slots = [m for m in vars(nnx.Variable).values() if isinstance(m, types.MemberDescriptorType)]
    [raw] = [s for s in slots if s.__get__(new) is value]
    [metadata] = [s for s in slots if type(s.__get__(new)) is dict]
    [birth] = [s for s in slots if s is not raw and s is not metadata]
    return raw, metadata, birth


try:
    RAW, METADATA, BIRTH = _slots()
except ValueError:
    raise AttributeError("flax.nnx.Variable has other slots than value, metadata and trace") from None

SET_RAW: Callable[[Any, Any], None] = RAW.__set__
"""Set the value of a Variable, and nothing besides."""

raw_metadata: Callable[[Any], dict[str, Any]] = METADATA.__get__
"""Return a Variable's own metadata dict."""

_get_raw: Any = RAW.__get__
_get_birth: Any = BIRTH.__get__
_set_birth, _set_metadata = BIRTH.__set__, METADATA.__set__
_new_birth: Any = type(_get_birth(nnx.Variable(0, hijax=False, ref=False)))


def new_variable(cls: type[nnx.Variable[Any]], raw: Any, metadata: dict[str, Any]) -> Any:
    """Make a Variable without running its constructor."""
    variable = object.__new__(cls)
    _set_birth(variable, _new_birth())
    _set_metadata(variable, metadata)
    SET_RAW(variable, raw)
    return variable


def value_of(variable: nnx.Variable[Any]) -> Any:
    """Return ``variable.get_value()``, without the copy if it is an array that no hook changes."""
    ordinary = type(variable).get_value is nnx.Variable.get_value and "on_get_value" not in raw_metadata(variable)
    raw = _get_raw(variable) if ordinary else None
    is_array = _is_array(type(raw)) or (isinstance(raw, jax.Array) and not isinstance(raw, jax.Ref))
    return raw if is_array else variable.get_value()


@functools.cache  # isinstance() of a reference asks for the type that JAX gives a value, every time
def _is_array(cls: type) -> bool:
    return issubclass(cls, jax.Array) and not issubclass(cls, (Tracer, jax.Ref))


def raw_values(variables: Any) -> list[Any]:
    """Return the values of Variables as they are."""
    return list(map(_get_raw, variables))


def write_variable(variable: Any, cls: type, raw: Any, metadata: dict[str, Any]) -> None:
    """Set class, value and metadata of a Variable, from whatever trace is current."""
    if not issubclass(type(variable), nnx.Variable):  # one of hijax, or a tracer of one: all else of it stays
        variable.set_raw_value(raw)
        return
    SET_RAW(variable, raw)
    _set_metadata(variable, metadata)
    object.__setattr__(variable, "__class__", cls)


NOT_GIVEN: Any = 0  # for nnx.use_eager_sharding: as False, and tells what a Variable was not given from False


def default_metadata() -> dict[str, Any]:
    """Return the metadata that flax gives every Variable made now (``Variable.required_metadata``)."""
    defaults = nnx.var_defaults()
    return {"hijax": defaults.hijax, "ref": defaults.ref, "eager_sharding": nnx.using_eager_sharding()}


# ---------------------------------------------------------------- the trace of a birth

# Flax keeps an object of its own class for it; that one has OpaqueTraceState of jax, and that a weak reference to
# the trace. Each is found by its class, not by its name. nnx objects have the same one. It tells who may change them.

OpaqueState: Any = type(get_opaque_trace_state(convention="nnx"))


def _name_of(holder: Any, kind: Any) -> str:
    """Return the name of the attribute of ``holder`` that is a ``kind``."""
    for name in dir(holder):
        if not name.startswith("__") and isinstance(getattr(holder, name), kind):
            return name
    raise AttributeError(f"{type(holder).__module__}.{type(holder).__qualname__} has no {kind.__name__}")


_OWN = _name_of(new_state(), _new_birth)
_own = operator.attrgetter(_OWN)
_OPAQUE = _name_of(_own(new_state()), OpaqueState)
opaque_of: Any = operator.attrgetter(_OPAQUE)
opaque_of_own: Any = operator.attrgetter(f"{_OWN}.{_OPAQUE}")  # of what an nnx object keeps under STATE
reference_of: Any = operator.attrgetter(_name_of(get_opaque_trace_state(convention="nnx"), weakref.ref))


def state_of(node: Any) -> Any:
    """Return what flax keeps of the birth of an nnx object or a Variable."""
    return _get_birth(node) if issubclass(type(node), nnx.Variable) else _own(vars(node)[STATE])


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
