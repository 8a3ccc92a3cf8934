"""Blocks around modules; the ready ones; what is refused."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from saving import HOW, V, ag, hooked, same, square

import lazymods as lm

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


@pytest.mark.slow
@pytest.mark.parametrize("how", OF_MODULES)
@pytest.mark.parametrize("block", BLOCKS)
def test_modules_change_in_a_block_as_outside(block, how):
    def in_block(m, x):
        with BLOCKS[block]():
            return loss_fn(m, x)

    a, b = Net(nnx.Rngs(0)), Net(nnx.Rngs(0))
    same(OF_MODULES[how](in_block)(a, jnp.asarray(X)), OF_MODULES[how](loss_fn)(b, jnp.asarray(X)))
    same(state_of(a), state_of(b))


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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

_UNDO = "lambda kept: kept.astype(jnp.float32)  # unpack undoes what pack does, shape and dtype too"
_HOW_TO_CLOSE = "lambda a: (a / a.max(), a.max())  # pack returns all that unpack needs"


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
        "  write:  lambda a: (a, a.max())  # pack returns an array, or a tuple or dict of arrays",
    ]


TWICE = [jax.hessian, lambda f: jax.jit(jax.hessian(jax.jit(f))), lambda f: jax.jacrev(jax.jacrev(f))]


@pytest.mark.parametrize("how", TWICE)
def test_a_second_derivative_through_integers_is_refused(how):
    f = hooked(square, lambda a: (a * 10).astype(jnp.int8), lambda a: a.astype(jnp.float32) / 10)
    same(jax.grad(f)(jnp.asarray(V)), 2 * V)
    with pytest.raises(lm.LazyError) as error:
        how(f)(jnp.asarray(V))
    assert told(error) == [
        "lm.autograd.saved_tensors_hooks, pack",
        "  got:    i8[3] for f32[3], in a second derivative",
        "  needed: floats for floats, as the derivative of the gradient goes through pack and unpack",
        "  write:  lambda a: a.astype(jnp.bfloat16)  # pack gives floats; or differentiate once inside of the block",
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


@pytest.mark.parametrize("run", [lambda f: f, jax.jit, jax.vmap], ids=["plain", "jit", "vmap"])
@pytest.mark.parametrize("how", ["module", "method", "closure"])
def test_recompute_of_a_model_that_is_no_argument_of_the_transform(how, run):
    layer = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
    fn = {"module": layer, "method": layer.__call__, "closure": lambda x: layer(x)}[how]
    x = jnp.arange(6.0).reshape(2, 3)
    got = run(jax.grad(lambda x: (ag.recompute(fn)(x) ** 2).sum()))(x)
    same(got, jax.grad(lambda x: (layer(x) ** 2).sum())(x))
    assert sorted(vars(layer).keys() & {"kernel", "bias"}) == ["bias", "kernel"]
    same(jax.jit(lambda x: ag.recompute(fn)(x))(x), layer(x))


def test_recompute_does_not_lose_what_it_cannot_write():
    norm = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
    x = jnp.arange(6.0).reshape(2, 3)
    with pytest.raises(lm.LazyError, match="changes an nnx object"):
        jax.grad(lambda x: ag.recompute(norm)(x).sum())(x)
    same(norm.mean[...], jnp.zeros(3))
    other = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
    nnx.grad(lambda n, x: ag.recompute(n)(x).sum(), argnums=1)(norm, x)
    nnx.grad(lambda n, x: n(x).sum(), argnums=1)(other, x)
    same(norm.mean[...], other.mean[...])


# ---------------------------------------------------------------- layers that are a scan


def in_eighths(a):
    """Round by the largest of what one operation keeps: what is packed at once decides on the values."""
    largest = abs(a).max() + 1e-6
    return (a / largest * 8).round(), largest


IN_TURN = {
    "scan": lambda body, x, layers: jax.lax.scan(lambda x, w: (body(w, x), None), x, layers)[0],
    "reversed": lambda body, x, layers: jax.lax.scan(lambda x, w: (body(w, x), None), x, layers[::-1], reverse=True)[0],
    "unrolled": lambda body, x, layers: jax.lax.scan(lambda x, w: (body(w, x), None), x, layers, unroll=2)[0],
    "jit": lambda body, x, layers: jax.jit(IN_TURN["scan"], static_argnums=0)(body, x, layers),
    "remat": lambda body, x, layers: IN_TURN["scan"](jax.checkpoint(body), x, layers),
}


FORMS = [*[(how, "scan") for how in HOW], *[("jit_of_grad", form) for form in IN_TURN if form != "scan"]]


@pytest.mark.slow
@pytest.mark.parametrize(("how", "form"), FORMS)
def test_each_iteration_of_a_scan_is_packed_alone_as_layers_in_turn_are(how, form):
    layers = jnp.asarray(np.random.default_rng(0).normal(size=36), jnp.float32)

    def body(w, x):
        return jnp.sin(x @ w) * x

    def loss(run):
        def f(flat):
            with ag.saved_tensors_hooks(in_eighths, lambda kept: kept[0] * kept[1] / 8):
                return (run(body, jnp.asarray(V), flat.reshape(4, 3, 3)) ** 2).sum()

        return HOW[how](f)(layers)

    def in_turn(body, x, layers):
        for w in layers:
            x = (jax.checkpoint(body) if form == "remat" else body)(w, x)
        return x

    np.testing.assert_allclose(loss(IN_TURN[form]), loss(in_turn), rtol=2e-5, atol=1e-6)


def test_a_stack_sends_each_layer_to_the_host_by_itself():
    class Block(nnx.Module):
        def __init__(self, rngs):
            self.fc = nnx.Linear(4, 4, rngs=rngs)

        def __call__(self, x):
            return jnp.sin(self.fc(x))

    stack = lm.Stack(Block, 3, rngs=nnx.Rngs(0))
    graph, state = nnx.split(stack)

    def loss(state):
        with ag.save_on_cpu():
            return nnx.merge(graph, state)(jnp.ones((2, 4))).sum()

    sent = [e for e in jax.make_jaxpr(jax.grad(loss))(state).eqns if e.primitive.name == "device_put"]
    assert not [v for e in sent for v in e.invars if v.aval.shape[:1] == (3,)]  # no array of all layers
    report = ag.saved_bytes(loss, state)
    assert report.total == sum(row.nbytes for row in report.rows if row.is_on_host) > 0
