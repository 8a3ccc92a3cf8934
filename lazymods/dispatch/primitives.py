"""Two operations of JAX's: one that no platform can run, and one whose shapes are known before its kernel is traced.

``refuse`` passes its operand on in every transform, and raises when it is lowered for a platform that it refuses. It
makes a program that has no kernel for one platform an error for that platform alone.

``shaped`` is what a call with a Meta kernel becomes under ``jax.jit`` and ``jax.eval_shape``. The kernels are traced
when the program is lowered, or when it is differentiated.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from typing import Any, Protocol

import jax
from jax.core import ShapedArray
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from lazymods.dispatch.keys import PLATFORMS
from lazymods.dispatch.refusals import NoKernelError, Refusal, ordered_effect


class Program(Hashable, Protocol):
    """A function of operands, equal to those that compute the same."""

    name: str  # the operator's

    def __call__(self, *operands: Any) -> list[Any]:
        """Return the leaves of the output."""
        ...

    def mapped(self, axes: Sequence[int | None], size: int) -> Program:
        """Return the program that ``jax.vmap`` makes of this one."""
        ...


# ---------------------------------------------------------------- refuse

_refuse = Primitive("operator_refuses")


def refuse(leaves: Sequence[Any], refusal: Refusal) -> list[Any]:
    """Return arrays which, when they are computed, raise :class:`NoKernelError`.

    Args:
        leaves: What they are like.
        refusal: What is said, by the key of the platform.
    """
    return [_refuse.bind(leaf, refusal=refusal) for leaf in leaves]


def _raise(*_: Any, refusal: Refusal) -> Any:
    raise NoKernelError(refusal(refusal.keys[-1]))


def _lower(_: Any, operand: Any, *, refusal: Refusal, key: str) -> Any:
    """Raise on the platforms that are refused; elsewhere do nothing: it is not what is chosen there."""
    if key in refusal.keys:
        raise NoKernelError(refusal(key))
    return [operand]


_refuse.def_impl(_raise)
_refuse.def_abstract_eval(lambda x, *, refusal: x)
ad.deflinear2(_refuse, lambda cotangent, _, *, refusal: [cotangent])
batching.primitive_batchers[_refuse] = lambda args, dims, *, refusal: (_refuse.bind(*args, refusal=refusal), dims[0])
mlir.register_lowering(_refuse, lambda _, *operands, refusal: _raise(*operands, refusal=refusal))
for _platform in ("cpu", "cuda", "tpu"):  # those that JAX takes rules for
    mlir.register_lowering(_refuse, functools.partial(_lower, key=PLATFORMS[_platform]), platform=_platform)

# ---------------------------------------------------------------- shaped

_shaped = Primitive("operator")
_shaped.multiple_results = True


def shaped(program: Program, operands: Sequence[Any], avals: Sequence[jax.ShapeDtypeStruct]) -> list[Any]:
    """Return what a program makes of operands, without tracing it before it is lowered.

    Args:
        program: The function.
        operands: Its arguments.
        avals: Shapes and dtypes of what it returns.

    Returns:
        The leaves of its output.
    """
    return _shaped.bind(*operands, program=program, avals=tuple((a.shape, a.dtype) for a in avals))


def _run(*operands: Any, program: Program, avals: Any) -> list[Any]:
    return program(*operands)


def _abstract(*_: Any, program: Program, avals: Any) -> list[Any]:
    return [ShapedArray(shape, dtype) for shape, dtype in avals]


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, program: Program, avals: Any) -> Any:
    moving = [i for i, tangent in enumerate(tangents) if type(tangent) is not ad.Zero]

    def of_moving(*values: Any) -> list[Any]:
        operands = list(primals)
        for i, value in zip(moving, values, strict=True):
            operands[i] = value
        return program(*operands)

    out, moved = jax.jvp(of_moving, [primals[i] for i in moving], [tangents[i] for i in moving])
    still = jax.dtypes.float0  # of what has no derivative, such as an integer
    zero: Any = ad.Zero
    return out, [zero.from_primal_value(x) if t.dtype == still else t for x, t in zip(out, moved, strict=True)]


def _batch(operands: Sequence[Any], dims: Sequence[int | None], *, program: Program, avals: Any) -> Any:
    axes = tuple(dims)
    size = next(x.shape[d] for x, d in zip(operands, axes, strict=True) if d is not None)
    found = [jax.ShapeDtypeStruct((size, *shape), dtype) for shape, dtype in avals]
    return shaped(program.mapped(axes, size), operands, found), [0] * len(found)


def _lower_shaped(ctx: Any, *operands: Any, program: Program, avals: Any) -> Any:
    """Trace the kernels and lower them, where what they do besides may be done in any order.

    Raises:
        RegistrationError: If they do things in order (``io_callback(ordered=True)``): the program around has been
            made, without a token for that.
    """
    traced = jax.make_jaxpr(program)(*ctx.avals_in)
    try:
        return mlir.lower_fun(jaxpr_as_fun(traced))(ctx, *operands)
    except KeyError as error:
        if error.args[0] not in traced.effects:
            raise
        raise ordered_effect(program.name, error.args[0]) from error


_shaped.def_impl(_run)
_shaped.def_abstract_eval(_abstract)
ad.primitive_jvps[_shaped] = _jvp
batching.primitive_batchers[_shaped] = _batch
mlir.register_lowering(_shaped, _lower_shaped)
