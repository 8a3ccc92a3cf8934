"""What a load looks at beside names and shapes: the configuration next to the file, and what it leaves to chance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lazymods._errors import Problem
from lazymods.state import config_file, tied_heads
from lazymods.state.entries import Survey
from lazymods.state.load import LoadResult


class Beside:
    """One load's second look.

    Args:
        survey: The model.
        path: The file.
        entries: What the file has, by the model's names; gets the output layer that it has tied to the embedding.
        sources: The file's names of those; gets that layer's.
        is_torch: Whether the file was read as PyTorch's.

    Attributes:
        config: The configuration beside the file; None: there is none.
        tied: The embedding's name by that of the output layer that got its numbers.
    """

    def __init__(
        self,
        survey: Survey,
        path: Path,
        entries: dict[str, Any],
        sources: dict[str, tuple[str, ...]],
        *,
        is_torch: bool,
    ) -> None:
        self.survey = survey
        self.config: config_file.Config | None = config_file.beside(path)
        is_tied = self.config is not None and self.config.ties and is_torch
        self.tied: Mapping[str, str] = tied_heads.fill(survey.places, entries, sources) if is_tied else {}
        self._loaded = [name for name in entries if name in survey.places]

    def wrong_heads(self) -> list[Problem]:
        """Find modules with another number of heads than the configuration says."""
        return [] if self.config is None else config_file.wrong_heads(self.survey, self.config, self._loaded)

    def remarks(self, result: LoadResult, entries: Mapping[str, Any]) -> list[str]:
        """Say what is good to know of a load that went well.

        Args:
            result: What it gave.
            entries: What it was given.
        """
        out = [] if self.config is None else config_file.differences(self.survey, self.config, result.matched)
        for head, embedding in self.tied.items():
            out.append(
                f"{head} and {embedding} are one parameter in the file (tie_word_embeddings) and two in the model; "
                "both are filled, and will train apart. To use one for both: nnx.Embed.attend"
            )
        return out + tied_heads.remarks(self.survey.places, result.missing, result.unexpected, entries)

    def watch(
        self, result: LoadResult, entries: Mapping[str, Any], flatten: Mapping[str, Sequence[int]] | None
    ) -> None:
        """Let the model's first call tell of a ``flatten`` that was forgotten."""
        from lazymods.state import flattened  # with what runs models, which most loads do without

        flattened.forget(self.survey.model)
        loaded = {name: entries[name] for name in result.matched if name in entries}
        flattened.watch(self.survey.model, flattened.suspects(self.survey, loaded, flatten))
