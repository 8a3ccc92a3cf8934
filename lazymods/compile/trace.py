"""A function at one structure as a pure function of flat arrays.

A :class:`Body` runs the function on copies of all that it reaches (:mod:`lazymods._objects.copies`), in which the
leaves are. So the user's own objects are never touched: other threads may use them, and what fails changes nothing.
What the function did to the copies is what the program will do to the originals (:mod:`lazymods.compile.records`).

A lazy layer whose copy is called for the first time is the exception: the original is initialized at once, outside of
the trace, as anywhere. Its parameters become inputs of the program. Where that can't be, since a transform has a copy
of its own, the trace ends with :class:`NotSizedError`, and all layers are sized before the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from lazymods import _compat, _graph
from lazymods._compat import jit as _compat_jit
from lazymods._compat import subclasses as _compat_subclasses
from lazymods._compat import tracing as _compat_tracing
from lazymods._layer import contexts, first_call, lifecycle
from lazymods._objects.copies import Copies
from lazymods._objects.tokens import TokenKind, kind_of
from lazymods._objects.traced_state import Reads, TracedState, held_by, put_item, with_inputs
from lazymods.compile.given import Given
from lazymods.compile.outside import leaving_alone
from lazymods.compile.records import Effects, describe

_compat_subclasses.let_tracers_be_arrays()


class Place:
    """Where an array is that is no Variable's: the attribute of an object, or the item of a dict or list."""

    __slots__ = ("key", "node")

    def __init__(self, node: Any, key: Any) -> None:
        self.node: Any = node
        self.key: Any = key

    @property
    def held(self) -> Any:
        """The dict or list in which it is."""
        return held_by(self.node)

    @property
    def mark(self) -> tuple[int, Any]:
        """What tells it from other places."""
        return id(self.node), self.key


class NotSizedError(Exception):
    """A lazy layer is met that can't be initialized in the middle of the trace (private)."""


class TraceStage:
    """What a trace does with lazy layers.

    Args:
        copies: The copies that it runs on.

    Attributes:
        adopted: Variables and places that were initialized, and their values, constants of the trace.
    """

    def __init__(self, copies: Copies) -> None:
        self._copies = copies
        self._trace = _compat.current_trace()
        self.adopted: list[tuple[Any, Any]] = []

    def owns(self, layer: Any) -> bool:
        """Whether a layer is one of the copies."""
        return self._copies.original(layer) is not layer

    def initialize(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], is_carried: bool) -> bool:
        """Initialize the original of a layer, and let the layer be a copy of that.

        Args:
            layer: The layer.
            args: The arguments of its first call.
            kwargs: Its keyword arguments.
            is_carried: Whether it is the copy that a transform made, and will carry out.

        Returns:
            False if the layer has no original: the function has made it.

        Raises:
            NotSizedError: If the trace can't take new inputs, or a transform has a copy of the copy.
        """
        original = self._copies.original(layer)
        if is_carried or (original is not layer and isinstance(self._trace, _compat_tracing.Recorder)):
            raise NotSizedError
        if original is layer:
            return False
        args, kwargs = first_call.as_specs((args, kwargs))
        told = _metadata_given(original, layer)
        _graph.LOCAL.stage = None
        try:
            with _compat.at_trace(_compat.eval_trace()), lifecycle.LOCK:
                if _graph.is_lazy_node(original):
                    first_call.finish(original, args, kwargs, keep_class=contexts.is_carried(original))
        finally:
            _graph.LOCAL.stage = self
        with _compat.at_trace(self._trace):
            self._adopt(TracedState([original]))
        for path, metadata, left in told:
            variable = _graph.at(layer, path)
            variable.set_metadata(variable.get_metadata() | metadata)
            for name in left:
                variable.del_metadata(name)
        return True

    def _adopt(self, traced_state: TracedState) -> None:
        for variable in self._copies.renew(traced_state):
            raw = variable.get_raw_value()
            if isinstance(raw, jax.Array):
                self.adopted.append((variable, raw))
                self._copies.give(variable, None, _compat_jit.as_input(raw))
        for node, key in traced_state.slots:
            value = held_by(node)[key]
            if self._copies.is_renewed(node) and isinstance(value, jax.Array):
                self.adopted.append((Place(node, key), value))
                self._copies.give(node, key, _compat_jit.as_input(value))
        self._copies.begin(traced_state, renewed=True)


def _metadata_given(original: Any, layer: Any) -> list[tuple[_graph.Path, dict[str, Any], list[str]]]:
    """Return what metadata the placeholders of a layer have got since it was copied, and have no more, by path."""
    found = []
    for entry in _graph.entries(original):
        copy = _graph.at(layer, entry.path)
        if _graph.is_placeholder(entry.value) and _graph.is_placeholder(copy):
            before, now = entry.value.get_metadata(), copy.get_metadata()
            given = {name: value for name, value in now.items() if name not in before or before[name] is not value}
            if given or len(now) != len(before):
                found.append((entry.path, given, [name for name in before if name not in now]))
    return found


class Body:
    """A function and the objects of one call, as a pure function of flat arrays.

    Args:
        call: ``call(copies, arrays)`` runs the function on copies, with these arrays among its arguments; returns what
            it returned, and the containers among its arguments as they were before.
        reach: What the function can reach: nnx objects, Variables, containers that hold some.
        inputs: How many leaves are arguments; those come first.
        targets: For every further leaf the Variable or :class:`Place` that holds it.
        impls: By number of a leaf: it is a typed key of this implementation, passed as its data.
        reads: Where it is noted what the function reads of objects; None: nowhere.
        attributes: Attributes of modules and classes, by which the function finds some of what it reaches.
        constants: Names and values of what the function reaches and can't write to.

    Attributes:
        own_trace: After a run: a weak reference to its trace. (jax takes what has a ``trace`` for jitted.)
        record: After a run: what else it did, see :class:`~lazymods.compile.records.Effects`.
        kept: After a run: the numbers of the targets that it can have read; others count for nothing.
        adopted: After a run: Variables and places that were initialized in it, and their values, constants of the
            trace. They count as further targets.
        has_read_more: After a run: whether it has read more of objects than any run before.
    """

    def __init__(
        self,
        call: Callable[[Copies, Sequence[Any]], tuple[Any, Given]],
        reach: Sequence[Any],
        inputs: int,
        targets: Sequence[Any],
        impls: dict[int, Any],
        reads: Reads | None = None,
        attributes: Sequence[tuple[Any, str]] = (),
        constants: Sequence[tuple[str, Any]] = (),
    ) -> None:
        self._call, self._reach, self._impls, self._constants = call, reach, impls, constants
        self.own_trace: Any = None
        self._reads, self._attributes = reads, attributes
        self.inputs: int = inputs
        self.targets: list[Any] = list(targets)
        self.record: Effects | None = None
        self.kept: list[int] = []
        self.adopted: list[tuple[Any, Any]] = []
        self.has_read_more: bool = False

    def count_all_as_read(self) -> None:
        """From now on let all of an object count as read."""
        if self._reads is not None:
            self._reads.widen()

    def __call__(self, leaves: Sequence[Any]) -> list[Any]:
        """Run the function on these leaves; return the arrays that it returned, then those that it wrote."""
        leaves = [_compat_jit.wrap_key(v, self._impls[i]) if i in self._impls else v for i, v in enumerate(leaves)]
        self.own_trace = _compat.weak(_compat.current_trace())
        traced_state = TracedState(self._reach)
        copies = Copies(traced_state, self._reads)
        for target, value in zip(self.targets, leaves[self.inputs :], strict=True):
            if isinstance(target, Place):
                copies.give(target.node, target.key, with_inputs(target.held[target.key], value))
            else:
                copies.give(target, None, value)
        copies.begin(traced_state)
        for owner, name in self._attributes:
            copies.swap(owner, name)
        stage, outer = TraceStage(copies), _graph.LOCAL.stage
        _graph.LOCAL.stage = stage
        try:
            with leaving_alone(self._constants, traced_state.nodes) as fixed, copies.swapped():
                out, given = self._call(copies, leaves[: self.inputs])
        finally:
            _graph.LOCAL.stage = outer
        self.adopted = stage.adopted
        reads = None
        if self._reads is not None:
            version, reads = self._reads.version, self._reads.settle()
            self.has_read_more = reads.version != version
        base = traced_state if reads is None and not self.adopted else TracedState(self._reach, reads=reads)
        known = {*map(id, base.variables), *((id(node), key) for node, key in base.slots)}
        self.kept = [n for n, t in enumerate(self.targets) if mark_of(t) in known]
        targets = {n: self.targets[n] for n in self.kept}
        targets |= enumerate((target for target, _ in self.adopted), len(self.targets))
        self.record, outputs = describe(out, base, copies, targets, reads, given, leaves, fixed)
        return outputs


def mark_of(target: Any) -> Any:
    """Return what tells a target from others: hashable."""
    return target.mark if isinstance(target, Place) else id(target)


def is_beside(target: Any) -> bool:
    """Whether a target is a place in a plain object or container, which is no part of a model."""
    return isinstance(target, Place) and kind_of(target.node) is not TokenKind.NODE


def write(target: Any, value: Any) -> None:
    """Let a Variable or place hold a value."""
    if isinstance(target, Place):
        put_item(target.held, target.key, value)
    else:
        _compat_jit.SET_RAW(target, value)
