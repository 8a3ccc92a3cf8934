"""What is read of a file: tensors are claimed by the modules that take them; all the rest stays as it is.

A parameter may be stored as what PyTorch computes it from: weight norm, spectral norm, pruning. It is put together
here, so that no module type needs to know.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from lazymods._errors import Problem
from lazymods.state.files.stored import StoredTensor
from lazymods.state.layouts.computed import COMPUTED
from lazymods.state.layouts.site import Array, Refusal, Site


class Part(NamedTuple):
    """Values, and the names of the file's entries that they come from."""

    value: Array
    sources: tuple[str, ...]

    def map(self, change: Callable[[Array], Array]) -> Part:
        """Return the part with changed values."""
        return Part(change(self.value), self.sources)


class TorchFile:
    """The tensors of a PyTorch file, and what the modules make of them.

    Attributes:
        entries: Values by the model's names.
        sources: The file's names of each, by the model's names.
        problems: What cannot be held exactly.
    """

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        self.tensors = tensors
        self.entries: dict[str, Any] = {}
        self.sources: dict[str, tuple[str, ...]] = {}
        self.problems: list[Problem] = []
        self._claimed: set[str] = set()
        self._has_computed = any(n.endswith(("_g", "_orig")) or "parametrizations." in n for n in tensors)
        self._leaves: dict[str, list[str]] = {}
        for name in tensors:
            prefix, dot, leaf = name.rpartition(".")
            self._leaves.setdefault(prefix + dot, []).append(leaf)

    # ------------------------------------------------------------ looking

    def tensor(self, name: str) -> StoredTensor | None:
        """Return the tensor of a name, if it is there and unclaimed."""
        found = self.tensors.get(name)
        return found if isinstance(found, StoredTensor) and name not in self._claimed else None

    def leaves(self, prefix: str) -> list[str]:
        """Return the last parts of the unclaimed names that consist of a prefix and one more part."""
        return [leaf for leaf in self._leaves.get(prefix, ()) if prefix + leaf not in self._claimed]

    def unclaimed(self) -> list[str]:
        """Return the names that no module has claimed, in the file's order."""
        return [name for name in self.tensors if name not in self._claimed]

    # ------------------------------------------------------------ claiming

    def claim(self, *names: str) -> None:
        """Take names out of what is left."""
        self._claimed.update(names)

    def read(self, *names: str) -> list[Part] | None:
        """Claim and read several tensors, or none of them if one is not there."""
        found = [self.tensor(name) for name in names]
        if any(t is None for t in found):
            return None
        self.claim(*names)
        return [Part(t.read(), (name,)) for name, t in zip(names, found, strict=True) if t is not None]

    def take(self, site: Site, entry: str) -> Part | None:
        """Claim a parameter of a module, put together if it is stored as what it is computed from.

        Args:
            site: The module.
            entry: PyTorch's name in the module, such as ``weight``.

        Returns:
            The values, or None if the file has none, or none that can be put together (then with a problem).
        """
        stored = self.read(site.torch_name(entry))
        if stored:
            return stored[0]
        for names, fold in COMPUTED if self._has_computed else ():
            parts = self.read(*(site.prefix + name.format(entry + site.suffix) for name in names))
            if parts is None:
                continue
            sources = tuple(s for part in parts for s in part.sources)
            try:
                return Part(fold([part.value for part in parts]), sources)
            except Refusal as refusal:
                self.problems.append(refusal.at(site.where(sources[0])))
                return None
        return None

    # ------------------------------------------------------------ giving

    def put(self, site: Site, entry: str, part: Part) -> None:
        """Give a module's entry its values."""
        name = site.name(entry)
        self.entries[name], self.sources[name] = part

    def refuse(self, site: Site, name: str, refusal: Refusal) -> None:
        """Claim an entry of the file that the module cannot hold."""
        self.claim(name)
        self.problems.append(refusal.at(site.where(name)))
