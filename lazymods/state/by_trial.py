"""Sizes that follow from a checkpoint by no formula, found by trying.

Mostly the sizes of a lazy layer follow from the shapes of its entries by its formulas. Where a class
decides by its sizes they may not: ``n * n`` features, a width of ``max(8, n // 4)``, as many blocks as a depth says, or
a size that the caller left at a default which is not the file's, or at None, where the file has what it is for. Then
the constructor is read at some sizes, until what it makes has exactly the names and shapes that the checkpoint has.
Sizes are taken only if no others give the same.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from flax import nnx

from lazymods._graph import STATE, dotted
from lazymods._initial.keys import is_key
from lazymods._initial.stacking import Shape
from lazymods._layer import lifecycle
from lazymods._layer.abstract_module import AbstractModule
from lazymods._layer.config import LayerConfig
from lazymods._layer.placeholder import fits
from lazymods._layer.structure import decides
from lazymods.state.entries import Survey, prefix_of

_MOST = 256  # readings of one constructor, where several sizes are not known
_LARGEST = 2**24


def fitted(survey: Survey, given: Mapping[str, Any]) -> list[tuple[Any, AbstractModule]]:
    """Find the lazy layers whose sizes follow by trying only, each with its constructor at those.

    Args:
        survey: The model.
        given: What is to be written, by name.
    """
    found = []
    names = sorted(given)
    for path, layer in survey.nodes:
        state = vars(layer).get(STATE)
        if state is None or state.keys is None or not decides(layer):
            continue
        prefix = prefix_of(path)
        first, last = bisect.bisect_left(names, prefix), bisect.bisect_left(names, f"{prefix}\U0010ffff")
        entries = {name[len(prefix) :]: given[name] for name in names[first:last]}
        shapes = {k: getattr(v, "shape", None) for k, v in entries.items() if not is_key(v)}
        whole = all(s is not None and None not in s for s in shapes.values())  # no entry of a lazy layer
        abstract = _fitted(state.spec, shapes) if shapes and whole else None
        if abstract is not None:
            found.append((layer, abstract))
    return found


def _fitted(spec: LayerConfig, shapes: Mapping[str, Any]) -> AbstractModule | None:
    """The constructor at the only sizes that fit, None if a formula gives them, or if there are none or several."""
    formulas = spec.formulas
    sized = {dotted(p): p for p in formulas.abstract.slots if not _is_left_out(formulas.abstract, p)}
    known = {sized[n]: tuple(s) for n, s in shapes.items() if n in sized}
    values, _ = spec.read(formulas, known)
    trial = _Trial(spec, shapes)
    abstract = None if values is None else trial.fits(values)
    if abstract is not None:  # if an axis has another length than at all probes, a formula has not told that
        return None if all(fits(formulas.shapes[p], s) for p, s in known.items()) else abstract
    for free in trial.choices():
        found = trial.only(free)
        if found is not None:
            return found
        if trial.several:
            return None
    return trial.with_options(values or {})


def _is_left_out(abstract: AbstractModule, path: Any) -> bool:
    """Whether entries may lack a slot, or hold it otherwise, as a random key by its data."""
    slot = abstract.slots[path]
    left_out = slot.cls is not None and issubclass(slot.cls, (nnx.RngState, *lifecycle.TRANSIENT))
    return left_out or is_key(slot)


@dataclasses.dataclass
class _Trial:
    """Readings of one constructor, against the shapes of the entries of a layer.

    Attributes:
        several: Whether several sizes fit: then they can't be told.
    """

    spec: LayerConfig
    shapes: Mapping[str, Shape]
    several: bool = False

    def choices(self) -> Iterator[tuple[str, ...]]:
        """Which sizes may be free: those that are not known, then those and one that was left at its default."""
        spec = self.spec
        if spec.unknown and all(v is None for v in spec.unknown.values()):
            yield tuple(spec.unknown)
        elif spec.unknown:
            return
        for name in spec.left_out:
            if type(spec.default_of(name)) is int:
                yield (*spec.unknown, name)

    def only(self, free: Sequence[str]) -> AbstractModule | None:
        """Return the constructor at the only sizes that fit."""
        found: dict[tuple[int, ...], AbstractModule] = {}
        for sizes in self._candidates(free):
            for near in _neighbours(sizes) if self.fits(dict(zip(free, sizes, strict=True))) else ():
                abstract = self.fits(dict(zip(free, near, strict=True)))
                if abstract is not None:
                    found[near] = abstract
            if len(found) > 1:
                self.several = True
                return None
        return next(iter(found.values()), None) or self._without(free)

    def _without(self, free: Sequence[str]) -> AbstractModule | None:
        """Return the constructor at the only sizes that fit if some of them are None, where that may be given."""
        numbers = [*self._numbers(), None]
        choices = itertools.product(numbers, repeat=len(free)) if len(numbers) ** len(free) <= _MOST else ()
        found = [self.fits(dict(zip(free, sizes, strict=True))) for sizes in choices if None in sizes]
        fitting = [abstract for abstract in found if abstract is not None]
        self.several = len(fitting) > 1
        return fitting[0] if len(fitting) == 1 else None

    def with_options(self, values: dict[str, Any]) -> AbstractModule | None:
        """Return the constructor at some sizes and at the only ones that fit of those that were left out as None.

        What such a size is for is there only with it: a projection of what a norm or an attention is conditioned on.
        Each is taken for itself, if what is made for it has entries.
        """
        spec = self.spec
        left = [n for n in spec.left_out if spec.default_of(n) is None] if values or not spec.unknown else []
        while left:
            before = self._part(values)
            if before is None:
                return None
            grown = {name: self._growing(values, name, before) for name in left}
            grown = {name: found for name, found in grown.items() if found}
            new = [path for [(_, paths), *_] in grown.values() for path in paths]
            if any(len(found) > 1 for found in grown.values()) or len(set(new)) < len(new):
                self.several = True
                return None
            if not grown:
                return None
            values = values | {name: size for name, [(size, _)] in grown.items()}
            left = [name for name in left if name not in grown]
            abstract = self.fits(values)
            if abstract is not None:
                return abstract
        return None

    def _growing(self, values: dict[str, Any], name: str, before: set[str]) -> list[tuple[int, set[str]]]:
        """The sizes of an argument at which more is made that there are entries for, with the names of that."""
        found: dict[int, set[str]] = {}
        for number in self._numbers():
            for size in (number, number - 1, number + 1):
                made = self._part(values | {name: size})
                if made is not None and made > before:
                    found[size] = made - before
                if number not in found:
                    break
        return list(found.items())

    def _part(self, values: Mapping[str, Any]) -> set[str] | None:
        """The names of what the constructor makes; None if there is anything without an entry of its shape."""
        abstract = self.read(values)
        made = abstract.slots.items() if abstract is not None else ()
        slots = {dotted(p): s.shape for p, s in made if abstract is not None and not _is_left_out(abstract, p)}
        fit = abstract is not None and all(self.shapes.get(n) == shape for n, shape in slots.items())
        return set(slots) if fit else None

    def read(self, values: Mapping[str, Any]) -> AbstractModule | None:
        """Read the constructor; None if it refuses these sizes."""
        try:
            return self.spec.abstract(values, {})
        except Exception:  # what a constructor says of sizes that it was not meant for
            return None

    def fits(self, values: Mapping[str, Any]) -> AbstractModule | None:
        """Return the constructor at some sizes if it makes exactly what the entries are for."""
        abstract = self.read(values)
        if abstract is None:
            return None
        wanted = {dotted(p): s.shape for p, s in abstract.slots.items() if not _is_left_out(abstract, p)}
        random = {dotted(p) for p in abstract.slots} - wanted.keys()
        entries = {n: tuple(s) for n, s in self.shapes.items() if not any(f"{n}.".startswith(f"{r}.") for r in random)}
        return abstract if entries == wanted else None

    def _candidates(self, free: Sequence[str]) -> Iterator[tuple[int, ...]]:
        numbers = self._numbers()
        if len(free) == 1:
            size = self._by_bisection(free[0])
            if size is not None:
                yield (size,)
        if len(numbers) ** len(free) <= _MOST:
            yield from itertools.product(numbers, repeat=len(free))

    def _numbers(self) -> list[int]:
        """The sizes that the entries suggest: how long axes are, and how many blocks there are."""
        lengths = {n for shape in self.shapes.values() for n in shape if n}
        counts = {int(part) + 1 for name in self.shapes for part in name.split(".") if part.isdigit()}
        return sorted({*lengths, *counts})

    def _by_bisection(self, name: str) -> int | None:
        """The first size at which there are as many numbers as in the entries: mostly there are more at each."""
        wanted = sum(math.prod(shape) for shape in self.shapes.values())
        below, size = 0, 1
        while (total := self._total({name: size})) is not None and total < wanted and size < _LARGEST:
            below, size = size, 2 * size
        while total is not None and size - below > 1:
            middle = (below + size) // 2
            total = self._total({name: middle})
            if total is not None and total < wanted:
                below = middle
            else:
                size = middle
        return None if total is None else size

    def _total(self, values: Mapping[str, Any]) -> int | None:
        abstract = self.read(values)
        if abstract is None:
            return None
        return sum(math.prod(s.shape) for p, s in abstract.slots.items() if not _is_left_out(abstract, p))


def _neighbours(sizes: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """The sizes themselves, and those that are one more or less in one of them."""
    yield sizes
    for i, size in enumerate(sizes):
        for near in (size - 1, size + 1):
            if near > 0:
                yield (*sizes[:i], near, *sizes[i + 1 :])
