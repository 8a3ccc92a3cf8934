"""Graphs to look at: as text, as a DOT graph, as the HLO that XLA would get. They show no data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax

from lazymods._compat import tracing
from lazymods._errors import LazyError, Problem
from lazymods._frames import entry
from lazymods._recording.dot import arrow, box, digraph, ellipse
from lazymods._recording.graph import Cell, Graph, Node, Structure, graph_of, needed
from lazymods._recording.kinds import show
from lazymods.lazytensor.trace import LazyTensor


class GraphHash:
    """What a graph computes: equal for two graphs that compute the same from values of the same types."""

    __slots__ = ("_key",)

    def __init__(self, structure: Structure, results: tuple[int, ...]) -> None:
        self._key = (structure, results)

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GraphHash) and self._key == other._key

    def __repr__(self) -> str:
        return f"GraphHash({hash(self) & 0xFFFFFFFFFFFFFFFF:016x})"


def _needed(tree: Any) -> tuple[Graph, list[Cell]]:
    cells = [x.cell for x in jax.tree.leaves(tree) if isinstance(x, LazyTensor) and x.cell.value is None]
    nodes: dict[Node, None] = {}
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, LazyTensor):
            nodes.update(dict.fromkeys(needed(leaf.recording.pending, cells)))
    return graph_of(list(nodes)), cells


@entry
def graph_hash(tree: Any) -> GraphHash:
    """Return what the pending lazy tensors of a pytree compute: hashable, compared by ``==``.

    Values do not count, neither those of arrays nor those of numbers; operations, their order and parameters, and the
    types of operands do. Nothing is computed.

    Example:
        >>> import jax.numpy as jnp
        >>> import lazymods as lm
        >>> with lm.lazytensor.lazy():
        ...     a, b = jnp.ones(3) * 2, jnp.zeros(3) * 5
        ...     lm.lazytensor.graph_hash(a) == lm.lazytensor.graph_hash(b)
        True
    """
    graph, cells = _needed(tree)
    return GraphHash(graph.structure(), graph.places_of(cells))


@entry
def dump(tree: Any, format: str = "text") -> str:
    """Return the graph that the pending lazy tensors of a pytree need. Nothing is computed.

    Args:
        tree: A pytree.
        format: ``"text"``, one line an operation; ``"dot"``, for Graphviz; ``"hlo"``, as XLA gets it.

    Raises:
        LazyError: The format is another one.

    Example:
        >>> import jax.numpy as jnp
        >>> import lazymods as lm
        >>> x = jnp.ones(3)
        >>> with lm.lazytensor.lazy():
        ...     print(lm.lazytensor.dump(jnp.sin(x) * 2.0))
        %0 = sin(array: f32[3]) -> f32[3]
        %1 = multiply(%0, number: f32[]) -> f32[3]
        return %1
    """
    graph, cells = _needed(tree)
    if format == "text":
        return _text(graph.nodes, cells)
    if format == "dot":
        return digraph(_lines(graph.nodes, cells))
    if format == "hlo":
        arrays = [jax.ShapeDtypeStruct(c.aval.shape, c.aval.dtype, weak_type=c.aval.weak_type) for c in graph.inputs]
        program = jax.jit(graph.structure().function(graph.places_of(cells)))
        module: Any = program.lower(arrays, graph.packs()).compiler_ir("hlo")
        return module.as_hlo_text()
    known, write = 'one of "text", "dot" and "hlo"', 'lm.lazytensor.dump(tree, format="text")'
    raise LazyError(Problem("lm.lazytensor.dump", f"format={format!r}", known, write))


def _names(nodes: Sequence[Node]) -> dict[Cell, str]:
    return {cell: f"%{n}" for n, cell in enumerate(cell for node in nodes for cell in node.outputs)}


def _operand(cell: Cell, names: dict[Cell, str]) -> str:
    if cell in names:
        return names[cell]
    return f"number: {show(cell.aval)}" if tracing.is_number(cell.value) else f"array: {show(cell.aval)}"


def _text(nodes: Sequence[Node], cells: Sequence[Cell]) -> str:
    names, lines = _names(nodes), []
    for node in nodes:
        operands = ", ".join(_operand(c, names) for c in node.inputs)
        made = ", ".join(names[c] for c in node.outputs)
        lines.append(f"{made} = {node.kind.name}({operands}) -> {', '.join(show(c.aval) for c in node.outputs)}")
    return "\n".join([*lines, "return " + ", ".join(names[c] for c in cells)])


def _lines(nodes: Sequence[Node], cells: Sequence[Cell]) -> Iterator[str]:
    """Draw operations, each with the arrays and numbers that it takes, and the results."""
    numbers = {cell: n for n, node in enumerate(nodes) for cell in node.outputs}
    for n, node in enumerate(nodes):
        yield "  " + box(f"n{n}", node.kind.name, ", ".join(show(c.aval) for c in node.outputs))
        for k, cell in enumerate(node.inputs):
            if cell not in numbers:
                yield "  " + ellipse(f"i{n}_{k}", _operand(cell, {}))
            yield "  " + arrow(f"n{numbers[cell]}" if cell in numbers else f"i{n}_{k}", f"n{n}")
    for k, cell in enumerate(cells):
        yield "  " + ellipse(f"out{k}", f"result {k}")
        yield "  " + arrow(f"n{numbers[cell]}", f"out{k}")
