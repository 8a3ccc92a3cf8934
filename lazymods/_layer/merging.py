"""Merges three ways: what was made at a probe's sizes, what is made at the real ones, what the user has changed.

A layer is built as its constructor made it at some probe's sizes. What the user has changed since stays; all else gets
the value that the constructor gives it at the real sizes: static attributes, at any depth and in containers, and the
metadata of Variables.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx

from lazymods import _compat, _graph
from lazymods._graph import NODE, PYTREE, STATE, Path, kind_of
from lazymods._layer.abstract_module import AbstractModule, Container, Held, Node, Slot, Static
from lazymods._layer.formulas import same_static


def merge(node: Any, actual: Node, pattern: Node) -> None:
    """Give an nnx object the attributes that the constructor gives it.

    Args:
        node: The object.
        actual: What the constructor makes at the sizes now known.
        pattern: What it made when the layer was built.
    """
    held = vars(node)
    merged = {k: held[k] for k in (_compat.STATE, _compat.NODES) if k in held}
    for name, description in actual.attributes.items():
        value = held.get(name, _graph.MISSING)
        before = pattern.attributes.get(name)
        if isinstance(description, Static) and isinstance(before, Static):  # most attributes of most layers
            if before.value is value and not description.mutable:
                merged[name] = description.value  # as _merged returns it
                continue
        if value is _graph.MISSING and not isinstance(description, Static):
            continue  # removed since construction
        merged[name] = _merged(value, description, before)
    names = actual.names
    left = [k for k in held if k not in merged and k not in pattern.attributes and k not in (STATE, _graph.HOOKS)]
    if left:  # what the user has added
        names = names.update({k: v for k, v in _compat.data_names(node).items() if k in left})
    merged.update([(k, held[k]) for k in (*left, STATE, _graph.HOOKS) if k in held])
    _compat.set_attributes(node, merged)
    _compat.share_data_names(node, names)


def _merged(value: Any, description: Any, before: Any) -> Any:
    """Return what an attribute or an item of a container holds from now on; an object is merged where it is."""
    if isinstance(description, Slot):
        return value
    if isinstance(description, Static):
        untouched = isinstance(before, Static) and same_static(before.value, value)
        return description.fresh() if untouched or value is _graph.MISSING else value
    if isinstance(description, Held) and isinstance(before, Held) and isinstance(value, nnx.Variable):
        _renew(value, before.metadata, description.metadata)
    elif isinstance(description, Node) and isinstance(before, Node) and isinstance(value, nnx.Pytree):
        merge(value, description, before)
    elif isinstance(description, Container) and isinstance(before, Container):
        return _merged_container(value, description, before)
    return value


def _merged_container(value: Any, description: Container, before: Container) -> Any:
    known = dict(before.items)
    if type(value) is not description.cls or description.cls is not before.cls:
        return value
    held = dict(_graph.children(value))
    found = {k: _merged(held[k], d, known[k]) for k, d in description.items if k in held and k in known}
    changed = {k: v for k, v in found.items() if v is not held[k]}
    is_whole = list(found) == [k for k, _ in description.items] and found.keys() == held.keys()
    if is_whole and (description.tree != before.tree or (changed and not isinstance(value, (dict, list)))):
        return description.of(list(found.values()))
    for key, new in changed.items():
        value[key] = new
    return value


def renew_metadata(abstract: AbstractModule, known: AbstractModule, held: Mapping[Path, tuple[Any, Any, Any]]) -> None:
    """Give Variables the metadata that the constructor gives them at the sizes now known.

    Args:
        abstract: The constructor at these sizes.
        known: As it was read when the layer was built.
        held: By path what the layer holds now: holder, key and value.
    """
    for path, (_, _, variable) in held.items():
        before, slot = known.slots.get(path), abstract.slots[path]
        if before is None or before.metadata is slot.metadata or not isinstance(variable, nnx.Variable):
            continue
        _renew(variable, before.metadata, slot.metadata)


def _renew(variable: Any, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    metadata = _compat.raw_metadata(variable)
    for name in before.keys() | after.keys():
        old, new, now = (m.get(name, _graph.MISSING) for m in (before, after, metadata))
        if same_static(old, new) or not same_static(old, now):
            continue
        if new is _graph.MISSING:
            del metadata[name]
        else:
            metadata[name] = new


def has_other_metadata(abstract: AbstractModule, known: AbstractModule) -> bool:
    """Whether Variables have other metadata at some sizes than they had when the layer was built."""
    slots = [(slot, known.slots[path]) for path, slot in abstract.slots.items() if path in known.slots]
    pairs = [(a.metadata, b.metadata) for a, b in slots if a.metadata is not b.metadata]
    return any(not same_static(a.get(n), b.get(n)) for a, b in pairs for n in a.keys() | b.keys())


def put(root: Any, path: Path, array: Any) -> None:
    """Write a raw array into the object, mapping or list that holds it; what can't be changed on the way is made anew.

    Args:
        root: Where the path begins.
        path: Where the array is.
        array: The array.
    """
    *above, key = path
    holder = _graph.at(root, tuple(above)) if above else root
    if isinstance(holder, tuple) or kind_of(holder) is PYTREE:
        tree = jax.tree.structure(holder, is_leaf=lambda x: x is not holder)
        parts = dict(_graph.pytree_children(holder)) | {key: array}
        put(root, tuple(above), tree.unflatten(parts.values()))
    elif kind_of(holder) is NODE:
        object.__setattr__(holder, key, array)
    else:
        holder[key] = array
