"""The arguments of a call: arrays are operands of the program, everything else is handed to the kernels as it is.

So a kernel may ask a Python number, a bool or a text for its value, also when it is compiled. Arrays of numpy become
arrays of JAX, so that a kernel computes alike whether it is compiled or not.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer

from lazymods import _compat
from lazymods._errors import describe
from lazymods.dispatch.refusals import RegistrationError, refused, show


def is_operand(leaf: Any) -> bool:
    """Whether a leaf of the arguments is an array."""
    return isinstance(leaf, (jax.Array, np.ndarray, np.generic))


def _kind(leaf: Any) -> str:
    return f"{type(leaf)}{leaf!r}" if isinstance(leaf, (float, complex, frozenset)) else str(type(leaf))


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Kept:
    """A value that is no array, as a part of the structure of a pytree."""

    value: Any
    kind: str


def _is_kept(node: Any) -> bool:
    return isinstance(node, Kept)


def arrays_only(tree: Any) -> Any:
    """Make a pytree one of arrays alone: a function that is traced returns nothing else unchanged."""
    return jax.tree.map(lambda leaf: leaf if is_operand(leaf) else Kept(leaf, _kind(leaf)), tree)


def with_others(tree: Any) -> Any:
    """Undo :func:`arrays_only`."""
    return jax.tree.map(lambda leaf: leaf.value if _is_kept(leaf) else leaf, tree, is_leaf=_is_kept)


@dataclasses.dataclass(frozen=True, eq=False)
class Reference:
    """Stands for a mutable array, or for its tracer, which are equal to themselves alone."""

    value: Any


class Slot(NamedTuple):
    """Stands for an operand, by its number."""

    number: int


def _is_slot(leaf: Any) -> bool:
    return isinstance(leaf, Slot)


class Layout(NamedTuple):
    """Arguments without their arrays; equal for calls that give the kernels the same but for those.

    Attributes:
        tree: The structure of ``(args, kwargs)``.
        leaves: Its leaves, with a :class:`Slot` for each array and a :class:`Reference` for each mutable one.
        kinds: What else tells leaves apart: ``1`` and ``True`` are equal, as ``0.0`` and ``-0.0`` are.
    """

    tree: Any
    leaves: tuple[Any, ...]
    kinds: tuple[str, ...]

    def filled(self, operands: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Put operands in their slots, and return ``(args, kwargs)``."""
        leaves = [operands[leaf.number] if isinstance(leaf, Slot) else leaf for leaf in self.leaves]
        leaves = [leaf.value if isinstance(leaf, Reference) else leaf for leaf in leaves]
        return jax.tree.unflatten(self.tree, leaves)

    def has_references(self) -> bool:
        """Whether a mutable array is among the arguments."""
        return any(isinstance(leaf, Reference) for leaf in self.leaves)


def split(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Layout]:
    """Take arguments apart into operands and the rest.

    Args:
        name: The operator's.
        args: The arguments of a call.
        kwargs: Those by keyword.

    Returns:
        The operands, as arrays of JAX or tracers, and the layout.

    Raises:
        RegistrationError: If an argument is an nnx module: what a kernel changed of it would be lost.
    """
    nodes = jax.tree.leaves((args, kwargs), is_leaf=lambda x: isinstance(x, (nnx.Pytree, nnx.Variable)))
    for node in nodes:
        if isinstance(node, nnx.Pytree):
            what = f"a module, {type(node).__name__}, among the arguments"
            raise refused(name, what, "arrays: what a kernel changes of a module would be lost", "op(x, module.kernel)")
    leaves, tree = jax.tree.flatten((args, kwargs))
    operands: list[Any] = []
    kept: list[Any] = []
    for leaf in leaves:
        if is_operand(leaf):
            kept.append(Slot(len(operands)))
            operands.append(leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf))
        else:
            kept.append(Reference(leaf) if isinstance(leaf, (Tracer, *_compat.REFERENCES)) else leaf)
    return operands, Layout(tree, tuple(kept), tuple(map(_kind, kept)))


def positional(name: str, key: str, forward: Callable[..., Any], layout: Layout) -> tuple[Any, ...]:
    """Return the arguments of the forward function of a pair by position, with a :class:`Slot` for each operand.

    ``backward`` returns one gradient for each, as that of ``jax.custom_vjp`` does, defaults included.

    Raises:
        RegistrationError: If an array has no position.
    """
    args, kwargs = layout.filled([Slot(i) for i in range(len(layout.leaves))])
    try:
        signature = inspect.signature(forward)
    except (TypeError, ValueError):  # of what is not written in Python
        signature = None
    if signature is not None:
        bound = signature.bind(*args, **kwargs)  # what does not fit is the TypeError of calling it
        bound.apply_defaults()
        args, kwargs = bound.args, bound.kwargs
    if any(map(_is_slot, jax.tree.leaves(kwargs, is_leaf=_is_slot))):
        what = f"an array for a parameter that {key}'s forward function takes by keyword only, or by **kwargs"
        raise refused(
            name, what, "arrays by position: backward returns a gradient for each position", "def forward(x, y): ..."
        )
    return args


def cotangents(
    name: str, key: str, returned: Any, args: tuple[Any, ...], operands: Sequence[jax.ShapeDtypeStruct]
) -> list[Any]:
    """Order what a backward function returned by operand.

    Args:
        name: The operator's.
        key: That of the pair.
        returned: A tuple with a gradient for each of ``args``, of its structure, or None for zero.
        args: What :func:`positional` returned.
        operands: Shapes and dtypes of the operands.

    Returns:
        A gradient for each operand; None for zero.

    Raises:
        RegistrationError: If there is not one for each, of its shape and dtype.
    """
    if not isinstance(returned, (tuple, list)) or len(returned) != len(args):
        what = f"{len(returned)} gradients" if isinstance(returned, (tuple, list)) else f"no tuple, {show(returned)},"
        needed = f"a tuple with one for each of its {len(args)} arguments, or None for zero"
        raise _wrong_gradient(name, key, what, needed)
    found: list[Any] = [None] * len(operands)
    for position, (gradient, argument) in enumerate(zip(returned, args, strict=True)):
        slots, tree = jax.tree.flatten(argument, is_leaf=_is_slot)
        if gradient is None or not any(map(_is_slot, slots)):
            continue
        try:
            parts = tree.flatten_up_to(gradient)
        except ValueError:
            what = f"{show(gradient)} for argument {position}"
            raise _wrong_gradient(name, key, what, f"the structure of the argument, {show(argument)}") from None
        for slot, part in zip(slots, parts, strict=True):
            if isinstance(slot, Slot) and jnp.issubdtype(operands[slot.number].dtype, jnp.inexact):
                found[slot.number] = _checked(name, key, part, operands[slot.number], position)
    return found


def _checked(name: str, key: str, part: Any, operand: jax.ShapeDtypeStruct, position: int) -> Any:
    if part is None:
        return None
    if not is_operand(part) and not isinstance(part, (int, float, complex)):
        got, needed = f"{show(part)} for argument {position}", f"that of the argument, {show(operand)}"
        raise _wrong_gradient(name, key, got, needed)
    given = jnp.asarray(part)
    if given.weak_type:
        given = given.astype(operand.dtype)
    if given.shape != operand.shape or given.dtype != operand.dtype:
        got, needed = f"{describe(given)} for argument {position}", f"that of the argument, {show(operand)}"
        raise _wrong_gradient(name, key, got, needed)
    return given


def _wrong_gradient(name: str, key: str, got: str, needed: str) -> RegistrationError:
    return refused(name, f"{got} from the backward function of {key}", needed, "return dx, None  # for f(x, n)")
