"""What operations keep goes through the hooks of a block, whatever differentiates, and gradients stay right."""

import functools
import gc
import os
import subprocess
import sys
import threading
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import lazymods as lm

ag = lm.autograd
V = np.array([1.0, -2.0, 3.0], np.float32)
MATRIX = np.array([[2.0, 0.3, -0.1], [0.5, 1.5, 0.2], [-0.4, 0.1, 3.0]], np.float32)


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
    "nondiff_argnums": lambda x: static_argument(x, 3).sum(),
    "closing_rule": closing_rule,
    "scan": scanned,
    "switch": branching,
    "fori_loop": lambda x: jnp.sum(jax.lax.fori_loop(0, 3, lambda i, c: jnp.sin(c) * i + c, x)),
    "jit": lambda x: jax.jit(lambda a: {"s": jnp.sin(a), "i": jnp.argmax(a), "n": 2 * a})(x)["s"].sum(),
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


# ---------------------------------------------------------------- modules


class Net(nnx.Module):
    def __init__(self, rngs, lazy=False):
        self.fc1 = lm.LazyLinear(5, rngs=rngs) if lazy else nnx.Linear(4, 5, rngs=rngs)
        self.bn = lm.LazyBatchNorm(rngs=rngs) if lazy else nnx.BatchNorm(5, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.fc2 = lm.LazyLinear(2, rngs=rngs) if lazy else nnx.Linear(5, 2, rngs=rngs)

    def __call__(self, x):
        return self.fc2(self.drop(jnp.tanh(self.bn(self.fc1(x)))))


X = np.linspace(-1, 1, 24, dtype=np.float32).reshape(6, 4) ** 2


def loss_fn(m, x):
    return ((m(x) - 1) ** 2).mean()


def state_of(m):
    return [np.asarray(jax.random.key_data(v) if jnp.issubdtype(v.dtype, jax.dtypes.prng_key) else v)
            for v in jax.tree.leaves(nnx.state(m))]  # fmt: skip


OF_MODULES = {
    "nnx_grad": nnx.grad,
    "nnx_jit_of_grad": lambda f: nnx.jit(nnx.grad(f)),
    "nnx_grad_of_jit": lambda f: nnx.grad(nnx.jit(f)),
    "ag_grad": ag.grad,
    "lm_jit": lambda f: lm.jit(lambda m, x: nnx.grad(f)(m, x)),
    "lm_jit_checked": lambda f: lm.jit(lambda m, x: nnx.grad(f)(m, x), check=True),
}
BLOCKS = {
    "hooks": lambda: ag.saved_tensors_hooks(lambda a: (a,), lambda kept: kept[0]),
    "save_on_cpu": ag.save_on_cpu,
}


@pytest.mark.parametrize("how", OF_MODULES)
@pytest.mark.parametrize("block", BLOCKS)
def test_modules_change_in_a_block_as_outside(block, how):
    def in_block(m, x):
        with BLOCKS[block]():
            return loss_fn(m, x)

    a, b = Net(nnx.Rngs(0)), Net(nnx.Rngs(0))
    same(OF_MODULES[how](in_block)(a, jnp.asarray(X)), OF_MODULES[how](loss_fn)(b, jnp.asarray(X)))
    same(state_of(a), state_of(b))


def test_a_lazy_model_is_initialized_by_lm_jit_in_a_block():
    def in_block(m, x):
        with ag.save_on_cpu():
            return loss_fn(m, x)

    a, b = Net(nnx.Rngs(0), lazy=True), Net(nnx.Rngs(0))
    same(lm.jit(lambda m, x: nnx.grad(in_block)(m, x))(a, jnp.asarray(X)), nnx.grad(loss_fn)(b, jnp.asarray(X)))
    assert not lm.has_uninitialized_params(a)
    same(state_of(a), state_of(b))


# ---------------------------------------------------------------- ready ones


def in_block(block, f):
    def run(*args):
        with block:
            return f(*args)

    return run


def deep(x):
    for _ in range(4):
        x = jnp.sin(x) * x
    return x.sum()


def test_save_on_cpu_keeps_arrays_in_the_memory_of_the_host():
    x = jnp.asarray(V)
    value, backward = jax.vjp(in_block(ag.save_on_cpu(), deep), x)
    assert {a.sharding.memory_kind for a in jax.tree.leaves(backward) if a.shape} == {"pinned_host"}
    same(backward(jnp.ones_like(value))[0], jax.grad(deep)(x), 0)
    for how in ("jit_of_grad", "grad_of_jit", "vmap_of_grad", "grad_of_vmap", "scan", "lm_jit", "lazy"):
        same(HOW[how](in_block(ag.save_on_cpu(), deep))(x), jax.grad(deep)(x))
    same(jax.hessian(in_block(ag.save_on_cpu(), deep))(x), jax.hessian(deep)(x), 1e-4)


def test_save_as_halves_what_is_kept_and_rounds_gradients():
    x = jnp.linspace(0.1, 1, 1000)
    value, half = jax.vjp(in_block(ag.save_as(jnp.bfloat16), deep), x)
    _, full = jax.vjp(deep, x)
    assert sum(a.nbytes for a in jax.tree.leaves(half)) == sum(a.nbytes for a in jax.tree.leaves(full)) // 2
    same(value, deep(x), 0)
    got, want = half(jnp.float32(1))[0], jax.grad(deep)(x)
    assert 0 < np.linalg.norm(got - want) < 0.01 * np.linalg.norm(want)


def test_save_as_leaves_what_is_no_wider_float():
    x = jnp.asarray(V, jnp.bfloat16)
    same(jax.grad(in_block(ag.save_as(jnp.float32), square))(x).astype(jnp.float32), 2 * V)
    f = in_block(ag.save_as(jnp.float16), lambda z: jnp.abs(z * z).sum())
    z = jnp.array([3 + 4j])
    same(jax.grad(f)(z), jax.grad(lambda z: jnp.abs(z * z).sum())(z), 0)


class Deep(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(3)])
        self.bn, self.drop = nnx.BatchNorm(4, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x, *, train=True):
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return self.drop(self.bn(x, use_running_average=not train))

    def body(self, x, train):
        return self(x, train=train)


RECOMPUTED = {
    "function": lambda m, x: ag.recompute(lambda m, x: m(x, train=True))(m, x),
    "module": lambda m, x: ag.recompute(m)(x, train=True),
    "method": lambda m, x: ag.recompute(m.body)(x, True),
}


@pytest.mark.parametrize("kind", RECOMPUTED)
def test_recompute_is_the_function_itself(kind):
    def loss(m, x):
        return (RECOMPUTED[kind](m, x) ** 2).mean()

    def plain(m, x):
        return (m(x) ** 2).mean()

    def remat(m, x):
        return (nnx.remat(lambda m, x: m(x))(m, x) ** 2).mean()

    a, b = Deep(nnx.Rngs(0)), Deep(nnx.Rngs(0))
    same(nnx.grad(loss)(a, jnp.asarray(X)), nnx.grad(plain)(b, jnp.asarray(X)))
    same(state_of(a), state_of(b))
    kept = [ag.saved_bytes(f, a, jnp.asarray(X)).total for f in (loss, remat, plain)]
    assert kept[0] <= kept[1] < kept[2]


# ---------------------------------------------------------------- bad input

_UNDO = "unpack that undoes what pack does, shape and dtype too: lambda kept: kept.astype(jnp.float32)"
_HOW_TO_CLOSE = "what unpack needs as part of what pack returns: lambda a: (a / a.max(), a.max())"


def told(error):
    return str(error.value).split("\n")


@pytest.mark.parametrize("how", [jax.grad, lambda f: jax.grad(jax.jit(f)), lambda f: jax.jit(jax.grad(f))])
@pytest.mark.parametrize(
    ("unpack", "got"),
    [(lambda a: a[:1], "f32[1]"), (lambda a: a.astype(jnp.bfloat16), "bf16[3]"), (lambda a: None, "None")],
    ids=["shape", "dtype", "none"],
)
def test_an_unpack_that_gives_something_else_is_refused(unpack, got, how):
    with pytest.raises(lm.LazyError) as error:
        how(hooked(square, lambda a: a, unpack))(jnp.asarray(V))
    assert told(error) == [
        "lm.autograd.saved_tensors_hooks, unpack",
        f"  got:    {got}",
        "  needed: f32[3], as what pack got: the backward pass goes on with it",
        f"  write:  {_UNDO}",
    ]


@pytest.mark.parametrize(("kept", "got"), [("disk", "'disk' for f32[3]"), (object(), "object")], ids=["text", "object"])
def test_a_pack_that_gives_no_arrays_is_refused(kept, got):
    with pytest.raises(lm.LazyError) as error:
        jax.grad(hooked(square, lambda a: {"x": kept}, lambda a: a))(jnp.asarray(V))
    assert told(error) == [
        "lm.autograd.saved_tensors_hooks, pack",
        f"  got:    {got}",
        "  needed: a pytree of arrays: what is kept is part of the program",
        "  write:  what is to be kept as an array, or as a tuple or dict of arrays",
    ]


@pytest.mark.parametrize("how", [jax.hessian, lambda f: jax.jit(jax.hessian(jax.jit(f))), ORDERS["reverse_twice"]])
def test_a_second_derivative_through_integers_is_refused(how):
    f = hooked(square, lambda a: (a * 10).astype(jnp.int8), lambda a: a.astype(jnp.float32) / 10)
    same(jax.grad(f)(jnp.asarray(V)), 2 * V)
    with pytest.raises(lm.LazyError) as error:
        how(f)(jnp.asarray(V))
    assert told(error) == [
        "lm.autograd.saved_tensors_hooks, pack",
        "  got:    i8[3] for f32[3], in a second derivative",
        "  needed: floats for floats, as the derivative of the gradient goes through pack and unpack",
        "  write:  with the block around what is differentiated once, or a pack that gives floats",
    ]


@pytest.mark.parametrize("how", ["grad", "grad_of_jit", "jit_of_grad", "vmap_of_grad", "grad_of_vmap"])
def test_a_hook_that_closes_over_what_is_differentiated_is_refused(how):
    def f(x):
        most = jnp.max(x)
        with ag.saved_tensors_hooks(lambda a: a / most, lambda a: a * most):
            return square(x)

    with pytest.raises(lm.LazyError) as error:
        HOW[how](f)(jnp.asarray(V))
    assert told(error) == [
        "lm.autograd.saved_tensors_hooks, pack",
        "  got:    a hook that closes over a value of the function that is differentiated",
        "  needed: one of what it gets alone: it is run where the function is transformed, outside of it",
        f"  write:  {_HOW_TO_CLOSE}",
    ]


def test_a_hook_may_close_over_shapes_and_over_values_from_outside():
    def step(scale, x):
        def f(x):
            with ag.saved_tensors_hooks(lambda a: a / scale, lambda a: (a * scale).astype(x.dtype)):
                return square(x)

        return jax.grad(f)(x)

    for run in (step, jax.jit(step), lambda s, x: jax.vmap(step)(s[None], x[None])[0]):
        same(run(jnp.float32(2), jnp.asarray(V)), 2 * V)


@pytest.mark.parametrize("hooks", [(3, square), (square, None)], ids=["pack", "unpack"])
def test_hooks_that_cannot_be_called_are_refused(hooks):
    with pytest.raises(lm.ArgumentError, match="what can be called"):
        ag.saved_tensors_hooks(*hooks)


@pytest.mark.parametrize("dtype", [jnp.int8, "foo", None, bool])
def test_save_as_refuses_what_is_no_float(dtype):
    with pytest.raises(lm.ArgumentError) as error:
        ag.save_as(dtype)
    assert told(error)[0] == "lm.autograd.save_as"
    assert told(error)[3] == "  write:  lm.autograd.save_as(jnp.bfloat16)"


def test_recompute_refuses_what_cannot_be_called():
    number: Any = 3
    with pytest.raises(lm.ArgumentError, match=r"lm\.autograd\.recompute"):
        ag.recompute(number)


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
