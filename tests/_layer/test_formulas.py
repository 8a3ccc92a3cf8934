"""Layers that differ in sizes alone: what is computed of them is what Flax's constructor makes."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

import lazymods as lm
from lazymods._graph import STATE

LINEAR: list[dict[str, Any]] = [
    {},
    {"use_bias": False},
    {"param_dtype": jnp.bfloat16},
    {"kernel_init": nnx.initializers.orthogonal(), "bias_init": nnx.initializers.normal()},
]
CONV: list[dict[str, Any]] = [
    {"kernel_size": (3,)},
    {"kernel_size": (3, 2), "use_bias": False, "strides": 2},
    {"kernel_size": (2, 2), "padding": "VALID", "param_dtype": jnp.float16},
]
NORM: list[dict[str, Any]] = [{}, {"use_bias": False}, {"use_scale": False, "param_dtype": jnp.float16}]

# the lazy class, Flax's, the argument that is inferred, the argument that scales, other arguments
Row = tuple[Callable[..., Any], Callable[..., Any], str, str | None, list[dict[str, Any]]]
ROWS: list[Row] = [
    (lm.LazyLinear, nnx.Linear, "in_features", "out_features", LINEAR),
    (lm.LazyConv, nnx.Conv, "in_features", "out_features", [*CONV, {"kernel_size": (3,), "feature_group_count": 3}]),
    (lm.LazyConvTranspose, nnx.ConvTranspose, "in_features", "out_features", [*CONV, {"kernel_size": 2}]),
    (lm.LazyBatchNorm, nnx.BatchNorm, "num_features", None, NORM),
    (lm.LazyLayerNorm, nnx.LayerNorm, "num_features", None, NORM),
    (lm.LazyRMSNorm, nnx.RMSNorm, "num_features", None, [{}, {"param_dtype": jnp.float16}]),
]
CASES = [(*row[:4], options) for row in ROWS for options in row[4]]


def input_of(options: dict[str, Any], features: int) -> jax.Array:
    kernel = options.get("kernel_size", ())
    axes = (5,) * (1 if isinstance(kernel, int) else len(kernel))
    return jnp.zeros((2, *axes, features), options.get("param_dtype", jnp.float32))


@pytest.mark.slow
@pytest.mark.parametrize(("lazy", "flax", "inferred", "scaling", "options"), CASES)
@settings(max_examples=4, deadline=None)
@given(data=st.data())
def test_what_is_computed_at_any_sizes_is_what_flax_makes(
    lazy: Any, flax: Any, inferred: str, scaling: str | None, options: dict[str, Any], data: st.DataObject
) -> None:
    groups = options.get("feature_group_count", 1)
    features = groups * data.draw(st.integers(1, 40))
    given_sizes = {} if scaling is None else {scaling: groups * data.draw(st.integers(1, 40))}
    layer = lazy(**given_sizes, **options, rngs=nnx.Rngs(3))
    want = flax(**{inferred: features}, **given_sizes, **options, rngs=nnx.Rngs(3))
    with jax.numpy_dtype_promotion("standard"):  # BatchNorm's statistics are float32
        lm.materialize(layer, input_of(options, features))
    assert type(layer) is type(want)
    assert nnx.graphdef(layer) == nnx.graphdef(want)
    assert vars(layer).keys() == vars(want).keys()
    got, expected = nnx.to_flat_state(nnx.state(layer)), nnx.to_flat_state(nnx.state(want))
    for (path, value), (_, other) in zip(got, expected, strict=True):
        assert value.dtype == other.dtype, path
        np.testing.assert_array_equal(np.asarray(value, np.float32), np.asarray(other, np.float32), str(path))


@pytest.mark.parametrize(("lazy", "scaling", "options"), [(row[0], row[3], row[4][0]) for row in ROWS])
def test_the_constructor_of_these_classes_is_not_read_for_every_size(
    lazy: Any, scaling: str | None, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(size: int) -> Any:
        return lazy(**({} if scaling is None else {scaling: size}), **options, rngs=nnx.Rngs(0))

    build(6)(input_of(options, 4))
    layer = build(1009)
    cls = type(layer).cls_to_become
    monkeypatch.setattr(cls, "__init__", None)  # a call of it would fail
    layer(input_of(options, 1013))
    assert type(layer) is cls


class Stepped(nnx.Module):
    """Decides by its sizes."""

    def __init__(self, features: int, width: int, *, rngs: nnx.Rngs) -> None:
        self.kernel = nnx.Param(nnx.initializers.normal()(rngs.params(), (features, width)))
        self.wide = width > 100
        if features > 100:
            self.bias = nnx.Param(jnp.zeros(width))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x @ self.kernel


LazyStepped = lm.lazy(Stepped, infer=lambda config, x: {"features": x.shape[-1]})


@pytest.mark.parametrize("features", [3, 300])
@pytest.mark.parametrize("width", [3, 300])
def test_the_constructor_of_any_other_class_is_read_at_its_sizes(features: int, width: int) -> None:
    layer = LazyStepped(width=width, rngs=nnx.Rngs(0))
    layer(jnp.zeros((1, features)))
    want = Stepped(features, width, rngs=nnx.Rngs(0))
    assert nnx.graphdef(layer) == nnx.graphdef(want)
    np.testing.assert_array_equal(layer.kernel[...], want.kernel[...])


@pytest.mark.parametrize("size", [True, np.int64(4), 4.0, 0, -1, "4", None])
def test_an_unusual_size_is_taken_or_refused_as_flax_does(size: Any) -> None:
    def outcome(build: Callable[[], Any]) -> Any:
        try:
            made = build()
        except Exception:
            return None
        return made.kernel.shape, type(made.out_features), made.out_features

    def lazy() -> Any:
        layer = lm.LazyLinear(size, rngs=nnx.Rngs(0))
        layer(jnp.zeros((2, 3)))
        return layer

    assert outcome(lazy) == outcome(lambda: nnx.Linear(3, size, rngs=nnx.Rngs(0)))


def test_a_layer_of_a_family_is_pickled_and_copied_with_what_it_knows() -> None:
    import copy
    import pickle

    layer = lm.LazyLinear(21, rngs=nnx.Rngs(0))
    for other in (pickle.loads(pickle.dumps(layer)), copy.deepcopy(layer), nnx.clone(layer)):
        assert vars(other)[STATE].spec == vars(layer)[STATE].spec
        other(jnp.zeros((2, 3)))
        np.testing.assert_array_equal(other.kernel[...], nnx.Linear(3, 21, rngs=nnx.Rngs(0)).kernel[...])
