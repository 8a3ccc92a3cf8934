"""Where a load on a mesh puts each entry: by the name that rules see, an optimizer's state as its parameter."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from lazymods import _graph
from lazymods._errors import Problem
from lazymods._graph import NODE, Path, kind_of
from lazymods._initial.keys import is_key
from lazymods._initial.shards import is_at, put
from lazymods._initial.stacking import Shape
from lazymods._layer import stacks
from lazymods._layer.blocks import with_axis
from lazymods._refusals import ArgumentError
from lazymods._shardings import Named, Rules, find_shardings, mesh_for
from lazymods.state.entries import Place, Survey, prefix_of


class Target(NamedTuple):
    """An entry that goes to the mesh: its place, and the shape and dtype that it gets."""

    place: Place
    shape: tuple[int, ...]
    dtype: Any


class Placing(NamedTuple):
    """Where the arrays of a model go.

    Attributes:
        mesh: The devices.
        rules: As :func:`lazymods.load` takes them.
        is_asked: Whether the caller has named the mesh, or rules; if not, parameters that the model has somewhere stay.
    """

    mesh: Mesh
    rules: Rules | None
    is_asked: bool

    def shardings(self, survey: Survey, targets: Iterable[Target]) -> dict[str, NamedSharding]:
        """Find where entries go; nothing is made or moved.

        Args:
            survey: The model.
            targets: What goes to the mesh.

        Raises:
            LazyError: If specs do not fit; it lists every such parameter.
        """
        chosen = {t.place.name: t for t in targets if self._moves(t.place)}
        names = _RuleNames(survey)
        layers = stacks.layers_of(survey.nodes)
        known: dict[str, _Known] = {}  # what is no optimizer's, by each of its names
        for name, target in chosen.items():
            if not names.is_of_optimizer(name):
                found_at = [layers.of(n, target.place.owner) for n in names.all_of(target.place)]
                seen = [names.cut(layer.name) for layer in found_at]
                shape = (*found_at[0].sizes, *target.shape)
                known |= {n: _Known(seen[0], shape) for n in seen if n not in known}
        beginnings = names.beginnings({name: target.shape for name, target in chosen.items()}, known)
        found: dict[str, NamedSharding] = {}
        asked: dict[str, Named] = {}
        inside: dict[str, stacks.Layer] = {}
        for name, target in chosen.items():
            layer = layers.of(names.all_of(target.place)[0], target.place.owner)
            seen = names.cut(layer.name)
            if names.is_of_optimizer(name):
                seen = names.seen_of_optimizer(name, target.shape, beginnings, known)
                if seen is None:  # a count, or the statistics of a row
                    found[name] = NamedSharding(self.mesh, PartitionSpec())
                    continue
            metadata = _metadata(target.place)
            for _ in layer.sizes:
                metadata = with_axis(metadata)
            inside[name] = layer
            asked[name] = Named(seen, (*layer.sizes, *target.shape), target.dtype, metadata)
        while asked:  # several may have one name to the rules: a round has each once
            this_round = {parameter.name: (name, parameter) for name, parameter in reversed(asked.items())}
            places = find_shardings([parameter for _, parameter in this_round.values()], self.mesh, self.rules)
            for name, parameter in list(asked.items()):
                first, _ = this_round[parameter.name]
                if name == first or inside[name].sizes:  # in a stack they are one parameter
                    found[name] = layers.place(inside[name], places[parameter.name])
                    del asked[name]
        return found

    def move_rest(self, survey: Survey) -> None:
        """Bring what a load has left as it was, or has initialized, to its place as well.

        Args:
            survey: The model, after the load.

        Raises:
            LazyError: If specs do not fit.
        """
        if not self.is_asked:
            return
        held = {p.name: p for p in survey.places.values() if is_placed(p) and isinstance(p.value, jax.Array)}
        targets = [Target(p, p.value.shape, p.value.dtype) for p in held.values()]
        changed: dict[Any, tuple[Place, dict[Path, Any]]] = {}
        moved: dict[Any, Any] = {}
        for name, sharding in self.shardings(survey, targets).items():
            place = held[name]
            if is_at(place.value, sharding):
                continue
            if place.identity not in moved:
                moved[place.identity] = put(place.value, sharding)
            changed.setdefault(place.replaced, (place, {}))[1][place.leaf] = moved[place.identity]
        for place, values in changed.values():
            place.write(place.replace(values))

    def _moves(self, place: Place) -> bool:
        return self.is_asked or not (_is_bound(place.value) or _is_elsewhere(_metadata(place)))


def placing_for(mesh: Mesh | AbstractMesh | None, rules: Rules | None) -> Placing | None:
    """Return where a load puts its entries; None if it leaves them where the model has them.

    Raises:
        ArgumentError: If there are rules and no mesh, or the mesh has no devices.
    """
    chosen = mesh_for(mesh, rules)
    if chosen is None:
        return None
    if isinstance(chosen, AbstractMesh):
        got, needed = "an AbstractMesh, which has no devices", "a jax.sharding.Mesh of the devices that get the values"
        raise ArgumentError(Problem("mesh=", got, needed, "mesh=jax.make_mesh((8,), ('data',))"))
    return Placing(chosen, rules, mesh is not None or rules is not None)


def is_placed(place: Place) -> bool:
    """Whether a place has, or will have, an array that can go to a mesh: no random state, and none of numpy's."""
    value = place.value
    if place.is_rng or is_key(value) or isinstance(value, Tracer):
        return False
    return place.lazy or isinstance(value, (jax.Array, jax.ShapeDtypeStruct))


def _is_bound(value: Any) -> bool:
    """Whether it is known where a value is to be."""
    if isinstance(value, jax.ShapeDtypeStruct):
        return value.sharding is not None
    return isinstance(value, jax.Array) and value.committed


def _is_elsewhere(metadata: Mapping[str, Any]) -> bool:
    """Whether a Variable's metadata say that the mesh of ``jax.set_mesh`` is not for it, to Flax."""
    names = metadata.get("out_sharding")
    has_mesh = metadata.get("mesh") is not None or getattr(names, "mesh", None) is not None
    return bool(names) and (has_mesh or not metadata.get("eager_sharding", True))


def _metadata(place: Place) -> dict[str, Any]:
    return place.owner.get_metadata() if isinstance(place.owner, nnx.Variable) and not place.leaf else {}


class _Known(NamedTuple):
    """A parameter as rules see it: by its first name, with the axes of the stacks that it is in."""

    first: str
    shape: Shape


class _RuleNames:
    """The names that rules see: a tie's first one, in a training state without the key of what it is in."""

    def __init__(self, survey: Survey) -> None:
        self._names: dict[Any, list[str]] = {}
        for place in survey.places.values():
            self._names.setdefault(place.identity, []).append(place.name)
        self._cuts: list[str] = []
        self._is_state = kind_of(survey.model) is not NODE
        self._states: list[str] = []
        self._optimizers: list[str] = []
        paths = {path for path, _ in survey.nodes}
        for path, node in survey.nodes:
            if not any(path[:i] in paths for i in range(len(path))):
                self._cuts.append(prefix_of(path))
            if isinstance(node, nnx.Optimizer):
                self._optimizers.append(prefix_of(path))
                self._states += _states_in(node, path)

    def all_of(self, place: Place) -> list[str]:
        """Return the names of a place: of a tie there are several."""
        return self._names[place.identity]

    def cut(self, name: str) -> str:
        """Return a name without the key, in a training state, of what it is in."""
        if not self._is_state:
            return name
        cut = next((c for c in self._cuts if name.startswith(c)), None)
        return name.partition(".")[2] or name if cut is None else name.removeprefix(cut)

    def is_of_optimizer(self, name: str) -> bool:
        """Whether an entry is part of an optimizer's state."""
        return name.startswith(tuple(self._optimizers))

    def beginnings(self, entries: Mapping[str, Shape], known: Mapping[str, _Known]) -> dict[str, str]:
        """Return what the names of the parameters begin with that each optimizer is for: where most entries fit.

        Args:
            entries: The shapes of all entries, by name.
            known: The parameters by each of the names that rules see.
        """
        found: dict[tuple[str | None, Shape], list[str]] = {}
        for name, parameter in known.items():
            parts = name.split(".")
            for i in range(len(parts)):
                found.setdefault((".".join(parts[i:]), parameter.shape), []).append(".".join([*parts[:i], ""]))
        out = {}
        for optimizer in self._optimizers:
            own = [(self._parameter_of(n), shape) for n, shape in entries.items() if n.startswith(optimizer)]
            fits = collections.Counter(beginning for entry in own for beginning in found.get(entry, ()))
            out[optimizer] = min(fits, key=lambda b: (-fits[b], len(b)), default="")
        return out

    def seen_of_optimizer(
        self, name: str, shape: Shape, beginnings: Mapping[str, str], known: Mapping[str, _Known]
    ) -> str | None:
        """Return the parameter that an entry of an optimizer is for; None if it is for none, or has another shape."""
        parameter = self._parameter_of(name)
        if parameter is None or not shape:
            return None
        own = next(b for optimizer, b in beginnings.items() if name.startswith(optimizer)) + parameter
        found = known.get(own, _Known(own, shape))
        return found.first if found.shape == shape else None

    def _parameter_of(self, name: str) -> str | None:
        """Return the name of the parameter that an optimizer's entry is for; None if it is for none."""
        prefix = max((s for s in self._states if name.startswith(s)), key=len, default=None)
        return None if prefix is None else name.removeprefix(prefix)


def _states_in(value: Any, path: Path) -> Iterator[str]:
    """Yield what the names begin with that lie in a state as the model has it: the rest is the parameter's name."""
    for key, child in _graph.children(value):
        if isinstance(child, nnx.State):
            yield prefix_of((*path, key))
        elif not isinstance(child, nnx.Variable) and kind_of(child) not in (_graph.ARRAY, _graph.OTHER):
            yield from _states_in(child, (*path, key))
