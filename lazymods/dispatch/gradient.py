"""The derivative that a pair ``(forward, backward)`` says, in both modes.

``jax.custom_vjp`` has the reverse mode only. Here a ``jax.custom_jvp`` runs the forward function, and puts the tangents
through one linear operation, ``push``. Its transpose is the backward function: that is all that ``jax.grad`` comes to.
Where forward mode runs the operation itself, that is the transpose of the backward function, by JAX; one that JAX can't
transpose, such as a call of a library, has no forward mode, and says so.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from lazymods import _compat
from lazymods._errors import LazyError
from lazymods.dispatch.places import is_auto_mesh
from lazymods.dispatch.refusals import NoKernelError, no_forward_mode

Spec = tuple[tuple[int, ...], Any]
"""Shape and dtype."""


@dataclasses.dataclass(frozen=True)
class Pullback:
    """A backward function with the structure of what its forward function saved.

    Attributes:
        name: The operator's.
        token: Equal where ``backward`` does the same.
        backward: Takes what was saved and the gradient of the output; returns one for each operand, or None for zero.
        tree: The structure of what was saved.
        output: The structure of the output, and its leaves.
        wanted: The operands that have a gradient: number, shape and dtype.
    """

    name: str
    token: Hashable
    backward: Callable[[Any, Any], Sequence[Any]] = dataclasses.field(compare=False)
    tree: Any
    output: tuple[Any, tuple[Spec, ...]]
    wanted: tuple[tuple[int, Spec], ...]

    @property
    def moving(self) -> list[int]:
        """The leaves of the output that have a gradient."""
        return [i for i, (_, dtype) in enumerate(self.output[1]) if _is_inexact(dtype)]

    def specs(self) -> list[Spec]:
        """Return shape and dtype of each tangent of the output."""
        return [self.output[1][i] for i in self.moving]

    def pull(self, saved: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
        """Return the gradients of those operands that have one, for those of the output."""
        given = dict(zip(self.moving, cotangents, strict=True))
        still = jax.dtypes.float0
        leaves = [given[i] if i in given else np.zeros(s, still) for i, (s, _) in enumerate(self.output[1])]
        found = self.backward(jax.tree.unflatten(self.tree, saved), jax.tree.unflatten(self.output[0], leaves))
        return [jnp.zeros(*spec) if found[i] is None else found[i] for i, spec in self.wanted]


@dataclasses.dataclass(frozen=True)
class _Mapped:
    """A pullback under ``jax.vmap``, with every tangent mapped along its first axis."""

    inner: Any
    axes: tuple[int | None, ...]
    size: int
    options: tuple[tuple[str, Any], ...]  # of that vmap

    @property
    def name(self) -> str:
        return self.inner.name

    def specs(self) -> list[Spec]:
        return [((self.size, *shape), dtype) for shape, dtype in self.inner.specs()]

    def pull(self, saved: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
        axes = (list(self.axes), [0] * len(cotangents))
        return jax.vmap(self.inner.pull, in_axes=axes, **dict(self.options))(list(saved), list(cotangents))


def with_derivative(
    name: str,
    token: Hashable,
    run: Callable[..., Any],
    forward: Callable[..., tuple[Any, Any]],
    backward: Callable[[Any, Any], Sequence[Any]],
) -> Callable[..., Any]:
    """Return a function of operands with the derivative that a pair says.

    Args:
        name: The operator's.
        token: Equal where ``backward`` does the same.
        run: The function.
        forward: Takes its operands, and returns the output and what ``backward`` needs, a pytree of arrays.
        backward: Takes that and the gradient of the output, and returns one for each operand, or None for zero.

    Returns:
        ``run``, differentiated by the others.
    """
    _map_tangents()
    if not is_auto_mesh():  # where an array's type says how it is sharded, JAX's own rule keeps that, in reverse mode
        return _in_reverse(run, forward, backward)
    function = jax.custom_jvp(lambda *operands: _mapped_together(run(*operands), operands))

    @function.defjvp
    def derivative(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
        primals = list(map(jnp.asarray, primals))  # a number beneath jax.grad is none yet
        out, saved = forward(*primals)
        out = _mapped_together(out, primals)
        leaves, output = jax.tree.flatten(out)
        parts, tree = jax.tree.flatten(saved)
        pullback = Pullback(
            name,
            token,
            backward,
            tree,
            (output, tuple((x.shape, x.dtype) for x in leaves)),
            tuple((i, (x.shape, x.dtype)) for i, x in enumerate(primals) if _is_inexact(x.dtype)),
        )
        pushed = dict(zip(pullback.moving, _push_through(pullback, parts, tangents), strict=True))
        moved = [pushed[i] if i in pushed else np.zeros(x.shape, jax.dtypes.float0) for i, x in enumerate(leaves)]
        return out, jax.tree.unflatten(output, moved)

    return function


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Types:
    """The types of operands, as a part of what is saved."""

    types: tuple[Any, ...]


def _in_reverse(run: Callable[..., Any], forward: Callable[..., Any], backward: Callable[..., Any]) -> Any:
    def saving(*operands: Any) -> tuple[Any, Any]:
        out, saved = forward(*operands)
        return out, (saved, _Types(tuple(map(jax.typeof, operands))))

    def back(saved: tuple[Any, _Types], cotangent: Any) -> tuple[Any, ...]:
        found = zip(backward(saved[0], cotangent), saved[1].types, strict=True)
        return tuple(None if g is None else _compat.named_axes.typed_as(g, aval) for g, aval in found)

    reverse = jax.custom_vjp(run)
    reverse.defvjp(saving, back)
    return reverse


def _push_through(pullback: Pullback, saved: Sequence[Any], tangents: Sequence[Any]) -> Sequence[Any]:
    if not pullback.wanted:
        return [jnp.zeros(*spec) for spec in pullback.specs()]
    return _push.bind(*saved, *[tangents[i] for i, _ in pullback.wanted], count=len(saved), pullback=pullback)


def _is_inexact(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.inexact)


# ---------------------------------------------------------------- outputs and their tangents

_together = Primitive("operator_outputs")
_together.multiple_results = True


def _mapped_together(out: Any, operands: Sequence[Any]) -> Any:
    """Return an output each of whose leaves is mapped by ``jax.vmap`` if an operand is, as its tangents are.

    JAX takes it for granted that a rule's output is mapped if that of the function is.
    """
    leaves, tree = jax.tree.flatten(out)
    arrays = [x for x in operands if isinstance(jax.typeof(x), ShapedArray)]
    return tree.unflatten(_together.bind(*map(jnp.asarray, leaves), *arrays, count=len(leaves)))


def _outputs(*inputs: Any, count: int) -> list[Any]:
    return list(inputs[:count])


def _jvp_of_outputs(primals: Sequence[Any], tangents: Sequence[Any], *, count: int) -> Any:
    return _together.bind(*primals, count=count), list(tangents[:count])


def _batch_outputs(inputs: Sequence[Any], dims: Sequence[int | None], *, count: int) -> Any:
    size = next(x.shape[d] for x, d in zip(inputs, dims, strict=True) if d is not None)
    return _mapped(inputs[:count], dims[:count], size), [0] * count


def _mapped(values: Sequence[Any], dims: Sequence[int | None], size: int) -> list[Any]:
    """Return arrays that are mapped along their first axis."""
    return [
        jnp.broadcast_to(x, (size, *x.shape)) if d is None else jnp.moveaxis(x, d, 0)
        for x, d in zip(values, dims, strict=True)
    ]


_together.def_impl(_outputs)
_together.def_abstract_eval(_outputs)
ad.primitive_jvps[_together] = _jvp_of_outputs
batching.primitive_batchers[_together] = _batch_outputs
mlir.register_lowering(_together, mlir.lower_fun(_outputs, multiple_results=True))


# ---------------------------------------------------------------- the linear operation

_push = Primitive("operator_tangents")
_push.multiple_results = True


def _run(*inputs: Any, count: int, pullback: Any) -> list[Any]:
    """Put tangents through: the transpose of the backward function."""
    saved, tangents = inputs[:count], inputs[count:]
    like = [jax.ShapeDtypeStruct(*spec) for spec in pullback.specs()]
    try:
        (pushed,) = jax.linear_transpose(lambda c: pullback.pull(saved, c), like)(list(tangents))
    except LazyError:
        raise
    except Exception as error:  # what JAX says of an operation that has no transpose
        raise NoKernelError(no_forward_mode(pullback.name, error)) from error
    return list(pushed)


def _abstract(*_: Any, count: int, pullback: Any) -> list[Any]:
    return [ShapedArray(shape, dtype) for shape, dtype in pullback.specs()]


def _transpose(cotangents: Sequence[Any], *inputs: Any, count: int, pullback: Any) -> list[Any]:
    found = pullback.pull(inputs[:count], list(map(ad.instantiate_zeros, cotangents)))
    asked = map(ad.is_undefined_primal, inputs[count:])
    return [None] * count + [x if wanted else None for x, wanted in zip(found, asked, strict=True)]


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, count: int, pullback: Any) -> Any:
    """Differentiate: it is linear in the tangents, and anything in what was saved."""
    if all(type(t) is ad.Zero for t in tangents[:count]):
        moved = map(ad.instantiate_zeros, tangents[count:])
        rest = _push.bind(*primals[:count], *moved, count=count, pullback=pullback)
        return _push.bind(*primals, count=count, pullback=pullback), rest
    moving = [i for i, t in enumerate(tangents) if type(t) is not ad.Zero]

    def of_moving(*values: Any) -> list[Any]:
        inputs = list(primals)
        for i, value in zip(moving, values, strict=True):
            inputs[i] = value
        return _run(*inputs, count=count, pullback=pullback)

    return jax.jvp(of_moving, [primals[i] for i in moving], [tangents[i] for i in moving])


def _batch(options: Any, inputs: Any, dims: Sequence[int | None], *, count: int, pullback: Any) -> Any:
    size = dict(options)["axis_size"]
    tangents = _mapped(inputs[count:], dims[count:], size)
    mapped = _Mapped(pullback, tuple(dims[:count]), size, options)
    out = _push.bind(*inputs[:count], *tangents, count=count, pullback=mapped)
    return out, [0] * len(out)


_push.def_impl(_run)
_push.def_abstract_eval(_abstract)
ad.primitive_jvps[_push] = _jvp
ad.primitive_transposes[_push] = _transpose
mlir.register_lowering(_push, mlir.lower_fun(_run, multiple_results=True))


@functools.cache  # when a pair is used first
def _map_tangents() -> None:
    _compat.named_axes.map_by(_push, _batch)
