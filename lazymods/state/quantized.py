"""The array rule for quantized weights: few bits and their scales, which are multiplied."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from lazymods.state.array_rules import Found, check_names, check_whole_numbers, compiled, problem_of, wide_dtype
from lazymods.state.files.stored import Array, StoredTensor
from lazymods.state.flow import ArrayRule, Entry, Group, Unfit, derived
from lazymods.state.values import cast_problem


@dataclasses.dataclass(frozen=True)
class Dequantize(ArrayRule):
    """Weights of few bits and their scales, which are multiplied: int8 by row, float8 by block.

    A scale has one number for all, a length of 1 or of the weight in each axis, or one number a block of equal
    lengths; a vector goes along ``axis``. The way back rounds to the file's numbers by the file's scales.

    Args:
        pattern: The regular expression of the weights' names.
        scale: What ``re.sub`` puts in the pattern's place for the scale's name.
        into: What it puts there for the result's name.
        zero: What it puts there for the name of the zero points, which are subtracted first; None: there are none.
        axis: The weight's axis that a vector of scales goes along; 0 is that of PyTorch's outputs.

    Example:
        >>> import lazymods as lm
        >>> int8 = lm.rules.Dequantize(r"[.]qweight$", scale=".scale", into=".weight")
    """

    pattern: str
    scale: str
    into: str
    zero: str | None = None
    axis: int = 0

    def __post_init__(self) -> None:
        check_names(self, self.pattern, self.scale, self.into, *(() if self.zero is None else (self.zero,)))
        check_whole_numbers(self, "axis", (self.axis,))

    def keeps(self, index: int) -> bool:
        """Keep scales and zero points."""
        return index > 0

    def find(self, entries: Sequence[Entry]) -> Found:
        """Find each weight's scale and zero points."""
        pattern = compiled(self.pattern)
        by_name = {entry.name: entry for entry in entries}
        groups, problems = [], []
        for entry in entries:
            if not pattern.search(entry.name):
                continue
            wanted = [pattern.sub(new, entry.name) for new in (self.scale, self.zero) if new is not None]
            found = [by_name.get(name) for name in wanted]
            lacking = [name for name, other in zip(wanted, found, strict=True) if other is None or other is entry]
            if lacking:
                problems.append(problem_of(self, entry.name, f"no entry {' and '.join(lacking)} beside it"))
            else:
                groups.append(Group((entry, *(e for e in found if e)), (pattern.sub(self.into, entry.name),)))
        return groups, problems

    def forward(self, tensors: Sequence[StoredTensor], count: int) -> list[StoredTensor]:
        """Multiply, in float32, or in float64 if the scales are of that.

        Raises:
            Unfit: If the scales do not go over the weight.
        """
        weight, *others = tensors
        for other in others:
            self._factors(other, weight.shape)
        if not jnp.issubdtype(others[0].dtype, jnp.floating):
            raise Unfit(f"scales of dtype {others[0].dtype}", "floating-point numbers")
        kind = wide_dtype(others[0].dtype)

        def read() -> Array:
            values = weight.read().astype(kind)
            if len(others) > 1:
                values -= self._spread(others[1], weight.shape, kind)
            return values * self._spread(others[0], weight.shape, kind)

        return [derived(weight, weight.shape, read, kind)]

    def backward(self, values: Sequence[Any], inputs: Sequence[StoredTensor]) -> list[Any]:
        """Divide, and round to the file's numbers.

        Raises:
            Unfit: If a number is too large for them.
        """
        weight, *others = inputs
        if values[0].shape != weight.shape:
            raise Unfit(f"shape {values[0].shape} in the model", f"{weight.shape}, as the file has")
        kind = np.dtype(np.float64)
        scales = self._spread(others[0], weight.shape, kind)
        whole = np.divide(values[0].astype(kind), scales, out=np.zeros(weight.shape, kind), where=scales != 0)
        if len(others) > 1:
            whole = whole + self._spread(others[1], weight.shape, kind)
        if jnp.issubdtype(weight.dtype, jnp.integer):
            whole = np.rint(whole)
        reason = cast_problem(whole, weight.dtype)
        if reason is not None:
            raise Unfit("weights that are too large for the file's scales", reason)
        return [whole.astype(weight.dtype), *(other.read() for other in others)]

    def _spread(self, other: StoredTensor, shape: tuple[int, ...], kind: np.dtype[Any]) -> Array:
        """Return scales or zero points, one for each weight or in axes of length 1."""
        as_axes, blocks = self._factors(other, shape)
        out = other.read().astype(kind).reshape(as_axes)
        for axis, block in enumerate(blocks):
            if block > 1 and as_axes[axis] > 1:
                out = np.repeat(out, block, axis)
        return out

    def _factors(self, other: StoredTensor, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shape of scales with all of the weight's axes, and the lengths of their blocks."""
        got = other.shape
        if math.prod(got) == 1:
            got = (1,) * len(shape)
        elif len(got) == 1 and len(shape) > 1 and -len(shape) <= self.axis < len(shape):
            got = tuple(got[0] if i == self.axis % len(shape) else 1 for i in range(len(shape)))
        if len(got) != len(shape) or any(not n or m % n for n, m in zip(got, shape, strict=False)):
            raise Unfit(f"{other.name} of shape {other.shape} for a weight of shape {shape}", "scales that go over it")
        return got, tuple(m // n for n, m in zip(got, shape, strict=True))
