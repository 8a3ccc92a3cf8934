"""The static side of a lazy layer: its class, its arguments, and which sizes are still unknown.

A :class:`LayerConfig` is immutable and hashable; it is what copies of a layer share. Reading the constructor at
a few probe sizes gives its formulas (see :mod:`lazymods._layer.formulas`). The same formulas, turned round, read the
sizes from the shapes in a checkpoint.

Layers of a class that only scales (``LazyClassSpec.scales``) make up a family if they differ in sizes alone: the
constructor is read for the family, and what it makes of each layer is computed.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from lazymods import _compat
from lazymods._errors import Problem, ShapeInferenceError, UninitializedError, check_pickles
from lazymods._graph import dotted
from lazymods._initial import asking
from lazymods._initial.stacking import Shape
from lazymods._layer import abstract_module
from lazymods._layer.abstract_module import AbstractModule, Path, init_p
from lazymods._layer.arguments import (
    Ignored,
    UnhashableError,
    common_multiple,
    constructor_parameters,
    copied,
    freeze,
    freeze_arguments,
)
from lazymods._layer.asked import SIZE_LINE
from lazymods._layer.formulas import ShapeFormulas, Sizes, fit
from lazymods._layer.placeholder import UninitializedVariable

PRIMES = (7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67)


REFUSALS = (ValueError, TypeError, ZeroDivisionError, AssertionError, LookupError, AttributeError)


class LayerConfig:
    """A class, the arguments that were given, and the structure of those that were not.

    Args:
        name: The lazy class's name, for messages.
        cls: The class to construct.
        config: The bound arguments, defaults included, without rngs and modules.
        unknown: The constructor arguments that are inferred: None for an int, or a structure such as
            ``(2, None, 4)`` with None where a size is unknown.
        options: Names in ``config`` that the lazy class takes and the class does not.
        streams: Name, key dtype and tag of each stream of the rngs that were given.
        rngs_name: The constructor's argument for them, None if it takes none.
        modules: Names of the arguments that are modules; they are part of the layer, not of the spec.
        guesses: Other structures that ``unknown`` may have, if its own was guessed.
        left_out: Arguments that the caller left at their defaults, and that ``infer`` may return all the same.
        scales: Arguments that were given of which, as of those that are inferred, nothing depends but how long axes
            are and what integers the object holds, each as ``a*n + b``. None if that is not known of the class.
    """

    def __init__(
        self,
        name: str,
        cls: type,
        config: Mapping[str, Any],
        unknown: Mapping[str, Any],
        options: tuple[str, ...],
        streams: tuple[tuple[str, Any, str], ...],
        rngs_name: str | None,
        modules: tuple[str, ...] = (),
        guesses: tuple[Mapping[str, Any], ...] = (),
        scales: tuple[str, ...] | None = None,
        left_out: tuple[str, ...] = (),
    ) -> None:
        self.name, self.cls, self.config, self.unknown, self.options = name, cls, dict(config), dict(unknown), options
        self.streams, self.rngs_name, self.modules, self.guesses = streams, rngs_name, modules, guesses
        self.scales, self.left_out = scales, left_out
        try:
            arguments = freeze_arguments(cls, self.config), freeze_arguments(cls, self.unknown)
            self.key: Any = (name, cls, *arguments, options, streams, rngs_name, modules, left_out)
        except UnhashableError:
            self.key = object()
        self._hash = hash(self.key)
        self._own_formulas: ShapeFormulas | None = None
        self._kept: dict[str, Any] = {}
        self._originals: dict[int, Any] = {}

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, LayerConfig) and self.key == other.key)

    def __hash__(self) -> int:
        return self._hash

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerConfig:
        return self

    def __repr__(self) -> str:
        known = ", ".join(f"{k}={v!r}" for k, v in self._given().items())
        return f"{self.name}({known})"

    def _given(self) -> dict[str, Any]:
        """The arguments that are not the class's own default: those need no pickling."""
        defaults = {n: p.default for n, p in constructor_parameters(self.cls).items()}
        given = {k for k, v in self.config.items() if v is not defaults.get(k, UnhashableError)}
        return {k: self._kept.get(k, v) for k, v in self.config.items() if k in given}

    def __reduce__(self) -> tuple[Any, ...]:
        given = self._given()
        for argument, value in given.items():
            needed = "arguments that pickle: a lazy layer is stored with those that it was given"
            write = f"lm.materialize(model, x)  # or a function defined at the top of a module for {argument}"
            check_pickles(argument, value, lambda: self.name, needed, write)
        streams = tuple((n, str(jax.random.key_impl(example_key(d))), tag) for n, d, tag in self.streams)
        names = tuple(self.config)  # in their order, which is part of the key
        rest = (self.rngs_name, self.modules, self.guesses, self.scales, self.left_out)
        return _restore, (self.name, self.cls, given, names, self.unknown, self.options, streams, *rest)

    def keep(self) -> None:
        """Keep the arguments as they are now, whatever becomes of them: the constructor is read again for the sizes."""
        known: dict[int, tuple[Any, Any]] = {}
        made = {name: copied(value, known) for name, value in self.config.items()}
        self._kept = {name: value for name, value in made.items() if value is not self.config[name]}
        self._originals = {id(twin): value for value, twin in known.values()}

    # ------------------------------------------------------------ sizes

    @property
    def arguments(self) -> dict[str, Any]:
        """What the class's constructor gets of what was given."""
        config = self.config | self._kept
        return {k: v for k, v in config.items() if k not in self.options and k not in self.unknown}

    def default_of(self, name: str) -> Any:
        """Return what an argument is that was left out; one behind ``**kwargs`` is what a base class has for it."""
        return self.config[name] if name in self.config else constructor_parameters(self.cls)[name].default

    @functools.cached_property
    def size_names(self) -> tuple[str, ...]:
        """Names of the unknown sizes: ``in_features``, ``kernel_shape[0]``."""
        return tuple([name for name, value in _named_leaves(self.unknown) if value is None])

    def values(self, sizes: Sizes) -> dict[str, Any]:
        """Return the inferred arguments for given sizes."""
        out = {}
        for argument, tree in self.unknown.items():
            leaves, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda v: v is None)
            filled = [sizes[argument + jax.tree_util.keystr(p)] if v is None else v for p, v in leaves]
            out[argument] = jax.tree_util.tree_unflatten(treedef, filled)
        return out

    # ------------------------------------------------------------ abstract modules

    def abstract(self, values: Mapping[str, Any], modules: Mapping[str, Any]) -> AbstractModule:
        """Read the constructor with the inferred arguments given.

        Args:
            values: The inferred arguments.
            modules: The arguments that are modules.
        """
        if modules or not isinstance(self.key, tuple):
            return self.trace([(values, None)], modules)[0]
        return _cached_abstract(self, freeze(dict(values)), context(), Ignored(values))

    def trace(
        self, readings: Sequence[tuple[Mapping[str, Any], int | None]], modules: Mapping[str, Any]
    ) -> list[AbstractModule]:
        """Read the constructor, uncached.

        Args:
            readings: For each reading, the inferred arguments, and a size for what is unknown of the modules, of which
                the constructor then gets copies.
            modules: The arguments that are modules.
        """
        counter = jax.ShapeDtypeStruct((), jnp.uint32)
        streams = {n: (jax.ShapeDtypeStruct((), dtype), counter, tag) for n, dtype, tag in self.streams}
        prepared = [(v, dict if p is None else functools.partial(_stand_ins, probe=p)) for v, p in readings]
        rest = (streams, self.rngs_name, self._originals)
        return abstract_module.trace(self.cls, self.arguments, prepared, modules, *rest)

    @property
    def formulas(self) -> ShapeFormulas:
        """The formulas of a layer without module arguments, read once for all layers that are configured alike."""
        if isinstance(self.key, tuple):
            return _cached_formulas(self, context())
        if self._own_formulas is None:  # its arguments hold arrays, which a cache must not keep
            self._own_formulas = self.probe({})
        return self._own_formulas

    def probe(self, modules: Mapping[str, Any]) -> ShapeFormulas:
        """Read the constructor at several sizes and compare.

        Raises:
            Exception: What the constructor raises at every probe.
        """
        base = common_multiple(self.arguments)
        error: Exception | None = None
        several = [base * p for p in PRIMES]
        for units in (several, [720720 * u for u in several], [2] * len(PRIMES)):
            try:
                return self._probe(modules, units)
            except REFUSALS as e:
                error = error or e
        assert error is not None
        raise error

    def _probe(self, modules: Mapping[str, Any], units: Sequence[int]) -> ShapeFormulas:
        names = self.size_names
        first = {n: units[i % len(units)] for i, n in enumerate(names)}
        doubled = [first | {n: 2 * first[n]} for n in names]
        third = [{n: 3 * v for n, v in first.items()}] if names else []
        wanted = [(self.values(sizes), units[0]) for sizes in (first, *doubled, *third)]
        if modules:  # with other stand-ins for lazy modules, an axis that moves is not this layer's to solve
            wanted.append((wanted[0][0], 2 * units[0]))
        base, *others = self.trace(wanted, modules)
        probes = list(zip(names, doubled, others, strict=False))
        check = list(zip([*third, first], others[len(names) :], strict=False))
        return fit((first, base), probes, check)

    def of_family(self) -> ShapeFormulas | None:
        """Compute the formulas from that of the layers that differ in sizes alone; None if it has to be read."""
        given = {n: self.config[n] for n in self.scales or () if n in self.config and n not in self.unknown}
        if not given or any(type(v) is not int for v in given.values()):
            return None
        config = {k: v for k, v in self.config.items() if k not in given}
        unknown = {**self.unknown, **dict.fromkeys(given)}
        family = LayerConfig(
            self.name, self.cls, config, unknown, self.options, self.streams, self.rngs_name, scales=()
        )
        try:
            return family.formulas.fixed(given)
        except REFUSALS:  # it may be taken with these sizes, and says what is wrong with them if not
            return None

    # ------------------------------------------------------------ reading sizes back

    def readings(self) -> Iterator[LayerConfig]:
        """This spec, and where the structure of what is unknown was guessed, those with another that reads."""
        yield self
        for guess in self.guesses:
            config = self.config | self._kept
            other = LayerConfig(self.name, self.cls, config, guess, self.options, self.streams, self.rngs_name)
            try:
                _ = other.formulas
            except REFUSALS:
                continue
            yield other

    def read(self, formulas: ShapeFormulas, shapes: Mapping[Path, Shape]) -> tuple[dict[str, Any] | None, list[str]]:
        """Read the inferred arguments from the shapes of some slots; layers that are alike share what is found.

        Args:
            formulas: The formulas of the spec.
            shapes: Shapes by slot.

        Returns:
            The arguments, None if they do not follow, and what does not fit, in words.
        """
        if self.modules or not isinstance(self.key, tuple):
            return self.read_anew(formulas, shapes)
        values, conflicts = _cached_reading(self, tuple(shapes.items()), context(), Ignored(formulas))
        return (None if values is None else dict(values)), conflicts

    def read_anew(
        self, formulas: ShapeFormulas, shapes: Mapping[Path, Shape]
    ) -> tuple[dict[str, Any] | None, list[str]]:
        """Do what :meth:`read` does, uncached."""
        sizes, conflicts = self.solve(formulas, shapes)
        follow = not conflicts and set(sizes) >= set(self.size_names)
        return (self.values(sizes) if follow else None), conflicts

    def solve(self, formulas: ShapeFormulas, shapes: Mapping[Path, Shape]) -> tuple[Sizes, list[str]]:
        """Read the sizes from the shapes of some slots.

        Returns:
            The sizes that follow, and what does not fit, in words.
        """
        shapes = {p: s for p, s in shapes.items() if formulas.shapes[p] is not None and len(s) == len(formulas.axes[p])}
        sizes: Sizes = {}
        conflicts: list[str] = []
        changed = True
        while changed:
            changed = False
            for path, shape in shapes.items():
                for axis, length in zip(formulas.axes[path], shape, strict=True):
                    found = axis.solve(length, sizes)
                    if found is not None:
                        name, value = found
                        changed = True
                        if value.denominator != 1 or value < 0:
                            conflicts.append(f"{name} would be {value} by {dotted(path)} of shape {shape}")
                        sizes[name] = int(value)
        for path, shape in shapes.items():
            for i, (axis, length) in enumerate(zip(formulas.axes[path], shape, strict=True)):
                if axis.factors and set(axis.factors) <= set(sizes):
                    expected = axis.length(sizes)
                    if expected != length:
                        conflicts.append(
                            f"axis {i} of {dotted(path)} is {length}, but other entries make it {expected}"
                        )
        return sizes, conflicts


def _named_leaves(arguments: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Find the sizes in arguments by their names, ``kernel_shape[0]``."""
    for argument, value in arguments.items():
        for path, leaf in jax.tree_util.tree_leaves_with_path(value, is_leaf=lambda v: v is None):
            yield argument + jax.tree_util.keystr(path), leaf


def _stand_ins(modules: Mapping[str, Any], probe: int) -> dict[str, Any]:
    """Copy modules with every placeholder filled at a probe size (inside a trace: nothing is allocated)."""
    out = {}
    for name, module in modules.items():
        out[name] = copy = nnx.merge(*nnx.split(module), copy=True)
        for _, node in nnx.iter_graph(copy):
            if isinstance(node, UninitializedVariable):
                shape = tuple(probe if d is None else d for d in node.shape)
                _compat.write_variable(node, node.target, jax.lax.full(shape, 0, node.dtype), node.get_metadata())
    return out


# ---------------------------------------------------------------- caches


@functools.lru_cache(maxsize=4096)
def _cached_abstract(spec: LayerConfig, key: Any, context: Any, values: Ignored) -> AbstractModule:
    made = None if spec.scales is None else spec.formulas.at(dict(_named_leaves(values.value)), values.value)
    return made or spec.trace([(values.value, None)], {})[0]


@functools.lru_cache(maxsize=4096)
def _cached_reading(spec: LayerConfig, shapes: Any, context: Any, formulas: Ignored) -> Any:
    return spec.read_anew(formulas.value, dict(shapes))


@functools.lru_cache(maxsize=4096)
def _cached_formulas(spec: LayerConfig, context: Any) -> ShapeFormulas:
    return spec.of_family() or spec.probe({})


def context() -> Any:
    """What, outside of the arguments, a constructor's result depends on."""
    defaults = nnx.var_defaults()
    return jax.dtypes.canonicalize_dtype(float), defaults.hijax, defaults.ref


@functools.cache
def example_key(dtype: Any) -> Any:
    """A key of a key dtype, to ask for its implementation's name."""
    for name in ("threefry2x32", "rbg", "unsafe_rbg"):
        key = jax.random.key(0, impl=name)
        if key.dtype == dtype:
            return key
    raise TypeError(f"unknown kind of random key {dtype}")


def _restore(name: str, cls: type, given: Any, names: Any, unknown: Any, options: Any, streams: Any, *rest: Any) -> Any:
    parameters = constructor_parameters(cls)
    config = {k: given[k] if k in given else parameters[k].default for k in names}
    streams = tuple((n, jax.random.key(0, impl=impl).dtype, tag) for n, impl, tag in streams)
    return LayerConfig(name, cls, config, unknown, options, streams, *rest)


@dataclasses.dataclass(frozen=True)
class ConstructorInit:
    """The source of a layer's own placeholder: one slot of the layer's constructor."""

    spec: LayerConfig
    path: Path

    def make(self, keys: Sequence[Any], shape: Shape, dtype: Any) -> Any:
        """Compute the slot's value at the sizes that its shape tells (probe sizes for those it does not).

        Raises:
            ShapeInferenceError: If the sizes do not follow from this shape alone.
            UninitializedError: If they follow from a module that the layer was given.
        """
        if self.spec.modules:
            got, needed = "a parameter that depends on a wrapped module", "the wrapped module's sizes"
            raise UninitializedError(Problem(f"{dotted(self.path)} of {self.spec.name}", got, needed, SIZE_LINE))
        sizes = self._sizes(shape)
        rest = {n: common_multiple(self.spec.arguments) * PRIMES[i] for i, n in enumerate(self.spec.size_names)}
        abstract = self.spec.abstract(self.spec.values(rest | sizes), {})
        slot = abstract.slots[self.path]
        if slot.shape != shape:
            known = ", ".join(f"{n}={self.spec.default_of(n)!r}" for n in self.spec.left_out)
            needed = f"sizes of {self.spec.cls.__name__} that follow from this shape alone"
            needed += f"; it makes {slot.shape} with {known}" if known else ""
            where = f"{dotted(self.path)} of {self.spec.name}"
            raise ShapeInferenceError(Problem(where, f"shape {shape}", needed, SIZE_LINE))
        return slot.as_asked(abstract.run([slot], keys)[0], dtype)

    def _sizes(self, shape: Shape) -> Sizes:
        return self.spec.solve(self.spec.formulas, {self.path: shape})[0]

    def has_all_sizes(self, shape: Shape) -> bool:
        """Whether the sizes follow from the shape of this slot alone: then so do its keys, whatever is decided."""
        spec = self.spec
        return not spec.left_out and not spec.modules and self._sizes(shape).keys() >= set(spec.size_names)

    def returned(self, shape: Shape, dtype: Any) -> Any:
        """Return what its initializer makes in place of a JAX array of the dtype that the placeholder has, or None."""
        if self.spec.modules:
            return None
        abstract = self.spec.formulas.abstract
        slot = abstract.slots.get(self.path)
        equation = None if slot is None else abstract.source_of(slot)
        if slot is None or equation is None or equation.primitive is not init_p or slot.dtype != dtype:
            return None
        return asking.returned_instead(equation.params["call"], shape, dtype)

    def owner(self) -> str:
        """Name the layer."""
        return self.spec.name
