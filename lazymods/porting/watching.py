"""Running a model and a PyTorch module on the same inputs, and keeping what their modules take and return.

Both are left as they were: statistics, caches and random states too. Modes are not switched.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lazymods._model.hooks import register_forward_hook, register_forward_pre_hook
from lazymods._snapshot import Snapshot
from lazymods.porting.comparing import Kept, channel_axis, kept_of_jax, kept_of_torch, may_move_axes

MODULE = "torch"  # PyTorch is never imported: who has one of its modules has imported it


@dataclasses.dataclass
class Call:
    """One call of a module.

    Attributes:
        inputs: The arrays that it took.
        outputs: The arrays that it returned; empty if it raised.
        order: The how-manieth call of all it was, by their ends.
    """

    inputs: list[Kept]
    outputs: list[Kept] = dataclasses.field(default_factory=list)
    order: int = -1


@dataclasses.dataclass
class Run:
    """One run of either side.

    Attributes:
        calls: By the id of a module, its calls.
        inputs: The arrays of the whole model's inputs.
        outputs: Those of its outputs.
        channels: Of PyTorch, the axis of the channels, if a layer that has them first took an input as it is.
        moves_from: Of PyTorch, how many calls had ended when a layer was called that may have its channels or the time
            before other axes; None if there was none.
        hidden: Of the model, the ids of modules that were called inside a transform, where there are no values.
    """

    calls: dict[int, list[Call]] = dataclasses.field(default_factory=dict)
    inputs: list[Kept] = dataclasses.field(default_factory=list)
    outputs: list[Kept] = dataclasses.field(default_factory=list)
    channels: int | None = None
    moves_from: int | None = None
    hidden: set[int] = dataclasses.field(default_factory=set)
    ended: int = 0

    def end(self, call: Call, outputs: list[Kept]) -> None:
        """Note what a call returned."""
        call.outputs, call.order, self.ended = outputs, self.ended, self.ended + 1


def arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return positional and keyword arguments: of a mapping the latter, of a tuple or list the former."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs), {}) if isinstance(inputs, (tuple, list)) else ((inputs,), {})


def changed(value: Any, change: Callable[[Any], Any]) -> Any:
    """Change the arrays of either framework in arguments."""
    if isinstance(value, Mapping):
        return {key: changed(part, change) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        parts = [changed(part, change) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return change(value)


def is_array(value: Any) -> bool:
    """Whether a value is an array of numpy, JAX or PyTorch."""
    return isinstance(value, (np.ndarray, np.generic, jax.Array, sys.modules[MODULE].Tensor))


def with_channels_last(inputs: Any, axis: int) -> Any:
    """Move the channels of all maps to the end: of arrays of floats with three axes or more."""
    return changed(inputs, lambda x: np.moveaxis(as_numpy(x), axis, -1) if is_map(x) else x)


def with_channels_first(inputs: Any) -> Any:
    """Move the last axis of all maps behind the batch."""
    return changed(inputs, lambda x: np.moveaxis(as_numpy(x), -1, 1) if is_map(x) else x)


def is_map(value: Any) -> bool:
    """Whether a value may be an image, a signal or the like."""
    if not is_array(value) or len(value.shape) < 3:
        return False
    return jnp.issubdtype(as_numpy(value).dtype, jnp.floating)


def as_numpy(value: Any) -> Any:
    """Return an array of either framework as one of numpy, with ml_dtypes' bfloat16."""
    torch = sys.modules[MODULE]
    if not isinstance(value, torch.Tensor):
        return np.asarray(value)
    value = value.detach().cpu()
    return value.float().numpy().astype(jnp.bfloat16) if value.dtype == torch.bfloat16 else value.numpy()


# ---------------------------------------------------------------- PyTorch


def run_torch(module: Any, watched: Sequence[Any], inputs: Any) -> Run:
    """Run a PyTorch module, without gradients, and keep what some of its modules take and return."""
    torch, run = sys.modules[MODULE], Run()
    first = next((t for t in (*module.parameters(), *module.buffers()) if t.is_floating_point()), torch.zeros(()))
    args, kwargs = arguments(changed(inputs, lambda x: _tensor(x, first)))
    given = {id(x) for x in _leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
    run.inputs = kept_of_torch((args, kwargs), torch)
    waiting: dict[int, list[Call]] = {}

    def before(inner: Any, args: Any, kwargs: Any) -> None:
        tensor = next((x for x in args if id(x) in given), None)
        axis = None if tensor is None else channel_axis(type(inner).__name__, tensor.ndim)
        if axis is not None and run.channels is None:
            run.channels = axis
        rank = max((x.ndim for x in _leaves((args, kwargs)) if isinstance(x, torch.Tensor)), default=0)
        if run.moves_from is None and may_move_axes(inner, rank):
            run.moves_from = run.ended
        if id(inner) in keys:
            call = Call(kept_of_torch((args, kwargs), torch))
            run.calls.setdefault(id(inner), []).append(call)
            waiting.setdefault(id(inner), []).append(call)

    def after(inner: Any, args: Any, kwargs: Any, output: Any) -> None:
        run.end(waiting[id(inner)].pop(), kept_of_torch(output, torch))

    keys = {id(inner) for inner in watched}
    handles = [inner.register_forward_pre_hook(before, with_kwargs=True) for inner in module.modules()]
    handles += [inner.register_forward_hook(after, with_kwargs=True) for inner in {id(w): w for w in watched}.values()]
    try:
        with _torch_unchanged(module, torch), torch.no_grad():
            run.outputs = kept_of_torch(module(*args, **kwargs), torch)
    finally:
        for handle in handles:
            handle.remove()
    return run


@contextlib.contextmanager
def _torch_unchanged(module: Any, torch: Any) -> Iterator[None]:
    """Put back what a call changes in training mode."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    with torch.random.fork_rng():
        try:
            yield
        finally:
            for buffer, value in buffers:
                with torch.no_grad():
                    buffer.copy_(value)


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for part in value:
            yield from _leaves(part)
    else:
        yield value


def _tensor(value: Any, like: Any) -> Any:
    """Return an array as a tensor on the device of another, and of its dtype if both are floating."""
    torch = sys.modules[MODULE]
    if not is_array(value):
        return value
    if not isinstance(value, torch.Tensor):
        array = np.asarray(value)
        is_float = jnp.issubdtype(array.dtype, jnp.floating)
        wide = array.astype(np.float64) if is_float and array.dtype.itemsize < 4 else array
        wide = wide.astype(np.int64) if jnp.issubdtype(array.dtype, jnp.integer) else wide
        value = torch.tensor(wide)
    return value.to(like.device, like.dtype if value.is_floating_point() else None)


# ---------------------------------------------------------------- the model


def run_model(model: Any, watched: Sequence[Any], inputs: Any) -> Run:
    """Run a model and keep what some of its modules take and return."""
    run = Run()
    args, kwargs = arguments(changed(inputs, lambda x: jnp.asarray(as_numpy(x)) if is_array(x) else x))
    run.inputs = kept_of_jax((args, kwargs)) or []
    waiting: dict[int, list[Call | None]] = {}

    def before(inner: Any, args: Any, kwargs: Any) -> None:
        kept = kept_of_jax((args, kwargs))
        call = None if kept is None else Call(kept)
        if call is not None:
            run.calls.setdefault(id(inner), []).append(call)
        waiting.setdefault(id(inner), []).append(call)

    def after(inner: Any, args: Any, kwargs: Any, output: Any) -> None:
        call, kept = waiting[id(inner)].pop(), kept_of_jax(output)
        if call is None or kept is None:
            run.hidden.add(id(inner))
        else:
            run.end(call, kept)

    snapshot = Snapshot(model)
    handles = [register_forward_pre_hook(inner, before, with_kwargs=True) for inner in watched]
    handles += [register_forward_hook(inner, after, with_kwargs=True) for inner in watched]
    try:
        with jax.default_matmul_precision("highest"):
            run.outputs = kept_of_jax(model(*args, **kwargs)) or []
    finally:
        for handle in handles:
            handle.remove()
        snapshot.restore()
    for inner in run.hidden:
        run.calls.pop(inner, None)
    return run
