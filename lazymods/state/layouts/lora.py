"""Low-rank adapters, as PEFT stores them: ``lora_A.weight`` and ``lora_B.weight`` beside the layer.

PEFT multiplies by ``lora_alpha / r`` when it is called, Flax by nothing: a load takes the factor from the
``adapter_config.json`` beside the file (:mod:`lazymods.state.adapters`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from flax import nnx

from lazymods.state.layouts.axes import Axes, Kernel
from lazymods.state.layouts.linear import LINEAR
from lazymods.state.layouts.rule import Field, Simple
from lazymods.state.layouts.site import Site

_FLAX = re.compile(r"(.*\.)?lora_([ab])")
_PEFT = re.compile(r"(.*\.)?lora_[AB](\.[^.]+)?\.weight")
_A, _B = (Kernel(lambda site: Axes((1, 0)), entry=entry) for entry in ("lora_a", "lora_b"))


class AdaptedLinear(Simple):
    """``nnx.LoRALinear``: a Linear, whose adapter hangs in it."""

    def inside(self, site: Site, key: Any, child: Any) -> Site:
        """Leave the adapter's attribute out of PyTorch's names."""
        return site.below(child, key, prefix=site.prefix) if key == "lora" else site.below(child, key)


LORA = Simple(Field("lora_A.weight", "lora_a", _A), Field("lora_B.weight", "lora_b", _B))
LORA_LINEAR = AdaptedLinear(*LINEAR.fields, flattens=True)


def name_as_laid(name: str, sources: Iterable[str], node_of: Any) -> str:
    """Return PEFT's name for a matrix of PEFT's that a rename has given Flax's: it lies as PyTorch has it.

    Args:
        name: The name that the rename has given.
        sources: The names in the file.
        node_of: Returns the module of a path, or None.
    """
    match = _FLAX.fullmatch(name)
    if match is None or not all(_PEFT.fullmatch(source) for source in sources):
        return name
    prefix = match[1] or ""
    outer = prefix.removesuffix("lora.")
    if outer != prefix and isinstance(node_of(outer[:-1]), nnx.LoRALinear):
        prefix = outer
    return f"{prefix}lora_{match[2].upper()}.weight"
