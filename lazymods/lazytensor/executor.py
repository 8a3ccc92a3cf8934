"""Running graphs: the cache of compiled programs, and what runs behind.

A cut turns a graph into a program. Graphs of equal structure are compiled once and kept, the least
recently used going first. Running one only starts it: its results are arrays that the device will have computed later.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import jax

from lazymods import _compat
from lazymods._compat import tracing
from lazymods._program_cache import Cache, CacheInfo, resized
from lazymods._recording.graph import Cell, Graph, Structure, compiled, graph_of
from lazymods.lazytensor import metrics
from lazymods.lazytensor.devices import by_devices

_LOCK = threading.Lock()
_graphs: OrderedDict[Structure, _Entry] = OrderedDict()
_last: OrderedDict[str, Structure] = OrderedDict()  # the last one compiled by where it was cut, to say what has changed
_running: list[weakref.ref[jax.Array]] = []
_MOST = 512  # arrays that may be on their way before those that have arrived are forgotten
_PATIENCE = 3  # times that all garbage is collected for one structure


def cache_info() -> CacheInfo:
    """Return how many compiled graphs are kept, and how many at most.

    Example:
        >>> import lazymods as lm
        >>> lm.lazytensor.cache_info().maxsize
        128
    """
    with _LOCK:
        return CacheInfo(_count(), Cache.size)


def _count() -> int:
    return sum(len(entry.functions) for entry in _graphs.values())


def _shrink() -> None:
    while _count() > Cache.size:
        _graphs.popitem(last=False)
    while len(_last) > Cache.size:
        _last.popitem(last=False)


def _resized() -> None:
    with _LOCK:
        _shrink()


resized.append(_resized)


def execute(graph: Graph, held: Callable[[], list[Cell]], trace: Any, settings: Any) -> tuple[list[Cell], list[Any]]:
    """Start the program that computes some cells of a graph, or one for each set of devices.

    Args:
        graph: The graph.
        held: Returns the cells; fewer when it is called again, if Python let go of some.
        trace: What executes operations, where the graph was recorded.
        settings: Those of jax when it was recorded.

    Returns:
        The cells, and the value of each.
    """
    parts = by_devices(graph)
    if not parts:
        return _execute(graph, held, trace, settings)
    cells: list[Cell] = []
    values: list[Any] = []
    for nodes in parts:
        own = {cell for node in nodes for cell in node.outputs}
        found = _execute(graph_of(nodes), lambda own=own: [c for c in held() if c in own], trace, settings)
        cells += found[0]
        values += found[1]
    return cells, values


def _execute(graph: Graph, held: Callable[[], list[Cell]], trace: Any, settings: Any) -> tuple[list[Cell], list[Any]]:
    structure = graph.structure()
    entry = _entry(structure)
    cells, results = _chosen(graph, structure, entry, held)
    known = entry.functions.get(results)
    metrics.count("CachedCompile" if known else "UncachedCompile")
    if known is None:
        _explain(structure)
    function = known or compiled(structure, results)
    start = time.perf_counter()
    with tracing.at(trace), tracing.public_errors():
        arrays, packs = [cell.value for cell in graph.inputs], graph.packs()
        with contextlib.nullcontext() if settings is tracing.settings() else settings.restored():
            values = function(arrays, packs)
    metrics.took("Execute" if known else "Compile", time.perf_counter() - start)
    with _LOCK:
        entry.functions[results] = function
        _shrink()
        _running.extend(weakref.ref(value) for value in values if not _compat.is_tracer(value))
        if len(_running) > _MOST:
            _running[:] = [ref for ref in _running if not has_arrived(ref())]
    found = dict(zip(results, values, strict=True))
    return cells, [found[place] for place in graph.places_of(cells)]


class _Entry:
    """The programs of one structure, by the results that they give."""

    __slots__ = ("_collected", "functions", "structure")

    def __init__(self, structure: Structure) -> None:
        self.structure = structure
        self.functions: dict[tuple[int, ...], Any] = {}
        self._collected = 0

    def collect_all(self) -> None:
        """Collect all garbage, which takes many milliseconds: a few times, then a program is the better way."""
        self._collected += 1
        if self._collected <= _PATIENCE:
            gc.collect()


def _entry(structure: Structure) -> _Entry:
    with _LOCK:
        entry = _graphs.get(structure)
        if entry is None:
            entry = _graphs[structure] = _Entry(structure)
        _graphs.move_to_end(entry.structure)  # to compare it with itself takes no time
        return entry


def _chosen(
    graph: Graph, structure: Structure, entry: _Entry, held: Callable[[], list[Cell]]
) -> tuple[list[Cell], tuple[int, ...]]:
    """Choose the results of a program: those wanted, or some more for which there is a program already.

    What Python holds varies from step to step, since the linearization of ``jax.grad`` leaves cycles that the garbage
    collector finds at some time. Results that nobody wants cost little, and to find what is young garbage costs less
    than a step; a program that is compiled for it costs much. Functions of Python are never called for what nobody
    wants.
    """
    for collect in (lambda: None, lambda: gc.collect(1), entry.collect_all):
        collect()
        cells = held()
        results = graph.places_of(cells)
        found = _covering(structure, entry, results)
        if found is not None or not entry.functions:
            break
    return cells, found or results


def _covering(structure: Structure, entry: _Entry, results: tuple[int, ...]) -> tuple[int, ...] | None:
    if results in entry.functions:
        return results
    for more in sorted(entry.functions, key=len):
        if set(results) <= set(more) and structure.calls(results) == structure.calls(more):
            return more
    return None


def has_arrived(array: Any) -> bool:
    """Whether an array has been computed; arrays of keys do not tell."""
    return array is None or (hasattr(array, "is_ready") and (array.is_deleted() or array.is_ready()))


def _explain(structure: Structure) -> None:
    place = metrics.where()
    with _LOCK:
        before = _last.get(place)
        _last[place] = structure
        _last.move_to_end(place)
        _shrink()
    metrics.compiled(place, "the first time" if before is None else structure.difference(before))


def wait_device_ops() -> None:
    """Wait until everything that was started has been computed, effects included.

    Example:
        >>> import jax.numpy as jnp
        >>> import lazymods as lm
        >>> with lm.lazytensor.lazy():
        ...     y = jnp.ones(3) * 2
        ...     lm.lazytensor.mark_step()
        ...     lm.lazytensor.wait_device_ops()
    """
    with _LOCK:
        arrays = [array for ref in _running if (array := ref()) is not None]
        _running.clear()
    for array in arrays:
        if not array.is_deleted():
            array.block_until_ready()
    jax.effects_barrier()
