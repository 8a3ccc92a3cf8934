"""A new lazy layer: the attributes of the class it will become, and placeholders for its Variables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from flax import nnx

from lazymods import _compat
from lazymods._blueprint import Container, Given, Node, Slot, Static
from lazymods._graph import STATE, Path, dotted
from lazymods._placeholder import UninitializedArray, placeholder, placeholder_type
from lazymods._recipe import Recipe, StaticKeys, key_source
from lazymods._spec import LayerSpec, SlotSource, Template


class LazyState:
    """What makes a layer lazy: the spec it was configured with, and the trace in which it was built.

    Two states are equal if their specs are: the trace is not part of a jit cache key.
    """

    def __init__(
        self,
        spec: LayerSpec | None = None,
        given: Mapping[str, Path] | None = None,
        keys: StaticKeys | None = None,
    ) -> None:
        self.spec = spec
        self.keys = keys
        self.given = dict(given or {})
        trace = _compat.current_trace()
        self.home = None if trace is _compat.eval_trace() else _compat.weak(trace)

    def built_in(self, trace: Any) -> bool:
        """Whether the layer was built in ``trace`` (rather than copied into it)."""
        return trace is _compat.eval_trace() if self.home is None else self.home() is trace

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LazyState) and self.spec == other.spec and self.given == other.given

    def __hash__(self) -> int:
        return hash(self.spec)

    def __repr__(self) -> str:
        return f"LazyState({self.spec})"

    def __deepcopy__(self, memo: dict[int, Any]) -> LazyState:
        return self

    def __getstate__(self) -> tuple[Any, ...]:
        return self.spec, self.given, self.keys

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.spec, self.given, self.keys = state
        self.home = None


def build(layer: Any, spec: LayerSpec, template: Template, keys: Sequence[Any], given: Mapping[str, Any]) -> None:
    """Give a new lazy layer its attributes and placeholders.

    Args:
        layer: The object, still without attributes.
        spec: Its spec.
        template: The template of the spec.
        keys: Key and counter of each stream, as they are before the layer draws from them.
        given: What the caller handed in and the layer keeps, by argument name.
    """
    builder = Builder(spec, template, keys, given)
    root = template.blueprint.root
    for name, description in root.attributes.items():
        if (name,) not in template.pending:
            object.__setattr__(layer, name, builder.make(description, (name,)))
    names = {k: v for k, v in root.data_names.items() if (k,) not in template.pending}
    _compat.set_data_names(layer, names)
    places = {d.argument: p for p, d in _given(root, ())}
    kept = {a: places[a] for a in spec.modules if a in places}
    static = builder.keys if isinstance(builder.keys, StaticKeys) else None
    object.__setattr__(layer, STATE, LazyState(spec, kept, static))


def _given(description: Any, path: Path) -> Iterator[tuple[Path, Given]]:
    if isinstance(description, Given):
        yield path, description
    elif isinstance(description, Node):
        for name, child in description.attributes.items():
            yield from _given(child, (*path, name))


class Builder:
    """Makes objects from descriptions: placeholders for slots, one object for a shared description."""

    def __init__(self, spec: LayerSpec, template: Template, keys: Sequence[Any], given: Mapping[str, Any]) -> None:
        self.spec, self.template, self.given = spec, template, given
        self.arrays = tuple(keys)
        self.keys = key_source(keys)
        self.made: dict[int, Any] = {}

    def make(self, description: Any, path: Path) -> Any:
        if isinstance(description, Static):
            return description.fresh()
        if isinstance(description, Given):
            return self.given[description.argument]
        if isinstance(description, Container):
            pairs = [(k, self.make(d, (*path, k))) for k, d in description.items]
            return dict(pairs) if description.cls is dict else description.cls(v for _, v in pairs)
        if id(description) not in self.made:
            made = self._slot(description) if isinstance(description, Slot) else self._node(description, path)
            self.made[id(description)] = made
        return self.made[id(description)]

    def _node(self, description: Node, path: Path) -> Any:
        node = _compat.new_object(description.cls)
        self.made[id(description)] = node
        for name, child in description.attributes.items():
            if (*path, name) not in self.template.pending:
                object.__setattr__(node, name, self.make(child, (*path, name)))
        names = {k: v for k, v in description.data_names.items() if (*path, k) not in self.template.pending}
        _compat.set_data_names(node, names)
        return node

    def _slot(self, slot: Slot) -> Any:
        metadata = dict(slot.metadata) | _compat.default_metadata()
        if slot.cls is not None and issubclass(slot.cls, nnx.RngState):  # random state depends on no size
            value = self.template.blueprint.run([slot], self.arrays)[0]
            return _compat.new_variable(slot.cls, value, metadata)
        # with a guessed structure not even the rank is sure
        shape = None if self.spec.guesses else self.template.shapes[slot.path]
        source = SlotSource(self.spec, slot.path)
        recipe = Recipe(source, shape, slot.dtype, dotted(slot.path), self.keys)
        return placeholder(UninitializedArray if slot.cls is None else placeholder_type(slot.cls), recipe, metadata)
