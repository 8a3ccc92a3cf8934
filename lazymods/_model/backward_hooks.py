"""Backward hooks of a module: what PyTorch's full backward hooks see, in terms of JAX.

A call of a module that has some marks its positional arguments on their way in and its outputs on their way out. Marks
do nothing but run the hooks in the backward pass (see ``_compat.backward_marks``): first those before the module's own
backward pass, on the gradients of its outputs; then the others, on the gradients of its inputs as well. The call itself
is the module's own, so what it does to statistics, random state or anything else is done as without hooks. In forward
mode, and where nothing is differentiated, no hook runs.
"""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from lazymods import _compat, _graph
from lazymods._errors import LazyError, Problem, describe
from lazymods._layer import lifecycle

BEFORE, AFTER = "backward_pre", "backward"  # the kinds of hooks

Gradients = list[Any]  # of marked leaves; None for those without


def run_with_hooks(module: nnx.Module, hooks: Sequence[Any], forward: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Run a call of a module with its backward hooks.

    Args:
        module: The module.
        hooks: Its backward hooks, in order.
        forward: The rest of the call, a function of the positional arguments.
        args: The positional arguments.
    """
    inputs = _Leaves.of(args)
    held = _Held.of(module)
    state = held.arrays(module)
    marked, token = _compat.mark_inputs(inputs.of_interest(args), state)
    output = forward(*inputs.replaced(args, marked))
    entries = tuple(output) if isinstance(output, tuple) else (output,)
    outputs = _Leaves.of(entries)
    found = outputs.of_interest(entries)
    if not found:
        return output
    call = Call(tuple(hooks), inputs, outputs, held)
    marked = _compat.mark_outputs(found, token, state, call)
    return _Leaves.of(output).replaced(output, marked)


# ---------------------------------------------------------------- arguments and outputs


@dataclasses.dataclass(frozen=True)
class _Leaves:
    """Which leaves of a pytree can have a gradient: arrays of floating point or complex numbers."""

    tree: Any
    marked: tuple[bool, ...]

    @classmethod
    def of(cls, value: Any) -> _Leaves:
        leaves, tree = jax.tree.flatten(value, is_leaf=_graph.is_object)
        return cls(tree, tuple(isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.inexact) for x in leaves))

    def of_interest(self, value: Any) -> list[Any]:
        leaves = jax.tree.leaves(value, is_leaf=_graph.is_object)
        return [x for x, marked in zip(leaves, self.marked, strict=True) if marked]

    def replaced(self, value: Any, new: Sequence[Any]) -> Any:
        """Return the pytree with other arrays for the leaves that can have a gradient."""
        rest = iter(new)
        leaves = jax.tree.leaves(value, is_leaf=_graph.is_object)
        return self.tree.unflatten([next(rest) if marked else x for x, marked in zip(leaves, self.marked, strict=True)])

    def shown(self, gradients: Gradients) -> Any:
        """Return what a hook sees: the pytree of gradients, None for all that has none."""
        rest = iter(gradients)
        return self.tree.unflatten([next(rest) if marked else None for marked in self.marked])

    def read(self, shown: Any) -> Gradients:
        """Return the gradients of what a hook returned.

        Raises:
            ValueError: If it is of another structure.
        """
        return [g for g, marked in zip(self.tree.flatten_up_to(shown), self.marked, strict=True) if marked]


@dataclasses.dataclass(frozen=True)
class _Held:
    """What a hook gets for the module: itself, or its copy with the values that it had in the call.

    The backward pass comes when an NNX transform is done with its copy of a model, whose values are tracers that have
    ended. So the arrays of such a module are kept like other things that the backward pass needs; compiled programs
    keep none that no hook asks for.
    """

    itself: weakref.ref[Any] | None  # if it holds no tracers
    graphdef: Any
    tree: Any
    others: tuple[tuple[int, Any], ...]  # leaves that are no arrays, such as placeholders

    @classmethod
    def of(cls, module: Any) -> _Held:
        with lifecycle.LOCK:  # other threads may be registering hooks
            graphdef, state = nnx.split(module)
        leaves, tree = jax.tree.flatten(state)
        others = tuple((i, x) for i, x in enumerate(leaves) if not isinstance(x, jax.Array))
        traced = any(map(_compat.is_tracer, leaves))
        return cls(None if traced else weakref.ref(module), graphdef, tree, others)

    def arrays(self, module: Any) -> list[Any]:
        with lifecycle.LOCK:
            return [x for x in jax.tree.leaves(nnx.state(module)) if isinstance(x, jax.Array)]

    def module(self, arrays: Sequence[Any]) -> Any:
        found = None if self.itself is None else self.itself()
        if found is not None:
            return found
        leaves = list(arrays)
        for place, value in self.others:
            leaves.insert(place, value)
        return nnx.merge(self.graphdef, self.tree.unflatten(leaves))


# ---------------------------------------------------------------- running


class _Local(threading.local):
    running = 0


_LOCAL = _Local()


def is_running() -> bool:
    """Whether this thread runs a backward hook: the transform that took the module in may have returned it already."""
    return _LOCAL.running > 0


def _run(hook: Any, *args: Any) -> Any:
    _LOCAL.running += 1
    try:
        return hook.function(*args)
    finally:
        _LOCAL.running -= 1


@dataclasses.dataclass(frozen=True, repr=False)
class Call:
    """One call of a module, and the hooks that it had then."""

    hooks: tuple[Any, ...]
    inputs: _Leaves
    outputs: _Leaves
    held: _Held

    def __hash__(self) -> int:
        return hash(tuple(hook.id for hook in self.hooks))  # a function may have no hash

    def __repr__(self) -> str:
        return f"<{len(self.hooks)} backward hooks>"  # in jaxprs

    def at_outputs(self, state: Sequence[Any], found: Gradients) -> Gradients:
        """Run the hooks that come before the module's own backward pass; return the gradients of its outputs.

        Raises:
            LazyError: If a hook returns other gradients than it was given.
        """
        for hook in self._of(BEFORE):
            module = self.held.module(state)
            result = _run(hook, module, self.outputs.shown(found))
            if result is not None:
                found = _checked(_name(module, hook), "grad_output", self.outputs, found, result)
        return found

    def at_inputs(self, state: Sequence[Any], found: Gradients, outputs: Gradients) -> Gradients:
        """Run the hooks that come after it; return the gradients of its inputs.

        Args:
            state: The arrays of the module.
            found: The gradients of the inputs; none at all if no input is differentiated.
            outputs: Those of the outputs.

        Raises:
            LazyError: If a hook returns other gradients than it was given.
        """
        none = [None] * sum(self.inputs.marked)
        for hook in self._of(AFTER):
            module = self.held.module(state)
            result = _run(hook, module, self.inputs.shown(found or none), self.outputs.shown(outputs))
            if result is None:
                continue
            if found:
                found = _checked(_name(module, hook), "grad_input", self.inputs, found, result)
            elif jax.tree.leaves(result):
                got = f"{_tuple_of(result)}, returned by a hook"
                needed = "None: no input of this call is differentiated, so there is no gradient to replace"
                raise LazyError(Problem(_name(module, hook), got, needed, "if grad_input[0] is None: return None"))
        return found

    def _of(self, kind: str) -> list[Any]:
        return [hook for hook in self.hooks if hook.kind == kind]


def _name(module: Any, hook: Any) -> str:
    name = getattr(hook.function, "__qualname__", type(hook.function).__qualname__)
    return f"the hook {name} of {_graph.place(module, type(module).__name__)}"


def _checked(where: str, name: str, leaves: _Leaves, found: Gradients, result: Any) -> Gradients:
    """Return the gradients that a hook returned; zeros for None where there was one.

    Raises:
        LazyError: If they are not those of the same arrays.
    """
    result = tuple(result) if isinstance(result, list) else result
    try:
        new = [x if x is None or hasattr(x, "dtype") else jnp.asarray(x) for x in leaves.read(result)]
    except (TypeError, ValueError):
        new = None
    if new is None or not all(map(_fits, new, found)):
        needed = f"{_tuple_of(leaves.shown(found))}, as the {name} that it was given, or None to leave that as it is"
        write = "return (new_gradient,)  # a tuple also for one, with the shape and the dtype of each"
        raise LazyError(Problem(where, f"{_tuple_of(result)}, returned by it", needed, write))
    return [_as_gradient(x, old) for x, old in zip(new, found, strict=True)]


def _fits(new: Any, old: Any) -> bool:
    return new is None or (old is not None and (jnp.shape(new), new.dtype) == (old.shape, old.dtype))


def _as_gradient(new: Any, old: Any) -> Any:
    if new is None:
        return None if old is None else jnp.zeros_like(old)
    return jnp.asarray(new, old.dtype)


def _tuple_of(value: Any) -> str:
    if not isinstance(value, tuple):
        return describe(value)
    shown = ", ".join("None" if x is None else _tuple_of(x) for x in value)
    return f"({shown},)" if len(value) == 1 else f"({shown})"
