"""From host memory to the devices that hold the parts of values, the large ones to GPUs while others are drawn."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from lazymods import _compat

_LARGE = 1 << 20  # bytes

Array = np.ndarray[Any, Any]


class Sender:
    """Brings finished arrays to their devices.

    Args:
        devices: Those of each array. To CPUs nothing is sent ahead: they take the memory over as it lies.
    """

    def __init__(self, devices: Sequence[tuple[Any, ...]]) -> None:
        self._devices = devices
        self._sent: dict[int, Any] = {}
        self._pool: Any = None
        self._touching: Any = None

    def __enter__(self) -> Sender:
        if any(device.platform != "cpu" for devices in self._devices for device in devices):
            from concurrent.futures import ThreadPoolExecutor  # takes longer to import than a small model to fill

            self._pool = ThreadPoolExecutor(1)
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown()

    def touch(self, arrays: Sequence[Array]) -> None:
        """Begin to have the memory of new arrays made, while the kernels are compiled; to a CPU, only what is used."""
        if self._pool is not None:
            self._touching = self._pool.submit(_touch, arrays)

    def touched(self) -> None:
        """Wait until what :meth:`touch` began is done: only then may the arrays be written."""
        if self._touching is not None:
            self._touching.result()
            self._touching = None

    def send_ahead(self, number: int, array: Array) -> None:
        """Begin to send an array, if that is worth a thread's while."""
        if self._pool is not None and array.nbytes >= _LARGE:
            self._sent[number] = self._pool.submit(_send, array, self._devices[number])

    def send(self, arrays: Sequence[Array]) -> list[list[jax.Array]]:
        """Send what was not sent yet; return all, on each of their devices.

        CPUs that hold the same share its memory: what JAX took over it never writes, also if it is donated.
        """
        out: list[list[jax.Array]] = [[] for _ in arrays]
        waiting: dict[Any, list[tuple[int, Array]]] = {}
        for number, array in enumerate(arrays):
            for device in self._devices[number] if number not in self._sent else ():
                waiting.setdefault(device, []).append((number, array))
        for device, items in waiting.items():
            sent = _compat.device_put([array for _, array in items], device)
            for (number, _), array in zip(items, sent, strict=True):
                out[number].append(array)
        for number, future in self._sent.items():
            out[number] = future.result()
        return out


def _send(array: Array, devices: Sequence[Any]) -> list[jax.Array]:
    return [_compat.device_put([array], device)[0] for device in devices]


def _touch(arrays: Sequence[Array]) -> None:
    for array in arrays:
        array.reshape(-1).view(np.uint8)[:: mmap.PAGESIZE] = 0
