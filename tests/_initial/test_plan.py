"""What infer_shapes shows is the plan by which materialize makes the values."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from helpers import assert_same_bits, spec
from jax.nn import initializers as I  # noqa: N812

import lazymods as lm


def model() -> Any:
    return nnx.Sequential(
        lm.LazyLinear(30, rngs=nnx.Rngs(0)),
        lm.LazyLinear(50, kernel_init=I.normal(), bias_init=I.constant(0.5), rngs=nnx.Rngs(1)),
        lm.LazyLinear(70, kernel_init=I.orthogonal(), rngs=nnx.Rngs(2)),
        lm.LazyLinear(90, kernel_init=I.he_normal(), rngs=nnx.Rngs(3)),
    )


def test_each_parameter_says_how_it_is_made() -> None:
    report = lm.infer_shapes(model(), spec(2, 4))
    assert [[p.init for p in row.parameters] for row in report.rows] == [
        ["lecun_normal, kernel 1", "zeros"],
        ["normal(stddev=0.01), kernel 2", "all 0.5"],
        ["orthogonal(scale=1)", "zeros"],
        ["he_normal, kernel 1", "zeros"],
    ]
    assert report.kernels == 2
    text = report.table(verbose=True)
    assert "lecun_normal," in text and "kernel 1" in text and "2 compiled kernels for all shapes" in text


def test_materialize_returns_the_plan_that_it_followed() -> None:
    expected = lm.infer_shapes(model(), spec(2, 4))
    done = lm.materialize(model(), spec(2, 4))
    assert [r.parameters for r in done.rows] == [r.parameters for r in expected.rows]
    assert done.kernels == expected.kernels


def test_what_has_a_value_is_not_planned() -> None:
    ready = model()
    lm.materialize(ready, spec(2, 4))
    report = lm.infer_shapes(ready, spec(2, 4))
    assert {p.init for row in report.rows for p in row.parameters} == {""}
    assert report.kernels == 0 and "kernel" not in report.footer(verbose=True)


def test_keys_of_another_kind_are_drawn_from_no_kernel() -> None:
    layer = lm.LazyLinear(3, rngs=nnx.Rngs(jax.random.key(0, impl="rbg")))
    assert [p.init for p in lm.infer_shapes(layer, spec(2, 4)).rows[0].parameters] == ["lecun_normal", "zeros"]


class Scaled(lm.LazyModuleMixin, nnx.Module):
    """Written by hand."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.w = lm.UninitializedParameter(init=I.lecun_normal(), key=rngs.params())

    def initialize_parameters(self, x: Any) -> None:
        self.w.materialize((x.shape[-1], 4))

    def __call__(self, x: Any) -> Any:
        return x @ self.w


def test_a_layer_written_by_hand_draws_from_the_kernels_too() -> None:
    for width in (3, 300):
        layer = Scaled(rngs=nnx.Rngs(0))
        layer(jnp.zeros((2, width)))
        key = nnx.Rngs(0).params()
        assert_same_bits(layer.w.get_value(), I.lecun_normal()(key, (width, 4), jnp.float32))


def test_looking_at_the_plan_calls_no_initializer_of_a_user() -> None:
    calls = []

    def init(key: Any, shape: Any, dtype: Any) -> Any:
        calls.append(shape)
        return jax.random.normal(key, shape, dtype) @ jnp.eye(shape[1], dtype=dtype)

    layer = lm.LazyLinear(30, kernel_init=init, rngs=nnx.Rngs(0))
    report = lm.infer_shapes(layer, spec(2, 4))
    assert calls == [] and report.rows[0].parameters[0].init == "init"
    lm.materialize(layer, spec(2, 4))
    assert calls == [(4, 30)]
    assert_same_bits(layer.kernel.get_value(), init(nnx.Rngs(0).params(), (4, 30), jnp.float32))
