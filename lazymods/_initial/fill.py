"""Filling parameters: a plan says which kernels run for which of their blocks, into memory that JAX takes over.

On a mesh each part that a device of this process holds is drawn alone: none is ever whole anywhere.
"""

from __future__ import annotations

import collections
import functools
import itertools
import math
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lazymods import _compat, _memory
from lazymods._initial import kernels, shards
from lazymods._initial.kernels import BLOCK, FEW, MANY
from lazymods._initial.keys import Key, host_value
from lazymods._initial.program import Constant, Drawn, Run, Unit, cast, read
from lazymods._initial.shards import Part
from lazymods._initial.stacking import Shape

_AHEAD = 3  # kernels that run while the results of the ones before are copied
_MOST = 1 << 32  # elements, whose index is one word
_NO_SKIP = shards.Skip(BLOCK, 0)

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
    """Up to ``BLOCK`` elements of a part, from ``first``; ``scalars`` are those of the units after the first."""

    number: int
    part: Part
    key: Key
    first: int
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
        self._unknown = {i for i, r in enumerate(requests) if not calling and r is not None and _must_be_called(r)}
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
            how, name = self.made.get(i), name_of_initializer(None if request is None else request.init)
            if isinstance(how, Drawn):
                out.append(f"{name}, kernel {numbers[how.units[0]]}")
            else:
                out.append(name if how is None else name_of_constant(how.value))
        return out

    def made_whole(self) -> list[bool]:
        """Say of each parameter whether it is known that it must be made whole, before devices get their parts."""
        return [i not in self.made and i not in self._unknown for i in range(len(self.requests))]

    def fill(self, shardings: Sequence[Any] = ()) -> list[jax.Array | None]:
        """Compute all in one go; None for each that is not known to come out as its initializer would give it.

        Args:
            shardings: Where each goes, None for the default device. Left out: all go there.
        """
        places = list(shardings) or [None] * len(self.requests)
        out: list[jax.Array | None] = [None] * len(self.requests)
        spread = {i: places[i] for i, run in self.runs.items() if _may_be_spread(run, places[i])}
        for i, value in self._spread(spread).items():
            out[i] = value
        for i in [i for i in self.runs if i not in spread]:
            value = _do_again(self.requests[i], self.runs[i])
            out[i] = value if places[i] is None else shards.put(value, places[i])
        device = _device() if self.made else None
        if device is None:
            return out
        wanted = {i: r for i in self.made if (r := self.requests[i]) is not None}
        parts = [p for i, r in wanted.items() for p in shards.parts_of(i, r.out_shape, places[i], device)]
        buffers = _memory.allocate([(p.shape, np.dtype(wanted[p.request].out_dtype)) for p in parts])
        jobs = self._jobs(parts, buffers)
        many = MANY[device.platform]
        large = {key for key, blocks in jobs.items() if len(blocks) > many // 8}
        together = tuple(dict.fromkeys(key[0][0] for key in jobs if key in large))
        skips = max((len(part.skips) for part in parts), default=0)
        with _compat.kept_when_compiled(), _memory.Sender([part.devices for part in parts]) as sender:
            sender.touch([b for p, b in zip(parts, buffers, strict=True) if isinstance(self.made[p.request], Drawn)])
            for (units, shared), blocks in jobs.items():
                rows, drawing = (many, together) if (units, shared) in large else (FEW, units[:1])
                for number in _run(units, shared, blocks, rows, drawing, skips, sender.touched):
                    sender.send_ahead(number, buffers[number])
            arrays = sender.send(buffers)
        pieces: dict[int, list[jax.Array]] = {}
        for part, copies in zip(parts, arrays, strict=True):
            pieces.setdefault(part.request, []).extend(copies)
        for i, request in wanted.items():
            if places[i] is None:
                [out[i]] = pieces[i]
            else:
                out[i] = shards.assembled(request.out_shape, request.out_dtype, places[i], pieces.get(i, []))
        return out

    def _spread(self, places: Mapping[int, Any]) -> dict[int, jax.Array]:
        """Do what initializers did under one jit, whose results are made where they go."""

        def make(keys: dict[int, Array]) -> dict[int, Any]:
            return {i: _do_again(self.requests[i], self.runs[i], key) for i, key in keys.items()}

        requests = {i: r for i in places if (r := self.requests[i]) is not None}
        keys = {i: np.array(r.key, np.uint32) for i, r in requests.items()}
        return jax.jit(make, out_shardings=dict(places))(keys) if keys else {}

    def _jobs(
        self, parts: Sequence[Part], buffers: Sequence[Array]
    ) -> dict[tuple[tuple[Unit, ...], Any], list[_Block]]:
        """Write the constants; cut the rest into blocks, by program and by the scalars that all rows share."""
        jobs: dict[tuple[tuple[Unit, ...], Any], list[_Block]] = {}
        for number, (part, buffer) in enumerate(zip(parts, buffers, strict=True)):
            how, key = self.made[part.request], getattr(self.requests[part.request], "key", None)
            if isinstance(how, Constant):
                buffer.fill(how.value)
            elif key is not None:
                flat, scalars = buffer.reshape(-1), how.scalars[1:]
                blocks = [_Block(number, part, key, first, scalars, flat) for first in range(0, flat.size, BLOCK)]
                jobs.setdefault((how.units, how.scalars[0]), []).extend(blocks)
        return jobs


def call_in_blocks(
    init: Callable[..., Any], key: Any, shape: Shape, dtype: Any, sharding: Any = None
) -> jax.Array | None:
    """Return ``init(key, shape, dtype)``; None if that is not known to come out the same in blocks."""
    data = host_value(key, sharding is not None)
    if not isinstance(data, tuple) or jax.dtypes.canonicalize_dtype(dtype) != dtype:
        return None
    request = InitRequest(init, data, shape, np.dtype(dtype), shape, np.dtype(dtype))
    return InitBatch([request]).fill([sharding])[0]


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


def _must_be_called(request: InitRequest) -> bool:
    """Whether what an initializer does is known only when it has been called."""
    init = request.init
    return request.key is not None and not isinstance(init, Constant) and not _compat.is_jax_initializer(init)


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
    if isinstance(made, Drawn) and (request.key is None or not kernels.are_known(made.units, request.shape)):
        made = None
    if made is not None and request.out_dtype != request.dtype:
        floats = all(jnp.issubdtype(d, jnp.floating) for d in (request.dtype, request.out_dtype))
        made = cast(made, request.out_dtype) if floats else None
    return made or (run if request.key is not None else None)


def _may_be_spread(run: Run, place: Any) -> bool:
    """Whether XLA may split what an initializer does over a mesh: not on a CPU, where that would change its bits."""
    of_jax = not isinstance(run.out, np.ndarray)
    return place is not None and of_jax and place.mesh.devices.flat[0].platform != "cpu"


def _do_again(request: InitRequest | None, run: Run, data: Any = None) -> Any:
    assert request is not None and request.key is not None
    data = np.array(request.key, np.uint32) if data is None else data
    value = run.on(jax.random.wrap_key_data(jnp.asarray(data), impl="threefry2x32"))
    if not isinstance(value, np.ndarray):
        value = jnp.asarray(value)
    if value.shape != request.out_shape:
        value = value.reshape(request.out_shape)
    if request.out_dtype == request.dtype != value.dtype:  # the initializer's own word
        return value
    is_weak = isinstance(value, jax.Array) and value.weak_type
    return value.astype(request.out_dtype) if value.dtype != request.out_dtype or is_weak else value


# ---------------------------------------------------------------- running


def _run(
    units: tuple[Unit, ...],
    shared: tuple[Any, ...],
    blocks: Sequence[_Block],
    rows: int,
    drawing: tuple[Unit, ...],
    skips: int,
    before_writing: Callable[[], None],
) -> Iterator[int]:
    """Run a program for blocks of whatever tensors; copy results while the next ones are computed.

    Yields the number of every part whose last block was written.

    Args:
        units: The program.
        shared: The scalars of its first unit.
        blocks: The blocks.
        rows: The kernels' number of rows.
        drawing: The units that are compiled together with the first one, which is one of them.
        skips: How many kinds of skips any of the parts has.
        before_writing: Called before results are copied.
    """
    on_host = kernels.is_product(units[-1]) and all(
        kernels.never_tiny(units[:-1], shared, factor) for factor in {block.scalars[-1][0] for block in blocks}
    )
    draw = kernels.drawing(drawing, rows, skips)
    unused = [tuple(dtype.type(0) for dtype in unit.dtypes) for unit in drawing]
    scalars = [s for unit, zeros in zip(drawing, unused, strict=True) for s in (shared if unit == units[0] else zeros)]
    index = np.int32(drawing.index(units[0]))
    rest = [kernels.following(unit, rows) for unit in (units[1:-1] if on_host else units[1:])]
    running: collections.deque[tuple[Any, Sequence[_Block]]] = collections.deque()
    for first in range(0, len(blocks), rows):
        group = blocks[first : first + rows]
        values = draw(index, *_heads(group, rows, skips), *scalars)
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


def _heads(group: Sequence[_Block], rows: int, skips: int) -> list[Array]:
    """The keys, the first elements and, if there are skips, those of each row, as the kernels take them."""
    count = len(group)
    first = np.array([block.first for block in group])
    start = first + np.array([block.part.start for block in group])
    left_out = np.ones((skips, 3, rows, 1), np.uint32)
    for kind in range(skips):
        of_rows = [b.part.skips[kind] if kind < len(b.part.skips) else _NO_SKIP for b in group]
        period, width = np.array(of_rows).T
        times, since = np.divmod(first, period)
        start += times * width
        left_out[kind, :, :count, 0] = np.minimum(period - since, BLOCK), np.minimum(period, BLOCK), width
    heads = np.zeros((3, rows, 1), np.uint32)
    heads[:2, :count, 0] = np.array([block.key for block in group], np.uint32).T
    heads[2, :count, 0] = start
    return [*heads, left_out] if skips else list(heads)


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
        target = run[0].flat[run[0].first : run[-1].first + BLOCK]
        part = results[row * BLOCK : row * BLOCK + target.size]
        if on_host:
            np.multiply(part, run[0].scalars[-1][0], out=target)
        else:
            target[...] = part
        row += len(run)
        if run[-1].first + BLOCK >= run[-1].flat.size:
            yield number


# ---------------------------------------------------------------- what reports call an initializer

_SCALING = {  # what jax.nn.initializers call variance_scaling of these arguments
    (1.0, "fan_in", "truncated_normal"): "lecun_normal",
    (1.0, "fan_in", "uniform"): "lecun_uniform",
    (2.0, "fan_in", "truncated_normal"): "he_normal",
    (2.0, "fan_in", "uniform"): "he_uniform",
    (1.0, "fan_avg", "truncated_normal"): "glorot_normal",
    (1.0, "fan_avg", "uniform"): "glorot_uniform",
}


def name_of_constant(value: Any) -> str:
    """Name a value that all elements have: ``zeros``, ``ones``, ``all 0.5``."""
    number = np.asarray(value)
    if number.dtype.kind in "biufc" and number.size == 1:
        known = {0: "zeros", 1: "ones"}.get(number.item())
        return known or f"all {number.item():g}" if number.dtype.kind in "iuf" else known or f"all {number.item()}"
    return f"all {value}"


def name_of_initializer(init: Any) -> str:
    """Name an initializer: ``lecun_normal``, ``normal(stddev=0.02)``, or the name of a user's function; '' for None."""
    if init is None:
        return ""
    function: Any = init.func if isinstance(init, functools.partial) else init
    if not _compat.is_jax_initializer(function):
        return getattr(function, "__name__", type(function).__name__)
    name = function.__qualname__.partition(".<locals>")[0]
    given = _closed_over(function)
    scaling = given.get("scale"), given.get("mode"), given.get("distribution")
    if name == "variance_scaling" and scaling in _SCALING:
        return _SCALING[scaling]  # type: ignore[index]
    plain = [f"{key}={value:g}" for key, value in given.items() if type(value) in (int, float) and "axis" not in key]
    return f"{name}({', '.join(plain)})" if plain else name


def _closed_over(function: Any) -> dict[str, Any]:
    """Return the plain values that a function closes over, by name."""
    if not isinstance(function, types.FunctionType):
        return {}
    names, cells = function.__code__.co_freevars, function.__closure__ or ()
    found = ((name, cell.cell_contents) for name, cell in zip(names, cells, strict=True))
    return {name: value for name, value in found if type(value) in (int, float, str)}
