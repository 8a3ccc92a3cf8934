"""What a load looks at beside names and shapes: the configuration next to the file, and what it leaves to chance."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flax import nnx

from lazymods._errors import Problem
from lazymods.state import config_file, modes, tied_heads
from lazymods.state.entries import Survey
from lazymods.state.files.stored import Checkpoint
from lazymods.state.load import LoadResult
from lazymods.state.prepared import Prepared, with_copy


class Beside:
    """One load's second look.

    Args:
        survey: The model.
        file: The file.
        prepared: What it has.
        layout: The layout that it was read with.
        flatten: As for a load.

    Attributes:
        prepared: What the file has, and the output layer that it has tied to the embedding.
        config: The configuration beside the file; None: there is none.
        tied: That output layer's name, and the embedding's; None: there is none, or the file has both.
    """

    def __init__(
        self,
        survey: Survey,
        file: Checkpoint,
        prepared: Prepared,
        layout: str,
        flatten: Mapping[str, Sequence[int]] | None,
    ) -> None:
        self.survey = survey
        self.is_torch: bool = layout == "torch"
        self.flatten = flatten
        self.config: config_file.Config | None = None if file.in_memory else config_file.beside(file.path)
        is_tied = self.config is not None and self.config.ties and self.is_torch
        said = [] if self.config is None else self.config.find(("vocab_size",))
        words = {n for _, n in said if isinstance(n, int)}
        self.tied: tuple[str, str] | None = tied_heads.find(survey.places, prepared.entries, words) if is_tied else None
        if self.tied is not None and len(prepared.laid.get(self.tied[1], ())) == 1:
            head, embedding = self.tied
            second = f"{head.removesuffix('.kernel')}.weight"
            prepared = with_copy(survey, file, flatten, prepared, embedding, second)
        self.prepared: Prepared = prepared

    def wrong_heads(self) -> list[Problem]:
        """Find modules with another number of heads than the configuration says."""
        loaded = [name for name in self.prepared.entries if name in self.survey.places]
        return [] if self.config is None else config_file.wrong_heads(self.survey, self.config, loaded)

    def remarks(self, result: LoadResult, entries: Mapping[str, Any], may_miss: Callable[[str], bool]) -> list[str]:
        """Say what is good to know of a load that went well.

        Args:
            result: What it gave.
            entries: What it was given.
            may_miss: Says of a name whether the user knows that it may be missing.
        """
        out = []
        if self.config is not None:
            out += config_file.differences(self.survey, self.config, result.matched)
            given = self._unchanged(result) if self.is_torch else {}
            out += config_file.scales_less_one(self.survey, self.config, given)
        if self.tied is not None:
            head, embedding = self.tied
            out.append(
                f"{head} and {embedding} are one parameter in the file (tie_word_embeddings) and two in the model; "
                "both are filled, and will train apart. To use one for both: nnx.Embed.attend"
            )
        out += self._other_orders(result)
        missing = [name for name in result.missing if not may_miss(name)]
        return out + tied_heads.remarks(self.survey.places, missing, result.unexpected, entries, result.matched)

    def _unchanged(self, result: LoadResult) -> dict[str, str]:
        """Return the names, after a rename, of what was loaded and no rule has changed, by the model's names."""
        originals = {id(entry) for entry in self.prepared.flow.originals.values()}
        final, laid = self.prepared.final, self.prepared.laid
        found = {name: final[laid[name][0]] for name in result.matched if len(laid.get(name, ())) == 1}
        return {name: entry.name for name, entry in found.items() if id(entry) in originals}

    def finish(self, result: LoadResult, mode: str | None) -> None:
        """Put the model in a mode, or note in which it is."""
        model = self.survey.model
        if mode is not None:
            modes.set_mode(model, mode)
        elif note := modes.note_of(model):
            result.notes.append(note)

    def _other_orders(self, result: LoadResult) -> list[str]:
        if not self.is_torch or not any(isinstance(n, (nnx.Conv, nnx.ConvTranspose)) for _, n in self.survey.nodes):
            return []
        from lazymods.state import flattened  # with what runs models, which most loads do without

        entries = self.prepared.entries
        loaded = {name: entries[name] for name in result.matched if name in entries}
        return list(flattened.remarks(self.survey, loaded, self.flatten))
