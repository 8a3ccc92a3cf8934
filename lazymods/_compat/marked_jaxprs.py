"""Jaxprs in which some operations are marked as such that gradients are switched on for: all others can be stopped.

A mark is a name in the name stack of an operation, which JAX keeps through its transformations. Reads what jaxprs are
made of: ``eqns``, ``invars``, ``source_info.name_stack``, ``replace``. Seen with jax 0.10.2, 0.11.2 and 0.12.0.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax._src.source_info_util import SourceInfo
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Primitive, Var

from lazymods._compat.finding import require

require(Jaxpr, "replace", "eqns")
require(JaxprEqn, "replace", "source_info", "params")
require(Primitive, "name")
require(SourceInfo, "name_stack")

ON = "lazymods.enable_grad"
INFERENCE_OFF = "lazymods.inference_mode_off"  # counts inside of inference_mode as well
INSIDE = "shard_map"  # is stopped inside: what a shard_map only passes on comes out with another type than it has

# What does with its operands what its jaxprs do; a custom rule is one operation.
_BODIES = frozenset(
    ("jit", "pjit", "closed_call", "core_call", "scan", "while", "cond", "checkpoint", "remat2", "shard_map")
)

_CALLS = frozenset(("jit", "pjit", "closed_call", "core_call", "checkpoint", "remat2"))  # the operands are the inputs

_marks: weakref.WeakKeyDictionary[Any, frozenset[str]] = weakref.WeakKeyDictionary()
_forwarded: weakref.WeakKeyDictionary[Any, dict[int, int]] = weakref.WeakKeyDictionary()
_stopped: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()


def marks_of(primitive: Any, params: dict[str, Any]) -> frozenset[str]:
    """Return which marks there are in the jaxprs of an operation, and in theirs."""
    if primitive.name not in _BODIES:
        return frozenset()
    own = frozenset([INSIDE] if primitive.name == INSIDE else [])
    return own.union(*map(_marks_in, _jaxprs(params)))


def forwarded(primitive: Any, params: dict[str, Any]) -> dict[int, int]:
    """Return which results of an operation are operands of it that it only passes on, both by number."""
    if primitive.name not in _CALLS:
        return {}
    (jaxpr,) = _jaxprs(params)
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    if inner not in _forwarded:
        inputs = {variable: number for number, variable in enumerate(inner.invars)}
        for equation in inner.eqns:
            for result, operand in forwarded(equation.primitive, equation.params).items():
                source = equation.invars[operand]
                if not isinstance(source, Literal) and source in inputs:
                    inputs[equation.outvars[result]] = inputs[source]
        results = [(n, v) for n, v in enumerate(inner.outvars) if not isinstance(v, Literal) and v in inputs]
        _forwarded[inner] = {number: inputs[variable] for number, variable in results}
    return _forwarded[inner]


def stopped_params(params: dict[str, Any], marks: frozenset[str]) -> dict[str, Any]:
    """Return the parameters of an operation with jaxprs in which all is stopped that has none of these marks."""

    def stopped(value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return type(value)(map(stopped, value)) if any(map(_is_jaxpr, value)) else value
        return _with_stops(value, marks) if _is_jaxpr(value) else value

    return {name: stopped(value) for name, value in params.items()}


def _is_jaxpr(value: Any) -> bool:
    return isinstance(value, (Jaxpr, ClosedJaxpr))


def _jaxprs(params: dict[str, Any]) -> Iterator[Any]:
    for value in params.values():
        for part in value if isinstance(value, (tuple, list)) else (value,):
            if _is_jaxpr(part):
                yield part


def _marks_on(equation: Any) -> frozenset[str]:
    names = str(equation.source_info.name_stack)
    return frozenset([mark for mark in (ON, INFERENCE_OFF) if mark in names])


def _marks_in(jaxpr: Any) -> frozenset[str]:
    found = _marks.get(jaxpr)
    if found is None:
        found = frozenset[str]()
        for equation in jaxpr.eqns:
            found |= _marks_on(equation) | marks_of(equation.primitive, equation.params)
        _marks[jaxpr] = found
    return found


def _with_stops(jaxpr: Any, marks: frozenset[str]) -> Any:
    """Return a jaxpr that computes the same, and is constant in all but its operations with these marks.

    It is kept as long as the jaxpr, since ``jax.jit`` keeps what it compiles by it.
    """
    kept = _stopped.setdefault(jaxpr, {})
    if marks not in kept:
        inner = getattr(jaxpr, "jaxpr", jaxpr)
        rewriting = _Rewriting(marks)
        new = inner.replace(eqns=rewriting.rewritten(inner.eqns), outvars=rewriting.sources(inner.outvars))
        kept[marks] = new if inner is jaxpr else jaxpr.replace(jaxpr=new)
    return kept[marks]


class _Rewriting:
    """Puts ``stop_gradient`` before the operations of one jaxpr that are to be constant."""

    def __init__(self, marks: frozenset[str]) -> None:
        self._marks = marks
        self._equations: list[Any] = []
        self._constants: set[Any] = set()  # variables
        self._stopped: dict[Any, Any] = {}
        self._passed_on: dict[Any, Any] = {}  # what a call passed on, by its result

    def sources(self, variables: Sequence[Any]) -> list[Any]:
        """Return variables, and instead of those that a call only passed on what it was given."""
        return [v if isinstance(v, Literal) else self._passed_on.get(v, v) for v in variables]

    def rewritten(self, equations: Sequence[Any]) -> list[Any]:
        """Return the equations that take the place of others."""
        for equation in equations:
            equation = equation.replace(invars=self.sources(equation.invars))
            if _marks_on(equation) & self._marks:
                self._equations.append(equation)
            elif marks_of(equation.primitive, equation.params) & self._marks:
                self._equations.append(equation.replace(params=stopped_params(equation.params, self._marks)))
            else:
                self._stop(equation)
        return self._equations

    def _stop(self, equation: Any) -> None:
        stopped = equation.replace(invars=[self._constant(variable) for variable in equation.invars])
        if all(isinstance(variable.aval, ShapedArray) for variable in equation.invars):
            self._equations.append(stopped)
        else:  # what is read from a reference
            made = [Var(variable.aval) for variable in equation.outvars]
            self._equations.append(stopped.replace(outvars=made))
            for before, after in zip(made, equation.outvars, strict=True):
                self._equations.append(_stop_gradient(before, after))
        self._constants.update(equation.outvars)
        for result, operand in forwarded(equation.primitive, equation.params).items():
            self._passed_on[equation.outvars[result]] = equation.invars[operand]

    def _constant(self, variable: Any) -> Any:
        aval = variable.aval
        if isinstance(variable, Literal) or variable in self._constants or not isinstance(aval, ShapedArray):
            return variable
        if not jnp.issubdtype(aval.dtype, jnp.inexact):
            return variable
        if variable not in self._stopped:
            self._stopped[variable] = Var(aval)
            self._equations.append(_stop_gradient(variable, self._stopped[variable]))
        return self._stopped[variable]


def _stop_gradient(before: Any, after: Any) -> Any:
    """Return the equation that makes a constant of a variable, as JAX writes it."""
    example = jax.make_jaxpr(jax.lax.stop_gradient)(jax.ShapeDtypeStruct((), jnp.float32))
    return example.eqns[0].replace(invars=[before], outvars=[after])
