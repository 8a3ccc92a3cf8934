"""What is computed between two layers: why a layer gets another input, though all before it agrees.

What lies there is code, not modules. So simple explanations are tried on the numbers: an activation, another order of
the same numbers, a factor, something that is added.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lazymods.porting.comparing import SMALLEST_SCALE, Array, Match, difference_of, is_close
from lazymods.porting.reasons import Reason

_RECENT = 8  # earlier outputs that are tried
_CLOSE = 1e-5
_ROUNDING = 1e-6


class Earlier(NamedTuple):
    """An output that agrees, or the model's input.

    Attributes:
        where: What to call it.
        match: The arrays of both sides.
    """

    where: str
    match: Match


class Function(NamedTuple):
    """An activation, and how it is written."""

    call: Callable[[Any], Any]
    code: str


def _named(name: str) -> Function:
    return Function(getattr(nnx, name), f"nnx.{name}(x)")


_OTHERS = (
    *("relu", "relu6", "silu", "tanh", "sigmoid", "elu", "selu", "celu", "leaky_relu", "hard_swish", "hard_tanh"),
    *("hard_sigmoid", "softplus", "soft_sign", "log_sigmoid", "softmax", "log_softmax"),
)
FUNCTIONS: dict[str, Function] = {
    "nothing": Function(lambda x: x, "no function"),
    "gelu (exact)": Function(lambda x: jax.nn.gelu(x, approximate=False), "nnx.gelu(x, approximate=False)"),
    "gelu (tanh form)": _named("gelu"),
    "gelu (sigmoid form)": Function(lambda x: x * jax.nn.sigmoid(1.702 * x), "x * nnx.sigmoid(1.702 * x)"),
    "mish": Function(jax.nn.mish, "jax.nn.mish(x)"),
}
FUNCTIONS |= {name: _named(name) for name in _OTHERS}



def of_input(node: Any, path: str, match: Match | None, earlier: Sequence[Earlier]) -> Reason | None:
    """Say why a layer's input differs; None if no simple explanation fits.

    Args:
        node: The layer; the model itself, whose output it is then.
        path: Its path; '' for the model.
        match: The arrays of both sides that differ, None if they have not even one shape.
        earlier: What agrees before it, the latest last.
    """
    if match is None:
        return None
    with np.errstate(invalid="ignore", over="ignore"):  # what a mask has filled may be infinite in either
        found = other_function(match, earlier), _other_order(node, path, match, earlier), _factor(match)
        return next((reason for reason in found if reason is not None), None) or _added(match, _recent(earlier))


def _recent(earlier: Sequence[Earlier]) -> list[Earlier]:
    return list(reversed(earlier))[:_RECENT]


def other_function(match: Match, earlier: Sequence[Earlier]) -> Reason | None:
    """Say which activation an input comes from, if it is another one than in PyTorch; None if that can't be told.

    Args:
        match: The input of both sides.
        earlier: What agrees before it, the latest last.
    """
    if np.iscomplexobj(match.ours) or not match.ours.ndim:
        return None
    for before in _recent(earlier):
        if before.match.ours.shape != match.ours.shape or np.iscomplexobj(before.match.ours):
            continue
        here, there = _errors(before.match.ours, match.ours), _errors(before.match.theirs, match.theirs)
        ours, theirs = min(here, key=here.__getitem__), min(there, key=there.__getitem__)
        if max(here[ours], there[theirs]) > _CLOSE or here[theirs] <= 4 * here[ours] + _ROUNDING:
            continue
        line = f"{FUNCTIONS[theirs].code} for x, {before.where}"
        alike = [name for name, error in there.items() if error == there[theirs] and name != theirs]
        known = f"{theirs}, or {' or '.join(alike)}, which is the same for these numbers" if alike else theirs
        return Reason(f"of {before.where} the model takes {ours}, PyTorch {known}", line)
    return None


def _errors(before: Array, after: Array) -> dict[str, float]:
    """Return by how much the result of each function differs from an array."""
    with np.errstate(over="ignore"):
        x = jnp.asarray(before.astype(np.float32))
    found = {}
    for name, function in FUNCTIONS.items():
        difference, scale = difference_of(np.asarray(function.call(x)).astype(np.float64), after)
        found[name] = difference / max(scale, SMALLEST_SCALE)
    return found


def _other_order(node: Any, path: str, match: Match, earlier: Sequence[Earlier]) -> Reason | None:
    ours, theirs = match.ours, match.theirs
    if np.iscomplexobj(ours) or ours.shape != theirs.shape:
        return None
    if not is_close(np.sort(ours, None), np.sort(theirs, None), _CLOSE):
        return None
    maps = [before.match.ours.shape for before in reversed(earlier) if before.match.ours.ndim > 2]
    if isinstance(node, nnx.Linear) and ours.ndim == 2:
        for channels in dict.fromkeys(shape[-1] for shape in maps):
            pixels, rest = divmod(ours.shape[-1], channels)
            if not rest and is_close(ours, _channels_last(theirs, channels), _CLOSE):
                side = math.isqrt(pixels)
                square = side * side == pixels
                sizes = f"({side}, {side}, {channels})" if square else f"(H, W, {channels})"
                text = "the map before it is flattened channels last here, channels first in PyTorch"
                text += "" if square else f"; H * W is {pixels}"
                return Reason(text, f'lm.load(..., layout="torch", flatten={{"{path}": {sizes}}})')
    return Reason("it gets PyTorch's numbers in another order: a reshape or a transpose before it")


def _channels_last(theirs: Array, channels: int) -> Array:
    return theirs.reshape(len(theirs), channels, -1).swapaxes(1, 2).reshape(theirs.shape)


def _factor(match: Match) -> Reason | None:
    ours, theirs = match.ours, match.theirs
    square = float(np.vdot(theirs, theirs).real)
    if ours.shape != theirs.shape or not square or not np.isfinite(square):
        return None
    factor = float(np.vdot(theirs, ours).real) / square
    if abs(factor) < 1e-6 or abs(factor - 1) < _CLOSE or not is_close(ours, factor * theirs, _CLOSE):
        return None
    return Reason(f"it gets {factor:.6g} times what it gets in PyTorch", f"a factor of {1 / factor:.6g} before it")


def _added(match: Match, recent: Sequence[Earlier]) -> Reason | None:
    if match.ours.shape != match.theirs.shape:
        return None
    delta = match.theirs - match.ours
    for before in recent:
        part = before.match.theirs
        if part.shape != delta.shape or not np.any(part):
            continue
        if is_close(delta, part, _CLOSE):
            return Reason(f"PyTorch adds {before.where} to it, the model does not", f"a sum with {before.where}")
        if is_close(-delta, part, _CLOSE):
            return Reason(f"the model adds {before.where} to it, PyTorch does not", f"no sum with {before.where}")
    return None
