"""Where an entry came from, and whether a rule of the user's has transposed it on its way."""

from __future__ import annotations

from collections.abc import Mapping

from lazymods.state.array_rules import Transpose
from lazymods.state.flow import Applied, Entry, Flow
from lazymods.state.layouts.doubts import Origin


def origins(flow: Flow, entries: Mapping[str, Entry]) -> dict[str, Origin]:
    """Return where entries came from, by their names now."""
    made = {id(entry): applied for applied in flow.applied for entry in applied.outputs}
    return {name: _origin(entry, made) for name, entry in entries.items()}


def _origin(entry: Entry, made: Mapping[int, Applied]) -> Origin:
    turns = None
    while id(entry) in made:
        rule, (entry, *_), _ = made[id(entry)]
        if isinstance(rule, Transpose) and len(getattr(entry.tensor, "shape", ())) == 2:
            is_turn = rule.axes is None or [axis % 2 for axis in rule.axes] == [1, 0]
            turns = (turns or 0) + is_turn
    return Origin(entry.tensor, turns)
