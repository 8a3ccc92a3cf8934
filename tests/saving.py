"""What the tests of blocks of saved tensors share: ways to differentiate, and hooks around a function."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import lazymods as lm

ag = lm.autograd
V = np.array([1.0, -2.0, 3.0], np.float32)


def same(got, want, tolerance=1e-5):
    got, want = jax.tree.leaves(got), jax.tree.leaves(want)
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        assert np.shape(a) == np.shape(b)
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def hooked(f, pack=lambda a: {"a": a, "again": (a,)}, unpack=lambda kept: kept["again"][0]):
    def in_block(*args):
        with ag.saved_tensors_hooks(pack, unpack):
            return f(*args)

    return in_block


def tripled(f):
    """Each residual counts thrice: so the gradient of what is linear in its residuals does."""
    return hooked(f, lambda a: a, lambda a: a * 3)


def square(x):
    return (x * x).sum()


def lazy_block(f):
    def run(x):
        with lm.lazytensor.lazy():
            return np.asarray(jax.grad(f)(x + 0.0))

    return run


HOW = {
    "grad": jax.grad,
    "jit_of_grad": lambda f: jax.jit(jax.grad(f)),
    "grad_of_jit": lambda f: jax.grad(jax.jit(f)),
    "value_and_grad": lambda f: lambda x: jax.value_and_grad(f)(x)[1],
    "vjp": lambda f: lambda x: jax.vjp(f, x)[1](jnp.float32(1))[0],
    "linearize": lambda f: lambda x: jax.vmap(jax.linearize(f, x)[1])(jnp.eye(x.size)),
    "vmap_of_grad": lambda f: lambda x: jax.vmap(jax.grad(f))(jnp.stack([x, x]))[1],
    "grad_of_vmap": lambda f: lambda x: jax.grad(lambda x: jax.vmap(f)(jnp.stack([x, x]))[1])(x),
    "jit_of_vmap_of_jit": lambda f: lambda x: jax.jit(jax.vmap(jax.grad(jax.jit(f))))(x[None])[0],
    "remat": lambda f: jax.grad(jax.checkpoint(f)),
    "scan": lambda f: jax.grad(lambda x: jax.lax.scan(lambda c, a: (c + f(a), None), 0.0, x[None])[0]),
    "cond": lambda f: jax.grad(lambda x: jax.lax.cond(x[0] > 0, f, lambda x: x.sum(), x)),
    "nnx_grad": nnx.grad,
    "ag_grad": ag.grad,
    "lm_jit": lambda f: lm.jit(jax.grad(f)),
    "lm_jit_checked": lambda f: lm.jit(jax.grad(f), check=True),
    "lm_jit_deciding": lambda f: lm.jit(lambda x: jax.grad(f)(x) if x.sum() > 0 else x),
    "grad_of_lm_jit": lambda f: jax.grad(lm.jit(f)),
    "lazy": lazy_block,
}
