"""What a cut has to keep apart: operations on arrays that are committed to other devices.

What names devices (``device_put``, a jitted function with shardings, ``shard_map``) is executed when it is met, see
``_recording.inside.names_devices``. What is recorded runs where its operands are; and an array that is committed
nowhere stays so, which it would not in one program with others.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import jax

from lazymods._compat import tracing
from lazymods._recording.graph import Graph, Node


def by_devices(graph: Graph) -> list[list[Node]]:
    """Return the operations by the devices that their operands are committed to; one list if they are one program."""
    held = [_devices_of(cell.value) for cell in graph.inputs]
    if not any(held) or jax.device_count() == 1:
        return []
    whole = _components(graph)
    devices: dict[int, Any] = {}
    for number, (_, *places) in enumerate(graph.lines):
        for place in places:
            found = held[~place] if isinstance(place, int) and place < 0 else None
            if found and devices.setdefault(whole[number], found) != found:
                return []  # jax says which of them do not fit
    parts: dict[Hashable, list[Node]] = {}
    for node, component in zip(graph.nodes, whole, strict=True):
        parts.setdefault(devices.get(component), []).append(node)
    return list(parts.values()) if len(parts) > 1 else []


def _devices_of(value: Any) -> Any:
    if type(value) is not tracing.array_type() or not value.committed:
        return None
    return frozenset(value.sharding.device_set)


def _components(graph: Graph) -> list[int]:
    """Return for each operation the first of those that it has to do with."""
    first: list[int] = []
    source: list[int] = []  # of each result, the number of its operation

    def root(number: int) -> int:
        while first[number] != number:
            number = first[number]
        return number

    for number, (kind, *places) in enumerate(graph.lines):
        first.append(number)
        for place in places:
            if isinstance(place, int) and 0 <= place < len(source):
                one, other = sorted((root(source[place]), root(number)))
                first[other] = one
        source += [number] * len(kind.results)
    return list(map(root, range(len(first))))
