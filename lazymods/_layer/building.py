"""A new lazy layer: the attributes of the class it will become, and placeholders for its Variables."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from flax import nnx

from lazymods import _compat
from lazymods._errors import ConfigurationError, Problem
from lazymods._graph import STATE, Path, dotted
from lazymods._initial import draws as _draws
from lazymods._initial.pending import PartialShape, PendingInit, StaticKeys, key_source, leaves_of
from lazymods._initial.stacking import Stacking
from lazymods._layer.abstract_module import Container, Given, Held, Node, Slot, Static
from lazymods._layer.arguments import Ignored, common_multiple, constructor_parameters
from lazymods._layer.config import ConstructorInit, LayerConfig, context
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

    def __init__(self, spec: LayerConfig, formulas: ShapeFormulas, shapes: Mapping[Path, PartialShape | None]) -> None:
        self.spec, self.formulas, self.shapes = spec, formulas, shapes
        root = formulas.abstract.root
        attributes = [(n, d) for n, d in root.attributes.items() if (n,) not in formulas.pending]
        self.attributes = [(n, d, isinstance(d, Static) and not d.mutable) for n, d in attributes]
        names = {n: is_data for n, is_data in root.data_names.items() if (n,) not in formulas.pending}
        self.names = _compat.mapping_of_names({**names, STATE: False})
        places = {d.argument: p for p, d in _given(root, ())} if spec.modules else {}
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


# ---------------------------------------------------------------- shapes while arguments are at their defaults

# infer or a checkpoint may say another size than a default that the caller left as it is (see factory.lazy). So an axis
# that follows from such an argument is as unknown as any other until the layer is sized. Which axes do, the constructor
# tells: it is read with another size in place of each.

Shapes = dict[Path, "PartialShape | None"]

_MOST = 24  # readings of one constructor, where it does not take the first other size of each


def placeholder_shapes(spec: LayerConfig, formulas: ShapeFormulas, modules: Mapping[str, Any]) -> Shapes:
    """Return the partial shape of each slot while it is empty: None for what ``infer`` may still decide.

    Args:
        spec: What the layer was configured with.
        formulas: Its formulas.
        modules: Those of its arguments that are modules.
    """
    if spec.guesses:  # not even the rank is sure
        return dict.fromkeys(formulas.shapes)
    if not spec.left_out:
        return dict(formulas.shapes)
    if modules or not isinstance(spec.key, tuple):
        return _without_defaults(spec, formulas, modules)
    return _cached(spec, context(), Ignored(formulas))


@functools.lru_cache(maxsize=1024)
def _cached(spec: LayerConfig, context: Any, formulas: Ignored) -> Shapes:
    return _without_defaults(spec, formulas.value, {})


def _without_defaults(spec: LayerConfig, formulas: ShapeFormulas, modules: Mapping[str, Any]) -> Shapes:
    shapes = dict(formulas.shapes)
    others = {name: found for name in spec.left_out if (found := _other_sizes(spec, name))}
    if not others or _vary(spec, formulas, modules, [{name: found[0]} for name, found in others.items()], shapes):
        return shapes
    left = _MOST
    for name, found in others.items():  # what the constructor takes of each alone
        for size in found[:left]:
            left -= 1
            if _vary(spec, formulas, modules, [{name: size}], shapes):
                break
    return shapes


def _vary(
    spec: LayerConfig,
    formulas: ShapeFormulas,
    modules: Mapping[str, Any],
    others: Sequence[Mapping[str, Any]],
    shapes: Shapes,
) -> bool:
    """Read the constructor with each of some other defaults, and note which axes are others; False if it refuses."""
    multiple = common_multiple({"others": list(others)})
    given = {name: multiple * size for name, size in formulas.sizes.items()}
    probe = next(iter(given.values()), common_multiple(spec.arguments))
    values = spec.values(given)
    try:
        before, *after = spec.trace([(values, probe), *(({**values, **other}, probe) for other in others)], modules)
    except Exception:  # what a constructor says of arguments that nobody gave
        return False
    for path, slot in before.slots.items():
        for other in [read.slots[path] for read in after if path in read.slots]:
            known = shapes.get(path)
            if known is None or len(other.shape) != len(slot.shape):
                shapes[path] = None
            else:
                pairs = zip(known, slot.shape, other.shape, strict=True)
                shapes[path] = tuple([k if a == b else None for k, a, b in pairs])
    return True


def _other_sizes(spec: LayerConfig, name: str) -> list[Any]:
    """Return what an argument might be in place of its default, if that is a size, or may be one."""
    default = spec.default_of(name)
    if default is None:
        return [common_multiple(spec.arguments) * 7] if _may_be_a_size(spec.cls, name) else []
    leaves, structure = jax.tree.flatten(default)
    if not leaves or not all(type(leaf) is int and leaf >= 0 for leaf in leaves):
        return []
    return [jax.tree.unflatten(structure, new) for new in zip(*map(_others, leaves), strict=True)]


def _others(size: int) -> Iterator[int]:
    yield from (2 * size or 1, size // 2 or 3, size + 1, 3 * size or 2)


def _may_be_a_size(cls: type, name: str) -> bool:
    """Whether a constructor says of an argument that it takes an int, or nothing at all."""
    annotation = constructor_parameters(cls)[name].annotation
    text = annotation if isinstance(annotation, str) else repr(annotation)
    return annotation is inspect.Parameter.empty or "int" in text.replace("[", " ").replace("|", " ").split()
