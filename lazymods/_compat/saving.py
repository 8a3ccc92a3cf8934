"""The trace of a block of :mod:`lazymods._compat.residuals`: which operations it makes ones that are saved.

Private: ``Trace._weakref``, ``WrappedFun.stores``, and the attributes of traces by which they hang together. Seen to
work with jax 0.10.2 and 0.12.0.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax._src.linear_util import StoreException
from jax.core import ShapedArray, Trace, Tracer, eval_jaxpr
from jax.extend.core import jaxprs_in_params, set_current_trace
from jax.extend.core.primitives import jit_p, scan_p
from jax.extend.linear_util import WrappedFun

from lazymods._compat.finding import require
from lazymods._compat.residuals import OWN, Saving, as_jaxpr, has_derivative, saving_p
from lazymods._compat.traces import EVAL
from lazymods._compat.tracing import Recorder, allocates, current, is_jaxpr, open_jaxpr
from lazymods._compat.worlds import same_world

require(Trace, "process_primitive", "process_custom_jvp_call", "process_custom_vjp_call")
require(Tracer, "_trace")
require(WrappedFun, "stores")


class SavingTrace(Trace):
    """A trace that makes ``saving`` of each operation that may be differentiated.

    Args:
        parent: The trace in which the block begins; its values are those of the block too.
        saving: What the block does with what is kept.
    """

    __slots__ = ("parent", "saving")

    def __init__(self, parent: Any, saving: Saving) -> None:
        super().__init__()
        self.parent: Any = parent
        self.saving = saving
        self._weakref = same_world(parent)

    def process_primitive(self, primitive: Any, tracers: Any, params: dict[str, Any], /) -> Any:
        if primitive in OWN or allocates(primitive) or not any([isinstance(x, Tracer) for x in tracers]):
            with set_current_trace(self.parent):
                return primitive.bind(*tracers, **params)
        inner = jaxprs_in_params(params)
        if _scans(primitive, params) or any([jaxpr.effects or _saves(jaxpr) for jaxpr in inner]):
            params = {name: self._inside(value) for name, value in params.items()}  # what is in there, one by one
            with set_current_trace(self.parent):
                return primitive.bind(*tracers, **params)
        if primitive.multiple_results:
            return self._saved(lambda *operands: primitive.bind(*operands, **params), tracers)
        return self._saved(lambda *operands: [primitive.bind(*operands, **params)], tracers)[0]

    def process_custom_jvp_call(self, primitive: Any, fun: Any, jvp: Any, tracers: Any, /, **params: Any) -> Any:
        def operation(*operands: Any) -> Any:
            return current().process_custom_jvp_call(primitive, fun, jvp, operands, **params)

        return _traced_once(fun, jvp, self._saved(operation, tracers))

    def process_custom_vjp_call(
        self, primitive: Any, fun: Any, fwd: Any, bwd: Any, tracers: Any, /, **params: Any
    ) -> Any:
        def operation(*operands: Any) -> Any:
            return current().process_custom_vjp_call(primitive, fun, fwd, bwd, operands, **params)

        return _traced_once(fun, fwd, self._saved(operation, tracers))

    def process_call(self, primitive: Any, fun: Any, tracers: Any, params: Any, /) -> Any:
        return self.parent.process_call(primitive, fun, tracers, params)

    def process_shard_map(self, primitive: Any, fun: Any, tracers: Any, /, **params: Any) -> Any:
        made = []

        def operation(*operands: Any) -> list[Any]:
            out = current().process_shard_map(primitive, fun, operands, **params)
            made.append(out.map(jax.typeof))  # its structure, and no tracer
            return list(out)

        out = self._saved(operation, tracers)
        return made[0].update(list(out))

    def stage_value(self, val: Any) -> Any:
        return self.parent.stage_value(val)

    def cur_qdd(self, x: Any) -> Any:
        """Return what a value of a type of the user's own is now."""
        return self.parent.cur_qdd(x)

    def _saved(self, operation: Callable[..., Any], operands: Sequence[Any]) -> Any:
        """Do an operation, in a way that what it keeps is saved; as it is, if it has effects or is of references."""
        with set_current_trace(self.parent):
            types = list(map(jax.typeof, operands))
            if not all([isinstance(t, ShapedArray) for t in types]) or not any(map(has_derivative, operands)):
                return operation(*operands)
            jaxpr, consts = as_jaxpr(operation, *operands)
            results = tuple([v.aval for v in jaxpr.outvars])
            if jaxpr.effects or not all([isinstance(t, ShapedArray) for t in results]):
                return operation(*operands)
            return saving_p.bind(*consts, *operands, jaxpr=jaxpr, saving=self.saving, levels=(), results=results)

    def _inside(self, value: Any) -> Any:
        """Return a parameter of an operation with each jaxpr in it as it is in a block of this kind."""
        if isinstance(value, tuple):
            return tuple(map(self._inside, value))
        if not is_jaxpr(value):
            return value
        inner, consts = open_jaxpr(value)

        def in_block(*operands: Any) -> list[Any]:
            with set_current_trace(SavingTrace(current(), self.saving)):
                return eval_jaxpr(inner, consts, *operands)

        made = jax.make_jaxpr(in_block)(*[v.aval for v in inner.invars])
        return made if isinstance(made, type(value)) else open_jaxpr(made)[0]


def _traced_once(fun: Any, rule: Any, out: Any) -> Any:
    """Return what a function with a rule gave.

    jax expects that either was called, and each notes the structure of its results. Here both have been, if the
    operation was differentiated at once: then it is to be the rule, whose backward pass needs what it noted.
    """
    if any(map(_is_filled, rule.stores)):
        for store in fun.stores:
            if store is not None:
                store.reset()
    return out


def _is_filled(store: Any) -> bool:
    try:
        return store is not None and store.val is not None
    except StoreException:
        return False


def _saves(jaxpr: Any) -> bool:
    """Whether a block of its own is somewhere in a jaxpr: the innermost one counts."""
    return any([e.primitive in OWN or any(map(_saves, jaxprs_in_params(e.params))) for e in jaxpr.eqns])


def _scans(primitive: Any, params: dict[str, Any]) -> bool:
    """Whether an operation is a scan, or a jit of one.

    What an iteration keeps is packed by itself, as that of layers in turn is. What all keep would lie whole beside what
    it is packed as.
    """
    if primitive is jit_p:
        return any([_scans(e.primitive, e.params) for jaxpr in jaxprs_in_params(params) for e in jaxpr.eqns])
    return primitive is scan_p


@contextlib.contextmanager
def saving_in(saving: Saving) -> Iterator[None]:
    """Let a block save what its operations keep; where operations are executed nothing is kept, and nothing is done."""
    parent = current()
    while isinstance(parent, SavingTrace):
        parent = parent.parent
    if parent is EVAL or isinstance(parent, Recorder):
        with set_current_trace(parent):
            yield
        return
    with set_current_trace(SavingTrace(parent, saving)):
        yield


def of_one_trace(values: Sequence[Any]) -> bool:
    """Whether values are all known arrays, or all tracers of one trace."""
    traces = {id(x._trace) if isinstance(x, Tracer) else None for x in values}
    return len(traces) == 1 and all([isinstance(x, jax.Array) for x in values])


def uses_foreign(function: Any, *args: Any) -> bool:
    """Whether a function computes with a value of a trace that operations do not go to now, which it closes over.

    jax says so, if at all, when it compiles the program.
    """
    traces, trace = set(), current()
    while trace is not None:
        traces.add(id(trace))
        trace = getattr(trace, "parent_trace", None) or getattr(trace, "parent", None)
    foreign = {id(x) for x in _closed_over(function, set()) if isinstance(x, Tracer) and id(x._trace) not in traces}
    if not foreign:
        return False
    try:
        _, consts = open_jaxpr(jax.make_jaxpr(function)(*args))
    except TypeError:  # it returns no arrays
        return False
    return any([id(x) in foreign for x in consts])


def _closed_over(function: Any, seen: set[int]) -> Iterator[Any]:
    seen.add(id(function))
    if isinstance(function, types.FunctionType):
        cells = [cell.cell_contents for cell in function.__closure__ or () if _is_set(cell)]
        for held in [*cells, *(function.__defaults__ or ())]:
            yield held
            if id(held) not in seen:
                yield from _closed_over(held, seen)


def _is_set(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False
