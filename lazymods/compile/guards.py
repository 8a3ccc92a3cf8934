"""Has anything changed? A guard for each model, cheap enough for every call.

A :class:`Graph` is the traced state of one nnx object. It is kept with that object and dies with it, so no cache holds
a model. Each call asks :meth:`Graph.read`, which is sound in two steps:

- Flax itself tells of every assignment to an attribute, a Variable or its metadata (see ``_compat_jit.watch``). After
  any, each attribute is compared by identity and each metadata entry by type and value.
- Deletions, and writes that go around Flax, show in a comparison of each object's contents with a copy. It runs in C,
  and takes an identical value to be equal without asking it: 7 ns an attribute. What it misses is a value that is
  written around Flax (``vars(module)[name] = ...``) and equals the one before, such as ``True`` in place of ``1``.
- What a program changes besides values goes around Flax as well. After such a call no graph is taken to be right, and
  each is made anew when it is asked (``Watch.structures``).
- Dicts, lists, sets and objects that are not Flax's are compared by identity each time, and so is what functions hold
  that are looked into. An array of numpy that is no input, and the like, is compared by what is in it.
"""

from __future__ import annotations

import array
import collections
import itertools
import operator
import weakref
from collections.abc import Hashable, Iterator
from typing import Any

from lazymods import _compat
from lazymods._compat import jit as _compat_jit
from lazymods._objects.attributes import Attributes
from lazymods._objects.reached import parts_of_callable
from lazymods._objects.tokens import TokenKind, kind_of, token
from lazymods._objects.traced_state import TracedState, held_by, input_of, slot_shape

_numbers = itertools.count()
_ATTEMPTS = 100  # how often to read an object again that another thread changes meanwhile
_BUILTIN = frozenset((dict, list, set, collections.deque, bytearray, array.array))  # classes whose objects keep them
_attributes = object.__getattribute__  # vars() would ask the class: nnx.Optimizer has a slow __getattribute__


class _Anything:
    """Equal to whatever stands in its place: a slot for arrays, whose changes are no change of structure."""

    __array_ufunc__ = None  # so that == of an array of numpy asks this class
    __hash__ = None  # type: ignore[assignment]
    __eq__ = id  # type: ignore[assignment]  # id(other) is true, and called without a frame: this is on every call's way


_ANYTHING = _Anything()


class Graph:
    """The structure of one nnx object and all below it, and how to see that it is still the same.

    Attributes:
        name: A number that no other graph ever has.
        key: The structure, equal for models of equal structure.
        variables: Every Variable, in the order of the values that :meth:`read` returns.
        slots: ``(node, key)`` of each array that is no Variable's, read after those; the node is None for the root.
        lazy: Whether something is uninitialized; such a graph is never kept.
        root: A weak reference to the object.
    """

    __slots__ = (
        "__weakref__",
        "_callables",
        "_classed",
        "_classes",
        "_copies",
        "_free",
        "_free_values",
        "_has_containers",
        "_held",
        "_looks",
        "_mark",
        "_metadata",
        "_nodes",
        "_odd",
        "_ordered",
        "_orders",
        "_own",
        "_root_class",
        "_slot_shapes",
        "_structures",
        "_trusted",
        "_variable_classes",
        "key",
        "lazy",
        "name",
        "root",
        "slots",
        "variables",
    )  # fmt: skip

    def __init__(self, root: Any, keep: bool = True) -> None:
        self._mark, self._structures = _compat_jit.Watch.mark, _compat_jit.Watch.structures
        traced_state = TracedState([root])
        self.name: int = next(_numbers)
        self.key: Hashable = traced_state.key
        self.lazy: bool = traced_state.lazy
        self.variables: list[Any] = traced_state.variables
        # what is kept with the root must not hold the root: it would live until the next garbage collection
        self.slots: list[tuple[Any, Any]] = [(None if node is root else node, key) for node, key in traced_state.slots]
        self._slot_shapes = [slot_shape(held_by(node)[key]) for node, key in traced_state.slots]
        for node, key in traced_state.slots:
            traced_state.contents_before(node)[key] = _ANYTHING
        traced_state.contents[0][_compat.STATE] = _ANYTHING
        self._root_class = traced_state.classes[0]
        self._own = traced_state.contents[0]
        self._nodes: list[Any] = traced_state.nodes[1:]
        self._classed = [n for n in self._nodes if type(n) not in _BUILTIN]
        self._classes = list(map(type, self._classed))
        self._held: list[Any] = []
        self._copies: list[Any] = []
        self._free: list[Any] = []  # dicts and lists to which anyone may write without Flax, and what they hold
        self._free_values: list[Any] = []
        self._trusted: list[Any] = []  # what is in other dicts and lists
        self._odd: list[tuple[Any, Any]] = []  # what is compared in Python: sets, and objects with __slots__
        with_slots = {id(node) for node, _ in traced_state.slots}
        for node, contents in zip(self._nodes, traced_state.contents[1:], strict=True):
            self._add(node, contents, id(node) in with_slots)
        self._ordered: list[Any] = traced_state.ordered
        self._orders = [list(n) for n in self._ordered]
        self._callables, self._looks = traced_state.callables, traced_state.looks
        self._has_containers = bool(self._ordered or self._free or self._odd or self._callables or self._looks)
        self._metadata = [_compat.raw_metadata(v).copy() for v in self.variables]
        self._variable_classes = list(map(type, self.variables))
        self.root: weakref.ref[Any] = weakref.ref(root)
        if keep and not self.lazy:
            self._watch(root)

    def _add(self, node: Any, contents: Any, has_slots: bool) -> None:
        """Note how to compare a node's contents."""
        kind = kind_of(node)
        held = held_by(node, kind)
        if (
            kind in (TokenKind.SET, TokenKind.QUEUE)
            or type(held) is Attributes
            or (has_slots and kind is not TokenKind.NODE)
        ):
            self._odd.append((node, contents))
            return
        self._held.append(held)
        self._copies.append(contents)
        values = contents.values() if isinstance(contents, dict) else contents
        if kind is TokenKind.NODE:
            return
        if all(map(_equals_itself_only, values)):
            self._trusted += values
        else:
            self._free.append(held.values() if isinstance(held, dict) else held)
            self._free_values += values

    def _watch(self, root: Any) -> None:
        for node in self._nodes:
            if kind_of(node) is TokenKind.NODE:
                _compat_jit.watch(node)
        for variable in self.variables:
            _compat_jit.watch(variable)
        _compat_jit.watch(root, self)

    def read(self, root: Any) -> list[Any] | None:
        """Return the values of all Variables and slots, or None if the structure is another now.

        Args:
            root: The object with which this graph is kept.
        """
        mark = _compat_jit.Watch.mark
        if self._mark is not mark:
            if self._structures is not _compat_jit.Watch.structures:
                return None
            if not self._is_same(root):
                return None
            self._mark = mark
        try:
            same = (
                _attributes(root, "__dict__") == self._own
                and self._held == self._copies
                and list(map(type, self._classed)) == self._classes
                and type(root) is self._root_class
            )
        except Exception:  # an array or another class's == was asked, so a value is not the one that was there
            return None
        if not same or (self._has_containers and not self._has_same_containers()):
            return None
        raws = _compat_jit.raw_values(self.variables)
        return self._with_slots(root, raws) if self.slots else raws

    def _has_same_containers(self) -> bool:
        """Compare what anyone may write to without Flax; that lengths are the same was seen before."""
        return (
            list(map(list, self._ordered)) == self._orders
            and all(map(operator.is_, itertools.chain.from_iterable(self._free), self._free_values))
            and all(itertools.starmap(_is_as, self._odd))
            and all(itertools.starmap(_still_holds, self._callables))
            and all(look(value) == found for look, value, found in self._looks)
        )

    def _with_slots(self, root: Any, raws: list[Any]) -> list[Any] | None:
        for (node, key), shape in zip(self.slots, self._slot_shapes, strict=True):
            value = held_by(root if node is None else node)[key]
            if slot_shape(value) != shape:
                return None
            raws.append(input_of(value))
        return raws

    def _is_same(self, root: Any) -> bool:
        """Compare everything by identity, as ``==`` between dicts does not."""
        if not _identical(vars(root), self._own) or not all(map(_identical, self._held, self._copies)):
            return False
        if list(map(type, self.variables)) != self._variable_classes:
            return False
        if not all(map(_equals_itself_only, self._trusted)):  # a Variable has another value
            return False
        return all(map(_same_metadata, map(_compat.raw_metadata, self.variables), self._metadata))

    def nodes(self) -> list[Any]:
        """Return all objects below the root."""
        return self._nodes

    def writers(self, root: Any) -> Iterator[tuple[Any, Any]]:
        """Return where each slot's value is: the object, dict or list, and the key."""
        return ((root if node is None else node, key) for node, key in self.slots)


def _equals_itself_only(value: Any) -> bool:
    """Whether ``==`` between a value and another in its place is false, or an error: no truth in several elements."""
    if kind_of(value) is TokenKind.VARIABLE:
        return getattr(value.get_raw_value(), "size", 1) > 1
    return kind_of(value) is TokenKind.NODE and type(value).__eq__ is object.__eq__


def _is_as(node: Any, contents: Any) -> bool:
    if isinstance(node, array.array):  # its items are new objects each time
        return [*map(token, node)] == [*map(token, contents)]
    return _identical(held_by(node), contents)


def _still_holds(value: Any, parts: list[Any]) -> bool:
    now = parts_of_callable(value)
    return len(now) == len(parts) and all(map(operator.is_, now, parts))


def _identical(held: Any, copy: Any) -> bool:
    if len(held) != len(copy):
        return False
    if isinstance(held, dict):
        if all(map(operator.is_, held.values(), copy.values())) and list(held) == list(copy):
            return True
        pairs = zip(held.items(), copy.items(), strict=True)
        return all(a == b and (x is y or y is _ANYTHING) for (a, x), (b, y) in pairs)
    if isinstance(held, set):
        return set(map(token, held)) == set(map(token, copy))
    return all(x is y or y is _ANYTHING for x, y in zip(held, copy, strict=True))


def _same_metadata(now: dict[str, Any], then: dict[str, Any]) -> bool:
    return now.keys() == then.keys() and all(v is then[k] or token(v) == token(then[k]) for k, v in now.items())


def graph_of(root: Any, *, keep: bool = True) -> tuple[Graph, list[Any]]:
    """Return an nnx object's graph, made anew if the object changed, and the values in it.

    Args:
        root: Any nnx object.
        keep: Keep the graph with the object; not while the object is under a trace.
    """
    kept = _compat_jit.kept_graph(root) if keep else None
    values = None if kept is None else kept.read(root)
    if kept is not None and values is not None:
        return kept, values
    for _ in range(_ATTEMPTS):
        try:
            graph = Graph(root, keep)
            values = graph.read(root)
        except RuntimeError as error:  # a dict or set has changed its size: another thread is at work on it
            if "during iteration" not in str(error):
                raise
            continue
        if values is not None:
            return graph, values
    raise RuntimeError(f"{type(root).__name__} changes while it is read")
