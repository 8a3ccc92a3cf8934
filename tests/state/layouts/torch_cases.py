"""One table: PyTorch modules, and the Flax ones, lazy and explicit, that compute the same."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import lazymods as lm


class Case(NamedTuple):
    """A PyTorch module and its twins.

    ``kind`` says how both are called: ``plain`` (features last), ``channels`` (PyTorch's channels are axis 1),
    ``ids``, ``attention`` (queries, and keys and values of another width if ``more``), ``sequence`` (the outputs of a
    recurrent layer), ``lstm cell`` or ``cell``.
    """

    name: str
    torch: Callable[[Any], Any]  # of torch.nn
    lazy: Callable[[nnx.Rngs], nnx.Module]
    explicit: Callable[[nnx.Rngs], nnx.Module]
    shape: tuple[int, ...]
    kind: str = "plain"
    more: tuple[int, ...] = ()


def _conv(name: str, rank: int, n_in: int, out: int, shape: tuple[int, ...], **options: Any) -> Case:
    def torch(nn: Any) -> Any:
        return getattr(nn, f"Conv{rank}d")(n_in, out, options["k"], stride=options.get("s", 1),
                                           padding=options.get("p", 0), dilation=options.get("d", 1),
                                           groups=options.get("g", 1), bias=options.get("bias", True))  # fmt: skip

    pad = np.broadcast_to(options.get("p", 0), rank)
    flax = {
        "strides": options.get("s", 1),
        "padding": [(int(p), int(p)) for p in pad],
        "kernel_dilation": options.get("d", 1),
        "feature_group_count": options.get("g", 1),
        "use_bias": options.get("bias", True),
    }
    return Case(
        name,
        torch,
        lambda r: lm.LazyConv(out, options["k"], **flax, rngs=r),
        lambda r: nnx.Conv(n_in, out, options["k"], **flax, rngs=r),
        shape,
        "channels",
    )


def _transposed(name: str, rank: int, n_in: int, out: int, shape: tuple[int, ...], **options: Any) -> Case:
    k, s, d, p, o = (tuple(np.broadcast_to(options.get(n, v), rank).tolist()) for n, v in
                     (("k", 1), ("s", 1), ("d", 1), ("p", 0), ("o", 0)))  # fmt: skip
    bias = options.get("bias", True)

    def torch(nn: Any) -> Any:
        return getattr(nn, f"ConvTranspose{rank}d")(n_in, out, k, s, p, o, dilation=d, bias=bias)

    padding = [(d[i] * (k[i] - 1) - p[i], d[i] * (k[i] - 1) - p[i] + o[i]) for i in range(rank)]
    flax = {
        "strides": s,
        "padding": padding,
        "kernel_dilation": d,
        "use_bias": bias,
        "transpose_kernel": options.get("t", False),
    }
    return Case(
        name,
        torch,
        lambda r: lm.LazyConvTranspose(out, k, **flax, rngs=r),
        lambda r: nnx.ConvTranspose(n_in, out, k, **flax, rngs=r),
        shape,
        "channels",
    )


def _norm(name: str, torch: Callable[[Any], Any], lazy: Any, explicit: Any, n: int, shape: tuple[int, ...],
          kind: str = "plain", **options: Any) -> Case:  # fmt: skip
    return Case(name, torch, lambda r: lazy(**options, rngs=r), lambda r: explicit(n, **options, rngs=r), shape, kind)


_EVAL: dict[str, Any] = {"use_running_average": True, "epsilon": 1e-5, "momentum": 0.9}
_EXACT: dict[str, Any] = {"epsilon": 1e-5, "use_fast_variance": False}
_BARE: dict[str, Any] = {"use_bias": False, "use_scale": False}

FEED_FORWARD = [
    Case("linear", lambda nn: nn.Linear(3, 5), lambda r: lm.LazyLinear(5, rngs=r),
         lambda r: nnx.Linear(3, 5, rngs=r), (2, 3)),
    Case("linear square", lambda nn: nn.Linear(4, 4), lambda r: lm.LazyLinear(4, rngs=r),
         lambda r: nnx.Linear(4, 4, rngs=r), (2, 3, 4)),
    Case("linear no bias", lambda nn: nn.Linear(4, 4, bias=False), lambda r: lm.LazyLinear(4, use_bias=False, rngs=r),
         lambda r: nnx.Linear(4, 4, use_bias=False, rngs=r), (2, 4)),
    Case("linear general", lambda nn: nn.Linear(4, 6), lambda r: lm.LazyLinearGeneral((2, 3), rngs=r),
         lambda r: nnx.LinearGeneral(4, (2, 3), rngs=r), (2, 4)),
    _conv("conv1d square", 1, 3, 3, (2, 3, 7), k=(3,)),
    _conv("conv1d groups", 1, 4, 6, (2, 4, 9), k=(3,), g=2, d=2, p=1, s=2),
    _conv("conv2d square", 2, 3, 3, (2, 3, 6, 5), k=(3, 3), p=1),
    _conv("conv2d mixed", 2, 4, 6, (2, 4, 7, 6), k=(3, 2), g=2, d=(1, 2), s=(2, 1), bias=False),
    _conv("conv2d depthwise", 2, 4, 8, (2, 4, 5, 5), k=(3, 3), g=4),
    _conv("conv3d square", 3, 2, 2, (1, 2, 4, 3, 4), k=(2, 2, 2)),
    _conv("conv3d groups", 3, 2, 4, (1, 2, 3, 5, 4), k=(1, 2, 3), g=2, p=(0, 1, 1)),
    _transposed("transposed1d square", 1, 3, 3, (2, 3, 6), k=3, s=2, p=1),
    _transposed("transposed1d kernel transposed", 1, 3, 3, (2, 3, 6), k=3, s=2, t=True),
    _transposed("transposed2d square", 2, 3, 3, (2, 3, 4, 5), k=3, s=2, p=1, o=1),
    _transposed("transposed2d mixed", 2, 4, 2, (1, 4, 3, 5), k=(4, 3), s=(4, 1), p=(0, 1), d=(1, 2), bias=False),
    _transposed("transposed2d kernel transposed", 2, 3, 3, (2, 3, 4, 5), k=3, s=2, p=1, o=1, t=True),
    _transposed("transposed3d square", 3, 2, 2, (1, 2, 3, 2, 3), k=2, s=2),
    _norm("batch norm", lambda nn: nn.BatchNorm1d(4), lm.LazyBatchNorm, nnx.BatchNorm, 4, (5, 4), **_EVAL),
    _norm("batch norm 2d", lambda nn: nn.BatchNorm2d(3), lm.LazyBatchNorm2d, nnx.BatchNorm, 3, (2, 3, 4, 5),
          "channels", **_EVAL),
    _norm("batch norm bare", lambda nn: nn.BatchNorm1d(4, affine=False), lm.LazyBatchNorm, nnx.BatchNorm, 4, (5, 4),
          **_EVAL, **_BARE),
    _norm("layer norm", lambda nn: nn.LayerNorm(6), lm.LazyLayerNorm, nnx.LayerNorm, 6, (2, 3, 6), **_EXACT),
    _norm("layer norm no bias", lambda nn: nn.LayerNorm(6, bias=False), lm.LazyLayerNorm, nnx.LayerNorm, 6, (2, 6),
          use_bias=False, **_EXACT),
    _norm("rms norm", lambda nn: nn.RMSNorm(6, eps=1e-5), lm.LazyRMSNorm, nnx.RMSNorm, 6, (2, 3, 6), epsilon=1e-5),
    _norm("group norm", lambda nn: nn.GroupNorm(2, 6), lm.LazyGroupNorm, nnx.GroupNorm, 6, (2, 6, 4), "channels",
          num_groups=2, **_EXACT),
    _norm("instance norm", lambda nn: nn.InstanceNorm2d(3, affine=True), lm.LazyInstanceNorm, nnx.InstanceNorm, 3,
          (2, 3, 4, 5), "channels", **_EXACT),
    Case("embedding square", lambda nn: nn.Embedding(5, 5), lambda r: lm.LazyEmbed(rngs=r),
         lambda r: nnx.Embed(5, 5, rngs=r), (2, 3), "ids"),
    Case("prelu", lambda nn: nn.PReLU(), lambda r: nnx.PReLU(), lambda r: nnx.PReLU(), (2, 3)),
    Case("prelu channels", lambda nn: nn.PReLU(3), lambda r: _slopes(3), lambda r: _slopes(3), (2, 3, 4), "channels"),
]  # fmt: skip


def _mha(name: str, heads: int, width: int, kv: int | None = None, **options: Any) -> Case:
    def torch(nn: Any) -> Any:
        return nn.MultiheadAttention(width, heads, kdim=kv, vdim=kv, batch_first=True, **options)

    flax: dict[str, Any] = {"use_bias": options.get("bias", True), "decode": False}
    return Case(
        name,
        torch,
        lambda r: lm.LazyMultiHeadAttention(heads, **flax, rngs=r),
        lambda r: nnx.MultiHeadAttention(heads, width, in_kv_features=kv, **flax, rngs=r),
        (2, 5, width),
        "attention",
        (2, 3, kv or width),
    )


ATTENTION = [
    _mha("attention", 2, 8),
    _mha("attention square heads", 4, 16),
    _mha("attention no bias", 3, 6, bias=False),
    _mha("attention separate", 2, 8, 6),
    _mha("attention separate no bias", 2, 8, 6, bias=False),
]


def _recurrent(name: str, kind: str, cell: tuple[Any, Any], n_in: int, hidden: int, *, both: bool = False,
               bias: bool = True, flax: dict[str, Any] | None = None, **options: Any) -> Case:  # fmt: skip
    lazy, explicit = cell
    flax = flax or {}

    def torch(nn: Any) -> Any:
        return getattr(nn, kind)(n_in, hidden, bias=bias, bidirectional=both, batch_first=True, **options)

    def wrapped(make: Callable[[], Any]) -> nnx.Module:
        return nnx.Bidirectional(nnx.RNN(make()), nnx.RNN(make())) if both else nnx.RNN(make())

    return Case(
        name,
        torch,
        lambda r: wrapped(lambda: lazy(hidden, **flax, rngs=r)),
        lambda r: wrapped(lambda: explicit(n_in, hidden, **flax, rngs=r)),
        (2, 6, n_in),
        "sequence",
    )


_LSTM, _FAST = (lm.LazyLSTMCell, nnx.LSTMCell), (lm.LazyOptimizedLSTMCell, nnx.OptimizedLSTMCell)
_GRU, _RNN = (lm.LazyGRUCell, nnx.GRUCell), (lm.LazySimpleCell, nnx.SimpleCell)
_RESET_AFTER = (lm.LazyResetAfterGRUCell, lm.ResetAfterGRUCell)


def _cell(name: str, kind: str, cell: tuple[Any, Any], n_in: int, hidden: int) -> Case:
    return Case(
        name,
        lambda nn: getattr(nn, kind)(n_in, hidden),
        lambda r: cell[0](hidden, rngs=r),
        lambda r: cell[1](n_in, hidden, rngs=r),
        (2, n_in),
        "lstm cell" if kind == "LSTMCell" else "cell",
        (2, hidden),
    )


RECURRENT = [
    _recurrent("lstm square", "LSTM", _FAST, 5, 5),
    _recurrent("lstm gates apart", "LSTM", _LSTM, 3, 4),
    _recurrent("lstm gates apart square", "LSTM", _LSTM, 4, 4),
    _recurrent("lstm both ways", "LSTM", _FAST, 3, 4, both=True),
    _recurrent("lstm gates apart both ways", "LSTM", _LSTM, 3, 4, both=True),
    _recurrent("lstm no bias", "LSTM", _FAST, 3, 4, bias=False),
    _recurrent("lstm gates apart no bias", "LSTM", _LSTM, 3, 4, bias=False),
    _recurrent("gru square", "GRU", _GRU, 5, 5),
    _recurrent("gru both ways", "GRU", _GRU, 3, 4, both=True),
    _recurrent("gru no bias", "GRU", _GRU, 3, 4, bias=False),
    _recurrent("gru with b_hn square", "GRU", _RESET_AFTER, 5, 5),
    _recurrent("gru with b_hn both ways", "GRU", _RESET_AFTER, 3, 4, both=True),
    _recurrent("gru with b_hn no bias", "GRU", _RESET_AFTER, 3, 4, bias=False),
    _recurrent("rnn square", "RNN", _RNN, 4, 4),
    _recurrent("rnn no bias", "RNN", _RNN, 3, 4, bias=False),
    _recurrent("rnn relu both ways", "RNN", _RNN, 3, 4, both=True, nonlinearity="relu",
               flax={"activation_fn": jax.nn.relu}),
    _cell("lstm cell", "LSTMCell", _FAST, 4, 4),
    _cell("lstm cell gates apart", "LSTMCell", _LSTM, 3, 4),
    _cell("gru cell", "GRUCell", _GRU, 3, 4),
    _cell("gru cell with b_hn", "GRUCell", _RESET_AFTER, 3, 4),
    _cell("rnn cell", "RNNCell", _RNN, 4, 4),
]  # fmt: skip

CASES = FEED_FORWARD + ATTENTION + RECURRENT


class Net(nnx.Module):
    """Holds one layer under a name."""

    def __init__(self, m: Any) -> None:
        self.m = m


def _slopes(n: int) -> nnx.PReLU:
    slopes: Any = jnp.ones(n)
    return nnx.PReLU(slopes)
