"""What a callable reaches without being told: what is in its cells, defaults and attributes, and what it wraps.

A function that holds an nnx object so is looked into like a container, wherever it is found: as an attribute of a
model, in a list, in the cell of another function. All other functions are values of their own, compared by identity:
which it is, is found out once for each.
"""

from __future__ import annotations

import dis
import functools
import gc
import inspect
import itertools
import sys
import types
import weakref
from collections.abc import Iterator
from typing import Any

import jax

from lazymods._objects.attributes import Attributes, slots_of
from lazymods._objects.tokens import JIT_OF_FLAX, TokenKind, kind_of

LIBRARIES = sys.stdlib_module_names | {
    "jax", "jaxlib", "flax", "optax", "numpy", "lazymods", "orbax", "chex", "einops", "torch", "scipy", "sklearn",
}  # fmt: skip

MISSING = object()  # what is in a cell without a value
_JITS: tuple[type, ...] = (type(jax.jit(lambda: None)), JIT_OF_FLAX)
_PLAIN = (type, types.BuiltinFunctionType, types.MethodWrapperType, types.WrapperDescriptorType)
_HASHED = (TokenKind.DICT, TokenKind.SET)
_DEPTH = 8  # so many containers deep is a model looked for
_PARTS = 1_000  # in so many of them, and in so many parts of each
_attributes = object.__getattribute__  # classes may answer for vars() themselves


def is_library(name: str | None) -> bool:
    """Whether a module, by its name, is a library's: its functions don't reach the user's models by name."""
    return (name or "").partition(".")[0] in LIBRARIES


def is_jit(value: Any) -> bool:
    """Whether a callable is one of ``jax.jit``, ``nnx.jit`` or ``lm.jit``, with a function in ``__wrapped__``.

    A deep copy of what ``jax.jit`` returns lacks it.
    """
    known = isinstance(value, _JITS) or getattr(type(value), "is_jit", False)
    return known and hasattr(value, "__wrapped__")


def in_cell(cell: Any) -> Any:
    """Return what a cell holds; MISSING if the variable has no value."""
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING


def held_by(node: Any, kind: TokenKind | None = None) -> Any:
    """Return the dict, list, set or queue in which a node holds its contents."""
    kind = kind_of(node) if kind is None else kind
    if kind is TokenKind.OBJECT and slots_of(type(node)):
        return Attributes(node)
    return _attributes(node, "__dict__") if kind in (TokenKind.NODE, TokenKind.OBJECT) else node


def defaults_of(function: types.FunctionType) -> dict[str, Any]:
    """Return the defaults that a function has now, by the names of its parameters."""
    code, defaults = function.__code__, function.__defaults__ or ()
    with_default = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
    return {**dict(zip(with_default, defaults, strict=True)), **(function.__kwdefaults__ or {})}


def parts_of_callable(value: Any) -> list[Any]:
    """Return what a callable holds, in a fixed order: cells, defaults, attributes, or the function that it wraps."""
    if isinstance(value, types.FunctionType):
        return [*map(in_cell, value.__closure__ or ()), *defaults_of(value).values(), *vars(value).values()]
    if isinstance(value, _PLAIN):
        return []
    if is_jit(value):
        return [value.__wrapped__]
    held = getattr(value, "__dict__", None)
    return list(held.values()) if isinstance(held, dict) and is_library(type(value).__module__) else []


def names_in_callable(value: Any) -> list[str]:
    """Return the names of what a callable holds, in the order of :func:`parts_of_callable`."""
    if isinstance(value, types.FunctionType):
        return [*value.__code__.co_freevars, *defaults_of(value), *vars(value)]
    return ["__wrapped__"] if is_jit(value) else list(vars(value))


def dict_of(proxy: types.MappingProxyType[Any, Any]) -> Any:
    """Return the dict of which a proxy is a view."""
    return gc.get_referents(proxy)[0]


def looked_up(held: Any, kind: TokenKind) -> list[Any]:
    """Return what is found in a container by its hash and may be changed: keys of a dict, items of a set."""
    return [v for v in list(held) if kind_of(v) is not TokenKind.ATOM] if kind in _HASHED else []


def parts_of(value: Any, kind: TokenKind) -> Iterator[Any]:
    """Yield what a container, bound method or partial function holds."""
    if kind is TokenKind.METHOD:
        yield from (value.__self__, value.__func__)
        return
    if kind is TokenKind.PARTIAL:
        yield from (value.func, value.args, value.keywords)
        return
    if kind is TokenKind.PROXY:
        yield dict_of(value)
        return
    held = held_by(value, kind)
    yield from () if kind is TokenKind.SET else list(held.values()) if isinstance(held, dict) else held
    yield from looked_up(held, kind)
    if kind is not TokenKind.OBJECT and type(value).__dictoffset__:  # the attributes of a container of the user's
        yield vars(value)


def global_names(code: types.CodeType) -> Iterator[str]:
    """Yield the names that code, and code inside it, may look up; those of attributes are among them."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from global_names(constant)


def functions_of(cls: type) -> Iterator[types.FunctionType]:
    """Yield the functions of a class and its bases, as far as these are the user's: methods, properties and so on."""
    for base in cls.__mro__:
        for held in () if is_library(base.__module__) else list(vars(base).values()):
            held = held.fget if isinstance(held, property) else held
            held = inspect.unwrap(held) if callable(held) or isinstance(held, (staticmethod, classmethod)) else None
            if isinstance(held, types.FunctionType):
                yield held


_LOADS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")


@functools.lru_cache(maxsize=4096)
def loaded_names(code: types.CodeType) -> frozenset[str]:
    """Return the names that code, and code inside it, looks up as globals."""
    found = {step.argval for step in dis.get_instructions(code) if step.opname in _LOADS}
    return frozenset(found.union(*(loaded_names(c) for c in code.co_consts if isinstance(c, types.CodeType))))


# ---------------------------------------------------------------- which hold a model


_DECIDED = (types.FunctionType, *_JITS)  # each of their objects is equal to itself alone
_decided: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()


def is_looked_into(value: Any) -> bool:
    """Whether a value that is no container is a callable that holds an nnx object."""
    if not callable(value) or isinstance(value, _PLAIN):
        return False
    if not isinstance(value, _DECIDED):
        return _parts_hold_model(value, {id(value)}, 0)
    known = _decided.get(value)
    if known is None:
        known = _decided[value] = _parts_hold_model(value, {id(value)}, 0)
    return known


def holds_model(value: Any) -> bool:
    """Whether a value is an nnx object or a Variable, or a container or callable that holds one.

    Each call asks, so only the first parts of a large container, a dataset, are looked at. A model that is further
    inside would be a constant of the program, which is refused.
    """
    return _holds_model(value, set(), 0)


def _holds_model(value: Any, seen: set[int], depth: int) -> bool:
    kind = kind_of(value)
    if kind in (TokenKind.NODE, TokenKind.VARIABLE):
        return True
    if kind is TokenKind.ARRAY or id(value) in seen or depth > _DEPTH or len(seen) > _PARTS:
        return False
    if kind is not TokenKind.ATOM:
        seen.add(id(value))
        return any(_holds_model(part, seen, depth + 1) for part in itertools.islice(parts_of(value, kind), _PARTS))
    if not callable(value):
        return False
    seen.add(id(value))
    return _parts_hold_model(value, seen, depth)


def _parts_hold_model(value: Any, seen: set[int], depth: int) -> bool:
    return any(_holds_model(part, seen, depth) for part in parts_of_callable(value))
