"""Looking at what a function is compiled to, without running it."""

from __future__ import annotations

from typing import Any

from lazymods._frames import entry
from lazymods._refusals import refuse_uncallable
from lazymods.compile.decorator import jit
from lazymods.compile.function import JitFunction
from lazymods.compile.stages import Lowered as Lowered


@entry
def lower(fn: Any, *args: Any, **kwargs: Any) -> Lowered:
    """Show what a function is compiled to. Nothing is run or changed; a lazy model stays lazy.

    Args:
        fn: A function, a module, or what :func:`lazymods.jit` returned.
        *args: Its arguments; ``jax.ShapeDtypeStruct`` will do for arrays.
        **kwargs: Its keyword arguments.

    Raises:
        ArgumentError: If ``fn`` can't be called, or an argument is no input.
        jax.errors.ConcretizationTypeError: If Python decides on the value of an array: that is many programs.

    Returns:
        An object with ``jaxpr``, ``stablehlo``, ``hlo`` (optimized), ``cost``, ``memory`` and ``dot``.

    Example:
        >>> import jax.numpy as jnp
        >>> import lazymods as lm
        >>> from flax import nnx
        >>> low = lm.lower(nnx.Linear(3, 4, rngs=nnx.Rngs(0)), jnp.ones((2, 3)))
        >>> low.stablehlo.count("stablehlo.dot_general"), low.dot.split()[0]
        (1, 'digraph')
    """
    return staged(fn, "lm.lower").lower(*args, **kwargs)


def staged(fn: Any, where: str) -> JitFunction:
    """Return a function as one that can be traced, lowered and compiled, for whom ``where`` names."""
    refuse_uncallable(where, fn)
    return fn if isinstance(fn, JitFunction) else jit(fn)
