"""Low-rank adapters, as PEFT stores them: ``lora_A.weight`` and ``lora_B.weight`` beside the layer.

PEFT multiplies by ``lora_alpha / r`` when it is called, Flax by nothing: a load takes the factor from the
``adapter_config.json`` beside the file (:mod:`lazymods.state.adapters`).
"""

from __future__ import annotations

from typing import Any

from lazymods.state.layouts.axes import Axes, Kernel
from lazymods.state.layouts.linear import LINEAR
from lazymods.state.layouts.rule import Field, Simple
from lazymods.state.layouts.site import Site

_MATRIX = Kernel(lambda site: Axes((1, 0)))


class AdaptedLinear(Simple):
    """``nnx.LoRALinear``: a Linear, whose adapter hangs in it."""

    def inside(self, site: Site, key: Any, child: Any) -> Site:
        """Leave the adapter's attribute out of PyTorch's names."""
        return site.below(child, key, prefix=site.prefix) if key == "lora" else site.below(child, key)


LORA = Simple(Field("lora_A.weight", "lora_a", _MATRIX), Field("lora_B.weight", "lora_b", _MATRIX))
LORA_LINEAR = AdaptedLinear(*LINEAR.fields, flattens=True)
