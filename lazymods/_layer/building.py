"""A new lazy layer: the attributes of the class it will become, and placeholders for its Variables."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from flax import nnx

from lazymods import _compat
from lazymods._errors import ConfigurationError, Problem
from lazymods._graph import STATE, Path, dotted
from lazymods._initial import draws as _draws
from lazymods._initial.pending import PartialShape, PendingInit, StaticKeys, key_source, leaves_of
from lazymods._initial.stacking import Stacking
from lazymods._layer.abstract_module import Container, Given, Held, Node, Slot, Static
from lazymods._layer.config import ConstructorInit, LayerConfig
from lazymods._layer.formulas import ShapeFormulas
from lazymods._layer.placeholder import UninitializedArray, placeholder_type


class LazyState:
    """What makes a layer lazy: the spec it was configured with, and the trace in which it was built.

    Two states are equal if their specs are: the trace is not part of a jit cache key.
    """

    unchecked = True  # whether Flax has to check the layer's attributes, when next it checks the whole layer

    def __init__(
        self,
        spec: LayerConfig | None = None,
        given: Mapping[str, Path] | None = None,
        keys: StaticKeys | None = None,
        turns: _draws.Turns | None = None,
    ) -> None:
        self.spec = spec
        self.keys = keys
        self.turns = turns
        self.given = dict(given or {})
        here = _compat.current_trace() is _compat.eval_trace()
        self.home = None if here else _compat.weak(_compat.current_home())

    def built_in(self, trace: Any) -> bool:
        """Whether the layer was built in ``trace`` (rather than copied into it)."""
        return trace is _compat.eval_trace() if self.home is None else self.home() is trace

    @staticmethod
    def spares(layer: Any, name: str) -> bool:
        """Whether an attribute needs no check, when Flax checks a whole object (the state is its last attribute)."""
        state = vars(layer).get(STATE)
        if state is None or state.unchecked:
            return False
        state.unchecked = name == STATE
        return True

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, LazyState):
            return NotImplemented
        return self.spec == other.spec and self.given == other.given and self.turns == other.turns

    def __hash__(self) -> int:
        return hash(self.spec)

    def __repr__(self) -> str:
        return f"LazyState({self.spec})"

    def __deepcopy__(self, memo: dict[int, Any]) -> LazyState:
        return self

    def __getstate__(self) -> tuple[Any, ...]:
        return self.spec, self.given, self.keys, self.turns

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.spec, self.given, self.keys, self.turns = state
        self.home = None


class LayerBuilder:
    """What all layers of one configuration have in common, worked out once.

    Args:
        spec: Their spec.
        formulas: The formulas of the spec.
        shapes: The partial shape of each slot while it is empty.
    """

    def __init__(
        self, spec: LayerConfig, formulas: ShapeFormulas, shapes: Mapping[Path, PartialShape | None]
    ) -> None:
        self.spec, self.formulas, self.shapes = spec, formulas, shapes
        root = formulas.abstract.root
        attributes = [(n, d) for n, d in root.attributes.items() if (n,) not in formulas.pending]
        self.attributes = [(n, d, isinstance(d, Static) and not d.mutable) for n, d in attributes]
        names = {n: is_data for n, is_data in root.data_names.items() if (n,) not in formulas.pending}
        self.names = _compat.mapping_of_names({**names, STATE: False})
        places = {d.argument: p for p, d in _given(root, ())}
        self.given = {a: places[a] for a in spec.modules if a in places}
        self.draws = {n: draws for n, draws in formulas.abstract.draws.items() if draws}
        self._placeholders: dict[Path, tuple[Any, tuple[Any, ...]]] = {}

    def placeholder(self, slot: Slot) -> tuple[Any, tuple[Any, ...]]:
        """The class of a slot's placeholder, and the static part of its pending init."""
        if slot.path not in self._placeholders:
            cls = UninitializedArray if slot.cls is None else placeholder_type(slot.cls)
            shape = self.shapes[slot.path]
            source = ConstructorInit(self.spec, slot.path)
            self._placeholders[slot.path] = cls, (source, shape, slot.dtype, dotted(slot.path))
        return self._placeholders[slot.path]

    def build(
        self,
        layer: Any,
        keys: Sequence[Any],
        given: Mapping[str, Any],
        *,
        checked: bool,
        turns: _draws.Turns | None = None,
    ) -> None:
        """Give a new lazy layer its attributes and placeholders.

        Args:
            layer: The object, still without attributes.
            keys: Key and counter of each stream, as they are before the layer draws from them.
            given: What the caller handed in and the layer keeps, by argument name.
            checked: Whether no attributes but those of the formulas will be there when the constructor returns: Flax
                has checked those of the object that the formulas describe.
            turns: Where these keys come in the order of draws, if that is not sure.
        """
        builder = ModuleBuilder(self, key_source(keys), given, turns=turns)
        held = vars(layer)
        for name, description, is_shared in self.attributes:
            held[name] = description.value if is_shared else builder.make(description, (name,))
        _compat.share_data_names(layer, self.names)
        static = builder.keys if isinstance(builder.keys, StaticKeys) else None
        held.pop(STATE, None)  # so that it comes last, see LazyState.spares
        held[STATE] = state = LazyState(self.spec, self.given, static, turns)
        state.unchecked = not checked


def not_kept(name: str, path: Path) -> ConfigurationError:
    """Make the error for rngs that a layer would hold at the sizes that it has: it was built without them."""
    needed = "the rngs themselves at all sizes, or at none: while the sizes are not known nothing keeps them"
    steps = "".join(f".{step}" if str(step).isidentifier() else f"[{step}]" for step in path)
    write = f"self{steps} = rngs.fork()  # in the constructor"
    return ConfigurationError(Problem(f"{dotted(path)} of {name}", "rngs, held at these sizes only", needed, write))


def _given(description: Any, path: Path) -> Iterator[tuple[Path, Given]]:
    if isinstance(description, Given):
        yield path, description
    elif isinstance(description, Node):
        for name, child in description.attributes.items():
            yield from _given(child, (*path, name))


class ModuleBuilder:
    """Makes objects from descriptions: placeholders for slots, one object for a shared description.

    Args:
        layer_builder: What is made.
        keys: Keys and counters of the streams; if not static, each of the shape of the stack.
        given: What the caller handed in, by argument name.
        stacking: How the values of a stack lie, at any rank; None: nothing is stacked.
        turns: Where the keys come in the order of draws, if that is not sure.
    """

    def __init__(
        self,
        layer_builder: LayerBuilder,
        keys: StaticKeys | tuple[Any, ...],
        given: Mapping[str, Any],
        stacking: Stacking | None = None,
        turns: _draws.Turns | None = None,
    ) -> None:
        self.layer_builder, self.formulas, self.given = layer_builder, layer_builder.formulas, given
        self.keys, self.stacking, self.turns = keys, stacking, turns
        self.made: dict[int, Any] = {}
        self.metadata = _compat.default_metadata()

    def make(self, description: Any, path: Path) -> Any:
        if isinstance(description, Static):
            return description.fresh()
        if isinstance(description, Given):
            if description.argument not in self.given:
                raise not_kept(self.layer_builder.spec.name, path)
            return self.given[description.argument]
        if isinstance(description, Container):
            return description.of([self.make(d, (*path, k)) for k, d in description.items])
        made = self.made.get(id(description))
        if made is None:
            if isinstance(description, Held):
                value, metadata = copy.deepcopy(description.value), self._metadata_of(description)
                made = _compat.new_variable(description.cls, value, metadata)
            else:
                made = self._slot(description) if isinstance(description, Slot) else self._node(description, path)
            self.made[id(description)] = made
        return made

    def _node(self, description: Node, path: Path) -> Any:
        node = _compat.new_object(description.cls)
        self.made[id(description)] = node
        for name, child in description.attributes.items():
            if (*path, name) not in self.formulas.pending:
                object.__setattr__(node, name, self.make(child, (*path, name)))
        names = {k: v for k, v in description.data_names.items() if (*path, k) not in self.formulas.pending}
        _compat.set_data_names(node, names)
        return node

    def _slot(self, slot: Slot) -> Any:
        metadata = self._metadata_of(slot)
        if slot.cls is not None and issubclass(slot.cls, nnx.RngState):  # random state depends on no size
            source = ConstructorInit(self.layer_builder.spec, slot.path)
            pending = PendingInit(source, slot.shape, slot.dtype, "", self.turns, keys=self._keys_of(slot, slot.shape))
            value = pending.stacked(lambda keys: self.formulas.abstract.run([slot], keys)[0])
            return _compat.new_variable(slot.cls, value, metadata)
        cls, static = self.layer_builder.placeholder(slot)
        pending = PendingInit(*static, turns=self.turns, keys=self._keys_of(slot, static[1]))
        return _compat.new_variable(cls, pending, metadata)

    def _metadata_of(self, description: Slot | Held) -> dict[str, Any]:
        metadata = {**description.metadata, **self.metadata}
        own = description.metadata.get("eager_sharding")
        if own is not None:  # the caller's own word goes before the setting
            metadata["eager_sharding"] = own
        return metadata

    def _keys_of(self, slot: Slot, shape: PartialShape | None) -> StaticKeys | tuple[Any, ...]:
        """The keys of one slot: the leaves of a value that follows from no key are the same in all of a stack."""
        if isinstance(self.keys, StaticKeys):
            return self.keys
        used = self.formulas.abstract.inputs_of([slot])
        keys = [k if i in used else None for i, k in enumerate(self.keys)]
        rank = None if shape is None else len(shape)
        stacking = Stacking.of_one(rank) if self.stacking is None else self.stacking.at_rank(rank)
        return leaves_of(keys, stacking)
