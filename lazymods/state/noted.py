"""What a load notes for its way back: what it did with each entry of the file.

Only shapes, dtypes and names are kept, and the values of what no model holds: buffers, scales.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from lazymods.state.files.stored import Array, Checkpoint, StoredTensor
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
        computed: Those names of loaded entries from which something was computed, several of them together: their
            values are kept.
        left: What was left out and is no known buffer, nor dropped by a rename: the file's names.
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
    computed: Collection[str] = ()
    left: Collection[str] = ()


def forget_values(flow: Flow, needed: Iterable[Entry]) -> None:
    """Let go of all values that the way back does not need: those of the file live as long as its map else."""
    kept = {id(entry) for entry in needed}
    kept |= {id(use.inputs[i]) for use in flow.applied for i in range(len(use.inputs)) if use.rule.keeps(i)}
    entries = [*flow.originals.values(), *(e for use in flow.applied for e in (*use.inputs, *use.outputs))]
    for entry in {id(entry): entry for entry in entries}.values():
        entry.tensor = remembered(entry.tensor, values=id(entry) in kept)


def is_buffer(file: Checkpoint, name: str, tensor: StoredTensor) -> bool:
    """Say whether an entry of a file is a buffer and no parameter, as numbers that have no gradient are."""
    return tensor.dtype.kind in "biu" or name in (file.buffers or ())


# Output layers of language models, as PyTorch's modules call them.
_HEAD = re.compile(
    r"(.*?)((cls\.)?predictions\.decoder|generator_lm_head|lm_head(\.decoder)?|lm_loss|embed_out|output_projection"
    r"|vocab_projector|pred_layer\.proj|proj_out|to_logits|generator|decoder|output|head)\.weight"
)


def tied_names(
    file: Checkpoint, used: Mapping[str, Entry], embeddings: Collection[str], left: Sequence[Entry]
) -> dict[str, str]:
    """Return the names of entries that were left out, each with that of a used one that it is tied to in the file.

    Tied is what has one memory: names that the file tells as one. Equal numbers alone are no tie: a target network
    is a copy at first. Formats other than PyTorch's hold tied tensors twice or once; there an output layer that
    has the very numbers of an embedding below the same module counts as tied to it.

    Args:
        file: The file.
        used: Its entries that the model has, by the file's names.
        embeddings: The names of those that an embedding of the model has as they are.
        left: Entries that were left out.
    """
    pairs = [] if file.tells_ties else [found for entry in left for found in _same_embedding(entry, used, embeddings)]
    tied: dict[str, str] = {}
    for group in (*([kept, alias] for alias, kept in file.aliases.items()), *file.ties, *pairs):
        found = [name for name in group if name in used]
        tied |= {name: found[0] for name in group if found and name not in used}
    return tied


def _same_embedding(entry: Entry, used: Mapping[str, Entry], embeddings: Collection[str]) -> Iterator[list[str]]:
    """Find the embedding of the very bits of an output layer, below the module that the layer hangs in."""
    (name, *_) = entry.sources
    match = _HEAD.fullmatch(name)
    tensor = entry.tensor
    if match is None or not isinstance(tensor, StoredTensor):
        return
    for other in embeddings:
        held = used[other].tensor
        if other.startswith(match[1]) and (held.shape, held.dtype) == (tensor.shape, tensor.dtype):
            if same_values(tensor.read()[:1], held.read()[:1]) and same_values(tensor.read(), held.read()):
                yield [name, other]
