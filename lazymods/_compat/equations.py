"""Running one operation of a jaxpr, and where it was made.

Private: ``JaxprEqn.ctx.manager``, ``JaxprEqn.source_info.name_stack`` and ``Primitive.get_bind_params``. Seen with
jax 0.10.2, 0.11.2 and 0.12.0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.core import eval_jaxpr
from jax.extend.core import Jaxpr, Literal, Var, new_jaxpr_eqn

from lazymods._compat.finding import tell


def bind_equation(equation: Any, inputs: Sequence[Any], params: dict[str, Any]) -> Sequence[Any]:
    """Run one equation of a jaxpr in the current trace, with other parameters."""
    primitive = equation.primitive
    try:
        settings, given = equation.ctx.manager, primitive.get_bind_params(params)
    except AttributeError as error:
        tell("the initialization of layers", str(error), "jax.core.eval_jaxpr")
        return _evaluated(equation, inputs, params)
    with settings:
        out = primitive.bind(*inputs, **given)
    return out if primitive.multiple_results else [out]


def scopes_of(equation: Any) -> str:
    """Return the named scopes in which an equation was made, ``outer/inner``, with transforms as ``jvp(outer)``."""
    try:
        return str(equation.source_info.name_stack)
    except AttributeError as error:
        tell("lm.autograd.saved_bytes", str(error), "operations without their layers")
        return ""


def _evaluated(equation: Any, inputs: Sequence[Any], params: dict[str, Any]) -> Sequence[Any]:
    """Run one equation as a jaxpr of its own."""
    given = {v: x for v, x in zip(equation.invars, inputs, strict=True) if not isinstance(v, Literal)}
    results = [Var(v.aval) for v in equation.outvars]
    alone = new_jaxpr_eqn(equation.invars, results, equation.primitive, params, equation.effects)
    return eval_jaxpr(Jaxpr((), list(given), results, [alone]), (), *given.values())
