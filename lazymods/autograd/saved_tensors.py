"""What is kept between forward and backward, in a form of the user's own.

A block is used inside of the function that is differentiated. Each operation in it hands what it keeps for the backward
pass to ``pack``, and gets it back from ``unpack`` there (:mod:`lazymods._compat.residuals`). Nothing happens where
nothing is differentiated. A residual that several operations keep is packed for each of them, as in PyTorch, and kept
once.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lazymods import _compat
from lazymods._errors import LazyError, Problem, describe
from lazymods._frames import entry
from lazymods._graph import is_object
from lazymods._refusals import ArgumentError, refuse_uncallable

_HOOKS = "lm.autograd.saved_tensors_hooks"


class Block(contextlib.ContextDecorator):
    """What :func:`saved_tensors_hooks` returns: a context and decorator, to be used again and by any thread.

    Args:
        pack: Gets what an operation keeps.
        unpack: Gets the type of that; returns what is called with what ``pack`` returned.
    """

    def __init__(self, pack: Callable[[Any], Any], unpack: Callable[[Any], Callable[[Any], Any]]) -> None:
        self._saving = _Saving(pack, unpack)
        self._entered = _Entered()

    def __enter__(self) -> None:
        block = _compat.saving.saving_in(self._saving)
        block.__enter__()
        self._entered.blocks.append(block)

    def __exit__(self, *error: Any) -> None:
        self._entered.blocks.pop().__exit__(*error)


class _Entered(threading.local):
    def __init__(self) -> None:
        self.blocks: list[Any] = []


class _Saving:
    """The hooks of a block, as :class:`lazymods._compat.saving.Saving`."""

    def __init__(self, pack: Callable[[Any], Any], unpack: Callable[[Any], Callable[[Any], Any]]) -> None:
        self._pack, self._unpack = pack, unpack
        self._kept: dict[int, _Kept] = {}  # by the id of a residual, as long as that is there

    def put(self, residual: Any) -> tuple[Sequence[Any], Any]:
        leaves, tree = jax.tree.flatten(_called("pack", self._pack, residual))
        for leaf in leaves:
            if not isinstance(leaf, (jax.Array, np.ndarray, np.generic, int, float, complex)):
                raise LazyError(_no_array(residual, leaf))
        arrays = [jnp.asarray(leaf) for leaf in leaves]
        known = self._kept.get(id(residual))
        before = None if known is None else known.arrays(residual)
        if before is not None and known is not None and known.tree == tree:
            return before, tree
        if _compat.saving.of_one_trace([residual, *arrays]):
            key = id(residual)
            self._kept[key] = _Kept(weakref.ref(residual, lambda _: self._kept.pop(key, None)), arrays, tree)
        return arrays, tree

    def get(self, kept: Sequence[Any], tree: Any, aval: Any) -> Any:
        value = _called("unpack", self._unpack(aval), jax.tree.unflatten(tree, kept))
        if describe(value) != describe(aval) or not isinstance(value, (jax.Array, np.ndarray, np.generic)):
            needed = f"{describe(aval)}, as what pack got: the backward pass goes on with it"
            line = "lambda kept: kept.astype(jnp.float32)  # unpack undoes what pack does, shape and dtype too"
            raise LazyError(Problem(f"{_HOOKS}, unpack", describe(value), needed, line))
        return value

    def refuse_derivative(self, residual: Any, kept: Any) -> Exception:
        return LazyError(
            Problem(
                f"{_HOOKS}, pack",
                f"{describe(kept)} for {describe(residual)}, in a second derivative",
                "floats for floats, as the derivative of the gradient goes through pack and unpack",
                "lambda a: a.astype(jnp.bfloat16)  # pack gives floats; or differentiate once inside of the block",
            )
        )


class _Kept:
    """What a residual was packed as, held by nothing but the backward pass."""

    def __init__(self, residual: weakref.ref[Any], arrays: Sequence[Any], tree: Any) -> None:
        self._residual, self._arrays, self.tree = residual, list(map(weakref.ref, arrays)), tree

    def arrays(self, residual: Any) -> list[Any] | None:
        """Return it, if it is that of this residual and still there."""
        found = [array() for array in self._arrays]
        return found if self._residual() is residual and all(x is not None for x in found) else None


def _called(name: str, hook: Callable[..., Any], value: Any) -> Any:
    try:
        is_foreign = _compat.saving.uses_foreign(hook, value)
        if not is_foreign:
            return hook(value)
        reason = None
    except jax.errors.UnexpectedTracerError as error:
        reason = error
    got = "a hook that closes over a value of the function that is differentiated"
    needed = "one of what it gets alone: it is run where the function is transformed, outside of it"
    line = "lambda a: (a / a.max(), a.max())  # pack returns all that unpack needs"
    raise LazyError(Problem(f"{_HOOKS}, {name}", got, needed, line)) from reason


def _no_array(residual: Any, leaf: Any) -> Problem:
    got = f"{leaf!r} for {describe(residual)}" if isinstance(leaf, str) else f"{type(leaf).__name__}"
    needed = "a pytree of arrays: what is kept is part of the program"
    line = "lambda a: (a, a.max())  # pack returns an array, or a tuple or dict of arrays"
    return Problem(f"{_HOOKS}, pack", got, needed, line)


@entry
def saved_tensors_hooks(pack: Callable[[Any], Any], unpack: Callable[[Any], Any]) -> Block:
    """Keep what a block needs for its backward pass in another form.

    The block is used inside of the function that is differentiated, by whatever transform. Each operation in it calls
    ``pack`` with every array that it keeps, integers and booleans too, and ``unpack`` with what that returned, when the
    backward pass comes to it. Nothing is called where nothing is differentiated. In nested blocks the innermost one
    counts. In a scan ``pack`` gets what one iteration keeps. A ``jax.grad`` that is started inside of a block is not
    covered: the block belongs into its function. Forward-mode derivatives go through both functions as well, and so do
    derivatives of higher order.

    Args:
        pack: Gets an array; returns a pytree of arrays, which is what is kept.
        unpack: Gets what ``pack`` returned; returns an array of the shape and dtype that ``pack`` got.

    Returns:
        A context, which can be entered again and by any thread; also a decorator.

    Raises:
        ArgumentError: If ``pack`` or ``unpack`` can't be called.
        LazyError: In the block, if ``pack`` returns no pytree of arrays; in the backward pass, if ``unpack`` returns
            another shape or dtype; in a second derivative, if ``pack`` gives integers for floats.

    References:
        ``torch.autograd.graph.saved_tensors_hooks``.

    Example:
        >>> import jax, jax.numpy as jnp, lazymods as lm
        >>> def loss(x):
        ...     with lm.autograd.saved_tensors_hooks(lambda a: a.astype(jnp.bfloat16), lambda a: a.astype(jnp.float32)):
        ...         return (x * x).sum()
        >>> jax.grad(loss)(jnp.array([1.0, 2.0]))
        Array([2., 4.], dtype=float32)
    """
    refuse_uncallable(f"{_HOOKS}, pack", pack, f"{_HOOKS}(pack, unpack)")
    refuse_uncallable(f"{_HOOKS}, unpack", unpack, f"{_HOOKS}(pack, unpack)")
    return Block(pack, lambda _: unpack)


def save_on_cpu() -> Block:
    """Keep what a block needs for its backward pass in the memory of the host.

    It is brought back when the backward pass comes to it: time for memory of the device. On a CPU it costs a copy.

    What ``jax.vjp`` returns holds arrays in the host's memory. Where one compiled program has both passes, as in
    ``jax.jit(jax.grad(f))``, layers on a GPU are to be a scan (``lm.Stack``, ``jax.lax.scan``): what an iteration keeps
    leaves the device before the next one. Outside of a scan XLA drops the moves: the values are right, and all stays on
    the device; :func:`recompute` saves memory there (H200, jax 0.11.2).

    Returns:
        A block as of :func:`saved_tensors_hooks`.

    References:
        ``torch.autograd.graph.save_on_cpu``.

    Example:
        >>> import jax, jax.numpy as jnp, lazymods as lm
        >>> def loss(x):
        ...     with lm.autograd.save_on_cpu():
        ...         return jnp.exp(x).sum()
        >>> _, backward = jax.vjp(loss, jnp.zeros(2))
        >>> {x.sharding.memory_kind for x in jax.tree.leaves(backward) if x.shape}
        {'pinned_host'}
    """
    host, device = jax.memory.Space.Host, jax.memory.Space.Device

    def pack(residual: Any) -> Any:
        return jax.device_put(residual, host, src=device)

    def unpack(kept: Any) -> Any:
        return jax.device_put(kept, device, src=host)

    return Block(pack, lambda _: unpack)


@entry
def save_as(dtype: Any) -> Block:
    """Keep the floats that a block needs for its backward pass in a narrower dtype, such as ``jnp.bfloat16``.

    Gradients are rounded by that; the value is not. Integers, booleans, complex numbers, and floats that are no wider
    are kept as they are.

    Args:
        dtype: A floating-point dtype.

    Returns:
        A block as of :func:`saved_tensors_hooks`.

    Raises:
        ArgumentError: If ``dtype`` is none of floats.

    Example:
        >>> import jax.numpy as jnp, lazymods as lm
        >>> def loss(x):
        ...     with lm.autograd.save_as(jnp.bfloat16):
        ...         return jnp.exp(x).sum()
        >>> lm.autograd.saved_bytes(loss, jnp.zeros(1000)).total
        2000
    """
    if dtype is None or not _is_float(dtype):  # numpy takes None for float64
        needed = "a dtype of floats: what is kept is rounded to it"
        raise ArgumentError(Problem("lm.autograd.save_as", f"{dtype!r}", needed, "lm.autograd.save_as(jnp.bfloat16)"))
    narrow = jnp.dtype(dtype)

    def pack(residual: Any) -> Any:
        return residual.astype(narrow) if _is_float(residual.dtype) and _bytes(residual) > narrow.itemsize else residual

    return Block(pack, lambda like: lambda kept: kept if kept.dtype == like.dtype else kept.astype(like.dtype))


def _is_float(dtype: Any) -> bool:
    try:
        return bool(jnp.issubdtype(dtype, jnp.floating))
    except TypeError:
        return False


def _bytes(array: Any) -> int:
    return array.dtype.itemsize


@entry
def recompute(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Keep nothing of a function for the backward pass but its arguments, and run it again there.

    It is ``jax.checkpoint`` for functions of modules, arrays and pytrees of them: what modules hold is an argument, and
    what ``fn`` does to them is done once. Arguments that are no arrays stay as they are: ``train=True`` needs no
    declaration.

    Args:
        fn: A function, a module, or a method of one.

    Returns:
        A function of the same arguments.

    Raises:
        ArgumentError: If ``fn`` can't be called.
        LazyError: When it is called, if it changes an nnx object that is no argument of the transform around.

    References:
        ``torch.utils.checkpoint.checkpoint``; ``nnx.remat``.

    Example:
        >>> import jax.numpy as jnp, lazymods as lm
        >>> def f(x):
        ...     return jnp.sin(jnp.exp(x)).sum()
        >>> lm.autograd.saved_bytes(f, jnp.ones(1000)).total
        8000
        >>> lm.autograd.saved_bytes(lm.autograd.recompute(f), jnp.ones(1000)).total
        4000
    """
    refuse_uncallable("lm.autograd.recompute", fn)
    owner = fn if isinstance(fn, nnx.Module) else getattr(fn, "__self__", None)
    if isinstance(owner, nnx.Module):
        call: Any = type(owner).__call__ if owner is fn else fn.__func__  # type: ignore[attr-defined]
        first: tuple[Any, ...] = (owner,)
    else:
        call, first = fn, ()

    @functools.wraps(call)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        try:
            leaves, tree = jax.tree.flatten(((*first, *args), kwargs), is_leaf=is_object)
            moving = {i: x for i, x in enumerate(leaves) if is_object(x) or isinstance(x, (jax.Array, np.ndarray))}

            def run(moving: dict[int, Any]) -> Any:
                args, kwargs = jax.tree.unflatten(tree, [moving.get(i, x) for i, x in enumerate(leaves)])
                return call(*args, **kwargs)

            objects = [x for x in moving.values() if is_object(x)]
            if all(_compat.birth_trace(x) is _compat.current_home() for x in objects):
                return nnx.remat(run)(moving)
            return _of_objects_outside(run, moving)
        except Exception as error:
            _compat.hide_frames(error)
            raise

    return recomputed


def _of_objects_outside(run: Callable[[dict[int, Any]], Any], moving: dict[int, Any]) -> Any:
    """Do so for nnx objects that are no arguments of the transform around: they may be read here, and not written.

    ``nnx.remat`` would take their Variables from them and fail to give them back.

    Raises:
        LazyError: If they are written.
    """
    graph, state = nnx.split(moving)

    def of_state(state: Any) -> Any:
        before = jax.tree.leaves(state)  # its Variables become those of the copies
        copies = nnx.merge(graph, state)
        out = run(copies)
        after, state = nnx.split(copies)
        same = zip(jax.tree.leaves(state), before, strict=True) if after == graph else ()
        if after != graph or any(new is not old for new, old in same):
            got = "a function that changes an nnx object which is no argument of the transform around"
            needed = "a function that reads it: what is computed in a transform can't be stored outside of it"
            write = "nnx.grad(loss)(model, x)  # the model as an argument, and this call inside of loss"
            raise LazyError(Problem("lm.autograd.recompute", got, needed, write))
        return out

    return jax.checkpoint(of_state)(state)
