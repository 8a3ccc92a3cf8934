"""Arrays of two frameworks side by side: which of PyTorch's is which of the model's, and by how much they differ.

PyTorch has channels first where Flax has them last, and, in some recurrent layers, time before the batch. A layer whose
type says so is compared in that layout only; otherwise the layout that fits the shape is taken, of several the closest.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.core import Tracer

from lazymods._errors import describe, short_dtype

Array = np.ndarray[Any, Any]

SMALLEST_SCALE = 1e-3  # where all values are smaller, differences are measured by this
_FILL = 1e8  # what is as large in both is a mask's, beside which no scale would tell anything of the rest
_FILL_OF_HALVES = 65504.0  # the same in float16, if both have exactly this
_TIME_FIRST = ("LSTM", "GRU", "RNN", "MultiheadAttention")
_CHANNELS_FIRST = ("Conv", "BatchNorm", "InstanceNorm", "MaxPool", "AvgPool", "AdaptiveMaxPool", "AdaptiveAvgPool")
_OF_MAPS = ("1d", "2d", "3d", "ConvNd", "GroupNorm", "PixelShuffle", "PixelUnshuffle", "Upsample", "Unfold")
_FEATURES_LAST = ("Linear", "LayerNorm", "RMSNorm", "Embedding")


class Match(NamedTuple):
    """One array of the model and the one of PyTorch that it is compared with.

    Attributes:
        ours: The model's.
        theirs: PyTorch's, laid as the model's.
        difference: The largest difference of two elements.
        scale: The largest of PyTorch's elements.
        precision: The rounding of the less precise of the two.
    """

    ours: Array
    theirs: Array
    difference: float
    scale: float
    precision: float

    @property
    def relative(self) -> float:
        """The difference, measured by the largest element."""
        return self.difference / max(self.scale, SMALLEST_SCALE)

    def agrees(self, tolerance: float) -> bool:
        """Whether they are equal, to a tolerance and to the rounding of their dtypes."""
        return self.relative <= max(tolerance, 8 * self.precision)


class Kept(NamedTuple):
    """An array as it was when it was seen, in float64 or complex128.

    Attributes:
        values: Its elements.
        shown: Its dtype and shape, as in a jaxpr.
        precision: The rounding of its own dtype.
    """

    values: Array
    shown: str
    precision: float


# ---------------------------------------------------------------- keeping


def kept_of_torch(value: Any, torch: Any) -> list[Kept]:
    """Copy the tensors in what a PyTorch module takes or returns, in order."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        inexact = value.is_floating_point() or value.is_complex()
        wide = value.to(torch.complex128 if value.is_complex() else torch.float64, copy=True)
        dims = ",".join(map(str, value.shape))
        dtype = str(value.dtype).removeprefix("torch.")
        shown = f"{short_dtype(jnp.dtype(dtype))}[{dims}]"
        return [Kept(wide.numpy(), shown, float(torch.finfo(value.dtype).eps) if inexact else 0.0)]
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [kept for part in value for kept in kept_of_torch(part, torch)]
    return []


def kept_of_jax(value: Any) -> list[Kept] | None:
    """Take the arrays in what a module takes or returns, in order; None if a transform is running."""
    leaves = [leaf for leaf in jax.tree.leaves(value) if isinstance(leaf, (jax.Array, np.ndarray))]
    if any(isinstance(leaf, Tracer) for leaf in leaves):
        return None
    return [_kept(leaf) for leaf in leaves if not jnp.issubdtype(leaf.dtype, jax.dtypes.extended)]


def _kept(leaf: Any) -> Kept:
    inexact = jnp.issubdtype(leaf.dtype, jnp.inexact)
    wide = np.complex128 if jnp.issubdtype(leaf.dtype, jnp.complexfloating) else np.float64
    precision = float(ml_dtypes.finfo(leaf.dtype).eps) if inexact else 0.0
    return Kept(np.asarray(leaf).astype(wide), describe(leaf), precision)


# ---------------------------------------------------------------- comparing


def compared(
    ours: Sequence[Kept], theirs: Sequence[Kept], module: Any = None, *, moves: bool = True
) -> list[Match] | None:
    """Compare the arrays of a module with those of its counterpart; None if one has none of a fitting shape.

    Args:
        ours: The model's.
        theirs: PyTorch's: as many, in the same order; or another number, of which the closest is taken for each, and
            what the model returns besides, a cache perhaps, is left out.
        module: The PyTorch module that they are of, if its type is to tell the layout.
        moves: Whether the axes may be in another order where the type does not tell it.
    """
    if not ours or not theirs:
        return None
    found = []
    for i, mine in enumerate(ours):
        others = theirs[i : i + 1] if len(ours) == len(theirs) else theirs
        matches = [match for other in others if (match := _closest(mine, other, module, moves)) is not None]
        if not matches and others is not theirs:
            matches = [match for other in theirs if (match := _closest(mine, other, module, moves)) is not None]
        if not matches and (not i or len(ours) == len(theirs)):
            return None
        if not matches:
            continue
        found.append(min(matches, key=lambda match: match.relative))
    return found


def _closest(mine: Kept, other: Kept, module: Any, moves: bool) -> Match | None:
    layouts = _layouts(mine.values.shape, other.values, module, moves)
    matches = [_match(mine, other._replace(values=laid)) for laid in layouts]
    return min(matches, key=lambda match: match.difference, default=None)


def _match(mine: Kept, other: Kept) -> Match:
    a, b = np.broadcast_arrays(mine.values, other.values)
    difference, scale = difference_of(a, b)
    return Match(a, b, difference, scale, max(mine.precision, other.precision))


def difference_of(a: Array, b: Array) -> tuple[float, float]:
    """Return the largest difference of two arrays, and the largest element of ``b``.

    The difference is infinite if one alone is not a number. Elements that are huge in both, as those that a mask has
    filled, don't count for the largest; their own differences are those of ordinary elements that are as far apart in
    relation to it.
    """
    if not a.size:
        return 0.0, 0.0
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    with np.errstate(invalid="ignore", over="ignore"):
        apart, sizes = np.where(same, 0.0, np.abs(a - b)), np.abs(b)
        filled = np.isfinite(sizes) & (np.minimum(np.abs(a), sizes) >= _FILL)
        filled |= same & (sizes == _FILL_OF_HALVES)
        scale = float(sizes[np.isfinite(sizes) & ~filled].max(initial=0.0))
        apart[filled] *= max(scale, SMALLEST_SCALE) / sizes[filled]
    return float(np.where(np.isnan(apart), np.inf, apart).max()), scale


def is_close(a: Array, b: Array, tolerance: float) -> bool:
    """Whether two arrays of one shape are equal, to a tolerance."""
    difference, scale = difference_of(a, b)
    return difference <= tolerance * max(scale, SMALLEST_SCALE)


def _layouts(shape: tuple[int, ...], theirs: Array, module: Any, moves: bool) -> Iterator[Array]:
    """Yield an array of PyTorch's in the layouts in which it has a shape of the model's."""
    name = "" if module is None else type(module).__name__
    axis = 1 if theirs.ndim > 2 and _has_slopes(module) else channel_axis(name, theirs.ndim)
    if axis is not None and np.moveaxis(theirs, axis, -1).shape == shape:
        yield np.moveaxis(theirs, axis, -1)
        return
    time_first = name in _TIME_FIRST and not getattr(module, "batch_first", True)
    if theirs.ndim == 3 and time_first and theirs.swapaxes(0, 1).shape == shape:
        yield theirs.swapaxes(0, 1)
        if theirs.shape == shape:  # the model may have time first as well
            yield theirs
        return
    if theirs.shape == shape and name.removesuffix("1d") in _FEATURES_LAST:
        yield theirs
        return
    moved = [np.moveaxis(theirs, axis, -1) for axis in (1, 0)] if moves and theirs.ndim > 2 else []
    moved += [theirs.swapaxes(0, 1)] if moves and theirs.ndim == 3 else []
    fitting = [laid for laid in (theirs, *moved) if laid.shape == shape]
    if fitting:
        yield from fitting
        return
    joined = [laid.reshape(shape) for laid in (theirs, *moved) if _only_joins(laid.shape, shape)]
    yield from joined  # heads apart or joined, a map or its pixels in a row
    if not joined and {shape, theirs.shape} & {_broadcast(shape, theirs.shape)}:  # positions, one row for all
        yield theirs


def _broadcast(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...] | None:
    try:
        return np.broadcast_shapes(a, b)
    except ValueError:
        return None


def _only_joins(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    """Whether one shape is the other with some neighbouring axes joined."""
    ends = [set(itertools.accumulate(shape, operator.mul, initial=1)) for shape in (a, b)]
    return math.prod(a) == math.prod(b) and (ends[0] <= ends[1] or ends[1] <= ends[0])


def may_move_axes(module: Any, rank: int) -> bool:
    """Whether a PyTorch layer may have, in what it takes, its channels or the time before other axes.

    Args:
        module: The layer.
        rank: How many axes its input has.
    """
    names = [cls.__name__ for cls in type(module).__mro__]
    if any(name in (*_TIME_FIRST, "Transformer") for name in names):
        return not getattr(module, "batch_first", False)
    return rank > 2 and (_has_slopes(module) or any(name.endswith(_OF_MAPS) for name in names))


def _has_slopes(module: Any) -> bool:
    """Whether a PyTorch layer is a PReLU with a slope for each channel, which is the second axis."""
    return type(module).__name__ == "PReLU" and getattr(module, "num_parameters", 1) > 1


def channel_axis(name: str, rank: int) -> int | None:
    """Return the axis of the channels in what a PyTorch layer takes and returns; None if its type does not tell."""
    if name == "GroupNorm":
        return 1 if rank > 2 else None
    if not name.removeprefix("Lazy").startswith(_CHANNELS_FIRST) or name[-2:] not in ("1d", "2d", "3d"):
        return None
    spatial = int(name[-2])
    if rank == spatial + 2:
        return 1
    return 0 if rank == spatial + 1 and "BatchNorm" not in name else None
