"""PyTorch files, zip archives or the older streams, read without PyTorch.

Nothing in them is run: the pickle that names the tensors is followed with stand-ins
(:mod:`lazymods.state.files.torch_pickle`), and every storage that it declares is looked up in the file. PyTorch itself
takes what is too short, and reads past its end. Values are views of the mapped file.
"""

from __future__ import annotations

import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lazymods.state.files import archive, torch_names, torch_pickle, torch_tensors
from lazymods.state.files.stored import Array, Checkpoint, known_as, map_file, printable, refuse
from lazymods.state.files.torch_calls import Malformed

SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".pth.tar", ".pt.tar")
"""The names under which a pickle is opened at all."""

_STREAM_MAGIC = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # the pickle of a number, the first of five
_PICKLES = tuple(b"\x80" + bytes([version]) for version in range(2, 6))
_NEEDED = "what torch.save writes of a state dict"


class _Contents(NamedTuple):
    """What a file holds.

    Attributes:
        tree: What its pickle describes.
        places: Where in the file the bytes of each storage begin, by the storage's key.
        is_swapped: Whether its numbers have their first byte first.
    """

    tree: Any
    places: Mapping[str, int]
    is_swapped: bool


def has_torch_name(path: Path) -> bool:
    """Say whether a file has a name that PyTorch files have."""
    return path.name.endswith(SUFFIXES)


def is_pickle(head: bytes) -> bool:
    """Say whether a file that begins like this is a pickle of a protocol from 2 on."""
    return head.startswith(_PICKLES)


def open_torch(path: Path) -> Checkpoint:
    """Open a PyTorch file.

    Raises:
        CheckpointError: If it is none, is damaged, has a use for functions that only harm, or holds a tensor of a kind
            that has no array: sparse, quantized, nested, without values.
    """
    data = map_file(path)
    head = data[:512].tobytes()
    if head.startswith((archive.MAGIC, archive.EMPTY_MAGIC)):
        return open_archive(path, data, archive.read_directory(path, data))
    _refuse_other_files(path, head)
    return _opened(path, data, _read_stream(path, data), lambda: None)


def open_archive(path: Path, data: Array, directory: Mapping[str, archive.Entry]) -> Checkpoint:
    """Open a PyTorch file that is a zip archive.

    Args:
        path: The file.
        data: Its bytes.
        directory: The archive's entries by name.

    Raises:
        CheckpointError: As :func:`open_torch`.
    """

    def check_sums() -> None:  # reads the directory anew: kept, it would be a third of what an opened file takes
        archive.check_sums(path, data, archive.read_directory(path, data).values())

    return _opened(path, data, _read_archive(path, data, directory), check_sums)


def _opened(path: Path, data: Array, found: _Contents, check_sums: Callable[[], None]) -> Checkpoint:
    for name, what in torch_pickle.refused_tensors(found.tree):
        line = "tensor.dequantize()  # or tensor.to_dense()"
        raise refuse(path, what, "an ordinary tensor with values", tensor=name, write=line)
    named = torch_tensors.named(path, data, found.tree, found.places, is_swapped=found.is_swapped)
    return Checkpoint(path, "PyTorch", named.tensors, roots=named.roots, ties=named.ties, check_sums=check_sums)


# ---------------------------------------------------------------- zip archives


def _folder(path: Path, entries: Mapping[str, archive.Entry]) -> str:
    """Return the folder in which a PyTorch archive has all its entries, with the slash."""
    # PyTorch takes the first entry's folder for the archive's, and compares names without regard to case
    folder = next(iter(entries), "").partition("/")[0] + "/"
    whole = (f"{folder}data.pkl", f"{folder}byteorder")
    for name, entry in entries.items():
        if not name.startswith(folder):
            raise refuse(path, f"an entry outside the folder {printable(folder[:-1])}", "one folder", tensor=name)
        # the programs of TorchScript are compressed, and not read
        if entry.compressed and (name in whole or name.startswith(f"{folder}data/")):
            needed = "entries as torch.save writes them, not compressed"
            raise refuse(path, "a compressed entry", needed, tensor=entry.name)
    if not all(map(str.islower, entries)) and len({name.lower() for name in entries}) != len(entries):
        raise refuse(path, "entries whose names differ in their case only", "each name once")
    if f"{folder}data.pkl" not in entries:
        raise refuse(path, "a zip archive without a data.pkl", _NEEDED)
    return folder


def _read_archive(path: Path, data: Array, entries: Mapping[str, archive.Entry]) -> _Contents:
    folder = _folder(path, entries)
    pickle = entries[f"{folder}data.pkl"]
    order = entries.get(f"{folder}byteorder")
    order = b"little" if order is None else archive.read_entry(path, data, order).tobytes()
    if order not in (b"little", b"big"):
        raise refuse(path, "a byte order that is none", "little or big")
    walked = _walk(path, data[pickle.begin : pickle.begin + pickle.size], 0)
    places: dict[str, int] = {}
    for key, storage in walked.storages.items():
        record = entries.get(f"{folder}data/{key}")
        if record is None:
            raise refuse(path, f"no entry data/{printable(key)}", "every storage that data.pkl declares")
        size, nbytes = record.size, storage.nbytes
        # more bytes than whole numbers are left of a storage of bytes that is seen as wider numbers
        if size != nbytes and (size < nbytes or (nbytes and size - nbytes >= storage.itemsize)):
            needed = f"{nbytes:,}, as data.pkl declares: the file is damaged"
            raise refuse(path, f"{size:,} bytes in data/{printable(key)}", needed)
        places[key] = record.begin
    return _Contents(walked.value, places, order == b"big")


def _walk(path: Path, data: Array, begin: int) -> torch_pickle.Pickle:
    try:
        walked = torch_pickle.walk(data, begin)
        torch_names.check_names(walked.value, walked.end - begin)
        return walked
    except Malformed as error:
        write = "safetensors.torch.save_file(model.state_dict(), path)  # where the file comes from"
        raise refuse(path, error.got, error.needed, write=write) from error


# ---------------------------------------------------------------- streams


def _refuse_other_files(path: Path, head: bytes) -> None:
    if head.startswith(_STREAM_MAGIC) and not _is_tar(head):
        return
    if _is_tar(head):
        got = "a tar archive, as PyTorch wrote before 0.1.10"
    elif is_pickle(head):
        got = "a pickle that torch.save did not write, and that is not run"
    else:
        got = known_as(head) or ("a file that is none of PyTorch's" if head else "an empty file, 0 bytes")
    raise refuse(path, got, _NEEDED)


def _is_tar(head: bytes) -> bool:
    """Say whether PyTorch would take a file for a tar archive, whatever else it may be."""
    try:
        tarfile.TarInfo.frombuf(head.ljust(tarfile.BLOCKSIZE, b"\0"), "utf-8", "surrogateescape")
    except tarfile.TarError:
        return False
    return True


def _read_stream(path: Path, data: Array) -> _Contents:
    """Read an older file: a number, a version, the writer's system, the tree, the keys, then the storages by key."""
    position = 0
    for _ in range(3):
        position = _walk(path, data, position).end
    walked = _walk(path, data, position)
    keys = _walk(path, data, walked.end)
    storages = {key: storage for key, storage in walked.storages.items() if storage.root is None}
    listed = keys.value
    if (
        not isinstance(listed, list)
        or not all(isinstance(key, str) for key in listed)
        or len(set(listed)) != len(listed)
    ):
        raise refuse(path, "a list of storages that is none", _NEEDED)
    if set(listed) != set(storages):
        raise refuse(path, "storages that are declared and not stored, or stored and not declared", _NEEDED)
    position = keys.end
    places: dict[str, int] = {}
    for key in listed:
        numel = int.from_bytes(data[position : position + 8].tobytes(), "little", signed=True)
        if numel != storages[key].numel or position + 8 > len(data):
            got = f"{numel:,} elements of storage {printable(key)}"
            raise refuse(
                path, got, f"{storages[key].numel:,}, as the pickle declares: the file is truncated or damaged"
            )
        places[key] = position + 8
        position += 8 + storages[key].nbytes
        if position > len(data):
            got = f"{len(data):,} bytes, which end inside storage {printable(key)}"
            raise refuse(path, got, f"at least {position:,}: the file is truncated")
    if position != len(data):
        got = f"{len(data) - position:,} bytes after the last storage"
        raise refuse(path, got, "a file that ends there: it is damaged, or holds more than one object")
    return _Contents(walked.value, places, False)
