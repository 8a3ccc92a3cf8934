"""Gradients by lazy parameters that the function has not reached: zeros, as those of an explicit layer are.

``nnx.grad`` leaves the placeholder among the gradients, which no optimizer takes. A parameter that has its whole shape,
such as that of ``LazyEmbed``, has a gradient without having a value.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from lazymods import _graph
from lazymods._errors import Problem, UninitializedError


def completed(where: str, gradients: Any) -> Any:
    """Return gradients with zeros in place of placeholders.

    Args:
        where: What found them.
        gradients: What ``nnx.grad`` returned.

    Returns:
        The gradients. In an abstract run a placeholder whose sizes are not known stays: it may be called later.

    Raises:
        UninitializedError: If a placeholder lacks a size; of all that do.
    """
    leaves, tree = jax.tree_util.tree_flatten_with_path(gradients, is_leaf=lambda x: isinstance(x, nnx.Variable))
    lazy = {i: leaf for i, (_, leaf) in enumerate(leaves) if _graph.is_placeholder(leaf)}
    if not lazy:
        return gradients
    whole = {i: v for i, v in lazy.items() if v.pending.shape is not None and None not in v.pending.shape}
    if len(whole) < len(lazy) and _graph.LOCAL.session is None:
        names = [_graph.dotted(tuple(map(_graph.name_of, leaves[i][0]))) for i in lazy if i not in whole]
        raise UninitializedError(*[_without_sizes(where, name) for name in names])
    made = {i: v.copy(jnp.zeros(v.pending.shape, v.dtype)) for i, v in whole.items()}
    return tree.unflatten([made.get(i, leaf) for i, (_, leaf) in enumerate(leaves)])


def _without_sizes(where: str, name: str) -> Problem:
    return Problem(
        f"{where}: {name}",
        "a lazy parameter that the function does not reach, so that its shape is not known",
        "a shape: the gradient by what is not reached is zeros of it",
        "lm.materialize(layer, x)  # before; or remove the layer; or freeze it: "
        "lm.autograd.requires_grad_(layer, False)",
    )
