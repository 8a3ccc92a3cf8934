"""What is known of a model's layers, as data and as a table."""

from __future__ import annotations

import contextlib
import dataclasses
import html
import io
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lazymods import _graph
from lazymods._errors import describe_call
from lazymods._graph import Path, dotted
from lazymods._initial.pending import PartialShape
from lazymods._layer import first_call, lifecycle
from lazymods._layer.lifecycle import PendingValues
from lazymods._layer.placeholder import show_shape
from lazymods._model import hooks
from lazymods._model.abstract_call import AbstractCall, CallArguments, hidden_nodes
from lazymods._model.called import model_of
from lazymods._objects.copies import Copies
from lazymods._objects.traced_state import TracedState, held_by, input_of, with_inputs


@dataclasses.dataclass(frozen=True)
class ParameterShape:
    """A parameter or buffer.

    Attributes:
        name: Its name in the layer.
        shape: Its shape, None for an axis that is unknown, or as a whole.
        dtype: Its dtype.
        shared: Whether it is one that an earlier row has too: totals count it once.
        init: How ``materialize`` makes it: by which initializer, and from which compiled kernel; the value itself
            where all elements are equal; '' if it has a value, or is made by ``initialize_parameters``.
        trained: Of an ``nnx.Param``, False if it is frozen (``lm.autograd.requires_grad_``); None of a buffer.
    """

    name: str
    shape: PartialShape | None
    dtype: Any
    shared: bool = False
    init: str = ""
    trained: bool | None = None

    @property
    def size(self) -> int | None:
        """The number of elements; None while an axis is unknown."""
        if self.shape is None or None in self.shape:
            return None
        return int(np.prod(self.shape, dtype=np.int64))  # type: ignore[arg-type]

    @property
    def nbytes(self) -> int | None:
        """The number of bytes; None while an axis is unknown."""
        return None if self.size is None else self.size * _dtype(self).itemsize

    def __str__(self) -> str:
        """Write name, dtype and shape."""
        return f"{self.name} {'?' if self.shape is None else show_shape(self.shape)}"


@dataclasses.dataclass(frozen=True)
class LayerRow:
    """One layer.

    Attributes:
        path: Its dotted path, '' for the model itself.
        layer: Its class.
        lazy: Whether it is lazy.
        inputs: Shapes and dtypes of its first call's arguments, None if the call does not reach it.
        output: Those of its output.
        inferred: The constructor arguments that were inferred.
        parameters: Its own parameters and buffers; those of the layers inside it have rows of their own, unless
            they were made with it.
        flops: Floating-point operations of its call by XLA's cost analysis, None if not asked for, or if they can't be
            counted: of a layer that is one of a stack, or whose call runs only inside the model.
    """

    path: str
    layer: str
    lazy: bool
    inputs: str | None
    output: Any
    inferred: Mapping[str, Any]
    parameters: tuple[ParameterShape, ...]
    flops: float | None = None

    @property
    def size(self) -> int | None:
        """The number of elements of its parameters; None while one is unknown."""
        sizes = [p.size for p in self.parameters]
        return None if None in sizes else sum(sizes)  # type: ignore[arg-type]

    @property
    def nbytes(self) -> int | None:
        """The number of bytes of its parameters; None while one is unknown."""
        sizes = [p.nbytes for p in self.parameters]
        return None if None in sizes else sum(sizes)  # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True)
class ShapeReport:
    """The shapes of a model.

    Attributes:
        rows: A row for each layer that has parameters or is lazy, in definition order.
        output: Shapes and dtypes of the model's output, None if it was not called.
        unreached: Dotted paths of the lazy layers that the call does not reach.
        flops: Floating-point operations of the whole call by XLA's cost analysis, None if not asked for.
        kernels: How many compiled kernels ``materialize`` draws from, whatever the number of shapes.
    """

    rows: tuple[LayerRow, ...]
    output: Any
    unreached: tuple[str, ...]
    flops: float | None = None
    kernels: int = 0

    @property
    def total_parameters(self) -> int:
        """The number of elements of all parameters and buffers whose shape is known."""
        return sum(p.size or 0 for row in self.rows for p in row.parameters if not p.shared)

    @property
    def trained_parameters(self) -> int:
        """The number of elements of all ``nnx.Param`` that are trained, of those whose shape is known."""
        return self._count(trained=True)

    @property
    def frozen_parameters(self) -> int:
        """The number of elements of all ``nnx.Param`` that are frozen, of those whose shape is known."""
        return self._count(trained=False)

    def _count(self, trained: bool) -> int:
        return sum(p.size or 0 for r in self.rows for p in r.parameters if p.trained is trained and not p.shared)

    @property
    def total_bytes(self) -> int:
        """The number of bytes of all parameters and buffers whose shape is known."""
        return sum(p.nbytes or 0 for row in self.rows for p in row.parameters if not p.shared)

    @property
    def is_complete(self) -> bool:
        """Whether every shape is known."""
        return all(row.size is not None for row in self.rows)

    def of_finished(self, nodes: list[tuple[Path, Any]]) -> ShapeReport:
        """Return the report with the present classes of all layers: those that are initialized are lazy no more."""
        now = {dotted(path): node for path, node in nodes}
        rows = []
        for row in self.rows:
            name = hooks.unhooked_class(type(now[row.path])).__name__
            rows.append(dataclasses.replace(row, layer=name, lazy=_graph.is_lazy_node(now[row.path])))
        return dataclasses.replace(self, rows=tuple(rows))

    def cells(self) -> tuple[list[str], list[list[str]]]:
        """Return the table's heads and rows as texts."""
        heads = ["path", "layer", "input", "inferred", "parameters", "dtype", "count", "bytes"]
        flops = self.flops is not None or any(row.flops is not None for row in self.rows)
        init = any(p.init for row in self.rows for p in row.parameters)
        rows = []
        for row in self.rows:
            cells = _cells(row)
            if flops:
                unknown = "" if row.inputs is None else "?"
                cells.append(unknown if row.flops is None else f"{row.flops:,.0f}")
            if init:
                cells.append("\n".join(p.init for p in row.parameters))
            rows.append(cells)
        return heads + ["FLOPs"] * flops + ["init"] * init, rows

    def footer(self) -> str:
        """Return the totals as a line."""
        at_least = "" if self.is_complete else ", and what is not known yet (?)"
        parts = [f"total: {self.total_parameters:,} parameters, {_bytes(self.total_bytes)}{at_least}"]
        if any(p.trained is False for row in self.rows for p in row.parameters):
            parts.append(f"{self.trained_parameters:,} trained, {self.frozen_parameters:,} frozen")
        if self.flops is not None:
            parts.append(f"{self.flops:,.0f} FLOPs")
        if self.kernels:
            parts.append(f"{self.kernels} compiled kernel{'s' * (self.kernels > 1)} for all shapes")
        if self.output is not None:
            parts.append(f"output {describe_call((self.output,), {})}")
        if self.unreached:
            parts.append(f"not reached, still lazy: {', '.join(self.unreached)}")
        return "; ".join(parts)

    def __str__(self) -> str:
        """Show the table as text."""
        from rich.console import Console
        from rich.table import Table

        heads, rows = self.cells()
        table = Table(box=None, pad_edge=False)
        for head in heads:
            table.add_column(head, justify="right" if head in ("count", "bytes", "FLOPs") else "left")
        for row in rows:
            table.add_row(*row)
        width = sum(max([len(head), *(_width(row[i]) for row in rows)]) + 2 for i, head in enumerate(heads))
        text = io.StringIO()
        console = Console(file=text, width=max(width, 40), markup=False, emoji=False, highlight=False)
        console.print(table)
        return text.getvalue() + self.footer()

    def _repr_html_(self) -> str:
        heads, rows = self.cells()
        head = "".join(f"<th>{html.escape(h)}</th>" for h in heads)
        body = "".join(
            "<tr>" + "".join(f"<td>{html.escape(c).replace(chr(10), '<br>')}</td>" for c in row) + "</tr>"
            for row in rows
        )
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table><p>{html.escape(self.footer())}</p>"


def _width(cell: str) -> int:
    return max(len(line) for line in cell.split("\n"))


def _dtype(parameter: ParameterShape) -> Any:
    """Return a parameter's dtype as numpy has it; the dtypes of random keys are JAX's alone."""
    is_extended = jnp.issubdtype(parameter.dtype, jax.dtypes.extended)
    return parameter.dtype if is_extended else np.dtype(parameter.dtype)


def _cells(row: LayerRow) -> list[str]:
    parameters = "\n".join(map(str, row.parameters))
    dtypes = "\n".join(str(_dtype(p)) for p in row.parameters)
    inferred = ", ".join(f"{k}={v}" for k, v in row.inferred.items())
    count = "?" if row.size is None else f"{row.size:,}"
    size = "?" if row.nbytes is None else _bytes(row.nbytes)
    layer = f"{row.layer} (lazy)" if row.lazy else row.layer
    inputs = "not reached" if row.inputs is None else row.inputs
    return [row.path or "(model)", layer, inputs, inferred, parameters, dtypes, count, size]


def _bytes(n: int) -> str:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if n >= scale:
            return f"{n / scale:.1f} {unit}"
    return f"{n} B"


# ---------------------------------------------------------------- making one


def report_of(model: Any, session: AbstractCall | None, drawing: PendingValues | None = None) -> ShapeReport:
    """Make the report of an abstract run; of a model that was not run if ``session`` is None.

    Args:
        model: The model.
        session: The run.
        drawing: How the values that are missing will be made.
    """
    how, kernels = ({}, 0) if drawing is None else drawing.describe()
    visited = {id(v.layer): v for v in session.visits.values()} if session is not None else {}
    rows, unreached = [], []
    seen: set[int] = set()
    for path, node, sized in _layers(_parts(model, session), visited):
        lazy = _graph.is_lazy_node(node)
        unreached += [dotted(path)] if lazy and id(node) not in visited else []
        parameters = _in_order(node, list(_own_parameters(sized, seen)))
        if lazy and how:
            inits = {e.name: how.get(id(e.value), "") for e in _graph.entries(node)}
            parameters = tuple(dataclasses.replace(p, init=inits.get(p.name, "")) for p in parameters)
        if not parameters and not lazy:
            continue
        call = session.calls.get(path) if session is not None else None
        visit = visited.get(id(node))
        rows.append(
            LayerRow(
                path=dotted(path),
                layer=hooks.unhooked_class(type(node)).__name__,
                lazy=lazy,
                inputs=describe_call(call.args, call.kwargs) if call is not None else ("" if session is None else None),
                output=call.output if call is not None else None,
                inferred=visit.values or {} if visit is not None else {},
                parameters=parameters,
            )
        )
    return ShapeReport(
        tuple(rows),
        session.output if session is not None else None,
        tuple(unreached) if session is not None else (),
        kernels=kernels,
    )


def _parts(model: Any, session: AbstractCall | None) -> list[tuple[Path, Any, Any]]:
    """The model and what is hidden in it: the path, the object, and the same at the sizes found."""
    if session is None:
        hidden = hidden_nodes([model], TracedState([model]))
        return [((), model, model), *((path[1:], node, node) for path, node in hidden)]
    return [((), model, session.finished), *((path, node, session.twin(node)) for path, node in session.hidden)]


def _layers(parts: list[tuple[Path, Any, Any]], visited: Mapping[int, Any]) -> Iterator[tuple[Path, Any, Any]]:
    """The nodes of all parts by path, and the same at the sizes found."""
    met: set[int] = set()
    for top, model, known in parts:
        for path, node in _all_nodes(model, known, visited):
            at = _graph.at(known, path)
            if at is _graph.MISSING and any(id(_graph.at(model, path[:i])) in visited for i in range(len(path))):
                continue  # the layer that holds it has none at these sizes
            if at is not _graph.MISSING and id(at) in met:
                continue  # at these sizes it is one with another
            met.add(id(at))
            yield (*top, *path), node, node if at is _graph.MISSING else at


def _all_nodes(model: Any, known: Any, visited: Mapping[int, Any]) -> list[tuple[Path, Any]]:
    """The nodes of a model, and after those of a layer the ones that it has at the sizes found, and had not before."""
    found = list(_ordered_nodes(model))
    for path in [p for p, n in found if id(n) in visited]:
        inside = [((*path, *p), n) for p, n in _ordered_nodes(_graph.at(known, path))]
        new = [(p, n) for p, n in inside if _graph.at(model, p) is _graph.MISSING]
        last = max(i for i, (p, _) in enumerate(found) if p[: len(path)] == path) if new else 0
        found[last + 1 : last + 1] = new
    return found


def _ordered_nodes(model: Any) -> Iterator[tuple[Path, Any]]:
    for path, node in _graph.nodes(model):
        if not isinstance(node, (nnx.Rngs, nnx.RngStream)):
            yield path, node


def _in_order(node: Any, parameters: list[ParameterShape]) -> tuple[ParameterShape, ...]:
    """Sort parameters as the layer defines them: an abstract run sorts attributes by name."""
    order = {str(k): i for i, (k, _) in enumerate(_graph.children(node))}
    return tuple(sorted(parameters, key=lambda p: order.get(p.name.partition(".")[0], len(order))))


def _own_parameters(node: Any, seen: set[int]) -> Iterator[ParameterShape]:
    """What the layer itself holds, without the objects in it."""
    for key, value in _graph.children(node):
        if _graph.kind_of(value) in (_graph.NODE, _graph.OTHER):
            continue
        holder = {key: value}
        for entry in _graph.entries(holder):
            if isinstance(entry.value, nnx.RngState) or _inside_object(holder, entry.path):
                continue
            trained = _graph.is_trained(entry.value) if isinstance(entry.value, nnx.Param) else None
            shape = _shape_of(entry.name, entry.value)
            yield dataclasses.replace(shape, shared=id(entry.value) in seen, trained=trained)
            seen.add(id(entry.value))


def _inside_object(holder: Any, path: Path) -> bool:
    for key in path[:-1]:
        holder = _graph.get_child(holder, key)
        if isinstance(holder, nnx.Pytree):
            return True
    return False


def _shape_of(name: str, value: Any) -> ParameterShape:
    if _graph.is_placeholder(value):
        return ParameterShape(name, value.pending.shape, value.dtype)
    raw = value.get_raw_value() if isinstance(value, nnx.Variable) else value
    if not hasattr(raw, "shape"):
        raw = np.asarray(raw) if isinstance(raw, (int, float, complex)) else None
    return ParameterShape(
        name, None if raw is None else tuple(raw.shape), np.dtype(np.float32) if raw is None else raw.dtype
    )


# ---------------------------------------------------------------- summary


def summary(model: nnx.Module | Callable[..., Any], *args: Any, **kwargs: Any) -> ShapeReport:
    """Show a model's layers: shapes, parameters, bytes and floating-point operations; nothing changes.

    Args:
        model: An nnx module, lazy or not; lazy layers are marked. Or a method of one, where that is what is called.
        *args: What its call takes, arrays or ``jax.ShapeDtypeStruct``. Without arguments the table says what is
            known now, with ``?`` for the rest.
        **kwargs: Keyword arguments of the call.

    Returns:
        A report that prints as a table. FLOPs are those of XLA's cost analysis of each layer's own call, before
        optimization where JAX has its CPU backend.

    Raises:
        ArgumentError: If arguments are given and the model has no ``__call__``.
        ShapeInferenceError: If a layer cannot be sized or refuses its input.
    """
    if not args and not kwargs:
        return report_of(model_of(model), None)
    with lifecycle.LOCK:
        session = AbstractCall(model, args, kwargs).run()
        report = report_of(session.model, session)
    calls = {dotted(path): call for path, call in session.calls.items() if not call.stacked}
    flops = {row.path: _flops(session, c.path, c.args, c.kwargs) for row in report.rows if (c := calls.get(row.path))}
    rows = tuple(dataclasses.replace(row, flops=flops.get(row.path)) for row in report.rows)
    return dataclasses.replace(report, rows=rows, flops=_flops(session, (), *session.inputs))


def _flops(session: AbstractCall, path: Path, args: Any, kwargs: Any) -> float | None:
    """Count the operations of one layer's call, lowered but not compiled."""
    arguments = CallArguments(args, kwargs)
    roots = [dict(session.nodes_of_finished())[path], *arguments.modules]
    traced_state = TracedState(roots)
    places = [(node, key, held_by(node)[key]) for node, key in traced_state.slots]
    held = [variable.get_raw_value() for variable in traced_state.variables]
    held += [input_of(value) for _, _, value in places]

    def call(held: list[Any], given: dict[int, Any]) -> Any:
        copies, left = Copies(traced_state), iter(held)
        for variable in traced_state.variables:
            copies.give(variable, None, next(left))
        for node, key, value in places:
            copies.give(node, key, with_inputs(value, next(left)))
        module, *modules = map(copies.of, roots)
        a, k = arguments.put_together(given, modules)
        return jax.tree.leaves((module if path else session.called.of(module))(*a, **k))

    try:
        return _count(jax.jit(call), jax.tree.map(first_call.as_specs, held), arguments.arrays)
    except Exception:  # the model's own run went well: the call alone can't be repeated outside of it
        return None


def _count(function: Any, *args: Any) -> float | None:
    """Ask XLA for the operations of a program: before optimization on the CPU, where there is one, else after it."""
    try:
        place = jax.default_device(jax.local_devices(backend="cpu")[0])
    except RuntimeError:  # JAX was started without its CPU backend
        place = contextlib.nullcontext()
    with place:
        lowered = function.lower(*args)
        cost = lowered.cost_analysis() or lowered.compile().cost_analysis()
    return None if not cost else float(cost.get("flops", 0.0))
