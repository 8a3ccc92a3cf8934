"""Going back: a model exactly as it was."""

from __future__ import annotations

import collections
import sys
import types
from collections.abc import Iterable, MutableMapping
from typing import Any

import numpy as np

from lazymods import _compat, _graph
from lazymods._graph import ARRAY, NODE, OTHER, PYTREE, STATE, VARIABLE, kind_of


def refill(held: Any, contents: Any) -> None:
    """Let a container hold other contents, in their order."""
    held.clear()
    held.extend(contents) if hasattr(held, "extend") else held.update(contents)


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
        self._arrays: list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]] = []
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
            for turn in getattr(vars(value).get(STATE), "turns", None) or ():
                if turn is not None and id(turn.ledger) not in self._ledgers:
                    self._ledgers[id(turn.ledger)] = turn.ledger, turn.ledger.saved()
        elif isinstance(value, list):
            self._containers.append((value, value.copy()))
        elif isinstance(value, MutableMapping):
            self._containers.append((value, dict(value)))
        for _, child in _graph.children(value):
            kind = kind_of(child)
            if kind is not OTHER and kind is not ARRAY:
                self._take(child, kind, seen)

    def keep(self, arrays: Iterable[np.ndarray[Any, Any]]) -> None:
        """Take the contents of arrays too; one that is among them twice, or overlaps another, has its first ones."""
        self._arrays = [(array, array.copy()) for array in arrays] + self._arrays

    def restore(self) -> None:
        """Put everything back."""
        for array, contents in self._arrays:
            array[...] = contents
        for ledger, saved in self._ledgers.values():
            ledger.restore(saved)
        for node, cls, attributes in self._nodes:
            _compat.set_attributes(node, attributes)
            _compat.set_class(node, cls)
        for container, contents in self._containers:
            refill(container, contents)
        for variable, cls, raw, metadata in self._variables:
            _compat.write_variable(variable, cls, raw, metadata)


class Containers:
    """What the plain lists, dicts, sets and objects below some nnx objects hold, which copies of those share.

    A run of copies may write to them; :meth:`restore` undoes it, and leaves alone what was not written to.

    Args:
        roots: nnx objects, and containers of such.
    """

    def __init__(self, roots: Iterable[Any]) -> None:
        self._before: list[tuple[Any, Any]] = []
        seen: set[int] = set()
        waiting = list(roots)
        while waiting:
            value = waiting.pop()
            if id(value) in seen:
                continue
            seen.add(id(value))
            held = _held(value)
            if held is not None:
                copy_as = next((cls for cls in (dict, set) if isinstance(held, cls)), list)
                self._before.append((held, copy_as(held)))
            waiting += _parts(value, held)

    def restore(self) -> None:
        """Let all that was written to hold again what it held."""
        for held, contents in self._before:
            if not is_same(contents, held):
                refill(held, contents)


_CONTAINERS = (dict, list, set, collections.deque)
_OF_LIBRARIES = sys.stdlib_module_names | {"jax", "jaxlib", "flax", "numpy", "optax", "lazymods", "orbax", "ml_dtypes"}


def _held(value: Any) -> Any:
    """Return the container that is a value, or the attributes of a plain object; None for anything else."""
    if isinstance(value, _CONTAINERS):
        return value
    if kind_of(value) not in (OTHER, PYTREE) or callable(value):
        return None
    own = type(value).__module__.partition(".")[0] not in _OF_LIBRARIES or type(value) is types.SimpleNamespace
    held = getattr(value, "__dict__", None) if own else None
    return held if type(held) is dict else None


def _parts(value: Any, held: Any) -> Iterable[Any]:
    if held is not None:
        return list(held.values()) if isinstance(held, dict) else list(held)
    return [child for _, child in _graph.children(value) if kind_of(child) not in (VARIABLE, ARRAY)]

