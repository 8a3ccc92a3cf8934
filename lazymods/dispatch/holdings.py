"""What kernels hold beside their arguments: arrays, models, and values of a trace that is running.

A kernel that holds some is traced at once, with the call, and not when the program is lowered: then they would be other
ones. The function of a pair may hold no value that is being traced: no gradient would come to it.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable, Iterator
from typing import Any

import jax
from flax import nnx

from lazymods._objects.reached import MISSING, in_cell

_DEPTH = 8
_LIBRARIES = ("jax", "jaxlib", "flax", "numpy", "optax", "lazymods")


def held(kernels: Iterable[Any]) -> Iterator[Any]:
    """Go through the arrays, Variables and nnx objects that functions reach by closures, defaults and globals."""
    seen: set[int] = set()
    for kernel in kernels:
        yield from _held(kernel, seen, _DEPTH)


def _held(value: Any, seen: set[int], depth: int) -> Iterator[Any]:
    if isinstance(value, jax.Array):
        yield value
        return
    if isinstance(value, (nnx.Pytree, nnx.Variable)):
        yield value
        yield from (leaf for leaf in jax.tree.leaves(nnx.state(value) if isinstance(value, nnx.Pytree) else value))
        return
    if id(value) in seen or depth == 0 or isinstance(value, (type, types.ModuleType)):
        return
    seen.add(id(value))
    for part in _parts(value):
        yield from _held(part, seen, depth - 1)


def _parts(value: Any) -> list[Any]:
    if isinstance(value, types.FunctionType):
        if (value.__module__ or "").partition(".")[0] in _LIBRARIES:
            return []
        cells = [held for held in map(in_cell, value.__closure__ or ()) if held is not MISSING]
        names = [value.__globals__[n] for n in value.__code__.co_names if n in value.__globals__]
        return [*cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values(), *names]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, types.MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, (list, tuple, set, frozenset)):
        return list(value)
    if isinstance(value, dict):
        return list(value.values())
    if type(value).__module__.partition(".")[0] in _LIBRARIES:
        return [getattr(value, "__wrapped__", None)]
    return list(getattr(value, "__dict__", {}).values())

