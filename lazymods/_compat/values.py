"""What jax does with a recorded value that needs the value itself: the hooks, and the private names that they need.

A recorded value is a tracer to jax, and some of its functions refuse a tracer, or hand it back as it is, where they
take any array. These get the value. The hooks are made with the first block and stay, since recorded values stay too;
for all other arguments they change nothing. Seen with jax 0.10.2 and 0.12.0; one whose name is missing is left out.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import jax
from jax._src import api, core, pjit, stages
from jax._src.interpreters.mlir import ir_constant, register_constant_handler
from jax._src.random import prng
from jax.extend.core import set_current_trace

from lazymods._compat.tracing import Recorded, Recorder


def _known(value: Any, reason: str) -> Any:
    return value.now(reason) if isinstance(value, Recorded) else value


def _parent() -> Any:
    """Return the trace to which operations would go if nothing was recorded."""
    trace = core.trace_ctx.trace
    return trace.parent if isinstance(trace, Recorder) else trace


def _device_get(ordinary: Any) -> Any:
    """``device_get`` gives a tracer back as it is."""
    return lambda x: ordinary(_known(x, "device_get"))


def _key_array(ordinary: Any) -> Any:
    """An array of keys that has a value makes others of what it does to its data: ``copy``, iteration."""
    return lambda self, impl, data: ordinary(self, impl, _known(data, "an array of keys"))


def _compiled_call(ordinary: Any) -> Any:
    """A program of ``.lower().compile()`` takes no tracers, and is run at once."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = jax.tree.map(lambda x: _known(x, "a compiled program"), (args, kwargs))
        with set_current_trace(_parent()):
            return ordinary(self, *args, **kwargs)

    return call


def _set_mesh(ordinary: Any) -> Any:
    """``set_mesh`` is refused where anything is traced."""

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        with set_current_trace(_parent()):
            ordinary(self, *args, **kwargs)

    return init


def _run_python_pjit(ordinary: Any) -> Any:
    """Let no program be called without asking Python that takes recorded values beside its arguments.

    Those over which a function closes are operands that jax adds at each call; its dispatch in C++ would leave them
    out. It uses what is here in place of the program, and None is none.
    """

    def run_python_pjit(p: Any, *args: Any) -> Any:
        answer = ordinary(p, *args)
        if any(isinstance(x, Recorded) for x in p.consts):
            return (*answer[:5], None, *answer[6:])
        return answer

    return run_python_pjit


_HOOKS: tuple[tuple[Any, str, Callable[[Any], Any]], ...] = (
    (api, "_device_get", _device_get),
    (prng.PRNGKeyArray, "__init__", _key_array),
    (stages.Compiled, "__call__", _compiled_call),
    (jax.set_mesh, "__init__", _set_mesh),
    (pjit, "_run_python_pjit", _run_python_pjit),
)
_LOCK = threading.Lock()
_installed = False


def install() -> None:
    """Make the hooks, once."""
    global _installed
    with _LOCK:
        if _installed:
            return
        _installed = True
        for owner, name, make in _HOOKS:
            before = getattr(owner, name, None)
            if before is not None:
                setattr(owner, name, functools.wraps(before)(make(before)))


def register(cls: type[Recorded]) -> None:
    """Let a program have recorded values of a class as constants (``mlir.register_constant_handler``)."""

    def constant(val: Any, aval: Any) -> Any:
        return ir_constant(val.now("a constant of a program"), aval=aval)

    register_constant_handler(cls, constant)
