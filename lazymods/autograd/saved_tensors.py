"""What is kept between forward and backward, in a form of the user's own.

A block is used inside of the function that is differentiated. Each operation in it hands what it keeps for the backward
pass to ``pack``, and gets it back from ``unpack`` there (:mod:`lazymods._compat.residuals`). Nothing happens where
nothing is differentiated. A residual that several operations keep is packed for each of them, as in PyTorch, and kept
once.
"""

from __future__ import annotations

import contextlib
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
from lazymods._refusals import refuse_uncallable

_HOOKS = "lm.autograd.saved_tensors_hooks"


class Block(contextlib.ContextDecorator):
    """What :func:`saved_tensors_hooks` returns: a context, also a decorator, that can be used again and by any thread."""

    def __init__(self, pack: Callable[[Any], Any], unpack: Callable[[Any, Any], Any]) -> None:
        self._saving = _Saving(pack, unpack)
        self._entered = _Entered()

    def __enter__(self) -> None:
        block = _compat.residuals.saving_in(self._saving)
        block.__enter__()
        self._entered.blocks.append(block)

    def __exit__(self, *error: Any) -> None:
        self._entered.blocks.pop().__exit__(*error)


class _Entered(threading.local):
    def __init__(self) -> None:
        self.blocks: list[Any] = []


class _Saving:
    """The hooks of a block, as :class:`lazymods._compat.residuals.Saving`."""

    def __init__(self, pack: Callable[[Any], Any], unpack: Callable[[Any, Any], Any]) -> None:
        self._pack, self._unpack = pack, unpack
        self._kept: dict[int, _Kept] = {}  # by the id of a residual, as long as that is there

    def put(self, residual: Any) -> tuple[Sequence[Any], Any]:
        leaves, tree = jax.tree.flatten(self._pack(residual))
        for leaf in leaves:
            if not isinstance(leaf, (jax.Array, np.ndarray, np.generic, int, float, complex)):
                raise LazyError(_no_array(residual, leaf))
        arrays = [jnp.asarray(leaf) for leaf in leaves]
        known = self._kept.get(id(residual))
        before = None if known is None else known.arrays(residual)
        if before is not None and known is not None and known.tree == tree:
            return before, tree
        if _compat.residuals.of_one_trace([residual, *arrays]):
            forget = weakref.ref(residual, lambda _, i=id(residual): self._kept.pop(i, None))
            self._kept[id(residual)] = _Kept(forget, arrays, tree)
        return arrays, tree

    def get(self, kept: Sequence[Any], tree: Any, aval: Any) -> Any:
        value = self._unpack(jax.tree.unflatten(tree, kept), aval)
        if describe(value) != describe(aval) or not isinstance(value, (jax.Array, np.ndarray, np.generic)):
            needed = f"{describe(aval)}, as what pack got: the backward pass goes on with it"
            line = "unpack that undoes what pack does, shape and dtype too: lambda kept: kept.astype(jnp.float32)"
            raise LazyError(Problem(f"{_HOOKS}, unpack", describe(value), needed, line))
        return value

    def refuse_derivative(self, residual: Any, kept: Any) -> Exception:
        return LazyError(
            Problem(
                f"{_HOOKS}, pack",
                f"{describe(kept)} for {describe(residual)}, in a second derivative",
                "floats for floats, as the derivative of the gradient goes through pack and unpack",
                "with the block around what is differentiated once, or a pack that gives floats",
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


def _no_array(residual: Any, leaf: Any) -> Problem:
    got = f"{leaf!r} for {describe(residual)}" if isinstance(leaf, str) else f"{type(leaf).__name__}"
    needed = "a pytree of arrays: what is kept is part of the program"
    return Problem(f"{_HOOKS}, pack", got, needed, "what is to be kept as an array, or as a tuple or dict of arrays")


def saved_tensors_hooks(pack: Callable[[Any], Any], unpack: Callable[[Any], Any]) -> Block:
    """Keep what a block needs for its backward pass in another form.
    """
    refuse_uncallable(_HOOKS, pack)
    refuse_uncallable(_HOOKS, unpack)
    return Block(pack, lambda kept, _: unpack(kept))


def save_on_cpu() -> Block:
    """Keep what a block needs for its backward pass in the memory of the host.
    """
    host, device = jax.memory.Space.Host, jax.memory.Space.Device
    return Block(
        lambda residual: jax.device_put(residual, host, src=device),
        lambda kept, _: jax.device_put(kept, device, src=host),
    )


def save_as(dtype: Any) -> Block:
    """Keep the floats that a block needs for its backward pass in a narrower dtype.
    """
    narrow = jnp.dtype(dtype)

    def pack(residual: Any) -> Any:
        is_wider = jnp.issubdtype(residual.dtype, jnp.floating) and residual.dtype.itemsize > narrow.itemsize
        return residual.astype(narrow) if is_wider else residual

    return Block(pack, lambda kept, like: kept if kept.dtype == like.dtype else kept.astype(like.dtype))
