"""Operators of lazy tensors, recorded without asking jax again.

``x * 2.0`` goes through several layers of jax before it becomes one operation of a known kind. The first time it does;
what it became is remembered by operator, operand types and settings, and the next one is noted at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from lazymods import _compat_tracing as tracing
from lazymods.lazytensor.graph import Cell, Kind
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

    kind: Kind
    swapped: bool


_known: dict[Any, _Known] = {}
_ARRAY = tracing.array_type()


def _binary(name: str, slow: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def operator(self: Any, other: Any) -> Any:
        trace = self._trace
        if tracing.current() is not trace:
            return slow(self, other)
        kind_of_other: Any = type(other)
        if kind_of_other is LazyTensor and other.recording is trace.recording:
            of_other, cell = other.aval, other.cell
        elif kind_of_other is float or (kind_of_other is int and -_LARGEST <= other < _LARGEST):
            of_other, cell = kind_of_other, None
        elif kind_of_other is _ARRAY:
            of_other, cell = other.aval, None
        else:
            return slow(self, other)
        key = (name, self.aval, of_other, tracing.settings())
        known = _known.get(key)
        if known is None:
            return _learn(key, slow, self, other)
        if cell is None:
            cell = Cell(known.kind.operands[not known.swapped], other)
        return trace.recording.add(known.kind, [cell, self.cell] if known.swapped else [self.cell, cell])[0]

    return operator


def _unary(name: str, slow: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def operator(self: Any) -> Any:
        trace = self._trace
        if tracing.current() is not trace:
            return slow(self)
        key = (name, self.aval, tracing.settings())
        known = _known.get(key)
        return _learn(key, slow, self) if known is None else trace.recording.add(known.kind, [self.cell])[0]

    return operator


def _learn(key: Any, slow: Callable[..., Any], *operands: Any) -> Any:
    """Do it as jax does, and remember what it became if that was one operation of just these operands."""
    session: Session = operands[0].recording
    before = len(session.pending)
    result = slow(*operands)
    added = session.pending[before:]
    if len(added) == 1 and type(result) is LazyTensor and added[0].outputs == [result.cell]:
        inputs = added[0].inputs
        for swapped in (False, True):
            expected = operands[::-1] if swapped else operands
            same = [_is(cell, x) for cell, x in zip(inputs, expected, strict=False)]
            if len(inputs) == len(operands) and all(same):
                if len(_known) >= _MOST:
                    _known.clear()
                _known[key] = _Known(added[0].kind, swapped)
                break
    return result


def _is(cell: Cell, operand: Any) -> bool:
    if isinstance(operand, LazyTensor):
        return cell is operand.cell
    number = type(operand) in (int, float) and tracing.is_number(cell.value)
    return cell.value is operand or (number and cell.value == operand)


def install() -> None:
    """Give :class:`LazyTensor` its operators."""
    names = [f"__{n}__" for n in _BINARY] + [f"__r{n}__" for n in _REFLECTED]
    for name in names:
        setattr(LazyTensor, name, _binary(name, getattr(tracing.Recorded, name)))
    for name in _UNARY:
        setattr(LazyTensor, f"__{name}__", _unary(name, getattr(tracing.Recorded, f"__{name}__")))
