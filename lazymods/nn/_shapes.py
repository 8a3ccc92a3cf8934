"""Checks that the ``infer`` functions of several layers share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from lazymods._layer.sizing import NotInferableError

Config = Any


def last_axis(x: Any, *, least: int = 1) -> int:
    """Return the length of the last axis of an array of at least ``least`` axes."""
    return size_at(x, -1, least=least)


def size_at(x: Any, axis: int, *, least: int = 1) -> int:
    """Return the length of one axis."""
    rank, needed = rank_of(x), max(least, axis + 1 if axis >= 0 else -axis)
    if rank < needed:
        axes = "1 axis" if needed == 1 else f"{needed} axes"
        raise NotInferableError(
            f"an array of at least {axes}, whose axis {axis} holds the features",
            "layer(x)  # with x of shape (batch, ..., features)",
        )
    return x.shape[axis]


def product_at(x: Any, axes: int | Sequence[int]) -> int:
    """Return the number of features at one or several axes."""
    return math.prod(size_at(x, a) for a in ((axes,) if isinstance(axes, int) else axes))


def rank_of(x: Any) -> int:
    """Return the number of axes of an array."""
    shape = getattr(x, "shape", None)
    if shape is None:
        is_shape = isinstance(x, (tuple, list)) and bool(x) and all(type(size) is int for size in x)
        line = f"jax.ShapeDtypeStruct({tuple(x)}, jnp.float32)  # in its place" if is_shape else "layer(jnp.asarray(x))"
        raise NotInferableError("an array as the first argument: its shape tells the sizes", line)
    return len(shape)


def axes_over(rank: int) -> str:
    """Return the axes of a batch over 1 to 3 axes of space, as a text."""
    return f"(batch, {('length', 'height, width', 'depth, height, width')[rank - 1]}, features)"


def check_rank(x: Any, ranks: Sequence[int], axes: str) -> None:
    """Refuse an array of any other rank."""
    if rank_of(x) not in ranks:
        wanted = " or ".join(map(str, ranks))
        raise NotInferableError(f"an array of {wanted} axes, {axes}", f"layer(x)  # with x of shape {axes}")


def check_divides(groups: int, features: int, what: str) -> None:
    """Refuse features that a group count does not divide."""
    if groups <= 0 or features % groups:
        raise NotInferableError(
            f"features that {what}={groups} divides, not {features}",
            f"layer(x)  # with a multiple of {groups} features; or another {what}",
        )
