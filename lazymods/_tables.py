"""How every report is shown: as plain text, in colour where rich prints, and as HTML that fits a light and a dark page.

A report says what is in its table (:class:`Table`) and inherits the ways of showing it (:class:`Shown`). ``print`` and
``str`` give plain text, wherever it goes. ``rich.print``, a console of rich and IPython in a terminal show colours;
rich leaves them out where there is no terminal, and where ``NO_COLOR`` is set.
"""

from __future__ import annotations

import dataclasses
import html
import itertools
import re
import shutil
import sys
import textwrap
from collections.abc import Collection, Iterator, Sequence
from typing import Any

WIDTH = 100  # columns, where there is no terminal
_GAP = 2  # columns between two cells
_TEXT = "text-align:left;padding:.15em .8em .15em 0;vertical-align:top;white-space:pre-line"
_WHOLE = "white-space:pre;"  # lines stay whole, and those of the same thing beside each other
_RIGHT = f"text-align:right;{_WHOLE}"
_LINE = "border-bottom:1px solid rgba(128,128,128,.45)"
_MARK = "border-left:3px solid #d97706;padding-left:.5em"  # seen on white and on black


@dataclasses.dataclass(frozen=True)
class Table:
    """What a report shows.

    Attributes:
        heads: The heads of the columns.
        rows: The cells, which may have several lines.
        numbers: The heads of the columns that are aligned to the right.
        folded: The heads of the columns that may be folded, in the order in which they are, and to what width. Where
            one comes again, names in it may be folded after an underscore, too.
        together: The heads of the columns whose cells have a line for each of the same things.
        marked: The numbers of the rows that stand out.
        before: Lines above the table.
        totals: A line below it, in parts that are divided by semicolons, between which it may be folded.
        after: Lines below that.
    """

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: Collection[str] = ()
    folded: Sequence[tuple[str, int]] = ()
    together: Collection[str] = ()
    marked: Collection[int] = ()
    before: Sequence[str] = ()
    totals: str = ""
    after: Sequence[str] = ()

    def text(self, width: int | None = None) -> str:
        """Return plain text, as wide as asked for; None: as the terminal, or 100 columns where there is none."""
        width = columns() if width is None else width
        lines = (line for line, _ in self._lines(width))
        return "\n".join([*self.before, *lines, *_folded(self.totals, width), *self.after])

    def rich(self, width: int) -> Any:
        """Return the same text for rich: heads in bold, marked rows in colour, what is around in grey."""
        from rich.text import Text

        styles = {None: "bold", True: "yellow", False: ""}
        lines = [Text(line, style="dim") for line in self.before]
        lines += [Text(line, style=styles[mark]) for line, mark in self._lines(width)]
        lines += [Text(line, style="dim") for line in (*_folded(self.totals, width), *self.after)]
        return Text("\n", no_wrap=False).join(lines)

    def html(self) -> str:
        """Return HTML: colours of the page, and a bar beside marked rows."""
        sides = [_RIGHT if head in self.numbers else _WHOLE if head in self.together else "" for head in self.heads]
        head = "".join(
            f'<th style="{_TEXT};{_LINE};{side}">{html.escape(name)}</th>'
            for name, side in zip(self.heads, sides, strict=True)
        )
        body = "".join(self._html_row(row, number in self.marked, sides) for number, row in enumerate(self.rows))
        above, below = (
            "".join(f'<p style="margin:.4em 0">{html.escape(line)}</p>' for line in lines if line)
            for lines in (self.before, (self.totals, *self.after))
        )
        style = "border-collapse:collapse;font-family:monospace;background:transparent"
        table = f'<table style="{style}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
        return f'<div style="overflow-x:auto">{above}{table}{below}</div>'

    def _html_row(self, row: Sequence[str], is_marked: bool, sides: Sequence[str]) -> str:
        marks = [_MARK if is_marked and not number else "" for number in range(len(row))]
        cells = (
            f'<td style="{_TEXT};{side}{mark}">{html.escape(cell).replace(chr(10), "<br>")}</td>'
            for cell, side, mark in zip(row, sides, marks, strict=True)
        )
        return f'<tr style="background:transparent">{"".join(cells)}</tr>'

    def _lines(self, width: int) -> Iterator[tuple[str, bool | None]]:
        """Yield the lines of heads and rows; of the former with None, of the latter with whether they stand out."""
        widths = self._widths(width)
        for number, cells in enumerate((self.heads, *self.rows), -1):
            for line in self._row(cells, widths):
                yield line, None if number < 0 else number in self.marked

    def _widths(self, room: int) -> list[int]:
        widths = [max([len(head), *(_width(row[i]) for row in self.rows)]) for i, head in enumerate(self.heads)]
        for number, (head, least) in enumerate(self.folded):
            if head in self.heads:
                i = list(self.heads).index(head)
                again = head in [known for known, _ in self.folded[:number]]
                words = (len(word) for row in self.rows for word in _pieces(row[i], finer=again))
                too_wide = sum(widths) + _GAP * (len(widths) - 1) - room
                widths[i] = min(widths[i], max(least, *words, widths[i] - max(too_wide, 0)))
        return widths

    def _row(self, cells: Sequence[str], widths: Sequence[int]) -> Iterator[str]:
        """Write the cells of a row under each other's heads, in as many lines as the highest has."""
        found = [
            [_wrapped(line, width) for line in cell.split("\n")] for cell, width in zip(cells, widths, strict=True)
        ]
        same = [lines for lines, head in zip(found, self.heads, strict=True) if head in self.together]
        for parts in itertools.zip_longest(*same, fillvalue=[]):  # the lines of one thing begin beside each other
            for lines in parts:
                lines += [""] * (max(map(len, parts)) - len(lines))
        folded = [[part for parts in lines for part in parts] for lines in found]
        for parts in itertools.zip_longest(*folded, fillvalue=""):
            columns = zip(self.heads, parts, widths, strict=True)
            line = (" " * _GAP).join(p.rjust(w) if head in self.numbers else p.ljust(w) for head, p, w in columns)
            yield line.rstrip()


def columns() -> int:
    """Return how many columns there are: those of the terminal that stdout is, else 100."""
    return shutil.get_terminal_size().columns if _is_terminal() else WIDTH


def _is_terminal() -> bool:
    return sys.stdout is not None and sys.stdout.isatty()


def _pieces(line: str, *, finer: bool = False) -> list[str]:
    """Return what a cell may be folded between: words, a shape being one; of one word, what ends with a dot."""
    if " " in line or "\n" in line:
        return re.split(r"[ \n]+", _SHAPE.sub(_HARD, line))
    return re.split(r"(?<=[._])" if finer else r"(?<=\.)", line)


_SHAPE, _HARD = re.compile(r"(?<=[\d?]), (?=[\d?])"), ",\N{NO-BREAK SPACE}"


def _wrapped(line: str, width: int) -> list[str]:
    if len(line) <= width:
        return [line]
    if " " in line:
        lines = textwrap.wrap(_SHAPE.sub(_HARD, line), width, break_long_words=False, break_on_hyphens=False) or [""]
        return [part.replace("\N{NO-BREAK SPACE}", " ") for part in lines]
    out = [""]
    for piece in _pieces(line, finer=max(map(len, _pieces(line))) > width):
        if out[-1] and len(out[-1]) + len(piece) > width:
            out.append("")
        out[-1] += piece
    return out


def _folded(line: str, width: int) -> list[str]:
    """Fold a line of parts: after a semicolon, and a part that is too long between words."""
    out = [""] if line else []
    for part in line.split("; ") if line else ():
        piece = part if not out[-1] else f"; {part}"
        if out[-1] and len(out[-1]) + len(piece) + 1 > width:
            out[-1] += ";"
            out.append(f"  {part}")
        else:
            out[-1] += piece
    return [short for long in out for short in textwrap.wrap(long, width, **_HANGING)]


_HANGING: Any = {"subsequent_indent": "    ", "break_long_words": False, "drop_whitespace": True}


def _width(cell: str) -> int:
    return max(len(line) for line in cell.split("\n"))


class Shown:
    """Shows what :meth:`_table` returns."""

    def _table(self) -> Table:
        raise NotImplementedError

    def __str__(self) -> str:
        """Show the table as plain text."""
        return self._table().text()

    __repr__ = __str__

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        """Show the table in colour, as wide as the console."""
        yield self._table().rich(options.max_width)

    def _repr_html_(self) -> str:
        return self._table().html()

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Show it in IPython: in colour in a terminal, plain in the text of a notebook."""
        if not _is_terminal():
            printer.text(str(self))
            return
        from rich.console import Console

        console = Console(width=columns())
        with console.capture() as capture:
            console.print(self)
        printer.text(capture.get().rstrip("\n"))
