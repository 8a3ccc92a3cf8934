"""One call of an operator: its kernels and its arguments, as functions of the operands alone.

Operands are the arrays among the arguments, in a flat list; so are the outputs. What a kernel returns is compared with
what the Meta kernel says, or the pair's forward function with the kernel: a program must not return another dtype or
shape because it is differentiated, or because it runs elsewhere.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lazymods.dispatch.arguments import Layout, arrays_only, cotangents, positional, with_others
from lazymods.dispatch.keys import AUTOGRAD_OF
from lazymods.dispatch.refusals import different, refused, show
from lazymods.dispatch.table import AMBIGUOUS, FALLBACK, MATH, entry


class Plan(NamedTuple):
    """What runs on a platform.

    Attributes:
        kernel: The key of its kernel; None if it has none.
        pair: The key of the pair that is its derivative; None if JAX differentiates the kernel.
        ambiguous: Whether it has no derivative, because two would do.
    """

    kernel: str | None
    pair: str | None
    ambiguous: bool


class Output(NamedTuple):
    """What a kernel returns, without values.

    Attributes:
        key: The registered key of the kernel.
        shapes: A pytree of ``jax.ShapeDtypeStruct``.
    """

    key: str
    shapes: Any

    def leaves(self) -> list[Any]:
        """Return the shapes in a list."""
        return jax.tree.leaves(self.shapes)


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """A call, without its operands.

    Attributes:
        name: The operator's.
        kernels: Its kernels by registered key.
        layout: The arguments without their arrays.
        operands: Shapes and dtypes of the arrays.
    """

    name: str
    kernels: Mapping[str, Any]
    layout: Layout
    operands: tuple[jax.ShapeDtypeStruct, ...]

    def __eq__(self, other: object) -> bool:
        """Whether the kernels, and all that they are given but values, are the same."""
        return isinstance(other, Call) and self._facts == other._facts

    def __hash__(self) -> int:
        try:
            return hash(self._facts)
        except TypeError:  # an argument has no hash
            return hash(self.layout.tree)

    @functools.cached_property
    def _facts(self) -> tuple[Any, ...]:
        kernels = tuple((key, id(kernel)) for key, kernel in self.kernels.items())  # alive: they are kept here
        return self.name, kernels, self.layout, repr(self.layout.tree), self.operands

    def plan(self, key: str) -> Plan:
        """Say what runs on the platform of a key."""
        kernel, derivative = entry(key, self.kernels), entry(AUTOGRAD_OF[key], self.kernels)
        by_jax = derivative.kind in (MATH, FALLBACK, AMBIGUOUS)
        return Plan(kernel.key, None if by_jax else derivative.key, derivative.kind == AMBIGUOUS)

    # ------------------------------------------------------------ what is registered, as functions of operands

    def run(self, key: str, *operands: Any) -> Any:
        """Run the kernel of a registered key, and return its output, as arrays."""
        args, kwargs = self.layout.filled(operands)
        out = jax.tree.map(jnp.asarray, self.kernels[key](*args, **kwargs))
        return out if self.meta is None else _of_strong_dtype(self.agreed(Output(key, out), self.meta))

    def forward(self, key: str, *operands: Any) -> tuple[Any, Any]:
        """Run the forward function of a pair, and return its output and what it saves.

        Raises:
            RegistrationError: If it returns no pair.
        """
        args, kwargs = self.layout.filled(operands)
        returned = self.kernels[key][0](*args, **kwargs)
        if not isinstance(returned, (tuple, list)) or len(returned) != 2:
            what = f"{show(returned)} from the forward function of {key}"
            raise refused(self.name, what, "a pair: the output, and what backward needs", "return out, residuals")
        out, saved = returned
        return jax.tree.map(jnp.asarray, out), arrays_only(saved)

    def backward(self, key: str, saved: Any, cotangent: Any) -> list[Any]:
        """Run the backward function of a pair, and return a gradient for each operand; None for zero."""
        forward, backward = self.kernels[key]
        args = positional(self.name, key, forward, self.layout)
        return cotangents(self.name, key, backward(with_others(saved), cotangent), args, self.operands)

    @functools.cached_property
    def meta(self) -> Output | None:
        """What the Meta kernel says of the output; None if there is none."""
        if "Meta" not in self.kernels:
            return None
        args, kwargs = self.layout.filled(self.operands)
        said = self.kernels["Meta"](*args, **kwargs)
        try:
            return Output("Meta", jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), said))
        except AttributeError:
            needed = "a jax.ShapeDtypeStruct, or a pytree of them"
            write = "return jax.ShapeDtypeStruct(x.shape, x.dtype)"
            raise refused(self.name, f"{show(said)} from the kernel of Meta", needed, write) from None

    def output(self, key: str, operands: Sequence[Any]) -> Output:
        """Return what the kernel of a registered key returns, without running it."""
        return self.meta or Output(key, jax.eval_shape(functools.partial(self.run, key), *operands))

    def agreed(self, given: Output, needed: Output) -> Any:
        """Return an output if it is like that of another kernel.

        Raises:
            RegistrationError: If structure, shapes or dtypes differ.
        """
        alike = jax.tree.structure(given.shapes) == jax.tree.structure(needed.shapes)
        if not alike or any(map(_differ, given.leaves(), needed.leaves())):
            raise different(self.name, given.key, given.shapes, needed.key, needed.shapes)
        return given.shapes


def _differ(one: Any, other: Any) -> bool:
    return one.shape != other.shape or one.dtype != other.dtype


def _of_strong_dtype(out: Any) -> Any:
    """Make dtypes strong, as those that a Meta kernel says are: a call computes alike when it is compiled."""
    return jax.tree.map(lambda x: jax.lax.convert_element_type(x, x.dtype) if is_weak(x) else x, out)


def slots(operands: Sequence[Any]) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Return shapes and dtypes of operands."""
    return tuple(jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=is_weak(x)) for x in operands)


def is_weak(array: Any) -> bool:
    """Whether an array's dtype gives way to another's; typed keys have nothing of the kind."""
    return bool(getattr(array, "weak_type", False))
