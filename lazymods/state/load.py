"""``load_state_dict``: everything is checked first, all problems are told together, then everything is written."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer

from lazymods import _compat, _graph, _hooks, _lifecycle
from lazymods._errors import (
    LazyError,
    Problem,
    StateDictError,
    UninitializedError,
    describe,
    located,
)
from lazymods._graph import STATE, dotted
from lazymods._placeholder import UninitializedArray, UninitializedVariable, fits, show_shape
from lazymods._recipe import is_key
from lazymods._snapshot import Snapshot
from lazymods._spec import REFUSALS
from lazymods.state.entries import IMPL, Place, leaf_of, named_places, prefix_of, raw_of
from lazymods.state.values import as_array, cast, cast_problem, same_values


class LoadResult(NamedTuple):
    """What a load did not use or find, as lists of dotted names.

    Attributes:
        missing: Parameters of the model without an entry.
        unexpected: Entries without a parameter.
        mismatched: Entries whose shape does not fit, left out by ``mismatched="skip"``.
    """

    missing: list[str]
    unexpected: list[str]
    mismatched: list[str]

    @property
    def missing_keys(self) -> list[str]:
        """``missing``, by PyTorch's name."""
        return self.missing

    @property
    def unexpected_keys(self) -> list[str]:
        """``unexpected``, by PyTorch's name."""
        return self.unexpected

    def __repr__(self) -> str:
        """Say that all matched, or list what did not."""
        if not any(self):
            return "<All keys matched successfully>"
        return f"LoadResult(missing={self.missing}, unexpected={self.unexpected}, mismatched={self.mismatched})"


@dataclasses.dataclass
class _Write:
    """An entry that fits: where it goes and its value."""

    place: Place
    value: Any


class _Plan:
    """What a load would do, and what is wrong with it."""

    def __init__(self, model: Any, mismatched: str) -> None:
        self.model, self.skip = model, mismatched == "skip"
        self.writes: dict[str, _Write] = {}
        self.missing: list[str] = []
        self.mismatched: list[str] = []
        self.problems: list[Problem] = []
        self.uninitialized: list[Problem] = []

    def where(self, place: Place) -> str:
        return located(place.name, type(place.owner).__name__)

    def mismatch(self, place: Place, got: str, needed: str) -> None:
        self.mismatched.append(place.name)
        if not self.skip:
            write = 'mismatched="skip" to leave it out, or an entry that fits'
            self.problems.append(Problem(self.where(place), got, needed, write))

    def problem(self, place: Place, got: str, needed: str, write: str) -> None:
        self.problems.append(Problem(self.where(place), got, needed, write))


def load_state_dict(
    model: nnx.Module, state_dict: Mapping[str, Any], *, strict: bool = True, mismatched: str = "error"
) -> LoadResult:
    """Write the entries of a state dict into a model, lazy or not.

    A lazy layer that gets all its parameters takes its sizes from them and becomes its class at once; nothing is
    initialized. One that gets some of them keeps those, and initializes the rest at its first call. Values go into
    the Variables that are there, cast to their dtype, so optimizers and ties hold. All or nothing: if anything is
    wrong, all of it is told and the model is as it was.

    Args:
        model: An nnx module, or any nnx object.
        state_dict: Arrays (JAX, numpy, or anything that converts to numpy) by dotted name. An uninitialized
            entry leaves an uninitialized parameter as it is.
        strict: Whether missing and unexpected entries are errors. Random state may always be missing.
        mismatched: ``"error"``, or ``"skip"`` to leave out entries whose shape does not fit, and list them.

    Returns:
        What was missing, unexpected and mismatched.

    Raises:
        StateDictError: If an entry does not fit: shape, dtype (complex into real, out of an integer's range), tied
            parameters whose entries differ, or, if ``strict``, missing and unexpected names.
        UninitializedError: If an uninitialized entry meets a parameter that has a value.
        TypeError: If ``state_dict`` is no mapping from names.
        ValueError: If ``mismatched`` is neither ``"error"`` nor ``"skip"``.

    Example:
        >>> import lazymods as lm
        >>> from flax import nnx
        >>> layer = lm.LazyLinear(4, rngs=nnx.Rngs(0))
        >>> lm.load_state_dict(layer, lm.state_dict(nnx.Linear(3, 4, rngs=nnx.Rngs(1))))
        <All keys matched successfully>
        >>> layer.in_features, type(layer).__name__
        (3, 'Linear')
    """
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"a state dict is a mapping from names to arrays, got {type(state_dict).__name__}")
    if mismatched not in ("error", "skip"):
        raise ValueError(f'mismatched is "error" or "skip", got {mismatched!r}')
    wrong = [k for k in state_dict if not isinstance(k, str)]
    if wrong:
        raise TypeError(f"names are dotted strings, got {wrong[0]!r} of type {type(wrong[0]).__name__}")
    with _lifecycle.LOCK:
        given = _run_pre_hooks(model, dict(state_dict), strict)
        plan, unexpected = _plan(model, given, mismatched)
        result = LoadResult(plan.missing, unexpected, plan.mismatched)
        hooked = [n for _, n in _graph.nodes(model) if _hooks.hooks_of(n, "load_state_dict_post")]
        _raise_problems(model, plan, result, strict=strict and not hooked)
        snapshot = Snapshot(model)
        try:
            with _compat.at_trace(_compat.home_trace(model)):  # what is written must outlive the current trace
                _write(model, plan)
            for node in reversed(hooked):  # children before parents
                _hooks.run_hooks(node, "load_state_dict_post", result)
            _raise_problems(model, plan, result, strict=strict)
        except BaseException:
            snapshot.restore()
            raise
    return result


def _run_pre_hooks(model: Any, given: dict[str, Any], strict: bool) -> dict[str, Any]:
    messages: list[str] = []
    for path, node in _graph.nodes(model):
        if not _hooks.hooks_of(node, "load_state_dict_pre"):
            continue
        prefix = prefix_of(path)
        own = {k: v for k, v in given.items() if k.startswith(prefix)}
        rest = {k: v for k, v in given.items() if not k.startswith(prefix)}
        _hooks.run_hooks(node, "load_state_dict_pre", own, prefix, {}, strict, [], [], messages)
        given = rest | own
    if messages:
        heading = f"a hook refuses the state dict for {type(model).__name__}"
        raise StateDictError(
            *(
                Problem(type(model).__name__, m, "entries that the hook accepts", "another state dict")
                for m in messages
            ),
            heading=heading,
        )
    return given


# ---------------------------------------------------------------- checking


def _plan(model: Any, given: dict[str, Any], mismatched: str) -> tuple[_Plan, list[str]]:
    plan = _Plan(model, mismatched)
    used: set[str] = set()
    groups: dict[tuple[int, Any], list[Place]] = {}
    named = named_places(model)
    for place in named.values():
        groups.setdefault((id(place.owner), place.leaf), []).append(place)
    for aliases in groups.values():
        found = [p for p in aliases if p.name in given]
        used.update(p.name for p in found)
        if not found:
            if not aliases[0].is_rng:
                plan.missing.extend(p.name for p in aliases)
            continue
        if is_key(aliases[0].value) and not _graph.is_placeholder(aliases[0].owner):
            used.update(f"{p.name}.{IMPL}" for p in found)
            _check_key(plan, found[0], given)
            continue
        found.sort(key=lambda p: isinstance(given[p.name], UninitializedVariable))  # a value, if one has it
        if _ties_agree(plan, found, given):
            _check_entry(plan, found, given[found[0].name])
    _check_lazy_layers(plan)
    order = {name: i for i, name in enumerate(named)}
    plan.missing.sort(key=order.__getitem__)
    return plan, [k for k in given if k not in used]


def _ties_agree(plan: _Plan, found: list[Place], given: dict[str, Any]) -> bool:
    first, *others = found
    for other in others:
        a, b = given[first.name], given[other.name]
        if isinstance(a, UninitializedVariable) or isinstance(b, UninitializedVariable):
            continue
        if not same_values(a, b):
            plan.problem(
                other,
                f"another value than {first.name}, to which it is tied in the model",
                "one value for what is one parameter",
                f"equal entries, or only {first.name}",
            )
            return False
    return True


def _check_entry(plan: _Plan, found: list[Place], value: Any) -> None:
    place = found[0]
    current = place.value
    lazy = _graph.is_placeholder(current)
    if isinstance(value, UninitializedVariable):
        if not lazy:
            plan.uninitialized.append(
                Problem(
                    plan.where(place),
                    f"an uninitialized entry of shape {_partial(value)}",
                    f"a value: the model's parameter has one, {describe(current)}",
                    "lm.materialize(other, x) before lm.state_dict(other)",
                )
            )
        return
    array = as_array(value)
    if array is None or (isinstance(array, jax.Array) and not isinstance(array, Tracer) and array.is_deleted()):
        got = f"a value of type {type(value).__name__}" if array is None else "an array that was deleted or donated"
        plan.problem(place, got, "an array of numbers", f"jnp.asarray(...) for {place.name}")
        return
    if isinstance(array, Tracer) and _compat.home_trace(plan.model) is not _compat.current_trace():
        got = f"{describe(array)}, a traced value of a transform that the model is outside of"
        plan.problem(place, got, "a value that outlives the transform", "the load before or after the transform")
        return
    shape = current.recipe.shape if lazy else tuple(np.shape(current))
    if not fits(shape, array.shape):
        needed = show_shape(shape) if shape is not None else "?"
        plan.mismatch(place, describe(array), f"shape {needed}, without broadcasting")
        return
    dtype = _dtype_of(current)
    if dtype is None:  # a raw array of any dtype: the one that JAX gives it
        dtype = jax.dtypes.canonicalize_dtype(array.dtype)
    reason = cast_problem(array, dtype)
    if reason is not None:
        plan.problem(place, describe(array), reason, f"{place.name} in a dtype that casts to {np.dtype(dtype).name}")
        return
    plan.writes[place.name] = _Write(place, array)


def _partial(value: UninitializedVariable) -> str:
    return "?" if value.recipe.shape is None else show_shape(value.recipe.shape)


def _dtype_of(current: Any) -> Any:
    if _graph.is_placeholder(current):
        return current.recipe.dtype
    return current.dtype if hasattr(current, "dtype") else jnp.result_type(current)


def _check_key(plan: _Plan, place: Place, given: dict[str, Any]) -> None:
    value, current = given[place.name], place.value
    impl = str(jax.random.key_impl(current)) if not isinstance(current, jax.ShapeDtypeStruct) else None
    named = given.get(f"{place.name}.{IMPL}")
    if named is not None:
        named = bytes(np.asarray(named).astype(np.uint8)).decode(errors="replace")
    if is_key(value):
        named, value = str(jax.random.key_impl(value)), jax.random.key_data(value)
    array = as_array(value)
    if array is None or array.dtype != np.uint32 or (named is not None and impl is not None and named != impl):
        got = f"{describe(value)} of a {named or 'nameless'} key"
        plan.problem(place, got, f"the data of a {impl} key, uint32", "lm.state_dict(model, include_rng=True)")
        return
    wanted = jax.eval_shape(jax.random.key_data, current).shape
    if array.shape != wanted:
        plan.mismatch(place, describe(array), f"shape {wanted}")
        return
    plan.writes[place.name] = _Write(place, jax.random.wrap_key_data(jnp.asarray(array), impl=impl or named))


def _check_lazy_layers(plan: _Plan) -> None:
    """Check that the entries of each lazy layer agree on its sizes."""
    by_owner = {id(w.place.owner): w for w in plan.writes.values()}
    for path, layer in _graph.lazy_nodes(plan.model):
        spec = vars(layer)[STATE].spec
        if spec is None or spec.modules or spec.guesses:
            continue  # what fits is seen when the layer is settled
        shapes, writes = {}, []
        for slot, (_, _, value) in _lifecycle.own_slots(layer, spec.template.blueprint).items():
            write = by_owner.get(id(value))
            if write is not None:
                writes.append(write)
                shapes[slot] = tuple(write.value.shape)
            elif not _graph.is_placeholder(value):
                shapes[slot] = _lifecycle.shape_of(value)
        if not writes:
            continue
        for reason in _size_conflicts(layer, spec, shapes):
            plan.mismatched.extend(w.place.name for w in writes)
            for write in writes:
                plan.writes.pop(write.place.name, None)
            if not plan.skip:
                where = located(dotted(path), type(layer).__name__)
                needed = "entries that agree on the layer's sizes"
                plan.problems.append(Problem(where, reason, needed, "entries of one and the same layer"))
            break


def _size_conflicts(layer: Any, spec: Any, shapes: Mapping[Any, Any]) -> list[str]:
    sizes, conflicts = spec.solve(spec.template, shapes)
    if conflicts or set(sizes) < set(spec.size_names):
        return conflicts
    try:
        blueprint = spec.blueprint(spec.values(sizes), {})
    except REFUSALS as error:
        return [f"{', '.join(f'{k}={v}' for k, v in sizes.items())}, which {spec.cls.__name__} refuses: {error}"]
    return [
        f"{dotted(p)} of shape {s}, where {blueprint.slots[p].shape} follows from the other entries"
        for p, s in shapes.items()
        if p in blueprint.slots and blueprint.slots[p].shape != s
    ]


# ---------------------------------------------------------------- telling


def _raise_problems(model: Any, plan: _Plan, result: LoadResult, *, strict: bool) -> None:
    heading = _heading(model)
    problems = list(plan.problems)
    if strict:
        problems += [
            Problem(
                name,
                "no entry in the state dict",
                "an entry for each parameter of the model",
                "strict=False to load the others, or lm.state_dict of a model like this one",
            )
            for name in result.missing
        ]
        problems += [
            Problem(
                name,
                "an entry that the model has no parameter for",
                "only entries of the model",
                "strict=False to leave it out",
            )
            for name in result.unexpected
        ]
    if plan.uninitialized:
        raise UninitializedError(*plan.uninitialized, *problems, heading=heading)
    if problems:
        raise StateDictError(*problems, heading=heading)


def _heading(model: Any) -> str:
    return f"the state dict does not fit {type(model).__name__}; nothing was loaded"


# ---------------------------------------------------------------- writing


def _write(model: Any, plan: _Plan) -> None:
    waiting = [(p, n) for p, n in _graph.lazy_nodes(model) if _graph.has_uninitialized_params(n)]
    for write in plan.writes.values():
        _write_entry(write)
    for path, layer in waiting:
        try:
            if STATE in vars(layer):
                _lifecycle.settle_if_filled(layer)
        except LazyError as error:
            problem = error.problems[0] if error.problems else None
            got = problem.got if problem else str(error)
            raise StateDictError(
                Problem(
                    located(dotted(path), type(layer).__name__),
                    got,
                    "entries that fit the layer",
                    "entries of one and the same layer",
                ),
                heading=_heading(model),
            ) from error


def _write_entry(write: _Write) -> None:
    place, owner = write.place, write.place.owner
    if isinstance(owner, UninitializedArray):
        _lifecycle.put(place.holder, place.key, cast(write.value, owner.recipe.dtype, None))
    elif isinstance(owner, UninitializedVariable):
        owner.become(cast(write.value, owner.recipe.dtype, None))
    elif not isinstance(owner, nnx.Variable):
        as_it_was = isinstance(owner, np.ndarray)  # numpy's 64 bits are not JAX's to cut
        value = np.array(write.value, owner.dtype) if as_it_was else cast(write.value, owner.dtype, owner)
        _lifecycle.put(place.holder, place.key, value)
    elif is_key(write.value):
        owner.set_raw_value(write.value)
    else:
        current = place.value
        value = cast(write.value, _dtype_of(current), current)
        whole = _replace_leaf(raw_of(owner), place.leaf, value)
        owner.set_value(whole) if owner.get_metadata("ref", False) else owner.set_raw_value(whole)


def _replace_leaf(tree: Any, path: Any, value: Any) -> Any:
    if not path:
        return value
    key, *rest = path
    child = _replace_leaf(leaf_of(tree, (key,)), rest, value)
    if isinstance(tree, dict):
        return tree | {key: child}
    items = list(tree)
    items[key] = child
    return items if isinstance(tree, list) else tuple(items)
