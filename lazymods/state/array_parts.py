"""Array rules by which one array of a file is several of a model, or several are one: fused projections, ties."""

from __future__ import annotations

import dataclasses
import functools
import itertools
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
    each,
    problem_of,
)
from lazymods.state.files.stored import Array, StoredTensor
from lazymods.state.flow import ArrayRule, Entry, Group, Unfit, derived
from lazymods.state.values import same_values


def _unit(length: int, ratio: Sequence[int], groups: int) -> int:
    """Return how long the unit of a ratio is.

    Raises:
        Unfit: If the axis cannot be cut so.
    """
    unit, rest = divmod(length, groups * sum(ratio))
    if rest or not unit:
        parts = f"{groups} groups of " if groups > 1 else ""
        needed = f"one that can be cut into {parts}parts as {' : '.join(map(str, ratio))}"
        raise Unfit(f"an axis of length {length}", needed)
    return unit


def _with_length(shape: Sequence[int], axis: int, length: int) -> tuple[int, ...]:
    return tuple(length if i == axis else n for i, n in enumerate(shape))


def _grouped(array: Array, axis: int, groups: int) -> Array:
    """Split an axis into groups and what is in one."""
    shape = array.shape
    return array.reshape(*shape[:axis], groups, shape[axis] // groups, *shape[axis + 1 :])


def _ungrouped(array: Array, axis: int) -> Array:
    shape = array.shape
    return array.reshape(*shape[:axis], shape[axis] * shape[axis + 1], *shape[axis + 2 :])


def _part(array: Array, axis: int, begin: int, end: int, groups: int) -> Array:
    """Return the part of an axis, or of each of its groups: a view, unless there are several groups."""
    if groups == 1:
        return array[(slice(None),) * axis + (slice(begin, end),)]
    return _ungrouped(_grouped(array, axis, groups)[(slice(None),) * (axis + 1) + (slice(begin, end),)], axis)


def _joined(arrays: Sequence[Array], axis: int, groups: int) -> Array:
    if groups == 1:
        return np.concatenate(arrays, axis)
    return _ungrouped(np.concatenate([_grouped(a, axis, groups) for a in arrays], axis + 1), axis)


def _check_parts(rule: ArrayRule, parts: Any, ratio: Any, groups: Any) -> None:
    where = f"lm.rules.{type(rule).__name__}"
    if not isinstance(parts, (tuple, list)) or len(parts) < 2:
        raise wrong_argument(where, parts, "a tuple of two or more names or patterns", '("q_proj", "k_proj", "v_proj")')
    check_whole_numbers(rule, "groups", (groups,), least=1)
    if ratio is not None:
        check_whole_numbers(rule, "ratio", ratio, least=1)
        if len(ratio) != len(parts):
            needed = f"ratio is {len(parts)} positive whole numbers, one for each part"
            raise wrong_argument(where, ratio, needed, f"ratio={(1,) * len(parts)}")


@dataclasses.dataclass(frozen=True)
class Split(ArrayRule):
    """One array of the file that is several of the model: queries, keys and values; a gate and what it opens.

    ``into=("q_proj", "k_proj", "v_proj")`` with the defaults cuts an axis in thirds (GPT-2, ViT of timm). With
    ``groups`` the parts stand in each group: GPT-NeoX and BLOOM have queries, keys and values head by head
    (``groups=num_heads``), Falcon by key-value head (``groups=num_kv_heads, ratio=(num_heads // num_kv_heads, 1, 1)``).
    Phi-3 has unequal parts, ``ratio=(num_heads, num_kv_heads, num_kv_heads)``; its ``gate_up_proj`` two equal ones.

    Args:
        pattern: The regular expression of the names.
        into: What ``re.sub`` puts in the pattern's place, for each part.
        axis: The axis, in the file's array; -1 for that of GPT-2's ``Conv1D`` and its bias.
        ratio: How long the parts are to each other; None: equally.
        groups: How many groups the axis has, each with all parts.

    Raises:
        ArgumentError: If ``ratio`` is not a positive number for each part, ``groups`` none, or a name is none.

    Example:
        >>> import lazymods as lm
        >>> neox = lm.rules.Split("query_key_value", into=("query", "key", "value"), groups=4)
    """

    pattern: str
    into: tuple[str, ...]
    axis: int = 0
    ratio: tuple[int, ...] | None = None
    groups: int = 1

    def __post_init__(self) -> None:
        _check_parts(self, self.into, self.ratio, self.groups)
        check_names(self, self.pattern, *self.into)
        check_whole_numbers(self, "axis", (self.axis,))

    def find(self, entries: Sequence[Entry]) -> Found:
        """Take each entry by itself."""
        return each(compiled(self.pattern), self.into, entries)

    def forward(self, tensors: Sequence[StoredTensor], count: int) -> list[StoredTensor]:
        """Cut.

        Raises:
            Unfit: If the axis cannot be cut so.
        """
        (tensor,) = tensors
        axis = axis_of(self.axis, tensor)
        ratio = self.ratio or (1,) * count
        unit = _unit(tensor.shape[axis], ratio, self.groups)
        out, begin = [], 0
        for length in ratio:
            end = begin + length * unit
            shape = _with_length(tensor.shape, axis, length * unit * self.groups)
            cut = functools.partial(_part, axis=axis, begin=begin, end=end, groups=self.groups)
            out.append(derived(tensor, shape, lambda cut=cut: cut(tensor.read())))
            begin = end
        return out

    def backward(self, values: Sequence[Any], inputs: Sequence[StoredTensor]) -> list[Any]:
        """Put the parts together.

        Raises:
            Unfit: If the model lacks one, or has one of another size than the file now.
        """
        check_whole(values, self.into)
        axis, whole = axis_of(self.axis, inputs[0]), inputs[0].shape
        ratio = self.ratio or (1,) * len(values)
        unit = whole[axis] // sum(ratio)
        if any(value.shape != _with_length(whole, axis, n * unit) for value, n in zip(values, ratio, strict=True)):
            got = f"parts of the shapes {', '.join(str(value.shape) for value in values)}"
            raise Unfit(got, f"parts of one of shape {whole}, as the file has")
        return [_joined(values, axis, self.groups)]


@dataclasses.dataclass(frozen=True)
class Merge(ArrayRule):
    """Several arrays of the file that are one of the model: its fused projection, where the file has three.

    Args:
        patterns: The regular expressions of the parts' names, in order.
        into: What ``re.sub`` puts in a pattern's place; the parts whose names become the same belong together.
        axis: The axis along which they are put together, in the file's arrays.
        groups: How many groups the axis has, each with all parts; see :class:`Split`.

    Raises:
        ArgumentError: If ``groups`` is no positive number, or a name is none.

    Example:
        >>> import lazymods as lm
        >>> fused = lm.rules.Merge(("q_proj", "k_proj", "v_proj"), into="qkv")
    """

    patterns: tuple[str, ...]
    into: str
    axis: int = 0
    groups: int = 1

    def __post_init__(self) -> None:
        _check_parts(self, self.patterns, None, self.groups)
        for pattern in self.patterns:
            check_names(self, pattern, self.into)
        check_whole_numbers(self, "axis", (self.axis,))

    def find(self, entries: Sequence[Entry]) -> Found:
        """Find the parts of each whole."""
        wholes: dict[str, dict[int, Entry]] = {}
        problems = []
        for entry in entries:
            for i, pattern in enumerate(map(compiled, self.patterns)):
                if not pattern.search(entry.name):
                    continue
                parts = wholes.setdefault(pattern.sub(self.into, entry.name), {})
                if parts.setdefault(i, entry) is not entry:
                    problems.append(problem_of(self, entry.name, f"a second part {i}, beside {parts[i].name}"))
                break
        groups = []
        for name, parts in wholes.items():
            if len(parts) < len(self.patterns):
                lacking = [p for i, p in enumerate(self.patterns) if i not in parts]
                got = f"only {', '.join(e.name for e in parts.values())}: nothing for {', '.join(lacking)}"
                problems.append(problem_of(self, name, got))
            else:
                groups.append(Group(tuple(parts[i] for i in range(len(self.patterns))), (name,)))
        return groups, problems

    def forward(self, tensors: Sequence[StoredTensor], count: int) -> list[StoredTensor]:
        """Put together.

        Raises:
            Unfit: If the parts differ in dtype, or in another axis, or do not have the groups.
        """
        first = tensors[0]
        axis = axis_of(self.axis, first)
        for tensor in tensors:
            same = _with_length(tensor.shape, axis, 0) == _with_length(first.shape, axis, 0)
            if len(tensor.shape) != len(first.shape) or not same or tensor.dtype != first.dtype:
                raise Unfit(f"{describe(first)} beside {describe(tensor)}", "parts that fit")
            _unit(tensor.shape[axis], (1,), self.groups)
        shape = _with_length(first.shape, axis, sum(tensor.shape[axis] for tensor in tensors))
        return [derived(first, shape, lambda: _joined([t.read() for t in tensors], axis, self.groups))]

    def backward(self, values: Sequence[Any], inputs: Sequence[StoredTensor]) -> list[Any]:
        """Cut the parts out again.

        Raises:
            Unfit: If the whole has another length now.
        """
        axis = axis_of(self.axis, inputs[0])
        lengths = [tensor.shape[axis] // self.groups for tensor in inputs]
        if values[0].ndim != len(inputs[0].shape) or values[0].shape[axis] != sum(lengths) * self.groups:
            raise Unfit(f"shape {values[0].shape} in the model", f"parts of {[t.shape for t in inputs]}")
        ends = np.cumsum([0, *lengths])
        return [_part(values[0], axis, int(a), int(b), self.groups) for a, b in itertools.pairwise(ends)]


@dataclasses.dataclass(frozen=True)
class Copy(ArrayRule):
    """One array of the file that is two of the model: an embedding whose file has no head of its own.

    The two are apart in the model, and train apart; ``nnx.Embed.attend`` uses one for both.

    Args:
        pattern: The regular expression of the names; the entry stays.
        into: What ``re.sub`` puts in the pattern's place, for the second name.

    Example:
        >>> import lazymods as lm
        >>> tied = lm.rules.Copy(r"^model[.]embed_tokens[.]", into="lm_head.")
    """

    pattern: str
    into: str

    def __post_init__(self) -> None:
        check_names(self, self.pattern, self.into)

    def find(self, entries: Sequence[Entry]) -> Found:
        """Take each entry by itself."""
        return each(compiled(self.pattern), [r"\g<0>", self.into], entries)

    def forward(self, tensors: Sequence[StoredTensor], count: int) -> list[StoredTensor]:
        """Give the array twice."""
        return [tensors[0], tensors[0]]

    def backward(self, values: Sequence[Any], inputs: Sequence[StoredTensor]) -> list[Any]:
        """Give the one value of both.

        Raises:
            Unfit: If they differ now.
        """
        found = [value for value in values if value is not None]
        if len(found) > 1 and not same_values(*(value.astype(inputs[0].dtype) for value in found)):
            raise Unfit("two parameters that differ now", "equal values, for the file has one entry for both")
        return [found[0]]
