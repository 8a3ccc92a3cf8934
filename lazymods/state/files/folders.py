"""Hugging Face folders: which of their files is the checkpoint, as transformers, diffusers and PEFT choose it.

A whole file of a known name comes before an index, safetensors before pickles. Without such names the only file, or
the only index, is taken. A variant is a part of the names: ``model.fp16.safetensors`` is ``variant="fp16"``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from lazymods.state.files.safetensors import open_safetensors
from lazymods.state.files.sharded import INDEX_SUFFIX, open_index, open_shards
from lazymods.state.files.stored import Checkpoint, printable, refuse
from lazymods.state.files.torch_file import open_torch

_STEMS = ("model", "diffusion_pytorch_model", "adapter_model")
_PICKLES = ("pytorch_model", "diffusion_pytorch_model", "adapter_model")  # training_args.bin holds no parameters
_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})((?:\.[^.]+)?\.(?:safetensors|bin))")
_VARIANT = re.compile(
    r"(?:diffusion_pytorch_|pytorch_|adapter_)?model(?:-\d{5}-of-\d{5})?\.([^.]+?)(?:-\d{5}-of-\d{5})?\.(?:safetensors|bin)"
)


def open_folder(path: Path, variant: str | None) -> Checkpoint | None:
    """Open a Hugging Face folder; None if it is none.

    Args:
        path: The folder.
        variant: Which variant of its files; None: those without one.

    Raises:
        CheckpointError: If several files would do, there is no such variant, or the file is not what it should be.
    """
    names = sorted(entry.name for entry in path.iterdir() if entry.is_file())
    known = _known(names, variant)
    if known is not None:
        return _opened(path, known)
    variants = sorted({match[1] for name in names if (match := _VARIANT.fullmatch(name))})
    if variant is not None:
        return _of_variant(path, names, variant, variants)
    files = [name for name in names if name.endswith(".safetensors")]
    if variants and len(files) > 1 and all(_VARIANT.fullmatch(name) for name in files):
        got = f"files of the variants {printable(', '.join(variants))} only"
        raise refuse(path, got, "the one that is meant", write=f"variant={variants[0]!r}")
    files = _without_variants(files)
    pickles = _without_variants([name for name in names if name.endswith(".bin") and _SHARD.fullmatch(name)])
    for candidates in (
        [name for name in names if name.endswith(f".safetensors{INDEX_SUFFIX}")],
        files,
        [name for name in names if name.endswith(f".bin{INDEX_SUFFIX}")],
        pickles,
    ):
        shards = _all_shards(path, candidates)
        if shards:
            return open_shards(path, shards)
        if len(candidates) > 1:
            shown = ", ".join(candidates[:8]) + (", ..." if len(candidates) > 8 else "")
            needed = "one index, or one file: which of them is meant is not known"
            line = f"lm.load(model, {printable(str(path / candidates[0]), 5000)!r})"
            raise refuse(path, printable(shown, 1000), needed, write=line)
        if candidates:
            return _opened(path, candidates[0])
    return None


def _without_variants(files: list[str]) -> list[str]:
    """Return shards alone, where shards of variants are beside them."""
    plain = [name for name in files if not _VARIANT.fullmatch(name)]
    return plain if plain and all(map(_SHARD.fullmatch, plain)) else files


def _of_variant(path: Path, names: Sequence[str], variant: str, variants: Sequence[str]) -> Checkpoint:
    """Open the shards of a variant that has neither a whole file nor an index.

    Raises:
        CheckpointError: If there are none, or one is not there.
    """
    files = [name for name in names if (match := _VARIANT.fullmatch(name)) and match[1] == variant]
    for suffix in (".safetensors", ".bin"):
        shards = _all_shards(path, [name for name in files if name.endswith(suffix)])
        if shards:
            return open_shards(path, shards)
    got = f"no files of the variant {printable(repr(variant))}, but of {printable(', '.join(variants)) or 'none'}"
    line = f"variant={variants[0]!r}" if variants else "lm.load(model, path)  # without variant"
    raise refuse(path, got, "one of the variants that the folder has", write=line)


def _known(names: Sequence[str], variant: str | None) -> str | None:
    """Return the file that the libraries take: the first that is there."""
    part = "" if variant is None else f".{variant}"
    wanted: list[str] = []
    for stems, suffix in ((_STEMS, "safetensors"), (_PICKLES, "bin")):
        for stem in stems:
            wanted.append(f"{stem}{part}.{suffix}")
            wanted.append(f"{stem}.{suffix}.index{part}.json")
            wanted.append(f"{stem}{part}.{suffix}.index.json")  # as diffusers wrote it once
    return next((name for name in wanted if name in names), None)


def _all_shards(path: Path, files: Sequence[str]) -> list[str]:
    """Return files that are the shards of one checkpoint, by their names; none if some are no such.

    Raises:
        CheckpointError: If one of the shards is not there.
    """
    found = [_SHARD.fullmatch(name) for name in files]
    whole = {(match[1], match[3], match[4]) for match in found if match}
    if len(whole) != 1 or None in found:
        return []
    ((stem, total, suffix),) = whole
    numbers = {int(match[2]) for match in found if match}
    lacking = sorted(set(range(1, int(total) + 1)) - numbers)
    if lacking or max(numbers) > int(total):
        names = [f"{stem}-{number:05}-of-{total}{suffix}" for number in lacking] or ["one more than there are"]
        got = f"{len(files)} of {int(total)} shards, without {printable(', '.join(names[:4]))}"
        raise refuse(path, f"{got}{', ...' if len(names) > 4 else ''}", "all shards: no index says what each holds")
    return list(files)


def _opened(path: Path, name: str) -> Checkpoint:
    if name.endswith(".json"):
        return open_index(path / name)
    return open_safetensors(path / name) if name.endswith(".safetensors") else open_torch(path / name)
