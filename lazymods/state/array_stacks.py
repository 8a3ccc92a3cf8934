"""Array rules for stacks: numbered modules of a file that are one stacked module of a model, and the other way."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from lazymods._errors import describe
from lazymods._refusals import wrong_argument
from lazymods.state.array_rules import (
    Found,
    axis_of,
    check_names,
    check_whole,
    check_whole_numbers,
    compiled,
    problem_of,
)
from lazymods.state.files.stored import Array, StoredTensor
from lazymods.state.flow import ArrayRule, Entry, Group, Slices, StackedTensor, Unfit, derived


def _slices(array: Array, axis: int) -> list[Array]:
    return list(np.moveaxis(array, axis, 0))


@dataclasses.dataclass(frozen=True)
class Stack(ArrayRule):
    r"""Arrays of numbered modules that are one array of the model: layers for ``nnx.scan``, the experts of Mixtral.

    With ``layout="torch"`` each is laid as its module has it, and stacked then: ``layers.0.fc.weight`` and so on
    become ``layers.fc.kernel`` of shape ``(layers, in, out)``.

    Args:
        pattern: The regular expression of the names, whose first group is the number.
        into: What ``re.sub`` puts in the pattern's place; arrays whose names become the same are stacked by number.
        axis: The axis of the result along which they are stacked.

    Raises:
        ArgumentError: If the pattern has no group, or a name is none.

    Example:
        >>> import lazymods as lm
        >>> layers = lm.rules.Stack(r"^layers[.](\d+)[.]", into="layers.")
    """

    pattern: str
    into: str
    axis: int = 0

    def __post_init__(self) -> None:
        check_names(self, self.pattern, self.into)
        check_whole_numbers(self, "axis", (self.axis,))
        if not compiled(self.pattern).groups:
            needed = "a pattern that has a group for the number"
            write = r'lm.rules.Stack(r"layers[.](\d+)[.]", into="layers.")'
            raise wrong_argument("lm.rules.Stack", self.pattern, needed, write)

    @property
    def takes_slices(self) -> bool:
        """Take what a layout has made of the layers by themselves."""
        return True

    def find(self, entries: Sequence[Entry]) -> Found:
        """Find the arrays of each stack."""
        stacks: dict[str, dict[int, Entry]] = {}
        problems = []
        pattern = compiled(self.pattern)
        for entry in entries:
            match = pattern.search(entry.name)
            if match is None:
                continue
            number = match[1]
            if number is None or not number.isdecimal():
                problems.append(problem_of(self, entry.name, f"{number!r}, where the first group is a number"))
                continue
            members = stacks.setdefault(pattern.sub(self.into, entry.name), {})
            if members.setdefault(int(number), entry) is not entry:
                got = f"a second number {number}, beside {members[int(number)].name}"
                problems.append(problem_of(self, entry.name, got))
        groups = []
        for name, members in stacks.items():
            if sorted(members) != list(range(len(members))):
                got = f"the numbers {', '.join(map(str, sorted(members)))}, which are not all from 0 on"
                problems.append(problem_of(self, name, got))
            else:
                groups.append(Group(tuple(members[i] for i in range(len(members))), (name,)))
        return groups, problems

    def forward(self, tensors: Sequence[StoredTensor], count: int) -> list[StoredTensor]:
        """Stack.

        Raises:
            Unfit: If the arrays differ in shape or dtype.
        """
        for tensor in tensors:
            if (tensor.shape, tensor.dtype) != (tensors[0].shape, tensors[0].dtype):
                got = f"{describe(tensors[0])} and {describe(tensor)}"
                raise Unfit(got, "arrays of one shape and dtype")
        return [StackedTensor(tensors, self.axis)]

    def backward(self, values: Sequence[Any], inputs: Sequence[StoredTensor]) -> list[Any]:
        """Take the stack apart.

        Raises:
            Unfit: If it has another length now.
        """
        parts = values[0].parts if isinstance(values[0], Slices) else _slices(values[0], self.axis)
        if len(parts) != len(inputs):
            raise Unfit(f"a stack of {len(parts)} in the model", f"{len(inputs)}, as the file has")
        return parts


@dataclasses.dataclass(frozen=True)
class Unstack(ArrayRule):
    """One array of the file that is those of numbered modules of the model: experts that are stored as a stack.

    Args:
        pattern: The regular expression of the names.
        into: What ``re.sub`` puts in the pattern's place, with ``{i}`` for the number.
        axis: The axis that is taken apart.

    Raises:
        ArgumentError: If ``into`` has no ``{i}``, or a name is none.

    Example:
        >>> import lazymods as lm
        >>> experts = lm.rules.Unstack(r"experts[.]down_proj$", into="experts.{i}.down_proj")
    """

    pattern: str
    into: str
    axis: int = 0

    def __post_init__(self) -> None:
        check_names(self, self.pattern, self.into)
        check_whole_numbers(self, "axis", (self.axis,))
        if "{i}" not in self.into:
            needed = "into has {i} for the number"
            raise wrong_argument("lm.rules.Unstack", self.into, needed, 'into="experts.{i}.down_proj"')

    def find(self, entries: Sequence[Entry]) -> Found:
        """Take each entry by itself."""
        pattern = compiled(self.pattern)
        groups = []
        problems = []
        for entry in entries:
            if not pattern.search(entry.name):
                continue
            shape, name = entry.tensor.shape, pattern.sub(self.into, entry.name)
            if -len(shape) <= self.axis < len(shape):
                groups.append(Group((entry,), tuple(name.replace("{i}", str(i)) for i in range(shape[self.axis]))))
            else:
                problems.append(problem_of(self, entry.name, f"shape {shape}, without an axis {self.axis}"))
        return groups, problems

    def forward(self, tensors: Sequence[StoredTensor], count: int) -> list[StoredTensor]:
        """Take apart; views."""
        (tensor,) = tensors
        axis = axis_of(self.axis, tensor)
        shape = (*tensor.shape[:axis], *tensor.shape[axis + 1 :])
        return [derived(tensor, shape, lambda i=i: np.take(tensor.read(), i, axis)) for i in range(count)]

    def backward(self, values: Sequence[Any], inputs: Sequence[StoredTensor]) -> list[Any]:
        """Stack.

        Raises:
            Unfit: If the model lacks one, or they differ in shape.
        """
        check_whole(values, range(len(values)))
        if len({value.shape for value in values}) > 1:
            raise Unfit(f"shapes {', '.join(str(v.shape) for v in values)}", "one shape, to be stacked")
        return [np.stack(values, self.axis)]
