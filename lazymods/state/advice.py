"""What to write for entries that are missing, and for those that the model has no parameter for, in a strict load."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from flax import nnx

from lazymods._error_lists import cause_of
from lazymods._errors import Problem, describe
from lazymods._graph import dotted
from lazymods.state import attention_names, missing, near_names, tied_heads
from lazymods.state.load_plan import LoadPlan

TORCH_LINE = 'lm.load(model, source, layout="torch")  # if PyTorch wrote it; source: the file, or the state dict'
TORCH_LEAVES = ("weight", "num_batches_tracked", "running_mean", "running_var", "in_proj_weight", "weight_ih_l0")
_MOST = 10_000  # names that are compared with each other
_PARAMETERS = ("weight", "bias", "scale", "gamma", "beta")  # also what is ignored may be what is missing


def lengths_of(plan: LoadPlan) -> missing.Lengths:
    """Return what knows how long lists are in the file and in the model."""
    sequential = [dotted(path) for path, node in plan.survey.named_nodes if isinstance(node, nnx.Sequential)]
    return missing.Lengths(plan.given, plan.places, sequential)


def problems(
    plan: LoadPlan,
    lacking: Sequence[str],
    unexpected: Sequence[str],
    lengths: missing.Lengths,
    *,
    file: str,
    sources: Mapping[str, tuple[str, ...]],
    known: Mapping[str, tuple[str, str]],
    is_flax: bool,
    may_ignore: bool,
) -> Iterator[Problem]:
    """Give a problem for each entry that is missing, or that the model has no parameter for.

    Args:
        plan: What the load would do.
        lacking: Names of the model without an entry, which may not be missing.
        unexpected: Names of entries without a parameter.
        lengths: Of the lists of both.
        file: What messages call the file.
        sources: The names in the file.
        known: For names without an entry, what was got instead and the line to write, where it is known.
        is_flax: Whether the entries are taken for ones of Flax's names and layouts.
        may_ignore: Whether the load takes ``ignore``.
    """
    line = "lm.load_state_dict(model, lm.state_dict(other))  # or a checkpoint, of a model like this one"
    usual = (f"no entry in {file}", line)
    shapes = {n: tuple(np.shape(w.value)) for n, w in plan.writes.items()} if lacking else {}
    ignored = [name for name in plan.unexpected if name.endswith(_PARAMETERS)]
    options = missing.Options(plan.survey, shapes, [*unexpected, *ignored])
    shared = missing.shared(plan.places, lacking, shapes, {n: plan.given.get(n) for n in unexpected}, sources)
    are_compared = not is_flax and len(lacking) + len(unexpected) <= _MOST
    attentions = attention_names.lines(plan, lacking, unexpected) if are_compared else {}
    near = near_names.lines(lacking, unexpected, sources) if are_compared else {}
    ignoring = _Ignoring(plan.places)
    embeddings = {n: w.value for n, w in plan.writes.items() if tied_heads.is_embedding(w.place)}
    for name in lacking:
        why = known.get(name) or shared.why.get(name) or missing.cause_of(plan.places, name, shapes, sources)
        got, line = why or usual
        if line is usual[1]:
            line = lengths.line_for(name) or attentions.get(name) or near.get(name) or options.without(name) or line
        yield Problem(name, got, "an entry for each parameter of the model", line)
    for name in unexpected:
        got = f"{describe(plan.given[name])}, an entry" if name in plan.given else "an entry"
        line = plan.sizes_line(name) or options.with_it(name) or shared.lines.get(name) or attentions.get(name)
        line = line or near.get(name) or _head_line(plan, name, embeddings) or _mask_line(plan, name)
        line = line or lengths.line_for(name)
        if line is None and is_flax and name.rpartition(".")[2] in TORCH_LEAVES:
            line = TORCH_LINE
        elif line is None:
            line = f"{ignoring.line(name) if may_ignore else 'strict=False'}  # leaves it out"
        yield Problem(name, f"{got} that the model has no parameter for", "only entries of the model", line)


def cause(
    lacking: Sequence[str], unexpected: Sequence[str], lengths: missing.Lengths, *, is_flax: bool
) -> tuple[str, str] | None:
    """Say what is behind most of what is missing and unexpected, and what to write, if it is one thing."""
    of_torch = [name for name in unexpected if name.rpartition(".")[2] in TORCH_LEAVES]
    if is_flax and lacking and 2 * len(of_torch) >= len(unexpected) > 0:
        return f"PyTorch's names, such as {of_torch[0]}", TORCH_LINE
    return cause_of(lacking, unexpected) or lengths.cause([*lacking, *unexpected])


def _head_line(plan: LoadPlan, name: str, embeddings: Mapping[str, Any]) -> str | None:
    """Say what to write for an entry that may be an output layer, where the model has the embedding for one."""
    if not name.endswith((".weight", ".kernel")):
        return None
    return f"{tied_heads.LINE}  # for it" if tied_heads.untied(plan.given.get(name), embeddings) else None


def _mask_line(plan: LoadPlan, name: str) -> str | None:
    """Say what to write for a mask of the shape of the weight beside it, as masked convolutions have one."""
    module, _, leaf = name.rpartition(".")
    write = plan.writes.get(f"{module}.kernel".lstrip("."))
    shape = np.shape(plan.given.get(name, 0))
    if leaf != "mask" or write is None or len(shape) < 2 or sorted(shape) != sorted(np.shape(write.value)):
        return None
    weights = '{k: v * o.get(k[:-6] + "mask", 1) for k, v in o.items() if k[-5:] != ".mask"}'
    return f"source = {weights}  # of o = lm.open(path): the weight that PyTorch computes with"


class _Ignoring:
    """The lines that leave entries out: as few as name nothing that the model has.

    Args:
        known: The model's names.
    """

    def __init__(self, known: Iterable[str]) -> None:
        kinds = {re.sub(r"(?<![^.])\d+(?![^.])", "0", name) for name in known}
        self._known = {kind[:at] for kind in kinds for at, sign in enumerate(kind) if sign == "."}

    def line(self, name: str) -> str:
        """Return the line for a name: for all of the outermost module that the model has not."""
        parts = ["0" if part.isdecimal() else part for part in name.split(".")]
        has = (n for n in range(1, len(parts)) if ".".join(parts[:n]) not in self._known)
        length = next(has, len(parts))
        pattern = "[.]".join(r"\d+" if part.isdecimal() else re.escape(part) for part in name.split(".")[:length])
        return f'ignore=r"^{pattern}{"[.]" if length < len(parts) else "$"}"'
