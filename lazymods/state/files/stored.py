"""What every format gives: named tensors whose shapes and dtypes are known before a byte of them is read."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import errno
import math
import mmap
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np

from lazymods._errors import CheckpointError, Problem
from lazymods._initial.stacking import Shape

Array = np.ndarray[Any, Any]
Index = tuple[slice, ...]

MAX_RANK = 64  # numpy's

MAX_UNPACKED_BYTES = 1 << 30
"""What packed tensors that nobody has an array for may unpack to, whatever the size of the file."""

MAX_UNPACKED_RATIO = 100
"""Beyond :data:`MAX_UNPACKED_BYTES`, how many times the file's own size they may unpack to."""


ALIASES = "__aliases__"  # the entry of an npz archive or Orbax folder that names tied tensors
DTYPES = "__dtypes__"  # the entry of an npz archive that names the dtypes that numpy has no name for
MAX_NAME_BYTES = 60_000  # of a tensor, for formats that store its length in 16 bits
WEAK = "__weak_types__"  # the entry, or the text of a safetensors file, that names tensors of weak type
NOTES = (ALIASES, WEAK)
IN_MEMORY = "memory"  # the format of what is no file


class StoredTensor:
    """One tensor of a file.

    Args:
        name: Its name in the file.
        shape: Its shape.
        dtype: Its dtype, as numpy or ml_dtypes has it.
        file: The file that holds it.
        source: Returns its values, and those at an index if it has a method ``part``; or the bytes of the mapped file,
            of which they are those from ``begin`` on.
        begin: Where they begin.
    """

    # files have a million tensors: what each is made of counts, in memory and in what Python's collector looks at
    __slots__ = ("begin", "dtype", "file", "name", "shape", "source")

    def __init__(
        self,
        name: str,
        shape: Shape,
        dtype: np.dtype[Any],
        file: Path,
        source: Array | Any,
        begin: int = 0,
    ) -> None:
        self.name: str = name
        self.shape: Shape = shape
        self.dtype: np.dtype[Any] = dtype
        self.file: Path = file
        self.source: Array | Any = source
        self.begin: int = begin

    def read(self) -> Array:
        """Return its values: a read-only view of the mapped file where the format allows it."""
        source = self.source
        return view(source, self.begin, self.shape, self.dtype) if isinstance(source, np.ndarray) else source()

    def start(self) -> Callable[[], Array]:
        """Start to read its values, if its format reads several tensors at a time; return what waits for them."""
        start: Callable[[], Callable[[], Array]] | None = getattr(self.source, "start", None)
        return self.read if start is None else start()

    @property
    def is_read_in_parts(self) -> bool:
        """Whether some of its values can be had without the others."""
        return isinstance(self.source, np.ndarray) or hasattr(self.source, "part")

    def part(self, index: Index) -> Array:
        """Return the values at an index, which has a slice for each axis, and read no others.

        To be asked for only where it :attr:`is_read_in_parts`.
        """
        return self.read()[index] if isinstance(self.source, np.ndarray) else self.source.part(index)

    @property
    def nbytes(self) -> int:
        """The number of bytes of its values."""
        return byte_count(self.shape, self.dtype)


class Unread:
    """An array that is a tensor of a file: its shape and dtype are known, and its values are read by whoever asks."""

    __slots__ = ("__weakref__", "stored")

    def __init__(self, stored: StoredTensor) -> None:
        self.stored: StoredTensor = stored

    @property
    def shape(self) -> Shape:
        """The lengths of its axes."""
        return self.stored.shape

    @property
    def ndim(self) -> int:
        """The number of its axes."""
        return len(self.stored.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype that it has in the file."""
        return self.stored.dtype

    @property
    def size(self) -> int:
        """The number of its values."""
        return math.prod(self.stored.shape)

    @property
    def nbytes(self) -> int:
        """The number of bytes of its values."""
        return self.stored.nbytes

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        """Read all of it."""
        return np.array(self.stored.read(), dtype, copy=copy)


_AHEAD = 1 << 33  # bytes that are on their way at a time; one array may be over a gigabyte, unpacked in one thread


def read_ahead(tensors: Iterable[StoredTensor]) -> Iterator[Array]:
    """Read tensors one after the other, while the next ones are on their way."""
    started: collections.deque[tuple[int, Callable[[], Array]]] = collections.deque()
    size = 0
    for tensor in tensors:
        started.append((tensor.nbytes, tensor.start()))
        size += tensor.nbytes
        while size > _AHEAD:
            nbytes, wait = started.popleft()
            size -= nbytes
            yield wait()
    while started:
        yield started.popleft()[1]()


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """An opened file: everything about it has been checked but the values themselves.

    Attributes:
        path: What was opened.
        format: The format's name, for people.
        tensors: What it holds by name, in the file's order: a :class:`StoredTensor`, or, from a PyTorch file, an
            object that is no tensor.
        aliases: Further names of tensors, each with the name that holds the values.
        weak: The names of tensors whose dtype is weak, as that of ``jnp.full(3, 0.5)`` is.
        metadata: Texts that the file carries.
        roots: Beginnings of names, of parts of the file any one of which may be all that is meant.
        ties: Names of tensors that share all of their memory, in groups.
        buffers: The names of tensors that are known to be no parameters, of a module of PyTorch; None: of no module.
        check_sums: Reads all that has a checksum which reading the tensors does not look at, and raises
            ``CheckpointError`` if one differs.
        packed_in: If it holds tensors packed: how many bytes its files have.
    """

    path: Path
    format: str
    tensors: Mapping[str, Any]
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    weak: Collection[str] = ()
    metadata: Mapping[str, str] = dataclasses.field(default_factory=dict)
    roots: Collection[str] = ()
    ties: Collection[Sequence[str]] = ()
    buffers: Collection[str] | None = None
    check_sums: Callable[[], None] = lambda: None
    packed_in: int | None = None

    def check_unpacked(self, tensors: Iterable[Any]) -> None:
        """Refuse tensors that unpack to far more than the file holds, before any of them is read.

        To be called of what is to be read at a time, without that of which somebody has an array of the same size.

        Raises:
            CheckpointError: If they are over both limits.
        """
        if self.packed_in is not None:
            check_unpacked(self.path, sum(t.nbytes for t in tensors if isinstance(t, StoredTensor)), self.packed_in)

    @property
    def in_memory(self) -> bool:
        """Whether it is no file but arrays in memory, which are somebody's: JAX may not take them over."""
        return self.format == IN_MEMORY

    @property
    def tells_ties(self) -> bool:
        """Whether tensors that share their memory are told by :attr:`ties`, so that equal ones are not tied else."""
        return self.format == "PyTorch" or self.buffers is not None

    @property
    def title(self) -> str:
        """What messages call it."""
        shown = printable(str(self.path), 5000)
        return shown if self.in_memory else f"the checkpoint {shown}"


def byte_count(shape: Shape, dtype: np.dtype[Any]) -> int:
    """Return how many bytes an array has; Python's integers do not overflow."""
    return math.prod(shape) * dtype.itemsize


def possible(shape: Shape, dtype: np.dtype[Any]) -> bool:
    """Say whether an array can have this shape: numpy counts the bytes as if no length were 0."""
    lengths = shape if 0 not in shape else tuple([length or 1 for length in shape])
    return len(shape) <= MAX_RANK and byte_count(lengths, dtype) <= sys.maxsize


# ---------------------------------------------------------------- refusing


def check_booleans(file: Path, name: str, value: Array) -> None:
    """Refuse booleans that are neither 0 nor 1: what is computed from them could be anything.

    Raises:
        CheckpointError: If an array of booleans has any such.
    """
    if value.dtype == np.bool_ and value.size and value.view(np.uint8).max() > 1:
        raise refuse(file, "bytes other than 0 and 1", "booleans", tensor=name)


def refuse(file: Path, got: str, needed: str, *, tensor: str = "", write: str = "") -> CheckpointError:
    """Make the error for a file that is not what it should be."""
    name = printable(file.name or str(file), 300)
    where = f"{name}: {printable(tensor)}" if tensor else name
    write = write or f"lm.load(model, {printable(str(file), 5000)!r})  # a sound copy of the file"
    return CheckpointError(Problem(where, got, needed, write))


def check_unpacked(file: Path, unpacked: int, stored: int) -> None:
    """Refuse what claims to unpack to far more than its file holds, before any of it is unpacked.

    Raises:
        CheckpointError: If it is over both limits.
    """
    limit = max(MAX_UNPACKED_BYTES, MAX_UNPACKED_RATIO * stored)
    if unpacked > limit:
        got = f"{unpacked:,} bytes when unpacked, from {stored:,}"
        needed = f"at most {limit:,}: it is a compressed bomb, or MAX_UNPACKED_RATIO has to be raised"
        ratio = -(-unpacked // max(stored, 1))
        line = f"from lazymods.state.files import stored; stored.MAX_UNPACKED_RATIO = {ratio:_}  # if you trust it"
        raise refuse(file, got, needed, write=line)


def printable(text: str, limit: int = 200) -> str:
    """Return a text of a file as it may be shown: in one line, whatever it holds."""
    text = text if text.isprintable() else ascii(text)[1:-1]
    return text if len(text) <= limit else f"{text[:limit]}..."


_MAGIC = (
    (b"version https://git-lfs", "a Git LFS pointer: the weights themselves were not downloaded"),
    (b"<!doctype", "an HTML page: the download gave an error page"),
    (b"<html", "an HTML page: the download gave an error page"),
    (b"<?xml", "an XML document: the download gave an error page"),
    (b"pk\x03\x04", "a zip archive, as npz and PyTorch files are"),
    (b"pk\x05\x06", "an empty zip archive"),
    (b"\x1f\x8b", "a file compressed by gzip, to be unpacked first (gunzip, tar -xzf)"),
    (b"(\xb5/\xfd", "a file compressed by zstd, to be unpacked first (unzstd)"),
    (b"\xfd7zxz\0", "a file compressed by xz, to be unpacked first (unxz)"),
    (b"bzh", "a file compressed by bzip2, to be unpacked first (bunzip2)"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive, to be unpacked first"),
    (b"gguf", "a GGUF file"),
    (b"\x89hdf", "an HDF5 file"),
    (b"\x93numpy", "a single npy array"),
    *((b"\x80" + bytes([v]), "a pickle") for v in (2, 3, 4, 5)),
)


def known_as(head: bytes) -> str | None:
    """Say what a file's first bytes show it to be, if that is a thing that people take for a checkpoint."""
    lower = head.lower()
    start = lower.lstrip()
    return next((what for magic, what in _MAGIC if lower.startswith(magic) or start.startswith(magic)), None)


# ---------------------------------------------------------------- dtypes


_SMALL = {
    name: np.dtype(getattr(ml_dtypes, name))
    for name in dir(ml_dtypes)
    if name.startswith(("bfloat", "float", "int", "uint"))
}
_PLAIN = {
    name: np.dtype(name)
    for name in (
        "bool",
        *(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)),
        *("float16", "float32", "float64", "complex64", "complex128"),
    )
}


def dtype_named(name: str) -> np.dtype[Any] | None:
    """Return the dtype of a name, ml_dtypes' included, or None: what else numpy makes of a text is no dtype here."""
    return _SMALL.get(name) or _PLAIN.get(name)


def small_dtype_named(name: str) -> np.dtype[Any] | None:
    """Return the dtype of a name that ml_dtypes has, and numpy has not, or None."""
    return _SMALL.get(name)


# ---------------------------------------------------------------- bytes


def map_file(path: Path) -> Array:
    """Map a whole file, as a read-only array; the map outlives the file's name. An empty file gives no bytes.

    The pages are private ones that may be written to, where the system has room to promise that: a library that takes
    a parameter for its own, as PyTorch does through DLPack, then writes to a copy, and the file is as it was.

    Raises:
        CheckpointError: If it is larger than what this process can address.
    """
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size == 0:
            return np.zeros(0, np.uint8)
        try:
            data = np.frombuffer(_map(file.fileno()), np.uint8)
        except OSError as error:
            if error.errno != errno.ENOMEM:
                raise
            needed = "a file that this process can map whole (ulimit -v limits it), which takes no memory"
            raise refuse(path, f"{size:,} bytes", needed) from error
    data.flags.writeable = False
    return data


class Map(mmap.mmap):
    """The map of a checkpoint's file, which nobody writes to."""


def _map(descriptor: int) -> Map:
    if os.name == "posix":
        # room for copies is not set aside, as it would be for a file of the size of the memory
        flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0)
        with contextlib.suppress(OSError):
            return Map(descriptor, 0, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    return Map(descriptor, 0, access=mmap.ACCESS_READ)


def is_mapped(array: Array) -> bool:
    """Whether an array lies in the map of a checkpoint's file, and nobody writes to it."""
    base: Any = array
    while isinstance(base, (np.ndarray, memoryview)):
        if isinstance(base, np.ndarray) and base.flags.writeable:
            return False
        base = base.obj if isinstance(base, memoryview) else base.base
    return isinstance(base, Map)


def read_description(path: Path, limit: int, file: Path | None = None) -> bytes:
    """Read a whole file that describes others, of a checkpoint at ``path``.

    Raises:
        CheckpointError: If it is longer than any is, or cannot be read.
    """
    file = file or path
    try:
        with open(file, "rb") as opened:
            size = os.fstat(opened.fileno()).st_size
            raw = b"" if size > limit else opened.read(size)
    except OSError as error:
        raise refuse(path, f"{printable(file.name)}, which cannot be read ({error.strerror})", "a file") from error
    if size > limit:
        raise refuse(path, f"{printable(file.name)} of over {limit:,} bytes", "a description of what is stored")
    return raw


def will_need(data: Array, begin: int, end: int) -> None:
    """Have the system read bytes of a mapped file, and none around them, as it does when they are touched.

    Args:
        data: The bytes of the map, or part of them.
        begin: The first byte.
        end: The one after the last.
    """
    mapped: Any = data
    while isinstance(mapped, (np.ndarray, memoryview)):
        mapped = mapped.obj if isinstance(mapped, memoryview) else mapped.base
    if not isinstance(mapped, mmap.mmap) or not hasattr(mapped, "madvise"):
        return
    begin += data.ctypes.data - np.frombuffer(mapped, np.uint8).ctypes.data
    end += data.ctypes.data - np.frombuffer(mapped, np.uint8).ctypes.data
    for at in range(begin // mmap.PAGESIZE * mmap.PAGESIZE, end, _READ_AHEAD):
        with contextlib.suppress(OSError):  # what it does not do at once, it does when the bytes are touched
            mapped.madvise(mmap.MADV_WILLNEED, at, min(_READ_AHEAD, end - at))


_READ_AHEAD = 1 << 17  # what Linux reads for one such call, unless it was told otherwise


def view(data: Array, begin: int, shape: Shape, dtype: np.dtype[Any], order: Literal["C", "F"] = "C") -> Array:
    """Return bytes from ``begin`` on as an array, without a copy, however they are aligned."""
    return np.ndarray(shape, dtype, data, begin, order=order)
