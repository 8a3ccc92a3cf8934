"""Which units come out the same however they are compiled.

How XLA cuts a program into loops depends on shapes, and a product and a sum in one loop may be rounded once instead of
twice. So a unit is taken only if at most one of its operations rounds, and that one alone is known to come out the
same at every shape, or if it is one of JAX's own samplers (uniform, normal, truncated normal). The tests compare all
of them with what is drawn at once, at many shapes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lazymods._initial.program import Literal, Unit, read
from lazymods._initial.stacking import Shape

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


def _x64() -> bool:
    return bool(jax.config.jax_enable_x64)  # type: ignore[attr-defined]


def _is_of_a_sampler(unit: Unit) -> bool:
    """Whether a unit does what one of JAX's samplers compiles as one; each is read when it is first asked."""
    if not jnp.issubdtype(unit.dtype, np.floating):
        return False
    samplers = (_truncated, jax.random.normal, jax.random.uniform)
    return any(skeleton(unit) in _skeletons(sample, unit.dtype, _x64()) for sample in samplers)


@functools.lru_cache(maxsize=64)
def _skeletons(sample: Callable[..., Any], dtype: Any, x64: bool) -> frozenset[Skeleton]:
    made: Any = read(sample, (1,), dtype).program  # at this shape JAX traces it for an initializer, too
    return frozenset() if made is None else frozenset(map(skeleton, made.units))


def _truncated(key: Any, shape: Any, dtype: Any) -> Any:
    return jax.random.truncated_normal(key, -2, 2, shape, dtype)
