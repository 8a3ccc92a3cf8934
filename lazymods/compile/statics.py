"""Which static values every call may return or store: none that holds a tracer, and none that can be used only once."""

from __future__ import annotations

import types
from collections.abc import AsyncIterator, Awaitable, Iterator
from typing import Any

from lazymods._errors import LazyError, Problem
from lazymods._objects.within import holds_tracer


def refuse_unrepeatable(value: Any) -> None:
    """Refuse a value that a function returned or stored if a compiled call can't give it again.

    Args:
        value: What is neither an array nor a container.

    Raises:
        LazyError: If it is an iterator or a coroutine, which can be used once, or if arrays of the trace are inside.
    """
    if isinstance(value, types.CoroutineType):
        value.close()  # else Python warns that it was never awaited
    if isinstance(value, (Iterator, Awaitable, AsyncIterator)):
        raise refuse_result(value, "it can be used once, and would be empty at the next call")
    if holds_tracer(value):
        raise refuse_result(value, "there are arrays inside that every call computes anew")


def refuse_result(value: Any, why: str) -> LazyError:
    """Return the error for what a function returned or stored, and no compiled call can."""
    return LazyError(
        Problem(
            "a result of the compiled function, or what it stored",
            f"a {type(value).__name__}: {why}",
            "arrays, numbers, texts, nnx objects and containers of those: what each call can return anew",
            "return list(iterator)  # for a function: the arrays that it closes over",
        )
    )
