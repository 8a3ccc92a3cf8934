"""Refuses models that a function reaches unseen: their values would be constants of its program."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from lazymods._errors import LazyError, Problem, describe
from lazymods._objects.within import RUNNING, all_within
from lazymods.compile.captures import Captured


class HiddenModelError(LazyError):
    """A model that a function reaches in a way of its own, which can be no input of its program."""


HiddenModelError.__module__ = "lazymods"


def check_constants(name: str, constants: Sequence[Any], captured: Captured) -> None:
    """Refuse a program that has the value of a Variable for a constant: it would not see the Variable change.

    Args:
        name: What errors call the function.
        constants: The constants of the program.
        captured: What the function reaches. Arrays that it holds as they are, and not in a Variable, are constants.

    Raises:
        HiddenModelError: If one is the value of a Variable that the function finds in a way of its own.
    """
    ids = set(map(id, captured.arrays))
    hidden = [c for c in constants if isinstance(c, (jax.Array, np.ndarray)) and id(c) not in ids]
    found = [v for v in gc.get_referrers(*hidden) if isinstance(v, nnx.Variable)] if hidden else []
    if found:  # which takes long
        ids = set(map(id, all_within(captured.found, (*RUNNING, nnx.Variable))))
        found = [v for v in found if id(v.get_raw_value()) not in ids]
    if found:
        raise HiddenModelError(
            *(
                Problem(
                    f"{name}: {type(v).__name__}",
                    f"{describe(v)}, read from a model that the function finds in a way of its own",
                    "models as arguments, or in closures, globals, defaults, attributes and containers of those: a "
                    "model that lm.jit does not see would be a constant of the program",
                    "lm.jit(lambda model, x: model(x))  # with the model as an argument",
                )
                for v in found
            )
        )
