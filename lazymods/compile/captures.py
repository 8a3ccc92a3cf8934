"""What a function reaches besides its arguments: models in closures, defaults, globals, bound objects, containers.

A function's cells and the globals that its code names are read at every call, as Python would. Whatever holds an
nnx object is looked into; functions, arrays and other containers are compared by identity. Numbers and texts that stand
alone in a closure or global are constants of the trace, as they are for ``jax.jit``.
"""

from __future__ import annotations

import functools
import itertools
import sys
import types
import weakref
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from flax import nnx

from lazymods._objects.attributes import slots_of
from lazymods._objects.module_attributes import attribute
from lazymods._objects.reached import (
    MISSING,
    defaults_of,
    functions_of,
    global_names,
    held_by,
    holds_model,
    in_cell,
    is_library,
    is_looked_into,
    loaded_names,
    parts_of,
    parts_of_callable,
)
from lazymods._objects.tokens import (
    SameObject,
    TokenKind,
    attributes_now,
    can_change,
    content,
    kind_of,
    made_as,
    token,
    token_now,
)
from lazymods._objects.traced_state import Reads, slot_shape


class Captured(NamedTuple):
    """What a function reaches at one call.

    Attributes:
        roots: nnx objects.
        variables: Variables that no nnx object holds.
        places: ``(holder, key)`` of arrays, and of tuples of arrays, in containers and objects that hold a model too.
        values: The values as they are held, containers and all.
        key: Everything else about them, hashable.
        arrays: Arrays, which are constants of a trace.
        found: What each place holds where the function finds something.
        has_objects: Whether there are objects of other classes than Flax's and Python's among what it reaches.
    """

    roots: list[Any]
    variables: list[Any]
    places: list[tuple[Any, Any]]
    values: list[Any]
    key: Hashable
    arrays: list[Any]
    found: list[Any]
    has_objects: bool = False


class _Cell(NamedTuple):
    cell: Any
    name: str

    def value(self) -> Any:
        return in_cell(self.cell)


class _Global(NamedTuple):
    names: dict[str, Any]
    name: str

    def value(self) -> Any:
        return self.names.get(self.name, MISSING)


class _Attribute(NamedTuple):
    owner: Any
    name: str

    def value(self) -> Any:
        return attribute(self.owner, self.name, MISSING)


class _Default(NamedTuple):
    function: Any
    name: str

    def value(self) -> Any:
        return defaults_of(self.function).get(self.name, MISSING)


class _Fixed(NamedTuple):
    held: Any
    name: str

    def value(self) -> Any:
        return self.held


class CaptureCheck:
    """Sees, cheaper than by binding a whole call, that a function reaches what it reached.

    Args:
        captures: What reads the function.
        was: What it read.
    """

    __slots__ = ("_always", "_captures", "_key", "_known", "_models")

    def __init__(self, captures: Captures, was: Captured) -> None:
        self._captures = captures
        kinds = [kind_of(v) for v in was.found]
        self._always = tuple(was.roots) if was is captures.fixed else None
        self._models = [n for n, kind in enumerate(kinds) if kind is TokenKind.NODE]
        self._known = [_known(value, kind) for value, kind in zip(was.found, kinds, strict=True)]
        self._key = was.key if None in self._known else None

    def look(self) -> tuple[tuple[Any, ...], Sequence[tuple[Any, Any]]] | None:
        """Return the nnx objects that the function reaches now, and where it finds arrays besides.

        Returns:
            None if it reaches anything else than before.
        """
        if self._always is not None:
            return self._always, ()
        if self._key is not None:  # containers: what they hold may have changed
            now = self._captures.read()
            return (tuple(now.roots), now.places) if now.key == self._key else None
        values = [source.value() for source in self._captures.sources]
        for value, (cls, known) in zip(values, self._known, strict=True):
            if type(value) is not cls or (known is not None and value is not known()):
                return None
        return tuple([values[n] for n in self._models]), ()


def _known(value: Any, kind: TokenKind) -> Any:
    """Return the class of a value, and a reference to it if it is part of a key itself; None if that does not tell."""
    cls: Any = type(value)
    if kind is TokenKind.NODE or (kind is TokenKind.ATOM and not callable(value)):
        return (cls, None)
    return (cls, weakref.ref(value)) if kind <= TokenKind.ARRAY and cls.__weakrefoffset__ else None


class _Lacking:
    """A namespace, and names that a function looks up and that it did not have.

    Attributes:
        size: How many names it had when it was looked at.
    """

    def __init__(self, space: Any) -> None:
        self.space = space
        self.names: set[str] = set()
        self.size = len(space)


class Captures:
    """Reads what a function reaches besides its arguments.

    Args:
        function: Any callable.
        reads: What it has read of objects; what it has not read does not count.
        classes: Classes whose methods it may call: it reaches what these name.

    Attributes:
        sources: The places where it finds something.
        functions: The functions that it is made of: itself, and the user's functions that it reaches.
        fixed: What it reaches at any time, if that is nothing but nnx objects that it holds itself; else None.
    """

    def __init__(self, function: Any, reads: Reads, classes: Iterable[type] = ()) -> None:
        self._reads = reads
        self.sources: list[Any] = []
        self.functions: list[types.FunctionType] = []
        self._functions: set[int] = set()
        self._seen: set[Any] = set()
        self._alive: list[Any] = []
        self._functions_at: dict[tuple[int, str], tuple[Any, str]] = {}
        self._looked_into: dict[int, set[str]] = {}  # by id of a module or class, for which names
        self._atoms: list[tuple[Any, Any]] = []  # sources that may hold a function later, and what they hold
        self._lacking: dict[int, _Lacking] = {}  # by id of a module's names, or of a class
        self._follow(function)
        for method in itertools.chain.from_iterable(map(functions_of, classes)):
            home = sys.modules.get(method.__module__)
            if home is not None and vars(home) is method.__globals__:  # where a name can hold a copy in a trace
                self._look_into(home, {*loaded_names(method.__code__)})
        self.fixed: Captured | None = None
        if all(type(s) is _Fixed and kind_of(s.value()) is TokenKind.NODE for s in self.sources):
            held = [source.value() for source in self.sources]
            self.fixed = Captured(held, [], [], held, (), [], held)

    def capture_check(self, was: Captured) -> CaptureCheck | None:
        """Return what sees whether the function reaches what was read; None if it never reaches anything."""
        return CaptureCheck(self, was) if self.sources else None

    def is_current(self) -> bool:
        """Whether the function reaches what it did by the names of functions and of what was not there yet.

        A function may be compiled before the model or the helpers that it names are there.
        """
        for lacking in self._lacking.values():
            if len(lacking.space) != lacking.size:
                if not lacking.names.isdisjoint(lacking.space):
                    return False
                lacking.size = len(lacking.space)
        return not any(callable(now := source.value()) and now is not value for source, value in self._atoms)

    def attributes(self) -> list[tuple[Any, str]]:
        """Return the attributes of modules and classes by which the function finds something."""
        found = [(s.owner, s.name) for s in self.sources if type(s) is _Attribute]
        return [*found, *self._functions_at.values()]

    def sees_order(self, nodes: Iterable[Any]) -> bool:
        """Whether the function, or a method of these objects, may ask for attributes in their order."""
        nodes = list(nodes)
        if any(isinstance(node, (nnx.Dict, nnx.Rngs)) for node in nodes):  # to go through one is to ask for them
            return True
        methods = itertools.chain.from_iterable(map(functions_of, {type(node) for node in nodes}))
        asked = (global_names(function.__code__) for function in (*self.functions, *methods))
        return not {"vars", "__dict__"}.isdisjoint(itertools.chain.from_iterable(asked))

    def named(self, captured: Captured) -> list[tuple[str, Any, bool]]:
        """Return what the function reached and a program depends on: a name, the value, whether only by identity."""
        looked_into = set(map(id, captured.values))
        found = []
        for source, value in zip(self.sources, captured.found, strict=True):
            kind = kind_of(value)
            if kind is not TokenKind.ATOM or callable(value) or isinstance(value, Iterator):
                found.append((source.name, value, kind is not TokenKind.ARRAY and id(value) not in looked_into))
        return found

    def read(self, *, whole: bool = False) -> Captured:
        """Return what the function reaches now.

        Args:
            whole: Whether what it has not read of objects counts as well.
        """
        reads = None if whole else self._reads
        has_objects = False
        if self.fixed is not None:
            return self.fixed
        roots: list[Any] = []
        variables: list[Any] = []
        places: list[tuple[Any, Any]] = []
        values: list[Any] = []
        tokens: list[Any] = []
        arrays: list[Any] = []
        everything = [source.value() for source in self.sources]
        for value in everything:
            kind = kind_of(value)
            if kind is TokenKind.NODE:
                roots.append(value)
                values.append(value)
                tokens.append(TokenKind.NODE)
            elif kind is TokenKind.ATOM:  # a number or text of its own is a constant of the trace, as for jax.jit
                tokens.append(SameObject(value) if callable(value) else TokenKind.ATOM)
            elif kind is TokenKind.ARRAY:
                arrays.append(value)
                tokens.append(token(value))
            else:
                found = _Reader(reads)
                if holds_model(value):
                    found.visit(value)
                    values.append(value)
                else:
                    found.tokens.append(SameObject(value))
                arrays += found.arrays
                roots += found.roots
                variables += found.variables
                places += found.places
                has_objects = has_objects or found.has_objects
                tokens.append(tuple(found.tokens))
        if has_objects:
            tokens.append(self._reads.version)
        return Captured(roots, variables, places, values, tuple(tokens), arrays, everything, has_objects)

    def _follow(self, function: Any) -> None:
        """Add what a callable reaches, and what the functions reach that it reaches."""
        if isinstance(function, types.MethodType):
            self._add(_Fixed(function.__self__, "self"), function.__self__)
            self._follow(function.__func__)
            if isinstance(function.__func__, types.FunctionType):  # of a class: self is one
                self._look_into(function.__self__, {*global_names(function.__func__.__code__)})
        elif isinstance(function, functools.partial):
            given: list[Any] = [_Fixed(value, f"args[{i}]") for i, value in enumerate(function.args)]
            given += [_Global(function.keywords, name) for name in function.keywords]  # to which anyone may write
            for source in given:
                self._add(source, source.value())
            self._follow(function.func)
        elif isinstance(function, types.FunctionType):
            if id(function) not in self._functions:
                self._functions.add(id(function))
                self._follow_code(function)
        elif hasattr(function, "__wrapped__"):  # a function of another jit, vmap or the like
            self._follow(function.__wrapped__)
        elif kind_of(function) in (TokenKind.NODE, TokenKind.OBJECT):
            self._add(_Fixed(function, "self"), function)
            call = vars(type(function)).get("__call__")
            if isinstance(call, types.FunctionType) and _is_own(call):
                self._follow(call)

    def _follow_code(self, function: types.FunctionType) -> None:
        self.functions.append(function)
        code, space = function.__code__, function.__globals__
        names = set(global_names(code))
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            self._add(_Cell(cell, name), in_cell(cell))
            self._look_into(in_cell(cell), names)
        for name, value in defaults_of(function).items():
            self._add(_Default(function, name), value)
        for name, value in vars(function).items():
            if holds_model(value):
                self._add(_Global(vars(function), name), value)
        for name in self._found(loaded_names(code), space, space):
            self._add(_Global(space, name), space[name])
            self._look_into(space[name], names)

    def _look_into(self, owner: Any, names: set[str]) -> None:
        """Add the attributes of these names of a module or class, if it is the user's, and of those in it."""
        if not isinstance(owner, (types.ModuleType, type)) or not _is_own(owner):
            return
        known = self._looked_into.setdefault(id(owner), set())
        if not names <= known:
            known |= names
            for name in self._found(names, vars(owner), owner):
                value = attribute(owner, name)
                self._add(_Attribute(owner, name), value)
                self._look_into(value, names)

    def _found(self, names: Collection[str], space: Any, owner: Any) -> list[str]:
        """Return which names are in a namespace, sorted; note the others, which may come."""
        lacking = self._lacking.setdefault(id(owner), _Lacking(space))
        lacking.names.update(name for name in names if name not in space)
        return sorted(name for name in names if name in space)

    def _follow_cells(self, function: types.FunctionType) -> None:
        """Follow what a library's function holds for the user: ``jax.grad(f)`` holds ``f`` in a cell of a cell."""
        if function.__closure__ and id(function) not in self._functions:
            self._functions.add(id(function))
            self._alive.append(function)
            for name, cell in zip(function.__code__.co_freevars, function.__closure__, strict=True):
                value = in_cell(cell)
                if kind_of(value) is not TokenKind.ATOM:
                    self._add(_Cell(cell, name), value)
                elif callable(value):  # such a cell is never written again
                    self._add(_Fixed(value, name), value)

    def _add(self, source: Any, value: Any) -> None:
        """Add one place where a function finds a value, unless it is known not to change or to matter."""
        if isinstance(value, (types.FunctionType, types.MethodType, functools.partial)) or _is_wrapper(value):
            if _is_own(value):
                if type(source) is _Attribute:
                    self._functions_at[id(source.owner), source.name] = (source.owner, source.name)
                self._follow(value)
            elif isinstance(value, types.FunctionType):
                self._follow_cells(value)
            if not isinstance(source, _Cell):
                return
        if isinstance(value, (types.ModuleType, type)):
            return
        mark = (type(source), id(source[0]), None if type(source) in (_Cell, _Fixed) else source.name)
        if mark not in self._seen:
            self._seen.add(mark)
            self.sources.append(source)
            if type(source) is not _Fixed and kind_of(value) is TokenKind.ATOM:
                self._atoms.append((source, value))


def _is_wrapper(value: Any) -> bool:
    """Whether a value is a callable made of a function, and no function itself."""
    ordinary = isinstance(value, (types.FunctionType, types.MethodType, functools.partial, type))
    return not ordinary and kind_of(value) is TokenKind.ATOM and hasattr(value, "__wrapped__")


def _is_own(function: Any) -> bool:
    """Whether a function is the user's, not a library's: those don't reach the user's models by name."""
    while isinstance(function, (types.MethodType, functools.partial)) or _is_wrapper(function):
        if isinstance(function, types.MethodType) and kind_of(function.__self__) is not TokenKind.ATOM:
            return True
        if isinstance(function, functools.partial) and (function.args or function.keywords):
            return True
        if isinstance(function, types.MethodType):
            function = function.__func__
        else:  # what jit, vmap and the like return has the function in __wrapped__
            function = function.func if isinstance(function, functools.partial) else function.__wrapped__
    home = function.__name__ if isinstance(function, types.ModuleType) else getattr(function, "__module__", None)
    return not is_library(home)


class _Reader:
    """Reads a container down to the nnx objects in it, which have guards of their own."""

    def __init__(self, reads: Reads | None) -> None:
        self._reads = reads
        self.has_objects = False
        self.roots: list[Any] = []
        self.variables: list[Any] = []
        self.places: list[tuple[Any, Any]] = []
        self.arrays: list[Any] = []
        self.tokens: list[Any] = []
        self._seen: dict[int, int] = {}

    def visit(self, value: Any) -> None:
        kind = kind_of(value)
        if kind is TokenKind.NODE:
            self.roots.append(value)
            self.tokens.append(TokenKind.NODE)
        elif kind is TokenKind.VARIABLE:
            self.variables.append(value)
            self.tokens.append(TokenKind.VARIABLE)
        elif kind is TokenKind.ARRAY:
            self.tokens.append(content(value) if isinstance(value, np.ndarray) else token(value))
            self.arrays.append(value)
        elif kind is TokenKind.ATOM and not is_looked_into(value):
            self.tokens.append(token_now(value) if can_change(value) else token(value))
        elif id(value) in self._seen:
            self.tokens.append(self._seen[id(value)])
        else:
            self._seen[id(value)] = len(self._seen)
            self._visit_callable(value) if kind is TokenKind.ATOM else self._visit_container(value, kind)

    def _visit_callable(self, value: Any) -> None:
        self.tokens.append(SameObject(value))
        for part in parts_of_callable(value):
            self.visit(part) if holds_model(part) else self.tokens.append(SameObject(part))

    def _visit_container(self, value: Any, kind: TokenKind) -> None:
        parts, names = list(parts_of(value, kind)), _names_in(value, kind)
        if kind is TokenKind.OBJECT:
            self.has_objects = True
            read = None if self._reads is None else self._reads.of(type(value))
            if read is not None:
                items = [(name, v) for name, v in held_by(value, kind).items() if name in read]
                names, parts = tuple(name for name, _ in items), [v for _, v in items]
        self.tokens.append((type(value), names, len(parts)))
        if kind is not TokenKind.OBJECT and slots_of(type(value)):
            self.tokens.append(attributes_now(value))
        keys: Any = names if kind is TokenKind.OBJECT else value if kind is TokenKind.DICT else range(len(parts))
        has_slots = kind in _WITH_SLOTS and not (kind is TokenKind.OBJECT and slots_of(type(value)))
        for key, part in itertools.zip_longest(list(keys), parts):
            if has_slots and _is_of_arrays(part):
                self.places.append((value, key))
                self.tokens.append(slot_shape(part))
            else:
                self.visit(part)


_WITH_SLOTS = (TokenKind.OBJECT, TokenKind.DICT, TokenKind.LIST, TokenKind.QUEUE)  # as in a TracedState


def _is_of_arrays(value: Any) -> bool:
    """Whether a value is an array, or a tuple with arrays in it and nothing else that counts by what is in it."""
    if type(value) is tuple or (isinstance(value, tuple) and hasattr(value, "_fields")):
        kinds = [TokenKind.ARRAY if _is_of_arrays(v) else kind_of(v) for v in value]
        return TokenKind.ARRAY in kinds and max(kinds) <= TokenKind.ARRAY
    return kind_of(value) is TokenKind.ARRAY


def _names_in(value: Any, kind: TokenKind) -> Hashable:
    """Return what a container is besides its parts: names, keys, items of a set, the function of a method."""
    match kind:
        case TokenKind.OBJECT:
            return tuple(held_by(value, kind))
        case TokenKind.DICT:
            return (*map(token, value), token(getattr(value, "default_factory", None)))
        case TokenKind.SET:
            return frozenset(map(token, value))
        case TokenKind.QUEUE:
            return made_as(value)
        case TokenKind.METHOD:
            return SameObject(value.__func__)
    return ()
