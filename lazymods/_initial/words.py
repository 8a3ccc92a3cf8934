"""What a report calls an initializer: by the name under which it is written, with the numbers that it was made with."""

from __future__ import annotations

import functools
import types
from typing import Any

import numpy as np

from lazymods import _compat

_SCALING = {  # what jax.nn.initializers call variance_scaling of these arguments
    (1.0, "fan_in", "truncated_normal"): "lecun_normal",
    (1.0, "fan_in", "uniform"): "lecun_uniform",
    (2.0, "fan_in", "truncated_normal"): "he_normal",
    (2.0, "fan_in", "uniform"): "he_uniform",
    (1.0, "fan_avg", "truncated_normal"): "glorot_normal",
    (1.0, "fan_avg", "uniform"): "glorot_uniform",
}


def of_constant(value: Any) -> str:
    """Name a value that all elements have: ``zeros``, ``ones``, ``all 0.5``."""
    number = np.asarray(value)
    if number.dtype.kind in "biufc" and number.size == 1:
        known = {0: "zeros", 1: "ones"}.get(number.item())
        return known or f"all {number.item():g}" if number.dtype.kind in "iuf" else known or f"all {number.item()}"
    return f"all {value}"


def of_initializer(init: Any) -> str:
    """Name an initializer: ``lecun_normal``, ``normal(stddev=0.02)``, or the name of a user's function; '' for None."""
    if init is None:
        return ""
    function: Any = init.func if isinstance(init, functools.partial) else init
    if not _compat.is_jax_initializer(function):
        return getattr(function, "__name__", type(function).__name__)
    name = function.__qualname__.partition(".<locals>")[0]
    given = _given(function)
    scaling = given.get("scale"), given.get("mode"), given.get("distribution")
    if name == "variance_scaling" and scaling in _SCALING:
        return _SCALING[scaling]  # type: ignore[index]
    plain = [f"{key}={value:g}" for key, value in given.items() if type(value) in (int, float) and "axis" not in key]
    return f"{name}({', '.join(plain)})" if plain else name


def _given(function: Any) -> dict[str, Any]:
    """Return the plain values that a function closes over, by name."""
    if not isinstance(function, types.FunctionType):
        return {}
    names, cells = function.__code__.co_freevars, function.__closure__ or ()
    found = ((name, cell.cell_contents) for name, cell in zip(names, cells, strict=True))
    return {name: value for name, value in found if type(value) in (int, float, str)}
