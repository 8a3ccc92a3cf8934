"""Counts and times of everything that was compiled, process-wide."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import Any


class Counts:
    """Numbers that only grow."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.hits = 0  # counted on the fast path, where a lock would be half the price
        self._numbers: dict[str, float] = {
            "traces": 0, "compiles": 0, "materializations": 0, "trace_time": 0.0, "compile_time": 0.0,
        }  # fmt: skip

    def add(self, **numbers: float) -> None:
        """Add to some of the numbers."""
        with self._lock:
            for name, number in numbers.items():
                self._numbers[name] += number

    def read(self) -> dict[str, float]:
        """Return all numbers."""
        with self._lock:
            return {**self._numbers, "cache_hits": self.hits}


COUNTS = Counts()


class Metrics(Mapping[str, float]):
    """What :func:`metrics` returns: the numbers at one time; prints as a table."""

    def __init__(self, numbers: dict[str, float]) -> None:
        self._numbers = numbers

    def __getitem__(self, name: str) -> float:
        return self._numbers[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._numbers)

    def __len__(self) -> int:
        return len(self._numbers)

    def __repr__(self) -> str:
        width = max(map(len, self._numbers))
        return "\n".join(f"{name:<{width}}  {_show(value)}" for name, value in self._numbers.items())


def _show(value: Any) -> str:
    return f"{value:.3f} s" if isinstance(value, float) else str(value)


def metrics() -> Metrics:
    """Return what ``lm.jit`` has done in this process so far.

    Returns:
        A mapping of numbers that never decrease: ``traces`` (runs of a Python body), ``compiles`` (new
        programs), ``cache_hits`` (calls that needed neither), ``materializations`` (layers and parameters that were
        initialized within a first call), ``trace_time`` and ``compile_time`` in seconds.

    Example:
        >>> import jax.numpy as jnp
        >>> import lazymods as lm
        >>> before = lm.metrics()
        >>> double = lm.jit(lambda x: x * 2)
        >>> print(double(jnp.ones(2)), double(jnp.ones(2)))
        [2. 2.] [2. 2.]
        >>> after = lm.metrics()
        >>> [after[k] - before[k] for k in ("traces", "compiles", "cache_hits")]
        [1, 1, 1]
    """
    return Metrics(COUNTS.read())
