"""Dicts and lists among the arguments of a call: their order counts, and writes to them reach the caller's objects.

``jax.jit`` gives a function containers of its own, whose keys it has sorted, and what the function writes to those is
lost. Here a dict comes with its keys in the caller's order, which is part of the program, and what a trace has written
to dicts and lists stands in its record. Other pytrees can't be written to: that is refused.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from lazymods._compat import jit as _compat_jit
from lazymods._errors import LazyError, Problem
from lazymods._objects.tokens import TokenKind, kind_of_type, token
from lazymods._objects.traced_state import contents_of, put_item
from lazymods._snapshot import is_same, refill

_SORTED = (dict, collections.defaultdict)  # by JAX, when it takes them apart
_CONTAINERS = (TokenKind.DICT, TokenKind.LIST, TokenKind.QUEUE)


def _children(value: Any) -> Iterable[tuple[Any, Any]] | None:
    """Return the parts of a pytree by what a path calls them, in JAX's order; None for a leaf."""
    return _taken_apart(value)[0]


def _taken_apart(value: Any) -> tuple[Iterable[tuple[Any, Any]] | None, Any]:
    """Return also what a pytree of another class is besides its parts."""
    cls = type(value)
    if cls is list or cls is tuple:
        return enumerate(value), None
    kind = kind_of_type(cls)
    if kind in (TokenKind.ARRAY, TokenKind.NODE, TokenKind.VARIABLE) or value is None:
        return None, None
    if cls in _SORTED:
        return [(key, value[key]) for key in sorted(value)], None
    flat = jax.tree_util.default_registry.flatten_one_level(value)
    return (None, None) if flat is None else (enumerate(flat[0]), flat[1])


def _values(value: Any) -> list[Any]:
    return [part for _, part in _children(value) or ()]


def _dicts(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> Iterator[Any]:
    """Yield the dicts in a pytree that JAX sorts, in an order that does not depend on theirs."""
    parts = _children(tree)
    if parts is None or (is_leaf is not None and is_leaf(tree)):
        return
    if type(tree) in _SORTED:
        yield tree
    for _, part in parts:
        yield from _dicts(part, is_leaf)


Orders = tuple[tuple[Hashable, ...], ...]


def orders_of(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> Orders:
    """Return the order of the keys of each dict in a pytree; nothing if all are sorted, as JAX would have them."""
    found = tuple(map(tuple, _dicts(tree, is_leaf)))
    return found if any(list(keys) != sorted(keys) for keys in found) else ()


def layout(tree: Any) -> list[Any]:
    """Return what tells two pytrees of equal structure apart: the order of keys, and what ``==`` does not tell."""
    found: list[Any] = []
    _add_layout(tree, found)
    return found


def _add_layout(tree: Any, found: list[Any]) -> None:
    if type(tree) in _SORTED:
        found.append((*tree, *map(type, tree)))
        parts: Any = tree.values()
    else:
        children, data = _taken_apart(tree)
        parts = [part for _, part in children or ()]
        if data is not None:
            found.append(_Exactly(data))
    for part in parts:
        if type(part) is not _compat_jit.ARRAY:
            _add_layout(part, found)


class _Exactly:
    """What a pytree is besides its parts: static fields, in which ``True``, ``1`` and ``1.0`` are three values.

    It stands beside a treedef, which has compared all else.
    """

    __slots__ = ("_data",)

    def __init__(self, data: Any) -> None:
        self._data = data

    def __hash__(self) -> int:
        return hash(type(self._data))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Exactly):
            return NotImplemented
        return self._data is other._data or _numbers_in(self._data) == _numbers_in(other._data)


def _numbers_in(data: Any) -> Hashable:
    if type(data) in (bool, int, float, complex) or isinstance(data, np.generic):
        return token(data)
    if isinstance(data, Mapping):
        return tuple((_numbers_in(key), _numbers_in(value)) for key, value in data.items())
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        data = [getattr(data, field.name) for field in dataclasses.fields(data)]
    return tuple(map(_numbers_in, data)) if isinstance(data, (tuple, list)) else None


def put_in_order(tree: Any, orders: Orders, leaves: Iterable[Any]) -> Any:
    """Return a pytree that JAX has built of these leaves, with the dicts in it in these orders."""
    if orders:
        whole = {*map(id, leaves)}  # some may be dicts
        for thing, keys in zip(list(_dicts(tree, lambda v: id(v) in whole)), orders, strict=True):
            refill(thing, {key: thing[key] for key in keys})
    return tree


def fresh(value: Any) -> Any:
    """Return a static argument in containers of its own, which a trace may write to."""
    cls = type(value)
    if cls is dict:
        return {key: fresh(part) for key, part in value.items()}
    return cls(map(fresh, value)) if cls is list or cls is tuple else value


def with_sharing(original: Any, twin: Any, of: Callable[[Any], Any], known: dict[int, Any]) -> Any:
    """Return a pytree that JAX has built anew with one object wherever the original has one.

    Args:
        original: What the pytree is a copy of.
        twin: The pytree, whose containers are changed.
        of: Returns what stands for an object that has a copy elsewhere; itself for all others.
        known: By id of what the original holds, what stands for it; this is added to.
    """
    parts = _children(original)
    if parts is None:
        return twin
    if id(original) not in known:
        # others have no identity
        elsewhere = of(original) if kind_of_type(type(original)) >= TokenKind.OBJECT else original
        known[id(original)] = twin if elsewhere is original else elsewhere
        if elsewhere is original:
            own = list(_children(twin) or ())
            new = [with_sharing(part, at, of, known) for (_, part), (_, at) in zip(parts, own, strict=True)]
            known[id(original)] = _with_parts(twin, own, new)
    return known[id(original)]


def _with_parts(value: Any, before: Sequence[tuple[Any, Any]], parts: list[Any]) -> Any:
    """Let a pytree hold other parts, in JAX's order."""
    if all(part is own for (_, own), part in zip(before, parts, strict=True)):
        return value
    if type(value) is list or type(value) in _SORTED:  # JAX would sort it
        for (key, _), part in zip(before, parts, strict=True):
            put_item(value, key, part)
        return value
    return jax.tree.structure(value, is_leaf=lambda v: v is not value).unflatten(parts)


def _are_same(before: Sequence[Any], after: Sequence[Any]) -> bool:
    """Whether a pytree has the parts that it had; some classes make containers of them each time they are asked."""
    return len(before) == len(after) and all(
        a is b or (type(a) is type(b) and _children(a) is not None and _are_same(_values(a), _values(b)))
        for a, b in zip(before, after, strict=True)
    )


class Given:
    """The containers among the arguments of one call, in a fixed order, and what they held.

    Args:
        args: The arguments.
        kwargs: The keyword arguments.

    Attributes:
        of: The arguments, and the keyword arguments.
        things: The dicts and lists. One that is in two places stands here twice, as the function gets two.
        contents: What each of them held.
    """

    def __init__(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self.of = (args, kwargs)
        self.things: list[Any] = []
        self.contents: list[Any] = []
        self._paths: list[str] = []
        self._others: list[tuple[str, Any, list[Any]]] = []
        for name, value in [*enumerate(args), *sorted(kwargs.items())]:
            self._visit(value, f"argument {name}")

    def _visit(self, value: Any, path: str) -> None:
        parts = _children(value)
        if parts is None:
            return
        parts, kind = list(parts), kind_of_type(type(value))
        if kind in _CONTAINERS:
            self.things.append(value)
            self.contents.append(contents_of(value, kind))
            self._paths.append(path)
        elif kind is not TokenKind.TUPLE:
            self._others.append((path, value, _values(value)))
        for key, part in parts:
            self._visit(part, f"{path}[{key!r}]")

    def changed(self) -> list[int]:
        """Return the numbers of the containers that hold other things than before, or in another order.

        Raises:
            LazyError: If a pytree of another class does.
        """
        for path, value, before in self._others:
            if not _are_same(before, _values(value)):
                raise LazyError(
                    Problem(
                        path,
                        f"a function that writes to a {type(value).__name__} among its arguments",
                        "a write to a dict, a list or an nnx object: of another pytree the function has a copy",
                        "return new  # the new object as a result of the function",
                    )
                )
        return [n for n, thing in enumerate(self.things) if not is_same(self.contents[n], contents_of(thing))]

    def restore(self) -> None:
        """Let the containers hold what they held."""
        for thing, contents in zip(self.things, self.contents, strict=True):
            if not is_same(contents, contents_of(thing)):
                refill(thing, contents)

    def refuse_shared(self, changed: Iterable[int], others: Iterable[Any]) -> None:
        """Refuse to change a container that the function has in several places, as several containers.

        Args:
            changed: The numbers of those that are about to change.
            others: Objects that the function reaches besides.

        Raises:
            LazyError: If there is one.
        """
        places, besides = [*map(id, self.things)], {*map(id, others)}
        for number in changed:
            if places.count(places[number]) > 1 or places[number] in besides:
                raise LazyError(
                    Problem(
                        self._paths[number],
                        "a container in several places, and a function that writes to it in one of them",
                        "one place: a compiled function has a container for each, and sees a write in one only",
                        "copy.copy(container)  # in all places but one",
                    )
                )
