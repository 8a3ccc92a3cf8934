"""The check asks plain Python how far rounding goes: what a function amplifies is no difference, all else is one."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.core import Tracer

import lazymods as lm
from lazymods._objects.noise import Noise
from lazymods.compile.shadow import compare

pytestmark = pytest.mark.usefixtures("standard_promotion")


class Net(nnx.Module):
    """The gradients of its first bias are 0 but for rounding: the normalization takes the bias away."""

    def __init__(self, seed: int) -> None:
        rngs = nnx.Rngs(seed)
        self.first = nnx.Linear(3, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.last = nnx.Linear(4, 2, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(jnp.tanh(self.norm(self.first(x))))


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "adam": lambda: optax.adam(1e-2),
    "signs": lambda: optax.sign_sgd(1e-2),
    "lion": lambda: optax.lion(1e-2),
    "chain": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)),
}


@pytest.mark.slow
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_steps_that_divide_by_the_size_of_rounding_are_right(make: Callable[[], Any]) -> None:
    @lm.jit(check=True)
    def step(model: Net, optimizer: Any, x: jax.Array) -> jax.Array:
        loss, grads = nnx.value_and_grad(lambda m: ((m(x) - x[:, :2]) ** 2).mean())(model)
        optimizer.update(model, grads)
        return loss

    for seed in range(2):
        model = Net(seed)
        optimizer = nnx.Optimizer(model, make(), wrt=nnx.Param)
        losses = [step(model, optimizer, jax.random.normal(jax.random.key(i), (16, 3))) for i in range(3)]
        assert all(np.isfinite(losses))
        assert int(optimizer.step[...]) == 3


@pytest.mark.slow
def test_a_step_that_is_wrong_is_found_beside_such_a_bias() -> None:
    traces: list[int] = []

    @lm.jit(check=True)
    def step(model: Net, optimizer: Any, x: jax.Array) -> None:
        grads = nnx.grad(lambda m: ((m(x) - x[:, :2]) ** 2).mean())(model)
        if isinstance(model.first.kernel[...], Tracer):  # as a fault of the compiler would
            traces.append(1)
            model.last.kernel[...] += 1e-3
        optimizer.update(model, grads)

    model = Net(0)
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    with pytest.raises(lm.LazyError, match=r"last\.kernel") as caught:
        step(model, optimizer, jax.random.normal(jax.random.key(0), (16, 3)))
    assert traces
    assert "first.bias" not in str(caught.value)


@pytest.mark.parametrize(
    "f",
    [
        lambda x: x * random.random(),
        lambda x: x + next(COUNTER),
        lambda x: jnp.sum(x) * np.random.default_rng().uniform(),
    ],
)
def test_what_is_never_the_same_again_is_no_rounding(f: Callable[[jax.Array], Any]) -> None:
    with pytest.raises(lm.LazyError, match="output"):
        lm.jit(f, check=True)(jnp.linspace(0.1, 1.0, 5))


class _Counter:
    def __init__(self) -> None:
        self._count = 0.0

    def __next__(self) -> float:
        self._count += 1.0
        return self._count


COUNTER = _Counter()

W = jnp.array([0.5, 1.5, 2.5, 3.5, 4.5])


def said(got: Any, again: Sequence[Any], want: Any = W) -> str:
    """Compare one output; return what is said of it."""
    try:
        compare("f", [("output", want)], [("output", got)], lambda: [[("output", value)] for value in again])
    except lm.LazyError as error:
        return str(error)
    return ""


def test_how_far_it_may_be_off() -> None:
    off = W.at[1].add(1e-2)
    assert "at [1], 1 of 5 wrong" in said(off, [])
    assert "at [1], 1 of 5 wrong" in said(off, [W])
    assert "at [1], 1 of 5 wrong" in said(off, [W, W, W])
    assert "at [1], 1 of 5 wrong" in said(off, [W, W.at[2].add(1e-2)])  # another element
    assert said(off, [W, W.at[1].add(-1e-3)]) == ""
    assert said(off, [W, W, W.at[1].add(1e-3)]) == ""
    assert "at [1]" in said(W.at[1].add(1.0), [W, W.at[1].add(1e-2)])  # further
    assert said(W.at[0].add(1e-2), [W, W.at[1:4].add(1e-3)]) == ""  # most of them are that unsure
    assert "at [1]" in said(off, [W.at[1].add(1e-6), W.at[1].add(1e-3)])  # not the same again
    assert "at [1]" in said(off, [W, jnp.ones(3), None, W.astype(jnp.int32), "a", W.at[1].set(jnp.nan)])
    assert said(1.0 + 1e-2, [1.0, 1.0 + 1e-3], 1.0) == ""
    assert "1.01" in said(1.0 + 1e-2, [1.0, 1.0], 1.0)


def test_what_is_counted_and_chosen_is_exact_whatever_noise_does() -> None:
    n = jnp.arange(3)
    assert "at [1]" in said(n.at[1].add(1), [n, n + 1, n + 2], n)
    assert "f32[5]" in said(W[:4], [W, W[:4]])
    assert "True" in said(True, [False, True], False)
    assert "nan" in said(W.at[1].set(jnp.nan), [W, W.at[1].set(jnp.nan)])


def test_runs_with_noise_are_asked_for_only_where_something_differs() -> None:
    def fails() -> Any:
        raise AssertionError

    compare("f", [("output", W)], [("output", W * (1 + 1e-7))], fails)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "complex64"])
def test_noise_is_in_the_last_place(dtype: str) -> None:
    numbers = [0.0, 1.0, -3.0, 0.3, -1.7, 123.4, 1e-3, float("nan"), float("inf")]
    value = jnp.array(numbers, dtype)
    found = Noise(1)(value)
    assert found.dtype == value.dtype and found.sharding == value.sharding
    old, new = (np.asarray(v.astype(jnp.complex64)) for v in (value, found))
    np.testing.assert_array_equal(new[:3], old[:3])  # whole numbers
    np.testing.assert_allclose(new, old, rtol=2.5 * float(jnp.finfo(value.dtype).eps))
    assert (new[3:7] != old[3:7]).all()
    for kept in (jnp.arange(3), jax.random.key(0), np.array(["a"]), jnp.asarray(0.3), 0.3, None):
        made = Noise(1)(kept)
        assert type(made) is type(kept)
        assert repr(made) == repr(kept)
    array = np.array([0.3, 1.0])
    moved = Noise(1)(array)
    assert moved is not array and moved[0] != array[0] and moved[1] == 1.0 and array[0] == 0.3
    reference = jax.new_ref(jnp.array([0.3, 1.0]))
    other = Noise(1)(reference)
    assert float(other[0]) != float(reference[0]) and float(other[1]) == 1.0
