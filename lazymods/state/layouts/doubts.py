"""What a PyTorch file leaves in doubt although all of its shapes fit, found by what is beside it.

A square matrix lies either way. If others of its kind fit only as they are stored, ``(in, out)``, or a rule of the
user's has transposed them, as ``Conv1D`` of GPT-2 needs, it is one that was forgotten. Queries, keys and values in one
matrix are thirds of it in PyTorch; some families interleave them head by head, and write another name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from lazymods._error_lists import shown_names
from lazymods._errors import Problem, describe
from lazymods._layer.placeholder import fits
from lazymods.state.files.stored import StoredTensor
from lazymods.state.flow import StackedTensor
from lazymods.state.layouts.attention import ATTENTION
from lazymods.state.layouts.linear import LINEAR
from lazymods.state.layouts.site import Site
from lazymods.state.layouts.table import rule_for


class _Fused(NamedTuple):
    """Queries, keys and values in one matrix in another order than PyTorch's thirds.

    Attributes:
        module: How the module is called that has them so.
        beside: A module that the file has as well, where others are called so too; "" if there are none.
        parts: What they are split into, in their order.
        groups: How many groups have all three; None: as many as there are heads.
        what: What is said of them.
    """

    module: str
    beside: str
    parts: tuple[str, str, str]
    groups: int | None
    what: str


_FUSED = (  # GPT-NeoX, BLOOM, Falcon and Persimmon; DeBERTa; CodeGen
    _Fused("query_key_value", "", ("q_proj", "k_proj", "v_proj"), None, "keys and values alternate head by head"),
    _Fused("in_proj", "q_bias", ("q_proj", "k_proj", "v_proj"), None, "keys and values alternate head by head"),
    _Fused("qkv_proj", "fc_in", ("q_proj", "v_proj", "k_proj"), 4, "values and keys stand in four groups (CodeGen)"),
)

_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "out_proj", "o_proj", "query", "out")
_MATRICES = ("in_proj_weight", *(f"{name}.weight" for name in _PROJECTIONS))


class Origin(NamedTuple):
    """The first of what an entry was made of.

    Attributes:
        tensor: What the file has.
        turns: How often its two axes were exchanged; None: no rule says how they lie.
    """

    tensor: Any
    turns: int | None = None


class _Matrix(NamedTuple):
    """A matrix that a module would transpose.

    Attributes:
        site: The module.
        name: The entry, by the model's name before the layout.
        file: The file's name.
        shape: How long its axes are.
        is_settled: Whether a rule of the user's says how it lies.
        is_other_way: Whether the file has it as ``(in, out)`` for certain.
    """

    site: Site
    name: str
    file: str
    shape: tuple[int, ...]
    is_settled: bool
    is_other_way: bool

    @property
    def kinds(self) -> set[str]:
        """What is the same for matrices of one kind: the name of their module, and the module that this is in."""
        *above, module, _ = ("", "", *re.sub(r"\d+", "#", self.file).split("."))
        return {f"{module}.", f".{'.'.join(above)}"} - {"."}


def found(sites: Iterable[Site], tensors: Mapping[str, Any], origins: Mapping[str, Origin]) -> list[Problem]:
    """Find what is in doubt.

    Args:
        sites: The modules of a model.
        tensors: The file's entries, by the model's names before the layout.
        origins: Where each of them came from.
    """
    modules = {(id(s.node), s.prefix): s for s in sites if rule_for(type(s.node)) in (LINEAR, ATTENTION)}.values()
    matrices = [m for site in modules for m in _matrices(site, tensors, origins)]
    return [*_square(matrices), *_per_head(modules, tensors, origins)]


def _matrices(site: Site, tensors: Mapping[str, Any], origins: Mapping[str, Origin]) -> Iterator[_Matrix]:
    rule = rule_for(type(site.node))
    for entry in ("weight",) if rule is LINEAR else _MATRICES:
        name = site.torch_name(entry)
        tensor = tensors.get(name)
        kernel = site.shape("kernel") if rule is LINEAR else None
        while isinstance(tensor, StackedTensor):  # of layers that are alike
            axis = tensor.axis % len(tensor.shape)
            kernel = None if kernel is None else kernel[:axis] + kernel[axis + 1 :]
            tensor = tensor.parts[0]
        shape = tensor.shape if isinstance(tensor, StoredTensor) else ()
        if len(shape) != 2:
            continue
        stored, turns = origins.get(name, Origin(tensor))
        rows, columns = stored.shape if len(getattr(stored, "shape", ())) == 2 else shape
        if turns is not None:
            is_other_way = turns % 2 == 1
        elif rows == shape[0] and columns > shape[1]:  # the columns were cut: it is what comes out that is cut
            is_other_way = True
        elif kernel is not None:
            is_other_way = fits(kernel, shape) and not fits(kernel, shape[::-1])
        else:
            is_other_way = entry == "in_proj_weight" and shape[1] == 3 * shape[0]
        yield _Matrix(site, name, getattr(stored, "name", name), shape, turns is not None, is_other_way)


def _square(matrices: list[_Matrix]) -> Iterator[Problem]:
    beside = [m for m in matrices if m.is_other_way]
    kinds = {kind for m in beside for kind in m.kinds}
    doubtful = [m for m in matrices if m.shape[0] == m.shape[1] and not m.is_settled and m.kinds & kinds]
    if not doubtful:
        return
    forgotten = [*doubtful, *(m for m in beside if not m.is_settled)]
    settled = [m.file for m in matrices if m.is_settled]
    names = "|".join(dict.fromkeys(_pattern(m.file, settled) for m in forgotten))
    rule = rf'lm.rules.Transpose(r"(^|\.)({names})\.weight$"'
    line = f"rename=[{rule}), ...]  # or [{rule}, axes=(0, 1)), ...], for what is as in torch.nn.Linear"
    shown = shown_names([m.file for m in beside]).replace("\n", ", ")
    for m in doubtful:
        got = f"shape {m.shape}, square, which fits either way, beside {shown}"
        needed = "to know how it lies: those are stored as (in, out), as Conv1D of GPT-2; torch.nn.Linear has (out, in)"
        yield Problem(m.site.where(m.name), got, needed, line)
    for m in beside:
        if not m.is_settled and m not in doubtful:
            got = f"shape {m.shape}, which fits only untransposed"
            yield Problem(m.site.where(m.name), got, "(out, in), as torch.nn.Linear has it", line)


def _pattern(name: str, others: Iterable[str]) -> str:
    """Return a regular expression of the end of a module's name, so long as no other name ends with it."""
    parts = re.sub(r"(?<![^.])\d+(?![^.])", "\0", name).split(".")[:-1]
    whole = [re.sub(r"(?<![^.])\d+(?![^.])", "\0", other).split(".")[:-1] for other in others]
    ends = (parts[-n:] for n in range(1, len(parts) + 1))
    end = next((end for end in ends if not any(other[-len(end) :] == end for other in whole)), parts)
    return r"\.".join(r"\d+" if part == "\0" else re.escape(part) for part in end)


def _per_head(
    modules: Iterable[Site], tensors: Mapping[str, Any], origins: Mapping[str, Origin]
) -> Iterator[Problem]:
    files = {part for o in origins.values() for part in str(getattr(o.tensor, "name", "")).split(".")}
    for site in modules:
        heads = site.get("num_heads")
        for entry in ("in_proj_weight", "in_proj_bias"):
            name = site.torch_name(entry)
            tensor = tensors.get(name)
            stored = origins[name].tensor if name in origins else None
            if tensor is not stored or rule_for(type(site.node)) is not ATTENTION or heads == 1:
                continue
            if not isinstance(stored, StoredTensor):
                continue
            file = stored.name
            own = next((f for f in _FUSED if f.module in file.split(".") and (f.beside or f.module) in files), None)
            if own is None:
                continue
            got = f"{describe(tensor)}, {file} of the file, where queries, {own.what}"
            needed = f"all queries, then all keys, then all values, as {entry} has them: the shape is the same"
            into = ", ".join(f'"{part}"' for part in own.parts)
            split = f'lm.rules.Split("{own.module}", into=({into}), groups={own.groups or heads})'
            yield Problem(site.where(name), got, needed, f"rename=[{split}, ...]  # in place of a rename to {entry}")
