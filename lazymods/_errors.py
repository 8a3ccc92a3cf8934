"""Errors that say where, what was got, what is needed and why, and the line to write.

Inner code raises short facts (a :class:`Problem`, or a :class:`LazyError` of one problem without a path);
whoever knows the path adds it with :func:`relocate`. Several problems are shown together, sorted by path.
"""

from __future__ import annotations

import dataclasses
import pickle
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lazymods._error_lists import MAX_LINES, shown_names


@dataclasses.dataclass(frozen=True)
class Problem:
    """One thing that is wrong.

    Attributes:
        where: Path and class, such as ``fc1.kernel (LazyLinear)``.
        got: What was found there.
        needed: What should have been there, and why.
        write: The line that mends it.
    """

    where: str
    got: str
    needed: str
    write: str

    def __str__(self) -> str:
        """Render the four parts, one a line."""
        return harmless(f"{self.where}\n  got:    {self.got}\n  needed: {self.needed}\n  write:  {self.write}")


class LazyError(Exception):
    """Base of every error that lazymods raises.

    Args:
        *problems: What is wrong; shown sorted by path.
        heading: A line above the problems.
    """

    def __init__(self, *problems: Problem, heading: str = "") -> None:
        super().__init__(*problems)
        self.problems: tuple[Problem, ...] = tuple(sorted(problems, key=lambda p: p.where))
        self.heading = heading

    def __str__(self) -> str:
        """Render the heading and every problem."""
        parts = [self.heading] if self.heading else []
        # whoever must initialize a model wants every path; files can have a million
        many = isinstance(self, (StateDictError, CheckpointError))
        return harmless("\n".join(parts + (_rendered(self.problems) if many else list(map(str, self.problems)))))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle with the heading, which ``Exception`` would drop."""
        return _rebuild, (type(self), self.problems, self.heading), vars(self).copy()


def _rebuild(cls: type[LazyError], problems: tuple[Problem, ...], heading: str) -> LazyError:
    return cls(*problems, heading=heading)


def _rendered(problems: Sequence[Problem]) -> list[str]:
    """Return each problem in four lines, or, if they are many, those of one kind together."""
    if 4 * len(problems) < MAX_LINES:
        return [str(problem) for problem in problems]
    kinds: dict[tuple[str, str], list[Problem]] = {}
    for problem in problems:
        kinds.setdefault((problem.needed, problem.write), []).append(problem)
    out: list[str] = []
    lines = told = 0
    for (needed, write), alike in kinds.items():
        where = shown_names([problem.where for problem in alike])
        got = alike[0].got if len(alike) == 1 else f"{alike[0].got} ({len(alike):,} of this kind)"
        lines += where.count("\n") + 4
        if lines > MAX_LINES - 3 and out:
            out.append(f"and {len(problems) - told:,} more: error.problems has all of them")
            break
        told += len(alike)
        out.append(str(Problem(where, got, needed, write)))
    return out


class UninitializedError(LazyError, RuntimeError):
    """Something needed the value or the size of a parameter that has none yet."""


class PendingAttributeError(UninitializedError, AttributeError):
    """An attribute that exists once the layer knows its sizes (``hasattr`` says False until then)."""


class ShapeInferenceError(LazyError, ValueError):
    """The sizes of a layer do not follow from what it was called with."""


class StateDictError(LazyError, RuntimeError):
    """A state dict does not fit the model it was loaded into.

    Attributes:
        missing: Parameters of the model without an entry, all of them.
        unexpected: Entries without a parameter, all of them.
        mismatched: Entries whose shape does not fit.
    """

    missing: Sequence[str] = ()
    unexpected: Sequence[str] = ()
    mismatched: Sequence[str] = ()


class CheckpointError(LazyError, ValueError):
    """A checkpoint file is not what it claims to be."""


class MissingFileError(CheckpointError, FileNotFoundError):
    """There is no checkpoint at a path."""


class SaveError(CheckpointError, OSError):
    """A checkpoint could not be written; what was there before still is."""


class ConfigurationError(LazyError, TypeError):
    """A layer was constructed with arguments that its signature does not take."""


class SerializationError(LazyError, pickle.PicklingError):
    """A lazy layer holds something that does not pickle."""


class MissingNameError(LazyError, NotImplementedError):
    """The installed jax or flax lacks a private name that a feature of lazymods needs."""


_PUBLIC = (
    LazyError,
    UninitializedError,
    PendingAttributeError,
    ShapeInferenceError,
    StateDictError,
    CheckpointError,
    MissingFileError,
    SaveError,
    ConfigurationError,
    SerializationError,
    MissingNameError,
)
for _error in _PUBLIC:
    _error.__module__ = "lazymods"  # tracebacks show the public name


def relocate(error: LazyError, place: Callable[[Problem], str]) -> LazyError:
    """Return the same error with every problem moved to ``place(problem)``."""
    moved = [dataclasses.replace(p, where=place(p)) for p in error.problems]
    return type(error)(*moved, heading=error.heading)


NOT_TRACEABLE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)
"""What JAX raises in code that decides on the values of arrays."""


def located(path: str, kind: str) -> str:
    """Name a place by its dotted path and its class: ``fc1 (LazyLinear)``; the model itself by its class."""
    return f"{path} ({kind})" if path else kind


def harmless(text: str) -> str:
    """Return a text without what a terminal acts on, which names out of files can hold; line breaks stay."""
    if text.isascii() and not _CONTROL.search(text):
        return text
    return "".join(c if c == "\n" or c.isprintable() else ascii(c)[1:-1] for c in text)


_CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f]")


def one_line(error: Exception) -> str:
    """Return what an error says, without its line breaks."""
    return " ".join(str(error).split())


def check_pickles(name: str, value: Any, where: Callable[[], str], needed: str, write: str) -> None:
    """Raise :class:`SerializationError` if a value that a pickle would hold does not pickle.

    Args:
        name: The argument that it was given as.
        value: The value.
        where: Called for the place, if it is needed.
        needed: What it should be, and why.
        write: The line that mends it.
    """
    try:
        pickle.dumps(value)
    except Exception as error:
        got = f"{name}={value!r}, which does not pickle ({error})"
        raise SerializationError(Problem(where(), got, needed, write)) from error


_MAX_SHOWN = 1000  # characters of a text, and bits of an integer, that a message shows
_SHORT = {"float": "f", "uint": "u", "int": "i", "complex": "c"}


def describe(value: Any) -> str:
    """Name a value as JAX does: ``f32[8,3]`` for arrays and specs, the type for the rest."""
    raw = value.get_raw_value() if isinstance(value, nnx.Variable) else value  # a placeholder's recipe has a shape too
    known = isinstance(raw, (nnx.Pytree, type))  # nnx.Rngs answers to any name
    shape, dtype = (None, None) if known else (getattr(raw, "shape", None), getattr(raw, "dtype", None))
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if shape is None or dtype is None:
        return _shown(value) if isinstance(value, (int, float, bool, str, type(None))) else type(value).__name__
    dims = ",".join("?" if d is None else str(d) for d in shape)
    return f"{short_dtype(dtype)}[{dims}]"


def _shown(value: Any) -> str:
    """Return a plain value as it is written; a long one is cut: Python refuses to write integers of any length."""
    if isinstance(value, int) and value.bit_length() > _MAX_SHOWN:
        return f"an integer of {value.bit_length():,} bits"
    if isinstance(value, str) and len(value) > _MAX_SHOWN:
        return f"{value[:_MAX_SHOWN]!r}..., a text of {len(value):,} characters"
    return repr(value)


def short_dtype(dtype: Any) -> str:
    """Shorten a dtype as a jaxpr does: ``float32`` to ``f32``, ``bfloat16`` to ``bf16``, ``int32`` to ``i32``."""
    try:
        if jnp.issubdtype(dtype, jax.dtypes.extended):
            return str(dtype)
    except TypeError:  # of another library
        return str(dtype)
    name = np.dtype(dtype).name
    for long, short in _SHORT.items():
        name = name.replace(long, short)
    return name


def describe_call(args: Iterable[Any], kwargs: dict[str, Any]) -> str:
    """Name the arguments of a call: ``f32[8,3], train=True``."""
    parts = [_describe_tree(a) for a in args] + [f"{k}={_describe_tree(v)}" for k, v in kwargs.items()]
    return ", ".join(parts) or "no arguments"


def _describe_tree(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        inner = ", ".join(_describe_tree(v) for v in value)
        return f"[{inner}]" if isinstance(value, list) else f"({inner})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k}: {_describe_tree(v)}" for k, v in value.items()) + "}"
    return describe(value)
