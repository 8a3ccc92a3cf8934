"""Stacks taken apart, for the names of their entries are those of a list of blocks.

While :func:`apart` is on, a walk of a model finds in a ``lm.Stack`` its blocks, ``blocks.3.fc.kernel``, each with
values of its own: a state dict, a save and a load see a list. What a load has written into the blocks,
:meth:`Apart.put_together` brings into the stack.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax

from lazymods import _compat, _graph
from lazymods._errors import LazyError, Problem
from lazymods._graph import LOCAL, TOGETHER, Path, kind_of
from lazymods._layer import blocks as _blocks
from lazymods._layer import first_call, lifecycle, stacked_values
from lazymods._snapshot import Snapshot


class Apart:
    """The blocks of the stacks that a walk has met.

    Args:
        abstract: Whether shapes and dtypes will do for values.
    """

    def __init__(self, *, abstract: bool) -> None:
        self._abstract = abstract
        self._known: dict[int, tuple[Any, list[tuple[str, Any]]]] = {}
        self._before: list[Snapshot] = []

    def blocks_of(self, stack: Any) -> list[tuple[str, Any]]:
        """Return the blocks of a stack by their names, the same ones each time."""
        if id(stack) not in self._known:
            with _looking(None):
                found = _blocks.parts_of(vars(stack)[TOGETHER], stack.n, stack.shared, abstract=self._abstract)
            self._known[id(stack)] = stack, [(str(i), block) for i, block in enumerate(found)]
        return self._known[id(stack)][1]

    def put_together(self) -> None:
        """Bring what the blocks hold now into their stacks, inner ones first.

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
                joined, _ = _blocks.join(blocks, [_graph.at(whole, path) for path in stack.shared])
                _blocks.become(whole, joined, first_call.load_is_carried)

    def restore(self) -> None:
        """Put the stacks back as they were before :meth:`put_together`."""
        with _looking(None):
            for snapshot in reversed(self._before):
                snapshot.restore()
        self._before.clear()


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


@contextlib.contextmanager
def _looking(found: Apart | None) -> Iterator[None]:
    before = LOCAL.apart
    LOCAL.apart = found
    try:
        yield
    finally:
        LOCAL.apart = before


def _keep_values(whole: Any, blocks: list[Any], n: int) -> None:
    """Give the blocks the values of the stack where nothing was written into them."""
    held = {e.path: e.value for e in _graph.entries(whole)}
    parts: dict[int, list[Any]] = {}
    for i, block in enumerate(blocks):
        for path, holder, key, value in list(_graph.entries(block)):
            raw = value if kind_of(value) is _graph.ARRAY else value.get_raw_value()
            owner = held.get(path)
            if owner is None or not any(isinstance(a, jax.ShapeDtypeStruct) for a in jax.tree.leaves(raw)):
                continue
            if id(owner) not in parts:
                parts[id(owner)] = stacked_values.parts(
                    owner if kind_of(owner) is _graph.ARRAY else owner.get_raw_value(), n
                )
            kept = jax.tree.map(
                lambda new, old: old if isinstance(new, jax.ShapeDtypeStruct) else new, raw, parts[id(owner)][i]
            )
            if kind_of(value) is _graph.ARRAY:
                _put(block, path, holder, key, kept)
            else:
                _compat.SET_RAW(value, kept)


def _put(block: Any, path: Path, holder: Any, key: Any, value: Any) -> None:
    from lazymods._layer.merging import put

    put(block, path, value)


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
                where, got = _graph.dotted(path), "entries for the layer in some blocks only, which don't tell its sizes"
                raise LazyError(Problem(where, got, "entries for all blocks of a stack", "strict=True"))
