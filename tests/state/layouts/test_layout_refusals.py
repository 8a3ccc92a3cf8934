"""What nnx cannot hold exactly, or a file does not tell: refused by the entry's name, in full text."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import pytest
from flax import nnx
from torch_cases import Net
from torch_files import imported, problems

import lazymods as lm


def ones(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


class Row(NamedTuple):
    name: str
    make: Callable[[nnx.Rngs], Any]
    file: Mapping[str, np.ndarray]
    text: str
    flatten: Mapping[str, Any] | None = None


_BIAS, _SQUARE = {"m.bias": ones(3)}, {"m.weight": ones(3, 3), "m.bias": ones(3)}
_MHA = {"m.out_proj.weight": ones(4, 4)}

ROWS = [
    Row(
        "the bias in the GRU's product",
        lambda r: nnx.RNN(lm.LazyGRUCell(2, rngs=r)),
        {"m.weight_ih_l0": ones(6, 3), "m.weight_hh_l0": ones(6, 2), "m.bias_hh_l0": ones(6)},
        """\
m.bias_hh_l0 (LazyGRUCell m.cell)
  got:    numbers other than 0 in its last third, the bias b_hn of shape (2,)
  needed: zeros: it stands inside the product with the reset gate, where nnx.GRUCell has no bias
  write:  lm.LazyResetAfterGRUCell(hidden_features, rngs=rngs)  # or lm.ResetAfterGRUCell: they have the bias""",
    ),
    Row(
        "grouped transposed convolution",
        lambda r: lm.LazyConvTranspose(4, (3,), rngs=r),
        {"m.weight": ones(4, 2, 3), "m.bias": ones(4)},
        """\
m.weight (LazyConvTranspose m)
  got:    a weight of shape (4, 2, 3), which is one of 2 groups for out_features=4
  needed: groups=1: nnx.ConvTranspose has no groups
  write:  rename=[lm.rules.Split(r"\\bm[.]", into=("m.0.", "m.1."))]  # for an nnx.List of 2 nnx.ConvTranspose of 2 \
features, each for its part of the channels""",
    ),
    Row(
        "instance norm's running statistics",
        lambda r: lm.LazyInstanceNorm(use_bias=False, use_scale=False, rngs=r),
        {"m.running_mean": ones(3), "m.running_var": ones(3)},
        """\
m.running_mean (LazyInstanceNorm m)
  got:    running statistics, by which PyTorch normalizes in eval mode
  needed: track_running_stats=False: nnx.InstanceNorm normalizes by the input's own statistics
  write:  rename={"m.running_mean": None}  # drops it; if it is wanted: nnx.BatchNorm in place of nnx.InstanceNorm
m.running_var (LazyInstanceNorm m)
  got:    running statistics, by which PyTorch normalizes in eval mode
  needed: track_running_stats=False: nnx.InstanceNorm normalizes by the input's own statistics
  write:  rename={"m.running_var": None}  # drops it; if it is wanted: nnx.BatchNorm in place of nnx.InstanceNorm""",
    ),
    Row(
        "attention's bias_k",
        lambda r: lm.LazyMultiHeadAttention(2, use_bias=False, rngs=r),
        _MHA | {"m.in_proj_weight": ones(12, 4), "m.bias_k": ones(1, 1, 4), "m.bias_v": ones(1, 1, 4)},
        """\
m.bias_k (LazyMultiHeadAttention m)
  got:    a learned key and value (add_bias_kv=True)
  needed: add_bias_kv=False: nnx.MultiHeadAttention attends to the given keys only
  write:  torch.nn.MultiheadAttention(64, 8)  # without add_bias_kv
m.bias_v (LazyMultiHeadAttention m)
  got:    a learned key and value (add_bias_kv=True)
  needed: add_bias_kv=False: nnx.MultiHeadAttention attends to the given keys only
  write:  torch.nn.MultiheadAttention(64, 8)  # without add_bias_kv""",
    ),
    Row(
        "attention over keys and values of two widths",
        lambda r: lm.LazyMultiHeadAttention(2, use_bias=False, rngs=r),
        _MHA | {"m.q_proj_weight": ones(4, 4), "m.k_proj_weight": ones(4, 3), "m.v_proj_weight": ones(4, 2)},
        """\
m.v_proj_weight (LazyMultiHeadAttention m)
  got:    keys of width 3 and values of width 2
  needed: one width for keys and values: nnx.MultiHeadAttention has in_kv_features for both
  write:  torch.nn.MultiheadAttention(64, 8, kdim=32, vdim=32)  # one width for both""",
    ),
    Row(
        "heads that do not divide",
        lambda r: lm.LazyMultiHeadAttention(3, use_bias=False, rngs=r),
        _MHA | {"m.q_proj_weight": ones(4, 4), "m.k_proj_weight": ones(3, 4), "m.v_proj_weight": ones(3, 4)},
        """\
m.q_proj_weight (LazyMultiHeadAttention m)
  got:    4 query features for num_heads=3
  needed: features that the heads divide
  write:  num_heads=8  # as many as the file was trained with""",
    ),
    Row(
        "fused projections that are not three",
        lambda r: lm.LazyMultiHeadAttention(2, use_bias=False, rngs=r),
        _MHA | {"m.in_proj_weight": ones(10, 4)},
        """\
m.in_proj_weight (LazyMultiHeadAttention m)
  got:    shape (10, 4)
  needed: queries, keys and values, one below the other, equally many rows each
  write:  lm.load(model, path)  # of a sound copy of the file""",
    ),
    Row(
        "more layers and directions",
        lambda r: nnx.RNN(lm.LazySimpleCell(2, rngs=r)),
        {"m.weight_ih_l0": ones(2, 3), "m.weight_hh_l0": ones(2, 2), "m.weight_ih_l1": ones(2, 2)}
        | {"m.bias_ih_l0_reverse": ones(2)},
        """\
m.bias_ih_l0_reverse (RNN m)
  got:    the direction from the end to the beginning, which nnx.RNN does not have
  needed: nnx.Bidirectional for two directions
  write:  nnx.Bidirectional(nnx.RNN(cell), nnx.RNN(other_cell), rngs=rngs)  # in place of nnx.RNN
m.weight_ih_l1 (RNN m)
  got:    a layer that the module does not have: it is one, and reads layer 0
  needed: one nnx.RNN or nnx.Bidirectional for each layer, in an nnx.Sequential or nnx.List of that name
  write:  nnx.Sequential(nnx.RNN(cell), nnx.RNN(other_cell))  # as many as PyTorch has layers""",
    ),
    Row(
        "a projected LSTM",
        lambda r: lm.LazyOptimizedLSTMCell(2, rngs=r),
        {"m.weight_hr": ones(1, 2)},
        """\
m.weight_hr (LazyOptimizedLSTMCell m)
  got:    a projection of the hidden state (proj_size)
  needed: proj_size=0: Flax's cells have no projection
  write:  torch.nn.LSTM(3, 4)  # without proj_size""",
    ),
    Row(
        "a residual cell",
        lambda r: lm.LazySimpleCell(2, residual=True, rngs=r),
        {"m.weight_ih": ones(2, 3), "m.weight_hh": ones(2, 2)},
        """\
m.weight_ih (LazySimpleCell m)
  got:    weights of a PyTorch cell, for residual=True
  needed: residual=False: no cell of PyTorch adds the hidden state
  write:  residual=False  # of nnx.SimpleCell""",
    ),
    Row(
        "gates that are not four",
        lambda r: lm.LazyLSTMCell(2, rngs=r),
        {"m.weight_ih": ones(6, 3), "m.weight_hh": ones(8, 2)},
        """\
m.weight_ih (LazyLSTMCell m)
  got:    shape (6, 3)
  needed: 4 gates, one below the other, equally many rows each
  write:  nnx.LSTMCell(3, 4, rngs=rngs)  # the class that the file was made with""",
    ),
    Row(
        "biases that cannot be added",
        lambda r: lm.LazySimpleCell(2, rngs=r),
        {"m.bias_ih": ones(2), "m.bias_hh": ones(3)},
        """\
m.bias_hh (LazySimpleCell m)
  got:    shape (3,), where m.bias_ih has (2,)
  needed: two biases of one shape, to be added
  write:  lm.load(model, path)  # of a sound copy of the file""",
    ),
    Row(
        "spectral norm in nnx.SpectralNorm",
        lambda r: lm.LazySpectralNorm(lm.LazyLinear(3, rngs=r), rngs=r),
        _BIAS | {"m.parametrizations.weight.original": ones(3, 3)},
        """\
m.parametrizations.weight.original (LazySpectralNorm m)
  got:    a weight under spectral norm
  needed: the normalized weight: PyTorch divides by the singular value of two stored vectors, nnx.SpectralNorm by one \
that it iterates to anew at every call
  write:  self.layer = layer  # without nnx.SpectralNorm: the normalized weight is loaded then""",
    ),
    Row(
        "spectral norm of other axes",
        lambda r: lm.LazyLinear(2, rngs=r),
        {"m.weight_orig": ones(2, 3), "m.weight_u": ones(3), "m.weight_v": ones(3), "m.bias": ones(2)},
        """\
m.weight_orig (LazyLinear m)
  got:    singular vectors of 3 and 3 numbers for a weight of shape (2, 3)
  needed: those of the weight as a matrix with one of its axes first, as PyTorch's spectral norm has them
  write:  torch.nn.utils.parametrize.remove_parametrizations(layer, 'weight')  # before saving""",
    ),
    Row(
        "another parametrization",
        lambda r: lm.LazyLinear(3, rngs=r),
        _BIAS | {"m.parametrizations.weight.original": ones(3, 3)},
        """\
m.parametrizations.weight.original (LazyLinear m)
  got:    a parameter that PyTorch computes from this one by code that the file does not hold
  needed: the parameter itself: only weight norm, spectral norm and pruning can be computed from a file
  write:  torch.nn.utils.parametrize.remove_parametrizations(layer, 'weight')  # before saving""",
    ),
    Row(
        "weight norm along another axis",
        lambda r: lm.LazyWeightNorm(lm.LazyLinear(3, rngs=r), rngs=r),
        _BIAS | {"m.weight_g": ones(1, 3), "m.weight_v": ones(3, 3)},
        """\
m.weight_g (LazyLinear m.layer_instance)
  got:    magnitudes of shape (1, 3) for directions of shape (3, 3), and feature_axes=-1
  needed: magnitudes along the axis that the wrapper has scales for: dim=0 of PyTorch is feature_axes=-1 of \
nnx.WeightNorm (for ConvTranspose -2, with transpose_kernel -1), dim=None is feature_axes=None
  write:  nnx.WeightNorm(..., feature_axes=...)  # that fit PyTorch's dim; or the layer without it, which gets the \
product""",
    ),
    Row(
        "weight norm without scales",
        lambda r: lm.LazyWeightNorm(lm.LazyLinear(3, rngs=r), use_scale=False, rngs=r),
        _BIAS | {"m.weight_g": 2 * ones(3, 1), "m.weight_v": ones(3, 3)},
        """\
m.weight_g (LazyLinear m.layer_instance)
  got:    magnitudes other than 1
  needed: a scale for them
  write:  nnx.WeightNorm(..., use_scale=True)""",
    ),
    Row(
        "weight norm whose parts do not fit",
        lambda r: lm.LazyLinear(3, rngs=r),
        _BIAS | {"m.weight_g": ones(2, 1), "m.weight_v": ones(3, 3)},
        """\
m.weight_g (LazyLinear m)
  got:    magnitudes of shape (2, 1) for directions of shape (3, 3)
  needed: magnitudes along one axis of the directions, as PyTorch's weight norm has them
  write:  torch.nn.utils.parametrizations.weight_norm(layer)  # as it saves them""",
    ),
    Row(
        "einsum",
        lambda r: lm.LazyEinsum("ab,bc->ac", sizes={"c": 3}, rngs=r),
        {"m.weight": ones(3, 2)},
        """\
m.weight (LazyEinsum m)
  got:    a weight for an nnx.Einsum, whose equation may put its axes in any order
  needed: an entry by Flax's name (kernel), in Flax's order: PyTorch has no such layer
  write:  rename={"m.weight": "m.kernel"}  # with the axes in Flax's order; or nnx.Linear in its place""",
    ),
    Row(
        "a general linear map of several axes",
        lambda r: nnx.LinearGeneral((2, 3), 4, axis=(-2, -1), rngs=r),
        {"m.weight": ones(4, 6), "m.bias": ones(4)},
        """\
m.weight (LinearGeneral m)
  got:    several input axes, (-2, -1), in one axis of PyTorch's weight
  needed: the order in which PyTorch flattened them, which the file does not hold
  write:  flatten={"m": (height, width, channels)}  # if channels came first in PyTorch; flatten={"m": (features,)} if \
the order is the same""",
    ),
    Row(
        "a general linear map of several unknown sizes",
        lambda r: lm.LazyLinearGeneral(4, axis=(-2, -1), rngs=r),
        {"m.weight": ones(4, 6), "m.bias": ones(4)},
        """\
m.weight (LazyLinearGeneral m)
  got:    a kernel of shape (None, None, 4), where more than one input size is unknown
  needed: all but one: a PyTorch file has only their product
  write:  nnx.LinearGeneral(in_features, out_features, rngs=rngs)  # or flatten= with a size for each axis""",
        {"m": (6,)},
    ),
    Row(
        "a general linear map with batch axes",
        lambda r: nnx.LinearGeneral(3, 4, batch_axis={0: 2}, use_bias=False, rngs=r),
        {"m.weight": ones(4, 3)},
        """\
m.weight (LinearGeneral m)
  got:    axis=(-1,), batch_axis={0: 2}
  needed: ascending axes and no batch axes: PyTorch's Linear has one map from one flattened axis
  write:  batch_axis=None  # of nnx.LinearGeneral; or entries by Flax's names (kernel, bias)""",
    ),
    Row(
        "layer norm over several axes",
        lambda r: lm.LazyLayerNorm(feature_axes=(1, 2), reduction_axes=(1, 2), use_bias=False, rngs=r),
        {"m.weight": ones(3, 3)},
        """\
m.weight (LazyLayerNorm m)
  got:    shape (3, 3), several feature axes
  needed: the order of these axes in the model, which the file does not hold
  write:  flatten={"m": (height, width, channels)}  # if channels come first in PyTorch; flatten={"m": (features,)} if \
the order is the same""",
    ),
    Row(
        "layer norm over other axes than flatten says",
        lambda r: lm.LazyLayerNorm(feature_axes=(1, 2), reduction_axes=(1, 2), use_bias=False, rngs=r),
        {"m.weight": ones(2, 3)},
        """\
m.weight (LazyLayerNorm m)
  got:    shape (2, 3), and flatten sizes (2, 3)
  needed: shape (3, 2) for these sizes: channels come first in PyTorch
  write:  flatten={'fc': (height, width, channels)}  # the sizes of the input""",
        {"m": (2, 3)},
    ),
    Row(
        "flatten sizes of another product",
        lambda r: lm.LazyLinear(3, rngs=r),
        _SQUARE,
        """\
m.weight (LazyLinear m)
  got:    flatten sizes (2, 2, 2), a product of 8, for 3 features
  needed: the sizes before the flatten, channels last, whose product is the number of features
  write:  flatten={'fc': (height, width, channels)}  # of the layer before""",
        {"m": (2, 2, 2)},
    ),
    Row(
        "flatten before what is no Linear, and of a name that is not there",
        lambda r: lm.LazyConv(3, (3,), rngs=r),
        {"m.weight": ones(3, 3, 3), "m.bias": ones(3)},
        """\
fc
  got:    flatten for it, and no layer of that name that can follow a flatten
  needed: the name of a Linear, LinearGeneral, BatchNorm, LayerNorm, RMSNorm or recurrent layer of the model
  write:  flatten={"fc": (height, width, channels)}
m
  got:    flatten for it, and no layer of that name that can follow a flatten
  needed: the name of a Linear, LinearGeneral, BatchNorm, LayerNorm, RMSNorm or recurrent layer of the model
  write:  flatten={"fc": (height, width, channels)}""",
        {"m": (1, 3), "fc": (3,)},
    ),
    Row(
        "flatten sizes that are no sizes",
        lambda r: lm.LazyLinear(3, rngs=r),
        _SQUARE,
        """\
m
  got:    flatten sizes (3, 1.0)
  needed: positive whole numbers
  write:  flatten={"fc": (height, width, channels)}""",
        {"m": (3, 1.0)},
    ),
    Row(
        "an entry by either name",
        lambda r: lm.LazyLinear(3, rngs=r),
        _SQUARE | {"m.kernel": ones(3, 3)},
        """\
m.kernel
  got:    an entry by Flax's name, beside m.weight
  needed: one entry a parameter
  write:  rename={"m.kernel": None}  # drops it""",
    ),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_refused_by_name(row: Row):
    net = Net(row.make(nnx.Rngs(0)))
    assert problems(net, row.file, row.flatten) == row.text


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_ready_and_abstract_models_refuse_the_same_entries(row: Row):
    lazy = Net(row.make(nnx.Rngs(0)))
    abstract = nnx.eval_shape(lambda: Net(row.make(nnx.Rngs(0))))
    names = [[p.where.split()[0] for p in imported(m, row.file, row.flatten).problems] for m in (lazy, abstract)]
    assert names[0] == names[1]


def mismatch(net: Net, file: Mapping[str, np.ndarray]) -> str:
    found = imported(net, file)
    assert not found.problems
    with pytest.raises(lm.StateDictError) as error:
        lm.load_state_dict(net, found.entries)
    return str(error.value)


def test_a_wrong_rank_is_left_to_the_load():
    text = mismatch(Net(lm.LazyLinear(3, rngs=nnx.Rngs(0))), {"m.weight": ones(3, 2, 1), "m.bias": ones(3)})
    assert "m.kernel (UninitializedParameter)\n  got:    f32[3,2,1]\n  needed: shape (?, 3)" in text


def test_a_wrong_axis_is_left_to_the_load():
    text = mismatch(Net(nnx.Linear(2, 3, rngs=nnx.Rngs(0))), {"m.weight": ones(4, 2), "m.bias": ones(4)})
    assert "m.kernel (Param)\n  got:    f32[2,4]\n  needed: shape (2, 3)" in text


def test_a_bias_for_a_layer_without_one_keeps_its_place():
    found = imported(Net(lm.LazyLinear(3, use_bias=False, rngs=nnx.Rngs(0))), _SQUARE)
    assert list(found.entries) == ["m.kernel", "m.bias"] and not found.problems


@pytest.mark.parametrize("rank", range(5))
@pytest.mark.parametrize(
    "make",
    [
        lambda r: lm.LazyLinear(3, rngs=r),
        lambda r: lm.LazyConv(3, (3,), rngs=r),
        lambda r: lm.LazyConvTranspose(3, (3,), rngs=r),
        lambda r: lm.LazyBatchNorm(rngs=r),
        lambda r: lm.LazyLayerNorm(rngs=r),
        lambda r: lm.LazyEmbed(rngs=r),
        lambda r: nnx.PReLU(),
        lambda r: lm.LazyLinearGeneral((3, 3), rngs=r),
        lambda r: lm.LazyMultiHeadAttention(3, rngs=r),
        lambda r: lm.LazyGRUCell(3, rngs=r),
        lambda r: lm.LazyLSTMCell(3, rngs=r),
        lambda r: lm.LazyWeightNorm(lm.LazyLinear(3, rngs=r), rngs=r),
    ],
)
def test_no_rank_crashes(make: Callable[[nnx.Rngs], Any], rank: int):
    names = ["weight", "bias", "running_mean", "in_proj_weight", "in_proj_bias", "q_proj.weight", "out_proj.weight"]
    names += ["weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_g", "weight_v"]
    file = {f"m.{name}": ones(*[3] * rank) for name in names}
    found = imported(Net(make(nnx.Rngs(0))), file)
    assert found.entries
    without = {k: v for k, v in file.items() if k != "m.weight"}
    assert imported(Net(make(nnx.Rngs(0))), without).entries
