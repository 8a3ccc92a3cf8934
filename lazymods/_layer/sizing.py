"""What a lazy class was told, and from there the sizes of a layer: ``infer``, and what it may return."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
from jax import export

from lazymods import _graph
from lazymods._errors import LazyError, Problem, ShapeInferenceError, describe_call, one_line, relocate
from lazymods._graph import STATE
from lazymods._layer import first_call, lifecycle
from lazymods._layer.abstract_module import AbstractModule
from lazymods._layer.arguments import as_size
from lazymods._layer.config import REFUSALS, LayerConfig

Infer = Callable[..., dict[str, Any]]
Call = tuple[tuple[Any, ...], dict[str, Any]]  # the arguments of a call


@dataclasses.dataclass(frozen=True)
class LazyClassSpec:
    """How a lazy class was asked for.

    Attributes:
        cls: The class it becomes.
        infer: ``infer(config, *args, **kwargs)`` returns the missing constructor arguments.
        inferred: Arguments that the signature leaves out; None leaves out nothing, and infers what is not given.
        structure: From the bound arguments, what is unknown: ``{"kernel_shape": (2, None, 4)}``.
        options: Arguments that the lazy class takes and the class does not, with their defaults.
        prepare: Changes the bound arguments before they are used.
        entries: Methods that may be called first; each turns its arguments into those of the forward.
        wraps: The argument whose module is initialized first.
        wrapped_call: From the arguments of the call, those with which the wrapped module is called.
        materialize: ``materialize(model, *args)``, for a wrapped model that is no lazy layer itself.
        optional: Required arguments that may be None in the lazy class, still by position.
        scales: See :class:`lazymods._layer.config.LayerConfig`.
    """

    cls: type
    infer: Infer
    inferred: tuple[str, ...] | None = None
    structure: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    prepare: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    entries: Mapping[str, Callable[..., Call]] = dataclasses.field(default_factory=dict)
    wraps: str | None = None
    wrapped_call: Callable[..., Call] = lambda *args, **kwargs: (args, kwargs)
    materialize: Callable[..., Any] | None = None
    optional: tuple[str, ...] = ()
    scales: tuple[str, ...] | None = None

    @property
    def decides(self) -> bool:
        """Whether the class may decide by its sizes: nobody has said what ``infer`` returns, as of any class."""
        return self.inferred is None and self.structure is None


def initialize_parameters(
    layer: Any, plan: LazyClassSpec, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> AbstractModule:
    if plan.wraps is not None:
        _initialize_wrapped(layer, plan, args, kwargs)
    values = infer_values(layer, plan, args, kwargs)
    try:
        return lifecycle.fill(layer, values, traced_zeros=first_call.LOCAL.session is not None)
    except LazyError:
        raise
    except REFUSALS as error:
        sizes = ", ".join(f"{k}={v}" for k, v in values.items())
        got = f"{describe_call(args, kwargs)}, so {sizes}"
        needed = f"sizes that {plan.cls.__name__} takes; it says: {one_line(error)}"
        write = "layer(x)  # with an input of another width"
        raise ShapeInferenceError(Problem(_graph.place(layer, type(layer).__name__), got, needed, write)) from error


def _initialize_wrapped(layer: Any, plan: LazyClassSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Initialize the module that a layer wraps: a lazy layer, or a model that has some."""
    inner = getattr(layer, str(plan.wraps))
    try:
        args, kwargs = plan.wrapped_call(*args, **kwargs)
    except TypeError as error:
        got = describe_call(args, kwargs)
        problem = Problem(_graph.place(layer, type(layer).__name__), got, f"an input; {error}", "layer(x)")
        raise ShapeInferenceError(problem) from error
    if _graph.is_lazy_node(inner):
        first_call.initialize(inner, args, kwargs)
    elif not _graph.has_uninitialized_params(inner):
        return
    elif first_call.LOCAL.session is not None:  # in an abstract run, a call is as abstract
        args, kwargs = jax.tree.map(_zeros, (args, kwargs))
        inner(*args, **kwargs)
    else:
        assert plan.materialize is not None  # whoever wraps gives it
        try:
            plan.materialize(inner, *args, **kwargs)
        except LazyError as error:
            raise relocate(error, lambda p: f"{plan.wraps}.{p.where}") from error


def _zeros(x: Any) -> Any:
    return jax.lax.full(x.shape, 0, x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else x


def infer_values(layer: Any, plan: LazyClassSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Call ``infer`` with the shapes of a call's arguments and check what it returns.

    Raises:
        ShapeInferenceError: If it raises, or does not return the missing arguments as positive ints, or returns what
            the constructor does not take.
    """
    spec = vars(layer)[STATE].spec
    config = MappingProxyType(spec.config | lifecycle.modules_of(layer))
    shapes, named = first_call.as_specs((args, kwargs))
    try:
        values = plan.infer(config, *shapes, **named)
    except LazyError:
        raise
    except Exception as error:
        needed = f"a call from which infer can tell the sizes; it raised {type(error).__name__}: {error}"
        write = "layer(x)  # with the arguments that its forward takes"
        if "ShapeDtypeStruct" in str(error):
            needed += "; it gets shapes and dtypes, and no values"
            write = "infer=lambda config, x: {'in_features': x.shape[-1]}"
        if isinstance(error, NotInferableError):
            needed, write = error.needed, error.write
        elif not args and not kwargs:
            needed = f"the arguments of a call, or specs of them: their shapes tell the sizes; infer says: {error}"
            write = "lm.materialize(model, jax.ShapeDtypeStruct(x.shape, x.dtype))  # x: what the model is called with"
        where = _graph.place(layer, type(layer).__name__)
        cause = None if isinstance(error, NotInferableError) else error
        raise ShapeInferenceError(Problem(where, describe_call(args, kwargs), needed, write)) from cause
    if isinstance(values, Mapping):  # what the caller gave is not to be inferred
        given = {*spec.config, *spec.modules}.difference(spec.left_out, spec.unknown)
        values = {name: value for name, value in values.items() if name not in given}
    problem = _wrong_values(spec, values)
    if problem is not None:
        got, needed, write = problem
        where = _graph.place(layer, type(layer).__name__)
        raise ShapeInferenceError(Problem(where, f"{describe_call(args, kwargs)}: {got}", needed, write))
    return {k: jax.tree.map(as_size, v) for k, v in values.items()}


class NotInferableError(Exception):
    """Raised by the built-in ``infer`` functions: what is needed, and the line to write."""

    def __init__(self, needed: str, write: str) -> None:
        super().__init__(needed)
        self.needed, self.write = needed, write


def _wrong_values(spec: LayerConfig, values: Any) -> tuple[str, str, str] | None:
    """Say what is wrong with what ``infer`` returned: got, needed, write."""
    wanted = sorted(spec.unknown)
    needed = f"a dict of positive ints for {', '.join(wanted) or 'nothing'}: the arguments that were not given"
    write = "return {" + ", ".join(f'"{n}": x.shape[-1]' for n in wanted) + "}"
    if not isinstance(values, Mapping):
        return f"infer returned {values!r}", needed, write
    if not set(wanted) <= set(values) or not set(values) <= {*wanted, *spec.left_out}:
        return f"infer returned the arguments {sorted(map(str, values))}", needed, write
    for name, value in values.items():
        for leaf in jax.tree.leaves(value):  # None is for what takes it: cond_dim=None
            size = as_size(leaf)
            if size is None and export.is_symbolic_dim(leaf):
                return (
                    f"{name}={leaf}, a symbolic size",
                    "a concrete feature axis: parameters need their sizes, only batch axes may be symbolic",
                    "layer(x)  # with an input whose feature axis is an int",
                )
            if size is None or size < 0:
                return f"infer returned {name}={leaf!r}", needed, write
    zero = [k for k, v in values.items() if any(as_size(leaf) == 0 for leaf in jax.tree.leaves(v))]
    if zero:
        return (
            ", ".join(f"{k}=0" for k in zero),
            "at least one feature: an initializer divides by their number",
            "layer(x)  # with an input whose feature axis is not empty",
        )
    return None
