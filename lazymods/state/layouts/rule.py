"""Rules: what PyTorch stores of one module type, by which names and with which axes.

Most types are a table of :class:`Field` in a :class:`Simple` rule. Attention and recurrent layers, which PyTorch
stores in other pieces than Flax, are rules of their own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from lazymods.state.layouts.axes import AS_IS, Layout
from lazymods.state.layouts.file import Part, TorchFile
from lazymods.state.layouts.site import Array, Refusal, Site
from lazymods.state.layouts.weight_norm import Scale, normed_names, scale_of, take_normed


class Cannot(NamedTuple):
    """Entries of PyTorch's that a Flax module has no place for.

    Attributes:
        pattern: A regular expression of the last part of their names.
        got: What they are.
        needed: What would be needed, and why Flax does not have it.
        write: The line to write.
    """

    pattern: str
    got: str
    needed: str
    write: str


class Rule:
    """How one module type is stored by PyTorch.

    Attributes:
        cannot: Entries that are refused by name.
        flattens: Whether ``flatten`` may name such a module.
        owns: Attributes whose modules are read and written with the module itself.
    """

    cannot: Sequence[Cannot] = ()
    flattens: bool = False
    owns: frozenset[str] = frozenset()

    def inside(self, site: Site, key: Any, child: Any) -> Site:
        """Return the site of what hangs in the module at a key."""
        return site.below(child, key)

    def read(self, site: Site, file: TorchFile) -> None:
        """Claim the file's entries of the module and give them to the model's."""

    def write(self, site: Site) -> tuple[dict[str, Array], list[str]]:
        """Return PyTorch's entries of the module, and the model's names that they hold.

        Raises:
            Refusal: If PyTorch cannot hold the module exactly.
        """
        return {}, []

    def held_in(self, site: Site, torch_name: str, taken: list[str]) -> list[str]:
        """Return which of the model's names that were written an entry of PyTorch's holds."""
        return taken

    def refuse_left(self, site: Site, left: Iterable[str]) -> Refusal | None:
        """Say what PyTorch has no place for, of the model's names that no rule has written."""
        return None

    def refuse_rest(self, site: Site, file: TorchFile, known: set[str]) -> None:
        """Refuse by name what is left of the module in the file and that the model has no entry for."""
        if not self.cannot:
            return
        for leaf in file.leaves(site.prefix):
            for pattern, got, needed, write in self.cannot:
                name = site.prefix + leaf
                if re.fullmatch(pattern, leaf) and name not in known:
                    write = write.format(prefix=site.prefix, name=name)
                    file.refuse(site, name, Refusal(got, needed, write))


class Field(NamedTuple):
    """One parameter: PyTorch's name, Flax's, and how the axes lie."""

    torch: str
    flax: str
    layout: Layout = AS_IS


class Simple(Rule):
    """A type whose parameters are the same in PyTorch, but for names and axes.

    Args:
        *fields: The parameters.
        cannot: Entries that are refused by name.
        counters: Entries that PyTorch has and Flax does without: swallowed, and written as zeros.
        flattens: Whether ``flatten`` may name such a module.
    """

    def __init__(
        self,
        *fields: Field,
        cannot: Sequence[Cannot] = (),
        counters: Sequence[str] = (),
        flattens: bool = False,
    ) -> None:
        self.fields: tuple[Field, ...] = fields
        self.cannot: Sequence[Cannot] = cannot
        self.counters: Sequence[str] = counters
        self.flattens: bool = flattens

    def read(self, site: Site, file: TorchFile) -> None:
        """Read every field that the file has."""
        for field in self.fields:
            scale = scale_of(site, field.flax)
            parts = take_normed(site, file, field.torch) if scale is not None else None
            if scale is not None and parts is not None:
                self._read_normed(site, file, field, scale, parts)
                continue
            part = file.take(site, field.torch)
            if part is not None:
                self._give(site, file, field, part)
        for counter in self.counters:
            file.claim(site.torch_name(counter))

    def _give(self, site: Site, file: TorchFile, field: Field, part: Part) -> None:
        try:
            field.layout.check(part.value, site)
            file.put(site, field.flax, part.map(lambda a: field.layout.to_flax(a, site)))
        except Refusal as refusal:
            file.refuse(site, part.sources[-1], refusal)

    def _read_normed(self, site: Site, file: TorchFile, field: Field, scale: Scale, parts: list[Part]) -> None:
        g, v = parts
        try:
            field.layout.check(v.value, site)
            g_value, v_value = scale.to_flax(field.layout, g.value, v.value, site)
        except Refusal as refusal:
            file.refuse(site, g.sources[0], refusal)
            return
        file.put(site, field.flax, v._replace(value=v_value))
        if g_value is not None:
            file.put(scale.site, scale.entry, g._replace(value=g_value))

    def write(self, site: Site) -> tuple[dict[str, Array], list[str]]:
        """Write every field that the module has."""
        out, names = {}, []
        for field in self.fields:
            value = site.value(field.flax)
            if value is None:
                continue
            names.append(site.name(field.flax))
            scale = scale_of(site, field.flax)
            if scale is None:
                out[site.torch_name(field.torch)] = field.layout.to_torch(value, site)
                continue
            g, v = normed_names(site, field.torch)
            out[g], out[v] = scale.to_torch(field.layout, value, site)
            names.append(scale.site.name(scale.entry))
        out |= {site.torch_name(counter): np.zeros((), np.int64) for counter in self.counters}
        return out, names

    def held_in(self, site: Site, torch_name: str, taken: list[str]) -> list[str]:
        """Return the field of PyTorch's name, and its scales if that are magnitudes or directions."""
        held: dict[str, list[str]] = {}
        for field in self.fields:
            scale, own = scale_of(site, field.flax), site.name(field.flax)
            names = [site.torch_name(field.torch)] if scale is None else normed_names(site, field.torch)
            held |= dict.fromkeys(names, [own] if scale is None else [own, scale.site.name(scale.entry)])
        return [name for name in held.get(torch_name, taken) if name in taken]
