"""Reading a constructor: which attributes, Variables and random draws it makes, without making any.

:func:`trace` runs a class's own constructor under ``jax.make_jaxpr`` with given sizes. The result, a
:class:`AbstractModule`, describes the object as a tree of descriptions and holds the program that computes each
Variable from the random keys. Nothing is allocated, and no initializer runs: a call ``init(key, shape, dtype)``
is recorded as one equation, ``lazy_init``, and a draw from ``rngs`` as another, ``lazy_fold``.
:meth:`AbstractModule.run` executes the equations that one Variable needs, one after the other and with the initializer
itself, and so gives the very bits that the constructor would have given.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer

from lazymods import _compat, _graph
from lazymods._errors import ConfigurationError, Problem, describe, short_dtype
from lazymods._graph import dotted
from lazymods._initial.stacking import Shape
from lazymods._layer.arguments import as_call
from lazymods._layer.recorded import RecordedInit, RecordedStream, draws_of, fold_p, init_p, is_initializer
from lazymods._objects.within import RUNNING, holds_tracer

Path = tuple[Any, ...]


# ---------------------------------------------------------------- descriptions


@dataclasses.dataclass(frozen=True)
class Static:
    """An attribute that is not data; ``value`` is copied if it can be changed in place."""

    value: Any

    @functools.cached_property
    def mutable(self) -> bool:
        """Whether the value can be changed in place, so that each object needs its own."""
        try:
            hash(self.value)
        except TypeError:
            return True
        return False

    def fresh(self) -> Any:
        """Return the value, a copy of its own if it is mutable."""
        return copy.deepcopy(self.value) if self.mutable else self.value


@dataclasses.dataclass(frozen=True)
class Slot:
    """A Variable, or a raw array if ``cls`` is None: the ``index``-th output of the program; ``weak``: of weak type."""

    index: int
    path: Path
    cls: type[nnx.Variable[Any]] | None
    shape: Shape
    dtype: Any
    metadata: Mapping[str, Any]
    weak: bool = False

    def as_asked(self, value: Any, dtype: Any) -> Any:
        """Return a value in the dtype that its placeholder has; if that is the slot's, the value's own stays.

        An initializer may return another dtype than it is asked for, and an explicit layer then holds what it returns.
        """
        return value if dtype is None or dtype in (self.dtype, value.dtype) else value.astype(dtype)


@dataclasses.dataclass(frozen=True)
class Node:
    """An nnx object: its class, its attributes in the order in which they were set, which of them are data."""

    cls: type
    attributes: Mapping[str, Any]
    data_names: Mapping[str, bool]

    @functools.cached_property
    def names(self) -> Any:
        """``data_names``, as the objects of this description share them."""
        return _compat.mapping_of_names(dict(self.data_names))

    def with_attributes(self, attributes: Mapping[str, Any]) -> Node:
        """Describe the same object with other values of its attributes."""
        other = Node(self.cls, attributes, self.data_names)
        other.__dict__["names"] = self.names  # made once
        return other


@dataclasses.dataclass(frozen=True)
class Held:
    """A Variable that holds no array, such as a counter of Python's: its class, value and metadata."""

    cls: type[nnx.Variable[Any]]
    value: Any
    metadata: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Container:
    """What holds data: a dict, list or tuple, or an object of a class that JAX knows as a pytree, with its treedef."""

    cls: type
    items: tuple[tuple[Any, Any], ...]
    tree: Any = None

    def of(self, values: Sequence[Any]) -> Any:
        """Return a container of this kind that holds these values."""
        if self.tree is not None:
            return self.tree.unflatten(values)
        if self.cls is dict:
            return {k: v for (k, _), v in zip(self.items, values, strict=True)}
        return self.cls(values)


@dataclasses.dataclass(frozen=True)
class Given:
    """What the caller handed to the constructor: an argument's name, or ``rngs.stream``, ``rngs.stream.key``."""

    argument: str


@dataclasses.dataclass(frozen=True)
class AbstractModule:
    """What a constructor makes at given sizes.

    Attributes:
        root: The description of the object.
        slots: Its Variables and raw arrays by path.
        program: Computes them from keys and counters, each as the output ``Slot.index``; the abstract modules of one
            trace
            share it.
        draws: How often each stream of ``rngs`` was drawn from, by name.
        values: The inferred arguments that it was read with.
    """

    root: Node
    slots: Mapping[Path, Slot]
    program: Any
    draws: Mapping[str, int]
    values: Mapping[str, Any]

    @functools.cached_property
    def producers(self) -> Mapping[Any, Any]:
        """The equation of the program that computes each variable."""
        return {v: equation for equation in self.program.jaxpr.eqns for v in equation.outvars}

    def producer_of(self, slot: Slot) -> Any:
        """Return the equation that computes a slot; None if nothing is computed."""
        variable = self.program.jaxpr.outvars[slot.index]
        return None if hasattr(variable, "val") else self.producers.get(variable)

    def source_of(self, slot: Slot) -> Any:
        """Return the equation of a slot that is one call of an initializer, or full of one value; else None."""
        equation = self.producer_of(slot)
        if equation is None or equation.primitive is init_p:
            return equation
        full = equation.primitive is jax.lax.broadcast_in_dim_p and np.shape(equation.invars[0].aval) == ()
        return equation if full and hasattr(equation.invars[0], "val") else None

    def inputs_of(self, slots: Sequence[Slot]) -> list[int]:
        """Return which of the keys and counters that were given to :func:`trace` some slots follow from."""
        jaxpr = self.program.jaxpr
        wanted = [jaxpr.outvars[s.index] for s in slots]
        live = {v for v in wanted if not hasattr(v, "val")}
        live.update(v for e in _needed(jaxpr.eqns, wanted) for v in _inputs_of(e))
        return [i for i, v in enumerate(jaxpr.invars) if v in live]

    def resized(self, root: Node, slots: Mapping[Path, Slot], values: Mapping[str, Any]) -> AbstractModule:
        """Describe what the constructor makes at other sizes, where each slot has a source (:meth:`source_of`)."""
        other = AbstractModule(root, slots, self.program, self.draws, values)
        other.__dict__["producers"] = self.producers  # made once
        return other

    def run(self, slots: Sequence[Slot], keys: Sequence[Any]) -> list[Any]:
        """Compute some of the slots, each equation in the current trace.

        Args:
            slots: Which ones.
            keys: Key and counter of each stream that was given to :func:`trace`, in its order.
        """
        jaxpr = self.program.jaxpr
        env: dict[Any, Any] = dict(zip(jaxpr.constvars, self.program.consts, strict=True))
        env |= zip(jaxpr.invars, keys, strict=True)

        def read(atom: Any) -> Any:
            return atom.val if hasattr(atom, "val") else env.get(atom)  # None: what is of no effect

        wanted = [jaxpr.outvars[s.index] for s in slots]
        shapes = {v: s.shape for v, s in zip(wanted, slots, strict=True) if not hasattr(v, "val")}
        arrays: dict[Any, Any] = {}  # what initializers returned, of whatever dtype, and of numpy if they say so
        for equation in _needed(jaxpr.eqns, wanted):
            _check_used(equation, arrays)
            out = _run_equation(equation, [read(v) for v in equation.invars], shapes.get(equation.outvars[0]))
            env.update(zip(equation.outvars, out, strict=True))
            if equation.primitive is init_p and isinstance(out[0], (np.ndarray, jax.Array)):
                arrays[equation.outvars[0]] = out[0]
        return [arrays[v] if not hasattr(v, "val") and v in arrays else jnp.asarray(read(v)) for v in wanted]


_CONSTANT = (jax.nn.initializers.zeros, jax.nn.initializers.ones)  # they take a key, and draw nothing


def _inputs_of(equation: Any) -> Sequence[Any]:
    """The variables that an equation computes from."""
    if equation.primitive is init_p and any(equation.params["call"] is c for c in _CONSTANT):
        return ()
    return [v for v in equation.invars if not hasattr(v, "val")]


def _needed(equations: Sequence[Any], wanted: Sequence[Any]) -> Iterator[Any]:
    """The equations that the wanted variables depend on, in order."""
    live = {v for v in wanted if not hasattr(v, "val")}
    keep = []
    for equation in reversed(equations):
        if any(v in live for v in equation.outvars):
            keep.append(equation)
            live.update(_inputs_of(equation))
    return reversed(keep)


def _check_used(equation: Any, arrays: Mapping[Any, Any]) -> None:
    """Refuse to compute on with what an initializer returned in another dtype: the program was read without it.

    Raises:
        ConfigurationError: If the equation does so.
    """
    for v in equation.invars:
        made = None if hasattr(v, "val") else arrays.get(v)
        if made is not None and made.dtype != v.aval.dtype:
            got = f"an initializer that returns {describe(made)}, from which the constructor computes a value"
            needed = f"the dtype that it is asked for, {short_dtype(v.aval.dtype)}"
            write = "return value.astype(dtype)  # in the initializer"
            raise ConfigurationError(Problem("a parameter", got, needed, write))


def _run_equation(equation: Any, inputs: list[Any], shape: Shape | None) -> Sequence[Any]:
    """Do an operation; ``shape`` is that of the slot that it makes, if it makes one."""
    sized = shape is not None and "shape" in equation.params
    params = equation.params | {"shape": shape} if sized else equation.params
    if equation.primitive is init_p:
        return [params["call"](inputs[0], params["shape"], params["dtype"])]
    if equation.primitive is fold_p:
        key, count = inputs
        return [jax.random.fold_in(key, count)]
    return _compat.bind_equation(equation, inputs, params)


# ---------------------------------------------------------------- tracing


def trace(
    cls: type,
    arguments: Mapping[str, Any],
    readings: Sequence[tuple[Mapping[str, Any], Callable[[Mapping[str, Any]], dict[str, Any]]]],
    modules: Mapping[str, Any],
    streams: Mapping[str, tuple[Any, Any, str]],
    rngs_name: str | None,
    originals: Mapping[int, Any] = MappingProxyType({}),
) -> list[AbstractModule]:
    """Run a constructor abstractly, at several sizes in one trace: half of what a trace costs is to begin one.

    Args:
        cls: The class.
        arguments: Its arguments by name, without rngs, modules and what is inferred.
        readings: For each run, the inferred arguments, and a function that is called with the modules inside the
            trace and returns what the constructor gets.
        modules: Its arguments that are modules; where the object holds one, the abstract module says :class:`Given`.
        streams: Avals of key and counter, and the tag, of every stream of rngs.
        rngs_name: The name of the argument that takes the rngs, None if it takes none.
        originals: By the id of a copy among the arguments: what the object holds in its place.

    Returns:
        An abstract module for each run; they share one program.

    Raises:
        Exception: Whatever the constructor raises.
    """
    found: list[tuple[Node, dict[Path, Slot], int]] = []

    def build(*leaves: Any) -> list[Any]:
        root = _compat.weak(_compat.current_trace())
        plain = {k: RecordedInit(v, root) if is_initializer(k, v) else v for k, v in arguments.items()}
        outputs: list[Any] = []
        for values, prepare in readings:
            mirrors = {}
            for i, (name, (_, _, tag)) in enumerate(streams.items()):
                mirrors[name] = RecordedStream.make(leaves[2 * i], leaves[2 * i + 1], tag=tag, root=root)
            prepared = prepare(modules)
            call = {**plain, **values, **prepared}
            known = {id(v): k for k, v in prepared.items()}
            if rngs_name is not None:
                bare = list(mirrors) == [""]  # a stream was given
                call[rngs_name] = rngs = mirrors[""] if bare else _compat.new_object(nnx.Rngs, mirrors, {})
                known |= {id(rngs): "rngs"}
                for name, stream in mirrors.items():
                    known |= {id(stream): f"rngs.{name}"}
                    known |= {id(stream.key): f"rngs.{name}.key", id(stream.count): f"rngs.{name}.count"}
            with nnx.use_eager_sharding(_compat.NOT_GIVEN):  # nothing is sharded, whatever a mesh may be set
                in_order, by_name = as_call(cls, call)
                twin = cls(*in_order, **by_name)
            reader = _Reader(cls.__name__, known, outputs, originals)
            found.append((reader.describe(twin, ()), reader.slots, len(outputs)))
            outputs += [v.get_raw_value() for s in mirrors.values() for v in (s.key, s.count)]
        return outputs

    avals = [aval for key, count, _ in streams.values() for aval in (key, count)]
    program = jax.make_jaxpr(build)(*avals)
    draws = draws_of(cls.__name__, program.jaxpr, list(streams), [start for _, _, start in found])
    triples = zip(found, draws, readings, strict=True)
    return [AbstractModule(node, slots, program, drawn, values) for (node, slots, _), drawn, (values, _) in triples]


class _Reader:
    """Turns a constructed object into descriptions, one description for an object however often it is met."""

    def __init__(self, name: str, given: Mapping[int, str], values: list[Any], originals: Mapping[int, Any]) -> None:
        self.name, self.given, self.originals = name, given, originals
        self.values = values  # those of the slots are appended
        self.slots: dict[Path, Slot] = {}
        self.seen: dict[int, Any] = {}
        self.alive: list[Any] = []

    def describe(self, value: Any, path: Path) -> Any:
        value = self.originals.get(id(value), value)
        if id(value) in self.given:
            return Given(self.given[id(value)])
        if id(value) in self.seen:
            return self.seen[id(value)]
        description = self._describe(value, path)
        if isinstance(description, (Slot, Node, Held)):
            self.seen[id(value)] = description
            self.alive.append(value)  # so that no later object gets the same id
        return description

    def _describe(self, value: Any, path: Path) -> Any:
        if isinstance(value, nnx.Variable):
            raw = value.get_raw_value()
            if hasattr(raw, "dtype"):
                return self._slot(raw, path, type(value), self._metadata(value))
            self._check(raw, path, f"a {type(value).__name__} that holds a {type(raw).__name__}")
            return Held(type(value), raw, self._metadata(value))
        if nnx.Pytree in type(value).__mro__:  # isinstance would take long for a type that it has not seen
            return self._node(value, path)
        if isinstance(value, Tracer):
            return self._slot(value, path, None, {})
        if isinstance(value, RecordedInit):
            return Static(value.call)
        if type(value) in (dict, list, tuple) and _holds_data(value):
            pairs = value.items() if isinstance(value, dict) else enumerate(value)
            return Container(type(value), self._items(pairs, path))
        if _graph.kind_of(value) in _OF_CLASSES and _holds_data(value):
            tree = jax.tree.structure(value, is_leaf=lambda x: x is not value)
            return Container(type(value), self._items(_graph.pytree_children(value), path), tree)
        self._check(value, path, f"a {type(value).__name__}")
        return Static(value)

    def _items(self, pairs: Iterable[tuple[Any, Any]], path: Path) -> tuple[tuple[Any, Any], ...]:
        return tuple([(k, self.describe(v, (*path, k))) for k, v in pairs])

    def _check(self, value: Any, path: Path, kind: str) -> None:
        """Refuse what would keep tracers of the reading: no description can say what it holds.

        Raises:
            ConfigurationError: If it holds an array or a layer of the constructor's.
        """
        if holds_tracer(value, RUNNING, self.given):
            got = f"{kind} that holds arrays or layers which the constructor has made"
            needed = "those in attributes, in a list, dict or tuple, or in Variables, one array in each: what lm.lazy "
            needed += "finds there it can size"
            write = "self.layer = layer  # what is made of it: in __call__; or a class by hand, of lm.LazyModuleMixin"
            raise ConfigurationError(Problem(f"{self.name}.{dotted(path)}", got, needed, write))

    def _metadata(self, variable: nnx.Variable[Any]) -> dict[str, Any]:
        metadata = variable.get_metadata()
        given = metadata["eager_sharding"]
        metadata.update(_compat.default_metadata() | {"eager_sharding": given if isinstance(given, bool) else None})
        return metadata

    def _slot(self, value: Any, path: Path, cls: Any, metadata: Mapping[str, Any]) -> Slot:
        weak = bool(getattr(value, "weak_type", False))
        dtype = value.dtype
        if cls is not None and not jnp.issubdtype(dtype, jax.dtypes.extended):
            dtype = jax.dtypes.canonicalize_dtype(dtype)  # a value of numpy's 64 bits becomes an array of JAX
        slot = Slot(len(self.values), path, cls, tuple(value.shape), dtype, metadata, weak)
        self.values.append(value)
        self.slots[path] = slot
        return slot

    def _node(self, node: Any, path: Path) -> Node:
        cls, names = type(node), _compat.data_names(node)
        if cls is RecordedStream:  # a copy of one that was given
            cls = nnx.RngStream
            del names["root"]
        left_out = (_compat.STATE, _compat.NODES, "root" if cls is not type(node) else _compat.STATE)
        attributes = {n: self.describe(v, (*path, n)) for n, v in vars(node).items() if n not in left_out}
        arrays = {n for n, d in attributes.items() if isinstance(d, Slot) and d.cls is None}
        for name in arrays - _compat.declared_names(cls):
            names[name] = True  # of an array that is traced Flax says that it is no data (0.12.8 and 0.12.12)
        return Node(cls, attributes, names)


_OF_CLASSES = (_graph.MAPPING, _graph.SEQUENCE, _graph.PYTREE)  # named tuples, nnx.State, flax.struct dataclasses


def _holds_data(value: Any) -> bool:
    leaves = jax.tree.leaves(value, is_leaf=_graph.is_object)
    return any(_graph.is_object(v) or isinstance(v, Tracer) for v in leaves)
