"""A lazy layer's place among the draws from its rngs, once its sizes are known: see :mod:`lazymods._initial.draws`."""

from __future__ import annotations

import functools
from typing import Any

from flax import nnx

from lazymods import _compat, _graph
from lazymods._graph import STATE
from lazymods._initial import draws
from lazymods._layer.abstract_module import AbstractModule


def note_draws(layer: Any, abstract: AbstractModule, *, roots: Any = (), strict: bool = True) -> None:
    """Note how often the constructor of a layer draws at the sizes now known: what comes after it follows from that.

    Args:
        layer: A lazy layer.
        abstract: The constructor at these sizes.
        roots: The model that it is in, where what was forked from its streams gets another key; if it is not known,
            what the callers have.
        strict: Whether it is refused that others have used keys as if it drew otherwise. A load of all values asks for
            no keys.

    Raises:
        ConfigurationError: If it is refused.
    """
    state = vars(layer)[STATE]
    if state.turns is not None and _graph.LOCAL.session is None:
        names = [name for name, _, _ in state.spec.streams]

        def streams() -> list[Any]:
            found = roots or [holder for _, holder in _graph.holders(layer)]
            own = {id(node) for _, node in _graph.nodes(layer)}  # drawn by itself
            own |= {id(v) for _, n in _graph.lazy_nodes(found) for v in _random_state(n)}  # each renews its own
            nodes = [n for _, n in _graph.nodes(found) if isinstance(n, nnx.RngStream)]
            return [n for n in nodes if id(n) not in own and id(n.count) not in own]

        where = functools.partial(_graph.place, layer, type(layer).__name__) if strict else None
        with _compat.at_trace(_compat.eval_trace()):
            draws.settle(state.turns, abstract.draws, names, streams, where)


def _random_state(layer: Any) -> list[Any]:
    """The random state that the constructor of a lazy layer has made."""
    spec = vars(layer)[STATE].spec
    slots = {} if spec is None or spec.modules else spec.formulas.abstract.slots
    random = [path for path, slot in slots.items() if slot.cls is not None and issubclass(slot.cls, nnx.RngState)]
    return [_graph.at(layer, path) for path in random]
