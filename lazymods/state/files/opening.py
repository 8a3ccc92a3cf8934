"""Which reader a path needs: by its content, then by its name."""

from __future__ import annotations

import os
from pathlib import Path

from lazymods.state.files.safetensors import looks_like_safetensors, open_safetensors
from lazymods.state.files.stored import Checkpoint, printable


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a checkpoint of any format and check everything about it but the values.

    A folder is one of Hugging Face, else one of Orbax. A file is an index by its name (``*.index.json``), an npz or a
    PyTorch file by its content, and safetensors otherwise. Pickles, which PyTorch files hold, are opened under the
    names that PyTorch files have and under no other.

    Raises:
        CheckpointError: If it is not what it claims to be; the error names the file, and the tensor if there is one.
        FileNotFoundError: If there is no such path.
        ImportError: If it is a PyTorch file and torch is not installed.
    """
    path = Path(path)
    if not path.exists():
        path = _moved(path)
    if path.is_file():
        with open(path, "rb") as file:
            head = file.read(512)
        if looks_like_safetensors(head):
            return open_safetensors(path)
    from lazymods.state.files.others import open_other  # takes longer to import than a small file to load

    return open_other(path)


def _moved(path: Path) -> Path:
    """Return where a killed save has left the checkpoint of a path: it was about to put a newer one there."""
    from lazymods.state.replacing import standing

    moved = standing(Path(os.path.realpath(path)))
    if not moved.exists():
        raise FileNotFoundError(f"no checkpoint at {printable(str(path), 5000)}")
    return moved
