"""What every drawing in the language of Graphviz is made of: boxes, ellipses, arrows."""

from __future__ import annotations

import html
import shutil
import subprocess
from collections.abc import Iterable

_LONGEST = 60  # seconds that Graphviz may take for a picture


class Drawing(str):
    """The text of a graph; in a notebook its picture, if Graphviz is installed: a program called ``dot``."""

    __slots__ = ()

    def _repr_svg_(self) -> str | None:
        program = shutil.which("dot")
        if program is None:
            return None
        command = [program, "-Tsvg"]
        try:
            done = subprocess.run(command, input=self, capture_output=True, text=True, timeout=_LONGEST, check=True)
        except (OSError, subprocess.SubprocessError):  # it is too large a graph, or another dot: the text is shown
            return None
        return done.stdout[done.stdout.find("<svg") :]

    def _repr_html_(self) -> str:
        """Show the picture, or the text and how to see it as one."""
        picture = self._repr_svg_()
        if picture is not None:
            return f'<div style="background:white;overflow-x:auto">{picture}</div>'
        note = "as text, for want of Graphviz or as it is too large: paste it into a viewer of DOT, or install graphviz"
        return f"<p>{note}</p><pre style='overflow-x:auto'>{html.escape(self)}</pre>"


def digraph(lines: Iterable[str]) -> Drawing:
    """Return a whole graph: boxes, but for what is an :func:`ellipse`."""
    return Drawing("\n".join(["digraph program {", '  node [shape=box, fontname="monospace"];', *lines, "}"]))


def box(name: str, *label: str) -> str:
    """Return an operation, with some lines of text."""
    return f"{name} [label={_quoted(label)}];"


def ellipse(name: str, *label: str) -> str:
    """Return an input or an output, with some lines of text."""
    return f"{name} [shape=ellipse, label={_quoted(label)}];"


def arrow(start: str, end: str) -> str:
    """Return the way of a value from one to another."""
    return f"{start} -> {end};"


def _quoted(lines: Iterable[str]) -> str:
    text = "\\n".join(line.replace("\\", "\\\\").replace('"', '\\"') for line in lines)
    return f'"{text}"'
