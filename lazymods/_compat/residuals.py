"""What operations keep between forward and backward, handed to code of ours: three operations and their rules.

A block (:mod:`lazymods._compat.saving`) makes of each operation one of its own, ``saving``, which computes the same.
Where that is differentiated, what the operation keeps goes through :class:`Saving`, and what came out of there is an
input of a ``linear`` operation, the derivative. That gets it back at the last moment: when it is transposed, in the
backward pass.
As both are ordinary operations, a block works wherever jax does: in a jit, a scan or a vmap, before and after those
that differentiate. Rules of the user's own stay: an operation is linearized as jax would, by ``jax.linearize``.

Public are the tables of rules in ``jax.interpreters``. Private: the attributes of ``batching.AxisData``, and
``Primitive.def_effectful_abstract_eval``. Seen to work with jax 0.10.2 and 0.12.0.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax._src.interpreters.batching import AxisData
from jax.core import eval_jaxpr
from jax.extend.core import Literal, Primitive, unmapped_aval
from jax.extend.linear_util import WrappedFun
from jax.interpreters import ad, batching, mlir
from jax.interpreters import partial_eval as pe

from lazymods._compat.finding import require
from lazymods._compat.named_axes import options_of
from lazymods._compat.tracing import open_jaxpr

require(AxisData, "size", "explicit_mesh_axis")
require(Primitive, "def_effectful_abstract_eval")
require(WrappedFun, "stores")


class Saving(Protocol):
    """What a block does with what is kept."""

    def put(self, residual: Any) -> tuple[Sequence[Any], Any]:
        """Return arrays to keep in place of one, and how they hang together."""
        ...

    def get(self, kept: Sequence[Any], tree: Any, aval: Any) -> Any:
        """Return what was put, of a shape and dtype, from what was kept."""
        ...

    def refuse_derivative(self, residual: Any, kept: Any) -> Exception:
        """Return the error for a second derivative by something that was kept as an array that has none."""
        ...


@dataclasses.dataclass(frozen=True)
class _Level:
    """A vmap around an operation: over which axes of its operands; None for one that has none."""

    options: tuple[tuple[str, Any], ...]
    axes: tuple[int | None, ...]


def _under(levels: Sequence[_Level], function: Callable[..., Any], *axes: Callable[[_Level], Any]) -> Any:
    """Return a function as the vmaps around it call it; ``axes`` say over what, for each of its arguments."""
    for level in levels:
        over = tuple([of(level) for of in axes])
        function = jax.vmap(function, in_axes=over, **dict(level.options))
    return function


def _all(level: _Level) -> list[int | None]:
    return list(level.axes)


# ---------------------------------------------------------------- saving: an operation

saving_p = Primitive("saving")
saving_p.multiple_results = True


def _operation(jaxpr: Any, levels: Sequence[_Level]) -> Callable[[list[Any]], list[Any]]:
    return _under(levels, lambda operands: eval_jaxpr(jaxpr, (), *operands), _all)


def _run(*operands: Any, jaxpr: Any, levels: Any, **_: Any) -> list[Any]:
    return _operation(jaxpr, levels)(list(operands))


def _types(*_: Any, jaxpr: Any, results: Any, **__: Any) -> Any:
    return list(results), jaxpr.effects


def _differentiate(primals: Any, tangents: Any, *, jaxpr: Any, saving: Saving, levels: Any, **_: Any) -> Any:
    moving = [i for i, t in enumerate(tangents) if not _is_zero(t)]
    with_tangent: list[int] = []

    def linearize(operands: list[Any], given: list[Any]) -> Any:
        def operation(*some: Any) -> list[Any]:
            filled = dict(enumerate(operands)) | dict(zip(moving, some, strict=True))
            return eval_jaxpr(jaxpr, (), *[filled[i] for i in range(len(operands))])

        out, linear = jax.linearize(operation, *[operands[i] for i in moving])
        residuals, tree = jax.tree.flatten(linear)
        derivative, residuals, found = _derivative(tree, residuals, given)
        with_tangent[:] = found
        return out, _put(saving, derivative, residuals, given) if found else []

    out, moved = _under(levels, linearize, _all, lambda level: [level.axes[i] for i in moving])(
        list(primals), [tangents[i] for i in moving]
    )
    known = dict(zip(with_tangent, moved, strict=True))
    return out, [known[i] if i in known else _zero(x) for i, x in enumerate(out)]


def _derivative(tree: Any, residuals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, list[Any], list[int]]:
    """Return a derivative as a jaxpr, the residuals that it needs, and which results of the operation have one."""

    def linear(residuals: Sequence[Any], *tangents: Any) -> Any:
        return jax.tree.unflatten(tree, residuals)(*tangents)

    jaxpr, consts = as_jaxpr(linear, residuals, *tangents)
    residuals = [*consts, *residuals]
    depending = set(jaxpr.invars[len(residuals) :])
    for equation in jaxpr.eqns:
        if any(not isinstance(v, Literal) and v in depending for v in equation.invars):
            depending.update(equation.outvars)
    moved = [not isinstance(v, Literal) and v in depending for v in jaxpr.outvars]
    keep = [False] * len(residuals) + [True] * len(tangents)
    jaxpr, used = pe.dce_jaxpr(jaxpr, moved, instantiate=keep)
    needed = [r for r, is_used in zip(residuals, used, strict=False) if is_used]  # after them come the tangents
    return jaxpr, needed, [i for i, is_moved in enumerate(moved) if is_moved]


def _put(saving: Saving, jaxpr: Any, residuals: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
    kept: list[Any] = []
    trees: list[Any] = []
    for residual in residuals:
        arrays, tree = saving.put(residual)
        if has_derivative(residual):
            arrays = [x if has_derivative(x) else guard_p.bind(residual, x, saving=saving) for x in arrays]
        kept += arrays
        trees.append((len(arrays), tree, jax.typeof(residual)))
    results = tuple([v.aval for v in jaxpr.outvars])
    return linear_p.bind(
        *kept, *tangents, jaxpr=jaxpr, saving=saving, trees=tuple(trees), levels=(), results=results
    )


def _map_operation(axis: Any, operands: Any, axes: Any, *, jaxpr: Any, levels: Any, results: Any, **params: Any) -> Any:
    if not _are_mapped(axes):
        return _unmapped(saving_p, operands, jaxpr=jaxpr, levels=levels, results=results, **params)
    levels = (*levels, _Level(options_of(axis), tuple(axes)))
    out = saving_p.bind(*operands, jaxpr=jaxpr, levels=levels, results=_mapped(axis, results), **params)
    return out, [0] * len(out)


def _transpose_operation(cotangents: Any, *operands: Any, jaxpr: Any, levels: Any, **_: Any) -> list[Any]:
    return _transposed(_operation(jaxpr, levels), cotangents, operands)


# ---------------------------------------------------------------- linear: its derivative

linear_p = Primitive("linear")
linear_p.multiple_results = True


def _unpacked(kept: Sequence[Any], saving: Saving, trees: Any) -> list[Any]:
    """Return residuals from what was kept; the last ones first, as a backward pass comes to them."""
    found, end = [], len(kept)
    for count, tree, aval in reversed(trees):
        found.append(saving.get(kept[end - count : end], tree, aval))
        end -= count
    return found[::-1]


def _count(trees: Any) -> int:
    return sum([count for count, _, _ in trees])


def _linear(levels: Any, jaxpr: Any, saving: Saving, trees: Any) -> Callable[..., list[Any]]:
    def apply(kept: list[Any], tangents: list[Any]) -> list[Any]:
        return eval_jaxpr(jaxpr, (), *_unpacked(kept, saving, trees), *tangents)

    return _under(levels, apply, _all, _first)


def _first(_: _Level) -> int:
    return 0


def _apply(*operands: Any, jaxpr: Any, saving: Saving, trees: Any, levels: Any, **_: Any) -> list[Any]:
    n = _count(trees)
    return _linear(levels, jaxpr, saving, trees)(list(operands[:n]), list(operands[n:]))


def _differentiate_again(primals: Any, tangents: Any, **params: Any) -> Any:
    n = _count(params["trees"])
    moving = [i for i, t in enumerate(tangents) if not _is_zero(t)]
    if all(i >= n for i in moving):
        out = linear_p.bind(*primals, **params)
        given = [ad.instantiate_zeros(t) for t in tangents[n:]]
        return out, linear_p.bind(*primals[:n], *given, **params)

    def apply(*some: Any) -> list[Any]:
        filled = dict(enumerate(primals)) | dict(zip(moving, some, strict=True))
        return _apply(*[filled[i] for i in range(len(primals))], **params)

    return jax.jvp(apply, [primals[i] for i in moving], [tangents[i] for i in moving])


def _map_linear(axis: Any, operands: Any, axes: Any, *, levels: Any, trees: Any, results: Any, **params: Any) -> Any:
    if not _are_mapped(axes):
        return _unmapped(linear_p, operands, levels=levels, trees=trees, results=results, **params)
    n = _count(trees)
    tangents = [batching.bdim_at_front(x, d, axis.size) for x, d in zip(operands[n:], axes[n:], strict=True)]
    levels = (*levels, _Level(options_of(axis), tuple(axes[:n])))
    kept = operands[:n]
    out = linear_p.bind(*kept, *tangents, levels=levels, trees=trees, results=_mapped(axis, results), **params)
    return out, [0] * len(out)


def _transpose(cotangents: Any, *operands: Any, jaxpr: Any, saving: Saving, trees: Any, levels: Any, **_: Any) -> Any:
    n = _count(trees)
    kept, tangents = list(operands[:n]), operands[n:]
    linear = [i for i, x in enumerate(tangents) if ad.is_undefined_primal(x)]
    if all(map(_is_zero, cotangents)):
        return [None] * n + [ad.Zero(x.aval) if ad.is_undefined_primal(x) else None for x in tangents]
    avals = [v.aval for v in jaxpr.invars[-len(tangents) :]]

    def back(kept: list[Any], cotangents: list[Any]) -> list[Any]:
        residuals = _unpacked(kept, saving, trees)

        def apply(*some: Any) -> list[Any]:
            given = [jnp.zeros(aval.shape, aval.dtype) for aval in avals]
            for i, x in zip(linear, some, strict=True):
                given[i] = x
            return eval_jaxpr(jaxpr, (), *residuals, *given)

        return list(jax.linear_transpose(apply, *[avals[i] for i in linear])(cotangents))

    given = [ad.instantiate_zeros(c) for c in cotangents]
    found = _under(levels, back, _all, _first)(kept, given)
    places = dict(zip(linear, found, strict=True))
    return [None] * n + [places.get(i) for i in range(len(tangents))]


# ---------------------------------------------------------------- guard: what was kept has no derivative

guard_p = Primitive("saving_guard")


def _refuse(primals: Any, tangents: Any, *, saving: Saving) -> Any:
    residual, kept = primals
    if not _is_zero(tangents[0]):
        raise saving.refuse_derivative(residual, kept)
    return guard_p.bind(residual, kept, saving=saving), _zero(kept)


def _map_guard(operands: Any, axes: Any, *, saving: Saving) -> Any:
    return guard_p.bind(*operands, saving=saving), axes[1]


# ---------------------------------------------------------------- rules

saving_p.def_impl(_run)
saving_p.def_effectful_abstract_eval(_types)
ad.primitive_jvps[saving_p] = _differentiate
ad.primitive_transposes[saving_p] = _transpose_operation
batching.fancy_primitive_batchers[saving_p] = _map_operation
mlir.register_lowering(saving_p, mlir.lower_fun(_run))

linear_p.def_impl(_apply)
linear_p.def_effectful_abstract_eval(_types)
ad.primitive_jvps[linear_p] = _differentiate_again
ad.primitive_transposes[linear_p] = _transpose
batching.fancy_primitive_batchers[linear_p] = _map_linear
mlir.register_lowering(linear_p, mlir.lower_fun(_apply))

guard_p.def_impl(lambda _, kept, **__: kept)
guard_p.def_abstract_eval(lambda _, kept, **__: kept)
ad.primitive_jvps[guard_p] = _refuse
batching.primitive_batchers[guard_p] = _map_guard
mlir.register_lowering(guard_p, mlir.lower_fun(lambda _, kept, **__: kept, multiple_results=False))

OWN = frozenset({saving_p, linear_p, guard_p})


def _is_zero(tangent: Any) -> bool:
    return type(tangent) is ad.Zero or jax.typeof(tangent).dtype == jax.dtypes.float0


def _zero(value: Any) -> Any:
    return ad.Zero(jax.typeof(value).to_tangent_aval())


def has_derivative(value: Any) -> bool:
    return jnp.issubdtype(jax.typeof(value).dtype, jnp.inexact)


def _are_mapped(axes: Sequence[int | None]) -> bool:
    """Whether vmap maps an operand; jax asks these rules also where it maps none."""
    return any([axis is not None for axis in axes])


def _unmapped(primitive: Primitive, operands: Sequence[Any], **params: Any) -> tuple[Any, list[None]]:
    """Do an operation as without vmap: what depends on no mapped operand is not mapped, or ``jax.jacfwd`` fails."""
    out = primitive.bind(*operands, **params)
    return out, [None] * len(out)


def _mapped(axis: Any, results: Any) -> Any:
    """Return the types of results of a vmap from those without it."""
    return tuple([unmapped_aval(axis.size, 0, aval, axis.explicit_mesh_axis) for aval in results])


def _transposed(function: Any, cotangents: Any, operands: Any) -> list[Any]:
    linear = [i for i, x in enumerate(operands) if ad.is_undefined_primal(x)]

    def apply(*some: Any) -> list[Any]:
        filled = dict(enumerate(operands)) | dict(zip(linear, some, strict=True))
        return function([filled[i] for i in range(len(operands))])

    given = [ad.instantiate_zeros(c) for c in cotangents]
    found = jax.linear_transpose(apply, *[operands[i].aval for i in linear])(given)
    places = dict(zip(linear, found, strict=True))
    return [places.get(i) for i in range(len(operands))]


def as_jaxpr(function: Callable[..., Any], *args: Any) -> tuple[Any, Sequence[Any]]:
    """Return a function as a jaxpr without constants, and what to give it first: what it closes over."""
    jaxpr, consts = open_jaxpr(jax.make_jaxpr(function)(*args))
    if consts:
        made = jax.make_jaxpr(lambda consts, *args: eval_jaxpr(jaxpr, consts, *jax.tree.leaves(args)))(consts, *args)
        return open_jaxpr(made)[0], consts
    return jaxpr, ()
