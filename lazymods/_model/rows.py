"""From an abstract run to a report: the layers of a model, and what each holds at the sizes found."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from flax import nnx

from lazymods import _graph
from lazymods._errors import describe_call
from lazymods._graph import Path, dotted
from lazymods._initial.keys import is_key
from lazymods._model import hooks
from lazymods._model.abstract_call import AbstractCall, hidden_nodes
from lazymods._model.report import LayerRow, ParameterShape, ShapeReport
from lazymods._objects.traced_state import TracedState

if TYPE_CHECKING:
    from lazymods._layer.pending_values import PendingValues

_UNKNOWN = "", False


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
    seen: dict[int, str] = {}
    first_names = _first_names(model)
    for path, node, sized in _layers(_parts(model, session), visited):
        lazy = _graph.is_lazy_node(node)
        unreached += [dotted(path)] if lazy and id(node) not in visited else []
        parameters = _in_order(node, list(_own_parameters(sized, path, seen)))
        parameters = tuple(
            dataclasses.replace(p, first_name=first_names.get(p.first_name, p.first_name)) for p in parameters
        )
        if lazy and how:
            inits = {e.name: how.get(id(e.value), _UNKNOWN) for e in _graph.entries(node)}
            said = [(p, *inits.get(p.name, _UNKNOWN)) for p in parameters]
            parameters = tuple(dataclasses.replace(p, init=text, made_whole=whole) for p, text, whole in said)
        if not parameters and not lazy:
            continue
        call = session.calls.get(path) if session is not None else None
        visit = visited.get(id(node))
        rows.append(
            LayerRow(
                path=dotted(path),
                layer=hooks.unhooked_class(type(node)).__name__,
                lazy=lazy,
                inputs=_inputs(call) if call is not None else ("" if session is None else None),
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


def _inputs(call: Any) -> str:
    """Describe what a layer was called with; options that are None are left out, such as Flax's ``out_sharding``."""
    return describe_call(call.args, {name: value for name, value in call.kwargs.items() if value is not None})


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
            at = at if _graph.kind_of(at) is _graph.NODE else _graph.MISSING
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
        new = [(p, n) for p, n in inside if _graph.kind_of(_graph.at(model, p)) is not _graph.NODE]
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


def _first_names(model: Any) -> dict[str, str]:
    """The first name of every Variable of a model, by each of its names, in the order of a state dict."""
    first: dict[int, str] = {}
    variables = (e for e in _graph.entries(model) if isinstance(e.value, nnx.Variable))
    return {e.name: first.setdefault(id(e.value), e.name) for e in variables}


def _own_parameters(node: Any, at: Path, seen: dict[int, str]) -> Iterator[ParameterShape]:
    """What the layer itself holds, without the objects in it; ``seen``: the name at which each was met first."""
    for key, value in _graph.children(node):
        if _graph.kind_of(value) in (_graph.NODE, _graph.OTHER):
            continue
        holder = {key: value}
        for entry in _graph.entries(holder):
            if isinstance(entry.value, nnx.RngState) or _inside_object(holder, entry.path):
                continue
            value, name = entry.value, dotted((*at, *entry.path))
            is_variable = isinstance(value, nnx.Variable)
            yield dataclasses.replace(
                _shape_of(entry.name, value),
                shared=id(value) in seen,
                kind=_kind(value),
                trained=_graph.is_trained(value) if isinstance(value, nnx.Param) else None,
                metadata=value.get_metadata() if is_variable else None if stays(value) else {},
                first_name=seen.get(id(value), name) if is_variable else name,
            )
            seen.setdefault(id(value), name)


def _kind(value: Any) -> str:
    if not isinstance(value, nnx.Variable):
        return "array"
    return (value.target if _graph.is_placeholder(value) else type(value)).__name__


def stays(array: Any) -> bool:
    """Whether an array that no Variable holds stays where it is when a model goes on a mesh."""
    return isinstance(array, np.ndarray) or is_key(array)


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
