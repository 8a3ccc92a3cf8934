"""What a constructor was seen to make at a few sizes: the formulas by which shapes follow from sizes, and back.

A :class:`ShapeFormulas` is fitted to several readings of one constructor. It holds the partial shape of each Variable,
how each unknown axis follows from the sizes (``a*n + b``), and which attributes must wait. Where everything that
differs between the readings has a formula, and the class is known not to decide by its sizes, what the constructor
makes at any other sizes is computed instead of read (:meth:`ShapeFormulas.at`): reading takes a thousand times as long.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

import jax

from lazymods._errors import ConfigurationError, Problem
from lazymods._graph import dotted
from lazymods._initial.pending import PartialShape
from lazymods._layer.abstract_module import AbstractModule, Container, Given, Held, Node, Path, Slot, Static

Sizes = dict[str, int]
Number = int | Fraction  # a fraction only where it is no whole number: that is ten times as slow


@dataclasses.dataclass(frozen=True)
class Axis:
    """How long an axis is: ``sum(factor * size) + offset``; unknown altogether if ``factors`` is None."""

    factors: Mapping[str, Number] | None
    offset: Number

    def length(self, sizes: Mapping[str, int]) -> Number:
        """Return how long the axis is, of an axis that has a formula; sizes that are not given count nothing."""
        return self.offset + sum([f * sizes[n] for n, f in (self.factors or {}).items() if n in sizes])

    def solve(self, length: int, known: Sizes) -> tuple[str, Fraction] | None:
        """Return the one size that follows from the length, if all others are known."""
        if self.factors is None:
            return None
        free = [n for n in self.factors if n not in known]
        if len(free) != 1:
            return None
        return free[0], Fraction(length - self.length(known)) / self.factors[free[0]]

    def fixed(self, sizes: Sizes) -> Axis:
        """Return the formula in what is left when some sizes are known."""
        if not self.factors or self.factors.keys().isdisjoint(sizes):
            return self
        return Axis({n: f for n, f in self.factors.items() if n not in sizes}, self.length(sizes))


UNKNOWN = Axis(None, 0)


@dataclasses.dataclass(frozen=True)
class SizeFormula:
    """How a static attribute follows from the sizes that is a number, or a tuple or such of numbers."""

    structure: Any
    formulas: tuple[Axis, ...]

    def at(self, sizes: Sizes) -> Any:
        """Return the value; None if it would not be whole numbers."""
        found = [f.length(sizes) for f in self.formulas]
        return jax.tree.unflatten(self.structure, map(int, found)) if _are_lengths(found) else None

    def fixed(self, sizes: Sizes) -> SizeFormula:
        """Return the formulas in what is left when some sizes are known."""
        return SizeFormula(self.structure, tuple([f.fixed(sizes) for f in self.formulas]))


@dataclasses.dataclass(frozen=True)
class ShapeFormulas:
    """What is known of a layer before its sizes are.

    Attributes:
        abstract: The constructor, read at the first probe.
        sizes: The sizes of that probe.
        axes: The formula of each axis, by slot.
        shapes: Partial shape by slot, None where the rank depends on the sizes.
        pending: Paths of static attributes that depend on the sizes.
        statics: Their formulas; None if there are some without, or if more than they and the shapes differed.
    """

    abstract: AbstractModule
    sizes: Sizes
    axes: Mapping[Path, tuple[Axis, ...]]
    shapes: Mapping[Path, PartialShape | None]
    pending: frozenset[Path]
    statics: Mapping[Path, SizeFormula] | None = None

    def at(self, sizes: Sizes, values: Mapping[str, Any]) -> AbstractModule | None:
        """Compute what the constructor makes at other sizes; None if it has to be read.

        Args:
            sizes: All of them.
            values: The inferred arguments that they make.
        """
        if self.statics is None or not all(type(n) is int and n > 0 for n in sizes.values()):
            return None
        slots = {}
        for path, axes in self.axes.items():
            shape = [axis.length(sizes) for axis in axes]
            if not _are_lengths(shape):
                return None  # the constructor says what is wrong
            slots[path] = dataclasses.replace(self.abstract.slots[path], shape=tuple(map(int, shape)))
        statics = {path: Static(numbers.at(sizes)) for path, numbers in self.statics.items()}
        if any(static.value is None for static in statics.values()):
            return None
        return self.abstract.resized(_resized(self.abstract.root, (), slots, statics, {}), slots, values)

    def fixed(self, given: Sizes) -> ShapeFormulas | None:
        """Return the formulas when some sizes are given; None if it has to be fitted anew."""
        left = {n: v for n, v in self.sizes.items() if n not in given}
        abstract = self.at(left | given, {n: v for n, v in self.abstract.values.items() if n not in given})
        if abstract is None or self.statics is None:
            return None
        axes = {path: tuple([axis.fixed(given) for axis in formulas]) for path, formulas in self.axes.items()}
        statics = {path: numbers.fixed(given) for path, numbers in self.statics.items()}
        statics = {path: numbers for path, numbers in statics.items() if any(f.factors for f in numbers.formulas)}
        return ShapeFormulas(abstract, left, axes, _partial_shapes(axes), frozenset(statics), statics)


def _are_lengths(numbers: Sequence[Number]) -> bool:
    return all([n.denominator == 1 and n >= 0 for n in numbers])


def _resized(
    description: Any, path: Path, slots: Mapping[Path, Slot], statics: Mapping[Path, Static], made: dict[int, Any]
) -> Any:
    """Describe an object at other sizes; ``made`` holds what was described, for what is met twice."""
    if isinstance(description, Slot):
        return slots[description.path]
    if isinstance(description, Static):
        return statics.get(path, description)
    if id(description) in made:
        return made[id(description)]
    if isinstance(description, Node):
        children = {n: _resized(d, (*path, n), slots, statics, made) for n, d in description.attributes.items()}
        made[id(description)] = description.with_attributes(children)
    elif isinstance(description, Container):
        items = tuple((k, _resized(d, (*path, k), slots, statics, made)) for k, d in description.items)
        made[id(description)] = Container(description.cls, items)
    else:
        return description
    return made[id(description)]


# ---------------------------------------------------------------- fitting


def fit(
    first: tuple[Sizes, AbstractModule],
    probes: Sequence[tuple[str, Sizes, AbstractModule]],
    check: Sequence[tuple[Sizes, AbstractModule]],
) -> ShapeFormulas:
    """Fit formulas to readings of a constructor.

    Args:
        first: The first reading, and its sizes.
        probes: Readings in each of which one size is another, with its name.
        check: Readings at which the formulas are checked.
    """
    sizes, base = first
    others = [b for _, _, b in probes] + [b for _, b in check]

    def length(path: Path, axis: int, abstract: AbstractModule) -> int | None:
        slot = abstract.slots.get(path)
        return None if slot is None or len(slot.shape) != len(base.slots[path].shape) else slot.shape[axis]

    axes = {}
    for path, slot in base.slots.items():
        measured = [[length(path, i, b) for b in (base, *others)] for i in range(len(slot.shape))]
        axes[path] = tuple(_formula(sizes, m, probes, check) for m in measured)
    pending: set[Path] = set()
    for other in others:
        pending |= set(_different(base.root, other.root, ()))
        _check_variables(base.root, other.root, ())
    statics: dict[Path, SizeFormula] | None = {}
    for path in pending:
        found = [static_at(b.root, path) for b in (base, *others)]
        leaves, structures = zip(*map(jax.tree.flatten, found), strict=True)
        same = all(s == structures[0] for s in structures) and all(type(n) is int for n in itertools.chain(*leaves))
        formulas = [_formula(sizes, numbers, probes, check) for numbers in zip(*leaves, strict=True)] if same else []
        statics[path] = SizeFormula(structures[0], tuple(formulas))
    fitted = [*axes.values(), *(numbers.formulas or (UNKNOWN,) for numbers in statics.values())]
    if any(f.factors is None for formulas in fitted for f in formulas) or not all(_alike(base, b) for b in others):
        statics = None
    ranks = {p: {len(b.slots[p].shape) for b in (base, *others) if p in b.slots} for p in axes}
    shapes = {p: s if len(ranks[p]) == 1 else None for p, s in _partial_shapes(axes).items()}  # not even the rank
    return ShapeFormulas(base, sizes, axes, shapes, frozenset(pending), statics)


def _partial_shapes(axes: Mapping[Path, tuple[Axis, ...]]) -> dict[Path, PartialShape]:
    return {p: tuple([int(a.offset) if a.factors == {} else None for a in formulas]) for p, formulas in axes.items()}


def _formula(
    first: Sizes,
    measured: Sequence[int | None],
    probes: Sequence[tuple[str, Sizes, AbstractModule]],
    check: Sequence[tuple[Sizes, AbstractModule]],
) -> Axis:
    """Fit ``sum(factor * size) + offset`` to what was measured, and check it at the sizes that were not used."""
    base, *others = measured
    if base is None or any(m is None for m in others):
        return UNKNOWN
    factors: dict[str, Number] = {}
    for (name, sizes, _), found in zip(probes, others, strict=False):
        if found != base and found is not None:
            factor = Fraction(found - base, sizes[name] - first[name])
            factors[name] = int(factor) if factor.denominator == 1 else factor
    fitted = Axis(factors, base - Axis(factors, 0).length(first))
    checked = zip(check, others[len(probes) :], strict=True)
    return fitted if all(found == fitted.length(sizes) for (sizes, _), found in checked) else UNKNOWN


def static_at(description: Any, path: Path) -> Any:
    """The value of a static attribute, None if there is no such attribute."""
    for name in path:
        description = description.attributes.get(name) if isinstance(description, Node) else None
    return description.value if isinstance(description, Static) else None


def _different(a: Any, b: Any, path: Path) -> Iterator[Path]:
    """Paths of the static attributes in which two descriptions differ."""
    if isinstance(a, Node) and isinstance(b, Node):
        for name in a.attributes:
            if name not in b.attributes:
                yield (*path, name)
            else:
                yield from _different(a.attributes[name], b.attributes[name], (*path, name))
    elif isinstance(a, Static) and not (isinstance(b, Static) and same_static(a.value, b.value)):
        yield path


def _check_variables(a: Any, b: Any, path: Path) -> None:
    """Refuse a number in a Variable that is another at another size: an array there would wait for it.

    Raises:
        ConfigurationError: If there is one.
    """
    if isinstance(a, Held) and isinstance(b, Held) and not same_static(a.value, b.value):
        needed = "an array: until the sizes are known, and in a transform, it would be the number of another size"
        got = f"a {a.cls.__name__} that holds a number which follows from a size"
        raise ConfigurationError(Problem(dotted(path), got, needed, f"{a.cls.__name__}(jnp.asarray(...))"))
    if isinstance(a, Node) and isinstance(b, Node):
        for name in a.attributes.keys() & b.attributes.keys():
            _check_variables(a.attributes[name], b.attributes[name], (*path, name))
    elif isinstance(a, Container) and isinstance(b, Container):
        known = dict(b.items)
        for key, value in a.items:
            _check_variables(value, known.get(key), (*path, key))


def same_static(a: Any, b: Any) -> bool:
    """Whether two static attributes are the same, by type and value."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    try:
        return bool(a == b)
    except (ValueError, TypeError):  # arrays, and what refuses to be compared
        return False


# ---------------------------------------------------------------- comparing


def _alike(a: AbstractModule, b: AbstractModule) -> bool:
    """Whether two readings are of one structure, and every slot of one source but for its shape."""
    if a.slots.keys() != b.slots.keys() or a.draws != b.draws or not same_structure(a.root, b.root):
        return False
    pairs = ((a.source_of(slot), b.source_of(b.slots[path])) for path, slot in a.slots.items())
    return all(x and y and _same_equation(x, y, a.producers, but="shape") for x, y in pairs)


def same_structure(a: Any, b: Any) -> bool:
    """Whether two readings describe the same objects, but for shapes and the values of static attributes."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Node):
        same = a.cls is b.cls and list(a.attributes) == list(b.attributes) and a.data_names == b.data_names
        return same and all(same_structure(d, b.attributes[n]) for n, d in a.attributes.items())
    if isinstance(a, Container):
        same = a.cls is b.cls and [k for k, _ in a.items] == [k for k, _ in b.items]
        return same and all(same_structure(x, y) for (_, x), (_, y) in zip(a.items, b.items, strict=True))
    if isinstance(a, Slot):
        return a.cls is b.cls and a.dtype == b.dtype and same_static(a.metadata, b.metadata)
    return a == b if isinstance(a, Given) else True


def _same_value(x: Any, y: Any, producers: Mapping[Any, Any]) -> bool:
    """Whether two variables of one program are computed alike."""
    if hasattr(x, "val") or hasattr(y, "val"):
        return hasattr(x, "val") and hasattr(y, "val") and same_static(x.val, y.val)
    if x is y or x not in producers or y not in producers:
        return x is y
    return len(producers[x].outvars) == 1 and _same_equation(producers[x], producers[y], producers)


def _same_equation(one: Any, two: Any, producers: Mapping[Any, Any], but: str = "") -> bool:
    if one.primitive is not two.primitive or len(one.invars) != len(two.invars):
        return False
    same = all(same_static(value, two.params.get(name)) for name, value in one.params.items() if name != but)
    return same and all(_same_value(p, q, producers) for p, q in zip(one.invars, two.invars, strict=True))
