"""Modules with backward hooks for tests: what they are called with, and the transforms that they run under."""

import itertools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import lazymods as lm

ag = lm.autograd
RNG = np.random.default_rng(0)
W = RNG.standard_normal((3, 3)).astype(np.float32)
A, B = (RNG.standard_normal((2, 3)).astype(np.float32) for _ in range(2))
I = np.array([[1, 2, 0], [0, 1, 2]], np.int32)  # noqa: E741


class Ours(nnx.Module):
    """A function of a weight and the arguments, as a module."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.w, self.fn = nnx.Param(jnp.asarray(W)), fn

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.fn(self.w[...], *args, **kwargs)


def parts(value: Any) -> list[Any]:
    return jax.tree.leaves(value, is_leaf=lambda x: x is None)


def same(got: Any, want: Any, tolerance: float = 1e-5) -> None:
    got, want = parts(got), parts(want)
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=tolerance, atol=tolerance)


def record(seen: list[Any], *values: Any) -> None:
    """Append values, as they are when the program runs, with their Nones."""
    jax.debug.callback(lambda *v: seen.append(jax.tree.map(np.asarray, v)), *values)


class Case(NamedTuple):
    """A module, what it is called with, which arguments are differentiated, and the loss of its outputs."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    wrt: tuple[int, ...]
    loss: Callable[[Any], Any] = lambda y: (y * y).sum()
    kwargs: Mapping[str, Any] = MappingProxyType({})


def first(y: Any) -> Any:
    return (y[0] * y[0]).sum()


CASES = {
    "one input": Case(lambda w, x: x @ w, (A,), (0,)),
    "two inputs": Case(lambda w, x, y: x @ w * y, (A, B), (0, 1)),
    "one of two differentiated": Case(lambda w, x, y: x @ w * y, (A, B), (1,)),
    "no input differentiated": Case(lambda w, x, y: x @ w * y, (A, B), ()),
    "an unused input": Case(lambda w, x, y: x @ w, (A, B), (0, 1)),
    "all inputs unused": Case(lambda w, x: w * 2, (A,), (0,)),
    "two outputs": Case(lambda w, x: (x @ w, x * 2), (A,), (0,), lambda y: (y[0] * y[1]).sum()),
    "an unused output": Case(lambda w, x: (x @ w, x * 2), (A,), (0,), first),
    "an integer output": Case(lambda w, x: (x @ w, 7), (A,), (0,), first),
    "integers only": Case(lambda w, i: w[i], (I,), ()),
    "a number": Case(lambda w, x, k: x @ w * k, (A, 3.0), (0,)),
    "nothing": Case(lambda w, x, y: x @ w, (A, None), (0,)),
    "a keyword": Case(lambda w, x, y: x @ w * y, (A,), (0,), kwargs={"y": B}),
    "keywords only": Case(lambda w, x: x @ w, (), (), kwargs={"x": A}),
    "the input itself": Case(lambda w, x: x, (A,), (0,)),
}


def ours(case: Case, transform: Callable[[Any], Any], module: Any = None) -> tuple[list[Any], Any]:
    """Return what hooks see here, and the gradients of the weight and the arguments."""
    module, numbered, numbers = module or Ours(case.fn), [], itertools.count()
    ag.register_full_backward_pre_hook(module, lambda m, go: record(numbered, np.int32(next(numbers)), go))
    ag.register_full_backward_hook(module, lambda m, gi, go: record(numbered, np.int32(next(numbers)), gi, go))
    args = [jnp.asarray(x) if isinstance(x, np.ndarray) else x for x in case.args]
    kwargs = {k: jnp.asarray(v) for k, v in case.kwargs.items()}

    def loss(module: Any, *chosen: Any) -> Any:
        rest = dict(zip(case.wrt, chosen, strict=True))
        return case.loss(module(*[rest.get(i, x) for i, x in enumerate(args)], **kwargs))

    found = transform(loss)(module, *[args[i] for i in case.wrt])
    found = jax.tree.leaves(found)
    jax.effects_barrier()
    numbered.sort(key=lambda values: int(values[0]))  # a GPU calls back in any order
    return [values[1:] for values in numbered], found


def wrt_all(loss: Any) -> Any:
    return lambda *args: nnx.grad(loss, argnums=tuple(range(len(args))))(*args)


def lazily(loss: Any) -> Any:
    def run(*args: Any) -> Any:
        with lm.lazytensor.lazy():
            out = wrt_all(loss)(*args)
        lm.lazytensor.sync(out)
        return out

    return run


def inner_jit(loss: Any) -> Any:
    """Differentiate a compiled function."""

    def pure(state: Any, module: Any, *args: Any) -> Any:
        return jax.jit(lambda state, *args: loss(nnx.merge(nnx.graphdef(module), state), *args))(state, *args)

    return lambda module, *args: jax.grad(lambda s, *a: pure(s, module, *a), tuple(range(len(args) + 1)))(
        nnx.state(module), *args
    )


TRANSFORMS: dict[str, Callable[[Any], Any]] = {
    "nnx.grad": wrt_all,
    "lm.autograd.grad": lambda loss: lambda *args: ag.grad(loss, argnums=tuple(range(len(args))))(*args),
    "nnx.jit": lambda loss: nnx.jit(wrt_all(loss)),
    "lm.jit": lambda loss: lm.jit(wrt_all(loss)),
    "lm.jit check": lambda loss: lm.jit(wrt_all(loss), check=True),
    "grad of jit": inner_jit,
    "nnx.remat": lambda loss: wrt_all(lambda *args: nnx.remat(loss)(*args)),
    "nnx.jit inside": lambda loss: wrt_all(lambda *args: nnx.jit(loss)(*args)),
    "a lazy block": lazily,
}


class Noisy(nnx.Module):
    """Statistics, random state, a counter."""

    def __init__(self, lazy: bool = False) -> None:
        rngs = nnx.Rngs(0)
        self.linear = lm.LazyLinear(4, rngs=rngs) if lazy else nnx.Linear(3, 4, rngs=rngs)
        self.norm = lm.LazyBatchNorm(rngs=rngs) if lazy else nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.calls = nnx.Variable(jnp.array(0))

    def __call__(self, x: Any) -> Any:
        self.calls[...] += 1
        return self.dropout(self.norm(self.linear(x)))


def arrays(model: Any) -> list[np.ndarray]:
    leaves = jax.tree.leaves(nnx.state(model))
    return [np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x) for x in leaves]
