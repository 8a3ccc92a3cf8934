"""Calls of jitted functions, recorded without asking jax again: the hooks, and the private names that they need.

All of ``jax.numpy`` is jitted. Under a trace a call costs jax 10 us: ``pjit._infer_params`` finds the jaxpr in a cache,
and ``pjit._run_python_pjit`` hands it to the trace as one operation. While a thread records, both are asked here first.
The one is a cache in front of a cache, with the same key and less to do. The other notes the operation that this jaxpr
became before; that it did was observed, not concluded. ``jnp.ufunc`` and ``jax.custom_jvp``, which take longer than
that to call such a function (``jnp.add``, ``jax.nn.relu``), look in the same cache.

What is not known goes jax's way, as everything does where the current trace is no :class:`CallRecorder`: in other
threads, and inside of ``jax.jit``, ``jax.grad`` and ``jax.vmap``. The hooks are there while a block is open. Seen with
jax 0.10.2, 0.11.2 and 0.12.0; where the signatures are others there are no hooks, and all is as slow as before.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
import types
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import pjit
from jax._src.array import ArrayImpl
from jax._src.config import eager_constant_folding, no_tracing
from jax._src.core import trace_state_strong_ref
from jax._src.lib import jax_jit
from jax._src.numpy import ufunc_api
from jax._src.tree_util import tracing_registry
from jax.extend.core import Jaxpr

from lazymods._compat.finding import require
from lazymods._compat.tracing import Recorded, Recorder, Recording, open_jaxpr, settings

_CURRENT: Any = trace_state_strong_ref  # whose value is the trace to which operations go
_MOST = 1 << 13
_NUMBERS = frozenset({bool, int, float, complex, *(np.dtype(code).type for code in "?bBhHiIlLefdFD")})


class CallRecording(Recording, Protocol):
    """What a :class:`CallRecorder` tells: it can note again what it has noted before.

    Attributes:
        pending: The operations that are noted.
    """

    pending: Sequence[Any]

    def noted(self, before: int, operands: Sequence[Any], results: Sequence[Any]) -> Any:
        """Return the kind of the only operation since there were ``before``, if it is of these operands and results."""
        ...

    def add(self, kind: Any, operands: Sequence[Any]) -> list[Any]:
        """Note an operation of a known kind, of recorded values, arrays and numbers; return its results."""
        ...


class CallRecorder(Recorder):
    """A :class:`Recorder` whose recording is a :class:`CallRecording`: known calls do not come to it."""

    __slots__ = ()


# ---------------------------------------------------------------- what is known


class _Call(pjit.PjitParams):
    """What ``_infer_params`` gives for a call, and what the call becomes.

    Attributes:
        key: Where it is in the cache, once ``kind`` is known.
        info: What the key has only the id of, so that no other gets it.
        function: What is jitted, weakly; when it goes, this does.
        witness: A weak reference to what was there before jax was asked.
        kind: The kind of the operation.
        tree: The structure of its results; None for a single one.
    """

    key: Any
    info: Any
    function: Any
    witness: Any
    kind: Any = None
    tree: Any = None

    def keep(self, kind: Any) -> None:
        """Put it into the cache, if it is not out of date already."""
        self.kind, self.tree = kind, None if self.out_tree == _LEAF else self.out_tree  # None and () are no leaves
        if self.witness() is not None:
            _add(self.key, self)


class _Witness:
    """Goes when the cache of ``_infer_params`` is cleared, since nothing else holds it.

    ``jax.clear_caches`` and ``f.clear_cache`` tell nobody, and what they forget is to be forgotten here.
    """


def _nobody() -> None: ...


_LEAF = jax.tree.structure(0)


def _forget(calls: dict[Any, Any], _: Any) -> None:
    calls.clear()


def _present() -> Any:
    """Return a weak reference to a witness that is there now."""
    global _witness
    if _witness() is None:
        new: Any = _Witness()
        _calls.clear()
        _witness = weakref.ref(new, functools.partial(_forget, _calls))
        pjit._infer_params_cached(_nobody, new, new, (), new)
    return _witness


def _add(key: Any, call: Any) -> None:
    if len(_calls) >= _MOST:
        _calls.clear()
    _calls[key] = call


_calls: dict[Any, Any] = {}  # a _Call by the id of what is jitted, an _Inside by that of what calls it
_witness: weakref.ref[_Witness] = weakref.ref(_Witness())  # none yet


def _key(trace: Any, called: int, operands: Sequence[Any], signature: Any = None) -> tuple[Any, ...] | None:
    """Return what jax sees of a call; None if that may be more, as of an array of numpy, or if it may refuse it."""
    key = [settings(), called, signature]
    for x in operands:
        if isinstance(x, Recorded):
            if x.recorder is not trace:
                return None
            key.append(x.aval)
            continue
        kind = type(x)
        if kind is ArrayImpl:
            key.append(x.aval)
        elif kind is float or (kind in _NUMBERS and (kind is not int or -(1 << 31) <= x < 1 << 31)):
            key.append(kind)
        else:
            return None
    return tuple(key)


# ---------------------------------------------------------------- hooks


def _infer_params(ordinary: Any) -> Any:
    def infer_params(fun: Any, ji: Any, args: Any, kwargs: Any) -> Any:
        trace = _CURRENT.value
        if type(trace) is not CallRecorder:
            return ordinary(fun, ji, args, kwargs)
        key = None if kwargs else _key(trace, id(ji), args)
        if key is not None:
            known = _calls.get(key)
            if known is not None:
                return known, args
        if key is None or ji.static_argnums or ji.static_argnames:
            signature, operands = jax_jit.parse_arguments(
                *(args, tuple(kwargs.values()), tuple(kwargs)),
                *(ji.static_argnums, ji.static_argnames, tracing_registry),
            )
            key = _key(trace, id(ji), operands, signature)
            if key is None:
                return ordinary(fun, ji, args, kwargs)
            known = _calls.get(key)
            if known is not None:
                return known, operands
        witness = _present()
        p, operands = ordinary(fun, ji, args, kwargs)
        # It closes over recorded values, has types for which jax does not keep it, depends on a mesh that is not in the
        # key, or may be executed at once.
        high = open_jaxpr(p.params["jaxpr"])[0].is_high
        if p.consts or high or ji.use_resource_env or eager_constant_folding.value:
            return p, operands
        call = _Call(*p)
        call.key, call.info, call.witness = key, ji, witness
        call.function = weakref.ref(fun, functools.partial(_calls.pop, key))
        return call, operands

    return infer_params


class _NoJaxpr:
    """In place of a jaxpr, where jax asks whether what it executed can be executed faster: nothing was."""

    effects = consts = ()


def _run_python_pjit(ordinary: Any) -> Any:
    def run_python_pjit(p: Any, args_flat: Any, fun: Any, args: Any, kwargs: Any) -> Any:
        if type(p) is not _Call:
            return ordinary(p, args_flat, fun, args, kwargs)
        recording: CallRecording = _CURRENT.value.recording
        if p.kind is not None:
            leaves = recording.add(p.kind, args_flat)
            result = leaves[0] if p.tree is None else p.tree.unflatten(leaves)
            return result, leaves, p.out_tree, args_flat, _NoJaxpr, None, None, ()
        before = len(recording.pending)
        result, leaves, tree, *rest = answer = ordinary(p, args_flat, fun, args, kwargs)
        kind = recording.noted(before, args_flat, leaves)
        if kind is not None and len(rest) == 5 and tree == p.out_tree:
            p.keep(kind)
        return answer

    return run_python_pjit


def _around(jitted: Any) -> Any:
    """Return a hook for the ``__call__`` of something that, while a thread records, calls a jitted function."""

    def hook(ordinary: Any) -> Any:
        @functools.wraps(ordinary)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            trace = _CURRENT.value
            if type(trace) is CallRecorder and not kwargs and not no_tracing.value:
                key = _key(trace, id(self), args)
                known = _calls.get(key)
                if known is None and key is not None:
                    known = _inside(trace, self, jitted(self), key, args)
                if known is not None:
                    return trace.recording.add(known.kind, args)[0]
            return ordinary(self, *args, **kwargs)

        return call

    return hook


class _Inside(NamedTuple):
    """What a call of something becomes that calls a jitted function.

    Attributes:
        kind: The kind of the operation.
        caller: What is called, weakly; when it goes, this does.
    """

    kind: Any
    caller: Any


def _inside(trace: Any, caller: Any, function: Any, key: Any, args: Sequence[Any]) -> _Inside | None:
    """Keep for a caller what is known of the jitted function that it calls, if that has a single result."""
    call = _calls.get(_key(trace, id(function._jit_info), args)) if type(function) is _JITTED else None
    if call is None or call.tree is not None:
        return None
    found = _Inside(call.kind, weakref.ref(caller, functools.partial(_calls.pop, key)))
    _add(key, found)
    return found


def _of_ufunc(self: Any) -> Any:
    return self._ufunc__static_props["call"]


def _of_custom_jvp(self: Any) -> Any:
    return self.fun if self.jvp and not self.nondiff_argnums else None


_example: Any = jax.jit(_nobody)
_JITTED: Any = type(_example)
require(_example, "_jit_info")
require(_example._jit_info, "static_argnums", "static_argnames", "use_resource_env")
require(pjit.PjitParams, "consts", "params", "out_tree")
require(jax_jit, "parse_arguments")
require(jnp.add, "_ufunc__static_props")
require(jax.custom_jvp, "nondiff_argnums")
require(Jaxpr, "is_high")
_HOOKS: tuple[tuple[Any, str, tuple[str, ...], Any], ...] = (
    (pjit, "_infer_params", ("fun", "ji", "args", "kwargs"), _infer_params),
    (pjit, "_run_python_pjit", ("p", "args_flat", "fun", "args", "kwargs"), _run_python_pjit),
    (ufunc_api.ufunc, "__call__", ("self", "args", "out", "where"), _around(_of_ufunc)),
    (jax.custom_jvp, "__call__", ("self", "args", "kwargs"), _around(_of_custom_jvp)),
)


def _is_as_seen(owner: Any, name: str, parameters: tuple[str, ...]) -> bool:
    function = getattr(owner, name, None)
    return isinstance(function, types.FunctionType) and tuple(inspect.signature(function).parameters) == parameters


_AS_SEEN = hasattr(pjit, "_infer_params_cached") and all(_is_as_seen(a, b, c) for a, b, c, _ in _HOOKS)
_LOCK = threading.Lock()
_open = 0
_hooked: list[tuple[Any, str, Any, Any]] = []  # with what was there before


@contextlib.contextmanager
def remembered() -> Iterator[None]:
    """Let :class:`CallRecorder` note the calls of jitted functions that are known, as long as one block is open."""
    global _open
    with _LOCK:
        _open += 1
        if _open == 1 and _AS_SEEN:
            for owner, name, _, make in _HOOKS:
                before = getattr(owner, name)
                hook = make(before)
                setattr(owner, name, hook)
                _hooked.append((owner, name, hook, before))
    try:
        yield
    finally:
        with _LOCK:
            _open -= 1
            while _open == 0 and _hooked:
                owner, name, hook, before = _hooked.pop()
                if getattr(owner, name) is hook:  # else somebody has wrapped it meanwhile: it does nothing there
                    setattr(owner, name, before)
