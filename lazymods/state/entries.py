"""The named entries of a model: what a state dict holds, and where each entry lives."""

from __future__ import annotations

import copy
import mmap
import os
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import Any, NamedTuple

import numpy as np
from flax import nnx

from lazymods import _compat, _graph
from lazymods._errors import Problem, StateDictError, describe
from lazymods._graph import ARRAY, MAPPING, NODE, OTHER, PYTREE, SEQUENCE, VARIABLE, Path, dotted, hooks_of, kind_of
from lazymods._initial.keys import is_key
from lazymods._layer.lifecycle import TRANSIENT
from lazymods._layer.merging import put
from lazymods._layer.placeholder import UninitializedArray
from lazymods._refusals import MAX_SHOWN, ArgumentError, refuse_class
from lazymods.state.static_fields import static_leaves, structure_of, with_fields
from lazymods.state.values import unwrapped

IMPL = "impl"  # the entry that names a random key's implementation: "rngs.key.impl"
JSON = "json"  # the entry that holds what no array can, a text or a large number: "run_name.json"


def check_is_model(model: Any, *, to_write: bool = False) -> None:
    """Refuse what has no entries, or none that could be written.

    Raises:
        ArgumentError: If it is no nnx object, and no dict or list of things.
    """
    if isinstance(model, (nnx.Pytree, MutableMapping, list)) or (isinstance(model, Mapping) and not to_write):
        return
    refuse_class(model)
    if isinstance(model, (str, bytes, os.PathLike)):
        line = "lm.load(model, path)  # or lm.save(model, path)"
        raise ArgumentError(Problem("the model", repr(model)[:MAX_SHOWN], "the model first, then the path", line))
    needed = "what has entries: an nnx module, or a dict of a training state"
    raise ArgumentError(Problem("the model", describe(model), needed, '{"state": ...}  # a dict that holds it'))


def base_name(name: str) -> str:
    """Return the name of the entry that another entry of a file belongs to: ``rngs.key`` for ``rngs.key.impl``."""
    stem, _, last = name.rpartition(".")
    return stem if last in (IMPL, JSON) else name


class Place(NamedTuple):
    """Where an entry lives.

    Attributes:
        name: The dotted name.
        holder: The object, mapping or list that holds the owner.
        key: Under which attribute or key.
        owner: The Variable, or what cannot be changed but only replaced: an array, a number, a tuple of arrays.
        leaf: The path inside the owner (inside its value, if it is a Variable); () for the owner itself.
        lazy: Whether the owner is a placeholder.
    """

    name: str
    holder: Any
    key: Any
    owner: Any
    leaf: Path = ()
    lazy: bool = False

    @property
    def value(self) -> Any:
        """The array, number or text that is there, or the placeholder."""
        if self.lazy:
            return self.owner
        return leaf_of(unwrapped(self.owner), self.leaf)

    @property
    def is_variable(self) -> bool:
        """Whether a Variable holds it."""
        return kind_of(self.owner) is VARIABLE

    @property
    def identity(self) -> tuple[Any, ...]:
        """What is the same for the names of one and the same thing: a shared Variable, or a place in a shared object.

        A JAX array is no identity: nobody can change one, so two attributes that are one array are not tied. An array
        of numpy that can be written to is one.
        """
        if not self.lazy and is_buffer(self.value):
            return ("buffer", id(self.value))
        return (*self.replaced, self.leaf)

    @property
    def replaced(self) -> tuple[Any, ...]:
        """What is the same for the parts of one value, which is replaced as a whole."""
        return (id(self.owner),) if self.is_variable else (id(self.holder), self.key)

    @property
    def is_rng(self) -> bool:
        """Whether it is random state."""
        in_variable = self.is_variable and not isinstance(self.owner, UninitializedArray)
        return isinstance(self.owner, nnx.RngState) or (not in_variable and is_key(self.value))

    def replace(self, values: Mapping[Path, Any]) -> Any:
        """Return what the owner becomes with other values at some paths inside it."""
        if () in values:
            return values[()]
        return _replaced(unwrapped(self.owner), values)

    def write(self, value: Any) -> None:
        """Write the owner's new value."""
        if not self.is_variable:
            put(self.holder, (self.key,), value)
        elif self.owner.get_metadata("ref", False):
            self.owner.set_value(value)
        else:
            self.owner.set_raw_value(value)


def is_buffer(value: Any) -> bool:
    """Whether a load writes into an array, as all who share it expect: one of numpy that is not mapped from a file."""
    if type(value) is not np.ndarray or not value.flags.writeable:
        return False
    base: Any = value
    while isinstance(base, (np.ndarray, memoryview)) and not isinstance(base, np.memmap):
        base = base.obj if isinstance(base, memoryview) else base.base
    return not isinstance(base, (np.memmap, mmap.mmap))


def memory_of(places: Iterable[Place]) -> Iterator[Any]:
    """Find what a load of some places writes into, and does not replace: arrays of numpy, references of Variables."""
    for place in places:
        raw = place.owner.get_raw_value() if place.is_variable else None
        if isinstance(raw, _compat.REFERENCES):
            yield raw
        elif is_buffer(place.value):
            yield place.value


class Survey:
    """A model as a load sees it: walked once.

    Attributes:
        model: The model.
        nodes: Its nnx objects, with their paths, one that is shared under its first name only.
        named_nodes: The same, one that is shared under each of its names.
        places: Its entries by name.
        hooked: Those objects that have hooks.
    """

    def __init__(self, model: Any) -> None:
        check_is_model(model, to_write=True)
        self.model = model
        self.named_nodes: list[Any] = _graph.named_nodes(model)
        first: dict[int, Any] = {}
        for path, node in self.named_nodes:
            first.setdefault(id(node), (path, node))
        self.nodes: list[Any] = list(first.values())
        self.places: dict[str, Place] = named_places(model)
        self.hooked: list[Any] = [(path, node) for path, node in self.nodes if hooks_of(node)]


def is_training_state(model: Any) -> bool:
    """Whether what is saved or loaded is a dict of things rather than one of them; or an optimizer without a state."""
    is_lazy_optimizer = isinstance(model, nnx.Optimizer) and _graph.is_lazy_node(model)
    return kind_of(model) is not NODE or is_lazy_optimizer  # nnx.Dict is a module


def home_trace(model: Any) -> Any:
    """Return the trace in which a model was born; a dict of objects is where the caller is."""
    return _compat.home_trace(model) if isinstance(model, nnx.Pytree) else _compat.current_trace()


def prefix_of(path: Path) -> str:
    """Return what the names of a module's entries begin with: its dotted path and a dot, '' for the model."""
    return f"{dotted(path)}." if path else ""


def leaf_of(value: Any, path: Path) -> Any:
    """Return what a pytree holds at a path."""
    for key in path:
        child = _graph.get_child(value, key)
        value = getattr(value, key) if child is _graph.MISSING else child  # a static field
    return value


def _replaced(tree: Any, values: Mapping[Path, Any]) -> Any:
    """Return a pytree of the same types with other values at some paths."""
    if () in values:
        return values[()]
    below: dict[Any, dict[Path, Any]] = {}
    for (key, *rest), value in values.items():
        below.setdefault(key, {})[tuple(rest)] = value
    new = {k: _replaced(c, below[k]) if k in below else c for k, c in _graph.children(tree)}
    kind = kind_of(tree)
    if kind is PYTREE:
        static = {k: _replaced(getattr(tree, k), below[k]) for k in below if k not in new}
        outer = structure_of(with_fields(tree, static) if static else tree)
        return outer.unflatten([new[k] for k, _ in _graph.pytree_children(tree)])
    if kind is MAPPING and not isinstance(tree, MutableMapping):
        return type(tree)(new)
    if isinstance(tree, tuple):
        out = tuple.__new__(type(tree), new.values())
        if hasattr(out, "__dict__"):
            vars(out).update(vars(tree))
        return out
    out = copy.copy(tree)
    for key in below:
        out[key] = new[key]
    return out


class _Walk:
    """The walk that finds the places.

    Attributes:
        found: The places, in definition order.
    """

    def __init__(self) -> None:
        self.found: list[Place] = []
        self._above: list[int] = []

    def inside(self, holder: Any, path: Path, plain: bool = False) -> None:
        """Take what an nnx object, mapping or list holds; ``plain``: also what is no array, as in a training state."""
        if id(holder) in self._above:  # a cycle
            return
        self._above.append(id(holder))
        declared = _compat.names_of(holder) if kind_of(holder) is NODE else {}
        for key, value in _graph.children(holder):
            kind = kind_of(value)
            if kind is VARIABLE:
                self._variable(holder, key, value, (*path, key))
            elif kind is ARRAY:
                self.found.append(Place(dotted((*path, key)), holder, key, value))
            elif kind is not OTHER or plain or declared.get(key):  # what else configures a module is no state
                data = plain or bool(declared.get(key))
                self._value(Place("", holder, key, value), value, (*path, key), data)
        self._above.pop()

    def _variable(self, holder: Any, key: Any, value: Any, path: Path) -> None:
        if isinstance(value, TRANSIENT):
            return
        if _graph.is_placeholder(value):
            self.found.append(Place(dotted(path), holder, key, value, (), True))
            return
        raw = unwrapped(value)
        if kind_of(raw) is ARRAY:
            self.found.append(Place(dotted(path), holder, key, value))
        else:
            self._value(Place("", holder, key, value), raw, path, True, fixed=True)

    def _value(self, at: Place, value: Any, path: Path, plain: bool, *, fixed: bool = False) -> None:
        """Take a value; ``fixed``: it is inside one that is replaced as a whole."""
        kind = kind_of(value)
        if kind is VARIABLE:
            holder, key = (None, None) if at.leaf else (at.holder, at.key)
            self._variable(holder, key, value, path)
        elif kind is NODE:
            self.inside(value, path)
        elif kind is ARRAY or (kind is OTHER and plain and value is not None):
            self.found.append(at._replace(name=dotted(path)))
        elif not fixed and (isinstance(value, list) or (kind is MAPPING and isinstance(value, MutableMapping))):
            self.inside(value, path, plain)
        elif kind in (MAPPING, SEQUENCE, PYTREE):
            for key, child in _graph.children(value):
                within = fixed or kind is PYTREE
                self._value(at._replace(leaf=(*at.leaf, key)), child, (*path, key), plain, fixed=within)
            if kind is PYTREE and plain:
                for below, _ in static_leaves(value):
                    self.found.append(at._replace(name=dotted((*path, *below)), leaf=(*at.leaf, *below)))


def places(model: Any) -> list[Place]:
    """Every entry of a model, in definition order; caches and intermediates are left out."""
    walk = _Walk()
    walk.inside(model, (), plain=kind_of(model) is not NODE)
    return walk.found


def named_places(model: Any) -> dict[str, Place]:
    """Every entry by name.

    Raises:
        StateDictError: If two entries have one name, as those of an attribute ``a.b`` and of ``b`` in ``a``.
    """
    out: dict[str, Place] = {}
    problems = []
    for place in places(model):
        other = out.setdefault(place.name, place)
        if other is not place:
            got = f"two entries of that name, a {type(other.owner).__name__} and a {type(place.owner).__name__}"
            line = "setattr(module, name.replace('.', '_'), value)  # attributes without dots"
            problems.append(Problem(place.name, got, "one entry a name", line))
    if problems:
        raise StateDictError(*problems)
    return out
