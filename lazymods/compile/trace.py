"""Running a function on the user's own objects while they hold tracers, and putting everything back.

:class:`Body` is a function at one structure as a pure function of flat arrays: ``body(leaves) -> outputs``. While it
runs, the Variables of the model hold the leaves and count as born in the current trace, so that Flax lets them be
written; identities, closures and shared references are simply those of plain Python. When it ends, by whatever
way, every object is as it was. It can be run any number of times, over any tracers.

A lazy layer that is first called in there is initialized at once, outside of the trace, as anywhere. Its parameters
are then replaced by tracers too: constants of the trace, which ``Body.adopted`` lists, to become inputs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax

from lazymods import _compat, _compat_jit, _graph
from lazymods._graph import STATE as LAZY
from lazymods.compile.picture import Picture, contents_of, held_by, refill, same_contents, with_inputs
from lazymods.compile.records import Record, describe
from lazymods.compile.tokens import Kind, kind_of

LOCK = threading.RLock()  # one trace at a time: it runs on the user's own objects


class STAGES:
    """How many times objects were given tracers, or got their values back: odd while some hold tracers."""

    number = 0


class Place:
    """Where an array is that is no Variable's: the attribute of an object, or the item of a dict or list."""

    __slots__ = ("held", "key")

    def __init__(self, held: Any, key: Any) -> None:
        self.held, self.key = held, key


class Body:
    """A function and the objects of one call, as a pure function of flat arrays.

    Args:
        call: ``call(arrays)`` runs the function, with these arrays among its arguments.
        reach: What the function can reach: nnx objects, Variables, containers that hold some.
        inputs: How many leaves are arguments; those come first.
        targets: For every further leaf the Variable or :class:`Place` that holds it.
        impls: By number of a leaf: it is a typed key of this implementation, passed as its data.

    Attributes:
        record: After a run: what else it did, see :class:`~lazymods.compile.records.Record`.
        adopted: After a run: Variables and places that were initialized in it, and their values, constants of the
            trace. They count as further targets.
    """

    def __init__(
        self,
        call: Callable[[Sequence[Any]], Any],
        reach: Sequence[Any],
        inputs: int,
        targets: Sequence[Any],
        impls: dict[int, Any],
    ) -> None:
        self._call, self._reach, self._impls = call, reach, impls
        self.inputs, self.targets = inputs, list(targets)
        self.record: Record | None = None
        self.adopted: list[tuple[Any, Any]] = []

    def __call__(self, leaves: Sequence[Any]) -> list[Any]:
        """Run the function on these leaves; return the arrays that it returned, then those that it wrote."""
        leaves = [_compat_jit.wrap_key(v, self._impls[i]) if i in self._impls else v for i, v in enumerate(leaves)]
        stage = _Stage(self._reach)
        outer, _graph.LOCAL.stage = _graph.LOCAL.stage, stage
        STAGES.number += outer is None
        try:
            stage.set(self.targets, leaves[self.inputs :])
            out = self._call(leaves[: self.inputs])
            stage.finish(out)
        finally:
            _graph.LOCAL.stage = outer
            stage.restore()
            STAGES.number += outer is None
        self.adopted = stage.adopted
        targets = [*self.targets, *(target for target, _ in stage.adopted)]
        self.record, outputs = describe(out, Picture(self._reach), stage, targets)
        return outputs


class _Stage:
    """The user's objects while a body runs on them: what they were, what they hold, what became of them."""

    def __init__(self, reach: Sequence[Any]) -> None:
        self._first = first = Picture(reach)
        self._nodes = list(zip(first.nodes, first.classes, first.contents, strict=True))
        self._lifted: set[int] = set()
        self._births: list[tuple[Any, Any]] = []
        self._trace = _compat_jit.this_trace()
        self._jax_trace = _compat.current_trace()
        self.adopted: list[tuple[Any, Any]] = []
        self.contents: dict[int, Any] = {}  # by node: what it held when the function began, with tracers
        self.raws: dict[int, Any] = {}  # by Variable: its value when the function began
        self.after: Picture | None = None
        self.contents_after: dict[int, Any] = {}
        self.classes_after: dict[int, type] = {}
        self.raws_after: dict[int, tuple[Any, type, dict[str, Any]]] = {}
        self._states = [_variable_state(v) for v in first.variables]

    # ------------------------------------------------------------ before

    def set(self, targets: Sequence[Any], values: Sequence[Any]) -> None:
        """Let Variables and places hold ``values``, and all objects count as born here."""
        for target, value in zip(targets, values, strict=True):
            if isinstance(target, Place):
                target.held[target.key] = with_inputs(target.held[target.key], value)
            else:
                _compat_jit.SET_RAW(target, value)
        self._lift(self._first)

    def _lift(self, picture: Picture) -> None:
        for thing in (*picture.nodes, *picture.variables):
            if id(thing) in self._lifted:
                continue
            kind = kind_of(thing)
            lazy = _is_lazy(thing)  # it stays where it was born: its parameters are made there
            if not lazy:
                self._lifted.add(id(thing))
            if kind in (Kind.NODE, Kind.VARIABLE) and not lazy:
                self._births.append((thing, _compat_jit.trace_of(thing)))
                _compat_jit.set_trace(thing, self._trace)
            if kind is Kind.VARIABLE:
                self.raws[id(thing)] = thing.get_raw_value()
            else:
                self.contents[id(thing)] = contents_of(thing)

    # ------------------------------------------------------------ during

    def adopt(self, thing: Any) -> None:
        """Let a layer or Variable that was just initialized be part of the trace."""
        if _compat.current_trace() is _compat.eval_trace():
            return  # in the middle of the initialization of something larger
        with _compat.at_trace(self._jax_trace):
            self._adopt(thing)

    def _adopt(self, thing: Any) -> None:
        picture = Picture([thing])
        new = [v for v in picture.variables if id(v) not in self._lifted and not _is_lazy(v)]
        own = [n for n in picture.nodes if id(n) not in self._lifted]
        self._nodes += [(n, type(n), contents_of(n)) for n in own]
        self._states += [_variable_state(v) for v in new]
        for variable in new:
            raw = variable.get_raw_value()
            if _is_concrete(raw):
                self.adopted.append((variable, raw))
                _compat_jit.SET_RAW(variable, _compat_jit.as_input(raw))
        for node, key in picture.slots:
            held = held_by(node)
            if id(node) not in self._lifted and _is_concrete(held[key]):
                self.adopted.append((Place(held, key), held[key]))
                held[key] = _compat_jit.as_input(held[key])
        self._lift(picture)

    # ------------------------------------------------------------ after

    def finish(self, out: Any) -> None:
        """Note what everything holds now."""
        self.after = Picture([[node for node, _, _ in self._nodes], [v for v, *_ in self._states], out_nodes(out)])
        for node in self.after.nodes:
            self.contents_after[id(node)] = contents_of(node)
            self.classes_after[id(node)] = type(node)
        for variable in self.after.variables:
            raw, metadata = variable.get_raw_value(), dict(_compat.raw_metadata(variable))
            self.raws_after[id(variable)] = (raw, type(variable), metadata)

    def restore(self) -> None:
        """Put everything back: as it was before, but for layers that were initialized, if the function went well."""
        births = self._births
        for thing, state in births:
            if isinstance(thing, jax.Array) or kind_of(thing) is Kind.VARIABLE:
                _compat_jit.set_trace(thing, state)
        failed = self.after is None
        nodes = self._nodes[: len(self._first.nodes)] if failed else self._nodes
        states = self._states[: len(self._first.variables)] if failed else self._states
        for node, cls, contents in nodes:
            if type(node) is not cls:
                _compat.set_class(node, cls)
            held = held_by(node)
            if not same_contents(held, contents):
                refill(held, contents)
        for thing, state in births:
            if kind_of(thing) is Kind.NODE and _compat.STATE in vars(thing):
                _compat_jit.set_trace(thing, state)
        for variable, cls, raw, metadata, items in states:
            _compat.write_variable(variable, cls, raw, metadata)
            if metadata != items:
                refill(metadata, items)


def _variable_state(variable: Any) -> tuple[Any, type, Any, dict[str, Any], dict[str, Any]]:
    metadata = _compat.raw_metadata(variable)
    return variable, type(variable), variable.get_raw_value(), metadata, dict(metadata)


def _is_concrete(value: Any) -> bool:
    return isinstance(value, jax.Array) and not _compat.is_tracer(value)


def _is_lazy(thing: Any) -> bool:
    if kind_of(thing) is Kind.VARIABLE:
        return _graph.is_placeholder(thing)
    return kind_of(thing) is Kind.NODE and LAZY in vars(thing)


def out_nodes(out: Any) -> list[Any]:
    """Return the nnx objects and Variables in what a function returned."""
    found = jax.tree.leaves(out, is_leaf=is_whole)
    return [v for v in found if is_whole(v)]


def is_whole(value: Any) -> bool:
    """Whether a value is an nnx object or Variable, which a pytree of results holds as it is."""
    return kind_of(value) in (Kind.NODE, Kind.VARIABLE)
