"""What is known of a model's layers, as data and as a table."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from lazymods import _graph
from lazymods._errors import describe_call
from lazymods._graph import Path, dotted
from lazymods._initial.pending import PartialShape
from lazymods._layer.placeholder import show_shape
from lazymods._model import hooks
from lazymods._tables import Shown, Table


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
        made_whole: Whether ``materialize`` makes it whole before the devices of a mesh get their parts, as its
            initializer can't be drawn in parts. ``infer_shapes`` calls no initializer of a user, and says False.
        kind: The class of its Variable, ``Param`` or ``BatchStat``; of what none holds, ``array``.
        trained: Of an ``nnx.Param``, False if it is frozen (``lm.autograd.requires_grad_``); None of a buffer.
        sharding: Where it goes on the mesh; None without a mesh, or while an axis is unknown.
        gradient_bytes_per_device: Bytes of its gradient on a device; None unless an optimizer was given.
        optimizer_bytes_per_device: Bytes that the optimizer keeps for it on a device; None likewise.
        metadata: That of its Variable; empty of an array without one, None of what a mesh leaves where it is: an array
            of numpy, or a random key.
        first_name: Its dotted name in the model; the first one if it is shared.
    """

    name: str
    shape: PartialShape | None
    dtype: Any
    shared: bool = False
    init: str = ""
    made_whole: bool = False
    kind: str = "array"
    trained: bool | None = None
    sharding: NamedSharding | None = None
    gradient_bytes_per_device: int | None = None
    optimizer_bytes_per_device: int | None = None
    metadata: Mapping[str, Any] | None = dataclasses.field(default_factory=dict, repr=False, compare=False)
    first_name: str = ""

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

    @property
    def bytes_per_device(self) -> int | None:
        """The number of bytes on each device of the mesh, or on the one device; None while an axis is unknown."""
        if self.size is None or self.shape is None:
            return None
        return bytes_on_device(self.shape, _dtype(self), self.sharding)

    def __str__(self) -> str:
        """Write name and shape."""
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

    @property
    def bytes_per_device(self) -> int | None:
        """The number of bytes of its parameters on a device; None while one is unknown."""
        sizes = [p.bytes_per_device for p in self.parameters]
        return None if None in sizes else sum(sizes)  # type: ignore[arg-type]

    @property
    def gradient_bytes_per_device(self) -> int | None:
        """The number of bytes of their gradients on a device; None unless an optimizer was given."""
        return _sum_of(p.gradient_bytes_per_device for p in self.parameters)

    @property
    def optimizer_bytes_per_device(self) -> int | None:
        """The number of bytes that the optimizer keeps for them on a device; None unless one was given."""
        return _sum_of(p.optimizer_bytes_per_device for p in self.parameters)


@dataclasses.dataclass(frozen=True, repr=False)
class ShapeReport(Shown):
    """The shapes of a model.

    Attributes:
        rows: A row for each layer that has parameters or is lazy, in definition order.
        output: Shapes and dtypes of the model's output, None if it was not called.
        unreached: Dotted paths of the lazy layers that the call does not reach.
        flops: Floating-point operations of the whole call by XLA's cost analysis, None if not asked for.
        kernels: How many compiled kernels ``materialize`` draws from, whatever the number of shapes.
        mesh: The devices that the parameters go to, if there was a mesh.
        optimizer_bytes_apart: Bytes on a device of what an optimizer keeps for no parameter, such as the number of
            steps; None unless one was given.
    """

    rows: tuple[LayerRow, ...]
    output: Any
    unreached: tuple[str, ...]
    flops: float | None = None
    kernels: int = 0
    mesh: Mesh | AbstractMesh | None = None
    optimizer_bytes_apart: int | None = None

    @property
    def total_parameters(self) -> int:
        """The number of elements of all parameters and buffers whose shape is known."""
        return sum(p.size or 0 for p in self._each_once())

    @property
    def trained_parameters(self) -> int:
        """The number of elements of all ``nnx.Param`` that are trained, of those whose shape is known."""
        return self._count(trained=True)

    @property
    def frozen_parameters(self) -> int:
        """The number of elements of all ``nnx.Param`` that are frozen, of those whose shape is known."""
        return self._count(trained=False)

    def _count(self, trained: bool) -> int:
        return sum(p.size or 0 for p in self._each_once() if p.trained is trained)

    @property
    def total_bytes(self) -> int:
        """The number of bytes of all parameters and buffers whose shape is known."""
        return sum(p.nbytes or 0 for p in self._each_once())

    @property
    def total_bytes_per_device(self) -> int:
        """The number of bytes on a device of all parameters and buffers whose shape is known."""
        return sum(p.bytes_per_device or 0 for p in self._each_once())

    @property
    def total_gradient_bytes_per_device(self) -> int | None:
        """The number of bytes of all gradients on a device; None unless an optimizer was given."""
        return _sum_of(p.gradient_bytes_per_device for p in self._each_once())

    @property
    def total_optimizer_bytes_per_device(self) -> int | None:
        """The number of bytes of the optimizer's state on a device; None unless one was given."""
        apart = self.optimizer_bytes_apart
        return None if apart is None else apart + sum(p.optimizer_bytes_per_device or 0 for p in self._each_once())

    def _each_once(self) -> Iterable[ParameterShape]:
        return (p for row in self.rows for p in row.parameters if not p.shared)

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

    def cells(self, *, verbose: bool = False) -> tuple[list[str], list[list[str]]]:
        """Return the table's heads and rows as texts.

        Args:
            verbose: Whether to say also which arguments were inferred, and how each parameter is made.
        """
        flops = self.flops is not None or any(row.flops is not None for row in self.rows)
        columns: dict[str, Callable[[LayerRow], str]] = {
            "path": lambda row: row.path or "(model)",
            "layer": lambda row: f"{row.layer} (lazy)" if row.lazy else row.layer,
            "input -> output": _show_call,
            "parameters": lambda row: "\n".join(f"{p} {_dtype(p)}" for p in row.parameters),
            "count": lambda row: "?" if row.size is None else f"{row.size:,}",
            "bytes": lambda row: _bytes(row.nbytes),
        }
        if self.mesh is not None:
            columns["sharding"] = lambda row: "\n".join(map(_show_place, row.parameters))
            columns["on a device"] = lambda row: _bytes(row.bytes_per_device)
        if self.optimizer_bytes_apart is not None:
            columns["gradients"] = lambda row: _bytes(row.gradient_bytes_per_device or 0)
            columns["optimizer"] = lambda row: _bytes(row.optimizer_bytes_per_device or 0)
        if flops:
            columns["FLOPs"] = _show_flops
        if not any(map(_show_call, self.rows)):  # nothing was run
            del columns["input -> output"]
        if verbose:
            columns["inferred"] = lambda row: ", ".join(f"{k}={v}" for k, v in row.inferred.items())
            columns["init"] = lambda row: "\n".join(p.init for p in row.parameters)
        return list(columns), [[show(row) for show in columns.values()] for row in self.rows]

    def footer(self, *, verbose: bool = False) -> str:
        """Return the totals as a line.

        Args:
            verbose: Whether to say also from how many compiled kernels the parameters are drawn.
        """
        at_least = "" if self.is_complete else ", and what is not known yet (?)"
        parts = [f"total: {self.total_parameters:,} parameters, {_bytes(self.total_bytes)}{at_least}"]
        if self.mesh is not None or self.optimizer_bytes_apart is not None:
            parts.append(self._on_a_device())
        if any(p.trained is False for row in self.rows for p in row.parameters):
            parts.append(f"{self.trained_parameters:,} trained, {self.frozen_parameters:,} frozen")
        kinds = {kind: found for kind, found in self.by_kind.items() if found[0]}
        if kinds.keys() - {"Param"}:
            parts.append(" + ".join(f"{kind} {size:,} ({_bytes(nbytes)})" for kind, (size, nbytes) in kinds.items()))
        if self.flops is not None:
            parts.append(f"{self.flops:,.0f} FLOPs")
        if verbose and self.kernels:
            parts.append(f"{self.kernels} compiled kernel{'s' * (self.kernels > 1)} for all shapes")
        if self.output is not None:
            parts.append(f"output {describe_call((self.output,), {})}")
        if self.unreached:
            parts.append(f"not reached, still lazy: {', '.join(self.unreached)}")
        return "; ".join(parts)

    @property
    def by_kind(self) -> dict[str, tuple[int, int]]:
        """The number of elements and of bytes of each kind of Variable, of those whose shape is known."""
        found: dict[str, tuple[int, int]] = {"Param": (0, 0)}  # first
        for p in self._each_once():
            size, nbytes = found.get(p.kind, (0, 0))
            found[p.kind] = size + (p.size or 0), nbytes + (p.nbytes or 0)
        return found

    def _on_a_device(self) -> str:
        """Say how many bytes a device needs, and for what."""
        numbers = {"parameters": self.total_bytes_per_device}
        if self.optimizer_bytes_apart is not None:
            numbers["gradients"] = self.total_gradient_bytes_per_device or 0
            numbers["optimizer"] = self.total_optimizer_bytes_per_device or 0
        count = 1 if self.mesh is None else self.mesh.size
        which = "the device" if count == 1 else f"each of {count:,} devices"
        of = "" if len(numbers) == 1 else f" ({', '.join(f'{k} {_bytes(n)}' for k, n in numbers.items())})"
        return f"{_bytes(sum(numbers.values()))} on {which}{of}"

    def table(self, *, verbose: bool = False) -> str:
        """Return the table as text, as wide as the terminal, or 100 columns where there is none.

        Args:
            verbose: As for :meth:`cells`.
        """
        return self._table(verbose=verbose).text()

    def _table(self, *, verbose: bool = False) -> Table:
        heads, rows = self.cells(verbose=verbose)
        marked = [number for number, row in enumerate(self.rows) if row.lazy]
        legend = [_LEGEND] if self._has_inner_flops() else []
        totals = self.footer(verbose=verbose)
        return Table(heads, rows, _NUMBERS, _FOLDED, _TOGETHER, marked, totals=totals, after=legend)

    def _has_inner_flops(self) -> bool:
        """Whether the operations of a row are also in those of another one."""
        counted = [row.path for row in self.rows if row.flops is not None]
        return any(a != b and (not a or b.startswith(f"{a}.")) for a in counted for b in counted)


_LEGEND = "count and bytes are a layer's own; FLOPs are of one call, with the layers inside of it"
_NUMBERS = ("count", "bytes", "on a device", "gradients", "optimizer", "FLOPs")
_TOGETHER = ("parameters", "sharding", "init")
_FOLDED = (  # columns that may be folded, in this order, and to how many characters
    *(("input -> output", 20), ("inferred", 12), ("init", 22), ("path", 22), ("layer", 12)),
    *(("input -> output", 12), ("init", 10), ("path", 22), ("parameters", 18), ("path", 12)),
)


def bytes_on_device(shape: tuple[Any, ...], dtype: Any, sharding: NamedSharding | None) -> int:
    """Return the number of bytes of an array on each of its devices."""
    local = shape if sharding is None else sharding.shard_shape(shape)
    return int(np.prod(local, dtype=np.int64)) * dtype.itemsize


def _sum_of(numbers: Iterable[int | None]) -> int | None:
    """Return the sum of the numbers that are there; None if there is none."""
    known = [n for n in numbers if n is not None]
    return sum(known) if known else None


def _show_place(parameter: ParameterShape) -> str:
    if parameter.metadata is None:
        return ""
    whole = ", made whole" if parameter.made_whole else ""
    return "?" if parameter.sharding is None else show_spec(parameter.sharding.spec) + whole


def show_spec(spec: PartitionSpec) -> str:
    """Write a spec as it is written in a program: ``P('data', None)``."""
    return f"P({', '.join(repr(part) for part in spec)})"


def _dtype(parameter: ParameterShape) -> Any:
    """Return a parameter's dtype as numpy has it; the dtypes of random keys are JAX's alone."""
    is_extended = jnp.issubdtype(parameter.dtype, jax.dtypes.extended)
    return parameter.dtype if is_extended else np.dtype(parameter.dtype)


def _show_call(row: LayerRow) -> str:
    if row.inputs is None:
        return "not reached"
    return f"{row.inputs} -> {describe_call((row.output,), {})}" if row.output is not None else row.inputs


def _show_flops(row: LayerRow) -> str:
    unknown = "" if row.inputs is None else "?"
    return unknown if row.flops is None else f"{row.flops:,.0f}"


def _bytes(n: int | None) -> str:
    if n is None:
        return "?"
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if n >= scale:
            return f"{n / scale:.1f} {unit}"
    return f"{n} B"
