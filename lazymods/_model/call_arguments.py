"""What a call of a model takes: arrays to trace, modules and Variables to copy, and what stays as it is."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx


class CallArguments:
    """The arguments of a call, taken apart: arrays to trace, modules and Variables to copy, and what stays as it is.

    Args:
        args: Shapes and dtypes in place of arrays.
        kwargs: Keyword arguments, likewise.

    Attributes:
        arrays: Shape and dtype of each array by its place.
        modules: The modules and Variables, in order.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._leaves, self._treedef = jax.tree.flatten((args, kwargs), is_leaf=_is_module)
        self._places = [i for i, v in enumerate(self._leaves) if _is_module(v)]
        self.arrays = {i: v for i, v in enumerate(self._leaves) if isinstance(v, jax.ShapeDtypeStruct)}
        self.modules = [self._leaves[i] for i in self._places]

    def put_together(self, arrays: dict[int, Any], modules: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with these in place of ``arrays`` and ``modules``."""
        filled = dict(enumerate(self._leaves)) | arrays | dict(zip(self._places, modules, strict=True))
        return jax.tree.unflatten(self._treedef, [filled[i] for i in range(len(self._leaves))])


def _is_module(value: Any) -> bool:
    return isinstance(value, (nnx.Pytree, nnx.Variable))
