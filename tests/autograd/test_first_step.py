"""The first steps of a model that was lazy equal the explicit model's, bit for bit: with hooks, with each optimizer."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import lazymods as lm

ag = lm.autograd
X = jax.random.normal(jax.random.key(3), (6, 4))
OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "adam": lambda: optax.adam(1e-2),
    "sgd": lambda: optax.sgd(0.1, momentum=0.9),
    "adamw": lambda: optax.adamw(1e-2),
    "rmsprop": lambda: optax.rmsprop(1e-2, momentum=0.9),
    "clipped, scheduled": lambda: optax.chain(
        optax.clip_by_global_norm(1.0), optax.adam(optax.cosine_decay_schedule(1e-2, 10))
    ),
    "amsgrad": lambda: optax.amsgrad(1e-2),
    "nadam": lambda: optax.nadam(1e-2),
    "lion": lambda: optax.lion(1e-2),
    "lamb": lambda: optax.lamb(1e-2),
    "adafactor": lambda: optax.adafactor(1e-2),
    "adagrad": lambda: optax.adagrad(1e-2),
}
RARE = [pytest.mark.exhaustive, pytest.mark.rare]


class Net(nnx.Module):
    """Two linear layers, statistics and random state."""

    def __init__(self, lazy: bool) -> None:
        rngs = nnx.Rngs(0)
        self.first: Any = lm.LazyLinear(5, rngs=rngs) if lazy else nnx.Linear(4, 5, rngs=rngs)
        self.norm: Any = lm.LazyBatchNorm(rngs=rngs) if lazy else nnx.BatchNorm(5, rngs=rngs)
        self.drop = nnx.Dropout(0.3, rngs=rngs)
        self.last: Any = lm.LazyLinear(2, rngs=rngs) if lazy else nnx.Linear(5, 2, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(jnp.tanh(self.drop(self.norm(self.first(x)))))


def with_hooks(model: Net) -> Net:
    ag.register_hook(model.first.kernel, lambda g: g * 2)
    ag.register_hook(model.last.bias, lambda g: g.clip(-0.1, 0.1))
    ag.register_full_backward_hook(model.norm, lambda m, gi, go: (gi[0] * 0.7,))
    ag.register_full_backward_pre_hook(model.last, lambda m, go: (go[0] + 0.01,))
    ag.requires_grad_(model.last.kernel, False)
    return model


def train(model: Net, optimizer: Any) -> Any:
    value, gradient = ag.value_and_grad(lambda m: ((m(X) - 1) ** 2).mean())(model)
    optimizer.update(model, gradient)
    return value


@pytest.fixture(autouse=True)
def standard_promotion() -> Any:
    """Optax's adam raises a Python float to an int32 count, which strict promotion refuses."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="a GPU rounds each compilation of a product differently")
@pytest.mark.parametrize("how", ["materialize", "call", "lm.jit"])
@pytest.mark.parametrize("name", [n if n in ("adam", "sgd") else pytest.param(n, marks=RARE) for n in OPTIMIZERS])
def test_the_first_steps_are_the_explicit_models(name: str, how: str) -> None:
    lazy, explicit = with_hooks(Net(True)), with_hooks(Net(False))
    tx = OPTIMIZERS[name]()
    optimizers = lm.LazyOptimizer(lazy, tx, wrt=lm.trainable), nnx.Optimizer(explicit, tx, wrt=lm.trainable)
    if how == "materialize":
        lm.materialize(lazy, X)
    if how == "call":
        for model in (lazy, explicit):
            model(X)  # the random state goes on
    jit = lm.jit if how == "lm.jit" else nnx.jit
    steps = jit(train), jit(train)
    for _ in range(2):
        a, b = steps[0](lazy, optimizers[0]), steps[1](explicit, optimizers[1])
        np.testing.assert_array_equal(a, b)
    for pair in ((lazy, explicit), optimizers):
        got, want = (jax.tree.leaves(nnx.state(x)) for x in pair)
        assert len(got) == len(want)
        for a, b in zip(got, want, strict=True):
            if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
                a, b = jax.random.key_data(a), jax.random.key_data(b)
            np.testing.assert_array_equal(a, b)
