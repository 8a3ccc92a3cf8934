"""How far a constructor moves the counter of a random stream, by the program that it was traced to.

Each draw adds one to the counter. The constructor may draw by copies of the stream that have its counter, and in
transforms of its own: ``nnx.jit``, ``nnx.remat``, a loop, a branch. So it is not counted who draws, but followed where
the last value of the counter comes from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_CALLS = ("jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint", "custom_jvp_call")
_SAME = ("copy", "copy_p", "stop_gradient", "convert_element_type", "optimization_barrier")

Origin = tuple[int, int]  # which input a value comes from, and by how much it is more


def moved(jaxpr: Any, values: Sequence[tuple[Any, Any]]) -> list[int | None]:
    """Return how much more each value is after a program than before it, None if that does not follow.

    Args:
        jaxpr: The program.
        values: For each, the variable that it is at first, and the variable or the number that it is at the end.
    """
    producers = _producers(jaxpr)
    origins = [_origin(after, jaxpr, producers) for _, after in values]
    pairs = zip(origins, values, strict=True)
    return [o[1] if o is not None and jaxpr.invars[o[0]] is before else None for o, (before, _) in pairs]


def _producers(jaxpr: Any) -> dict[Any, Any]:
    return {v: equation for equation in jaxpr.eqns for v in equation.outvars}


def _origin(variable: Any, jaxpr: Any, producers: Mapping[Any, Any]) -> Origin | None:
    """Return the input of a program that a value is, but for a number that is added."""
    more = 0
    while not hasattr(variable, "val") and variable in producers:
        equation = producers[variable]
        step = _step(equation, equation.outvars.index(variable))
        if step is None:
            return None
        variable, more = equation.invars[step[0]], more + step[1]
    return (jaxpr.invars.index(variable), more) if not hasattr(variable, "val") and variable in jaxpr.invars else None


def _step(equation: Any, output: int) -> Origin | None:
    """Return the input of an equation that one of its outputs is, but for a number that is added."""
    name, params, inputs = equation.primitive.name, equation.params, equation.invars
    if name in _SAME:
        return output, 0
    if name in ("add", "sub") and hasattr(inputs[1], "val"):
        return 0, int(inputs[1].val) * (1 if name == "add" else -1)
    if name == "add" and hasattr(inputs[0], "val"):
        return 1, int(inputs[0].val)
    if name in _CALLS:
        inner = next(params[k] for k in ("jaxpr", "call_jaxpr") if k in params)
        return _inside(inner, output, len(inputs))
    if name == "cond":  # its first input says which branch
        found = {_inside(branch, output, len(inputs) - 1) for branch in params["branches"]}
        origin = found.pop()
        return None if found or origin is None else (origin[0] + 1, origin[1])
    if name == "scan" and output < params["num_carry"]:
        origin = _inside(params["jaxpr"], output, len(inputs))
        carried = origin is not None and origin[0] == params["num_consts"] + output
        return (origin[0], origin[1] * params["length"]) if origin is not None and carried else None
    return None


def _inside(program: Any, output: int, count: int) -> Origin | None:
    jaxpr = getattr(program, "jaxpr", program)
    return _origin(jaxpr.outvars[output], jaxpr, _producers(jaxpr)) if len(jaxpr.invars) == count else None
