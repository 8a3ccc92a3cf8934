"""What a comparison has found, as data and as a table."""

from __future__ import annotations

import dataclasses

from lazymods._tables import Shown, Table

_BEFORE, _AFTER = 6, 3  # rows that are shown around the first that differs


@dataclasses.dataclass(frozen=True)
class ParityRow:
    """One call of a layer and of its counterpart.

    Attributes:
        path: The layer's dotted path in the model; '' for the model itself.
        layer: Its class.
        torch_path: The counterpart's name in the PyTorch module.
        torch_layer: The counterpart's class.
        call: The how-manieth call of the layer it is, from 0.
        shape: The shape of the layer's output, or of the first of its outputs, as in a jaxpr: ``f32[8,3]``.
        difference: The largest difference of two elements; infinite if the shapes don't fit.
        relative: The same, measured by PyTorch's largest element.
        agrees: Whether that is within the tolerance.
    """

    path: str
    layer: str
    torch_path: str
    torch_layer: str
    call: int
    shape: str
    difference: float
    relative: float
    agrees: bool

    @property
    def where(self) -> str:
        """The layer for a sentence: its path and class, and which of its calls it is, if not the first."""
        call = f", call {self.call + 1}" if self.call else ""
        return f"{self.path or 'the output'} ({self.layer}{call})"


@dataclasses.dataclass(frozen=True, repr=False)
class ParityReport(Shown):
    """A model beside the PyTorch module that it was ported from; prints as a table.

    Attributes:
        rows: A row for each call of each pair of layers, in PyTorch's order; the whole model's output comes last.
        first: The first row that differs, None if all agree.
        reason: Why it differs, as far as that can be told; '' if all agree.
        write: What to write; '' if all agree, or if that can't be told.
        notes: Settings of layers that are not PyTorch's, though no output may show it; which layers were not compared.
        tolerance: What a relative difference may be.
    """

    rows: tuple[ParityRow, ...]
    first: ParityRow | None
    reason: str
    write: str
    notes: tuple[str, ...]
    tolerance: float

    @property
    def agrees(self) -> bool:
        """Whether all outputs agree."""
        return self.first is None

    def _table(self) -> Table:
        """Show the first difference and why, or that there is none, above the table."""
        first = self.first
        if first is None:
            worst = max((row.relative for row in self.rows), default=0.0)
            lines = [f"all {len(self.rows)} outputs agree; the largest relative difference is {worst:.1e}"]
        else:
            before = sum(row.agrees for row in self.rows[: self.rows.index(first)])
            size = f"by {first.difference:.3g}, {first.relative:.1e} of PyTorch's largest value"
            if first.difference == float("inf"):
                size = "in shape, or in what is no number"
            lines = [f"{first.where} is the first that differs, after {before} that agree: {size}"]
            lines += [f"  why:    {self.reason}"] + ([f"  write:  {self.write}"] if self.write else [])
        notes = [f"note: {note}" for note in self.notes]
        at = len(self.rows) if first is None else self.rows.index(first)
        shown = self.rows if first is None else self.rows[max(0, at - _BEFORE) : at + _AFTER + 1]
        rows = [_cells(row) for row in shown]
        hidden = 0 if first is None else max(0, at - _BEFORE)
        left = len(self.rows) - hidden - len(shown)
        if hidden:
            rows.insert(0, (f"... {hidden} rows that agree", *[""] * (len(_HEADS) - 1)))
        after = [*([f"... {left} more rows"] if left else []), *([""] if notes else []), *notes]
        marked = [number for number, row in enumerate(rows) if row[-1]]
        return Table(_HEADS, rows, _NUMBERS, _FOLDED, marked=marked, before=[*lines, ""], after=after)


_HEADS = ("layer", "class", "PyTorch", "its class", "output", "difference", "relative", "")
_NUMBERS = ("difference", "relative")
_FOLDED = (("PyTorch", 20), ("layer", 20), ("PyTorch", 10), ("layer", 10))


def _cells(row: ParityRow) -> tuple[str, ...]:
    path = (row.path or "(output)") + (f" #{row.call + 1}" if row.call else "")
    sizes = (f"{row.difference:.1e}", f"{row.relative:.1e}")
    return (path, row.layer, row.torch_path, row.torch_layer, row.shape, *sizes, "" if row.agrees else "differs")
