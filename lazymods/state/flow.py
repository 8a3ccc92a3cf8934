"""The entries of a checkpoint on their way to a model's names: renamed, dropped, and put through array rules, in order.

What was done is noted step by step, so that it can be undone: :mod:`lazymods.state.way_back`. Nothing is read here:
a rule says what the shape will be, and gives a function that makes the values.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from lazymods._errors import Problem
from lazymods._initial.stacking import Shape
from lazymods._refusals import ArgumentError
from lazymods.state import options
from lazymods.state.files.stored import Array, StoredTensor, printable
from lazymods.state.values import as_array


class Entry:
    """An entry on its way.

    Attributes:
        name: Its name now.
        tensor: What it holds: a :class:`StoredTensor`, or an object that is no tensor.
        sources: The names of the file that it comes from.
    """

    __slots__ = ("name", "sources", "tensor")

    def __init__(self, name: str, tensor: Any, sources: tuple[str, ...]) -> None:
        self.name: str = name
        self.tensor: Any = tensor
        self.sources: tuple[str, ...] = sources


class Group(NamedTuple):
    """Entries that a rule takes together, and the names of what it makes of them."""

    inputs: tuple[Entry, ...]
    names: tuple[str, ...]


class Unfit(Exception):  # noqa: N818  a finding that becomes a Problem where the entry's name is known
    """What a rule cannot do with an entry: what was got, and what is needed."""

    def __init__(self, got: str, needed: str) -> None:
        super().__init__(got, needed)
        self.got: str = got
        self.needed: str = needed


class ArrayRule:
    """What changes arrays on their way from a file to a model, and back."""

    def find(self, entries: Sequence[Entry]) -> tuple[list[Group], list[Problem]]:
        """Find the entries that go together, and the names of what becomes of them."""
        raise NotImplementedError

    def forward(self, tensors: Sequence[StoredTensor], count: int) -> list[StoredTensor]:
        """Return what becomes of the tensors of a group, unread; so many as the group has names.

        Raises:
            Unfit: If they cannot be taken so.
        """
        raise NotImplementedError

    def backward(self, values: Sequence[Any], inputs: Sequence[StoredTensor]) -> list[Any]:
        """Return the values of the group's tensors, given those of what became of them.

        Args:
            values: Arrays; None for what the model does not have.
            inputs: The shapes and dtypes of the tensors; the values too of those that the rule ``keeps``.

        Raises:
            Unfit: If no values of theirs would give these.
        """
        raise NotImplementedError

    @property
    def takes_slices(self) -> bool:
        """Whether the way back takes the layers of a stack by themselves, as :class:`Slices`."""
        return False

    def keeps(self, index: int) -> bool:
        """Whether the way back needs the values of a group's tensor, not its shape only."""
        return False


class Applied(NamedTuple):
    """One use of a rule: the entries that it took, and those that it made of them."""

    rule: ArrayRule
    inputs: tuple[Entry, ...]
    outputs: tuple[Entry, ...]


class Dropped(NamedTuple):
    """An entry that a rename has left out, by the name that it had then, and the part of the rename that did."""

    entry: Entry
    by: str


@dataclasses.dataclass
class Flow:
    """What became of the entries.

    Attributes:
        entries: Those that are left, with their names of now.
        originals: All entries as they were, by the file's names.
        applied: The uses of rules, in order.
        dropped: What was left out.
        unused: Parts of the rename that fit no name.
        problems: What a rule cannot do.
        rename_given: Whether there is a rename.
        ignored: Expressions of names of entries that need no parameter.
    """

    entries: list[Entry]
    originals: Mapping[str, Entry]
    applied: list[Applied] = dataclasses.field(default_factory=list)
    dropped: list[Dropped] = dataclasses.field(default_factory=list)
    unused: list[str] = dataclasses.field(default_factory=list)
    problems: list[Problem] = dataclasses.field(default_factory=list)
    rename_given: bool = False
    ignored: Sequence[re.Pattern[str]] = ()

    def by_name(self) -> dict[str, Entry]:
        """Return the entries by name, and note those that meet."""
        out: dict[str, Entry] = {}
        for entry in self.entries:
            other = out.setdefault(entry.name, entry)
            if other is not entry:
                first, second = (" and ".join(e.sources) or e.name for e in (other, entry))
                got = f"two entries of the file, {first} and {second}"
                write = f"rename=lambda name: None if name == {second!r} else name"
                self.problems.append(Problem(entry.name, got, "one entry for a name", write))
        return out

    def rename(self, function: Callable[[str], str | None], by: Callable[[str], str]) -> int:
        """Rename all entries, and return how many names were another then.

        Args:
            function: Gives the new name, or None to leave an entry out.
            by: Says of a name what part of the rename has left it out.

        Raises:
            ArgumentError: If the function returns neither a name nor None.
        """
        kept: list[Entry] = []
        changed = 0
        for entry in self.entries:
            new = function(entry.name)
            if new is None:
                self.dropped.append(Dropped(entry, by(entry.name)))
            elif isinstance(new, str):
                changed += new != entry.name
                entry.name = new
                kept.append(entry)
            else:
                got = f"for {entry.name!r} it gave {new!r}"
                line = f"rename=lambda name: name if name != {entry.name!r} else None"
                if isinstance(new, (tuple, list)):
                    line = f"rename=[lm.rules.Copy({re.escape(entry.name)!r}, into=...)]  # gives it a second name"
                needed = "a name, or None to leave an entry out"
                raise ArgumentError(Problem(RENAME, printable(got), needed, line))
        changed += len(self.entries) - len(kept)
        self.entries = kept
        return changed

    def apply(self, rule: ArrayRule) -> None:
        """Put entries through a rule; what it makes stands where the first of what it takes stood."""
        tensors = [entry for entry in self.entries if isinstance(entry.tensor, StoredTensor)]
        groups, problems = rule.find(tensors)
        self.problems += problems
        if not groups and not problems:
            self.unused.append(repr(rule))
        made: dict[int, tuple[Entry, ...]] = {}
        taken: set[int] = set()
        for group in groups:
            try:
                results = rule.forward([entry.tensor for entry in group.inputs], len(group.names))
            except Unfit as unfit:
                where = group.inputs[0].name
                write = f"lm.rules.{type(rule).__name__}(r'...')  # one that fits it, or a narrower pattern"
                self.problems.append(Problem(where, unfit.got, f"{unfit.needed}, for {rule!r}", write))
                continue
            sources = tuple(dict.fromkeys(s for entry in group.inputs for s in entry.sources))
            outputs = tuple(Entry(n, t, sources) for n, t in zip(group.names, results, strict=True))
            self.applied.append(Applied(rule, group.inputs, outputs))
            made[id(group.inputs[0])] = outputs
            taken.update(map(id, group.inputs))
        out: list[Entry] = []
        for entry in self.entries:
            out += made.get(id(entry), () if id(entry) in taken else (entry,))
        self.entries = out


# ---------------------------------------------------------------- tensors that are made of others


def derived(like: StoredTensor, shape: Shape, read: Callable[[], Array], dtype: Any = None) -> StoredTensor:
    """Return a tensor that is made of another one when it is read."""
    kind = like.dtype if dtype is None else np.dtype(dtype)
    return StoredTensor(like.name, tuple(int(n) for n in shape), kind, like.file, read)


class StackedTensor(StoredTensor):
    """Tensors of one shape and dtype, to be stacked; a layout takes them one by one, and stacks what it makes.

    Attributes:
        parts: The tensors.
        axis: The axis along which they are stacked.
    """

    __slots__ = ("axis", "parts")

    def __init__(self, parts: Sequence[StoredTensor], axis: int) -> None:
        first = parts[0]
        rank = len(first.shape) + 1
        if not -rank <= axis < rank:
            raise Unfit(f"shape {first.shape}", f"a rank that can be stacked along axis {axis}")
        at = axis % rank
        shape = (*first.shape[:at], len(parts), *first.shape[at:])
        super().__init__(first.name, shape, first.dtype, first.file, self._stacked)
        self.parts: tuple[StoredTensor, ...] = tuple(parts)
        self.axis: int = axis

    def _stacked(self) -> Array:
        return stacked([part.read() for part in self.parts], self.axis)


class Slices:
    """The arrays of a stack, by themselves."""

    def __init__(self, parts: list[Any]) -> None:
        self.parts: list[Any] = parts


def stacked(arrays: Sequence[Array], axis: int) -> Array:
    """Stack arrays into new memory that JAX can take over."""
    from lazymods._memory import empty

    at = axis % (arrays[0].ndim + 1)
    out = empty((*arrays[0].shape[:at], len(arrays), *arrays[0].shape[at:]), arrays[0].dtype)
    return np.stack(arrays, axis, out=out)


def remembered(tensor: Any, *, values: bool) -> Any:
    """Return what says a tensor's shape and dtype, and holds its values, read now, or none."""
    if not isinstance(tensor, StoredTensor):  # an array of a mapping, which a load of Flax's layouts takes as it is
        array = as_array(tensor)
        if array is None:
            return None
        array = array if hasattr(array, "dtype") else np.asarray(array)
        return StoredTensor("", tuple(array.shape), np.dtype(array.dtype), Path(), _values_are_gone)
    read = functools.partial(np.asarray, tensor.read()) if values else _values_are_gone
    return StoredTensor(tensor.name, tensor.shape, tensor.dtype, tensor.file, read)


def _values_are_gone() -> Array:
    raise RuntimeError("only the shape was kept")  # nobody asks for the values


# ---------------------------------------------------------------- rename


RENAME = "lm.load: rename"

Step: TypeAlias = "tuple[str, str | None] | ArrayRule"
Rename: TypeAlias = Mapping[str, "str | None"] | Sequence[Step] | ArrayRule | Callable[[str], "str | None"]
"""What ``rename=`` takes; see :func:`transformed`."""


def transformed(stored: Mapping[str, Any], rename: Rename | None, first: Sequence[ArrayRule] = ()) -> Flow:
    """Put the entries of a file through a rename.

    Args:
        stored: The entries by the file's names.
        rename: A mapping, a list of pairs ``(pattern, replacement)`` and array rules, a rule, a function, or None.
        first: Rules that come before it; they need not fit anything.

    Raises:
        ArgumentError: If it is none of these, or a function that returns neither a name nor None.
    """
    entries = [Entry(name, tensor, (name,)) for name, tensor in stored.items()]
    flow = Flow(entries, {entry.name: entry for entry in entries})
    for rule in first:
        flow.apply(rule)
    flow.unused.clear()
    if rename is None:
        return flow
    flow.rename_given = True
    if isinstance(rename, Mapping):
        flow.unused += [f"{name!r}: {new!r}" for name, new in rename.items() if name not in stored]
        flow.rename(lambda name: rename.get(name, name), lambda name: f"{name!r}: None")
        return flow
    if not isinstance(rename, (Sequence, ArrayRule)) and callable(rename):
        flow.rename(rename, lambda _: "the function")
        return flow
    for step in _steps(rename):
        if not isinstance(step, tuple):
            flow.apply(step)
            continue
        pattern, replacement = step
        if not any(pattern.search(entry.name) for entry in flow.entries):
            flow.unused.append(f"({pattern.pattern!r}, {replacement!r})")
        elif replacement is None:
            text = f"({pattern.pattern!r}, None)"
            flow.rename(lambda name, p=pattern: None if p.search(name) else name, lambda _, text=text: text)
        else:
            flow.rename(lambda name, p=pattern, r=replacement: p.sub(r, name), str)
    return flow


def _steps(rename: Any) -> Iterable[Any]:
    if isinstance(rename, ArrayRule):
        return [rename]
    out: list[Any] = []
    for step in rename if isinstance(rename, Sequence) and not isinstance(rename, str) else [None]:
        if isinstance(step, ArrayRule):
            out.append(step)
        elif isinstance(step, Sequence) and not isinstance(step, str) and len(step) == 2:
            pattern = options.expression(RENAME, step[0])
            if step[1] is not None and not callable(step[1]):
                options.replacement(RENAME, pattern, step[1])
            out.append((pattern, step[1]))
        else:
            needed = "a mapping, a list of pairs (pattern, replacement) and rules of lm.rules, or a function"
            raise ArgumentError(Problem(RENAME, printable(repr(rename)), needed, 'rename=[(r"^bert[.]", "")]'))
    return out


def has_array_rules(rename: Any) -> bool:
    """Whether a rename changes arrays, too."""
    if rename is None or isinstance(rename, Mapping) or (callable(rename) and not isinstance(rename, Sequence)):
        return False
    return any(not isinstance(step, tuple) for step in _steps(rename))
