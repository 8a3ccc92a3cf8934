"""Where values are made while a model is materialized on a mesh: the place of each placeholder.

The places are known to this thread as long as that lasts. What fills a placeholder asks for its place; what can draw it
in parts does, and whatever is made otherwise is brought there when it is written.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from jax.sharding import NamedSharding

from lazymods import _compat
from lazymods._initial import shards


class _Local(threading.local):
    places: Mapping[int, tuple[Any, NamedSharding]] = {}  # by the placeholder's id: itself and its place
    current: NamedSharding | None = None  # of the value that an initializer is making
    is_told: bool = True  # whether told_to_xla does what it is for


_LOCAL = _Local()


@contextlib.contextmanager
def places_of(places: Mapping[int, tuple[Any, NamedSharding]]) -> Iterator[None]:
    """Know the places of placeholders in the body.

    Args:
        places: By the placeholder's id: itself, so that no other has the id, and its place.
    """
    before, _LOCAL.places = _LOCAL.places, places
    try:
        yield
    finally:
        _LOCAL.places = before


def place_of(placeholder: Any) -> NamedSharding | None:
    """Return the place of a placeholder; None if it goes wherever values are made."""
    found = _LOCAL.places.get(id(placeholder)) if _LOCAL.places else None
    return None if found is None else found[1]


@contextlib.contextmanager
def making(placeholder: Any) -> Iterator[None]:
    """Let :func:`current` be the place of a placeholder, whose initializer is called in the body."""
    before, _LOCAL.current = _LOCAL.current, place_of(placeholder)
    try:
        yield
    finally:
        _LOCAL.current = before


def current() -> NamedSharding | None:
    """Return the place of the value that is being made, if it has one."""
    return _LOCAL.current


def on_one_device() -> contextlib.AbstractContextManager[Any]:
    """Leave the mesh of ``jax.set_mesh``, all of whose devices would make the whole of every value."""
    if jax.sharding.get_abstract_mesh().empty:
        return contextlib.nullcontext()
    return jax.set_mesh(None)


def at_place(placeholder: Any, value: Any) -> Any:
    """Bring a value to the place of its placeholder, if that has one and the value is not there yet."""
    place = place_of(placeholder)
    return value if place is None else shards.put(value, place)


@contextlib.contextmanager
def told_later() -> Iterator[None]:
    """Let :func:`told_to_xla` return values as they are: what a load writes may still be put together with others."""
    before, _LOCAL.is_told = _LOCAL.is_told, False
    try:
        yield
    finally:
        _LOCAL.is_told = before


def told_to_xla(variable: Any, value: Any) -> Any:
    """Return a value for a Variable that stays where it is on a mesh when a transform carries it out of its trace.

    A value that was made outside of the trace is a constant there, of which XLA does not know where it was.
    """
    sharding = getattr(value, "sharding", None)
    is_spread = isinstance(sharding, NamedSharding) and sharding.num_devices > 1 and not _compat.is_tracer(value)
    if not is_spread or not _LOCAL.is_told:
        return value
    home = _compat.home_trace(variable)
    if home is _compat.eval_trace() or jax.sharding.get_abstract_mesh().manual_axes:
        return value
    with _compat.at_trace(home):
        return shards.told(value, sharding)
