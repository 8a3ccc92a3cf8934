"""Blocks of one kind around those of another, and around what passes values on: as with jax.lax.stop_gradient there."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import lazymods as lm

ag = lm.autograd
X = jnp.array([0.5, 2.0])
P = jax.sharding.PartitionSpec

BLOCKS: dict[str, Callable[[], Any]] = {
    "hooks": lambda: ag.saved_tensors_hooks(lambda a: (a, 1.0), lambda kept: kept[0]),
    "narrow": lambda: ag.save_as(jnp.bfloat16),
    "host": ag.save_on_cpu,
}
JITS: dict[str, Callable[[Any], Any]] = {"plain": lambda f: f, "jit": jax.jit, "lm.jit": lm.jit}
MODES: dict[str, Callable[[], Any]] = {"no_grad": ag.no_grad, "inference_mode": ag.inference_mode}


def outside(block: str, mode: str) -> Callable[[Any], Any]:
    kept = BLOCKS[block]()(jnp.sin)

    def f(x: Any) -> Any:
        with MODES[mode]():
            target = kept(x)
        return target * x

    return f


def inside(block: str, mode: str) -> Callable[[Any], Any]:
    def f(x: Any) -> Any:
        with MODES[mode]():
            target = jnp.sin(x)
        return target * x

    return BLOCKS[block]()(f)


DERIVATIVES: dict[str, Callable[[Any], Any]] = {
    "jacfwd": jax.jacfwd,
    "jacrev": jax.jacrev,
    "mapped jvp": lambda f: lambda x: jax.vmap(lambda t: jax.jvp(f, (x,), (t,))[1], out_axes=-1)(jnp.eye(2)),
    "jacfwd of jacfwd": lambda f: lambda x: jax.jacfwd(jax.jacfwd(lambda x: f(x) * x))(x).sum(-1),
    "hessian": lambda f: lambda x: jax.hessian(lambda x: (f(x) * x).sum())(x),
}


@pytest.mark.parametrize("jit", JITS)
@pytest.mark.parametrize("derivative", DERIVATIVES)
@pytest.mark.parametrize("where", [outside, inside])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("block", BLOCKS)
def test_a_mode_and_a_block_of_saved_tensors(block: str, mode: str, where: Any, derivative: str, jit: str) -> None:
    f = JITS[jit](DERIVATIVES[derivative](where(block, mode)))
    want = np.diag(np.sin(X)) * (1 if derivative.startswith(("jac", "mapped")) and "of" not in derivative else 2)
    np.testing.assert_allclose(f(X), want, rtol=5e-3 if block == "narrow" else 1e-6)


@pytest.mark.parametrize("block", BLOCKS)
def test_what_a_map_does_not_map_stays_so_in_a_block(block: str) -> None:
    def f(x: Any, y: Any) -> Any:
        with BLOCKS[block]():
            return jnp.sin(y), jnp.sin(x) * y

    mapped = jax.vmap(f, in_axes=(0, None), out_axes=(None, 0))
    got = jax.jit(lambda x, y: jax.vjp(mapped, x, y)[0])(X, X)
    np.testing.assert_allclose(got[0], np.sin(X), rtol=1e-6)
    np.testing.assert_allclose(got[1], np.sin(X)[:, None] * np.asarray(X), rtol=1e-6)
    gradient = jax.grad(lambda y: sum(out.sum() for out in mapped(X, y)))(X)
    np.testing.assert_allclose(gradient, np.cos(X) + np.sin(X).sum(), rtol=5e-3)  # one is kept in bfloat16


# ---------------------------------------------------------------- shard_map

INPUT = jnp.array([[1.0, 2.0], [3.0, -1.0]])


def linear() -> nnx.Linear:
    return nnx.Linear(2, 2, rngs=nnx.Rngs(0))


def mapped_call(axis_type: Any, check_vma: bool) -> Any:
    mesh = jax.make_mesh((1,), ("i",), axis_types=(axis_type,))
    return nnx.shard_map(lambda m, x: m(x), mesh=mesh, in_specs=(P(), P()), out_specs=P(), check_vma=check_vma)


def stopped(block: bool, call: Any) -> Any:
    """Return a loss with a target that is a constant, by a block or by hand."""

    def loss(model: Any, x: Any) -> Any:
        if block:
            with ag.no_grad():
                target = call(model, x)
        else:
            target = jax.lax.stop_gradient(call(model, x))
        return ((model(x) * target) ** 2).sum()

    return loss


STEPS: dict[str, Callable[[Any], Any]] = {
    "nnx.grad": nnx.grad,
    "lm.autograd.grad": ag.grad,
    "nnx.jit": lambda f: nnx.jit(nnx.grad(f)),
    "nnx.jit inside": lambda f: nnx.grad(nnx.jit(f)),
    "lm.jit": lambda f: lm.jit(nnx.grad(f)),
    "remat": lambda f: nnx.grad(nnx.remat(f)),
    "scan": lambda f: nnx.grad(
        lambda m, x: nnx.scan(lambda c, m, x: (c + f(m, x), None), in_axes=(nnx.Carry, None, 0))(0.0, m, x[None])[0]
    ),
}


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("axis_type", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit])
@pytest.mark.parametrize("step", STEPS)
def test_a_model_that_a_shard_map_passes_on(step: str, axis_type: Any, check_vma: bool) -> None:
    call = mapped_call(axis_type, check_vma)
    want = STEPS[step](stopped(False, call))(linear(), INPUT)
    model = linear()
    for _ in range(2):  # the second time its parameters are on the mesh
        got = STEPS[step](stopped(True, call))(model, INPUT)
        for name in ("kernel", "bias"):
            assert np.abs(want[name][...]).max() > 0
            np.testing.assert_allclose(got[name][...], want[name][...], rtol=1e-6, err_msg=name)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint], ids=["plain", "jit", "checkpoint"])
@pytest.mark.parametrize("derivative", [jax.grad, jax.jacfwd, lambda f: jax.jit(jax.grad(f))])
def test_values_that_a_shard_map_passes_on(derivative: Any, wrap: Any) -> None:
    mesh = jax.make_mesh((1,), ("i",))
    both = wrap(jax.shard_map(lambda x: (x, jnp.sin(x)), mesh=mesh, in_specs=P(), out_specs=P()))

    def f(x: Any) -> Any:
        with ag.no_grad():
            same, target = both(x)
        return (same * target).sum()

    np.testing.assert_allclose(derivative(f)(X), np.sin(X), rtol=1e-6)
