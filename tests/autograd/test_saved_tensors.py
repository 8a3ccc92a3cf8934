"""What operations keep goes through the hooks of a block, whatever differentiates, and gradients stay right."""

import functools
import gc
import os
import subprocess
import sys
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from saving import HOW, V, ag, hooked, same, square, tripled

import lazymods as lm

MATRIX = np.array([[2.0, 0.3, -0.1], [0.5, 1.5, 0.2], [-0.4, 0.1, 3.0]], np.float32)


@pytest.mark.parametrize("how", HOW)
def test_hooks_are_used_by_whatever_differentiates(how):
    x = jnp.asarray(V)
    same(HOW[how](tripled(square))(x), 6 * V)
    same(HOW[how](hooked(square))(x), 2 * V)
    same(tripled(square)(x), (V * V).sum())


# ---------------------------------------------------------------- operations: gradients as without hooks


@jax.custom_vjp
def doubled_rule(x, y):
    return jnp.sin(x) * y


doubled_rule.defvjp(
    lambda x, y: (jnp.sin(x) * y, (jnp.cos(x), y, jnp.arange(3), x)),
    lambda kept, g: (2 * g * kept[0] * kept[1], 3 * g * jnp.sin(kept[3])),
)


@jax.custom_jvp
def fivefold_rule(x):
    return jnp.sin(x)


fivefold_rule.defjvp(lambda primals, tangents: (fivefold_rule(*primals), 5 * jnp.cos(primals[0]) * tangents[0]))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def static_argument(x, n):
    return x * n


static_argument.defvjp(lambda x, n: (x * n, (x,)), lambda n, kept, g: (g * n * kept[0],))


def closing_rule(x):
    y = x * 2

    @jax.custom_jvp
    def f(z):
        return z * y

    f.defjvp(lambda primals, tangents: (primals[0] * y, tangents[0] * y))
    return f(x).sum()


def scanned(x):
    def body(carry, row):
        carry = jnp.tanh(carry @ x + row)
        return carry, carry * row

    carry, rows = jax.lax.scan(body, x[0], x)
    return carry.sum() + (rows**2).sum()


def branching(x):
    return jax.lax.switch(jnp.argmax(x[0]), [jnp.sin, jnp.cos, jnp.tanh], x).sum()


def with_a_callback(x):
    @jax.jit
    def f(a):
        jax.debug.callback(lambda a: None, a)
        return jnp.sin(a) * a

    return f(x).sum()


def mutable_reference(x):
    ref = jax.new_ref(x * 1.0)
    ref[...] = jnp.sin(ref[...])
    return (ref[...] * x).sum()


def named_axis(x):
    return jax.vmap(lambda row: jax.lax.psum(jnp.sin(row) * row, "i") * row, axis_name="i")(x).sum()


OPERATIONS = {
    "matmul": lambda x: ((x @ x) @ x.T).sum(),
    "relu": lambda x: (jax.nn.relu(x) * x).sum(),
    "softmax": lambda x: (jax.nn.softmax(x) ** 2).sum(),
    "gelu": lambda x: jax.nn.gelu(x).sum(),
    "gather": lambda x: (x[jnp.array([0, 2, 2])] ** 2).sum(),
    "sort": lambda x: (jnp.sort(x) ** 2 * jnp.arange(3.0)[None]).sum(),
    "cumsum": lambda x: (jnp.cumsum(x) ** 2).sum(),
    "complex": lambda x: jnp.abs(jnp.fft.fft(x)).sum(),
    "bfloat16": lambda x: (x.astype(jnp.bfloat16) ** 2).astype(jnp.float32).sum() * x.sum(),
    "solve": lambda x: jnp.linalg.solve(x, x.T).sum(),
    "cholesky": lambda x: jnp.linalg.cholesky(x @ x.T).sum(),
    "convolve": lambda x: jnp.convolve(x.ravel(), x.ravel()).sum() ** 2,
    "custom_vjp": lambda x: doubled_rule(x, jnp.cos(x)).sum(),
    "custom_jvp": lambda x: (fivefold_rule(x) * x).sum(),
    "nondiff_argnums": lambda x: jnp.sum(static_argument(x, 3)),
    "closing_rule": closing_rule,
    "scan": scanned,
    "switch": branching,
    "fori_loop": lambda x: jnp.sum(jax.lax.fori_loop(0, 3, lambda i, c: jnp.sin(c) * i + c, x)),
    "jit": lambda x: jnp.sum(jax.jit(lambda a: (jnp.sin(a), jnp.argmax(a), 2 * a))(x)[0]),
    "checkpoint": lambda x: jax.checkpoint(lambda a: jnp.sin(jnp.sin(a)))(x).sum(),
    "inner_grad": lambda x: (jax.grad(lambda y: (jnp.sin(y) * x).sum())(x) * x).sum(),
    "inner_vmap": lambda x: jax.vmap(lambda row: jnp.linalg.norm(jax.nn.softmax(row)))(x).sum(),
    "named_axis": named_axis,
    "callback": with_a_callback,
    "dropout": lambda x: jnp.where(jax.random.bernoulli(jax.random.key(1), 0.5, x.shape), x / 0.5, 0.0).sum() ** 2,
    "stop_gradient": lambda x: (jax.lax.stop_gradient(x) * x).sum(),
    "nothing": lambda x: jnp.ones(()),
}
ORDERS = {
    "grad": jax.grad,
    "grad_of_jit": lambda f: jax.grad(jax.jit(f)),
    "grad_of_vmap": lambda f: jax.grad(lambda x: jax.vmap(f)(jnp.stack([x, x * 0.9])).sum()),
    "hessian": jax.hessian,
    "reverse_twice": lambda f: jax.jacrev(jax.jacrev(f)),
}


@pytest.mark.parametrize("how", ORDERS)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_gradients_are_those_without_hooks(operation, how):
    f, x = OPERATIONS[operation], jnp.asarray(MATRIX)
    try:
        want = ORDERS[how](f)(x)
    except TypeError as error:  # what jax refuses
        with pytest.raises(type(error)):
            ORDERS[how](hooked(f))(x)
        return
    same(ORDERS[how](hooked(f))(x), want, 1e-4)


@pytest.mark.parametrize("how", ["grad", "grad_of_jit", "jit_of_grad"])
def test_mutable_references_work_in_a_block(how):  # jax itself has no second derivative of them
    x = jnp.asarray(V)
    same(HOW[how](hooked(mutable_reference))(x), np.cos(V) * V + np.sin(V))


def test_rules_of_the_users_own_stay():
    x = jnp.asarray(V)
    same(jax.grad(hooked(lambda x: fivefold_rule(x).sum()))(x), 5 * np.cos(V))
    same(jax.grad(hooked(lambda x: doubled_rule(x, jnp.ones(3)).sum()))(x), 2 * np.cos(V))


def test_forward_mode_goes_through_both_hooks():
    same(jax.jvp(tripled(square), (jnp.asarray(V),), (jnp.ones(3),)), [(V * V).sum(), (6 * V).sum()])


def test_second_derivatives_go_through_both_hooks():
    same(jax.hessian(tripled(square))(jnp.asarray(V)), 6 * np.eye(3))
    f = hooked(lambda x: (x**4).sum(), lambda a: a * 2, lambda a: a / 2)
    same(jax.hessian(f)(jnp.asarray(V)), np.diag(12 * V**2))


# ---------------------------------------------------------------- what the hooks see


def test_pack_sees_values_in_the_forward_and_unpack_in_the_backward():
    packed, unpacked = [], []

    def pack(a):
        packed.append(np.asarray(a))
        return a

    def unpack(a):
        unpacked.append(np.asarray(a))
        return a

    value, backward = jax.vjp(hooked(lambda x: (jnp.sin(x) * jnp.exp(x)).sum(), pack, unpack), jnp.asarray(V))
    assert not unpacked
    assert sorted(a[0] for a in packed) == pytest.approx(sorted([np.cos(1), np.e, np.sin(1), np.e]))
    backward(jnp.ones_like(value))
    same(unpacked[::-1], packed)


def test_nothing_is_called_where_nothing_is_differentiated():
    def refuse(a):
        raise AssertionError

    f = hooked(square, refuse, refuse)
    of_a_constant = jax.grad(lambda y, x: f(x))
    for run in (f, jax.jit(f), lambda x: jax.vmap(f)(x[None]), lm.jit(f), lambda x: of_a_constant(x, x)):
        run(jnp.asarray(V))


def test_integers_and_booleans_are_packed():
    seen = set()

    def pack(a):
        seen.add(str(a.dtype))
        return a

    def f(x):
        return (jnp.where(x > 0, x, 0.0)[jnp.array([0, 2])] ** 2).sum()

    same(jax.grad(hooked(f, pack, lambda a: a))(jnp.asarray(V)), np.array([2, 0, 6]))
    assert {"bool", "int32", "float32"} <= seen


def test_pack_sees_one_example_under_vmap():
    shapes = set()

    def pack(a):
        shapes.add(a.shape)
        return a

    f = hooked(square, pack, lambda a: a)
    x = jnp.stack([jnp.asarray(V)] * 4)
    same(jax.vmap(jax.grad(f))(x), 2 * np.stack([V] * 4))
    same(jax.grad(lambda x: jax.vmap(f)(x).sum())(x), 2 * np.stack([V] * 4))
    same(jax.grad(lambda x: jax.vmap(f, in_axes=1)(x).sum())(x.T), 2 * np.stack([V] * 4).T)
    assert shapes == {(3,)}


def test_a_residual_that_two_operations_keep_is_kept_once():
    def f(x):
        y = jnp.exp(x)
        return (y * jnp.sin(x)).sum() + (y * jnp.cos(x)).sum()

    x = jnp.ones(1000)
    for transform in (lambda f: f, jax.jit):
        full = sum(a.nbytes for a in jax.tree.leaves(jax.vjp(transform(f), x)[1]))
        with_hooks = hooked(f, lambda a: a.astype(jnp.bfloat16), lambda a: a.astype(jnp.float32))
        half = sum(a.nbytes for a in jax.tree.leaves(jax.vjp(transform(with_hooks), x)[1]))
        assert half <= 0.55 * full


def test_what_pack_gets_is_not_kept():
    alive = []

    def pack(a):
        if a.shape:
            alive.append(weakref.ref(a))
        return a[:1]

    _, backward = jax.vjp(hooked(lambda x: jnp.exp(x).sum(), pack, lambda a: jnp.ones(3) * a), jnp.asarray(V))
    gc.collect()
    assert alive
    assert not any(ref() is not None for ref in alive)
    same(backward(jnp.float32(1))[0], np.full(3, np.e))


# ---------------------------------------------------------------- blocks


@pytest.mark.parametrize("how", ["grad", "grad_of_jit", "jit_of_grad", "grad_of_vmap"])
def test_the_innermost_block_counts(how):
    def f(x):
        with ag.saved_tensors_hooks(lambda a: a, lambda a: a * 2):
            return tripled(square)(x) + square(x)

    def through(transform):
        def f(x):
            with ag.saved_tensors_hooks(lambda a: a, lambda a: a * 2):
                return transform(tripled(square))(x) + square(x)

        return f

    def scan(f):
        return lambda x: jax.lax.scan(lambda c, a: (c + f(a), None), 0.0, x[None])[0]

    def vmap(f):
        return lambda x: jax.vmap(f)(x[None])[0]

    for g in (f, through(jax.jit), through(scan), through(vmap), through(lambda f: lambda x: jax.jit(jax.jit(f))(x))):
        same(HOW[how](g)(jnp.asarray(V)), 6 * V + 4 * V)


def test_a_block_can_be_entered_again_and_decorate():
    block = ag.saved_tensors_hooks(lambda a: a, lambda a: a * 3)

    @block
    def f(x):
        with block:
            return (x * x).sum()

    for _ in range(2):
        same(jax.grad(f)(jnp.asarray(V)), 6 * V)
    assert f.__name__ == "f"


def test_a_block_that_raises_leaves_nothing():
    def f(x):
        with ag.saved_tensors_hooks(lambda a: a, lambda a: a * 3):
            raise KeyError

    def caught(x):
        try:
            f(x)
        except KeyError:
            return square(x)

    with pytest.raises(KeyError):
        jax.grad(f)(jnp.asarray(V))
    same(jax.grad(caught)(jnp.asarray(V)), 2 * V)
    same(jax.grad(square)(jnp.asarray(V)), 2 * V)


def test_a_gradient_that_is_started_inside_is_not_covered():
    with ag.saved_tensors_hooks(lambda a: a * 0, lambda a: a):
        same(jax.grad(square)(jnp.asarray(V)), 2 * V)


def test_each_thread_has_its_own_blocks():
    block, found, start = ag.saved_tensors_hooks(lambda a: a, lambda a: a * 3), {}, threading.Barrier(4)

    def work(i):
        def f(x):
            start.wait()
            if i % 2:
                with block:
                    start.wait()
                    return square(x)
            start.wait()
            return square(x)

        found[i] = jax.grad(f)(jnp.asarray(V))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    same([found[i] for i in range(4)], [2 * V, 6 * V, 2 * V, 6 * V])


def test_shard_map_is_covered():
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("d")

    def around(x):
        return jax.shard_map(lambda x: x * x, mesh=mesh, in_specs=spec, out_specs=spec)(x).sum()

    def inside(x):
        f = tripled(lambda x: x * x)
        return jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec)(x).sum()

    for f in (tripled(around), inside):
        same([jax.grad(f)(jnp.asarray(V)), jax.grad(jax.jit(f))(jnp.asarray(V))], [6 * V, 6 * V])


LEAKS = """
import jax, jax.numpy as jnp, lazymods as lm
def f(x):
    with lm.autograd.saved_tensors_hooks(lambda a: (a,), lambda kept: kept[0]):
        return (jax.nn.relu(jnp.sin(x)) * x).sum() + jax.jit(lambda x: x * x)(x).sum()
x = jnp.arange(3.0)
for g in (jax.grad(f), jax.jit(jax.grad(f)), jax.grad(jax.jit(f)), lambda x: jax.vmap(jax.grad(f))(x[None])):
    g(x).block_until_ready()
"""


@pytest.mark.slow
def test_no_tracer_leaks():
    environment = {**os.environ, "JAX_CHECK_TRACER_LEAKS": "1"}
    done = subprocess.run([sys.executable, "-W", "error", "-c", LEAKS], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
