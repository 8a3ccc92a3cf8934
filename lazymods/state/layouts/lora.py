"""Low-rank adapters, as PEFT stores them: ``lora_A`` and ``lora_B`` beside the layer, which may be ``base_layer``.

PEFT multiplies by ``lora_alpha / r`` when it is called, Flax by nothing: a load takes the factor from the
``adapter_config.json`` beside the file (:mod:`lazymods.state.adapters`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

from lazymods.state.layouts.axes import Axes, Kernel
from lazymods.state.layouts.file import TorchFile
from lazymods.state.layouts.linear import LINEAR
from lazymods.state.layouts.rule import Field, Simple
from lazymods.state.layouts.site import Array, Site

_BASE = "base_layer."
_MATRIX = Kernel(lambda site: Axes((1, 0)))


class Adapter(Simple):
    """``nnx.LoRA``: its matrices stand beside the layer that it wraps, if any."""

    def inside(self, site: Site, key: Any, child: Any) -> Site:
        """Name what is wrapped as PEFT does."""
        return site.below(child, key, prefix=site.prefix + _BASE) if key == "base_module" else site.below(child, key)


class AdaptedLinear(Simple):
    """``nnx.LoRALinear``: a Linear, whose adapter hangs in it."""

    def inside(self, site: Site, key: Any, child: Any) -> Site:
        """Leave the adapter's attribute out of PyTorch's names."""
        return site.below(child, key, prefix=site.prefix) if key == "lora" else site.below(child, key)

    def read(self, site: Site, file: TorchFile) -> None:
        """Read the layer from where it is."""
        base = dataclasses.replace(site, prefix=site.prefix + _BASE)
        super().read(base if file.leaves(base.prefix) else site, file)

    def write(self, site: Site) -> tuple[dict[str, Array], list[str]]:
        """Write the layer to where it is to be."""
        base = site.prefix + _BASE
        is_wrapped = any(name.startswith(base) for name in site.names or ())
        return super().write(dataclasses.replace(site, prefix=base) if is_wrapped else site)


LORA = Adapter(Field("lora_A.weight", "lora_a", _MATRIX), Field("lora_B.weight", "lora_b", _MATRIX))
LORA_LINEAR = AdaptedLinear(*LINEAR.fields, flattens=True)
