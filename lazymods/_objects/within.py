"""All that is inside an object, as Python's garbage collector knows it: also where neither JAX nor Flax looks."""

from __future__ import annotations

import collections
import gc
import threading
import types
from collections.abc import Container, Iterable, Iterator
from typing import Any

from jax.core import Trace, Tracer

_SHARED = (type, types.ModuleType, types.CodeType)  # no part of what refers to them
RUNNING = (Trace, types.FrameType)  # what an object refers to while it is used in a trace


def all_within(roots: Iterable[Any], skipped: tuple[type, ...] = RUNNING, given: Container[int] = ()) -> Iterator[Any]:
    """Yield all that is inside some objects, the nearest first.

    Classes, modules and code are neither yielded nor looked into. Globals of functions, where everything is, are never
    looked into; of a ``threading.local``, what this thread has there is.

    Args:
        roots: Where to begin; these are yielded as well.
        skipped: Classes of what is neither yielded nor looked into, besides.
        given: Ids of objects that are left out, with what is inside of them only.
    """
    skipped = (*_SHARED, *skipped)
    seen: set[int] = set()
    waiting = collections.deque(roots)
    while waiting:
        thing = waiting.popleft()
        if id(thing) in seen or isinstance(thing, skipped) or id(thing) in given:
            continue
        seen.add(id(thing))
        yield thing
        if isinstance(thing, types.FunctionType):
            waiting += [thing.__closure__, thing.__defaults__, thing.__kwdefaults__, vars(thing)]
        elif gc.is_tracked(thing):
            waiting += gc.get_referents(thing)
            if isinstance(thing, threading.local):
                waiting.append(vars(thing))


def holds_tracer(value: Any, skipped: tuple[type, ...] = (), given: Container[int] = ()) -> bool:
    """Whether a value is a tracer, or one is anywhere inside it: in cells, defaults, attributes, slots, items.

    Args:
        value: The value.
        skipped: Classes of what is not looked into, besides classes, modules and code.
        given: Ids of objects that the caller has handed in; what those hold is the caller's.
    """
    if isinstance(value, Tracer):
        return True
    return gc.is_tracked(value) and any(isinstance(thing, Tracer) for thing in all_within((value,), skipped, given))
