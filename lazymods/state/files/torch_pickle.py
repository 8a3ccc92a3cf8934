"""What a PyTorch file's pickle says, without running it.

A pickle is a program for a stack machine. Here its instructions are followed with stand-ins: a class or function is a
name, a call makes a description of what it would make (:mod:`lazymods.state.files.torch_calls`). Nothing is imported
and nothing is called, and every name and size in a file is checked before a byte of its tensors is looked at.

Python's own unpickler is in C, and could be given stand-ins too, but it trusts a pickle with more than calls: it makes
room for the largest index that a file names, and computes the hashes of keys, however deep they are.
"""

from __future__ import annotations

import pickletools
import struct
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from lazymods._errors import one_line
from lazymods.state.files import torch_calls
from lazymods.state.files.stored import Array, printable
from lazymods.state.files.torch_calls import Global, Malformed, Refused, Storage
from lazymods.state.files.torch_objects import MAX_DEPTH as MAX_DEPTH
from lazymods.state.files.torch_objects import Opaque, as_mappings
from lazymods.state.files.torch_records import Memo, Records, text_at

MAX_LINE = 1000
"""The longest name of a module, class or function."""

MAX_STACK = 100_000
"""How many values a pickle may have begun with at a time: ``pickle`` writes a thousand of a container at once."""


class Pickle(NamedTuple):
    """What a pickle describes.

    Attributes:
        value: Its value, of stand-ins.
        storages: The storages by key.
        end: Where it ends.
    """

    value: Any
    storages: dict[str, Storage]
    end: int


def walk(data: Array, begin: int = 0, *, in_pieces: bool = True) -> Pickle:
    """Follow a pickle.

    Args:
        data: The bytes that hold it.
        begin: Where it begins.
        in_pieces: Whether tensors are followed as one piece each where they can be; the values are the same.

    Raises:
        Malformed: If it is damaged, or does something that ``torch.save`` does not write.
    """
    machine = _Machine(data.data, begin, in_pieces=in_pieces)
    try:
        value, end = machine.run()
    except (Malformed, IndexError, KeyError, ValueError, struct.error) as error:
        if machine.records is not None:
            return walk(data, begin, in_pieces=False)
        if isinstance(error, Malformed):
            raise
        got = f"a damaged pickle ({printable(one_line(error)) or type(error).__name__})"
        raise Malformed(got, "what torch.save writes") from error
    if machine.records is not None and not machine.records.are_exact:
        return walk(data, begin, in_pieces=False)
    return Pickle(as_mappings(value), machine.storages, end)


def refused_tensors(tree: Any) -> Iterator[tuple[str, str]]:
    """Give the names of tensors that have no array, and what they are."""
    seen = set()
    pending = [("", tree)]
    while pending:
        name, value = pending.pop()
        if isinstance(value, Refused):
            yield name, value.what
        elif (isinstance(value, (dict, list)) or type(value) is tuple) and id(value) not in seen:
            seen.add(id(value))
            items = value.items() if isinstance(value, dict) else enumerate(value)
            pending.extend(
                (f"{name}.{key}"[-MAX_LINE:].lstrip("."), item)
                for key, item in items
                if isinstance(item, (dict, list, Refused)) or type(item) is tuple
            )


# ---------------------------------------------------------------- the machine

_STOP, _BINPUT, _BINGET, _LONG_BINPUT, _LONG_BINGET = b".qhrj"
_U16, _U32, _I32, _F64 = (struct.Struct(f).unpack_from for f in ("<H", "<I", "<i", ">d"))


class _Machine:
    """A machine at work.

    Attributes:
        stack: The values since the last mark.
        outer: Those before it, and before the marks before it.
        memo: Values by their index.
        storages: The storages that were declared, by key.
        records: What follows tensors as one piece each; None: every instruction is followed.
    """

    def __init__(self, raw: Any, begin: int, *, in_pieces: bool) -> None:
        self.raw, self.begin = raw, begin
        self.stack: list[Any] = []
        self.outer: list[list[Any]] = []
        self.memo = Memo()
        self.storages: dict[str, Storage] = {}
        self.records: Records | None = Records(raw, self.memo, self.storages, self.register) if in_pieces else None

    def run(self) -> tuple[Any, int]:
        """Return the value, and where the pickle ends."""
        raw, memo, stack, at = self.raw, self.memo, self.stack, self.begin
        while True:
            code = raw[at]
            if code == _BINPUT:  # these are half of all instructions
                memo[raw[at + 1]] = stack[-1]
                at += 2
            elif code == _BINGET:
                stack.append(memo[raw[at + 1]])
                at += 2
            elif code == _LONG_BINPUT:
                memo[_U32(raw, at + 1)[0]] = stack[-1]
                at += 5
            elif code == _LONG_BINGET:
                stack.append(memo[_U32(raw, at + 1)[0]])
                at += 5
            elif code == _STOP:
                return stack.pop(), at + 1
            else:
                step = _STEPS_BY_CODE[code]
                if step is None:
                    name = _NAMES.get(code, f"{code:02x}")
                    raise Malformed(f"the pickle instruction {name}", "those that torch.save writes")
                at = step(self, at + 1)
                stack = self.stack
                if len(stack) > MAX_STACK:
                    raise _too_many()

    def bytes_at(self, begin: int, length: int) -> Any:
        end = begin + length
        if end > len(self.raw):
            raise IndexError("it ends inside of a value")
        return self.raw[begin:end]

    def line_at(self, begin: int) -> tuple[str, int]:
        line, found, _ = bytes(self.raw[begin : begin + MAX_LINE]).partition(b"\n")
        if not found:
            raise ValueError("a name without an end")
        return line.decode(), begin + len(line) + 1

    def items_from_mark(self) -> list[Any]:
        items, self.stack = self.stack, self.outer.pop()
        return items

    def set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, (dict, Opaque)) or len(items) % 2:
            raise ValueError("items for what is no dict")
        if isinstance(target, Opaque):
            target.items.update((k, v) for k, v in zip(items[::2], items[1::2], strict=True) if type(k) is str)
        else:
            target.update(torch_calls.pairs(zip(items[::2], items[1::2], strict=True)))

    def extend(self, items: list[Any]) -> None:
        if isinstance(self.stack[-1], Opaque):
            return
        if not isinstance(self.stack[-1], list):
            raise ValueError("items for what is no list")
        self.stack[-1].extend(items)

    def called(self) -> tuple[str, tuple[Any, ...]]:
        arguments, function = self.stack.pop(), self.stack.pop()
        if type(function) not in (Global, Opaque) or type(arguments) is not tuple:
            raise ValueError("a call of what is no function")
        return function.name if type(function) is Global else function.what, arguments

    def register(self, storage: Storage) -> Storage:
        """Keep a storage; PyTorch takes the first of each key, so the others must be as long."""
        kept = self.storages.setdefault(storage.key, storage)
        if kept is not storage and kept != storage and (kept.nbytes or storage.nbytes or kept.root != storage.root):
            raise ValueError(f"the storage {storage.key} declared in two ways")
        return storage


def _too_many() -> Malformed:
    return Malformed(f"over {MAX_STACK:,} values begun at a time", "what torch.save writes")


_Step = Callable[[_Machine, int], int]
"""Does what an instruction says; given where its argument begins, it returns where the next one does."""


def _pushing(make: Callable[[], Any]) -> _Step:
    def step(machine: _Machine, at: int) -> int:
        machine.stack.append(make())
        return at

    return step


def _number(size: int, read: Callable[[Any, int], tuple[Any, ...]]) -> _Step:
    def step(machine: _Machine, at: int) -> int:
        machine.stack.append(read(machine.raw, at)[0])
        return at + size

    return step


def _acting(act: Callable[[_Machine], None]) -> _Step:
    def step(machine: _Machine, at: int) -> int:
        act(machine)
        return at

    return step


def _grouping(count: int) -> _Step:
    def step(machine: _Machine, at: int) -> int:
        stack = machine.stack
        if len(stack) < count:
            raise ValueError("an empty stack")
        stack[-count:] = [tuple(stack[-count:])]
        return at

    return step


def _byte(machine: _Machine, at: int) -> int:
    machine.stack.append(machine.raw[at])
    return at + 1


def _long(machine: _Machine, at: int) -> int:
    length = machine.raw[at]
    machine.stack.append(int.from_bytes(machine.bytes_at(at + 1, length), "little", signed=True))
    return at + 1 + length


def _text(machine: _Machine, at: int) -> int:
    text, at = text_at(machine.raw, at)
    machine.stack.append(text)
    return at if machine.records is None else machine.records.follow(at, machine.stack, MAX_STACK)


def _short_text(machine: _Machine, at: int) -> int:
    length = machine.raw[at]
    machine.stack.append(str(machine.bytes_at(at + 1, length), "utf-8"))  # Python 2's, which PyTorch takes for UTF-8
    return at + 1 + length


def _protocol(machine: _Machine, at: int) -> int:
    if at != machine.begin + 1:
        raise Malformed("a protocol that is told twice", "what torch.save writes")
    machine.raw[at]  # which is there
    return at + 1


def _global(machine: _Machine, at: int) -> int:
    module, at = machine.line_at(at)
    name, at = machine.line_at(at)
    machine.stack.append(torch_calls.find(module, name))
    return at


def _mark(machine: _Machine, at: int) -> int:
    machine.outer.append(machine.stack)
    machine.stack = []
    if len(machine.outer) > MAX_STACK:
        raise _too_many()
    return at


def _tuple(machine: _Machine, at: int) -> int:
    items = tuple(machine.stack)
    machine.stack = machine.outer.pop()
    machine.stack.append(items)
    return at


def _set_item(machine: _Machine) -> None:
    value, key = machine.stack.pop(), machine.stack.pop()
    machine.set_items([key, value])


def _build(machine: _Machine) -> None:
    state, target = machine.stack.pop(), machine.stack[-1]
    is_attributes = isinstance(target, dict) and isinstance(state, dict)  # a state dict's _metadata
    if isinstance(target, Opaque):
        target.state = state
    elif not is_attributes:
        raise Malformed("the state of an object", "tensors and plain values")


def _storage(machine: _Machine) -> None:
    identity = machine.stack.pop()
    if type(identity) is tuple and len(identity) == 4 and identity[0] == "module" and type(identity[1]) is Global:
        machine.stack.append(identity[1])  # a class, and its source, as streams have it
        return
    whole, part = torch_calls.storage_of(identity)
    storage = machine.register(whole)
    machine.stack.append(storage if part is None else machine.register(part))


_STEPS: dict[str, _Step] = {
    "PROTO": _protocol,
    "GLOBAL": _global,
    "NONE": _pushing(lambda: None),
    "NEWTRUE": _pushing(lambda: True),
    "NEWFALSE": _pushing(lambda: False),
    "EMPTY_TUPLE": _pushing(tuple),
    "EMPTY_LIST": _pushing(list),
    "EMPTY_DICT": _pushing(dict),
    "EMPTY_SET": _pushing(set),
    "BININT": _number(4, _I32),
    "BININT1": _byte,
    "BININT2": _number(2, _U16),
    "BINFLOAT": _number(8, _F64),
    "BINUNICODE": _text,
    "SHORT_BINSTRING": _short_text,
    "LONG1": _long,
    "MARK": _mark,
    "TUPLE": _tuple,
    "TUPLE1": _grouping(1),
    "TUPLE2": _grouping(2),
    "TUPLE3": _grouping(3),
    "SETITEM": _acting(_set_item),
    "SETITEMS": _acting(lambda machine: machine.set_items(machine.items_from_mark())),
    "APPEND": _acting(lambda machine: machine.extend([machine.stack.pop()])),
    "APPENDS": _acting(lambda machine: machine.extend(machine.items_from_mark())),
    "REDUCE": _acting(lambda machine: machine.stack.append(torch_calls.made_by(*machine.called()))),
    "NEWOBJ": _acting(lambda machine: machine.stack.append(torch_calls.new(*machine.called()))),
    "BUILD": _acting(_build),
    "BINPERSID": _acting(_storage),
}
_NAMES = {ord(instruction.code): instruction.name for instruction in pickletools.opcodes}
_STEPS_BY_CODE = [_STEPS.get(_NAMES.get(code, "")) for code in range(256)]
