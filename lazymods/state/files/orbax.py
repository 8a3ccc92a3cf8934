"""Orbax folders, as its StandardCheckpointer and PyTreeCheckpointer write them.

A folder holds a JSON file of the tree, and one zarr array for every leaf, in files of their own or together in an OCDBT
store. The tree is checked here, and the arrays are opened by tensorstore, which is what Orbax reads them with. What
goes to several devices is restored by Orbax itself (:mod:`lazymods.state.files.orbax_restoring`). For one device Orbax
is not even imported: that takes seconds.

Written for what Orbax 0.5 to 0.12 writes; the tests write with the Orbax that is installed.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lazymods._errors import CheckpointError, one_line
from lazymods._memory import empty
from lazymods.state.files import orbax_folder
from lazymods.state.files.json_text import read_json, read_texts
from lazymods.state.files.paths import check_orbax_path
from lazymods.state.files.stored import (
    ALIASES,
    WEAK,
    Array,
    Checkpoint,
    StoredTensor,
    byte_count,
    check_unpacked,
    dtype_named,
    possible,
    printable,
    read_description,
    refuse,
)

_TREE = "_METADATA"
_STEP = "_CHECKPOINT_METADATA"
_STORE = "manifest.ocdbt"
VALUE = "value"  # the level that a saved nnx.State has below each Variable
_ARRAYS = ("jax.Array", "np.ndarray", "scalar")

Keys = tuple[str, ...]


def is_orbax(path: Path) -> bool:
    """Say whether a folder looks like one that Orbax wrote."""
    return any((path / mark).is_file() for mark in (_TREE, _STEP, _STORE))


def open_orbax(path: Path) -> Checkpoint:
    """Open a folder that holds one tree, or a step of a CheckpointManager that holds one item.

    Names are dotted paths in the tree. The ``.value`` that a saved ``nnx.State`` has below each Variable is dropped.
    Python's numbers are arrays without axes.

    Raises:
        CheckpointError: If metadata or values are missing or damaged, or something in the tree is no array.
    """
    folder = _item_folder(path)
    check_orbax_path(folder.resolve())
    tree = _read_tree(path, folder / _TREE)
    arrays = None if _has_store(folder, tree.options) else {".".join(keys) for keys in tree.leaves}
    files = orbax_folder.files_of(folder, arrays)  # before any array is opened
    stores = _open_arrays(path, folder, tree)
    # a part of an array is read by whole chunks, which may be larger than the array
    needed = {".".join(keys): max(tensor.nbytes, chunk) for keys, (tensor, chunk) in stores.items()}
    tensors = {".".join(keys): tensor for keys, (tensor, _) in stores.items()}
    beyond = [size for name, size in needed.items() if name in (ALIASES, WEAK) or size > tensors[name].nbytes]
    check_unpacked(path, sum(beyond), sum(files.values()))
    orbax_folder.check_sizes(path, files, needed)
    notes = {key: _read_note(path, key, tensors[key]) for key in (ALIASES, WEAK) if key in tensors}
    aliases = notes.get(ALIASES, {})
    dropped = _state_levels([keys for keys in stores if keys not in ((ALIASES,), (WEAK,))])
    renamed: dict[str, StoredTensor] = {}
    for keys, (tensor, _) in stores.items():
        name = ".".join(keys[:-1] if keys[:1] in dropped else keys)
        if name in notes:
            continue
        if name in renamed:
            raise refuse(path, "two arrays of this name", "each name once", tensor=name)
        renamed[name] = StoredTensor(name, tensor.shape, tensor.dtype, tensor.file, tensor.source)
    for alias, kept in aliases.items():
        if kept not in renamed or alias in renamed:
            raise refuse(path, f"another name for {printable(kept)}", "another name for one tensor", tensor=alias)
    if not renamed:
        raise refuse(path, "an Orbax folder without an array in it", "a tree of arrays")
    return Checkpoint(
        path, "Orbax", renamed, aliases, notes.get(WEAK, {}).keys(), packed_in=sum(files.values())
    )


def refuse_to_replace(path: Path) -> str | None:
    """Say why a folder must not be replaced: because it is no checkpoint, or holds something that Orbax did not write.

    Returns:
        What it is, or None if it is a checkpoint that can be opened, and nothing else, or has nothing in it.
    """
    if is_empty(path):
        return "the working directory" if os.path.samefile(path, os.curdir) else None
    if not is_orbax(path):
        return "a folder that is no Orbax checkpoint"
    try:
        open_orbax(path)
        folder = _item_folder(path)
        arrays = {".".join(keys) for keys in _read_tree(path, folder / _TREE).leaves}
    except CheckpointError as error:
        problem = error.problems[0]
        return f"an Orbax folder that does not open ({problem.where}: {problem.got})"
    stranger = orbax_folder.stranger_in(path, folder, arrays)
    return None if stranger is None else f"a checkpoint's folder with something else in it, {printable(stranger)}"


def is_empty(path: Path) -> bool:
    """Whether a folder has nothing in it."""
    with os.scandir(path) as entries:
        return next(entries, None) is None


def _item_folder(path: Path) -> Path:
    if (path / _TREE).is_file():
        return path
    items = sorted(mark.parent.name for mark in path.glob(f"*/{_TREE}"))
    if len(items) == 1:
        return path / items[0]
    if items:
        shown = printable(", ".join(items))
        raise refuse(
            path,
            f"several items: {shown}",
            "one tree",
            write=f"lm.load(model, {printable(str(path / items[0]), 5000)!r})",
        )
    raise refuse(path, f"an Orbax folder without its {_TREE}", "all of what Orbax wrote: the folder is incomplete")


# ---------------------------------------------------------------- the tree


class _Tree:
    """What the metadata says.

    Attributes:
        leaves: The keys of every array.
        options: How the arrays are stored.
    """

    def __init__(self, leaves: Sequence[Keys], options: Mapping[str, Any]) -> None:
        self.leaves, self.options = leaves, options


def _read_tree(path: Path, file: Path) -> _Tree:
    metadata = read_json(path, read_description(path, orbax_folder.MAX_METADATA_BYTES, file), _TREE)
    entries = metadata.get("tree_metadata") if isinstance(metadata, dict) else None
    if not isinstance(entries, dict):
        raise refuse(path, f"the {_TREE} {printable(repr(metadata))}", 'a JSON object with "tree_metadata"')
    leaves: list[Keys] = []
    for shown, entry in entries.items():
        keys, kind, is_empty = _read_leaf(path, shown, entry)
        if is_empty:  # where the tree has nothing, such as None or an empty dict
            continue
        if kind not in _ARRAYS:
            raise refuse(path, f"a {printable(kind)}", "arrays and numbers only", tensor=".".join(keys))
        if not stays_inside(".".join(keys)):
            raise refuse(path, f"the keys {printable(repr(keys))}", "keys that stay in the folder", tensor=shown)
        leaves.append(keys)
    twice = [keys for keys, count in Counter(".".join(keys) for keys in leaves).items() if count > 1]
    if twice:
        raise refuse(path, "two arrays of this name", "each name once", tensor=twice[0])
    return _Tree(leaves, metadata)


def stays_inside(name: str) -> bool:
    """Whether the name of an array, which can be that of its folder, leads nowhere else."""
    return not any(part in ("", ".", "..") for part in re.split(r"[/\\\0]", name))


def _read_leaf(path: Path, shown: str, entry: Any) -> tuple[Keys, str, bool]:
    """Return the keys of a leaf, its kind, and whether there is nothing."""
    try:
        keys = tuple(part["key"] for part in entry["key_metadata"])
        kind, is_empty = entry["value_metadata"]["value_type"], entry["value_metadata"]["skip_deserialize"]
    except (KeyError, TypeError, IndexError):
        keys, kind, is_empty = (), None, None
    if not keys or not all(isinstance(key, str) for key in keys) or type(is_empty) is not bool or type(kind) is not str:
        got = f"the entry {printable(repr(entry))}"
        raise refuse(path, got, "an entry with its keys and its kind", tensor=shown)
    return keys, kind, is_empty


def _state_levels(leaves: Sequence[Keys]) -> set[Keys]:
    """Return the top-level keys below which every array lies in a ``value`` of its own, as in a saved nnx.State.

    A lone ``{"value": array}`` beside other things is a parameter of that name.
    """
    tops: dict[Keys, list[Keys]] = {}
    for keys in leaves:
        tops.setdefault(keys[:1], []).append(keys)
    children = Counter(keys[:-1] for keys in leaves)
    found = {
        top
        for top, below in tops.items()
        if all(len(keys) > 1 and keys[-1] == VALUE and children[keys[:-1]] == 1 for keys in below)
    }
    return found if found == tops.keys() else {top for top in found if len(tops[top]) > 1}


def _read_note(path: Path, key: str, tensor: StoredTensor) -> Mapping[str, str]:
    """Read what :func:`lazymods.save` notes about tensors, and stores as the bytes of a JSON object."""
    return read_texts(path, tensor.read().tobytes(), key)


# ---------------------------------------------------------------- the arrays


@contextlib.contextmanager
def calling_tensorstore(path: Path, name: str) -> Iterator[None]:
    """Turn what tensorstore raises into an error that names the folder; it raises whatever an array's driver does."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        got = f"an array that tensorstore does not read ({printable(one_line(error), 300)})"
        raise refuse(path, got, "what Orbax wrote, complete and undamaged", tensor=name) from error


def _open_arrays(path: Path, folder: Path, tree: _Tree) -> dict[Keys, tuple[StoredTensor, int]]:
    """Open every array; return each with the size of its chunks in bytes."""
    import tensorstore

    context = tensorstore.Context({"cache_pool#ocdbt": {"total_bytes_limit": 100_000_000}})
    held = Held(path, folder.resolve())
    pending = {}
    root = f"{folder.resolve()}/"  # tensorstore takes no path with ".." in it
    has_store = _has_store(folder, tree.options)
    for keys in tree.leaves:
        name = ".".join(keys)
        with calling_tensorstore(path, name):
            spec = _spec(root, name, tree.options, has_store=has_store)
            pending[keys] = tensorstore.open(spec, open=True, read=True, context=context)
    out = {}
    for keys, future in pending.items():
        name = ".".join(keys)
        with calling_tensorstore(path, name):
            store = future.result()
            shape, kind = tuple(store.shape), str(store.dtype.name)
            chunk = tuple(store.chunk_layout.read_chunk.shape or ())
        dtype = dtype_named(kind)
        if dtype is None or not possible(shape, dtype):
            got = f"an array of dtype {printable(kind)} and shape {printable(str(shape))}"
            raise refuse(path, got, "an array of numbers", tensor=name)
        values = OrbaxArray(held, name, store, shape, dtype, tree.options, has_store, context)
        out[keys] = (StoredTensor(name, shape, dtype, path, values), byte_count(chunk, dtype))
    return out


def _has_store(folder: Path, options: Mapping[str, Any]) -> bool:
    use_ocdbt = options.get("use_ocdbt")
    return (folder / _STORE).exists() if use_ocdbt is None else bool(use_ocdbt)


def _spec(root: str, name: str, options: Mapping[str, Any], *, has_store: bool) -> dict[str, Any]:
    """Return where tensorstore finds an array, as Orbax lays it out, in a folder or in a store that holds all."""
    if has_store:
        base = {"driver": "file", "path": root}
        store = {"driver": "ocdbt", "base": base, "path": f"{name}/", "cache_pool": "cache_pool#ocdbt"}
    else:
        store = {"driver": "file", "path": f"{root}{name}/"}
    return {
        "driver": "zarr3" if options.get("use_zarr3") else "zarr",
        "kvstore": store,
        # Orbax used to leave out chunks of zeros; now what is not there is lost
        "fill_missing_data_reads": not options.get("store_array_data_equal_to_fill_value"),
        "recheck_cached_data": False,
        "recheck_cached_metadata": False,
    }


class Held:
    """A folder that is kept open: no other one can be taken for it, whatever gets its name.

    Args:
        path: What was opened.
        folder: The folder of the arrays, in it or the same.
    """

    def __init__(self, path: Path, folder: Path) -> None:
        self.path: Path = path
        self.folder: Path = folder
        self._descriptor: int | None = os.open(folder, os.O_RDONLY) if os.name == "posix" else None
        self._close = os.close  # the module is gone when the interpreter ends

    def check(self) -> None:
        """See that the folder is still the one that was opened, after something of it has been read.

        Raises:
            CheckpointError: If it is another one, or gone: what was read may be of both.
        """
        if self._descriptor is None:
            return
        try:
            is_same = os.path.samestat(os.stat(self.folder), os.fstat(self._descriptor))
        except OSError:
            is_same = False
        if not is_same:
            needed = "one and the same folder until all of it is read"
            got = "another save has replaced it while it was read"
            raise refuse(self.path, got, needed, write="lm.load(model, path)  # again")

    def __del__(self) -> None:
        """Close it."""
        if self._descriptor is not None:
            self._close(self._descriptor)


class OrbaxArray(NamedTuple):
    """One array of a folder; called, it reads all its values. Several are read at a time.

    Attributes:
        held: The folder.
        name: The name that it has there.
        store: The array, as tensorstore has opened it.
        shape: Its shape.
        dtype: Its dtype.
        options: How the folder's arrays are stored.
        has_store: Whether they lie in one store.
        context: What tensorstore opens them with.
    """

    held: Held
    name: str
    store: Any
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    options: Mapping[str, Any]
    has_store: bool
    context: Any

    def start(self) -> Callable[[], Array]:
        """Start to read all values; return what waits for them."""
        import tensorstore

        array = empty(self.shape, self.dtype)  # aligned, so that JAX takes it over as it is
        with calling_tensorstore(self.held.path, self.name):
            reading = tensorstore.array(array, copy=False, write=True).write(self.store)

        def wait() -> Array:
            with calling_tensorstore(self.held.path, self.name):
                reading.result()
            array.flags.writeable = False
            return array

        return wait

    def __call__(self) -> Array:
        """Read all values."""
        return self.start()()
