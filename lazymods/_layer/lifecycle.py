"""From lazy to ready: the only place that fills a layer's slots and swaps its class.

A lazy layer has the attributes of the class it will become, placeholders for its Variables, and one more static
attribute, its ``LazyState`` (see ``building``). :func:`fill` computes the values that are missing, then writes
all of them at once; :func:`settle` removes what made the layer lazy.

Values are made where the layer was born: in plain Python for a layer that is closed over by a transform, since
its keys are concrete; inside the transform for one that was built there. So no tracer is ever stored in an
object that outlives it.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lazymods import _compat, _graph
from lazymods._counts import COUNTS
from lazymods._errors import Problem, ShapeInferenceError, UninitializedError
from lazymods._graph import STATE, Path
from lazymods._initial import draws, placement
from lazymods._initial.pending import PendingInit
from lazymods._initial.stacking import Stacking, Stackings
from lazymods._layer.abstract_module import AbstractModule, Slot
from lazymods._layer.config import ConstructorInit, LayerConfig
from lazymods._layer.copying import copied
from lazymods._layer.drawing import note_draws
from lazymods._layer.formulas import ShapeFormulas
from lazymods._layer.held import check_held, shape_of, stackings
from lazymods._layer.merging import has_other_metadata, merge, put, renew_metadata
from lazymods._layer.placeholder import UninitializedArray, UninitializedVariable
from lazymods._layer.structure import BuiltWith, conform, has_other_slots, renew_random_state

if TYPE_CHECKING:
    from lazymods._layer.pending_values import PendingValues

TRANSIENT = (nnx.Cache, nnx.Intermediate)  # no state dict holds them: a loaded layer starts with new ones
LOCK = threading.RLock()  # one initialization at a time, in whatever thread


# ---------------------------------------------------------------- filling


def own_slots(layer: Any, abstract: AbstractModule) -> dict[Path, tuple[Any, Any, Any]]:
    """What the layer now holds at each slot: holder, key and value (a slot that was removed is left out)."""
    found = {}
    for path in abstract.slots:
        holder, value, key = None, layer, None
        for key in path:
            holder = value
            value = _graph.get_child(holder, key)
        if value is not _graph.MISSING:
            found[path] = (holder, key, value)
    return found


def modules_of(layer: Any) -> dict[str, Any]:
    """The modules that a lazy layer was given, by argument name; in a stack, one of each of those."""
    given = {argument: _graph.at(layer, path) for argument, path in vars(layer)[STATE].given.items()}
    stacking = stackings(layer).common if given else None
    if stacking is None or not stacking.sizes:
        return given
    return {argument: _one_of(module, stacking) for argument, module in given.items()}


def _one_of(module: Any, stacking: Stacking) -> Any:
    """Return a module as it is in one of the models that are stacked, for a constructor to look at."""

    def leaf(owner: Any) -> Any:
        raw = owner.get_raw_value() if isinstance(owner, nnx.Variable) else owner
        if isinstance(raw, PendingInit):
            one = PendingInit.build(raw.source, raw.element, raw.dtype, raw.label, raw.keys_of_each()[0])
        else:
            one = jax.tree.map(lambda a: _first(a, stacking), raw)
        return one if raw is owner else _compat.new_variable(type(owner), one, dict(_compat.raw_metadata(owner)))

    return copied(module, leaf, {})


def _first(array: Any, stacking: Stacking) -> Any:
    part = stacking.part(np.shape(array))
    if part is None or len(part) == np.ndim(array):
        return array
    if isinstance(array, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(part, array.dtype)
    axes = stacking.axes(len(part))
    return array[tuple([0 if axis in axes else slice(None) for axis in range(np.ndim(array))])]


def fill(layer: Any, values: Mapping[str, Any], *, traced_zeros: bool = False) -> AbstractModule:
    """Compute every slot of a factory-made layer that has no value yet, then write them all.

    Args:
        layer: A lazy layer.
        values: The inferred constructor arguments.
        traced_zeros: Write traced zeros instead; nothing is computed.

    Returns:
        The abstract module at those sizes.

    Raises:
        ShapeInferenceError: If a slot that has a value already, or a known axis, has another size.
    """
    spec = vars(layer)[STATE].spec
    abstract = spec.abstract(values, modules_of(layer))
    if not traced_zeros:
        note_draws(layer, abstract)
        renew_random_state(layer, abstract)
    if has_other_slots(spec, abstract):
        conform(layer, abstract)
    held = own_slots(layer, abstract)
    check_held(layer, abstract, held, stackings(layer))
    renew_metadata_of(layer, abstract)
    empty = {p: v for p, (_, _, v) in held.items() if isinstance(v, UninitializedVariable)}
    if not traced_zeros:
        for variable in empty.values():
            draws.use(variable.pending.turns)
    is_concrete = _compat.are_concrete(k for v in empty.values() for k in v.pending.leaves)
    level = _compat.eval_trace() if is_concrete and not traced_zeros else _compat.home_trace(layer)
    with _compat.at_trace(level):
        if traced_zeros:
            arrays = {p: _zeros(whole(abstract, p, v), v, abstract.slots[p]) for p, v in empty.items()}
        elif any(isinstance(k, jax.ShapeDtypeStruct) for v in empty.values() for k in v.pending.leaves):
            # a model that nnx.eval_shape made: abstract keys give abstract parameters
            arrays = {p: jax.ShapeDtypeStruct(whole(abstract, p, v), v.dtype) for p, v in empty.items()}
        else:
            arrays = _compute(spec, abstract, empty)
        for path, array in arrays.items():
            _write(layer, path, held[path][2], array)
    return abstract


def _write(layer: Any, path: Path, variable: Any, array: Any) -> None:
    if isinstance(variable, UninitializedArray):
        put(layer, path, placement.at_place(variable, array))
    elif isinstance(variable, UninitializedVariable):  # a tie inside the layer may have filled it
        variable.become(array)


def _zeros(shape: tuple[int, ...], variable: UninitializedVariable, slot: Slot) -> Any:
    """Return zeros that stand for a value in an abstract run: of weak type where the constructor makes one."""
    source, dtype = variable.pending.source, variable.dtype
    made = source.returned(slot.shape, dtype) if isinstance(source, ConstructorInit) else None
    dtype = dtype if made is None else jax.dtypes.canonicalize_dtype(made.dtype)
    weak = jnp.full(shape, {"f": 0.0, "i": 0, "c": 0j}.get(dtype.kind, False)) if slot.weak else None
    return weak if weak is not None and weak.dtype == dtype else _compat.abstract.zeros(shape, dtype)


def whole(abstract: AbstractModule, path: Path, variable: UninitializedVariable) -> tuple[int, ...]:
    """The shape of a slot's value at the sizes of an abstract module, with the axes that are stacked."""
    return variable.pending.stacking.whole(abstract.slots[path].shape)


def _compute(spec: LayerConfig, abstract: AbstractModule, empty: Mapping[Path, Any]) -> dict[Path, Any]:
    """Run the abstract module for the layer's own placeholders; those tied in from elsewhere know their own way."""
    own = _own(spec, empty)
    arrays = {p: v.pending.make(whole(abstract, p, v)) for p, v in empty.items() if p not in own}
    arrays |= _taken(abstract, own)
    waiting = {p: v for p, v in own.items() if p not in arrays}
    if waiting and _compat.current_trace() is _compat.eval_trace():
        from lazymods._layer.pending_values import PendingValues  # on first use: a model that is loaded never draws

        placed = any(placement.place_of(v) is not None for v in waiting.values())
        arrays |= PendingValues([(abstract, waiting)], placed=placed).run()[0]
    groups: dict[int, list[Path]] = {}  # by the identity of their keys
    for path, variable in own.items():
        if path not in arrays:
            groups.setdefault(id(variable.pending.key_source), []).append(path)
    for paths in groups.values():
        slots = [abstract.slots[p] for p in paths]
        made = empty[paths[0]].pending.stacked(functools.partial(abstract.run, slots))
        for path, array in zip(paths, made, strict=True):
            arrays[path] = abstract.slots[path].as_asked(array, empty[path].pending.dtype)
    return arrays


def _own(spec: LayerConfig, empty: Mapping[Path, Any]) -> dict[Path, Any]:
    """The placeholders that the layer's own constructor made."""
    own = {}
    for path, variable in empty.items():
        source = variable.pending.source
        if isinstance(source, ConstructorInit) and source.spec == spec and source.path == path:
            own[path] = variable
    return own


# ---------------------------------------------------------------- many layers at once


class _Local(threading.local):
    """What was computed in advance, for the layers that this thread is about to fill."""

    prepared: dict[int, tuple[Any, Any, Any]] | None = None  # by placeholder: itself, its pending init, the value


_LOCAL = _Local()


def plan(layers: Sequence[tuple[Any, Mapping[str, Any] | None]], calling: bool, placed: bool = False) -> PendingValues:
    """Plan the values of many layers together.

    Args:
        layers: Lazy layers and their inferred constructor arguments. Layers written by hand (None) are left out.
        calling: Whether initializers of users may be called.
        placed: Whether the values have places on a mesh.
    """
    from lazymods._layer.pending_values import PendingValues

    found = [_readable(layer, values) for layer, values in layers if values is not None]
    with _compat.at_trace(_compat.eval_trace()):
        return PendingValues([f for f in found if f is not None], calling, placed)


@contextlib.contextmanager
def prepared(drawing: PendingValues) -> Iterator[None]:
    """Compute what was planned, for the layers that are filled in the body; nothing is written here."""
    with _compat.at_trace(_compat.eval_trace()):
        drawn = drawing.run()
    values = {}
    for (_, own), arrays in zip(drawing.layers, drawn, strict=True):
        values |= {id(own[path]): (own[path], own[path].pending, array) for path, array in arrays.items()}
    _LOCAL.prepared = values
    try:
        yield
    finally:
        _LOCAL.prepared = None


def _readable(layer: Any, values: Mapping[str, Any]) -> tuple[AbstractModule, dict[Path, Any]] | None:
    """The abstract module and the placeholders of a layer that was made outside of traces; None for any other."""
    spec = vars(layer)[STATE].spec
    if spec is None or spec.modules:
        return None
    try:
        abstract = spec.abstract(values, {})
    except Exception:  # said with more of the context when it is the layer's turn
        return None
    held = own_slots(layer, abstract)
    own = _own(spec, {p: v for p, (_, _, v) in held.items() if isinstance(v, UninitializedVariable)})
    return (abstract, own) if _compat.are_concrete(k for v in own.values() for k in v.pending.leaves) else None


def _taken(abstract: AbstractModule, own: Mapping[Path, Any]) -> dict[Path, Any]:
    """Take what was computed in advance, if it is still what is wanted."""
    waiting = (_LOCAL.prepared or {}) if _compat.executing() else {}
    found = {}
    for path, variable in own.items():
        placeholder, pending, value = waiting.pop(id(variable), (None, None, None))
        if placeholder is variable and pending is variable.pending and value.shape == whole(abstract, path, variable):
            found[path] = value
    return found


# ---------------------------------------------------------------- settling


def settle(layer: Any, abstract: AbstractModule | None, *, keep_class: bool = False, strict: bool = True) -> None:
    """Remove what made a layer lazy, and let it become its class.

    Attributes are merged three ways: what the user changed since construction stays, everything else gets the
    value that the constructor would have given it at the sizes now known.

    Args:
        layer: A layer whose slots are filled.
        abstract: The constructor at the sizes now known; None for a layer written by hand.
        keep_class: Leave the class for the object outside of an nnx transform to settle.
        strict: As for :func:`note_draws`.

    Raises:
        ConfigurationError: As :func:`note_draws`.
        UninitializedError: If a transform would not carry out what it is then.
    """
    if abstract is not None:
        note_draws(layer, abstract, strict=strict)
        merge_attributes(layer, abstract)
        if keep_class:
            _check_carried(layer, abstract)
    del vars(layer)[STATE]
    _compat.forget_data_name(layer, STATE)
    if _graph.LOCAL.session is None:
        COUNTS.add(materializations=1)
    if not keep_class:
        finish_class(layer)


def _check_carried(layer: Any, abstract: AbstractModule) -> None:
    """Refuse what a transform of Flax does not carry out: it carries values, and no metadata."""
    spec = vars(layer)[STATE].spec
    if spec.scales is None and not spec.modules and has_other_metadata(abstract, spec.formulas.abstract):
        where = _graph.place(layer, type(layer).__name__)
        got = "metadata of its Variables that follow from a size, in the first call inside a transform of Flax"
        needed = "a first call outside: such a transform carries values out, and no metadata"
        write = "lm.materialize(model, x)  # before the transform"
        raise UninitializedError(Problem(where, got, needed, write))


_UPDATING = _compat.own_name("updating")


def start_update(node: Any) -> None:
    """Note that an nnx transform has emptied an object, to carry to it what became of its copy."""
    vars(node)[_UPDATING] = True


def end_update(node: Any) -> None:
    """Let an object become its class if the copy that was carried to it is initialized.

    A new copy inside a trace keeps its class, and so does an object that is a copy itself: the transform expects
    to find the node that it began with.
    """
    updating = vars(node).pop(_UPDATING, False)
    if STATE in vars(node):
        return
    outside = _compat.birth_trace(node) is _compat.eval_trace() and not _compat.transforms_running()
    if outside or (updating and not _compat.carrying_transforms(node)):
        finish_class(node)


def merge_attributes(layer: Any, abstract: AbstractModule) -> None:
    """Give a layer the attributes that its constructor gives it at the sizes now known, as :func:`settle` does."""
    spec = vars(layer)[STATE].spec
    formulas = spec.formulas.abstract if not spec.modules else abstract
    renew_metadata_of(layer, abstract)
    merge(layer, abstract.root, formulas.root)


def renew_metadata_of(layer: Any, abstract: AbstractModule) -> None:
    """Give the Variables of a layer the metadata that they have at the sizes now known, such as where their values go.

    Args:
        layer: A lazy layer.
        abstract: The constructor at these sizes.
    """
    spec = vars(layer)[STATE].spec
    if spec.scales is None and not spec.modules:
        renew_metadata(abstract, spec.formulas.abstract, own_slots(layer, abstract))


def finish_class(layer: Any) -> None:
    """Let a layer that is not lazy any more become its class (``cls_to_become``)."""
    target = type(layer).cls_to_become
    if target is not None:
        _compat.set_class(layer, target)


def settle_if_filled(
    layer: Any, *, initialize: bool = False, stacked: Stackings | None = None, keep_class: bool = False
) -> bool:
    """Settle a layer whose slots have all been filled one by one, by a load or by hand.

    Args:
        layer: A lazy layer.
        initialize: Initialize the slots that are empty, if the sizes follow from the others.
        stacked: What :func:`stackings` said before the slots were filled. None: what it says now.
        keep_class: As for :func:`settle`.

    Returns:
        Whether it settled; not if a slot is empty or a size does not follow from the slots.

    Raises:
        ShapeInferenceError: If the slots contradict each other.
    """
    spec = vars(layer)[STATE].spec
    if spec is None:
        if _graph.has_uninitialized_params(layer):
            return False
        layer.infer_attributes_from_state()
        settle(layer, None, keep_class=keep_class)
        return True
    stacked = stackings(layer) if stacked is None else stacked
    values = values_from_slots(layer, stacked)
    if values is None:
        return False
    abstract = spec.abstract(values, modules_of(layer))
    if has_other_slots(spec, abstract):
        conform(layer, abstract)
    held = own_slots(layer, abstract)
    empty = [v for _, _, v in held.values() if isinstance(v, UninitializedVariable)]
    if not initialize and not all(isinstance(v, TRANSIENT) for v in empty):
        return False
    if empty:
        fill(layer, values)
    else:
        check_held(layer, abstract, held, stacked)
    settle(layer, abstract, keep_class=keep_class, strict=False)
    return True


def note_draws_of_slots(
    layer: Any, stacked: Stackings, model: Any, *, strict: bool, keys: BuiltWith | None = None
) -> None:
    """Do what :func:`note_draws` does, if the sizes follow from the slots that are filled, before others use keys.

    Args:
        layer: A lazy layer, or one that was.
        stacked: As for :func:`settle_if_filled`.
        model: The model that it is in.
        strict: As for :func:`note_draws`.
        keys: As for :func:`renew_random_state`.

    Raises:
        ConfigurationError: As :func:`note_draws`.
    """
    state = vars(layer).get(STATE)
    if state is None or state.turns is None or state.spec.modules:
        return
    with contextlib.suppress(ShapeInferenceError):  # said when it is the layer's turn
        values = values_from_slots(layer, stacked)
        if values is not None:
            note_draws(layer, state.spec.abstract(values, {}), roots=model, strict=strict)
            renew_random_state(layer, state.spec.abstract(values, {}), keys)


def values_from_slots(layer: Any, stacked: Stackings | None = None) -> dict[str, Any] | None:
    """Read the inferred arguments from the slots that are filled; None if they do not follow.

    Args:
        layer: A lazy layer.
        stacked: As for :func:`settle_if_filled`.

    Raises:
        ShapeInferenceError: If the slots contradict each other.
    """
    spec = vars(layer)[STATE].spec
    modules = modules_of(layer)
    if any(_graph.has_uninitialized_params(m) for m in modules.values()):
        return None
    stacked = stackings(layer) if stacked is None else stacked
    problems: list[str] = []
    for reading in spec.readings():
        formulas = reading.probe(modules) if modules else reading.formulas
        shapes = _shapes_held(layer, formulas, stacked)
        values, conflicts = reading.read(formulas, shapes)
        problems = problems or conflicts
        if values is not None and (not spec.guesses or _agree(spec, values, shapes)):
            return values
    if problems:
        needed = "entries that agree on every size"
        write = "lm.load_state_dict(layer, lm.state_dict(other))  # arrays of one and the same layer"
        raise ShapeInferenceError(*(Problem(spec.name, p, needed, write) for p in problems))
    return None


def _shapes_held(layer: Any, formulas: ShapeFormulas, stacked: Stackings) -> dict[Path, tuple[int, ...]]:
    shapes = {}
    for path, (_, _, value) in own_slots(layer, formulas.abstract).items():
        if isinstance(value, UninitializedVariable):
            continue
        shape = stacked.part(path, shape_of(value), len(formulas.abstract.slots[path].shape))
        if len(shape) == len(formulas.abstract.slots[path].shape):
            shapes[path] = shape
    return shapes


def _agree(spec: LayerConfig, values: Mapping[str, Any], shapes: Mapping[Path, tuple[int, ...]]) -> bool:
    slots = spec.abstract(values, {}).slots
    return all(path in slots and slots[path].shape == shape for path, shape in shapes.items())
