"""Abstract evaluation: traces that see shapes and operations only.

Subclasses ``Trace`` and ``Tracer`` of ``jax.core``; private is what they override, and what is called beside it:
``Primitive.abstract_eval``, ``WrappedFun.call_wrapped``, ``jax._src.core.shaped_abstractify``. Seen to work with jax
0.10.2, 0.11.2 and 0.12.0, unless it says otherwise. Without them :mod:`lazymods._compat.plain_abstract` is used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.core import EvalTrace, shaped_abstractify
from jax.core import ShapedArray, Trace, Tracer, eval_jaxpr
from jax.extend.core import Primitive, set_current_trace
from jax.extend.linear_util import WrappedFun

from lazymods._compat.fast_traces import current_trace
from lazymods._compat.finding import require

_NESTED = ("process_custom_jvp_call", "process_custom_vjp_call")  # and process_call, until jax 0.11
require(Trace, "process_primitive", "stage_value", "invalidate", *_NESTED)
require(EvalTrace, "process_shard_map")
require(Tracer, "_trace", "aval", "_short_repr")
require(Primitive, "abstract_eval")
require(WrappedFun, "call_wrapped")


class _Abstract(Tracer):
    """A value without a value: shape and dtype alone."""

    __slots__ = ()

    def _short_repr(self) -> str:
        return f"Abstract<{self.aval}>"

    def _elementwise(self, other: Any) -> Any:
        """Return what arithmetic with another value gives, if that is plain to see; else None."""
        trace: Any = self._trace  # type: ignore[attr-defined]
        if type(other) is not _Abstract or other._trace is not trace or current_trace() is not trace:
            return None
        one: Any = self.aval
        two: Any = other.aval
        same = one.dtype == two.dtype and one.ndim == two.ndim and not (one.weak_type or two.weak_type)
        if type(trace) is not _AbstractTrace or not same or not jnp.issubdtype(one.dtype, np.inexact):
            return None
        shape = tuple([m if n == 1 else n for n, m in zip(one.shape, two.shape, strict=True)])
        fits = all([d in (1, n) for aval in (one, two) for d, n in zip(aval.shape, shape, strict=True)])
        return zeros(shape, one.dtype) if fits and one.sharding.mesh.empty and two.sharding.mesh.empty else None


def _arithmetic(name: str) -> Any:
    """Return an operator that spares JAX its tracing of ``jnp.add`` and the like at every shape that it has not met."""
    ordinary = getattr(Tracer, name)

    def operator(self: Any, other: Any) -> Any:
        known = self._elementwise(other)
        return ordinary(self, other) if known is None else known

    return operator


for _name in ("__add__", "__sub__", "__mul__", "__truediv__"):
    setattr(_Abstract, _name, _arithmetic(_name))


class OperationByOperation(Trace):
    """A trace that sees the operations within functions that have rules of their own, as executing them does."""

    __slots__ = ()

    def _inside(self, fun: Any, tracers: Any) -> Any:
        with set_current_trace(self):
            return fun.call_wrapped(*tracers)

    def process_call(self, primitive: Any, fun: Any, tracers: Any, params: Any, /) -> Any:
        return self._inside(fun, tracers)

    def process_custom_jvp_call(self, primitive: Any, fun: Any, jvp: Any, tracers: Any, /, **_: Any) -> Any:
        return self._inside(fun, tracers)

    def process_custom_vjp_call(self, primitive: Any, fun: Any, fwd: Any, bwd: Any, tracers: Any, /, **_: Any) -> Any:
        return self._inside(fun, tracers)


def abstract(primitive: Any, avals: Sequence[Any], params: dict[str, Any]) -> tuple[Sequence[Any], Any]:
    """Return what an operation gives, and its effects (``Primitive.abstract_eval``)."""
    out, effects = primitive.abstract_eval(*avals, **params)
    return out if primitive.multiple_results else [out], effects


class _AbstractTrace(OperationByOperation):
    """A trace that finds the shapes of every operation as executing it would, and keeps nothing.

    ``jax.eval_shape`` keeps every operation, and goes through all of them each time that somebody asks a tracer for
    an attribute that it lacks, as ``nnx.BatchNorm`` does twice a call: that is quadratic in the number of layers.
    """

    __slots__ = ()

    def process_primitive(self, primitive: Any, tracers: Any, params: dict[str, Any], /) -> Any:
        with set_current_trace(self):
            avals, effects = abstract(primitive, list(map(jax.typeof, tracers)), params)
        made = [_Abstract(self, aval) for aval in avals]
        self.note(primitive, tracers, params, made, effects)
        return made if primitive.multiple_results else made[0]

    def note(self, primitive: Any, tracers: Any, params: dict[str, Any], made: list[Any], effects: Any) -> None:
        """See an operation."""

    def stage_value(self, val: Any) -> Any:
        return val

    def process_shard_map(self, primitive: Any, fun: Any, tracers: Any, **params: Any) -> Any:
        found: list[Any] = []  # a tree of JAX's own

        def bind(*args: Any) -> None:
            found.append(current_trace().process_shard_map(primitive, fun, args, **params).map(jax.typeof))

        jax.eval_shape(bind, *tracers)
        return found[0].map(lambda aval: _Abstract(self, aval))


class _Recorder(_AbstractTrace):
    """One that notes the operations: each would be one compiled program."""

    __slots__ = ("operations",)

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Sequence[Any], dict[str, Any], list[Any]]] = []

    def note(self, primitive: Any, tracers: Any, params: dict[str, Any], made: list[Any], effects: Any) -> None:
        if effects:
            raise NotImplementedError(f"{primitive} has effects")
        self.operations.append((primitive, list(tracers), params, made))


class _Historian(_AbstractTrace):
    """One that keeps which operation made what, also inside of functions that are jitted."""

    __slots__ = ("producers", "values")

    def __init__(self, producers: dict[int, tuple[str, Sequence[Any], dict[str, Any]]]) -> None:
        super().__init__()
        self.producers = producers
        self.values: list[Any] = []  # so that their ids stay theirs

    def process_primitive(self, primitive: Any, tracers: Any, params: dict[str, Any], /) -> Any:
        program = params.get("jaxpr") if primitive.name in ("jit", "pjit") else None
        if program is None:
            return super().process_primitive(primitive, tracers, params)
        with set_current_trace(self):
            return eval_jaxpr(program.jaxpr, program.consts, *tracers)

    def note(self, primitive: Any, tracers: Any, params: dict[str, Any], made: list[Any], effects: Any) -> None:
        self.values += made
        self.producers |= dict.fromkeys(map(id, made), (primitive.name, list(tracers), params))


def call_abstractly(
    fun: Callable[..., Any],
    specs: Any,
    producers: dict[int, tuple[str, Sequence[Any], dict[str, Any]]] | None = None,
) -> Any:
    """Find the shapes and dtypes that ``fun`` returns for those of a pytree, as ``jax.eval_shape`` does.

    Subclasses ``jax.core.Trace`` and ``Tracer``; calls ``Primitive.abstract_eval``, ``set_current_trace``,
    ``jax.typeof`` and ``shaped_abstractify``. (jax 0.10.2, 0.11.2 and 0.12.0)

    Args:
        fun: The function.
        specs: What it is called with.
        producers: Gets, while ``fun`` runs, by the id of each value the name of the operation that made it, its
            operands and its parameters.
    """

    def spec(value: Any) -> jax.ShapeDtypeStruct:
        aval = jax.typeof(value)
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)

    trace = _AbstractTrace() if producers is None else _Historian(producers)
    values = jax.tree.map(lambda x: _Abstract(trace, shaped_abstractify(x)), specs)
    try:
        with set_current_trace(trace):
            return jax.tree.map(spec, fun(values))
    finally:
        trace.invalidate()


def zeros(shape: Sequence[int], dtype: Any) -> Any:
    """Return zeros in the current trace; where nothing is computed, without asking JAX what their shape will be."""
    trace = current_trace()
    if type(trace) is _AbstractTrace and not jnp.issubdtype(dtype, jax.dtypes.extended):
        return _Abstract(trace, ShapedArray(tuple(shape), np.dtype(dtype)))
    return jax.lax.full(shape, 0, dtype)


def recorded(fun: Callable[[Any], Any], dtype: Any) -> tuple[Any, Any, list[tuple[Any, Sequence[Any], Any, list[Any]]]]:
    """Call ``fun`` with a scalar that has no value, and note which programs executing it would run, one by one.

    ``jax.make_jaxpr`` does not tell: it takes ``jax.jit(..., inline=True)`` apart. Subclasses ``jax.core.Trace``
    and ``Tracer``; calls ``Primitive.abstract_eval`` and ``jax._src.jax.typeof``. (jax 0.10.2 and 0.12.0)

    Returns:
        The scalar, what ``fun`` returned, and of every operation primitive, inputs, parameters and outputs.
    """
    trace = _Recorder()
    scalar = _Abstract(trace, ShapedArray((), dtype))
    with set_current_trace(trace):
        out = fun(scalar)
    trace.invalidate()
    return scalar, out, trace.operations
