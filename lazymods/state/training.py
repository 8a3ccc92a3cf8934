"""A whole training state: a dict of a model, its optimizer, random streams and numbers, such as the step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx

from lazymods import _compat, _graph
from lazymods._errors import Problem, UninitializedError
from lazymods._graph import OTHER, dotted, kind_of
from lazymods._initial.keys import is_key
from lazymods._layer import stacks
from lazymods._layer.blocks import raw_of
from lazymods._model.optimizer import LazyOptimizer, model_of
from lazymods._snapshot import Snapshot
from lazymods.state import load
from lazymods.state.entries import memory_of, named_places, prefix_of


def load_entries(
    state: Any,
    entries: Mapping[str, Any],
    *,
    strict: bool,
    mismatched: str,
    dtype: Any = None,
    origin: load.Origin | None = None,
) -> load.LoadResult:
    """Write entries into a training state.

    Optimizers without a state get one first, each made for the module that its entries fit, once the other entries have
    sized the modules.

    Raises:
        StateDictError: As for a module.
        UninitializedError: If it does not follow which module an optimizer without a state is for.
    """
    lazy = lazy_optimizers(state)
    if not lazy:
        return load.load_entries(state, entries, strict=strict, mismatched=mismatched, dtype=dtype, origin=origin)
    with stacks.together():  # as they are, and not their blocks, which the first of two loads brings into them
        snapshot = Snapshot(state)
        snapshot.keep(memory_of(named_places(state).values()))
    try:
        rest = {name: value for name, value in entries.items() if not name.startswith(tuple(lazy))}
        quiet = origin and origin._replace(warn=None)
        first = load.load_entries(state, rest, strict=False, mismatched=mismatched, dtype=dtype, origin=quiet)
        made_for = {}
        for prefix, optimizer in lazy.items():
            own = {n.removeprefix(prefix): v for n, v in entries.items() if n.startswith(prefix)}
            made_for[prefix] = _model_of(state, optimizer, prefix, own)
            optimizer.make_state(made_for[prefix])
            _give_up(optimizer)
        again = (origin or load.Origin())._replace(written=first.matched)
        result = load.load_entries(state, entries, strict=strict, mismatched=mismatched, dtype=dtype, origin=again)
        for prefix, optimizer in lazy.items():
            _make_rest(optimizer, made_for[prefix])
        return result
    except BaseException:
        snapshot.restore()
        raise


_LARGE = 1 << 20  # bytes


def _give_up(optimizer: LazyOptimizer) -> None:
    """Let shapes stand for the large arrays of a new state, which a load replaces: so they are not there twice."""
    for variable in _graph.variables(optimizer):
        raw = variable.get_raw_value()
        if isinstance(raw, jax.Array) and not _compat.is_tracer(raw) and not is_key(raw) and raw.nbytes >= _LARGE:
            place = raw.sharding if raw.committed else None
            spec = jax.ShapeDtypeStruct(raw.shape, raw.dtype, sharding=place, weak_type=raw.weak_type)
            _compat.SET_RAW(variable, spec)


def _make_rest(optimizer: LazyOptimizer, model: nnx.Pytree) -> None:
    """Make again what :func:`_give_up` has given up and the load has not replaced."""
    left = {p: v for p, _, _, v in _graph.entries(optimizer) if isinstance(raw_of(v), jax.ShapeDtypeStruct)}
    if left:
        new = LazyOptimizer(model, optimizer.tx, wrt=optimizer.wrt)
        for path, variable in left.items():
            _compat.SET_RAW(variable, raw_of(_graph.at(new, path)))


def lazy_optimizers(state: Any) -> dict[str, LazyOptimizer]:
    """Return the optimizers that have no state yet, by what the names of their entries begin with."""
    return {prefix_of(path): node for path, node in _graph.nodes(state) if _is_lazy_optimizer(node)}


def _is_lazy_optimizer(node: Any) -> bool:
    return isinstance(node, LazyOptimizer) and _graph.is_lazy_node(node)


def _model_of(state: Any, optimizer: LazyOptimizer, prefix: str, own: Mapping[str, Any]) -> nnx.Pytree:
    """Return the module that an optimizer is for.

    It is the one that it was made for, if that is there or none is; the only one that is there; or one whose optimizer
    would have a state of the names, shapes and dtypes of the entries. Two such have equal states at first, so it is no
    matter which of them is taken.

    Raises:
        UninitializedError: If there is none.
    """
    nodes = [(path, n) for path, n in _graph.nodes(state) if isinstance(n, nnx.Module) and not _is_optimizer(n)]
    modules = {path: n for path, n in nodes if not any(path[:i] in dict(nodes) for i in range(1, len(path)))}
    made_for = model_of(optimizer)
    if made_for is not None and (not modules or any(node is made_for for _, node in nodes)):
        return made_for
    if len(modules) == 1:
        return next(iter(modules.values()))
    wanted = {name: (np.shape(v), getattr(v, "dtype", None)) for name, v in own.items()}
    ready = [node for _, node in nodes if not _graph.has_uninitialized_params(node)]
    states = [_signature(node, optimizer) for node in ready]
    for node, found in zip(ready, states, strict=True):
        if found == wanted:
            return node
    shapes = {name: shape for name, (shape, _) in wanted.items()}
    for node, found in zip(ready, states, strict=True):
        if {name: shape for name, (shape, _) in found.items()} == shapes:
            return node
    raise UninitializedError(
        Problem(
            prefix.rstrip(".") or type(optimizer).__name__,
            f"an optimizer without a state, beside {len(modules)} modules: "
            f"{', '.join(map(dotted, modules)) or 'none'}, whose states the entries do not fit",
            "one module, whose parameters the optimizer's state is made for",
            "lm.load(model, path)  # of the module, then lm.load of nnx.Optimizer(model, tx, wrt=nnx.Param)",
        )
    )


def _is_optimizer(node: Any) -> bool:
    return isinstance(node, nnx.Optimizer)


def _signature(module: Any, optimizer: LazyOptimizer) -> dict[str, tuple[Any, Any]]:
    """Return the shapes and dtypes of the entries of an optimizer for a module."""
    with _compat.at_trace(_compat.home_trace(optimizer)):
        made = nnx.Optimizer(module, optimizer.tx, wrt=optimizer.wrt)
    values = {name: place.value for name, place in named_places(made).items()}
    return {name: (np.shape(v), getattr(v, "dtype", None)) for name, v in values.items() if kind_of(v) is not OTHER}
