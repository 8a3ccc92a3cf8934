"""The entries of a checkpoint by a model's names: renamed, matched, laid; and what is to be said of them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from lazymods._errors import StateDictError
from lazymods._graph import dotted
from lazymods.state import names
from lazymods.state.entries import Survey, is_training_state
from lazymods.state.files.stored import Checkpoint
from lazymods.state.flow import Entry, Flow, Rename, transformed


@dataclasses.dataclass(frozen=True)
class Prepared:
    """What a checkpoint is to a model.

    Attributes:
        entries: The entries by the model's names, unread where nothing had to be computed.
        sources: For each, the names of the file that it comes from.
        laid: For each, the names that the layout was given.
        final: The entries by the names that the layout was given.
        flow: What the rename has done.
        swallowed: Names that the layout was given, of entries that it has taken for nothing.
        stacked: By the model's names of stacked entries, the axis and length of each stack.
        notes: What is to be said.
    """

    entries: dict[str, Any]
    sources: dict[str, tuple[str, ...]]
    laid: dict[str, tuple[str, ...]]
    final: dict[str, Entry]
    flow: Flow
    swallowed: frozenset[str] = frozenset()
    stacked: Mapping[str, tuple[tuple[int, int], ...]] = dataclasses.field(default_factory=dict)
    notes: Sequence[str] = ()


def prepare(
    survey: Survey,
    file: Checkpoint,
    layout: str,
    rename: Rename | None,
    flatten: Mapping[str, Sequence[int]] | None,
    ignored: Sequence[re.Pattern[str]] = (),
) -> Prepared:
    """Return what a file holds by the model's names.

    Args:
        survey: The model.
        file: The file.
        layout: Its layout.
        rename: As for a load.
        flatten: As for a load.
        ignored: Expressions of names of entries that need no parameter; what the others have in common is a prefix.

    Raises:
        StateDictError: If entries meet under one name, or do not fit a rule or a layout.
        CheckpointError: If what stands beside the file cannot be followed.
        ArgumentError: If ``rename`` is none.
    """
    stored = dict(file.tensors) | {alias: file.tensors[kept] for alias, kept in file.aliases.items()}
    first, notes = [], []
    if layout == "torch":
        from lazymods.state.adapters import adapter_rules

        first, notes = adapter_rules(file, stored, survey.nodes)
    elif not file.in_memory and is_training_state(survey.model):
        from lazymods.state.stacked_states import rules_for

        first = rules_for(survey)
    flow = transformed(stored, rename, first)
    flow.ignored = ignored
    given = flow.by_name()
    _refuse(survey, file, flow.problems)
    return dataclasses.replace(_laid(survey, file, layout, flatten, given, flow), notes=notes)


def with_copy(
    survey: Survey,
    file: Checkpoint,
    flatten: Mapping[str, Sequence[int]] | None,
    prepared: Prepared,
    name: str,
    second: str,
) -> Prepared:
    """Return what a PyTorch file holds if one of its entries is two, as by a :class:`~lazymods.rules.Copy`.

    Args:
        survey: The model.
        file: The file.
        flatten: As for a load.
        prepared: What it holds; not to be used any more.
        name: The model's name of the entry.
        second: The name of the other one, as PyTorch has it.
    """
    from lazymods.state.array_parts import Copy

    (spelled,) = prepared.laid[name]
    flow = prepared.flow
    flow.apply(Copy(rf"^{re.escape(prepared.final[spelled].name)}$", into=second.replace("\\", r"\\")))
    return dataclasses.replace(_laid(survey, file, "torch", flatten, flow.by_name(), flow), notes=prepared.notes)


def _laid(
    survey: Survey,
    file: Checkpoint,
    layout: str,
    flatten: Mapping[str, Sequence[int]] | None,
    given: Mapping[str, Entry],
    flow: Flow,
) -> Prepared:
    if layout == "torch" and flow.rename_given:
        from lazymods.state.layouts.lora import name_as_laid

        nodes = {dotted(path): node for path, node in survey.named_nodes}
        given = {name_as_laid(name, entry.sources, nodes.get): entry for name, entry in given.items()}
    aside = {n for n, e in given.items() if any(p.search(s) for p in flow.ignored for s in (n, *e.sources))}
    spelled = names.matched(survey, {n: e.tensor for n, e in given.items()}, leaves=layout == "flax", aside=aside)
    final = {new: given[name] for new, name in spelled.items()}
    entries = {new: entry.tensor for new, entry in final.items()}
    if layout != "torch":
        laid = {new: (new,) for new in final}
        return Prepared(entries, {n: e.sources for n, e in final.items()}, laid, final, flow)
    from lazymods.state.layouts import from_torch
    from lazymods.state.lineage import origins

    imported = from_torch(survey.model, entries, flatten, survey.places, origins(flow, final))
    _refuse(survey, file, imported.problems)
    laid = {name: imported.sources.get(name, (name,)) for name in imported.entries}
    sources = {n: tuple(dict.fromkeys(s for name in found for s in final[name].sources)) for n, found in laid.items()}
    used = {name for found in laid.values() for name in found}
    swallowed = frozenset(imported.claimed - used)
    return Prepared(imported.entries, sources, laid, final, flow, swallowed, imported.stacked)


def why_missing(
    survey: Survey,
    file: Checkpoint,
    layout: str,
    flatten: Mapping[str, Sequence[int]] | None,
    prepared: Prepared,
    missing: Sequence[str],
) -> dict[str, tuple[str, str]]:
    """Return, of the model's names without an entry, those whose entries a rename has dropped.

    Returns:
        For each the name in the file, and the part of the rename that has dropped it.
    """
    dropped = {d.entry.name: d for d in prepared.flow.dropped}
    if not dropped or not missing:
        return {}
    rest = {name: entry for name, entry in prepared.final.items() if name not in dropped}
    given = rest | {name: d.entry for name, d in dropped.items()}  # prefixes are seen by all names
    try:
        found = _laid(survey, file, layout, flatten, given, prepared.flow)
    except Exception:  # what was dropped need not fit anything
        return {}
    of_source = {d.entry.sources: d for d in dropped.values()}
    out = {}
    for name in missing:
        drops = [of_source[(s,)] for s in found.sources.get(name, ()) if (s,) in of_source]
        if drops:
            out[name] = (" and ".join(drops[0].entry.sources), drops[0].by)
    return out


def _refuse(survey: Survey, file: Checkpoint, problems: Sequence[Any]) -> None:
    if problems:
        heading = f"{file.title} does not fit {type(survey.model).__name__}; nothing was loaded"
        raise StateDictError(*problems, heading=heading)
