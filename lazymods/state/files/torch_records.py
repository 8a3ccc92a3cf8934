"""Tensors of a state dict, each followed in the pickle as one piece.

``torch.save`` writes a tensor as some thirty instructions, nearly always the same ones. A regular expression knows
them, so that they need not be followed one by one. What it does not match is, and both ways give the same values.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from lazymods.state.files import torch_calls
from lazymods.state.files.torch_calls import STORAGES, Global, Layout, Storage

_NUMBER = rb"(?:K.|M..|J....)"  # BININT1, BININT2, BININT
_GET = rb"(?P<%b>h.|j....)"  # BINGET, LONG_BINGET
_PUT = rb"r(?P<%b>....)"  # LONG_BINPUT
_TUPLE = rb"(?:(?P<%%b>%b{1,3}[\x85-\x87]|\(%b{4,64}t)%b|\))" % (_NUMBER, _NUMBER, _PUT)  # TUPLE1, ..., EMPTY_TUPLE
_TENSOR = re.compile(
    b"".join((
        _PUT % b"name_at",
        _GET % b"maker",
        rb"\(\(",  # MARK
        _GET % b"label",
        _GET % b"cls",
        rb"(?:X(?P<length>.)\0\0\0(?P<key>[0-9]{1,20})%b|%b)" % (_PUT % b"key_at", _GET % b"known"),  # BINUNICODE
        _GET % b"place",
        rb"(?P<numel>%b)t%bQ" % (_NUMBER, _PUT % b"storage_at"),  # TUPLE, BINPERSID
        rb"(?P<offset>%b)" % _NUMBER,
        _TUPLE % (b"size", b"size_at"),
        _TUPLE % (b"stride", b"stride_at"),
        rb"[\x88\x89]",  # NEWTRUE, NEWFALSE: whether it requires a gradient
        rb"%b\)R%b" % (_GET % b"hooks", _PUT % b"hooks_at"),  # EMPTY_TUPLE, REDUCE
        rb"t%bR%b" % (_PUT % b"arguments_at", _PUT % b"tensor_at"),
    )),
    re.DOTALL,
)
_NUMBERS = re.compile(_NUMBER, re.DOTALL)
_MAKER = "torch._utils._rebuild_tensor_v2"
_COUNTS = {b"\x85": 1, b"\x86": 2, b"\x87": 3}
_U32 = struct.Struct("<I").unpack_from
_BINUNICODE = ord("X")


class _Kind(NamedTuple):
    """What tensors have in common whose instructions name the same values and numbers.

    Attributes:
        dtype: The name of the dtype of their numbers.
        itemsize: The bytes of one.
        numel: How many their storage has.
        nbytes: How many bytes these are.
        offset: Where in the storage they begin.
        layout: Where they lie from there on.
    """

    dtype: str
    itemsize: int
    numel: int
    nbytes: int
    offset: int
    layout: Layout


class Memo(dict[int, Any]):
    """The values that instructions remember, by their index; those of tensors are put in when one is asked for."""

    def __init__(self) -> None:
        self.of_tensors: dict[int, Any] = {}
        self.pending_indices, self.pending_values = bytearray(), list[Any]()

    def __missing__(self, index: int) -> Any:
        indices, values = np.frombuffer(self.pending_indices, "<u4").tolist(), self.pending_values
        self.of_tensors.update(zip(indices, values, strict=True))
        self.pending_indices, self.pending_values = bytearray(), []
        return self.of_tensors[index]


class Records:
    """The tensors of one pickle that are followed as one piece each.

    Most of what their instructions remember is never named again, and is left out.

    Args:
        raw: The pickle.
        memo: The values that instructions remember.
        storages: The storages that were declared, by their key.
        register: Compares one that is declared again.
    """

    def __init__(
        self,
        raw: Any,
        memo: Memo,
        storages: dict[str, Storage],
        register: Callable[[Storage], Storage],
    ) -> None:
        self.raw, self.memo, self.storages, self.register = raw, memo, storages, register
        self._written = bytearray()

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
        raw, memo, storages, written = self.raw, self.memo, self.storages, self._written
        kinds: dict[Any, _Kind | None] = {}
        while (found := _TENSOR.match(raw, at)) is not None and len(stack) < most:
            name_at, maker, label, cls, key_length, key, key_at, known, place, numel, *rest = found.groups(b"")
            storage_at, offset, size, size_at, stride, stride_at, hooks, hooks_at, arguments_at, tensor_at = rest
            alike = maker, label, cls, place, hooks, numel, offset, size, stride
            if alike not in kinds:
                kinds[alike] = _kind(memo, *alike)
            kind = kinds[alike]
            if kind is None:
                break
            if known:
                key = memo[_index(known)]
            elif key_length[0] == len(key):
                key = key.decode()
            if type(key) is not str:
                break
            dtype, itemsize, numel, nbytes, offset, layout = kind
            storage = tuple.__new__(Storage, (key, dtype, numel, nbytes, itemsize, None, 0))  # faster than its own
            if storages.setdefault(key, storage) is not storage:  # one that several tensors share
                storage = self.register(storage)
            tensor = torch_calls.placed(storage, dtype, itemsize, offset, layout)
            memo.pending_indices += name_at + key_at + tensor_at if key_at else name_at + tensor_at
            memo.pending_values += (stack[-1], key, tensor) if key_at else (stack[-1], tensor)
            written += b"".join((name_at, key_at, storage_at, size_at, stride_at, hooks_at, arguments_at, tensor_at))
            stack.append(tensor)
            at = found.end()
            if raw[at] != _BINUNICODE:
                break
            name, at = text_at(raw, at + 1)
            stack.append(name)
        return at

    @property
    def are_exact(self) -> bool:
        """Whether each index that they write stands for one value in all of the pickle: as picklers count them, up."""
        written = np.frombuffer(self._written, "<u4")
        others = np.array(list(self.memo), np.int64)
        is_between = np.searchsorted(written, others, "left") == np.searchsorted(written, others, "right")
        return bool((written[1:] > written[:-1]).all() and is_between.all())


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


def _kind(memo: Memo, *found: bytes) -> _Kind | None:
    """Return what tensors have in common of which this was found; None if ``torch.save`` does not write such."""
    *names, numel, offset, size, stride = found
    maker, label, cls, place, hooks = [memo[_index(name)] for name in names]
    if not type(maker) is type(cls) is type(hooks) is Global or cls.name not in STORAGES:
        return None
    if (maker.name, label, hooks.name) != (_MAKER, "storage", "collections.OrderedDict") or type(place) is not str:
        return None
    count, begin = _number(numel), _number(offset)
    try:
        layout = torch_calls.layout_of(_tuple(size), _tuple(stride))
    except ValueError:
        return None
    dtype, itemsize = STORAGES[cls.name]
    return None if count < 0 or begin < 0 else _Kind(dtype, itemsize, count, count * itemsize, begin, layout)


def _index(get: bytes) -> int:
    return int.from_bytes(get[1:], "little")


def _number(written: bytes) -> int:
    return int.from_bytes(written[1:], "little", signed=written[:1] == b"J")


def _tuple(written: bytes) -> tuple[int, ...]:
    if not written:
        return ()
    numbers = _NUMBERS.findall(written, written.startswith(b"("), len(written) - 1)
    if len(numbers) != _COUNTS.get(written[-1:], len(numbers)):
        raise ValueError("a tuple of another length than it says")
    return tuple(map(_number, numbers))
