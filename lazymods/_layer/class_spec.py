"""What ``lm.lazy`` was told about a class: the record from which a lazy class is made."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

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
