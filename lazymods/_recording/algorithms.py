"""Products of matrices by an algorithm that was chosen: some devices do not have it.

JAX says so when it compiles one, and ``jax.nn.dot_product_attention`` catches that and takes another algorithm. So an
error must come at the operation, and not with the program of a cut.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.core import ShapedArray

from lazymods import _compat
from lazymods._compat import tracing


def is_chosen(primitive: Any, params: dict[str, Any], operands: tuple[Any, ...]) -> bool:
    """Whether an operation is a product by a chosen algorithm, or a jitted function that has one: ``jnp.einsum``.

    Those deeper inside are of a function that is compiled as a whole without a block too.
    """
    inner = [tracing.open_jaxpr(value)[0].eqns for value in params.values() if tracing.is_jaxpr(value)]
    every = [(primitive, params), *[(eqn.primitive, eqn.params) for eqns in inner for eqn in eqns]]
    chosen = any(isinstance(p.get("precision"), (jax.lax.DotAlgorithm, jax.lax.DotAlgorithmPreset)) for _, p in every)
    return chosen and all(type(a) is ShapedArray and a.sharding.mesh.empty for a in operands)


def confirm(primitive: Any, params: dict[str, Any], operands: tuple[Any, ...]) -> None:
    """Compile an operation alone.

    Raises:
        Exception: What JAX has against it, as if it were executed.
    """
    arrays = [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type) for a in operands]
    with tracing.at(_compat.eval_trace()):
        jax.jit(lambda *values: primitive.bind(*values, **params)).lower(*arrays).compile()
