"""Weight norm: PyTorch's magnitudes ``g`` and directions ``v`` in an ``nnx.WeightNorm``.

Flax adds ``epsilon`` (1e-12) to the square of the norm, PyTorch does not: directions shorter than 1e-4 differ.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np

from lazymods._graph import Path, dotted
from lazymods.state.layouts.axes import Layout
from lazymods.state.layouts.computed import wide
from lazymods.state.layouts.file import Part, TorchFile
from lazymods.state.layouts.site import Array, Refusal, Site, value_of


def take_normed(site: Site, file: TorchFile, entry: str) -> list[Part] | None:
    """Claim the magnitudes and directions that PyTorch's weight norm stores of a parameter."""
    return file.read(
        site.torch_name(f"parametrizations.{entry}.original0"), site.torch_name(f"parametrizations.{entry}.original1")
    ) or file.read(site.torch_name(f"{entry}_g"), site.torch_name(f"{entry}_v"))


def normed_names(site: Site, entry: str) -> tuple[str, str]:
    """Return the names of magnitudes and directions: PyTorch's of now, or its older ones if those are asked for."""
    older = site.torch_name(f"{entry}_g"), site.torch_name(f"{entry}_v")
    if all(name in (site.names or ()) for name in older):
        return older
    original = site.torch_name(f"parametrizations.{entry}.original")
    return f"{original}0", f"{original}1"


class Scale(NamedTuple):
    """The magnitudes of a kernel that an ``nnx.WeightNorm`` normalizes: the wrapper, and the kernel's path below it."""

    site: Site
    path: Path

    @property
    def entry(self) -> str:
        """The name of the magnitudes in the wrapper."""
        return f"scales.{dotted(self.path)}"

    def to_flax(self, layout: Layout, g: Array, v: Array, site: Site) -> tuple[Array | None, Array]:
        """Return the scales (None if the wrapper has none and needs none) and the kernel.

        A negative magnitude is moved into its direction: Flax keeps the product as the next direction, so that a
        negative scale would change the sign of the kernel at every call.

        Raises:
            Refusal: If PyTorch's magnitudes go along another axis than the wrapper's ``feature_axes``.
        """
        if g.ndim == 0:
            g = g.reshape((1,) * v.ndim)
        if g.ndim != v.ndim or v.ndim == 0:
            raise Refusal(f"magnitudes of shape {g.shape} for directions of shape {v.shape}", *_NORM_AXES)
        if (wide(g) < 0).any():
            v, g = wide(v) * np.sign(wide(g)), np.abs(wide(g))
        kernel, scale = layout.to_flax(v, site), layout.to_flax(g, _unflattened(site, g))
        kept = self.axes(kernel.ndim)
        if scale.shape != tuple(n if i in kept else 1 for i, n in enumerate(kernel.shape)):
            axes = self.site.get("feature_axes")
            got = f"magnitudes of shape {g.shape} for directions of shape {v.shape}, and feature_axes={axes}"
            raise Refusal(got, *_NORM_AXES)
        scale = scale.reshape([kernel.shape[i] for i in kept])
        if self.site.get("use_scale"):
            return scale, kernel
        if (wide(scale) != 1).any():
            raise Refusal("magnitudes other than 1", "a scale for them", "nnx.WeightNorm(..., use_scale=True)")
        return None, kernel

    def to_torch(self, layout: Layout, kernel: Array, site: Site) -> tuple[Array, Array]:
        """Return PyTorch's magnitudes and directions.

        Raises:
            Refusal: If ``feature_axes`` are several axes, where PyTorch has one or none.
        """
        axes = self.axes(kernel.ndim)
        v = layout.to_torch(kernel, site)
        if len(axes) > 1:
            raise Refusal(f"feature_axes={self.site.get('feature_axes')}", *_NORM_AXES)
        scale = np.ones([kernel.shape[i] for i in axes], kernel.dtype)
        if self.site.get("use_scale"):
            scale = value_of(self.site.get("scales")[self.path])
            for axis, number in site.index:
                scale = np.take(scale, number, axis)
        if not axes:
            return scale.reshape(()), v
        whole = [1] * kernel.ndim
        whole[axes[0]] = kernel.shape[axes[0]]
        scale = scale.reshape(whole)
        return layout.to_torch(scale, _unflattened(site, scale.T)), v

    def axes(self, rank: int) -> tuple[int, ...]:
        """Return the kernel's axes that have a scale each."""
        axes = self.site.get("feature_axes")
        return tuple(sorted(a % rank for a in (axes if isinstance(axes, (tuple, list)) else (axes,))))


def _unflattened(site: Site, g: Array) -> Site:
    """The site for magnitudes (PyTorch's axes) that do not go along the input axis, which may have been flattened."""
    return dataclasses.replace(site, sizes=None) if g.ndim < 2 or g.shape[1] == 1 else site


_NORM_AXES = (
    "magnitudes along the axis that the wrapper has scales for: dim=0 of PyTorch is feature_axes=-1 of nnx.WeightNorm "
    "(for ConvTranspose -2, with transpose_kernel -1), dim=None is feature_axes=None",
    "nnx.WeightNorm(..., feature_axes=...)  # that fit PyTorch's dim; or the layer without it, which gets the product",
)


def scale_of(site: Site, entry: str) -> Scale | None:
    """Return the magnitudes of an entry of the module, if a weight norm around it normalizes that entry."""
    outer = site.normed_by
    if outer is None:
        return None
    path = (*site.path[len(outer.path) + 1 :], *entry.split("."))
    accepts = outer.get("variable_filter")
    if accepts is None or not accepts(path, site.at(entry)):
        return None
    return Scale(outer, path)
