"""Repeats for a call what the function did while it was traced: from its ``Effects`` and the program's outputs."""

from __future__ import annotations

import array
import collections
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax

from lazymods import _compat
from lazymods._compat import jit as _compat_jit
from lazymods._objects.attributes import Attributes, new_object, new_tuple
from lazymods._objects.tokens import TokenKind, kind_of
from lazymods._objects.traced_state import TracedState, held_by
from lazymods._snapshot import refill
from lazymods.compile.given import Given, put_in_order
from lazymods.compile.records import (
    Change,
    Effects,
    Gone,
    Group,
    Keep,
    Leaf,
    Made,
    New,
    Old,
    Out,
    Passed,
    Tree,
    Value,
)

_SORTING = threading.Lock()  # while one thread sorts a model's attributes, another one would not find all of them
# whose constructors make empty containers of the user's own classes, too: those may want arguments
_CONTAINERS = (collections.defaultdict, collections.OrderedDict, dict, list, set, collections.deque, bytearray)


class EffectsReplay:
    """Does what a record says, to the objects of one call.

    Args:
        record: The record.
        outputs: The program's outputs.
        reach: What the function can reach, as in the trace.
        given: The containers among its arguments.
        leaf: Returns a leaf of the call, by number.
    """

    def __init__(
        self,
        record: Effects,
        outputs: Sequence[Any],
        reach: Sequence[Any],
        given: Given | None,
        leaf: Callable[[int], Any] | None = None,
    ) -> None:
        self._record, self._outputs, self._given, self._leaf = record, outputs, given, leaf
        self._base = None if record.is_plain and not record.orders else TracedState(reach, reads=record.reads)
        self._new = [self._empty(made) for made in record.made]
        for made, thing in zip(record.made, self._new, strict=True):
            self._fill(made, thing)

    def changed(self) -> list[Any]:
        """Return the objects that are about to change."""
        return [self.value(change.old) for change in self._record.changes]

    def change(self) -> None:
        """Bring about the changes."""
        for number, names in self._record.orders:
            held = held_by(self._base.nodes[number])  # type: ignore[union-attr]
            with _SORTING:
                if list(held) != names:
                    refill(held, {name: held[name] for name in names})
                    _compat_jit.Watch.restructured()
        for change in self._record.changes:
            thing = self.value(change.old)
            if change.old.is_variable:
                raw, metadata = change.contents
                items = {k: self.value(v) for k, v in metadata.items()}
                _compat.write_variable(thing, change.cls or type(thing), self.value(raw), items)
                continue
            held = held_by(thing)
            if kind_of(thing) is TokenKind.OBJECT:
                self._change_object(thing, held, change)
            elif isinstance(held, dict):
                before = dict(held)
                state = {k: v for k, v in before.items() if k == _compat.STATE}
                refill(held, state | {k: self.value(v, before) for k, v in change.contents.items()})
                if change.cls is not None:
                    _compat.set_class(thing, change.cls)
            else:
                refill(held, [self.value(v) for v in change.contents])
        if self._record.changes:
            _compat_jit.Watch.restructured()
        for number, contents in self._record.given:
            self._change_given(number, contents)

    def _change_given(self, number: int, contents: Any) -> None:
        thing, before = self._given.things[number], self._given.contents[number]  # type: ignore[union-attr]
        if isinstance(contents, dict):
            refill(thing, {k: self.value(v, before) for k, v in contents.items()})
        else:
            refill(thing, [self.value(v, before) for v in contents])

    def _change_object(self, thing: Any, held: Any, change: Change) -> None:
        for name in [k for k, part in change.contents.items() if isinstance(part, Gone)]:
            held.remove(name) if isinstance(held, Attributes) else held.pop(name)
        held.update({k: self.value(part) for k, part in change.contents.items() if not isinstance(part, Gone)})
        if change.cls is not None:
            _compat.set_class(thing, change.cls)

    def out(self) -> Any:
        """Return what the function returned."""
        return self.value(self._record.out)

    def value(self, part: Any, before: Any = None) -> Any:
        """Return the value that a part stands for."""
        match part:
            case Out(number):
                return self._outputs[number]
            case Value(value):
                return value
            case Leaf(number):
                return self._leaf(number)  # type: ignore[misc]
            case Old() | New() | Passed():
                return self._object(part)
            case Keep(key):
                return before[key]
            case Tree(treedef, parts, orders):
                leaves = [self.value(p) for p in parts]
                return put_in_order(treedef.unflatten(leaves), orders, leaves)
            case Group(TokenKind.METHOD, function, (owner,)):
                return function.__get__(self.value(owner))
            case Group(TokenKind.PARTIAL, cls, (function, args, keywords)):
                return cls(self.value(function), *self.value(args), **self.value(keywords))
            case Group():
                return self._tuple(part)
        raise TypeError(f"no part of a record: {part!r}")

    def _tuple(self, part: Group) -> Any:
        if part.kind is TokenKind.PROXY:
            return part.cls(self.value(part.parts[0]))
        made = new_tuple(part.cls, map(self.value, part.parts))
        if part.attributes is not None:
            object.__setattr__(made, "__dict__", self.value(part.attributes))  # it may be filled later
        return made

    def _object(self, part: Old | New | Passed) -> Any:
        match part:
            case Old(number, is_variable):
                return (self._base.variables if is_variable else self._base.nodes)[number]  # type: ignore[union-attr]
            case New(number):
                return self._new[number]
            case Passed(number):
                return self._given.things[number]  # type: ignore[union-attr]

    def _empty(self, made: Made) -> Any:
        if made.kind is TokenKind.ARRAY:
            return jax.new_ref(self.value(made.contents))
        if made.kind is TokenKind.VARIABLE:
            return _compat.new_variable(made.cls, None, {})  # type: ignore[arg-type]
        if made.kind is TokenKind.NODE:
            thing = new_object(made.cls)
            vars(thing)[_compat.STATE] = _compat_jit.new_state()
            return thing
        if made.kind is TokenKind.OBJECT:
            return new_object(made.cls)
        if issubclass(made.cls, array.array):
            return array.array.__new__(made.cls, *map(self.value, made.given))  # type: ignore[arg-type]
        base: Any = next(cls for cls in _CONTAINERS if issubclass(made.cls, cls))
        thing = base.__new__(made.cls)
        base.__init__(thing, *map(self.value, made.given))
        return thing

    def _fill(self, made: Made, thing: Any) -> None:
        if made.kind is TokenKind.ARRAY:
            return
        if made.kind is TokenKind.VARIABLE:
            raw, metadata = made.contents
            items = {k: self.value(v) for k, v in metadata.items()}
            _compat.write_variable(thing, made.cls, self.value(raw), items)
            return
        held = held_by(thing, made.kind)
        if isinstance(made.contents, dict):
            held.update({k: self.value(v) for k, v in made.contents.items()})
        else:
            refill(held, [self.value(v) for v in made.contents])
        if made.attributes is not None:  # the dict of them may be the container itself
            object.__setattr__(thing, "__dict__", self.value(made.attributes))


def result_of(record: Effects, outputs: Sequence[Any]) -> Any:
    """Return what the function returned, if that was nothing but arrays and static values."""
    if type(record.out) is Out:
        return outputs[record.out.number]
    return EffectsReplay(record, outputs, (), None).out()
