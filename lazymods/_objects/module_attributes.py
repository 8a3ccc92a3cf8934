"""Attributes of modules and classes that hold a copy while a trace runs, for the function that finds a model there."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

_SWAPPING = threading.RLock()  # of the thread in whose trace some hold copies
_SWAPPED: dict[tuple[int, str], tuple[int, Any, Any, int]] = {}  # that thread, what is held otherwise, how, how often
_SWAPPED_LOCK = threading.Lock()


def attribute(owner: Any, name: str, default: Any = None) -> Any:
    """Return what an attribute of a module or class holds, and not its copy in the trace of another thread."""
    with _SWAPPED_LOCK:
        thread, value, *_ = _SWAPPED.get((id(owner), name), (None, None))
        return getattr(owner, name, default) if thread in (None, threading.get_ident()) else value


def wait_for_attributes() -> None:
    """Wait until no attribute holds a copy; to be called with no lock held that a trace may want."""
    with _SWAPPING:
        pass


@contextlib.contextmanager
def swapped(swaps: list[tuple[Any, str, Any]]) -> Iterator[None]:
    """Let attributes hold copies. Where two threads do so at once, one fails, and all is as it was in the end."""
    if not swaps:
        yield
        return
    is_alone, before = _SWAPPING.acquire(blocking=False), []
    with _SWAPPED_LOCK:
        for owner, name, twin in swaps:
            held = vars(owner)[name]
            before.append((owner, name, held))
            new = (threading.get_ident(), getattr(owner, name), held, 0)
            thread, value, otherwise, count = _SWAPPED.get((id(owner), name), new)
            _SWAPPED[id(owner), name] = (thread, value, otherwise, count + 1)
            setattr(owner, name, staticmethod(twin) if isinstance(held, staticmethod) else twin)
    try:
        yield
    finally:
        with _SWAPPED_LOCK:
            for owner, name, held in reversed(before):
                thread, value, otherwise, count = _SWAPPED.pop((id(owner), name))
                setattr(owner, name, held if count > 1 else otherwise)
                if count > 1:
                    _SWAPPED[id(owner), name] = (thread, value, otherwise, count - 1)
        if is_alone:
            _SWAPPING.release()
