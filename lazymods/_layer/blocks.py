"""Blocks of one structure as one: the objects of a single block, whose Variables hold the values of all of them.

:func:`join` makes that one of several blocks, :func:`parts_of` the blocks again, and :func:`become` writes what
became of blocks into the one that is there. The values of all blocks lie along a new first axis. What all blocks
share, as rngs that each of them keeps, stays one and without that axis.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from lazymods import _compat, _graph
from lazymods._errors import LazyError, Problem
from lazymods._graph import ARRAY, HOOKS, NODE, OTHER, STATE, VARIABLE, Path, dotted, kind_of
from lazymods._initial import draws, shards
from lazymods._initial.keys import is_key
from lazymods._initial.pending import PendingInit, leaves_of
from lazymods._initial.stacking import Stacking
from lazymods._layer import stacked_values
from lazymods._layer.building import LazyState
from lazymods._layer.copying import copied, rebuilt
from lazymods._layer.lifecycle import TRANSIENT
from lazymods._layer.settings import objects_of, same_setting
from lazymods._layer.ties import parts_in

LAYERS = "layers"  # metadata of caches and intermediates of a stack that have the axis of the layers
_AXES = "out_sharding"  # metadata with a name for each axis of the value


# ---------------------------------------------------------------- one of many


def join(
    blocks: Sequence[Any],
    shared: Sequence[Any] = (),
    places: Mapping[str, Any] | None = None,
    *,
    outside: Mapping[int, str] | None = None,
    used_up: bool = False,
) -> tuple[Any, tuple[Path, ...]]:
    """Make one block of several.

    Args:
        blocks: Blocks of one structure, which differ in the values of their Variables and arrays alone.
        shared: Objects that are shared if a block has them, also if there is only one block.
        places: Where the values of all go, by their names in a block; those of others stay where they are.
        outside: Variables and objects that are not the blocks' own, by id, with what else holds each. All blocks may
            share one; one of its own for each block could not stay what it is.
        used_up: Whether each Variable of the blocks may lose its value once that is in the one block, so that no more
            than one of its parameters is in memory twice.

    Returns:
        The block, and the paths of what all of them share.

    Raises:
        LazyError: If they differ in anything else; it lists every such place.
    """
    joining = _Joining(blocks, shared, places or {}, outside or {}, used_up)
    made = joining.join(blocks, ())
    if joining.problems:
        raise LazyError(*joining.problems, heading="These blocks are not equal, so they can't be one:")
    return made, tuple(joining.shared)


class _Joining:
    """Makes one object of several, at each place of a block."""

    def __init__(
        self,
        blocks: Sequence[Any],
        shared: Sequence[Any],
        places: Mapping[str, Any],
        outside: Mapping[int, str],
        used_up: bool,
    ) -> None:
        self._places, self._used_up = places, used_up
        self.shared: list[Path] = []
        self.problems: list[Problem] = []
        self._memo: dict[int, tuple[tuple[int, ...], Any]] = {}
        self._known = {id(n) for s in shared for _, n in _graph.nodes(s)}
        self._known |= {id(v) for s in shared for v in _graph.variables(s)}
        self._outside = outside
        self._known |= outside.keys()
        all_share = functools.reduce(operator.and_, [{id(p) for p in parts_in(b)} for b in blocks])
        stays = all_share if len(blocks) > 1 else self._known
        self._parts = {id(p) for b in blocks for p in parts_in(b)} - stays

    def join(self, values: Sequence[Any], path: Path) -> Any:
        first, kind = values[0], kind_of(values[0])
        if kind is OTHER:
            return self._setting(values, path)
        classes = {type(v): None for v in values}
        if len({kind_of(v) for v in values}) > 1 or (kind is not ARRAY and len(classes) > 1):
            self._differ(path, " and ".join(cls.__name__ for cls in classes))
            return first
        ids = tuple(map(id, values))
        if kind in (VARIABLE, NODE) and len(set(ids)) == 1 and (len(values) > 1 or id(first) in self._known):
            self.shared.append(path)
            return first
        if kind in (VARIABLE, NODE) and any(i in self._outside for i in ids):
            self._tied(first, ids, path)
            return first
        if id(first) in self._memo:
            known, made = self._memo[id(first)]
            if known != ids:
                self._differ(path, "a part that is another's in one of them, and its own in another")
            return made
        if kind in (VARIABLE, NODE) and len(set(ids)) < len(ids):
            self._differ(path, f"a {type(first).__name__} that some of them share, and others do not")
            return first
        return self._made(kind, values, ids, path)

    def _setting(self, values: Sequence[Any], path: Path, write: str = "") -> Any:
        first = values[0]
        part = next((v for value in values for v in objects_of(value) if id(v) in self._parts), None)
        if part is not None:
            got = f"{getattr(first, '__qualname__', 'a function')}, which holds a {type(part).__name__} of its block"
            needed = (
                "functions that get all they need as arguments: one serves all blocks, none of which stays as it is"
            )
            write = write or f"def {path[-1]}(self, x): ...  # a method of the class of the block"
            self.problems.append(Problem(dotted(path), got, needed, write))
        elif not all(same_setting(first, v) for v in values):
            other = next(v for v in values if not same_setting(first, v))
            self._differ(path, f"{first!r:.80} and {other!r:.80}")
        return first

    def _made(self, kind: Any, values: Sequence[Any], ids: tuple[int, ...], path: Path) -> Any:
        first = values[0]
        if kind is NODE:
            made = _compat.new_object(type(first))
            self._memo[id(first)] = ids, made
            self._join_attributes(made, values, path)
            return made
        if kind is VARIABLE:
            made = self._variable(values, path)
        elif kind is ARRAY:
            made = self._array(values, path)
        else:
            made = self._container(kind, values, path)
        self._memo[id(first)] = ids, made
        return made

    def _join_attributes(self, made: Any, nodes: Sequence[Any], path: Path) -> None:
        first = nodes[0]
        own = (_compat.STATE, _compat.NODES, STATE, HOOKS)
        names = [[k for k in vars(n) if k not in own] for n in nodes]
        if any(set(n) != set(names[0]) for n in names) or len({STATE in vars(n) for n in nodes}) > 1:
            self._differ(path, f"a {type(first).__name__} of other attributes in each")
            return
        attributes = {_compat.STATE: vars(made)[_compat.STATE]}
        attributes |= {k: self.join([vars(n)[k] for n in nodes], (*path, k)) for k in names[0]}
        if any(HOOKS in vars(n) for n in nodes):
            attributes[HOOKS] = self._hooks([_graph.hooks_of(n) for n in nodes], (*path, "hooks"))
        if STATE in vars(first):
            attributes[STATE] = self._lazy_state([vars(n)[STATE] for n in nodes], path)
        _compat.set_attributes(made, attributes)
        _compat.share_data_names(made, _compat.names_of(first))

    def _hooks(self, hooks: Sequence[tuple[Any, ...]], path: Path) -> tuple[Any, ...]:
        """Return the hooks of the first block, if those of the others do the same: each has a number of its own."""
        kinds = [[h._replace(id=0, function=None) for h in own] for own in hooks]
        if any(k != kinds[0] for k in kinds):
            self._differ(path, f"{len(hooks[0])} hooks in the first block, and others in another")
            return hooks[0]
        write = "lm.register_forward_hook(layer, hook)  # with a function that is the same for all blocks"
        for i, hook in enumerate(hooks[0]):
            self._setting([own[i].function for own in hooks], (*path, hook.kind), write)
        return hooks[0]

    def _lazy_state(self, states: Sequence[LazyState], path: Path) -> LazyState:
        first = states[0]
        if not all(same_setting(first.spec, s.spec) and first.given == s.given for s in states):
            self._differ(path, "lazy layers of other arguments")
        return LazyState(first.spec, first.given, turns=draws.of_blocks([s.turns for s in states]))

    def _container(self, kind: Any, values: Sequence[Any], path: Path) -> Any:
        items = [dict(_graph.children(v, kind)) for v in values]
        if any(list(i) != list(items[0]) for i in items):
            self._differ(path, f"{len(items[0])} and {len(next(i for i in items if list(i) != list(items[0])))} items")
            return values[0]
        new = {k: self.join([i[k] for i in items], (*path, k)) for k in items[0]}
        return rebuilt(values[0], kind, new)

    def _variable(self, variables: Sequence[Any], path: Path) -> Any:
        first = variables[0]
        raws = [v.get_raw_value() for v in variables]
        metadata = [_compat.raw_metadata(v) for v in variables]
        if not all(same_setting(metadata[0], m) for m in metadata):
            self._differ(path, "Variables of other metadata")
        if metadata[0].get("ref") or metadata[0].get("hijax"):
            got, needed = "a mutable array", "Variables of ordinary arrays, which can be stacked"
            self.problems.append(Problem(dotted(path), got, needed, "nnx.Param(value, ref=False)  # for it"))
            return first
        raw = self._pending(raws, path) if isinstance(raws[0], PendingInit) else self._tree(raws, path)
        for variable in variables if self._used_up else ():
            _compat.SET_RAW(variable, jax.tree.map(_without_values, variable.get_raw_value()))
        mark = {LAYERS: len(variables)} if isinstance(first, TRANSIENT) else {}
        return _compat.new_variable(type(first), raw, with_axis(metadata[0]) | mark)

    def _pending(self, pendings: Sequence[PendingInit], path: Path) -> Any:
        first = pendings[0]
        same = all((p.element, p.dtype, p.label) == (first.element, first.dtype, first.label) for p in pendings)
        if not same or any(p.stacking != first.stacking for p in pendings):
            self._differ(path, "placeholders that know other sizes")
            return first
        return joined_pending(pendings)

    def _tree(self, raws: Sequence[Any], path: Path) -> Any:
        trees = [jax.tree.flatten(r) for r in raws]
        if any(tree != trees[0][1] for _, tree in trees):
            self._differ(path, "Variables that hold other things")
            return raws[0]
        return jax.tree.unflatten(trees[0][1], [self._array(v, path) for v in zip(*[t[0] for t in trees], strict=True)])

    def _array(self, values: Sequence[Any], path: Path) -> Any:
        kinds = dict.fromkeys(map(stacked_values.describe, values))
        if len(kinds) > 1:
            self._differ(path, " and ".join(kinds))
            return values[0]
        place = self._places.get(dotted(path)) or stacked_values.place_of_parts(values, self._places.values())
        devices = {frozenset(p.device_set) for p in map(stacked_values.place_of, values) if p is not None}
        if place is None and len(devices) > 1:
            got = "arrays that lie on other devices in each"
            needed = "arrays on the devices of their layer, or all on the same"
            self.problems.append(Problem(dotted(path), got, needed, "jax.device_put(value, sharding)  # in each block"))
            return values[0]
        return stacked_values.stack(values, place)

    def _tied(self, first: Any, ids: Sequence[int], path: Path) -> None:
        tied = [i for i, part in enumerate(ids) if part in self._outside]
        others = ", ".join(dict.fromkeys([self._outside[ids[i]] for i in tied]))
        number = "each block" if len(tied) == len(ids) else f"block {', '.join(map(str, tied))}"
        got = f"a {type(first).__name__} in {number} that is tied to something outside: {others}"
        needed = "parts that the blocks make, or one that all of them share: the stack has one array for all blocks"
        write = f"nnx.clone({path[-1] if path else 'block'})  # for each block: a copy, tied to nothing"
        self.problems.append(Problem(dotted(path) or "a block", got, needed, write))

    def _differ(self, path: Path, got: str) -> None:
        where = dotted(path) or "a block"
        needed = "the same in each block: they may differ in the values of their Variables and arrays alone"
        self.problems.append(Problem(where, got, needed, "nnx.List([make_block(rngs) for _ in range(n)])"))


def joined_pending(pendings: Sequence[PendingInit]) -> PendingInit:
    """Return how the values of several placeholders will be made, along a new first axis."""
    first = pendings[0]
    rank = None if first.element is None else len(first.element)
    inner = first.stacking
    marks = inner.marks if inner.sizes else Stacking.of_one(rank).marks
    keys = [None if None in k else stacked_values.stack(k) for k in zip(*[p.built_with for p in pendings], strict=True)]
    held = leaves_of(keys, Stacking((len(pendings), *marks), inner.exact if inner.sizes else rank is not None))
    turns = draws.of_blocks([p.turns for p in pendings])
    return PendingInit(first.source, first.element, first.dtype, first.label, turns, keys=held)


def parts_of_pending(pending: PendingInit, n: int) -> list[PendingInit]:
    """Return how the value of each of the blocks of :func:`joined_pending` will be made."""
    each = [[None] * n if k is None else stacked_values.parts(k, n) for k in pending.built_with]
    out = []
    for i, turns in enumerate(draws.of_each(pending.turns, n)):
        keys = [k[i] for k in each]
        made = PendingInit.build(pending.source, pending.element, pending.dtype, pending.label, keys)
        if len(pending.stacking.sizes) > 1:
            made.key_source = leaves_of(keys, Stacking(pending.stacking.marks[1:], pending.stacking.exact))
        made.turns = turns
        out.append(made)
    return out


def _without_values(value: Any) -> Any:
    """Return the shape and dtype of an array in its place: a load looks at those of what it has written."""
    is_array = isinstance(value, (jax.Array, np.ndarray)) and not is_key(value)
    return jax.ShapeDtypeStruct(value.shape, value.dtype) if is_array else value


def with_axis(metadata: dict[str, Any]) -> dict[str, Any]:
    """Return the metadata of a Variable for a value with one more axis in front, which is not split over devices."""
    return _respelled(metadata, lambda spec: (None, *spec))


def without_axis(metadata: dict[str, Any]) -> dict[str, Any]:
    """Return the metadata of a Variable for a value without its first axis."""
    kept = {k: v for k, v in metadata.items() if k != LAYERS}
    return _respelled(kept, lambda spec: tuple(spec)[1:])


def has_no_layers(owner: Any) -> bool:
    """Whether a Variable was set on a stack without the axis of the layers: each of the blocks gets its value.

    Flax sets caches so: ``init_cache`` of a layer asks nobody how many layers there are.
    """
    return isinstance(owner, TRANSIENT) and not owner.has_metadata(LAYERS)


def _respelled(metadata: dict[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    sharding = metadata.get(_AXES)
    if not sharding:
        return dict(metadata)
    if isinstance(sharding, jax.sharding.NamedSharding):
        spec = jax.sharding.PartitionSpec(*change(sharding.spec))
        return {**metadata, _AXES: jax.sharding.NamedSharding(sharding.mesh, spec)}
    names = change(sharding)
    return {**metadata, _AXES: type(sharding)(*names) if isinstance(sharding, jax.sharding.PartitionSpec) else names}


# ---------------------------------------------------------------- parts


def parts_of(whole: Any, n: int, shared: Sequence[Path], *, abstract: bool = False) -> list[Any]:
    """Return the blocks again, each with values of its own.

    Args:
        whole: What :func:`join` made.
        n: How many blocks it is.
        shared: The paths that it said.
        abstract: Whether shapes and dtypes will do for values.
    """
    values: dict[int, list[Any]] = {}
    same = {id(v): v for v in (_graph.at(whole, path) for path in shared)}

    def leaf(i: int, owner: Any) -> Any:
        if id(owner) not in values:
            values[id(owner)] = _values_of(owner, n, abstract)
        value = values[id(owner)][i]
        if kind_of(owner) is ARRAY:
            return value
        return _compat.new_variable(type(owner), value, without_axis(_compat.raw_metadata(owner)))

    with _compat.at_trace(_compat.home_trace(whole)):
        made = [copied(whole, functools.partial(leaf, i), dict(same)) for i in range(n)]
        for i, block in enumerate(made):
            for _, layer in _graph.lazy_nodes(block):
                state = vars(layer)[STATE]
                if id(layer) not in same and state.turns is not None:
                    turns = draws.of_each(state.turns, n)[i]
                    object.__setattr__(layer, STATE, LazyState(state.spec, state.given, state.keys, turns))
        return made


def raw_of(owner: Any) -> Any:
    """Return the value of a Variable, or an array itself."""
    return owner if kind_of(owner) is ARRAY else owner.get_raw_value()


def value_outside(owner: Any) -> Any:
    """Return the value of a Variable, or an array itself; of an argument of a transform, what it is outside of that."""
    raw = raw_of(owner)
    if not _compat.is_tracer(raw) or kind_of(owner) is ARRAY:
        return raw
    found = [v.get_raw_value() for v in _compat.incarnations(owner)]
    arrays = (v for v in found if isinstance(v, jax.Array) and not _compat.is_tracer(v))
    return next((v for v in arrays if v.shape == raw.shape), raw)


def places_of(whole: Any) -> dict[str, Any]:
    """Return where the values of all blocks are, by their names in a block; of those that are bound to a place."""
    found = {e.name: value_outside(e.value) for e in _graph.entries(whole)}
    places = {name: stacked_values.place_of(raw) or shards.type_of(raw) for name, raw in found.items()}
    return {name: place for name, place in places.items() if place is not None}


def _values_of(owner: Any, n: int, abstract: bool) -> list[Any]:
    raw = raw_of(owner)
    if isinstance(raw, PendingInit):
        return parts_of_pending(raw, n)
    if has_no_layers(owner):
        return [raw] * n
    if isinstance(owner, nnx.RngState):  # a load may move it
        return stacked_values.parts(raw, n)
    return stacked_values.parts(value_outside(owner) if abstract else raw, n, abstract=abstract)


# ---------------------------------------------------------------- writing back


def become(node: Any, other: Any, keeps_class: Callable[[Any], bool], shared: Sequence[Path] = ()) -> None:
    """Let an object hold what another of its structure does; its Variables and objects stay the same ones.

    Args:
        node: The object.
        other: One of the same structure, whose lazy layers may be ready where those of the object are not.
        keeps_class: Whether a layer that is ready now keeps its class, as an nnx transform wants it.
        shared: The paths of what blocks share, which takes the place of what was there.
    """
    known = {id(value): value for value in (_graph.at(other, path) for path in shared)}
    _become(node, other, known, keeps_class)


def _become(value: Any, other: Any, known: dict[int, Any], keeps_class: Callable[[Any], bool]) -> Any:
    """Return what is there from now on: ``value``, changed to what ``other`` is, or else ``other``."""
    if value is other or id(other) in known:
        return known.get(id(other), value)
    kind = kind_of(other)
    if kind is OTHER or kind is ARRAY or kind_of(value) is not kind:
        return other
    if kind is VARIABLE:
        known[id(other)] = value
        _compat.write_variable(value, type(other), other.get_raw_value(), _compat.raw_metadata(other))
        return value
    if kind is not NODE:
        held = dict(_graph.children(value))
        items = _graph.children(other, kind)
        return rebuilt(other, kind, {k: _become(held.get(k), v, known, keeps_class) for k, v in items})
    known[id(other)] = value
    held = vars(value)
    own = {k: held[k] for k in (_compat.STATE, _compat.NODES)}
    was_lazy = STATE in held
    new = {k: _become(held.get(k), v, known, keeps_class) for k, v in vars(other).items() if k not in own}
    keep = was_lazy and STATE not in new and keeps_class(value)
    _compat.set_attributes(value, own | new)
    _compat.share_data_names(value, _compat.names_of(other))
    if not keep and type(value) is not type(other):
        _compat.set_class(value, type(other))
    return value
