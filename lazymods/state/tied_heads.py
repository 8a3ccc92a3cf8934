"""Output layers of language models, which a file may have only once: as the embedding that they are tied to.

A file says so by ``tie_word_embeddings`` in its ``config.json``. Then a model that has an output layer of its own gets
the same numbers in both, as with a file that has two names for them. Without that word nobody knows: the layer is
missing, and the line to write is told (:mod:`lazymods.state.missing`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from flax import nnx

from lazymods.state.entries import Place
from lazymods.state.files.stored import StoredTensor
from lazymods.state.missing import cause_of, known_shape, tied_to, value_now
from lazymods.state.values import same_values


def find(places: Mapping[str, Place], entries: Mapping[str, Any], words: Collection[int]) -> tuple[str, str] | None:
    """Find the output layer that a file lacks and an embedding fits.

    Args:
        places: The model's entries.
        entries: What the file has for them.
        words: How many the vocabulary has: other tables, as of positions, are none of it; empty: that is not known.

    Returns:
        The kernel's name and the embedding's; None if there is none, or more than one layer may be meant.
    """
    shapes = {n: tuple(np.shape(v)) for n, v in entries.items() if n in places}
    filled = {places[name].identity for name in shapes}
    tables = {n: shape for n, shape in shapes.items() if not words or (shape and shape[0] in words)}
    found = [
        (name, embedding)
        for name, place in places.items()
        if place.identity not in filled and (embedding := tied_to(places, name, tables)) is not None
    ]
    return found[0] if len({places[name].identity for name, _ in found}) == 1 else None


def remarks(
    places: Mapping[str, Place],
    missing: list[str],
    unexpected: list[str],
    left: Mapping[str, Any],
    sources: Mapping[str, tuple[str, ...]],
) -> list[str]:
    """Say what a load that is not strict leaves to chance, or drops, and would not be expected to.

    Args:
        places: The model's entries, loaded.
        missing: The names of those that were not.
        unexpected: The names of what the file has beside.
        left: That, by name.
        sources: The names in the file of what was loaded.
    """
    loaded = {n: s for n, p in places.items() if n not in missing and (s := known_shape(p)) and None not in s}
    out = []
    for name in missing:
        cause = cause_of(places, name, loaded, sources)  # type: ignore[arg-type]
        if cause is not None:
            out.append(f"{name} is left as it is: {cause[0]}; write {cause[1]}")
    held = {n: value_now(p) for n, p in places.items() if n in loaded and is_embedding(p)}
    for name in [name for name in unexpected if name.endswith((".weight", ".kernel"))]:
        embedding = untied(left.get(name), held)
        if embedding is not None:
            out.append(
                f"{name} is left out: it has the shape of {embedding} and other numbers, as an output layer that is "
                f"not tied to it; write {LINE} for it"
            )
    return out


LINE = "lm.LazyLinear(..., use_bias=False)"


def is_embedding(place: Place) -> bool:
    """Say whether a place is the matrix of an embedding."""
    return isinstance(place.holder, nnx.Embed) and place.key == "embedding"


def untied(value: Any, embeddings: Mapping[str, Any]) -> str | None:
    """Return the name of the embedding that has the shape of an array and other numbers; None if there is none.

    Args:
        value: The array, or a tensor of a file.
        embeddings: The matrices of a model's embeddings.
    """
    for name, held in embeddings.items():
        if not hasattr(value, "shape") or tuple(value.shape) != tuple(np.shape(held)):
            continue
        numbers = np.asarray(value.read() if isinstance(value, StoredTensor) else value)
        if not same_values(numbers, held) and not same_values(numbers.astype(held.dtype), held):
            return name
    return None
