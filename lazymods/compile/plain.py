"""``lm.jit`` by ``nnx.jit``, for a jax or flax that lacks a private name which the usual way needs.

Slower at each call. Closed-over models and new structures are what ``nnx.jit`` makes of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from flax import nnx

from lazymods._compat.finding import problem, tell
from lazymods._errors import NOT_TRACEABLE, MissingNameError
from lazymods._refusals import refuse_uncallable

_missing = ""  # the missing name, as Python's error tells it


def jit_without(error: MissingNameError) -> Callable[..., Any]:
    """Return what takes the place of ``lm.jit``, and warn.

    Args:
        error: What is missing.
    """
    global _missing
    _missing = str(error.__cause__)
    tell("lm.jit", _missing, "nnx.jit")
    return jit


def jit(
    function: Any = None,
    *,
    donate_state: bool = False,
    static_argnames: str | Sequence[str] = (),
    max_paths: int = 16,
    check: bool = False,
) -> Any:
    """Compile a function or module with ``nnx.jit``; takes what ``lm.jit`` takes.

    Args:
        function: A function, a method, or a module, which is then called. Left out, ``jit`` is a decorator.
        donate_state: Nothing is donated: ``nnx.jit`` knows no way for the state alone.
        static_argnames: Parameters that the program depends on by value, a name or several.
        max_paths: There is one path.
        check: There is nothing to compare.

    Raises:
        ArgumentError: If ``function`` can't be called.
        MissingNameError: At a call, where Python decides on the value of an array.
    """
    if function is None:
        return lambda function: _compiled(function, static_argnames)
    return _compiled(function, static_argnames)


def _compiled(function: Any, static_argnames: str | Sequence[str]) -> Any:
    refuse_uncallable("lm.jit", function)
    is_module = isinstance(function, nnx.Module)
    compiled = nnx.jit(_call if is_module else function, static_argnames=static_argnames)
    given = (function,) if is_module else ()

    @functools.wraps(type(function) if is_module else function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return compiled(*given, *args, **kwargs)
        except NOT_TRACEABLE as error:
            raise MissingNameError(problem("lm.jit: a Python decision on the value of an array", _missing)) from error

    return call


def _call(module: Any, *args: Any, **kwargs: Any) -> Any:
    return module(*args, **kwargs)
