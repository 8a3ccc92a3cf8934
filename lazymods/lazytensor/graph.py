"""The graph of what was recorded: cells that hold values, nodes that compute them, and programs made of nodes.

A :class:`Cell` is a value, known or not. A :class:`Node` is one operation on cells, whose :class:`Kind` says which. A
:class:`Graph` numbers nodes as they come, so that it is told from others by its structure alone, however and wherever
it was recorded. This :class:`Structure` is what is compiled; it holds no array.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from lazymods import _compat_abstract
from lazymods import _compat_tracing as tracing


class Cell:
    """A value of a recording.

    Attributes:
        aval: Shape, dtype and weak type.
        value: The value; None until it is known.
        held: Whether Python can still ask for the value.
    """

    __slots__ = ("aval", "held", "value")  # and not its node: a cycle would be left to the garbage collector

    def __init__(self, aval: Any, value: Any = None) -> None:
        self.aval = aval
        self.value = value
        self.held = False


class Kind:
    """What an operation does: two that do the same, on operands of the same types, have one kind.

    Attributes:
        primitive: The operation.
        params: Its parameters.
        settings: Those of jax in which it was recorded.
        operands: The avals of its operands.
        results: The avals of its results.
        effects: Whether it does more than to compute: then it runs once, in its turn, even if no result is used.
    """

    __slots__ = ("__weakref__", "effects", "operands", "params", "primitive", "results", "settings")

    def __init__(self, primitive: Any, params: dict[str, Any], settings: Any, operands: tuple[Any, ...]) -> None:
        self.primitive = primitive
        self.params = params
        self.settings = settings
        self.operands = operands
        results, effects = _compat_abstract.abstract(primitive, operands, params)
        self.results = tuple(results)
        self.effects = bool(effects)

    @property
    def name(self) -> str:
        """The name of the operation; of a jitted function its own."""
        return str(self.params.get("name", self.primitive.name))

    def __str__(self) -> str:
        """Render as ``sin(f32[8]) -> f32[8]``."""
        operands, results = (", ".join(map(show, avals)) for avals in (self.operands, self.results))
        return f"{self.name}({operands}) -> {results}"


def show(aval: Any) -> str:
    """Name a type as JAX does: ``f32[8]``."""
    return aval.str_short(short_dtypes=True)


class Node:
    """One operation, the cells that it takes, and those that it gives."""

    __slots__ = ("inputs", "kind", "outputs")

    def __init__(self, kind: Kind, inputs: list[Cell]) -> None:
        self.kind = kind
        self.inputs = inputs
        self.outputs = [Cell(aval) for aval in kind.results]


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


# ---------------------------------------------------------------- what makes two operations the same

_kinds: weakref.WeakValueDictionary[Any, Kind] = weakref.WeakValueDictionary()


@functools.lru_cache(maxsize=1 << 13, typed=True)
def _kind(primitive: Any, settings: Any, operands: tuple[Any, ...], /, **params: Any) -> Kind:
    key = (primitive, settings, operands, _params_key(params))
    known = _kinds.get(key)
    return known or _kinds.setdefault(key, Kind(primitive, params, settings, operands))


def kind_of(primitive: Any, operands: tuple[Any, ...], params: dict[str, Any], settings: Any) -> Kind:
    """Return the kind of an operation.

    Args:
        primitive: The operation.
        operands: The avals of its operands.
        params: Its parameters.
        settings: Those of jax now.

    Raises:
        TypeError: The operands do not fit; this and others are those of the operation itself.
    """
    with contextlib.suppress(TypeError):  # a parameter that has no hash, or what is wrong with the operands
        return _kind(primitive, settings, operands, **params)
    return _kind.__wrapped__(primitive, settings, operands, **params)


# What tells jax how to differentiate, which is over when an operation has come down to a recording.
_DERIVATIVES = frozenset({"jvp_jaxpr_fun", "jvp_jaxpr_thunk", "fwd_jaxpr_thunk", "bwd", "out_trees", "symbolic_zeros"})


class _Key:
    """A tuple whose hash is computed once."""

    __slots__ = ("_hash", "parts")

    def __init__(self, parts: tuple[Any, ...]) -> None:
        self.parts = parts
        self._hash = hash(parts)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, _Key) and self._hash == other._hash and self.parts == other.parts


class _Identity:
    """Anything else: the same only as itself."""

    __slots__ = ("thing",)

    def __init__(self, thing: Any) -> None:
        self.thing = thing

    def __hash__(self) -> int:
        return id(self.thing)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self.thing is other.thing


_jaxprs: weakref.WeakKeyDictionary[Any, _Key] = weakref.WeakKeyDictionary()


def _key(value: Any) -> Any:
    """Return what stands for a parameter of an operation: equal for two that mean the same."""
    if value is None or isinstance(value, (str, bool, int, np.dtype, type)):
        return (type(value), value)
    if isinstance(value, (float, complex, np.generic, np.ndarray)):
        array = np.asarray(value)
        return (type(value), array.shape, array.dtype, array.tobytes())
    if isinstance(value, dict):
        return (dict, tuple((name, _key(v)) for name, v in value.items()))
    if type(value) in (tuple, list):
        return (type(value), tuple(map(_key, value)))
    if tracing.is_jaxpr(value):
        return _jaxpr_key(value)
    try:
        hash(value)
    except TypeError:
        return _Identity(value)
    return (type(value), value)


def _params_key(params: dict[str, Any]) -> tuple[Any, ...]:
    return tuple([(name, _key(value)) for name, value in params.items() if name not in _DERIVATIVES])


def _jaxpr_key(jaxpr: Any) -> _Key:
    """Return what stands for a jaxpr: its structure. jax makes a new one for every fresh closure."""
    known = _jaxprs.get(jaxpr)
    if known is not None:
        return known
    inner, consts = tracing.open_jaxpr(jaxpr)
    numbers: dict[Any, int] = {}

    def number(variables: Iterable[Any]) -> tuple[Any, ...]:
        return tuple([(numbers.setdefault(v, len(numbers)), v.aval) for v in variables])

    def operand(atom: Any) -> Any:
        return numbers[atom] if atom in numbers else number([atom])

    lines: list[Any] = [number(inner.constvars), number(inner.invars), tuple(map(_Identity, consts))]
    for eqn in inner.eqns:
        operands = tuple([(*_key(a.val), a.aval) if hasattr(a, "val") else operand(a) for a in eqn.invars])
        lines.append((eqn.primitive, _params_key(eqn.params), eqn.ctx, operands, number(eqn.outvars)))
    lines.append(tuple([(*_key(a.val), a.aval) if hasattr(a, "val") else operand(a) for a in inner.outvars]))
    key = _jaxprs[jaxpr] = _Key(tuple(lines))
    return key


# ---------------------------------------------------------------- graphs


class Baked:
    """An operand that is part of a program."""

    __slots__ = ("key", "value")

    def __init__(self, value: Any) -> None:
        self.value = value
        self.key = _key(value)

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Baked) and self.key == other.key


_PACK = 1 << 40  # places of numbers are multiples of this, and their index in the pack


class Graph:
    """Nodes, numbered as they come.

    Args:
        fixed: Whether the structure is to serve other arrays: then each cell is an operand of its own, and numbers are
            part of the structure. Else an array that several cells hold is one operand, and numbers come in packs: one
            numpy array for those of a type, since every argument of a program costs a microsecond.

    Attributes:
        nodes: The nodes, in order.
        inputs: The cells of the arrays that they take, in order.
    """

    def __init__(self, *, fixed: bool = False) -> None:
        self.nodes: list[Node] = []
        self.inputs: list[Cell] = []
        self._fixed = fixed
        self._lines: list[Any] = []
        self._places: dict[Cell, Any] = {}
        self._arrays: dict[int, int] = {}  # places, by id
        self._packs: dict[Any, tuple[int, list[Any]]] = {}  # where the places of a type start, and the numbers
        self._made = 0

    def add(self, node: Node) -> None:
        """Add a node; what it takes has a value, or was made by a node that was added before."""
        places = self._places
        operands = [places[cell] if cell in places else self._place(cell) for cell in node.inputs]
        self.nodes.append(node)
        self._lines.append((node.kind, *operands))
        made = self._made
        for cell in node.outputs:
            places[cell] = made
            made += 1
        self._made = made

    def _place(self, cell: Cell) -> Any:
        value = cell.value
        if not tracing.is_number(value):
            place: Any = self._arrays.setdefault(id(cell if self._fixed else value), ~len(self.inputs))
            if place == ~len(self.inputs):
                self.inputs.append(cell)
        elif self._fixed:
            place = Baked(value)
        else:
            start, pack = self._packs.setdefault(cell.aval, (_PACK * (1 + len(self._packs)), []))
            place = start + len(pack)
            pack.append(value)
        self._places[cell] = place
        return place

    def packs(self) -> list[Any]:
        """Return the numbers, as one numpy array for each type."""
        with np.errstate(over="ignore"):  # a number that is too large is infinite, as in an operation of jax
            return [np.array(pack, aval.dtype) for aval, (_, pack) in self._packs.items()]

    def places(self, cells: Iterable[Cell]) -> tuple[int, ...]:
        """Return the numbers of some results."""
        return tuple([self._places[cell] for cell in cells])

    def structure(self) -> Structure:
        """Return what tells the graph from others."""
        return Structure(_Key(tuple(self._lines)), tuple(self._packs))


class Structure(NamedTuple):
    """What a graph does, apart from values: equal for graphs that do the same.

    Attributes:
        lines: Each operation's kind and where its operands are.
        packs: The types of the packs of numbers.
    """

    lines: _Key
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
        return tuple([n for n, (used, (kind, *_)) in enumerate(lines) if used and "callback" in kind.primitive.name])

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
        if tracing.aval_of(value) != aval:
            raise TypeError(f"a program of {aval} was called with {tracing.aval_of(value)}")
        return value

    for wanted, (kind, *operands) in zip(structure.needed(results), structure.lines.parts, strict=True):
        if wanted:
            values = [at(place, aval) for place, aval in zip(operands, kind.operands, strict=True)]
            made += tracing.bind(kind.primitive, values, kind.params, kind.settings.context)
        else:
            made += [None] * len(kind.results)
    return [made[place] for place in results]


_shared: weakref.WeakValueDictionary[Any, Any] = weakref.WeakValueDictionary()


def compiled(structure: Structure, results: Sequence[int]) -> Any:
    """Return a jitted function: the same for the same structure and results, as long as anyone holds it."""
    function = _shared.get((structure, results))
    if function is None:
        function = _shared.setdefault((structure, results), jax.jit(structure.function(results)))
    return function
