"""What a load would write, and everything that is wrong with it, before anything is written."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer

from lazymods import _compat, _graph
from lazymods._errors import Problem, describe, located, short_dtype
from lazymods._graph import NODE, OTHER, STATE, Path, dotted, kind_of
from lazymods._initial.keys import is_key
from lazymods._initial.stacking import Shape
from lazymods._layer import held as _held
from lazymods._layer import lifecycle, structure
from lazymods._layer.abstract_module import AbstractModule
from lazymods._layer.config import REFUSALS, ConstructorInit, LayerConfig, example_key
from lazymods._layer.formulas import ShapeFormulas
from lazymods._layer.placeholder import UninitializedVariable, fits, show_shape
from lazymods._spread import is_spread
from lazymods.state.entries import IMPL, Place, Survey, home_trace, prefix_of
from lazymods.state.files.stored import Unread
from lazymods.state.plain import as_number
from lazymods.state.values import (
    as_array,
    cast_problem,
    is_deleted,
    is_number,
    is_storable,
    kind_problem,
    own,
    same_numbers,
    same_values,
    unwrapped,
)


class Write(NamedTuple):
    """An entry that fits: where it goes, its value, the dtype that it gets, and what is there now.

    The dtype is None for what is written as it is: a number, a text, a random key.
    """

    place: Place
    value: Any
    dtype: Any
    current: Any


def is_spread_place(place: Place) -> bool:
    """Whether the array that is there lies on several devices; random keys are made whole."""
    return not place.lazy and is_spread(place.value) and not is_key(place.value)


class LoadPlan:
    """What a load would do, and what is wrong with it.

    Args:
        survey: The model.
        given: What is to be written, by name.
        skip: Whether entries whose shape does not fit are left out.
        dtype: The dtype that floating-point parameters (``nnx.Param``) get, or ``"file"`` for the one that each has
            among ``given``; None: each its own.
        in_parts: Whether the values of a place are looked at when they are read, part by part.
        line_for: Returns the line to write for an entry of another shape, or None if none is known.

    Attributes:
        lazy: The model's lazy layers, with their paths, children before parents.
        sized: The layers whose every slot will have been written, with their abstract modules.
        writes: What fits, by name.
        missing: Names of the model without an entry.
        unexpected: Entries that the model has no name for.
        mismatched: Names whose entries do not fit in shape.
        problems: What is wrong.
        uninitialized: Uninitialized entries for parameters that have a value.
    """

    def __init__(
        self,
        survey: Survey,
        given: Mapping[str, Any],
        *,
        skip: bool,
        dtype: Any = None,
        in_parts: Callable[[Place], bool] = is_spread_place,
        line_for: Callable[[Place], str | None] = lambda place: None,
    ) -> None:
        self.survey: Survey = survey
        self.model: Any = survey.model
        self.places: dict[str, Place] = survey.places
        self.given: Mapping[str, Any] = given
        self.skip: bool = skip
        self.dtype: Any = dtype
        self.in_parts: Callable[[Place], bool] = in_parts
        self.line_for: Callable[[Place], str | None] = line_for
        self.lazy: list[tuple[Any, Any]] = [(p, n) for p, n in reversed(survey.nodes) if _graph.is_lazy_node(n)]
        self.sized: list[tuple[Any, AbstractModule]] = []
        self.grown: list[tuple[Any, AbstractModule]] = []
        self.writes: dict[str, Write] = {}
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self.mismatched: list[str] = []
        self.problems: list[Problem] = []
        self.uninitialized: list[Problem] = []
        self._made: dict[Any, Any] = {}

    @functools.cached_property
    def keeps_random_values(self) -> bool:
        """Whether anything is left as it is that may have been drawn: it is no constant."""
        left = [self.places[name] for name in (*self.missing, *self.mismatched) if name in self.places]
        return any(not place.lazy and not place.is_rng and _may_be_drawn(place.value) for place in left)

    @property
    def leaves_some(self) -> bool:
        """Whether the model will have entries that are not written, such as those that a layer initializes."""
        sized = {id(layer) for layer, _ in self.sized}
        return bool(self.missing or self.mismatched) or any(id(layer) not in sized for _, layer in self.lazy)

    def where(self, place: Place) -> str:
        """Name a place by its path and what is there."""
        return located(place.name, type(place.owner).__name__)

    def mismatch(self, place: Place, got: str, needed: str, write: str | None = None) -> None:
        """Note an entry whose shape does not fit."""
        self.mismatched.append(place.name)
        if not self.skip:
            write = write or 'mismatched="skip"  # leaves it out'
            self.problems.append(Problem(self.where(place), got, needed, write))

    def sizes_line(self, name: str) -> str | None:
        """Say what to write if an entry may be of a lazy layer whose sizes it does not tell, not even how many."""
        sized = {id(layer) for layer, _ in self.sized}
        for path, layer in self.lazy:
            spec = vars(layer)[STATE].spec
            if spec is None or not name.startswith(prefix_of(path)):
                continue
            several = [n for n in spec.left_out if isinstance(spec.default_of(n), (tuple, list))]
            if several or spec.guesses or (spec.unknown and structure.decides(layer) and id(layer) not in sized):
                sizes = ", ".join(f"{n}=..." for n in several or spec.unknown)
                return f"{spec.name}({sizes})  # the sizes of the file; or model(x) before the load"
        return None

    def cast_problem(self, place: Place, array: Any, dtype: Any) -> str | None:
        """Say why an array cannot be cast, or return None; where it is read in parts, by its dtype only."""
        if isinstance(array, (np.ndarray, Unread)) and self.in_parts(place):
            return kind_problem(array, dtype)
        return cast_problem(array, dtype)

    def misfit(self, place: Place, array: Any, dtype: Any, reason: str) -> Problem:
        """Return the problem of an array that cannot be cast."""
        line = f"array.astype({np.dtype(array.dtype).name!r})  # of what is in the model, before the load"
        is_float = isinstance(place.owner, nnx.Param) and jnp.issubdtype(array.dtype, jnp.floating)
        if is_float and self.dtype is not None and str(self.dtype) != "file":
            line = 'dtype="file"  # each parameter gets the dtype that it has there'
        return Problem(self.where(place), describe(array), reason, line)

    def problem(self, place: Place, got: str, needed: str, write: str) -> None:
        """Note that an entry cannot be written."""
        self.problems.append(Problem(self.where(place), got, needed, write))

    def made_instead(self, place: Place, shape: Shape) -> Any:
        """Return what a user's initializer makes, if it is another kind of array than the placeholder tells."""
        pending = place.value.pending if place.lazy else None
        if pending is None or not isinstance(pending.source, ConstructorInit) or pending.stacking.sizes:
            return None
        key = (id(pending.source), shape, pending.dtype)  # layers of one configuration share the source
        if key not in self._made:
            self._made[key] = pending.source.returned(shape, pending.dtype)
        return self._made[key]

    def target_dtype(self, place: Place, stored: Any, made: Any = None) -> Any:
        """Return the dtype that a value gets in a place: only parameters get what was asked for."""
        dtype = _dtype_of(place.value) if made is None else made.dtype
        becomes_jax = place.lazy and not isinstance(made, np.ndarray)
        if dtype is None or becomes_jax:  # an array of JAX has no 64 bits unless they are enabled
            dtype = jax.dtypes.canonicalize_dtype(stored if dtype is None else dtype)
        if self.dtype is None or not isinstance(place.owner, nnx.Param) or not jnp.issubdtype(dtype, jnp.floating):
            return dtype
        if not (isinstance(self.dtype, str) and self.dtype == "file"):
            return self.dtype
        is_kept = jnp.issubdtype(stored, jnp.floating) and not isinstance(place.value, np.ndarray)
        return jax.dtypes.canonicalize_dtype(stored) if is_kept else dtype


def _may_be_drawn(value: Any) -> bool:
    if not isinstance(value, (jax.Array, np.ndarray)) or is_key(value) or not _compat.are_concrete([value]):
        return False
    if is_deleted(value) or not getattr(value, "is_fully_addressable", True):
        return True  # nobody here can say
    return value.size > 0 and not bool((value == value.ravel()[0]).all())


def make_plan(
    survey: Survey,
    given: Mapping[str, Any],
    *,
    skip: bool,
    dtype: Any = None,
    fitted: Sequence[tuple[Any, AbstractModule]] = (),
    in_parts: Callable[[Place], bool] = is_spread_place,
    line_for: Callable[[Place], str | None] = lambda place: None,
) -> LoadPlan:
    """Check every entry against the model.

    Args:
        survey: The model.
        given: What is to be written, by name.
        skip: Whether to leave out what does not fit in shape.
        dtype: The dtype that floating-point parameters (``nnx.Param``) get, or ``"file"`` for the one that each has
            among ``given``; None: each its own.
        fitted: Layers whose sizes are known by other ways than formulas, with their abstract modules.
        in_parts: Whether the values of a place are looked at when they are read, part by part.
        line_for: Returns the line to write for an entry of another shape, or None if none is known.
    """
    plan = LoadPlan(survey, given, skip=skip, dtype=dtype, in_parts=in_parts, line_for=line_for)
    used: set[str] = set()
    groups: dict[tuple[int, Any], list[Place]] = {}
    for place in plan.places.values():
        groups.setdefault(place.identity, []).append(place)
    for aliases in groups.values():
        found = [p for p in aliases if p.name in given]
        used.update(p.name for p in found)
        if not found:
            if not aliases[0].is_rng:
                plan.missing.extend(p.name for p in aliases)
            continue
        if is_key(aliases[0].value) and not _graph.is_placeholder(given[found[0].name]):
            used.update(f"{p.name}.{IMPL}" for p in found)
            if _ties_agree(plan, found, given):
                _check_key(plan, found[0], given)
            continue
        if len(found) > 1:
            found.sort(key=lambda p: _graph.is_placeholder(given[p.name]))  # a value, if one has it
        if _ties_agree(plan, found, given):
            _check_entry(plan, found[0], given[found[0].name])
    plan.sized.extend(fitted)
    _check_lazy_layers(plan)
    order = {name: i for i, name in enumerate(plan.places)}
    plan.missing.sort(key=order.__getitem__)
    plan.unexpected = [k for k in given if k not in used]
    return plan


def _ties_agree(plan: LoadPlan, found: list[Place], given: Mapping[str, Any]) -> bool:
    first, *others = found
    for other in others:
        a, b = given[first.name], given[other.name]
        if _graph.is_placeholder(a) or _graph.is_placeholder(b):
            continue
        if not same_values(a, b) and not same_numbers(a, b):
            needed, line = "one value for what is one parameter", f"state.pop({other.name!r})  # or an equal entry"
            if not other.is_variable and kind_of(other.holder) is not NODE:  # trees of JAX, which once were equal
                key = other.name.partition(".")[0]
                needed = "one value for what is one and the same dict, list or array"
                line = f"state[{key!r}] = jax.tree.map(copy.copy, state[{key!r}])  # its own, before the load"
            got = f"another value than {first.name}, to which it is tied in the model"
            plan.problem(other, got, needed, line)
            return False
    return True


def _check_entry(plan: LoadPlan, place: Place, value: Any) -> None:
    current = place.value
    if _graph.is_placeholder(value):
        if not place.lazy:
            plan.uninitialized.append(
                Problem(
                    plan.where(place),
                    f"an uninitialized entry of shape {_partial(value)}",
                    f"a value: the model's parameter has one, {describe(current)}",
                    "lm.materialize(other, x)  # before lm.state_dict(other)",
                )
            )
        return
    if kind_of(current) is OTHER and not (isinstance(value, Tracer) and is_number(current)):
        _check_plain(plan, place, value, current)
        return
    array = _array_for(plan, place, value, current)
    if array is None:
        return
    shape = current.pending.shape if place.lazy else tuple(np.shape(current))
    if not fits(shape, array.shape):
        needed = show_shape(shape) if shape is not None else "?"
        write = plan.sizes_line(place.name) if place.lazy and len(shape or ()) != array.ndim else None
        plan.mismatch(place, describe(array), f"shape {needed}, without broadcasting", write or plan.line_for(place))
        return
    made = plan.made_instead(place, tuple(array.shape))
    dtype = plan.target_dtype(place, array.dtype, made)
    reason = plan.cast_problem(place, array, dtype)
    if reason is not None:
        plan.problems.append(plan.misfit(place, array, dtype, reason))
        return
    if isinstance(made, np.ndarray) and not isinstance(array, Tracer):
        array, dtype = np.array(array, dtype), None
    plan.writes[place.name] = Write(place, array, dtype, current)


def _check_plain(plan: LoadPlan, place: Place, value: Any, current: Any) -> None:
    """Check what is to take the place of a number, a text or another object."""
    if not is_number(current):
        if type(value) is type(current):
            plan.writes[place.name] = Write(place, value, None, current)
        else:
            needed = f"a value of type {type(current).__name__}, as the one that is there"
            plan.problem(place, describe(value), needed, f"state[{place.name!r}] = ...  # a value of that type")
        return
    array = value if is_number(value) else as_array(value)
    if array is None or is_deleted(array):
        plan.problem(place, describe(value), "a number", f"state[{place.name!r}] = 1  # a number")
    elif np.shape(array) != ():
        plan.mismatch(place, describe(array), f"one number, as {_number(current)} is")
    elif isinstance(current, (int, np.integer, np.bool_)) and type(array) is not int and not np.isfinite(array):
        needed = f"a finite number, as {_number(current)} is"
        plan.problem(place, str(np.asarray(array)), needed, f"state[{place.name!r}] = 1  # a number")
    else:
        number = array if is_number(array) else as_number(array, current)
        plan.writes[place.name] = Write(place, number, None, current)


def _array_for(plan: LoadPlan, place: Place, value: Any, current: Any) -> Any:
    """Return a value as an array; None if it is none that a place could hold, which is noted."""
    array = as_array(value)
    if array is None:
        needed, line = "an array of numbers", f"state[{place.name!r}] = jnp.asarray(value)"
        got = f"a value of type {type(value).__name__}"
        if hasattr(value, "shape"):  # such as a masked array, or a sparse tensor
            made = "array.filled(0)" if isinstance(value, np.ma.MaskedArray) else "np.asarray(array)"
            line = f"state[{place.name!r}] = {made}  # a plain one, with a number in each place"
        elif type(value) is int:
            got, needed = describe(value), "a number of at most 64 bits: an array has no longer ones"
        plan.problem(place, got, needed, line)
    elif is_deleted(array):
        got = "an array that was deleted or donated"
        plan.problem(place, got, "an array of numbers", f"state[{place.name!r}] = jnp.asarray(values)")
    elif isinstance(array, Tracer) and home_trace(plan.model) is not _compat.current_home():
        got = f"{describe(array)}, a traced value of a transform that the model is outside of"
        line = "lm.load(model, source)  # before or after the transform"
        plan.problem(place, got, "a value that outlives the transform", line)
    elif _has_no_numbers(current):
        got = f"{describe(value)}, for an array of {short_dtype(current.dtype)} in the model"
        line = f"state[{place.name!r}] = jnp.asarray(values)"
        plan.problem(place, got, "an array of numbers, as it is there", line)
    elif array.dtype.itemsize > 8 and _dtype_of(current) is None and not is_storable(array.dtype):  # a longdouble
        line = f"state[{place.name!r}] = values.astype(np.float32)"
        plan.problem(place, describe(array), "numbers that JAX has an array for", line)
    else:
        return array
    return None


def _number(value: Any) -> str:
    return describe(value) if type(value) is int else repr(value)


def _has_no_numbers(current: Any) -> bool:
    return isinstance(current, np.ndarray) and as_array(current) is None


def _partial(value: UninitializedVariable) -> str:
    return "?" if value.pending.shape is None else show_shape(value.pending.shape)


def _dtype_of(current: Any) -> Any:
    if _graph.is_placeholder(current):
        return current.pending.dtype
    return current.dtype if hasattr(current, "dtype") else jnp.result_type(current)


def _check_key(plan: LoadPlan, place: Place, given: Mapping[str, Any]) -> None:
    value = unwrapped(given[place.name])
    current = place.value
    impl = None
    if place.lazy:
        impl = str(jax.random.key_impl(example_key(current.dtype)))
    elif not isinstance(current, jax.ShapeDtypeStruct):
        impl = str(jax.random.key_impl(current))
    named = given.get(f"{place.name}.{IMPL}")
    if named is not None:
        named = bytes(np.asarray(named).astype(np.uint8)).decode(errors="replace")
    if is_key(value):
        named, value = str(jax.random.key_impl(value)), jax.random.key_data(value)
    array = as_array(value)
    is_other = named is not None and impl is not None and named != impl
    if array is None or is_deleted(array) or array.dtype != np.uint32 or is_other:
        got = f"{describe(value)} of a {named} key" if named else describe(value)
        plan.problem(place, got, f"the data of a {impl} key, uint32", "lm.state_dict(model, include_rng=True)")
        return
    known = place.value.pending.shape if place.lazy else current.shape
    words = jax.eval_shape(jax.random.key_data, example_key(current.dtype)).shape
    wanted = None if known is None else (*known, *words)
    if not fits(wanted, array.shape) or array.shape[-1:] != words:
        plan.mismatch(place, describe(array), f"shape {'?' if wanted is None else show_shape(wanted)}")
        return
    key = jax.random.wrap_key_data(*own([array]), impl=impl or named)
    if isinstance(current, jax.Array) and not isinstance(current, Tracer) and current.committed:
        key = jax.device_put(key, current.sharding)
    plan.writes[place.name] = Write(place, key, None, current)


def _check_lazy_layers(plan: LoadPlan) -> None:
    """Check that the entries of each lazy layer agree on its sizes."""
    by_owner = {id(w.place.owner): w for w in plan.writes.values()}
    done = {id(layer) for layer, _ in plan.sized}
    known: dict[Any, Any] = {}  # layers of one configuration share their spec, and those of one size the rest
    for path, layer in plan.lazy:
        spec = vars(layer)[STATE].spec
        if spec is None or spec.modules or spec.guesses or id(layer) in done:
            continue  # what fits is seen when the layer is settled
        formulas = known.get(spec) or known.setdefault(spec, spec.formulas)
        shapes, writes = _shapes_to_be(layer, formulas, by_owner)
        if not writes:
            continue
        key = (spec, tuple(shapes.items()))
        abstract, conflicts = known.get(key) or known.setdefault(key, _sized(spec, formulas, shapes))
        if abstract is not None:
            _note_other_structure(plan, layer, formulas.abstract, abstract)
        if abstract is not None and shapes.keys() == formulas.abstract.slots.keys() == abstract.slots.keys():
            plan.sized.append((layer, abstract))
        if conflicts:
            plan.mismatched.extend(w.place.name for w in writes)
            for write in writes:
                plan.writes.pop(write.place.name, None)
        if conflicts and not plan.skip:
            where = located(dotted(path), type(layer).__name__)
            needed = "entries that agree on the layer's sizes"
            line = "lm.load_state_dict(layer, lm.state_dict(other))  # entries of one and the same layer"
            plan.problems.append(Problem(where, conflicts[0], needed, line))
    if plan.mismatched:  # an entry that is left out may be tied into a layer that counted on it
        plan.sized.clear()


def _note_other_structure(plan: LoadPlan, layer: Any, known: AbstractModule, actual: AbstractModule) -> None:
    """Note what a layer has at the sizes of its entries only, and forget what it has not."""
    same_slots = actual.slots.keys() == known.slots.keys()
    spec = vars(layer)[STATE].spec
    if structure.has_other_slots(spec, actual) or structure.has_pending_arrays(spec, actual):
        plan.grown.append((layer, actual))
    if same_slots:
        return
    slots = lifecycle.own_slots(layer, known).items()
    gone = {id(value) for slot, (_, _, value) in slots if slot not in actual.slots}
    plan.missing = [name for name in plan.missing if id(plan.places[name].owner) not in gone]


def _shapes_to_be(
    layer: Any, formulas: ShapeFormulas, by_owner: Mapping[int, Write]
) -> tuple[dict[Path, Shape], list[Write]]:
    """Return the shapes of the slots that have a value or will get one, and the writes to them."""
    shapes, writes = {}, []
    held = lifecycle.own_slots(layer, formulas.abstract)
    stacked = _held.stackings_held(held)
    for slot, (_, _, value) in held.items():
        write = by_owner.get(id(value))
        if write is not None:
            writes.append(write)
            shape = write.value.shape
        elif not _graph.is_placeholder(value):
            shape = lifecycle.shape_of(value)
        else:
            continue
        shapes[slot] = stacked.part(slot, tuple(shape), len(formulas.abstract.slots[slot].shape))
    return shapes, writes


def _sized(
    spec: LayerConfig, formulas: ShapeFormulas, shapes: Mapping[Path, Shape]
) -> tuple[AbstractModule | None, Sequence[str]]:
    """Return the constructor at the sizes that some shapes tell, None if they tell none, and what does not fit."""
    values, conflicts = spec.read(formulas, shapes)
    if values is None:
        return None, conflicts
    try:
        abstract = spec.abstract(values, {})
    except REFUSALS as error:
        sizes, _ = spec.solve(formulas, shapes)
        return None, [f"{', '.join(f'{k}={v}' for k, v in sizes.items())}, which {spec.cls.__name__} refuses: {error}"]
    slots = abstract.slots
    wrong = {p: s for p, s in shapes.items() if p in slots and slots[p].shape != s}
    return None if wrong else abstract, [
        f"{dotted(p)} of shape {s}, where {slots[p].shape} follows from the other entries" for p, s in wrong.items()
    ]
