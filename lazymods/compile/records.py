"""What a function did besides computing arrays, so that a call of the compiled program can do it again.

A :class:`Effects` is written by a trace. It holds no array, no model and no tracer: objects that were there before
stand in it by their number in a :class:`~lazymods._objects.traced_state.TracedState` of the call, arrays by their
number among the program's outputs, objects that the function made by how to make them.
"""

from __future__ import annotations

import array
import collections
import dataclasses
import operator
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import jax

from lazymods import _compat
from lazymods._compat import jit as _compat_jit
from lazymods._initial.pending import PendingInit
from lazymods._objects.attributes import has_hidden_state
from lazymods._objects.copies import Copies, items_of, object_contents
from lazymods._objects.reached import parts_of
from lazymods._objects.tokens import TokenKind, kind_of, token
from lazymods._objects.traced_state import Reads, TracedState, contents_of, held_by
from lazymods.compile.given import Given, Orders, orders_of
from lazymods.compile.statics import refuse_result, refuse_unrepeatable


@dataclasses.dataclass(eq=False)
class Out:
    """An output of the program: its number, and how often a record names it."""

    number: int
    uses: int = 0


@dataclasses.dataclass(frozen=True)
class Old:
    """A node or Variable that was there before the call."""

    number: int
    is_variable: bool


@dataclasses.dataclass(frozen=True)
class New:
    """The object of that number among those that the function made."""

    number: int


@dataclasses.dataclass(frozen=True)
class Leaf:
    """The leaf of the call of that number: a mutable array, which no program can return."""

    number: int


@dataclasses.dataclass(frozen=True)
class Passed:
    """The container of that number among the arguments."""

    number: int


@dataclasses.dataclass(frozen=True)
class Keep:
    """What is there already, under this key."""

    key: Any


@dataclasses.dataclass(frozen=True)
class Gone:
    """Nothing: the attribute is deleted."""


@dataclasses.dataclass(frozen=True)
class Value:
    """A static value."""

    value: Any


@dataclasses.dataclass(frozen=True)
class Group:
    """A tuple, bound method or partial function of other parts.

    Attributes:
        attributes: Those that a tuple of the user's own class has besides its items.
    """

    kind: TokenKind
    cls: Any
    parts: tuple[Any, ...]
    attributes: Any = None


@dataclasses.dataclass(frozen=True)
class Tree:
    """A pytree of other parts, and the order of the keys of its dicts."""

    treedef: Any
    parts: tuple[Any, ...]
    orders: Orders = ()


@dataclasses.dataclass
class Made:
    """An object that the function made: its class, and what to put in it; of a Variable its value and metadata.

    Attributes:
        given: Of a container, what its base class takes to make an empty one: the length of a queue.
        attributes: The attributes that a container of the user's own class has besides its items.
    """

    kind: TokenKind
    cls: type
    contents: Any = None
    given: tuple[Any, ...] = ()
    attributes: Any = None


@dataclasses.dataclass
class Change:
    """What became of a node or Variable that was there before.

    Attributes:
        old: Which one.
        cls: Its class; None for a node's if it stays.
        contents: What it holds; of an object of no container's class only what is other than before.
    """

    old: Old
    cls: type | None
    contents: Any


@dataclasses.dataclass(eq=False)
class Effects:
    """What a function did at one structure.

    Attributes:
        out: What it returned.
        writes: ``(target, output)``: the output that is the new value of a Variable or place, which is named by its
            number among the body's targets.
        changes: What became of other objects; usually nothing.
        made: Objects that the function made.
        outputs: The program's outputs.
        reads: What the function had read of objects: what numbers stand for depends on it.
        orders: The attributes of nnx objects, by number, that are in another order than before, as transforms of NNX
            leave them. A call that is like the last one need not look: they are so by then.
        given: What containers among the arguments, by number, hold afterwards.
        written_anew: ``(target, part)``: the new value of a Variable or place of which more than the value changes.
        stays: What ``placement.stays_of`` found for a path of a function that decides.
        is_plain: Whether the function only wrote values, and returned nothing but arrays and static values.
        passes_on: Whether a new value is one of the program's inputs, unchanged: two Variables then hold one array. Or
            of another size than the one before: a guard may rely on that.
    """

    out: Any
    writes: list[tuple[int, Out]]
    changes: list[Change]
    made: list[Made]
    outputs: list[Out]
    reads: Reads | None = None
    orders: list[tuple[int, list[str]]] = dataclasses.field(default_factory=list)
    given: list[tuple[int, Any]] = dataclasses.field(default_factory=list)
    written_anew: list[tuple[int, Any]] = dataclasses.field(default_factory=list)
    stays: Sequence[Any] = ()

    def __post_init__(self) -> None:
        """Find what can be repeated in a shorter way."""
        self.passes_on: bool = False
        self.is_plain: bool = not (self.changes or self.made or self.given or has_objects(self.out))

    @property
    def only_sorts(self) -> bool:
        """Whether attributes of nnx objects are in another order, and nothing else but values has changed."""
        return bool(self.orders) and not (self.changes or self.made or self.given)

    @property
    def returns_arrays(self) -> bool:
        """Whether what the function returned is made of nothing but arrays and static values."""
        return not has_objects(self.out)

    def find_unchanged(
        self, outputs: Sequence[Any], inputs: Sequence[Any], places: Mapping[int, int | None]
    ) -> set[int]:
        """Return the writes, by number, that give a target the input that it had; note whether others pass one on.

        Args:
            outputs: The outputs of the trace.
            inputs: Its inputs.
            places: Of a target, by number, the number of its input.
        """
        given = set(map(id, inputs))
        seen: set[int] = set()
        for _, out in self.writes:  # what a path writes twice is one array
            (given if id(outputs[out.number]) in seen else seen).add(id(outputs[out.number]))
        found = {}
        for number, (target, out) in enumerate(self.writes):
            place, array = places.get(target), outputs[out.number]
            before = None if place is None else inputs[place]
            found[number] = (
                array is before,
                id(array) in given or (before is not None and _size(array) != _size(before)),
            )
        self.passes_on = any(not same and passed_on for same, passed_on in found.values())
        return {number for number, (same, _) in found.items() if same}

    def drop_writes(self, unchanged: set[int]) -> list[int]:
        """Forget writes, by number, and the outputs that nothing else names; return the numbers of those that stay."""
        for number in unchanged:
            self.writes[number][1].uses -= 1
        self.writes = [w for i, w in enumerate(self.writes) if i not in unchanged]
        kept = [i for i, out in enumerate(self.outputs) if out.uses]
        self.outputs = [self.outputs[i] for i in kept]
        for number, out in enumerate(self.outputs):
            out.number = number
        return kept


def _size(value: Any) -> Any:
    """Return how many elements an array, a tracer or a variable of a jaxpr has."""
    return getattr(getattr(value, "aval", value), "size", 1)


def describe(
    out: Any,
    base: TracedState,
    copies: Copies,
    targets: Mapping[int, Any],
    reads: Reads | None,
    given: Given,
    leaves: Sequence[Any] = (),
    fixed: Collection[int] = (),
) -> tuple[Effects, list[Any]]:
    """Write a record of a run.

    Args:
        out: What the function returned.
        base: The objects as they are before each call of the program.
        copies: Their copies, on which the function has run.
        targets: By number, what leaves of the program are the values of.
        reads: What ``base`` leaves out.
        given: The containers among its arguments, as they were when it began.
        leaves: The leaves with which it has run.
        fixed: The ids of lists, dicts and the like that are constants of the program.

    Returns:
        The record, and the program's outputs: tracers, or arrays that do not depend on any input.

    Raises:
        LazyError: If the function returned or stored what no further call could make again, or has written to an
            argument that no further call could write to.
    """
    return _Writer(base, copies, given, leaves, fixed).write(out, targets, reads)


class _Writer:
    def __init__(
        self, base: TracedState, copies: Copies, given: Given, leaves: Sequence[Any], fixed: Collection[int]
    ) -> None:
        self._base, self._copies, self._given, self._fixed = base, copies, given, fixed
        self._passed = {id(thing): number for number, thing in enumerate(given.things)}
        self._references = {id(leaf): number for number, leaf in enumerate(leaves) if _compat_jit.is_reference(leaf)}
        self._arrays: list[Any] = []
        self._outputs: dict[int, Out] = {}
        self._made: list[Made] = []
        self._new: dict[int, int] = {}
        self._orders: list[tuple[int, list[str]]] = []
        self._anew: list[tuple[int, Any]] = []

    def write(self, out: Any, targets: Mapping[int, Any], reads: Reads | None) -> tuple[Effects, list[Any]]:
        described = self._tree(out)
        numbers = {id(t): i for i, t in targets.items()}
        places = {t.mark: i for i, t in targets.items() if hasattr(t, "mark")}
        writes: list[tuple[int, Out]] = []
        changes: list[Change] = []
        for number, variable in enumerate(self._base.variables):
            self._variable(number, variable, numbers.get(id(variable)), writes, changes)
        for number, node in enumerate(self._base.nodes):
            self._node(number, node, places, writes, changes)
        given = [(number, self._container(number)) for number in self._given.changed()]
        outputs = list(self._outputs.values())
        record = Effects(described, writes, changes, self._made, outputs, reads, self._orders, given, self._anew)
        return record, self._arrays

    def _container(self, number: int) -> Any:
        """Describe what a container among the arguments holds now."""
        before, after = self._given.contents[number], contents_of(self._given.things[number])
        if isinstance(after, dict):
            return {k: Keep(k) if k in before and v is before[k] else self._part(v) for k, v in after.items()}
        known = {id(v): Keep(n) for n, v in enumerate(before)}
        return [known.get(id(v)) or self._part(v) for v in after]

    def _variable(self, number: int, variable: Any, target: int | None, writes: Any, changes: Any) -> None:
        copy, (begun, items, metadata_before) = self._copies.of(variable), self._copies.begun[id(variable)]
        raw, cls, metadata = copy.get_raw_value(), type(copy), _compat.raw_metadata(copy)
        same_kind = cls is type(variable) and _same_metadata(metadata, metadata_before)
        if same_kind and raw is begun and (items is None or _same_tree(items_of(raw), items)):
            return
        if same_kind and target is not None and self._can_be_output(raw):
            writes.append((target, self._own_output(raw)))
            return
        contents = (self._tree(raw), {k: self._part(v) for k, v in metadata.items()})
        if target is not None:
            self._anew.append((target, contents[0]))
        changes.append(Change(Old(number, True), cls, contents))

    def _node(self, number: int, node: Any, places: Any, writes: Any, changes: Any) -> None:
        copy, kind = self._copies.of(node), kind_of(node)
        after, begun = map(self._copies.by_original, (contents_of(copy), self._copies.begun[id(node)]))
        if not isinstance(after, dict):
            if not _same_items(after, begun):
                parts = [self._part(v) for v in after]
                self._anew += [(places[id(node), i], p) for i, p in enumerate(parts) if (id(node), i) in places]
                changes.append(Change(Old(number, False), None, parts))
            return
        same_class = type(copy) is type(node)
        names = [k for k in after if k != _compat.STATE]
        moved = [k for k in names if k not in begun or not _same_value(after[k], begun[k])]
        ordered = kind is TokenKind.OBJECT or names == [k for k in begun if k != _compat.STATE]
        if kind is TokenKind.NODE and not ordered and sorted(names) == sorted(k for k in begun if k != _compat.STATE):
            self._orders.append((number, list(after)))
            ordered = True
        if same_class and len(after) == len(begun) and ordered and all((id(node), k) in places for k in moved):
            if all(self._can_be_output(after[k]) for k in moved):
                writes += [(places[id(node), k], self._own_output(after[k])) for k in moved]
                return
        if kind is TokenKind.OBJECT:
            contents: dict[Any, Any] = {k: self._part(after[k]) for k in moved}
            contents |= {k: Gone() for k in begun if k not in after}
        else:
            kept = {k: Keep(k) for k in after if k in begun and k not in moved}
            contents = {k: kept.get(k) or self._part(v) for k, v in after.items() if k != _compat.STATE}
        if same_class and ordered and not moved and len(after) == len(begun):
            return
        self._anew += [(places[id(node), k], contents[k]) for k in moved if (id(node), k) in places]
        changes.append(Change(Old(number, False), None if same_class else type(copy), contents))

    # ------------------------------------------------------------ values

    def _can_be_output(self, value: Any) -> bool:
        return kind_of(value) is TokenKind.ARRAY and not _compat_jit.is_reference(value)

    def _output(self, array: Any) -> Out | Leaf | New:
        if id(array) in self._references:
            return Leaf(self._references[id(array)])
        if isinstance(array, jax.Ref):  # the function has made it: each call makes another of what it holds at the end
            if id(array) not in self._new:
                self._new[id(array)] = len(self._made)
                self._made.append(Made(TokenKind.ARRAY, jax.Ref, self._output(array[...])))
            return New(self._new[id(array)])
        if id(array) not in self._outputs:
            self._outputs[id(array)] = Out(len(self._arrays))
            self._arrays.append(array)
        self._outputs[id(array)].uses += 1
        return self._outputs[id(array)]

    def _own_output(self, array: Any) -> Out:
        """Return an output that nothing else is: a Variable's new value can be donated by the next call."""
        out = Out(len(self._arrays), 1)
        self._arrays.append(array)
        self._outputs[-len(self._arrays)] = out  # an id is never negative
        return out

    def _tree(self, value: Any) -> Any:
        """Describe a pytree of results or the value of a Variable."""
        if kind_of(value) is TokenKind.ARRAY:
            return self._output(value)
        if kind_of(value) is TokenKind.ATOM and value is not None and not _has_keys(value):
            return self._part(value)
        if self._is_old(value):
            return self._part(value)
        leaves, treedef = jax.tree.flatten(value, is_leaf=self._is_old)
        orders = orders_of(value, self._is_old)
        return Tree(treedef, tuple(self._part(v) for v in leaves), orders)

    def _is_old(self, value: Any) -> bool:
        """Whether a part of a result is no container that the function made."""
        kind = kind_of(value)
        if kind in (TokenKind.DICT, TokenKind.LIST):
            known = id(value) in self._passed or id(value) in self._fixed
            return known or self._base.number(self._copies.original(value)) is not None
        return kind in (TokenKind.NODE, TokenKind.VARIABLE)

    def _part(self, value: Any) -> Any:
        kind = kind_of(value)
        if kind is TokenKind.ATOM:
            original = self._copies.original(value)
            return Value(self._checked(value) if original is value else original)
        if kind is TokenKind.ARRAY:
            return self._output(value)
        if kind is TokenKind.TUPLE:
            return self._tuple(value)
        if kind is TokenKind.METHOD:
            return Group(kind, self._copies.original(value.__func__), (self._part(value.__self__),))
        if kind in (TokenKind.PARTIAL, TokenKind.PROXY):
            return Group(kind, type(value), tuple(map(self._part, parts_of(value, kind))))
        if id(value) in self._passed:
            return Passed(self._passed[id(value)])
        if id(value) in self._fixed:
            return Value(value)
        number = self._base.number(self._copies.original(value))
        if number is not None:
            return Old(number, kind is TokenKind.VARIABLE)
        if kind is TokenKind.OBJECT and has_hidden_state(type(value)):
            return Value(self._checked(value))  # nobody but its class could make another
        return self._object(value, kind)

    def _object(self, value: Any, kind: TokenKind) -> New:
        """Describe an object that the function made."""
        if id(value) not in self._new:
            self._new[id(value)] = len(self._made)
            made = Made(kind, type(value), given=tuple(map(self._part, _given_to(value))))
            self._made.append(made)
            made.contents = self._contents(value, kind)
            if kind > TokenKind.OBJECT and type(value).__dictoffset__:
                made.attributes = self._part(vars(value))
        return New(self._new[id(value)])

    def _tuple(self, value: Any) -> Group:
        attributes = self._part(vars(value)) if type(value).__dictoffset__ and vars(value) else None
        return Group(TokenKind.TUPLE, type(value), tuple(map(self._part, value)), attributes)

    def _checked(self, value: Any) -> Any:
        """Return a static value that every call can give again; refuse another one."""
        refuse_unrepeatable(value)
        if isinstance(value, weakref.ReferenceType):
            thing = value()
            if thing is None or self._copies.original(thing) is not thing:
                raise refuse_result(value, "it refers to a copy that was made for the trace")
        return value

    def _contents(self, value: Any, kind: TokenKind) -> Any:
        if kind is TokenKind.VARIABLE:
            metadata = _compat.raw_metadata(value)
            return self._tree(value.get_raw_value()), {k: self._part(v) for k, v in metadata.items()}
        held = object_contents(value) if kind is TokenKind.OBJECT else held_by(value, kind)
        if isinstance(held, dict):
            return {k: self._part(v) for k, v in held.items() if k != _compat.STATE}
        return [self._part(v) for v in held]


def _given_to(value: Any) -> tuple[Any, ...]:
    """Return what makes an empty container like this one, besides its class."""
    if isinstance(value, collections.deque):
        return (), value.maxlen
    if isinstance(value, array.array):
        return (value.typecode,)
    if isinstance(value, collections.defaultdict):
        return (value.default_factory,)
    return ()


def _same_value(a: Any, b: Any) -> bool:
    return a is b or (kind_of(a) is TokenKind.ATOM and kind_of(b) is TokenKind.ATOM and token(a) == token(b))


def _same_tree(a: Any, b: Any) -> bool:
    (leaves, treedef), (leaves_before, treedef_before) = a, b
    return treedef == treedef_before and all(map(operator.is_, leaves, leaves_before))


def _same_items(a: Any, b: Any) -> bool:
    if isinstance(a, set):
        return set(map(token, a)) == set(map(token, b))
    return len(a) == len(b) and all(map(_same_value, a, b))


def _same_metadata(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(_same_value(v, b[k]) for k, v in a.items())


def _has_keys(value: Any) -> bool:
    """Whether a value is the pending init of a placeholder that was made under a trace: its keys are arrays."""
    return type(value) is PendingInit and not value.is_static


def has_objects(part: Any) -> bool:
    """Whether a part of a record stands for an object, a container or a mutable array, or holds one that does."""
    if isinstance(part, (Tree, Group)):
        return any(map(has_objects, part.parts))
    return isinstance(part, (Old, New, Passed, Leaf))


def arrays_of(part: Any) -> Iterator[Out]:
    """Return the outputs that a part of a record is made of, in order."""
    if isinstance(part, Out):
        yield part
    elif isinstance(part, (Tree, Group)):
        for inner in part.parts:
            yield from arrays_of(inner)
