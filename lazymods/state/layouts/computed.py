"""What PyTorch computes a parameter from: weight norm, spectral norm, pruning.

The file holds the parts only. Spectral norm is computed as PyTorch does in eval mode, from the stored vectors. Over
which axis it went the shapes tell, or else the vectors: one of them is the weight's product with the other, normalized.
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
            "torch.nn.utils.parametrizations.weight_norm(layer)  # as it saves them",
        )
    axes = tuple(i for i, n in enumerate(g_shape) if n == 1) if g_shape else None
    return np.sqrt(np.sum(np.square(wide(v)), axis=axes, keepdims=True))


def _weight_norm(parts: list[Array]) -> Array:
    g, v = parts
    norm = norm_over(v, g.shape)
    with np.errstate(all="ignore"):  # a direction of zero is nan in PyTorch as well
        return wide(v) * (wide(g) / norm)


def _spectral_norm(parts: list[Array]) -> Array:
    weight, u, v = (wide(p) for p in parts)
    u, v = u.reshape(-1), v.reshape(-1)
    axes = range(weight.ndim) if weight.size == u.size * v.size else ()
    matrices = [np.moveaxis(weight, axis, 0).reshape(weight.shape[axis], -1) for axis in axes]
    matrices = [matrix for matrix in matrices if matrix.shape == (u.size, v.size)]
    if not matrices or weight.ndim < 2:
        raise Refusal(
            f"singular vectors of {u.size} and {v.size} numbers for a weight of shape {weight.shape}",
            "those of the weight as a matrix with one of its axes first, as PyTorch's spectral norm has them",
            "torch.nn.utils.parametrize.remove_parametrizations(layer, 'weight')  # before saving",
        )
    with np.errstate(all="ignore"):
        return weight / _singular_value(matrices, u, v)


_FAR, _CLEARLY = 0.01, 10.0  # a step of training away from where the vectors were made, and nearer than any other axis


def _singular_value(matrices: list[Array], u: Array, v: Array) -> Array:
    """Return the one of the axis whose matrix the vectors belong to.

    Raises:
        Refusal: If several may be, which give different values.
    """
    values = [u @ matrix @ v for matrix in matrices]
    if len(matrices) == 1 or np.allclose(values, values[0], rtol=1e-6, atol=0):
        return values[0]
    off = [min(_angle(matrix @ v, u), _angle(u @ matrix, v)) for matrix in matrices]
    best, second = np.argsort(off)[:2]
    if not (off[best] < _FAR and off[best] * _CLEARLY < off[second]):
        raise Refusal(
            f"a weight of shape {matrices[0].shape} as a matrix along more than one axis, and vectors that fit neither",
            "vectors of the power iteration for this weight, which tell the axis that dim= was",
            "torch.nn.utils.parametrize.remove_parametrizations(layer, 'weight')  # before saving",
        )
    return values[best]


def _angle(a: Array, b: Array) -> float:
    """Return 1 minus the cosine between two vectors, or infinity if one has no direction."""
    cosine = float(a @ b / np.sqrt((a @ a) * (b @ b)))
    return 1 - cosine if np.isfinite(cosine) else np.inf


def _pruned(parts: list[Array]) -> Array:
    weight, mask = parts
    return wide(weight) * wide(mask)


def _unknown(parts: list[Array]) -> Array:
    raise Refusal(
        "a parameter that PyTorch computes from this one by code that the file does not hold",
        "the parameter itself: only weight norm, spectral norm and pruning can be computed from a file",
        "torch.nn.utils.parametrize.remove_parametrizations(layer, 'weight')  # before saving",
    )


COMPUTED: tuple[tuple[tuple[str, ...], Callable[[list[Array]], Array]], ...] = (
    (("parametrizations.{}.original0", "parametrizations.{}.original1"), _weight_norm),
    (("{}_g", "{}_v"), _weight_norm),
    (("parametrizations.{}.original", "parametrizations.{}.0._u", "parametrizations.{}.0._v"), _spectral_norm),
    (("{}_orig", "{}_u", "{}_v"), _spectral_norm),
    (("{}_orig", "{}_mask"), _pruned),
    (("parametrizations.{}.original",), _unknown),
)
