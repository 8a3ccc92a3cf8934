"""Which static values a call may return or store again and again: none that holds a tracer, none that is used up."""

from __future__ import annotations

import contextlib
import gc
import types
from collections.abc import Iterable, Iterator
from typing import Any

from jax.core import Tracer

from lazymods._errors import LazyError, Problem
from lazymods._snapshot import refill
from lazymods.compile.picture import contents_of, held_by
from lazymods.compile.tokens import Kind, kind_of

_SKIPPED = (types.ModuleType, types.CodeType, type)  # a tracer is no part of these


def refuse_unrepeatable(value: Any) -> None:
    """Refuse a value that a function returned or stored if a compiled call can't give it again.

    Args:
        value: What is neither an array nor a container.

    Raises:
        LazyError: If it is an iterator, which can be used once, or if arrays of the trace are inside.
    """
    if isinstance(value, Iterator):
        raise _refusal(value, "it can be used once, and would be empty at the next call")
    if (callable(value) or hasattr(value, "__dict__")) and not isinstance(value, _SKIPPED) and _holds_tracer(value):
        raise _refusal(value, "there are arrays inside that every call computes anew")


def _refusal(value: Any, why: str) -> LazyError:
    return LazyError(
        Problem(
            "a result of the compiled function, or what it stored",
            f"a {type(value).__name__}: {why}",
            "arrays, numbers, texts, nnx objects and containers of those: what each call can return anew",
            "list(...) around an iterator; for a function, return the arrays that it closes over",
        )
    )


def _holds_tracer(value: Any) -> bool:
    """Whether a tracer is anywhere inside a function or object: in its cells, defaults, attributes, items."""
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        thing = waiting.pop()
        if isinstance(thing, Tracer):
            return True
        if id(thing) in seen or isinstance(thing, _SKIPPED) or len(seen) > 10_000:
            continue
        seen.add(id(thing))
        if isinstance(thing, types.FunctionType):  # and not its globals, where everything is
            waiting += [thing.__closure__, thing.__defaults__, thing.__kwdefaults__, vars(thing)]
        else:
            waiting += gc.get_referents(thing)
    return False


@contextlib.contextmanager
def keeping_no_tracer(reached: Iterable[tuple[str, Any]]) -> Iterator[None]:
    """Let a trace store none of its arrays in lists, dicts and objects that are constants of the program.

    What else it does to those, such as counting traces, is done at each trace only, as under ``jax.jit``.

    Args:
        reached: Names and values of what the function reaches and that holds no model.

    Raises:
        LazyError: If it did; what they held is restored then.
    """
    before = [(name, thing, contents_of(thing)) for name, thing in reached if kind_of(thing) in _CONTAINERS]
    names: list[str] = []
    try:
        yield
    finally:
        for name, thing, contents in before:
            if _has_new_tracer(thing, contents):
                refill(held_by(thing), contents)
                names.append(name)
    if names:
        raise LazyError(
            Problem(
                ", ".join(names),
                "a compiled function that stores an array there, which every call computes anew",
                "no write of an array to what holds no model: that is constant, as for jax.jit. An attribute of an "
                "object that holds a model too, such as self.losses beside self.model, is written at each call",
                "the array as a result of the function, and the write outside",
            )
        )


_CONTAINERS = (Kind.LIST, Kind.DICT, Kind.SET, Kind.QUEUE, Kind.OBJECT)


def _has_new_tracer(thing: Any, before: Any) -> bool:
    values = [c.values() if isinstance(c, dict) else c for c in (contents_of(thing), before)]
    known = set(map(id, values[1]))
    return any(isinstance(v, Tracer) and id(v) not in known for v in values[0])
