"""Whole models: their shapes, and their parameters, from the shapes of one input."""

from __future__ import annotations

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from lazymods import _first_call, _graph, _lifecycle
from lazymods._errors import LazyError, located, relocate
from lazymods._graph import STATE, dotted
from lazymods._placeholder import UninitializedVariable
from lazymods._recipe import Recipe
from lazymods._report import ShapeReport, report_of
from lazymods._session import Session, Visit
from lazymods._snapshot import Snapshot


def infer_shapes(model: nnx.Module, *args: Any, **kwargs: Any) -> ShapeReport:
    """Find the shapes of a model's layers, parameters and output; nothing is allocated and nothing changes.

    Args:
        model: An nnx module, lazy or not.
        *args: What its call takes; a ``jax.ShapeDtypeStruct`` may stand for any array.
        **kwargs: Keyword arguments of the call.

    Returns:
        A report with a row for each layer, the output's shapes and dtypes, and totals. It prints as a table.

    Raises:
        ShapeInferenceError: If a layer cannot be sized, is used at two widths, or refuses its input.

    Example:
        >>> import jax, jax.numpy as jnp, lazymods as lm
        >>> from flax import nnx
        >>> model = nnx.Sequential(lm.LazyLinear(16, rngs=nnx.Rngs(0)), lm.LazyLinear(4, rngs=nnx.Rngs(1)))
        >>> report = lm.infer_shapes(model, jax.ShapeDtypeStruct((32, 8), jnp.float32))
        >>> report.output.shape, report.total_parameters
        ((32, 4), 212)
    """
    session = Session(model, args, kwargs).run()
    return report_of(model, session)


def materialize(model: nnx.Module, *args: Any, device: Any = None, dtype: Any = None, **kwargs: Any) -> ShapeReport:
    """Initialize every lazy layer that a call would reach, without running the call.

    All or nothing: if a layer fails, the whole model is as it was. Layers that the call does not reach stay lazy
    and are listed in the report's ``unreached``. Layers that are ready stay as they are.

    Args:
        model: An nnx module.
        *args: What its call takes; a ``jax.ShapeDtypeStruct`` may stand for any array.
        device: Where the parameters are made; None: the default device.
        dtype: The dtype that floating-point parameters (``nnx.Param``) get: drawn as usual, then cast. None: each
            layer's own. Statistics keep theirs.
        **kwargs: Keyword arguments of the call.

    Returns:
        The report of :func:`infer_shapes`, with ``unreached``.

    Raises:
        ShapeInferenceError: If a layer cannot be sized, is used at two widths, or refuses its input.
        UninitializedError: If a layer's ``initialize_parameters`` leaves a parameter empty.

    Example:
        >>> import jax, jax.numpy as jnp, lazymods as lm
        >>> from flax import nnx
        >>> layer = lm.LazyLinear(4, rngs=nnx.Rngs(0))
        >>> report = lm.materialize(layer, jax.ShapeDtypeStruct((2, 3), jnp.float32))
        >>> type(layer).__name__, layer.kernel.shape
        ('Linear', (3, 4))
    """
    dtype = None if dtype is None else jax.dtypes.canonicalize_dtype(dtype)
    with _lifecycle.LOCK:
        session = Session(model, args, kwargs)
        snapshot = Snapshot(*session.roots)
        place = contextlib.nullcontext() if device is None else jax.default_device(device)
        try:
            changed = _set_dtype(model, dtype)
            report = report_of(model, session.run())
            slots = [e for e in _graph.entries(model) if _graph.is_placeholder(e.value)]
            with place:
                while _finish(model, list(session.visits.values())) and _graph.lazy_nodes(model):
                    changed += _set_dtype(model, dtype)  # of layers that initialize_parameters made
                    session = Session(model, args, kwargs).run()
            for variable, recipe in changed:
                if _graph.is_placeholder(variable):  # not reached: as before
                    variable.set_raw_value(recipe)
            if device is not None:
                _commit(slots, device)
        except BaseException:
            snapshot.restore()
            raise
    return report.of_finished(model)


def _commit(slots: list[_graph.Entry], device: Any) -> None:
    """Bind what was made to its device, so that the model's calls run there."""
    for entry in slots:
        if not isinstance(entry.value, nnx.Variable) or _graph.is_placeholder(entry.value):
            continue
        raw = jax.device_put(entry.value.get_raw_value(), device)
        entry.value.set_raw_value(raw)


def _finish(model: Any, visits: list[Visit]) -> bool:
    """Initialize the layers that a run reached; say whether there were any."""
    paths = {id(node): path for path, node in _graph.nodes(model)}
    waiting = [v for v in visits if STATE in vars(v.layer)]
    for visit in waiting:
        if STATE not in vars(visit.layer):  # a layer that wraps it has initialized it
            continue
        try:
            _first_call.finish(visit.layer, visit.args, visit.kwargs, keep_class=_first_call.is_carried(visit.layer))
        except LazyError as error:
            path = dotted(paths.get(id(visit.layer), ()))
            where = located(path, type(visit.layer).__name__)
            raise relocate(error, lambda p, where=where, path=path: p.where if path in p.where else where) from error
    return bool(waiting)


def _set_dtype(model: Any, dtype: Any) -> list[tuple[UninitializedVariable, Recipe]]:
    """Give floating-point placeholders another dtype; return those with the recipes that they had."""
    changed = []
    for variable in _graph.variables(model) if dtype is not None else ():
        if not isinstance(variable, UninitializedVariable) or not isinstance(variable, nnx.Param):
            continue
        if jnp.issubdtype(variable.dtype, jnp.floating) and variable.dtype != dtype:
            changed.append((variable, variable.recipe))
            variable.dtype = dtype
    return changed
