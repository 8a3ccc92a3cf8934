"""Constructors that decide by a size which parts a layer has.

A layer is built with what its constructor made at the probes' sizes. :func:`conform` brings it to what the constructor
makes at the real ones: a shortcut that is there only where widths differ, comes or goes.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lazymods import _compat, _graph
from lazymods._errors import Problem, ShapeInferenceError
from lazymods._graph import STATE, Path
from lazymods._initial import draws
from lazymods._initial.keys import is_key
from lazymods._initial.pending import StaticKeys
from lazymods._initial.stacking import Stacking
from lazymods._layer.abstract_module import AbstractModule, Container, Given, Held, Node, Slot, Static
from lazymods._layer.building import LayerBuilder, ModuleBuilder, not_kept
from lazymods._layer.config import LayerConfig
from lazymods._layer.formulas import ShapeFormulas, same_static, same_structure, static_at
from lazymods._layer.held import stackings
from lazymods._layer.placeholder import UninitializedVariable


def conform(layer: Any, abstract: AbstractModule) -> None:
    """Give a layer the structure that its constructor makes at these sizes, where the probes saw another.

    A constructor may decide by a size what it holds. Slots that are not there any more go; new ones come as
    placeholders; what is one object at these sizes becomes one. Arrays of numpy that had to wait for the sizes come
    as they are, for a load to write into.

    Raises:
        ConfigurationError: If it holds its rngs at these sizes only.
    """
    spec = vars(layer)[STATE].spec
    builder = _builder(layer, abstract)
    builder.made[id(abstract.root)] = layer
    _conform_node(layer, abstract.root, spec.formulas.abstract.root, (), builder)


def decides(layer: Any) -> bool:
    """Whether the class of a lazy layer may decide by its sizes what there is."""
    plan = getattr(type(layer), "_lazymods_plan", None)
    return plan is not None and plan.decides and not vars(layer)[STATE].spec.modules


def set_shapes(layer: Any, abstract: AbstractModule) -> None:
    """Let the placeholders of a layer have the shapes that they have at sizes that no formula told."""
    for path, slot in abstract.slots.items():
        variable = _graph.at(layer, path)
        if _graph.is_placeholder(variable) and variable.pending.is_static:
            variable.set_raw_value(variable.pending.replace(element=slot.shape))


BuiltWith = tuple[Any, Stacking | None]  # the keys that a layer was built with, and how the values of its stack lie


def built_with(layer: Any) -> BuiltWith | None:
    """Return what :func:`renew_random_state` needs of a layer that will have no placeholder left; None: nothing."""
    state = vars(layer).get(STATE)
    if state is None or state.turns is None or state.keys is not None:
        return None
    try:
        return _traced_keys(layer)
    except ShapeInferenceError:
        return None  # told when it is asked for


def renew_random_state(layer: Any, abstract: AbstractModule, keys: BuiltWith | None = None) -> None:
    """Give random streams inside a layer, of a Dropout, say, what keys and counters they get at the sizes now known.

    They were forked or copied when the layer was built, from keys and counters that depend on how often was drawn
    before: by the constructor itself, and by those of other layers. Random state that is another by now, as by a load,
    stays.

    Args:
        layer: The layer.
        abstract: What its constructor makes at the sizes now known.
        keys: What :func:`built_with` gave while it had placeholders; None: it has some now.
    """
    state = vars(layer)[STATE]
    known = None if state.turns is None or state.spec.modules else state.spec.formulas.abstract
    if known is None or (abstract is known and not draws.are_off(state.turns)):
        return
    before = after = None
    for path, slot in abstract.slots.items():
        if not (slot.cls and issubclass(slot.cls, nnx.RngState) and path in known.slots):
            continue
        variable = _graph.at(layer, path)
        if type(variable) is not slot.cls:
            continue
        before = before or _builder(layer, known, None, built=keys)
        after = after or _builder(layer, abstract, built=keys)
        old, new = (b.make(d.slots[path], path).get_raw_value() for b, d in ((before, known), (after, abstract)))
        if _same_state(variable.get_raw_value(), old):
            _compat.SET_RAW(variable, new)


def _same_state(now: Any, before: Any) -> bool:
    if not _compat.are_concrete([now, before]):
        return True  # in a transform; nothing was loaded there
    now, before = (jax.random.key_data(v) if is_key(v) else v for v in (now, before))
    return now.shape == before.shape and bool(jnp.all(now == before))


_OWN: Any = object()


def _builder(layer: Any, abstract: AbstractModule, turns: Any = _OWN, built: BuiltWith | None = None) -> ModuleBuilder:
    """Return what makes the parts of a layer; without turns, from the keys that it was built with."""
    state = vars(layer)[STATE]
    keys, stacking = state.keys, None
    if keys is None:
        keys, stacking = built or _traced_keys(layer)
    shapes = {p: s.shape for p, s in abstract.slots.items()}
    layer_builder = LayerBuilder(state.spec, ShapeFormulas(abstract, {}, {}, shapes, frozenset()), shapes)
    return ModuleBuilder(layer_builder, keys, {}, stacking, state.turns if turns is _OWN else turns)


def has_pending_arrays(spec: LayerConfig, abstract: AbstractModule) -> bool:
    """Whether a constructor holds arrays of numpy at these sizes that had to wait for them."""
    if spec.modules or spec.scales is not None:
        return False
    return any(isinstance(static_at(abstract.root, path), np.ndarray) for path in spec.formulas.pending)


def has_other_slots(spec: LayerConfig, abstract: AbstractModule) -> bool:
    """Whether a constructor holds other Variables at these sizes than it did at the probes, or other objects."""
    if spec.modules:
        return False
    known = spec.formulas.abstract
    return abstract.slots.keys() != known.slots.keys() or (
        spec.scales is None and not same_structure(abstract.root, known.root)
    )


def _traced_keys(layer: Any) -> tuple[Any, Stacking | None]:
    """The keys of a layer that was built under a transform, and how the values of its stack lie.

    Raises:
        ShapeInferenceError: If its values do not all lie alike: then it is not known how a new one does.
    """
    waiting = [v for v in _graph.variables(layer) if isinstance(v, UninitializedVariable)]
    found: dict[int, Any] = {}
    for variable in waiting:
        found |= {i: k for i, k in enumerate(variable.pending.built_with) if k is not None and i not in found}
    keys = tuple([found.get(i) for i in range(max((len(v.pending.leaves) for v in waiting), default=0))])
    if all(v.pending.is_static for v in waiting):  # of a pickle
        return StaticKeys(keys), None
    stacking = stackings(layer).common
    if stacking is None:
        got = "a value that it has at these sizes only, in a stack whose other values lie each in its own way"
        where = _graph.place(layer, type(layer).__name__)
        raise ShapeInferenceError(Problem(where, got, "all axes of the stack in front", "nnx.vmap(make, out_axes=0)"))
    return keys, stacking


def _conform_node(node: Any, actual: Node, pattern: Node, path: Path, builder: ModuleBuilder) -> None:
    for name in pattern.attributes.keys() - actual.attributes.keys():
        vars(node).pop(name, None)
    for name, description in actual.attributes.items():
        value = vars(node).get(name, _graph.MISSING)
        new = _conform(value, description, pattern.attributes.get(name), (*path, name), builder)
        if new is not value:
            object.__setattr__(node, name, new)


def _conform(value: Any, description: Any, before: Any, path: Path, builder: ModuleBuilder) -> Any:
    """Return what an attribute, or an item of a container, is at these sizes; MISSING if it has to wait.

    Raises:
        ConfigurationError: If it is what the layer was given and does not have.
    """
    replaceable = value is _graph.MISSING or _is_own(value, before)  # else it was given: by a load, or by hand
    alike = _are_alike(description, before)
    if replaceable and isinstance(description, Given) and not alike:
        raise not_kept(builder.layer_builder.spec.name, path)
    met = id(description) in builder.made
    if not met and alike and isinstance(description, Node) and isinstance(value, nnx.Pytree):
        builder.made[id(description)] = value
        _conform_node(value, description, before, path, builder)
    elif isinstance(description, Container) and alike and type(value) is description.cls:
        return _conform_container(value, description, before, path, builder)
    elif isinstance(description, Container) or (isinstance(description, (Slot, Node, Held)) and (met or not alike)):
        return builder.make(description, path) if replaceable else value
    elif isinstance(description, Slot) and value is not _graph.MISSING:
        builder.made[id(description)] = value
    elif isinstance(description, Static) and replaceable and _is_there(value, description):
        return description.fresh()
    return value


def _conform_container(
    value: Any, description: Container, before: Container, path: Path, builder: ModuleBuilder
) -> Any:
    held, known = dict(_graph.children(value)), dict(before.items)
    if held.keys() != known.keys():
        return value  # changed by hand
    items = [(k, d, held.get(k, _graph.MISSING), known.get(k)) for k, d in description.items]
    new = [_conform(child, d, was, (*path, k), builder) for k, d, child, was in items]
    same = held.keys() == {k for k, _ in description.items}
    return value if same and all(a is b for a, (_, _, b, _) in zip(new, items, strict=True)) else description.of(new)


def _are_alike(description: Any, before: Any) -> bool:
    """Whether an attribute is of one kind at the sizes and at the probes' sizes: an object, of one class."""
    both = type(before) is type(description)
    return both and (not isinstance(description, (Node, Container)) or description.cls is before.cls)


def _is_there(value: Any, description: Static) -> bool:
    """Whether a static attribute is set before the layer is settled: in place of another, or as an array."""
    return value is not _graph.MISSING or isinstance(description.value, np.ndarray)


def _is_own(value: Any, before: Any) -> bool:
    """Whether an attribute is a placeholder, or what the constructor made at the probes' sizes with nothing filled."""
    if isinstance(value, UninitializedVariable):
        return isinstance(before, Slot)
    if isinstance(before, Static):
        return same_static(before.value, value)
    if not isinstance(before, (Node, Container)) or not isinstance(value, before.cls):
        return False
    return _graph.has_uninitialized_params(value) or not _graph.variables(value)
