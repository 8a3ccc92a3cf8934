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
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from lazymods._compat.finding import require

require(Jaxpr, "replace", "eqns")
require(JaxprEqn, "replace", "source_info")
require(SourceInfo, "name_stack")

ON = "lazymods.enable_grad"
INFERENCE_OFF = "lazymods.inference_mode_off"  # counts inside of inference_mode as well

# What does with its operands what its jaxprs do; a custom rule is one operation.
_BODIES = frozenset(
    ("jit", "pjit", "closed_call", "core_call", "scan", "while", "cond", "checkpoint", "remat2", "shard_map")
)

_marks: weakref.WeakKeyDictionary[Any, frozenset[str]] = weakref.WeakKeyDictionary()
_stopped: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()


def marks_of(primitive: Any, params: dict[str, Any]) -> frozenset[str]:
    """Return which marks there are in the jaxprs of an operation, and in theirs."""
    if primitive.name not in _BODIES:
        return frozenset()
    return frozenset().union(*map(_marks_in, _jaxprs(params)))


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
        new = inner.replace(eqns=_Rewriting(marks).rewritten(inner.eqns))
        kept[marks] = new if inner is jaxpr else jaxpr.replace(jaxpr=new)
    return kept[marks]


class _Rewriting:
    """Puts ``stop_gradient`` before the operations of one jaxpr that are to be constant."""

    def __init__(self, marks: frozenset[str]) -> None:
        self._marks = marks
        self._equations: list[Any] = []
        self._constants: set[Any] = set()  # variables
        self._stopped: dict[Any, Any] = {}

    def rewritten(self, equations: Sequence[Any]) -> list[Any]:
        """Return the equations that take the place of others."""
        for equation in equations:
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
