"""A constructor's arguments: their names, as a cache key, and as sizes."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
import math
import operator
import types
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.core import Tracer


class UnhashableError(Exception):
    """An argument cannot be part of a cache key."""


@functools.cache
def constructor_parameters(cls: type) -> dict[str, inspect.Parameter]:
    """The constructor's parameters; those behind ``**kwargs`` are looked up in the base classes.

    ``*dims`` is a parameter ``dims=()``, for all arguments have names here.
    """
    found: dict[str, inspect.Parameter] = {}
    for i, own in enumerate(_constructors(cls)):
        for p in own:
            if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL):
                found.setdefault(p.name, p)
            elif p.kind is p.VAR_POSITIONAL and i == 0:
                found[p.name] = p.replace(kind=p.KEYWORD_ONLY, default=())
        if not any(p.kind is p.VAR_KEYWORD for p in own):
            break
    return found


def _constructors(cls: type) -> Iterator[list[inspect.Parameter]]:
    """The parameters of the constructors of a class and its bases, in the order in which they call each other."""
    for base in cls.__mro__:
        if "__init__" in vars(base) and base is not object:
            yield list(inspect.signature(vars(base)["__init__"]).parameters.values())[1:]


class Variadic(NamedTuple):
    """What a constructor takes without naming it.

    Attributes:
        positional: Its ``*dims``, by name, or None.
        keyword: Its ``**kwargs``, or None.
        behind: Parameters of base classes that may be given through ``**kwargs``. Only the class itself knows which of
            them it hands on, and which it gives to its base on its own.
    """

    positional: str | None
    keyword: str | None
    behind: frozenset[str]


@functools.cache
def variadic(cls: type) -> Variadic:
    """Return what a class's own constructor takes without naming it."""
    own = next(_constructors(cls), [])
    names = {p.kind: p.name for p in own}
    keyword = names.get(inspect.Parameter.VAR_KEYWORD)
    behind = constructor_parameters(cls).keys() - {p.name for p in own}
    return Variadic(names.get(inspect.Parameter.VAR_POSITIONAL), keyword, frozenset(behind))


def as_call(cls: type, arguments: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return arguments by name as a constructor takes them: by position what has to be, the rest by keyword.

    Raises:
        TypeError: If one is missing that goes before others by position, or ``*dims`` is given what is no sequence.
    """
    rest = dict(arguments)
    more = tuple(rest.pop(variadic(cls).positional or "", ()))
    in_order = []
    for p in next(_constructors(cls), []):
        if p.kind is p.POSITIONAL_ONLY or (p.kind is p.POSITIONAL_OR_KEYWORD and more):
            value = rest.pop(p.name, p.default)
            if value is p.empty:
                raise TypeError(f"{cls.__name__}.__init__() missing the argument {p.name!r}")
            in_order.append(value)
    return [*in_order, *more], rest


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
    return _freeze_object(kind, value)


def _freeze_object(kind: Any, value: Any) -> Any:
    if isinstance(value, (jax.Array, np.ndarray)) or nnx.Pytree in kind.__mro__:
        raise UnhashableError
    if isinstance(value, frozenset):
        return kind, frozenset(map(freeze, value))
    if can_change(value):
        raise UnhashableError
    if dataclasses.is_dataclass(kind):  # its own comparison may take True for 1, or leave out a field
        return kind, tuple([freeze(getattr(value, f.name, None)) for f in dataclasses.fields(kind)])
    try:
        hash(value)
    except TypeError as error:
        raise UnhashableError from error
    return kind, value


def can_change(value: Any) -> bool:
    """Whether an argument may be another one later, though it is the same object: a list, or a config, say."""
    kind: Any = type(value)
    if isinstance(value, (list, set)) or (hasattr(kind, "keys") and hasattr(kind, "__setitem__")):
        return True
    if nnx.Pytree in kind.__mro__ or nnx.Variable in kind.__mro__ or hasattr(kind, "dtype"):
        return False
    parameters: Any = getattr(kind, "__dataclass_params__", None)
    if parameters is not None and parameters.frozen:
        return False
    by_identity = kind.__hash__ is None or kind.__hash__ is object.__hash__
    is_other = callable(value) or isinstance(value, types.ModuleType)
    return by_identity and hasattr(value, "__dict__") and not is_other


def copied(value: Any, known: dict[int, tuple[Any, Any]]) -> Any:
    """Copy an argument, and what it holds, as far as that can change; nnx objects stay what they are.

    Args:
        value: The argument.
        known: What is copied already, by its id, with its copy; it gets all others.
    """
    if id(value) in known:
        return known[id(value)][1]
    if type(value) is tuple:
        items = tuple([copied(v, known) for v in value])
        return value if all(a is b for a, b in zip(items, value, strict=True)) else items
    if not (can_change(value) or type(value) is np.ndarray):
        return value
    try:
        made = copy.copy(value)
    except Exception:  # of a file, say: there is but one
        return value
    if made is value:
        return value
    known[id(value)] = value, made
    if isinstance(value, list):
        made[:] = [copied(v, known) for v in value]
    elif hasattr(value, "keys"):
        for key in list(made):
            made[key] = copied(made[key], known)
    elif not isinstance(value, (set, np.ndarray)):
        vars(made).update({k: copied(v, known) for k, v in vars(value).items()})
    return made


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
        is_mapping = hasattr(kind, "keys") and kind is not types.MappingProxyType
        if isinstance(value, (list, tuple)) or is_mapping or can_change(value):
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
    if isinstance(value, (types.MethodType, tuple, jax.Array)) or hasattr(kind, "keys") or can_change(value):
        raise UnhashableError
    if nnx.Pytree in kind.__mro__:
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
    if isinstance(value, (bool, np.bool_, Tracer)):  # a lazy tensor would tell its value
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None
