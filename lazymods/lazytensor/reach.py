"""What a function reaches: functions, closures, globals and classes, so that its program is kept only if all is known.

:func:`look` takes a function apart into a hashable key and the values that are inputs of its program (models, arrays,
floats), and puts it together again with others. Code is part of the key, not the function: one that is defined anew is
the same. :class:`UnknownError` says that something is reached whose changes nobody would see, as an attribute of a
plain object or a list: then no program is kept.
"""

from __future__ import annotations

import builtins
import dis
import functools
import itertools
import types
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import jax
import numpy as np

from lazymods import _compat
from lazymods._graph import attributes, is_object, nodes, variables
from lazymods._objects.reached import MISSING, names_in_callable, parts_of_callable
from lazymods._objects.tokens import SameObject, token

# Modules whose functions give the same whenever they are called with the same.
_PURE = frozenset(
    "jax jaxlib flax numpy optax einops chex ml_dtypes lazymods builtins math cmath functools operator itertools typing"
    " dataclasses collections enum abc types".split()
)
_UNSEEN = frozenset(("globals", "locals", "vars", "eval", "exec", "__import__", "open", "input", "id"))
_WRITES = frozenset(("STORE_GLOBAL", "DELETE_GLOBAL", "IMPORT_NAME", "IMPORT_FROM"))


_EQUAL_TO_OTHERS = (int, float, complex, np.generic, tuple, frozenset)  # 1 == True == 1.0


class UnknownError(Exception):
    """Something is reached whose changes would not be seen."""


class Looked(NamedTuple):
    """A function taken apart.

    Attributes:
        key: Equal for functions that do the same with the same inputs.
        inputs: A pytree of models, arrays and floats.
        build: Makes a function that does the same with other inputs.
    """

    key: Hashable
    inputs: Any
    build: Callable[[Any], Any]


def is_input(value: Any) -> bool:
    """Whether a value is an array, or a number that often changes."""
    return isinstance(value, (jax.Array, np.ndarray, np.generic, float, complex))


def look(value: Any, above: tuple[int, ...] = ()) -> Looked:
    """Take apart a function, or what it holds.

    Raises:
        UnknownError: It reaches something whose changes would not be seen.
    """
    if is_object(value) or is_input(value):
        return Looked("input", value, lambda inputs: inputs)
    if id(value) in above:  # a function that calls itself
        raise UnknownError
    above = (*above, id(value))
    if isinstance(value, functools.partial):
        return _partial(value, above)
    if isinstance(value, types.MethodType):
        parts = [look(value.__func__, above), look(value.__self__, above)]
        return _joined("method", parts, lambda made: types.MethodType(*made))
    if isinstance(value, tuple) and type(value) is tuple:
        return _joined("tuple", [look(v, above) for v in value], tuple)
    if isinstance(value, types.FunctionType) and not _is_pure(value):
        return _function(value, above)
    key = fixed(value)  # what it reaches is as it is, also if that is above here, where it is made anew
    return Looked(key, None, lambda _: value)


def _joined(name: str, parts: list[Looked], make: Callable[[list[Any]], Any]) -> Looked:
    def build(inputs: Any) -> Any:
        return make([part.build(given) for part, given in zip(parts, inputs, strict=True)])

    return Looked((name, *[part.key for part in parts]), [part.inputs for part in parts], build)


def _partial(value: functools.partial[Any], above: tuple[int, ...]) -> Looked:
    if vars(value):
        raise UnknownError
    count, names = len(value.args), tuple(value.keywords)
    parts = [look(v, above) for v in (value.func, *value.args, *value.keywords.values())]

    def make(made: list[Any]) -> Any:
        function, *rest = made
        return type(value)(function, *rest[:count], **dict(zip(names, rest[count:], strict=True)))

    return _joined(f"partial {count} {names}", parts, make)


def _function(f: types.FunctionType, above: tuple[int, ...]) -> Looked:
    code, names = f.__code__, global_names(f.__code__)
    parts = [look(v, above) for v in (*_held(f), *[_global(f.__globals__, n) for n in names])]
    keywords, own = tuple(f.__kwdefaults__ or {}), tuple(vars(f))

    def make(made: list[Any]) -> Any:
        waiting = iter(made)

        def some(count: int) -> list[Any]:
            return [*itertools.islice(waiting, count)]

        cells = tuple(map(types.CellType, some(len(code.co_freevars))))
        defaults = tuple(some(len(f.__defaults__ or ()))) or None
        of_keywords, attributes = some(len(keywords)), some(len(own))
        space = {**f.__globals__, **dict(zip(names, waiting, strict=True))}
        again = types.FunctionType(code, space, f.__name__, defaults, cells)
        again.__kwdefaults__ = dict(zip(keywords, of_keywords, strict=True)) or None  # type: ignore[assignment]
        vars(again).update(zip(own, attributes, strict=True))
        return again

    looked = _joined("function", parts, make)
    return looked._replace(key=(*_shape(f), looked.key))


def _shape(f: types.FunctionType) -> tuple[Hashable, ...]:
    """Return the code of a function, and under which names it holds what it holds."""
    return f.__code__, len(f.__defaults__ or ()), len(f.__kwdefaults__ or {}), tuple(names_in_callable(f))


def _held(f: types.FunctionType) -> list[Any]:
    """Return what a function holds; a name that has no value yet may get any."""
    held = parts_of_callable(f)
    if any(v is MISSING for v in held):
        raise UnknownError
    return held


def _global(space: dict[str, Any], name: str) -> Any:
    name, _, inner = name.partition(".")
    if name in space or hasattr(builtins, name):
        value = space[name] if name in space else getattr(builtins, name)
        if not inner:
            return value
        return getattr(value, inner, None) if isinstance(value, types.ModuleType) else None
    raise UnknownError


@functools.lru_cache(maxsize=4096)
def _named(code: types.CodeType) -> tuple[str, ...] | None:
    """Return the globals that code reads, that of functions inside it too; None if it reaches or writes others."""
    found: dict[str, None] = {}
    for step, after in itertools.pairwise(dis.get_instructions(code)):
        if step.opname in _WRITES or (step.opname == "STORE_DEREF" and step.argval in code.co_freevars):
            return None
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            found[step.argval] = None
            if after.argval == "random":  # np.random has a state, and np has none
                found[f"{step.argval}.random"] = None
        elif step.opname == "LOAD_DEREF" and after.argval == "random":
            return None
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            names = _named(inner)
            if names is None:
                return None
            found.update(dict.fromkeys(names))
    return None if found.keys() & _UNSEEN else tuple(found)


def global_names(code: types.CodeType) -> tuple[str, ...]:
    """Return the globals that code reads, and that of the functions inside it.

    Raises:
        UnknownError: It writes globals or what it closes over, or reads what has no name.
    """
    names = _named(code)
    if names is None:
        raise UnknownError
    return names


# ---------------------------------------------------------------- what can't be an input


def fixed(value: Any, above: tuple[int, ...] = ()) -> Hashable:
    """Return a key for a value that is part of a program.

    Raises:
        UnknownError: It, or what it reaches, can change without another key.
    """
    if isinstance(value, (types.FunctionType, types.BuiltinFunctionType, types.ModuleType, type)) and _is_pure(value):
        return value
    if isinstance(getattr(value, "__wrapped__", None), types.FunctionType) and _is_pure(value):
        return ("wrapped", id(value), value)  # one of jax's own functions
    if isinstance(value, types.FunctionType):
        if id(value) in above:
            return "again"
        above = (*above, id(value))
        return (*_shape(value), *[fixed(v, above) for v in _held(value)], _fixed_globals(value, above))
    if isinstance(value, type):
        return of_class(value, above)
    if isinstance(value, (tuple, frozenset)) and type(value) in (tuple, frozenset):
        return (type(value), *[fixed(v, above) for v in value])
    if isinstance(value, (jax.sharding.Sharding, jax.sharding.Mesh, jax.sharding.PartitionSpec, np.dtype)):
        return (type(value), value)
    known = token(value)
    if isinstance(known, SameObject):
        raise UnknownError
    return known


def _fixed_globals(f: types.FunctionType, above: tuple[int, ...]) -> Hashable:
    if id(f.__code__) in above:
        return "again"
    above = (*above, id(f.__code__))
    found = [_global(f.__globals__, name) for name in global_names(f.__code__)]
    return tuple([fixed(value, above) for value in found])


def of_class(cls: type, above: tuple[int, ...] = ()) -> Hashable:
    """Return a key for a class and what the code of its methods reaches.

    Raises:
        UnknownError: That can change without another key.
    """
    if id(cls) in above:
        return "again"
    above = (*above, id(cls))
    found: list[Any] = [cls]
    for base in cls.__mro__:
        for name, held in () if _is_pure(base) else list(vars(base).items()):
            if name == "_abc_impl" or (name.startswith("__") and not callable(held)):
                continue
            held = getattr(held, "__func__", getattr(held, "fget", held))
            if not isinstance(held, (types.MemberDescriptorType, types.GetSetDescriptorType)):
                found.append(fixed(held, above))
    return tuple(found)


def of_objects(objects: list[Any]) -> Hashable:
    """Return a key for what nnx objects are besides their graph: their code, and types that ``==`` does not tell.

    Raises:
        UnknownError: They hold something whose changes would not be seen.
    """
    found: list[Hashable] = []
    for thing in objects:
        for variable in variables(thing):
            metadata = _compat.raw_metadata(variable).values()
            found.append(tuple([repr(v) for v in metadata if isinstance(v, _EQUAL_TO_OTHERS)]))
        for _, node in nodes(thing):
            found.append(of_class(type(node)))
            for held in attributes(node).values():
                if not _in_the_graph(held):
                    found.append(fixed(held))
    return tuple(found)


def _in_the_graph(held: Any) -> bool:
    """Whether ``nnx.split`` tells all about an attribute: a library's function is the same one, or another."""
    if isinstance(held, types.FunctionType):
        return _is_pure_module(held.__module__ or "")
    return is_object(held) or isinstance(held, (jax.Array, np.ndarray))


@functools.lru_cache(maxsize=4096)
def _is_pure_module(name: str) -> bool:
    return name.partition(".")[0] in _PURE and not name.startswith("numpy.random")


def _is_pure(value: Any) -> bool:
    name = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
    if isinstance(value, types.BuiltinFunctionType) and not isinstance(value.__self__, (types.ModuleType, type(None))):
        return False  # a method of an object
    if isinstance(value, types.FunctionType) and value.__closure__:
        return False  # a transform of jax closes over the user's function
    return isinstance(name, str) and _is_pure_module(name)
