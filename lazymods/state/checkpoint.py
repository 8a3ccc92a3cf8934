"""``load``: a checkpoint file into a model that may not know its sizes yet."""

from __future__ import annotations

import inspect
import os
import re
import warnings
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lazymods import _graph
from lazymods._error_lists import cause_of
from lazymods._errors import StateDictError, describe
from lazymods._initial.keys import is_key
from lazymods._layer import lifecycle
from lazymods.state import modes, names
from lazymods.state.beside import Beside
from lazymods.state.entries import IMPL, Place, Survey, base_name, is_training_state
from lazymods.state.files.opening import read_checkpoint
from lazymods.state.files.stored import Checkpoint, StoredTensor, Unread, printable, refuse
from lazymods.state.load import LoadResult, Origin, load_entries
from lazymods.state.names import Rename
from lazymods.state.parts import may_fit, part_of
from lazymods.state.progress import progress_bar

LAYOUTS = ("flax", "torch")

def load(
    model: nnx.Pytree | MutableMapping[str, Any],
    path: str | os.PathLike[str],
    *,
    layout: str = "flax",
    rename: Rename | None = None,
    flatten: Mapping[str, Sequence[int]] | None = None,
    strict: bool = True,
    mismatched: str = "error",
    dtype: Any = None,
    mode: str | None = None,
    progress: bool | None = None,
) -> LoadResult:
    """Load a checkpoint into a model, lazy or not.

    Lazy layers take their sizes from the file and become their classes at once; nothing is traced, initialized or
    run. Bytes go to the device once: on a CPU the parameters are the mapped file itself wherever its tensors are
    aligned, as in every file that :func:`save` writes. All or nothing: if anything is wrong, all of it is told and the
    model is as it was.

    Args:
        model: An nnx module, or any nnx object, also one that ``nnx.eval_shape`` made; or a dict of a training state
            as :func:`save` takes it, whose numbers and texts are set in it: a number of another type takes the file's.
        path: A file or folder; its format is told by its content, then by its name: safetensors, an index of sharded
            files (``*.index.json``), a Hugging Face folder, npz, an Orbax folder, or a PyTorch file, which is
            read without PyTorch and never run. Of one that holds several mappings of tensors (a model's, an
            optimizer's) the one that fits is taken.
        layout: ``"flax"``, or ``"torch"`` for names and layouts as PyTorch's modules have them: each module of the
            model reads those of its PyTorch counterpart.
        rename: From a name of the file to a name of the model, before the layout: a mapping (other names stay), a list
            of pairs ``(pattern, replacement)`` for ``re.sub``, or a function. None for a name drops the entry. Without
            it, names are matched over the frequent differences: ``layers_0`` for ``layers.0``, slashes for dots, ``0``
            for ``layers.0`` in an ``nnx.Sequential``, the prefixes ``module.``, ``_orig_mod.``, ``model.``,
            ``params.`` and ``batch_stats.``, and a norm's ``weight``, ``running_mean`` and ``running_var``.
        flatten: With ``layout="torch"``, for a Linear after a flatten, the shape ``(H, W, C)`` that is flattened, by
            the Linear's path: PyTorch flattens channels first.
        strict: Whether missing and unexpected entries are errors.
        mismatched: ``"error"``, or ``"skip"`` to leave out entries whose shape does not fit, and list them.
        dtype: The dtype that the floating-point parameters (``nnx.Param``) get that are loaded, and that their layers
            compute in where they follow ``param_dtype``; ``"file"``: each gets that of its entry. None: each keeps its
            own, as statistics, an optimizer's moments and raw arrays do.
        mode: ``"eval"`` or ``"train"``: the mode that the model is put in, as by ``model.eval()``. None: it stays in
            its own, training for Flax's layers, and the result says so where that matters.
        progress: Show a progress bar on stderr; None: on a terminal, for long loads.

    Returns:
        What was missing, unexpected and mismatched; ``matched`` says what came from where, ``notes`` what else is
        good to know.

    Raises:
        CheckpointError: If the file is not what it claims to be.
        StateDictError: If its entries do not fit the model, as for :func:`load_state_dict`.
        UninitializedError: If a lazy layer is an argument of a transform of Flax that cannot carry new parameters out.
        FileNotFoundError: If there is no such file.
        TypeError: If the model is neither an nnx object nor a dict or list that can be written to.
        ValueError: If an argument has no such choice.

    Warns:
        UserWarning: If two parameters of the model are one in the file; if a matrix of 8-bit numbers, as quantized
            weights are stored, goes into wider floats; if ``config.json`` beside the file has another activation
            function, or epsilon of the norms; or if, with ``strict=False``, nothing at all was loaded, statistics of
            a BatchNorm were not, or an output layer was left to chance or left out that the embedding may stand for.

    Example:
        >>> import tempfile, lazymods as lm
        >>> from flax import nnx
        >>> path = tempfile.mkdtemp() + "/layer.safetensors"
        >>> lm.save(nnx.Linear(3, 4, rngs=nnx.Rngs(0)), path)
        >>> layer = lm.LazyLinear(4, rngs=nnx.Rngs(1))
        >>> lm.load(layer, path)
        <All keys matched successfully>
        >>> layer.in_features
        3
    """
    _check_options(layout, flatten, dtype, mode)
    with lifecycle.LOCK:
        survey = Survey(model)

        def read(file: Checkpoint) -> tuple[Checkpoint, dict[str, Any], dict[str, tuple[str, ...]], Beside]:
            part, entries, sources = part_of(survey, file, lambda p: _entries(survey, p, layout, rename, flatten))
            beside = Beside(survey, part.path, entries, sources, is_torch=layout == "torch")
            return part, _values(survey, entries), sources, beside

        file, entries, sources, beside = read_checkpoint(path, read)
        _check_booleans(entries, file)
        _check_key_kinds(survey.places, entries, file)
        _warn_of_quantized(survey.places, entries, file)
        total = sum(t.nbytes for t in file.tensors.values() if isinstance(t, StoredTensor))
        with progress_bar(progress, f"loading {printable(file.path.name)}", total) as advance:
            owned = {id(value) for value in entries.values()}
            weak = _weak(file, sources)

            def finish(result: LoadResult) -> None:
                if not result.matched and entries and survey.places:
                    _warn_of_nothing(result, file)
                _warn_of_untied(survey.places, file, sources)
                for text in beside.remarks(result, entries):
                    warn(f"{printable(file.path.name)}: {text}")
                if mode is not None:
                    modes.set_mode(model, mode)
                elif note := modes.note_of(model):
                    result.notes.append(note)
                if layout == "torch":
                    beside.watch(result, entries, flatten)

            origin = Origin(
                _called(file), sources, owned, advance, layout == "flax", weak, finish, beside.wrong_heads()
            )
            options = {"strict": strict, "mismatched": mismatched, "dtype": dtype, "origin": origin}
            if is_training_state(model):
                from lazymods.state import training  # with the optimizers, which many loads do without

                result = training.load_entries(model, entries, **options)
            else:
                result = load_entries(model, entries, survey=survey, **options)
    return result


def _check_options(layout: str, flatten: Mapping[str, Sequence[int]] | None, dtype: Any, mode: str | None) -> None:
    if layout not in LAYOUTS:
        raise ValueError(f"layout is one of {', '.join(map(repr, LAYOUTS))}, got {layout!r}")
    if flatten and layout != "torch":
        raise ValueError(f'flatten needs layout="torch": it reorders what PyTorch flattened, got layout={layout!r}')
    keeps = isinstance(dtype, str) and dtype == "file"
    if dtype is not None and not keeps and not jnp.issubdtype(jnp.dtype(dtype), jnp.floating):
        raise ValueError(f"dtype is a floating-point dtype for the parameters, got {jnp.dtype(dtype).name}")
    if mode is not None and mode not in modes.MODES:
        raise ValueError(f"mode is one of {', '.join(map(repr, modes.MODES))}, got {mode!r}")


def _called(file: Checkpoint) -> str:
    return f"the checkpoint {printable(str(file.path), 5000)}"


def _weak(file: Checkpoint, sources: Mapping[str, tuple[str, ...]]) -> set[str]:
    """Return the names of the model whose values are of weak type in the file."""
    if not file.weak:
        return set()
    return {new for new, old in sources.items() if any(file.aliases.get(name, name) in file.weak for name in old)}


def _entries(
    survey: Survey,
    file: Checkpoint,
    layout: str,
    rename: Rename | None,
    flatten: Mapping[str, Sequence[int]] | None,
) -> tuple[dict[str, Any], dict[str, tuple[str, ...]]]:
    """Return what the file holds by the model's names, and the names in the file."""
    stored = dict(file.tensors) | {alias: file.tensors[kept] for alias, kept in file.aliases.items()}
    if rename is None:
        origins, problems = names.matched(survey, stored, leaves=layout == "flax"), []
    else:
        origins, problems = names.renamed(stored, names.as_function(rename))
    entries = {new: stored[name] for new, name in origins.items()}
    sources = {new: (name,) for new, name in origins.items()}
    if layout == "torch" and not problems:
        from lazymods.state.layouts import from_torch

        imported = from_torch(survey.model, entries, flatten, {new: stored[name] for new, name in origins.items()})
        sources = {n: tuple(origins[s] for s in imported.sources.get(n, (n,))) for n in imported.entries}
        entries, problems = imported.entries, imported.problems
    if problems:
        heading = f"{_called(file)} does not fit {type(survey.model).__name__}; nothing was loaded"
        raise StateDictError(*problems, heading=heading)
    return entries, sources


def _values(survey: Survey, entries: Mapping[str, Any]) -> dict[str, Any]:
    """Read what the model has a place for; what does not fit there is told by its shape, and not read."""
    # hooks may give an entry another name, and an optimizer without a state gets one later
    everything = survey.hooked or is_training_state(survey.model)
    out = dict(entries)
    for name, value in entries.items():
        if isinstance(value, StoredTensor):
            place = survey.places.get(name) or survey.places.get(base_name(name))
            if place is not None and not survey.hooked and not may_fit(place, name, value):
                out[name] = Unread.of(value)
            elif place is not None or everything:
                out[name] = value.read()
    return out


def _check_booleans(entries: Mapping[str, Any], file: Checkpoint) -> None:
    """Refuse booleans that are neither 0 nor 1: what is computed from them could be anything."""
    for name, value in entries.items():
        if not isinstance(value, np.ndarray) or value.dtype != bool or not value.size or _is_spread(value):
            continue
        if value.view(np.uint8).max() > 1:
            raise refuse(file.path, "bytes other than 0 and 1", "booleans", tensor=name)


def _check_key_kinds(places: Mapping[str, Place], entries: Mapping[str, Any], file: Checkpoint) -> None:
    """Refuse the name of a kind of random keys that is none: anything but the bytes of one that JAX knows."""
    for name, value in entries.items():
        place = places.get(name.removesuffix(f".{IMPL}"))
        if place is None or place.name == name or not is_key(place.value):
            continue
        is_text = isinstance(value, np.ndarray) and value.dtype == np.uint8 and value.ndim == 1
        kind = value.tobytes().decode(errors="replace") if is_text and not _is_spread(value) else None
        try:
            jax.eval_shape(lambda kind=kind: jax.random.key(0, impl=kind or "none"))
        except ValueError as error:
            got = repr(kind) if kind is not None else describe(value)
            needed = "the bytes of the name of one of JAX's kinds of random keys, such as threefry2x32"
            raise refuse(file.path, f"a random key of the kind {printable(got)}", needed, tensor=name) from error


def _is_spread(value: np.ndarray[Any, Any]) -> bool:
    """Say whether an array is one value in all places, as what was not read is."""
    return value.size > 1 and not any(value.strides)


def warn(text: str) -> None:
    """Warn at the line that called :func:`load`."""
    frame, level = inspect.currentframe(), 1
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "lazymods":
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)


_SCALE = r"(?i)scale|zero_?point|absmax|quant_state"


def _warn_of_quantized(places: Mapping[str, Place], entries: Mapping[str, Any], file: Checkpoint) -> None:
    """Warn of quantized weights that go into wider floats, or whose scales the model has no place for."""
    scales = [name for name in entries if name not in places and re.search(_SCALE, name)]
    owners = {name.rpartition(".")[0] for name in scales}
    suspects = [
        name
        for name, value in entries.items()
        if isinstance(value, np.ndarray)
        and value.ndim >= 2
        and value.dtype.itemsize == 1
        and value.dtype != bool
        and name in places
        and (_is_wider_float(places[name].value) or name.rpartition(".")[0] in owners)
    ]
    if suspects:
        shown = ", ".join(suspects[:3]) + (f" and {len(suspects) - 3} more" if len(suspects) > 3 else "")
        what = "hold numbers of 8 bits or less, as quantized weights do, and are loaded without scales"
        left = f"; the file has {printable(', '.join(scales[:3]))}" if scales else ""
        text = f"{printable(file.path.name)}: {printable(shown)} {what}{left}"
        warn(text)


def _warn_of_nothing(result: LoadResult, file: Checkpoint) -> None:
    cause = cause_of(result.missing, result.unexpected)
    why = f": {cause[0]}; write {cause[1]}" if cause else ""
    warn(f"{printable(file.path.name)}: nothing was loaded, no name fits the model{why}")


def _is_wider_float(value: Any) -> bool:
    dtype = value.pending.dtype if _graph.is_placeholder(value) else getattr(value, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize > 1


def _warn_of_untied(places: Mapping[str, Place], file: Checkpoint, sources: Mapping[str, tuple[str, ...]]) -> None:
    """Say what is one parameter in the file and two in the model: which Variables it shares, the model decides."""
    name_of = {origin: name for name, origins in sources.items() for origin in origins[:1]}
    groups: dict[str, list[str]] = {}
    for alias, kept in file.aliases.items():
        groups.setdefault(kept, [kept]).append(alias)
    apart = []
    for group in (*groups.values(), *file.ties):
        found = [place for name in group if (place := places.get(name_of.get(name, ""))) and place.is_variable]
        apart += [(place.name, found[0].name) for place in found[1:] if place.owner is not found[0].owner]
    if apart:
        shown = ", ".join(f"{a} and {b}" for a, b in apart[:3])
        more = f" and {len(apart) - 3} more pairs" if len(apart) > 3 else ""
        told = f"{file.path.name}: {shown}{more} are one parameter in the file and two in the model"
        a, b = apart[0]
        if a.rpartition(".")[2] == b.rpartition(".")[2]:
            line = f"To tie them: model.{a} = model.{b}"
        else:  # an nnx.Linear has the transpose of what an nnx.Embed has
            line = "To use one for both: nnx.Embed.attend"
        warn(f"{told}; both are filled, and will train apart. {line}")
