"""Copies of nnx objects with other values: as they are shared, and in the order of their attributes."""

from __future__ import annotations

import copy
from collections.abc import Callable, MutableMapping
from typing import Any

import jax

from lazymods import _compat, _graph
from lazymods._graph import ARRAY, MAPPING, NODE, OTHER, PYTREE, kind_of


def copied(value: Any, leaf: Callable[[Any], Any], memo: dict[int, Any]) -> Any:
    """Copy nnx objects and containers, as they are shared and in the order of their attributes.

    Args:
        value: An nnx object, a container, or what is in one.
        leaf: Returns what takes the place of a Variable or an array.
        memo: What is copied already, by the id of the original; it gets all others.
    """
    kind = kind_of(value)
    if kind is OTHER:
        return value
    if id(value) in memo:
        return memo[id(value)]
    if kind is NODE:
        memo[id(value)] = made = _compat.new_object(type(value))
        own = {_compat.STATE: vars(made)[_compat.STATE]}
        held = {k: copied(v, leaf, memo) for k, v in vars(value).items() if k not in (_compat.STATE, _compat.NODES)}
        _compat.set_attributes(made, own | held)
        _compat.share_data_names(made, _compat.names_of(value))
        return made
    memo[id(value)] = made = leaf(value) if kind <= ARRAY else None
    if made is None:
        new = {k: copied(v, leaf, memo) for k, v in _graph.children(value, kind)}
        memo[id(value)] = made = rebuilt(value, kind, new)
    return made


def rebuilt(value: Any, kind: Any, new: dict[Any, Any]) -> Any:
    """Return a container of the same type with other contents, by the keys of ``_graph.children``."""
    if kind is PYTREE:
        return jax.tree.structure(value, is_leaf=lambda x: x is not value).unflatten(list(new.values()))
    if isinstance(value, (list, MutableMapping)):
        made = copy.copy(value)
        for key, item in new.items():
            made[key] = item
        return made
    if kind is MAPPING:
        return type(value)(new)
    made = tuple.__new__(type(value), new.values())
    if hasattr(made, "__dict__"):
        vars(made).update(vars(value))
    return made
