"""Initializers of JAX, known by their code, and what is kept of the programs that draw from them.

Nothing of this is needed: an initializer that is not known is called. Seen with jax 0.10.2 and 0.12.0.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable
from typing import Any

import jax

from lazymods._compat.finding import tell


def kept_when_compiled() -> contextlib.AbstractContextManager[Any]:
    """Let JAX's persistent cache, if the user has switched it on, keep also what is compiled within a second.

    ``jax._src.config.persistent_cache_min_compile_time_secs`` as a context of this thread. (jax 0.10.2 and 0.12.0)
    """
    if not jax.config.jax_compilation_cache_dir:  # type: ignore[attr-defined]
        return contextlib.nullcontext()
    try:
        from jax._src.config import persistent_cache_min_compile_time_secs as least
    except ImportError as error:
        tell("the persistent compilation cache", str(error), "compiling short programs anew in each process")
        return contextlib.nullcontext()
    return least(0.0)


@functools.cache
def _sampling() -> frozenset[Any]:
    """Code of the initializers of JAX that draw once, at their shape, and multiply by a scalar."""
    own = jax.nn.initializers
    made = (own.normal(), own.truncated_normal(), own.uniform(), own.variance_scaling(1.0, "fan_in", "normal"))
    return frozenset(init.__code__ for init in made)  # type: ignore[attr-defined]


def is_jax_initializer(init: Any) -> bool:
    """Whether an initializer was defined by JAX, so that its result depends on nothing but its arguments.

    By the name of the module, ``jax._src.nn.initializers``. (jax 0.10.2 and 0.12.0)
    """
    return getattr(init, "__module__", None) in ("jax._src.nn.initializers", "jax.nn.initializers")


def with_modules(init: Any, **modules: Any) -> Callable[..., Any] | None:
    """Return an initializer of JAX's own that draws once and multiplies, with others in place of modules that it uses.

    None if ``init`` is not one of those. Reads ``__code__``, ``__closure__`` and ``__globals__`` of the functions in
    ``jax._src.nn.initializers``, which know ``jax.random`` as ``random`` and ``jax.numpy`` as ``jnp``. (jax 0.10.2 and
    0.12.0)
    """
    if getattr(init, "__code__", None) not in _sampling() or not init.__globals__.keys() >= modules.keys():
        return None
    names = {**init.__globals__, **modules}
    return types.FunctionType(init.__code__, names, init.__name__, init.__defaults__, init.__closure__)
