"""``load``: a checkpoint file into a model that may not know its sizes yet."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Collection, Mapping, MutableMapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from lazymods import _graph
from lazymods._error_lists import cause_of, collapsed
from lazymods._errors import describe
from lazymods._frames import entry
from lazymods._initial.keys import is_key
from lazymods._layer import lifecycle, stacks
from lazymods._progress import telling
from lazymods._refusals import refuse_no_float, wrong_argument
from lazymods._shardings import Rules
from lazymods.state import modes, ones, options, tied_heads
from lazymods.state.beside import Beside
from lazymods.state.entries import IMPL, Place, Survey, base_name, is_training_state
from lazymods.state.files.stored import Checkpoint, StoredTensor, Unread, check_booleans, is_mapped, printable, refuse
from lazymods.state.flow import Rename, derived, has_array_rules
from lazymods.state.load import LoadResult, Origin, load_entries
from lazymods.state.load_plan import is_spread_place
from lazymods.state.noted import WayBack, forget_values, is_buffer, tied_names
from lazymods.state.parts import may_fit, part_of
from lazymods.state.placing import Placing, is_placed, placing_for
from lazymods.state.prepared import Prepared, prepare, why_missing
from lazymods.state.sources import read_source
from lazymods.state.warned import warn

LAYOUTS = ("flax", "torch")


@entry
def load(
    model: nnx.Pytree | MutableMapping[str, Any],
    source: str | os.PathLike[str] | Mapping[str, Any] | Any,
    *,
    layout: str = "flax",
    rename: Rename | None = None,
    flatten: Mapping[str, Sequence[int]] | None = None,
    root: str | None = None,
    variant: str | None = None,
    ignore: str | Sequence[str] = (),
    missing: str | Sequence[str] = (),
    strict: bool = True,
    mismatched: str = "error",
    dtype: Any = None,
    mesh: Mesh | None = None,
    rules: Rules | None = None,
    mode: str | None = None,
    progress: bool | None = None,
) -> LoadResult:
    """Load a checkpoint into a model, lazy or not.

    Lazy layers take their sizes from the file and become their classes at once. Nothing is initialized or run; to see
    whether a ``flatten`` was forgotten, some models are evaluated once without values. Bytes go to the device once. On
    a CPU the parameters are the mapped file itself wherever its tensors are aligned, as in every safetensors file that
    :func:`save` writes. All or nothing: if anything is wrong, one error lists it, and the model is as it was.

    Args:
        model: An nnx module, or any nnx object, also one that ``nnx.eval_shape`` made; or a dict of a training state,
            as :func:`save` takes it. Its numbers and texts are set in the dict. A number of another type becomes the
            file's.
        source: A file or folder; its format is told by its content, then by its name: safetensors, an index of sharded
            files (``*.index.json``), a Hugging Face folder, npz, an Orbax folder, or a PyTorch file, which is
            read without PyTorch and never run. Of one that holds several mappings of tensors (a model's, an
            optimizer's) the one that fits is taken. Or arrays in memory: a mapping from names, nested or not, to
            arrays of numpy, JAX or PyTorch, what :func:`open` gives, or a ``torch.nn.Module``.
        layout: ``"flax"``, or ``"torch"`` for names and layouts as PyTorch's modules have them: each module of the
            model reads those of its PyTorch counterpart.
        rename: From a name of the file to a name of the model, before the layout: a mapping (other names stay), a
            function, or a list of pairs ``(pattern, replacement)`` for ``re.sub`` and of the array rules of
            :mod:`lazymods.rules`, applied in order. None for a name drops the entry. What it leaves as it is, is
            matched over the frequent differences: ``layers_0`` for ``layers.0``, slashes for dots, ``0``
            for ``layers.0`` in an ``nnx.Sequential``, the prefixes ``module.``, ``_orig_mod.``, ``model.``,
            ``params.`` and ``batch_stats.``, any one prefix that many names have (``bert.``) or lack, a norm's
            ``weight``, ``running_mean`` and ``running_var``, ``weight_ih_l1`` for the second of a list of recurrent
            layers or cells, PEFT's names of adapters.
        flatten: With ``layout="torch"``, for a Linear or recurrent layer after a flatten, the shape ``(H, W, C)`` that
            is flattened, by the layer's path: PyTorch flattens channels first.
        root: The part of the file that is meant, by what its names begin with: ``"model_ema"``; None: the one that
            fits, or the whole.
        variant: Of a folder, the variant of its files: ``"fp16"`` for ``model.fp16.safetensors``.
        ignore: Regular expressions, searched for in the names of entries that the model has no parameter for: these
            are left out, and a prefix is found by the others. Buffers that are known (position numbers, causal masks,
            rotary frequencies, counters) are left out with ``layout="torch"`` without it.
        missing: Regular expressions, searched for in the model's names: these may be missing.
        strict: Whether missing and unexpected entries are errors.
        mismatched: ``"error"``, or ``"skip"`` to leave out entries whose shape does not fit, and list them.
        dtype: The dtype that the floating-point parameters (``nnx.Param``) get that are loaded, and that their layers
            compute in where they follow ``param_dtype`` (recurrent cells keep theirs); ``"file"``: each gets that of
            its entry. None: each keeps its own, as statistics, an optimizer's moments and raw arrays do.
        mesh: The devices that the arrays go to, by ``rules``. Each process reads what its own devices hold. None: the
            mesh of ``jax.set_mesh`` for arrays that are bound to no device; all others stay where the model has them.
        rules: Pairs ``(regular expression, PartitionSpec)``. The first pair whose expression is found in the
            parameter's name is used. Or a function of name, shape and dtype that returns a PartitionSpec or None. A
            parameter without a rule follows its ``out_sharding`` metadata; without it, it is copied to each device. In
            a training state the names are those of the module itself, and an optimizer's state goes where its
            parameter does.
        mode: ``"eval"`` or ``"train"``: the mode that the model is put in, as by ``model.eval()``. None: it stays in
            its own, training for Flax's layers, and the result says so where that matters.
        progress: Show a progress bar on stderr; None: in a terminal or a notebook, of a load that takes over a second.

    Returns:
        What was missing, unexpected and mismatched; ``matched`` says what came from where, ``ignored`` what was left
        out, ``notes`` what else there is to say.

    Raises:
        CheckpointError: If the file is not what it claims to be.
        StateDictError: If its entries do not fit the model, as for :func:`load_state_dict`.
        UninitializedError: If a lazy layer is an argument of a transform of Flax that cannot carry new parameters out.
        LazyError: If parameters do not fit on the mesh; it lists all of them.
        MissingFileError: If there is no such file.
        ArgumentError: If the model is neither an nnx object nor a dict or list that can be written to, the source is
            none, or another argument is none that it takes, such as an expression that is not regular.

    Warns:
        UserWarning: If a part of ``rename`` fits no entry, or drops one that the model then misses; if two parameters
            of the model are one in the file; if a matrix of 8-bit numbers, as quantized weights are stored, goes into
            wider floats; if a layer reads what the model flattens channels last, or gives what becomes a map with
            channels last, and was loaded as PyTorch has it, which has channels first; if ``config.json`` beside the
            file has another activation function or epsilon of the norms, or is of a model whose norms add 1; or if,
            with ``strict=False``, nothing at all was loaded, statistics of a BatchNorm were not, or an output layer
            was left to chance or left out that the embedding may stand for.

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
    placing = placing_for(mesh, rules)
    ignored, may_miss = options.patterns("lm.load: ignore", ignore), options.patterns("lm.load: missing", missing)
    with lifecycle.LOCK, stacks.apart(abstract=True):
        survey = Survey(model)

        def read(file: Checkpoint) -> tuple[Checkpoint, Prepared, str, dict[str, Any], Collection[str], Beside]:
            def reader(part: Checkpoint) -> Prepared:
                return prepare(survey, part, layout, rename, flatten, ignored)

            if as_stored:
                file.check_unpacked(file.tensors.values())  # some are read to be laid
            part, prepared, begin = part_of(survey, file, reader, root)
            beside = Beside(survey, part, prepared, layout, flatten)
            prepared = beside.prepared
            return part, prepared, begin, _values(survey, prepared.entries, placing, part), file.roots, beside

        as_stored = layout == "torch" or has_array_rules(rename)
        file, prepared, begin, entries, roots, beside = read_source(source, read, as_stored=as_stored, variant=variant)
        if isinstance(dtype, str):
            entries = _in_dtypes_of_file(entries, prepared)
        _check_booleans(entries, file)
        _check_key_kinds(survey.places, entries, file)
        _warn_of_quantized(survey.places, entries, file)
        left = _ignored(survey, prepared, layout, ignored)
        report = _Report(survey, file, layout, flatten, prepared)

        def may_be_missing(name: str) -> bool:
            return any(pattern.search(name) for pattern in may_miss)

        def finish(result: LoadResult) -> None:
            report.warn(result)
            for text in beside.remarks(result, entries, may_be_missing):
                warn(f"{printable(file.path.name)}: {text}")
            beside.finish(result, mode)
            result.way_back = _way_back(survey, file, layout, flatten, prepared, result, left)  # reads what is left

        total = sum(t.nbytes for t in file.tensors.values() if isinstance(t, StoredTensor))
        with telling(f"loading {printable(file.path.name)}", total, progress) as advance:
            origin = Origin(
                file.title,
                {name: tuple(f"{begin}{s}" for s in found) for name, found in prepared.sources.items()},
                _owned(file, entries),
                advance,
                layout == "flax",
                _weak(file, prepared.sources),
                finish,
                left,
                may_be_missing,
                report.why_missing,
                functools.partial(ones.line_for, prepared) if layout == "torch" else lambda place: None,
                [f"nothing of the file fits {text}, of rename" for text in prepared.flow.unused],
                beside.wrong_heads(),
                placing,
            )
            how = {"strict": strict, "mismatched": mismatched, "dtype": dtype, "origin": origin}
            if is_training_state(model):
                from lazymods.state import training  # with the optimizers, which many loads do without

                result = training.load_entries(model, entries, **how)
            else:
                result = load_entries(model, entries, survey=survey, **how)
    result.ignored = [begin + s for name in left for s in prepared.sources[name]]
    result.root = begin.rstrip(".")
    result.notes = [*_notes(left, begin, roots), *prepared.notes, *result.notes]
    return result


def _check_options(layout: str, flatten: Mapping[str, Sequence[int]] | None, dtype: Any, mode: str | None) -> None:
    if layout not in LAYOUTS:
        raise wrong_argument("lm.load: layout", layout, f"one of {', '.join(map(repr, LAYOUTS))}", 'layout="torch"')
    if flatten and layout != "torch":
        needed = "flatten reorders what PyTorch flattened, and needs its layout"
        raise wrong_argument("lm.load: layout", layout, needed, 'layout="torch"')
    keeps = isinstance(dtype, str) and dtype == "file"
    if dtype is not None and not keeps:
        needed = 'a floating-point dtype, which the parameters get, or "file" for that of each entry'
        refuse_no_float("lm.load: dtype", dtype, needed)
    if mode is not None and mode not in modes.MODES:
        raise wrong_argument("lm.load: mode", mode, f"one of {', '.join(map(repr, modes.MODES))}", 'mode="eval"')


def _ignored(
    survey: Survey, prepared: Prepared, layout: str, patterns: Sequence[re.Pattern[str]]
) -> dict[str, str | None]:
    """Return the entries without a parameter that need none, each with what it is: a buffer, or what was named."""
    out: dict[str, str | None] = {}
    for name, tensor in prepared.entries.items():
        if name in survey.places or base_name(name) in survey.places:
            continue
        if any(pattern.search(n) for pattern in patterns for n in (name, *prepared.sources.get(name, ()))):
            out[name] = None
        elif layout == "torch":
            from lazymods.state.buffers import known_buffer

            what = known_buffer(name, tensor)
            if what is not None:
                out[name] = what
    return out


def _owned(file: Checkpoint, entries: Mapping[str, Any]) -> set[int]:
    """Return the ids of the arrays whose memory JAX may take over: those of the file, and not somebody's own."""
    if not file.in_memory:
        return {id(value) for value in entries.values()}
    return {id(value) for value in entries.values() if isinstance(value, np.ndarray) and is_mapped(value)}


def _notes(left: Mapping[str, str | None], begin: str, roots: Collection[str]) -> list[str]:
    notes = []
    kinds: dict[str, list[str]] = {}
    for name, what in left.items():
        kinds.setdefault(what or "as asked", []).append(name)
    for what, found in kinds.items():
        names = list(map(printable, collapsed(found)))
        notes.append(f"ignored {', '.join(names[:4])}{', ...' if len(names) > 4 else ''} ({what})")
    others = [root for root in roots if f"{root}." != begin]
    if begin and others:
        notes.append(f"taken from {printable(begin[:-1])!r}, beside {', '.join(map(printable, others[:8]))}")
    return notes


def _way_back(
    survey: Survey,
    file: Checkpoint,
    layout: str,
    flatten: Mapping[str, Sequence[int]] | None,
    prepared: Prepared,
    result: LoadResult,
    left: Mapping[str, str | None],
) -> WayBack:
    """Note what the way back needs."""
    flow, final = prepared.flow, prepared.final
    loaded = {name for model_name in result.matched for name in prepared.laid.get(model_name, ())}
    file_name = {id(entry): name for name, entry in flow.originals.items()}
    wanted = {s for n, found in prepared.laid.items() if base_name(n) in survey.places for s in found}
    known = {*prepared.swallowed, *(name for name, what in left.items() if what is not None)}
    kept, rest, unnamed = {}, [dropped.entry for dropped in flow.dropped], []
    for name in final.keys() - loaded:
        entry = final[name]
        source = file_name.get(id(entry))
        if source is None or not isinstance(entry.tensor, StoredTensor):
            continue
        if name in known or (name not in wanted and is_buffer(file, source, entry.tensor)):
            values = np.asarray(entry.tensor.read())
            kept[source] = np.array(values) if file.in_memory else values
        else:
            rest.append(entry)
            unnamed.append(source)
    used = {source: flow.originals[source] for name in loaded for source in final[name].sources}
    embeddings = [
        final[laid].sources[0]
        for name in result.matched
        if name in survey.places and tied_heads.is_embedding(survey.places[name])
        for laid in prepared.laid.get(name, ())
        if id(final[laid]) in file_name
    ]
    tied = tied_names(file, used, embeddings, [entry for entry in rest if id(entry) in file_name])
    several = {n for name in result.matched for n in prepared.laid.get(name, ()) if len(prepared.laid[name]) > 1}
    computed = [name for name in several if type(final[name].tensor) is StoredTensor]
    forget_values(flow, [final[name] for name in computed])
    stacked = {name: levels for name, levels in prepared.stacked.items() if name in result.matched}
    left_out = [name for name in unnamed if name not in tied]
    return WayBack(
        layout, flatten, flow.originals, flow.applied, final, frozenset(loaded), kept, tied, stacked, computed, left_out
    )


class _Report:
    """What is said of a load when it is known what it has left out."""

    def __init__(
        self,
        survey: Survey,
        file: Checkpoint,
        layout: str,
        flatten: Mapping[str, Sequence[int]] | None,
        prepared: Prepared,
    ) -> None:
        self.survey, self.file, self.prepared = survey, file, prepared
        self.layout, self.flatten = layout, flatten

    def _dropped(self, missing: Sequence[str]) -> dict[str, tuple[str, str]]:
        return why_missing(self.survey, self.file, self.layout, self.flatten, self.prepared, missing)

    def why_missing(self, missing: Sequence[str]) -> dict[str, tuple[str, str]]:
        """Return what was got for names without an entry that a rename has dropped, and the line to write."""
        line = "rename=[(r'^model[.]head', None)]  # a narrower pattern"
        return {
            name: (f"no entry: {by} of rename has dropped {source} of {self.file.title}", line)
            for name, (source, by) in self._dropped(missing).items()
        }

    def warn(self, result: LoadResult) -> None:
        """Warn of what a user is not to find out later."""
        if not result.matched and self.prepared.entries and self.survey.places:
            _warn_of_nothing(result, self.file)
        _warn_of_untied(self.survey.places, self.file, self.prepared.sources)
        called = printable(self.file.path.name)
        if self.prepared.flow.unused:
            warn(f"{called}: nothing fits {', '.join(map(printable, self.prepared.flow.unused))}, of rename")
        for name, (source, by) in self._dropped(result.missing).items():
            warn(f"{called}: {by} of rename has dropped {printable(source)}, and the model has no {name} now")


def _weak(file: Checkpoint, sources: Mapping[str, tuple[str, ...]]) -> set[str]:
    """Return the names of the model whose values are of weak type in the file."""
    if not file.weak:
        return set()
    return {new for new, old in sources.items() if any(file.aliases.get(name, name) in file.weak for name in old)}


def _values(survey: Survey, entries: Mapping[str, Any], placing: Placing | None, file: Checkpoint) -> dict[str, Any]:
    """Read what the model has a place for; what does not fit there is told by its shape, and not read.

    What goes to several devices is read when it is known which part goes where.
    """
    # hooks may give an entry another name, and an optimizer without a state gets one later
    everything = survey.hooked or is_training_state(survey.model)
    may_grow = everything or any(_graph.is_lazy_node(node) for _, node in survey.nodes)
    out, wanted, unasked = dict(entries), [], []
    for name, value in entries.items():
        if not isinstance(value, StoredTensor):
            continue
        place = survey.places.get(name) or survey.places.get(base_name(name))
        is_misfit = place is not None and not may_fit(place, name, value)
        if not survey.hooked and (is_misfit or _is_for_several(place, name, placing)):
            out[name] = Unread(value)
        elif place is not None or everything:
            wanted.append(name)
        is_read = place is not None or may_grow or is_buffer(file, value.name, value)  # if not now, then later
        if is_read and not _is_asked_for(place, name, value):
            unasked.append(value)
    file.check_unpacked(unasked)
    return out | {name: entries[name].read() for name in wanted}


def _is_asked_for(place: Place | None, name: str, tensor: StoredTensor) -> bool:
    """Whether the model has an array of that very shape: then a tensor of a file is no bomb, however well packed."""
    if place is None or place.name != name or not may_fit(place, name, tensor):
        return False
    return not place.lazy or None not in (place.value.pending.shape or (None,))


def _in_dtypes_of_file(entries: Mapping[str, Any], prepared: Prepared) -> dict[str, Any]:
    """Return entries with those that a layout has computed in float32, of halves, in the dtype of these halves."""
    out = dict(entries)
    for name, value in entries.items():
        if not isinstance(value, (np.ndarray, Unread)) or value.dtype != np.float32:
            continue
        tensors = [prepared.final[n].tensor for n in prepared.laid.get(name, ()) if n in prepared.final]
        kinds = {tensor.dtype for tensor in tensors if isinstance(tensor, StoredTensor)}
        if len(kinds) == 1 and all(kind.itemsize == 2 and jnp.issubdtype(kind, jnp.floating) for kind in kinds):
            out[name] = _as_kind(value, kinds.pop())
    return out


def _as_kind(value: np.ndarray[Any, Any] | Unread, kind: np.dtype[Any]) -> np.ndarray[Any, Any] | Unread:
    """Return an array in another dtype; one that is not read yet when it is."""
    if isinstance(value, np.ndarray):
        return value.astype(kind)
    stored = value.stored
    return Unread(derived(stored, stored.shape, lambda: stored.read().astype(kind), kind))


def _is_for_several(place: Place | None, name: str, placing: Placing | None) -> bool:
    if place is None:  # it is unexpected, or of an optimizer that has no state yet
        return placing is not None
    return place.name == name and (is_spread_place(place) or (placing is not None and is_placed(place)))


def _check_booleans(entries: Mapping[str, Any], file: Checkpoint) -> None:
    """Refuse booleans that are neither 0 nor 1: what is computed from them could be anything."""
    for name, value in entries.items():
        if isinstance(value, np.ndarray):
            check_booleans(file.path, name, value)


def _check_key_kinds(places: Mapping[str, Place], entries: Mapping[str, Any], file: Checkpoint) -> None:
    """Refuse the name of a kind of random keys that is none: anything but the bytes of one that JAX knows."""
    for name, value in entries.items():
        place = places.get(name.removesuffix(f".{IMPL}"))
        if place is None or place.name == name or not is_key(place.value):
            continue
        is_text = isinstance(value, np.ndarray) and value.dtype == np.uint8 and value.ndim == 1
        kind = value.tobytes().decode(errors="replace") if is_text else None
        try:
            jax.eval_shape(lambda kind=kind: jax.random.key(0, impl=kind or "none"))
        except ValueError as error:
            got = repr(kind) if kind is not None else describe(value)
            needed = "the bytes of the name of one of JAX's kinds of random keys, such as threefry2x32"
            raise refuse(file.path, f"a random key of the kind {printable(got)}", needed, tensor=name) from error


_SCALE = r"(?i)scale|zero_?point|absmax|quant_state"


def _warn_of_quantized(places: Mapping[str, Place], entries: Mapping[str, Any], file: Checkpoint) -> None:
    """Warn of quantized weights that go into wider floats, or whose scales the model has no place for."""
    scales = [name for name in entries if name not in places and re.search(_SCALE, name)]
    owners = {name.rpartition(".")[0] for name in scales}
    suspects = [
        name
        for name, value in entries.items()
        if isinstance(value, (np.ndarray, Unread))
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
