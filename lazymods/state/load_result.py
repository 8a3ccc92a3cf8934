"""What a load returns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class _Lists(NamedTuple):
    missing: list[str]
    unexpected: list[str]
    mismatched: list[str]


class LoadResult(_Lists):
    """What a load did not use or find, as lists of dotted names: a tuple of three.

    Attributes:
        missing: Parameters of the model without an entry.
        unexpected: Entries without a parameter.
        mismatched: Entries whose shape does not fit, left out by ``mismatched="skip"``.
        matched: What was loaded: for each name of the model the names, in the state dict or file, that it came from.
        ignored: Entries that the model has no parameter for and that were left out: known buffers, and what ``ignore``
            names.
        root: The part of the file that was loaded, of one that holds several; else ``""``.
        notes: What else is to be said, in sentences.
        way_back: What :func:`lazymods.export_torch` needs to undo the load.
    """

    def __new__(
        cls,
        missing: list[str],
        unexpected: list[str],
        mismatched: list[str],
        matched: Mapping[str, tuple[str, ...]] | None = None,
    ) -> LoadResult:
        """Make a result; only the three lists are in the tuple."""
        self = super().__new__(cls, missing, unexpected, mismatched)
        self.matched = dict(matched or {})
        self.ignored = []
        self.root = ""
        self.notes = []
        self.way_back = None
        return self

    matched: dict[str, tuple[str, ...]]
    ignored: list[str]
    root: str
    notes: list[str]
    way_back: Any

    @property
    def missing_keys(self) -> list[str]:
        """``missing``, by PyTorch's name."""
        return self.missing

    @property
    def unexpected_keys(self) -> list[str]:
        """``unexpected``, by PyTorch's name."""
        return self.unexpected

    def __repr__(self) -> str:
        """Say that all matched, or list what did not, and what else there is to say."""
        notes = "".join(f"; {note}" for note in self.notes)
        if not any(self):
            return f"<All keys matched successfully{notes}>"
        lists = f"missing={self.missing}, unexpected={self.unexpected}, mismatched={self.mismatched}"
        return f"LoadResult({lists}{notes})"
