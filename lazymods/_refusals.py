"""Arguments that no program can take: each is named, with its place and type, and what to write for its kind."""

from __future__ import annotations

import dataclasses
import enum
import io
import sys
import types
from collections.abc import Callable, Iterator, MutableSet, Set
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lazymods._errors import LazyError, Problem, describe, one_line

_NEEDED = "arrays, numbers and nnx objects, in any pytree: they are the inputs of the compiled program"
_STATIC = "lm.jit(fn, static_argnames=...)  # with the parameter's name, if it is part of the program"
MAX_SHOWN = 200  # characters of an argument


class ArgumentError(LazyError, TypeError, ValueError):
    """An argument is none that the function takes: of another type or value, or nothing that a program can take."""


ArgumentError.__module__ = "lazymods"


def wrong_argument(where: str, got: Any, needed: str, write: str) -> ArgumentError:
    """Return the error for an argument that a function does not take.

    Args:
        where: The function, and the argument.
        got: What it was given; a class stands for one of its objects.
        needed: What it takes.
        write: The line that mends it.
    """
    is_object = isinstance(got, nnx.Pytree) or hasattr(got, "shape")
    shown = got.__name__ if isinstance(got, type) else describe(got) if is_object else " ".join(repr(got).split())
    return ArgumentError(Problem(where, shown[:MAX_SHOWN], needed, write))


def refusal(where: str, value: Any, reason: Exception | None = None) -> ArgumentError:
    """Return the error for an argument, or a part of one, that is no input.

    Args:
        where: Its name and path.
        value: The value.
        reason: Why JAX refuses it, if it is a number or an array.
    """
    got = describe(value) if type(value) is str else _article(type(value).__name__)
    if reason is not None:
        got += f": {one_line(reason)}"
    return ArgumentError(Problem(where, got, _NEEDED, _line(value)))


def unreadable(where: str, value: Any, reason: Exception) -> ArgumentError:
    """Return the error for an argument that JAX can't take apart, such as a dict whose keys have no order."""
    got = f"{_article(type(value).__name__)}: {one_line(reason)}"
    write = "{str(k): v for k, v in d.items()}  # keys of one type, or nodes that flatten"
    return ArgumentError(Problem(where, got, "a pytree that JAX can take apart", write))


def used_up(where: str, value: Any) -> ArgumentError:
    """Return the error for a static argument that can be used once."""
    needed = "a value that stays what it is: the program is compiled with it, and would go on with what it gave first"
    return ArgumentError(Problem(where, _article(type(value).__name__), needed, _line(value)))


def refuse_uncallable(where: str, value: Any, line: str = "") -> None:
    """Refuse what is to be made a function of and is none, when it is given and not when it is called.

    Args:
        where: What it was given to.
        value: It.
        line: The call as it should be; left out, ``where`` of a function.

    Raises:
        ArgumentError: If it can't be called.
    """
    if not callable(value):
        got = "an array" if isinstance(value, (jax.Array, np.ndarray)) else _article(type(value).__name__)
        needed = "what can be called: a function, a method, or a module with a __call__"
        write = f"{line or f'{where}(f)'}  # the function itself, and not what it returned; options by their names"
        raise ArgumentError(Problem(where, got, needed, write))


def reason_against(value: Any) -> Exception | None:
    """Return why JAX refuses a number or an array that is none of its own; None if it takes it."""
    try:
        jax.typeof(value)
        return ValueError("a mask, which JAX does not know") if isinstance(value, np.ma.MaskedArray) else None
    except (TypeError, ValueError, OverflowError) as error:
        return error


def _article(name: str) -> str:
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


_LINES: tuple[tuple[Callable[[Any], bool], str], ...] = (
    (lambda v: isinstance(v, io.IOBase), "np.frombuffer(file.read(), np.uint8)  # what it holds"),
    (lambda v: isinstance(v, Iterator), "list(iterator)  # or next(iterator): an iterator can be used once"),
    (lambda v: isinstance(v, (set, frozenset, Set, MutableSet)), "sorted(values)  # a set has no order"),
    (lambda v: isinstance(v, np.ma.MaskedArray), "array.filled(0)  # and its mask as an argument of its own"),
    (lambda v: isinstance(v, (np.ndarray, np.generic)), "array.astype(np.float32)  # in the machine's byte order"),
    (lambda v: isinstance(v, int), "jnp.asarray(float(number))  # or another dtype that holds it"),
    (lambda v: type(v).__module__.partition(".")[0] == "torch", "jnp.from_dlpack(tensor)  # or tensor.numpy()"),
    (
        lambda v: dataclasses.is_dataclass(v) and not isinstance(v, type),
        "jax.tree_util.register_dataclass(Class)  # for its class; or an nnx.Pytree for its base",
    ),
    (
        lambda v: _is_object(v),
        "class Class(nnx.Pytree): ...  # if it holds arrays; static_argnames=... if it is part of the program",
    ),
)


def _is_object(value: Any) -> bool:
    """Whether a value is an object of a class that somebody wrote, with attributes of its own."""
    plain = (type, enum.Enum, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType)
    return hasattr(value, "__dict__") and not isinstance(value, plain)


def _line(value: Any) -> str:
    return next((line for fits, line in _LINES if fits(value)), _STATIC)


def refuse_no_model(model: Any, args: tuple[Any, ...]) -> None:
    """Refuse an array in place of a model, as when model and input are swapped, and anything else that is none.

    Args:
        model: What was given as the model.
        args: What was given after it.

    Raises:
        ArgumentError: If it is an array, a spec of one, a class of modules, or nothing that can be called.
    """
    refuse_class(model)
    if isinstance(model, (jax.Array, np.ndarray, jax.ShapeDtypeStruct)):
        got = f"{describe(model)}{', then ' if args else ''}{', '.join(type(a).__name__ for a in args)}"
        needed = "the model first, then what it is called with"
        raise ArgumentError(Problem("the model", got, needed, "lm.materialize(model, x)"))
    if not isinstance(model, nnx.Pytree) and not callable(model):
        needed = "an nnx module, or a method of one"
        got = model if isinstance(model, (str, int, type(None))) else type(model)  # not all that a dict holds
        raise wrong_argument("the model", got, needed, "lm.materialize(model, x)")


def refuse_class(model: Any) -> None:
    """Refuse a class in place of a model, and a model of PyTorch.

    Raises:
        ArgumentError: If it is a class of modules, or a module of PyTorch.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(model, torch.nn.Module):
        needed, write = "an nnx module", "lm.load(model, torch_module, layout='torch')  # model: the same in Flax NNX"
        raise ArgumentError(Problem("the model", f"the torch module {type(model).__name__}", needed, write))
    if isinstance(model, type) and issubclass(model, nnx.Pytree):
        needed = "the model: an object of the class, as its constructor makes it"
        write = f"model = {model.__name__}(..., rngs=nnx.Rngs(0))"
        raise ArgumentError(Problem("the model", f"the class {model.__name__}", needed, write))


def refuse_no_float(where: str, dtype: Any, needed: str = "a floating-point dtype, which the parameters get") -> None:
    """Refuse a dtype that floating-point parameters can't be cast to.

    Args:
        where: The function, and the argument.
        dtype: What was given.
        needed: What it takes.

    Raises:
        ArgumentError: If it is no floating-point dtype.
    """
    try:
        is_floating = jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
    except TypeError:
        is_floating = False
    if not is_floating:
        raise wrong_argument(where, dtype, needed, "dtype=jnp.bfloat16")
