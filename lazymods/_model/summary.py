"""The table of a model's layers with what their calls cost."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun

from lazymods._frames import entry
from lazymods._graph import Path, dotted
from lazymods._layer import first_call, lifecycle
from lazymods._model.abstract_call import AbstractCall
from lazymods._model.called import CallArguments, model_of
from lazymods._model.planning import AnyMesh, Places
from lazymods._model.report import ShapeReport
from lazymods._model.rows import report_of
from lazymods._objects.copies import Copies
from lazymods._objects.traced_state import TracedState, held_by, input_of, with_inputs
from lazymods._refusals import refuse_no_model
from lazymods._shardings import Rules


@entry
def summary(
    model: nnx.Module | Callable[..., Any],
    *args: Any,
    mesh: AnyMesh | None = None,
    rules: Rules | None = None,
    **kwargs: Any,
) -> ShapeReport:
    """Show a model's layers: shapes, parameters, bytes and floating-point operations; nothing changes.

    Args:
        model: An nnx module, lazy or not; lazy layers are marked. Or one of its methods, if the model is called by it.
        *args: What its call takes, arrays or ``jax.ShapeDtypeStruct``. Without arguments the table shows what is known
            now, with ``?`` for the rest.
        mesh: As for :func:`infer_shapes`: adds where the parameters go, and the bytes on a device.
        rules: As for :func:`infer_shapes`.
        **kwargs: Keyword arguments of the call.

    Returns:
        A report that prints as a table. FLOPs are those of XLA's cost analysis of a layer's call, with the layers
        inside it and all steps of a ``scan``. They are counted before optimization if JAX has its CPU backend. They
        are None if a value decides how many steps there are.

    Raises:
        ArgumentError: If arguments are given and the model has no ``__call__``, if mesh or rules are none, or if there
            are rules without a mesh.
        ShapeInferenceError: If a layer cannot be sized or refuses its input.
        LazyError: If parameters do not fit on the mesh; it lists all of them.
    """
    places = Places(mesh, rules)
    if not args and not kwargs:
        refuse_no_model(model, ())
        return places.in_report(report_of(model_of(model), None))
    with lifecycle.LOCK:
        session = AbstractCall(model, args, kwargs).run()
        report = places.in_report(report_of(session.model, session))
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
    """Count the operations of a program with every step of its loops; None if it can't be known how many there are."""
    try:
        place = jax.default_device(jax.local_devices(backend="cpu")[0])
    except RuntimeError:  # JAX was started without its CPU backend
        place = contextlib.nullcontext()
    with place:
        traced = function.trace(*args)
        once, more = _once(traced.lower()), _of_further_steps(traced.jaxpr)
    return None if once is None or more is None else once + more


def _once(lowered: Any) -> float | None:
    """Ask XLA for the operations of a program: before optimization on the CPU, where there is one, else after it.

    It counts the body of a loop once.
    """
    cost = lowered.cost_analysis() or lowered.compile().cost_analysis()
    return None if not cost else float(cost.get("flops", 0.0))


def _of_further_steps(closed: Any) -> float | None:
    """Count what XLA leaves out: all steps but one of each ``scan``; None if it is not known how many there are."""
    found = 0.0
    for equation in closed.eqns:
        name, inner = equation.primitive.name, [p for value in equation.params.values() for p in _jaxprs(value)]
        parts = [_of_further_steps(part) for part in inner]
        more = None if None in parts or (inner and name == "while") else sum(part for part in parts if part)
        if more is None or (more and name == "cond"):
            return None
        if name == "scan":
            [body] = inner
            length = equation.params["length"]
            once = _once(jax.jit(jaxpr_as_fun(body)).lower(*map(_spec_of, body.in_avals)))
            if once is None:
                return None
            more = length * more + (length - 1) * once
        found += more
    return found


def _jaxprs(value: Any) -> list[Any]:
    parts = value if isinstance(value, (tuple, list)) else [value]
    return [part for part in parts if isinstance(part, (ClosedJaxpr, Jaxpr))]


def _spec_of(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)
