"""Gradients switched off for a block: a trace that hands operations on with their inputs made constants.

Whatever differentiates around the block sees constants: ``jax.grad`` of a function that has the block, by stripping its
tracers; a compiled function that has it and is differentiated later, by ``stop_gradient`` in its jaxpr, which costs
nothing when it runs. What begins to differentiate inside the block has a trace above this one, that takes its own
tracers apart before anything comes here.

What is done in a block that switches gradients on, inside a function that is traced, has that in the names of its
operations (``jax.named_scope``). So a block around a call of that function can tell: a jaxpr is one operation to it.

Where nothing can be differentiated there is no such trace, and a block costs nothing. Seen with jax 0.10.2, 0.11.2
and 0.12.0.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax._src.interpreters.ad import JVPTracer, LinearizeTrace, LinearizeTracer
from jax._src.interpreters.batching import BatchTrace, BatchTracer
from jax._src.interpreters.partial_eval import DynamicJaxprTrace
from jax.core import ShapedArray, Tracer
from jax.extend.core import Primitive, set_current_trace

from lazymods._compat.abstract import OperationByOperation
from lazymods._compat.fast_traces import current_trace
from lazymods._compat.finding import require
from lazymods._compat.marked_jaxprs import INFERENCE_OFF, INSIDE, ON, forwarded, marks_of, stopped_params
from lazymods._compat.traces import EVAL
from lazymods._compat.worlds import same_world

require(Primitive, "bind_with_trace")
require(LinearizeTrace, "parent_trace", "stage_value", "process_shard_map")
require(JVPTracer, "primal")
require(LinearizeTracer, "primal")
require(BatchTracer, "val", "batch_dim", "source_info")
require(EVAL, "_weakref", "requires_low")


class Mode(NamedTuple):
    """What a block makes of the mode around it.

    Attributes:
        grad: Whether it switches gradients on.
        inference: Whether nothing inside can switch them on; None leaves that as it is.
    """

    grad: bool
    inference: bool | None = None


class _Block:
    """A block that is open.

    Attributes:
        mode: What it does.
        trace: What its operations go to.
        before: The trace that was current, if ``trace`` was made for this block.
    """

    __slots__ = ("before", "mode", "trace")

    def __init__(self, mode: Mode, trace: GradModeTrace, before: Any) -> None:
        self.mode, self.trace, self.before = mode, trace, before


class GradModeTrace(OperationByOperation):
    """A trace that hands every operation to its parent, as the blocks that are open say.

    It has no tracers of its own, so what it returns is used after the block as if there had been none.
    """

    __slots__ = ("_constants", "_mark", "_marks_that_count", "_stopped", "blocks", "parent_trace", "stops")

    def __init__(self, parent: Any) -> None:
        super().__init__()
        self.requires_low = False  # the parent says
        self.parent_trace: Any = parent
        self._weakref = same_world(parent._weakref())
        self.blocks: list[_Block] = []
        self.stops = False
        self._mark: str | None = None
        self._marks_that_count: frozenset[str] = frozenset()
        self._constants: dict[int, Any] = {}  # weak references to what was made here, or is stopped; by id
        self._stopped: dict[int, tuple[Any, Any]] = {}  # a weak reference to a tracer, and what it is stopped

    def switch(self) -> None:
        """Bring the mode up to date with the blocks that are open."""
        grad, inference, mark = True, False, None
        for block in self.blocks:
            grad = block.mode.grad
            inference = inference if block.mode.inference is None else block.mode.inference
            if grad:
                mark = INFERENCE_OFF if block.mode.inference is False or mark == INFERENCE_OFF else ON
        self.stops = inference or not grad
        self._mark = mark if _is_traced(self.parent_trace) else None
        self._marks_that_count = frozenset([INFERENCE_OFF, INSIDE] if inference else [INFERENCE_OFF, INSIDE, ON])

    def forget(self) -> None:
        """Hold no tracers any more: what JAX keeps of what was traced here may keep this trace."""
        self._constants.clear()
        self._stopped.clear()

    # ------------------------------------------------------------ what a trace does

    def process_primitive(self, primitive: Any, tracers: Any, params: dict[str, Any], /) -> Any:
        def bind(inputs: Sequence[Any], params: dict[str, Any]) -> Any:
            return primitive.bind_with_trace(self.parent_trace, inputs, tuple(map(jax.typeof, inputs)), params)

        if not self.stops:
            return self._passed(bind, tracers, params)
        if marks_of(primitive, params) & self._marks_that_count:
            return bind(tracers, stopped_params(params, self._marks_that_count))
        out = bind([self._constant(x) for x in tracers], params)
        plain = all(isinstance(jax.typeof(x), ShapedArray) for x in tracers)
        made = list(out) if primitive.multiple_results else [out]
        if not plain:  # what is read from a reference
            made = [self._constant(x) for x in made]
        for x in made:
            self._note(x)
        passed_on = forwarded(primitive, params)
        if primitive is jax.lax.convert_element_type_p and jax.typeof(made[0]) == jax.typeof(tracers[0]):
            passed_on = {0: 0}  # as in a compiled function, where JAX leaves it out
        for result, operand in passed_on.items():
            made[result] = tracers[operand] if isinstance(tracers[operand], Tracer) else made[result]
        return made if primitive.multiple_results else made[0]

    def process_call(self, primitive: Any, fun: Any, tracers: Any, params: dict[str, Any], /) -> Any:
        if self.stops:
            return super().process_call(primitive, fun, self._constants_of(tracers), params)
        return self._passed(self.parent_trace.process_call, primitive, fun, tracers, params)

    def process_custom_jvp_call(self, primitive: Any, fun: Any, jvp: Any, tracers: Any, /, **rest: Any) -> Any:
        if self.stops:  # what has no derivative needs no rule for it
            return super().process_custom_jvp_call(primitive, fun, jvp, self._constants_of(tracers))
        return self._passed(self.parent_trace.process_custom_jvp_call, primitive, fun, jvp, tracers, **rest)

    def process_custom_vjp_call(
        self, primitive: Any, fun: Any, fwd: Any, bwd: Any, tracers: Any, /, **rest: Any
    ) -> Any:
        if self.stops:
            return super().process_custom_vjp_call(primitive, fun, fwd, bwd, self._constants_of(tracers))
        return self._passed(self.parent_trace.process_custom_vjp_call, primitive, fun, fwd, bwd, tracers, **rest)

    def process_shard_map(self, primitive: Any, fun: Any, tracers: Any, /, **params: Any) -> Any:
        if not self.stops:
            return self._passed(self.parent_trace.process_shard_map, primitive, fun, tracers, **params)
        made = []

        def staged(*operands: Any) -> list[Any]:
            out = primitive.bind(*operands, subfuns=(fun,), **params)
            made.append(out.map(jax.typeof))  # its structure, and no tracer
            return list(out)

        with set_current_trace(self):  # as a jaxpr, in which there may be marks
            out = jax.jit(staged)(*tracers)
        return made[0].update(out)

    def stage_value(self, val: Any) -> Any:
        return self.parent_trace.stage_value(val)

    def cur_qdd(self, x: Any) -> Any:
        """Return what a value of a type of the user's own is now."""
        return self.parent_trace.cur_qdd(x)

    def _passed(self, process: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._mark is None:
            return process(*args, **kwargs)
        with jax.named_scope(self._mark):
            return process(*args, **kwargs)

    # ------------------------------------------------------------ constants

    def _constants_of(self, values: Sequence[Any]) -> list[Any]:
        return [self._constant(x) for x in values]

    def _constant(self, value: Any) -> Any:
        """Return a value as what differentiates around the block is to see it."""
        if not isinstance(value, Tracer):
            return value
        if isinstance(value, (JVPTracer, LinearizeTracer)):
            return self._constant(value.primal)
        if isinstance(value, BatchTracer):
            inner = self._constant(value.val)
            same = inner is value.val
            return value if same else BatchTracer(value._trace, inner, value.batch_dim, value.source_info)
        aval: Any = jax.typeof(value)
        known = self._constants.get(id(value))
        if (known is not None and known() is value) or not isinstance(aval, ShapedArray):
            return value
        if not jnp.issubdtype(aval.dtype, jnp.inexact):
            return value
        before = self._stopped.get(id(value))
        if before is None or before[0]() is not value:
            with set_current_trace(self.parent_trace):
                before = (weakref.ref(value), jax.lax.stop_gradient(value))
            self._stopped[id(value)] = before
            self._note(before[1])
        return before[1]

    def _note(self, value: Any) -> None:
        """Remember that a value is a constant."""
        while isinstance(value, BatchTracer):
            value = value.val
        if isinstance(value, Tracer):
            self._constants[id(value)] = weakref.ref(value)


# ---------------------------------------------------------------- blocks


def _within(trace: Any) -> Any:
    """Return the trace that an operation comes to after ``vmap``, recordings, runs without values and saved tensors."""
    while type(trace) is not GradModeTrace:
        if isinstance(trace, BatchTrace):
            trace = trace.parent_trace
        elif isinstance(trace, OperationByOperation) or hasattr(trace, "parent"):  # of a block of saved tensors
            trace = getattr(trace, "parent", EVAL)
        else:
            break
    return trace


def _is_traced(trace: Any) -> bool:
    """Whether operations become those of a jaxpr, and nothing differentiates before that."""
    found = _within(trace)
    while type(found) is GradModeTrace:
        found = _within(found.parent_trace)
    return isinstance(found, DynamicJaxprTrace)


def open_block(mode: Mode) -> _Block | None:
    """Begin a block in which gradients are on or off.

    Returns:
        What :func:`close_block` takes; None where nothing can be differentiated.
    """
    before = current_trace()
    trace = _within(before)
    if trace is EVAL:
        return None
    if type(trace) is GradModeTrace:
        block = _Block(mode, trace, None)
    elif mode.grad and not isinstance(trace, DynamicJaxprTrace):
        return None
    else:
        block = _Block(mode, GradModeTrace(before), before)
        set_current_trace(block.trace).__enter__()
    block.trace.blocks.append(block)
    block.trace.switch()
    return block


def close_block(block: _Block) -> None:
    """End a block: if another began in it and has not ended, as a generator may do, its trace stays and does nothing.

    A block that ends where another trace is current, in another thread or after the function in which it began,
    changes nothing there.
    """
    trace = block.trace
    trace.blocks = [other for other in trace.blocks if other is not block]
    trace.switch()
    if not trace.blocks:
        trace.forget()
    if block.before is not None and current_trace() is trace:
        set_current_trace(block.before).__enter__()
