"""How a placeholder will get its value: a pytree that has leaves only while its key is traced.

A placeholder holds a :class:`PendingInit` where an ordinary Variable holds its array. The pending init is static data
for JAX (no leaf, hashable), so a model that has placeholders passes through ``nnx.split``, ``jax.jit`` and
``nnx.clone``. Only in a model that was built under a transform are the keys leaves, since there they are
tracers that the transform must carry. They have as many axes, of one element, as the value will have, so that
``nnx.vmap`` can stack them wherever it would stack the value; and marks go with them, whose shape tells where that was
(see :mod:`lazymods._initial.stacking`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from lazymods import _compat
from lazymods._errors import Problem, UninitializedError
from lazymods._initial import draws, placement
from lazymods._initial.keys import is_key
from lazymods._initial.stacking import ONE, Shape, Stacking

PartialShape = tuple["int | None", ...]


class InitFunction(Protocol):
    """Where a value comes from: hashable, comparable, without arrays."""

    def make(self, keys: Sequence[Any], shape: Shape, dtype: Any) -> Any:
        """Return the initial value, of ``shape``, and of ``dtype`` if its maker does not say otherwise."""
        ...

    def has_all_sizes(self, shape: Shape) -> bool:
        """Whether a shape tells all that the keys follow from."""
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
        asked, dtype = dtype, jnp.result_type(float) if dtype is None else dtype
        if self.init is None:
            return jnp.zeros(shape, dtype)
        made, place = None, placement.current()
        with contextlib.nullcontext() if place is None else placement.on_one_device():
            if keys and _compat.executing():
                from lazymods._initial.fill import call_in_blocks  # on first use: a model that is loaded never draws

                made = call_in_blocks(self.init, keys[0], shape, dtype, place)
        value = self.init(keys[0] if keys else None, shape, dtype) if made is None else made
        other = isinstance(value, jax.Array) and asked is not None and (value.dtype != asked or value.weak_type)
        return value.astype(asked) if other else value

    def has_all_sizes(self, shape: Shape) -> bool:
        """A parameter made by hand has one key, whatever its shape."""
        return True

    def owner(self) -> str:
        """A parameter made by hand belongs to nobody that it knows."""
        return ""


class StaticKeys:
    """Concrete keys and counters as static data: compared and hashed by their bytes."""

    def __init__(self, arrays: Sequence[Any]) -> None:
        self.arrays = tuple(arrays)

    def _bytes(self) -> tuple[bytes, ...]:
        with _compat.at_trace(_compat.eval_trace()):  # comparisons happen inside traces as well
            return tuple(b"" if a is None else np.asarray(_key_data(a)).tobytes() for a in self.arrays)

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
        return [_stored(a) for a in self.arrays]

    def __setstate__(self, state: list[Any]) -> None:
        self.arrays = tuple(None if data is None else _array(data, impl) for impl, data in state)

    def __deepcopy__(self, memo: dict[int, Any]) -> StaticKeys:
        return self


def _key_data(a: Any) -> Any:
    return jax.random.key_data(a) if is_key(a) else a


def _stored(array: Any) -> tuple[str | None, Any]:
    impl = str(jax.random.key_impl(array)) if is_key(array) else None
    return impl, None if array is None else np.asarray(_key_data(array))


def _array(data: Any, impl: str | None) -> Any:
    return jnp.asarray(data) if impl is None else jax.random.wrap_key_data(jnp.asarray(data), impl=impl)


def key_source(keys: Sequence[Any]) -> StaticKeys | tuple[Any, ...]:
    """Return keys as a layer holds them: static, or, in what is built under a transform, as they are."""
    plain = _compat.current_trace() is _compat.eval_trace() and _compat.are_concrete(keys)
    return StaticKeys(keys) if plain else tuple(keys)


def _parts(keys: Any) -> list[Any]:
    """Return keys or counters of a stack one by one; those that are there, without a program that takes them apart."""
    if isinstance(keys, jax.ShapeDtypeStruct):  # of a model that nnx.eval_shape made
        return [jax.ShapeDtypeStruct((), keys.dtype)] * math.prod(keys.shape)
    if not _compat.are_concrete([keys]):
        return [keys[i] for i in np.ndindex(keys.shape)]
    if is_key(keys):
        data = np.asarray(jax.random.key_data(keys))
        impl = jax.random.key_impl(keys)
        return [jax.random.wrap_key_data(jnp.array(d), impl=impl) for d in data.reshape(-1, *data.shape[keys.ndim :])]
    return [jnp.array(count) for count in np.asarray(keys).reshape(-1)]


def leaves_of(keys: Sequence[Any], stacking: Stacking) -> tuple[Any, ...]:
    """Return traced keys as the leaves of one pending init: with the axes of its value, and the marks.

    Args:
        keys: The keys and counters, each of the shape of the stack; None for one that the value does not follow from.
        stacking: Where the axes of the stack are.
    """
    shape = tuple([n or 1 for n in stacking.marks])
    level = _compat.eval_trace() if _compat.are_concrete(keys) else _compat.current_trace()
    with _compat.at_trace(level):
        return (*[k if k is None else jnp.reshape(k, shape) for k in keys], marks_of(stacking))


def _reshaped(key: Any, shape: Shape) -> Any:
    if isinstance(key, jax.ShapeDtypeStruct):  # of a model that nnx.eval_shape made
        return jax.ShapeDtypeStruct(shape, key.dtype)
    return jnp.reshape(key, shape)


def marks_of(stacking: Stacking) -> Any:
    """Return an array of the shape of the marks: of floats, for nnx.grad of an abstract run differentiates by it."""
    return np.zeros(stacking.marks, np.float32)


class PendingInit:
    """What a placeholder knows of its value: partial shape, dtype, source and keys.

    Attributes:
        source: What makes the value.
        element: The partial shape of one model's value; None where an axis is unknown, or as a whole if even the rank
            is. ``shape`` is that of all that are stacked.
        dtype: The dtype that the value gets, None for whatever is written first.
        label: The parameter's name in its layer, for messages.
        turns: Where its keys come in the order of draws, if that is not sure.
        key_source: The keys: static, shared by the placeholders of one layer, or traced leaves (:func:`leaves_of`).
    """

    __slots__ = ("dtype", "element", "key_source", "label", "source", "turns")

    def __init__(
        self,
        source: InitFunction,
        element: PartialShape | None,
        dtype: Any,
        label: str,
        turns: draws.Turns | None = None,
        *,
        keys: Any,
    ) -> None:
        self.source: InitFunction = source
        self.element: PartialShape | None = element
        self.dtype: Any = dtype
        self.label: str = label
        self.turns: draws.Turns | None = turns
        self.key_source: Any = keys

    @classmethod
    def build(
        cls, source: InitFunction, shape: PartialShape | None, dtype: Any, label: str, keys: Sequence[Any]
    ) -> PendingInit:
        """Make a pending init; its keys are leaves if it is made under a transform, else static."""
        held = key_source(keys)
        if not isinstance(held, StaticKeys):
            held = leaves_of(held, Stacking.of_one(None if shape is None else len(shape)))
        return cls(source, shape, dtype, label, keys=held)

    @property
    def leaves(self) -> tuple[Any, ...]:
        """The keys and counters as they are held; None for one that the value does not follow from."""
        return self.key_source.arrays if isinstance(self.key_source, StaticKeys) else self.key_source[:-1]

    @property
    def keys(self) -> tuple[Any, ...]:
        """The keys and counters that ``source.make`` takes, for each of the models that are stacked."""
        return self.built_with if self.turns is None else draws.shifted(self.built_with, self.turns)

    def keys_of_each(self) -> list[tuple[Any, ...]]:
        """Return the keys of each of the models that are stacked, one after the other; of one if none are."""
        keys, sizes = self.keys, self.stacking.sizes
        if not sizes:
            return [keys]
        parts = [None if k is None else _parts(k) for k in keys]
        return [tuple([None if p is None else p[i] for p in parts]) for i in range(math.prod(sizes))]

    @property
    def built_with(self) -> tuple[Any, ...]:
        """The keys as they were when the layer was built."""
        if isinstance(self.key_source, StaticKeys):
            return self.key_source.arrays
        shape = self.stacking.sizes
        return tuple([k if k is None or np.shape(k) == shape else _reshaped(k, shape) for k in self.leaves])

    @property
    def stacking(self) -> Stacking:
        """Where the axes of a stack are."""
        if isinstance(self.key_source, StaticKeys):
            return ONE
        return Stacking(tuple(np.shape(self.key_source[-1])), self.element is not None)

    @property
    def shape(self) -> PartialShape | None:
        """The partial shape, with the axes that are stacked; None if not even the rank is known."""
        if self.element is None or isinstance(self.key_source, StaticKeys):
            return self.element
        stacking = self.stacking
        return stacking.whole(self.element) if stacking.sizes else self.element

    @property
    def is_static(self) -> bool:
        """Whether the pending init has no leaf."""
        return isinstance(self.key_source, StaticKeys)

    def replace(self, **changes: Any) -> PendingInit:
        """Return a copy with another ``dtype``, ``label`` or ``element``."""
        fields = {"source": self.source, "element": self.element, "dtype": self.dtype, "label": self.label} | changes
        return PendingInit(keys=self.key_source, turns=self.turns, **fields)

    def make(self, shape: Shape) -> Any:
        """Return the initial value for ``shape``, in its dtype; each model's as it would be on its own."""
        element = self.stacking.part(shape)
        assert element is not None  # the shape was checked
        return self.stacked(lambda keys: self.source.make(keys, element, self.dtype))

    def stacked(self, make: Callable[[tuple[Any, ...]], Any]) -> Any:
        """Return what ``make(keys)`` gives for each of the models that are stacked, as ``nnx.vmap`` stacks them."""
        stacking = self.stacking
        if not stacking.sizes:
            return make(self.keys)

        def one(keys: tuple[Any, ...], _: Any) -> Any:
            return make(keys)

        for _ in stacking.sizes:
            one = jax.vmap(one)
        in_front = one(self.keys, np.zeros(stacking.sizes))  # the keys may all be None
        front = range(len(stacking.sizes))
        return jax.tree.map(lambda v: jnp.moveaxis(v, front, stacking.axes(v.ndim - len(front))), in_front)

    def static(self) -> tuple[Any, ...]:
        """Everything but the keys."""
        return self.source, self.element, self.dtype, self.label, self.turns

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PendingInit):
            return NotImplemented
        mine, others = self.leaves, other.leaves
        same_keys = len(mine) == len(others) and all(a is b for a, b in zip(mine, others, strict=True))
        return (
            self.static() == other.static()
            and self.stacking == other.stacking
            and (same_keys or (self.is_static and self.key_source == other.key_source))
        )

    def __hash__(self) -> int:
        return hash(self.static())

    def __repr__(self) -> str:
        return f"PendingInit(shape={self.shape}, dtype={self.dtype}, label={self.label!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> PendingInit:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        keys = self.key_source
        if not isinstance(keys, StaticKeys) and not self.stacking.sizes:
            keys = StaticKeys(self.built_with)
        if not isinstance(keys, StaticKeys):  # keys by their data
            return _restore, (StaticKeys(keys), *self.static())
        return _restore_static, (keys, *self.static())


def _restore(leaves: StaticKeys, *static: Any) -> PendingInit:
    return PendingInit(*static, keys=leaves.arrays)


def _restore_static(keys: StaticKeys, *static: Any) -> PendingInit:
    return PendingInit(*static, keys=keys)


def _flatten(pending: PendingInit) -> tuple[tuple[Any, ...], Any]:
    if pending.is_static:
        return (), (*pending.static(), pending.key_source)
    if any(k is not None for k in pending.leaves) and _compat.asked_for_gradient():  # JAX would speak of keys
        owner = pending.source.owner()
        where = f"{pending.label or 'a parameter'}{f' of {owner}' if owner else ''}"
        got = "nnx.grad (or nnx.value_and_grad) with respect to it, while it is an uninitialized parameter"
        needed = "parameters to differentiate with respect to: none exist yet"
        write = "lm.materialize(model, x)  # before the transform"
        raise UninitializedError(Problem(where, got, needed, write))
    return pending.key_source, (*pending.static(), None)


def _unflatten(aux: Any, leaves: Sequence[Any]) -> PendingInit:
    *static, keys = aux
    return PendingInit(*static, keys=tuple(leaves) if keys is None else keys)


jax.tree_util.register_pytree_node(PendingInit, _flatten, _unflatten)
