"""Parameters without a shape.

An :class:`UninitializedVariable` is an ordinary Flax Variable whose value is a
:class:`~lazymods._initial.pending.PendingInit`: NNX filters, ``nnx.state`` and ``nnx.split`` see a Param or BatchStat,
JAX sees no array leaf. ``materialize`` turns that very object into the ordinary Variable, so references, ties and
optimizers that hold it stay right. Everything that would need a value or an unknown size raises
:class:`UninitializedError`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Generator, Iterator, Sequence
from copy import deepcopy
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.nnx import reprlib
from flax.typing import MISSING, Missing

from lazymods import _compat, _graph
from lazymods._errors import (
    LazyError,
    PendingAttributeError,
    Problem,
    ShapeInferenceError,
    UninitializedError,
    check_pickles,
    describe,
    one_line,
)
from lazymods._initial import draws, placement
from lazymods._initial.pending import InitSource, PartialShape, PendingInit
from lazymods._initial.stacking import Shape
from lazymods._layer import contexts
from lazymods._layer.asked import SIZE_LINE, line_for_caller, line_for_holder, plain_holder
from lazymods._refusals import wrong_argument


class _PlaceholderType(type(nnx.Variable)):  # type: ignore[misc]
    """Flax asks whether a value is a tracer that stands for a Variable; none stands for a placeholder."""

    __instancecheck__: Any = type.__instancecheck__


class UninitializedVariable(nnx.Variable[Any], metaclass=_PlaceholderType):
    """Base of all placeholders: a Variable whose shape, and so whose value, is not known yet.

    Args:
        shape: The partial shape, None for an unknown axis, ``(None, 10)``. None: not even the rank is known.
        dtype: The dtype it will have. None: the default float, or that of the value written.
        init: ``init(key, shape, dtype)`` makes the value; zeros if left out.
        key: The random key for ``init``.
        **metadata: Metadata of the Variable, such as ``out_sharding``.

    Example:
        >>> import lazymods as lm
        >>> p = lm.UninitializedParameter((None, 10))
        >>> p
        UninitializedParameter(shape=(?, 10), dtype=float32)
        >>> p.materialize((3, 10))
        >>> type(p).__name__, p.shape
        ('Param', (3, 10))
    """

    target: type[nnx.Variable[Any]] = nnx.Variable

    def __init__(
        self,
        shape: Sequence[int | None] | None = None,
        *,
        dtype: Any = None,
        init: Callable[..., Any] | None = None,
        key: Any = None,
        **metadata: Any,
    ) -> None:
        partial = None if shape is None else tuple(None if d is None else operator.index(d) for d in shape)
        if partial is not None and any(d is not None and d < 0 for d in partial):
            write = f"lm.{type(self).__name__}((None, 4))"
            raise wrong_argument(type(self).__name__, partial, "a shape has no negative sizes", write)
        dtype = None if dtype is None else jax.dtypes.canonicalize_dtype(dtype)
        keys = () if key is None else (key,)
        # the pending init is not a value: Flax must neither shard it nor run value hooks on it
        super().__init__(PendingInit.build(InitSource(init), partial, dtype, "", keys), ref=False, hijax=False)
        _compat.raw_metadata(self).update(_compat.default_metadata() | metadata)

    # ------------------------------------------------------------ what is known

    @property
    def pending(self) -> PendingInit:
        """How the value will be made."""
        return self.get_raw_value()

    @property
    def shape(self) -> Any:
        """The partial shape, ``(None, 10)``; refused while even the rank is unknown."""
        if self.pending.shape is None:
            raise self._refused("its shape")
        return self.pending.shape

    @property
    def ndim(self) -> int:
        """The number of axes; refused while it is unknown."""
        return len(self.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype that the parameter will have."""
        dtype = self.pending.dtype
        return jnp.result_type(float) if dtype is None else dtype

    @dtype.setter
    def dtype(self, dtype: Any) -> None:
        self.set_raw_value(self.pending.replace(dtype=jax.dtypes.canonicalize_dtype(dtype)))

    @property
    def size(self) -> int:
        """The number of elements; refused while an axis is unknown."""
        return int(np.prod(self._full_shape("its size"), dtype=np.int64))

    @property
    def itemsize(self) -> int:
        """The number of bytes of an element."""
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """The number of bytes; refused while an axis is unknown."""
        return self.size * self.dtype.itemsize

    def __len__(self) -> int:
        """Return the length of the first axis; refused while an axis is unknown."""
        return self._full_shape("its length")[0]

    def astype(self, dtype: Any) -> UninitializedVariable:
        """Return a placeholder of another dtype: the value is drawn as before, then cast."""
        twin = _compat.new_variable(type(self), self.pending, self.get_metadata())
        twin.dtype = dtype
        return twin

    # ------------------------------------------------------------ becoming a Variable

    def materialize(self, shape: Sequence[int], value: Any = None) -> None:
        """Turn this very object into the ordinary Variable.

        Args:
            shape: The whole shape; it must agree with the axes that are known. Of a layer that ``nnx.vmap`` stacked,
                that of one layer will do, and is what is meant in its ``initialize_parameters``.
            value: The value, of that shape; cast to the placeholder's dtype if it has one. None: the
                initializer's.

        Raises:
            ShapeInferenceError: If the shape is not whole or contradicts a known axis or the value's shape.
            UninitializedError: If it is an argument of a transform that would lose the parameter, or its gradient.
        """
        full = self.check_shape(shape)
        if not _graph.LOCAL.initializing and _graph.LOCAL.session is None:
            contexts.check_by_hand(self, drawn=value is None)
        if value is not None and len(full) != len(shape):  # each of the layers gets that of one
            value = self.pending.stacking.repeat(jnp.asarray(value))
        if value is None:
            with _compat.at_trace(self.level()):
                value = self._initial_value(full)
        else:
            value = self._given_value(full, value)
        with _compat.at_trace(self.level()):
            self.become(value)

    def level(self) -> Any:
        """Return the trace in which the value is made: at once if the keys are concrete, never in an abstract run."""
        if not _graph.LOCAL.session and _compat.are_concrete(self.pending.leaves):
            return _compat.eval_trace()
        return _compat.home_trace(self)

    def check_shape(self, shape: Sequence[int]) -> Shape:
        """Return ``shape`` as a tuple of ints.

        Raises:
            ShapeInferenceError: If it is not whole, or contradicts an axis that is known.
        """
        try:
            full = tuple(operator.index(d) for d in shape)
        except TypeError:
            full = None
        known, one, stacking = self.pending.shape, self.pending.element, self.pending.stacking
        if full is not None and min(full, default=0) >= 0:
            if stacking.sizes and (_graph.LOCAL.initializing if one is None else len(full) == len(one)):
                full, known = (stacking.whole(full), known) if fits(one, full) else (full, one)
            if fits(known, full) and stacking.part(full) is not None:
                return full
        got = f"shape {shape!r}" if isinstance(shape, (int, str, tuple, list)) else describe(shape)
        needed = "whole sizes" if known is None else f"shape {show_shape(known)}, whose known axes are fixed"
        write = "parameter.materialize(shape)  # with sizes that agree"
        raise ShapeInferenceError(Problem(self.whereabouts(), got, needed, write))

    def _initial_value(self, shape: Shape) -> Any:
        if not _graph.LOCAL.session:
            pending, part = self.pending, self.pending.stacking.part(shape)
            draws.use(pending.turns, is_sure=part is None or pending.source.has_all_sizes(part))
        try:
            with placement.making(self):
                return self.pending.make(shape)
        except ValueError as error:
            if isinstance(error, LazyError):
                raise
            got, needed = f"shape {shape}", f"sizes that its layer takes; it says: {one_line(error)}"
            write = "parameter.materialize(shape)  # with other sizes"
            raise ShapeInferenceError(Problem(self.whereabouts(), got, needed, write)) from error
        except TypeError as error:
            if self.pending.leaves or not isinstance(self.pending.source, InitSource):
                raise
            got, needed = "no key", f"its initializer draws random numbers ({error})"
            write = f"{type(self).__name__}(..., init=init, key=rngs.params())"
            raise UninitializedError(Problem(self.whereabouts(), got, needed, write)) from error

    def _given_value(self, shape: Shape, value: Any) -> Any:
        array = strongly_typed(jnp.asarray(value, self.pending.dtype))
        if _compat.is_tracer(array):
            super().set_raw_value(self.pending)  # refused by Flax where another trace would leave its value behind
        if array.shape != shape:
            got, needed = f"a value {describe(array)}", f"shape {shape}, as asked for"
            write = "parameter.materialize(value.shape, value)"
            raise ShapeInferenceError(Problem(self.whereabouts(), got, needed, write))
        return array

    def become(self, value: Any) -> None:
        """Be the ordinary Variable that holds ``value`` from now on (private: no checks)."""
        metadata = self.get_metadata()
        place = placement.place_of(self)
        if isinstance(self.pending.source, InitSource):  # as if constructed with that value
            elsewhere = place is not None or _graph.LOCAL.session is not None
            own = {k: v for k, v in metadata.items() if k == "eager_sharding" and elsewhere}
            twin = self.target(value, **metadata | dict.fromkeys(own, False))
            value, metadata = twin.get_raw_value(), twin.get_metadata() | own
        elif place is None and metadata.get("out_sharding") and metadata["eager_sharding"] and not _graph.LOCAL.session:
            value = self._shard(value, metadata)
        if place is not None:
            value = placement.at_place(self, value)
        _compat.write_variable(self, self.target, placement.told_to_xla(self, value), metadata)

    def _shard(self, value: Any, metadata: dict[str, Any]) -> Any:
        names = ("out_sharding", "sharding_rules", "mesh", "eager_sharding")
        try:
            twin = nnx.Variable(value, **{k: metadata[k] for k in names if k in metadata})
        except ValueError as error:
            got = f"out_sharding={metadata['out_sharding']!r}"
            needed = f"a mesh to shard it over; Flax says: {one_line(error)}"
            write = "with jax.set_mesh(mesh): lm.materialize(model, x)"
            raise LazyError(Problem(self.whereabouts(), got, needed, write)) from error
        return twin.get_raw_value()

    def set_raw_value(self, value: Any, **kwargs: Any) -> None:
        """Take a pending init, or a value: then be the ordinary Variable (NNX transforms write through this)."""
        if isinstance(value, PendingInit) or not is_value(value):
            super().set_raw_value(value, **kwargs)
        else:
            _compat.write_variable(self, self.target, value, self.get_metadata())

    def update_from_state(self, variable_state: nnx.Variable[Any]) -> None:
        """Take the state of another Variable, its type as well if it has a value."""
        super().update_from_state(variable_state)
        raw = variable_state.get_raw_value()
        if not isinstance(variable_state, UninitializedVariable) and is_value(raw):
            _compat.write_variable(self, type(variable_state), raw, self.get_metadata())

    def copy(self, value: Any = MISSING, **updates: Any) -> Any:
        """Copy the placeholder; with a value, return the ordinary Variable that holds it.

        Raises:
            UninitializedError: If the value is none of a parameter's, such as a sharding for it.
        """
        value = updates.pop("value", value)
        if isinstance(value, (Missing, PendingInit)):
            return super().copy(value, **updates)
        if not is_value(value):
            raise self._refused(f"its sharding or plan ({type(value).__name__})")
        updates.pop("_copy_ref", None)
        return self.target.from_metadata(value, self.get_metadata() | updates)

    replace = copy
    to_state = copy

    def set_value(self, value: Any, *, index: Any = ...) -> None:
        """Assign the whole value (``p[...] = value``): the same as ``materialize(value.shape, value)``."""
        if index is not ...:
            raise self._refused("one of its elements")
        value = jnp.asarray(value)
        self.materialize(value.shape, value)

    # ------------------------------------------------------------ refusals

    def get_value(self, *, index: Any = None) -> NoReturn:
        """Refuse: there is no value yet."""
        raise self._refused("its value")

    def __jax_array__(self) -> NoReturn:
        """Refuse: there is no value yet."""
        raise self._refused("its value")

    def __array__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: there is no value yet."""
        raise self._refused("its value")

    def __iter__(self) -> Iterator[Any]:
        """Refuse: there is no value yet."""
        raise self._refused("its elements")

    def __bool__(self) -> bool:
        """Be true, as a Variable that is there: Flax's norms ask ``if self.scale``."""
        return True

    def __getattr__(self, name: str) -> Any:
        """Return metadata; refuse what only an array has."""
        metadata = _compat.raw_metadata(self)
        if name in metadata:
            return metadata[name]
        raise PendingAttributeError(self._problem(f"its attribute .{name}"))

    def _full_shape(self, wanted: str) -> Shape:
        shape = self.pending.shape
        if shape is None or None in shape:
            raise self._refused(wanted)
        return shape  # type: ignore[return-value]

    def whereabouts(self) -> str:
        """Name the parameter: ``fc1.kernel (UninitializedParameter of LazyLinear)``."""
        owner = self.pending.source.owner()
        kind = f"{type(self).__name__} of {owner}" if owner else type(self).__name__
        return _graph.place(self, kind, self.pending.label)

    def _problem(self, wanted: str, write: str = SIZE_LINE) -> Problem:
        known = "" if self.pending.shape is None else f" of shape {show_shape(self.pending.shape)}"
        got = f"a use of {wanted}, while it is an uninitialized parameter{known}"
        needed = "its sizes, which follow from the first input, from a shape spec or from a checkpoint"
        plain = None if self.pending.source.owner() else plain_holder(self)
        if plain is not None:
            why = f"{plain[0]} is no lazy module, and only a checkpoint could tell them"
            needed, write = f"its sizes, which nothing infers: {why}", line_for_holder(*plain, self.pending.shape)
        return Problem(self.whereabouts(), got, needed, write)

    def _refused(self, wanted: str) -> UninitializedError:
        return UninitializedError(self._problem(wanted, line_for_caller()))

    # ------------------------------------------------------------ showing, copying, pickling

    def __repr__(self) -> str:
        """Show what is known: ``UninitializedParameter(shape=(?, 10), dtype=float32)``."""
        shape = "?" if self.pending.shape is None else show_shape(self.pending.shape)
        extra = "".join(f", {k}={v!r}" for k, v in self.get_metadata(exclude_required=True).items())
        return f"{type(self).__name__}(shape={shape}, dtype={self.dtype}{extra})"

    def __nnx_repr__(self) -> Generator[Any, None, None]:
        """Show what is known inside the repr of a module."""
        yield reprlib.Object(type=type(self).__name__, same_line=True)
        yield reprlib.Attr("shape", _Bare("?" if self.pending.shape is None else show_shape(self.pending.shape)))
        yield reprlib.Attr("dtype", _Bare(str(self.dtype)))
        for name, value in self.get_metadata(exclude_required=True).items():
            yield reprlib.Attr(name, value)

    def __treescope_repr__(self, path: Any, subtree_renderer: Any) -> Any:
        """Show what is known in a notebook."""
        from flax.nnx import visualization

        attributes = {"shape": self.pending.shape, "dtype": self.dtype, **self.get_metadata(exclude_required=True)}
        return visualization.render_object_constructor(
            object_type=type(self), attributes=attributes, path=path, subtree_renderer=subtree_renderer
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy with metadata of its own; the pending init is immutable."""
        return placeholder(type(self), self.pending, deepcopy(self.get_metadata(), memo))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by the Variable type that it stands for.

        Raises:
            SerializationError: If its initializer does not pickle.
        """
        source = self.pending.source
        if isinstance(source, InitSource):
            needed = "an initializer that pickles: a placeholder is stored with its own"
            write = "parameter.materialize(shape)  # first; or an init that is defined at the top of a module"
            check_pickles("init", source.init, self.whereabouts, needed, write)
        return _restore, (self.target, self.pending, self.get_metadata())


def _refusing(what: str) -> Callable[..., NoReturn]:
    def refuse(self: UninitializedVariable, *_: Any) -> NoReturn:
        raise self._refused(what)

    return refuse


# Flax's Variable has no comparisons, and refuses in-place operators with advice that would not help here.
for _name in ("lt", "le", "gt", "ge", "divmod", "rdivmod"):
    setattr(UninitializedVariable, f"__{_name}__", _refusing("its value"))
for _name in "add sub mul matmul truediv floordiv mod pow lshift rshift and xor or".split():
    setattr(UninitializedVariable, f"__i{_name}__", _refusing("its value"))


class UninitializedParameter(UninitializedVariable, nnx.Param[Any]):
    """A placeholder that is an ``nnx.Param`` (see :class:`UninitializedVariable` for the arguments)."""

    target: type[nnx.Variable[Any]] = nnx.Param


class UninitializedBuffer(UninitializedVariable, nnx.BatchStat[Any]):
    """A placeholder that is an ``nnx.BatchStat`` (see :class:`UninitializedVariable` for the arguments)."""

    target: type[nnx.Variable[Any]] = nnx.BatchStat


class UninitializedArray(UninitializedVariable):
    """A placeholder for a raw array that a module holds without a Variable; replaced by the array."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as itself: it stands for no Variable type."""
        return placeholder, (UninitializedArray, self.pending, self.get_metadata())


_TYPES: dict[type, type[UninitializedVariable]] = {
    nnx.Param: UninitializedParameter,
    nnx.BatchStat: UninitializedBuffer,
    nnx.Variable: UninitializedVariable,
}


def placeholder_type(target: type[nnx.Variable[Any]]) -> type[UninitializedVariable]:
    """Return the placeholder type of a Variable type, made on demand: ``UninitializedLoRAParam``."""
    if target not in _TYPES:
        name = f"Uninitialized{target.__name__}"
        namespace = {"target": target, "__module__": __name__}
        _TYPES[target] = _compat.make_quietly(_PlaceholderType, name, (UninitializedVariable, target), namespace)
    return _TYPES[target]


def placeholder(cls: type[UninitializedVariable], pending: PendingInit, metadata: dict[str, Any]) -> Any:
    """Make a placeholder with a pending init of its own."""
    return _compat.new_variable(cls, pending, dict(metadata))


def _restore(target: type[nnx.Variable[Any]], pending: PendingInit, metadata: dict[str, Any]) -> Any:
    return placeholder(placeholder_type(target), pending, metadata)


def is_value(raw: Any) -> bool:
    """Whether ``raw`` is a parameter's value; nnx passes sentinels through Variables as well."""
    return isinstance(raw, (jax.Array, np.ndarray, jax.ShapeDtypeStruct))


def strongly_typed(array: Any) -> Any:
    """Return an array that no longer follows the dtypes it meets: a weak one would make programs trace twice."""
    return array.astype(array.dtype) if getattr(array, "weak_type", False) else array


def fits(known: PartialShape | None, shape: Sequence[int]) -> bool:
    """Whether a whole shape agrees with a partial one."""
    if known is None or known == shape:
        return True
    return len(known) == len(shape) and not [k for k, d in zip(known, shape, strict=True) if k is not None and k != d]


def show_shape(shape: PartialShape) -> str:
    """Write a partial shape with ``?`` for what is unknown."""
    dims = ["?" if d is None else str(d) for d in shape]
    return f"({dims[0]},)" if len(dims) == 1 else f"({', '.join(dims)})"


class _Bare(str):
    """A text that is shown without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)
