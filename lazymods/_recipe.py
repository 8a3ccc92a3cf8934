"""How a placeholder will get its value: a pytree that has leaves only while its key is traced.

A placeholder holds a :class:`Recipe` where an ordinary Variable holds its array. The recipe is static data
for JAX (no leaf, hashable), so a model that has placeholders passes through ``nnx.split``, ``jax.jit`` and
``nnx.clone``. Only in a model that was built under a transform are the keys leaves, since there they are
tracers that the transform must carry. A marker goes with them: a transform that stacks models, as ``nnx.vmap``
does, stacks it as well, and so its shape tells the axes that the value has in front of those of one model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from lazymods import _compat

Shape = tuple[int, ...]
PartialShape = tuple["int | None", ...]


class Source(Protocol):
    """Where a value comes from: hashable, comparable, without arrays."""

    def make(self, keys: Sequence[Any], shape: Shape, dtype: Any) -> Any:
        """Return the initial value, of ``shape``."""
        ...

    def owner(self) -> str:
        """Name what the parameter belongs to, or ''."""
        ...


@dataclasses.dataclass(frozen=True)
class InitSource:
    """A value that ``init(key, shape, dtype)`` makes; zeros without an ``init``."""

    init: Callable[..., Any] | None

    def make(self, keys: Sequence[Any], shape: Shape, dtype: Any) -> Any:
        """Call the initializer, in the dtype of the parameter."""
        dtype = jnp.result_type(float) if dtype is None else dtype
        if self.init is None:
            return jnp.zeros(shape, dtype)
        made = None
        if keys and _compat.executing():
            from lazymods.init import call_in_blocks  # on first use: a model that is loaded never draws

            made = call_in_blocks(self.init, keys[0], shape, dtype)
        return self.init(keys[0] if keys else None, shape, dtype) if made is None else made

    def owner(self) -> str:
        """A parameter made by hand belongs to nobody that it knows."""
        return ""


class StaticKeys:
    """Concrete keys and counters as static data: compared and hashed by their bytes."""

    def __init__(self, arrays: Sequence[Any]) -> None:
        self.arrays = tuple(arrays)

    def _bytes(self) -> tuple[bytes, ...]:
        with _compat.at_trace(_compat.eval_trace()):  # comparisons happen inside traces as well
            return tuple(np.asarray(_key_data(a)).tobytes() for a in self.arrays)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, StaticKeys):
            return NotImplemented
        same = len(self.arrays) == len(other.arrays) and all(
            a is b for a, b in zip(self.arrays, other.arrays, strict=True)
        )
        return same or self._bytes() == other._bytes()

    def __hash__(self) -> int:
        return hash(self._bytes())

    def __getstate__(self) -> list[Any]:
        return [
            (str(jax.random.key_impl(a)), np.asarray(_key_data(a))) if is_key(a) else (None, np.asarray(a))
            for a in self.arrays
        ]

    def __setstate__(self, state: list[Any]) -> None:
        self.arrays = tuple(
            jnp.asarray(data) if impl is None else jax.random.wrap_key_data(jnp.asarray(data), impl=impl)
            for impl, data in state
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> StaticKeys:
        return self


def is_key(value: Any) -> bool:
    """Whether a value is an array of random keys."""
    return hasattr(value, "dtype") and jnp.issubdtype(value.dtype, jax.dtypes.prng_key)


def _key_data(a: Any) -> Any:
    return jax.random.key_data(a) if is_key(a) else a


def key_source(keys: Sequence[Any]) -> StaticKeys | tuple[Any, ...]:
    """Return keys as a recipe holds them: leaves, with a marker, in what is built under a transform, else static."""
    plain = _compat.current_trace() is _compat.eval_trace() and _compat.are_concrete(keys)
    return StaticKeys(keys) if plain else (*keys, MARKER)


MARKER = np.zeros((), np.float32)  # a float: nnx.grad of an abstract run differentiates by it, and is given nothing


class Recipe:
    """What a placeholder knows of its value: partial shape, dtype, source and keys.

    Attributes:
        source: What makes the value.
        element: The partial shape of one model's value; None where an axis is unknown, or as a whole if even the rank
            is. ``shape`` is that of all that are stacked.
        dtype: The dtype that the value gets, None for whatever is written first.
        label: The parameter's name in its layer, for messages.
        key_source: The keys: static, or traced leaves. Placeholders of one layer share it.
    """

    __slots__ = ("dtype", "element", "key_source", "label", "source")

    def __init__(self, source: Source, element: PartialShape | None, dtype: Any, label: str, keys: Any) -> None:
        self.source, self.element, self.dtype, self.label, self.key_source = source, element, dtype, label, keys

    @classmethod
    def build(cls, source: Source, shape: PartialShape | None, dtype: Any, label: str, keys: Sequence[Any]) -> Recipe:
        """Make a recipe; its keys are leaves if it is made under a transform, else static."""
        return cls(source, shape, dtype, label, key_source(keys))

    @property
    def keys(self) -> tuple[Any, ...]:
        """The keys (and counters) that ``source.make`` takes."""
        return self.key_source.arrays if isinstance(self.key_source, StaticKeys) else self.key_source[:-1]

    @property
    def stack(self) -> Shape:
        """The axes in front of those of one model: those of the transforms that stacked several."""
        return () if isinstance(self.key_source, StaticKeys) else tuple(np.shape(self.key_source[-1]))

    @property
    def shape(self) -> PartialShape | None:
        """The partial shape, with the axes that are stacked; None if not even the rank is known."""
        return None if self.element is None else (*self.stack, *self.element)

    @property
    def is_static(self) -> bool:
        """Whether the recipe has no leaf."""
        return isinstance(self.key_source, StaticKeys)

    def replace(self, **changes: Any) -> Recipe:
        """Return a copy with another ``element``, ``dtype`` or ``label``."""
        fields = {"source": self.source, "element": self.element, "dtype": self.dtype, "label": self.label} | changes
        return Recipe(keys=self.key_source, **fields)

    def make(self, shape: Shape) -> Any:
        """Return the initial value for ``shape``, in the recipe's dtype; each model's as it would be on its own."""
        element = shape[len(self.stack) :]
        value = self.stacked(lambda keys: self.source.make(keys, element, self.dtype))
        if isinstance(value, jax.Array) and self.dtype is not None and (value.dtype != self.dtype or value.weak_type):
            value = value.astype(self.dtype)
        return value

    def stacked(self, make: Callable[[tuple[Any, ...]], Any]) -> Any:
        """Return what ``make(keys)`` gives for each of the models that are stacked, as ``nnx.vmap`` stacks them."""
        if not self.stack:
            return make(self.keys)

        def one(leaves: tuple[Any, ...]) -> Any:
            return make(leaves[:-1])

        for _ in self.stack:
            one = jax.vmap(one)
        return one(tuple(self.key_source))  # type: ignore[arg-type]

    def static(self) -> tuple[Any, ...]:
        """Everything but the keys."""
        return self.source, self.element, self.dtype, self.label

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Recipe):
            return NotImplemented
        same_keys = len(self.keys) == len(other.keys) and all(
            a is b for a, b in zip(self.keys, other.keys, strict=True)
        )
        return (
            self.static() == other.static()
            and self.stack == other.stack
            and (same_keys or (self.is_static and self.key_source == other.key_source))
        )

    def __hash__(self) -> int:
        return hash(self.static())

    def __repr__(self) -> str:
        return f"Recipe(shape={self.shape}, dtype={self.dtype}, label={self.label!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Recipe:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        keys = self.key_source
        if not isinstance(keys, StaticKeys) and not self.stack:
            keys = StaticKeys(self.keys)
        if not isinstance(keys, StaticKeys):  # keys by their data
            return _restore, (*self.static(), StaticKeys(keys))
        return Recipe, (*self.static(), keys)


def _restore(source: Source, element: PartialShape | None, dtype: Any, label: str, leaves: StaticKeys) -> Recipe:
    return Recipe(source, element, dtype, label, leaves.arrays)


def _flatten(recipe: Recipe) -> tuple[tuple[Any, ...], Any]:
    if recipe.is_static:
        return (), (*recipe.static(), recipe.key_source)
    return recipe.key_source, (*recipe.static(), None)


def _unflatten(aux: Any, leaves: Sequence[Any]) -> Recipe:
    *static, keys = aux
    return Recipe(*static, keys=tuple(leaves) if keys is None else keys)


jax.tree_util.register_pytree_node(Recipe, _flatten, _unflatten)
