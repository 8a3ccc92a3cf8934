"""Walking what a function can reach: every object, its contents, every Variable, in a fixed order.

A :class:`Picture` is taken of some roots. It numbers the objects that can change (nnx objects, plain objects, dicts,
lists, sets) and the Variables, keeps what each of them held, and tells their structure as a hashable key in which
values of arrays don't count. Tuples are part of what holds them.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

from flax import nnx

from lazymods import _compat
from lazymods._graph import STATE as LAZY
from lazymods._recipe import Recipe
from lazymods.compile.tokens import Kind, Same, kind_of, token

_HIDDEN = _compat.STATE  # flax's record of the trace in which an object was born


class Picture:
    """The objects and Variables under some roots, as they were.

    Attributes:
        nodes: Everything that can change, in the order in which it was met; no object twice.
        contents: What each node held: a copy of its attributes or items.
        classes: The class of each node.
        variables: Every Variable once.
        slots: ``(node, key)`` of each place that holds an array, or a tuple with arrays inside.
        key: The structure, hashable.
        paths: Where each token of the key was met, for messages: a list beside ``tokens``.
        ordered: The dicts whose order matters; that of an ``nnx.State``, which sorts its keys, does not.
        lazy: Whether a layer or a parameter is uninitialized.
    """

    def __init__(self, roots: Iterable[Any]) -> None:
        self.nodes: list[Any] = []
        self.contents: list[Any] = []
        self.classes: list[type] = []
        self.variables: list[Any] = []
        self.slots: list[tuple[Any, Any]] = []
        self.tokens: list[Any] = []
        self.paths: list[tuple[Any, ...]] = []
        self.ordered: list[Any] = []
        self.lazy = False
        self._in_state = 0
        self._numbers: dict[int, int] = {}
        for number, root in enumerate(roots):
            self._visit(root, (number,))
        self.key: Hashable = tuple(self.tokens)

    def number(self, value: Any) -> int | None:
        """Return the number of a node, the number of a Variable, or None for what is not in the picture."""
        return self._numbers.get(id(value))

    def contents_before(self, node: Any) -> Any:
        """Return what a node of the picture held; the copy that the picture keeps."""
        return self.contents[self._numbers[id(node)]]

    def _emit(self, what: Any, path: tuple[Any, ...]) -> None:
        self.tokens.append(what)
        self.paths.append(path)

    def _visit(self, value: Any, path: tuple[Any, ...]) -> bool:
        """Note a value; return whether it is, or holds in a tuple, an array."""
        kind = kind_of(value)
        if kind is Kind.ATOM:
            self._emit(token(value), path)
        elif kind is Kind.ARRAY:
            self._emit(Kind.ARRAY, path)
            return True
        elif kind is Kind.TUPLE:
            self._emit((type(value), len(value)), path)
            return any([self._visit(v, (*path, i)) for i, v in enumerate(value)])
        elif kind is Kind.METHOD:
            self._emit((Kind.METHOD, Same(value.__func__)), path)
            self._visit(value.__self__, (*path, "__self__"))
        elif kind is Kind.PARTIAL:
            self._emit(Kind.PARTIAL, path)
            for name in ("func", "args", "keywords"):
                self._visit(getattr(value, name), (*path, name))
        elif id(value) in self._numbers:
            self._emit((kind is Kind.VARIABLE, self._numbers[id(value)]), path)
        elif kind is Kind.VARIABLE:
            self._visit_variable(value, path)
        else:
            self._visit_node(value, kind, path)
        return False

    def _visit_variable(self, variable: Any, path: tuple[Any, ...]) -> None:
        self._numbers[id(variable)] = len(self.variables)
        self.variables.append(variable)
        self._emit(type(variable), path)
        for name, value in sorted(_compat.raw_metadata(variable).items()):
            self._emit(name, (*path, name))
            self._visit(value, (*path, name))
        if type(variable.get_raw_value()) is Recipe:
            self.lazy = True
            self._emit(Same(variable.get_raw_value()), path)

    def _visit_node(self, node: Any, kind: Kind, path: tuple[Any, ...]) -> None:
        number = self._numbers[id(node)] = len(self.nodes)
        self.nodes.append(node)
        self.classes.append(type(node))
        self.contents.append(contents_of(node, kind))
        self._emit((type(node), len(self.contents[number])), path)
        if kind in (Kind.SET, Kind.QUEUE):
            items = self.contents[number]
            self._emit(frozenset(map(token, items)) if kind is Kind.SET else tuple(map(token, items)), path)
            return
        if kind is Kind.DICT and not self._in_state:
            self.ordered.append(node)
        is_state = isinstance(node, nnx.State)
        self._in_state += is_state
        self._visit_items(node, kind, self.contents[number], path)
        self._in_state -= is_state

    def _visit_items(self, node: Any, kind: Kind, contents: Any, path: tuple[Any, ...]) -> None:
        items = enumerate(contents) if kind is Kind.LIST else contents.items()
        for key, value in items:
            if kind is not Kind.LIST:
                self._emit(token(key), path)
            if key == _HIDDEN and kind is Kind.NODE:
                continue
            if key == LAZY:
                self.lazy = True
            elif key == _compat.NODES and kind is Kind.NODE:  # a mapping that is never changed
                self._emit(tuple(value.items()), path)
            elif self._visit(value, (*path, key)):
                self.slots.append((node, key))


def held_by(node: Any, kind: Kind | None = None) -> Any:
    """Return the dict, list, set or queue in which a node holds its contents."""
    kind = kind_of(node) if kind is None else kind
    return vars(node) if kind in (Kind.NODE, Kind.OBJECT) else node


def contents_of(node: Any, kind: Kind | None = None) -> Any:
    """Return a copy of what a node holds, as a plain dict, list or set."""
    kind = kind_of(node) if kind is None else kind
    if kind in (Kind.NODE, Kind.OBJECT):
        return vars(node).copy()
    if kind is Kind.DICT:
        return dict(node)
    return set(node) if kind is Kind.SET else list(node)


def same_contents(now: Any, then: Any) -> bool:
    """Whether contents hold the same objects in the same order (``==`` would run the code of their classes)."""
    if len(now) != len(then):
        return False
    if isinstance(now, dict):
        return all(a == b and x is y for (a, x), (b, y) in zip(now.items(), then.items(), strict=True))
    if isinstance(now, set):
        return set(map(token, now)) == set(map(token, then))
    return all(x is y for x, y in zip(now, then, strict=True))


def refill(held: Any, contents: Any) -> None:
    """Let a container hold other contents, in their order."""
    held.clear()
    held.extend(contents) if isinstance(contents, list) else held.update(contents)


def array_of(node: Any, key: Any) -> Any:
    """Return what a slot holds."""
    return held_by(node)[key]


def slot_shape(value: Any) -> Any:
    """Return what a slot holds besides arrays, hashable: a static value in a tuple of arrays is part of a structure."""
    if isinstance(value, tuple):
        return (type(value), *map(slot_shape, value))
    kind = kind_of(value)
    if kind is Kind.ARRAY:
        return Kind.ARRAY
    return token(value) if kind is Kind.ATOM else Same(value)


def input_of(value: Any) -> Any:
    """Return the arrays in what a slot holds, for ``jax.jit``: nothing but arrays, in the tuples they are in."""
    if isinstance(value, tuple):
        return tuple(input_of(v) for v in value)
    return value if kind_of(value) is Kind.ARRAY else None


def with_inputs(value: Any, inputs: Any) -> Any:
    """Return what a slot holds with other arrays; the inverse of :func:`input_of`."""
    if isinstance(value, tuple):
        made = [with_inputs(v, i) for v, i in zip(value, inputs, strict=True)]
        return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)
    return value if inputs is None else inputs
