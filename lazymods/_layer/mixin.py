"""LazyModuleMixin: lazy, then sized, then concrete.

A class that mixes it in has parameters without a shape. Before its first forward, ``initialize_parameters`` runs
with the arguments of that call and materializes them; then the object becomes ``cls_to_become``, and nothing of
lazymods is left in it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Self

from flax import nnx

from lazymods import _compat, _graph
from lazymods._errors import PendingAttributeError, Problem
from lazymods._graph import STATE
from lazymods._layer import first_call, lifecycle
from lazymods._layer.asked import SIZE_LINE
from lazymods._layer.building import LazyState


class LazyModuleMixin(nnx.Module):  # a Module, so that the layout is that of the class it becomes
    """Mix into an nnx.Module class, in front of it, to make it lazy.

    Attributes:
        cls_to_become: The class of the object once it is initialized. None: it keeps its class, and only the lazy
            machinery goes. A subclass of a lazy class keeps its own class unless it names one here.

    Example:
        >>> import jax.numpy as jnp, lazymods as lm
        >>> from flax import nnx
        >>> class Scale(nnx.Module):
        ...     def __init__(self, features):
        ...         self.w = nnx.Param(jnp.ones(features))
        ...     def __call__(self, x):
        ...         return x * self.w
        >>> class LazyScale(lm.LazyModuleMixin, Scale):
        ...     cls_to_become = Scale
        ...     def __init__(self):
        ...         self.w = lm.UninitializedParameter(init=nnx.initializers.ones)
        ...     def initialize_parameters(self, x):
        ...         self.w.materialize((x.shape[-1],))
        >>> layer = LazyScale()
        >>> layer(jnp.ones((2, 3))).shape, type(layer).__name__
        ((2, 3), 'Scale')
    """

    cls_to_become: type[nnx.Module] | None = None

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Make an object that is lazy from the start."""
        target = cls.cls_to_become
        self = super().__new__(cls if target is None else _compat.laid_out_as(target, cls))
        object.__setattr__(self, STATE, LazyState())
        return self

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Let the class keep itself unless it says otherwise, and let its ``__call__`` initialize first."""
        super().__init_subclass__(**kwargs)
        _compat.inherit_data_names(cls)
        if "cls_to_become" not in vars(cls):
            cls.cls_to_become = None
        if "initialize_parameters" in vars(cls) and "_lazymods_infer" not in vars(cls):
            cls._lazymods_infer = None  # sizes no longer follow from the arguments in the way known
        for name in ("__call__", *cls._lazymods_entries):
            if name in vars(cls):
                setattr(cls, name, _initializing(vars(cls)[name]))

    _lazymods_infer: Any = None
    _lazymods_entries: tuple[str, ...] = ()  # other methods that may be the first to be called

    if not TYPE_CHECKING:  # type checkers take that of the class that this one stands for

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            """Initialize, then run the forward of the class that this one stands for."""
            try:
                cls = type(self)
                if not issubclass(cls, LazyModuleMixin):  # another thread has just initialized it
                    return self(*args, **kwargs)
                forward: Callable[..., Any] = super(LazyModuleMixin, cls).__call__  # type: ignore[misc]
                if STATE not in vars(self):
                    return forward(self, *args, **kwargs)
                return first_call.first_call(self, forward, args, kwargs)
            except Exception as error:
                _compat.hide_frames(error)
                raise

    def initialize_parameters(self, *args: Any, **kwargs: Any) -> Any:
        """Materialize every parameter; runs once, with the arguments of the first call.

        Read shapes and dtypes only: under a transform or in ``lm.materialize`` arrays come as
        ``jax.ShapeDtypeStruct``.

        Raises:
            NotImplementedError: If the class does not define it.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must define initialize_parameters(self, *args, **kwargs): it gets the arguments "
            f"of the first call and materializes every parameter, self.w.materialize((x.shape[-1],))"
        )

    def has_uninitialized_params(self) -> bool:
        """Say whether a parameter or buffer is still uninitialized."""
        return _graph.has_uninitialized_params(self)

    def infer_attributes_from_state(self) -> None:
        """Set attributes such as ``in_features`` from the parameters; runs after a load has filled them."""

    if not TYPE_CHECKING:  # for type checkers, the attributes are those of the class

        def __getattr__(self, name: str) -> Any:
            """Say of an attribute that must wait for the sizes that it is pending."""
            state = vars(self).get(STATE)
            if state is not None and state.spec is not None and not name.startswith("__"):
                pending = state.spec.formulas.pending if not state.spec.modules else ()
                if (name,) in pending:
                    got, needed = f"a use of .{name}", "its sizes, which are not known yet"
                    where = _graph.place(self, type(self).__name__)
                    raise PendingAttributeError(Problem(where, got, needed, SIZE_LINE))
            own = getattr(super(), "__getattr__", None)  # the class's own
            if own is not None:
                return own(name)
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __repr__(self) -> str:
        """Show what is known: a repr of the class's own, as a dataclass has, may ask for a size."""
        try:
            return super().__repr__()
        except PendingAttributeError:
            return nnx.Module.__repr__(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over the attributes of a pickle, lazy or not."""
        vars(self).clear()
        vars(self).update(state)

    def _graph_node_clear(self) -> None:
        super()._graph_node_clear()  # type: ignore[misc]
        lifecycle.start_update(self)

    def _graph_node_init(self, attributes: Iterable[tuple[Any, Any]]) -> None:
        super()._graph_node_init(attributes)  # type: ignore[misc]
        lifecycle.end_update(self)


def _initializing(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method so that the lazy layer is initialized before its first call."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            if STATE in vars(self):
                return first_call.first_call(self, method, args, kwargs)
            output = method(self, *args, **kwargs)
            first_call.note_success(self)
            return output
        except Exception as error:
            _compat.hide_frames(error)
            raise

    return call
