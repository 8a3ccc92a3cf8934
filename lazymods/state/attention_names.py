"""What to write where a file calls the projections of an attention otherwise than PyTorch's module and the model do.

``to_q``, ``wq``, ``q_lin``, ``self.query`` are a model's ``query``; ``qkv`` is one matrix for all three, one below the
other, as PyTorch's ``in_proj_weight`` is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from flax import nnx

from lazymods._graph import dotted
from lazymods.state.load_plan import LoadPlan

_AROUND = r"(?:.*[.])?(?:to_|[wW]_?|lin_|linear_|proj_|fc_)?({})(?:s|_lin|_linear|_proj|_projection|_layer)?"
_KINDS = {
    "query": re.compile(_AROUND.format("q|query|querie")),
    "key": re.compile(_AROUND.format("k|key")),
    "value": re.compile(_AROUND.format("v|value")),
    "out": re.compile(_AROUND.format("o|out|output") + r"(?:[.](?:0|dense|linear))?|proj|c_proj|dense|fc"),
}
_FUSED = ("qkv", "to_qkv", "Wqkv", "wqkv", "qkv_proj", "in_proj", "c_attn", "query_key_value")


def lines(plan: LoadPlan, lacking: Sequence[str], unexpected: Sequence[str]) -> dict[str, str]:
    """Return the line to write for the entries of attentions, by the model's names and the file's.

    Args:
        plan: What the load would do.
        lacking: Names of the model without an entry.
        unexpected: Names of entries without a parameter.
    """
    out: dict[str, str] = {}
    for path, node in plan.survey.named_nodes if lacking and unexpected else ():
        if not isinstance(node, nnx.MultiHeadAttention):
            continue
        prefix = f"{dotted(path)}.".lstrip(".")
        parts = tuple(f"{prefix}{kind}." for kind in _KINDS)
        misses = [name for name in lacking if name.startswith(parts)]
        tails = ((name, f".{name}".partition(f".{prefix}")[2] if prefix else name) for name in unexpected)
        given = {tail: name for name, tail in tails if tail}  # there may be a prefix that the model has not
        found = dict(_renames(prefix, given, plan.given, node.num_heads)) if misses else {}
        if found:
            line = f"rename=[{', '.join(dict.fromkeys(found.values()))}]"
            out |= dict.fromkeys([*misses, *found], line)
    return out


def _renames(
    prefix: str, given: Mapping[str, str], tensors: Mapping[str, Any], heads: int
) -> Iterator[tuple[str, str]]:
    """Give the names of entries that are known, each with its pair of a rename."""
    *_, last = ("", *prefix[:-1].split("."))
    before, after, group = (rf"\b{re.escape(last)}[.]", f"{last}.", 1) if last else ("^", "", 1)
    if last.isdecimal():
        before, after, group = r"\b(\d+)[.]", r"\1.", 2
    for rest, name in given.items():
        module, _, leaf = rest.rpartition(".")
        shape = np.shape(tensors.get(name, 0))
        is_thirds = len(shape) == 1 or (len(shape) == 2 and shape[0] == 3 * shape[1])
        kind = next((kind for kind, words in _KINDS.items() if words.fullmatch(module)), None)
        if module == "query_key_value" and is_thirds:  # head by head, as in GPT-NeoX and BLOOM
            into = ", ".join(f'r"{after}{part}_proj"' for part in "qkv")
            yield name, f'lm.rules.Split(r"{before}{module}", into=({into}), groups={heads})'
        elif module.rpartition(".")[2] in _FUSED and leaf in ("weight", "bias") and is_thirds:
            yield name, rf'(r"{before}{_escaped(module)}[.](weight|bias)$", r"{after}in_proj_\{group}")'
        elif not module and leaf in ("q_bias", "k_bias", "v_bias"):
            yield name, f'(r"{before}{leaf}$", r"{after}{leaf[0]}_proj.bias")'
        elif kind is not None:
            yield name, f'(r"{before}{_escaped(module)}[.]", r"{after}{kind}.")'


def _escaped(module: str) -> str:
    return "[.]".join(map(re.escape, module.split(".")))
