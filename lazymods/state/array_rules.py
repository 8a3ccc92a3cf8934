"""Rules for arrays: what ``rename=`` takes beside pairs of names where a file has other arrays than the model.

A rule takes entries by a regular expression that is searched for in their names, and gives what it makes of them the
names of ``re.sub`` with that expression. It says what shape comes out before anything is read, and makes views where
numpy has them. Every rule has a way back, which :func:`lazymods.export_torch` goes.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from lazymods._errors import Problem, short_dtype
from lazymods._refusals import wrong_argument
from lazymods.state.files.stored import StoredTensor
from lazymods.state.flow import ArrayRule, Entry, Group, Unfit, derived
from lazymods.state.layouts.computed import wide
from lazymods.state.options import compiled, expression, replacement

Found = tuple[list[Group], list[Problem]]


def each(pattern: re.Pattern[str], into: Sequence[str], entries: Sequence[Entry]) -> Found:
    """Take each entry that a pattern fits by itself."""
    found = [entry for entry in entries if pattern.search(entry.name)]
    return [Group((entry,), tuple(pattern.sub(new, entry.name) for new in into)) for entry in found], []


def check_names(rule: ArrayRule, pattern: Any, *into: Any) -> None:
    """Refuse a rule whose names are none: the expression, or what is put in its place.

    Raises:
        ArgumentError: If one is none.
    """
    where = f"lm.rules.{type(rule).__name__}"
    found = expression(where, pattern)
    for new in into:
        replacement(where, found, new)


def axis_of(axis: int, tensor: StoredTensor) -> int:
    """Return an axis of a tensor, counted from the front.

    Raises:
        Unfit: If it has no such axis.
    """
    rank = len(tensor.shape)
    if not -rank <= axis < rank:
        raise Unfit(f"shape {tensor.shape}", f"an axis {axis}")
    return axis % rank


def wide_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype that is computed in for one of a file: float32 for the narrower floats."""
    return wide(np.zeros(0, dtype)).dtype


def problem_of(rule: ArrayRule, name: str, got: str) -> Problem:
    """Say what is wrong with the entries that a rule found."""
    needed = f"entries as {rule!r} takes them"
    line = f"lm.rules.{type(rule).__name__}(r'...')  # with a pattern that fits all of them, and no others"
    return Problem(name, got, needed, line)


def check_whole(values: Sequence[Any], names: Sequence[Any]) -> None:
    """Refuse to put together what is not all there.

    Raises:
        Unfit: If a part is None.
    """
    lacking = [str(name) for name, value in zip(names, values, strict=True) if value is None]
    if lacking:
        raise Unfit(f"a model without the part {', '.join(lacking)}", "all parts of one entry of the file")


def as_before(value: Any, made: StoredTensor, given: StoredTensor, otherwise: Any) -> Any:
    """Return the array that a file gave where what was made of it is still there, and something else where it is not.

    Args:
        value: What is there now.
        made: What was made of the file's array.
        given: That array.
        otherwise: What is computed from ``value``, in places where that is another number than was made.
    """
    if value.shape != made.shape:
        return otherwise
    same = value == made.read().astype(value.dtype)
    return np.where(same, given.read().astype(otherwise.dtype), otherwise)


def check_whole_numbers(rule: ArrayRule, what: str, numbers: Any, *, least: int | None = None) -> None:
    """Refuse what is no sequence of whole numbers.

    Raises:
        ArgumentError: If it is none, or a number of it is less than ``least``.
    """
    are = isinstance(numbers, Sequence) and all(isinstance(n, (int, np.integer)) for n in numbers)
    if not are or (least is not None and min(numbers, default=least) < least):
        needed = f"{what} is {'positive ' if least else ''}whole numbers"
        raise wrong_argument(f"lm.rules.{type(rule).__name__}", numbers, needed, f"{what}=...")


# ---------------------------------------------------------------- one array to one


@dataclasses.dataclass(frozen=True)
class _OneByOne(ArrayRule):
    """A rule that takes each entry by itself, and leaves it its name."""

    pattern: str

    def __post_init__(self) -> None:
        check_names(self, self.pattern)

    def find(self, entries: Sequence[Entry]) -> Found:
        """Take each entry by itself."""
        return each(compiled(self.pattern), [r"\g<0>"], entries)


@dataclasses.dataclass(frozen=True)
class Transpose(_OneByOne):
    """Arrays whose axes lie in another order: GPT-2's ``Conv1D`` has ``(in, out)``, ``nn.Linear`` ``(out, in)``.

    Args:
        pattern: The regular expression of the names.
        axes: The axis of the file's array for each axis of the result, as in ``numpy.transpose``; None: reversed, so
            that a vector stays as it is.

    Example:
        >>> import lazymods as lm
        >>> conv1d = lm.rules.Transpose(r"(c_attn|c_proj|c_fc)[.]weight$")
    """

    pattern: str
    axes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.axes is not None:
            check_whole_numbers(self, "axes", self.axes)

    def forward(self, tensors: Sequence[StoredTensor], count: int) -> list[StoredTensor]:
        """Permute; a view.

        Raises:
            Unfit: If the axes are not those of the array.
        """
        (tensor,) = tensors
        order = self._order(tensor)
        shape = tuple(tensor.shape[axis] for axis in order)
        return [derived(tensor, shape, lambda: tensor.read().transpose(order))]

    def backward(self, values: Sequence[Any], inputs: Sequence[StoredTensor]) -> list[Any]:
        """Permute back."""
        return [values[0].transpose(np.argsort(self._order(inputs[0])))]

    def _order(self, tensor: StoredTensor) -> tuple[int, ...]:
        rank = len(tensor.shape)
        if self.axes is None:
            return tuple(reversed(range(rank)))
        if sorted(axis % rank if rank else axis for axis in self.axes) != list(range(rank)):
            raise Unfit(f"shape {tensor.shape}", f"an array with the axes {self.axes}")
        return tuple(axis % rank for axis in self.axes)


@dataclasses.dataclass(frozen=True)
class Reshape(_OneByOne):
    """Arrays with the same numbers in another shape: a layer scale ``(C, 1, 1)`` of ConvNeXt, CaiT or BEiT.

    Args:
        pattern: The regular expression of the names.
        shape: The new shape, with at most one -1, as in ``numpy.reshape``.

    Example:
        >>> import lazymods as lm
        >>> layer_scale = lm.rules.Reshape(r"layer_scale$", (-1,))
    """

    pattern: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole_numbers(self, "shape", self.shape)

    def forward(self, tensors: Sequence[StoredTensor], count: int) -> list[StoredTensor]:
        """Reshape.

        Raises:
            Unfit: If the array has another number of elements.
        """
        (tensor,) = tensors
        size = math.prod(tensor.shape)
        known = math.prod(n for n in self.shape if n != -1)
        free = self.shape.count(-1)
        if free > 1 or (free and (not known or size % known)) or (not free and known != size):
            raise Unfit(f"shape {tensor.shape}", f"as many numbers as {self.shape} has")
        shape = tuple(size // known if n == -1 else n for n in self.shape)
        return [derived(tensor, shape, lambda: tensor.read().reshape(shape))]

    def backward(self, values: Sequence[Any], inputs: Sequence[StoredTensor]) -> list[Any]:
        """Give the file's shape back.

        Raises:
            Unfit: If the model has another number of elements now.
        """
        if values[0].size != math.prod(inputs[0].shape):
            raise Unfit(f"shape {values[0].shape} in the model", f"as many numbers as {inputs[0].shape} has")
        return [values[0].reshape(inputs[0].shape)]


@dataclasses.dataclass(frozen=True)
class Add(_OneByOne):
    """A constant to be added: Gemma stores the scale of an ``RMSNorm`` less 1.

    It is added in float32 if the file's floats are narrower, as PyTorch's code does.

    Args:
        pattern: The regular expression of the names.
        value: The number.

    Example:
        >>> import lazymods as lm
        >>> gemma = lm.rules.Add(r"norm[.]weight$", 1.0)
    """

    pattern: str
    value: float

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.value, (int, float, np.number)):
            raise wrong_argument("lm.rules.Add", self.value, "a number", "lm.rules.Add(..., 1.0)")

    def forward(self, tensors: Sequence[StoredTensor], count: int) -> list[StoredTensor]:
        """Add.

        Raises:
            Unfit: If it is no array of floating-point numbers.
        """
        (tensor,) = tensors
        if not jnp.issubdtype(tensor.dtype, jnp.inexact):
            raise Unfit(f"dtype {short_dtype(tensor.dtype)}", "floating-point numbers")
        kind = wide_dtype(tensor.dtype)
        return [derived(tensor, tensor.shape, lambda: wide(tensor.read()) + kind.type(self.value), kind)]

    def backward(self, values: Sequence[Any], inputs: Sequence[StoredTensor]) -> list[Any]:
        """Give the file's numbers where the sum is theirs, else subtract: the difference is rounded again."""
        value = wide(values[0])
        return [as_before(values[0], self.forward(inputs, 1)[0], inputs[0], value - value.dtype.type(self.value))]

    def keeps(self, index: int) -> bool:
        """Keep the file's numbers: a difference does not give all of their bits."""
        return True
