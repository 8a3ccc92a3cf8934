"""How the axes of one parameter lie in PyTorch and in Flax, and the way between them: views, where numpy has one."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from lazymods.state.layouts.site import Array, Refusal, Site


class Layout:
    """How the axes of one parameter lie; this one leaves them as they are."""

    def check(self, array: Array, site: Site) -> None:
        """Raise :class:`Refusal` if Flax cannot hold PyTorch's values."""

    def to_flax(self, array: Array, site: Site) -> Array:
        """Return PyTorch's values as Flax lays them; as they are if their rank is another, which the load reports.

        Raises:
            Refusal: If their axes cannot be told.
        """
        return array

    def to_torch(self, array: Array, site: Site) -> Array:
        """Return Flax's values as PyTorch lays them.

        Raises:
            Refusal: If PyTorch cannot hold them.
        """
        return array


AS_IS = Layout()


class Axes(NamedTuple):
    """The axes of a kernel: PyTorch's axis for each of Flax's, and PyTorch's axes that run the other way."""

    order: tuple[int, ...]
    flipped: tuple[int, ...] = ()


class Kernel(Layout):
    """A kernel whose axes are permuted, some of them reversed; views only, but for a flattened input."""

    def __init__(self, axes: Callable[[Site], Axes], entry: str = "kernel") -> None:
        self.axes = axes
        self.entry = entry

    def to_flax(self, array: Array, site: Site) -> Array:
        """Permute and flip."""
        order, flipped = self.axes(site)
        extra = stacked_axes(array, len(order), site, self.entry)
        if extra is None:
            return array
        if extra:  # stacked layers
            order = (*range(extra), *(axis + extra for axis in order))
            flipped = tuple(axis + extra for axis in flipped)
        if site.sizes is not None:
            array = channels_last(array, site.sizes)
        return (np.flip(array, flipped) if flipped else array).transpose(order)

    def to_torch(self, array: Array, site: Site) -> Array:
        """Flip and permute back."""
        order, flipped = self.axes(site)
        check_rank(array, len(order), site)
        array = np.flip(array.transpose(np.argsort(order)), flipped)
        return array if site.sizes is None else channels_first(array, site.sizes)


def stacked_axes(array: Array, rank: int, site: Site, entry: str, own: int | None = None) -> int | None:
    """Return how many first axes of an array are stacked layers, which the model has too; None if its rank is another.

    Args:
        array: PyTorch's values.
        rank: How many axes PyTorch's have in one layer.
        site: The module.
        entry: Its entry that the values are for.
        own: How many the model's have in one layer; None: as many.
    """
    extra = array.ndim - rank
    own = rank if own is None else own
    is_so = extra == 0 or (extra > 0 and len(site.shape(entry) or ()) - extra == own)
    return extra if is_so else None


def check_rank(array: Array, rank: int, site: Site) -> None:
    """Raise :class:`Refusal` if an array of the model has another rank than PyTorch's."""
    if array.ndim != rank:
        raise Refusal(
            f"an array of shape {array.shape}",
            f"{rank} axes, as PyTorch has: it has no stacked layers",
            "nnx.List([make_block(rngs) for _ in range(n)])  # layers that nnx.vmap has not stacked",
        )


def without_ones(names: Iterable[str], shape: tuple[int, ...]) -> str:
    """Return the line to write for an entry that has the shape that is needed, but for axes of length 1.

    Args:
        names: Its names, in the file and after a rename.
        shape: The shape that is needed.
    """
    found = [re.escape(name) for name in dict.fromkeys(names)]
    pattern = found[0] if len(found) == 1 else f"({'|'.join(found)})"
    return f'rename=[lm.rules.Reshape(r"^{pattern}$", {shape})]  # or a layer as the file\'s'


# ---------------------------------------------------------------- flattened inputs


def channels_last(array: Array, sizes: tuple[int, ...]) -> Array:
    """Reorder the last axis, flattened from ``(C, *spatial)``, as if flattened from ``(*spatial, C)``.

    Raises:
        Refusal: If ``sizes``, which are ``(*spatial, C)``, do not multiply to the axis.
    """
    _check_product(array, sizes)
    whole = array.reshape(*array.shape[:-1], sizes[-1], *sizes[:-1])
    return np.moveaxis(whole, array.ndim - 1, -1).reshape(array.shape)


def channels_first(array: Array, sizes: tuple[int, ...]) -> Array:
    """Undo :func:`channels_last`.

    Raises:
        Refusal: If ``sizes`` do not multiply to the axis.
    """
    _check_product(array, sizes)
    whole = array.reshape(*array.shape[:-1], *sizes)
    return np.moveaxis(whole, -1, array.ndim - 1).reshape(array.shape)


def _check_product(array: Array, sizes: tuple[int, ...]) -> None:
    product = int(np.prod(sizes, dtype=object))
    if product != array.shape[-1]:
        raise Refusal(
            f"flatten sizes {sizes}, a product of {product}, for {array.shape[-1]} features",
            "the sizes before the flatten, channels last, whose product is the number of features",
            "flatten={'fc': (height, width, channels)}  # of the layer before",
        )
