"""What an operator refuses, and how it says so: the operator, the key, and what is registered."""

from __future__ import annotations

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


def no_kernel(name: str, key: str, registered: Collection[str]) -> Problem:
    """Say that a platform has no kernel."""
    return Problem(
        f"Operator {name!r}",
        f"a call on a platform whose key is {key}; registered: {names(registered)}",
        f"a kernel for {key}, or a composite one, which serves every platform",
        f"op.register({key!r}, kernel), or op.register('CompositeImplicitAutograd', kernel)",
    )


def ambiguous(name: str, registered: Collection[str]) -> Problem:
    """Say that the derivative on platforms without a key of their own is ambiguous."""
    return Problem(
        f"Operator {name!r}",
        f"a derivative on a platform of AutogradOther; registered: {names(registered)}",
        "one derivative: FPGA has a kernel of its own, and CompositeImplicitAutograd is that of another function",
        "op.register('AutogradOther', (forward, backward))",
    )


def no_forward_mode(name: str, error: Exception) -> Problem:
    """Say that forward mode needs the transpose of a backward function that has none."""
    return Problem(
        f"Operator {name!r}",
        f"forward mode (jax.jvp, jax.jacfwd, jax.linearize): {type(error).__name__}: {one_line(error)}",
        "a backward function that JAX can transpose: of linear operations in the gradient that it gets",
        "reverse mode (jax.grad, jax.vjp, jax.jacrev), or a backward function of jax.numpy",
    )


def failed(name: str, key: str, error: Exception) -> Problem:
    """Say that the kernel of another platform than the process's own could not be traced here."""
    return Problem(
        f"Operator {name!r}",
        f"a program for the platform of {key}, whose kernel raised {type(error).__name__}: {one_line(error)}",
        "a kernel that can be traced on the machine that compiles for it",
        "compile where that platform is, or mend the kernel",
    )


def different(name: str, key: str, got: Any, other: str, needed: Any) -> RegistrationError:
    """Return the error for a kernel that gives another structure, shape or dtype than another one."""
    return refused(
        name,
        f"{show(got)} from the kernel of {key}",
        f"{show(needed)}, which the kernel of {other} gives: one program serves all, so their outputs are alike",
        f"a kernel for {key} that returns that, or another one for {other}",
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
