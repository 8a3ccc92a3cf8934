"""What the lazy tensors did: counters, timers, and what to change to make it less.

Counters have the names of PyTorch's: ``MarkStep``, ``UncachedCompile`` and ``CachedCompile`` (their sum is the number
of graphs that were run), ``CreateLazyTensor`` and ``DestroyLazyTensor``, ``AutomaticCut``, and one for each reason for
which Python wanted a value, such as ``Forced:bool``. Timers are in seconds.
"""

from __future__ import annotations

import collections
import inspect
import itertools
import threading
from collections.abc import Callable
from typing import Any

from flax import nnx

_LOCK = threading.Lock()
_counts: collections.Counter[str] = collections.Counter()
_seconds: dict[str, float] = {}
_forced: collections.Counter[tuple[str, str]] = collections.Counter()
_compiled: collections.Counter[tuple[str, str]] = collections.Counter()

_INSIDE = ("jax", "jaxlib", "flax", "optax", "lazymods", "contextlib", "functools")
_OF_A_VARIABLE = nnx.Variable.__getattr__.__code__
_MOST = 1000  # places that are remembered


class EventCounts:
    """A count that any thread may add to without a lock, in 40 ns: every step of an iterator is one more.

    Attributes:
        add: Adds one.
    """

    __slots__ = ("_other", "add")

    def __init__(self) -> None:
        self.add: Callable[[], int] = itertools.count().__next__
        self._other = 0  # steps that are not counted

    def total(self) -> int:
        """Return the count."""
        steps = self.add()
        self._other += 1
        return steps + 1 - self._other

    def reset(self) -> None:
        """Begin at zero again."""
        count = self.total()
        self._other += count


created: EventCounts = EventCounts()  # lazy tensors
destroyed: EventCounts = EventCounts()


def count(name: str) -> None:
    """Count something."""
    with _LOCK:
        _counts[name] += 1


def forced(reason: str) -> None:
    """Count that Python wanted a value, and where."""
    place = where()
    with _LOCK:
        _counts[f"Forced:{reason}"] += 1
        if len(_forced) < _MOST or (place, reason) in _forced:
            _forced[place, reason] += 1


def compiled(place: str, why: str) -> None:
    """Note that a graph was compiled, where it was cut, and why."""
    with _LOCK:
        if len(_compiled) < _MOST or (place, why) in _compiled:
            _compiled[place, why] += 1


def took(name: str, seconds: float) -> None:
    """Add seconds to a timer."""
    with _LOCK:
        _seconds[name] = _seconds.get(name, 0.0) + seconds


def asks_a_library() -> bool:
    """Whether what called the caller is part of jax, flax or optax, which can do without; others get an answer."""
    frame: Any = inspect.currentframe()
    frame = frame.f_back.f_back
    if frame.f_code is _OF_A_VARIABLE:  # which passes the question on
        frame = frame.f_back
    name = frame.f_globals.get("__name__", "")
    return str(name).partition(".")[0] in ("jax", "flax", "optax")


def where() -> str:
    """Return file and line of the innermost frame that is not inside a library that was asked to do it."""
    frame: Any = inspect.currentframe()
    while frame is not None and str(frame.f_globals.get("__name__", "")).partition(".")[0] in _INSIDE:
        frame = frame.f_back
    return "?" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def counters() -> dict[str, int]:
    """Return the counters by name.

    Example:
        >>> import jax.numpy as jnp
        >>> import lazymods as lm
        >>> lm.lazytensor.metrics.reset()
        >>> with lm.lazytensor.lazy():
        ...     y = jnp.ones(3) * 2
        ...     lm.lazytensor.mark_step()
        >>> lm.lazytensor.metrics.counters()["MarkStep"]
        1
    """
    with _LOCK:
        found = dict.fromkeys(("MarkStep", "UncachedCompile", "CachedCompile"), 0) | dict(_counts)
        found["CreateLazyTensor"] = created.total()
        found["DestroyLazyTensor"] = destroyed.total()
        return found


def counter_names() -> list[str]:
    """Return the names of the counters that are not zero, sorted."""
    return sorted(name for name, value in counters().items() if value)


def timers() -> dict[str, float]:
    """Return seconds by name.

    ``Trace`` is the time from the first operation of a graph to its cut, the Python in between included; ``Compile``
    that of the first run of a graph, ``Execute`` that of starting the others: they run behind.
    """
    with _LOCK:
        return {"Trace": 0.0, "Compile": 0.0, "Execute": 0.0} | _seconds


def reset() -> None:
    """Set all counters and timers to zero, and forget all places."""
    with _LOCK:
        for kept in (_counts, _seconds, _forced, _compiled):
            kept.clear()
        created.reset()
        destroyed.reset()


def summary() -> str:
    """Return a text that says where graphs are cut and compiled, and what to change.

    Example:
        >>> import jax.numpy as jnp
        >>> import lazymods as lm
        >>> lm.lazytensor.metrics.reset()
        >>> print(lm.lazytensor.metrics.summary())
        graphs run: 0 (0 compiled, 0 from the cache); steps marked: 0
    """
    counts, seconds = counters(), timers()
    run = counts["UncachedCompile"] + counts["CachedCompile"]
    first = f"graphs run: {run} ({counts['UncachedCompile']} compiled, {counts['CachedCompile']} from the cache)"
    lines = [f"{first}; steps marked: {counts['MarkStep']}"]
    lines += [f"{name.lower()}: {value:.3f} s" for name, value in seconds.items() if value]
    with _LOCK:
        places, compiles = _forced.most_common(10), _compiled.most_common(10)
    if places:
        lines.append("values that Python wanted, each a cut (ask for them after mark_step, or less often):")
        lines += [f"  {n:6d} x {place} ({reason})" for (place, reason), n in places]
    if compiles:
        lines.append("graphs that were compiled, by where they were cut (keep shapes and the order of operations):")
        lines += [f"  {n:6d} x {place} ({why})" for (place, why), n in compiles]
    return "\n".join(lines)
