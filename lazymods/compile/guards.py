"""Has anything changed? A guard for each model, cheap enough for every call.

A :class:`Graph` is the picture of one nnx object. It is kept with that object and dies with it, so no cache holds a
model. Each call asks :meth:`Graph.read`, which is sound in two steps:

- Flax itself tells of every assignment to an attribute, a Variable or its metadata (see ``_compat_jit.watch``). After
  any, each attribute is compared by identity and each metadata entry by type and value.
- Deletions, items of dicts and lists, and writes that go around Flax show in a comparison of each object's
  contents with a copy. It runs in C, and takes an identical value to be equal without asking it: 7 ns an attribute.
"""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Iterator
from typing import Any

from lazymods import _compat, _compat_jit
from lazymods.compile.picture import Picture, held_by, input_of, slot_shape
from lazymods.compile.tokens import Kind, kind_of, token

_numbers = itertools.count()
_attributes = object.__getattribute__  # vars() would ask the class: nnx.Optimizer has a slow __getattribute__


class _Anything:
    """Equal to whatever stands in its place: a slot for arrays, whose changes are no change of structure."""

    __array_ufunc__ = None  # numpy leaves the comparison to us
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
        "_classes",
        "_copies",
        "_held",
        "_mark",
        "_metadata",
        "_nodes",
        "_ordered",
        "_orders",
        "_own",
        "_root_class",
        "_slot_shapes",
        "_variable_classes",
        "key",
        "lazy",
        "name",
        "root",
        "slots",
        "variables",
    )  # fmt: skip

    def __init__(self, root: Any, keep: bool = True) -> None:
        self._mark = _compat_jit.Watch.mark
        picture = Picture([root])
        self.name = next(_numbers)
        self.key = picture.key
        self.lazy = picture.lazy
        self.variables: list[Any] = picture.variables
        # what is kept with the root must not hold the root: it would live until the next garbage collection
        self.slots = [(None if node is root else node, key) for node, key in picture.slots]
        self._slot_shapes = [slot_shape(held_by(node)[key]) for node, key in picture.slots]
        for node, key in picture.slots:
            picture.contents_before(node)[key] = _ANYTHING
        picture.contents[0][_compat.STATE] = _ANYTHING
        self._root_class = picture.classes[0]
        self._own = picture.contents[0]
        self._nodes: list[Any] = picture.nodes[1:]
        self._classes = picture.classes[1:]
        self._held: list[Any] = [held_by(node) for node in self._nodes]
        self._copies: list[Any] = picture.contents[1:]
        self._ordered: list[Any] = picture.ordered
        self._orders = [list(n) for n in self._ordered]
        self._metadata = [_compat.raw_metadata(v).copy() for v in self.variables]
        self._variable_classes = list(map(type, self.variables))
        self.root = weakref.ref(root)
        if keep and not self.lazy:
            self._watch(root)

    def _watch(self, root: Any) -> None:
        for node in self._nodes:
            if kind_of(node) is Kind.NODE:
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
            if not self._is_same(root):
                return None
            self._mark = mark
        try:
            same = (
                _attributes(root, "__dict__") == self._own
                and self._held == self._copies
                and list(map(type, self._nodes)) == self._classes
                and type(root) is self._root_class
            )
        except Exception:  # an array or another class's == was asked, so a value is not the one that was there
            return None
        if not same or (self._ordered and list(map(list, self._ordered)) != self._orders):
            return None
        raws = _compat_jit.raw_values(self.variables)
        return self._with_slots(root, raws) if self.slots else raws

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
        return all(map(_same_metadata, map(_compat.raw_metadata, self.variables), self._metadata))

    def nodes(self) -> list[Any]:
        """Return all objects below the root."""
        return self._nodes

    def writers(self, root: Any) -> Iterator[tuple[Any, Any]]:
        """Return where each slot's value is: the dict or list, and the key."""
        return ((held_by(root if node is None else node), key) for node, key in self.slots)


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
    graph = Graph(root, keep)
    values = graph.read(root)
    if values is None:
        raise RuntimeError(f"{type(root).__name__} changes while it is read")
    return graph, values
