"""What values hold where Flax does not look: in closures, partials and plain objects."""

from __future__ import annotations

import functools
import types
from collections.abc import Container, Mapping
from typing import Any

import numpy as np
from flax import nnx
from jax.core import Tracer

_PLAIN = frozenset((int, float, bool, str, bytes, type(None), type, np.dtype))


def holds_tracers(value: Any, given: Container[int], depth: int = 8) -> bool:
    """Whether a value holds a traced array, where Flax does not look: in closures, partials and plain objects as well.

    Args:
        value: The value.
        given: The ids of objects that the caller has handed in; what those hold is the caller's.
        depth: How far to look.
    """
    if isinstance(value, Tracer):
        return True
    if depth == 0 or type(value) in _PLAIN or isinstance(value, (type, types.ModuleType)) or id(value) in given:
        return False
    if isinstance(value, nnx.Variable):
        return holds_tracers(value.get_raw_value(), given, depth - 1)
    return any(holds_tracers(v, given, depth - 1) for v in _parts_of(value))


def _parts_of(value: Any) -> list[Any]:
    """What a value holds, as far as Python tells."""
    if isinstance(value, types.FunctionType):
        cells = [c.cell_contents for c in value.__closure__ or () if c != types.CellType()]
        return [*cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    if isinstance(value, types.MethodType):
        return [value.__self__]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    held = list(getattr(value, "__dict__", {}).values())
    if isinstance(value, Mapping):
        return [*held, *value.values()]
    return [*held, *value] if isinstance(value, (list, tuple, set, frozenset)) else held
