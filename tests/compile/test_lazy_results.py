"""Lazy models that a compiled function returns, copies, looks at or makes, and does not call."""

from collections.abc import Callable
from typing import Any

import jax
import pytest
from flax import nnx
from helpers import MLP, array, assert_same_bits, lazy_mlp, plain_mlp
from jax.core import Tracer

import lazymods as lm

X = array(5, 8)
WAYS: dict[str, Callable[[Any], Any]] = {
    "returned": lambda model: lm.jit(lambda m: m)(model),
    "cloned": lambda model: lm.jit(lambda m: nnx.clone(m))(model),
    "split": lambda model: nnx.merge(*lm.jit(lambda m: nnx.split(m))(model)),
    "not read": lambda model: (lm.jit(lambda m, x: x)(model, X), model)[1],
    "a layer called": lambda model: (lm.jit(lambda m, x: m.fc1(x))(model, X), model)[1],
}


@pytest.mark.parametrize("through", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("make", [lazy_mlp, plain_mlp])
def test_a_model_stays_usable(make: Any, through: Any) -> None:
    model = make()
    found = through(model)
    assert_same_bits(found(X), plain_mlp()(X))
    assert_same_bits(model(X), plain_mlp()(X))


def test_an_attribute_beside_lazy_layers() -> None:
    def note(model: Any, x: jax.Array) -> None:
        model.seen = nnx.Variable(x)

    model: Any = lazy_mlp()
    lm.jit(note)(model, X)
    assert_same_bits(model.seen[...], X)
    assert lm.uninitialized_paths(model) == ["fc1.kernel", "fc1.bias", "fc2.kernel", "fc2.bias"]
    assert_same_bits(model(X), plain_mlp()(X))


# ---------------------------------------------------------------- made in the function


def test_a_lazy_model_that_a_function_makes_has_keys_of_its_own() -> None:
    made = lm.jit(lambda: lazy_mlp())
    want = nnx.jit(lambda: plain_mlp())()
    for _ in range(2):
        model = made()
        assert len(lm.uninitialized_paths(model)) == 4
        assert not any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(nnx.state(model)))
        assert_same_bits(model(X), want(X))
        assert_same_bits(nnx.state(model), nnx.state(want))


def test_keys_that_come_from_an_argument_are_those_of_each_call() -> None:
    made = lm.jit(lambda key: MLP(rngs=nnx.Rngs(key)))
    explicit = nnx.jit(lambda key: MLP(8, rngs=nnx.Rngs(key)))
    for seed in (0, 1):
        key = jax.random.key(seed)
        assert_same_bits(made(key)(X), explicit(key)(X))


@pytest.mark.parametrize("size", ["call", "materialize", "lm.jit"])
def test_a_lazy_layer_that_a_function_attaches(size: str) -> None:
    def attach(make: Callable[[nnx.Rngs], Any]) -> Callable[..., None]:
        def attach(model: Any, rngs: nnx.Rngs) -> None:
            model.head = make(rngs)

        return attach

    model: Any = lazy_mlp()
    twin: Any = plain_mlp()
    rngs, others = nnx.Rngs(5), nnx.Rngs(5)
    mine = lm.jit(attach(lambda r: lm.LazyLinear(3, rngs=r)))
    flax = nnx.jit(attach(lambda r: nnx.Linear(8, 3, rngs=r)))
    for _ in range(2):  # the second time in place of the first
        mine(model, rngs)
        flax(twin, others)
        if size == "materialize":
            lm.materialize(model.head, X)
        got = lm.jit(lambda m, x: m.head(x))(model, X) if size == "lm.jit" else model.head(X)
        want = nnx.jit(lambda m, x: m.head(x))(twin, X) if size == "lm.jit" else twin.head(X)
        assert_same_bits(got, want)
        assert_same_bits(nnx.state(model.head), nnx.state(twin.head))
    assert_same_bits(nnx.state(rngs), nnx.state(others))
