"""The blocks in which operations are recorded."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

from lazymods import _compat
from lazymods._compat import calls, tracing, values
from lazymods._refusals import refuse_uncallable
from lazymods.lazytensor.trace import session, session_for


class Block:
    """What :func:`lazy` returns: a context manager, and a decorator whose function has a block at every call."""

    __slots__ = ("_entered", "_options")

    def __init__(self, *options: Any) -> None:
        self._options = options
        self._entered = _recorded(*options)

    def __enter__(self) -> None:
        self._entered.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self._entered.__exit__(*error)

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that records what it does."""
        refuse_uncallable("lm.lazytensor.lazy", function, "lm.lazytensor.lazy()(f)")

        @functools.wraps(function)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            with _recorded(*self._options):
                return function(*args, **kwargs)

        return recorded


def lazy(*, max_ops: int | None = None, check: bool = False) -> Block:
    """Record the operations of a block instead of running them; also a decorator.

    What is recorded is cut into programs where Python needs a value, at :func:`mark_step`, and at the end of the
    outermost block. Inside of a function that ``jax.jit`` or another transform traces it does nothing: that records
    already. A block that raises leaves what it recorded to be computed when it is wanted.

    Args:
        max_ops: Operations after which a graph is cut, which bounds the time of a compile; 20,000 if not given.
        check: Execute every operation at once as well, on values of its own, and compare each value that a cut
            computes: its type exactly, and floats to rounding. Operations with effects run once, and are not checked.
            A block then takes longer than both together. ``LAZYMODS_CHECK=1`` in the environment turns it on
            for all blocks. In nested blocks the outermost one decides.

    Returns:
        A context manager, to be entered once, which is a decorator too.

    Raises:
        ArgumentError: What it decorates can't be called.
        LazyError: With ``check``: the first operation that gave something else, by name and types.

    Example:
        >>> import jax.numpy as jnp
        >>> import lazymods as lm
        >>> with lm.lazytensor.lazy():
        ...     y = jnp.arange(3.0) * 2
        ...     z = y + 1 if y.sum() > 0 else y - 1
        >>> z
        Array([1., 3., 5.], dtype=float32)
    """
    return Block(max_ops, check)


@contextlib.contextmanager
def _recorded(max_ops: int | None, check: bool) -> Iterator[None]:
    running = session()
    if running is None and not _compat.executing():
        yield
        return
    if running is None:
        running = session_for(check or os.environ.get("LAZYMODS_CHECK") == "1")
    before, running.max_ops = running.max_ops, max_ops or running.max_ops
    running.depth += 1
    try:
        if running.depth > 1:
            yield
        else:
            values.install()
            with calls.remembered(), tracing.at(running.trace):
                yield
                running.cut()
    finally:
        running.depth -= 1
        running.max_ops = before
