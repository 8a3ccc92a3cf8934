"""Compiled programs of fixed size: a block of consecutive elements in each row, of any tensor each.

A row has its own key, the index of its first element and, but for the unit that draws, its own scalars. So one kernel
serves a large tensor, whose blocks are consecutive rows, and many small ones at a time. For the parts of tensors that
devices of a mesh hold, there are kernels whose rows leave elements out (:mod:`lazymods._initial.shards`).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.random import threefry2x32_p

from lazymods._initial.program import Literal, Step, Unit

BLOCK = 1 << 12  # elements in a row
# rows of the kernel for much, on the platforms where results were compared with Flax's; on a CPU, XLA takes several
# times longer for each element above 2**19
MANY = {"cpu": 64, "gpu": 512}
FEW = 1  # rows of the kernel for little

Kernel = Callable[..., Any]


@functools.lru_cache(maxsize=64)
def drawing(units: tuple[Unit, ...], rows: int, skips: int = 0) -> Kernel:
    """Compile units that draw, as one program that runs one of them at a time: each program has its price.

    Args:
        units: The units.
        rows: How many blocks are drawn at a time.
        skips: At how many different distances a row may leave elements out.

    Returns:
        A function of the unit's index, of both halves of the keys and the first element, each ``(rows, 1)`` of
        uint32, of ``(skips, 3, rows, 1)`` as :func:`_index` takes them if there are skips, and of the scalars of all
        units, which all rows share. It returns ``(rows, BLOCK)``.
    """
    ends = list(itertools.accumulate(len(unit.dtypes) for unit in units))

    def branch(unit: Unit, end: int) -> Kernel:
        def draw(first: Any, second: Any, start: Any, left_out: Any, *scalars: Any) -> Any:
            high = lax.full((rows, BLOCK), 0, np.uint32)
            low = _index(start, left_out, high.shape)
            # keys that were spread over the rows before would make it take twice as long
            words = threefry2x32_p.bind(first, second, high, low)
            return _run(unit, scalars[end - len(unit.dtypes) : end], words)

        return draw

    def kernel(index: Any, first: Any, second: Any, start: Any, *rest: Any) -> Any:
        arguments = (first, second, start, *rest) if skips else (first, second, start, (), *rest)
        branches = [branch(unit, end) for unit, end in zip(units, ends, strict=True)]
        return branches[0](*arguments) if len(units) == 1 else lax.switch(index, branches, *arguments)

    return jax.jit(kernel)


def _index(start: Any, left_out: Any, shape: tuple[int, ...]) -> Any:
    """Return the index of each element of some rows.

    Args:
        start: That of the first in each row.
        left_out: For each kind of skip, three numbers of each row: how many elements come before the first skip, how
            many between two, both at most BLOCK, and how many are left out.
        shape: Rows and elements.
    """
    index = lax.add(_spread(start, shape), lax.broadcasted_iota(np.uint32, shape, 1))
    number = lax.broadcasted_iota(np.float32, shape, 1)
    for kind in range(len(left_out)):
        before, period, count = (_spread(left_out[kind][i], shape) for i in range(3))
        # Small numbers, for which half an element more than makes up for the rounding: no division of integers, which
        # processors do one at a time.
        before, period = (lax.convert_element_type(x, np.float32) for x in (before, period))
        half = lax.full(shape, 0.5, np.float32)
        times = lax.floor(lax.div(lax.add(lax.sub(number, before), half), period))
        passed = lax.convert_element_type(lax.max(lax.add(times, lax.full(shape, 1, np.float32)), half), np.uint32)
        index = lax.add(index, lax.mul(passed, count))
    return index


@functools.lru_cache(maxsize=64)
def following(unit: Unit, rows: int) -> Kernel:
    """Compile a unit that does not draw.

    Returns:
        A function of what the unit before gave, ``(rows, BLOCK)``, and of the unit's scalars, ``(rows, 1)`` each.
    """

    def kernel(values: Any, *scalars: Any) -> Any:
        rest = iter(scalars)
        return _run(unit, [values if drawn else next(rest) for drawn in unit.drawn], None)

    return jax.jit(kernel)


def _run(unit: Unit, inputs: Sequence[Any], words: Any) -> Any:
    results: list[Any] = []

    def value(atom: int | Literal) -> Any:
        if isinstance(atom, Literal):
            return atom.value
        return inputs[atom] if atom >= 0 else results[-1 - atom]

    for step in unit.steps:
        if step.primitive.name == "random_bits":
            results.append(_bits(words, dict(step.params)["bit_width"]))
        else:
            results.append(_bind(step, [value(atom) for atom in step.inputs]))
    return value(unit.output)


def _bind(step: Step, inputs: list[Any]) -> Any:
    shape = max((np.shape(x) for x in inputs), key=lambda s: (len(s), s))
    inputs = [x if np.shape(x) == shape else _spread(x, shape) for x in inputs]
    return step.primitive.bind(*inputs, **dict(step.params))


def _spread(x: Any, shape: tuple[int, ...]) -> Any:
    return lax.broadcast_in_dim(x, shape, tuple(range(np.ndim(x))))


def _bits(words: Any, width: int) -> Any:
    """Turn two words for each element into the bits of ``jax.random.bits``, as its partitionable threefry does."""
    high, low = words
    dtype = np.dtype(f"uint{width}")
    if width == 64:
        wide = lax.shift_left(lax.convert_element_type(high, dtype), lax.full(high.shape, 32, dtype))
        return lax.bitwise_or(wide, lax.convert_element_type(low, dtype))
    bits = lax.bitwise_xor(high, low)
    return bits if width == 32 else lax.convert_element_type(bits, dtype)
