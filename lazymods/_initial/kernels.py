"""Compiled programs of fixed size: a block of consecutive elements in each row, of any tensor each.

A row has its own key, the index of its first element and, but for the unit that draws, its own scalars. So one kernel
serves a large tensor, whose blocks are consecutive rows, and many small ones at a time.
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
def drawing(units: tuple[Unit, ...], rows: int) -> Kernel:
    """Compile units that draw, as one program that runs one of them at a time: each program has its price.

    Returns:
        A function of the unit's index, of both halves of the keys and the first element, each ``(rows, 1)`` of
        uint32, and of the scalars of all units, which all rows share. It returns ``(rows, BLOCK)``.
    """
    ends = list(itertools.accumulate(len(unit.dtypes) for unit in units))

    def branch(unit: Unit, end: int) -> Kernel:
        def draw(first: Any, second: Any, start: Any, *scalars: Any) -> Any:
            high = lax.full((rows, BLOCK), 0, np.uint32)
            low = lax.add(_spread(start, high.shape), lax.broadcasted_iota(np.uint32, high.shape, 1))
            # keys that were spread over the rows before would make it take twice as long
            words = threefry2x32_p.bind(first, second, high, low)
            return _run(unit, scalars[end - len(unit.dtypes) : end], words)

        return draw

    def kernel(index: Any, *arguments: Any) -> Any:
        branches = [branch(unit, end) for unit, end in zip(units, ends, strict=True)]
        return branches[0](*arguments) if len(units) == 1 else lax.switch(index, branches, *arguments)

    return jax.jit(kernel)


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
