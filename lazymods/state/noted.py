"""What a load notes for its way back: what it did with each entry of the file.

Only shapes, dtypes and names are kept, and the values of what no model holds: buffers, scales.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from lazymods.state.files.stored import Array, StoredTensor
from lazymods.state.flow import Applied, Entry, Flow, remembered
from lazymods.state.values import same_values


@dataclasses.dataclass(frozen=True)
class WayBack:
    """What a load did.

    Attributes:
        layout: Its layout.
        flatten: Its flatten.
        originals: The file's entries by name, in the file's order.
        applied: The uses of rules, in order.
        final: The entries by the names that the layout was given.
        loaded: Those of these names that the model has values of.
        kept: The values of entries that the model does without, by the file's names.
        tied: For an entry that was left out, the one that it is tied to in the file.
        stacked: By the model's names of what was stacked, the axis and length of each stack.
    """

    layout: str
    flatten: Mapping[str, Sequence[int]] | None
    originals: Mapping[str, Entry]
    applied: Sequence[Applied]
    final: Mapping[str, Entry]
    loaded: frozenset[str]
    kept: Mapping[str, Array]
    tied: Mapping[str, str]
    stacked: Mapping[str, tuple[tuple[int, int], ...]]


def forget_values(flow: Flow) -> None:
    """Let go of all values that the way back does not need: those of the file live as long as its map else."""
    kept = {id(use.inputs[i]) for use in flow.applied for i in range(len(use.inputs)) if use.rule.keeps(i)}
    entries = [*flow.originals.values(), *(e for use in flow.applied for e in (*use.inputs, *use.outputs))]
    for entry in {id(entry): entry for entry in entries}.values():
        entry.tensor = remembered(entry.tensor, values=id(entry) in kept)


def same_entries(left_out: Sequence[Entry], used: Sequence[Entry]) -> list[list[str]]:
    """Return the names of entries that were left out, each with that of a used one of the same bits: a tied head."""

    def kind(entry: Entry) -> Any:
        tensor = entry.tensor
        return (tensor.shape, tensor.dtype) if isinstance(tensor, StoredTensor) and len(tensor.shape) > 1 else None

    alike: dict[Any, list[Entry]] = {}
    for entry in used if left_out else ():
        alike.setdefault(kind(entry), []).append(entry)
    pairs = []
    for entry in left_out:
        for other in alike.get(kind(entry), ()) if kind(entry) else ():
            if _starts_as(entry.tensor, other.tensor) and same_values(entry.tensor.read(), other.tensor.read()):
                pairs.append([entry.sources[0], other.sources[0]])
                break
    return pairs


def _starts_as(one: StoredTensor, other: StoredTensor) -> bool:
    return same_values(one.read()[:1], other.read()[:1])
