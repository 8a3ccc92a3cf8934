"""What blocks hold that is not their own: a part that was there before them, and that something else may hold too.

One block of several holds copies of their values. So what a block shares with the rest of a model has to stay the
object that it is, or is refused; else a tie would be lost without a word. Taken over are blocks that were there before
as such, a list of them, say, with all parts that nothing else holds.
"""

from __future__ import annotations

import gc
import sys
import types
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from flax import nnx

from lazymods import _graph
from lazymods._graph import ARRAY, MAPPING, NODE, OTHER, SEQUENCE, VARIABLE, kind_of

_OWN = ("jax", "jaxlib", "flax", "lazymods")  # whose frames hold no ties
_CODE = (type, types.ModuleType, types.FunctionType)


class Before:
    """The Variables and nnx objects that were there before blocks were made."""

    def __init__(self) -> None:
        self._objects = _nnx_objects()

    def held_by(self, blocks: Sequence[Any]) -> dict[int, str]:
        """Return what blocks hold that is not their own, by id, each with what else holds it. To be asked once.

        A part of a block that was made since is not its own if it was there before. A part of one that was there itself
        is not if anything else holds it.
        """
        before = {id(value) for value in self._objects}
        there = {id(v): v for block in blocks for v in parts_in(block) if id(v) in before}
        self._objects = []  # what nothing else holds may go
        old = [block for block in blocks if id(block) in there]
        own = {id(v) for block in old for v in parts_in(block)}
        tied = _held_elsewhere(own, old) if own else {}
        if tied:  # perhaps by what is not collected yet
            gc.collect()
            tied = _held_elsewhere(own, old)
        return {i: tied.get(i, "it was there before") for i in there if i in tied or i not in own}


def parts_in(value: Any) -> list[Any]:
    """Return the nnx objects and Variables that a block consists of; of a Variable, itself."""
    if kind_of(value) is VARIABLE:
        return [value]
    return [*[node for _, node in _graph.nodes(value)], *_graph.variables(value)]


def _nnx_objects() -> list[Any]:
    """Return every Variable and nnx object that is there.

    What ``gc.freeze`` has set aside would be left out, so it is brought back. It is not frozen again: that would also
    keep for ever what is garbage by now, or will be (Python 3.12 starts with frozen objects).
    """
    classes: set[type] = set()
    pending: list[type] = [nnx.Variable, nnx.Pytree]
    while pending:
        cls = pending.pop()
        classes.add(cls)
        pending += [other for other in cls.__subclasses__() if other not in classes]
    gc.unfreeze()
    return [value for value in gc.get_objects() if type(value) in classes]


def _held_elsewhere(own: set[int], blocks: Sequence[Any]) -> dict[int, str]:
    """Return which parts of blocks other nnx objects hold, or local variables of callers, and what holds them.

    A list may hold the blocks themselves: it is what becomes a stack.
    """
    whole = {id(block) for block in blocks}
    tied: dict[int, tuple[Any, str]] = {}
    for node in _nnx_objects():
        if not isinstance(node, nnx.Pytree) or id(node) in own:
            continue
        lists: dict[int, set[int]] = {}
        found = [(holder, name, value) for holder, name, value in _held(node, "") if id(value) in own]
        for holder, _, value in found:
            lists.setdefault(id(holder), set()).add(id(value))
        for holder, name, value in found:
            is_list = isinstance(holder, (nnx.List, nnx.Dict)) or kind_of(holder) is not NODE
            if id(value) not in whole or not is_list or not whole <= lists[id(holder)]:
                tied[id(value)] = value, f"{type(node).__name__}{name}"
    for name, value in _reached_by_callers():
        if id(value) in own - whole:
            tied[id(value)] = value, f"the variable {name}"
    return {id(part): words for value, words in tied.values() for part in parts_in(value)}


def _held(value: Any, name: str, above: tuple[int, ...] = ()) -> Iterator[tuple[Any, str, Any]]:
    """Find the Variables and nnx objects that a value holds itself or in containers; each with what holds it."""
    kind = kind_of(value)
    if kind in (VARIABLE, ARRAY, OTHER) or id(value) in above:
        return
    items: Iterable[tuple[Any, Any]] = vars(value).items() if kind is NODE else _graph.children(value, kind)
    for key, child in list(items):
        where = f"{name}[{key!r}]" if kind in (MAPPING, SEQUENCE) else f"{name}.{key}"
        if kind_of(child) in (VARIABLE, NODE):
            yield value, where, child
        else:
            yield from _held(child, where, (*above, id(value)))


def _reached_by_callers() -> Iterator[tuple[str, Any]]:
    """Find the Variables and nnx objects that callers have as local variables, or in ordinary objects among these."""
    frame = sys._getframe(1)  # noqa: SLF001
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] not in _OWN:
            found = dict(frame.f_locals)
            for name, value in list(found.items()):
                if kind_of(value) is OTHER and not isinstance(value, _CODE) and hasattr(value, "__dict__"):
                    found |= {f"{name}.{key}": held for key, held in vars(value).items()}
            for name, value in found.items():
                if kind_of(value) in (VARIABLE, NODE):
                    yield name, value
                else:
                    yield from ((place, held) for _, place, held in _held(value, name))
        frame = frame.f_back
