"""``save``: a model into a file, whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import struct
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.core import Tracer

from lazymods import _compat, _frames, _graph
from lazymods._errors import CheckpointError, LazyError, Problem, UninitializedError, describe, located
from lazymods._graph import dotted
from lazymods._layer import stacks
from lazymods._layer.asked import SIZE_LINE
from lazymods._memory import ALIGNMENT
from lazymods._progress import Advance, telling
from lazymods._refusals import wrong_argument
from lazymods._spread import on_host
from lazymods.state import plain
from lazymods.state.entries import check_is_model, is_training_state, named_places
from lazymods.state.files import safetensors
from lazymods.state.files.json_text import texts_as_array
from lazymods.state.files.paths import check_path
from lazymods.state.files.replacing import cannot_write, check_file_target, replacing
from lazymods.state.files.stored import ALIASES, DTYPES, MAX_NAME_BYTES, NOTES, WEAK, Array, printable
from lazymods.state.orbax_saving import PendingSave, begin_orbax, check_target, orbax_problem
from lazymods.state.state_dict import state_dict
from lazymods.state.values import is_deleted, is_weak, unwrapped

Values = Mapping[str, Any]  # arrays of numpy and of JAX, each of which is brought to the host when it is written
Notes = dict[str, dict[str, str]]  # ALIASES and WEAK, those that there are


@_frames.entry
def save(
    model: Any, path: str | os.PathLike[str], *, include_rng: bool | None = None, wait: bool = True
) -> PendingSave | None:
    """Write a model, or a whole training state, to a file.

    The file appears whole or not at all: a save that fails or is killed leaves what was there before, and of several to
    one path the last to finish wins. Only a checkpoint or a regular file is ever replaced. Tied parameters are written
    once, and tied again by :func:`load`.

    Of a model over several devices one parameter at a time is brought to the host. A program of several processes saves
    to an Orbax folder, by the same call in each: what each has for itself, such as a random key, is written as the
    first one's, and the folder is there when the call returns, in all of them.

    Args:
        model: An nnx module; or a dict of a training state, such as ``{"model": model, "optimizer": optimizer, "rngs":
            rngs, "step": 100}``, whose numbers, texts and random state are stored as well, in dicts, lists, tuples
            and registered pytrees too. What no file can hold is refused by its name. A plain number or text of a
            module, also in an ``nnx.Dict`` or ``nnx.List``, is its configuration, and is not stored.
        path: Where to: ``.safetensors``, whose tensors are laid so that :func:`load` can map them; ``.npz``; or,
            without a suffix, an Orbax folder, which takes the place of the one that is there and can hold arrays that
            are spread over several processes.
        include_rng: Whether to write random state as well; None: for a training state and for ``nnx.Rngs``, not for a
            module.
        wait: False, for an Orbax folder: return once the values are copied, and write in the background.

    Returns:
        With ``wait=False`` the save that is going on, whose ``wait()`` must be called; else None.

    Raises:
        UninitializedError: If a parameter has no value yet, or a ``LazyOptimizer`` no state.
        CheckpointError: If a value cannot be held by the format, such as 4-bit integers, or by any, such as a function,
            a donated array or a traced value; if a file was to hold arrays of several processes, or one of these does
            not come to save; if something stands at the path that is neither a checkpoint nor a
            regular file, or the path is a URL; or if it cannot be written (then it is an OSError too).
        ArgumentError: If the model is neither an nnx object nor a dict or list, the path none, or its suffix none of
            these.

    Example:
        >>> import tempfile, lazymods as lm
        >>> from flax import nnx
        >>> lm.save(nnx.Linear(3, 4, rngs=nnx.Rngs(0)), tempfile.mkdtemp() + "/layer.safetensors")
    """
    check_is_model(model)
    check_path(path)
    target = Path(os.path.realpath(os.fsdecode(path)))  # a link stays one: what it points to is replaced
    writers = {".safetensors": write_safetensors, ".npz": write_npz}
    named = Path(os.fsdecode(path)).suffix
    suffix = named if named in writers else target.suffix  # what a link leads to may have any name
    if suffix and suffix not in writers:
        needed = "a path that ends with .safetensors or .npz, or without a suffix, for an Orbax folder"
        bare = target if suffix[1:].isdecimal() else target.with_suffix("")  # run_0.1 and run_0.2 are two names
        write = f"lm.save(model, {f'{bare}.safetensors'!r})"
        raise wrong_argument("lm.save: path", path, needed, write)
    if suffix and not wait:
        needed = "a path without a suffix: wait=False is for Orbax folders"
        write = f"lm.save(model, {str(target.with_suffix(''))!r}, wait=False)"
        raise wrong_argument("lm.save: path", path, needed, write)
    with _told(target):
        (check_file_target if suffix else check_target)(target)
    _refuse_lazy(model)
    if include_rng is None:
        include_rng = is_training_state(model) or isinstance(model, (nnx.Rngs, nnx.RngStream))
    with stacks.apart():
        _refuse_without_values(model, target, include_rng=include_rng)
        values, aliases, problems = _collect(model, target, include_rng=include_rng)
    problems += [p for name, value in values.items() if (p := _format_problem(target, suffix, name, value)) is not None]
    if problems:
        raise CheckpointError(*problems)
    weak = {name: v.dtype.name for name, v in values.items() if is_weak(v)}
    notes = {key: texts for key, texts in ((ALIASES, aliases), (WEAK, weak)) if texts}
    title = f"saving {printable(target.name)}"
    known = {name: _known(value) for name, value in values.items()}
    if suffix:
        with telling(title, sum(value.nbytes for value in known.values())) as advance:
            writers[suffix](target, known, notes, advance)
        return None
    with _told(target), telling(title):
        pending = begin_orbax(target, known, notes)
        if wait:
            pending.wait()
    return None if wait else pending


@contextlib.contextmanager
def _told(target: Path) -> Iterator[None]:
    """Turn what the system has against a path into an error of a save."""
    try:
        yield
    except LazyError:
        raise
    except OSError as error:
        raise cannot_write(target, error) from error


def _refuse_lazy(model: Any) -> None:
    problems = []
    for entry in _graph.entries(model):
        if _graph.is_placeholder(entry.value):
            got = f"an uninitialized parameter, {entry.value!r}"
            needed = "a value: a file holds values only"
            problems.append(Problem(f"{entry.name} ({type(entry.value).__name__})", got, needed, SIZE_LINE))
    for path, node in _graph.nodes(model):
        if isinstance(node, nnx.Optimizer) and _graph.is_lazy_node(node):
            needed = "its state, which is made of the parameters: a file holds values only"
            line = "optimizer.make_state(model)  # or its first update, before lm.save"
            where = located(dotted(path), type(node).__name__)
            problems.append(Problem(where, "an optimizer without a state", needed, line))
    if problems:
        raise UninitializedError(*problems, heading=f"{type(model).__name__} is not ready to be saved")


def _known(value: Any) -> Any:
    """Return a value of a lazy block as an array."""
    return _compat.values.known(value, "save") if isinstance(value, Tracer) else value


def _refuse_without_values(model: Any, path: Path, *, include_rng: bool) -> None:
    """Refuse arrays that JAX has deleted, and those that stand for values inside a transform."""
    problems = []
    for place in named_places(model).values():
        value = _known(place.value)
        if place.is_rng and not include_rng:
            continue
        if is_deleted(value):
            got = "an array that was deleted or donated"
            line = "lm.save(model, path)  # before the step that donates it"
        elif isinstance(value, Tracer):
            got = f"{describe(value)}, a traced value of a transform"
            line = "lm.save(model, path)  # outside of the transform"
        else:
            continue
        where = printable(f"{path.name}: {place.name}")
        problems.append(Problem(where, got, "a value: a file holds values only", line))
    if problems:
        raise CheckpointError(*problems)


def _collect(
    model: Any, path: Path, *, include_rng: bool
) -> tuple[dict[str, Any], dict[str, str], list[Problem]]:
    """Return the values by name, further names of tied ones, and what is there that no file can hold."""
    entries = state_dict(model, include_rng=include_rng)
    first: dict[Any, str] = {}
    aliases = {}
    for place in named_places(model).values():
        if place.name in entries:
            kept = first.setdefault(place.identity, place.name)
            if kept != place.name and entries[kept] is entries[place.name]:  # unless a hook changed one of them
                aliases[place.name] = kept
    values: dict[str, Any] = {}
    problems = []
    for name, value in entries.items():
        if name in aliases and isinstance(value, (jax.Array, np.ndarray)) and _is_text(name) and name not in NOTES:
            continue
        aliases.pop(name, None)
        held = plain.stored(name, unwrapped(value))
        needed = "an array, a random key, a number or a text: a file holds nothing else"
        line = plain.line_for(unwrapped(value))
        if not _is_text(name):
            got, needed, line = describe(value), "a name that UTF-8 can hold", "state[other_name] = state.pop(name)"
        elif held is None:
            got = _with_its_type(value)
        elif held[0] != name and held[0] in entries:
            got, line = f"{describe(value)}, beside an entry {held[0]}", "state[other_name] = state.pop(name)"
        else:
            values[held[0]] = held[1]
            continue
        where = printable(f"{path.name}: {name}")
        line = line if line.startswith("del") else f"{line}  # or del state[name], before lm.save(state, path)"
        problems.append(Problem(where, got, needed, line))
    return values, aliases, problems


def _with_its_type(value: Any) -> str:
    """Describe a value whose type says why no file holds it: an enumeration's 4, a masked array."""
    shown, kind = describe(value), type(value).__name__
    return shown if shown == kind else f"{shown}, of type {kind}"


def _is_text(name: str) -> bool:
    """Whether a name can be written: half of a surrogate pair has no bytes."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _format_problem(path: Path, suffix: str, name: str, value: Any) -> Problem | None:
    """Say why the format of a suffix cannot hold a value, if so."""
    if not suffix:
        return orbax_problem(path, name, value)
    where = printable(f"{path.name}: {name}")
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        got = "an array that is spread over several processes"
        needed = "values that this process has, for a single file: Orbax writes a folder from all of them"
        line = f"lm.save(model, {printable(str(path.with_suffix('')))!r})  # in every process"
        return Problem(where, got, needed, line)
    dtype = _native(value.dtype)
    if suffix == ".safetensors":
        kind, is_held = "safetensors", dtype in safetensors.NAMES and name != safetensors.METADATA
    else:
        is_name = name not in (DTYPES, *NOTES) and "\0" not in name and len(name.encode()) <= MAX_NAME_BYTES
        kind, is_held = "npz", is_name and not dtype.hasobject
    if is_held:
        return None
    line = "state[other_name] = state.pop(name)"
    if kind == "safetensors":  # npz has its names and all dtypes
        line = f"lm.save(model, {printable(str(path.with_suffix('.npz')))!r})"
    return Problem(where, describe(value), f"a name and a dtype that {kind} can hold", line)


def _native(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return dtype if dtype.isnative else dtype.newbyteorder("=")


def _to_host(value: Any) -> Array:
    """Return the values of an array; nothing keeps them but who asks."""
    array = np.ascontiguousarray(on_host(value)).reshape(value.shape)  # which has no array without axes
    return array.astype(_native(array.dtype), copy=False)


# ---------------------------------------------------------------- formats


def write_safetensors(path: Path, values: Values, notes: Notes, advance: Advance | None = None) -> None:
    """Write a safetensors file whose tensors lie on multiples of 64 bytes, all whose sizes allow it.

    The format has no holes, so those whose size is no multiple of 64 come last. One value at a time is on the host.
    """
    order = sorted(values, key=lambda name: values[name].nbytes % ALIGNMENT != 0)
    offsets, position = {}, 0
    for name in order:
        offsets[name] = [position, position + values[name].nbytes]
        position += values[name].nbytes
    metadata = dict(notes.get(ALIASES, {})) | ({WEAK: json.dumps(notes[WEAK])} if WEAK in notes else {})
    header: dict[str, Any] = {safetensors.METADATA: metadata} if metadata else {}
    for name, value in values.items():
        kind = safetensors.NAMES[_native(value.dtype)]
        header[name] = {"dtype": kind, "shape": list(value.shape), "data_offsets": offsets[name]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    if len(text) > safetensors.MAX_HEADER_BYTES:
        got = f"{len(values):,} arrays, whose names and shapes take {len(text):,} bytes"
        needed = f"at most {safetensors.MAX_HEADER_BYTES:,}: no reader takes a longer header"
        line = f"lm.save(model, {printable(str(path.with_suffix('.npz')))!r})"
        raise CheckpointError(Problem(printable(path.name), got, needed, line))
    with replacing(path) as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in order:
            file.write(_bytes_of(_to_host(values[name])))
            if advance is not None:
                advance(values[name].nbytes)


def write_npz(path: Path, values: Values, notes: Notes, advance: Advance | None = None) -> None:
    """Write an npz archive; dtypes that numpy has no name for go as raw bytes, their names in an entry of its own.

    One value at a time is on the host.
    """
    dtypes = {name: value.dtype.name for name, value in values.items() if value.dtype.isbuiltin == 2}
    extras = ({DTYPES: dtypes} if dtypes else {}) | notes
    with replacing(path) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        for name, value in values.items():
            array = _to_host(value)
            raw = array.view(np.dtype((np.void, array.dtype.itemsize))) if name in dtypes else array
            _write_npy(archive, name, raw)
            del array, raw
            if advance is not None:
                advance(value.nbytes)
        for key, texts in extras.items():
            _write_npy(archive, key, texts_as_array(texts))


def _write_npy(archive: zipfile.ZipFile, name: str, array: Array) -> None:
    with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as entry:
        np.lib.format.write_array(entry, array, allow_pickle=False)


def _bytes_of(array: Array) -> memoryview:
    return array.reshape(-1).view(np.uint8).data

