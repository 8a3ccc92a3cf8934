"""Indices of Hugging Face folders: which file holds which tensor.

An index names files of its own folder and nothing else. What is a link is followed: the hub's cache is a folder of
links into another one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lazymods._errors import CheckpointError, Problem
from lazymods.state.files.json_text import read_json
from lazymods.state.files.safetensors import open_safetensors
from lazymods.state.files.stored import Checkpoint, known_as, printable, read_description, refuse
from lazymods.state.files.torch_file import open_torch

INDEX_SUFFIX = ".index.json"

MAX_INDEX_BYTES = 100_000_000
"""The longest index that is read."""

_READERS: dict[str, Callable[[Path], Checkpoint]] = {
    ".safetensors": open_safetensors,
    ".bin": open_torch,
    ".pt": open_torch,
    ".pth": open_torch,
}
_DRIVE = re.compile(r"[A-Za-z]:")


def open_index(path: Path) -> Checkpoint:
    """Open an index and every file that it names.

    A tensor is taken from the file that the index names for it, also where another one has it too. Tensors that the
    index does not name are left out: to Hugging Face as well, what the index lists is what the checkpoint holds
    (transformers reports missing and unexpected tensors by it).

    Raises:
        CheckpointError: If it is no index, names a file outside its folder, or names what is not there.
    """
    weight_map = _read_index(path)
    files: dict[str, Checkpoint] = {}
    problems: list[Problem] = []
    for file in dict.fromkeys(weight_map.values()):
        try:
            files[file] = _open_shard(path, file)
        except CheckpointError as error:  # all of what is wrong is told at once
            problems.extend(error.problems)
    return _merged(path, weight_map, files, problems)


def open_shards(path: Path, files: Sequence[str]) -> Checkpoint:
    """Open all the shards of a checkpoint that has no index: each tensor is in one of them.

    Raises:
        CheckpointError: If two of them have a tensor of one name, or one is no sound file.
    """
    shards = {file: _open_shard(path / file, file) for file in files}
    weight_map: dict[str, str] = {}
    for file, shard in shards.items():
        for name in shard.tensors:
            if name in weight_map:
                got = f"the tensor in {printable(weight_map[name])} and in {printable(file)}"
                raise refuse(path, got, "an index that says which is meant, or each tensor once", tensor=name)
            weight_map[name] = file
    return _merged(path, weight_map, shards, [])


def _merged(
    path: Path, weight_map: Mapping[str, str], files: Mapping[str, Checkpoint], problems: list[Problem]
) -> Checkpoint:
    """Return the tensors that a map from their names to files tells as one checkpoint."""
    tensors: dict[str, Any] = {}
    for name, file in weight_map.items():
        shard = files.get(file)
        if shard is None:
            continue
        stored = shard.aliases.get(name, name)
        if stored in shard.tensors:
            tensors[name] = shard.tensors[stored]
            continue
        got = f"no such tensor in {printable(file)}"
        problems += refuse(path, got, "every tensor in the file that the index names for it", tensor=name).problems
    if problems:
        raise CheckpointError(*problems)

    def check_sums() -> None:
        for shard in files.values():
            shard.check_sums()

    aliases = {a: kept for f in files.values() for a, kept in f.aliases.items() if kept in tensors and a not in tensors}
    weak = [name for f in files.values() for name in f.weak if name in tensors]
    kind = "sharded " + next(iter(files.values())).format if files else "sharded"
    within = [[name for name in group if name in tensors] for f in files.values() for group in f.ties]
    ties = [group for group in within if len(group) > 1]
    return Checkpoint(path, kind, tensors, aliases, weak, ties=ties, check_sums=check_sums)


def _read_index(path: Path) -> dict[str, str]:
    data = read_description(path, MAX_INDEX_BYTES)
    known = known_as(data[:512])
    if known:
        raise refuse(path, known, "an index of sharded files")
    index = read_json(path, data, "an index")
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict):
        raise refuse(path, printable(repr(index)), 'a JSON object with a "weight_map" from tensor to file')
    for name, file in weight_map.items():
        if not _is_plain_name(file):
            got = f"the file {printable(repr(file))}"
            needed = "the name of a file in the index's folder, without any path"
            raise refuse(path, got, needed, tensor=name)
    return weight_map


def _is_plain_name(name: Any) -> bool:
    if not isinstance(name, str) or name in ("", ".", ".."):
        return False
    return not any(c in name for c in "/\\\0") and not _DRIVE.match(name) and len(name.encode()) <= 255


def _open_shard(index: Path, name: str) -> Checkpoint:
    shard = index.parent / name
    reader = _READERS.get(shard.suffix)
    if reader is None:
        needed = f"a file that ends with {', '.join(_READERS)}"
        raise refuse(index, f"the file {printable(name)}", needed)
    if not shard.is_file():
        raise refuse(index, f"no file {printable(name)} beside it", "every file that the index names")
    return reader(shard)
