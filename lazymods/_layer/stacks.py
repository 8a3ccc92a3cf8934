"""Stacks taken apart, for the names of their entries are those of a list of blocks.

While :func:`apart` is on, a walk of a model finds in a ``lm.Stack`` its blocks, ``blocks.3.fc.kernel``, each with
values of its own: a state dict, a save and a load see a list. What a load has written into the blocks,
:meth:`Apart.put_together` brings into the stack.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from lazymods import _compat, _graph
from lazymods._errors import LazyError, Problem
from lazymods._graph import LOCAL, TOGETHER, Path, kind_of
from lazymods._initial import shards
from lazymods._layer import blocks as _blocks
from lazymods._layer import contexts, lifecycle, stacked_values
from lazymods._layer.merging import put
from lazymods._snapshot import Snapshot


class Apart:
    """The blocks of the stacks that a walk has met.

    Args:
        abstract: Whether shapes and dtypes will do for values.
    """

    def __init__(self, *, abstract: bool) -> None:
        self._abstract = abstract
        self._known: dict[int, tuple[Any, list[tuple[str, Any]]]] = {}
        self._closed: dict[int, Any] = {}
        self._before: list[Snapshot] = []
        self._places: dict[int, dict[str, Any]] = {}

    def layers_of(self, nodes: Iterable[tuple[Path, Any]]) -> Layers:
        """Return what says where in a stack an entry is, from the objects that a walk has found."""
        return Layers([(path, *self._known[id(node)]) for path, node in nodes if id(node) in self._known], self._places)

    def opens(self, node: Any) -> bool:
        """Whether an object is a stack to be taken apart.

        One that the constructor of a lazy layer has made is not, before that layer has its sizes: the constructor, and
        not the blocks, says how the values are made.
        """
        if TOGETHER not in vars(node):
            return False
        if id(node) not in self._known and id(node) not in self._closed:
            whole = vars(node)[TOGETHER]
            with _looking(None):
                shared = {id(e.value) for e in _graph.entries([_graph.at(whole, path) for path in node.shared])}
                held = [e.value for e in _graph.entries(whole) if id(e.value) not in shared]
            if any(_graph.is_placeholder(v) and not v.pending.stacking.sizes for v in held):
                self._closed[id(node)] = node
        return id(node) not in self._closed

    def blocks_of(self, stack: Any) -> list[tuple[str, Any]]:
        """Return the blocks of a stack by their names, the same ones each time."""
        if id(stack) not in self._known:
            with _looking(None):
                found = _blocks.parts_of(vars(stack)[TOGETHER], stack.n, stack.shared, abstract=self._abstract)
            self._known[id(stack)] = stack, [(str(i), block) for i, block in enumerate(found)]
        return self._known[id(stack)][1]

    def put_together(self, *, used_up: bool = False) -> None:
        """Bring what the blocks hold now into their stacks, inner ones first. Later walks find other blocks.

        Args:
            used_up: Whether nobody looks at the values of these blocks any more.

        Raises:
            LazyError: If the blocks of a stack are not of one structure any more.
        """
        for stack, named in reversed(list(self._known.values())):
            whole = vars(stack)[TOGETHER]
            with _looking(None), _compat.at_trace(_compat.home_trace(whole)):
                self._before.append(Snapshot(whole))
                blocks = [block for _, block in named]
                _keep_values(whole, blocks, stack.n)
                _size_together(blocks)
                places = _blocks.places_of(whole) | self._places.get(id(stack), {})
                shared = [_graph.at(whole, path) for path in stack.shared]
                joined, _ = _blocks.join(blocks, shared, places, used_up=used_up)
                _keep_whole(whole, joined)
                _blocks.become(whole, joined, contexts.load_is_carried)
        self._known.clear()

    def restore(self) -> None:
        """Put the stacks back as they were before :meth:`put_together`."""
        with _looking(None):
            for snapshot in reversed(self._before):
                snapshot.restore()
        self._before.clear()


class Layer(NamedTuple):
    """Where in stacks an entry is.

    Attributes:
        name: The entry's name without the numbers of blocks.
        sizes: How many blocks each of the stacks has, from the outer one.
        numbers: Which of them it is in.
        inside: The stacks, each with the entry's name in the block that holds the values of all.
    """

    name: str
    sizes: tuple[int, ...] = ()
    numbers: tuple[int, ...] = ()
    inside: tuple[tuple[int, str], ...] = ()


class Layers:
    """The entries of stacks that are taken apart, as rules for shardings see them."""

    def __init__(self, stacks: Sequence[tuple[Path, Any, Any]], places: dict[int, dict[str, Any]]) -> None:
        self._stacks = sorted(stacks, key=lambda found: len(found[0]), reverse=True)
        self._places = places
        with _looking(None):
            shared = [_graph.at(vars(s)[TOGETHER], p) for _, s, _ in stacks for p in s.shared]
            self._shared = {id(e.value) for e in _graph.entries(shared)}

    def of(self, name: str, owner: Any) -> Layer:
        """Return where an entry is, from its name and the Variable or array that it is."""
        layer = Layer(name)
        for path, stack, _ in self._stacks:  # inner ones first
            prefix = f"{_graph.dotted(path)}." if path else ""
            number, _, rest = layer.name.removeprefix(prefix).partition(".")
            if not layer.name.startswith(prefix) or not number.isdecimal() or not rest:
                continue
            outer = Layer(prefix + rest)
            if id(owner) not in self._shared:
                inside = ((id(stack), rest), *layer.inside)
                outer = Layer(prefix + rest, (stack.n, *layer.sizes), (int(number), *layer.numbers), inside)
            layer = outer
        return layer

    def place(self, layer: Layer, sharding: Any) -> Any:
        """Note where the values of all layers go; return where that of this one does."""
        for depth, (stack, below) in enumerate(layer.inside):
            there = _of_one(sharding, layer.sizes[:depth], layer.numbers[:depth])
            self._places.setdefault(stack, {})[below] = there
        return _of_one(sharding, layer.sizes, layer.numbers)


def _of_one(sharding: Any, sizes: tuple[int, ...], numbers: tuple[int, ...]) -> Any:
    return shards.of_each(sharding, sizes)[int(np.ravel_multi_index(numbers, sizes)) if sizes else 0]


def layers_of(nodes: Iterable[tuple[Path, Any]]) -> Layers:
    """Return what says where in a stack an entry is, from the objects that a walk has found, also outside of a load."""
    return Layers([], {}) if LOCAL.apart is None else LOCAL.apart.layers_of(nodes)


@contextlib.contextmanager
def apart(*, abstract: bool = False) -> Iterator[Apart]:
    """Let walks of this thread find the blocks of stacks; inside another one that has values, the same blocks.

    Args:
        abstract: Whether shapes and dtypes will do for values, as for a load, which replaces them.
    """
    outer = LOCAL.apart
    if outer is not None and not abstract and not outer._abstract:  # noqa: SLF001  its own class
        yield outer
        return
    with _looking(made := Apart(abstract=abstract)):
        yield made


def together() -> contextlib.AbstractContextManager[None]:
    """Let walks find a stack as it is, inside :func:`apart`."""
    return _looking(None)


@contextlib.contextmanager
def _looking(found: Apart | None) -> Iterator[None]:
    before = LOCAL.apart
    LOCAL.apart = found
    try:
        yield
    finally:
        LOCAL.apart = before


def _keep_values(whole: Any, blocks: list[Any], n: int) -> None:
    """Give the blocks the values of the stack where something was written into others of them."""
    held = {e.path: e.value for e in _graph.entries(whole)}
    each = [list(_graph.entries(block)) for block in blocks]
    written = {e.path for entries in each for e in entries if not _has_abstract(_blocks.raw_of(e.value))}
    parts: dict[int, list[Any]] = {}
    for i, (block, entries) in enumerate(zip(blocks, each, strict=True)):
        for path, _, _, value in entries:
            raw, owner = _blocks.raw_of(value), held.get(path)
            if owner is None or path not in written or not _has_abstract(raw):
                continue
            if id(owner) not in parts:
                parts[id(owner)] = stacked_values.parts(_blocks.raw_of(owner), n)
            _fill_in(block, path, value, parts[id(owner)][i])


def _keep_whole(whole: Any, joined: Any) -> None:
    """Give what was made of the blocks the values of the stack where nothing was written into any of them."""
    for path, _, _, value in list(_graph.entries(joined)):
        raw, owner = _blocks.raw_of(value), _graph.at(whole, path)
        if owner is not _graph.MISSING and _has_abstract(raw):
            _fill_in(joined, path, value, _blocks.raw_of(owner))


def _fill_in(block: Any, path: Path, value: Any, old: Any) -> None:
    """Put old values where a Variable or array of a block has shapes alone."""
    kept = jax.tree.map(lambda new, old: old if _is_abstract(new) else new, _blocks.raw_of(value), old)
    if kind_of(value) is _graph.ARRAY:
        put(block, path, kept)
    else:
        _compat.SET_RAW(value, kept)


def _has_abstract(raw: Any) -> bool:
    return any(map(_is_abstract, jax.tree.leaves(raw)))


def _is_abstract(value: Any) -> bool:
    return isinstance(value, jax.ShapeDtypeStruct)


def _size_together(blocks: list[Any]) -> None:
    """Initialize the lazy layers of blocks of which others have been sized: a stack is sized as one."""
    lazy = [{path for path, _ in _graph.lazy_nodes(b)} for b in blocks]
    for path in sorted({p for paths in lazy for p in paths}, key=len, reverse=True):
        ready = [b for b, paths in zip(blocks, lazy, strict=True) if path not in paths]
        if not ready:
            continue
        like = _graph.at(ready[0], path)
        for block in blocks:
            layer = _graph.at(block, path)
            if not _graph.is_lazy_node(layer):
                continue
            for entry in list(_graph.entries(layer)):
                other = _graph.at(like, entry.path)
                if _graph.is_placeholder(entry.value) and other is not _graph.MISSING:
                    entry.value.materialize(other.shape)
            if _graph.is_lazy_node(layer) and not lifecycle.settle_if_filled(layer, initialize=True):
                got, needed = "entries for some blocks, which don't tell the layer's sizes", "entries for all blocks"
                raise LazyError(Problem(_graph.dotted(path), got, needed, "strict=True  # to see what is missing"))
