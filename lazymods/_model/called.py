"""What a run without values calls, a model or a method of one, and the arguments that it calls it with.

Models of other people have more to call than themselves, or cannot be called at all: encoders and decoders, cells with
``step`` and ``unroll``. A method stands for its model, whose layers are told by their paths in it.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from lazymods._errors import Problem
from lazymods._graph import is_object
from lazymods._refusals import ArgumentError


def model_of(given: Any) -> Any:
    """Return the module that a method is of, or that a partial function has for its one argument; else what came."""
    if isinstance(given, types.MethodType):
        owner = given.__self__
    else:  # a method that nnx.jit has compiled is a partial function
        is_partial = isinstance(given, functools.partial) and len(given.args) == 1 and not given.keywords
        owner = given.args[0] if is_partial else None
    return owner if isinstance(owner, nnx.Pytree) else given


class Called:
    """What is called.

    Args:
        given: A module, a method of one, or any function.

    Attributes:
        model: The module; the function, if it is no method of one.

    Raises:
        ArgumentError: If it cannot be called.
    """

    def __init__(self, given: Any) -> None:
        self.model = model_of(given)
        method = given.func if isinstance(given, functools.partial) else getattr(given, "__func__", None)
        self._method: Any = None if self.model is given else method
        if isinstance(given, nnx.Pytree) and not callable(given):
            raise ArgumentError(_not_callable(given))

    @property
    def is_method(self) -> bool:
        """Whether it is a method of the model."""
        return self._method is not None

    def of(self, model: Any) -> Callable[..., Any]:
        """Return the same of a copy of the model."""
        return model if self._method is None else functools.partial(self._method, model)


def _not_callable(model: Any) -> Problem:
    name = type(model).__name__
    public = [n for cls in type(model).__mro__ if not _is_flax(cls) for n in vars(cls) if not n.startswith("_")]
    method = next((n for n in public if isinstance(getattr(type(model), n), types.FunctionType)), "method")
    needed = "what can be called: it is run without values, to see which layer gets what"
    return Problem(name, "a module without a __call__", needed, f"lm.materialize(model.{method}, x)  # a method of it")


def _is_flax(cls: type) -> bool:
    return cls.__module__.partition(".")[0] in ("flax", "lazymods", "builtins")


class CallArguments:
    """The arguments of a call, taken apart: arrays to trace, modules and Variables to copy, and what stays as it is.

    Args:
        args: Shapes and dtypes in place of arrays.
        kwargs: Keyword arguments, likewise.

    Attributes:
        arrays: Shape and dtype of each array by its place.
        modules: The modules and Variables, in order.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._leaves, self._treedef = jax.tree.flatten((args, kwargs), is_leaf=is_object)
        self._places = [i for i, v in enumerate(self._leaves) if is_object(v)]
        self.arrays = {i: v for i, v in enumerate(self._leaves) if isinstance(v, jax.ShapeDtypeStruct)}
        self.modules = [self._leaves[i] for i in self._places]

    def put_together(self, arrays: dict[int, Any], modules: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with these in place of ``arrays`` and ``modules``."""
        filled = dict(enumerate(self._leaves)) | arrays | dict(zip(self._places, modules, strict=True))
        return jax.tree.unflatten(self._treedef, [filled[i] for i in range(len(self._leaves))])
