"""Parameters that a file lacks for a known reason, so that what is left to chance is told with the line to write.

Two are frequent: the statistics of a BatchNorm that PyTorch made with ``track_running_stats=False``, and the output
layer of a language model whose file has it only once, as the embedding that it was tied to.
"""

from __future__ import annotations

import collections
import functools
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from flax import nnx

from lazymods import _graph
from lazymods._graph import dotted
from lazymods._layer.placeholder import fits
from lazymods.state.entries import Place, Survey, leaf_of
from lazymods.state.values import unwrapped

_AFFINE = (nnx.LayerNorm, nnx.RMSNorm, nnx.GroupNorm, nnx.InstanceNorm)  # of which a file may have nothing
_NUMBER = re.compile(r"(?<![^.])\d+(?=\.)")  # a part of a name
_RECURRENT = re.compile(r"(?<![^.])((?:weight|bias)_(?:ih|hh|hr))_l(\d+)((?:_reverse)?)$")  # of a layer of several
Shapes = Mapping[str, tuple[int, ...]]
_OTHER_TABLES = re.compile(r"(^|_)(pos|wpe|rel|type|token_type|seg|lang)")  # their rows are positions, or kinds


def cause_of(
    places: Mapping[str, Place], name: str, loaded: Shapes, sources: Mapping[str, tuple[str, ...]]
) -> tuple[str, str] | None:
    """Say why a parameter may be missing, and what to write.

    Args:
        places: The model's entries.
        name: The one that is missing.
        loaded: The shapes of what is not.
        sources: The names of that in the file.

    Returns:
        What is the case, and the line; None if nothing is known.
    """
    place = places.get(name)
    is_statistic = place is not None and isinstance(place.holder, nnx.BatchNorm) and place.key in ("mean", "var")
    prefix = name[: name.rfind(".") + 1]
    found = {key for key in ("mean", "var", "scale", "bias") if prefix + key in loaded}
    if is_statistic and found and not found & {"mean", "var"}:  # the layer is in the file, under its name
        got = "no running statistics in the file: BatchNorm of PyTorch without track_running_stats has none"
        return got, "strict=False  # and use_running_average=False: such a layer always normalizes by its batch"
    embedding = tied_to(places, name, loaded)
    if embedding is not None:
        got = f"no output layer in the file, whose embedding ({embedding}) fits it: they are tied there"
        module, head = embedding.rpartition(".")[0], name.rpartition(".")[0]
        rules = _copy(sources, embedding, head)
        return got, f"rename=[{rules}]  # for both; or {module}.attend(x) in its place"
    return None


def tied_to(places: Mapping[str, Place], name: str, loaded: Shapes) -> str | None:
    """Return the only embedding whose transpose the kernel of a missing output layer can be; None if there is none.

    Tables of positions and of kinds of tokens, as their names say, are none: their rows are no words.
    """
    place = places.get(name)
    if place is None or place.key != "kernel" or not isinstance(place.holder, nnx.Linear):
        return None
    known = known_shape(place)
    found: dict[Any, str] = {}
    for other in places.values():
        shape = loaded.get(other.name)
        if shape is None or not isinstance(other.holder, nnx.Embed) or _OTHER_TABLES.search(_own_name(other.name)):
            continue
        if known is not None and fits(known, shape[::-1]):
            found.setdefault(other.identity, other.name)
    return next(iter(found.values())) if len(found) == 1 else None


def _copy(sources: Mapping[str, tuple[str, ...]], embedding: str, head: str) -> str:
    """Return the rules by which an output layer gets the numbers of an embedding as well."""
    module, (source, *_) = embedding.rpartition(".")[0], sources.get(embedding) or (embedding,)
    stem, _, leaf = source.rpartition(".")
    pattern = module if f".{stem}".endswith(f".{module}") else stem
    if leaf == "embedding":  # as Flax lies
        return rf'lm.rules.Copy(r"{pattern}[.]{leaf}$", into="{head}.kernel"), lm.rules.Transpose(r"{head}[.]kernel$")'
    return rf'lm.rules.Copy(r"{pattern}[.]{leaf}$", into="{head}.{leaf}")'


class Shared(NamedTuple):
    """One table of a file that may be several of a model, by names.

    Attributes:
        lines: The line to write for the table.
        why: For what is missing, what is the case, and the line.
    """

    lines: Mapping[str, str]
    why: Mapping[str, tuple[str, str]]


def shared(
    places: Mapping[str, Place],
    missing: Sequence[str],
    loaded: Shapes,
    unexpected: Mapping[str, Any],
    sources: Mapping[str, tuple[str, ...]],
) -> Shared:
    """Find the one table of a file that fits embeddings which are missing, and the output layer with them.

    T5 and BART have one for the encoder, the decoder and the head, which their files have once, as ``shared``.

    Args:
        places: The model's entries.
        missing: Those without an entry.
        loaded: The shapes of the others.
        unexpected: What the file has beside, by name.
        sources: The file's names of what is loaded.
    """
    named = {n: tuple(getattr(v, "shape", ())) for n, v in unexpected.items() if n.endswith(".weight")}
    tables = {n: shape for n, shape in named.items() if len(shape) == 2}
    tables |= {n: s for n, s in loaded.items() if n in places and isinstance(places[n].holder, nnx.Embed)}
    lacking = [places[n] for n in missing if n in places]  # a hook may add others
    wanted = {known_shape(place) for place in lacking if _is_table(place)}
    found = [n for n, s in tables.items() if not _is_other(n) and any(fits(known, s) for known in wanted)]
    found = [n for n in found if _own_name(n) == "shared"] or found
    if len(found) != 1:
        return Shared({}, {})
    [table] = found
    names = sorted({p.identity: p.name for p in reversed(lacking) if _may_be(p, tables[table])}.values())
    (source, *_) = sources.get(table) or (table,)
    stem, _, leaf = source.rpartition(".")
    if leaf != "weight" or (table in unexpected and len(names) < 2):
        return Shared({}, {})
    pattern = rf"\b{re.escape(table.rpartition('.')[0] if table in unexpected else stem)}[.]weight$"
    rules = [f'lm.rules.Copy(r"{pattern}", into="{name.rpartition(".")[0]}.weight")' for name in names]
    if table in unexpected:
        rules[-1] = f'(r"{pattern}", "{names[-1].rpartition(".")[0]}.weight")'
    line = f"rename=[{', '.join(rules)}]"
    got = f"no entry in the file, whose {source} fits it: T5 and BART have one table for all"
    return Shared({table: line}, dict.fromkeys(names, (got, line)))


def _may_be(place: Place, shape: tuple[int, ...]) -> bool:
    """Whether a table may be an embedding that is missing, or an output layer."""
    if _is_table(place):
        return fits(known_shape(place), shape)
    return place.key == "kernel" and isinstance(place.holder, nnx.Linear) and fits(known_shape(place), shape[::-1])


def _is_table(place: Place) -> bool:
    return place.key == "embedding" and isinstance(place.holder, nnx.Embed) and not _is_other(place.name)


def _is_other(name: str) -> bool:
    return _OTHER_TABLES.search(_own_name(name)) is not None


def _own_name(name: str) -> str:
    """Return the name of the module that an entry is of, in the module that this hangs in."""
    return name.rpartition(".")[0].rpartition(".")[2]


def known_shape(place: Place) -> tuple[int | None, ...] | None:
    """Return what is known of the shape of what is at a place now."""
    if _graph.is_placeholder(place.owner):
        return place.owner.pending.shape
    return tuple(np.shape(value_now(place)))


def value_now(place: Place) -> Any:
    """Return what is at a place now, which may have been a placeholder when the place was found."""
    return leaf_of(unwrapped(place.owner), place.leaf)


class Options:
    """What to write where a layer has a bias or a scale and the file has not, or the other way: ``use_bias``.

    Args:
        survey: The model.
        loaded: Names of what is loaded.
        unexpected: Names of what the file has beside.
    """

    def __init__(self, survey: Survey, loaded: Collection[str], unexpected: Collection[str]) -> None:
        self.survey, self.loaded = survey, loaded
        self.named_otherwise = {name.rpartition(".")[0] for name in unexpected}  # what is missing may be among these
        self.filled = {name.rpartition(".")[0] for name in loaded}

    @functools.cached_property
    def nodes(self) -> dict[str, Any]:
        """The modules, by each of their names."""
        return {dotted(path): node for path, node in self.survey.named_nodes}

    def without(self, name: str) -> str | None:
        """Return the line for a parameter that is missing; None if the file has nothing of its layer, but for norms."""
        module = name.rpartition(".")[0]
        owner = self._owner(name, True)
        if owner is None or module in self.named_otherwise:
            return None
        if module not in self.filled:
            may_be_plain = isinstance(self.nodes[module], _AFFINE) and self.filled and not self.named_otherwise
            line = f"use_{name.rpartition('.')[2]}=False  # of {self._called(owner)}, if PyTorch's is not affine"
            return line if may_be_plain else None
        others = [n for n in self.loaded if n.startswith(f"{owner}.".lstrip(".")) and n.endswith(".bias")]
        if owner != module and others:
            return f'lm.load(model, source, missing=r"{re.escape(name)}$")  # it stays as it is: zeros, if it is new'
        return f"use_{name.rpartition('.')[2]}=False  # of {self._called(owner)}"

    def with_it(self, name: str) -> str | None:
        """Return the line for an entry that a layer was made without."""
        owner = self._owner(name, False)
        return None if owner is None else f"use_{name.rpartition('.')[2]}=True  # of {self._called(owner)}"

    def _owner(self, name: str, has: bool) -> str | None:
        """Return the module whose option says that a layer has a parameter, or none; of attentions the whole."""
        module, _, leaf = name.rpartition(".")
        if getattr(self.nodes.get(module), "__dict__", {}).get(f"use_{leaf}") is not has:
            return None
        outer = module.rpartition(".")[0]
        return outer if module and isinstance(self.nodes.get(outer), nnx.MultiHeadAttention) else module

    def _called(self, module: str) -> str:
        return module or type(self.nodes[module]).__name__


class Lengths:
    """What to write where a list of layers is longer in the file than in the model, or shorter.

    Args:
        in_file: The names of the file.
        in_model: Those of the model.
        sequential: The names of the model's ``nnx.Sequential``, whose modules PyTorch's names have without ``layers``.
    """

    def __init__(self, in_file: Collection[str], in_model: Collection[str], sequential: Collection[str] = ()) -> None:
        self._names = in_file, in_model
        self._sequential = sorted((f"{name}.".lstrip(".") for name in sequential), key=len, reverse=True)

    @functools.cached_property
    def _lengths(self) -> list[dict[str, int]]:
        """How long the lists of each side are, by what stands before their numbers; only those that lack no number."""
        found: list[dict[str, set[int]]] = [{}, {}]
        for numbers, names in zip(found, self._names, strict=True):
            for name in map(self._as_in_torch, names):
                for number in _NUMBER.finditer(name):
                    numbers.setdefault(name[: number.start()], set()).add(int(number[0]))
        return [{k: len(n) for k, n in numbers.items() if n == set(range(len(n)))} for numbers in found]

    def _as_in_torch(self, name: str) -> str:
        name = _RECURRENT.sub(r"\2.\1\3", name)
        for prefix in self._sequential if "layers." in name else ():
            if name.startswith(f"{prefix}layers."):
                name = prefix + name.removeprefix(f"{prefix}layers.")
        return name

    def cause(self, names: Sequence[str]) -> tuple[str, str] | None:
        """Say once that most of some entries are of one such list, and what to write."""
        found = collections.Counter(filter(None, map(self._list_of, names)))
        for of_most, count in found.most_common(1):
            if 2 * count > len(names):
                where, theirs, ours = of_most
                return f"{theirs} layers in {where!r} of the file, {ours} in the model's", self._line(*of_most)
        return None

    def line_for(self, name: str) -> str | None:
        """Return the line for an entry of such a list; None if it is of none."""
        found = self._list_of(name)
        return None if found is None else self._line(*found)

    @staticmethod
    def _line(where: str, theirs: int, ours: int) -> str:
        line = f"n_layers = {theirs}  # of {where}: the file has {theirs}, the model {ours}"
        one = f"; or nnx.List([layer] * {ours}), if all are one, as in ALBERT"
        return line + one if theirs == 1 else line

    def _list_of(self, name: str) -> tuple[str, int, int] | None:
        """Return the outermost list of another length that an entry is of: its name, its lengths in file and model."""
        name = self._as_in_torch(name)
        for number in _NUMBER.finditer(name):
            before = name[: number.start()]
            theirs, ours = (lengths.get(before, 0) for lengths in self._lengths)
            if 0 < min(theirs, ours) <= int(number[0]):
                return before.rstrip(".") or "layers", theirs, ours
        return None
