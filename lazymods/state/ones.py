"""Entries that a file has with other axes of length 1: a 1x1 convolution for a linear layer, or the other way."""

from __future__ import annotations

from flax import nnx

from lazymods._layer.placeholder import fits
from lazymods.state.entries import Place
from lazymods.state.missing import known_shape
from lazymods.state.prepared import Prepared


def line_for(prepared: Prepared, place: Place) -> str | None:
    """Return the rename by which PyTorch's entry fits the model's, if only axes of length 1 are in the way.

    Args:
        prepared: What the file is to the model.
        place: The model's.
    """
    laid, known = prepared.laid.get(place.name, ()), known_shape(place)
    if known is None or len(laid) != 1:
        return None
    entry = prepared.final[laid[0]]
    shape: tuple[int, ...] = tuple(getattr(entry.tensor, "shape", ()))
    new = _kernel(place, shape, known) if place.key == "kernel" else _as_it_is(shape, known)
    if new is None:
        return None
    from lazymods.state.layouts.axes import without_ones  # with all layouts, which many loads do without

    return without_ones((*entry.sources, entry.name), new)


def _as_it_is(shape: tuple[int, ...], known: tuple[int | None, ...]) -> tuple[int, ...] | None:
    """Return the shape of an array that no layout changes, as a layer scale ``(C, 1, 1)``."""
    sizes = [n for n in known if n is not None]
    new = tuple(_longer(shape)) if len(sizes) < len(known) else tuple(sizes)
    return new if fits(known, new) and _longer(new) == _longer(shape) and new != shape else None


def _kernel(place: Place, shape: tuple[int, ...], known: tuple[int | None, ...]) -> tuple[int, ...] | None:
    spatial: tuple[int, ...] = ()
    if isinstance(place.holder, nnx.Conv):
        spatial = tuple(n for n in known[:-2] if n is not None)
    if len(shape) < 2 or len(shape) == len(known) or _longer(shape[2:]) != _longer(spatial):
        return None
    is_known = isinstance(place.holder, (nnx.Linear, nnx.Conv)) and fits(known, (*spatial, shape[1], shape[0]))
    if not (is_known or isinstance(place.holder, nnx.LinearGeneral)):
        return None
    return (*shape[:2], *spatial)


def _longer(lengths: tuple[int, ...]) -> list[int]:
    return [n for n in lengths if n != 1]
