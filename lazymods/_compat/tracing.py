"""Recording: a trace that notes operations instead of running them.

There is no public way: where a private name is gone, lazy tensors are, and decisions on values in ``lm.jit``. Seen to
work with jax 0.10.2, 0.11.2 and 0.12.0, unless it says otherwise.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
import sys
import types
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import jax
import numpy as np
from jax._src import api_util, checkify, config, core, dispatch, hijax, literals, pjit
from jax._src.array import ArrayImpl
from jax._src.config import eager_constant_folding
from jax._src.interpreters import ad, batching, pxla
from jax._src.numpy import indexing
from jax.core import Trace, Tracer
from jax.extend.core import Jaxpr, Primitive, concrete_or_error, set_current_trace

from lazymods._compat.abstract import OperationByOperation
from lazymods._compat.finding import require
from lazymods._compat.traces import EVAL
from lazymods._compat.worlds import same_world

require(Trace, "_weakref", "is_valid")
require(Tracer, "to_concrete_value", "full_lower")
require(Primitive, "bind_with_trace", "ref_allocating")
require(core.trace_state_strong_ref, "value")
require(config.enable_x64, "swap_local", "set_local")
require(core.JaxprEqnContext, "manager")
require(api_util.InternalFloatingPointError("", ""), "name", "ty")
require(core, "escaped_tracer_error", "check_bool_conversion", "check_scalar_conversion", "check_integer_conversion")
require(core, "current_jaxpr_eqn_context", "pytype_aval_mappings")
require(pxla, "shard_arg_handlers")
require(literals, "TypedNdArray")
require(checkify, "check_p")

# What a function of jax asks of a tracer while it only looks, as jnp.power does at its exponent, is answered with None.
# These need the value, and would have it if they were executed: (jax 0.10.2, 0.11.2 and 0.12.0)
_NEEDING: dict[Any, str] = {
    Tracer.__bool__: "bool",  # of a tracer of grad or vmap around a recorded value
    Tracer.__int__: "int",
    Tracer.__index__: "int",
    Tracer.__hex__: "int",
    Tracer.__oct__: "int",
    concrete_or_error: "an argument that has to be known",
    core.EvalTrace.process_primitive: "an operation that is executed",
    pjit._run_python_pjit: "an operation that is executed",
    indexing.NDIndexer.expand_bool_indices: "a boolean index",
    jax.lax.fori_loop: "the bounds of fori_loop",  # known ones make it a scan, which has a reverse derivative
}
_PASSING: tuple[Any, ...] = (
    core.to_concrete_value,
    core.is_concrete,
    core.full_lower,
    ad.JVPTracer.to_concrete_value,
    ad.LinearizeTracer.to_concrete_value,
    ad.JVPTracer.full_lower,
    ad.LinearizeTracer.full_lower,
    batching.BatchTracer.full_lower,
)


def _code(function: Any) -> types.CodeType:
    return inspect.unwrap(function).__code__


_needing = {_code(function): reason for function, reason in _NEEDING.items()}
_passing = frozenset(map(_code, _PASSING))


class Recording(Protocol):
    """What a :class:`Recorder` tells what it sees."""

    def note(self, primitive: Any, inputs: Sequence[Any], params: dict[str, Any]) -> list[Recorded]:
        """Note one operation; return its results."""
        ...

    def constant(self, value: Any) -> Any:
        """Return what stands for a Python number or a numpy array that becomes an array."""
        ...

    def value(self, recorded: Recorded, reason: str) -> Any:
        """Return the value of what was recorded: Python needs it now, for ``reason``; bool and int want it as such."""
        ...


class Recorded(Tracer):
    """A value that was noted and not computed: shape and dtype, and what its recording keeps in ``cell``.

    There is one for a cell; when Python drops it, ``cell.held`` becomes False.
    """

    __slots__ = ("cell",)
    recorder: Any = Tracer.__dict__["_trace"]  # the slot, by a public name

    def __init__(self, trace: Recorder, aval: Any, cell: Any) -> None:
        self._trace = trace
        self.aval = aval
        self.cell: Any = cell

    def __del__(self) -> None:
        self.cell.held = False

    @property
    def recording(self) -> Any:
        """The recording that it belongs to."""
        return self._trace.recording

    def now(self, reason: str) -> Any:
        """Return the value.

        Args:
            reason: What Python does with it.

        Raises:
            jax.errors.UnexpectedTracerError: The recording has ended, and what it left is no value of its own.
        """
        if not self._trace.is_valid():
            raise core.escaped_tracer_error(self)
        return self._trace.recording.value(self, reason)

    def _asked(self) -> Any:
        frame = sys._getframe(2)
        while frame.f_code in _passing and frame.f_back is not None:
            frame = frame.f_back
        return self.now(_needing[frame.f_code]) if frame.f_code in _needing else None

    def to_concrete_value(self) -> Any:
        """Return the value to those functions of jax that cannot do without (see ``_NEEDING``)."""
        return self._asked()

    def full_lower(self) -> Any:
        """Return the value to what is about to execute an operation on it."""
        value = self._asked()
        return self if value is None else value

    def __bool__(self) -> bool:
        core.check_bool_conversion(self)
        return bool(self.now("bool"))

    def __int__(self) -> int:
        core.check_scalar_conversion(self)
        return int(self.now("int"))

    def __index__(self) -> int:
        core.check_integer_conversion(self)
        return int(self.now("int"))

    def __float__(self) -> float:
        core.check_scalar_conversion(self)
        return float(self.now("float"))

    def __complex__(self) -> complex:
        core.check_scalar_conversion(self)
        return complex(self.now("complex"))

    def __hex__(self) -> str:
        return hex(self.__index__())

    def __oct__(self) -> str:
        return oct(self.__index__())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        value = np.asarray(self.now("array"), dtype=dtype)
        return value.copy() if copy else value

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self.now("dlpack").__dlpack__(**kwargs)

    def __dlpack_device__(self) -> Any:
        return self.now("dlpack").__dlpack_device__()

    def item(self, *args: Any) -> Any:
        """Return one element as a Python number."""
        return self.now("item").item(*args)

    def tolist(self) -> Any:
        """Return the elements as a list."""
        return self.now("tolist").tolist()

    def tobytes(self, order: Any = "C") -> bytes:  # type: ignore[override]
        """Return the elements as bytes."""
        return self.now("tobytes").tobytes(order)


_worlds: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


class Recorder(OperationByOperation):
    """A trace that hands every operation to a :class:`Recording`, one by one, as executing them would run them.

    Args:
        recording: What notes the operations.

    Subclasses ``jax.core.Trace``; calls ``Primitive.abstract_eval`` and ``jax.typeof``.
    """

    __slots__ = ("parent", "recording")

    def __init__(self, recording: Any) -> None:
        super().__init__()
        self.recording: Any = recording
        self.parent: Any = core.trace_ctx.trace
        world = _worlds.get(self.parent)
        if world is None:
            world = _worlds.setdefault(self.parent, same_world(self.parent))
        self._weakref = world

    def process_primitive(self, primitive: Any, tracers: Any, params: dict[str, Any], /) -> Any:
        if eager_constant_folding.value and not any(isinstance(x, Tracer) for x in tracers):
            return primitive.bind_with_trace(EVAL, tracers, tuple(map(jax.typeof, tracers)), params)
        made = self.recording.note(primitive, tracers, params)
        return made if primitive.multiple_results else made[0]

    def stage_value(self, val: Any) -> Any:
        return val if isinstance(val, jax.Array) else self.recording.constant(val)

    def cur_qdd(self, x: Any) -> Any:
        """Return what a value of a type of the user's own is now: such values are never recorded."""
        return self.parent.cur_qdd(x)

    def process_shard_map(self, primitive: Any, fun: Any, tracers: Any, /, **params: Any) -> Any:
        made = []

        def staged(*operands: Any) -> list[Any]:
            out = primitive.bind(*operands, subfuns=(fun,), **params)
            made.append(out.map(jax.typeof))  # its structure, and no tracer
            return list(out)

        jitted = jax.jit(staged)  # one operation: a jitted function of what is mapped
        with set_current_trace(self):
            out = jitted(*tracers)
            mapped = jitted.trace(*tracers).jaxpr.eqns[-1]
        with set_current_trace(EVAL):
            return made[0].update(list(map(_with_spec, out, mapped.params["out_specs"])))


def _with_spec(array: Any, spec: Any) -> Any:
    """Return an array of a mesh with its sharding as it was asked for: a compiler writes ``P(None)`` as ``P()``."""
    if not isinstance(array, ArrayImpl) or not isinstance(array.sharding, jax.sharding.NamedSharding):
        return array
    asked = jax.sharding.NamedSharding(array.sharding.mesh, spec)
    return jax.device_put(array, asked) if asked.is_equivalent_to(array.sharding, array.ndim) else array


def at(trace: Any) -> Any:
    """Return a context in which operations go to ``trace`` (``jax.extend.core.set_current_trace``)."""
    return set_current_trace(trace)


def current() -> Any:
    """Return the trace to which operations go, fast (``core.trace_state_strong_ref``)."""
    return core.trace_state_strong_ref.value


def aval_of(value: Any) -> Any:
    """Return shape, dtype and weak type of a value (``jax.typeof``)."""
    return jax.typeof(value)


def fits(value: Any, aval: Any) -> bool:
    """Whether a value has the type with which an operation was recorded.

    An array that is spread over a mesh has the mesh in its type, and what a program will give is known to be spread
    only when it has run. As long as no axis of the mesh is explicit, operations do not depend on it; nor do they where
    the whole array is on each device, as what a program gives on a mesh of ``jax.set_mesh``.
    """
    found: Any = jax.typeof(value)
    if found == aval:
        return True
    same = found.shape == aval.shape and found.dtype == aval.dtype and found.weak_type == aval.weak_type
    meshes = [x.sharding.mesh for x in (found, aval)]
    if any(mesh.explicit_axes for mesh in meshes):
        return same and any(mesh.empty for mesh in meshes) and not any([*found.sharding.spec, *aval.sharding.spec])
    return same and not any(mesh.manual_axes for mesh in meshes)


def executed(value: Any) -> Any:
    """Return a number or a numpy array as an array with a value (``EvalTrace.stage_value``)."""
    with set_current_trace(EVAL):
        return EVAL.stage_value(value)


class Settings:
    """The settings of jax in which an operation is recorded; equal ones are one object.

    Attributes:
        context: What jax keeps with an operation (``core.current_jaxpr_eqn_context``).
    """

    __slots__ = ("_values", "context")

    def __init__(self) -> None:
        self.context = core.current_jaxpr_eqn_context()
        self._values = [(setting, setting.value) for setting in _RUNNING]

    def runs_as(self, other: Settings) -> bool:
        """Whether what is recorded in either can be run together."""
        return self._values == other._values

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Make them the settings of what is run now."""
        before = [setting.swap_local(value) for setting, value in self._values]
        try:
            yield
        finally:
            for (setting, _), value in zip(self._values, before, strict=True):
                setting.set_local(value)


# The mesh of jax.set_mesh, which is not in config.trace_context (in config in jax 0.10.2, in mesh since 0.11.2).
try:
    from jax._src.config import device_context  # type: ignore[attr-defined]
except ImportError:
    from jax._src.mesh import device_context  # type: ignore[attr-defined]
# The settings that matter when a program is run; others have had their effect when its operations were recorded.
_RUNNING = (config.enable_x64, config.default_device, config.debug_nans, config.debug_infs, device_context)
_trace_context, _NANS, _INFS = config.trace_context, config.debug_nans, config.debug_infs
_last: tuple[Any, ...] = (None, None, None, None, None)


@functools.lru_cache(maxsize=64)
def _settings(_: Any) -> Settings:
    return Settings()


def settings() -> Settings:
    """Return the settings now: what the caches of jax depend on.

    They are ``config.trace_context``, in which the default device is, and what is not in there.
    """
    global _last  # a tuple that is replaced as one
    context, mesh, nans, infs, found = _last
    if _trace_context() == context and device_context.value is mesh and _NANS.value is nans and _INFS.value is infs:
        return found
    now = (_trace_context(), device_context.value, _NANS.value, _INFS.value)
    found = _settings(now)
    _last = (*now, found)
    return found


def allocates(primitive: Any) -> bool:
    """Whether an operation makes a mutable reference, which no program can give (``Primitive.ref_allocating``)."""
    return primitive.ref_allocating


_HIGH: Any = getattr(hijax, "HiPrimitive", ())
_FOR_NOW = frozenset({checkify.check_p, getattr(hijax, "call_hi_primitive_p", checkify.check_p)})


def is_for_now(primitive: Any) -> bool:
    """Whether an operation is to be executed when it is met, since no program can have it.

    That is what makes a mutable reference (``Primitive.ref_allocating``); what takes and gives values of types that are
    made of arrays, as flax's mutable Variables are (``hijax.HiPrimitive``; ``hijax.call_hi_primitive_p`` since jax
    0.12); and a check that raises (``checkify.check_p``).
    """
    return primitive.ref_allocating or primitive in _FOR_NOW or isinstance(primitive, _HIGH)


def is_high(aval: Any) -> bool:
    """Whether a type is made of others, which alone a program can take (``AbstractValue.is_high``)."""
    return aval.is_high


@contextlib.contextmanager
def public_errors() -> Iterator[None]:
    """Raise what ``jax_debug_nans`` finds as a public error (``api_util.InternalFloatingPointError``)."""
    try:
        yield
    except api_util.InternalFloatingPointError as error:
        name = error.name.removeprefix("jit(").removesuffix(")")
        raise FloatingPointError(f"invalid value ({error.ty}) encountered in {name}") from None


def waited(outputs: Any) -> Any:
    """Wait for a program that calls Python, and return its outputs; raise what a Python function raised.

    A GPU tells of that after the call. Whoever waits for effects later, as Python does at its end, would be told a
    second time, so they are forgotten (``dispatch.runtime_tokens``).
    """
    try:
        jax.block_until_ready(outputs)
        jax.effects_barrier()
    except Exception:
        dispatch.runtime_tokens.clear()
        raise
    return outputs


def register(cls: type[Recorded]) -> None:
    """Let jax know recorded values of a class by the class itself.

    ``jax.device_put`` takes them (``pxla.shard_arg_handlers``), and ``jax.typeof``, which is asked 1,000 times in a
    step, does not look through their base classes (``core.pytype_aval_mappings``).
    """

    def shard(values: Sequence[Any], *args: Any) -> Any:
        known = [value.now("device_put") for value in values]
        return pxla.shard_arg_handlers[type(known[0])](known, *args)

    pxla.shard_arg_handlers[cls] = shard
    core.pytype_aval_mappings[cls] = operator.attrgetter("aval")


def array_type() -> type:
    """Return the class of arrays that have a value (``jax._src.ArrayImpl``)."""
    return ArrayImpl


NUMBERS = frozenset({bool, int, float, complex, *literals.typed_scalar_types})
"""The classes of most numbers that :func:`is_number` knows."""


def is_number(value: Any) -> bool:
    """Whether an operand is a Python or numpy scalar (``jax._src.literals`` are how jax passes Python's)."""
    kind = type(value)
    if kind in NUMBERS or kind is ArrayImpl:
        return kind is not ArrayImpl
    return isinstance(value, np.generic) or (isinstance(value, literals.TypedNdArray) and not value.shape)


def owned(value: Any) -> Any:
    """Return an operand as what Python cannot change later: numpy arrays are copied."""
    if not isinstance(value, (np.ndarray, literals.TypedNdArray)) or is_number(value):
        return value
    return executed(value) if jax.typeof(value).weak_type else np.array(value)  # numpy has no weak types


def bind(primitive: Any, inputs: Sequence[Any], params: dict[str, Any], context: Any) -> Sequence[Any]:
    """Do an operation that was recorded, with the settings that it was recorded with, in the current trace."""
    with context.manager, public_errors():  # jax calls a program again, as it is, to tell where a nan came from
        out = primitive.bind(*inputs, **params)
    return out if primitive.multiple_results else [out]


_JAXPRS = tuple({Jaxpr, getattr(core, "ClosedJaxpr", Jaxpr)})  # one class since jax 0.12


def is_jaxpr(value: Any) -> bool:
    """Whether a parameter is a jaxpr, with constants or without."""
    return isinstance(value, _JAXPRS)


def open_jaxpr(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    """Return a jaxpr and its constants (``core.ClosedJaxpr`` has them until jax 0.11, ``Jaxpr`` since 0.12)."""
    return getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ())
