"""What PyTorch computes a parameter from: weight norm, spectral norm, pruning.

The file holds the parts only. Spectral norm is computed as PyTorch does in eval mode, from the stored vectors, over the
axes of its default (``dim=1`` for transposed convolutions, 0 for all else), which a square weight cannot tell.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from lazymods.state.layouts.site import Array, Refusal


def wide(array: Array) -> Array:
    """Return an array in a dtype that numpy computes in without losing digits: float32 for the narrower floats."""
    return array.astype(np.float32) if array.dtype.itemsize < 4 else array


def norm_over(v: Array, g_shape: tuple[int, ...]) -> Array:
    """Return the norms of ``v`` over the axes where ``g`` has length 1.

    Raises:
        Refusal: If ``g`` does not broadcast over ``v``.
    """
    if len(g_shape) not in (0, v.ndim) or any(n not in (1, m) for n, m in zip(g_shape, v.shape, strict=False)):
        raise Refusal(
            f"magnitudes of shape {g_shape} for directions of shape {v.shape}",
            "magnitudes along one axis of the directions, as PyTorch's weight norm has them",
            "a file of torch.nn.utils.parametrizations.weight_norm",
        )
    axes = tuple(i for i, n in enumerate(g_shape) if n == 1) if g_shape else None
    return np.sqrt(np.sum(np.square(wide(v)), axis=axes, keepdims=True))


def _weight_norm(parts: list[Array], dim: int) -> Array:
    g, v = parts
    norm = norm_over(v, g.shape)
    with np.errstate(all="ignore"):  # a direction of zero is nan in PyTorch as well
        return wide(v) * (wide(g) / norm)


def _spectral_norm(parts: list[Array], dim: int) -> Array:
    weight, u, v = (wide(p) for p in parts)
    matrix = np.moveaxis(weight, dim, 0).reshape(weight.shape[dim], -1) if weight.ndim > dim else weight
    if matrix.ndim != 2 or matrix.shape != (u.size, v.size):
        raise Refusal(
            f"singular vectors of {u.size} and {v.size} numbers for a weight of shape {weight.shape}",
            f"those of the weight as a matrix with axis {dim} first, as PyTorch's spectral norm has them by default",
            "the normalized weight itself, saved after torch.nn.utils.parametrize.remove_parametrizations(layer, ...)",
        )
    with np.errstate(all="ignore"):
        return weight / (u.reshape(-1) @ matrix @ v.reshape(-1))


def _pruned(parts: list[Array], dim: int) -> Array:
    weight, mask = parts
    return wide(weight) * wide(mask)


def _unknown(parts: list[Array], dim: int) -> Array:
    raise Refusal(
        "a parameter that PyTorch computes from this one by code that the file does not hold",
        "the parameter itself: only weight norm, spectral norm and pruning can be computed from a file",
        "torch.nn.utils.parametrize.remove_parametrizations(layer, ...) before saving",
    )


COMPUTED: tuple[tuple[tuple[str, ...], Callable[[list[Array], int], Array]], ...] = (
    (("parametrizations.{}.original0", "parametrizations.{}.original1"), _weight_norm),
    (("{}_g", "{}_v"), _weight_norm),
    (("parametrizations.{}.original", "parametrizations.{}.0._u", "parametrizations.{}.0._v"), _spectral_norm),
    (("{}_orig", "{}_u", "{}_v"), _spectral_norm),
    (("{}_orig", "{}_mask"), _pruned),
    (("parametrizations.{}.original",), _unknown),
)
