"""From host memory to the device, once: arrays that JAX can take over as they lie, the others by one copy.

What is filled in parts goes to a GPU while the rest is filled (:class:`Sender`).

On a CPU, JAX takes over memory that begins on a multiple of 64 bytes without copying it. What may be taken over is
memory that nobody else writes, such as a mapped file. Everything else (unaligned, strided, of another dtype, or
somebody's own array) is copied, in parallel, into new aligned memory.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from lazymods import _compat

ALIGNMENT = 64
_CHUNK = 4 << 20  # bytes that one thread copies at a time
_BATCH = 1 << 30  # bytes that go to a device other than a CPU at a time
_SMALL = 1 << 20  # bytes; arrays below that share their memory, and are sent together

Array = np.ndarray[Any, Any]


class Incoming(NamedTuple):
    """An array on its way to the device.

    Attributes:
        value: The values.
        dtype: The dtype that they get.
        sharding: Where they go; None: the default device, or the mesh that is set.
        owned: Whether JAX may take the memory over: nobody else writes it.
    """

    value: Array
    dtype: Any
    sharding: Any
    owned: bool


def transfer(incoming: Iterable[Incoming], advance: Callable[[int], None] | None = None) -> list[jax.Array]:
    """Put arrays on the device: in one batch if that is a CPU, which takes over what is in memory.

    Args:
        incoming: The arrays; to other devices a batch is asked for when the one before is there.
        advance: Called with the number of bytes, from several threads, whenever some have been copied.
    """
    device = default_device()
    if device.platform == "cpu":
        return _transferred(list(incoming), device, advance)
    out: list[jax.Array] = []
    for batch in _batches(incoming):
        out += jax.block_until_ready(_transferred(batch, device, advance))
    return out


def _batches(incoming: Iterable[Incoming]) -> Iterator[list[Incoming]]:
    """Cut what comes, so that little more than a batch is in host memory."""
    batch: list[Incoming] = []
    size = 0
    for item in incoming:
        batch.append(item)
        size += item.value.nbytes
        if size >= _BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _transferred(incoming: Sequence[Incoming], device: Any, advance: Callable[[int], None] | None) -> list[jax.Array]:
    ready = prepared(incoming, advance, on_cpu=device.platform == "cpu")
    spread = _over_the_mesh()
    explicit = {i: item.sharding or spread for i, item in enumerate(incoming) if item.sharding or spread}
    placed = dict(zip(explicit, jax.device_put([ready[i] for i in explicit], list(explicit.values())), strict=True))
    rest = iter(_compat.device_put([a for i, a in enumerate(ready) if i not in explicit], device))
    return [placed[i] if i in placed else next(rest) for i in range(len(ready))]


def prepared(
    incoming: Sequence[Incoming], advance: Callable[[int], None] | None = None, *, on_cpu: bool = True
) -> list[Array]:
    """Return arrays as they can be handed over: cast, and in memory that JAX may take over.

    Args:
        incoming: The arrays.
        advance: Called with the number of bytes, from several threads, whenever some have been copied.
        on_cpu: Whether they go to a CPU, which takes over aligned memory only.
    """
    ready: list[Array] = [item.value for item in incoming]
    copies = [i for i, item in enumerate(incoming) if not as_it_lies(item, on_cpu)]
    for i, array in zip(copies, _copied([incoming[i] for i in copies], advance), strict=True):
        ready[i] = array
    return ready


def _over_the_mesh() -> Any:
    """Return where JAX makes arrays while a mesh is set: on each of its devices. None: there is no mesh."""
    if jax.sharding.get_abstract_mesh().empty or _compat.current_trace() is not _compat.eval_trace():
        return None
    return jax.sharding.NamedSharding(jax.sharding.get_mesh(), jax.sharding.PartitionSpec())


def default_device() -> Any:
    """Return the device on which JAX makes arrays if none is named."""
    device: Any = jax.config.jax_default_device  # type: ignore[attr-defined]
    if isinstance(device, str):
        return jax.local_devices(backend=device)[0]
    return device or jax.local_devices()[0]


def as_it_lies(item: Incoming, on_cpu: bool = True) -> bool:
    """Whether JAX can take an array over without a copy."""
    value = item.value
    if not (item.owned and value.dtype == item.dtype and value.flags.c_contiguous):
        return False
    return not on_cpu or value.__array_interface__["data"][0] % ALIGNMENT == 0 or value.size == 0


# ---------------------------------------------------------------- copies


def _copied(items: Sequence[Incoming], advance: Callable[[int], None] | None) -> list[Array]:
    """Copy arrays into new memory, cast on the way."""
    targets = allocate([(item.value.shape, np.dtype(item.dtype)) for item in items])
    jobs = [(t, i.value) for t, i in zip(targets, items, strict=True) if t.size]

    def copy(pieces: Sequence[tuple[Array, Array]]) -> None:
        with np.errstate(all="ignore"):  # what overflows becomes inf, as in any cast
            for target, source in pieces:
                np.copyto(target, source, casting="unsafe")
                if advance is not None:
                    advance(target.nbytes)

    if sum(t.nbytes for t in targets) < 2 * _CHUNK:
        copy(jobs)
    else:
        from concurrent.futures import ThreadPoolExecutor  # takes longer to import than a small file to load

        pieces = [[piece] for target, source in jobs for piece in _pieces(target, source)]
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            list(pool.map(copy, pieces))
    return targets


def _pieces(target: Array, source: Array) -> list[tuple[Array, Array]]:
    """Cut an array along its first axis that is long enough, into parts of about a chunk: those lie together."""
    count = -(-target.nbytes // _CHUNK)
    if count == 1:
        return [(target, source)]
    longest = max(range(target.ndim), key=lambda i: target.shape[i])
    axis = next((i for i, length in enumerate(target.shape) if length >= count), longest)
    step = max(1, target.shape[axis] * _CHUNK // target.nbytes)
    cuts = [(slice(None),) * axis + (slice(a, a + step),) for a in range(0, target.shape[axis], step)]
    return [(target[cut], source[cut]) for cut in cuts]


def allocate(wanted: Sequence[tuple[tuple[int, ...], np.dtype[Any]]]) -> list[Array]:
    """Make new arrays that JAX can take over: one block of memory for all small ones, one for each of the others.

    Args:
        wanted: Shape and dtype of each.
    """
    sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in wanted]
    padded = [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]
    shared = _block(sum(p for p in padded if p < _SMALL))
    out, position = [], 0
    for (shape, dtype), size, room in zip(wanted, sizes, padded, strict=True):
        if room < _SMALL:
            block = shared[position : position + size]
            position += room
        else:
            block = _block(room)[:size]
        out.append(block.view(dtype).reshape(shape))
    return out


def empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Return a new array that JAX can take over without a copy."""
    return allocate([(shape, dtype)])[0]


def _block(size: int) -> Array:
    if size == 0:
        return np.zeros(0, np.uint8)
    # a private anonymous map is page-aligned, free of the huge pages that make a new numpy buffer slow at times, and
    # nothing of it exists before it is written
    flags = {"flags": mmap.MAP_PRIVATE} if hasattr(mmap, "MAP_PRIVATE") else {}
    return np.frombuffer(mmap.mmap(-1, size, **flags), np.uint8)


# ---------------------------------------------------------------- arrays that are filled one after the other


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
        if self._pool is not None and array.nbytes >= _SMALL:
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
