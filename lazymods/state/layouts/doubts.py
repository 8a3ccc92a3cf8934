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
from lazymods.state.layouts.attention import ATTENTION
from lazymods.state.layouts.linear import LINEAR
from lazymods.state.layouts.site import Site
from lazymods.state.layouts.table import rule_for

PER_HEAD = ("query_key_value",)
"""Modules whose queries, keys and values are interleaved head by head: in GPT-NeoX, BLOOM, Falcon, Persimmon."""

_MATRICES = ("in_proj_weight", *(f"{p}.weight" for p in ("q_proj", "k_proj", "v_proj", "out_proj", "query", "out")))


class _Matrix(NamedTuple):
    """A matrix that a module would transpose.

    Attributes:
        site: The module.
        name: The entry, by the model's name before the layout.
        file: The file's name.
        shape: How long its axes are.
        is_changed: Whether a rule of the user's has changed it on its way.
        is_other_way: Whether it lies, or lay before that, as ``(in, out)`` for certain.
    """

    site: Site
    name: str
    file: str
    shape: tuple[int, ...]
    is_changed: bool
    is_other_way: bool

    @property
    def kinds(self) -> set[str]:
        """What is the same for matrices of one kind: the name of their module, and the module that this is in."""
        *above, module, _ = ("", "", *re.sub(r"\d+", "#", self.file).split("."))
        return {f"{module}.", f".{'.'.join(above)}"} - {"."}


def found(sites: Iterable[Site], tensors: Mapping[str, Any], originals: Mapping[str, Any]) -> list[Problem]:
    """Find what is in doubt.

    Args:
        sites: The modules of a model.
        tensors: The file's entries, by the model's names before the layout.
        originals: What the file has for each, before any rule of the user's changed it.
    """
    modules = {(id(s.node), s.prefix): s for s in sites if rule_for(type(s.node)) in (LINEAR, ATTENTION)}.values()
    matrices = [m for site in modules for m in _matrices(site, tensors, originals)]
    return [*_square(matrices), *_per_head(modules, tensors, originals)]


def _matrices(site: Site, tensors: Mapping[str, Any], originals: Mapping[str, Any]) -> Iterator[_Matrix]:
    rule = rule_for(type(site.node))
    for entry in ("weight",) if rule is LINEAR else _MATRICES:
        name = site.torch_name(entry)
        tensor = tensors.get(name)
        shape = tuple(getattr(tensor, "shape", ()))
        if len(shape) != 2:
            continue
        original = originals.get(name, tensor)
        stored = tuple(getattr(original, "shape", ()))
        is_changed = original is not tensor
        if is_changed:
            is_other_way = stored == shape[::-1] != shape
        elif rule is LINEAR:
            kernel = site.shape("kernel")
            is_other_way = kernel is not None and fits(kernel, shape) and not fits(kernel, shape[::-1])
        else:
            is_other_way = entry == "in_proj_weight" and shape[1] == 3 * shape[0]
        yield _Matrix(site, name, getattr(original, "name", name), shape, is_changed, is_other_way)


def _square(matrices: list[_Matrix]) -> Iterator[Problem]:
    beside = [m for m in matrices if m.is_other_way]
    kinds = {kind for m in beside for kind in m.kinds}
    doubtful = [m for m in matrices if m.shape[0] == m.shape[1] and not m.is_changed and m.kinds & kinds]
    if not doubtful:
        return
    forgotten = [*doubtful, *(m for m in beside if not m.is_changed)]
    names = "|".join(dict.fromkeys(re.escape(m.file.rpartition(".")[0].rpartition(".")[2]) for m in forgotten))
    line = rf'rename=[lm.rules.Transpose(r"(^|\.)({names})\.weight$"), ...], if they are stored as (in, out)'
    shown = shown_names([m.file for m in beside]).replace("\n", ", ")
    for m in doubtful:
        got = f"shape {m.shape}, square, which fits either way, beside {shown}"
        needed = "to know how it lies: those are stored as (in, out), as Conv1D of GPT-2; torch.nn.Linear has (out, in)"
        yield Problem(m.site.where(m.name), got, needed, line)
    for m in beside:
        if not m.is_changed:
            got = f"shape {m.shape}, which fits only untransposed"
            yield Problem(m.site.where(m.name), got, "(out, in), as torch.nn.Linear has it", line)


def _per_head(
    modules: Iterable[Site], tensors: Mapping[str, Any], originals: Mapping[str, Any]
) -> Iterator[Problem]:
    for site in modules:
        heads = site.get("num_heads")
        for entry in ("in_proj_weight", "in_proj_bias"):
            name = site.torch_name(entry)
            tensor = tensors.get(name)
            original = originals.get(name)
            if tensor is None or tensor is not original or rule_for(type(site.node)) is not ATTENTION or heads == 1:
                continue
            file = getattr(original, "name", name)
            if not set(file.split(".")) & {*PER_HEAD}:
                continue
            got = f"{describe(tensor)}, {file} of the file, where queries, keys and values alternate head by head"
            needed = f"all queries, then all keys, then all values, as {entry} has them: the shape is the same"
            line = f'rename=[lm.rules.Split(...)] per head, into q_proj, k_proj and v_proj, in place of a name {entry}'
            yield Problem(site.where(name), got, needed, line)
