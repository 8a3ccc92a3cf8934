"""What objects of registered classes hold beside their children, such as the fields of ``pytree_node=False``.

JAX hands it from flattening to unflattening as it is. Numbers, texts and arrays there are state as those among the
children are; functions and other objects, as a ``TrainState`` has its ``apply_fn`` and ``tx``, are configuration.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from lazymods import _graph
from lazymods._graph import ARRAY, MAPPING, OTHER, PYTREE, SEQUENCE, Path, kind_of
from lazymods.state.values import is_number, is_text


def static_leaves(value: Any) -> Iterator[tuple[Path, Any]]:
    """The numbers, texts and arrays in the static fields of an object of a registered class, by path."""
    children = {key for key, _ in _graph.pytree_children(value)}
    for name, held in _attributes(value).items():
        if name in children:
            continue
        leaves = list(_leaves(held))
        if leaves and _is_static(value, name, held):
            yield from (((name, *path), leaf) for path, leaf in leaves)


def with_fields(value: Any, fields: Mapping[str, Any]) -> Any:
    """Return a copy of an object with other values in some fields, also if its class is frozen."""
    out = copy.copy(value)
    for name, held in fields.items():
        object.__setattr__(out, name, held)
    return out


def structure_of(value: Any) -> Any:
    """Return the structure of an object whose children are leaves."""
    return jax.tree_util.tree_structure(value, is_leaf=lambda x: x is not value)


def _attributes(value: Any) -> dict[str, Any]:
    if dataclasses.is_dataclass(value):  # which may have slots
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if hasattr(value, f.name)}
    return dict(getattr(value, "__dict__", {}))


def _leaves(value: Any) -> Iterator[tuple[Path, Any]]:
    kind = kind_of(value)
    if kind is ARRAY or (kind is OTHER and (is_number(value) or is_text(value))):
        yield (), value
    elif kind in (MAPPING, SEQUENCE, PYTREE):
        for key, child in _graph.children(value):
            yield from (((key, *path), leaf) for path, leaf in _leaves(child))
        if kind is PYTREE:
            yield from static_leaves(value)


def _is_static(value: Any, name: str, held: Any) -> bool:
    """Whether flattening hands an attribute on: another value in its place is seen there."""
    mark, own = object(), structure_of(value)
    marked = {MAPPING: {"mark": mark}, SEQUENCE: [mark] if isinstance(held, list) else (mark,)}
    for other in (marked.get(kind_of(held), mark), _another(held)):
        try:
            probe = with_fields(value, {name: other})
            found = structure_of(probe)
            handed_on = found.node_data()[1]
            if handed_on is probe or _holds(handed_on, mark):
                return True
            is_alike = kind_of(held) is not ARRAY and found.num_leaves == own.num_leaves and own == structure_of(value)
            if is_alike and found != own:  # it hands on what it makes of it
                return True
        except Exception:  # a class that takes no other value there, or none of another type
            continue
    return False


def _another(held: Any) -> Any:
    """Return another number or text of the same type; anything else as it is."""
    if isinstance(held, str):
        return f"{held}x"
    if isinstance(held, bytes):
        return held + b"x"
    return type(held)(held == 0) if is_number(held) else held


def _holds(data: Any, mark: Any) -> bool:
    if isinstance(data, Mapping):
        return any(_holds(child, mark) for child in data.values())
    return data is mark or (isinstance(data, (list, tuple)) and any(_holds(child, mark) for child in data))
