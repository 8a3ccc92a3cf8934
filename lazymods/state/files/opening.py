"""Which reader a path needs: by its content, then by its name."""

from __future__ import annotations

import contextlib
import difflib
import errno
import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from lazymods._errors import LazyError, MissingFileError, Problem
from lazymods.state.files.paths import check_path
from lazymods.state.files.safetensors import looks_like_safetensors, open_safetensors
from lazymods.state.files.stored import Checkpoint, printable, refuse

_ATTEMPTS = 100  # each failed one is a whole save that was faster

T = TypeVar("T")


def read_checkpoint(
    path: str | os.PathLike[str], read: Callable[[Checkpoint], T], *, variant: str | None = None
) -> T:
    """Open a checkpoint and return what ``read`` makes of it, all of it from one and the same.

    A file is mapped, and the map outlives the file's name. A folder is read by the names of its files: if a save has
    put a new one in its place meanwhile, the new one is read, from its beginning.

    Raises:
        Exception: As :func:`open_checkpoint`, or what ``read`` raises.
    """
    for _ in range(_ATTEMPTS):
        with held(path) as is_same:
            try:
                out = read(open_checkpoint(path, variant=variant))
            except (LazyError, OSError):
                if is_same():
                    raise
            else:
                if is_same():
                    return out
    raise OSError(f"{_ATTEMPTS} times another save replaced {printable(str(path))} while it was read")


@contextlib.contextmanager
def held(path: str | os.PathLike[str]) -> Iterator[Callable[[], bool]]:
    """Give a function that says whether a folder is still the one of now; while it is held open, no other is alike."""
    path = Path(os.fsdecode(path)).absolute()  # the program may change its directory
    if os.name != "posix" or not os.path.isdir(path):
        yield lambda: True
        return
    descriptor = os.open(path, os.O_RDONLY)

    def is_same() -> bool:
        try:
            return os.path.samestat(os.stat(path), os.fstat(descriptor))
        except OSError:
            return False

    try:
        yield is_same
    finally:
        os.close(descriptor)


def open_checkpoint(path: str | os.PathLike[str], *, variant: str | None = None) -> Checkpoint:
    """Open a checkpoint of any format and check everything about it but the values.

    A folder is one of Hugging Face, else one of Orbax. A file is an index by its name (``*.index.json``), an npz or a
    PyTorch file by its content, and safetensors otherwise. Pickles, which PyTorch files hold, are opened under the
    names that PyTorch files have and under no other.

    Args:
        path: The file or folder.
        variant: Which variant of a folder's files: ``"fp16"`` for ``model.fp16.safetensors``.

    Raises:
        CheckpointError: If it is not what it claims to be; the error names the file, and the tensor if there is one.
        MissingFileError: If there is no such path.
    """
    check_path(path)
    path = Path(os.fsdecode(path))
    if not os.path.exists(path):
        path = _moved(path)
    with _without_collections():
        if path.is_file():
            with open(path, "rb") as file:
                head = file.read(512)
            if variant is not None:
                _refuse_variant(path, variant)
            if looks_like_safetensors(head):
                return open_safetensors(path)
        from lazymods.state.files.others import open_other  # takes longer to import than a small file to load

        return open_other(path, variant)


def _refuse_variant(path: Path, variant: str) -> None:
    needed = "a folder: a variant says which of its files is meant"
    raise refuse(path, f"a file, and variant={variant!r}", needed, write="lm.load(model, path)  # without variant")


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """Keep Python's collector from going through the tensors so far, again and again: it is up to half of the time."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _moved(path: Path) -> Path:
    """Return where a killed save has left the checkpoint of a path: it was about to put a newer one there."""
    from lazymods.state.files.replacing import standing

    try:
        moved = standing(Path(os.path.realpath(path)))
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        moved = path
    if not os.path.exists(moved):
        raise _missing(path)
    return moved


def _missing(path: Path) -> MissingFileError:
    """Say where there is no checkpoint, and name the file beside it that may be meant."""
    try:
        beside = sorted(os.listdir(path.parent))
    except OSError:
        beside = []
    near = [name for name in beside if Path(name).stem in (path.name, path.stem)]
    stems = difflib.get_close_matches(path.stem, [Path(name).stem for name in beside], 1, 0.7)
    near = near or [name for name in beside if Path(name).stem in stems]
    near.sort(key=lambda name: not name.endswith(".safetensors"))
    line = "lm.load(model, 'model.safetensors')  # the path of the file or folder"
    if near:
        line = f"lm.load(model, {str(path.with_name(near[0]))!r})"
    where = printable(os.path.abspath(path), 5000)
    return MissingFileError(Problem(where, "no checkpoint at this path", "a file or folder that is there", line))
