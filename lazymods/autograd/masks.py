"""Functions that are finite at some elements alone, and their gradients there.

``jnp.where(mask, fn(x), 0)`` has the right value, and a gradient of ``nan`` where ``fn`` has no finite derivative: what
the mask drops is multiplied by zero, and zero times infinity is not zero. So ``fn`` must not see those elements.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lazymods._errors import Problem, describe
from lazymods._frames import entry
from lazymods._refusals import ArgumentError, refuse_uncallable

_NUMBERS = (bool, int, float, complex)


@entry
def safe_where(mask: Any, fn: Callable[..., Any], *args: Any, fill: Any = 0.0) -> Any:
    """Return ``jnp.where(mask, fn(*args), fill)``, with finite derivatives of every order where ``fn`` has none.

    Where ``mask`` is False, ``fn`` gets the arguments of the first element where it is True instead, and nothing is
    differentiated. So masked elements get the gradient 0, and ``fn`` is never called where it is not finite, unless
    ``mask`` is False everywhere; then it gets 0.5, or 1 for integers, and what it closes over has a gradient of ``nan``
    if it is not finite there. Under ``jax.vmap`` that is the first element of all examples.
    An array that ``fn`` closes over it sees as it is, masked elements too: pass it as an argument.

    Args:
        mask: Where to use ``fn``; a bool array, or what broadcasts with the arguments.
        fn: A function that works element by element, such as ``jnp.log`` or a formula of such functions. What it
            returns has the shape of its arguments; it may be a pytree.
        *args: Arrays, or pytrees of arrays, that broadcast with each other and with ``mask``. Python numbers are handed
            on as they are.
        fill: What is there instead, where ``mask`` is False: a number or an array. It has a gradient there.

    Returns:
        An array of the shape to which ``mask`` and the arguments broadcast, of the dtype that ``jnp.where`` gives.

    Raises:
        ArgumentError: If ``fn`` can't be called, or returns another shape; if ``mask``, an argument or ``fill`` is no
            array and no number, or if they do not broadcast.

    Example:
        >>> import jax, jax.numpy as jnp, lazymods as lm
        >>> x = jnp.array([0.0, 2.0])
        >>> jax.grad(lambda x: jnp.where(x > 0, jnp.log(x), 0.0).sum())(x)
        Array([nan, 0.5], dtype=float32)
        >>> jax.grad(lambda x: lm.autograd.safe_where(x > 0, jnp.log, x).sum())(x)
        Array([0. , 0.5], dtype=float32)
    """
    refuse_uncallable(_WHERE, fn, "lm.autograd.safe_where(mask, fn, x)")
    _refuse_other_kinds(mask, args, fill)
    values, tree = jax.tree.flatten(args)
    arrays = {i: x for i, x in enumerate(values) if type(x) not in _NUMBERS}
    shape = _common_shape(mask, arrays.values(), fill)
    mask = jnp.broadcast_to(jnp.asarray(mask), shape).astype(bool)
    arrays = {i: jnp.broadcast_to(jnp.asarray(x), shape) for i, x in arrays.items()}
    wholes = {i: x for i, x in arrays.items() if not jnp.issubdtype(x.dtype, jax.dtypes.extended)}
    firsts = _first(mask, {i: jax.lax.stop_gradient(x) for i, x in wholes.items()})
    safe = {i: jnp.where(mask, x, firsts[i]) for i, x in wholes.items()}
    given = [safe.get(i, arrays.get(i, x)) for i, x in enumerate(values)]

    def filled(result: Any) -> Any:
        if np.shape(result) != shape:
            raise ArgumentError(_not_elementwise(result, shape))
        if _is_key(result) != _is_key(fill):
            needed = f"what jnp.where takes beside {describe(result)}, which fn returned"
            raise ArgumentError(Problem(f"{_WHERE}: fill", describe(fill), needed, "fill=...  # a key for keys only"))
        return jnp.where(mask, result, fill)

    return jax.tree.map(filled, fn(*jax.tree.unflatten(tree, given)))


_WHERE = "lm.autograd.safe_where"


def _refuse_other_kinds(mask: Any, args: tuple[Any, ...], fill: Any) -> None:
    """Refuse what is neither an array nor a number.

    Raises:
        ArgumentError: If anything is; of all that are.
    """
    wrong = [] if _is_array(mask) and not _is_key(mask) else [("mask", mask, "safe_where(x > 0, jnp.log, x)")]
    for path, leaf in jax.tree_util.tree_leaves_with_path(args):
        if not _is_array(leaf):
            line = "lambda x: fn(x, option)  # for what is an option of fn and no array"
            wrong.append((f"argument {jax.tree_util.keystr(path)}", leaf, line))
    if not _is_array(fill):
        wrong.append(("fill", fill, "fill=0.0"))
    if wrong:
        needed = "an array or a number, as jnp.where takes them"
        raise ArgumentError(*[Problem(f"{_WHERE}: {n}", describe(x), needed, line) for n, x, line in wrong])


def _is_array(value: Any) -> bool:
    """Whether ``jnp.asarray`` takes a value; a list of numbers is one to it."""
    try:
        jax.eval_shape(jnp.asarray, value)
    except (TypeError, ValueError, OverflowError):
        return False
    return value is not None


def _is_key(value: Any) -> bool:
    dtype = getattr(value, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.extended)


def _common_shape(mask: Any, arrays: Collection[Any], fill: Any) -> tuple[int, ...]:
    """Return the shape to which mask and arguments broadcast.

    Raises:
        ArgumentError: If they do not, or not with ``fill``.
    """
    try:
        shape = jnp.broadcast_shapes(np.shape(mask), *map(np.shape, arrays))
        jnp.broadcast_shapes(shape, np.shape(fill))
    except ValueError:
        shapes = [describe(jnp.asarray(x)) for x in (mask, *arrays, fill)]
        got = f"a mask {shapes[0]}, arguments {', '.join(shapes[1:-1]) or 'without arrays'}, and fill {shapes[-1]}"
        needed = "shapes that broadcast with each other: one element of each for one of the result"
        line = "mask[:, None]  # for a mask of rows; arrays of another shape in a closure: lambda x: x @ w"
        raise ArgumentError(Problem(_WHERE, got, needed, line)) from None
    return shape


# ---------------------------------------------------------------- the first element that counts

_LAST = np.iinfo(np.int32).max


@jax.custom_batching.custom_vmap
def _first_of_each(mask: jax.Array, values: dict[int, jax.Array]) -> dict[int, jax.Array]:
    """Return of each array the first element where the mask is True, be it of another example of a vmap."""
    positions = _positions(mask.shape)
    first = mask & (positions == jnp.min(positions, where=mask, initial=_LAST))
    return {i: jnp.where(jnp.any(mask), _only(first, x), _harmless(x.dtype)) for i, x in values.items()}


@_first_of_each.def_vmap
def _first_of_examples(size: int, are_mapped: Any, mask: jax.Array, values: dict[int, jax.Array]) -> Any:
    def mapped(is_mapped: bool, x: jax.Array) -> jax.Array:
        return x if is_mapped else jnp.broadcast_to(x, (size, *x.shape))

    whole = jax.tree.map(mapped, are_mapped, [mask, values])
    return _first_of_each(*whole), dict.fromkeys(values, False)


_first = jax.jit(_first_of_each)  # traced once for each shape


def _harmless(dtype: Any) -> Any:
    """Return a number at which most functions that are not finite everywhere are finite."""
    return jnp.asarray(0.5 if jnp.issubdtype(dtype, jnp.inexact) else 1, dtype)


def _positions(shape: tuple[Any, ...]) -> jax.Array:
    """Return a number for each element, without a reshape, which not every sharding can have."""
    position = jnp.zeros(shape, jnp.int32)
    for axis, size in enumerate(shape):
        position = position * size + jax.lax.broadcasted_iota(jnp.int32, shape, axis)
    return position


def _only(first: jax.Array, value: jax.Array) -> jax.Array:
    """Return the element of an array where ``first`` is True, or 0."""
    if value.dtype == bool:
        return jnp.any(value & first)
    return jnp.sum(value, where=first, dtype=value.dtype)


def _not_elementwise(result: Any, shape: tuple[Any, ...]) -> Problem:
    needed = f"an array of the shape {shape}, to which the mask and the arguments broadcast: one element for each"
    write = "lm.autograd.safe_where(mask, jnp.log, x).sum()  # fn element by element; its result is reduced"
    return Problem(f"{_WHERE}: what fn returned", describe(result), needed, write)
