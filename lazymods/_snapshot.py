"""Going back: a model exactly as it was."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from lazymods import _compat, _graph
from lazymods._graph import ARRAY, NODE, OTHER, VARIABLE, kind_of


class Snapshot:
    """The classes, attributes and Variable contents of objects, to go back to."""

    def __init__(self, *roots: Any) -> None:
        self._nodes: list[tuple[Any, type, dict[str, Any]]] = []
        self._containers: list[tuple[Any, Any]] = []
        self._variables: list[tuple[Any, type, Any, dict[str, Any]]] = []
        seen: set[int] = set()
        for root in roots:
            self._take(root, seen)

    def _take(self, value: Any, seen: set[int]) -> None:
        if id(value) in seen:
            return
        seen.add(id(value))
        kind = kind_of(value)
        if kind is VARIABLE:
            self._variables.append((value, type(value), value.get_raw_value(), value.get_metadata()))
            return
        if kind is NODE:
            self._nodes.append((value, type(value), dict(vars(value))))
        elif isinstance(value, list):
            self._containers.append((value, value.copy()))
        elif isinstance(value, MutableMapping):
            self._containers.append((value, dict(value)))
        for _, child in _graph.children(value):
            if kind_of(child) not in (ARRAY, OTHER):
                self._take(child, seen)

    def restore(self) -> None:
        """Put everything back."""
        for node, cls, attributes in self._nodes:
            _compat.set_attributes(node, attributes)
            _compat.set_class(node, cls)
        for container, contents in self._containers:
            container.clear()
            container.extend(contents) if isinstance(container, list) else container.update(contents)
        for variable, cls, raw, metadata in self._variables:
            _compat.write_variable(variable, cls, raw, metadata)
