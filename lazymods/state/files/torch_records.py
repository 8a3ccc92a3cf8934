"""Tensors of a state dict, each followed in the pickle as one piece.

``torch.save`` writes a tensor as some thirty instructions, nearly always the same ones. A regular expression knows
them, so that they need not be followed one by one. What it does not match is, and both ways give the same values.
"""

from __future__ import annotations

import functools
import re
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from lazymods.state.files import torch_calls
from lazymods.state.files.torch_calls import STORAGES, Global, Layout, Storage

_NUMBER = rb"K.|M..|J...."  # BININT1, BININT2, BININT
_GET = rb"(h.|j....)"  # BINGET, LONG_BINGET
_PUT = rb"r(....)"  # LONG_BINPUT
_KEY = rb"(?:X(.)\0\0\0([0-9]{1,20})%b|%b)" % (_PUT, _GET)  # BINUNICODE, or one that stands before
_STORAGE = rb"\(%b%b%b%b(%b)t%bQ" % (_GET, _GET, _KEY, _GET, _NUMBER, _PUT)  # MARK ... TUPLE, BINPERSID
_LENGTHS = rb"(?:((?:%b){1,3}[\x85-\x87]|\((?:%b){4,64}t)%b|\))" % (_NUMBER, _NUMBER, _PUT)  # TUPLE1, ..., EMPTY_TUPLE
_HOOKS = rb"%b\)R%b" % (_GET, _PUT)  # EMPTY_TUPLE, REDUCE
_TENSOR = re.compile(
    rb"%b%b\(%b(%b)%b%b[\x88\x89]%bt%bR%b" % (_PUT, _GET, _STORAGE, _NUMBER, _LENGTHS, _LENGTHS, _HOOKS, _PUT, _PUT),
    re.DOTALL,
)
_NUMBERS = re.compile(_NUMBER, re.DOTALL)
_MAKER = "torch._utils._rebuild_tensor_v2"
_COUNTS = {b"\x85": 1, b"\x86": 2, b"\x87": 3}
_U32 = struct.Struct("<I").unpack_from
_INDICES = struct.Struct("<3I").unpack
_BINUNICODE = ord("X")


class _Kind(NamedTuple):
    """What tensors have in common whose instructions name the same values.

    Attributes:
        dtype: The name of the dtype of their numbers.
        itemsize: The bytes of one.
        last: The largest index of such a value.
    """

    dtype: str
    itemsize: int
    last: int


_NO_TENSORS = _Kind("", 0, 0)


class Records:
    """The tensors of one pickle that are followed as one piece each.

    Most of what their instructions remember is never named again, and is left out.

    Args:
        raw: The pickle.
        memo: The values that instructions remember, by their index.
        storages: The storages that were declared, by their key.
        register: Compares one that is declared again.
    """

    def __init__(
        self,
        raw: Any,
        memo: dict[int, Any],
        storages: dict[str, Storage],
        register: Callable[[Storage], Storage],
    ) -> None:
        self.raw, self.memo, self.storages, self.register = raw, memo, storages, register
        self._left_out = bytearray()

    def follow(self, at: int, stack: list[Any], most: int) -> int:
        """Follow tensors, and the names between them.

        Args:
            at: Where the instructions of the first tensor begin: after its name, which is the stack's last value.
            stack: Where they leave their values.
            most: How many values it may have.

        Returns:
            Where the first instruction is that is none of theirs.

        Raises:
            KeyError: If they name a value that nothing remembers.
            Malformed: If a tensor does not lie in its storage.
            ValueError: If a storage is declared in two ways.
        """
        raw, memo, storages = self.raw, self.memo, self.storages
        kinds: dict[Any, _Kind] = {}
        last = 0  # no value that they all name is remembered anew
        left_out: list[bytes | None] = []
        while (found := _TENSOR.match(raw, at)) is not None and len(stack) < most:
            name_at, maker, label, cls, length, key, key_at, known, place, numel, *rest = found.groups()
            storage_at, offset, size, size_at, stride, stride_at, hooks, hooks_at, call_at, tensor_at = rest
            names = (maker, label, cls, place, hooks)
            kind = kinds.get(names)
            if kind is None:
                kind = kinds[names] = _kind(memo, *names)
                last = max(last, kind.last)
            layout, numel, offset = _layout(size, stride), _number(numel), _number(offset)
            name_at, tensor_at, key_at = _INDICES(name_at + tensor_at + (key_at or tensor_at))
            if not kind.itemsize or layout is None or numel < 0 or offset < 0:
                break
            if name_at <= last or key_at <= last or tensor_at <= last:
                break
            memo[name_at] = stack[-1]
            if key is None:
                key = memo[_index(known)]
            elif length[0] == len(key):
                memo[key_at] = key = key.decode()
            if type(key) is not str:
                break
            dtype, itemsize, _ = kind
            storage = Storage._make((key, dtype, numel, numel * itemsize, itemsize, None, 0))  # faster than by its name
            if storages.setdefault(key, storage) is not storage:  # one that several tensors share
                storage = self.register(storage)
            memo[tensor_at] = tensor = torch_calls.placed(storage, dtype, itemsize, offset, layout)
            left_out += (storage_at, size_at, stride_at, hooks_at, call_at)
            stack.append(tensor)
            at = found.end()
            if raw[at] != _BINUNICODE:
                break
            name, at = text_at(raw, at + 1)
            stack.append(name)
        self._left_out += b"".join(filter(None, left_out))
        return at

    @property
    def are_exact(self) -> bool:
        """Whether no index that was left out is that of a value which is remembered."""
        return not np.isin(np.frombuffer(self._left_out, "<u4"), list(self.memo)).any()


def text_at(raw: Any, at: int) -> tuple[str, int]:
    """Return a text after its length, and where it ends.

    Raises:
        IndexError: If it does not end in the pickle.
        ValueError: If it is none.
    """
    (length,) = _U32(raw, at)
    end = at + 4 + length
    if end > len(raw):
        raise IndexError("it ends inside of a value")
    return str(raw[at + 4 : end], "utf-8", "surrogatepass"), end


def _kind(memo: dict[int, Any], *gets: bytes) -> _Kind:
    """Return what tensors have in common that name these values; without bytes if ``torch.save`` names others."""
    indices = [_index(get) for get in gets]
    maker, label, cls, place, hooks = [memo[index] for index in indices]
    if not type(maker) is type(cls) is type(hooks) is Global or cls.name not in STORAGES:
        return _NO_TENSORS
    if (maker.name, label, hooks.name) != (_MAKER, "storage", "collections.OrderedDict") or type(place) is not str:
        return _NO_TENSORS
    return _Kind(*STORAGES[cls.name], max(indices))


def _index(get: bytes) -> int:
    return int.from_bytes(get[1:], "little")


@functools.lru_cache(maxsize=1024)
def _number(written: bytes) -> int:
    return int.from_bytes(written[1:], "little", signed=written[:1] == b"J")


@functools.lru_cache(maxsize=1024)
def _layout(size: bytes | None, stride: bytes | None) -> Layout | None:
    """Return where numbers lie whose sizes and strides are written; None if these are none."""
    try:
        return torch_calls.layout_of(_tuple(size), _tuple(stride))
    except ValueError:
        return None


def _tuple(written: bytes | None) -> tuple[int, ...]:
    if written is None:
        return ()
    numbers = _NUMBERS.findall(written, written.startswith(b"("), len(written) - 1)
    if len(numbers) != _COUNTS.get(written[-1:], len(numbers)):
        raise ValueError("a tuple of another length than it says")
    return tuple(map(_number, numbers))
