"""The second law, layer by layer: a first call that fails leaves a layer exactly as lazy as it was."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from helpers import array, assert_same_bits, assert_same_model, filled, spec
from layers import TABLE, Row

import lazymods as lm

i32 = jnp.int32


@dataclasses.dataclass(frozen=True)
class Bad:
    """A call that a row of the table refuses.

    Attributes:
        row: The row's name; its own arguments are the corrected retry.
        what: What is wrong, in a word.
        args: The arguments.
        needed: What the message says.
    """

    row: str
    what: str
    args: tuple[Any, ...]
    needed: str

    def __str__(self) -> str:
        """Name the test."""
        return f"{self.row}-{self.what}"

    @property
    def good(self) -> Row:
        """The row."""
        return next(r for r in TABLE if r.name == self.row)


carry = spec(2, 4)
BAD = [
    Bad("linear", "scalar", (spec(),), "at least 1 ax"),
    Bad("linear", "zero", (spec(2, 0),), "in_features=0"),
    Bad("linear", "strict-ints", (spec(2, 3, dtype=i32),), "promotion"),
    Bad("linear", "no-array", ("text",), "an array"),
    Bad("linear-general", "zero", (spec(2, 0),), "in_features"),
    Bad("linear-general-axes", "rank", (spec(4),), "axes"),
    Bad("linear-general-batch-axes", "rank", (spec(4),), "axes"),
    Bad("linear-general-batch-axes", "zero-batch", (spec(0, 3, 2),), "batch_axis"),
    Bad("linear-general-given-batch", "other-batch", (spec(3, 3, 6),), "dot_general"),
    Bad("einsum-bias", "rank", (spec(2, 3, 4),), "nd"),
    Bad("einsum-bias", "zero", (spec(2, 0),), "kernel_shape"),
    Bad("einsum-ellipsis", "scalar", (spec(),), "d"),
    Bad("embed", "floats", (spec(2),), "integer"),
    Bad("conv", "rank", (spec(8),), "at least 2 axes"),
    Bad("conv", "zero", (spec(2, 8, 0),), "in_features=0"),
    Bad("conv-groups", "groups", (spec(2, 8, 5),), "feature_group_count=2"),
    Bad("conv-mask", "mask", (spec(2, 8, 2),), "[Mm]ask"),
    Bad("conv-strided", "strict-ints", (spec(2, 9, 9, 3, dtype=i32),), "promotion"),
    Bad("conv1d", "rank", (spec(2, 8, 8, 3),), "2 or 3 axes"),
    Bad("conv2d-unbatched", "rank", (spec(8, 3),), "3 or 4 axes"),
    Bad("conv3d", "rank", (spec(4, 4, 3),), "4 or 5 axes"),
    Bad("conv-transpose", "rank", (spec(5),), "at least 2 axes"),
    Bad("conv-transpose", "zero", (spec(2, 5, 0),), "in_features=0"),
    Bad("conv-transpose1d", "rank", (spec(2, 5, 5, 3),), "2 or 3 axes"),
    Bad("conv-transpose2d", "rank", (spec(2, 5, 5, 5, 3),), "3 or 4 axes"),
    Bad("conv-transpose3d", "rank", (spec(3, 3, 3),), "4 or 5 axes"),
    Bad("batch-norm", "scalar", (spec(),), "at least 1 ax"),
    Bad("batch-norm", "zero", (spec(4, 0),), "num_features=0"),
    Bad("batch-norm-axis-1", "rank", (spec(3),), "axes"),
    Bad("batch-norm1d", "rank", (spec(2, 5, 5, 3),), "2 or 3 axes"),
    Bad("batch-norm2d", "rank", (spec(2, 3),), "4 axes"),
    Bad("batch-norm3d", "rank", (spec(2, 4, 4, 3),), "5 axes"),
    Bad("layer-norm", "zero", (spec(2, 0),), "num_features=0"),
    Bad("layer-norm-axes", "rank", (spec(4),), "axes"),
    Bad("layer-norm-plain", "zero", (spec(2, 0),), "num_features=0"),
    Bad("rms-norm", "scalar", (spec(),), "at least 1 ax"),
    Bad("rms-norm-axes", "zero", (spec(2, 3, 0),), "num_features=0"),
    Bad("group-norm", "groups", (spec(2, 4, 5),), "num_groups=3"),
    Bad("group-norm-size", "groups", (spec(2, 4, 4, 5),), "group_size=2"),
    Bad("group-norm-32", "default-groups", (spec(2, 6),), "num_groups=32"),
    Bad("instance-norm", "zero", (spec(2, 5, 0),), "num_features=0"),
    Bad("instance-norm", "no-batch", (spec(3),), "batch axis"),
    Bad("instance-norm1d", "rank", (spec(2, 4, 4, 3),), "3 axes"),
    Bad("instance-norm2d", "rank", (spec(2, 5, 3),), "4 axes"),
    Bad("instance-norm3d", "rank", (spec(2, 5, 5, 3),), "5 axes"),
    Bad("attention", "rank", (spec(8),), "at least 2 axes"),
    Bad("attention", "zero", (spec(2, 5, 0),), "in_features=0"),
    Bad("attention", "heads", (spec(2, 5, 7),), "divisible"),
    Bad("attention-other-keys", "batch", (spec(2, 5, 8), spec(3, 6, 4)), "batch dims"),
    Bad("attention-values", "values", (spec(2, 5, 8), spec(2, 6, 4), spec(2, 6, 3)), "dot_general"),
    Bad("lora", "scalar", (spec(),), "at least 1 ax"),
    Bad("lora", "zero", (spec(2, 0),), "in_features=0"),
    Bad("lora-lazy-base", "strict-ints", (spec(2, 3, dtype=i32),), "promotion"),
    Bad("lora-ready-base", "base", (spec(2, 6),), "dot_general"),
    Bad("lora-linear", "zero", (spec(2, 0),), "in_features=0"),
    Bad("simple-cell", "zero", (carry, spec(2, 0)), "in_features=0"),
    Bad("lstm-cell", "scalar", ((carry, carry), spec()), "at least 1 ax"),
    Bad("optimized-lstm-cell", "carry", ((spec(2, 5), spec(2, 5)), spec(2, 3)), "dot_general"),
    Bad("gru-cell", "batch", (spec(3, 4), spec(2, 3)), "shapes"),
    Bad("weight-norm-linear", "zero", (spec(2, 0),), "in_features=0"),
    Bad("weight-norm-conv", "rank", (spec(8),), "at least 2 axes"),
    Bad("weight-norm-ready", "width", (spec(2, 4),), "dot_general"),
    Bad("spectral-norm-linear", "scalar", (spec(),), "at least 1 ax"),
    Bad("spectral-norm-conv", "zero", (spec(2, 8, 0),), "in_features=0"),
]
bad_calls = pytest.mark.parametrize("bad", BAD, ids=str)


def everything(layer: Any) -> Any:
    """All that makes a layer what it is: class, attributes in order, the very Variables and their contents."""
    nodes = [(p, type(n), list(vars(n))) for p, n in nnx.iter_graph(layer) if isinstance(n, nnx.Pytree)]
    variables = [
        (p, id(v), type(v), v.get_raw_value(), v.get_metadata())
        for p, v in nnx.iter_graph(layer)
        if isinstance(v, nnx.Variable)
    ]
    return nnx.graphdef(layer), nodes, variables, lm.uninitialized_paths(layer), repr(layer)


WAYS: dict[str, Callable[[Any, Bad], Any]] = {
    "call": lambda layer, bad: layer(*filled(bad.args), **bad.good.kwargs),
    "materialize": lambda layer, bad: lm.materialize(layer, *bad.args, **bad.good.kwargs),
    "infer_shapes": lambda layer, bad: lm.infer_shapes(layer, *bad.args, **bad.good.kwargs),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@bad_calls
def test_failure_leaves_the_layer_lazy(bad: Bad, way: Callable[[Any, Bad], Any]) -> None:
    rngs = nnx.Rngs(0)
    layer, want = bad.good.lazy(rngs), bad.good.explicit(nnx.Rngs(0))
    before, streams = everything(layer), str(nnx.state(rngs))
    for _ in range(2):  # the second time as the first
        with pytest.raises(lm.ShapeInferenceError, match=bad.needed) as caught:
            way(layer, bad)
        assert "write:" in str(caught.value)
    assert everything(layer) == before
    assert str(nnx.state(rngs)) == streams
    assert_same_bits(bad.good.call(layer), bad.good.call(want))
    assert_same_model(layer, want)


# ---------------------------------------------------------------- what sizes allow, and the forward refuses


@dataclasses.dataclass(frozen=True)
class Refused:
    """A layer whose forward fails for a reason that has nothing to do with sizes, and the call that works."""

    name: str
    lazy: Callable[[nnx.Rngs], Any]
    explicit: Callable[[nnx.Rngs], Any]
    bad: Callable[[Any], Any]
    good: Callable[[Any], Any]
    error: type[Exception] | tuple[type[Exception], ...]
    match: str

    def __str__(self) -> str:
        """Name the test."""
        return self.name


x, queries = array(2, 3), array(2, 5, 8)
REFUSED = [
    Refused(
        "no mode",
        lambda r: lm.LazyBatchNorm(use_running_average=None, rngs=r),
        lambda r: nnx.BatchNorm(3, use_running_average=None, rngs=r),
        lambda layer: layer(x),
        lambda layer: layer(x, use_running_average=False),
        ValueError,
        "use_running_average",
    ),
    Refused(
        "no cache",
        lambda r: lm.LazyMultiHeadAttention(2, decode=True, rngs=r),
        lambda r: nnx.MultiHeadAttention(2, 8, decode=True, rngs=r),
        lambda layer: layer(queries),
        lambda layer: layer(queries, decode=False),
        ValueError,
        "init_cache",
    ),
    Refused(
        "no rngs for dropout",
        lambda r: lm.LazyMultiHeadAttention(2, decode=False, dropout_rate=0.5, keep_rngs=False, rngs=r),
        lambda r: nnx.MultiHeadAttention(2, 8, decode=False, dropout_rate=0.5, keep_rngs=False, rngs=r),
        lambda layer: layer(queries, deterministic=False),
        lambda layer: layer(queries, deterministic=False, rngs=nnx.Rngs(dropout=3)),
        ValueError,
        "rngs",
    ),
    Refused(
        "no arguments",
        lambda r: lm.LazyLinear(4, rngs=r),
        lambda r: nnx.Linear(3, 4, rngs=r),
        lambda layer: layer(),
        lambda layer: layer(inputs=x),
        (TypeError, lm.ShapeInferenceError),
        "inputs",
    ),
    Refused(
        "unknown keyword",
        lambda r: lm.LazyLinear(4, rngs=r),
        lambda r: nnx.Linear(3, 4, rngs=r),
        lambda layer: layer(x, colour="red"),
        lambda layer: layer(x),
        (TypeError, lm.ShapeInferenceError),
        "colour",
    ),
]


@pytest.mark.parametrize("case", REFUSED, ids=str)
def test_failing_forward_leaves_the_layer_lazy(case: Refused) -> None:
    layer, want = case.lazy(nnx.Rngs(0)), case.explicit(nnx.Rngs(0))
    before = everything(layer)
    with pytest.raises(case.error, match=case.match):
        case.bad(layer)
    assert everything(layer) == before
    assert_same_bits(case.good(layer), case.good(want))
    assert_same_model(layer, want)


def test_base_module_of_another_width_leaves_adapter_and_base_lazy() -> None:
    layer = lm.LazyLoRA(2, 4, base_module=lm.LazyLinear(5, rngs=nnx.Rngs(1)), rngs=nnx.Rngs(0))
    before = everything(layer)
    with pytest.raises(lm.ShapeInferenceError, match="shapes"):
        layer(x)
    assert everything(layer) == before


@pytest.mark.parametrize("wrap", [lm.LazyWeightNorm, lm.LazySpectralNorm])
def test_wrapped_layer_stays_lazy_with_its_wrapper(wrap: Any) -> None:
    layer = wrap(nnx.Sequential(lm.LazyLinear(4, rngs=nnx.Rngs(1)), lm.LazyConv(2, (3, 3), rngs=nnx.Rngs(2))),
                 rngs=nnx.Rngs(0))
    before = everything(layer)
    with pytest.raises(lm.ShapeInferenceError, match=r"layer_instance\.layers\.1 \(LazyConv\)"):
        layer(x)
    assert everything(layer) == before


def test_matrix_only_spectral_norm_refuses_a_convolution() -> None:
    """Flax refuses it when it is constructed; so does lazymods, or else at the first call."""
    with pytest.raises(ValueError, match="error_on_non_matrix"):
        nnx.SpectralNorm(nnx.Conv(3, 4, (3,), rngs=nnx.Rngs(0)), error_on_non_matrix=True, rngs=nnx.Rngs(0))
    conv = lm.LazyConv(4, (3,), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="error_on_non_matrix"):
        lm.LazySpectralNorm(conv, error_on_non_matrix=True, rngs=nnx.Rngs(0))(array(2, 8, 3))
    assert lm.uninitialized_paths(conv) == ["kernel", "bias"]


class Net(nnx.Module):
    """Three layers, of which the second refuses what the first makes."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.first = lm.LazyLinear(5, rngs=rngs)
        self.norm = lm.LazyGroupNorm(num_groups=3, rngs=rngs)
        self.last = lm.LazyLinear(2, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(self.norm(self.first(x)))


LAZY_NET = ["first.kernel", "first.bias", "norm.scale", "norm.bias", "last.kernel", "last.bias"]


def test_plain_call_of_a_model_holds_layer_by_layer() -> None:
    net = Net(rngs=nnx.Rngs(0))
    with pytest.raises(lm.ShapeInferenceError, match=r"norm \(LazyGroupNorm\)"):
        net(x)
    assert_same_model(net.first, nnx.Linear(3, 5, rngs=nnx.Rngs(0)))
    assert lm.uninitialized_paths(net) == LAZY_NET[2:]


@pytest.mark.parametrize("way", [lm.materialize, lm.infer_shapes])
def test_materialize_of_a_model_holds_as_a_whole(way: Callable[..., Any]) -> None:
    net = Net(rngs=nnx.Rngs(0))
    before = everything(net)
    with pytest.raises(lm.ShapeInferenceError, match=r"norm \(LazyGroupNorm\)"):
        way(net, spec(2, 3))
    assert everything(net) == before
