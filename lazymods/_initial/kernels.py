"""Compiled programs of fixed size: a block of consecutive elements in each row, of any tensor each.

A row has its own key, the index of its first element and, but for the unit that draws, its own scalars. So one kernel
serves a large tensor, whose blocks are consecutive rows, and many small ones at a time. For the parts of tensors that
devices of a mesh hold, there are kernels whose rows leave elements out (:mod:`lazymods._initial.shards`).

How XLA cuts a program into loops depends on shapes, and a product and a sum in one loop may be rounded once instead of
twice. So a unit is taken only if at most one of its operations rounds, and that one alone is known to come out the
same at every shape, or if it is one of JAX's own samplers (uniform, normal, truncated normal). The tests compare all
of them with what is drawn at once, at many shapes.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.random import threefry2x32_p

from lazymods._initial.program import Literal, Step, Unit, read
from lazymods._initial.stacking import Shape

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


# ---------------------------------------------------------------- which units come out the same in blocks


_EXACT = set(
    "abs and bitcast_convert_type ceil clamp convert_element_type eq floor ge gt is_finite le lt max min ne neg not or "
    "random_bits round select_n shift_left shift_right_arithmetic shift_right_logical sign xor".split()
)

# They round, but alone they are the same at every shape: IEEE 754 leaves no choice, and JAX's samplers rely on erf_inv.
# What XLA approximates otherwise may differ in its last bit between the lanes of a vector and the rest of a loop: erf,
# log, logistic, tanh, and on some processors exp, expm1 and log1p (the first two: jaxlib 0.11.2).
_STEADY = set("add div erf_inv integer_pow mul sqrt square sub".split())
# the inverse error function is another one where the last axis is shorter (float32, CPU; seen from jax 0.12 on)
_SHORT = 8 if jax.__version_info__ >= (0, 11) else 0

Skeleton = tuple[Any, ...]


def are_known(units: Sequence[Unit], shape: Shape) -> bool:
    """Whether every unit comes out the same in blocks as it does at this shape."""
    lengths = [n for n in shape if n != 1]
    short = len(lengths) > 1 and lengths[-1] < _SHORT
    return all(_is_known(unit, short) for unit in units)


def _is_known(unit: Unit, short: bool) -> bool:
    names = [step.primitive.name for step in unit.steps]
    if short and "erf_inv" in names and unit.dtype == np.float32:
        return False
    rounding = [name for name in names if name not in _EXACT]
    one = not rounding or (len(rounding) == 1 and rounding[0] in _STEADY)
    return one or _is_of_a_sampler(unit)


def is_product(unit: Unit) -> bool:
    """Whether a unit multiplies float32 or float64 by a scalar and does nothing else."""
    if unit.dtype not in (np.float32, np.float64) or len(unit.steps) != 1 or sorted(unit.drawn) != [False, True]:
        return False
    step = unit.steps[0]
    return step.primitive.name == "mul" and set(step.inputs) == {0, 1} and set(unit.dtypes) == {unit.dtype}


def never_tiny(units: Sequence[Unit], bounds: Sequence[Any], factor: Any) -> bool:
    """Whether a product on the host is that of XLA, which takes the smallest numbers (subnormal ones) for zero.

    What JAX's samplers give is zero or no less than 2**-77 if their bounds are zero or no less than 2**-28: a uniform
    number is a whole multiple of 2**-76, for a difference of the bounds is one of 2**-53 and a fraction one of 2**-23
    (float64 has room for much more).

    Args:
        units: All units but the product.
        bounds: The scalars that the first one takes.
        factor: The scalar of the product.
    """
    large = all(b == 0 or abs(float(b)) >= 2.0**-28 for b in bounds) and 2.0**-40 <= abs(float(factor)) <= 2.0**60
    first, *rest = units
    inverse = [len(u.steps) == 1 and u.steps[0].primitive.name == "erf_inv" for u in rest]  # normal, from jax 0.12 on
    return large and all(inverse) and _is_of_a_sampler(first)


@functools.lru_cache(maxsize=256)
def skeleton(unit: Unit) -> Skeleton:
    """What a unit does to elements; two that differ in how their scalars were converted have the same one."""
    elements: dict[Any, bool] = dict(enumerate(unit.drawn))
    names: dict[Any, Any] = {i: "elements" if drawn else "scalar" for i, drawn in elements.items()}
    steps = []
    for i, step in enumerate(unit.steps):
        inputs = tuple(a if isinstance(a, Literal) else names[a] for a in step.inputs)
        drawn = step.primitive.name == "random_bits" or any(elements.get(a, False) for a in step.inputs)
        elements[-1 - i] = drawn
        if step.primitive.name == "convert_element_type" and not drawn and inputs == ("scalar",):
            names[-1 - i] = "scalar"
        else:
            names[-1 - i] = len(steps)
            steps.append((step.primitive.name, step.params, inputs))
    return (unit.dtype, *steps, names[unit.output])


def _is_of_a_sampler(unit: Unit) -> bool:
    """Whether a unit does what one of JAX's samplers compiles as one; each is read when it is first asked."""
    if not jnp.issubdtype(unit.dtype, np.floating):
        return False
    samplers = (_truncated, jax.random.normal, jax.random.uniform)
    x64 = bool(jax.config.jax_enable_x64)  # type: ignore[attr-defined]
    return any(skeleton(unit) in _skeletons(sample, unit.dtype, x64) for sample in samplers)


@functools.lru_cache(maxsize=64)
def _skeletons(sample: Callable[..., Any], dtype: Any, x64: bool) -> frozenset[Skeleton]:
    made: Any = read(sample, (1,), dtype).program  # at this shape JAX traces it for an initializer, too
    return frozenset() if made is None else frozenset(map(skeleton, made.units))


def _truncated(key: Any, shape: Any, dtype: Any) -> Any:
    return jax.random.truncated_normal(key, -2, 2, shape, dtype)
