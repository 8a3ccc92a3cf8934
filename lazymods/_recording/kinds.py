"""Kinds of operations: what makes two of them the same.

Operations are compared by what they do, not by which object says so: jax makes a new jaxpr for every fresh closure, and
a step that defines a function is still the same step.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from typing import Any

import numpy as np

from lazymods import _compat
from lazymods._compat import tracing
from lazymods._recording import algorithms, inside


class OperationKind:
    """What an operation does: two that do the same, on operands of the same types, have one kind.

    Attributes:
        primitive: The operation.
        params: Its parameters.
        settings: Those of jax in which it was recorded.
        operands: The avals of its operands.
        results: The avals of its results.
        effects: Whether it does more than to compute: then it runs once, in its turn, even if no result is used.
        calls_python: Whether a Python function is called when it runs.
        for_now: Whether it is executed when it is met: it names devices, which in one program with others would be
            where all of them run, or it has operands of types that no program takes.

    Raises:
        Exception: What JAX has against it.
    """

    __slots__ = (
        *("__weakref__", "calls_python", "effects", "for_now", "operands"),
        *("params", "primitive", "results", "settings"),
    )

    def __init__(self, primitive: Any, params: dict[str, Any], settings: Any, operands: tuple[Any, ...]) -> None:
        self.primitive: Any = primitive
        self.params: dict[str, Any] = params
        self.settings: Any = settings
        self.operands: tuple[Any, ...] = operands
        results, effects = _compat.abstract.abstract(primitive, operands, params)
        self.results: tuple[Any, ...] = tuple(results)
        self.effects: bool = bool(effects)
        self.calls_python: bool = inside.calls_python(primitive, params)
        self.for_now: bool = inside.names_devices(primitive, params) or any(map(tracing.is_high, operands))
        if algorithms.is_chosen(primitive, params, operands):
            algorithms.confirm(primitive, params, operands)

    @property
    def name(self) -> str:
        """The name of the operation; of a jitted function its own."""
        return str(self.params.get("name", self.primitive.name))

    def __str__(self) -> str:
        """Render as ``sin(f32[8]) -> f32[8]``."""
        operands, results = (", ".join(map(show, avals)) for avals in (self.operands, self.results))
        return f"{self.name}({operands}) -> {results}"


def show(aval: Any) -> str:
    """Name a type as JAX does: ``f32[8]``."""
    return aval.str_short(short_dtypes=True)


_kinds: weakref.WeakValueDictionary[Any, OperationKind] = weakref.WeakValueDictionary()


@functools.lru_cache(maxsize=1 << 13, typed=True)
def _kind(primitive: Any, settings: Any, operands: tuple[Any, ...], /, **params: Any) -> OperationKind:
    key = (primitive, settings, operands, _params_key(params))
    known = _kinds.get(key)
    return known or _kinds.setdefault(key, OperationKind(primitive, params, settings, operands))


def kind_of(primitive: Any, operands: tuple[Any, ...], params: dict[str, Any], settings: Any) -> OperationKind:
    """Return the kind of an operation.

    Args:
        primitive: The operation.
        operands: The avals of its operands.
        params: Its parameters.
        settings: Those of jax now.

    Raises:
        TypeError: The operands do not fit; this and others are those of the operation itself.
    """
    try:
        return _kind(primitive, settings, operands, **params)
    except TypeError:  # a parameter that has no hash, or what is wrong with the operands
        pass
    return _kind.__wrapped__(primitive, settings, operands, **params)


# What tells jax how to differentiate, which is over when an operation has come down to a recording.
_DERIVATIVES = frozenset({"jvp_jaxpr_fun", "jvp_jaxpr_thunk", "fwd_jaxpr_thunk", "bwd", "out_trees", "symbolic_zeros"})


class Key:
    """A tuple whose hash is computed once."""

    __slots__ = ("_hash", "parts")

    def __init__(self, parts: tuple[Any, ...]) -> None:
        self.parts: tuple[Any, ...] = parts
        self._hash = hash(parts)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Key) and self._hash == other._hash and self.parts == other.parts


class _Identity:
    """Anything else: the same only as itself."""

    __slots__ = ("thing",)

    def __init__(self, thing: Any) -> None:
        self.thing = thing

    def __hash__(self) -> int:
        return id(self.thing)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self.thing is other.thing


_jaxprs: weakref.WeakKeyDictionary[Any, Key] = weakref.WeakKeyDictionary()


def key_of(value: Any) -> Any:
    """Return what stands for a parameter of an operation: equal for two that mean the same."""
    if value is None or isinstance(value, (str, bool, int, np.dtype, type)):
        return (type(value), value)
    if isinstance(value, (float, complex, np.generic, np.ndarray)):
        array = np.asarray(value)
        return (type(value), array.shape, array.dtype, array.tobytes())
    if isinstance(value, dict):
        return (dict, tuple((name, key_of(v)) for name, v in value.items()))
    if type(value) in (tuple, list):
        return (type(value), tuple(map(key_of, value)))
    if tracing.is_jaxpr(value):
        return _jaxpr_key(value)
    try:
        hash(value)
    except TypeError:
        return _Identity(value)
    return (type(value), value)


def _params_key(params: dict[str, Any]) -> tuple[Any, ...]:
    return tuple([(name, key_of(value)) for name, value in params.items() if name not in _DERIVATIVES])


def _jaxpr_key(jaxpr: Any) -> Key:
    """Return what stands for a jaxpr: its structure. jax makes a new one for every fresh closure."""
    known = _jaxprs.get(jaxpr)
    if known is not None:
        return known
    inner, consts = tracing.open_jaxpr(jaxpr)
    for const in consts:
        if isinstance(const, tracing.Recorded):
            const.now("a constant of a program")  # the program that has it in it is compiled when nothing can be cut
    numbers: dict[Any, int] = {}

    def number(variables: Iterable[Any]) -> tuple[Any, ...]:
        return tuple([(numbers.setdefault(v, len(numbers)), v.aval) for v in variables])

    def operand(atom: Any) -> Any:
        return numbers[atom] if atom in numbers else number([atom])

    lines: list[Any] = [number(inner.constvars), number(inner.invars), tuple(map(_Identity, consts))]
    for eqn in inner.eqns:
        operands = tuple([(*key_of(a.val), a.aval) if hasattr(a, "val") else operand(a) for a in eqn.invars])
        lines.append((eqn.primitive, _params_key(eqn.params), eqn.ctx, operands, number(eqn.outvars)))
    lines.append(tuple([(*key_of(a.val), a.aval) if hasattr(a, "val") else operand(a) for a in inner.outvars]))
    key = _jaxprs[jaxpr] = Key(tuple(lines))
    return key
