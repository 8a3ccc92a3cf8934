"""Gradients of complex parameters by PyTorch's convention: torch and the finite differences of numpy are the oracle."""

import itertools
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
RNG = np.random.default_rng(0)
Z = (RNG.standard_normal(4) + 1j * RNG.standard_normal(4)).astype(np.complex64)
FUNCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "abs": lambda z, _: abs(z).sum(),
    "square": lambda z, _: (z * z).real.sum(),
    "conjugate": lambda z, _: (z * z.conj() * z.conj()).imag.sum(),
    "angle": lambda z, np_: np_.angle(z).sum(),
    "exp": lambda z, np_: np_.exp(z * 1j).imag.sum(),
    "log": lambda z, np_: np_.log(z + 3).imag.sum(),
    "sqrt": lambda z, np_: np_.sqrt(z + 3).real.sum(),
    "quotient": lambda z, _: abs((z + 2j) / (z - 3)).sum(),
    "tanh": lambda z, np_: abs(np_.tanh(z)).sum(),
    "fft": lambda z, np_: (abs(np_.fft.fft(z)) ** 3).sum(),
    "product": lambda z, _: (z[0] * z[1] * z[2].conj() * z[3]).real,
    "matrix": lambda z, _: abs(z.reshape(2, 2) @ z.reshape(2, 2).conj()).sum(),
}


def near(got: Any, want: Any, tolerance: float = 1e-4) -> None:
    np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=tolerance, atol=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_direction_is_pytorchs(name: str) -> None:
    torch = pytest.importorskip("torch")
    fn = FUNCTIONS[name]
    t = torch.tensor(Z, requires_grad=True)
    fn(t, torch).backward()
    want = t.grad.numpy()
    weight = nnx.Param(jnp.asarray(Z))
    for wrap in (lambda f: f, nnx.jit, lm.jit):
        near(wrap(ag.grad(lambda w: fn(w[...], jnp), conjugate=True))(weight)[...], want)
        near(wrap(ag.value_and_grad(lambda w: fn(w[...], jnp), conjugate=True))(weight)[1][...], want)
        near(wrap(ag.grad(lambda w: fn(w[...], jnp)))(weight)[...], want.conj())
    near(jax.vmap(ag.grad(lambda z: fn(z, jnp), conjugate=True))(jnp.stack([jnp.asarray(Z)] * 2))[1], want)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_it_is_the_steepest_ascent(name: str) -> None:
    """Its parts are the derivatives with respect to the real and the imaginary part."""
    fn, z, h = FUNCTIONS[name], Z.astype(np.complex128), 1e-6
    want = np.zeros_like(z)
    for i, unit in enumerate(np.eye(4)):
        for part in (1, 1j):
            ahead, behind = fn(z + h * part * unit, np), fn(z - h * part * unit, np)
            want[i] += part * (ahead - behind) / (2 * h)
    near(ag.grad(lambda z: fn(z, jnp), conjugate=True)(jnp.asarray(Z)), want, 2e-3)


class Net(nnx.Module):
    """A complex layer and a real one; the real one sees absolute values."""

    def __init__(self, lazy: bool = False) -> None:
        rngs, of = nnx.Rngs(0), {"dtype": jnp.complex64, "param_dtype": jnp.complex64}
        self.first: Any = lm.LazyLinear(4, rngs=rngs, **of) if lazy else nnx.Linear(3, 4, rngs=rngs, **of)
        self.last: Any = lm.LazyLinear(1, rngs=rngs) if lazy else nnx.Linear(4, 1, rngs=rngs)

    def __call__(self, z: jax.Array) -> jax.Array:
        return self.last(jnp.abs(self.first(z)))


INPUTS = jnp.asarray((RNG.standard_normal((8, 3)) + 1j * RNG.standard_normal((8, 3))).astype(np.complex64))
TARGETS = jnp.sin(jnp.abs(INPUTS).sum(1, keepdims=True))


def loss(model: Any) -> jax.Array:
    return ((model(INPUTS) - TARGETS) ** 2).mean()


@pytest.mark.slow
@pytest.mark.parametrize("jit", [lambda f: f, nnx.jit, lm.jit], ids=["plain", "nnx.jit", "lm.jit"])
@pytest.mark.parametrize("lazy", [False, True], ids=["ready", "lazy"])
def test_steps_of_an_optimizer_descend(jit: Callable[[Any], Any], lazy: bool) -> None:
    model = Net(lazy)
    lm.materialize(model, INPUTS)
    optimizer = lm.LazyOptimizer(model, optax.sgd(0.02, momentum=0.5), wrt=nnx.Param)

    def step(model: Any, optimizer: Any) -> Any:
        value, gradient = ag.value_and_grad(loss, conjugate=True)(model)
        optimizer.update(model, gradient)
        return value

    step = jit(step)
    values = [float(step(model, optimizer)) for _ in range(30)]
    assert all(b < a for a, b in itertools.pairwise(values[:10]))
    assert values[-1] < 0.5 * values[0]


@pytest.mark.slow
def test_a_small_step_goes_down_by_the_square_of_the_gradient() -> None:
    model = Net()
    gradient = ag.grad(loss, conjugate=True)(model)
    moved = jax.tree.map(lambda p, g: p - 1e-3 * g, nnx.state(model, nnx.Param), gradient)
    squares = sum(float((abs(g) ** 2).sum()) for g in jax.tree.leaves(gradient))
    before = float(loss(model))
    nnx.update(model, moved)
    assert before - float(loss(model)) == pytest.approx(1e-3 * squares, rel=0.05)


def test_real_gradients_integers_and_aux_are_left_alone() -> None:
    p = {"r": jnp.arange(3.0), "c": jnp.array([3 + 4j])}
    fn = lambda p: ((p["r"] ** 2).sum() + jnp.abs(p["c"]).sum(), {"z": p["c"], "n": 3})  # noqa: E731
    got, aux = ag.grad(fn, has_aux=True, conjugate=True)(p)
    near(got["r"], 2 * np.arange(3))
    near(got["c"], [0.6 + 0.8j])
    near(aux["z"], [3 + 4j])
    (value, aux), both = ag.value_and_grad(fn, has_aux=True, conjugate=True)(p)
    assert float(value) == 10 and aux["n"] == 3
    near(both["c"], [0.6 + 0.8j])
    pair = ag.grad(lambda a, b: jnp.abs(a * b).sum(), argnums=(0, 1), conjugate=True)(p["c"], p["c"])
    near(pair[0], [3 + 4j])
    near(pair[1], [3 + 4j])


@pytest.mark.slow
def test_module_hooks_see_what_jax_passes_and_change_it() -> None:
    """Inside the backward pass there is one convention, JAX's; conjugate speaks of what is returned."""
    model, seen = Net(), []
    ag.register_full_backward_hook(model.first, lambda m, gi, go: seen.append(go[0]))
    want = jax.grad(lambda h: ((model.last(jnp.abs(h)) - TARGETS) ** 2).mean())(Net().first(INPUTS))
    ag.grad(loss, conjugate=True)(model)
    near(seen[0], want)
