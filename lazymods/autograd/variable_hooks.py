"""Hooks on the gradients of Variables, with PyTorch's names and order.

The hooks of a Variable are an entry of its metadata, which is static: they are there before a lazy parameter has a
value, go with it through class changes and NNX transforms, and what was compiled with other hooks is compiled anew.
:mod:`lazymods.autograd.gradient` runs them on what it found, once for each Variable: NNX gives a shared one a
single gradient, the sum. Which hooks run is settled before the first one does, so what a hook registers or removes
counts from the next gradient on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from lazymods import _compat, _graph
from lazymods._errors import LazyError, Problem, UninitializedError, describe, located
from lazymods._frames import entry
from lazymods._model.hooks import RemovableHandle
from lazymods._refusals import ArgumentError, refuse_uncallable

_KEY = "lazymods_gradient_hooks"  # in the metadata
ALONE = threading.RLock()
"""Held while nnx.grad works in plain Python: at its end it empties and refills the modules that it was given, and gives
Variables the metadata that they had at its beginning. Held also while hooks are registered and removed, therefore.
"""
_ids = itertools.count()


@dataclasses.dataclass(frozen=True, repr=False)
class GradientHook:
    """One registered hook; hashable also if its function is not."""

    id: int
    function: Callable[..., Any] = dataclasses.field(hash=False)
    last: bool  # a post-accumulate hook

    def __repr__(self) -> str:
        return getattr(self.function, "__qualname__", type(self.function).__qualname__)


class _Running(threading.local):
    variables: tuple[nnx.Variable[Any], ...] = ()  # those with hooks, of the gradient whose hooks run in this thread


_RUNNING = _Running()


class VariableHookHandle(RemovableHandle):
    """Removes a hook from a Variable; also a context manager that removes it at the end.

    A hook may use it, too. Inside an NNX transform it runs for a copy of the Variable, of which the transform makes the
    original again, so the hook is removed from both. Until then the handle keeps the Variable alive, to which there are
    no weak references.
    """

    def __init__(self, variable: nnx.Variable[Any], hook: GradientHook) -> None:
        self._variables: tuple[nnx.Variable[Any], ...] = (variable,)
        self._id = hook.id

    def remove(self) -> None:
        """Remove the hook; removing it twice does nothing."""
        targets, self._variables = (*_RUNNING.variables, *self._variables), ()
        for target in targets:
            with ALONE:
                hooks = hooks_of(target)
                left = tuple(hook for hook in hooks if hook.id != self._id)
                if left != hooks:
                    _set_hooks(target, left)


@entry
def register_hook(variable: nnx.Variable[Any], fn: Callable[[Any], Any]) -> RemovableHandle:
    """Run a function on the gradient of a Variable, each time that ``grad`` or ``value_and_grad`` finds it.

    Those of :mod:`lazymods.autograd`, that is: ``jax.grad`` and ``nnx.grad`` know nothing of hooks. The hooks of a
    Variable run in the order in which they were registered, each on what the one before returned, once for each
    gradient: of a Variable that is shared, on the sum. Compiled code runs them while it is traced.

    Args:
        variable: Any Variable, also a lazy one that has no value yet. A copy of it, by ``nnx.clone``, ``nnx.merge`` or
            ``copy.deepcopy``, has the hooks as well: NNX transforms see a model by copies. (PyTorch's copy of a module
            has its hooks; that of a single parameter has none.) Removing a hook leaves those of copies.
        fn: ``fn(grad) -> None | new grad``, of the same shape and dtype.

    Returns:
        A handle whose ``remove()`` removes the hook.

    Raises:
        ArgumentError: If ``variable`` is no Variable, or ``fn`` can't be called.
        LazyError: When it runs, if ``fn`` returns another shape or dtype.
        UninitializedError: When a gradient is taken and ``variable`` has no value yet.

    References:
        ``torch.Tensor.register_hook``.

    Example:
        >>> import jax.numpy as jnp, lazymods as lm
        >>> from flax import nnx
        >>> weight = nnx.Param(jnp.array([1.0, 2.0]))
        >>> handle = lm.autograd.register_hook(weight, lambda g: g.clip(max=3.0))
        >>> lm.autograd.grad(lambda w: (w[...] ** 2).sum())(weight)[...]
        Array([2., 3.], dtype=float32)
    """
    return _register("register_hook", variable, fn, last=False)


@entry
def register_post_accumulate_grad_hook(
    variable: nnx.Variable[Any], fn: Callable[[nnx.Variable[Any], Any], None]
) -> RemovableHandle:
    """Run a function on a Variable and its final gradient, after all hooks of :func:`register_hook`.

    Args:
        variable: As for :func:`register_hook`.
        fn: ``fn(variable, grad) -> None``. It may change the Variable, as an optimizer does.

    Returns:
        A handle whose ``remove()`` removes the hook.

    Raises:
        ArgumentError: If ``variable`` is no Variable, or ``fn`` can't be called.
        LazyError: When it runs, if ``fn`` returns something: it would be lost.
        UninitializedError: When a gradient is taken and ``variable`` has no value yet.

    References:
        ``torch.Tensor.register_post_accumulate_grad_hook``.
    """
    return _register("register_post_accumulate_grad_hook", variable, fn, last=True)


def hooks_of(variable: nnx.Variable[Any]) -> tuple[GradientHook, ...]:
    """Return a Variable's hooks in the order in which they were registered."""
    return variable.get_metadata(_KEY, ())


def _register(name: str, variable: Any, fn: Any, *, last: bool) -> RemovableHandle:
    where = f"lm.autograd.{name}"
    if not isinstance(variable, nnx.Variable):
        needed = "an nnx.Variable, such as a parameter: a hook runs on its gradient"
        write = f"{where}(model.kernel, fn)  # for a module, lm.autograd.register_full_backward_hook(module, fn)"
        raise ArgumentError(Problem(where, f"{type(variable).__name__}", needed, write))
    refuse_uncallable(where, fn, f"{where}(variable, hook)")
    hook = GradientHook(next(_ids), fn, last)
    with ALONE:
        _set_hooks(variable, (*hooks_of(variable), hook))
    return VariableHookHandle(variable, hook)


def _set_hooks(variable: nnx.Variable[Any], hooks: tuple[GradientHook, ...]) -> None:
    metadata = {k: v for k, v in variable.get_metadata().items() if k != _KEY}
    if hooks:
        metadata[_KEY] = hooks
    birth = _compat.birth_trace(variable)  # a hook that runs in a trace may remove one of a Variable outside
    with contextlib.nullcontext() if birth is None else _compat.at_trace(birth):
        variable.set_metadata(metadata)  # whole: other threads may be reading


# ---------------------------------------------------------------- running


Hooked = tuple[str, Any, Any, tuple[GradientHook, ...]]
"""The name of a Variable, itself, its gradient, and its hooks."""


def hooked(gradients: Iterable[tuple[Any, Any]]) -> list[Hooked]:
    """Find the Variables of a gradient that have hooks.

    Args:
        gradients: What was differentiated, each with its gradient: a Variable, or a pytree that holds Variables or
            nnx objects that do.
    """
    return [entry for argument, gradient in gradients for entry in _hooked(argument, gradient)]


def run(found: Sequence[Hooked]) -> None:
    """Run the hooks of Variables, and write what they return into the gradients.

    Args:
        found: What :func:`hooked` returned.

    Raises:
        UninitializedError: If a Variable with hooks has no value.
        LazyError: If a hook returns what can't be the gradient, or a post-accumulate hook returns anything.
    """
    if not found:
        return
    lazy = [Problem(located(name, type(v).__name__), *_NO_VALUE) for name, v, _, _ in found if _graph.is_placeholder(v)]
    if lazy:
        raise UninitializedError(*lazy)
    before, _RUNNING.variables = _RUNNING.variables, (*_RUNNING.variables, *(v for _, v, _, _ in found))
    try:
        for name, variable, gradient, hooks in found:
            _run_of_one(located(name, type(variable).__name__), variable, gradient, hooks)
    finally:
        _RUNNING.variables = before


_NO_VALUE = (
    "no value, and a hook that waits for its gradient",
    "a value: what has none has no gradient, and the hook would never run",
    "lm.materialize(model, x)  # before; or handle.remove(), for a layer that is not used",
)


def _hooked(argument: Any, gradient: Any) -> Iterator[Hooked]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(gradient, is_leaf=lambda x: isinstance(x, nnx.Variable))
    for keys, leaf in leaves:
        if isinstance(leaf, nnx.Variable):
            path = tuple(map(_graph.name_of, keys))
            variable = _graph.at(argument, path)
            hooks = hooks_of(variable) if isinstance(variable, nnx.Variable) else ()
            if hooks:
                yield _graph.dotted(path), variable, leaf, hooks


def _run_of_one(where: str, variable: Any, gradient: Any, hooks: tuple[GradientHook, ...]) -> None:
    value = gradient.get_raw_value()
    for hook in (h for h in hooks if not h.last):
        result = hook.function(value)
        if result is not None:
            value = _checked(where, hook, value, result)
            gradient.set_raw_value(value)
    for hook in (h for h in hooks if h.last):
        result = hook.function(variable, value)
        if result is not None:
            got = f"{describe(result)}, returned by the post-accumulate hook {hook!r}"
            needed = "None: the gradient is final then, and what a hook returns would be lost"
            write = "lm.autograd.register_hook(variable, fn)  # for a hook that replaces the gradient"
            raise LazyError(Problem(where, got, needed, write))


def _checked(where: str, hook: GradientHook, value: Any, result: Any) -> Any:
    """Return what a hook returned as a gradient of the same shape and dtype.

    Raises:
        LazyError: If it is none.
    """
    leaves, tree = jax.tree.flatten(value)
    try:
        arrays = [x if hasattr(x, "dtype") else jnp.asarray(x) for x in tree.flatten_up_to(result)]
    except (TypeError, ValueError):
        arrays = []
    if [(jnp.shape(a), a.dtype) for a in arrays] != [(a.shape, a.dtype) for a in leaves]:
        got = f"{describe(result)}, returned by the hook {hook!r}"
        needed = f"{describe(value)}, as the gradient that it was given, or None to leave that as it is"
        raise LazyError(Problem(where, got, needed, "return new_grad.reshape(grad.shape).astype(grad.dtype)"))
    return tree.unflatten([jnp.asarray(a, a.dtype) for a in arrays])
