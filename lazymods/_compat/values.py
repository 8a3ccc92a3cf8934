"""What jax does with a recorded value that needs the value itself: the hooks, and the private names that they need.

A recorded value is a tracer to jax, and some of its functions refuse a tracer, or hand it back as it is, where they
take any array. These get the value. The hooks are made with the first block and stay, since recorded values stay too;
for all other arguments they change nothing. Seen with jax 0.10.2 and 0.12.0; one whose name is missing is left out.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax._src import api, array, core, pjit, stages
from jax._src.interpreters.mlir import ir_constant, register_constant_handler
from jax._src.lax import lax
from jax._src.random import prng
from jax.extend.core import set_current_trace

from lazymods._compat.tracing import Recorded, Recorder


def known(value: Any, reason: str) -> Any:
    """Return a recorded value as an array, for ``reason``; any other value as it is."""
    return value.now(reason) if isinstance(value, Recorded) else value


def _parent() -> Any:
    """Return the trace to which operations would go if nothing was recorded."""
    trace = core.trace_ctx.trace
    return trace.parent if isinstance(trace, Recorder) else trace


def _device_get(ordinary: Any) -> Any:
    """``device_get`` gives a tracer back as it is. An array of numpy is the caller's own: nobody else has this one."""

    def get(x: Any) -> Any:
        got = ordinary(known(x, "device_get"))
        return np.array(got) if isinstance(x, Recorded) and isinstance(got, np.ndarray) else got

    return get


def _key_array(ordinary: Any) -> Any:
    """An array of keys that has a value makes others of what it does to its data: ``copy``, iteration."""
    return lambda self, impl, data: ordinary(self, impl, known(data, "an array of keys"))


def _at_once(reason: str) -> Callable[[Any], Any]:
    """What takes arrays that have values is executed, as a program of ``.lower().compile()``."""

    def make(ordinary: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = jax.tree.map(lambda x: known(x, reason), (args, kwargs))
            with set_current_trace(_parent()):
                return ordinary(*args, **kwargs)

        return call

    return make


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


def _is_default(sharding: Any) -> bool:
    """Whether an array is there anyhow; ``jax.grad`` gives a sharding without devices (``Sharding._is_concrete``)."""
    if sharding is None or not sharding._is_concrete:
        return True
    if type(sharding) is not jax.sharding.SingleDeviceSharding:
        return False
    chosen: Any = jax.config.jax_default_device  # type: ignore[attr-defined]
    return sharding.device_set == {chosen if isinstance(chosen, jax.Device) else jax.local_devices()[0]}


def _full(ordinary: Any) -> Any:
    """``jnp.zeros(..., device=)`` and the like make an array where it is asked for only if nothing is traced."""

    def full(shape: Any, fill_value: Any, dtype: Any = None, *, sharding: Any = None) -> Any:
        if not isinstance(core.trace_ctx.trace, Recorder) or _is_default(sharding):
            return ordinary(shape, fill_value, dtype, sharding=sharding)
        with set_current_trace(_parent()):
            return ordinary(shape, known(fill_value, "full"), dtype, sharding=sharding)

    return full


def _nondiff(ordinary: Any) -> Any:
    """``custom_vjp`` refuses tracers where it does not differentiate; its rule may ask for the values of those."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.nondiff_argnums:
            of_tree = functools.partial(jax.tree.map, lambda x: known(x, "nondiff_argnums"))
            fixed = set(self.nondiff_argnums)
            args = tuple([of_tree(x) if n in fixed else x for n, x in enumerate(args)])
            kwargs = of_tree(kwargs)
        return ordinary(self, *args, **kwargs)

    return call


def _type_handler(ordinary: Any) -> Any:
    """Orbax looks for what saves a value by its class; what it finds asks the value itself, which is an array then."""

    def get(self: Any, ty: Any) -> Any:
        return ordinary(self, jax.Array if isinstance(ty, type) and issubclass(ty, Recorded) else ty)

    return get


_HOOKS: tuple[tuple[Any, str, Callable[[Any], Any]], ...] = (
    (api, "_device_get", _device_get),
    (prng.PRNGKeyArray, "__init__", _key_array),
    (stages.Compiled, "__call__", _at_once("a compiled program")),
    *[
        (module, name, _at_once(name))
        for module in (jax, array)
        for name in ("make_array_from_single_device_arrays", "make_array_from_callback")
    ],
    (jax.custom_vjp, "__call__", _nondiff),
    (lax, "full", _full),
    (jax.lax, "full", _full),
    (jax, "make_array_from_process_local_data", _at_once("make_array_from_process_local_data")),
    (array, "_reconstruct_array", _at_once("pickle")),  # what is loaded has a value, also as the data of a key
    (jax.set_mesh, "__init__", _set_mesh),
    (pjit, "_run_python_pjit", _run_python_pjit),
)
_ORBAX = "orbax.checkpoint._src.serialization.type_handler_registry"  # seen with orbax-checkpoint 0.11 and 0.12
_LOCK = threading.Lock()
_installed = _orbax_is_ready = False


def install() -> None:
    """Make the hooks, once; those of Orbax when it has been imported."""
    global _installed, _orbax_is_ready
    with _LOCK:
        if not _installed:
            _installed = True
            for owner, name, make in _HOOKS:
                _hook(owner, name, make)
        registry = None if _orbax_is_ready else sys.modules.get(_ORBAX)
        if registry is not None:
            _orbax_is_ready = True
            _hook(getattr(registry, "_TypeHandlerRegistryImpl", None), "get", _type_handler)


def _hook(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    before = getattr(owner, name, None)
    if before is not None:
        setattr(owner, name, functools.wraps(before)(make(before)))


def register(cls: type[Recorded]) -> None:
    """Let a program have recorded values of a class as constants (``mlir.register_constant_handler``)."""

    def constant(val: Any, aval: Any) -> Any:
        return ir_constant(val.now("a constant of a program"), aval=aval)

    register_constant_handler(cls, constant)
