"""The first call of a lazy layer, in whatever context it happens.

Where a layer was born decides. Born in plain Python (and perhaps closed over by a transform): it is sized,
initialized and finished at once. Born inside a trace as the copy that an nnx transform made of an object
outside: it is filled and keeps its class, so that the transform finds the node that it expects; the object
outside finishes when the copy's changes are carried to it. Born inside a trace in any other way, as an argument
of ``jax.jit`` or by ``nnx.merge``: its parameters would be lost, so the call is refused.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import jax
import numpy as np
from flax import nnx

from lazymods import _compat, _graph
from lazymods._errors import (
    LazyError,
    Problem,
    ShapeInferenceError,
    UninitializedError,
    describe_call,
    one_line,
)
from lazymods._graph import LOCAL, STATE
from lazymods._layer import lifecycle
from lazymods._layer.abstract_module import AbstractModule
from lazymods._layer.placeholder import UninitializedVariable
from lazymods._snapshot import Snapshot

_LOOPS = {"scan", "while_loop", "while_loop_body", "fori_loop", "fori_loop_body"}


def first_call(layer: Any, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Initialize a lazy layer and run its forward; on any error it is as lazy as before.

    Args:
        layer: A lazy layer.
        forward: Its class's ``__call__``; used if the layer keeps its class.
        args: The call's arguments.
        kwargs: The call's keyword arguments.
    """
    before = type(layer)
    with initialized(layer, args, kwargs):
        if type(layer) is before:
            return forward(layer, *args, **kwargs)
        return layer(*args, **kwargs)


@contextlib.contextmanager
def initialized(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
    """Initialize a lazy layer for the forward in the body; if either fails, it is back where it was.

    Raises:
        ShapeInferenceError: If the sizes do not follow from the arguments, or the forward of a layer of Flax
            refuses them.
    """
    if LOCAL.session is not None:
        session = LOCAL.session
        session.initialize(layer, args, kwargs)
        try:
            yield
        except Exception as error:
            if not session.follows_calls:
                tell(layer, args, kwargs, error)
            raise
        return
    with lifecycle.LOCK:
        attempt = _attempts.setdefault(id(layer), _Attempt())
        attempt.threads.append(threading.get_ident())
    try:
        with lifecycle.LOCK:
            if STATE in vars(layer):  # else another thread was first
                attempt.before = Snapshot(layer)
                finish(layer, args, kwargs, keep_class=is_carried(layer))
        yield
        attempt.succeeded = True
    except BaseException as error:
        _end(layer, attempt)
        if isinstance(error, Exception):
            tell(layer, args, kwargs, error)
        raise
    _end(layer, attempt)


@dataclasses.dataclass
class _Attempt:
    """The first calls of one layer that are running, in whatever threads."""

    before: Snapshot | None = None
    threads: list[int] = dataclasses.field(default_factory=list)
    succeeded: bool = False


_attempts: dict[int, _Attempt] = {}


def note_success(layer: Any) -> None:
    """Note that a call went well while a first call of the same layer is running in another thread."""
    attempt = _attempts.get(id(layer)) if _attempts else None
    if attempt is not None and threading.get_ident() not in attempt.threads:
        attempt.succeeded = True


def _end(layer: Any, attempt: _Attempt) -> None:
    """When the last of a layer's first calls has ended, take the layer back if none of them succeeded."""
    with lifecycle.LOCK:
        attempt.threads.remove(threading.get_ident())
        if not attempt.threads and _attempts.get(id(layer)) is attempt:
            del _attempts[id(layer)]
            if attempt.before is not None and not attempt.succeeded:
                attempt.before.restore()


_MISSING = re.compile(r"(was|must be) provided|not initialized")  # by Flax's words: a mode, rngs or a cache


def refuses_input(layer: Any, error: Exception) -> bool:
    """Whether an error says that a lazy layer which becomes one of Flax's does not take its input."""
    state = vars(layer).get(STATE) if layer is not None else None
    spec = state.spec if state is not None else None
    is_of_flax = spec is not None and spec.cls.__module__.startswith("flax.")
    return is_of_flax and isinstance(error, (ValueError, TypeError)) and _MISSING.search(str(error)) is None


_NOTE = "in the first call of a lazy layer, at "


def tell(layer: Any, args: Sequence[Any], kwargs: Mapping[str, Any], error: Exception) -> None:
    """Say in which layer a first call has failed: in an error of its own, or else in a note, once.

    Raises:
        ShapeInferenceError: If a layer of Flax refuses its input.
    """
    if isinstance(error, LazyError):
        return
    if refuses_input(layer, error):
        raise forward_error(layer, args, kwargs, error) from error
    if not any(note.startswith(_NOTE) for note in getattr(error, "__notes__", ())):
        error.add_note(_NOTE + _graph.place(layer, type(layer).__name__))


def forward_error(layer: Any, args: Sequence[Any], kwargs: Mapping[str, Any], error: Exception) -> ShapeInferenceError:
    """Say which layer refused which input; the reason is Flax's own."""
    return ShapeInferenceError(
        Problem(
            where=_graph.place(layer, type(layer).__name__),
            got=describe_call(args, dict(kwargs)),
            needed=f"an input that the layer takes; Flax says: {one_line(error)}",
            write="layer(x)  # with another input: the layer is as lazy as before",
        )
    )


# ---------------------------------------------------------------- initializing


def initialize(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Initialize a lazy layer without a forward, as the part of another that is being initialized."""
    if LOCAL.session is not None:
        LOCAL.session.initialize(layer, args, kwargs)
    else:
        finish(layer, args, kwargs, keep_class=is_carried(layer))


def run_initialize_parameters(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AbstractModule | None:
    """Call ``initialize_parameters`` where the layer was born, and check that it left no slot empty.

    Returns:
        The abstract module at the sizes found; None for a layer written by hand.

    Raises:
        UninitializedError: If a slot was left empty.
    """
    LOCAL.initializing += 1
    try:
        made = layer.initialize_parameters(*args, **kwargs)
    finally:
        LOCAL.initializing -= 1
    left = [e.name for e in empty_slots(layer)]
    if left:
        raise UninitializedError(_left_empty(layer, left))
    spec = vars(layer)[STATE].spec
    if spec is None or isinstance(made, AbstractModule):
        return made if spec is not None else None
    # an override that did not return what it got from super()
    return spec.abstract(lifecycle.values_from_slots(layer) or {}, lifecycle.modules_of(layer))


def finish(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, keep_class: bool = False) -> None:
    """Initialize a lazy layer where it was born, and settle it there."""
    if LOCAL.stage is not None and LOCAL.stage.initialize(layer, args, kwargs, keep_class):
        return
    level = _compat.home_trace(layer)
    if level is not _compat.current_trace():
        args, kwargs = as_specs((args, kwargs))
    with _compat.at_trace(level):
        abstract = run_initialize_parameters(layer, args, kwargs)
        lifecycle.settle(layer, abstract, keep_class=keep_class)


def empty_slots(layer: Any) -> list[_graph.Entry]:
    """The placeholders of a layer, without those of lazy layers inside it."""
    inside = [path for path, node in _graph.nodes(layer) if path and _graph.is_lazy_node(node)]
    return [
        e
        for e in _graph.entries(layer)
        if isinstance(e.value, UninitializedVariable) and not any(e.path[: len(p)] == p for p in inside)
    ]


def _left_empty(layer: Any, left: list[str]) -> Problem:
    return Problem(
        where=_graph.place(layer, type(layer).__name__),
        got=f"initialize_parameters left {', '.join(left)} uninitialized",
        needed="every parameter of the layer materialized by its initialize_parameters",
        write="\n          ".join(f"self.{name}.materialize(shape)" for name in left),
    )


def as_specs(tree: Any) -> Any:
    """Replace every array of a pytree by its shape and dtype; modules and everything else stay."""
    if type(tree) is tuple:  # arguments: what a tree of JAX's own costs more than the rest of a small call
        return tuple([as_specs(x) for x in tree])
    if type(tree) is jax.ShapeDtypeStruct or (type(tree) is dict and not tree):
        return tree
    spec = _as_spec(tree)
    if spec is not tree:
        return spec
    return jax.tree.map(_as_spec, tree, is_leaf=lambda x: isinstance(x, (nnx.Pytree, nnx.Variable)))


def _as_spec(x: Any) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype) if isinstance(x, (jax.Array, np.ndarray)) else x


# ---------------------------------------------------------------- contexts


def is_carried(layer: Any) -> bool:
    """Whether an nnx transform carries the layer's changes to an object outside.

    Raises:
        UninitializedError: If the layer is a copy whose parameters, or their gradients, would be lost.
    """
    if LOCAL.stage is not None and LOCAL.stage.owns(layer):
        return False  # it is initialized where its original is
    tags = _compat.carrying_transforms(layer)
    outside = _compat.outermost(layer) if tags else layer
    birth = _compat.birth_trace(outside)
    if not tags and (birth is None or birth is _compat.eval_trace()):
        return False
    if not empty_slots(layer):  # filled by hand or by nnx.merge with values: nothing will be made
        return bool(tags)
    if tags:
        _check_transforms(layer, tags, "its first call", _WRITE)
    if tags and LOCAL.stage is not None and LOCAL.stage.owns(outside):
        return True
    if birth is None or birth is _compat.eval_trace() or vars(outside)[STATE].built_in(birth):
        return bool(tags)
    return _refuse(
        outside,
        f"its first call on a copy of it that was made inside {_compat.transform_of(birth)}",
        "parameters that outlive the call: those made here would be lost",
        write=f"{_WRITE}; {_SHAPES}",
    )


def load_is_carried(layer: Any) -> bool:
    """Whether an nnx transform carries what a load makes of a lazy layer to an object outside.

    Raises:
        UninitializedError: If the transform has it as an argument, and cannot carry new parameters out.
    """
    if LOCAL.stage is not None and LOCAL.stage.owns(layer):
        return False
    tags = _compat.carrying_transforms(layer)
    if tags:
        _check_transforms(layer, tags, "a load of it", "lm.load(model, source)  # before, outside of the transform")
    return bool(tags)


def _check_transforms(layer: Any, all_tags: list[Any], what: str, write: str) -> None:
    """Refuse what gives a layer its parameters as an argument of a transform that cannot carry new ones out."""
    tags = {tag for tag in all_tags if isinstance(tag, str)}
    fixed = _compat.fixed_structure(layer)
    if fixed is not None:
        needed = "the same structure before and after: such a transform cannot carry new parameters out"
        _refuse(layer, f"{what} inside {fixed}, of which it is an argument", needed, write=write)
    if "grad" in tags:
        got = f"{what} inside nnx.grad (or nnx.value_and_grad), of which it is an argument"
        _refuse(layer, got, "parameters to differentiate with respect to: none exist yet", write=write)
    if tags & {"cond", "switch"}:
        got = f"{what} inside nnx.cond (or nnx.switch), of which it is an argument"
        _refuse(layer, got, "the same parameters after every branch, whether it calls the layer or not", write=write)
    if tags & _LOOPS and not _is_one_of_a_stack(layer):
        got = f"{what} inside an NNX loop (nnx.scan, nnx.while_loop, nnx.fori_loop)"
        _refuse(layer, got, "the same parameters before and after every step of the loop", write=write)
    if tags & {"vmap", "pmap"} and _has_static_keys(layer) and _compat.mapping_axes(layer):
        got = f"{what} inside nnx.vmap (or nnx.pmap), which maps over its parameters"
        needed = "parameters that have the mapped axis: the model was built outside, with one set of random keys"
        write = "nnx.vmap(f, in_axes=(None, 0))  # or build the model under nnx.vmap too, with nnx.split_rngs"
        _refuse(layer, got, needed, write=write)


def _has_static_keys(layer: Any) -> bool:
    return all(v.pending.is_static for v in _graph.variables(layer) if isinstance(v, UninitializedVariable))


def _is_one_of_a_stack(layer: Any) -> bool:
    """Whether a loop takes one after the other of the layers that are stacked outside of it."""
    return any(_axes_of_stacks(other) > _axes_of_stacks(layer) for other in _compat.incarnations(layer))


def _axes_of_stacks(layer: Any) -> int:
    pendings = [v.pending for v in _graph.variables(layer) if isinstance(v, UninitializedVariable)]
    return max((len(p.stacking.sizes) for p in pendings), default=0)


_WRITE = "lm.materialize(model, x)  # before the transform"
_SHAPES = "for output shapes alone, lm.infer_shapes(model, x)"


def _refuse(layer: Any, got: str, needed: str, *, write: str = _WRITE) -> NoReturn:
    names = _graph.uninitialized_paths(layer)
    parameters = f" ({', '.join(names)})" if names else ""
    where = _graph.place(layer, f"{type(layer).__name__}{parameters}")
    raise UninitializedError(Problem(where, got, needed, write))
