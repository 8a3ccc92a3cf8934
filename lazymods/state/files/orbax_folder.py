"""The files of an Orbax folder: of what kind and size they are, and whether Orbax wrote all of them.

tensorstore opens whatever has the right name: it waits for ever for a named pipe, and ends the process when a file is
larger than memory. So every file is looked at before tensorstore sees the folder.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

from lazymods.state.files.stored import refuse

MAX_METADATA_BYTES = 100_000_000
"""The longest description of a tree, of an array or of a store that is read."""

MAX_FILES = 10_000_000
"""How many files a folder may have."""

MAX_DEPTH = 100
"""How deep folders may be nested."""

_ROOM = 1 << 26
"""What the files of a folder may take beside the values: descriptions, checksums, and values that compress badly."""

# a store keeps its descriptions in files of 32 digits; an array of its own lies in a folder of its name
_STORE = r"(?:ocdbt\.process_[\w.]+/)?(?:manifest\.ocdbt|d/[0-9a-f]{32})"
_ITEM = re.compile(
    rf"_METADATA|_CHECKPOINT_METADATA|_sharding|_strings\.json|commit_success\.txt|array_metadatas/process_\d+|{_STORE}"
)
_IN_STORE = re.compile(r"manifest\.ocdbt|d|ocdbt\.process_.*")
_STEP = re.compile(r"_CHECKPOINT_METADATA|commit_success\.txt|metadata/[\w.]+|descriptor/descriptor\.pbtxt")
_ARRAY = re.compile(r"\.zarray|\.zattrs|zarr\.json|(?:c/)?\d+(?:[./]\d+)*|c")
_DESCRIPTION = re.compile(r"(?:.*/)?(?:manifest\.ocdbt|\.zarray|\.zattrs|zarr\.json)")


def files_of(path: Path, arrays: Collection[str] | None) -> dict[str, int]:
    """Return the size of every file that tensorstore may open, by its path in a folder; links are followed.

    What else somebody has put into the folder, such as a link to the data, is not looked at.

    Args:
        path: The folder.
        arrays: The names of the arrays, each of which has a folder of its own; None: a store holds them together.

    Raises:
        CheckpointError: If there is anything else than files and folders, or a description of impossible size.
    """
    out: dict[str, int] = {}
    is_read = _IN_STORE.fullmatch if arrays is None else arrays.__contains__
    tops = (entry for entry in sorted(os.scandir(path), key=lambda entry: entry.name) if is_read(entry.name))
    for name, status in _walk(tops, "", set()):
        if not stat.S_ISREG(status.st_mode):
            raise refuse(path, "no file and no folder, but a pipe, a device or a link to nothing", "files", tensor=name)
        if status.st_size > MAX_METADATA_BYTES and _DESCRIPTION.fullmatch(name):
            got = f"{status.st_size:,} bytes"
            raise refuse(path, got, f"a description of at most {MAX_METADATA_BYTES:,}: it is damaged", tensor=name)
        out[name] = status.st_size
        if len(out) > MAX_FILES:
            raise refuse(path, f"over {MAX_FILES:,} files", "what Orbax wrote")
    return out


def _walk(
    entries: Iterable[os.DirEntry[str]], prefix: str, seen: set[tuple[int, int]]
) -> Iterator[tuple[str, os.stat_result]]:
    for entry in entries:
        name = f"{prefix}{entry.name}"
        try:
            status = entry.stat()
        except OSError:
            status = entry.stat(follow_symlinks=False)
        if not stat.S_ISDIR(status.st_mode):
            yield name, status
        elif name.count("/") >= MAX_DEPTH:
            folder = Path(entry.path).parents[name.count("/")]
            raise refuse(folder, f"folders in folders, over {MAX_DEPTH} deep", "what Orbax wrote")
        elif (status.st_dev, status.st_ino) not in seen:  # a link may lead into a folder that it is in
            seen.add((status.st_dev, status.st_ino))
            below = sorted(os.scandir(entry.path), key=lambda entry: entry.name)
            yield from _walk(below, f"{name}/", seen)


def check_sizes(path: Path, files: Mapping[str, int], needed: Mapping[str, int]) -> None:
    """Refuse files that are larger than what the arrays can need.

    Args:
        path: The folder.
        files: The size of every file.
        needed: For each array, by the folder that it would have for itself, the bytes that its values can take.

    Raises:
        CheckpointError: If one is; tensorstore would read it into memory as a whole.
    """
    total = sum(needed.values())
    for name, size in files.items():
        limit = _ROOM + 2 * next((needed[f] for f in _folders(name) if f in needed), total)
        if size > limit:
            got = f"{size:,} bytes"
            raise refuse(path, got, f"at most {limit:,} for the arrays that it describes: it is damaged", tensor=name)


def _folders(name: str) -> Iterator[str]:
    while "/" in name:
        name = name.rpartition("/")[0]
        yield name


def stranger_in(path: Path, item: Path, arrays: Collection[str]) -> str | None:
    """Return the name of something in a checkpoint's folder that Orbax has not written, or None.

    Args:
        path: The folder.
        item: The folder of its tree: itself, or one in it.
        arrays: The names of the folders that arrays may have for themselves.
    """
    inside = "" if item == path else f"{item.name}/"
    for name, status in _walk_links(path, ""):
        if not stat.S_ISREG(status.st_mode):
            return name
        own = name.removeprefix(inside) if name.startswith(inside) else None
        if own is not None and (_ITEM.fullmatch(own) or _is_in_array(own, arrays)):
            continue
        if not inside or not _STEP.fullmatch(name):
            return name
    return None


def _walk_links(path: Path, prefix: str) -> Iterator[tuple[str, os.stat_result]]:
    for entry in list(os.scandir(path)):
        name = f"{prefix}{entry.name}"
        if entry.is_dir(follow_symlinks=False):
            yield from _walk_links(Path(entry.path), f"{name}/")
        else:
            yield name, entry.stat(follow_symlinks=False)


def _is_in_array(name: str, arrays: Collection[str]) -> bool:
    return any(f in arrays and _ARRAY.fullmatch(name[len(f) + 1 :]) for f in _folders(name))
