"""What ``lm.jit`` needs: writes that flax tells of, keys without operations, programs without their look at arguments.

Private: ``jax._src.core.trace_state_strong_ref``, ``config.trace_context``, ``config.default_prng_impl``,
``ArrayImpl``, ``PRNGKeyArray``, ``random_wrap``, ``source_info_util.current``, ``dispatch.needs_check_special``,
``pxla.ExecuteReplicated``, and the attributes of these below. Seen to work with jax 0.10.2, 0.12.0 and flax 0.12.8,
0.12.12.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import jax
from flax import nnx
from jax._src.array import ArrayImpl
from jax._src.config import default_prng_impl
from jax._src.config import trace_context as _trace_context
from jax._src.core import trace_state_strong_ref
from jax._src.dispatch import needs_check_special
from jax._src.interpreters.partial_eval import DynamicJaxprTrace
from jax._src.interpreters.pxla import ExecuteReplicated
from jax._src.random.prng import PRNGKeyArray, random_wrap
from jax._src.source_info_util import current as current_source
from jax.experimental.layout import Format
from jaxlib._jax import ExecuteResults

from lazymods._compat.fast_traces import current_trace
from lazymods._compat.finding import require, tell
from lazymods._compat.objects import REFERENCES, STATE
from lazymods._compat.objects import new_state as new_state
from lazymods._compat.traces import EVAL as EVAL
from lazymods._compat.variables import SET_RAW as SET_RAW
from lazymods._compat.variables import OpaqueState, opaque_of, opaque_of_own, reference_of, set_opaque, state_of
from lazymods._compat.variables import raw_values as raw_values

require(trace_state_strong_ref, "value")
require(PRNGKeyArray, "_base_array", "_impl")
require(ArrayImpl, "aval", "_sharding", "_committed", "_pjrt_layout")
require(ExecuteResults, "consume_with_handlers")
require(DynamicJaxprTrace, "to_jaxpr_tracer")
require(nnx.Variable, "_check_can_update")
require(nnx.Pytree, "_check_valid_context")

ARRAY: type = ArrayImpl  # the class of arrays that have values
KEY: type = PRNGKeyArray  # the class of arrays of typed keys
TRACE = trace_state_strong_ref  # TRACE.value is the trace that operations go to: half the time of trace_ctx


def is_reference(value: Any) -> bool:
    """Whether a value, or what a tracer stands for, is one of :data:`REFERENCES`."""
    return isinstance(value, REFERENCES)


PRNG_IMPL = default_prng_impl
"""``PRNG_IMPL.value`` is the implementation of new keys. What is traced depends on it; ``jax.jit`` has it in no key."""


def trace_context() -> Any:
    """Return all settings that a trace depends on, hashable (``jax._src.config.trace_context``)."""
    return _trace_context(), PRNG_IMPL.value


def key_parts(key: Any) -> tuple[Any, Any]:
    """Return a typed key's data and implementation, without an operation (``_base_array``, ``_impl``)."""
    return key._base_array, key._impl


def unwrap_keys(values: list[Any], keys: Sequence[tuple[int, Any]]) -> bool:
    """Replace typed keys, by number, by their data; return False if one is none or has another implementation.

    It is :func:`key_parts` for many, in one frame.
    """
    for number, impl in keys:
        key = values[number]
        if type(key) is not PRNGKeyArray or key._impl is not impl:
            return False
        values[number] = key._base_array
    return True


def wrap_key(data: Any, impl: Any) -> Any:
    """Make a typed key of data and what :func:`key_parts` returned as its implementation (``random_wrap``)."""
    return random_wrap(data, impl=impl)


def as_input(value: Any) -> Any:
    """Return a tracer of the current trace for an array that was made outside: a constant of the trace, by identity.

    Calls ``DynamicJaxprTrace.to_jaxpr_tracer``. The array is among the ``consts`` of what ``jax.make_jaxpr`` returns.
    """
    return current_trace().to_jaxpr_tracer(value, current_source())  # type: ignore[attr-defined]


FLAX = getattr(nnx.graphlib, "GRAPH_CONTEXT", SimpleNamespace(tmp_static_cache=None))
"""What flax keeps for a thread: ``tmp_static_cache`` is what ``nnx.cached_partial`` hands to the call that it makes."""


def take_clones() -> list[Any]:
    """Return the clones of models that ``nnx.cached_partial`` calls a function with, and take them over for it."""
    cache, FLAX.tmp_static_cache = FLAX.tmp_static_cache, None
    return list(cache)


# ---------------------------------------------------------------- objects


class Watch:
    """What is true of all objects that are watched.

    Attributes:
        mark: A new object after every write to one of them.
        structures: A new object after every change of more than values that went around flax; ``mark`` then is, too.
    """

    mark: object = object()
    structures: object = object()

    @classmethod
    def restructured(cls) -> None:
        """Note a change of more than values that went around flax."""
        cls.structures = object()
        cls.mark = object()


class _Watched(OpaqueState):
    """The trace in which an nnx object was born, told when flax is about to write to the object.

    Flax compares it with the current trace before each assignment, to an attribute of an object or to a Variable. It is
    also the one place of an object where something can be kept that dies with the object, is no attribute,
    and is in no GraphDef, copy or pickle (flax makes a new one each time).
    """

    graph: Any = None

    def __eq__(self, other: object) -> bool:
        Watch.mark = object()
        return super().__eq__(other)

    __hash__ = None  # type: ignore[assignment]


def watch(node: Any, graph: Any = None) -> None:
    """Have writes to an nnx object or Variable noted; keep ``graph`` with it."""
    state = state_of(node)
    before = opaque_of(state)
    if type(before) is not _Watched:
        set_opaque(state, _Watched(reference_of(before)))
    if graph is not None:
        opaque_of(state).graph = graph


_attribute = object.__getattribute__


def attributes(node: Any) -> dict[str, Any]:
    """Return ``vars(node)`` without asking its class: ``nnx.Optimizer.__getattribute__`` is slow."""
    return _attribute(node, "__dict__")


def kept_graph(node: Any) -> Any:
    """Return what :func:`watch` keeps with an nnx object; None if there is nothing."""
    return getattr(opaque_of_own(_attribute(node, "__dict__")[STATE]), "graph", None)


def check_update(node: Any) -> None:
    """Raise Flax's error if an nnx object or Variable may not be written in the current trace."""
    if isinstance(node, nnx.Variable):
        node._check_can_update()
    elif isinstance(node, nnx.Pytree):
        node._check_valid_context(lambda: f"Cannot mutate {type(node).__name__!r} from different trace level")


def is_of_another_trace(error: Exception) -> bool:
    """Whether an nnx transform refuses a Variable that was made outside of the current trace, as a placeholder is.

    By the text that flax gives it (a ValueError of ``flax.nnx.extract``, or a TraceContextError).
    """
    return "different trace level" in str(error)


# ---------------------------------------------------------------- compiled programs


def info_of(aval: Any, donated: bool) -> jax.stages.ArgInfo:
    """Return what jax tells of one argument of a traced function (``jax.stages.ArgInfo``, by its private field)."""
    return jax.stages.ArgInfo(aval, donated)


def aval_of_info(info: jax.stages.ArgInfo) -> Any:
    """Return the type in what :func:`info_of` returned (``ArgInfo._aval``)."""
    return info._aval


class Executable:
    """What ``jax.jit`` compiled, to be run without its look at each argument.

    It calls what ``pxla.ExecuteReplicated.__call__`` calls: ``LoadedExecutable.execute_sharded``, then
    ``ExecuteResults.consume_with_handlers``.

    Attributes:
        formats: Layout and sharding of each argument; both None if the program does not use it.
        run: Takes the arguments that are used, in order, as a list of arrays of these formats, and returns the outputs.
    """

    __slots__ = ("formats", "run")

    def __init__(self, formats: Sequence[Any], execute: Callable[..., Any], handlers: Sequence[Any]) -> None:
        self.formats: Sequence[Any] = formats
        self.run: Callable[[Any], Any] = lambda arguments: execute(arguments).consume_with_handlers(handlers)

    def takes(self, number: int, array: Any) -> bool:
        """Whether an array is where and as the program wants that argument; its shape and dtype must be right."""
        layout, sharding = self.formats[number].layout, self.formats[number].sharding
        if sharding is None:
            return True
        return array.format.layout == layout and sharding.is_equivalent_to(array.sharding, array.ndim)


def executable_of(jitted: Any, *args: Any) -> Executable | None:
    """Return what ``jitted``, which was called with such arguments, is compiled to; None if more is done at each call.

    That is so with effects, callbacks, mutable arrays, constants that are passed, and checks for NaNs (all as in
    ``jax._src.pjit._get_fastpath_data``, by ``Compiled._executable`` and ``Compiled._params``).
    """
    compiled = jitted.lower(*args).compile()
    try:
        return _direct(compiled)
    except AttributeError as error:
        tell("the calls of lm.jit", str(error), "jax.jit's own look at each argument")
        return None


def _direct(compiled: Any) -> Executable | None:
    call = compiled._executable.unsafe_call
    if type(call) is not ExecuteReplicated or call.ordered_effects or call.has_unordered_effects:
        return None
    if call.has_host_callbacks or call.mut or call.pgle_profiler or compiled._params.const_args:
        return None
    if needs_check_special():
        return None
    formats = jax.tree.leaves(compiled.input_formats, is_leaf=lambda x: isinstance(x, Format))
    return Executable(formats, call.xla_executable.execute_sharded, call.out_handler.handlers)


def kind_of_array(array: Any) -> tuple[Any, ...]:
    """Return all that ``jax.jit`` looks at in an array: equal for arrays that a program takes alike."""
    return array.aval, array._sharding, array._committed, array._pjrt_layout
