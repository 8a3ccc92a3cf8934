"""``nnx.WeightNorm`` and ``nnx.SpectralNorm``: PyTorch has what they wrap under the wrapper's own name."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from lazymods.state.layouts.file import TorchFile
from lazymods.state.layouts.rule import Rule
from lazymods.state.layouts.site import Array, Refusal, Site


class WeightNorm(Rule):
    """Its scales are read and written with the kernels that they belong to."""

    def inside(self, site: Site, key: Any, child: Any) -> Site:
        """Leave the wrapper's attribute out of PyTorch's names."""
        if key != "layer_instance":
            return site.below(child, key)
        return dataclasses.replace(site.below(child, key, prefix=site.prefix), normed_by=site)

    def refuse_left(self, site: Site, left: Iterable[str]) -> Refusal | None:
        """Refuse scales of what PyTorch stores in other pieces."""
        prefix = site.name("scales.")
        names = [name.removeprefix(prefix) for name in left if name.startswith(prefix)]
        return Refusal(f"scales of {', '.join(names)}", *_ONE_LAYER) if names else None


_ONE_LAYER = (
    "weight norm of Linear, Conv and ConvTranspose only: PyTorch has other entries for the rest",
    "nnx.WeightNorm(layer)  # around each such layer",
)
_NOT_THE_SAME = (
    "the normalized weight: PyTorch divides by the singular value of two stored vectors, nnx.SpectralNorm by one that "
    "it iterates to anew at every call",
    "self.layer = layer  # without nnx.SpectralNorm: the normalized weight is loaded then",
)


class SpectralNorm(Rule):
    """It computes other numbers than PyTorch's, and so is refused."""

    def inside(self, site: Site, key: Any, child: Any) -> Site:
        """Leave the wrapper's attribute out of PyTorch's names."""
        return site.below(child, key, prefix=site.prefix) if key == "layer_instance" else site.below(child, key)

    def read(self, site: Site, file: TorchFile) -> None:
        """Refuse PyTorch's spectral norm."""
        for name in ("parametrizations.weight.original", "weight_orig"):
            if file.tensor(site.prefix + name) is not None:
                file.refuse(site, site.prefix + name, Refusal("a weight under spectral norm", *_NOT_THE_SAME))

    def write(self, site: Site) -> tuple[dict[str, Array], list[str]]:
        """Refuse."""
        raise Refusal("spectral norm", _NOT_THE_SAME[0], "self.layer = layer  # without nnx.SpectralNorm")


WEIGHT_NORM, SPECTRAL_NORM = WeightNorm(), SpectralNorm()
