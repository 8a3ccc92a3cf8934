"""Backward hooks of modules, with PyTorch's names and arguments; :mod:`lazymods._model.backward_hooks` runs them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flax import nnx

from lazymods._errors import Problem
from lazymods._frames import entry
from lazymods._model.backward_hooks import AFTER, BEFORE
from lazymods._model.hooks import Hook, RemovableHandle, ids, register
from lazymods._refusals import ArgumentError, refuse_uncallable


@entry
def register_full_backward_hook(
    module: nnx.Module, hook: Callable[..., Any], *, prepend: bool = False
) -> RemovableHandle:
    """Run a hook whenever the gradients of a module's inputs are computed, under ``jax.grad`` or any other.

    Hooks run in the backward pass of each call of the module, in the order in which they were registered, each on
    what the one before returned; in compiled code while it is traced, and under ``vmap`` for each example. As in
    PyTorch they see the gradients of positional arguments only, and run when those are there: with None for all if no
    argument is differentiated, and not at all if no gradient reaches the outputs.

    Args:
        module: Any nnx module, also a lazy one. Inside an NNX transform hooks get a copy of it, with the values that
            it had in the call.
        hook: ``hook(module, grad_input, grad_output) -> None | new grad_input``. Both are tuples, with one entry for
            each positional argument, and for each output. An entry has the structure of the argument, with None for
            what has no gradient: integers, keys, Python numbers; in ``grad_output`` also outputs that were not used.
        prepend: Run before all backward hooks that are registered.

    Returns:
        A handle whose ``remove()`` removes the hook.

    Raises:
        ArgumentError: If ``module`` is no nnx module, or ``hook`` can't be called.
        LazyError: When it runs, if the hook returns gradients of other shapes or dtypes.

    References:
        ``torch.nn.Module.register_full_backward_hook``.

    Example:
        >>> import jax, jax.numpy as jnp, lazymods as lm
        >>> from flax import nnx
        >>> layer = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
        >>> handle = lm.autograd.register_full_backward_hook(layer, lambda _, grad_in, grad_out: (grad_in[0] * 0 + 1,))
        >>> jax.grad(lambda x: layer(x).sum())(jnp.ones((1, 2)))
        Array([[1., 1.]], dtype=float32)
    """
    return _register("register_full_backward_hook", module, Hook(next(ids), AFTER, hook), prepend)


@entry
def register_full_backward_pre_hook(
    module: nnx.Module, hook: Callable[..., Any], *, prepend: bool = False
) -> RemovableHandle:
    """Run a hook on the gradients of a module's outputs, before those of its parameters and inputs are computed.

    Args:
        module: As for :func:`register_full_backward_hook`.
        hook: ``hook(module, grad_output) -> None | new grad_output``.
        prepend: Run before all backward hooks that are registered.

    Returns:
        A handle whose ``remove()`` removes the hook.

    Raises:
        ArgumentError: If ``module`` is no nnx module, or ``hook`` can't be called.
        LazyError: When it runs, if the hook returns gradients of other shapes or dtypes.

    References:
        ``torch.nn.Module.register_full_backward_pre_hook``.
    """
    return _register("register_full_backward_pre_hook", module, Hook(next(ids), BEFORE, hook), prepend)


def _register(name: str, module: nnx.Module, hook: Hook, first: bool) -> RemovableHandle:
    where = f"lm.autograd.{name}"
    if not isinstance(module, nnx.Module):
        needed = "an nnx.Module: the hook runs in the backward pass of its calls"
        write = f"{where}(model.layer, fn)  # for a Variable, lm.autograd.register_hook(variable, fn)"
        raise ArgumentError(Problem(where, type(module).__name__, needed, write))
    refuse_uncallable(where, hook.function, f"{where}(module, hook)")
    return register(module, hook, first=first)
