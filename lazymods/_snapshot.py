"""Going back: a model exactly as it was."""

from __future__ import annotations

import array
import collections
import functools
import operator
from collections.abc import Iterable, MutableMapping
from typing import Any

import numpy as np

from lazymods import _compat, _graph
from lazymods._graph import ARRAY, NODE, OTHER, STATE, VARIABLE, kind_of
from lazymods._initial import draws

_exhaust = collections.deque(maxlen=0).extend
_SEQUENCES = (list, collections.deque, bytearray)


def refill(held: Any, contents: Any) -> None:
    """Let a container hold other contents, in their order.

    Both steps are one call of a function in C, so that no other thread finds the container empty.
    """
    if isinstance(held, array.array):
        held[:] = array.array(held.typecode, contents)
        return
    put = held.extend if isinstance(held, _SEQUENCES) else held.update  # a dict may have any attribute
    _exhaust(map(operator.call, (held.clear, functools.partial(put, contents))))


def is_same(before: Any, after: Any) -> bool:
    """Whether a copy of what a container held, or a list of its parts, is what it holds now."""
    if len(before) != len(after):
        return False
    if isinstance(before, set):
        return {*map(id, before)} == {*map(id, after)}
    if isinstance(before, dict):
        return all(a == b and before[a] is after[b] for a, b in zip(before, after, strict=True))
    return all(a is b for a, b in zip(before, after, strict=True))


class Snapshot:
    """The classes, attributes and Variable contents of objects, to go back to."""

    def __init__(self, *roots: Any) -> None:
        self._nodes: list[tuple[Any, type, dict[str, Any]]] = []
        self._containers: list[tuple[Any, Any]] = []
        self._variables: list[tuple[Any, type, Any, dict[str, Any]]] = []
        self._arrays: list[tuple[Any, Any]] = []
        self._ledgers: dict[int, tuple[Any, Any]] = {}
        seen: set[int] = set()
        for root in roots:
            self._take(root, kind_of(root), seen)

    def _take(self, value: Any, kind: Any, seen: set[int]) -> None:
        if id(value) in seen:
            return
        seen.add(id(value))
        if kind is VARIABLE:
            self._variables.append((value, type(value), value.get_raw_value(), value.get_metadata()))
            return
        if kind is NODE:
            self._nodes.append((value, type(value), dict(vars(value))))
            for turn in draws.all_of(getattr(vars(value).get(STATE), "turns", None)):
                if id(turn.ledger) not in self._ledgers:
                    self._ledgers[id(turn.ledger)] = turn.ledger, turn.ledger.saved()
        elif isinstance(value, list):
            self._containers.append((value, value.copy()))
        elif isinstance(value, MutableMapping):
            self._containers.append((value, dict(value)))
        for _, child in _graph.children(value, kind):
            kind = kind_of(child)
            if kind is not OTHER and kind is not ARRAY:
                self._take(child, kind, seen)

    def keep(self, arrays: Iterable[Any]) -> None:
        """Take the contents of arrays, or of references, too.

        One that is among them twice, or overlaps another, has its first ones.
        """
        self._arrays = [(a, a.copy() if isinstance(a, np.ndarray) else a[...]) for a in arrays] + self._arrays

    def restore(self) -> None:
        """Put everything back."""
        for values, contents in self._arrays:
            values[...] = contents
        for ledger, saved in self._ledgers.values():
            ledger.restore(saved)
        for node, cls, attributes in self._nodes:
            _compat.set_attributes(node, attributes)
            _compat.set_class(node, cls)
        for container, contents in self._containers:
            refill(container, contents)
        for variable, cls, raw, metadata in self._variables:
            _compat.write_variable(variable, cls, raw, metadata)
