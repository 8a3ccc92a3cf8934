"""A whole training state: a dict of a model, its optimizer, random streams and numbers, such as the step."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

import numpy as np
from flax import nnx

from lazymods import _graph
from lazymods._errors import Problem, StateDictError, UninitializedError, describe
from lazymods._optimizer import LazyOptimizer
from lazymods._snapshot import Snapshot
from lazymods.state import load

Numbers = (bool, int, float, complex)


def is_training_state(model: Any) -> bool:
    """Whether what is saved or loaded is a dict of things rather than one of them."""
    return isinstance(model, Mapping) and not isinstance(model, nnx.Pytree)  # nnx.Dict is a module


def numbers(model: Any) -> dict[str, np.ndarray[Any, Any]]:
    """Return the numbers that a training state holds, as arrays."""
    if not is_training_state(model):
        return {}
    return {str(k): np.asarray(v) for k, v in model.items() if isinstance(v, Numbers)}


def load_entries(
    state: MutableMapping[str, Any],
    entries: Mapping[str, Any],
    *,
    strict: bool,
    mismatched: str,
    dtype: Any,
    origin: load.Origin,
) -> load.LoadResult:
    """Write entries into a training state; its numbers get the types that they have.

    An optimizer without a state gets one first, made for the module that the entries have sized.

    Raises:
        StateDictError: As for a module; also if a number is no number in the entries.
        UninitializedError: If it does not follow which module an optimizer without a state is for.
    """
    mine = numbers(state)
    found = {key: entries[key] for key in mine if key in entries}
    for key, value in found.items():
        if np.shape(value) != () or not isinstance(value, np.ndarray):
            problem = Problem(
                key, describe(value), f"one number, as {state[key]!r} is", f"a {origin.name} of this state"
            )
            raise StateDictError(problem, heading=f"{origin.name} does not fit the training state; nothing was loaded")
    rest = {name: value for name, value in entries.items() if name not in mine}
    snapshot = Snapshot(state)
    try:
        for optimizer in lazy_optimizers(state).values():
            module, prefix = model_of(state)
            own = {n.removeprefix(prefix): v for n, v in rest.items() if n.startswith(prefix)}
            load.load_entries(module, own, strict=False, mismatched=mismatched, dtype=dtype, origin=origin)
            optimizer.make_state(module)
        result = load.load_entries(state, rest, strict=strict, mismatched=mismatched, dtype=dtype, origin=origin)
        absent = [key for key in mine if key not in found]
        if strict and absent:
            needed, line = "an entry for each number of the training state", "strict=False to leave it as it is"
            problems = [Problem(key, f"no entry in {origin.name}", needed, line) for key in absent]
            raise StateDictError(
                *problems, heading=f"{origin.name} does not fit the training state; nothing was loaded"
            )
    except BaseException:
        snapshot.restore()
        raise
    result.missing.extend(absent)
    result.matched.update({key: origin.sources.get(key, (key,)) for key in found})
    for key, value in found.items():
        state[key] = type(state[key])(value.item())
    return result


def lazy_optimizers(model: Any) -> dict[str, LazyOptimizer]:
    """Return the optimizers of a training state that have no state yet."""
    if not is_training_state(model):
        return {}
    return {k: v for k, v in model.items() if isinstance(v, LazyOptimizer) and _graph.is_lazy_node(v)}


def model_of(state: Mapping[str, Any]) -> tuple[nnx.Module, str]:
    """Return the one module of a training state that an optimizer can be for, and what its names begin with.

    Raises:
        UninitializedError: If there are several: an optimizer without a state does not say which it is for.
    """
    modules = {k: v for k, v in state.items() if isinstance(v, nnx.Module) and not isinstance(v, nnx.Optimizer)}
    if len(modules) == 1:
        key, module = next(iter(modules.items()))
        return module, f"{key}."
    raise UninitializedError(
        Problem(
            ", ".join(lazy_optimizers(state)),
            f"an optimizer without a state, beside {len(modules)} modules: {', '.join(modules) or 'none'}",
            "one module, whose parameters the optimizer's state is made for",
            "lm.load(model, path) of the module, then nnx.Optimizer(model, tx, wrt=nnx.Param)",
        )
    )
