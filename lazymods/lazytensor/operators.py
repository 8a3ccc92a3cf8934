"""Operators of lazy tensors, recorded without asking jax again.

``x * 2.0`` goes through several layers of jax before it becomes one operation of a known kind. The first time it does;
what it became is remembered by operator, operand types and settings, and the next one is noted at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from lazymods._compat import tracing
from lazymods._recording.kinds import OperationKind
from lazymods.lazytensor.trace import LazyTensor, Session

_BINARY = (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift"),
    *("eq", "ne", "lt", "le", "gt", "ge"),
)
_REFLECTED = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor")
_UNARY = ("neg", "abs", "invert")
_LARGEST = 1 << 31
_MOST = 1 << 12


class _Known(NamedTuple):
    """What an operator becomes: an operation of one kind, of the operands in this order."""

    kind: OperationKind
    swapped: bool


_known: dict[Any, _Known] = {}
_ARRAY = tracing.array_type()


def _binary(name: str, slow: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def operator(self: Any, other: Any) -> Any:
        trace = self.recorder
        if tracing.current() is not trace:
            return slow(self, other)
        of_other: Any = type(other)
        if of_other is LazyTensor and other.recorder is trace:
            of_other = other.aval
        elif of_other is _ARRAY:
            of_other = other.aval
        elif of_other is not float and (of_other is not int or not -_LARGEST <= other < _LARGEST):
            return slow(self, other)
        key = (name, self.aval, of_other, tracing.settings())
        known = _known.get(key)
        if known is None or trace.recording.checks:
            return _learn(key, lambda: slow(self, other), (self, other), (other, self))
        return trace.recording.add(known.kind, (other, self) if known.swapped else (self, other))[0]

    return operator


def _power(otherwise: Callable[[Any, Any], Any], slow: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """``x ** 2`` is an operation of ``x`` alone, and another one than ``x ** 3``."""

    def operator(self: Any, other: Any) -> Any:
        trace = self.recorder
        if type(other) is not int or tracing.current() is not trace:
            return otherwise(self, other)
        key = ("power", self.aval, other, tracing.settings())
        known = _known.get(key)
        if known is None or trace.recording.checks:
            return _learn(key, lambda: slow(self, other), (self,))
        return trace.recording.add(known.kind, (self,))[0]

    return operator


def _unary(name: str, slow: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def operator(self: Any) -> Any:
        trace = self.recorder
        if tracing.current() is not trace:
            return slow(self)
        key = (name, self.aval, tracing.settings())
        known = _known.get(key)
        if known is None or trace.recording.checks:
            return _learn(key, lambda: slow(self), (self,))
        return trace.recording.add(known.kind, (self,))[0]

    return operator


def _learn(key: Any, slow: Callable[[], Any], *orders: Sequence[Any]) -> Any:
    """Do it as jax does, and remember what it became if that was one operation of operands in one of these orders."""
    session: Session = orders[0][0].recording
    session.prepare(orders[0])
    before = len(session.pending)
    result = slow()
    found = None
    for n, operands in enumerate(orders):
        kind = session.noted(before, operands, [result])
        if kind is not None:
            found = _Known(kind, swapped=n == 1)
            break
    if session.checks and key in _known:
        session.confirm(key[0], _known[key], found)
    elif found is not None:
        if len(_known) >= _MOST:
            _known.clear()
        _known[key] = found
    return result


def install() -> None:
    """Give :class:`LazyTensor` its operators."""
    names = [f"__{n}__" for n in _BINARY] + [f"__r{n}__" for n in _REFLECTED]
    for name in names:
        slow = getattr(tracing.Recorded, name)
        fast = _binary(name, slow)
        setattr(LazyTensor, name, _power(fast, slow) if name == "__pow__" else fast)
    for name in _UNARY:
        setattr(LazyTensor, f"__{name}__", _unary(name, getattr(tracing.Recorded, f"__{name}__")))
