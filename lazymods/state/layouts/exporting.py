"""To PyTorch: a ready model's arrays by PyTorch's names, as PyTorch lays them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from lazymods import _graph
from lazymods._errors import Problem, StateDictError, UninitializedError, describe, located
from lazymods.state.entries import Place, named_places
from lazymods.state.layouts.importing import with_sizes, without_layers
from lazymods.state.layouts.site import Array, Refusal, Site
from lazymods.state.layouts.table import rule_for, sites, torch_names


def export_torch(model: nnx.Module, *, flatten: Mapping[str, Sequence[int]] | None = None) -> dict[str, Array]:
    """Return a model's parameters as PyTorch's state dict: its names and layouts, by module type.

    What is shared appears under each of its names. Modules of types that PyTorch does not have keep their names and
    layouts. A recurrent layer's bias is written as ``bias_ih``, with zeros as ``bias_hh``; ``num_batches_tracked`` is
    0.

    Args:
        model: An nnx module, initialized.
        flatten: As for a load: by a layer's name, the sizes ``(*spatial, channels)`` of what is flattened before it,
            for a layer that is to follow a flatten with channels first.

    Returns:
        numpy arrays by name, writable and contiguous, in the model's dtypes (bfloat16 is that of ml_dtypes).

    Raises:
        UninitializedError: If a parameter has no value yet.
        StateDictError: If PyTorch cannot hold a layer exactly, or ``flatten`` does not fit.

    Example:
        >>> import lazymods as lm
        >>> from flax import nnx
        >>> {k: v.shape for k, v in lm.export_torch(nnx.Linear(3, 4, rngs=nnx.Rngs(0))).items()}
        {'weight': (4, 3), 'bias': (4,)}
    """
    left = {name: place for name, place in named_places(model).items() if not place.is_rng}
    _check_ready(model, left)
    found, problems = with_sizes(list(sites(model)), flatten)
    out: dict[str, Array] = {}
    sequential = [site.prefix for site in found if isinstance(site.node, nnx.Sequential)]
    for site in found:
        try:
            entries, names = rule_for(type(site.node)).write(site)
        except Refusal as refusal:
            problems.append(refusal.at(_where(site)))
            continue
        for name in names:
            left.pop(name, None)
        for name, value in entries.items():
            _put(out, problems, without_layers(name, sequential), value)
    if not problems:
        problems = [r.at(_where(site)) for site in found if (r := rule_for(type(site.node)).refuse_left(site, left))]
    for name, torch in torch_names(found, left).items():
        _put(out, problems, without_layers(torch, sequential), np.asarray(left[name].value))
    if problems:
        raise StateDictError(*problems, heading=f"PyTorch cannot hold {type(model).__name__}")
    return out


def _where(site: Site) -> str:
    return located(_graph.dotted(site.path), type(site.node).__name__)


def _check_ready(model: Any, places: Mapping[str, Place]) -> None:
    problems = [
        Problem(
            located(name, type(place.owner).__name__),
            describe(place.value),
            "a value: only an initialized model can be exported",
            "lm.materialize(model, x), or lm.load(model, path), first",
        )
        for name, place in places.items()
        if _graph.is_placeholder(place.owner) or isinstance(place.value, jax.ShapeDtypeStruct)
    ]
    if problems:
        raise UninitializedError(*problems, heading=f"{type(model).__name__} is not initialized")


def _put(out: dict[str, Array], problems: list[Problem], name: str, value: Array) -> None:
    if name in out:
        problems.append(
            Problem(name, "two entries of that name", "one", "attributes that do not meet in PyTorch's names")
        )
    out[name] = np.array(value, order="C")  # torch.from_numpy takes neither reversed nor read-only arrays in silence
