"""Linear maps, convolutions, embeddings and PReLU.

What a file does not hold is the constructor's: strides, dilation and padding. PyTorch's ``ConvTranspose(padding=p,
output_padding=o)`` is ``padding=((d * (k - 1) - p, d * (k - 1) - p + o), ...)`` of ``nnx.ConvTranspose`` for a kernel
of size ``k`` and dilation ``d``. PyTorch's ``Embedding(max_norm=...)`` has no twin in Flax, and leaves no trace in a
file.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from lazymods.state.layouts.axes import (
    AS_IS,
    Axes,
    Kernel,
    Layout,
    channels_first,
    channels_last,
    check_rank,
    stacked_axes,
)
from lazymods.state.layouts.rule import Cannot, Field, Rule, Simple
from lazymods.state.layouts.site import Array, Refusal, Site

BIAS = Field("bias", "bias")
_MOST_GROUPS = 8  # that a line to write names


def _spatial(site: Site) -> tuple[int, ...]:
    """PyTorch's axes of the kernel's spatial ones."""
    return tuple(range(2, 2 + len(site.get("kernel_size"))))


def _conv_axes(site: Site) -> Axes:
    return Axes((*_spatial(site), 1, 0))  # (out, in / groups, *k) to (*k, in / groups, out)


def _transposed_axes(site: Site) -> Axes:
    """(in, out, *k) to (*k, in, out): Flax slides the kernel as it stands, PyTorch reversed."""
    if site.get("transpose_kernel"):
        return Axes((*_spatial(site), 1, 0))
    return Axes((*_spatial(site), 0, 1), _spatial(site))


def _of_each_group(name: str, groups: int, features: int) -> str:
    """Return the line for a grouped layer: one layer a group in the model, and the file's arrays cut."""
    if groups > _MOST_GROUPS or not name:
        return "groups=1  # of torch.nn.ConvTranspose; or one nnx.ConvTranspose for each group"
    into = ", ".join(f'"{name}.{i}."' for i in range(groups))
    layers = f"an nnx.List of {groups} nnx.ConvTranspose of {features} features, each for its part of the channels"
    return rf'rename=[lm.rules.Split(r"\b{re.escape(name)}[.]", into=({into}))]  # for {layers}'


class _Transposed(Kernel):
    """The kernel of a transposed convolution, which Flax has without groups."""

    def check(self, array: Array, site: Site) -> None:
        """Refuse groups."""
        features = site.get("out_features")
        if array.ndim == len(_spatial(site)) + 2 and 0 < array.shape[1] < features and features % array.shape[1] == 0:
            raise Refusal(
                f"a weight of shape {array.shape}, which is one of {features // array.shape[1]} groups for "
                f"out_features={features}",
                "groups=1: nnx.ConvTranspose has no groups",
                _of_each_group(site.prefix[:-1], features // array.shape[1], array.shape[1]),
            )


class _Flat(Layout):
    """A kernel of several input or output axes, which PyTorch has as one ``nn.Linear`` of the flattened ones."""

    def to_flax(self, array: Array, site: Site) -> Array:
        """Transpose, and take the flattened axes apart."""
        extra = stacked_axes(array, 2, site, "kernel", self._rank(site))
        if extra is None or array.ndim < 2:
            return array
        if len(_as_tuple(site.get("axis"))) > 1:
            array = channels_last(array, self._sizes(site))
        inputs, outputs = self._shape(site, array.shape[-1], extra)
        kernel = array.swapaxes(-1, -2)
        if (int(np.prod(inputs)), int(np.prod(outputs))) != kernel.shape[extra:]:
            return kernel
        return kernel.reshape(*kernel.shape[:extra], *inputs, *outputs)

    def to_torch(self, array: Array, site: Site) -> Array:
        """Flatten, and transpose."""
        check_rank(array, self._rank(site), site)
        inputs, outputs = self._shape(site, None)
        array = array.reshape(int(np.prod(inputs)), int(np.prod(outputs))).T
        return channels_first(array, self._sizes(site)) if len(inputs) > 1 else array

    def _rank(self, site: Site) -> int:
        """Return how many axes the kernel of one layer has."""
        return len(_as_tuple(site.get("axis"))) + len(_as_tuple(site.get("out_features")))

    def _shape(self, site: Site, columns: int | None, extra: int = 0) -> tuple[tuple[int, ...], tuple[int, ...]]:
        shape, outputs = site.shape("kernel"), _as_tuple(site.get("out_features"))
        axes = _as_tuple(site.get("axis"))
        if site.get("batch_axis") or list(axes) != sorted(axes) or shape is None:
            raise Refusal(
                f"axis={axes}, batch_axis={dict(site.get('batch_axis') or {})}",
                "ascending axes and no batch axes: PyTorch's Linear has one map from one flattened axis",
                "batch_axis=None  # of nnx.LinearGeneral; or entries by Flax's names (kernel, bias)",
            )
        inputs = shape[extra : extra + len(axes)]
        if None in inputs and site.sizes is not None and len(site.sizes) == len(axes):
            inputs = site.sizes
        known = int(np.prod([n for n in inputs if n is not None]))
        if inputs.count(None) > 1:
            raise Refusal(
                f"a kernel of shape {shape}, where more than one input size is unknown",
                "all but one: a PyTorch file has only their product",
                "nnx.LinearGeneral(in_features, out_features, rngs=rngs)  # or flatten= with a size for each axis",
            )
        return tuple(n if n is not None else (columns or 0) // max(known, 1) for n in inputs), outputs

    def _sizes(self, site: Site) -> tuple[int, ...]:
        if site.sizes is None:
            raise Refusal(
                f"several input axes, {_as_tuple(site.get('axis'))}, in one axis of PyTorch's weight",
                "the order in which PyTorch flattened them, which the file does not hold",
                f'flatten={{"{site.prefix[:-1]}": (height, width, channels)}}  # if channels came first in PyTorch; '
                f'flatten={{"{site.prefix[:-1]}": (features,)}} if the order is the same',
            )
        return site.sizes


def _as_tuple(value: int | Sequence[int]) -> tuple[int, ...]:
    return tuple(value) if isinstance(value, Sequence) else (value,)


class _FlatBias(Layout):
    def to_flax(self, array: Array, site: Site) -> Array:
        outputs = _as_tuple(site.get("out_features"))
        extra = stacked_axes(array, 1, site, "bias", len(outputs))
        if extra is None or array.ndim == 0 or site.get("batch_axis") or array.shape[-1] != int(np.prod(outputs)):
            return array
        return array.reshape(*array.shape[:extra], *outputs)

    def to_torch(self, array: Array, site: Site) -> Array:
        return array.reshape(-1)


class _Slope(Layout):
    """PyTorch has one axis of slopes, Flax what it was given: a scalar, ``(C,)``, ``(1, 1, C)``."""

    def check(self, array: Array, site: Site) -> None:
        """Refuse a slope for each channel where the model has one for all."""
        if array.size > 1 and site.shape("negative_slope") == ():
            got, line = f"{array.size} slopes, one a channel", f"nnx.PReLU(jnp.full({array.size}, 0.25))"
            raise Refusal(got, "as many as the model has: it has one for all", line)

    def to_flax(self, array: Array, site: Site) -> Array:
        shape = tuple(n or 0 for n in site.shape("negative_slope") or ())
        one_axis = array.shape == (max(shape, default=1),) and int(np.prod(shape)) == array.size
        return array.reshape(shape) if one_axis else array

    def to_torch(self, array: Array, site: Site) -> Array:
        return array.reshape(-1)


_EINSUM = Cannot(
    "weight",
    "a weight for an nnx.Einsum, whose equation may put its axes in any order",
    "an entry by Flax's name (kernel), in Flax's order: PyTorch has no such layer",
    'rename={{"{name}": "{prefix}kernel"}}  # with the axes in Flax\'s order; or nnx.Linear in its place',
)

LINEAR = Simple(Field("weight", "kernel", Kernel(lambda site: Axes((1, 0)))), BIAS, flattens=True)
CONV = Simple(
    Field("weight", "kernel", Kernel(_conv_axes)), BIAS, Field("mask", "mask", Kernel(_conv_axes, entry="mask"))
)
CONV_TRANSPOSE = Simple(Field("weight", "kernel", _Transposed(_transposed_axes)), BIAS)
LINEAR_GENERAL = Simple(Field("weight", "kernel", _Flat()), Field("bias", "bias", _FlatBias()), flattens=True)
EINSUM: Rule = Simple(cannot=(_EINSUM,))
EMBED = Simple(Field("weight", "embedding", AS_IS))
PRELU = Simple(Field("weight", "negative_slope", _Slope()))
