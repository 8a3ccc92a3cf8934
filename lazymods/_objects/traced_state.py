"""Walking what a function can reach: every object, its contents, every Variable, in a fixed order.

A :class:`TracedState` is taken of some roots. It numbers the objects that can change (nnx objects, plain objects,
dicts, lists, sets) and the Variables, keeps what each of them held, and tells their structure as a hashable key in
which values of arrays don't count. Tuples are part of what holds them.

Arrays in nnx objects, plain objects, dicts and lists are in *slots*: they can be read and written there, and are inputs
of a program. Those in a partial function, in the metadata of a Variable or in an object with ``__slots__`` are part of
the structure, each by identity, those of numpy by what is in them. What a function holds besides models and what holds
those is part of it by identity.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import numpy as np
from flax import nnx

from lazymods import _compat
from lazymods._graph import STATE as LAZY
from lazymods._initial.pending import PendingInit
from lazymods._objects.attributes import has_hidden_state, new_tuple, slots_of
from lazymods._objects.reached import (
    dict_of,
    held_by,
    holds_model,
    is_looked_into,
    looked_up,
    names_in_callable,
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

_HIDDEN = _compat.STATE  # flax's record of the trace in which an object was born
_WHOLE = frozenset(("__dict__", "__reduce_ex__", "__reduce__", "__getstate__"))  # reads all: copy does so in C


class Reads:
    """Which attributes of objects of the user's own classes a function has read, in all its traces.

    It only grows. A class of which nothing is known is looked at as a whole.

    Attributes:
        version: How often it has grown: what was found out at another version is not known to hold.
    """

    __slots__ = ("_names", "_size", "version")

    def __init__(self, names: dict[type, set[str]] | None = None, version: int = 0) -> None:
        self._names = names or {}
        self._size = -1
        self.version: int = version

    def begin(self, cls: type) -> set[str]:
        """Return the set to which the names are added that are read of objects of a class."""
        return self._names.setdefault(cls, set())

    def widen(self) -> None:
        """Let all of each object count as read."""
        for names in self._names.values():
            names |= _WHOLE

    def settle(self) -> Reads:
        """After a trace, return what has been read until now, as it will stay; see whether that is more than before."""
        size = sum(map(len, self._names.values())) + len(self._names)
        self.version += size != self._size
        self._size = size
        return Reads({cls: set(names) for cls, names in self._names.items()}, self.version)

    def of(self, cls: type) -> set[str] | None:
        """Return the names that were read of objects of a class; None: all may have been."""
        names = self._names.get(cls)
        return None if names is None or not _WHOLE.isdisjoint(names) else names


class TracedState:
    """The objects and Variables under some roots, as they were.

    Args:
        roots: Where to start.
        static: Whether the roots are part of a program by value, with every array in them.
        reads: Leave out what was not read of objects of the user's own classes.

    Attributes:
        nodes: Everything that can change, in the order in which it was met; no object twice.
        places: Where each node was met: the number of the root, then keys and names.
        contents: What each node held: a copy of its attributes or items.
        classes: The class of each node.
        variables: Every Variable once.
        slots: ``(node, key)`` of each place that holds an array, or a tuple with arrays inside.
        key: The structure, hashable.
        paths: Where each token of the key was met, for messages: a list beside ``tokens``.
        callables: Each callable that was looked into, and what it holds, as ``parts_of_callable`` tells it.
        looks: What is compared by what is in it: how to look at it, the value, and what was found.
        ordered: The dicts whose order matters; that of an ``nnx.State``, which sorts its keys, does not.
        lazy: Whether a layer or a parameter is uninitialized.
    """

    def __init__(self, roots: Iterable[Any], static: bool = False, reads: Reads | None = None) -> None:
        self.nodes: list[Any] = []
        self.places: list[tuple[Any, ...]] = []
        self.contents: list[Any] = []
        self.classes: list[type] = []
        self.variables: list[Any] = []
        self.slots: list[tuple[Any, Any]] = []
        self.tokens: list[Any] = []
        self.paths: list[tuple[Any, ...]] = []
        self.callables: list[tuple[Any, list[Any]]] = []
        self.ordered: list[Any] = []
        self.looks: list[tuple[Callable[[Any], Hashable], Any, Hashable]] = []
        self.lazy: bool = False
        self._in_state = 0
        self._static = static
        self._reads = reads
        self._fixed = static  # whether an array is part of the structure
        self._numbers: dict[int, int] = {}
        self._looked_into: set[int] = set()
        for number, root in enumerate(roots):
            self._visit(root, (number,))
        self.key: Hashable = tuple(self.tokens)

    def number(self, value: Any) -> int | None:
        """Return the number of a node, the number of a Variable, or None for what is not in the traced state."""
        return self._numbers.get(id(value))

    def contents_before(self, node: Any) -> Any:
        """Return what a node of the traced state held; the copy that the traced state keeps."""
        return self.contents[self._numbers[id(node)]]

    def _emit(self, what: Any, path: tuple[Any, ...]) -> None:
        self.tokens.append(what)
        self.paths.append(path)

    def _visit(self, value: Any, path: tuple[Any, ...]) -> bool:
        """Note a value; return whether it is, or holds in a tuple, an array."""
        kind = kind_of(value)
        if kind is TokenKind.ATOM:
            self._emit(self._now(token_now, value) if can_change(value) else token(value), path)
            if is_looked_into(value):
                self._visit_callable(value, path)
        elif kind is TokenKind.ARRAY:
            self._emit(self._array_token(value), path)
            return not self._fixed
        elif kind is TokenKind.TUPLE:
            self._emit((type(value), len(value)), path)
            self._visit_attributes(value, path)
            return any([self._visit(v, (*path, i)) for i, v in enumerate(value)])
        elif kind is TokenKind.METHOD:
            self._emit((TokenKind.METHOD, SameObject(value.__func__)), path)
            self._visit_fixed([(name, getattr(value, name)) for name in ("__self__", "__func__")], path)
        elif kind is TokenKind.PARTIAL:
            self._emit(type(value), path)
            self._visit_fixed([(name, getattr(value, name)) for name in ("func", "args", "keywords")], path)
        elif kind is TokenKind.PROXY:
            self._emit(type(value), path)
            self._visit_fixed([("its dict", dict_of(value))], path)
        elif id(value) in self._numbers:
            self._emit((kind is TokenKind.VARIABLE, self._numbers[id(value)]), path)
        elif kind is TokenKind.VARIABLE:
            self._visit_variable(value, path)
        else:
            self._visit_node(value, kind, path)
        return False

    def _array_token(self, array: Any) -> Any:
        if self._fixed and isinstance(array, np.ndarray):  # it may be written to
            return self._now(content, array)
        return token(array) if self._fixed else TokenKind.ARRAY

    def _now(self, look: Callable[[Any], Hashable], value: Any) -> Hashable:
        """Return what a look at a value finds, and note that each call is to look again."""
        self.looks.append((look, value, found := look(value)))
        return found

    def _visit_callable(self, value: Any, path: tuple[Any, ...]) -> None:
        if id(value) in self._looked_into:
            return
        self._looked_into.add(id(value))
        parts = parts_of_callable(value)
        self.callables.append((value, parts))
        for name, part in zip(names_in_callable(value), parts, strict=True):
            if holds_model(part):
                self._visit_fixed([(name, part)], path)
            else:
                self._emit((name, SameObject(part)), path)

    def _visit_variable(self, variable: Any, path: tuple[Any, ...]) -> None:
        self._numbers[id(variable)] = len(self.variables)
        self.variables.append(variable)
        self._emit(type(variable), path)
        self._visit_fixed(sorted(_compat.raw_metadata(variable).items()), path)
        if type(variable.get_raw_value()) is PendingInit:
            self.lazy = True
            self._emit(SameObject(variable.get_raw_value()), path)

    def _visit_node(self, node: Any, kind: TokenKind, path: tuple[Any, ...]) -> None:
        number = self._numbers[id(node)] = len(self.nodes)
        self.nodes.append(node)
        self.places.append(path)
        self.classes.append(type(node))
        self.contents.append(contents_of(node, kind, self._reads))
        self._emit((type(node), len(self.contents[number])), path)
        if kind is not TokenKind.OBJECT:
            self._visit_attributes(node, path)
        elif has_hidden_state(type(node)):
            self._emit(SameObject(node), path)
        if kind > TokenKind.OBJECT:
            self._visit_container(node, kind, self.contents[number], path)
        if kind is TokenKind.DICT and not self._in_state:
            self.ordered.append(node)
        is_state = isinstance(node, nnx.State)
        self._in_state += is_state
        before, self._fixed = self._fixed, self._static or (kind is TokenKind.OBJECT and bool(slots_of(type(node))))
        if kind is not TokenKind.SET:
            self._visit_items(node, kind, self.contents[number], path)
        self._fixed = before
        self._in_state -= is_state

    def _visit_fixed(self, parts: Iterable[tuple[str, Any]], path: tuple[Any, ...]) -> None:
        """Note values that are looked into, but that nobody can write."""
        before, self._fixed = self._fixed, True
        for name, part in parts:
            self._emit(name, (*path, name))
            self._visit(part, (*path, name))
        self._fixed = before

    def _visit_attributes(self, container: Any, path: tuple[Any, ...]) -> None:
        """Note the attributes that a container has besides its items, if its class is one of the user's."""
        if kind_of(container) is TokenKind.NODE:
            return
        if slots_of(type(container)):
            self._emit(self._now(attributes_now, container), path)
        if type(container).__dictoffset__:
            self._visit(vars(container), (*path, "__dict__"))

    def _visit_container(self, node: Any, kind: TokenKind, contents: Any, path: tuple[Any, ...]) -> None:
        """Note what a container is besides its items, and what its items are found by."""
        if kind is TokenKind.QUEUE:
            self._emit(made_as(node), path)
        if kind is TokenKind.SET:
            self._emit(frozenset(map(token, contents)), path)
        if isinstance(node, collections.defaultdict):
            self._emit(self._now(_factory, node), path)
        self._visit_fixed([("a key", part) for part in looked_up(contents, kind)], path)

    def _visit_items(self, node: Any, kind: TokenKind, contents: Any, path: tuple[Any, ...]) -> None:
        items: Iterable[tuple[Any, Any]] = enumerate(contents) if isinstance(contents, list) else contents.items()
        if kind is TokenKind.NODE:  # numbers don't depend on the order of attributes: transforms of NNX sort them
            before, items = items, sorted(items)
            self._emit(None if [k for k, _ in before] == [k for k, _ in items] else tuple(contents), path)
        for key, value in items:
            if isinstance(contents, dict):
                self._emit(token(key), path)
            if key == _HIDDEN and kind is TokenKind.NODE:
                continue
            if key == LAZY:
                self.lazy = True
            elif key == _compat.NODES and kind is TokenKind.NODE:  # a mapping that is never changed
                self._emit(tuple(value.items()), path)
            elif self._visit(value, (*path, key)):
                self.slots.append((node, key))


def _factory(values: collections.defaultdict[Any, Any]) -> Hashable:
    return token(values.default_factory)


def put_item(held: Any, key: Any, value: Any) -> None:
    """Let a container hold a value where it holds one already, without what a class of the user's does besides."""
    plain: Any = next((cls for cls in (dict, list, collections.deque) if isinstance(held, cls)), type(held))
    plain.__setitem__(held, key, value)


def contents_of(node: Any, kind: TokenKind | None = None, reads: Reads | None = None) -> Any:
    """Return a copy of what a node holds, as a plain dict, list or set; of an object what was read of it."""
    kind = kind_of(node) if kind is None else kind
    if kind is TokenKind.OBJECT and reads is not None and (names := reads.of(type(node))) is not None:
        return {name: value for name, value in held_by(node, kind).items() if name in names}
    if kind in (TokenKind.NODE, TokenKind.OBJECT, TokenKind.DICT):
        return dict(held_by(node, kind))
    return set(node) if kind is TokenKind.SET else list(node)


def slot_shape(value: Any) -> Any:
    """Return what a slot holds besides arrays, hashable: a static value in a tuple of arrays is part of a structure."""
    if isinstance(value, tuple):
        return (type(value), *map(slot_shape, value))
    kind = kind_of(value)
    if kind is TokenKind.ARRAY:
        return TokenKind.ARRAY
    return token(value) if kind is TokenKind.ATOM else SameObject(value)


def input_of(value: Any) -> Any:
    """Return the arrays in what a slot holds, for ``jax.jit``: nothing but arrays, in the tuples they are in."""
    if isinstance(value, tuple):
        return tuple(input_of(v) for v in value)
    return value if kind_of(value) is TokenKind.ARRAY else None


def with_inputs(value: Any, inputs: Any) -> Any:
    """Return what a slot holds with other arrays; the inverse of :func:`input_of`."""
    if isinstance(value, tuple):
        return new_tuple(type(value), [with_inputs(v, i) for v, i in zip(value, inputs, strict=True)])
    return value if inputs is None else inputs
