"""``load_state_dict``: a state dict into a model, or into the whole state of a training run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from flax import nnx

from lazymods._errors import Problem
from lazymods._frames import entry
from lazymods._refusals import ArgumentError, wrong_argument
from lazymods.state.entries import is_training_state
from lazymods.state.load import LoadResult, load_entries


@entry
def load_state_dict(
    model: nnx.Pytree | Mapping[str, Any],
    state_dict: Mapping[str, Any],
    *,
    strict: bool = True,
    mismatched: str = "error",
) -> LoadResult:
    """Write the entries of a state dict into a model, lazy or not.

    A lazy layer that gets all its parameters takes its sizes from them and becomes its class at once; nothing is
    initialized. One that gets some of them initializes the rest, if its sizes follow from those. Values go into
    the Variables that are there, cast to their dtype, so optimizers and ties hold, and are copied: a step that donates
    one of two models leaves the other alone. All or nothing: if anything is wrong, all of it is told and the model is
    as it was.

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
        UninitializedError: If an uninitialized entry meets a parameter that has a value; or if a lazy layer is an
            argument of a transform of Flax that cannot carry new parameters out, as of ``nnx.grad``.
        ArgumentError: If ``state_dict`` is no mapping from names to arrays, the model neither an nnx object nor a dict
            or list that can be written to, or ``mismatched`` neither ``"error"`` nor ``"skip"``.

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
        needed, line = "a state dict, a mapping from names to arrays", "lm.load_state_dict(model, lm.state_dict(other))"
        if isinstance(state_dict, (str, bytes, os.PathLike)):
            line = f"lm.load(model, {os.fsdecode(state_dict)!r})"
        elif isinstance(state_dict, nnx.Pytree) and isinstance(model, Mapping):
            needed, line = "the model first, then the state dict", "lm.load_state_dict(model, state_dict)"
        raise wrong_argument("lm.load_state_dict: state_dict", type(state_dict), needed, line)
    nested = [k for k, v in state_dict.items() if isinstance(v, Mapping) and not isinstance(v, nnx.Variable)]
    if nested:
        got, needed = f"a mapping at {nested[0]!r}", "arrays by dotted name; lm.load takes mappings in mappings, too"
        raise ArgumentError(Problem("lm.load_state_dict: state_dict", got, needed, "lm.load(model, state_dict)"))
    others = [k for k in state_dict if not isinstance(k, str)]
    if others:
        needed = "names that are dotted strings"
        raise wrong_argument("lm.load_state_dict: state_dict", others[0], needed, '{"fc1.kernel": ...}')
    if is_training_state(model):
        from lazymods.state import training  # with the optimizers, which many loads do without

        return training.load_entries(model, state_dict, strict=strict, mismatched=mismatched)
    return load_entries(model, state_dict, strict=strict, mismatched=mismatched)
