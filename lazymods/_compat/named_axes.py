"""Axes that have a name: those of vmap around an operation, and those of a mesh over which a value varies in shard_map.

Private: ``jax._src.core.trace_ctx.axis_env.axis_sizes``, the attributes of ``batching.AxisData``, and
``ShapedArray.manual_axis_type.varying``. Seen with jax 0.10.2, 0.11.2 and 0.12.0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax._src.core import trace_ctx
from jax._src.interpreters.batching import AxisData
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import batching

from lazymods._compat.finding import require

require(trace_ctx.axis_env, "axis_sizes")
require(AxisData, "name", "size", "spmd_name")
require(ShapedArray((), np.dtype(np.float32)).manual_axis_type, "varying")  # type: ignore[attr-defined]
require(batching, "fancy_primitive_batchers")


def are_there() -> bool:
    """Whether an operation can name an axis here: that of a vmap with ``axis_name``, or of a mesh in shard_map."""
    return bool(trace_ctx.axis_env.axis_sizes)


def map_by(primitive: Primitive, rule: Callable[..., tuple[Sequence[Any], Sequence[int | None]]]) -> None:
    """Give a primitive of several results a rule for ``jax.vmap`` that is told the name of the axis.

    Args:
        primitive: The primitive.
        rule: ``rule(options, values, dims, **params)`` returns results and along which axes they are mapped;
            ``options`` are the arguments for a ``jax.vmap`` like that around it. Not asked where nothing is mapped.
    """

    def batch(axis: Any, values: Any, dims: Any, **params: Any) -> Any:
        if all([dim is None for dim in dims]):
            out = primitive.bind(*values, **params)
            return out, [None] * len(out)
        return rule(options_of(axis), values, dims, **params)

    batching.fancy_primitive_batchers[primitive] = batch


def options_of(axis: Any) -> tuple[tuple[str, Any], ...]:
    """Return the options of the vmap whose axis this is."""
    return (("axis_name", axis.name), ("axis_size", axis.size), ("spmd_axis_name", axis.spmd_name))


def typed_as(gradient: Any, aval: Any) -> Any:
    """Return the gradient by an operand of a type as one that varies over the axes of a mesh over which that does.

    Where the operand is one and the same on devices that have a part of the gradient each, it is their sum.
    """
    here, there = _varying(jax.typeof(gradient)), _varying(aval)
    if here - there:
        gradient = jax.lax.psum(gradient, tuple(sorted(here - there)))
    return jax.lax.pcast(gradient, tuple(sorted(there - here)), to="varying") if there - here else gradient


def _varying(aval: Any) -> Any:
    return aval.manual_axis_type.varying
