"""The named entries of a model: what a state dict holds, and where each entry lives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from flax import nnx

from lazymods import _compat, _graph
from lazymods._errors import Problem, StateDictError
from lazymods._graph import ARRAY, VARIABLE, Path, dotted, kind_of
from lazymods._hooks import hooks_of
from lazymods._lifecycle import TRANSIENT
from lazymods._recipe import is_key

IMPL = "impl"  # the entry that names a random key's implementation: "rngs.key.impl"


class Place(NamedTuple):
    """Where an entry lives.

    Attributes:
        name: The dotted name.
        holder: The object, dict or list that holds the Variable or raw array.
        key: Under which attribute or key.
        owner: The Variable or raw array.
        leaf: The path inside the Variable's value, if that is a pytree; () for an array.
        lazy: Whether the owner is a placeholder.
    """

    name: str
    holder: Any
    key: Any
    owner: Any
    leaf: Path = ()
    lazy: bool = False

    @property
    def value(self) -> Any:
        """The array (or number) that is there, or the placeholder."""
        if self.lazy or kind_of(self.owner) is not VARIABLE:
            return self.owner
        return leaf_of(raw_of(self.owner), self.leaf)

    @property
    def is_rng(self) -> bool:
        """Whether it is random state."""
        return isinstance(self.owner, nnx.RngState) or (kind_of(self.owner) is ARRAY and is_key(self.owner))


def raw_of(variable: nnx.Variable[Any]) -> Any:
    """Return a Variable's value, read out of its reference if it has one."""
    raw = variable.get_raw_value()
    return variable.get_value() if variable.get_metadata("ref", False) else raw


class Survey:
    """A model as a load sees it: walked once.

    Attributes:
        model: The model.
        nodes: Its nnx objects, with their paths.
        places: Its entries by name.
        hooked: Those objects that have hooks.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.nodes = _graph.nodes(model)
        self.places = named_places(model)
        self.hooked = [(path, node) for path, node in self.nodes if hooks_of(node)]


def home_trace(model: Any) -> Any:
    """Return the trace in which a model was born; a dict of objects is where the caller is."""
    return _compat.home_trace(model) if isinstance(model, nnx.Pytree) else _compat.current_trace()


def prefix_of(path: Path) -> str:
    """Return what the names of a module's entries begin with: its dotted path and a dot, '' for the model."""
    return f"{dotted(path)}." if path else ""


def leaf_of(value: Any, path: Path) -> Any:
    """Return what a pytree of dicts, lists and tuples holds at a path."""
    for key in path:
        value = value[key]
    return value


def places(model: Any, prefix: Path = ()) -> Iterator[Place]:
    """Every entry of a model, in definition order; caches and intermediates are left out."""
    for path, holder, key, value in _graph.entries(model):
        kind = kind_of(value)
        if kind is VARIABLE and isinstance(value, TRANSIENT):
            continue
        path = (*prefix, *path)
        lazy = kind is VARIABLE and _graph.is_placeholder(value)
        if lazy or kind is not VARIABLE:
            yield Place(dotted(path), holder, key, value, (), lazy)
            continue
        for leaf in _leaves(raw_of(value), ()):
            yield Place(dotted((*path, *leaf)), holder, key, value, leaf)


def named_places(model: Any) -> dict[str, Place]:
    """Every entry by name.

    Raises:
        StateDictError: If two entries have one name, as those of an attribute ``a.b`` and of ``b`` in ``a``.
    """
    out: dict[str, Place] = {}
    for place in places(model):
        if place.name in out:
            kinds = " and a ".join(type(p.owner).__name__ for p in (out[place.name], place))
            raise StateDictError(
                Problem(
                    place.name, f"two entries of that name, a {kinds}", "one entry a name", "attributes without dots"
                )
            )
        out[place.name] = place
    return out


def _leaves(value: Any, path: Path) -> Iterator[Path]:
    if kind_of(value) is ARRAY:
        yield path
    elif isinstance(value, dict):
        for key, child in value.items():
            yield from _leaves(child, (*path, key))
    elif isinstance(value, (list, tuple)):
        for i, child in enumerate(value):
            yield from _leaves(child, (*path, i))
    elif isinstance(value, (int, float, complex, np.generic)):
        yield path
