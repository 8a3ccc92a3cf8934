"""Hooks that are registered or removed inside an nnx transform, on a module that is its argument."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import lazymods as lm


class Net(nnx.Module):
    """A layer in a module."""

    def __init__(self) -> None:
        self.layer = nnx.Linear(2, 3, rngs=nnx.Rngs(0))

    def __call__(self, x: Any) -> Any:
        return self.layer(x).sum()


X = jnp.ones((4, 2))
PLAIN = float(Net()(X))
Run = Callable[[Any, Any], Any]


def _nested(run: Run) -> Run:
    inner = nnx.jit(run)
    return nnx.jit(lambda model, x: inner(model, x))


def _value_and_grad(run: Run) -> Run:
    return lambda model, x: nnx.value_and_grad(run)(model, x)[0]


TRANSFORMS: dict[str, Callable[[Run], Run]] = {
    "jit": nnx.jit,
    "remat": nnx.remat,
    "nested": _nested,
    "grad": _value_and_grad,
    "jit-grad": lambda run: nnx.jit(_value_and_grad(run)),
}
each_transform = pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)


def assert_plain(model: Any) -> None:
    assert nnx.graphdef(model) == nnx.graphdef(Net())
    np.testing.assert_allclose(model(X), PLAIN, rtol=1e-6)


@each_transform
def test_a_hook_that_removes_itself(transform: Callable[[Run], Run]) -> None:
    model = Net()

    def once(module: Any, args: Any, output: Any) -> Any:
        handle.remove()
        return 2 * output

    handle = lm.register_forward_hook(model.layer, once)
    run = transform(lambda model, x: model(x))
    np.testing.assert_allclose(run(model, X), 2 * PLAIN, rtol=1e-6)
    assert_plain(model)
    np.testing.assert_allclose(run(model, X), PLAIN, rtol=1e-6)
    assert_plain(model)


@each_transform
def test_a_hook_that_stays(transform: Callable[[Run], Run]) -> None:
    model = Net()
    handles = []

    def run(model: Any, x: Any) -> Any:
        if not handles:
            handles.append(lm.register_forward_hook(model.layer, lambda module, args, output: 2 * output))
        return model(x)

    np.testing.assert_allclose(transform(run)(model, X), 2 * PLAIN, rtol=1e-6)
    np.testing.assert_allclose(model(X), 2 * PLAIN, rtol=1e-6)
    np.testing.assert_allclose(transform(run)(model, X), 2 * PLAIN, rtol=1e-6)
    handles[0].remove()
    assert_plain(model)


@each_transform
def test_a_hook_for_a_while(transform: Callable[[Run], Run]) -> None:
    model = Net()

    def run(model: Any, x: Any) -> Any:
        with lm.register_forward_hook(model.layer, lambda module, args, output: 2 * output):
            return model(x)

    for _ in range(2):
        np.testing.assert_allclose(transform(run)(model, X), 2 * PLAIN, rtol=1e-6)
        assert_plain(model)
