"""Recording: lazy tensors, and the blocks in which operations make them.

Inside of ``lazy()`` operations are noted in the graph of the thread instead of being run. When Python wants a value, or
at ``mark_step()``, the graph is cut: what is still held by Python is computed by one program, which is compiled once
for every structure (``executor``), and recording goes on. A lazy tensor is an array to everything that asks.

Invariants: an operation runs once, or not at all if nothing holds what it gives; after a run that fails, all is pending
as before, but for what had effects, and what failed together is computed apart, when it is wanted; every thread has a
graph of its own.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax

from lazymods._compat import calls, subclasses, tracing, values
from lazymods._frames import entry
from lazymods._recording.graph import Cell, Graph, Node, graph_of, needed
from lazymods._recording.kinds import kind_of
from lazymods.lazytensor import executor, metrics

_created = metrics.created.add
_MOST_OPS = 20_000  # operations after which a graph is cut: XLA takes minutes for more


class LazyTensor(tracing.Recorded):
    """An array that is computed when its value is wanted."""

    __slots__ = ()

    def __del__(self, _count: Callable[[], int] = metrics.destroyed.add) -> None:
        self.cell.held = False
        _count()  # bound above: of an interpreter that shuts down, globals may be gone

    def _short_repr(self) -> str:
        return f"LazyTensor<{self.aval}>"

    def __repr__(self) -> str:
        return repr(self.now("repr"))

    def __str__(self) -> str:
        return str(self.now("str"))

    def __format__(self, spec: str) -> str:
        return format(self.now("format"), spec)

    def __reduce_ex__(self, protocol: Any) -> Any:
        make, *rest = self.now("pickle").__reduce_ex__(max(protocol, 2))
        is_special = make.__name__ == "__newobj__"  # to pickle, which compares the class with ours then
        return (object.__new__ if is_special else make, *rest)

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self.now("deepcopy").copy()

    def block_until_ready(self) -> Any:
        """Compute the value and wait for it."""
        self.now("block_until_ready").block_until_ready()
        return self

    def copy_to_host_async(self) -> None:
        """Compute the value and begin to copy it to the host."""
        self.now("copy_to_host_async").copy_to_host_async()

    def is_ready(self) -> bool:
        """Whether the value has been computed."""
        value = self.cell.value
        return value is not None and (tracing.is_number(value) or executor.has_arrived(value))


def _of_the_value(name: str) -> Any:
    def get(self: LazyTensor) -> Any:
        if self.cell.value is None and metrics.asks_a_library():
            raise AttributeError(f"{name} of a value that has not been computed")  # as of a tracer: it has another way
        return getattr(self.now(name), name)

    return property(get, doc=f"``jax.Array.{name}`` of the value.")


tracing.register(LazyTensor)
subclasses.let_tracers_be_arrays()
values.register(LazyTensor)
for _name in (
    *("addressable_data", "addressable_shards", "committed", "delete", "device", "devices", "global_shards"),
    *("is_deleted", "is_fully_addressable", "is_fully_replicated", "on_device_size_in_bytes", "sharding"),
    *("format", "platform", "traceback", "unsafe_buffer_pointer", "__cuda_array_interface__"),
):
    setattr(LazyTensor, _name, _of_the_value(_name))


class Session:
    """The recording of one thread."""

    checks = False

    def __init__(self) -> None:
        self.trace: tracing.Recorder = calls.CallRecorder(self)
        self.depth = 0
        self.max_ops = _MOST_OPS
        self._lock = threading.RLock()
        self._acquire, self._release = self._lock.acquire, self._lock.release  # half of what ``with`` costs
        self._graph = Graph()
        self._apart: set[Cell] = set()  # what was to be computed together, and failed
        self._left = 0  # how many operations were left when all was computed that could be
        self._settings: Any = None
        self._started = 0.0

    # ------------------------------------------------------------ what the recorder tells

    def note(self, primitive: Any, inputs: Sequence[Any], params: dict[str, Any]) -> list[Any]:
        """Note one operation (see :class:`lazymods._compat.tracing.Recording`)."""
        settings = tracing.settings()
        if primitive is jax.lax.slice_p:
            primitive, inputs, params = _from_where_it_starts(inputs[0], params)
        elif tracing.is_for_now(primitive):
            return self._execute(primitive, inputs, params)
        operands = [self._operand(x) for x in inputs]
        kind = kind_of(primitive, tuple(map(tracing.aval_of, operands)), params, settings)
        return self._execute(primitive, operands, params) if kind.for_now else self.add(kind, operands)

    def _execute(self, primitive: Any, inputs: Sequence[Any], params: dict[str, Any]) -> list[Any]:
        """Do an operation that no program can do with others."""
        known = [x.now("what no program can do") if isinstance(x, tracing.Recorded) else x for x in inputs]
        with tracing.at(self.trace.parent):
            out = primitive.bind(*known, **params)
        return list(out) if primitive.multiple_results else [out]

    def add(self, kind: Any, operands: Sequence[Any]) -> list[LazyTensor]:
        """Add an operation (see :class:`lazymods._compat.calls.CallRecording`).

        This is most of what recording costs, so it does the work of :meth:`Graph.add` itself, without a Node.
        """
        line: list[Any] = [kind]
        made: list[LazyTensor] = []
        self._acquire()
        try:
            graph = self._graph
            if kind.settings is not self._settings or not graph.made:
                graph = self._graph_in(kind.settings)
            places = graph.places
            for operand in operands:
                if type(operand) is LazyTensor:
                    place = places.get(operand.cell)
                    line.append(graph.place(operand.cell) if place is None else place)
                    continue
                aval = kind.operands[len(line) - 1]
                pool = graph.pools.get(aval) if type(operand) is float else None
                if pool is None:
                    line.append(graph.place_of_value(operand, aval))
                else:
                    line.append(pool[0] + len(pool[1]))
                    pool[1].append(operand)
            graph.lines.append(tuple(line))
            for aval in kind.results:
                cell = Cell(aval)
                places[cell] = len(graph.made)
                graph.made.append(cell)
                cell.held = True
                made.append(LazyTensor(self.trace, aval, cell))
                _created()
            if kind.effects:
                graph.effects = True
            if len(graph.lines) - self._left >= self.max_ops:
                metrics.count("AutomaticCut")
                self._cut_for_operation()
        finally:
            self._release()
        return made

    def _graph_in(self, settings: Any) -> Graph:
        """Return a graph to which what is recorded with some settings can be added."""
        if not self._graph.lines:
            self._settings, self._started = settings, time.perf_counter()
        elif settings is not self._settings and not self._settings.runs_as(settings):
            self._cut_for_operation()  # what is run together is run with the same settings
            self._compute_apart()
            self._settings = settings
        return self._graph

    def noted(self, before: int, operands: Sequence[Any], results: Sequence[Any]) -> Any:
        """Return the kind of what was noted (see :class:`lazymods._compat.calls.CallRecording`)."""
        added = self.pending[before:]
        if len(added) != 1 or len(added[0].inputs) != len(operands):
            return None
        given = [x.cell if type(x) is LazyTensor else None for x in results]
        same = added[0].outputs == given and all(map(_is, added[0].inputs, operands))
        return added[0].kind if same else None

    def constant(self, value: Any) -> Any:
        """Return what stands for a number or a numpy array that becomes an array."""
        if not tracing.is_number(value):
            return tracing.executed(tracing.owned(value))
        return self._hold(Cell(tracing.aval_of(value), value=value))

    def value(self, recorded: LazyTensor, reason: str) -> Any:
        """Return a value that Python wants, and compute it if it has to be."""
        cell = recorded.cell
        if cell.value is None:
            with self._lock:
                if cell.value is None:
                    metrics.forced(reason)
                    self._force(cell)
        if tracing.is_number(_known(cell)):
            cell.value = tracing.executed(cell.value)
        return cell.value

    def prepare(self, operands: Sequence[Any]) -> None:
        """In check mode, cut the graph now if it has to be for these operands, and not when they are used."""

    def confirm(self, name: str, known: Any, found: Any) -> None:
        """In check mode, see that what an operator was known to become is what it became."""

    def _operand(self, value: Any) -> Any:
        if isinstance(value, LazyTensor):
            return value if value.recording is self else value.now("use in another thread")
        return tracing.owned(value)

    def _hold(self, cell: Cell) -> LazyTensor:
        cell.held = True
        _created()
        return LazyTensor(self.trace, cell.aval, cell)

    # ------------------------------------------------------------ cuts

    @property
    def pending(self) -> list[Node]:
        """What was recorded and has not run."""
        with self._lock:
            return self._graph.nodes

    def cut(self) -> None:
        """Start the computation of all that is held, and of what has effects."""
        with self._lock:
            self._drop_failed()
            try:
                self._compute_held()
            except Exception as error:
                self._keep(self._held(), error)
                raise
            finally:
                self._left = len(self._graph.lines)

    def _cut_for_operation(self) -> None:
        """Start the computation of all that is held, since an operation cannot be added to it.

        That operation is not what fails then: the values that failed raise when they are wanted. An effect's error is
        raised now.
        """
        effects = self._graph.effects
        try:
            self.cut()
        except Exception:
            if effects:
                raise

    def _compute_apart(self) -> None:
        """Compute each value that failed together with others; what fails again keeps its error."""
        for cell in [cell for cell in self._apart if cell.held and cell.value is None]:
            with contextlib.suppress(Exception):
                self.compute([cell])

    def compute(self, cells: Sequence[Cell]) -> None:
        """Start the computation of some values and of nothing else that can wait."""
        with self._lock:
            self._drop_failed()
            try:
                self._compute_part(needed(self._graph.nodes, cells))
            except Exception as error:
                self._keep(cells, error)
                raise

    def _force(self, cell: Cell) -> None:
        """Compute a value, with all that is held: it will be wanted too, and one program is better than two."""
        self._drop_failed()
        if cell.value is not None:
            return
        nodes, effects = self._graph.nodes, self._graph.effects
        alone = set(needed(nodes, [cell]))
        others = any(n not in alone for n in nodes if n.kind.effects or any(c.held for c in n.outputs))
        if cell not in self._apart:
            try:
                self._compute_held(cell if others else None)
            except Exception as error:
                if not others:
                    self._keep([cell], error)
                if effects or not others:  # an effect that fails is raised now, as nobody asks for it
                    raise
        if cell.value is None:
            self.compute([cell])  # apart from what failed together with it

    def _held(self) -> list[Cell]:
        return [cell for cell in self._graph.made if cell.held and cell not in self._apart]

    def _compute_held(self, now: Cell | None = None) -> None:
        """Start the computation of all that is held, and of what has effects; wait for one cell."""
        graph, self._apart = self._graph, {cell for cell in self._apart if cell.held and cell.value is None}
        if self._apart:
            self._compute_part(needed(graph.nodes, self._held(), effects=True), now)
        elif graph.effects or any(cell.held for cell in reversed(graph.made)):
            self._run(graph, lambda: [cell for cell in graph.made if cell.held], now)

    def _compute_part(self, nodes: Sequence[Node], now: Cell | None = None) -> None:
        """Start the computation of some operations, and let the others wait."""
        chosen = set(nodes)
        others = [node for node in self._graph.nodes if node not in chosen]
        rest = needed(others, [cell for node in others for cell in node.outputs if cell.held], effects=True)
        later = {cell for node in rest for cell in node.inputs}
        wanted = [cell for node in nodes for cell in node.outputs if cell.held or cell in later]
        if nodes:
            self._run(graph_of(nodes), lambda: wanted, now, rest)

    def _run(self, graph: Graph, held: Callable[[], list[Cell]], now: Cell | None, rest: Sequence[Node] = ()) -> None:
        """Compute cells of what is pending, and let the rest of it wait.

        If that fails, all is pending as before, but for what had effects: that keeps the error.
        """
        before, self._graph = self._graph, graph_of(rest)
        metrics.took("Trace", time.perf_counter() - self._started)
        try:
            cells, found = executor.execute(graph, held, self.trace.parent, self._settings)
            if now is not None:
                jax.block_until_ready(found[cells.index(now)])
        except BaseException as error:
            self._graph = before
            self._fail({node for node in before.nodes if node.kind.effects and node not in rest}, error)
            raise
        finally:
            self._started = time.perf_counter()
        self.given(graph, cells, found)

    def given(self, graph: Graph, cells: Sequence[Cell], found: Sequence[Any]) -> None:
        """Let cells of a graph have their values."""
        for cell, value in zip(cells, found, strict=True):
            cell.value = value

    # ------------------------------------------------------------ failures

    def _keep(self, cells: Sequence[Cell], error: Exception) -> None:
        """Keep what cells failed with: a single one has that, and several are computed apart, when they are wanted."""
        if len(cells) == 1:
            self._fail({node for node in self._graph.nodes if cells[0] in node.outputs}, error)
        else:
            self._apart.update(cells)

    def _fail(self, nodes: Collection[Node], error: BaseException) -> None:
        """Let what operations give be an error, and let them not be pending any more."""
        for node in nodes:
            for cell in node.outputs:
                cell.value = _Failure(error)
        self._graph = graph_of([node for node in self._graph.nodes if node not in nodes])

    def _drop_failed(self) -> None:
        """Let what needs a value that failed fail too, without an error now: that was raised when it failed."""
        causes = {cell: cell.value for cell in self._graph.inputs if isinstance(cell.value, _Failure)}
        if not causes:
            return
        rest = []
        for node in self._graph.nodes:
            cause = next((causes[cell] for cell in node.inputs if cell in causes), None)
            if cause is None:
                rest.append(node)
                continue
            for cell in node.outputs:
                cell.value = causes[cell] = cause
        self._graph = graph_of(rest)


def _is(cell: Cell, operand: Any) -> bool:
    if isinstance(operand, LazyTensor):
        return cell is operand.cell
    number = type(operand) in (bool, int, float, complex) and tracing.is_number(cell.value)
    return cell.value is operand or (number and cell.value == operand)


def _from_where_it_starts(operand: Any, params: dict[str, Any]) -> tuple[Any, Sequence[Any], dict[str, Any]]:
    """Return a slice as one whose start is an operand: a loop over ``x[i]`` is one program."""
    starts, limits = params["start_indices"], params["limit_indices"]
    if any(s != 1 for s in params["strides"] or ()) or max(starts, default=0) >= 1 << 31:
        return jax.lax.slice_p, [operand], params
    sizes = tuple([limit - start for start, limit in zip(starts, limits, strict=True)])
    return jax.lax.dynamic_slice_p, [operand, *starts], {"slice_sizes": sizes}


class _Failure:
    """What a cell holds whose computation failed."""

    __slots__ = ("error",)

    def __init__(self, error: BaseException) -> None:
        self.error = error


def _known(cell: Cell) -> Any:
    """Return the value of a cell that has one, as an array.

    Raises:
        Exception: What its computation failed with.
    """
    if isinstance(cell.value, _Failure):
        raise cell.value.error.with_traceback(None)
    return cell.value


# ---------------------------------------------------------------- blocks


class _Threads(threading.local):
    session: Session | None = None


_THREADS = _Threads()
SESSIONS: dict[bool, type[Session]] = {False: Session}
"""What records, and what checks as well."""


def session() -> Session | None:
    """Return what this thread records, if it is in a ``lazy()`` block."""
    found = _THREADS.session
    return found if found is not None and found.depth else None


def session_for(check: bool) -> Session:
    """Return what records this thread; what another one has recorded is computed when it is wanted."""
    known = _THREADS.session
    if known is None or known.checks != check:
        known = _THREADS.session = SESSIONS[check]()
    return known


@entry
def mark_step() -> None:
    """Start the computation of everything that was recorded and is still held, and go on recording.

    Outside of a ``lazy()`` block there is nothing to start.

    Raises:
        Exception: What the computation failed with, where that is known at once. No other value is lost: from then on
            each is computed by itself, when it is wanted.
    """
    running = session()
    metrics.count("MarkStep")
    if running is not None:
        running.cut()


@entry
def sync(tree: Any) -> Any:
    """Start the computation of the lazy tensors of a pytree, and of no more than they need.

    Args:
        tree: A pytree, or an nnx object.

    Returns:
        The same tree with arrays in place of the lazy tensors.

    Raises:
        Exception: What one of them failed with; the others are computed when they are wanted.
    """
    leaves, structure = jax.tree.flatten(tree)
    for recording, cells in _by_session(leaves).items():
        recording.compute([cell for cell in cells if cell.value is None])
    return jax.tree.unflatten(structure, [x.now("sync") if isinstance(x, LazyTensor) else x for x in leaves])


def _by_session(leaves: Sequence[Any]) -> dict[Session, list[Cell]]:
    found: dict[Session, list[Cell]] = {}
    for leaf in leaves:
        if isinstance(leaf, LazyTensor):
            found.setdefault(leaf.recording, []).append(leaf.cell)
    return found
