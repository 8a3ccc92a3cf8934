"""Lazy layers that the loss does not reach: what has all its sizes is made, what has not is named, nothing is lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import lazymods as lm

X = jnp.ones((2, 4))


class Net(nnx.Module):
    """Two layers, of which one is not called."""

    def __init__(self, fc: Any, unused: Any) -> None:
        self.fc, self.unused = fc, unused

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.fc(x)


def net(sized: bool) -> Any:
    rngs = nnx.Rngs(0)
    fc = lm.LazyLinear(3, rngs=rngs)
    return Net(fc, lm.LazyEmbed(5, 2, rngs=rngs) if sized else lm.LazyLinear(2, rngs=rngs))


def explicit() -> Any:
    rngs = nnx.Rngs(0)
    return Net(nnx.Linear(4, 3, rngs=rngs), nnx.Embed(5, 2, rngs=rngs))


def loss(model: Any) -> jax.Array:
    return model(X).sum()


def assert_same(model: Any, want: Any) -> None:
    assert nnx.graphdef(model) == nnx.graphdef(want)
    for (path, a), (_, b) in zip(*(nnx.to_flat_state(nnx.state(m)) for m in (model, want)), strict=True):
        np.testing.assert_array_equal(a.get_raw_value(), b.get_raw_value(), err_msg=str(path))


SIZE: dict[str, Callable[[Any], Any]] = {
    "call": lambda model: model(X),
    "materialize": lambda model: lm.materialize(model, X),
    "lm.jit": lambda model: lm.jit(lambda m, x: m(x))(model, X),
}


@pytest.mark.parametrize("way", SIZE)
@pytest.mark.parametrize("sized", [True, False])
def test_what_is_not_reached_stays_lazy(way: str, sized: bool) -> None:
    model = net(sized)
    report = SIZE[way](model)
    names = ["unused.embedding"] if sized else ["unused.kernel", "unused.bias"]
    assert lm.uninitialized_paths(model) == names and not lm.is_lazy(model.fc)
    if way == "materialize":
        assert list(report.unreached) == ["unused"]


def trained(model: Any, optimizer: Any, compiled: bool) -> Any:
    def step(model: Any, optimizer: Any) -> jax.Array:
        value, gradient = nnx.value_and_grad(loss)(model)
        optimizer.update(model, gradient)
        return value

    step = lm.jit(step) if compiled else step
    return [float(step(model, optimizer)) for _ in range(3)]


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [True, False])
def test_a_lazy_optimizer_makes_what_has_all_its_sizes(compiled: bool) -> None:
    model, want, tx = net(True), explicit(), optax.sgd(1e-2, momentum=0.9)
    optimizer = lm.LazyOptimizer(model, tx, wrt=nnx.Param)
    other = nnx.Optimizer(want, tx, wrt=nnx.Param)
    if not compiled:
        lm.materialize(model, X)
    assert trained(model, optimizer, compiled) == trained(want, other, compiled)
    assert_same(model, want)
    assert_same(optimizer, other)


@pytest.mark.parametrize("compiled", [True, False])
def test_a_lazy_optimizer_names_what_has_no_sizes(compiled: bool) -> None:
    model = net(False)
    optimizer = lm.LazyOptimizer(model, optax.sgd(1e-2, momentum=0.9), wrt=nnx.Param)
    lm.materialize(model, X)
    kernel = np.asarray(model.fc.kernel)
    with pytest.raises(lm.UninitializedError) as caught:
        trained(model, optimizer, compiled)
    assert "unused.kernel" in str(caught.value)
    np.testing.assert_array_equal(model.fc.kernel, kernel)
    assert lm.is_lazy(optimizer) and lm.is_lazy(model.unused)
    model.unused(jnp.ones((2, 3)))  # called once, it is trained with the rest
    assert len(trained(model, optimizer, compiled)) == 3


def test_an_optimizer_of_flax_names_it() -> None:
    for sized in (True, False):
        model = net(sized)
        lm.materialize(model, X)
        with pytest.raises(lm.UninitializedError, match=r"unused\."):
            nnx.Optimizer(model, optax.sgd(1e-2, momentum=0.9), wrt=nnx.Param)
        del model.unused  # removed, it is an ordinary model
        nnx.Optimizer(model, optax.sgd(1e-2, momentum=0.9), wrt=nnx.Param)


@pytest.mark.parametrize("sized", [True, False])
def test_a_gradient_by_what_is_not_there_is_refused(sized: bool) -> None:
    model = net(sized)
    lm.materialize(model, X)
    with pytest.raises(lm.UninitializedError):
        nnx.grad(lambda m: m.unused.kernel[...].sum() if not sized else m.unused.embedding[...].sum())(model)
    gradient = nnx.grad(loss, argnums=nnx.DiffState(0, nnx.PathContains("fc")))(model)
    want = nnx.grad(loss, argnums=nnx.DiffState(0, nnx.PathContains("fc")))(explicit())
    np.testing.assert_array_equal(gradient["fc"]["kernel"][...], want["fc"]["kernel"][...])


@pytest.mark.parametrize("sized", [True, False])
@pytest.mark.parametrize("suffix", [".safetensors", ".npz", ""])
def test_a_save_names_it(sized: bool, suffix: str, tmp_path: Path) -> None:
    model = net(sized)
    lm.materialize(model, X)
    with pytest.raises(lm.UninitializedError, match=r"unused\."):
        lm.save(model, tmp_path / f"model{suffix}")
    assert list(tmp_path.iterdir()) == []
