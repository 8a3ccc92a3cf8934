"""What an operator refuses, and how it says so: the operator, the key, and what is registered."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

from lazymods._errors import LazyError, Problem, describe, one_line


class RegistrationError(LazyError, ValueError):
    """A kernel can't be registered, or does not do what the other kernels of its operator do."""


class NoKernelError(LazyError, NotImplementedError):
    """An operator has no kernel for the platform that it runs on, or no derivative there."""


RegistrationError.__module__ = NoKernelError.__module__ = "lazymods.dispatch"


def refused(name: str, got: str, needed: str, write: str) -> RegistrationError:
    """Return the error for what an operator does not take.

    Args:
        name: The operator's.
        got: What came.
        needed: What has to come, and why.
        write: The line that mends it.
    """
    return RegistrationError(Problem(f"Operator {name!r}", got, needed, write))


@dataclasses.dataclass(frozen=True)
class Refusal:
    """Why an operator does not run on some platforms; called with the key of the one that asks.

    Attributes:
        name: The operator's.
        registered: All keys that have a kernel.
        keys: Those of the platforms, ``FPGA`` last.
        kernel: The key of the kernel that could not be traced in this process; None if there is none.
        error: What it raised.
        ambiguous: Whether it is the derivative that is missing, because two would do.
    """

    name: str
    registered: tuple[str, ...]
    keys: tuple[str, ...]
    kernel: str | None = None
    error: str = ""
    ambiguous: bool = False

    def __call__(self, key: str) -> Problem:
        """Return what to say."""
        where, registered = f"Operator {self.name!r}", f"registered: {names(self.registered)}"
        if self.kernel is not None:
            return Problem(
                where,
                f"a program for the platform of {key}, where the kernel of {self.kernel} raised {self.error}",
                "a kernel that can be traced on the machine that compiles for it",
                "jax.jit(fn).lower(x)  # where that platform is; or mend the kernel",
            )
        if self.ambiguous:
            return Problem(
                where,
                f"a derivative on a platform of AutogradOther; {registered}",
                "one derivative: FPGA has a kernel of its own, and CompositeImplicitAutograd is another function",
                "op.register('AutogradOther', (forward, backward))",
            )
        return Problem(
            where,
            f"a call on a platform whose key is {key}; {registered}",
            f"a kernel for {key}, or a composite one, which serves every platform",
            f"op.register({key!r}, kernel)  # or op.register('CompositeImplicitAutograd', kernel)",
        )


def no_forward_mode(name: str, error: Exception) -> Problem:
    """Say that forward mode needs the transpose of a backward function that has none."""
    return Problem(
        f"Operator {name!r}",
        f"forward mode (jax.jvp, jax.jacfwd, jax.linearize): {type(error).__name__}: {one_line(error)}",
        "a backward function that JAX can transpose: of linear operations in the gradient that it gets",
        "jax.vjp(fn, x)  # reverse mode; or a backward function of jax.numpy",
    )


def ordered_effect(name: str, effect: Any) -> RegistrationError:
    """Return the error for a kernel that does something in order, where it is traced after the program around."""
    return refused(
        name,
        f"a kernel with an ordered effect ({type(effect).__name__}) beside a Meta kernel, in a compiled program",
        "no order: with a Meta kernel, the kernels are traced when the program around them has been made",
        "jax.debug.print(..., ordered=False)  # or io_callback(..., ordered=False); or no Meta kernel",
    )


def different(name: str, key: str, got: Any, other: str, needed: Any) -> RegistrationError:
    """Return the error for a kernel that gives another structure, shape or dtype than another one."""
    return refused(
        name,
        f"{show(got)} from the kernel of {key}",
        f"{show(needed)}, which the kernel of {other} gives: one program serves all, so their outputs are alike",
        f"op.register({key!r}, kernel)  # one that returns that; or another one for {other}",
    )


def names(registered: Collection[str]) -> str:
    """List keys."""
    return ", ".join(registered) or "nothing"


def show(tree: Any) -> str:
    """Name a pytree of arrays: ``{'s': f32[3]}``."""
    if isinstance(tree, dict):
        return "{" + ", ".join(f"{key!r}: {show(value)}" for key, value in tree.items()) + "}"
    if isinstance(tree, (tuple, list)):
        inner = ", ".join(map(show, tree))
        return f"[{inner}]" if isinstance(tree, list) else f"({inner})"
    return describe(tree)
