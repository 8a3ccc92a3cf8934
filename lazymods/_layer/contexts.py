"""Where a lazy layer, or a placeholder, may get its parameters: in whose hands it is while transforms run.

Where it was born decides. Born in plain Python (and perhaps closed over by a transform), it may. Born inside a trace as
the copy that an nnx transform made of an object outside, it may if the transform carries new parameters out. Born
inside a trace in any other way, as an argument of ``jax.jit`` or by ``nnx.merge``, its parameters would be lost, so
that is refused.
"""

from __future__ import annotations

from typing import Any, NoReturn

from lazymods import _compat, _graph
from lazymods._errors import Problem, UninitializedError
from lazymods._graph import LOCAL, STATE, VARIABLE, kind_of

_LOOPS = {"scan", "while_loop", "while_loop_body", "fori_loop", "fori_loop_body"}
_WRITE = "lm.materialize(model, x)  # before the transform"
_LOAD = "lm.load(model, source)  # before, outside of the transform"
_SHAPES = "for output shapes alone, lm.infer_shapes(model, x)"


def empty_slots(layer: Any) -> list[_graph.Entry]:
    """The placeholders of a layer, without those of lazy layers inside it."""
    inside = [path for path, node in _graph.nodes(layer) if path and _graph.is_lazy_node(node)]
    return [
        e
        for e in _graph.entries(layer)
        if _graph.is_placeholder(e.value) and not any(e.path[: len(p)] == p for p in inside)
    ]


def is_carried(target: Any, what: str = "its first call", write: str = _WRITE) -> bool:
    """Whether an nnx transform carries what becomes of a layer or a placeholder to an object outside.

    Args:
        target: A lazy layer, or a placeholder.
        what: What makes its parameters, for messages.
        write: The line to write if it is refused.

    Raises:
        UninitializedError: If it is a copy whose parameters, or their gradients, would be lost.
    """
    if LOCAL.stage is not None and LOCAL.stage.owns(target):
        return False  # it is initialized where its original is
    tags = _compat.carrying_transforms(target)
    outside = _compat.outermost(target) if tags else target
    birth = _compat.birth_trace(outside)
    if not tags and (birth is None or birth is _compat.eval_trace()):
        return False
    if kind_of(target) is not VARIABLE and not empty_slots(target):  # filled by hand or by nnx.merge with values
        return bool(tags)
    if tags:
        _check_transforms(target, tags, what, write)
    if tags and LOCAL.stage is not None and LOCAL.stage.owns(outside):
        return True
    if birth is None or birth is _compat.eval_trace() or _was_built_in(outside, birth):
        return bool(tags)
    return _refuse(
        outside,
        f"{what} on a copy of it that was made inside {_compat.transform_of(birth)}",
        "parameters that outlive the call: those made here would be lost",
        write=f"{write}; {_SHAPES}",
    )


def load_is_carried(target: Any, what: str = "a load of it", write: str = _LOAD) -> bool:
    """Whether an nnx transform carries what a load makes of a layer or a placeholder to an object outside.

    Args:
        target: A lazy layer, or a placeholder.
        what: What gives it its values, for messages.
        write: The line to write if it is refused.

    Raises:
        UninitializedError: If the transform has it as an argument, and cannot carry new parameters out.
    """
    if LOCAL.stage is not None and LOCAL.stage.owns(target):
        return False
    tags = _compat.carrying_transforms(target)
    if tags:
        _check_transforms(target, tags, what, write)
    return bool(tags)


def check_by_hand(placeholder: Any, *, drawn: bool) -> None:
    """Refuse that a placeholder is materialized by hand where the parameter, or its gradient, would be lost.

    Args:
        placeholder: The placeholder.
        drawn: Whether its value is drawn; one that is given may be for a copy alone, as a load is.

    Raises:
        UninitializedError: If it is refused.
    """
    check = is_carried if drawn else load_is_carried
    check(placeholder, "its materialize", "parameter.materialize(shape)  # before the transform")


def _was_built_in(target: Any, birth: Any) -> bool:
    """Whether a layer or a placeholder was built in a trace, rather than copied into it."""
    if kind_of(target) is VARIABLE:
        return not target.get_raw_value().is_static  # what is built under a transform has keys that it carries
    return vars(target)[STATE].built_in(birth)


def _check_transforms(target: Any, all_tags: list[Any], what: str, write: str) -> None:
    """Refuse what gives a layer its parameters as an argument of a transform that cannot carry new ones out."""
    tags = {tag for tag in all_tags if isinstance(tag, str)}
    fixed = _compat.fixed_structure(target)
    if fixed is not None:
        needed = "the same structure before and after: such a transform cannot carry new parameters out"
        _refuse(target, f"{what} inside {fixed}, of which it is an argument", needed, write=write)
    if "grad" in tags:
        got = f"{what} inside nnx.grad (or nnx.value_and_grad), of which it is an argument"
        _refuse(target, got, "parameters to differentiate with respect to: none exist yet", write=write)
    if tags & {"cond", "switch"}:
        got = f"{what} inside nnx.cond (or nnx.switch), of which it is an argument"
        _refuse(target, got, "the same parameters after every branch, whether it calls the layer or not", write=write)
    if tags & _LOOPS and not _is_one_of_a_stack(target):
        got = f"{what} inside an NNX loop (nnx.scan, nnx.while_loop, nnx.fori_loop)"
        _refuse(target, got, "the same parameters before and after every step of the loop", write=write)
    if tags & {"vmap", "pmap"} and _has_static_keys(target) and _compat.mapping_axes(target):
        got = f"{what} inside nnx.vmap (or nnx.pmap), which maps over its parameters"
        needed = "parameters that have the mapped axis: the model was built outside, with one set of random keys"
        write = "nnx.vmap(f, in_axes=(None, 0))  # or build the model under nnx.vmap too, with nnx.split_rngs"
        _refuse(target, got, needed, write=write)


def _pendings(target: Any) -> list[Any]:
    variables = [target] if kind_of(target) is VARIABLE else _graph.variables(target)
    return [v.get_raw_value() for v in variables if _graph.is_placeholder(v)]


def _has_static_keys(target: Any) -> bool:
    return all(p.is_static for p in _pendings(target))


def _is_one_of_a_stack(target: Any) -> bool:
    """Whether a loop takes one after the other of the layers that are stacked outside of it."""
    return any(_axes_of_stacks(other) > _axes_of_stacks(target) for other in _compat.incarnations(target))


def _axes_of_stacks(target: Any) -> int:
    return max((len(p.stacking.sizes) for p in _pendings(target)), default=0)


def _refuse(target: Any, got: str, needed: str, *, write: str = _WRITE) -> NoReturn:
    if kind_of(target) is VARIABLE:
        raise UninitializedError(Problem(target.whereabouts(), got, needed, write))
    names = _graph.uninitialized_paths(target)
    parameters = f" ({', '.join(names)})" if names else ""
    where = _graph.place(target, f"{type(target).__name__}{parameters}")
    raise UninitializedError(Problem(where, got, needed, write))
