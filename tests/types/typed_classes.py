"""The types of ``lm.lazy``: the class's own instances, made from arguments by keyword."""
# pyright: reportUnnecessaryTypeIgnoreComment=true

from typing import assert_type

import jax
from flax import nnx

import lazymods as lm


class Gate(nnx.Module):
    def __init__(self, features: int, *, rngs: nnx.Rngs) -> None:
        self.features = features
        self.linear = nnx.Linear(features, features, rngs=rngs)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return x, self.linear(x)


LazyGate = lm.lazy(Gate, infer=lambda config, x: {"features": x.shape[-1]})
LazyDense = lm.lazy(nnx.Linear, infer=lambda config, x: {"in_features": x.shape[-1]})


def instances(rngs: nnx.Rngs, x: jax.Array) -> None:
    gate = LazyGate(rngs=rngs)
    assert_type(gate, Gate)
    assert_type(gate.features, int)
    assert_type(gate(x), tuple[jax.Array, jax.Array])
    assert_type(LazyDense(out_features=5, rngs=rngs), nnx.Linear)
    assert_type(LazyGate.__name__, str)
    assert_type(LazyGate.cls_to_become, type[Gate])
    assert_type(isinstance(gate, LazyGate), bool)


def wrong(rngs: nnx.Rngs) -> None:
    LazyGate(3, rngs=rngs)  # type: ignore[call-arg]
    LazyGate(rngs=rngs).feature  # type: ignore[attr-defined]  # noqa: B018
    lm.lazy(int, infer=lambda config, x: {})  # type: ignore[type-var]
    lm.lazy(Gate)  # type: ignore[call-arg]
    linear: nnx.Linear = LazyGate(rngs=rngs)  # type: ignore[assignment]
    del linear
