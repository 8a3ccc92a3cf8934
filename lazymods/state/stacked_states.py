"""Training states of a model with a list of blocks, for one with a ``lm.Stack`` of them, and the other way.

The entries of the model itself have the names of a list in both. But what an optimizer has for a stack is one array for
all layers, ``optimizer.opt_state.0.mu.blocks.fc.kernel``, and for a list one for each,
``optimizer.opt_state.0.mu.blocks.0.fc.kernel``. A file of either is brought to what the state that is loaded has.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from flax import nnx

from lazymods import _graph
from lazymods._graph import TOGETHER, Path, dotted
from lazymods.state.array_rules import Found
from lazymods.state.array_stacks import Stack, Unstack
from lazymods.state.entries import Survey, prefix_of
from lazymods.state.flow import ArrayRule, Entry


@dataclasses.dataclass(frozen=True)
class _Beside:
    """What is beside the modules of a state, and goes by another name in it than in the file."""

    modules: tuple[str, ...]
    names: frozenset[str]

    def __call__(self, entries: Sequence[Entry]) -> list[Entry]:
        """Choose among the entries of a file; one whose name the state has is what it is, whatever others are."""
        return [e for e in entries if not e.name.startswith(self.modules) and e.name not in self.names]


@dataclasses.dataclass(frozen=True)
class _Together(Stack):
    """What an optimizer has for the blocks of a list, as it has it for a stack."""

    beside: _Beside = _Beside((), frozenset())

    def find(self, entries: Sequence[Entry]) -> Found:
        """Find what is beside the modules."""
        return super().find(self.beside(entries))


@dataclasses.dataclass(frozen=True)
class _Apart(Unstack):
    """What an optimizer has for the blocks of a stack, as it has it for a list."""

    beside: _Beside = _Beside((), frozenset())
    count: int = 0

    def find(self, entries: Sequence[Entry]) -> Found:
        """Find what is beside the modules, and has as many layers as the list has."""
        return super().find([e for e in self.beside(entries) if e.tensor.shape[:1] == (self.count,)])


def rules_for(survey: Survey) -> list[ArrayRule]:
    """Return the rules for a training state; on the entries of a file of the same kind they do nothing."""
    inside = list(_in_modules(survey))
    beside = _Beside(tuple({prefix_of(root) for root, _, _ in inside}), frozenset(survey.places))
    stacks = [p for _, p, node in inside if TOGETHER in vars(node)]
    lists = [(p, node) for _, p, node in inside if isinstance(node, nnx.List)]
    names = {dotted(p) for _, p, _ in inside}
    rules: list[ArrayRule] = []
    for path in sorted(stacks, key=len, reverse=True):  # inner ones first
        rules.append(_Together(rf"{_after(dotted(path), names)}(\d+)[.]", into="", beside=beside))
    for path, node in sorted(lists, key=lambda found: len(found[0])):
        count = sum(key.isdecimal() for key in _graph.attributes(node))
        rules.append(_Apart(rf"{_after(dotted(path), names)}(?!\d)", into="{i}.", beside=beside, count=count))
    return rules


def _after(name: str, names: Collection[str]) -> str:
    """Return the expression for what comes after the name of an object, and not after a longer one's that ends so."""
    longer = [other for other in names if other.endswith(f".{name}")]
    others = "".join([rf"(?<![.]{re.escape(other)}[.])" for other in sorted(longer)])
    return rf"(?<=[.]{re.escape(name)}[.]){others}"


def _in_modules(survey: Survey) -> Iterator[tuple[Path, Path, Any]]:
    """Find the objects in the modules of a state: the path of the module, the path in it, and the object."""
    roots: list[Path] = []
    for path, node in survey.nodes:
        root = next((r for r in roots if path[: len(r)] == r), None)
        if root is not None:
            yield root, path[len(root) :], node
        elif isinstance(node, nnx.Module) and not isinstance(node, nnx.Optimizer):
            roots.append(path)
