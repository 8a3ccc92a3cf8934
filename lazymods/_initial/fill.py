"""Filling parameters: a plan says which kernels run for which of their blocks, into memory that JAX takes over."""

from __future__ import annotations

import collections
import itertools
import math
import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lazymods import _compat, _memory
from lazymods._initial import kernels, samplers
from lazymods._initial.kernels import BLOCK, FEW, MANY
from lazymods._initial.keys import Key, host_value
from lazymods._initial.program import Constant, Drawn, Run, Unit, cast, read
from lazymods._initial.stacking import Shape

_LARGE = 1 << 20  # bytes
_AHEAD = 3  # kernels that run while the results of the ones before are copied
_MOST = 1 << 32  # elements, whose index is one word

Array = np.ndarray[Any, Any]


class InitRequest(NamedTuple):
    """A parameter: ``init(key, shape, dtype).reshape(out_shape).astype(out_dtype)``, or full of one value.

    ``key`` is None if the host does not know it: then nothing can be drawn.
    """

    init: Callable[..., Any] | Constant
    key: Key | None
    shape: Shape
    dtype: Any
    out_shape: Shape
    out_dtype: Any


class _Block(NamedTuple):
    """Up to ``BLOCK`` elements of a request, from ``start``; ``scalars`` are those of the units after the first."""

    number: int
    key: Key
    start: int
    scalars: tuple[tuple[Any, ...], ...]
    flat: Array


class InitBatch:
    """How parameters will be computed.

    Args:
        requests: The parameters; None for each that only its own layer can make.
        calling: Whether initializers may be called that are not JAX's, to see what they do. What they did is then
            what :meth:`fill` does again, so each is called once.
    """

    def __init__(self, requests: Sequence[InitRequest | None], calling: bool = True) -> None:
        self.requests = requests
        self.made: dict[int, Drawn | Constant] = {}
        self.runs: dict[int, Run] = {}
        for i, request in enumerate(requests):
            how = None if request is None else _made(request, calling)
            if isinstance(how, Run):
                self.runs[i] = how
            elif how is not None:
                self.made[i] = how

    def kernels(self) -> tuple[Unit, ...]:
        """Return what has to be compiled to draw; a kernel serves every shape."""
        return tuple(dict.fromkeys(how.units[0] for how in self.made.values() if isinstance(how, Drawn)))

    def describe(self) -> list[str]:
        """Say of each parameter how it is made: from which kernel, full of which value, or by its initializer."""
        numbers = {unit: i for i, unit in enumerate(self.kernels(), 1)}
        out = []
        for i, request in enumerate(self.requests):
            how = self.made.get(i)
            if isinstance(how, Drawn):
                out.append(f"{_name(request)}, kernel {numbers[how.units[0]]}")
            else:
                out.append(_name(request) if how is None else f"{how.value}")
        return out

    def fill(self) -> list[jax.Array | None]:
        """Compute all in one go; None for each that is not known to come out as its initializer would give it."""
        out: list[jax.Array | None] = [None] * len(self.requests)
        for i, run in self.runs.items():
            out[i] = _do_again(self.requests[i], run)
        device = _device() if self.made else None
        if device is None:
            return out
        wanted = [self.requests[i] for i in self.made]
        kinds = [(r.out_shape, np.dtype(r.out_dtype)) for r in wanted if r is not None]
        buffers = dict(zip(self.made, _memory.allocate(kinds), strict=True))
        jobs = self._jobs(buffers)
        many = MANY[device.platform]
        large = {key for key, blocks in jobs.items() if len(blocks) > many // 8}
        together = tuple(dict.fromkeys(key[0][0] for key in jobs if key in large))
        with _compat.kept_when_compiled(), _Sender(device) as sender:
            sender.touch([buffers[i] for i, how in self.made.items() if isinstance(how, Drawn)])
            for (units, shared), blocks in jobs.items():
                rows, drawing = (many, together) if (units, shared) in large else (FEW, units[:1])
                for i in _run(units, shared, blocks, rows, drawing, sender.touched):
                    sender.send_ahead(i, buffers[i])
            for i, array in sender.send(buffers).items():
                out[i] = array
        return out

    def _jobs(self, buffers: Mapping[int, Array]) -> dict[tuple[tuple[Unit, ...], Any], list[_Block]]:
        """Write the constants; cut the rest into blocks, by program and by the scalars that all rows share."""
        jobs: dict[tuple[tuple[Unit, ...], Any], list[_Block]] = {}
        for i, how in self.made.items():
            key = getattr(self.requests[i], "key", None)
            if isinstance(how, Constant):
                buffers[i].fill(how.value)
            elif key is not None:
                jobs.setdefault((how.units, how.scalars[0]), []).extend(_blocks(i, key, how, buffers[i]))
        return jobs


def _name(request: InitRequest | None) -> str:
    """The name of an initializer; JAX's are functions in functions."""
    init: Any = None if request is None else getattr(request.init, "func", request.init)
    if _compat.is_jax_initializer(init):
        return init.__qualname__.partition(".<locals>")[0]
    return "" if init is None else getattr(init, "__name__", type(init).__name__)


def call_in_blocks(init: Callable[..., Any], key: Any, shape: Shape, dtype: Any) -> jax.Array | None:
    """Return ``init(key, shape, dtype)``; None if that is not known to come out the same in blocks."""
    data = host_value(key)
    if not isinstance(data, tuple) or jax.dtypes.canonicalize_dtype(dtype) != dtype:
        return None
    return InitBatch([InitRequest(init, data, shape, np.dtype(dtype), shape, np.dtype(dtype))]).fill()[0]


class _Sender:
    """Brings finished arrays to the device: the large ones to a GPU while others are drawn.

    Args:
        device: The device. To a CPU nothing is sent ahead: it takes the memory over as it lies.
    """

    def __init__(self, device: Any) -> None:
        self.device = device
        self._sent: dict[int, Any] = {}
        self._pool: Any = None
        self._touching: Any = None

    def __enter__(self) -> _Sender:
        if self.device.platform != "cpu":
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
            self._sent[number] = self._pool.submit(_compat.device_put, [array], self.device)

    def send(self, arrays: Mapping[int, Array]) -> dict[int, jax.Array]:
        """Send what was not sent yet, and return all."""
        rest = {i: array for i, array in arrays.items() if i not in self._sent}
        placed = dict(zip(rest, _compat.device_put(list(rest.values()), self.device), strict=True))
        return placed | {i: future.result()[0] for i, future in self._sent.items()}


def _touch(arrays: Sequence[Array]) -> None:
    for array in arrays:
        array.reshape(-1).view(np.uint8)[:: mmap.PAGESIZE] = 0


def _device() -> Any:
    """Where operations are executed at once, if bits are drawn there as is known here; else None."""
    config: Any = jax.config
    if (
        config.jax_disable_jit
        or config.jax_debug_nans
        or config.jax_debug_infs
        or not config.jax_threefry_partitionable
    ):
        return None
    device = _memory.default_device()
    return device if _compat.executing() and device.platform in MANY else None


def _made(request: InitRequest, calling: bool) -> Drawn | Constant | Run | None:
    init, size = request.init, math.prod(request.shape)
    if isinstance(init, Constant):
        made, run = init, None
    elif size >= _MOST or math.prod(request.out_shape) != size:
        return None
    elif _compat.is_jax_initializer(init) or (calling and request.key is not None):
        made, run = read(init, request.shape, request.dtype)
    else:
        return None
    if isinstance(made, Drawn) and (request.key is None or not samplers.are_known(made.units, request.shape)):
        made = None
    if made is not None and request.out_dtype != request.dtype:
        floats = all(jnp.issubdtype(d, jnp.floating) for d in (request.dtype, request.out_dtype))
        made = cast(made, request.out_dtype) if floats else None
    return made or (run if request.key is not None else None)


def _do_again(request: InitRequest | None, run: Run) -> Any:
    assert request is not None and request.key is not None
    key = jax.random.wrap_key_data(jnp.asarray(np.array(request.key, np.uint32)), impl="threefry2x32")
    value = run.on(key)
    if not isinstance(value, np.ndarray):
        value = jnp.asarray(value)
    if value.shape != request.out_shape:
        value = value.reshape(request.out_shape)
    if request.out_dtype == request.dtype != value.dtype:  # the initializer's own word
        return value
    is_weak = isinstance(value, jax.Array) and value.weak_type
    return value.astype(request.out_dtype) if value.dtype != request.out_dtype or is_weak else value


def _blocks(number: int, key: Key, how: Drawn, buffer: Array) -> Iterator[_Block]:
    flat = buffer.reshape(-1)
    for start in range(0, flat.size, BLOCK):
        yield _Block(number, key, start, how.scalars[1:], flat)


# ---------------------------------------------------------------- running


def _run(
    units: tuple[Unit, ...],
    shared: tuple[Any, ...],
    blocks: Sequence[_Block],
    rows: int,
    drawing: tuple[Unit, ...],
    before_writing: Callable[[], None],
) -> Iterator[int]:
    """Run a program for blocks of whatever tensors; copy results while the next ones are computed.

    Yields the number of every request whose last block was written.

    Args:
        units: The program.
        shared: The scalars of its first unit.
        blocks: The blocks.
        rows: The kernels' number of rows.
        drawing: The units that are compiled together with the first one, which is one of them.
        before_writing: Called before results are copied.
    """
    on_host = samplers.is_product(units[-1]) and all(
        samplers.never_tiny(units[:-1], shared, factor) for factor in {block.scalars[-1][0] for block in blocks}
    )
    draw = kernels.drawing(drawing, rows)
    unused = [tuple(dtype.type(0) for dtype in unit.dtypes) for unit in drawing]
    scalars = [s for unit, zeros in zip(drawing, unused, strict=True) for s in (shared if unit == units[0] else zeros)]
    index = np.int32(drawing.index(units[0]))
    rest = [kernels.following(unit, rows) for unit in (units[1:-1] if on_host else units[1:])]
    running: collections.deque[tuple[Any, Sequence[_Block]]] = collections.deque()
    for first in range(0, len(blocks), rows):
        group = blocks[first : first + rows]
        heads = np.zeros((3, rows, 1), np.uint32)
        heads[:, : len(group), 0] = np.array([(*b.key, b.start) for b in group], np.uint32).T
        values = draw(index, *heads, *scalars)
        for i, kernel in enumerate(rest):
            values = kernel(values, *_columns(group, i, rows))
        values.copy_to_host_async()
        running.append((values, group))
        if len(running) > _AHEAD:
            before_writing()
            yield from _copy(*running.popleft(), on_host)
    before_writing()
    while running:
        yield from _copy(*running.popleft(), on_host)


def _columns(group: Sequence[_Block], index: int, rows: int) -> list[Array]:
    """The scalars of a unit, a row for each block."""
    columns = []
    for i, example in enumerate(group[0].scalars[index]):
        column = np.zeros((rows, 1), example.dtype)
        column[: len(group), 0] = [block.scalars[index][i] for block in group]
        columns.append(column)
    return columns


def _copy(values: Any, group: Sequence[_Block], on_host: bool) -> Iterator[int]:
    """Write results where they belong, multiplied on the way if that is all that is left to do."""
    results = np.asarray(values).reshape(-1)
    row = 0
    for number, same in itertools.groupby(group, key=lambda block: block.number):
        run = list(same)
        target = run[0].flat[run[0].start : run[-1].start + BLOCK]
        part = results[row * BLOCK : row * BLOCK + target.size]
        if on_host:
            np.multiply(part, run[0].scalars[-1][0], out=target)
        else:
            target[...] = part
        row += len(run)
        if run[-1].start + BLOCK >= run[-1].flat.size:
            yield number
