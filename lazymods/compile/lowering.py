"""Looking at what a function is compiled to, without running it."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax

from lazymods.compile.dot import dot
from lazymods.compile.function import JitFunction, jit
from lazymods.compile.program import Program


class Lowered:
    """A function at each stage from Python to machine code; what is asked for is made then.

    Attributes:
        jaxpr: The closed jaxpr. Its inputs are the arrays of the arguments, then the state that it reads.
    """

    def __init__(self, program: Program, leaves: list[Any]) -> None:
        self._tape, self._leaves = program.tape, leaves
        self.jaxpr: Any = jax.make_jaxpr(lambda leaves: program.tape(jax.tree.leaves(leaves)))(leaves)

    @functools.cached_property
    def _lowered(self) -> Any:
        return jax.jit(lambda leaves: self._tape(jax.tree.leaves(leaves))).lower(self._leaves)

    @functools.cached_property
    def _compiled(self) -> Any:
        return self._lowered.compile()

    @property
    def stablehlo(self) -> str:
        """The StableHLO module, as JAX hands it to XLA."""
        return self._lowered.as_text()

    @property
    def hlo(self) -> str:
        """The HLO module after XLA has optimized it for this platform."""
        return self._compiled.as_text()

    @property
    def cost(self) -> Mapping[str, float]:
        """XLA's estimates: ``flops``, ``bytes accessed`` and others that depend on the platform."""
        found = self._compiled.cost_analysis()
        return found[0] if isinstance(found, list) else found

    @property
    def memory(self) -> Any:
        """XLA's sizes in bytes: ``argument_size_in_bytes``, ``output_size_in_bytes``, ``temp_size_in_bytes``."""
        return self._compiled.memory_analysis()

    @property
    def dot(self) -> str:
        """The jaxpr as a graph for Graphviz."""
        return dot(self.jaxpr)

    def __repr__(self) -> str:
        return f"Lowered({len(self.jaxpr.jaxpr.eqns)} operations)"


def lower(fn: Any, *args: Any, **kwargs: Any) -> Lowered:
    """Show what a function is compiled to. Nothing is run or changed; a lazy model stays lazy.

    Args:
        fn: A function, a module, or what :func:`lazymods.jit` returned.
        *args: Its arguments; ``jax.ShapeDtypeStruct`` will do for arrays.
        **kwargs: Its keyword arguments.

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
    program, leaves, _ = trace_only(fn, args, kwargs)
    return Lowered(program, leaves)


def trace_only(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Program, list[Any], int]:
    """Trace a function and leave everything as it was.

    Returns:
        The program, its leaves, and how many of them are arguments.
    """
    function = fn if isinstance(fn, JitFunction) else jit(fn)
    return function.trace_only(args, kwargs)
