"""The check mode of lazy tensors: every operation is also executed at once, and both are compared at each cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lazymods import _compat
from lazymods._compat import tracing
from lazymods._errors import LazyError, Problem
from lazymods._objects.comparing import values_differ
from lazymods._objects.noise import exact_and_noisy, near
from lazymods._recording.graph import Cell, Graph
from lazymods._recording.kinds import OperationKind, kind_of
from lazymods.lazytensor.trace import SESSIONS, LazyTensor, Session

_WRITE = "with lm.lazytensor.lazy(check=True): fn(x)  # around less, to find what differs: it is a fault of lazymods"


class _Raised:
    """What an operation has for a result that raised an error when it was executed at once."""

    def __init__(self, error: Exception) -> None:
        self.error = error


class _Noisy:
    """What the operations of a graph give, one by one, with noise in its inputs; they run when that is asked for first.

    Args:
        graph: The graph, all of whose inputs have values.
        cells: What it gives that is asked for.
        plain: What they were without noise.
        trace: What executes operations.
    """

    def __init__(self, graph: Graph, cells: Sequence[Cell], plain: dict[Cell, Any], trace: Any) -> None:
        self._graph, self._cells, self._plain, self._trace = graph, cells, plain, trace
        self._found: list[dict[Cell, Any]] | None = None

    def at(self, cell: Cell) -> list[Any]:
        """Return what the runs with noise gave; nothing if one without noise does not give what was there before."""
        if self._found is None:
            calls = self._graph.effects or any(kind.calls_python for kind, *_ in self._graph.lines)
            self._found = [] if calls else [self._run(make) for make in exact_and_noisy()]
        found = [values.get(cell) for values in self._found]
        return [*near(self._plain[cell], found)]

    def _run(self, make: Callable[[Any], Any]) -> dict[Cell, Any]:
        structure = self._graph.structure()
        arrays = [make(cell.value) for cell in self._graph.inputs]
        packs = [make(pack) for pack in self._graph.packs()]
        with tracing.at(self._trace):
            try:
                values = structure.function(self._graph.places_of(self._cells))(arrays, packs)
            except Exception:  # with noise it may go where it raises
                return {}
        return dict(zip(self._cells, values, strict=True))


class CheckedSession(Session):
    """A recording beside which each operation is executed, as it would be without the block.

    The values of both are apart from each other until a cut has compared them: ``cell.plain`` is what executing gave.
    Operations with effects are not executed a second time; what they give is taken as it is.
    """

    checks = True

    def __init__(self) -> None:
        super().__init__()
        self.trace: tracing.Recorder = tracing.Recorder(self)  # all operations come to ``note``

    def note(self, primitive: Any, inputs: Sequence[Any], params: dict[str, Any]) -> list[Any]:
        """Note one operation, and execute it."""
        if tracing.is_for_now(primitive):
            return super().note(primitive, inputs, params)
        kind = kind_of(primitive, tuple(map(tracing.aval_of, inputs)), params, tracing.settings())
        if kind.for_now:  # it is executed in the block as well
            return super().note(primitive, inputs, params)
        plain = None if kind.effects else self._executed(primitive, inputs, params)
        made = super().note(primitive, inputs, params)
        for number, tensor in enumerate(made if plain is not None else ()):
            tensor.cell.plain = plain if isinstance(plain, _Raised) else plain[number]  # type: ignore[index]
            if tensor.cell.value is not None:  # the graph was cut at this operation
                self._compare(kind, tensor.cell)
        return made

    def _executed(self, primitive: Any, inputs: Sequence[Any], params: dict[str, Any]) -> Sequence[Any] | _Raised:
        with tracing.at(self.trace.parent):
            operands = [self._plain(x) for x in inputs]
            for operand in operands:
                if isinstance(operand, _Raised):
                    return operand
            try:
                out = primitive.bind(*operands, **params)
            except Exception as error:  # it is raised when it is computed
                return _Raised(error)
        return out if primitive.multiple_results else [out]

    def _plain(self, value: Any) -> Any:
        if not isinstance(value, LazyTensor):
            return value
        if value.recording is self and value.cell.plain is not None:
            return value.cell.plain
        return value.now("check")

    def given(self, graph: Graph, cells: Sequence[Cell], found: Sequence[Any]) -> None:
        """Let cells have their values, and compare those with what executing gave."""
        super().given(graph, cells, found)
        wanted = set(cells)
        noisy = _Noisy(graph, cells, {cell: cell.plain for cell in cells}, self.trace.parent)
        for node in graph.nodes:
            for cell in node.outputs:
                if cell in wanted and cell.plain is not None:
                    self._compare(node.kind, cell, noisy)

    def _compare(self, kind: OperationKind, cell: Cell, noisy: _Noisy | None = None) -> None:
        plain, cell.plain = cell.plain, None  # from here on both go on with one value: rounding does not add up
        if isinstance(plain, _Raised):
            error = plain.error
            raise LazyError(Problem(str(kind), "a value", f"{type(error).__name__}: {error}", _WRITE)) from error
        if _compat.is_tracer(plain) or _compat.is_tracer(cell.value):
            return
        found = values_differ(plain, tracing.executed(cell.value))
        if found is not None and noisy is not None:
            found = values_differ(plain, tracing.executed(cell.value), noisy.at(cell))
        if found is not None:
            raise LazyError(Problem(str(kind), f"{found[0]}, of the block", f"{found[1]}, as without it", _WRITE))

    def prepare(self, operands: Sequence[Any]) -> None:
        """Have what executing an operator takes: of operands with effects that is the value."""
        for operand in operands:
            self._plain(operand)

    def confirm(self, name: str, known: Any, found: Any) -> None:
        """Refuse what the short way of an operator would record, if that is not what JAX does."""
        if found != known:
            was = "other operations" if found is None else str(found.kind)
            raise LazyError(Problem(name, f"{known.kind}, of the block", f"{was}, as without it", _WRITE))


SESSIONS[True] = CheckedSession
