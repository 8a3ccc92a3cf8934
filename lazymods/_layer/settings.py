"""Static values of blocks that are to be one: whether they do the same in each."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from typing import Any

from lazymods._graph import NODE, OTHER, VARIABLE, children, kind_of
from lazymods._layer.config import LayerConfig
from lazymods._layer.formulas import same_static

_SPEC = ("name", "cls", "config", "unknown", "options", "streams", "rngs_name", "modules", "left_out")


def same_setting(a: Any, b: Any, known: frozenset[tuple[int, int]] = frozenset()) -> bool:
    """Whether two static values do the same: equal ones, and functions and objects that are made alike.

    Args:
        a: One of them.
        b: The other.
        known: What is being compared already: a function may hold itself.
    """
    if a is b or same_static(a, b) or (id(a), id(b)) in known:
        return True
    if type(a) is not type(b):
        return False
    known |= {(id(a), id(b))}
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same_setting(x, y, known) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same_setting(v, b[k], known) for k, v in a.items())
    made = _made_of(a)
    return made is not None and same_setting(made, _made_of(b), known)


def _made_of(value: Any) -> tuple[Any, ...] | None:
    """Return all that says what a function or an object does; None if that is not known."""
    if isinstance(value, LayerConfig):
        return tuple([getattr(value, name) for name in _SPEC])
    if isinstance(value, types.FunctionType):
        return value.__code__, value.__defaults__, value.__kwdefaults__, _closed_over(value)
    if isinstance(value, types.MethodType):
        return value.__func__, value.__self__
    if isinstance(value, functools.partial):
        return value.func, value.args, value.keywords
    return None


def _closed_over(function: types.FunctionType) -> list[Any]:
    found = []
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # nothing was assigned yet
            found.append(None)
    return found


def objects_of(value: Any, known: frozenset[int] = frozenset()) -> Iterator[Any]:
    """Find the nnx objects and Variables that a function holds: closed over, bound to it, or as defaults.

    Args:
        value: The function, or anything else.
        known: What is being searched already.
    """
    kind = kind_of(value)
    if kind in (NODE, VARIABLE):
        yield value
        return
    if id(value) in known or isinstance(value, LayerConfig):
        return
    held = _made_of(value) or () if kind is OTHER else [child for _, child in children(value, kind)]
    for child in held:
        yield from objects_of(child, known | {id(value)})
