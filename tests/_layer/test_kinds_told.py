"""Kinds of Variables whose bases are told of their subclasses: their placeholders are no news."""

from __future__ import annotations

import copy
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import lazymods as lm

REGISTER: list[tuple[str, type, str]] = []  # what a base was told
X = jnp.ones((2, 4))


def width(config: Any, x: Any) -> dict[str, int]:
    return {"n": x.shape[-1]}


class OwnKind(nnx.Param[Any]):
    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        REGISTER.append((cls.__name__, cls, "kind"))


class SubKind(OwnKind): ...


def test_a_kind_of_variables_is_not_told_of_its_placeholder() -> None:
    class Holds(nnx.Module):
        def __init__(self, n: int) -> None:
            self.w = SubKind(jnp.ones((n, 3)))

        def __call__(self, x: jax.Array) -> jax.Array:
            return x @ self.w[...]

    before = REGISTER.copy()
    layer = lm.lazy(Holds, infer=width)()
    assert isinstance(layer.w, SubKind) and type(layer.w).__name__ == "UninitializedSubKind"
    assert jax.tree.leaves(copy.deepcopy(layer.w)) == []
    np.testing.assert_array_equal(nnx.jit(lambda m, x: m(x))(layer, X), jnp.full((2, 3), 4.0))
    assert type(layer.w) is SubKind and before == REGISTER
