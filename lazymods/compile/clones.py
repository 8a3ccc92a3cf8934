"""Calls by ``nnx.cached_partial``: with clones of models, which share the Variables of the models.

Flax hands over the clones for one call, which has to take what it keeps of them. ``lm.jit`` has no use for that, and
sees what a call would do to a clone: new values reach the model by its Variables, and anything else would be lost.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from lazymods._errors import LazyError, Problem, UninitializedError
from lazymods._objects.traced_state import TracedState


class _Local(threading.local):
    clones: Sequence[Any] = ()


_LOCAL = _Local()


def call_with(clones: Sequence[Any], function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a function whose arguments are clones of models, or hold some."""
    before, _LOCAL.clones = _LOCAL.clones, clones
    try:
        return function(*args, **kwargs)
    finally:
        _LOCAL.clones = before


def refuse_lazy_clones(name: str) -> None:
    """Refuse a call that would initialize a clone, and leave its model half lazy.

    Args:
        name: What errors call the function.

    Raises:
        UninitializedError: A clone is lazy.
    """
    if _LOCAL.clones and TracedState(_LOCAL.clones).lazy:
        needed = "a model that is initialized: a call would initialize the clone, and the model would stay lazy"
        write = "lm.jit(f)  # alone, as fast as with nnx.cached_partial; or lm.materialize(model, x) before that"
        raise UninitializedError(Problem(name, "a lazy model in nnx.cached_partial", needed, write))


def refuse_changes(name: str, changed: Sequence[Any]) -> None:
    """Refuse a call that would change more of a clone than values.

    Args:
        name: What errors call the function.
        changed: The objects that it would change.

    Raises:
        LazyError: A clone, or what only the clone has, is among them.
    """
    if not _LOCAL.clones:
        return
    own = set(map(id, TracedState(_LOCAL.clones).nodes))
    found = sorted({type(thing).__name__ for thing in changed if id(thing) in own})
    if found:
        got = f"a function that changes the structure of what nnx.cached_partial holds: {', '.join(found)}"
        needed = "a function that changes values of Variables: the rest would be done to a clone, not to the model"
        raise LazyError(Problem(name, got, needed, "lm.jit(f)  # alone, without nnx.cached_partial: it is as fast"))
