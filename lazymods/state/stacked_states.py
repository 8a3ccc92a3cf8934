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
class _Together(Stack):
    """What an optimizer has for the blocks of a list, as it has it for a stack."""

    modules: tuple[str, ...] = ()
    known: Collection[str] = dataclasses.field(default=(), repr=False, compare=False)

    def find(self, entries: Sequence[Entry]) -> Found:
        """Find what is beside the modules, and has no place as it is."""
        return super().find(_beside(entries, self.modules, self.known))


@dataclasses.dataclass(frozen=True)
class _Apart(Unstack):
    """What an optimizer has for the blocks of a stack, as it has it for a list."""

    modules: tuple[str, ...] = ()
    count: int = 0
    known: Collection[str] = dataclasses.field(default=(), repr=False, compare=False)

    def find(self, entries: Sequence[Entry]) -> Found:
        """Find what is beside the modules, has no place as it is, and has as many layers as the list has."""
        rest = _beside(entries, self.modules, self.known)
        return super().find([e for e in rest if e.tensor.shape[:1] == (self.count,)])


def _beside(entries: Sequence[Entry], modules: tuple[str, ...], known: Collection[str]) -> list[Entry]:
    return [e for e in entries if e.name not in known and not e.name.startswith(modules)]


def rules_for(survey: Survey) -> list[ArrayRule]:
    """Return the rules for a training state; on the entries of a file of the same kind they do nothing."""
    inside = list(_in_modules(survey))
    modules = tuple({prefix_of(root) for root, _, _ in inside})
    stacks = [p for _, p, node in inside if TOGETHER in vars(node)]
    lists = [(p, node) for _, p, node in inside if isinstance(node, nnx.List)]
    names = {dotted(p) for _, p, _ in inside}
    known = survey.places.keys()
    rules: list[ArrayRule] = []
    for path in sorted(stacks, key=len, reverse=True):  # inner ones first
        rules.append(_Together(rf"{_after(dotted(path), names)}(\d+)[.]", into="", modules=modules, known=known))
    for path, node in sorted(lists, key=lambda found: len(found[0])):
        count = sum(key.isdecimal() for key in _graph.attributes(node))
        pattern = rf"{_after(dotted(path), names)}(?!\d)"
        rules.append(_Apart(pattern, into="{i}.", modules=modules, count=count, known=known))
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
