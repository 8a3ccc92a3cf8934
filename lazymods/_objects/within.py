"""All that is inside an object, as Python's garbage collector knows it: also where neither JAX nor Flax looks."""

from __future__ import annotations

import collections
import gc
import threading
import types
from collections.abc import Container, Iterable, Iterator
from typing import Any

from jax.core import Trace, Tracer

_SKIPPED = (type, Trace, types.ModuleType, types.FrameType, types.CodeType)  # no part of what holds them


def all_within(roots: Iterable[Any], given: Container[int] = ()) -> Iterator[Any]:
    """Yield all that is inside some objects, the nearest first.

    Classes, modules, code, and traces of JAX are neither yielded nor looked into. Globals of functions, where
    everything is, are never looked into; of a ``threading.local``, what this thread has there is.

    Args:
        roots: Where to begin; these are yielded as well.
        given: Ids of objects that are left out, with what is inside of them only.
    """
    seen: set[int] = set()
    waiting = collections.deque(roots)
    while waiting:
        thing = waiting.popleft()
        if id(thing) in seen or isinstance(thing, _SKIPPED) or id(thing) in given:
            continue
        seen.add(id(thing))
        yield thing
        if isinstance(thing, types.FunctionType):
            waiting += [thing.__closure__, thing.__defaults__, thing.__kwdefaults__, vars(thing)]
        elif gc.is_tracked(thing):
            waiting += gc.get_referents(thing)
            if isinstance(thing, threading.local):
                waiting.append(vars(thing))


def holds_tracer(value: Any, given: Container[int] = ()) -> bool:
    """Whether a value is a tracer, or one is anywhere inside it: in cells, defaults, attributes, slots, items.

    Args:
        value: The value.
        given: Ids of objects that the caller has handed in; what those hold is the caller's.
    """
    if isinstance(value, Tracer):
        return True
    return gc.is_tracked(value) and any(isinstance(thing, Tracer) for thing in all_within((value,), given))
