"""Which reader a path needs that is no safetensors file by its first bytes: by its content, then by its name."""

from __future__ import annotations

from pathlib import Path

from lazymods.state.files import archive, folders, orbax, sharded, torch_file
from lazymods.state.files.npz import open_npz
from lazymods.state.files.safetensors import open_safetensors
from lazymods.state.files.stored import Checkpoint, map_file, printable, refuse


def open_other(path: Path, variant: str | None = None) -> Checkpoint:
    """Open a folder, an index, a zip archive, a PyTorch file, or what is none of them, with the error that fits.

    Raises:
        CheckpointError: If it is not what it claims to be.
    """
    if path.is_dir():
        return _open_folder(path, variant)
    if not path.is_file():
        raise refuse(path, "neither a file nor a folder", "a checkpoint")
    if path.name.endswith(sharded.INDEX_SUFFIX):
        return sharded.open_index(path)
    with open(path, "rb") as file:
        head = file.read(512)
    if head.startswith((archive.MAGIC, archive.EMPTY_MAGIC)):
        return _open_archive(path)
    if torch_file.has_torch_name(path):
        return torch_file.open_torch(path)
    if torch_file.is_pickle(head):
        raise _unread_pickle(path, "a pickle, as PyTorch files are")
    return open_npz(path) if path.suffix == ".npz" else open_safetensors(path)


def _open_folder(path: Path, variant: str | None) -> Checkpoint:
    found = folders.open_folder(path, variant)
    if found is not None:
        return found
    if orbax.is_orbax(path):
        return orbax.open_orbax(path)
    names = sorted(entry.name for entry in path.iterdir())
    got = f"a folder without a checkpoint, which holds {printable(', '.join(names)) or 'nothing'}"
    needed = "an index, a .safetensors file, a pytorch_model.bin, or what Orbax writes"
    raise refuse(path, got, needed, write="lm.load(model, path)  # of the file or folder that holds the tensors")


def _open_archive(path: Path) -> Checkpoint:
    if path.suffix == ".npz":
        return open_npz(path)
    data = map_file(path)
    directory = archive.read_directory(path, data)
    if any(name.endswith(".npy") for name in directory):
        return open_npz(path)
    if torch_file.has_torch_name(path):
        return torch_file.open_archive(path, data, directory)
    if any(name.endswith("data.pkl") for name in directory):
        raise _unread_pickle(path, "a PyTorch file, which holds a pickle")
    raise refuse(path, "a zip archive", "a checkpoint: an npz has entries that end with .npy")


def _unread_pickle(path: Path, what: str) -> Exception:
    endings = ", ".join(torch_file.SUFFIXES)
    needed = f"safetensors or npz; a pickle can hold code, and is opened under the names {endings} only, and not run"
    return refuse(path, what, needed, write=f"path.rename({printable(path.stem) + '.pt'!r})  # if it is a PyTorch file")
