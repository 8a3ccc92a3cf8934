"""What a PyTorch file's pickle says, without running it.

A pickle is a program for a stack machine. Here its instructions are followed with stand-ins: a class or function is a
name, a call makes a description of what it would make. Nothing is imported and nothing is called, so that every name
and every size in a file is known before PyTorch's own ``weights_only`` loader, which does run it, gets to see the file.

That loader trusts sizes: it allocates what a pickle asks for, and takes storages that are shorter than declared. So a
file passes only if it builds its tensors by the few functions that ``torch.save`` writes, each inside its storage.
"""

from __future__ import annotations

import pickletools
import re
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

from lazymods._errors import one_line
from lazymods.state.files.stored import Array, printable
from lazymods.state.files.torch_reader import MAX_LINE, Reader

_PROTO = b"\x80"
_MAX_LENGTH = 2**63 - 1
MAX_DEPTH = 64
"""How deep mappings may be nested."""

STORAGES = {
    "Double": 8,
    "Float": 4,
    "Half": 2,
    "Long": 8,
    "Int": 4,
    "Short": 2,
    "Char": 1,
    "Byte": 1,
    "Bool": 1,
    "BFloat16": 2,
    "ComplexDouble": 16,
    "ComplexFloat": 8,
    "QUInt8": 1,
    "QInt8": 1,
    "QInt32": 4,
    "QUInt4x2": 1,
    "QUInt2x4": 1,
}
"""The bytes of an element by the kind of its storage."""

_SIZES = {
    f"torch.{where}{kind}Storage": size for kind, size in STORAGES.items() for where in ("", "cuda.", "storage.")
} | {"torch.storage.UntypedStorage": 1, "torch.UntypedStorage": 1}
_UTILS = "torch._utils."
_TYPED = "torch._tensor._rebuild_from_type_v2"
_PARAMETER = "torch.nn.parameter.Parameter"
_REFUSED = {
    f"{_UTILS}_rebuild_qtensor": "a quantized tensor",
    f"{_UTILS}_rebuild_sparse_tensor": "a sparse tensor",
    f"{_UTILS}_rebuild_nested_tensor": "a nested tensor",
    f"{_UTILS}_rebuild_meta_tensor_no_storage": "a tensor on the meta device, without values",
    f"{_UTILS}_rebuild_wrapper_subclass": "a tensor subclass",
    f"{_UTILS}_rebuild_device_tensor_from_numpy": "a tensor of another device, as numpy has it",
    f"{_UTILS}_rebuild_device_tensor_from_cpu_tensor": "a tensor of another device",
}
_CONSTANT_NAME = re.compile(
    r"torch\.(?:u?int\d+|float\w*|bfloat16|complex\d+|bool|q\w+|bits\w+|per_(?:tensor|channel)\w+)"
)
_BUILTIN = {"__builtin__": "builtins"}  # as Python 2 named it, and as protocol 2 still does


MAX_STACK = 100_000
"""How many values a pickle may have begun with at a time: ``pickle`` writes a thousand of a container at once."""


class Malformed(Exception):  # noqa: N818 - a fact for the reader, who makes the error
    """A pickle that is not read.

    Attributes:
        got: What it holds.
        needed: What was needed instead.
    """

    def __init__(self, got: str, needed: str) -> None:
        super().__init__(got, needed)
        self.got, self.needed = got, needed


class Global(NamedTuple):
    """A class or function by its name."""

    name: str


class Storage(NamedTuple):
    """The memory of tensors: its key in the file, its kind and its length, and whether it is a part of another one."""

    key: str
    kind: str
    numel: int
    nbytes: int
    is_view: bool = False


class Tensor(NamedTuple):
    """A tensor that lies inside its storage."""

    storage: Storage


class Refused(NamedTuple):
    """A tensor of a kind that has no array."""

    what: str


class Opaque(NamedTuple):
    """Something else that is no tensor."""

    what: str


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


def walk(data: Array, begin: int = 0, *, allowed: Collection[str] = ()) -> Pickle:
    """Follow a pickle.

    Args:
        data: The bytes that hold it.
        begin: Where it begins.
        allowed: Names of classes that the user has told PyTorch to trust.

    Raises:
        Malformed: If it is damaged, or does something that ``torch.save`` does not write.
    """
    machine = _Machine(Reader(data, begin), allowed)
    try:
        value = machine.run()
    except (IndexError, KeyError, ValueError) as error:
        got = f"a damaged pickle ({printable(one_line(error)) or type(error).__name__})"
        raise Malformed(got, "what torch.save writes") from error
    return Pickle(value, machine.storages, machine.reader.position)


def refused_tensors(tree: Any) -> Iterator[tuple[str, str]]:
    """Give the names of tensors that have no array, and what they are."""
    seen = set()
    pending = [("", tree)]
    while pending:
        name, value = pending.pop()
        if isinstance(value, Refused):
            yield name, value.what
        elif isinstance(value, (dict, list)) or type(value) is tuple:
            if id(value) not in seen:
                seen.add(id(value))
                items = value.items() if isinstance(value, dict) else enumerate(value)
                pending.extend((f"{name}.{key}"[-MAX_LINE:].lstrip("."), item) for key, item in items)


# ---------------------------------------------------------------- the machine


class _Machine:
    def __init__(self, reader: Reader, allowed: Collection[str]) -> None:
        self.reader, self.allowed = reader, allowed
        self.stack: list[Any] = []
        self.outer: list[list[Any]] = []
        self.memo: dict[int, Any] = {}
        self.storages: dict[str, Storage] = {}

    def run(self) -> Any:
        reader = self.reader
        begin = reader.position
        while True:
            code = reader.read(1)
            if not code:
                raise ValueError("it ends without a stop")
            known = _STEPS_BY_CODE.get(code)
            if known is None:
                name = _NAMES.get(code, code.hex())
                raise Malformed(f"the pickle instruction {name}", "those that PyTorch's weights_only loader reads")
            read, step = known
            if step is None:
                return self.stack.pop()
            if len(self.stack) > MAX_STACK or len(self.outer) > MAX_STACK:
                raise Malformed(f"over {MAX_STACK:,} values begun at a time", "what torch.save writes")
            if code == _PROTO and reader.position > begin + 1:
                raise Malformed("a protocol that is told twice", "what torch.save writes")
            # the readers need read and readline of a file, and no more
            step(self, None if read is None else read(reader))

    def line(self) -> str:
        line = self.reader.readline()
        if not line.endswith(b"\n"):
            raise ValueError("a name without an end")
        return line[:-1].decode()

    def find(self, module: str, name: str) -> Global:
        full = f"{_BUILTIN.get(module, module)}.{name}"
        known = full in _CALLS or full in _SIZES or full in _REFUSED or full in (_PARAMETER, "torch.Tensor")
        if not known and full not in self.allowed and not _CONSTANT_NAME.fullmatch(full):
            needed = "tensors and plain values: other names are not imported, and nothing is run"
            raise Malformed(f"the global {printable(full)}", needed)
        return Global(full)

    def items_from_mark(self) -> list[Any]:
        items, self.stack = self.stack, self.outer.pop()
        return items

    def set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, dict) or len(items) % 2:
            raise ValueError("items for what is no dict")
        target.update(_pairs(zip(items[::2], items[1::2], strict=True)))

    def extend(self, items: list[Any]) -> None:
        if not isinstance(self.stack[-1], list):
            raise ValueError("items for what is no list")
        self.stack[-1].extend(items)

    def group(self, count: int) -> None:
        if len(self.stack) < count:
            raise ValueError("an empty stack")
        self.stack[-count:] = [tuple(self.stack[-count:])]

    def call(self, argument: Any) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        if not isinstance(function, Global) or type(arguments) is not tuple:
            raise ValueError("a call of what is no function")
        self.stack.append(_made_by(function.name, arguments, self.allowed))

    def new(self, argument: Any) -> None:
        arguments, cls = self.stack.pop(), self.stack.pop()
        if not isinstance(cls, Global) or type(arguments) is not tuple:
            raise ValueError("an object of what is no class")
        if cls.name == _PARAMETER:
            self.stack.append(_tensor_in(arguments))
        elif cls.name in self.allowed:
            self.stack.append(Opaque(cls.name))
        else:
            raise Malformed(f"an object of {printable(cls.name)}", "tensors and plain values")

    def build(self, argument: Any) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        is_attributes = isinstance(target, dict) and isinstance(state, dict)  # a state dict's _metadata
        if not is_attributes and not isinstance(target, Opaque):
            raise Malformed("the state of an object", "tensors and plain values")

    def storage(self, argument: Any) -> None:
        identity = self.stack.pop()
        if type(identity) is not tuple or len(identity) not in (5, 6) or identity[0] != "storage":
            raise ValueError("a persistent id that is no storage's")
        _, kind, key, location, numel, *view = identity
        size = _SIZES.get(kind.name) if isinstance(kind, Global) else None
        if size is None or type(key) is not str or type(location) is not str or not _is_length(numel):
            raise ValueError("a persistent id that is no storage's")
        storage = self.register(Storage(key, kind.name, numel, numel * size))
        if view and view[0] is not None:
            if type(view[0]) is not tuple or len(view[0]) != 3:
                raise ValueError("a view that is none")
            key, offset, length = view[0]
            if type(key) is not str or not _is_length(offset) or not _is_length(length) or offset + length > numel:
                raise ValueError("a view outside its storage")
            storage = self.register(Storage(key, kind.name, length, length * size, is_view=True))
        self.stack.append(storage)

    def register(self, storage: Storage) -> Storage:
        """Keep a storage; PyTorch takes the first of each key, so the others must be as long."""
        kept = self.storages.setdefault(storage.key, storage)
        if kept != storage and (kept.nbytes or storage.nbytes or kept.is_view != storage.is_view):
            raise ValueError(f"the storage {storage.key} declared in two ways")
        return storage


def _constant(make: Callable[[], Any]) -> Callable[[_Machine, Any], Any]:
    return lambda machine, _: machine.stack.append(make())


def _mark(machine: _Machine, argument: Any) -> None:
    machine.outer.append(machine.stack)
    machine.stack = []


def _tuple(machine: _Machine, argument: Any) -> None:
    items = tuple(machine.items_from_mark())
    machine.stack.append(items)


def _set_item(machine: _Machine, argument: Any) -> None:
    value, key = machine.stack.pop(), machine.stack.pop()
    machine.set_items([key, value])


def _literal(machine: _Machine, argument: Any) -> None:
    machine.stack.append(argument)


_STEPS: dict[str, Callable[[_Machine, Any], Any] | None] = {
    "STOP": None,
    "PROTO": lambda machine, version: None,
    "GLOBAL": lambda machine, _: machine.stack.append(machine.find(machine.line(), machine.line())),
    "NONE": _constant(lambda: None),
    "NEWTRUE": _constant(lambda: True),
    "NEWFALSE": _constant(lambda: False),
    "EMPTY_TUPLE": _constant(tuple),
    "EMPTY_LIST": _constant(list),
    "EMPTY_DICT": _constant(dict),
    "EMPTY_SET": _constant(lambda: Opaque("set")),
    **dict.fromkeys(("BININT", "BININT1", "BININT2", "BINFLOAT", "BINUNICODE", "LONG1"), _literal),
    "MARK": _mark,
    "TUPLE": _tuple,
    "TUPLE1": lambda machine, _: machine.group(1),
    "TUPLE2": lambda machine, _: machine.group(2),
    "TUPLE3": lambda machine, _: machine.group(3),
    "SETITEM": _set_item,
    "SETITEMS": lambda machine, _: machine.set_items(machine.items_from_mark()),
    "APPEND": lambda machine, _: machine.extend([machine.stack.pop()]),
    "APPENDS": lambda machine, _: machine.extend(machine.items_from_mark()),
    "BINPUT": lambda machine, index: machine.memo.__setitem__(index, machine.stack[-1]),
    "LONG_BINPUT": lambda machine, index: machine.memo.__setitem__(index, machine.stack[-1]),
    "BINGET": lambda machine, index: machine.stack.append(machine.memo[index]),
    "LONG_BINGET": lambda machine, index: machine.stack.append(machine.memo[index]),
    # Python 2's texts; PyTorch takes them to be UTF-8
    "SHORT_BINSTRING": lambda machine, text: machine.stack.append(text.encode("latin-1").decode("utf-8")),
    "REDUCE": _Machine.call,
    "NEWOBJ": _Machine.new,
    "BUILD": _Machine.build,
    "BINPERSID": _Machine.storage,
}
_NAMES = {instruction.code.encode("latin-1"): instruction.name for instruction in pickletools.opcodes}
_STEPS_BY_CODE: dict[bytes, tuple[Callable[[Any], Any] | None, Callable[[_Machine, Any], Any] | None]] = {
    # the two lines of a global are read by lengths of our own
    i.code.encode("latin-1"): (None if i.arg is None or i.name == "GLOBAL" else i.arg.reader, _STEPS[i.name])
    for i in pickletools.opcodes
    if i.name in _STEPS
}
"""How the argument of an instruction is read, and what is done with it; None at the end."""


# ---------------------------------------------------------------- calls


def _made_by(name: str, arguments: tuple[Any, ...], allowed: Collection[str]) -> Any:
    if name in _REFUSED:
        return Refused(_REFUSED[name])
    if name in _CALLS:
        return _CALLS[name](arguments)
    if name in allowed:
        return Opaque(name)
    raise Malformed(f"a call of {printable(name)}", "tensors and plain values")


def _rebuilt(arguments: tuple[Any, ...], dtype: int | None = None) -> Tensor:
    """Check a tensor against its storage: offset, sizes and strides, all of which PyTorch would take as they are."""
    storage, offset, size, stride, *rest = arguments
    if not isinstance(storage, Storage) or not _is_length(offset):
        raise ValueError("a tensor without a storage")
    if not _are_lengths(size) or not _are_lengths(stride) or len(size) != len(stride):
        raise ValueError("a tensor whose sizes or strides are none")
    requires_grad, hooks, metadata = [*rest, *(False, {}, {})[len(rest) :]]
    if type(requires_grad) is not bool or hooks or not isinstance(metadata or {}, dict):
        raise ValueError("a tensor with hooks")
    item = dtype or _SIZES[storage.kind]
    last = offset + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
    if 0 not in size and (last + 1) * item > storage.nbytes:
        got = f"a tensor of shape {printable(str(size))} that ends past the {storage.nbytes:,} bytes of its storage"
        raise Malformed(got, "tensors inside their storages")
    return Tensor(storage)


def _rebuilt_as(arguments: tuple[Any, ...]) -> Tensor:
    """Check a tensor whose dtype is told apart from its storage, as for the younger dtypes."""
    storage, offset, size, stride, requires_grad, hooks, dtype, *metadata = arguments
    item = _ITEM_SIZES.get(dtype.name) if isinstance(dtype, Global) else None
    if item is None:
        raise ValueError("a tensor without a dtype")
    return _rebuilt((storage, offset, size, stride, requires_grad, hooks, *metadata), item)


def _rebuilt_by(arguments: tuple[Any, ...]) -> Any:
    """Check a tensor that has attributes: the function that makes it, its class, the function's arguments, the rest."""
    function, cls, inner, _ = arguments
    makers = (f"{_UTILS}_rebuild_tensor_v2", f"{_UTILS}_rebuild_tensor_v3", f"{_UTILS}_rebuild_parameter")
    if not isinstance(function, Global) or type(inner) is not tuple:
        raise ValueError("a tensor that nothing makes")
    if function.name in _REFUSED or (isinstance(cls, Global) and cls.name not in (_PARAMETER, "torch.Tensor")):
        return Refused(_REFUSED.get(function.name, "a tensor subclass"))
    if function.name not in makers or not isinstance(cls, Global):
        raise ValueError("a tensor that nothing makes")
    return _CALLS[function.name](inner)


def _tensor_in(arguments: tuple[Any, ...]) -> Any:
    if not arguments or not isinstance(arguments[0], (Tensor, Refused)):
        raise ValueError("a parameter without a tensor")
    return arguments[0]


def _ordered_dict(arguments: tuple[Any, ...]) -> dict[Any, Any]:
    if not arguments:
        return {}
    (items,) = arguments
    if isinstance(items, dict):
        return _pairs(items.items())
    if not isinstance(items, list) or not all(type(i) in (list, tuple) and len(i) == 2 for i in items):
        raise ValueError("a dict of what are no pairs")
    return _pairs(items)


def _pairs(items: Any) -> dict[Any, Any]:
    out = {}
    for key, value in items:
        if not _is_plain(key) and not (type(key) is tuple and all(map(_is_plain, key))):
            raise ValueError("a key that is no plain value")
        out[key] = value
    return out


def _plain_call(arguments: tuple[Any, ...]) -> Opaque:
    """Check a call whose arguments are texts, numbers, or one list of them, and that makes nothing big of a number."""
    flat = [item for a in arguments for item in (a if type(a) in (list, tuple) else [a])]
    if not all(map(_is_plain, flat)):
        raise ValueError("arguments that are no plain values")
    return Opaque("a plain value")


def _bytes(arguments: tuple[Any, ...]) -> Opaque:
    """Check bytes that are written as a text; other codecs and a bare length could make much of little."""
    if not arguments:
        return Opaque("bytes")
    text, *codec = arguments
    if not (isinstance(text, Opaque) and not codec) and not (
        isinstance(text, str) and codec in (["latin1"], ["latin-1"])
    ):
        raise ValueError("bytes that are no text")
    return Opaque("bytes")


_CALLS: dict[str, Callable[[tuple[Any, ...]], Any]] = {
    f"{_UTILS}_rebuild_tensor": _rebuilt,
    f"{_UTILS}_rebuild_tensor_v2": _rebuilt,
    f"{_UTILS}_rebuild_tensor_v3": _rebuilt_as,
    f"{_UTILS}_rebuild_parameter": _tensor_in,
    f"{_UTILS}_rebuild_parameter_with_state": _tensor_in,
    _TYPED: _rebuilt_by,
    "collections.OrderedDict": _ordered_dict,
    "collections.Counter": _ordered_dict,
    "builtins.set": _plain_call,
    "builtins.complex": _plain_call,
    "builtins.bytearray": _bytes,
    "_codecs.encode": _bytes,
    "torch.Size": _plain_call,
    "torch.device": _plain_call,
    "torch.serialization._get_layout": _plain_call,
}

_ITEM_SIZES = {
    f"torch.{name}": size
    for size, names in {
        1: "uint8 int8 bool float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2",
        2: "uint16 int16 float16 half bfloat16 short",
        4: "uint32 int32 float32 float int complex32",
        8: "uint64 int64 float64 double long complex64",
        16: "complex128",
    }.items()
    for name in names.split()
}


def _is_plain(value: Any) -> bool:
    return value is None or type(value) in (str, int, float, bool)


def _is_length(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MAX_LENGTH


def _are_lengths(value: Any) -> bool:
    return type(value) in (list, tuple) and all(map(_is_length, value))
