"""A constructor's arguments: their names, as a cache key, and as sizes."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import operator
import types
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx


class UnhashableError(Exception):
    """An argument cannot be part of a cache key."""


@functools.cache
def constructor_parameters(cls: type) -> dict[str, inspect.Parameter]:
    """The constructor's parameters; those behind ``**kwargs`` are looked up in the base classes."""
    found: dict[str, inspect.Parameter] = {}
    for base in cls.__mro__:
        if "__init__" not in vars(base):
            continue
        own = list(inspect.signature(vars(base)["__init__"]).parameters.values())[1:]
        for p in own:
            if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL):
                found.setdefault(p.name, p)
        if not any(p.kind is p.VAR_KEYWORD for p in own):
            break
    return found


# isinstance(value, Mapping) or (value, nnx.Pytree) asks every subclass of those whether it knows the type of the value,
# once for each type. In a fresh process that takes as long as making some layers; so the keys below try less first.
_ATOMS = frozenset((int, bool, str, bytes, type(None)))
_NONE = type(None), None


def freeze(value: Any) -> Any:
    """Turn an argument into a hashable key that tells 1, True and 1.0 apart.

    Raises:
        UnhashableError: If it holds an array or anything else without a hash.
    """
    kind = type(value)
    if value is None:
        return _NONE
    if kind in _ATOMS:
        return kind, value
    if isinstance(value, (list, tuple)):
        return type(value), tuple(freeze(v) for v in value)
    if hasattr(kind, "keys") and isinstance(value, Mapping):
        return type(value), tuple((freeze(k), freeze(v)) for k, v in value.items())
    if isinstance(value, np.generic):
        return kind, value.tobytes()  # tells 0.0 and -0.0 apart
    if isinstance(value, float):
        return kind, value.hex()
    if isinstance(value, complex):
        return kind, value.real.hex(), value.imag.hex()
    if isinstance(value, (jax.Array, np.ndarray)) or nnx.Pytree in kind.__mro__:
        raise UnhashableError
    try:
        hash(value)
    except TypeError as error:
        raise UnhashableError from error
    return type(value), value


def freeze_arguments(cls: type, arguments: Mapping[str, Any]) -> Any:
    """Return ``freeze(arguments)`` for a constructor; layers share the keys of what they leave at its default.

    Raises:
        UnhashableError: As :func:`freeze`.
    """
    defaults = _frozen_defaults(cls)
    found = []
    for name, value in arguments.items():
        known = defaults.get(name)
        found.append(known[1] if known is not None and known[0] is value else (name, freeze(value)))
    return tuple(found)


@functools.cache
def _frozen_defaults(cls: type) -> dict[str, tuple[Any, tuple[str, Any]]]:
    """Each default that is a key, with name and key."""
    found = {}
    for name, parameter in constructor_parameters(cls).items():
        value = parameter.default
        kind = type(value)
        if isinstance(value, (list, tuple)) or (hasattr(kind, "keys") and kind is not types.MappingProxyType):
            continue  # it may be changed in place
        with contextlib.suppress(UnhashableError):
            found[name] = value, (name, freeze(value))
    return found


def exact(value: Any) -> Any:
    """Return a key under which whatever was made of an argument may be remembered while that argument lives.

    Numbers, texts and tuples of them count by type and value, everything else by identity.

    Raises:
        UnhashableError: If it can be changed in place, or is made anew whenever it is asked for.
    """
    kind = type(value)
    if kind in _ATOMS:
        return kind, value
    if kind is float:
        return kind, value.hex()
    if kind is tuple:
        return tuple(map(exact, value))
    if isinstance(value, (types.MethodType, tuple, jax.Array)) or hasattr(kind, "keys") or nnx.Pytree in kind.__mro__:
        raise UnhashableError
    try:
        hash(value)
    except TypeError as error:
        raise UnhashableError from error
    return kind, id(value)


class Ignored:
    """Carries what a cached function needs beside its key."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ignored)

    def __hash__(self) -> int:
        return 0


def common_multiple(arguments: Mapping[str, Any]) -> int:
    """A number that every plausible group count, head count or width among the arguments divides."""
    found = 1
    for value in jax.tree.leaves(list(arguments.values())):
        if isinstance(value, int) and not isinstance(value, bool) and 1 < value <= 65536:
            found = math.lcm(found, value) if math.lcm(found, value) < 2**24 else found
    return found


def as_size(value: Any) -> int | None:
    """Return a positive int, or None if ``value`` is no size."""
    if isinstance(value, (bool, np.bool_)):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None
