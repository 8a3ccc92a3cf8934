"""Parameters that a file lacks for a known reason, so that what is left to chance is told with the line to write.

Two are frequent: the statistics of a BatchNorm that PyTorch made with ``track_running_stats=False``, and the output
layer of a language model whose file has it only once, as the embedding that it was tied to.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from flax import nnx

from lazymods import _graph
from lazymods._layer.placeholder import fits
from lazymods.state.entries import Place, leaf_of, raw_of

Shapes = Mapping[str, tuple[int, ...]]


def cause_of(places: Mapping[str, Place], name: str, loaded: Shapes) -> tuple[str, str] | None:
    """Say why a parameter may be missing, and what to write.

    Args:
        places: The model's entries.
        name: The one that is missing.
        loaded: The shapes of what is not.

    Returns:
        What is the case, and the line; None if nothing is known.
    """
    place = places.get(name)
    is_statistic = place is not None and isinstance(place.holder, nnx.BatchNorm) and place.key in ("mean", "var")
    if is_statistic and not any(f"{name.rpartition('.')[0]}.{key}".lstrip(".") in loaded for key in ("mean", "var")):
        got = "no running statistics in the file: BatchNorm of PyTorch without track_running_stats has none"
        return got, "strict=False  # and use_running_average=False: such a layer always normalizes by its batch"
    embedding = tied_to(places, name, loaded)
    if embedding is not None:
        got = f"no output layer in the file, whose embedding ({embedding}) fits it: they are tied there"
        module, head = embedding.rpartition(".")[0], name.rpartition(".")[0]
        copied = f'rename=[lm.rules.Copy(r"{module}[.]weight$", into="{head}.weight")]'
        return got, f"{copied}  # for both; or {module}.attend(x) in its place"
    return None


def tied_to(places: Mapping[str, Place], name: str, loaded: Shapes) -> str | None:
    """Return the only embedding whose transpose the kernel of a missing output layer can be; None if there is none."""
    place = places.get(name)
    if place is None or place.key != "kernel" or not isinstance(place.holder, nnx.Linear):
        return None
    known = known_shape(place)
    found: dict[Any, str] = {}
    for other in places.values():
        shape = loaded.get(other.name)
        if shape is not None and isinstance(other.holder, nnx.Embed) and known is not None and fits(known, shape[::-1]):
            found.setdefault(other.identity, other.name)
    return next(iter(found.values())) if len(found) == 1 else None


def known_shape(place: Place) -> tuple[int | None, ...] | None:
    """Return what is known of the shape of what is at a place now."""
    if _graph.is_placeholder(place.owner):
        return place.owner.pending.shape
    return tuple(np.shape(value_now(place)))


def value_now(place: Place) -> Any:
    """Return what is at a place now, which may have been a placeholder when the place was found."""
    return leaf_of(raw_of(place.owner) if place.is_variable else place.owner, place.leaf)
