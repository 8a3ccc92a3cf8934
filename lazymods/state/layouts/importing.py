"""From PyTorch: a file's tensors by the model's names, as Flax lays them."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from flax import nnx

from lazymods._error_lists import shown_names
from lazymods._errors import Problem
from lazymods._graph import dotted
from lazymods.state.entries import named_places
from lazymods.state.files.stored import StoredTensor
from lazymods.state.flow import StackedTensor
from lazymods.state.layouts import doubts
from lazymods.state.layouts.exporting import without_layers
from lazymods.state.layouts.file import TorchFile
from lazymods.state.layouts.site import Site, Sizes
from lazymods.state.layouts.table import rule_for, sites, torch_names


class Imported(NamedTuple):
    """What a PyTorch file is to a model.

    Attributes:
        entries: By the model's names: arrays, views of the file's where no arithmetic is needed; what no module
            claims under its own name, as the object given.
        sources: The file's names that each entry comes from; none for what the file lacks and Flax needs.
        problems: What the model cannot hold exactly, by the file's names.
        claimed: The file's names that were taken by modules, also for nothing that Flax needs.
        stacked: By the model's names of stacked entries, the axis of each stack and its length, the outermost first.
    """

    entries: dict[str, Any]
    sources: dict[str, tuple[str, ...]]
    problems: list[Problem]
    claimed: set[str]
    stacked: dict[str, tuple[tuple[int, int], ...]]


def from_torch(
    model: Any,
    tensors: Mapping[str, Any],
    flatten: Mapping[str, Sequence[int]] | None,
    known: Collection[str] | None = None,
    origins: Mapping[str, doubts.Origin] | None = None,
) -> Imported:
    """Give the tensors of a PyTorch file the names and layouts of a model.

    Args:
        model: An nnx module: lazy, ready or abstract. It is not changed.
        tensors: :class:`~lazymods.state.files.stored.StoredTensor` by name; what is something else stays as it is.
        flatten: By a layer's name, the sizes ``(*spatial, channels)`` of what is flattened before it, for a layer that
            PyTorch flattens channels first and the model channels last.
        known: The names of the model's entries, if they are known already.
        origins: Where each of ``tensors`` came from; None: that is not known, and nothing is in doubt.

    Returns:
        The entries, where they come from, and what cannot be held exactly.

    Raises:
        StateDictError: If two entries of the model have one name.
    """
    found, problems = with_sizes(list(sites(model)), flatten)
    out = _imported(found, tensors, set(named_places(model) if known is None else known))
    out.problems.extend(problems)
    if origins is not None:
        out.problems.extend(doubts.found(found, tensors, origins))
    return out


def _imported(found: list[Site], tensors: Mapping[str, Any], known: set[str]) -> Imported:
    stacks: dict[tuple[int, int], dict[str, StackedTensor]] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, StackedTensor):
            stacks.setdefault((tensor.axis, len(tensor.parts)), {})[name] = tensor
    plain = {name: t for name, t in tensors.items() if not isinstance(t, StackedTensor)} if stacks else tensors
    out = _imported_plain(found, plain, known)
    for (axis, length), members in stacks.items():
        layers = []
        for i in range(length):
            layer_sites = [dataclasses.replace(site, index=(*site.index, (axis, i))) for site in found]
            layers.append(_imported(layer_sites, {name: t.parts[i] for name, t in members.items()}, known))
        _add_stacked(out, layers, axis, members)
    return out


def _add_stacked(out: Imported, layers: list[Imported], axis: int, members: Mapping[str, StackedTensor]) -> None:
    """Add what modules make of the layers of stacked tensors, stacked again."""
    out.problems.extend(dict.fromkeys(problem for layer in layers for problem in layer.problems))
    out.claimed.update(layers[0].claimed)
    for name, value in layers[0].entries.items():
        if name in out.entries:
            out.problems.append(_second(name, layers[0].sources[name]))
            continue
        out.sources[name] = layers[0].sources[name]
        out.stacked[name] = ((axis, len(layers)), *layers[0].stacked.get(name, ()))
        if name in members and value is members[name].parts[0]:
            out.entries[name] = members[name]
        else:
            out.entries[name] = StackedTensor([_as_tensor(name, layer.entries[name]) for layer in layers], axis)


def _as_tensor(name: str, value: Any) -> StoredTensor:
    if isinstance(value, StoredTensor):
        return value
    return StoredTensor(name, value.shape, value.dtype, Path(name), lambda: value)


def _imported_plain(found: list[Site], tensors: Mapping[str, Any], known: set[str]) -> Imported:
    file = TorchFile(tensors)
    for site in found:
        rule_for(type(site.node)).read(site, file)
    for site in found:
        rule_for(type(site.node)).refuse_rest(site, file, known)
    _read_others(found, file, known)
    claimed = set(tensors)
    for name in file.unclaimed():
        claimed.discard(name)
        if name in file.entries:
            file.problems.append(_second(name, file.sources[name]))
        else:
            file.entries[name], file.sources[name] = tensors[name], (name,)
    return Imported(file.entries, file.sources, file.problems, claimed, {})


def _read_others(found: list[Site], file: TorchFile, known: set[str]) -> None:
    """Read what no rule has a name for, inside of wrappers that PyTorch's names leave out."""
    for name, torch in torch_names(found, known - file.entries.keys()).items():
        parts = file.read(torch) if torch != name else None
        if parts:
            file.entries[name], file.sources[name] = parts[0]


def _second(name: str, sources: tuple[str, ...]) -> Problem:
    got = f"an entry by Flax's name, beside {' and '.join(sources)}"
    return Problem(name, got, "one entry a parameter", f'rename={{"{name}": None}}  # drops it')


def with_sizes(found: list[Site], flatten: Mapping[str, Sequence[int]] | None) -> tuple[list[Site], list[Problem]]:
    """Give the sites that ``flatten`` names their sizes, under all of their names, and say which it names in vain."""
    sizes: dict[int, Sizes] = {}
    problems: list[Problem] = []
    flattening = [s for s in found if rule_for(type(s.node)).flattens] if flatten else []
    sequential = [s.prefix for s in found if isinstance(s.node, nnx.Sequential)]
    names = {id(s): without_layers(s.prefix, sequential)[:-1] for s in flattening}
    for name, given in (flatten or {}).items():
        named = [s for s in flattening if name in (dotted(s.path), s.prefix[:-1], names[id(s)])]
        try:
            whole = tuple(operator.index(n) for n in given)
        except TypeError:
            whole = ()
        if not named:
            got = "no layer of that name that can follow a flatten"
            there = f": {shown_names([*names.values()])}".replace("\n", ", ") if names else ""
            problems.append(Problem(name, f"flatten for it, and {got}", f"{_FLATTENS[0]}{there}", _FLATTENS[1]))
        elif not whole or min(whole) < 1:
            problems.append(Problem(name, f"flatten sizes {given!r}", "positive whole numbers", _FLATTENS[1]))
        else:
            sizes |= {id(s.node): whole for s in named}
    if not sizes:
        return found, problems
    return [dataclasses.replace(s, sizes=sizes.get(id(s.node))) for s in found], problems


_FLATTENS = (
    "the name of a Linear, LinearGeneral, BatchNorm, LayerNorm, RMSNorm or recurrent layer of the model",
    'flatten={"fc": (height, width, channels)}',
)
