"""Whole models: their shapes, and their parameters, from the shapes of one input."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, Mesh

from lazymods import _compat, _graph
from lazymods._errors import LazyError, Problem, located, relocate
from lazymods._frames import entry
from lazymods._graph import STATE, Path, dotted
from lazymods._initial.keys import is_key
from lazymods._initial.pending import PendingInit
from lazymods._initial.placement import places_of
from lazymods._layer import contexts, first_call, lifecycle, param_dtypes
from lazymods._layer.drawing import note_draws
from lazymods._layer.merging import put
from lazymods._layer.placeholder import UninitializedVariable
from lazymods._model.abstract_call import AbstractCall, LayerCall
from lazymods._model.planning import AnyMesh, Places, bring, placeholders_at, with_optimizer
from lazymods._model.report import ShapeReport
from lazymods._model.rows import report_of
from lazymods._progress import telling
from lazymods._refusals import ArgumentError, refuse_no_float
from lazymods._shardings import Rules
from lazymods._snapshot import Snapshot


@entry
def infer_shapes(
    model: nnx.Module | Callable[..., Any],
    *args: Any,
    mesh: AnyMesh | None = None,
    rules: Rules | None = None,
    optimizer: Any = None,
    **kwargs: Any,
) -> ShapeReport:
    """Find the shapes of a model's layers, parameters and output; nothing is allocated and nothing changes.

    With a mesh it also plans where the parameters go, and says how many bytes a device then holds.

    Args:
        model: An nnx module, lazy or not; or one of its methods, if the model is called by it.
        *args: What its call takes; a ``jax.ShapeDtypeStruct`` may stand for any array.
        mesh: As for :func:`materialize`; a ``jax.sharding.AbstractMesh`` plans for devices that nobody has.
        rules: As for :func:`materialize`.
        optimizer: An optax transformation, or the optimizer of the model: the report then also has the bytes of the
            gradients and of the optimizer's state on a device.
        **kwargs: Keyword arguments of the call.

    Returns:
        A report with a row for each layer, the output's shapes and dtypes, and totals. It prints as a table.

    Raises:
        ArgumentError: If the model has no ``__call__``, if mesh, rules or optimizer are none, or if there are rules
            without a mesh.
        ShapeInferenceError: If a layer cannot be sized, is used at two widths, or refuses its input.
        LazyError: If parameters do not fit on the mesh; it lists all of them.

    Example:
        >>> import jax, jax.numpy as jnp, lazymods as lm
        >>> from flax import nnx
        >>> model = nnx.Sequential(lm.LazyLinear(16, rngs=nnx.Rngs(0)), lm.LazyLinear(4, rngs=nnx.Rngs(1)))
        >>> report = lm.infer_shapes(model, jax.ShapeDtypeStruct((32, 8), jnp.float32))
        >>> report.output.shape, report.total_parameters
        ((32, 4), 212)
    """
    places = Places(mesh, rules)
    with lifecycle.LOCK, _no_collections():
        session = AbstractCall(model, args, kwargs).run()
        drawing = _plan(session, places.mesh is not None, calling=False)
        report = places.in_report(report_of(session.model, session, drawing))
        return report if optimizer is None else with_optimizer(report, session.finished, optimizer)


@entry
def materialize(
    model: nnx.Module | Callable[..., Any],
    *args: Any,
    mesh: Mesh | None = None,
    rules: Rules | None = None,
    device: Any = None,
    dtype: Any = None,
    init_backend: str | None = None,
    **kwargs: Any,
) -> ShapeReport:
    """Initialize every lazy layer that a call would reach, without running the call.

    All or nothing: if a layer fails, the whole model is as it was. Layers that the call does not reach stay lazy
    and are listed in the report's ``unreached``. Layers that are ready keep their values.

    On a mesh each device draws only its own part of each parameter, and the values do not depend on the mesh. If an
    initializer can't draw in parts, its value is made whole first, and the report says so. Layers that are ready are
    moved to their place. In a program of several processes, each makes the same call.

    Args:
        model: An nnx module; or one of its methods, if the model is called by it.
        *args: What its call takes; a ``jax.ShapeDtypeStruct`` may stand for any array.
        mesh: The devices over which the parameters are spread. None: the mesh of ``jax.set_mesh``, if there is one.
        rules: Where they go: pairs of a regular expression and a ``PartitionSpec``. The first pair whose expression is
            found in the dotted name is used. Or a function of name, shape and dtype that returns a ``PartitionSpec``
            or None. A parameter without a rule follows its ``out_sharding`` metadata; without metadata it is copied to
            each device.
        device: Where the parameters are made; None: the default device.
        dtype: The dtype that floating-point parameters (``nnx.Param``) get: drawn as usual, then cast. None: each
            layer's own. Statistics keep theirs.
        init_backend: The platform that draws: with ``"cpu"`` a seed gives the same bits on every platform. None: the
            device of the parameters, where the bits are those of Flax's own layers.
        **kwargs: Keyword arguments of the call.

    Returns:
        The report of :func:`infer_shapes`, with ``unreached``.

    Raises:
        ArgumentError: If the model has no ``__call__``, if dtype is no floating-point dtype, if mesh, rules and device
            do not go together, if the mesh has no devices, or if the model belongs to a function that is being traced.
        ShapeInferenceError: If a layer cannot be sized, is used at two widths, or refuses its input.
        UninitializedError: If a layer's ``initialize_parameters`` leaves a parameter empty.
        LazyError: If parameters do not fit on the mesh; it lists all of them, and nothing is made.
        RuntimeError: If JAX has no backend of the name ``init_backend``.

    Example:
        >>> import jax, jax.numpy as jnp, lazymods as lm
        >>> from flax import nnx
        >>> layer = lm.LazyLinear(4, rngs=nnx.Rngs(0))
        >>> report = lm.materialize(layer, jax.ShapeDtypeStruct((2, 3), jnp.float32))
        >>> type(layer).__name__, layer.kernel.shape
        ('Linear', (3, 4))
    """
    if isinstance(mesh, AbstractMesh):
        needed, write = "a mesh of devices to make parameters on", "lm.infer_shapes(model, x, mesh=mesh, rules=rules)"
        raise ArgumentError(Problem("mesh=", "an AbstractMesh", needed, write))
    if mesh is not None and _compat.home_trace(model) is not _compat.eval_trace():
        got = "a mesh, for a model that a function which is being traced has made, or has as an argument"
        needed = "a call outside of it: in a program XLA decides where things go"
        raise ArgumentError(Problem("mesh=", got, needed, "lm.materialize(model, x, mesh=mesh)  # before"))
    if dtype is not None:
        refuse_no_float("lm.materialize: dtype", dtype)
    places = Places(mesh, rules, device)
    return _materialize(lambda: AbstractCall(model, args, kwargs), device, dtype, init_backend, places)


def _materialize(
    start: Callable[[], AbstractCall],
    device: Any,
    dtype: Any,
    init_backend: str | None,
    places: Places | None = None,
) -> ShapeReport:
    dtype = None if dtype is None else jax.dtypes.canonicalize_dtype(dtype)
    with lifecycle.LOCK, _no_collections(), telling("initializing parameters"):
        session = start()
        snapshot = Snapshot(*session.roots)
        where = device if init_backend is None else jax.local_devices(backend=init_backend)[0]
        drawn_on = where if where is not None or places is None else places.device()
        place = contextlib.nullcontext() if drawn_on is None else jax.default_device(drawn_on)
        try:
            changed = _set_dtype(session.everything, dtype)
            noted = _follow(session.everything, dtype)
            session = start() if noted else session  # which copies attributes as they were when it was made
            session.run()
            empty = {e.path for e in _graph.entries(session.everything) if _graph.is_placeholder(e.value)}
            with place:
                report = None
                while True:
                    _note_draws(session)
                    drawing = _plan(session, places is not None and places.mesh is not None)
                    found = report_of(session.model, session, drawing)
                    found = found if places is None else places.in_report(found)
                    report = report or found
                    with places_of(placeholders_at(session, found)):
                        made_some = _finish(session, drawing)
                    if not made_some or not _graph.lazy_nodes(session.everything):
                        break
                    changed += _set_dtype(session.everything, dtype)  # of layers that initialize_parameters made
                    noted += _follow(session.everything, dtype)
                    session = start().run()
            for variable, pending in changed:
                if _graph.is_placeholder(variable):  # not reached: as before
                    variable.set_raw_value(pending)
            for layer, name, value in noted:
                if _graph.has_uninitialized_params(layer):
                    put(layer, (name,), value)
            _cast(session.everything, empty, dtype)
            if places is not None and places.mesh is not None:
                bring(session, places)
            elif where is not None:
                _move(session.everything, empty, device)
        except BaseException:
            snapshot.restore()
            raise
    return report.of_finished(session.nodes())


def initialize(reach: list[Any], run: Callable[..., Any], arrays: list[Any]) -> None:
    """Initialize the lazy layers that a run would reach, as :func:`materialize`.

    Args:
        reach: nnx objects, Variables and containers of such: all that it can reach.
        run: Gets copies of those, as a ``Copies``, and the arrays without values.
        arrays: Arrays that it takes.
    """
    _materialize(lambda: AbstractCall(reach, (arrays,), {}, run), None, None, None)


def initialize_called(model: nnx.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Initialize the lazy layers that a call of a model would reach, whatever the names of its arguments."""
    _materialize(lambda: AbstractCall(model, args, kwargs), None, None, None)


@contextlib.contextmanager
def _no_collections() -> Iterator[None]:
    """Put off the collection of cycles: nearly all that is made here is kept, and each would go through all of it."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _move(model: Any, paths: set[Path], device: Any) -> None:
    """Bring what was made to its device, bound to it, so that the model's calls run there; None: the default one."""
    for path, _, _, value in list(_graph.entries(model)):
        if path not in paths or _graph.is_placeholder(value):
            continue
        raw = value.get_raw_value() if isinstance(value, nnx.Variable) else value
        moved = _to_default_device(raw) if device is None else jax.device_put(raw, device)
        if isinstance(value, nnx.Variable):
            value.set_raw_value(moved)
        else:
            put(model, path, moved)


def _to_default_device(array: Any) -> Any:
    """Copy an array, or keys, to where JAX makes arrays; bound to no device, as what is made there."""
    from lazymods import _memory

    device = _memory.default_device()
    if not isinstance(array, jax.Array) or _compat.is_tracer(array) or array.devices() == {device}:
        return array
    if is_key(array):
        return jax.random.wrap_key_data(_to_default_device(jax.random.key_data(array)), impl=jax.random.key_impl(array))
    return _compat.device_put([np.asarray(array)], device)[0]


def _waiting(session: AbstractCall) -> list[LayerCall]:
    return [v for v in session.visits.values() if STATE in vars(v.layer)]


def _note_draws(session: AbstractCall) -> None:
    """Note how often each layer draws at its sizes, before any key is used: order of calls is not that of draws."""
    for visit in _waiting(session):
        state = vars(visit.layer)[STATE]
        if state.turns is not None and visit.values is not None and not state.spec.modules:
            note_draws(visit.layer, state.spec.abstract(visit.values, {}), roots=session.roots)


def _plan(session: AbstractCall, placed: bool, calling: bool = True) -> lifecycle.PendingValues:
    """Plan the values of the layers that a run reached, as :func:`lazymods._layer.lifecycle.plan`."""
    return lifecycle.plan([(v.layer, v.values) for v in _waiting(session)], calling, placed)


def _finish(session: AbstractCall, drawing: lifecycle.PendingValues) -> bool:
    """Initialize the layers that a run reached; say whether there were any."""
    paths = {id(node): path for path, node in session.nodes()}
    waiting = _waiting(session)
    with lifecycle.prepared(drawing):
        for visit in waiting:
            if STATE in vars(visit.layer):  # else a layer that wraps it has initialized it
                _finish_layer(visit, dotted(paths.get(id(visit.layer), ())))
    return bool(waiting)


def _finish_layer(visit: LayerCall, path: str) -> None:
    try:
        first_call.finish(visit.layer, visit.args, visit.kwargs, keep_class=contexts.is_carried(visit.layer))
    except LazyError as error:
        where = located(path, type(visit.layer).__name__)
        raise relocate(error, lambda p: p.where if path in p.where else where) from error


def _cast(model: Any, paths: set[Path], dtype: Any) -> None:
    """Cast what an initializer returned in another dtype than it was asked for, if that is the one that is wanted."""
    for path, _, _, value in list(_graph.entries(model)) if dtype is not None else ():
        if path not in paths or not isinstance(value, nnx.Param) or _graph.is_placeholder(value):
            continue
        raw = value.get_raw_value()
        if jnp.issubdtype(raw.dtype, jnp.floating) and raw.dtype != dtype:
            value.set_raw_value(raw.astype(dtype))


def _follow(model: Any, dtype: Any) -> list[tuple[Any, str, Any]]:
    """Let lazy layers compute in the dtype that their parameters get; return what they noted before."""
    lazy = [layer for _, layer in _graph.lazy_nodes(model)] if dtype is not None else []
    return param_dtypes.follow(node for layer in lazy for _, node in _graph.nodes(layer))


def _set_dtype(model: Any, dtype: Any) -> list[tuple[UninitializedVariable, PendingInit]]:
    """Give floating-point placeholders another dtype; return those with the pending inits that they had."""
    changed = []
    for variable in _graph.variables(model) if dtype is not None else ():
        if not isinstance(variable, UninitializedVariable) or not isinstance(variable, nnx.Param):
            continue
        if jnp.issubdtype(variable.dtype, jnp.floating) and variable.dtype != dtype:
            changed.append((variable, variable.pending))
            variable.dtype = dtype
    return changed
