"""Where a module hangs: its path in the model, and what PyTorch's names of its entries begin and end with.

The two differ inside wrappers: what ``nnx.WeightNorm`` at ``fc`` wraps is ``fc.layer_instance`` in the model and ``fc``
in PyTorch; the cell of an ``nnx.RNN`` at ``lstm`` is ``lstm.cell``, and its weights are ``lstm.weight_ih_l0``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

import jax
import numpy as np

from lazymods import _graph
from lazymods._errors import Problem, located
from lazymods._graph import Path, dotted
from lazymods.state.values import unwrapped

Array = np.ndarray[Any, Any]
Sizes = tuple[int, ...]


class Refusal(Exception):  # noqa: N818  a finding that becomes a Problem where the entry's name is known
    """What one side cannot hold of the other: what was got, what is needed and why, the line to write."""

    def __init__(self, got: str, needed: str, write: str) -> None:
        super().__init__(got, needed, write)
        self.got: str = got
        self.needed: str = needed
        self.write: str = write

    def at(self, where: str) -> Problem:
        """Return it as the problem of a place."""
        return Problem(where, self.got, self.needed, self.write)


@dataclasses.dataclass(frozen=True)
class Site:
    """A module under one of its names.

    Attributes:
        node: The module.
        path: Its path in the model.
        prefix: What PyTorch's names of its entries begin with: ``""`` or a name and a dot.
        suffix: What PyTorch's names of its entries end with, in recurrent layers: ``_l0_reverse``.
        normed_by: The ``nnx.WeightNorm`` around it, if any.
        sizes: The sizes of the axes that were flattened before it, channels last, if ``flatten`` tells them.
        index: Which layer of a stacked module is meant: for each axis of stacked layers, the outermost first, the axis
            and the number.
        names: PyTorch's names that are to be written, where there is a choice; None: the ones of its own modules.
    """

    node: Any
    path: Path = ()
    prefix: str = ""
    suffix: str = ""
    normed_by: Site | None = None
    sizes: Sizes | None = None
    index: tuple[tuple[int, int], ...] = ()
    names: Collection[str] | None = None

    def below(self, node: Any, key: Any, *, prefix: str | None = None, suffix: str = "") -> Site:
        """Return the site of what hangs at a key; PyTorch's prefix goes on with the key unless one is given."""
        path = (*self.path, key)
        prefix = f"{self.prefix}{dotted((key,))}." if prefix is None else prefix
        return Site(node, path, prefix, suffix, self.normed_by)

    def name(self, entry: str) -> str:
        """Return the model's name of an entry."""
        return f"{dotted(self.path)}.{entry}" if self.path else entry

    def torch_name(self, entry: str) -> str:
        """Return PyTorch's name of an entry."""
        return f"{self.prefix}{entry}{self.suffix}"

    @property
    def label(self) -> str:
        """The module for a message: its class and where it hangs."""
        return f"{type(self.node).__name__} {dotted(self.path)}".rstrip()

    def where(self, entry: str) -> str:
        """Name an entry of either side, with the module that it belongs to, for a message."""
        return located(entry, self.label)

    def get(self, attribute: str) -> Any:
        """Return an attribute, or None if it is not known yet."""
        return vars(self.node).get(attribute)

    def at(self, entry: str) -> Any:
        """Return the Variable or raw array that an entry's name stands for, or None."""
        found = self.node
        for key in entry.split("."):
            found = _graph.get_child(found, key)
        return None if found is _graph.MISSING else found

    def shape(self, entry: str) -> tuple[int | None, ...] | None:
        """Return what is known of an entry's shape, None for an unknown axis; None if nothing is."""
        found = self.at(entry)
        if _graph.is_placeholder(found):
            return self._of_layer(found.get_raw_value().shape)
        raw = unwrapped(found)
        return self._of_layer(raw.shape) if isinstance(raw, (jax.Array, np.ndarray, jax.ShapeDtypeStruct)) else None

    def _of_layer(self, shape: tuple[int | None, ...] | None) -> tuple[int | None, ...] | None:
        """Return a shape without the axes of stacked layers."""
        if shape is None:
            return None
        for axis, _ in self.index:
            shape = tuple(n for i, n in enumerate(shape) if i != axis % len(shape))
        return shape

    def value(self, entry: str) -> Array | None:
        """Return an entry's values, or None if the module has no such entry."""
        found = self.at(entry)
        if found is None:
            return None
        value = value_of(found)
        for axis, number in self.index:
            value = value[(slice(None),) * (axis % value.ndim) + (number,)]
        return value


def value_of(found: Any) -> Array:
    """Return the values of a Variable or raw array."""
    return np.asarray(unwrapped(found))
