"""Gradients in several threads, of one model and of models that share parameters; hooks come and go meanwhile."""

import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import lazymods as lm

ag = lm.autograd
X = jax.random.normal(jax.random.key(0), (6, 4))


class Net(nnx.Module):
    """Two linear layers, of which the first may be another model's."""

    def __init__(self, first: Any = None) -> None:
        self.first: Any = first or nnx.Linear(4, 5, rngs=nnx.Rngs(0))
        self.last: Any = nnx.Linear(5, 2, rngs=nnx.Rngs(1))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(jnp.tanh(self.first(x)))


def loss(model: Any, x: jax.Array = X) -> jax.Array:
    return ((model(x) - 1) ** 2).mean()


@pytest.fixture(autouse=True)
def switching() -> Iterator[None]:
    """Let threads interrupt each other often."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def in_threads(count: int, work: Callable[[int], None]) -> None:
    errors: list[BaseException] = []
    start = threading.Barrier(count)

    def run(i: int) -> None:
        try:
            start.wait()
            work(i)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def near(got: Any, want: Any) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("jit", [lambda f: f, lm.jit], ids=["plain", "lm.jit"])  # nnx.jit is for one thread
def test_one_model(jit: Callable[[Any], Any]) -> None:
    model, want = Net(), nnx.grad(loss)(Net())
    ag.register_hook(model.first.bias, lambda g: g * 2)
    ag.register_full_backward_hook(model.last, lambda m, gi, go: (gi[0] * 3,))
    gradient = jit(lambda m: ag.grad(loss)(m))

    def work(i: int) -> None:
        for _ in range(4):
            got = gradient(model)
            near(got["first"]["bias"], 6 * want["first"]["bias"][...])
            near(got["first"]["kernel"], 3 * want["first"]["kernel"][...])
            near(got["last"], want["last"])

    in_threads(4, work)


def test_models_that_share_parameters() -> None:
    """Each has a layer of its own; the hook on the shared one counts the gradients of all."""
    shared, want = nnx.Linear(4, 5, rngs=nnx.Rngs(0)), nnx.grad(loss)(Net())
    models, counts = [Net(shared) for _ in range(4)], []
    ag.register_hook(shared.kernel, lambda g: counts.append(1))
    for i, model in enumerate(models):
        ag.register_hook(model.last.bias, lambda g, i=i: g * i)

    def work(i: int) -> None:
        for _ in range(4):
            got = ag.grad(loss)(models[i])
            near(got["first"], want["first"])
            near(got["last"]["bias"], i * want["last"]["bias"][...])

    in_threads(4, work)
    assert len(counts) == 16


def test_hooks_come_and_go_in_eight_threads() -> None:
    """None is lost, none stays, and each runs for the gradients that its thread takes."""
    model, want = Net(), nnx.grad(loss)(Net())
    kernels, bias = (model.first.kernel, model.last.kernel), model.last.bias
    kept = [0] * 8

    def work(i: int) -> None:
        for _ in range(3):
            mine: list[int] = []
            thread = threading.get_ident()

            def note(*_: Any, mine: list[int] = mine, thread: int = thread) -> None:
                if threading.get_ident() == thread:
                    mine.append(1)

            handles = [
                ag.register_hook(kernels[0], note),
                ag.register_post_accumulate_grad_hook(kernels[1], note),
            ]
            near(ag.grad(loss)(model), want)
            assert len(mine) == 2
            for handle in handles:
                handle.remove()
            near(ag.grad(loss)(model), want)
            assert len(mine) == 2
        ag.register_hook(bias, lambda g: kept.__setitem__(i, kept[i] + 1))

    in_threads(8, work)
    before = list(kept)
    ag.grad(loss)(model)
    assert [b - a for a, b in zip(before, kept, strict=True)] == [1] * 8
    assert "lazymods_gradient_hooks" not in model.first.kernel.get_metadata()


def test_module_hooks_come_and_go_in_eight_threads() -> None:
    """Each thread differentiates with respect to the input; the module is the same for all."""
    model = Net()
    want = jax.grad(lambda x: loss(model, x))(X)

    def work(i: int) -> None:
        for _ in range(3):
            mine: list[int] = []
            thread = threading.get_ident()

            def note(*_: Any, mine: list[int] = mine, thread: int = thread) -> None:
                if threading.get_ident() == thread:
                    mine.append(1)

            pre = ag.register_full_backward_pre_hook(model.last, note)
            with ag.register_full_backward_hook(model.last, note), pre:
                near(jax.grad(lambda x: loss(model, x))(X), want)
                assert len(mine) == 2
            near(jax.grad(lambda x: loss(model, x))(X), want)
            assert len(mine) == 2

    in_threads(8, work)
    assert type(model.last) is nnx.Linear


def test_no_lost_update_of_parameters_that_one_thread_trains() -> None:
    """Gradients of one model in other threads, by lm.jit, write nothing back."""
    model, alone = Net(), Net()
    gradient, done = lm.jit(ag.grad(loss)), threading.Event()

    def descend(model: Any) -> None:
        for path, g in nnx.to_flat_state(gradient(model)):
            at = model
            for key in path:
                at = getattr(at, str(key))
            at[...] -= 0.1 * g[...]

    def work(i: int) -> None:
        if i == 0:
            for _ in range(20):
                descend(model)
            done.set()
        while not done.is_set():
            gradient(model)

    in_threads(3, work)
    for _ in range(20):
        descend(alone)
    near(nnx.state(model), nnx.state(alone))
