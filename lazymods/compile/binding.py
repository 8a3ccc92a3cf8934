"""What a call passes to a program: from arguments and models to one list of leaves.

The values of a call stand in this order: arrays of the arguments; of each nnx object its Variables, then its other
arrays; Variables that no nnx object holds; arrays in objects and containers that are captured. A Variable that several
of them share is one leaf, and which ones do is part of the structure.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from lazymods._compat import jit as _compat_jit
from lazymods._initial.pending import PendingInit
from lazymods._objects.tokens import TokenKind, kind_of
from lazymods._objects.traced_state import TracedState, held_by, input_of
from lazymods.compile.arguments import Arguments
from lazymods.compile.captures import Captured
from lazymods.compile.guards import Graph, graph_of
from lazymods.compile.program import signature_of
from lazymods.compile.trace import Place, mark_of


class Binding:
    """The leaves of one call, and what they are the values of.

    Attributes:
        leaves: Arrays, in the order above; typed keys as their data.
        targets: Of each leaf that is no argument: the Variable or :class:`Place` that holds it.
        places: The numbers of these leaves' values among all values.
        impls: By number of a leaf: it is a typed key of that implementation.
        reach: What the function can reach.
        names: Of each root its graph's name.
        lazy: Whether something is uninitialized.
        executing: Whether no trace is running around the call.
        values: All values; a value that is shared is in it more than once.
        constants: Arrays that the function reaches as they are.
        captured: What the function reached besides its arguments.
        given: Returns the containers among the arguments, as they are.
        roots: nnx objects, in the order of their values.
        loose: Variables that no nnx object holds.
        is_simple: Whether all values but the arguments are those of Variables, each in one nnx object, and arrays that
            captured objects hold.
    """

    def __init__(self, arguments: Arguments, captured: Captured, executing: bool) -> None:
        roots = [*arguments.roots, *captured.roots]
        loose = [*arguments.variables, *captured.variables]
        self.graphs: list[Graph] = []
        self.roots = roots
        values: list[Any] = list(arguments.arrays)
        targets: list[Any] = []
        for root in roots:
            graph, held = graph_of(root, keep=executing)
            self.graphs.append(graph)
            values += held
            targets += graph.variables
            targets += [Place(*place) for place in graph.writers(root)]
        for variable in loose:
            values.append(variable.get_raw_value())
            targets.append(variable)
        for node, key in captured.places:
            values.append(input_of(held_by(node)[key]))
            targets.append(Place(node, key))
        self.inputs: int = len(arguments.arrays)
        self.names: tuple[int, ...] = tuple(g.name for g in self.graphs)
        self.lazy: bool = any(g.lazy for g in self.graphs)
        self.reach: list[Any] = [*arguments.roots, *arguments.variables, *captured.values]
        shared = self._share(values, targets)
        self.executing = executing
        self.values: list[Any] = values
        self.count: int = len(values)
        is_flat = not loose and not any(g.slots for g in self.graphs) and self.places == list(range(self.count))
        are_whole = all(type(v) is not tuple for v in values[self.count - len(captured.places) :])
        self.is_simple: bool = is_flat and are_whole and len(set(self.names)) == len(self.names)
        self._shared = shared
        self.constants: Any = captured.arrays
        self.captured = captured
        self._keys = (arguments.key, captured.key)
        self.given: Any = arguments.given
        self.loose = loose

    @property
    def key(self) -> Hashable:
        """The structure of everything, hashable."""
        return (*self._keys, tuple(g.key for g in self.graphs), TracedState(self.loose).key, self._shared)

    def quick_key(self, arguments: Arguments) -> Hashable:
        """Return what tells calls of the very same models apart, cheaper than :attr:`key`; None if nothing does."""
        if self.loose or self.lazy or not self.executing or len(set(self.names)) != len(self.names):
            return None
        shared = self._shared if self.captured.places else ()
        kinds = tuple(map(kind_of_input, arguments.arrays))
        return (*self._keys, self.names, kinds, shared, _compat_jit.PRNG_IMPL.value)

    def _share(self, values: list[Any], targets: list[Any]) -> Hashable:
        """Leave out values that are there already; return which those are."""
        first: dict[Any, int] = {}
        shared = []
        self.leaves: list[Any] = values[: self.inputs]
        self.targets: list[Any] = []
        self.places: list[int] = list(range(self.inputs))
        for number, target in enumerate(targets):
            mark = mark_of(target)
            if mark in first:
                shared.append((number, first[mark]))
                continue
            first[mark] = number
            value = values[self.inputs + number]
            if isinstance(value, PendingInit):
                continue
            self.targets.append(target)
            self.places.append(self.inputs + number)
            self.leaves.append(value)
        self.impls: dict[int, Any] = {}
        for number, leaf in enumerate(self.leaves):
            if type(leaf) is _compat_jit.KEY:
                self.leaves[number], self.impls[number] = _compat_jit.key_parts(leaf)
            elif type(leaf) is np.ndarray and not leaf.dtype.isnative:
                jax.typeof(leaf)  # raises: jax.jit itself refuses another byte order only while nothing is compiled
        roots: dict[int, int] = {}
        same_roots = tuple(roots.setdefault(id(r), i) for i, r in enumerate(self.roots))
        return (tuple(shared), same_roots, self._shared_nodes(), frozenset(self.impls.items()))

    def _shared_nodes(self) -> Hashable:
        """Which objects are below several roots."""
        if len(self.graphs) < 2:
            return ()
        first: dict[int, int] = {}
        number, shared = 0, []
        for graph, root in zip(self.graphs, self.roots, strict=True):
            for node in (root, *graph.nodes()):
                if first.setdefault(id(node), number) != number:
                    shared.append((number, first[id(node)]))
                number += 1
        return tuple(shared)

    def nodes(self) -> list[Any]:
        """Return the objects and containers that the function reaches otherwise than in pytrees of arguments."""
        found = [node for graph, root in zip(self.graphs, self.roots, strict=True) for node in (root, *graph.nodes())]
        return found + TracedState(v for v in self.captured.values if kind_of(v) is not TokenKind.NODE).nodes

    def check_given(self, changes: Sequence[tuple[int, Any]]) -> None:
        """Refuse a call that would have to change a container, by number, which it has in several places."""
        if changes:
            self.given().refuse_shared([number for number, _ in changes], self.nodes())

    def references(self) -> list[Any]:
        """Return the mutable arrays that the function can reach."""
        return [v for v in jax.tree.leaves([self.leaves, self.constants]) if _compat_jit.is_reference(v)]

    def signature(self) -> Hashable:
        """Return what else a program depends on: shapes, dtypes, shardings in types, and the settings of JAX."""
        return signature_of(self.leaves)

    def values_of_targets(self) -> list[Any]:
        """Return the value of each target as it is held, typed keys as such."""
        return [self.values[place] for place in self.places[self.inputs :]]

    def leaf_of(self, at: Mapping[int, int], number: int) -> Any:
        """Return the leaf that a program's body knows by a number; ``at`` are the numbers of its targets here."""
        return self.leaves[number if number < self.inputs else self.inputs + at[number - self.inputs]]

    def numbers_of(self, targets: Mapping[int, Any]) -> dict[int, int]:
        """Return which of this call's targets some Variables and places are."""
        known = {mark_of(t): n for n, t in enumerate(self.targets)}
        return {number: known[mark_of(t)] for number, t in targets.items()}


def kind_of_input(value: Any) -> Hashable:
    """Return the shape and dtype of an input, for arrays cheaper than ``jax.typeof``."""
    if type(value) is _compat_jit.ARRAY:
        return value.aval
    return type(value), jax.typeof(value)
