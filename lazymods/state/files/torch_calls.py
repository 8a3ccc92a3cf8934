"""What the calls in a PyTorch file's pickle make: descriptions of tensors, each checked against its storage.

PyTorch itself trusts sizes: it allocates what a pickle asks for, and takes storages that are shorter than declared. So
only the few functions are known that ``torch.save`` writes, and what they make of tensors lies inside its storage.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from lazymods._initial.stacking import Shape
from lazymods.state.files.stored import printable
from lazymods.state.files.torch_objects import Opaque

_MAX_LENGTH = 2**63 - 1

_KINDS = {
    "Double": ("float64", 8),
    "Float": ("float32", 4),
    "Half": ("float16", 2),
    "Long": ("int64", 8),
    "Int": ("int32", 4),
    "Short": ("int16", 2),
    "Char": ("int8", 1),
    "Byte": ("uint8", 1),
    "Bool": ("bool", 1),
    "BFloat16": ("bfloat16", 2),
    "ComplexDouble": ("complex128", 16),
    "ComplexFloat": ("complex64", 8),
    "QUInt8": ("quint8", 1),
    "QInt8": ("qint8", 1),
    "QInt32": ("qint32", 4),
    "QUInt4x2": ("quint4x2", 1),
    "QUInt2x4": ("quint2x4", 1),
}
STORAGES = {
    f"torch.{where}{kind}Storage": dtype for kind, dtype in _KINDS.items() for where in ("", "cuda.", "storage.")
} | dict.fromkeys(("torch.storage.UntypedStorage", "torch.UntypedStorage"), ("uint8", 1))
"""The dtype of the elements of a storage and their bytes, by the storage's class."""

_DTYPES = {
    f"torch.{name}": (alias or name, size)
    for size, names in {
        1: "uint8 int8 bool float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2",
        2: "uint16 int16 float16 half:float16 bfloat16 short:int16",
        4: "uint32 int32 float32 float:float32 int:int32 complex32",
        8: "uint64 int64 float64 double:float64 long:int64 complex64",
        16: "complex128",
    }.items()
    for name, _, alias in (text.partition(":") for text in names.split())
}

_UTILS = "torch._utils."
_TYPED = "torch._tensor._rebuild_from_type_v2"
PARAMETER = "torch.nn.parameter.Parameter"
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
_FUNCTIONS = r"_nn\.|_VariableFunctions"  # torch.relu and others, which a module may have for an attribute
_MAKES_TENSORS = re.compile(rf"torch\.(_utils|_tensor|storage|_C(?!\.({_FUNCTIONS})))\..*|torch\.\w*(Storage|_tensor)")
_TENSOR = re.compile(r"torch\.(\w+\.)?\w*Tensor")
_HARMFUL = re.compile(
    r"(io|_io|os|posix|nt|subprocess|sys|pty|socket|shutil|runpy|importlib|ctypes|code|pickle|marshal|webbrowser)\..*"
    r"|builtins\.(eval|exec|open|compile|__import__|input|breakpoint|globals|setattr|delattr)"
)
_BUILTIN = {"__builtin__": "builtins"}  # as Python 2 named it, and as protocol 2 still does


class Malformed(Exception):  # noqa: N818 - a fact for the reader, who makes the error
    """A pickle that is not read.

    Attributes:
        got: What it holds.
        needed: What was needed instead.
    """

    def __init__(self, got: str, needed: str) -> None:
        super().__init__(got, needed)
        self.got: str = got
        self.needed: str = needed


class Global(NamedTuple):
    """A class or function by its name."""

    name: str

    def __str__(self) -> str:
        return self.name


class Storage(NamedTuple):
    """The memory of tensors.

    Attributes:
        key: Its key in the file.
        dtype: The name of its elements' dtype.
        numel: How many there are.
        nbytes: How many bytes they have.
        itemsize: The bytes of one.
        root: The key of the storage that it is a part of; None: it is none.
        begin: Where in that storage it begins, in bytes.
    """

    key: str
    dtype: str
    numel: int
    nbytes: int
    itemsize: int
    root: str | None = None
    begin: int = 0


class Layout(NamedTuple):
    """Where the numbers of a tensor lie in its storage.

    Attributes:
        shape: Its shape.
        strides: How many numbers there are from one to the next along each axis.
        extent: How many there are from the first to the last, both counted; 0: it has none.
        room: How many it has; with a length of 0, how many if that were 1.
        is_contiguous: Whether they lie one after the other.
    """

    shape: Shape
    strides: Shape
    extent: int
    room: int
    is_contiguous: bool


class Tensor(NamedTuple):
    """A tensor that lies inside its storage.

    Attributes:
        storage: The storage.
        dtype: The name of its dtype, as PyTorch has it.
        itemsize: The bytes of a number.
        offset: Where in the storage it begins, in numbers.
        layout: Where its numbers lie from there on.
        is_conjugate: Whether the numbers of the storage are to be conjugated.
        is_negative: Whether they are to be negated.
    """

    storage: Storage
    dtype: str
    itemsize: int
    offset: int
    layout: Layout
    is_conjugate: bool = False
    is_negative: bool = False


class Refused(NamedTuple):
    """A tensor of a kind that has no array."""

    what: str


def find(module: str, name: str) -> Global:
    """Return the stand-in of a class or function.

    Raises:
        Malformed: If it makes tensors in a way that is not known, or is what only a harmful file has a use for.
    """
    full = f"{_BUILTIN.get(module, module)}.{name}"
    known = full in _CALLS or full in STORAGES or full in _REFUSED or _CONSTANT_NAME.fullmatch(full)
    if not known and (_MAKES_TENSORS.fullmatch(full) or _HARMFUL.fullmatch(full)):
        needed = "tensors and plain values: other names are not imported, and nothing is run"
        raise Malformed(f"the global {printable(full)}", needed)
    return Global(full)


def made_by(name: str, arguments: tuple[Any, ...]) -> Any:
    """Return what a call makes: a description of a tensor or a plain value, or an inert stand-in.

    Raises:
        Malformed: If a tensor does not lie in its storage, or has none.
        ValueError: If its arguments are others than those that ``torch.save`` writes.
    """
    if name in _CALLS:
        return _CALLS[name](arguments)
    return Refused(_REFUSED[name]) if name in _REFUSED else _object(name)


def new(name: str, arguments: tuple[Any, ...]) -> Any:
    """Return an object of a class.

    Raises:
        Malformed: If it is a tensor without a storage.
        ValueError: If it is a parameter without a tensor.
    """
    return tensor_in(arguments) if name == PARAMETER else _object(name)


def _object(name: str) -> Opaque:
    if _TENSOR.fullmatch(name):
        raise Malformed(f"a {name} without a storage", "tensors as torch.save writes them")
    return Opaque(name)


def storage_of(identity: Any) -> tuple[Storage, Storage | None]:
    """Return the storage that a persistent id declares, and the part of it that is meant, if it is a part.

    Raises:
        ValueError: If it declares none.
    """
    if type(identity) is not tuple or len(identity) not in (5, 6) or identity[0] != "storage":
        raise ValueError("a persistent id that is no storage's")
    _, kind, key, location, numel, *view = identity
    dtype = STORAGES.get(kind.name) if isinstance(kind, Global) else None
    if dtype is None or type(key) is not str or type(location) is not str or not _is_length(numel):
        raise ValueError("a persistent id that is no storage's")
    name, size = dtype
    root = Storage(key, name, numel, numel * size, size)
    if not view or view[0] is None:
        return root, None
    if type(view[0]) is not tuple or len(view[0]) != 3:
        raise ValueError("a view that is none")
    part, offset, length = view[0]
    if type(part) is not str or not _is_length(offset) or not _is_length(length) or offset + length > numel:
        raise ValueError("a view outside its storage")
    return root, Storage(part, name, length, length * size, size, key, offset * size)


def pairs(items: Any) -> dict[Any, Any]:
    """Return a dict of pairs.

    Raises:
        ValueError: If a key is no plain value and no stand-in: hashes of tuples in tuples can take for ever.
    """
    out = {}
    for key, value in items:
        if type(key) is not str and not _is_key(key) and not (type(key) is tuple and all(map(_is_key, key))):
            raise ValueError("a key that is no plain value")
        out[key] = value
    return out


# ---------------------------------------------------------------- tensors


def _rebuilt(arguments: tuple[Any, ...], dtype: tuple[str, int] | None = None) -> Tensor:
    """Check a tensor against its storage: offset, sizes and strides, all of which PyTorch would take as they are."""
    storage, offset, size, stride, *rest = arguments
    if not isinstance(storage, Storage) or not _is_length(offset):
        raise ValueError("a tensor without a storage")
    requires_grad, hooks, metadata = [*rest, *(False, {}, {})[len(rest) :]]
    if type(requires_grad) is not bool or hooks or not isinstance(metadata or {}, dict):
        raise ValueError("a tensor with hooks")
    name, item = dtype or (storage.dtype, storage.itemsize)
    tensor = placed(storage, name, item, offset, layout_of(size, stride))
    if not metadata:
        return tensor
    is_conjugate, is_negative = _bits(metadata)
    return tensor._replace(is_conjugate=is_conjugate, is_negative=is_negative)


def layout_of(size: Any, stride: Any) -> Layout:
    """Return where numbers lie.

    Raises:
        ValueError: If these are no sizes and strides.
    """
    if not _are_lengths(size) or not _are_lengths(stride) or len(size) != len(stride):
        raise ValueError("a tensor whose sizes or strides are none")
    extent = 0 if 0 in size else 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    room = math.prod(n or 1 for n in size)
    return Layout(tuple(size), tuple(stride), extent, room, _is_contiguous(size, stride))


def _is_contiguous(shape: Sequence[int], strides: Sequence[int]) -> bool:
    expected = 1
    for length, step in zip(reversed(shape), reversed(strides), strict=True):
        if step != expected and length > 1:
            return 0 in shape
        expected *= length
    return True


def placed(storage: Storage, dtype: str, itemsize: int, offset: int, layout: Layout) -> Tensor:
    """Return a tensor of a storage.

    Raises:
        Malformed: If it does not lie inside.
    """
    if layout.extent and (offset + layout.extent) * itemsize > storage.nbytes:
        size = printable(str(layout.shape))
        got = f"a tensor of shape {size} that ends past the {storage.nbytes:,} bytes of its storage"
        raise Malformed(got, "tensors inside their storages")
    return tuple.__new__(Tensor, (storage, dtype, itemsize, offset, layout, False, False))  # faster than its own


def _bits(metadata: Mapping[str, Any]) -> tuple[bool, bool]:
    """Return whether a tensor's numbers are to be conjugated and negated when they are read."""
    if not metadata.keys() <= {"conj", "neg"} or not all(type(bit) is bool for bit in metadata.values()):
        raise ValueError("a tensor with unknown bits")
    return metadata.get("conj", False), metadata.get("neg", False)


def _rebuilt_as(arguments: tuple[Any, ...]) -> Tensor:
    """Check a tensor whose dtype is told apart from its storage, as for the younger dtypes."""
    storage, offset, size, stride, requires_grad, hooks, dtype, *metadata = arguments
    found = _DTYPES.get(dtype.name) if isinstance(dtype, Global) else None
    if found is None:
        raise ValueError("a tensor without a dtype")
    return _rebuilt((storage, offset, size, stride, requires_grad, hooks, *metadata), found)


def _rebuilt_by(arguments: tuple[Any, ...]) -> Any:
    """Check a tensor that has attributes: the function that makes it, its class, the function's arguments, the rest."""
    function, cls, inner, _ = arguments
    makers = (f"{_UTILS}_rebuild_tensor_v2", f"{_UTILS}_rebuild_tensor_v3", f"{_UTILS}_rebuild_parameter")
    if not isinstance(function, Global) or type(inner) is not tuple:
        raise ValueError("a tensor that nothing makes")
    if function.name in _REFUSED or (isinstance(cls, Global) and cls.name not in (PARAMETER, "torch.Tensor")):
        return Refused(_REFUSED.get(function.name, "a tensor subclass"))
    if function.name not in makers or not isinstance(cls, Global):
        raise ValueError("a tensor that nothing makes")
    return _CALLS[function.name](inner)


def tensor_in(arguments: tuple[Any, ...]) -> Any:
    """Return the tensor that is the first argument.

    Raises:
        ValueError: If it is none.
    """
    if not arguments or not isinstance(arguments[0], (Tensor, Refused)):
        raise ValueError("a parameter without a tensor")
    return arguments[0]


def _ordered_dict(arguments: tuple[Any, ...]) -> dict[Any, Any]:
    if not arguments:
        return {}
    (items,) = arguments
    if isinstance(items, dict):
        return pairs(items.items())
    if not isinstance(items, list) or not all(type(i) in (list, tuple) and len(i) == 2 for i in items):
        raise ValueError("a dict of what are no pairs")
    return pairs(items)


# ---------------------------------------------------------------- plain values


def _plain(make: Callable[..., Any]) -> Callable[[tuple[Any, ...]], Any]:
    """Return what calls a function whose arguments are texts, numbers, or one list of them, and no size of a result."""

    def call(arguments: tuple[Any, ...]) -> Any:
        flat = [item for a in arguments for item in (a if type(a) in (list, tuple) else [a])]
        if not all(map(_is_plain, flat)):
            raise ValueError("arguments that are no plain values")
        try:
            return make(*arguments)
        except TypeError as error:
            raise ValueError(str(error)) from error

    return call


def _bytes(arguments: tuple[Any, ...]) -> bytes:
    """Return bytes that are written as a text; other codecs and a bare length could make much of little."""
    text, *codec = arguments or (b"",)
    if isinstance(text, bytes) and not codec:
        return text
    if not isinstance(text, str) or codec not in (["latin1"], ["latin-1"]):
        raise ValueError("bytes that are no text")
    return text.encode("latin-1")


_CALLS: dict[str, Callable[[tuple[Any, ...]], Any]] = {
    f"{_UTILS}_rebuild_tensor": _rebuilt,
    f"{_UTILS}_rebuild_tensor_v2": _rebuilt,
    f"{_UTILS}_rebuild_tensor_v3": _rebuilt_as,
    f"{_UTILS}_rebuild_parameter": tensor_in,
    f"{_UTILS}_rebuild_parameter_with_state": tensor_in,
    _TYPED: _rebuilt_by,
    "collections.OrderedDict": _ordered_dict,
    "collections.Counter": _ordered_dict,
    "builtins.set": _plain(set),
    "builtins.complex": _plain(complex),
    "builtins.bytearray": lambda arguments: bytearray(_bytes(arguments)),
    "_codecs.encode": _bytes,
    "torch.Size": _plain(lambda size=(): tuple(size)),
    "torch.device": _plain(lambda *_: Opaque("torch.device")),
    "torch.serialization._get_layout": _plain(lambda *_: Opaque("torch.layout")),
}

def _is_plain(value: Any) -> bool:
    return value is None or type(value) in (str, int, float, bool)


def _is_key(value: Any) -> bool:
    return _is_plain(value) or type(value) in (bytes, Global, Opaque)  # Lightning has classes for keys


def _is_length(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MAX_LENGTH


def _are_lengths(value: Any) -> bool:
    return type(value) in (list, tuple) and all(map(_is_length, value))
