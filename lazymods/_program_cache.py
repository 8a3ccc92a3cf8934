"""A bounded cache of programs, least recently used first out; one bound for all."""

from __future__ import annotations

import collections
import weakref
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

from lazymods._refusals import wrong_argument


class CacheInfo(NamedTuple):
    """How full a cache is.

    Attributes:
        currsize: The number of compiled signatures that it keeps.
        maxsize: The number that it may keep.
    """

    currsize: int
    maxsize: int


resized: list[Callable[[], None]] = []  # what other caches of this bound do when it changes


class Cache:
    """What is kept by key, within a bound that all caches share.

    Args:
        dropped: Called, if it is alive, with each thing that is dropped.
    """

    size = 128

    def __init__(self, dropped: Callable[[Any], None]) -> None:
        self._dropped = weakref.WeakMethod(dropped)
        self._order: collections.OrderedDict[Any, Hashable] = collections.OrderedDict()  # the key of each thing
        self._things: dict[Hashable, Any] = {}
        _all.add(self)

    def get(self, key: Hashable) -> Any:
        """Return what is kept under a key; None if there is nothing."""
        return self._things.get(key)

    def touch(self, thing: Any) -> None:
        """Note that something that is kept was used: cheaper than by its key, which may be large."""
        if thing in self._order:
            self._order.move_to_end(thing)

    def put(self, key: Hashable, thing: Any) -> None:
        """Keep something in place of what had its key, and drop what was not used for longest."""
        before = self._things.get(key)
        self._things[key] = thing
        self._order[thing] = key
        if before is not None and before is not thing:
            self._order.pop(before, None)
            self._note(before)
        self.trim()

    def trim(self) -> None:
        """Drop what is beyond the bound."""
        while len(self._order) > Cache.size:
            thing, key = self._order.popitem(last=False)
            del self._things[key]
            self._note(thing)

    def _note(self, thing: Any) -> None:
        note = self._dropped()
        if note is not None:
            note(thing)

    def info(self) -> CacheInfo:
        """Return how full the cache is."""
        return CacheInfo(len(self._order), Cache.size)

    def __contains__(self, thing: Any) -> bool:
        return thing in self._order


_all: weakref.WeakSet[Cache] = weakref.WeakSet()


def set_cache_size(size: int) -> int:
    """Bound the number of compiled signatures that each compiled function keeps.

    Applies at once to every ``lm.jit`` function, and to the cache of the lazy tensors.

    Args:
        size: The bound, at least 1. The default is 128.

    Returns:
        The bound until now.

    Raises:
        ArgumentError: If ``size`` is no whole number from 1 on.

    Example:
        >>> import lazymods as lm
        >>> previous = lm.set_cache_size(16)
        >>> lm.set_cache_size(previous)
        16
    """
    if not isinstance(size, int) or size < 1:
        raise wrong_argument("lm.set_cache_size", size, "a cache keeps at least 1 signature", "lm.set_cache_size(64)")
    previous, Cache.size = Cache.size, size
    for cache in list(_all):
        cache.trim()
    return previous
