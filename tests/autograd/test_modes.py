"""no_grad, enable_grad, inference_mode: PyTorch's own answers, and stop_gradient by hand, are the oracle."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend.core import get_opaque_trace_state
from jax.sharding import PartitionSpec as P

import lazymods as lm

ag = lm.autograd
X = jnp.array([1.0, -2.0, 3.0])
constant = jax.lax.stop_gradient
MESH = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))


def assert_same(got: Any, want: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


# ---------------------------------------------------------------- two modes, one in the other


MODES: dict[str, Callable[[Any], Any]] = {
    "no_grad": lambda library: library.no_grad(),
    "enable_grad": lambda library: library.enable_grad(),
    "inference_mode": lambda library: library.inference_mode(),
    "inference_mode_off": lambda library: library.inference_mode(False),
}
# Whether PyTorch 2.13 differentiates through what is computed in the inner one; test_the_table_is_pytorchs asks it.
IS_ON = {
    "no_grad": {"no_grad": False, "enable_grad": True, "inference_mode": False, "inference_mode_off": True},
    "enable_grad": {"no_grad": False, "enable_grad": True, "inference_mode": False, "inference_mode_off": True},
    "inference_mode": {"no_grad": False, "enable_grad": False, "inference_mode": False, "inference_mode_off": True},
    "inference_mode_off": {"no_grad": False, "enable_grad": True, "inference_mode": False, "inference_mode_off": True},
}
PAIRS = [(outer, inner) for outer in MODES for inner in MODES]
# What is between the two, and around the outer one: f is the inner block.
BETWEEN: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda f: f,
    "jit": jax.jit,
    "jit in jit": lambda f: jax.jit(lambda x: jax.jit(f)(x)),
    "scan": lambda f: lambda x: jax.lax.scan(lambda c, _: (f(c), None), x, None, length=1)[0],
    "cond": lambda f: lambda x: jax.lax.cond(x.sum() > 0, f, lambda x: x * 5, x),
    "checkpoint": jax.checkpoint,
    "vmap": jax.vmap,
    "vmap of jit": lambda f: jax.vmap(jax.jit(f)),
    "jit of vmap": lambda f: jax.jit(jax.vmap(f)),
    "shard_map": lambda f: jax.shard_map(f, mesh=MESH, in_specs=P("i"), out_specs=P("i")),
    "lm.jit": lm.jit,
    "saved tensors": lambda f: ag.saved_tensors_hooks(lambda a: a, lambda kept: kept)(f),
    "jit of saved tensors": lambda f: jax.jit(ag.save_as(jnp.float32)(f)),
}
AROUND: dict[str, Callable[[Any], Any]] = {
    "grad": lambda f: jax.grad(lambda x: f(x).sum()),
    "grad of jit": lambda f: jax.grad(jax.jit(lambda x: f(x).sum())),
    "jit of grad": lambda f: jax.jit(jax.grad(lambda x: f(x).sum())),
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (jnp.ones_like(x),))[1],
    "linearize": lambda f: lambda x: jax.linearize(f, x)[1](jnp.ones_like(x)),
    "vmap of grad": lambda f: lambda x: jax.vmap(jax.grad(lambda x: f(x).sum()))(x[None])[0],
    "grad of checkpoint": lambda f: jax.grad(jax.checkpoint(lambda x: f(x).sum())),
    "lm.autograd.grad": lambda f: ag.grad(lambda x: f(x).sum()),
    "lm.jit": lambda f: lm.jit(jax.grad(lambda x: f(x).sum())),
    "lm.jit, checked": lambda f: lm.jit(jax.grad(lambda x: f(x).sum()), check=True),
    "lazy": lambda f: lm.lazytensor.lazy()(jax.grad(lambda x: f(x).sum())),
}


def inside(outer: str, inner: str, between: Any, library: Any) -> Any:
    def innermost(x: Any) -> Any:
        with MODES[inner](library):
            return x * x

    def both(x: Any) -> Any:
        with MODES[outer](library):
            return between(innermost)(x)

    return both


def test_the_table_is_pytorchs() -> None:
    torch = pytest.importorskip("torch", reason="compares with PyTorch")
    for outer, inner in PAIRS:
        x = torch.tensor([3.0], requires_grad=True)
        assert inside(outer, inner, lambda f: f, torch)(x).requires_grad is IS_ON[outer][inner], (outer, inner)


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("between", BETWEEN)
def test_one_mode_in_another(between: str, around: str) -> None:
    x = jnp.abs(X)
    for outer, inner in PAIRS:
        f = inside(outer, inner, BETWEEN[between], ag)
        want = 2 * x if IS_ON[outer][inner] else jnp.zeros(3)
        np.testing.assert_array_equal(AROUND[around](f)(x), want, err_msg=f"{inner} in {outer}")


def test_a_function_that_was_compiled_before_is_in_the_mode_around_its_call() -> None:
    tracked = jax.jit(ag.enable_grad(lambda x: x**2))
    plain = jax.jit(lambda x: x**2)
    for _ in range(2):
        for f in (tracked, plain):
            assert_same(jax.grad(lambda x, f=f: f(x).sum())(X), 2 * X)
            assert_same(jax.grad(lambda x, f=f: ag.inference_mode()(f)(x).sum())(X), 0 * X)
        assert_same(jax.grad(lambda x: ag.no_grad()(tracked)(x).sum())(X), 2 * X)
        assert_same(jax.grad(lambda x: ag.no_grad()(plain)(x).sum())(X), 0 * X)


def test_what_is_compiled_in_a_mode_is_compiled_once() -> None:
    traces = []

    @jax.jit
    def f(x: jax.Array) -> jax.Array:
        traces.append(x.shape)
        with ag.enable_grad():
            return x**2

    for _ in range(3):
        with ag.no_grad():
            f(X)
        jax.grad(lambda x: (ag.no_grad()(f)(x) + f(x)).sum())(X)
    assert len(traces) == 1


# ---------------------------------------------------------------- levels of differentiation


def stopped(x: Any, y: Any) -> jax.Array:
    with ag.no_grad():
        z = x * y
    return x * y + z


@pytest.mark.slow
def test_every_gradient_around_a_block_sees_constants() -> None:
    by_hand = jax.grad(jax.grad(lambda x, y: x * y + constant(x * y)), argnums=1)
    assert_same(jax.grad(jax.grad(stopped), argnums=1)(2.0, 3.0), by_hand(2.0, 3.0))
    assert_same(jax.grad(lambda y: jax.grad(stopped)(2.0, y) * stopped(2.0, y))(3.0), jnp.float32(18.0))  # y * (2y + 6)
    assert_same(jax.hessian(lambda x: (x**2 * ag.no_grad()(jnp.sin)(x)).sum())(X), jnp.diag(2 * jnp.sin(X)))


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
@pytest.mark.parametrize("jit", [lambda f: f, jax.jit])
def test_a_gradient_that_is_begun_inside_is_real_and_what_it_gives_a_constant(mode: str, jit: Any) -> None:
    def f(x: jax.Array) -> jax.Array:
        with MODES[mode](ag):
            return jit(jax.grad(lambda x: (x**3).sum()))(x)

    assert_same(f(X), 3 * X**2)
    assert_same(jax.grad(lambda x: (x * f(x)).sum())(X), 3 * X**2)
    assert_same(jax.jacfwd(f)(X), jnp.zeros((3, 3)))


def test_a_gradient_that_is_begun_inside_switches_nothing_on_for_those_around() -> None:
    def f(x: jax.Array) -> jax.Array:
        with ag.no_grad():
            return jax.grad(ag.enable_grad(lambda y: (y**3).sum()))(x)

    assert_same(f(X), 3 * X**2)
    assert_same(jax.grad(lambda x: (x * f(x)).sum())(X), 3 * X**2)


# ---------------------------------------------------------------- what is in the block


@jax.custom_vjp
def with_a_rule(x: jax.Array) -> jax.Array:
    return x * 2


with_a_rule.defvjp(lambda x: (x * 2, None), lambda _, g: (g * 7,))


def drawn(x: jax.Array) -> jax.Array:
    keys = jax.random.split(jax.random.key(0))
    return x * jax.random.normal(keys[0], x.shape)


BLOCKS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "an integer": lambda x: x * (x > 0).astype(jnp.int32).astype(jnp.float32),
    "an index": lambda x: x[1:].repeat(3)[:3] * x[jnp.argsort(x)],
    "a while loop": lambda x: jax.lax.while_loop(lambda c: jnp.abs(c).sum() < 100, lambda c: c * 2, x),
    "a scan": lambda x: jax.lax.scan(lambda c, v: (c + v, c * v), 0 * x, jnp.stack([x, x]))[1].sum(0),
    "a cond": lambda x: jax.lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x),
    "a custom_jvp": jax.nn.relu,
    "a custom_vjp": with_a_rule,
    "a checkpoint": jax.checkpoint(lambda x: jnp.sin(x) * x),
    "random numbers": drawn,
    "linear algebra": lambda x: jnp.linalg.solve(jnp.eye(3) * 2 + jnp.outer(x, x), x),
    "a callback": lambda x: jax.pure_callback(lambda v: np.asarray(v) * 2, jax.ShapeDtypeStruct((3,), x.dtype), x),
    "a reference": lambda x: jax.new_ref(x)[...] * 2,
    "a map": lambda x: jax.lax.map(lambda v: v * v, x),
    "a collective": lambda x: jax.vmap(lambda v: v * jax.lax.psum(v, "n"), axis_name="n")(x),
    "numbers alone": lambda x: jnp.arange(3.0) * 2,
    "a jitted closure": lambda x: jax.jit(lambda: x * 3)(),
    "complex numbers": lambda x: jnp.abs(jax.lax.complex(x, 2 * x)),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_is_a_constant_whatever_is_in_it(name: str) -> None:
    f = BLOCKS[name]

    def product(x: jax.Array) -> jax.Array:
        with ag.no_grad():
            y = f(x)
        return (x * y).sum()

    want = f(X)  # the gradient of x * constant
    for around in (jax.grad, lambda p: jax.grad(jax.jit(p)), lambda p: jax.jit(jax.grad(p))):
        assert_same(around(product)(X), want)
    assert_same(jax.jvp(product, (X,), (jnp.ones(3),))[1], want.sum())


def test_a_reference_outside_of_the_block_is_read_as_a_constant_and_keeps_its_gradient() -> None:
    def f(x: jax.Array) -> jax.Array:
        reference = jax.new_ref(x)
        with ag.no_grad():
            y = reference[...] * 2
        return (x * y + reference[...]).sum()

    for around in (jax.grad, lambda f: jax.grad(jax.jit(f))):
        assert_same(around(f)(X), 2 * X + 1)


def test_a_constant_costs_no_residual() -> None:
    def f(x: jax.Array) -> jax.Array:
        with ag.no_grad():
            y = jnp.sin(jnp.exp(x))
        return (x * y).sum()

    kept = [a for a in jax.tree.leaves(jax.vjp(f, X)[1]) if a.shape == (3,)]
    assert_same(kept, [jnp.sin(jnp.exp(X))])


def test_each_value_is_stopped_once() -> None:
    def f(x: jax.Array) -> jax.Array:
        with ag.no_grad():
            return jnp.sin(x * x + x).sum() * x

    names = [equation.primitive.name for equation in jax.make_jaxpr(f)(X).eqns]
    assert names.count("stop_gradient") == 1


def test_where_nothing_is_differentiated_a_block_is_nothing() -> None:
    before = get_opaque_trace_state()
    with ag.no_grad(), ag.inference_mode():
        assert get_opaque_trace_state() == before
    inside = []

    def mapped(x: jax.Array) -> jax.Array:
        outside = get_opaque_trace_state()
        with ag.no_grad():
            inside.append(get_opaque_trace_state() == outside)
        return x

    jax.vmap(mapped)(X)
    lm.infer_shapes(nnx.Sequential(ag.no_grad()(mapped)), X)
    assert inside == [True, True]
