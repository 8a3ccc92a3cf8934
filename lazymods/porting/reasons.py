"""Why a layer gives other numbers than its counterpart for the same input: its mode, parameters or settings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from lazymods import _graph
from lazymods._errors import LazyError
from lazymods._graph import dotted
from lazymods.porting.comparing import Kept, difference_of, kept_of_torch
from lazymods.porting.pairing import Pair
from lazymods.state.layouts.exporting import written
from lazymods.state.layouts.site import Refusal
from lazymods.state.layouts.table import rule_for, sites

_TORCH_EPSILONS = ("eps", "variance_epsilon")
_SAME_VALUES = 1e-6
_PAD_MODES = {"reflect": "reflect", "replicate": "edge", "circular": "wrap"}


class Reason(NamedTuple):
    """Why two differ, and what to write."""

    text: str
    write: str = ""


def of_layer(pair: Pair, shape: Sequence[int], torch: Any) -> Reason | None:
    """Say why a layer may differ whose input does not; None if no setting tells.

    Args:
        pair: The layer and its counterpart.
        shape: The shape of its input, or () if it is not known.
        torch: The torch module.
    """
    found = _of_mode(pair), _of_parameters(pair, torch), next(settings(pair, shape), None), _of_dtype(pair)
    return next((reason for reason in found if reason is not None), None)


def unexplained(pair: Pair) -> str:
    """Say all that is known of a layer that differs for none of the reasons above."""
    ours, theirs = type(pair.site.node).__name__, type(pair.module).__name__
    same = "its input and its parameters are PyTorch's"
    return f"{same}: {ours} computes something else than {theirs}, or has other options"


# ---------------------------------------------------------------- modes


def _of_mode(pair: Pair) -> Reason | None:
    return of_modes(pair.site.node, pair.module)


def of_modes(model: Any, torch_module: Any) -> Reason | None:
    """Say what is in training mode on one side only, or random."""
    ours = [dotted(path) or type(node).__name__ for path, node in _graph.nodes(model) if _drops(node)]
    theirs = [name or type(inner).__name__ for name, inner in torch_module.named_modules() if _torch_drops(inner)]
    if ours or theirs:
        where, line = (ours[0], "model.eval()") if ours else (f"PyTorch's {theirs[0]}", "torch_module.eval()")
        return Reason(f"{where} drops values at random, as in training", line)
    ours = [dotted(path) or type(node).__name__ for path, node in _graph.nodes(model) if _normalizes_batch(node)]
    theirs = [name or type(inner).__name__ for name, inner in torch_module.named_modules() if _torch_batch(inner)]
    if bool(ours) == bool(theirs):
        return None
    where, other = (ours[0], "PyTorch") if ours else (f"PyTorch's {theirs[0]}", "the model")
    line = "model.eval()" if ours else "torch_module.eval()"
    return Reason(f"{where} normalizes by the batch, as in training, {other} by the running statistics", line)


def _drops(node: Any) -> bool:
    rate = getattr(node, "rate", 0) if isinstance(node, nnx.Dropout) else getattr(node, "dropout_rate", 0)
    is_layer = isinstance(node, (nnx.Dropout, nnx.MultiHeadAttention))
    return is_layer and bool(rate) and not getattr(node, "deterministic", True)


def _torch_drops(inner: Any) -> bool:
    rate = getattr(inner, "p", 0) if "Dropout" in type(inner).__name__ else getattr(inner, "dropout", 0)
    return bool(inner.training) and isinstance(rate, float) and rate > 0


def _normalizes_batch(node: Any) -> bool:
    return isinstance(node, nnx.BatchNorm) and not node.use_running_average


def _torch_batch(inner: Any) -> bool:
    is_norm = "BatchNorm" in type(inner).__name__
    return is_norm and (bool(inner.training) or getattr(inner, "running_mean", 0) is None)


# ---------------------------------------------------------------- parameters


def _of_parameters(pair: Pair, torch: Any) -> Reason | None:
    """Compare the parameters as PyTorch lays them, where the layer's type is known; also those of modules inside."""
    node, theirs = pair.site.node, pair.module.state_dict()
    try:
        if any(path for path, inner in _graph.nodes(node) if isinstance(inner, nnx.Module)):
            entries = written(node, list(sites(node)), shapes={n: tuple(v.shape) for n, v in theirs.items()}).entries
        else:
            own, _ = rule_for(type(node)).write(pair.site)
            entries = {name.removeprefix(pair.site.prefix): value for name, value in own.items()}
    except (Refusal, LazyError):
        return None
    mine = {leaf: np.asarray(v) for leaf, v in entries.items() if leaf in theirs and leaf != "num_batches_tracked"}
    kept = {leaf: kept_of_torch(theirs[leaf], torch)[0] for leaf in mine}
    for leaf in [leaf for leaf in mine if leaf.startswith("bias_hh")]:
        both = leaf.replace("_hh", "_ih")
        if "GRU" not in type(pair.module).__name__ and both in mine:  # of one bias in Flax, PyTorch has the parts
            mine[both] = mine[both] + mine.pop(leaf)
            whole = kept[both].values + kept.pop(leaf).values
            kept[both] = Kept(whole, kept[both].shown, kept[both].precision)
    for leaf, value in mine.items():
        reason = _of_parameter(pair, leaf, value.astype(np.float64), kept[leaf])
        if reason is not None:
            return reason
    return None


def _of_parameter(pair: Pair, leaf: str, mine: Any, theirs: Kept) -> Reason | None:
    if type(pair.module).__name__ == "Conv1D" and leaf == "weight":  # transformers': it has no transpose
        mine = mine.T
    if mine.shape != theirs.values.shape and mine.size == theirs.values.size:
        return None  # a layout of a library's own
    if mine.shape != theirs.values.shape or _differ(mine, theirs.values, theirs.precision):
        return _other_parameter(pair, leaf, mine, theirs.values)
    return None


def _differ(a: Any, b: Any, precision: float) -> bool:
    difference, scale = difference_of(a, b)
    return difference > max(_SAME_VALUES, 2 * precision) * scale


def _other_parameter(pair: Pair, leaf: str, mine: Any, theirs: Any) -> Reason:
    line = 'lm.load(model, torch_module.state_dict(), layout="torch") with the weights that are compared'
    if mine.shape != theirs.shape:
        return Reason(f"its {leaf} has shape {mine.shape}, PyTorch's {theirs.shape}", line)
    if mine.ndim == 2 and mine.shape[0] == mine.shape[1] and not _differ(mine.T, theirs, 0):
        return Reason(
            f"its {leaf} is PyTorch's transposed", 'lm.load(model, path, layout="torch")  # which transposes kernels'
        )
    if mine.ndim >= 2 and not _differ(np.sort(mine, None), np.sort(theirs, None), 0):
        return Reason(f"its {leaf} has PyTorch's numbers in another order: a flatten, a flip, or heads or gates")
    difference, _ = difference_of(mine, theirs)
    return Reason(f"its {leaf} is not PyTorch's: they differ by {difference:.3g}", line)


def _of_dtype(pair: Pair) -> Reason | None:
    dtype = pair.site.get("dtype")
    if dtype is None or jax.numpy.dtype(dtype).itemsize >= 4:
        return None
    return Reason(f"it computes in {jax.numpy.dtype(dtype).name}", "dtype=jnp.float32")


# ---------------------------------------------------------------- settings


def settings(pair: Pair, shape: Sequence[int] = ()) -> Iterator[Reason]:
    """Yield the settings of a layer that are not its counterpart's.

    Args:
        pair: The layer and its counterpart.
        shape: The shape of its input, or () if it is not known.
    """
    node, module = pair.site.node, pair.module
    yield from _epsilon(pair)
    if isinstance(node, nnx.Conv) and hasattr(module, "stride"):
        yield from _convolution(node, module, shape)
    if isinstance(node, nnx.ConvTranspose) and hasattr(module, "output_padding"):
        yield from _transposed(node, module)
    for ours, theirs in (("num_groups", "num_groups"), ("num_heads", "num_heads"), ("feature_group_count", "groups")):
        a, b = pair.site.get(ours), getattr(module, theirs, None)
        if isinstance(a, int) and isinstance(b, int) and a != b:
            yield Reason(f"{ours}={a}, PyTorch has {theirs}={b}", f"{ours}={b}")


def _epsilon(pair: Pair) -> Iterator[Reason]:
    ours = pair.site.get("epsilon")
    found = {name: getattr(pair.module, name) for name in _TORCH_EPSILONS if hasattr(pair.module, name)}
    name = next((name for name, value in found.items() if value is None or isinstance(value, float)), None)
    theirs = None if name is None else getattr(pair.module, name)
    if theirs is None and name is not None:  # of nn.RMSNorm: the rounding of float32, in which norms compute
        theirs = float(np.finfo(np.float32).eps)
    if isinstance(ours, float) and theirs is not None and ours != theirs:
        yield Reason(f"epsilon={ours:g}, PyTorch has {name}={theirs:g}", f"epsilon={theirs:g}")


def _convolution(node: nnx.Conv, module: Any, shape: Sequence[int]) -> Iterator[Reason]:
    rank = len(node.kernel_size)
    strides, dilation = _each(node.strides, rank), _each(node.kernel_dilation, rank)
    theirs, apart = _each(module.stride, rank), _each(module.dilation, rank)
    if strides != theirs:
        yield Reason(f"strides={strides}, PyTorch has stride={theirs}", f"strides={theirs}")
    if dilation != apart:
        yield Reason(f"kernel_dilation={dilation}, PyTorch has dilation={apart}", f"kernel_dilation={apart}")
    given = _padding(node, strides, dilation, shape)
    if not shape and (given is None or not any(map(any, given))):  # the code before it may pad
        return
    mode = getattr(module, "padding_mode", "zeros")
    if mode != "zeros" and (mode, node.padding) != ("circular", "CIRCULAR"):
        line = f'jnp.pad(x, ..., mode="{_PAD_MODES[mode]}") before it, and padding="VALID"'
        yield Reason(f"padding={node.padding!r} pads by zeros, PyTorch has padding_mode={mode!r}", line)
        return
    wanted = _torch_padding(module, apart, rank)
    if given is not None and given != wanted:
        shown = f"padding={node.padding!r}" + (f" at strides {strides}" if max(strides) > 1 else "")
        yield Reason(f"{shown} pads {given}, PyTorch {wanted}", f"padding={wanted}")


def _transposed(node: nnx.ConvTranspose, module: Any) -> Iterator[Reason]:
    rank = len(module.kernel_size)
    parts = (module.kernel_size, module.dilation, module.padding, module.output_padding)
    reach = [(d * (k - 1) - p, out) for k, d, p, out in zip(*parts, strict=True)]
    wanted = tuple((left, left + out) for left, out in reach)
    strides, theirs = _each(node.strides, rank), _each(module.stride, rank)
    if strides != theirs:
        yield Reason(f"strides={strides}, PyTorch has stride={theirs}", f"strides={theirs}")
    given = _transposed_padding(node.padding, module, strides)
    if given is not None and given != wanted:
        text = f"padding={node.padding!r} pads {given}, PyTorch's padding={module.padding} of a transposed convolution"
        yield Reason(f"{text} {wanted}", f"padding={wanted}")


def _transposed_padding(padding: Any, module: Any, strides: Sequence[int]) -> tuple[tuple[int, int], ...] | None:
    """Return what a transposed convolution pads, as ``jax.lax.conv_transpose`` says; None if it is not by zeros."""
    if not isinstance(padding, str):
        return _pairs(padding, len(strides))
    if padding not in ("SAME", "VALID"):
        return None
    found = []
    for k, d, s in zip(module.kernel_size, module.dilation, strides, strict=True):
        reach = (k - 1) * d + 1
        total = reach + s - 2 + (max(reach - s, 0) if padding == "VALID" else 0)
        left = reach - 1 if padding == "VALID" else s - 1 if s > reach - 1 else -(-total // 2)
        found.append((left, total - left))
    return tuple(found)


def _pairs(padding: Any, rank: int) -> tuple[tuple[int, int], ...]:
    if isinstance(padding, int):
        return ((padding, padding),) * rank
    return tuple((p, p) if isinstance(p, int) else (int(p[0]), int(p[1])) for p in padding)


def _each(value: Any, rank: int) -> tuple[int, ...]:
    return (int(value or 1),) * rank if value is None or isinstance(value, int) else tuple(map(int, value))


def _padding(
    node: nnx.Conv, strides: Sequence[int], dilation: Sequence[int], shape: Sequence[int]
) -> tuple[tuple[int, int], ...] | None:
    """Return what a convolution pads; None if that depends on a size that is not known, or is no padding by zeros."""
    padding, rank = node.padding, len(node.kernel_size)
    if not isinstance(padding, str):
        return _pairs(padding, rank)
    spatial = tuple(shape[-rank - 1 : -1])
    if padding not in ("SAME", "VALID", "SAME_LOWER") or len(spatial) != rank:
        return None
    reach = [(k - 1) * d + 1 for k, d in zip(node.kernel_size, dilation, strict=True)]
    return tuple((int(a), int(b)) for a, b in jax.lax.padtype_to_pads(spatial, reach, strides, padding))


def _torch_padding(module: Any, dilation: Sequence[int], rank: int) -> tuple[tuple[int, int], ...]:
    if module.padding == "valid":
        return ((0, 0),) * rank
    if module.padding == "same":
        totals = [d * (k - 1) for d, k in zip(dilation, module.kernel_size, strict=True)]
        return tuple((total // 2, total - total // 2) for total in totals)
    return tuple((p, p) for p in ((module.padding,) * rank if isinstance(module.padding, int) else module.padding))
