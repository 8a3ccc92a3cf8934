"""What every drawing in the language of Graphviz is made of: boxes, ellipses, arrows."""

from __future__ import annotations

from collections.abc import Iterable


def digraph(lines: Iterable[str]) -> str:
    """Return a whole graph: boxes, but for what is an :func:`ellipse`."""
    return "\n".join(["digraph program {", '  node [shape=box, fontname="monospace"];', *lines, "}"])


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
