"""The first call of a lazy layer, in whatever context it happens.

Where a layer was born decides (see :mod:`lazymods._layer.contexts`). Born in plain Python (and perhaps closed over by a
transform): it is sized, initialized and finished at once. Born inside a trace as the copy that an nnx transform made of
an object outside: it is filled and keeps its class, so that the transform finds the node that it expects; the object
outside finishes when the copy's changes are carried to it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

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
from lazymods._layer.contexts import empty_slots, is_carried
from lazymods._snapshot import Snapshot


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
    if refuses_input(layer, error):  # the reason is Flax's own
        where, got = _graph.place(layer, type(layer).__name__), describe_call(args, dict(kwargs))
        needed = f"an input that the layer takes; Flax says: {one_line(error)}"
        write = "layer(x)  # with another input: the layer is as lazy as before"
        raise ShapeInferenceError(Problem(where, got, needed, write)) from error
    if not any(note.startswith(_NOTE) for note in getattr(error, "__notes__", ())):
        error.add_note(_NOTE + _graph.place(layer, type(layer).__name__))


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
        where = _graph.place(layer, type(layer).__name__)
        got = f"initialize_parameters left {', '.join(left)} uninitialized"
        needed = "every parameter of the layer materialized by its initialize_parameters"
        write = "\n          ".join(f"self.{name}.materialize(shape)" for name in left)
        raise UninitializedError(Problem(where, got, needed, write))
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


def as_specs(tree: Any) -> Any:
    """Replace every array of a pytree by its shape and dtype; modules and everything else stay."""
    if type(tree) is tuple:  # arguments: what a tree of JAX's own costs more than the rest of a small call
        return tuple([as_specs(x) for x in tree])
    if type(tree) is jax.ShapeDtypeStruct or (type(tree) is dict and not tree):
        return tree
    spec = _as_spec(tree)
    if spec is not tree:
        return spec
    return jax.tree.map(_as_spec, tree, is_leaf=_graph.is_object)


def _as_spec(x: Any) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype) if isinstance(x, (jax.Array, np.ndarray)) else x
