"""A function at one structure as a pure function of flat arrays.

A :class:`Body` runs the function on copies of all that it reaches (:mod:`lazymods.compile.copies`), in which the leaves
are. So the user's own objects are never touched: other threads may use them, and what fails changes nothing. What the
function did to the copies is what the program will do to the originals (:mod:`lazymods.compile.records`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lazymods import _compat_jit
from lazymods.compile.copies import Copies
from lazymods.compile.picture import Picture, Reads, held_by, with_inputs
from lazymods.compile.records import Record, describe


class Place:
    """Where an array is that is no Variable's: the attribute of an object, or the item of a dict or list."""

    __slots__ = ("key", "node")

    def __init__(self, node: Any, key: Any) -> None:
        self.node, self.key = node, key

    @property
    def held(self) -> Any:
        """The dict or list in which it is."""
        return held_by(self.node)

    @property
    def mark(self) -> tuple[int, Any]:
        """What tells it from other places."""
        return id(self.node), self.key


class Body:
    """A function and the objects of one call, as a pure function of flat arrays.

    Args:
        call: ``call(copies, arrays)`` runs the function on copies, with these arrays among its arguments.
        reach: What the function can reach: nnx objects, Variables, containers that hold some.
        inputs: How many leaves are arguments; those come first.
        targets: For every further leaf the Variable or :class:`Place` that holds it.
        impls: By number of a leaf: it is a typed key of this implementation, passed as its data.
        reads: Where it is noted what the function reads of objects; None: nowhere.
        attributes: Attributes of modules and classes, by which the function finds some of what it reaches.

    Attributes:
        record: After a run: what else it did, see :class:`~lazymods.compile.records.Record`.
        kept: After a run: the numbers of the targets that it can have read; others count for nothing.
        has_read_more: After a run: whether it has read more of objects than any run before.
    """

    def __init__(
        self,
        call: Callable[[Copies, Sequence[Any]], Any],
        reach: Sequence[Any],
        inputs: int,
        targets: Sequence[Any],
        impls: dict[int, Any],
        reads: Reads | None = None,
        attributes: Sequence[tuple[Any, str]] = (),
    ) -> None:
        self._call, self._reach, self._impls = call, reach, impls
        self._reads, self._attributes = reads, attributes
        self.inputs, self.targets = inputs, list(targets)
        self.record: Record | None = None
        self.kept: list[int] = []
        self.has_read_more = False

    def __call__(self, leaves: Sequence[Any]) -> list[Any]:
        """Run the function on these leaves; return the arrays that it returned, then those that it wrote."""
        leaves = [_compat_jit.wrap_key(v, self._impls[i]) if i in self._impls else v for i, v in enumerate(leaves)]
        picture = Picture(self._reach)
        copies = Copies(picture, self._reads)
        for target, value in zip(self.targets, leaves[self.inputs :], strict=True):
            copy = copies.of(target.node if isinstance(target, Place) else target)
            if isinstance(target, Place):
                held = held_by(copy)
                held[target.key] = with_inputs(held[target.key], value)
            else:
                _compat_jit.SET_RAW(copy, value)
        copies.begin(picture)
        for owner, name in self._attributes:
            copies.swap(owner, name)
        with copies.swapped():
            out = self._call(copies, leaves[: self.inputs])
        reads = None
        if self._reads is not None:
            version, reads = self._reads.version, self._reads.settle()
            self.has_read_more = reads.version != version
        base = picture if reads is None else Picture(self._reach, reads=reads)
        known = {*map(id, base.variables), *((id(node), key) for node, key in base.slots)}
        self.kept = [n for n, t in enumerate(self.targets) if (t.mark if isinstance(t, Place) else id(t)) in known]
        targets = {n: self.targets[n] for n in self.kept}
        self.record, outputs = describe(out, base, copies, targets, reads)
        return outputs


def mark_of(target: Any) -> Any:
    """Return what tells a target from others: hashable."""
    return target.mark if isinstance(target, Place) else id(target)


def write(target: Any, value: Any) -> None:
    """Let a Variable or place hold a value."""
    if isinstance(target, Place):
        target.held[target.key] = value
    else:
        _compat_jit.SET_RAW(target, value)
