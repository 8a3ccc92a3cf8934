"""Sizes that have a default: unknown while the caller has not given them, for ``infer`` or a file may say another."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from deciding import Default
from flax import nnx
from helpers import assert_same_model

import lazymods as lm


class Heads(nnx.Module):
    """Takes other numbers of heads than its default, but not at every width."""

    def __init__(self, n: int, width: int = 12, heads: int = 4, *, rngs: nnx.Rngs) -> None:
        if width % heads:
            raise ValueError(f"{width} features in {heads} heads")
        self.q = nnx.LinearGeneral(n, (heads, width // heads), rngs=rngs)
        self.out = nnx.Linear(width, 3, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(self.q(x).reshape(*x.shape[:-1], -1))


class Optional(nnx.Module):
    """A width that may be left out, options that are no sizes, and sizes that nothing follows from."""

    def __init__(
        self,
        n: int,
        hidden: int | None = None,
        kernel: tuple[int, int] = (3, 3),
        dtype: Any = None,
        rate: float = 0.5,
        use_bias: bool = True,
        name: str = "a",
        *,
        rngs: nnx.Rngs,
    ) -> None:
        self.a = nnx.Linear(4, hidden or 8, use_bias=use_bias, dtype=dtype, rngs=rngs)
        self.b = nnx.Conv(n, 5, kernel, rngs=rngs)
        self.rate, self.name = rate, name


class Fixed(nnx.Module):
    """Takes nothing but its default."""

    def __init__(self, n: int, m: int = 3, *, rngs: nnx.Rngs) -> None:
        if m != 3:
            raise ValueError("m is 3")
        self.fc = nnx.Linear(n, m, rngs=rngs)


def n(config: Any, x: Any) -> dict[str, int]:
    return {"n": x.shape[-1]}


LazyDefault = lm.lazy(Default, infer=n)


def shapes(layer: Any) -> dict[str, Any]:
    return {k: v.shape for k, v in lm.state_dict(layer).items()}


CASES: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "none given": (Default, {}, {"fc.kernel": (None, None), "fc.bias": (None,), "bias": (None,)}),
    "one given": (Default, {"m": 2}, {"fc.kernel": (None, 2), "fc.bias": (2,), "bias": (None,)}),
    "all given": (Default, {"n": 3, "m": 2}, {"fc.kernel": (3, 2), "fc.bias": (2,), "bias": (3,)}),
    "divided": (
        Heads,
        {},
        {"q.kernel": (None, None, None), "q.bias": (None, None), "out.kernel": (None, 3), "out.bias": (3,)},
    ),
    "divided, one given": (
        Heads,
        {"width": 12},
        {"q.kernel": (None, None, None), "q.bias": (None, None), "out.kernel": (12, 3), "out.bias": (3,)},
    ),
    "optional": (
        Optional,
        {},
        {"a.kernel": (4, None), "a.bias": (None,), "b.kernel": (None, None, None, 5), "b.bias": (5,)},
    ),
    "optional, given": (
        Optional,
        {"hidden": None, "kernel": (3, 3)},
        {"a.kernel": (4, 8), "a.bias": (8,), "b.kernel": (3, 3, None, 5), "b.bias": (5,)},
    ),
    "no other": (Fixed, {}, {"fc.kernel": (None, 3), "fc.bias": (3,)}),
}


@pytest.mark.parametrize("name", CASES)
def test_what_follows_from_a_default_is_not_known(name: str) -> None:
    cls, given, want = CASES[name]
    layer = lm.lazy(cls, infer=n)(**given, rngs=nnx.Rngs(0))
    assert shapes(layer) == want


def test_copies_know_the_same() -> None:
    layer = LazyDefault(m=2, rngs=nnx.Rngs(0))
    for copied in (copy.deepcopy(layer), nnx.clone(layer), pickle.loads(pickle.dumps(layer))):
        assert shapes(copied) == {"fc.kernel": (None, 2), "fc.bias": (2,), "bias": (None,)}


def test_a_count_of_numbers_is_refused() -> None:
    layer = LazyDefault(rngs=nnx.Rngs(0))
    with pytest.raises(lm.UninitializedError, match=r"a use of its size, while .* of shape \(\?, \?\)"):
        _ = layer.fc.kernel.size


def test_a_shape_by_hand_that_does_not_tell_the_sizes_is_refused() -> None:
    layer = LazyDefault(rngs=nnx.Rngs(0))
    with pytest.raises(lm.ShapeInferenceError) as caught:
        layer.fc.kernel.materialize((5, 2))
    assert str(caught.value).splitlines() == [
        "fc.kernel of LazyDefault",
        "  got:    shape (5, 2)",
        "  needed: sizes of Default that follow from this shape alone; it makes (3, 2) with n=3, m=2",
        "  write:  lm.materialize(model, jax.ShapeDtypeStruct(x.shape, x.dtype))  # or model(x), first",
    ]
    layer(jnp.ones((2, 5)))
    assert_same_model(layer, Default(5, rngs=nnx.Rngs(0)))


class Square(nnx.Module):
    """As many numbers as no formula tells."""

    def __init__(self, n: int, *, rngs: nnx.Rngs) -> None:
        self.w = nnx.Param(nnx.initializers.lecun_normal()(rngs.params(), (n * n, 3)))

    def __call__(self, x: jax.Array) -> jax.Array:
        return (x[:, :, None] * x[:, None, :]).reshape(x.shape[0], -1) @ self.w


def test_a_shape_by_hand_that_no_formula_tells_is_refused() -> None:
    layer = lm.lazy(Square, infer=n)(rngs=nnx.Rngs(0))
    with pytest.raises(lm.ShapeInferenceError, match="sizes of Square that follow from this shape alone\n"):
        layer.w.materialize((16, 3))
    layer(jnp.ones((2, 4)))
    assert_same_model(layer, Square(4, rngs=nnx.Rngs(0)))
