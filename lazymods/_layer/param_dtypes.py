"""The dtypes that layers of Flax note, after their parameters got another one.

A layer notes the dtype of its parameters in ``param_dtype``; ``nnx.Embed`` also computes in it unless it was given a
``dtype``. With the old ones a model in bfloat16 would compute in float32. With the new ones it is the model that was
made with ``param_dtype=jnp.bfloat16``. Recurrent cells keep theirs: their carry would have another dtype than what they
make of float32 inputs, and a scan refuses that.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lazymods import _graph
from lazymods._layer.merging import put

_LAYERS = "flax.nnx.nn."


def follow(nodes: Iterable[Any]) -> list[tuple[Any, str, Any]]:
    """Let layers note the dtype that all of their parameters have, or will have.

    Args:
        nodes: nnx objects, of which those that are no layer of Flax's stay as they are.

    Returns:
        What was noted before: layer, attribute and value.
    """
    before = []
    for node in nodes:
        noted = vars(node).get("param_dtype")
        is_layer = any(cls.__module__.startswith(_LAYERS) for cls in type(node).__mro__)
        if noted is None or not is_layer or isinstance(node, nnx.RNNCellBase):
            continue
        dtype = _common_dtype(node)
        if dtype is None or dtype == np.dtype(noted):
            continue
        if isinstance(node, nnx.Embed) and isinstance(node.dtype, np.dtype) and node.dtype == np.dtype(noted):
            before.append((node, "dtype", node.dtype))
            put(node, ("dtype",), dtype)  # the array's, which nnx.Embed takes if it is given none
        before.append((node, "param_dtype", noted))
        put(node, ("param_dtype",), getattr(jnp, dtype.name, dtype))  # as people write it, and Flax's defaults do
    return before


def _common_dtype(node: Any) -> Any:
    """Return the one dtype of all floating-point parameters of a layer; None if they have none, or several."""
    found = set()
    for variable in _graph.variables(node):
        if isinstance(variable, nnx.Param):
            held = variable.pending if _graph.is_placeholder(variable) else variable.get_raw_value()
            found.add(getattr(held, "dtype", None))
    floats = {np.dtype(dtype) for dtype in found if dtype is not None and _is_float(dtype)}
    return floats.pop() if len(floats) == 1 else None


def _is_float(dtype: Any) -> bool:
    return not jnp.issubdtype(dtype, jax.dtypes.extended) and jnp.issubdtype(dtype, jnp.floating)
