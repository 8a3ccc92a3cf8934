"""Loading entries: everything is checked first, all problems are told together, then everything is written."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.core import Tracer
from jax.sharding import NamedSharding

from lazymods import _compat, _graph
from lazymods._errors import LazyError, Problem, StateDictError, UninitializedError, located
from lazymods._graph import LOCAL, MAPPING, NODE, STATE, dotted, hooks_of, kind_of, run_hooks
from lazymods._initial import placement, shards
from lazymods._layer import blocks, contexts, held, lifecycle, param_dtypes, stacks, structure
from lazymods._layer.abstract_module import AbstractModule
from lazymods._layer.config import ConstructorInit
from lazymods._layer.drawing import note_draws
from lazymods._layer.merging import put
from lazymods._layer.placeholder import UninitializedArray
from lazymods._memory import Incoming, transfer
from lazymods._refusals import wrong_argument
from lazymods._snapshot import Snapshot
from lazymods._spread import goes_to_several
from lazymods.state import by_trial
from lazymods.state.entries import Place, Survey, home_trace, is_buffer, memory_of, prefix_of
from lazymods.state.files.stored import StoredTensor, Unread, read_ahead
from lazymods.state.load_plan import LoadPlan, Write, is_spread_place, make_plan
from lazymods.state.load_result import LoadResult as LoadResult
from lazymods.state.placing import Placing, Target, is_placed
from lazymods.state.plain import decoded
from lazymods.state.values import cast, is_weak, own, same_values, weakly_typed


class Origin(NamedTuple):
    """Where the entries of a load come from, and what that allows.

    Attributes:
        name: What messages call it: ``the state dict``, or a file.
        sources: For each entry of another name, the names that it has there.
        owned: The ids of the arrays whose memory JAX may take over.
        advance: Called with the number of bytes whenever some have been copied.
        is_flax: Whether the entries are taken for ones of Flax's names and layouts.
        weak: The names whose values are of weak type, although they are arrays of numpy.
        warn: Called with the result; what it raises undoes the load, as a warning does that is an error.
        ignored: Names of entries that need no parameter.
        may_miss: Says of a name whether the model may have no entry for it.
        line_for: Returns the line to write for an entry whose shape does not fit, or None.
        why_missing: Returns, for names without an entry, what was got instead and the line to write, where it is known.
        remarks: What an error says below its heading.
        problems: What is wrong with the entries beside what does not fit.
        placing: Where on a mesh the arrays go; None: where the model has them.
        written: Names whose entries the model has already, from the same load.
    """

    name: str = "the state dict"
    sources: Mapping[str, tuple[str, ...]] = {}
    owned: Collection[int] = frozenset()
    advance: Callable[[int], None] | None = None
    is_flax: bool = True
    weak: Collection[str] = frozenset()
    warn: Callable[[LoadResult], None] | None = None
    ignored: Collection[str] = ()
    may_miss: Callable[[str], bool] = lambda name: False
    why_missing: Callable[[Sequence[str]], Mapping[str, tuple[str, str]]] = lambda names: {}
    line_for: Callable[[Place], str | None] = lambda place: None
    remarks: Sequence[str] = ()
    problems: Sequence[Problem] = ()
    placing: Placing | None = None
    written: Collection[str] = ()

    def in_parts(self, place: Place) -> bool:
        """Whether what goes to a place is read part by part, for several devices."""
        return is_spread_place(place) or (self.placing is not None and is_placed(place))


def load_entries(
    model: Any,
    entries: Mapping[str, Any],
    *,
    strict: bool,
    mismatched: str,
    dtype: Any = None,
    origin: Origin | None = None,
    survey: Survey | None = None,
) -> LoadResult:
    """Write entries into a model, as :func:`load_state_dict` says.

    Args:
        model: The model.
        entries: Arrays by the model's names.
        strict: Whether missing and unexpected entries are errors.
        mismatched: ``"error"`` or ``"skip"``.
        dtype: The dtype that floating-point parameters (``nnx.Param``) get, or ``"file"`` for the one that each has
            among ``entries``; None: each its own.
        origin: Where they come from; None: somebody's state dict.
        survey: The model, if it has been walked already.
    """
    if mismatched not in ("error", "skip"):
        raise wrong_argument("mismatched", mismatched, 'one of "error", "skip"', 'mismatched="skip"')
    origin = origin or Origin()
    if LOCAL.apart is None:
        with stacks.apart(abstract=True):
            return load_entries(
                model, entries, strict=strict, mismatched=mismatched, dtype=dtype, origin=origin, survey=survey
            )
    with lifecycle.LOCK:
        survey = survey or Survey(model)
        given = dict(entries)
        found = origin.sources
        if survey.hooked:
            origin = origin._replace(written=())  # a hook need not give the same entries again
            before, given = given, _run_pre_hooks(survey, dict(given), strict)
            found = _found_by_hooks(before, given, origin)
            survey = Survey(model)  # a hook may do anything
        entries = decoded(given, survey.places)
        how = {"skip": mismatched == "skip", "dtype": dtype, "in_parts": origin.in_parts, "line_for": origin.line_for}
        plan = make_plan(survey, entries, **how)
        fitted = by_trial.fitted(survey, entries)
        snapshot = Snapshot(model) if plan.grown or fitted else None
        try:
            if plan.grown or fitted:  # layers that hold more at the sizes of their entries than what was known
                _grow(plan, fitted)
                survey = Survey(model)
                given = {n: _read(v, survey.places.get(n), origin) for n, v in given.items()}
                entries = decoded(given, survey.places)
                plan = make_plan(survey, entries, fitted=fitted, **how)
            result = _result(plan, origin, found)
            after = [n for _, n in survey.hooked if hooks_of(n, "load_state_dict_post")]
            _raise_problems(plan, result, origin, strict=strict and not after)
            snapshot = snapshot or Snapshot(model)
            snapshot.keep(memory_of(w.place for w in plan.writes.values()))
            with _compat.at_trace(home_trace(model)):  # what is written must outlive the current trace
                with placement.told_later():
                    _write(plan, origin)
                    if dtype is not None:
                        param_dtypes.follow([node for _, node in _graph.nodes(model)])
                    LOCAL.apart.put_together(used_up=not after)
                    if origin.placing is not None and plan.leaves_some:
                        with stacks.together():
                            origin.placing.move_rest(Survey(model))
                _tell_xla(model)
            _finish(plan, result, origin, after, strict=strict)
        except BaseException:
            LOCAL.apart.restore()
            if snapshot is not None:
                snapshot.restore()
            raise
    return result


def _finish(plan: LoadPlan, result: LoadResult, origin: Origin, after: Sequence[Any], *, strict: bool) -> None:
    """Run the hooks of a load that has written, and say what there is to say of it."""
    for node in reversed(after):  # children before parents
        run_hooks(node, "load_state_dict_post", result)
    _raise_problems(plan, result, origin, strict=strict)
    if origin.warn is not None:
        origin.warn(result)


def _result(plan: LoadPlan, origin: Origin, found: Mapping[str, tuple[str, ...]]) -> LoadResult:
    matched = {name: found.get(name, (name,)) for name in plan.writes}
    unexpected = [name for name in plan.unexpected if name not in origin.ignored]
    return LoadResult(plan.missing, unexpected, plan.mismatched, matched)


def _found_by_hooks(
    before: Mapping[str, Any], given: Mapping[str, Any], origin: Origin
) -> Mapping[str, tuple[str, ...]]:
    """Return the names in the file of what hooks have left, moved or made; what they have made has none."""
    if not origin.sources:
        return {}
    by_value = {id(value): name for name, value in before.items()}
    out = {}
    for name, value in given.items():
        old = name if before.get(name) is value else by_value.get(id(value))
        out[name] = () if old is None else origin.sources.get(old, (old,))
    return out


def _grow(plan: LoadPlan, fitted: Sequence[tuple[Any, AbstractModule]]) -> None:
    """Give layers what they hold at the sizes of their entries only, and those found by trial their shapes."""
    tried = {id(layer) for layer, _ in fitted}
    grown = [(layer, abstract) for layer, abstract in plan.grown if id(layer) not in tried]
    grown += fitted
    for layer, abstract in [*grown, *plan.sized]:  # what is new in one depends on the others' draws
        note_draws(layer, abstract, roots=plan.model, strict=plan.keeps_random_values)
    for layer, abstract in grown:
        structure.conform(layer, abstract)
    for layer, abstract in fitted:
        structure.set_shapes(layer, abstract)


def _read(value: Any, place: Place | None, origin: Origin) -> Any:
    """Read an entry that was left in its file for want of a place, or of one of its shape."""
    if place is None or not isinstance(value, (Unread, StoredTensor)):
        return value
    stored = value.stored if isinstance(value, Unread) else value
    return Unread(stored) if origin.in_parts(place) else stored.read()


def _run_pre_hooks(survey: Survey, given: dict[str, Any], strict: bool) -> dict[str, Any]:
    messages: list[str] = []
    for path, node in survey.hooked:
        if not hooks_of(node, "load_state_dict_pre"):
            continue
        prefix = prefix_of(path)
        own = {k: v for k, v in given.items() if k.startswith(prefix)}
        rest = {k: v for k, v in given.items() if not k.startswith(prefix)}
        run_hooks(node, "load_state_dict_pre", own, prefix, {}, strict, [], [], messages)
        given = rest | own
    if messages:
        name = type(survey.model).__name__
        needed, line = "entries that the hook accepts", "lm.load_state_dict(model, lm.state_dict(other))"
        raise StateDictError(
            *(Problem(name, m, needed, line) for m in messages), heading=f"a hook refuses the state dict for {name}"
        )
    return given


# ---------------------------------------------------------------- telling


def _raise_problems(plan: LoadPlan, result: LoadResult, origin: Origin, *, strict: bool) -> None:
    problems = [*origin.problems, *plan.problems]
    missing = [name for name in result.missing if not origin.may_miss(name)] if strict else []
    unexpected = result.unexpected if strict else []
    if not (problems or missing or unexpected or plan.uninitialized):
        return
    from lazymods.state import advice  # of no use to most loads

    lengths = advice.lengths_of(plan)
    problems += advice.problems(
        plan,
        missing,
        unexpected,
        lengths,
        file=origin.name,
        sources={**origin.sources, **result.matched},
        known=origin.why_missing(missing),
        is_flax=origin.is_flax,
        may_ignore=bool(origin.sources),  # lm.load takes it
    )
    heading = _heading(plan.model, origin)
    cause = advice.cause(result.missing, result.unexpected, lengths, is_flax=origin.is_flax)
    if cause is not None:
        heading += f"\n  cause:  {cause[0]}\n  write:  {cause[1]}"
    heading += "".join(f"\n  note:   {remark}" for remark in origin.remarks)
    if plan.uninitialized:
        raise UninitializedError(*plan.uninitialized, *problems, heading=heading)
    error = StateDictError(*problems, heading=heading)
    error.missing, error.unexpected, error.mismatched = result
    raise error


def _heading(model: Any, origin: Origin) -> str:
    return f"{origin.name} does not fit {type(model).__name__}; nothing was loaded"


# ---------------------------------------------------------------- writing


def _write(plan: LoadPlan, origin: Origin) -> None:
    sized = {id(layer) for layer, _ in plan.sized}
    waiting = [
        (p, n, held.stackings(n)) for p, n in plan.lazy if id(n) not in sized and _graph.has_uninitialized_params(n)
    ]
    keys = {id(n): structure.built_with(n) for _, n, _ in waiting}  # the placeholders have them until they are filled
    written = {id(write.place.owner) for write in plan.writes.values()}
    partly = {id(n) for _, n, _ in waiting if any(id(e.value) in written for e in _graph.entries(n))}
    carried = {id(n) for _, n in plan.lazy if id(n) in sized | partly and contexts.load_is_carried(n)}
    for owner in [write.place.owner for write in plan.writes.values() if write.place.lazy]:
        contexts.load_is_carried(owner)
    for layer, abstract in plan.sized:
        note_draws(layer, abstract, roots=plan.model, strict=plan.keeps_random_values)
    for layer, abstract in plan.sized:
        structure.renew_random_state(layer, abstract)
        lifecycle.renew_metadata_of(layer, abstract)
    _write_values(plan, origin)
    for layer, abstract in plan.sized:
        lifecycle.settle(layer, abstract, keep_class=id(layer) in carried, strict=False)
    for _, layer, stacked in waiting:
        strict = plan.keeps_random_values
        lifecycle.note_draws_of_slots(layer, stacked, plan.model, strict=strict, keys=keys[id(layer)])
    for path, layer, stacked in waiting:
        how = {"initialize": id(layer) in partly, "stacked": stacked, "keep_class": id(layer) in carried}
        try:
            if STATE in vars(layer):
                lifecycle.settle_if_filled(layer, **how)
        except LazyError as error:
            problem = error.problems[0] if error.problems else None
            got = problem.got if problem else str(error)
            where = located(dotted(path), type(layer).__name__)
            needed = "entries that fit the layer"
            line = "lm.load_state_dict(layer, lm.state_dict(other))  # entries of one and the same layer"
            raise StateDictError(Problem(where, got, needed, line), heading=_heading(plan.model, origin)) from error


def _write_values(plan: LoadPlan, origin: Origin) -> None:
    """Make all values, then write them: into arrays of numpy in place, else in place of what is there."""
    writes = [w for w in plan.writes.values() if w.place.name not in origin.written]
    placed = _placed(plan, origin)
    goals = _together_first(plan, _goals(plan) | placed)
    batch = [w for w in writes if _is_transferred(w)]
    spread = [w for w in batch if goes_to_several(goals[w.place.name])]
    whole = [w for w in batch if not goes_to_several(goals[w.place.name])]
    on_device = _spread(plan, spread, goals, origin) if spread else {}
    arrays = transfer(_incoming(whole, goals, origin), origin.advance)
    on_device |= {w.place.name: a for w, a in zip(whole, arrays, strict=True)}
    made: list[tuple[Write, Any]] = []
    parts: dict[tuple[Any, ...], tuple[Write, dict[Any, Any]]] = {}  # several may be parts of one tuple
    shared = [w for w in writes if _is_shared(w, origin)]
    copies = dict(zip((w.place.name for w in shared), own([w.value for w in shared]), strict=True))
    fills = []
    for planned in writes:
        write = planned._replace(value=copies.get(planned.place.name, planned.value))
        goal = goals.get(write.place.name)
        value = _new_value(write, on_device.get(write.place.name), goal, origin)
        if goal is None:
            value = shards.of_type(value, shards.type_of(write.current))
        if is_buffer(write.current):
            fills.append((write, value))
            value = write.current
        if write.place.leaf:
            parts.setdefault(write.place.replaced, (write, {}))[1][write.place.leaf] = value
        else:
            made.append((write, value))
    # the placeholders of raw arrays in what is made anew are found there
    made = [*((write, write.place.replace(values)) for write, values in parts.values()), *made]
    _fill(plan, fills, origin)
    places = {id(w.place.owner): (w.place.owner, goals[w.place.name]) for w in writes if w.place.name in placed}
    with placement.places_of(places):
        for write, value in made:  # nothing fails from here on that could be known before
            _put(plan.model, write, value)


def _fill(plan: LoadPlan, fills: Sequence[tuple[Write, Any]], origin: Origin) -> None:
    """Write into arrays of numpy; where two have memory in common, or one with itself, the last value is there."""
    for write, values in fills:
        write.current[...] = values
    got = "an array that shares its memory with another entry's, or with itself, where the values differ"
    line = "module.buffer = module.buffer.copy()  # memory of its own"
    problems = [
        Problem(plan.where(write.place), got, "a place for each number", line)
        for write, values in fills
        if not same_values(write.current, values)
    ]
    if problems:
        raise StateDictError(*problems, heading=_heading(plan.model, origin))


def _is_transferred(write: Write) -> bool:
    """Whether an entry goes to the device as it lies in memory; numpy's 64 bits are not JAX's to cut."""
    is_on_host = isinstance(write.value, (np.ndarray, Unread))
    return is_on_host and write.dtype is not None and not isinstance(write.current, np.ndarray)


def _goals(plan: LoadPlan) -> dict[str, Any]:
    """Return where the model has each array, by name; None: on the default device, or the mesh that is set."""
    goals: dict[str, Any] = {}
    for name, write in plan.writes.items():
        if write.dtype is not None and not isinstance(write.current, np.ndarray):
            current, place = write.current, write.place
            if isinstance(current, Tracer) and isinstance(place.owner, nnx.Variable) and not place.leaf:
                current = blocks.value_outside(place.owner)
            placed = isinstance(current, jax.Array) and not isinstance(current, Tracer) and current.committed
            goals[name] = current.sharding if placed or isinstance(current, jax.ShapeDtypeStruct) else None
    return goals


def _placed(plan: LoadPlan, origin: Origin) -> dict[str, Any]:
    """Return where arrays go on the mesh, by name."""
    if origin.placing is None:
        return {}
    writes = [w for w in plan.writes.values() if w.dtype is not None and is_placed(w.place)]
    return origin.placing.shardings(plan.survey, [Target(w.place, w.value.shape, w.dtype) for w in writes])


def _together_first(plan: LoadPlan, goals: dict[str, Any]) -> dict[str, Any]:
    """Let what a stack has go nowhere in a program, which runs on all devices, before it is put together."""
    if home_trace(plan.model) is _compat.eval_trace():
        return goals
    layers = stacks.layers_of(plan.survey.nodes)
    return {n: None if layers.of(n, plan.places[n].owner).sizes else goal for n, goal in goals.items()}


def _spread(plan: LoadPlan, writes: Sequence[Write], goals: Mapping[str, Any], origin: Origin) -> dict[str, jax.Array]:
    """Make the arrays that go to several devices."""
    from lazymods.state.sharded_loading import Spread, load_spread  # most loads are for one device

    entries = [Spread(w.place.name, w.value, w.dtype, goals[w.place.name], id(w.value) in origin.owned) for w in writes]
    arrays, misfits = load_spread(entries, origin.advance)
    wrong = [(w, misfits[w.place.name]) for w in writes if w.place.name in misfits]
    if wrong:
        problems = [plan.misfit(w.place, w.value, w.dtype, reason) for w, reason in wrong]
        raise StateDictError(*problems, heading=_heading(plan.model, origin))
    return {w.place.name: array for w, array in zip(writes, arrays, strict=True)}


def _is_shared(write: Write, origin: Origin) -> bool:
    """Whether a value is somebody's array of JAX, which a model would hold as it is."""
    is_array = isinstance(write.value, jax.Array) and not is_buffer(write.current)
    is_kept = write.dtype is not None and is_array and write.value.dtype == write.dtype
    return is_kept and id(write.value) not in origin.owned


def _incoming(writes: Sequence[Write], goals: Mapping[str, Any], origin: Origin) -> Iterator[Incoming]:
    read = read_ahead(w.value.stored for w in writes if isinstance(w.value, Unread))
    for write in writes:
        value = next(read) if isinstance(write.value, Unread) else write.value
        yield Incoming(value, write.dtype, goals[write.place.name], id(write.value) in origin.owned)


def _new_value(write: Write, array: jax.Array | None, goal: Any, origin: Origin) -> Any:
    if write.dtype is None:
        return write.value
    if isinstance(write.current, np.ndarray):
        return np.array(write.value, write.current.dtype)
    new = array if array is not None else _at_goal(cast(write.value, write.dtype, write.current), goal)
    if write.place.name in origin.weak and not write.place.lazy:
        return weakly_typed(new) if new.dtype == write.value.dtype else new
    weak = write.place.name in origin.weak or is_weak(write.value)
    return weakly_typed(new) if weak and _is_weak_place(write) else new


def _at_goal(array: jax.Array, goal: Any) -> jax.Array:
    if isinstance(array, Tracer):  # made of arrays of JAX in a transform
        return shards.told(array, goal) if goes_to_several(goal) else array
    if goal is None or array.sharding == goal:
        return array
    return shards.put(array, goal) if isinstance(goal, NamedSharding) else jax.device_put(array, goal)


def _is_weak_place(write: Write) -> bool:
    """Whether a value of weak type is there, or one that the constructor of a lazy layer makes."""
    if not write.place.lazy:
        return is_weak(write.current)
    source = write.current.pending.source
    slot = source.spec.formulas.abstract.slots.get(source.path) if isinstance(source, ConstructorInit) else None
    return slot is not None and slot.weak


def _tell_xla(model: Any) -> None:
    """Let what a load has written in a transform stay where it is on a mesh, also stacks."""
    if home_trace(model) is _compat.eval_trace():
        return
    with stacks.together():
        for variable in _graph.variables(model):
            raw = variable.get_raw_value()
            told = raw if isinstance(raw, _compat.REFERENCES) else placement.told_to_xla(variable, raw)
            if told is not raw:
                _compat.SET_RAW(variable, told)


def _put(model: Any, write: Write, value: Any) -> None:
    place = write.place
    if not place.lazy:
        place.write(value)
    elif not isinstance(place.owner, UninitializedArray):
        place.owner.become(value)
    elif kind_of(place.holder) in (NODE, MAPPING) or isinstance(place.holder, list):
        put(place.holder, (place.key,), value)
    else:  # in a tuple
        for entry in [e for e in _graph.entries(model) if e.value is place.owner]:
            put(model, entry.path, value)
