"""Rows 15-63, 68 and 86-105: each layer's first call, pickle and load, and what a layer refuses.

Inputs are channels-last, as in Flax; otherwise the sizes are those of the scenarios, with smaller batches.
"""

import dataclasses
import itertools
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import array, assert_same_bits, assert_same_model, filled, spec

import lazymods as lm


@dataclasses.dataclass(frozen=True)
class Case:
    """A layer, the rows for its first call, pickle and load, and the shapes that its parameters must get."""

    name: str
    rows: tuple[str, str, str]
    lazy_cls: Any
    cls: Any
    size: int
    args: tuple[Any, ...]
    options: dict[str, Any]
    input: tuple[int, ...]
    shapes: dict[str, tuple[int, ...]]

    def lazy(self, seed: int = 0) -> Any:
        return self.lazy_cls(*self.args, **self.options, rngs=nnx.Rngs(seed))

    def explicit(self, seed: int = 0) -> Any:
        return self.cls(self.size, *self.args, **self.options, rngs=nnx.Rngs(seed))


SPACE = {1: (7,), 2: (6, 5), 3: (4, 3, 5)}


def convolutions() -> list[Case]:
    rows = {("Conv", 1): ("24", "25", "26"), ("Conv", 2): ("27", "28", "29"), ("Conv", 3): ("32", "33", "34"),
            ("ConvTranspose", 1): ("35", "37", "38"), ("ConvTranspose", 2): ("39", "41", "42"),
            ("ConvTranspose", 3): ("43", "45", "46")}
    return [
        Case(f"{kind}{n}d", numbers, getattr(lm, f"Lazy{kind}{n}d"), getattr(nnx, kind), 16, (32, (2,) * n), {},
             (2, *SPACE[n], 16), {"kernel": (*(2,) * n, 16, 32), "bias": (32,)})
        for (kind, n), numbers in rows.items()
    ]


def norms() -> list[Case]:
    table: list[tuple[str, Any, Any, tuple[int, ...], tuple[str, str, str]]] = [
        ("BatchNorm1d", lm.LazyBatchNorm1d, nnx.BatchNorm, (4, 6, 3), ("47", "49", "50")),
        ("BatchNorm1d_2D", lm.LazyBatchNorm1d, nnx.BatchNorm, (16, 6), ("48", "49", "50")),
        ("BatchNorm2d", lm.LazyBatchNorm2d, nnx.BatchNorm, (4, 6, 7, 3), ("51", "52", "53")),
        ("BatchNorm3d", lm.LazyBatchNorm3d, nnx.BatchNorm, (2, 6, 7, 8, 3), ("55", "56", "57")),
        ("InstanceNorm1d", lm.LazyInstanceNorm1d, nnx.InstanceNorm, (4, 6, 3), ("58", "59", "60")),
        ("InstanceNorm2d", lm.LazyInstanceNorm2d, nnx.InstanceNorm, (4, 6, 7, 3), ("61", "61", "61")),
        ("InstanceNorm3d", lm.LazyInstanceNorm3d, nnx.InstanceNorm, (2, 6, 7, 8, 3), ("62", "62", "62")),
    ]
    cases = []
    for (name, lazy_cls, cls, shape, rows), scale, bias in itertools.product(table, (True, False), (True, False)):
        size = shape[-1]
        named = {"scale": scale, "bias": bias, "mean": cls is nnx.BatchNorm, "var": cls is nnx.BatchNorm}
        shapes = {key: (size,) for key, there in named.items() if there}
        flags = {"use_scale": scale, "use_bias": bias}
        cases.append(Case(f"{name}-scale{scale:d}-bias{bias:d}", rows, lazy_cls, cls, size, (), flags, shape, shapes))
    return cases


LINEAR = Case("Linear", ("15_16", "17_18", "19_20"), lm.LazyLinear, nnx.Linear, 5, (10,), {}, (5, 5),
              {"kernel": (5, 10), "bias": (10,)})
CASES = [LINEAR, *convolutions(), *norms()]
WITH_PARAMETERS = [c for c in CASES if c.shapes]


def cases(which: int, members: list[Case] = CASES) -> Any:
    ids = [f"row_{c.rows[which]}-{c.name}" for c in members]
    return pytest.mark.parametrize("case", members, ids=ids)


def shapes_of(model: Any) -> dict[str, tuple[int, ...]]:
    return {k: tuple(v.shape) for k, v in lm.state_dict(model).items()}


@cases(0)
def test_first_and_second_call(case: Case) -> None:
    lazy, want, x = case.lazy(), case.explicit(), array(*case.input)
    assert set(lm.uninitialized_paths(lazy)) == set(case.shapes)
    assert_same_bits(lazy(x), want(x))
    assert type(lazy) is case.cls and not isinstance(lazy, lm.LazyModuleMixin)
    assert shapes_of(lazy) == case.shapes
    assert_same_model(lazy, want)  # running statistics of this batch as well
    assert_same_bits(lazy(x), want(x))
    assert_same_model(lazy, want)


def test_second_call_is_the_plain_function() -> None:
    layer, x = LINEAR.lazy(), array(5, 5)
    layer.bias[...] = array(10, seed=3)
    assert float(jnp.abs(layer(x)).min()) > 0
    kernel, bias = layer.kernel[...], layer.bias[...]
    assert float(jnp.abs(kernel).min()) > 0
    want = jax.lax.dot_general(x, kernel, (((1,), (0,)), ((), ()))) + bias[None]
    assert_same_bits(layer(x), want)


@cases(1)
def test_pickled_before_the_first_call(case: Case) -> None:
    lazy, want, x = case.lazy(), case.explicit(), array(*case.input)
    twin = pickle.loads(pickle.dumps(lazy))
    assert type(twin) is case.lazy_cls
    assert lm.uninitialized_paths(twin) == lm.uninitialized_paths(lazy)
    assert_same_bits(twin(x), want(x))
    assert_same_model(twin, want)
    assert lm.is_lazy(lazy)


@cases(1)
def test_pickled_after_the_first_call(case: Case) -> None:
    lazy, want, x = case.lazy(), case.explicit(), array(*case.input)
    assert_same_bits(lazy(x), want(x))
    twin = pickle.loads(pickle.dumps(lazy))
    assert type(twin) is case.cls and shapes_of(twin) == case.shapes
    assert_same_model(twin, want)


@cases(2, WITH_PARAMETERS)
def test_ready_into_lazy(case: Case) -> None:
    lazy, want, x = case.lazy(), case.explicit(7), array(*case.input)
    want(x)  # statistics that are not the initial ones
    result = lm.load_state_dict(lazy, lm.state_dict(want))
    assert result == ([], [], [])
    assert type(lazy) is case.cls and shapes_of(lazy) == case.shapes
    size = lazy.in_features if hasattr(want, "in_features") else lazy.num_features
    assert size == case.size
    assert_same_model(lazy, want)
    assert_same_bits(lazy(x), want(x))


@cases(2, WITH_PARAMETERS)
def test_lazy_into_ready_is_refused(case: Case) -> None:
    ready, same = case.explicit(7), case.explicit(7)
    with pytest.raises(lm.UninitializedError, match="uninitialized entry of shape") as error:
        lm.load_state_dict(ready, lm.state_dict(case.lazy()))
    assert isinstance(error.value, RuntimeError)
    assert all(name in str(error.value) for name in case.shapes)
    assert_same_model(ready, same)


@pytest.mark.parametrize("case", [c for c in CASES if not c.shapes], ids=lambda c: f"row_{c.rows[2]}-{c.name}")
def test_without_any_parameter_the_first_call_tells(case: Case) -> None:
    lazy, want, x = case.lazy(), case.explicit(), array(*case.input)
    assert lm.load_state_dict(lazy, lm.state_dict(want)) == ([], [], [])
    assert lm.is_lazy(lazy) and not lm.has_uninitialized_params(lazy)
    assert_same_bits(lazy(x), want(x))
    assert lazy.num_features == 3
    assert_same_model(lazy, want)


def test_loaded_weights_are_not_drawn_again() -> None:
    lazy, source, x = LINEAR.lazy(), LINEAR.explicit(7), array(5, 5)
    lm.load_state_dict(lazy, lm.state_dict(source))
    assert lazy.in_features == 5
    before = lm.state_dict(lazy)
    assert_same_bits(lazy(x), source(x))
    assert lazy.in_features == 5
    assert all(a is b for a, b in zip(lm.state_dict(lazy).values(), before.values(), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("lazy_cls, cls", [(lm.LazyConv2d, nnx.Conv), (lm.LazyConvTranspose2d, nnx.ConvTranspose)],
                         ids=["row_30-Conv2d", "row_31-ConvTranspose2d"])
def test_load_then_forward(lazy_cls: Any, cls: Any) -> None:
    source = cls(3, 16, (3, 3), padding=1 if cls is nnx.Conv else "SAME", rngs=nnx.Rngs(1))
    lazy = lazy_cls(16, 3, padding=source.padding, rngs=nnx.Rngs(0))
    lm.load_state_dict(lazy, lm.state_dict(source))
    assert type(lazy) is cls and lazy.in_features == 3
    x = array(2, 5, 6, 3)
    assert_same_bits(lazy(x), source(x))


@pytest.mark.slow
@pytest.mark.parametrize("lazy_cls, rank", [(lm.LazyConvTranspose1d, 1), (lm.LazyConvTranspose2d, 2),
                                            (lm.LazyConvTranspose3d, 3)],
                         ids=["row_36", "row_40", "row_44"])
def test_transposed_convolution_by_keyword(lazy_cls: Any, rank: int) -> None:
    lazy, x = lazy_cls(4, (2,) * rank, strides=(2,) * rank, rngs=nnx.Rngs(0)), array(1, *(3,) * rank, 2)
    want = nnx.ConvTranspose(2, 4, (2,) * rank, strides=(2,) * rank, rngs=nnx.Rngs(0))
    assert_same_bits(lazy(inputs=x), want(inputs=x))
    assert_same_model(lazy, want)


@pytest.mark.slow
def test_further_arguments_of_the_forward_reach_it() -> None:
    lazy, want, x = (lm.LazyMultiHeadAttention(2, decode=False, rngs=nnx.Rngs(0)),
                     nnx.MultiHeadAttention(2, 4, decode=False, rngs=nnx.Rngs(0)), array(1, 3, 4))
    mask = nnx.make_causal_mask(jnp.ones((1, 3)))
    assert_same_bits(lazy(x, mask=mask, deterministic=True), want(x, mask=mask, deterministic=True))
    assert_same_bits(lm.LazyLinear(2, rngs=nnx.Rngs(0))(x, out_sharding=None), nnx.Linear(4, 2, rngs=nnx.Rngs(0))(x))


def test_batch_norm_load_then_evaluate() -> None:
    source, x = nnx.BatchNorm(16, rngs=nnx.Rngs(0)), array(2, 3, 4, 16)
    source(x + 2)
    lazy = lm.LazyBatchNorm2d(use_running_average=True, rngs=nnx.Rngs(0))
    lm.load_state_dict(lazy, lm.state_dict(source))
    assert type(lazy) is nnx.BatchNorm and lazy.num_features == 16
    assert_same_bits(lazy(x), source(x, use_running_average=True))


@pytest.mark.parametrize("lazy_cls, shape", [(lm.LazyBatchNorm1d, (4, 3)), (lm.LazyBatchNorm2d, (4, 5, 6, 3)),
                                             (lm.LazyBatchNorm3d, (2, 3, 4, 5, 3))], ids=["1d", "2d", "3d"])
def test_norms_by_keyword(lazy_cls: Any, shape: tuple[int, ...]) -> None:
    lazy, want, x = lazy_cls(rngs=nnx.Rngs(0)), nnx.BatchNorm(3, rngs=nnx.Rngs(0)), array(*shape)
    assert_same_bits(lazy(x=x), want(x=x))
    assert_same_model(lazy, want)


def test_layers_in_a_chain() -> None:
    r = nnx.Rngs(0)
    net = nnx.Sequential(lm.LazyLinear(15, rngs=r), lm.LazyLinear(10, rngs=r))
    net(array(5, 10))
    assert shapes_of(net) == {"layers.0.kernel": (10, 15), "layers.0.bias": (15,),
                              "layers.1.kernel": (15, 10), "layers.1.bias": (10,)}


# ---------------------------------------------------------------- what a layer shows, takes and refuses


@pytest.mark.parametrize("layer, known", [(lm.LazyLinear(4, rngs=nnx.Rngs(0)), "(?, 4)"),
                                          (lm.LazyConv2d(4, 3, rngs=nnx.Rngs(0)), "(3, 3, ?, 4)"),
                                          (lm.LazyBatchNorm1d(rngs=nnx.Rngs(0)), "(?,)")],
                         ids=["Linear", "Conv2d", "BatchNorm1d"])
def test_repr_before_the_first_call(layer: Any, known: str) -> None:
    text = repr(layer)
    assert text.startswith(type(layer).__name__) and known in text
    assert "in_features=0" not in text and "num_features=0" not in text


@pytest.mark.parametrize("shape", [(0, 3), (3,), (2, 0, 3)], ids=["row_87-empty_batch", "row_88-one_axis", "row_87"])
def test_inputs_that_have_features(shape: tuple[int, ...]) -> None:
    lazy, want = lm.LazyLinear(4, rngs=nnx.Rngs(0)), nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    out = lazy(array(*shape))
    assert out.shape == (*shape[:-1], 4)
    assert_same_bits(out, want(array(*shape)))
    assert_same_model(lazy, want)


@dataclasses.dataclass(frozen=True)
class Bad:
    """A first call that is refused, what its message says, and a call that must then work as if it were the first."""

    layer: Any
    bad: tuple[int, ...]
    text: str
    good: tuple[int, ...]
    explicit: Any
    dtype: Any = jnp.float32


def linear(r: nnx.Rngs) -> Any:
    return lm.LazyLinear(4, rngs=r)


REFUSED = {
    "row_89-no_axes": Bad(linear, (), "at least 1 axis", (2, 3), lambda r: nnx.Linear(3, 4, rngs=r)),
    "row_90-zero_features": Bad(linear, (2, 0), "in_features=0", (2, 3), lambda r: nnx.Linear(3, 4, rngs=r)),
    "row_91-zero_channels": Bad(lambda r: lm.LazyConv2d(4, 3, rngs=r), (1, 6, 6, 0), "in_features=0", (1, 6, 6, 2),
                                lambda r: nnx.Conv(2, 4, (3, 3), rngs=r)),
    "row_92-integers": Bad(linear, (2, 5), "i32[2,5]", (2, 3), lambda r: nnx.Linear(3, 4, rngs=r), jnp.int32),
    "row_93-rank": Bad(lambda r: lm.LazyBatchNorm2d(rngs=r), (4, 7), "an array of 4 axes", (4, 2, 2, 3),
                       lambda r: nnx.BatchNorm(3, rngs=r)),
    "row_95-groups": Bad(lambda r: lm.LazyConv2d(4, 3, feature_group_count=2, rngs=r), (1, 4, 4, 5),
                         "feature_group_count=2 divides, not 5", (1, 4, 4, 6),
                         lambda r: nnx.Conv(6, 4, (3, 3), feature_group_count=2, rngs=r)),
    "row_98-rank": Bad(lambda r: lm.LazyConv2d(4, 3, rngs=r), (5, 8), "3 or 4 axes", (1, 4, 4, 6),
                       lambda r: nnx.Conv(6, 4, (3, 3), rngs=r)),
    "row_103-unbatched": Bad(lambda r: lm.LazyInstanceNorm1d(rngs=r), (6, 5), "an array of 3 axes", (2, 6, 3),
                             lambda r: nnx.InstanceNorm(3, rngs=r)),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_refused_first_call_changes_nothing(case: Bad) -> None:
    layer, want = case.layer(nnx.Rngs(0)), case.explicit(nnx.Rngs(0))
    kind, before = type(layer), lm.state_dict(layer)
    with pytest.raises(lm.ShapeInferenceError) as error:
        layer(filled(spec(*case.bad, dtype=case.dtype)))
    assert isinstance(error.value, ValueError)
    message = str(error.value)
    assert case.text in message and kind.__name__ in message
    assert all(part in message for part in ("got:", "needed:", "write:"))
    assert type(layer) is kind and lm.is_lazy(layer)
    assert all(a is b for a, b in zip(lm.state_dict(layer).values(), before.values(), strict=True))
    x = array(*case.good)
    assert_same_bits(layer(x), want(x))
    assert_same_model(layer, want)


def test_a_zero_width_input_leaves_no_garbage() -> None:
    norm = lm.LazyLayerNorm(rngs=nnx.Rngs(0))
    with pytest.raises(lm.ShapeInferenceError, match="num_features=0"):
        norm(array(2, 0))
    assert lm.uninitialized_paths(norm) == ["scale", "bias"]


def test_batch_norm_of_a_single_row_is_flax_s() -> None:
    lazy, want, x = lm.LazyBatchNorm1d(rngs=nnx.Rngs(0)), nnx.BatchNorm(3, rngs=nnx.Rngs(0)), array(1, 3)
    assert_same_bits(lazy(x), want(x))
    np.testing.assert_allclose(lazy.mean[...], 0.01 * x[0], rtol=1e-6)
    np.testing.assert_allclose(lazy.var[...], 0.99, rtol=1e-6)


def test_groups_that_do_not_divide_the_output() -> None:
    with pytest.raises(ValueError):
        nnx.Conv(4, 5, (3, 3), feature_group_count=2, rngs=nnx.Rngs(0))(array(1, 4, 4, 4))
    with pytest.raises(lm.LazyError):  # at construction or at the first call, and lazy still
        layer = lm.LazyConv2d(5, 3, feature_group_count=2, rngs=nnx.Rngs(0))
        try:
            layer(array(1, 4, 4, 4))
        finally:
            assert lm.is_lazy(layer)


@pytest.mark.parametrize("lazy_cls, shape, rank", [(lm.LazyConv2d, (8, 8, 3), 2), (lm.LazyConv1d, (3, 16, 5), 1),
                                                   (lm.LazyConv1d, (16, 5), 1)],
                         ids=["row_97-unbatched", "row_99-three_axes_are_a_batch", "row_97-unbatched_1d"])
def test_convolution_ranks(lazy_cls: Any, shape: tuple[int, ...], rank: int) -> None:
    lazy, want = lazy_cls(4, 3, rngs=nnx.Rngs(0)), nnx.Conv(shape[-1], 4, (3,) * rank, rngs=nnx.Rngs(0))
    x = array(*shape)
    out = lazy(x)
    assert out.shape == (*shape[:-1], 4)
    assert_same_bits(out, want(x))
    assert_same_model(lazy, want)


def test_batch_norm_evaluated_first() -> None:
    lazy, x = lm.LazyBatchNorm(use_running_average=True, epsilon=0.0, rngs=nnx.Rngs(0)), array(4, 3)
    assert_same_bits(lazy(x), x)  # mean 0, variance 1
    assert_same_bits(lazy.mean[...], jnp.zeros(3))
    assert_same_bits(lazy.var[...], jnp.ones(3))


def test_batch_norm_without_scale_and_bias_still_knows_its_size() -> None:
    lazy = lm.LazyBatchNorm1d(use_scale=False, use_bias=False, rngs=nnx.Rngs(0))
    lazy(array(4, 3))
    assert type(lazy) is nnx.BatchNorm and lazy.num_features == 3
    assert shapes_of(lazy) == {"mean": (3,), "var": (3,)}


def ramp(key: Any, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return jnp.arange(shape[0], dtype=dtype)


def test_instance_norm_has_flax_s_defaults() -> None:
    lazy, want = lm.LazyInstanceNorm(rngs=nnx.Rngs(0)), nnx.InstanceNorm(5, scale_init=ramp, rngs=nnx.Rngs(0))
    assert lm.load_state_dict(lazy, lm.state_dict(want)) == ([], [], [])
    assert_same_model(lazy, want)


def test_loaded_statistics_are_used_and_kept() -> None:
    lazy = lm.LazyBatchNorm1d(use_running_average=True, epsilon=0.0, rngs=nnx.Rngs(0))
    entries = {"mean": jnp.array([1.0, 2.0]), "var": jnp.array([4.0, 16.0]), "scale": jnp.array([2.0, 4.0]),
               "bias": jnp.array([0.5, -0.5])}
    lm.load_state_dict(lazy, entries)
    assert_same_bits(lazy(jnp.array([[3.0, 6.0]])), jnp.array([[2.5, 3.5]]))  # (x - mean) / sqrt(var) * scale + bias
    assert_same_bits({k: lm.state_dict(lazy)[k] for k in entries}, entries)
