"""What a value is to a trace, and a hashable stand-in for it that tells apart what Python's ``==`` does not.

A trace depends on static values by type and value: ``True``, ``1`` and ``1.0`` are three values, as are ``0.0``
and ``-0.0``; two arrays are never compared. What has no content that is known is the same only if it is the same
object, remembered by a weak reference where Python has one.
"""

from __future__ import annotations

import argparse
import array
import collections
import enum
import functools
import sys
import types
import weakref
from collections.abc import Hashable
from typing import Any

import jax
import numpy as np
from flax import nnx
from flax.typing import HashableMapping
from jax.core import Tracer

from lazymods import _compat
from lazymods._objects.attributes import Attributes, slots_of


class TokenKind(enum.IntEnum):
    """What a walk does with a value."""

    ATOM = 0  # nothing inside: compared by type and value, or by identity
    ARRAY = 1
    TUPLE = 2  # immutable, looked into
    METHOD = 3
    PARTIAL = 4
    PROXY = 5  # a view of a dict
    VARIABLE = 6
    NODE = 7  # an nnx object
    OBJECT = 8  # any other object with attributes or slots
    DICT = 9
    LIST = 10
    SET = 11
    QUEUE = 12


# Instances of these packages' classes are looked at from outside: their state is not the user's.
_CLOSED = sys.stdlib_module_names | {"jax", "jaxlib", "numpy", "optax", "lazymods", "ml_dtypes", "torch", "tensorflow"}
_OPEN_CLASSES: frozenset[type] = frozenset((
    *(types.SimpleNamespace, argparse.Namespace),
    *(collections.UserDict, collections.UserList, collections.ChainMap),
))  # fmt: skip


@functools.lru_cache(maxsize=4096)
def kind_of_type(cls: type) -> TokenKind:
    """Tell what values of a class are to a walk."""
    if cls in _compat.REFERENCES:
        return TokenKind.ARRAY
    if issubclass(cls, nnx.Variable):
        return TokenKind.VARIABLE
    if issubclass(cls, nnx.Pytree):
        return TokenKind.NODE
    if issubclass(cls, (jax.Array, Tracer, np.ndarray)) or hasattr(cls, "aval"):
        return TokenKind.ARRAY
    for kind, bases in _BUILTIN.items():
        if issubclass(cls, bases):
            return kind
    if issubclass(cls, (*_WITHOUT_STATE, *_BUILTIN_VALUES)) or not (cls.__dictoffset__ or slots_of(cls)):
        return TokenKind.ATOM
    closed = (cls.__module__ or "").partition(".")[0] in _CLOSED and cls not in _OPEN_CLASSES
    return TokenKind.ATOM if closed else TokenKind.OBJECT


_BUILTIN: dict[TokenKind, Any] = {
    TokenKind.TUPLE: tuple,
    TokenKind.METHOD: types.MethodType,
    TokenKind.PARTIAL: functools.partial,
    TokenKind.PROXY: types.MappingProxyType,
    TokenKind.DICT: dict,
    TokenKind.LIST: list,
    TokenKind.SET: set,
    TokenKind.QUEUE: (collections.deque, bytearray, array.array),
}


JIT_OF_FLAX: type = type(nnx.jit(lambda: None))
_WITHOUT_STATE = (
    *(type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType, enum.Enum, HashableMapping),
    JIT_OF_FLAX,
)


_BUILTIN_VALUES = (int, float, complex, str, bytes, frozenset)  # also of a class of the user's


def kind_of(value: Any) -> TokenKind:
    """Tell what a value is to a walk."""
    kind = kind_of_type(type(value))
    return TokenKind.ATOM if kind is TokenKind.ARRAY and _is_foreign(value) else kind


def _is_foreign(value: Any) -> bool:
    """Whether a value is an array of numpy that JAX does not take: of texts, times, records, objects."""
    if not isinstance(value, np.ndarray) or value.dtype == jax.dtypes.float0:
        return False
    return value.dtype.kind in "OSUMm" or value.dtype.type is np.void


def can_change(value: Any) -> bool:
    """Whether an atom can get another token: one with attributes, or one to whose items anyone may write."""
    if isinstance(value, (memoryview, np.ndarray)):
        return True
    return isinstance(value, _BUILTIN_VALUES) and bool(type(value).__dictoffset__) and not isinstance(value, enum.Enum)


def content(value: Any) -> Hashable:
    """Return what is in an array of numpy, or in a view of memory."""
    if not isinstance(value, np.ndarray):
        return (memoryview, value.format, value.shape, value.tobytes())
    items = tuple(map(token, value.ravel())) if value.dtype.kind == "O" else value.tobytes()
    return (np.ndarray, value.dtype, value.shape, items)


def attributes_now(value: Any) -> Hashable:
    """Return what stands for the attributes and slots that a value has now, and that are not looked into."""
    return tuple((name, token(held)) for name, held in Attributes(value).items())


def made_as(queue: Any) -> Hashable:
    """Return what a queue is besides its items: how many it may have, or of which type they are."""
    return getattr(queue, "maxlen", None), getattr(queue, "typecode", None)


def token_now(value: Any) -> Hashable:
    """Return the token of an atom, with its attributes if its class gives it some."""
    return (token(value), attributes_now(value)) if isinstance(value, _BUILTIN_VALUES) else token(value)


class SameObject:
    """Stands for an object in a key: equal to another only while both stand for one living object."""

    __slots__ = ("_get", "_hash")

    def __init__(self, value: Any) -> None:
        self._hash = id(value)
        try:
            self._get: Any = weakref.ref(value)
        except TypeError:
            self._get = lambda: value

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SameObject):
            return NotImplemented
        mine = self._get()
        return mine is not None and mine is other._get()

    def __repr__(self) -> str:
        value = self._get()
        return "an object that is gone" if value is None else getattr(value, "__name__", None) or repr(value)


_PLAIN = frozenset((type(None), bool, int, str, bytes, type(Ellipsis)))


def token(value: Any) -> Hashable:
    """Return a hashable that equals another's only if both are the same to a trace.

    Args:
        value: Anything that a walk does not look into.
    """
    cls = type(value)
    if cls in _PLAIN:
        return (cls, value)
    if cls is float:
        return (cls, value.hex())
    if cls is complex:
        return (cls, value.real.hex(), value.imag.hex())
    if cls is HashableMapping:  # flax's names of data attributes, never changed
        return (cls, frozenset(value.items()))
    if isinstance(value, (np.dtype, jax.ShapeDtypeStruct)):
        return (np.dtype if isinstance(value, np.dtype) else cls, value)
    if isinstance(value, np.generic):
        return (cls, value.tobytes(), value.dtype)  # a time has its unit in its dtype
    if cls is memoryview or _is_foreign(value):
        return content(value)
    if cls is frozenset:
        return (cls, frozenset(map(token, value)))
    if cls is slice or cls is range:
        return (cls, token(value.start), token(value.stop), token(value.step))
    return SameObject(value)


def show(value: Any) -> str:
    """Show a static value or its token in a message."""
    if isinstance(value, tuple) and len(value) >= 2 and isinstance(value[0], type):
        if value[0] is float:
            return repr(float.fromhex(value[1]))
        return repr(value[1])
    return repr(value)
