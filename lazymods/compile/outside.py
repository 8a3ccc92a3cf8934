"""Refuses arrays that a trace leaves behind where no call of its program can write.

Lists, dicts and objects without a model, classes, modules and functions are constants of a program, as for ``jax.jit``.
What the function does to them happens while it is traced only, as a counter of traces relies on. But an array stored
there would be a tracer, which nobody can use, and an iterator would give every call the item that it gave the trace:
both are refused.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import gc
import itertools
import operator
import time
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from jax.core import Trace, Tracer

from lazymods import _compat
from lazymods._errors import LazyError, Problem
from lazymods._objects.reached import MISSING, global_names, in_cell, is_library
from lazymods._objects.tokens import TokenKind, kind_of
from lazymods._objects.traced_state import contents_of, held_by
from lazymods._objects.within import all_within
from lazymods._refusals import used_up
from lazymods._snapshot import refill

_CONTAINERS = (TokenKind.LIST, TokenKind.DICT, TokenKind.SET, TokenKind.QUEUE, TokenKind.OBJECT)
_MAX_PARTS = 10_000  # of a container, that are searched; a leak beyond them is refused too, but not removed
# a tracer is no part of these
_SKIPPED = (type, Trace, types.ModuleType, types.FrameType, types.CodeType)
_CACHE = type(functools.lru_cache(len))
_NEAR = 8  # steps from a tracer to the cache that holds it


class _Holder(NamedTuple):
    """A container or class, by the name under which the function reaches it, and what it held."""

    name: str
    thing: Any
    contents: Any

    def restore(self, trace: Any) -> bool:
        """Let it hold what it held if an array of a trace was put in; return whether that was so."""
        is_class = isinstance(self.thing, type)
        now = dict(vars(self.thing)) if is_class else contents_of(self.thing)
        before = {id(v) for v in _values(self.contents)}
        leaks = {id(v) for v in _values(now) if id(v) not in before and _leaks(v, trace)}
        if not leaks:
            return False
        if not is_class:
            refill(held_by(self.thing), self.contents)
            return True
        for name, value in now.items():
            if id(value) in leaks and name in self.contents:
                setattr(self.thing, name, self.contents[name])
            elif id(value) in leaks:
                delattr(self.thing, name)
        return True


class _FunctionHolder:
    """A function, and what its cells, its attributes and the globals that it names held."""

    contents = ()  # nothing of which it knows an iterator

    def __init__(self, name: str, function: types.FunctionType) -> None:
        self.name = name
        self.thing = function
        self._cells = [(cell, in_cell(cell)) for cell in function.__closure__ or ()]
        named, known = {*global_names(function.__code__)}, function.__globals__
        self._names = [(vars(function), dict(vars(function)), None)]
        self._names += [(known, {name: known[name] for name in named & known.keys()}, named)]

    def restore(self, trace: Any) -> bool:
        """Let it hold what it held where an array of a trace was put in; return whether that was so."""
        leaks = False
        for cell, before in self._cells:
            now = in_cell(cell)
            if now is not before and _leaks(now, trace):
                leaks = True
                cell.cell_contents = before
                if before is MISSING:
                    del cell.cell_contents
        for held, was, names in self._names:
            for name in list(held) if names is None else names & held.keys():
                if held[name] is not was.get(name) and _leaks(held[name], trace):
                    leaks = True
                    del held[name]
                    held |= {name: was[name]} if name in was else {}
        return leaks


def _leaks(value: Any, trace: Any) -> bool:
    """Whether a value is an array of a trace, or holds one, as in ``log.append((step, loss))``.

    What another thread traces may be there meanwhile: copies, in attributes of modules and classes.
    """
    if isinstance(value, Tracer):
        return True
    tracers = (thing for thing in all_within((value,)) if isinstance(thing, Tracer))
    # a tracer refers to its trace; JAX has no public name for it
    return gc.is_tracked(value) and any(any(part is trace for part in gc.get_referents(t)) for t in tracers)


def _values(contents: Any) -> Iterable[Any]:
    return contents.values() if isinstance(contents, dict) else contents


def _first(contents: Any) -> list[tuple[Any, Any]]:
    """Return the first items of a container, each with its key if that has a name."""
    items = contents.items() if isinstance(contents, dict) else (("", v) for v in contents)
    return list(itertools.islice(items, _MAX_PARTS))


@contextlib.contextmanager
def leaving_alone(reached: Iterable[tuple[str, Any]], nodes: Iterable[Any]) -> Iterator[set[int]]:
    """Let a trace store none of its arrays in what is constant to the program, and use up no iterator.

    Args:
        reached: Names and values of what the function reaches and that holds no model.
        nodes: The objects that it can write to, whose classes it can reach, and their iterators.

    Yields:
        The ids of the containers that are constant.

    Raises:
        LazyError: If it stored one; what the containers held is restored then.
        ArgumentError: If it used up an iterator.
    """
    reached, nodes, trace = list(reached), list(nodes), _compat.current_trace()
    holders = _holders(reached)
    objects = [*nodes, *(holder.thing for holder in holders)]
    classes = {cls: None for thing in objects for cls in type(thing).__mro__ if not is_library(cls.__module__)}
    of_classes = [_Holder(cls.__qualname__, cls, dict(vars(cls))) for cls in classes]
    holders += of_classes
    holders += _holders((f"{name}.{key}", v) for name, _, contents in of_classes for key, v in contents.items())
    iterators = list(_iterators([*reached, *_parts_of(holders), *_parts_of(map(_as_holder, nodes))]))
    names: list[str] = []
    try:
        yield {id(holder.thing) for holder in holders}
    finally:
        names += [holder.name for holder in holders if holder.restore(trace)]
    if names:
        raise _stores(", ".join(names))
    for name, iterator, was in iterators:
        if _progress(iterator) != was:
            raise used_up(f"{name}, from which the function takes", iterator)


def _holders(found: Iterable[tuple[str, Any]]) -> list[Any]:
    """Return the containers and functions under some values, with what they hold."""
    out: list[Any] = []
    seen: set[int] = set()
    waiting = collections.deque(found)
    while waiting and len(seen) < _MAX_PARTS:
        name, thing = waiting.popleft()
        if isinstance(thing, types.FunctionType) and id(thing) not in seen:
            seen.add(id(thing))
            out.append(_FunctionHolder(name, thing))
        kind = kind_of(thing)
        if id(thing) in seen or not (kind is TokenKind.TUPLE or kind in _CONTAINERS):
            continue
        seen.add(id(thing))
        contents = thing if kind is TokenKind.TUPLE else contents_of(thing)
        if kind is not TokenKind.TUPLE:
            out.append(_Holder(name, thing, contents))
        of_object = kind is TokenKind.OBJECT
        waiting += [
            (f"{name}.{k}" if of_object else name, v) for k, v in _first(contents) if kind_of(v) >= TokenKind.TUPLE
        ]
    return out


def _as_holder(node: Any) -> _Holder:
    return _Holder(type(node).__name__, node, contents_of(node))


def _parts_of(holders: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    for holder in holders:
        name = holder.name
        for key, value in _first(holder.contents):
            if kind_of(value) is TokenKind.ATOM:
                yield (f"{name}.{key}" if key else name), value


# ---------------------------------------------------------------- iterators


def _iterators(found: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any, Any]]:
    """Yield the iterators among some values, and how far they are."""
    for name, value in found:
        if kind_of(value) is TokenKind.ATOM and isinstance(value, Iterator):
            yield name, value, _progress(value)


def _progress(iterator: Any, depth: int = 0) -> Any:
    """Return what changes in an iterator when something is taken from it, or from those that it takes from."""
    if isinstance(iterator, types.GeneratorType):
        return None if iterator.gi_frame is None else iterator.gi_frame.f_lasti
    if isinstance(iterator, itertools.count):
        return repr(iterator)
    own = operator.length_hint(iterator, -1), tuple(map(id, getattr(iterator, "__dict__", {}).values()))
    inner = gc.get_referents(iterator) if depth < 4 else []
    inner += [v for several in inner if isinstance(several, tuple) for v in several]  # zip has its iterators in one
    return (*own, *(_progress(v, depth + 1) for v in inner if isinstance(v, Iterator)))


# ---------------------------------------------------------------- leaks


def refuse_leaks(trace: Callable[[], Any], name: str, program: Any, given: Any) -> None:
    """Refuse a function that has stored an array of its trace anywhere: then it lives, and so does the trace.

    Args:
        trace: A weak reference to the trace.
        name: What errors call the function.
        program: What the trace gave. Its equations may hold functions, such as those of ``jax.custom_vjp``, and so what
            these close over.
        given: What was traced: the function, and what it reaches.

    Raises:
        LazyError: If that is so.
    """
    for generation in (1, 2, 2, 2):  # cycles, such as a function that calls itself, live until then
        if trace() is None:
            return
        _collect(generation)
    live = trace()
    held = [] if live is None else [thing for thing in gc.get_referrers(live) if isinstance(thing, Tracer)]
    if held and not _are_of_program(held, program, given):  # objects of flax refer to the trace too
        found: dict[str, None] = {}
        for tracer in held:
            found.update(dict.fromkeys(_places_of(tracer, held)))
        raise _stores(f"{name}: {', '.join([*found][:4]) or 'a place that Python does not tell'}")


def _are_of_program(held: list[Any], program: Any, given: Any) -> bool:
    """Whether tracers are only in what a program or JAX keeps of the trace, and in nothing that was there before it."""
    inside = set(map(id, all_within((program, *_caches_of_jax(held)))))
    holders = [h for h in gc.get_referrers(*held) if not isinstance(h, (types.FrameType, Tracer))]
    asked = [h for h in holders if type(h) in (list, tuple) and [*map(id, h)] == [*map(id, held)]]  # our own lists
    if not all(id(thing) in inside for thing in (*held, *holders) if not any(thing is one for one in asked)):
        return False
    theirs = set(map(id, all_within((given,))))
    return not any(id(tracer) in theirs for tracer in held)


def _caches_of_jax(held: list[Any]) -> list[Any]:
    """Return the caches of JAX's own functions that hold some tracers, as that of ``jax.closure_convert`` does."""
    found: list[Any] = []
    level: list[Any] = held
    for _ in range(_NEAR):
        above = gc.get_referrers(*level)
        found += [thing for thing in above if _is_cache_of_jax(thing)]
        level = [thing for thing in above if thing is not level and not isinstance(thing, _SKIPPED)][:_MAX_PARTS]
        if not level:
            break
    return found


def _is_cache_of_jax(thing: Any) -> bool:
    if isinstance(thing, _CACHE):
        return thing.__module__.startswith("jax.")
    return type(thing).__module__.startswith("jaxlib.") and type(thing).__name__.endswith("Cache")


def _collect(generation: int) -> None:
    """Collect what is garbage; while another thread collects, ``gc.collect`` does nothing."""
    before = gc.get_stats()[generation]["collections"]
    gc.collect(generation)
    while gc.get_stats()[generation]["collections"] == before:
        time.sleep(0.001)
        gc.collect(generation)


def _places_of(tracer: Any, known: list[Any]) -> list[str]:
    """Return words for what holds a tracer."""
    found = []
    for holder in gc.get_referrers(tracer):
        if holder is known or isinstance(holder, (types.FrameType, Tracer)):
            continue
        if not isinstance(holder, dict):
            found.append(f"a {type(holder).__name__}")
            continue
        key = _key_of(tracer, holder)
        owner: Any = None
        for thing in gc.get_referrers(holder):
            if isinstance(thing, type) or getattr(thing, "__dict__", None) is holder:
                owner = thing
        told = getattr(owner, "__qualname__", None) or getattr(owner, "__name__", None) or type(owner).__name__
        found.append(f"a dict, under {key!r}" if owner is None else f"{told}.{key}")
    return found


def _key_of(value: Any, holder: dict[Any, Any]) -> Any:
    for key, held in list(holder.items()):
        if held is value:
            return key
    return None


def _stores(where: str) -> LazyError:
    return LazyError(
        Problem(
            where,
            "a compiled function that stores an array there, which every call computes anew",
            "no write of an array to what holds no model: that is constant, as for jax.jit. An attribute of an "
            "object that holds a model too, such as self.losses beside self.model, is written at each call",
            "return array  # as a result of the function, and write it outside",
        )
    )
