"""What kernels hold beside their arguments: arrays, models, and values of a trace that is running.

A kernel that holds some is traced at once, with the call, and not when the program is lowered: then they would be other
ones. The function of a pair may hold no value that is being traced: no gradient would come to it.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator
from typing import Any

import jax
from flax import nnx

from lazymods._objects.reached import global_names, is_library, parts_of, parts_of_callable
from lazymods._objects.tokens import TokenKind, kind_of

_DEPTH = 8


def held(kernels: Iterable[Any]) -> Iterator[Any]:
    """Go through the arrays, Variables and nnx objects that functions reach by closures, defaults and globals."""
    seen: set[int] = set()
    for kernel in kernels:
        yield from _held(kernel, seen, _DEPTH)


def _held(value: Any, seen: set[int], depth: int) -> Iterator[Any]:
    kind = kind_of(value)
    if isinstance(value, jax.Array):
        yield value
    elif kind in (TokenKind.NODE, TokenKind.VARIABLE):
        yield value
        yield from jax.tree.leaves(nnx.state(value) if kind is TokenKind.NODE else value)
    elif id(value) not in seen and depth > 0:
        seen.add(id(value))
        for part in _parts(value, kind):
            yield from _held(part, seen, depth - 1)


def _parts(value: Any, kind: TokenKind) -> Iterator[Any]:
    if kind is TokenKind.SET:
        yield from value
    elif kind is not TokenKind.ATOM:
        yield from parts_of(value, kind)
    elif callable(value):
        yield from parts_of_callable(value)
        if isinstance(value, types.FunctionType) and not is_library(value.__module__):
            names = set(global_names(value.__code__)) & value.__globals__.keys()
            yield from (value.__globals__[name] for name in names)
