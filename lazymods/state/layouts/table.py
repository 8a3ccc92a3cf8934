"""The table of module types, and the walk that finds them in a model."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from flax import nnx

from lazymods import _graph
from lazymods.state.layouts import attention, linear, lora, normalization, recurrent, wrappers
from lazymods.state.layouts.rule import Rule
from lazymods.state.layouts.site import Site

RULES: dict[type, Rule] = {
    nnx.Linear: linear.LINEAR,
    nnx.LoRALinear: lora.LORA_LINEAR,
    nnx.LoRA: lora.LORA,
    nnx.LinearGeneral: linear.LINEAR_GENERAL,
    nnx.Einsum: linear.EINSUM,
    nnx.Conv: linear.CONV,
    nnx.ConvTranspose: linear.CONV_TRANSPOSE,
    nnx.Embed: linear.EMBED,
    nnx.PReLU: linear.PRELU,
    nnx.BatchNorm: normalization.BATCH_NORM,
    nnx.LayerNorm: normalization.LAYER_NORM,
    nnx.RMSNorm: normalization.RMS_NORM,
    nnx.GroupNorm: normalization.GROUP_NORM,
    nnx.InstanceNorm: normalization.INSTANCE_NORM,
    nnx.MultiHeadAttention: attention.ATTENTION,
    **recurrent.CELLS,
    nnx.RNN: recurrent.RNN,
    nnx.Bidirectional: recurrent.BIDIRECTIONAL,
    nnx.WeightNorm: wrappers.WEIGHT_NORM,
    nnx.SpectralNorm: wrappers.SPECTRAL_NORM,
}

_UNKNOWN = Rule()


@functools.lru_cache(maxsize=1024)
def rule_for(cls: type) -> Rule:
    """Return the rule of a class: its own, or that of its nearest base; one that reads nothing for other types."""
    return next((RULES[base] for base in cls.__mro__ if base in RULES), _UNKNOWN)


def sites(model: Any) -> Iterator[Site]:
    """Every module of a model, parents first, one that is shared under each of its names."""
    yield from _sites(Site(model), ())


def _sites(site: Site, above: tuple[int, ...]) -> Iterator[Site]:
    node = site.node
    if id(node) in above:  # a cycle
        return
    is_module = isinstance(node, nnx.Pytree)
    if is_module:
        yield site
    rule = rule_for(type(node))
    for key, child in _graph.children(node):
        if is_module and key in rule.owns:
            continue
        if isinstance(child, nnx.Pytree) or (isinstance(child, (Mapping, list, tuple)) and child):
            yield from _sites(rule.inside(site, key, child), (*above, id(node)))


def torch_names(found: Iterable[Site], names: Iterable[str]) -> dict[str, str]:
    """Return PyTorch's names of entries that no rule has a name for: the model's, without what wrappers add."""
    moved = [(site.name(""), site.prefix) for site in found if site.name("") != site.prefix]
    out = {}
    for name in names:
        path, prefix = max((m for m in moved if name.startswith(m[0])), key=lambda m: len(m[0]), default=("", ""))
        out[name] = prefix + name[len(path) :]
    return out
