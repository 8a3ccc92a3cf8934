"""What can be done without the private names of :mod:`lazymods._compat.named_axes`: no axis has a name.

Seen with jax 0.10.2 and 0.12.0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.core import Primitive
from jax.interpreters import batching


def are_there() -> bool:
    """Say that there are none: a kernel that names one is traced too late beside a Meta kernel, which JAX refuses."""
    return False


def map_by(primitive: Primitive, rule: Callable[..., tuple[Sequence[Any], Sequence[int | None]]]) -> None:
    """Give a primitive a rule for ``jax.vmap`` that is told of no name."""

    def batch(values: Any, dims: Any, **params: Any) -> Any:
        size = next(x.shape[d] for x, d in zip(values, dims, strict=True) if d is not None)
        return rule((("axis_size", size),), values, dims, **params)

    batching.primitive_batchers[primitive] = batch


def typed_as(gradient: Any, aval: Any) -> Any:
    """Return the gradient as it is: one of another type than its operand's is refused by JAX."""
    return gradient
