"""Values side by side in shadow mode: numbers and arrays to rounding, everything static by type and value."""

from __future__ import annotations

import types
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from lazymods import _compat
from lazymods._compat import tracing
from lazymods._errors import describe, short_dtype
from lazymods._objects.tokens import SameObject, TokenKind, kind_of, token


class Rounding(NamedTuple):
    """How far a float may be off: ``each * |want| + most * max |want| + least``."""

    each: float
    most: float
    least: float


ROUNDING = {
    "float64": Rounding(1e-9, 1e-10, 1e-15),
    "float32": Rounding(1e-4, 1e-5, 2e-7),
    "float16": Rounding(1e-2, 5e-3, 1e-3),
    "bfloat16": Rounding(5e-2, 2e-2, 1e-2),
}
"""By the dtype of an array, or of the parts of its complex numbers. ``least`` is the rounding of numbers around 1: what
should cancel to 0 does not quite. The two short ones leave room for the excess precision that XLA keeps."""

_BEYOND = 16  # so many times as far as with noise in the inputs may a float be off

_NARROW = Rounding(0.25, 0.25, 0.25)  # floats of 8 bits and less


# ---------------------------------------------------------------- static values


class Name(NamedTuple):
    """What a part is compared under that is no key or attribute of its own."""

    of: str
    name: str


def listed(keys: Iterable[Any]) -> str:
    """Name some keys in a message."""
    names = list(dict.fromkeys(repr(key.name) if isinstance(key, Name) else repr(key) for key in keys))
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return (", ".join(names[:8]) + more) or "nothing"


def same_static(a: Any, b: Any) -> bool:
    """Whether two values that are looked at from outside are the same, or may be copies of one another."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(same_static, a, b))
    if isinstance(a, frozenset):
        return sets_differ(a, b) is None
    if isinstance(a, float):
        return float.hex(a) == float.hex(b)  # also of a class of the user's; every nan is one
    known = token(a)
    if not isinstance(known, SameObject):
        return known == token(b)
    if isinstance(a, (type, types.ModuleType, types.BuiltinFunctionType)):
        return getattr(a, "__self__", None) is not None and a.__name__ == b.__name__  # a method written in C
    if isinstance(a, types.FunctionType):
        return a.__code__ == b.__code__
    named = [getattr(x, "__qualname__", None) for x in (a, b)]  # functions of jax.jit are no FunctionType
    return named[0] == named[1] and (type(a).__eq__ is object.__eq__ or _equal(a, b))


def _equal(a: Any, b: Any) -> bool:
    try:
        return bool(a == b)
    except Exception:  # an ``==`` that answers otherwise, as that of arrays
        return True


def sets_differ(a: Any, b: Any) -> tuple[str, str] | None:
    """Say how two sets differ; elements that are only looked at from outside count by their class."""
    here, there = list(map(_in_set, a)), list(map(_in_set, b))
    added = [v for v, t in zip(b, there, strict=True) if t not in here]
    missing = [v for v, t in zip(a, here, strict=True) if t not in there]
    if len(here) == len(there) and not added and not missing:
        return None
    return f"{listed(added)} more and {listed(missing)} less", f"{len(here)} items"


def _in_set(value: Any) -> Any:
    if isinstance(value, tuple):
        return (type(value), *map(_in_set, value))
    known = token(value)
    return type(value) if isinstance(known, SameObject) else known  # a copy is another object


# ---------------------------------------------------------------- values


def is_value(value: Any) -> bool:
    """Whether a value is a number or an array."""
    kinds = (bool, int, float, complex, np.generic, np.ndarray, jax.Array, Tracer)
    return isinstance(value, (*kinds, *_compat.REFERENCES)) or _is_empty(value)


def _is_empty(value: Any) -> bool:
    """Whether a value is of the type of gradients of integers, of which JAX has arrays of two classes."""
    is_array = kind_of(value) is TokenKind.ARRAY and not isinstance(value, jax.ShapeDtypeStruct)
    return is_array and value.dtype == jax.dtypes.float0


def values_differ(want: Any, got: Any, near: Sequence[Any] = ()) -> tuple[str, str] | None:
    """Say what is there instead of a number or array, if it is another one; ``near`` it are results with noise."""
    want, got = _known(want), _known(got)
    mutable = isinstance(want, _compat.REFERENCES)
    if not is_value(want) or not is_value(got) or mutable != isinstance(got, _compat.REFERENCES):
        return class_of(got), class_of(want)
    if mutable:
        want, got = want[...], got[...]
        near = [value[...] for value in near if isinstance(value, _compat.REFERENCES)]
    if isinstance(want, Tracer) or isinstance(got, Tracer):
        return None if isinstance(want, Tracer) else ("a tracer, which has no value any more", shown(want))
    if isinstance(want, jax.Array) and isinstance(got, jax.Array):
        return _arrays_differ(want, got, near, weak=True)
    if isinstance(got, jax.Array):
        try:
            return _arrays_differ(jnp.asarray(want), got, near, weak=False)
        except (TypeError, OverflowError):  # no array of JAX can be that
            return shown(got), shown(want)
    if type(want) is not type(got):
        return f"{class_of(got)} {shown(got)}", f"{class_of(want)} {shown(want)}"
    if isinstance(want, (np.ndarray, np.generic)):
        return _arrays_differ(want, got, near, weak=False)
    if same_static(want, got) or (want != got and isinstance(want, (float, complex)) and _round_alike(want, got, near)):
        return None
    return shown(got), shown(want)


def is_identical(a: Any, b: Any) -> bool:
    """Whether two numbers or arrays, such as have no tracers inside, are the same to the last place."""
    a, b = (np.asarray(value[...] if isinstance(value, _compat.REFERENCES) else value) for value in (a, b))
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def _round_alike(want: complex, got: complex, near: Sequence[Any]) -> bool:
    """Whether two numbers of Python may be one array of JAX, rounded differently: ``float(loss)``."""
    return bool(_close(np.asarray(want), np.asarray(got), "float32", near))


def _known(value: Any) -> Any:
    """Return what is compared: the value of a lazy tensor; a recording that has ended, as of a decision, left none."""
    if _is_empty(value) and not isinstance(value, Tracer):
        return np.zeros(value.shape, jax.dtypes.float0)
    recorded = isinstance(value, tracing.Recorded) and value.recorder.is_valid()
    return value.now("comparison") if recorded else value


def _arrays_differ(want: Any, got: Any, near: Sequence[Any], *, weak: bool) -> tuple[str, str] | None:
    if want.shape != got.shape or want.dtype != got.dtype:
        return describe(got), describe(want)
    loose, was_loose = _is_weak(got), _is_weak(want)
    if weak and loose != was_loose:
        said = {True: "weakly typed", False: "not weakly typed"}
        return f"{describe(got)}, {said[loose]}", f"{describe(want)}, {said[was_loose]}"
    gone, was_gone = _is_deleted(got), _is_deleted(want)
    if gone or was_gone:
        return None if gone and was_gone else _states(gone, got, want)
    if jnp.issubdtype(want.dtype, jax.dtypes.prng_key):
        want, got = jax.random.key_data(want), jax.random.key_data(got)
    return _numbers_differ(np.asarray(want), np.asarray(got), near)


def _is_weak(array: Any) -> bool:
    return getattr(array, "weak_type", False)  # keys have none


def _is_deleted(array: Any) -> bool:
    return isinstance(array, jax.Array) and array.is_deleted()


def _states(gone: bool, got: Any, want: Any) -> tuple[str, str]:
    said = {True: "deleted (donated)", False: "there"}
    return f"{describe(got)}, {said[gone]}", f"{describe(want)}, {said[not gone]}"


def _numbers_differ(want: np.ndarray, got: np.ndarray, near: Sequence[Any]) -> tuple[str, str] | None:
    kind, objects = want.dtype, want.dtype.kind == "O"
    if kind == jax.dtypes.float0 or want.size == 0:
        return None
    if objects:
        wrong = np.array([not same_static(a, b) for a, b in zip(want.flat, got.flat, strict=True)])
        wrong = wrong.reshape(want.shape)
    elif jnp.issubdtype(kind, jnp.inexact):
        wrong = ~_close(want, got, str(np.finfo(kind).dtype) if kind.kind == "c" else kind.name, near)
    else:
        wrong = np.asarray(want != got).reshape(want.shape)
    if not wrong.any():
        return None
    place = tuple(map(int, np.argwhere(wrong)[0]))
    at = f" at {list(place)}" if place else ""
    many = f", {int(wrong.sum())} of {wrong.size} wrong" if wrong.size > 1 else ""
    named = "an object" if objects else describe(got)
    return f"{named} {got[place]}{at}{many}", f"{want[place]}{at}"


def _close(want: np.ndarray, got: np.ndarray, short: str, near: Sequence[Any]) -> np.ndarray:
    """Return where floats are equal to rounding; infinities and nans are equal to themselves."""
    allowed = ROUNDING.get(short, _NARROW)
    wide = np.complex128 if want.dtype.kind == "c" else np.float64
    a, b = want.astype(wide), got.astype(wide)
    if a.dtype.kind == "c":
        finite = np.isfinite(a.real) & np.isfinite(a.imag) & np.isfinite(b.real) & np.isfinite(b.imag)
        special = _same_special(a.real, b.real) & _same_special(a.imag, b.imag)
    else:
        finite, special = np.isfinite(a) & np.isfinite(b), _same_special(a, b)
    size = np.abs(np.where(finite, a, 0))
    room = allowed.each * size + allowed.most * size.max() + allowed.least
    room = np.maximum(room, _BEYOND * _spread(a, near))
    return np.where(finite, np.abs(np.where(finite, a, 0) - np.where(finite, b, 0)) <= room, special)


def _spread(want: np.ndarray, near: Sequence[Any]) -> np.ndarray:
    """Return how far results with noise are off; where that is little by chance, as far as in half of the array."""
    spread = np.zeros(want.shape)
    for value in filter(is_value, near):
        other = np.asarray(_known(value))
        if other.shape == want.shape and jnp.issubdtype(other.dtype, np.inexact):
            with np.errstate(all="ignore"):
                found = np.abs(other.astype(want.dtype) - want)
            spread = np.maximum(spread, np.where(np.isfinite(found), found, 0))
    return np.maximum(spread, np.median(spread))


def _same_special(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return where neither is special, or both are in the same way."""
    return np.where(np.isfinite(a), np.isfinite(b), (np.isnan(a) & np.isnan(b)) | (a == b))


# ---------------------------------------------------------------- words


def shown(value: Any) -> str:
    """Show a static value in a message."""
    if isinstance(value, (np.ndarray, jax.Array, Tracer, jax.ShapeDtypeStruct)):
        return f"{short_dtype(value.dtype)}{list(value.shape)}"
    try:
        text = repr(value)
    except Exception:  # a class of the user's
        text = f"one {type(value).__name__}"
    return text if len(text) <= 80 else text[:77] + "..."


def class_of(value: Any) -> str:
    """Name the class of a value in a message."""
    cls = type(value)
    if value is None:
        return "None"
    if isinstance(value, jax.Array):
        return f"jax.Array {describe(value)}"
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"
