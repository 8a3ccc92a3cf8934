"""A model on a mesh: where each of its parameters goes, what a device then holds, and bringing them there.

The places follow from names, shapes and dtypes, as a report has them, so they are found before anything is made.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from lazymods import _compat, _graph, _memory
from lazymods._errors import Problem
from lazymods._graph import Path, dotted
from lazymods._initial import shards
from lazymods._layer.merging import put
from lazymods._model.abstract_call import AbstractCall
from lazymods._model.report import ParameterShape, ShapeReport, bytes_on_device
from lazymods._model.rows import stays
from lazymods._refusals import ArgumentError
from lazymods._shardings import Named, Rules, find_shardings, mesh_for

AnyMesh = Mesh | AbstractMesh


class Places:
    """Where the parameters of a model go.

    Args:
        mesh: As given to ``materialize`` and others; None: that of ``jax.set_mesh``, if there is one.
        rules: As given.
        device: As given.

    Attributes:
        mesh: The mesh; None if there is none.

    Raises:
        ArgumentError: If the three do not go together.
    """

    def __init__(self, mesh: AnyMesh | None, rules: Rules | None, device: Any = None) -> None:
        self.mesh = mesh_for(mesh, rules, device)
        self._rules = rules
        self._is_given = mesh is not None

    def of(self, parameters: Iterable[Named]) -> dict[str, NamedSharding]:
        """Find the place of each parameter by its name.

        In the mesh of ``jax.set_mesh`` metadata mean what they mean to Flax: there they may say that they are not for
        when a parameter is made, or name a mesh of their own.

        Raises:
            LazyError: If some do not fit.
        """
        if self.mesh is None:
            return {}
        if self._is_given:
            return find_shardings(parameters, self.mesh, self._rules)
        now = [Named(*p[:3], {}) if p.metadata.get("eager_sharding") is False else p for p in parameters]
        own = {p.name: mesh for p in now if self._rules is None and (mesh := _own_mesh(p.metadata)) is not None}
        found = find_shardings([p for p in now if p.name not in own], self.mesh, self._rules)
        for parameter in now:
            if parameter.name in own:
                found |= find_shardings([parameter], own[parameter.name])
        return found

    def device(self) -> Any:
        """Return the device on which this process draws; None: the default one."""
        own = () if self.mesh is None else self.mesh.local_devices
        return None if not own or _memory.default_device() in own else own[0]

    def in_report(self, report: ShapeReport) -> ShapeReport:
        """Return a report with the place of each parameter whose shape is known.

        Raises:
            LazyError: If some do not fit.
        """
        if self.mesh is None:
            return report
        named = {p.first_name: _named(p) for p in _each(report) if p.size is not None and p.metadata is not None}
        found = self.of(named.values())
        report = _with(report, lambda p: {"sharding": found.get(p.first_name)} if p.size is not None else {})
        return dataclasses.replace(report, mesh=self.mesh)


def _own_mesh(metadata: Mapping[str, Any]) -> Mesh | None:
    own = metadata.get("mesh") or getattr(metadata.get("out_sharding"), "mesh", None)
    return own if isinstance(own, Mesh) else None


def _each(report: ShapeReport) -> Iterator[ParameterShape]:
    return (p for row in report.rows for p in row.parameters)


def _named(parameter: ParameterShape) -> Named:
    assert parameter.shape is not None
    shape: tuple[Any, ...] = parameter.shape
    return Named(parameter.first_name, shape, parameter.dtype, parameter.metadata or {})


def _with(report: ShapeReport, changes: Callable[[ParameterShape], dict[str, Any]]) -> ShapeReport:
    rows = [
        dataclasses.replace(r, parameters=tuple(dataclasses.replace(p, **changes(p)) for p in r.parameters))
        for r in report.rows
    ]
    return dataclasses.replace(report, rows=tuple(rows))


# ---------------------------------------------------------------- the model itself


def _entries(session: AbstractCall) -> Iterator[tuple[Path, Any, Path, Any]]:
    """Every entry of the model and of what is hidden in it: the path of what holds it, that, its path there, itself."""
    for top, root in [((), session.model), *session.hidden]:
        for path, _, _, value in list(_graph.entries(root)):
            yield top, root, path, value


def placeholders_at(session: AbstractCall, report: ShapeReport) -> dict[int, tuple[Any, NamedSharding]]:
    """Return the placeholders that have a place, by their ids."""
    places = {p.first_name: p.sharding for p in _each(report) if p.sharding is not None}
    out: dict[int, tuple[Any, NamedSharding]] = {}
    for top, _, path, value in _entries(session):
        name = dotted((*top, *path))
        if name in places and _graph.is_placeholder(value):
            out.setdefault(id(value), (value, places[name]))
    return out


def bring(session: AbstractCall, places: Places) -> None:
    """Bring what has a value to its place, where it is not there yet; random state stays where it is.

    Raises:
        LazyError: If some do not fit: of layers that were made when others were initialized.
    """
    owners: list[tuple[Path, Any, Any, dict[str, Any]]] = []
    met: set[int] = set()
    for top, root, path, value in _entries(session):
        is_variable = isinstance(value, nnx.Variable)
        if isinstance(value, nnx.RngState) or _graph.is_placeholder(value) or (is_variable and id(value) in met):
            continue
        if is_variable or not stays(value):
            owners.append((path, root, value, _arrays_of(value, (*top, *path))))
            met.add(id(value))
    found = places.of(
        Named(name, array.shape, array.dtype, value.get_metadata() if isinstance(value, nnx.Variable) else {})
        for _, _, value, held in owners
        for name, array in held.items()
    )
    for path, root, value, held in owners:
        moved = {name: shards.put(array, found[name]) if name in found else array for name, array in held.items()}
        if any(moved[name] is not array for name, array in held.items()):
            _write(root, path, value, list(moved.values()))


def _arrays_of(value: Any, path: Path) -> dict[str, Any]:
    """Return the arrays that a Variable holds, mostly one, by name; or the array itself."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(_held_by(value))
    arrays = [(keys, leaf) for keys, leaf in leaves if hasattr(leaf, "shape")]
    return {dotted((*path, *map(_graph.name_of, keys))): leaf for keys, leaf in arrays}


def _held_by(value: Any) -> Any:
    """Return what a Variable holds, read out of its reference if it has one."""
    if not isinstance(value, nnx.Variable):
        return value
    return value.get_value() if value.get_metadata("ref", False) else value.get_raw_value()


def _write(root: Any, path: Path, value: Any, arrays: list[Any]) -> None:
    """Write arrays in place of those that :func:`_arrays_of` has returned; a reference can't move, and is made anew."""
    if not isinstance(value, nnx.Variable):
        put(root, path, arrays[0])
        return
    rest = iter(arrays)
    new = jax.tree.map(lambda leaf: next(rest) if hasattr(leaf, "shape") else leaf, _held_by(value))
    value.set_raw_value(jax.new_ref(new) if value.get_metadata("ref", False) else new)


# ---------------------------------------------------------------- optimizers


def with_optimizer(report: ShapeReport, model: Any, optimizer: Any) -> ShapeReport:
    """Return a report with the bytes of gradients and of an optimizer's state.

    Args:
        report: The report, with places if there is a mesh.
        model: The model at the sizes found, of values without a value.
        optimizer: An optax transformation, which trains what is not frozen; or an ``nnx.Optimizer``.

    Raises:
        ArgumentError: If it is neither.
    """
    if isinstance(optimizer, nnx.Optimizer):
        tx, wrt = optimizer.tx, optimizer.wrt
    elif isinstance(optimizer, optax.GradientTransformation | optax.MultiSteps):
        tx, wrt = optimizer, lambda _, v: isinstance(v, nnx.Param) and _graph.is_trained(v)
    else:
        got, needed = f"a {type(optimizer).__name__}", "an optax transformation, or the optimizer of the model"
        raise ArgumentError(Problem("optimizer=", got, needed, "optimizer=optax.adam(1e-3)"))
    own = {f"{row.path}.{p.name}".lstrip("."): p for row in report.rows for p in row.parameters}
    names: dict[int, list[str]] = {}
    for entry in _graph.entries(model):
        names.setdefault(id(entry.value), []).append(entry.name)
    by_name = {alias: own[name] for same in names.values() for name in same if name in own for alias in same}
    chosen = [(path, variable, by_name[dotted(path)]) for path, variable in nnx.to_flat_state(nnx.state(model, wrt))]
    trained = {path: p for path, _, p in chosen if p.size is not None}
    abstract: Any = nnx.from_flat_state({path: _of_shape(v, p) for path, v, p in chosen if path in trained})
    kept = dict.fromkeys((p.first_name for p in trained.values()), 0)
    apart = np.dtype(np.uint32).itemsize  # nnx.Optimizer counts its steps
    for path, leaf in leaves_of_state(jax.eval_shape(tx.init, abstract)):
        parameter = parameter_of(path, leaf, trained)
        if parameter is None:
            apart += bytes_on_device(leaf.shape, leaf.dtype, None)
        else:
            like = parameter.sharding if leaf.shape == parameter.shape else None
            kept[parameter.first_name] += bytes_on_device(leaf.shape, leaf.dtype, like)

    def changes(p: ParameterShape) -> dict[str, Any]:
        grad = p.bytes_per_device if p.first_name in kept else 0
        return {"gradient_bytes_per_device": grad, "optimizer_bytes_per_device": kept.get(p.first_name, 0)}

    return dataclasses.replace(_with(report, changes), optimizer_bytes_apart=apart)


def _of_shape(variable: nnx.Variable[Any], parameter: ParameterShape) -> nnx.Variable[Any]:
    """Return a Variable that holds a shape and a dtype."""
    shape: Any = parameter.shape
    held = getattr(variable, "target", type(variable))
    return held.from_metadata(jax.ShapeDtypeStruct(shape, parameter.dtype), dict(parameter.metadata or {}))


def leaves_of_state(state: Any) -> list[tuple[Path, Any]]:
    """Return the arrays of an optimizer's state by path; those in one Variable, of which there may be several, by its.

    Optax puts a node of its own, without an array, where it keeps nothing.
    """
    held = [(e.path[1:], _held_by(e.value)) for e in _graph.entries([state])]
    return [(path, leaf) for path, raw in held for leaf in jax.tree.leaves(raw) if hasattr(leaf, "shape")]


def parameter_of(path: Path, leaf: Any, parameters: Mapping[Path, Any]) -> Any:
    """Return the parameter that a part of an optimizer's state is kept for, as its path ends with that one's.

    Returns:
        None of what is kept for none; also of the number that optax has in place of what it leaves out.
    """
    found = next((parameters[path[i:]] for i in range(len(path)) if path[i:] in parameters), None)
    return found if found is None or leaf.shape or not found.shape else None


def place_state(optimizer: nnx.Optimizer[Any], model: Any) -> None:
    """Bring the state of an optimizer to where its parameters are on a mesh: what is of another shape to each device.

    Args:
        optimizer: The optimizer, with its state.
        model: Its model.
    """
    state: Any = nnx.state(model, optimizer.wrt)
    parameters = {path: v.get_raw_value() for path, v in nnx.to_flat_state(state)}
    meshes = {s.mesh: None for a in parameters.values() if (s := _sharding_of(a)) is not None}
    if len(meshes) != 1:
        return
    [mesh] = meshes
    everywhere = NamedSharding(mesh, PartitionSpec())

    def moved(path: Path, leaf: Any) -> Any:
        parameter = parameter_of(path, leaf, parameters) if isinstance(leaf, jax.Array) else None
        own = None if parameter is None or parameter.shape != leaf.shape else _sharding_of(parameter)
        return shards.put(leaf, everywhere if own is None else own)

    for path, _, _, variable in [((), None, None, optimizer.step), *_graph.entries([optimizer.opt_state])]:
        if isinstance(variable, nnx.Variable):
            raw = variable.get_raw_value()
            new = jax.tree.map(functools.partial(moved, path[1:]), raw)
            if any(a is not b for a, b in zip(jax.tree.leaves(new), jax.tree.leaves(raw), strict=True)):
                variable.set_raw_value(new)


def _sharding_of(array: Any) -> NamedSharding | None:
    """Return the place of an array on a mesh of several devices; None of any other, and of a tracer."""
    if not isinstance(array, jax.Array) or _compat.is_tracer(array):
        return None
    sharding = array.sharding
    return sharding if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh) else None

