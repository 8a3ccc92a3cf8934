"""The graph of what was recorded: cells that hold values, operations that compute them, and programs made of those.

A :class:`Cell` is a value, known or not. A :class:`Graph` numbers operations as they come, so that it is told from
others by its structure alone, however and wherever it was recorded; a :class:`Node` is one of them, to look at. What is
compiled is a :class:`Structure`, which holds no array.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from lazymods._compat import tracing
from lazymods._recording.kinds import Key, OperationKind, key_of


class Cell:
    """A value of a recording.

    Attributes:
        aval: Shape, dtype and weak type.
        value: The value; None until it is known.
        held: Whether Python can still ask for the value.
        plain: In check mode, until both are compared: what executing the operation gave.
    """

    __slots__ = ("aval", "held", "plain", "value")  # and not its node: a cycle would be left to the garbage collector

    def __init__(self, aval: Any, value: Any = None) -> None:
        self.aval: Any = aval
        self.value: Any = value
        self.held: bool = False
        self.plain: Any = None


class Node:
    """One operation, the cells that it takes, and those that it gives."""

    __slots__ = ("inputs", "kind", "outputs")

    def __init__(self, kind: OperationKind, inputs: list[Cell], outputs: list[Cell] | None = None) -> None:
        self.kind: OperationKind = kind
        self.inputs: list[Cell] = inputs
        self.outputs: list[Cell] = [Cell(aval) for aval in kind.results] if outputs is None else outputs


def needed(nodes: Sequence[Node], wanted: Iterable[Cell], *, effects: bool = False) -> list[Node]:
    """Return, in their order, the nodes that some cells need.

    Args:
        nodes: All that were recorded and have not run, in order.
        wanted: The cells.
        effects: Whether the nodes with effects are needed in any case.
    """
    seen = set(wanted)
    found = []
    for node in reversed(nodes):
        if (effects and node.kind.effects) or not seen.isdisjoint(node.outputs):
            found.append(node)
            seen.update(node.inputs)
    return found[::-1]


class Baked:
    """An operand that is part of a program."""

    __slots__ = ("key", "value")

    def __init__(self, value: Any) -> None:
        self.value = value
        self.key = key_of(value)

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Baked) and self.key == other.key


_PACK = 1 << 40  # places of numbers are multiples of this, and their index in the pack


class Graph:
    """Operations, numbered as they come.

    What is recorded is kept in columns: a line an operation, and all their results in one list. A :class:`Node` is
    made of a line only where somebody asks for it, since an object more for each operation is a tenth of recording it.

    Args:
        fixed: Whether the structure is to serve other arrays: then each cell is an operand of its own, and numbers are
            part of the structure. Else an array that several cells hold is one operand, and numbers come in packs: one
            numpy array for those of a type, since every argument of a program costs a microsecond.

    Attributes:
        lines: The kind of each operation, and where its operands are.
        made: The results of the operations, in order.
        inputs: The cells of the arrays that they take, in order.
        places: Where each cell is.
        pools: By type, the place of the first number and all numbers.
        effects: Whether one of them does more than to compute.
    """

    def __init__(self, *, fixed: bool = False) -> None:
        self.lines: list[tuple[Any, ...]] = []
        self.made: list[Cell] = []
        self.inputs: list[Cell] = []
        self.places: dict[Cell, Any] = {}
        self.pools: dict[Any, tuple[int, list[Any]]] = {}
        self.effects: bool = False
        self._fixed = fixed
        self._arrays: dict[int, int] = {}  # places, by id
        self._numbers: dict[Any, Cell] = {}  # by place, as far as they have one
        self._nodes: list[Node] = []  # those of the first lines
        self._in_nodes = 0  # how many results those have

    def place(self, cell: Cell) -> Any:
        """Return where a cell is that has a value, or whose operation was added before."""
        place = self.places.get(cell)
        if place is None:
            place = self.places[cell] = self.place_of_value(cell.value, cell.aval, cell)
        return place

    def add(self, node: Node) -> None:
        """Add a node."""
        self.lines.append((node.kind, *map(self.place, node.inputs)))
        for cell in node.outputs:
            self.places[cell] = len(self.made)
            self.made.append(cell)
        self.effects = self.effects or node.kind.effects

    def place_of_value(self, value: Any, aval: Any, cell: Cell | None = None) -> Any:
        """Return where an array or a number is, which may be the value of a cell."""
        if type(value) not in tracing.NUMBERS and not tracing.is_number(value):
            cell = cell or Cell(aval, value)
            key = cell if self._fixed or value is None else value  # cells whose values are computed now differ
            place = self._arrays.setdefault(id(key), ~len(self.inputs))
            if place == ~len(self.inputs):
                self.inputs.append(cell)
            return place
        if self._fixed:
            return Baked(value)
        start, numbers = self.pools.setdefault(aval, (_PACK * (1 + len(self.pools)), []))
        place = start + len(numbers)
        numbers.append(np.asarray(value)[()] if isinstance(value, np.ndarray) else value)  # numpy packs no arrays
        if cell is not None:
            self._numbers[place] = cell
        return place

    @property
    def nodes(self) -> list[Node]:
        """The operations as nodes, in order: the same ones when asked again."""
        for kind, *places in self.lines[len(self._nodes) :]:
            end = self._in_nodes + len(kind.results)
            inputs = list(map(self._at, places, kind.operands))
            self._nodes.append(Node(kind, inputs, self.made[self._in_nodes : end]))
            self._in_nodes = end
        return self._nodes

    def _at(self, place: Any, aval: Any) -> Cell:
        if not isinstance(place, Baked) and place < _PACK:
            return self.made[place] if place >= 0 else self.inputs[~place]
        if place not in self._numbers:
            value = place.value if isinstance(place, Baked) else self.pools[aval][1][place % _PACK]
            self._numbers[place] = Cell(aval, value)
        return self._numbers[place]

    def packs(self) -> list[Any]:
        """Return the numbers, as one numpy array for each type."""
        with np.errstate(over="ignore"):  # a number that is too large is infinite, as in an operation of jax
            return [np.array(pack, aval.dtype) for aval, (_, pack) in self.pools.items()]

    def places_of(self, cells: Iterable[Cell]) -> tuple[int, ...]:
        """Return the numbers of some results."""
        return tuple([self.places[cell] for cell in cells])

    def structure(self) -> Structure:
        """Return what tells the graph from others."""
        return Structure(Key(tuple(self.lines)), tuple(self.pools))


def graph_of(nodes: Sequence[Node]) -> Graph:
    """Return some nodes as a graph of their own."""
    graph = Graph()
    for node in nodes:
        graph.add(node)
    return graph


class Structure(NamedTuple):
    """What a graph does, apart from values: equal for graphs that do the same.

    Attributes:
        lines: Each operation's kind and where its operands are.
        packs: The types of the packs of numbers.
    """

    lines: Key
    packs: tuple[Any, ...]

    def needed(self, results: Iterable[int]) -> list[bool]:
        """Return which of its operations some results need; those with effects are always needed."""
        last = list(itertools.accumulate(len(kind.results) for kind, *_ in self.lines.parts))
        wanted = [kind.effects for kind, *_ in self.lines.parts]
        for place in results:
            wanted[bisect.bisect_right(last, place)] = True
        for n, (_, *operands) in reversed(list(enumerate(self.lines.parts))):
            for place in operands if wanted[n] else ():
                if isinstance(place, int) and 0 <= place < _PACK:
                    wanted[bisect.bisect_right(last, place)] = True
        return wanted

    def calls(self, results: Iterable[int]) -> tuple[int, ...]:
        """Return which of the operations that some results need call Python."""
        lines = zip(self.needed(results), self.lines.parts, strict=True)
        return tuple([n for n, (used, (kind, *_)) in enumerate(lines) if used and kind.calls_python])

    def difference(self, other: Structure) -> str:
        """Say where it departs from another one."""
        for (mine, *_), (others, *_) in zip(self.lines.parts, other.lines.parts, strict=False):
            if mine is not others:
                return f"{others} became {mine}"
        if len(self.lines.parts) != len(other.lines.parts):
            return f"{len(other.lines.parts)} operations became {len(self.lines.parts)}"
        return "other results are wanted, or other arrays are the same"

    def function(self, results: Sequence[int]) -> Callable[[Sequence[Any], Sequence[Any]], list[Any]]:
        """Return it as a function of arrays and packs that gives some results, for ``jax.jit`` to compile."""
        return functools.partial(_run, self, results)


def _run(structure: Structure, results: Sequence[int], arrays: Sequence[Any], packs: Sequence[Any]) -> list[Any]:
    made: list[Any] = []

    def at(place: Any, aval: Any) -> Any:
        if isinstance(place, Baked):
            return place.value
        if place >= _PACK:
            value = packs[place // _PACK - 1][place % _PACK]
            weak = jax.lax.convert_element_type_p.bind  # public functions make no weak types
            return weak(value, new_dtype=aval.dtype, weak_type=True, sharding=None) if aval.weak_type else value
        value = made[place] if place >= 0 else arrays[~place]
        if not tracing.fits(value, aval):
            raise TypeError(f"a program of {aval} was called with {tracing.aval_of(value)}")
        return value

    for wanted, (kind, *operands) in zip(structure.needed(results), structure.lines.parts, strict=True):
        if wanted:
            with kind.settings.context.manager:  # in it numbers have the mesh that the operation has
                values = [at(place, aval) for place, aval in zip(operands, kind.operands, strict=True)]
            made += tracing.bind(kind.primitive, values, kind.params, kind.settings.context)
        else:
            made += [None] * len(kind.results)
    return [made[place] for place in results]


_shared: weakref.WeakValueDictionary[Any, Any] = weakref.WeakValueDictionary()


def compiled(structure: Structure, results: Sequence[int]) -> Any:
    """Return a jitted function: the same for the same structure and results, as long as anyone holds it.

    One that calls Python waits for its results: if that fails while the program runs, they have no values.
    """
    function = _shared.get((structure, results))
    if function is None:
        function = jax.jit(structure.function(results))
        if structure.calls(results):
            function = functools.partial(_run_and_wait, function)
        function = _shared.setdefault((structure, results), function)
    return function


def _run_and_wait(function: Any, arrays: Sequence[Any], packs: Sequence[Any]) -> Any:
    return tracing.waited(function(arrays, packs))
