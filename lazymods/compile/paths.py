"""Python control flow on the values of arrays: one compiled program from each decision to the next.

A :class:`Paths` runs a function whose Python asks for values (``if``, ``while``, ``bool()``, ``int()``, ``float()``,
``.item()``). The first call records it (:mod:`lazymods._recording.graph`). Where Python asks, what was recorded so far
becomes a program, which computes the value asked for and all others that are still alive; it is run, and recording
goes on with its results. The programs form a tree: a call runs from the root, at each decision takes the branch of the
value found, and runs no Python of the function at all. A value that has no branch yet makes the function run once more:
up to there its operations are skipped, since their results are known, and what follows becomes the new branch.

Invariants: nothing is computed twice in a call; a branch is added when the function has returned, or not at all; what
the tree holds are the constants of the function, as ``jax.jit`` holds them, and no other array.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from lazymods import _compat
from lazymods._compat import tracing
from lazymods._errors import LazyError, Problem
from lazymods._recording.graph import Cell, Graph, Node, compiled, needed
from lazymods._recording.kinds import kind_of
from lazymods.compile.outside import refuse_leaks
from lazymods.compile.program import getter

Body = Callable[[list[Any]], tuple[Sequence[Any], Any]]


class NoPathError(Exception):
    """A mutable array is made, which no segment could pass on to the next: the call is for plain Python (private)."""


class _TraceBranch:
    """A program from one decision to the next, or to the end.

    Attributes:
        program: What it runs; None if all values are known already.
        take: Returns the operands of the program of the values of a call.
        constants: Operands that are the same in every call.
        gives: Which cells of the recording its results are.
        asked: Where the value is that is decided on; None at the end.
        convert: What Python made of that value.
        branches: What follows each of its values.
        fixed: At the end, results that are the same in every call; they follow the values.
        results: At the end, returns the results of the function.
        rest: At the end, what the function returned besides.
    """

    __slots__ = (
        "asked",
        "branches",
        "constants",
        "convert",
        "fixed",
        "gives",
        "program",
        "rest",
        "results",
        "take",
    )

    def __init__(self) -> None:
        self.program: Any = None
        self.take: Callable[[list[Any]], Sequence[Any]] = getter(())
        self.constants: tuple[Any, ...] = ()
        self.gives: tuple[int, ...] = ()
        self.asked: int | None = None
        self.convert: Callable[[Any], Any] = _raw
        self.branches: dict[Any, _TraceBranch] = {}
        self.fixed: list[Any] = []
        self.results: Callable[[list[Any]], Sequence[Any]] = getter(())
        self.rest: Any = None

    def run(self, values: list[Any]) -> None:
        """Run the program; add its constants, then what it gives, to the values of the call."""
        if self.program is not None:
            values += self.constants
            values += self.program([*self.take(values)], ())

    def finish(self, values: list[Any]) -> list[Any]:
        """Return the results of the function."""
        return [*self.results(values + self.fixed if self.fixed else values)]

    def decide(self, values: list[Any]) -> tuple[Any, Any]:
        """Return what Python gets of the value asked for, be it an error, and what tells it from others."""
        assert self.asked is not None
        try:
            value = self.convert(values[self.asked])
        except (ValueError, OverflowError) as error:  # int() of nan or infinity, which the function may catch
            return error.with_traceback(None), repr(error)
        return value, (np.asarray(value).tobytes() if self.convert is _raw else value)


def _raw(value: Any) -> Any:
    return value


_ARRAY = tracing.array_type()
_CONVERT = {"bool": bool, "int": int}  # how Python asks for a part of a value; all else is given the whole


class Paths:
    """A function of arrays that may decide on their values, as a tree of compiled programs.

    Args:
        body: Gets a list of values and returns a list of arrays, and anything else besides, which is kept and returned
            again whenever a call takes the same path; it must not hold values of the recording. It must be repeatable:
            the same operations, and the same questions, for the same answers.
        max_paths: How many paths from start to end there may be.
        name: What errors call the function.
        check: Called with the arrays that a new path has for constants; what it raises ends the call.

    One ``Paths`` serves arguments of the same number, shapes, dtypes and weak types; this is not checked on a call.

    Example:
        >>> import jax.numpy as jnp
        >>> from lazymods.compile.paths import Paths
        >>> def body(leaves):
        ...     (x,) = leaves
        ...     return ([x * 2] if x.sum() > 0 else [x - 1]), None
        >>> paths = Paths(body, max_paths=16)
        >>> paths([jnp.ones(2)])
        ([Array([2., 2.], dtype=float32)], None)
        >>> paths([-jnp.ones(2)])
        ([Array([-2., -2.], dtype=float32)], None)
        >>> len(paths)
        2
    """

    def __init__(
        self,
        body: Body,
        max_paths: int = 16,
        name: str = "the function",
        check: Callable[[Sequence[Any]], None] | None = None,
    ) -> None:
        self._body, self._check = body, check
        self._max_paths = max_paths
        self._name = name
        self._root: _TraceBranch | None = None
        self._count = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Return how many paths are known."""
        return self._count

    def __call__(self, leaves: Sequence[Any]) -> tuple[list[Any], Any]:
        """Run the function.

        Args:
            leaves: The arrays.

        Returns:
            The arrays that the function returned, and what it returned besides.

        Raises:
            LazyError: A path that is not known yet would be one more than ``max_paths``; nothing has changed.
        """
        # a number among the leaves is an input as well: as what it is in an operation, an array of weak type
        values = [v if type(v) is _ARRAY else tracing.executed(v) for v in leaves]
        trail: list[tuple[_TraceBranch, Any, Any]] = []
        segment = self._root
        while segment is not None:
            segment.run(values)
            if segment.asked is None:
                return segment.finish(values), segment.rest
            answer, key = segment.decide(values)
            trail.append((segment, answer, key))
            segment = segment.branches.get(key)
        return self._grow(values, len(leaves), trail)

    def _grow(
        self, values: list[Any], arguments: int, trail: list[tuple[_TraceBranch, Any, Any]]
    ) -> tuple[list[Any], Any]:
        if self._count >= self._max_paths:
            raise self._too_many()
        known = len(trail)
        recording = _Recording(values, arguments, trail, self._name)
        results, rest = recording.run(self._body, self._check)
        trail, last, trace = recording.trail, recording.end, recording.weak_trace()
        del recording
        refuse_leaks(trace, self._name, (trail, last), self._body)
        with self._lock:
            for segment, _, key in reversed(trail[known:]):
                segment.branches[key] = last
                last = segment
            if known:
                segment, _, key = trail[known - 1]
                grown = segment.branches.setdefault(key, last) is last
            else:
                grown = self._root is None
                self._root = self._root or last
            self._count += grown
        return results, rest

    def _too_many(self) -> LazyError:
        got = f"values that would make path {self._max_paths + 1} of its Python code"
        needed = (
            f"at most max_paths={self._max_paths} paths: each is compiled by itself, and more of them mostly means "
            "that Python decides on a number or loops until a value is reached"
        )
        write = (
            "jax.lax.cond(pred, then, otherwise, x)  # a loop: jax.lax.while_loop or jax.lax.fori_loop; "
            "or more paths: lm.jit(f, max_paths=...)"
        )
        return LazyError(Problem(self._name, got, needed, write))


class _Recording:
    """One run of the function's Python: along a known path first, then along a new one."""

    def __init__(
        self, values: list[Any], arguments: int, trail: list[tuple[_TraceBranch, Any, Any]], name: str
    ) -> None:
        self.values = values  # of the arguments, then of what the segments gave
        self.trail = list(trail)
        self.end = _TraceBranch()
        self._arguments = arguments
        self._known = len(trail)
        self._name = name
        self._asked = 0
        self._cells: list[Cell] = []  # all results of operations, by their number
        self._numbers: dict[Cell, int] = {}
        self._places: dict[Cell, int] = {}  # where in ``values`` the value of a cell is
        self._answers: dict[tuple[Cell, Any], Any] = {}
        self._pending: list[Node] = []
        self._constants: list[Any] = []
        self._trace = tracing.Recorder(self)

    def weak_trace(self) -> Any:
        """Return a weak reference to the trace in which it records."""
        return _compat.weak(self._trace)

    def run(self, body: Body, check: Callable[[Sequence[Any]], None] | None) -> tuple[list[Any], Any]:
        """Run the function, let its constants be checked, and finish the last segment."""
        arguments = []
        for i, value in enumerate(self.values[: self._arguments]):
            cell = Cell(tracing.aval_of(value), value=value)
            self._places[cell] = i
            arguments.append(self._hold(cell))
        try:
            with tracing.at(self._trace):
                results, rest = body(arguments)
            del arguments
            cells = [r.cell if self._is_own(r) else None for r in results]
            if check is not None:
                check([*self._constants, *(r for r, c in zip(results, cells, strict=True) if c is None)])
            self._segment(self.end, [c for c in cells if c is not None])
            places = [self._end(result, cell) for result, cell in zip(results, cells, strict=True)]
        finally:
            self._trace.invalidate()
        self.end.results, self.end.rest = getter(places), rest
        return self.end.finish(self.values), rest

    def _end(self, result: Any, cell: Cell | None) -> int:
        """Return where among the values, and what follows them, a result of the function is."""
        if cell in self._places:
            return self._places[cell]
        self.end.fixed.append(result if cell is None else tracing.executed(cell.value))
        return len(self.values) + len(self.end.fixed) - 1

    def note(self, primitive: Any, inputs: Sequence[Any], params: dict[str, Any]) -> list[Any]:
        """Note one operation (see :class:`lazymods._compat.tracing.Recording`)."""
        if tracing.allocates(primitive):
            raise NoPathError
        cells = [x.cell if self._is_own(x) else self._fixed(x) for x in inputs]
        node = Node(kind_of(primitive, tuple([c.aval for c in cells]), params, tracing.settings()), cells)
        for cell in node.outputs:
            self._numbers[cell] = len(self._cells)
            self._cells.append(cell)
        self._pending.append(node)
        return [self._hold(cell) for cell in node.outputs]

    def constant(self, value: Any) -> Any:
        """Return what stands for a number or a numpy array that becomes an array."""
        return self._hold(self._fixed(value))

    def value(self, recorded: Any, reason: str) -> Any:
        """Answer a question of Python's: from the known path, or by running what was recorded."""
        cell, convert = recorded.cell, _CONVERT.get(reason, _raw)
        if cell.value is not None and cell not in self._places:
            return tracing.executed(cell.value)  # a constant
        if (cell, convert) not in self._answers:
            answer = self._follow(cell, convert) if self._asked < self._known else self._branch(cell, convert)
            self._answers[cell, convert] = answer
            self._asked += 1
        answer = self._answers[cell, convert]
        if isinstance(answer, Exception):
            raise type(answer)(*answer.args)  # another one each time: its traceback holds what is traced
        return answer

    def _is_own(self, value: Any) -> bool:
        return isinstance(value, tracing.Recorded) and value.recording is self

    def _hold(self, cell: Cell) -> Any:
        cell.held = True
        return tracing.Recorded(self._trace, cell.aval, cell)

    def _fixed(self, value: Any) -> Cell:
        self._constants.append(value)
        return Cell(tracing.aval_of(value), value=tracing.owned(value))

    def _follow(self, cell: Cell, convert: Callable[[Any], Any]) -> Any:
        """Skip what a segment of the known path has computed."""
        segment, answer, _ = self.trail[self._asked]
        before = sum(len(s.constants) + len(s.gives) for s, _, _ in self.trail[: self._asked])
        start = self._arguments + before + len(segment.constants)
        for place, number in enumerate(segment.gives, start):
            if number >= len(self._cells):
                raise self._not_repeatable()
            self._learn(self._cells[number], place)
        if self._places.get(cell) != segment.asked or convert is not segment.convert:
            raise self._not_repeatable()
        self._forget()
        return answer

    def _branch(self, cell: Cell, convert: Callable[[Any], Any]) -> Any:
        """Run what was recorded, up to a decision."""
        segment = _TraceBranch()
        if cell.value is None:
            self._segment(segment, [cell, *(c for node in self._pending for c in node.outputs if c.held)])
        segment.asked, segment.convert = self._places[cell], convert
        answer, key = segment.decide(self.values)
        self.trail.append((segment, answer, key))
        return answer

    def _segment(self, segment: _TraceBranch, wanted: Sequence[Cell]) -> None:
        """Compile and run what some cells need."""
        outputs = list(dict.fromkeys(c for c in wanted if c.value is None))
        nodes = needed(self._pending, outputs, effects=True)
        if nodes:
            graph = Graph(fixed=True)
            for node in nodes:
                graph.add(node)
            fixed = [c for c in graph.inputs if c not in self._places]
            self._places.update((c, place) for place, c in enumerate(fixed, len(self.values)))
            segment.program = compiled(graph.structure(), graph.places_of(outputs))
            segment.take = getter([self._places[c] for c in graph.inputs])
            segment.constants = tuple(c.value for c in fixed)
            segment.gives = tuple(self._numbers[c] for c in outputs)
            start = len(self.values) + len(fixed)
            with tracing.at(self._trace.parent):
                segment.run(self.values)
            for place, cell in enumerate(outputs, start):
                self._learn(cell, place)
        self._forget()

    def _learn(self, cell: Cell, place: int) -> None:
        cell.value = self.values[place]
        self._places[cell] = place

    def _forget(self) -> None:
        """Drop the operations that have run; one whose results were kept from it by chance alone stays."""
        held = [c for node in self._pending for c in node.outputs if c.value is None and c.held]
        self._pending = needed(self._pending, held)

    def _not_repeatable(self) -> LazyError:
        got = f"other operations before decision {self._asked + 1} than when it was recorded first"
        needed = "the same operations in every run: its Python may decide on values, on nothing that changes outside"
        return LazyError(Problem(self._name, got, needed, "f(x, changing)  # what changes, as an argument"))
