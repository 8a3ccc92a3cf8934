"""The first call, context by context: closed over, as an argument, refused; threads; empty batches; leaks."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import MLP, array, assert_same_bits, assert_same_model, lazy_mlp, plain_mlp, spec
from jax.sharding import PartitionSpec as P

import lazymods as lm

X = array(2, 8)
PATHS = ["fc1.kernel", "fc1.bias", "fc2.kernel", "fc2.bias"]


def close(got: Any, want: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (jnp.shape(a), jnp.result_type(a)) == (jnp.shape(b), jnp.result_type(b))
        if not isinstance(a, jax.ShapeDtypeStruct):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def assert_untouched(model: Any) -> None:
    """As lazy as before, and a correct first call gives what the explicit model gives."""
    assert lm.uninitialized_paths(model) == PATHS
    assert_same_bits(model(X), plain_mlp()(X))
    assert_same_model(model, plain_mlp())


# ---------------------------------------------------------------- closed over


def shard_map(f: Any, x: jax.Array) -> Any:
    mesh = jax.make_mesh((1,), ("d",))
    return jax.shard_map(f, mesh=mesh, in_specs=P(), out_specs=P())(x)


def custom_vjp(f: Any, x: jax.Array) -> Any:
    g = jax.custom_vjp(lambda x: f(x))
    g.defvjp(lambda x: (f(x), x), lambda x, ct: (jnp.ones_like(x) * ct.sum(),))
    return jax.grad(lambda x: g(x).sum())(x)


def custom_jvp(f: Any, x: jax.Array) -> Any:
    g = jax.custom_jvp(lambda x: f(x))
    g.defjvp(lambda p, t: jax.jvp(lambda x: f(x), p, t))
    return jax.jvp(g, (x,), (x,))


def while_loop(f: Any, x: jax.Array) -> Any:
    return jax.lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, c[1] + f(x).sum()), (0, jnp.float32(0)))


def nnx_custom_vjp(f: Any, x: jax.Array) -> Any:
    g = nnx.custom_vjp(lambda x: f(x))
    g.defvjp(lambda x: (f(x), x), lambda x, ct: (jnp.ones_like(x) * ct[1].sum(),))
    return jax.grad(lambda x: g(x).sum())(x)


CLOSED_OVER: dict[str, Callable[[Any, jax.Array], Any]] = {
    "python": lambda f, x: f(x),
    "jax.jit": lambda f, x: jax.jit(lambda x: f(x))(x),
    "make_jaxpr": lambda f, x: jax.make_jaxpr(lambda x: f(x), return_shape=True)(x)[1],
    "eval_shape": lambda f, x: jax.eval_shape(lambda x: f(x), x),
    "lower": lambda f, x: jax.jit(lambda x: f(x)).lower(x).out_info,
    "vmap": lambda f, x: jax.vmap(lambda row: f(row))(x),
    "pmap": lambda f, x: jax.pmap(lambda x: f(x))(x[None]),
    "grad": lambda f, x: jax.grad(lambda x: f(x).sum())(x),
    "value_and_grad": lambda f, x: jax.value_and_grad(lambda x: f(x).sum())(x),
    "jvp": lambda f, x: jax.jvp(lambda x: f(x), (x,), (x,)),
    "vjp": lambda f, x: jax.vjp(lambda x: f(x), x)[1](jnp.ones((2, 4))),
    "linearize": lambda f, x: jax.linearize(lambda x: f(x), x)[1](x),
    "jacfwd": lambda f, x: jax.jacfwd(lambda x: f(x))(x),
    "jacrev": lambda f, x: jax.jacrev(lambda x: f(x))(x),
    "hessian": lambda f, x: jax.hessian(lambda x: f(x).sum())(x[:1, :2].repeat(4, 1)),
    "scan": lambda f, x: jax.lax.scan(lambda c, row: (c + 1, f(row)), 0, x),
    "map": lambda f, x: jax.lax.map(lambda row: f(row), x),
    "while_loop": while_loop,
    "fori_loop": lambda f, x: jax.lax.fori_loop(0, 2, lambda i, c: c + f(x), jnp.zeros((2, 4))),
    "cond": lambda f, x: jax.lax.cond(x.sum() > 0, lambda x: f(x), lambda x: 2 * f(x), x),
    "switch": lambda f, x: jax.lax.switch(1, [lambda x: x @ jnp.ones((8, 4)), lambda x: f(x)], x),
    "checkpoint": lambda f, x: jax.grad(lambda x: jax.checkpoint(lambda x: f(x))(x).sum())(x),
    "custom_vjp": custom_vjp,
    "custom_jvp": custom_jvp,
    "shard_map": shard_map,
    "jit-shard_map": lambda f, x: jax.jit(lambda x: shard_map(lambda x: f(x), x))(x),
    "vmap-scan-grad-jit": lambda f, x: jax.jit(
        lambda x: jax.lax.scan(lambda c, r: (c, jax.vmap(jax.grad(lambda r: f(r).sum()))(r[None])), 0, x))(x),
    "nnx.jit": lambda f, x: nnx.jit(lambda x: f(x))(x),
    "nnx.vmap": lambda f, x: nnx.vmap(lambda row: f(row))(x),
    "nnx.remat": lambda f, x: nnx.remat(lambda x: f(x))(x),
    "nnx.grad": lambda f, x: nnx.grad(lambda x: f(x).sum())(x),
    "nnx.scan": lambda f, x: nnx.scan(lambda c, r: (c, f(r)), in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))(0, x),
    "nnx.cond": lambda f, x: nnx.cond(x.sum() > 0, lambda x: f(x), lambda x: 2 * f(x), x),
    "nnx.fori_loop": lambda f, x: nnx.fori_loop(0, 2, lambda i, c: c + f(x), jnp.zeros((2, 4))),
    "nnx.custom_vjp": nnx_custom_vjp,
    "nnx.jit-nnx.remat": lambda f, x: nnx.jit(lambda x: nnx.remat(lambda x: f(x))(x))(x),
    "nnx.jit-jax.grad": lambda f, x: nnx.jit(lambda x: jax.grad(lambda x: f(x).sum())(x))(x),
}


@pytest.mark.parametrize("context", CLOSED_OVER.values(), ids=CLOSED_OVER)
def test_closed_over(context: Callable[[Any, jax.Array], Any]) -> None:
    lazy, want = lazy_mlp(), plain_mlp()
    got = context(lazy, X)
    assert_same_model(lazy, want)
    close(got, context(want, X))
    assert_same_bits(lazy(X), want(X))


def test_closed_over_by_several_levels_at_once() -> None:
    lazy, want = lazy_mlp(), plain_mlp()

    def f(model: Any) -> Callable[[jax.Array], Any]:
        return lambda x: jax.vmap(lambda r: jax.checkpoint(lambda r: model.fc1(r))(r))(x).sum() + model(x).sum()

    close(jax.jit(jax.grad(f(lazy)))(X), jax.jit(jax.grad(f(want)))(X))
    assert_same_model(lazy, want)


# ---------------------------------------------------------------- as an argument


def grads_of_the_input(m: Any, x: jax.Array) -> Any:
    return nnx.jit(lambda m, x: jax.grad(lambda x: m(x).sum())(x))(m, x)


def remat_then_grad(m: Any, x: jax.Array) -> Any:
    @nnx.jit
    def step(m: Any, x: jax.Array) -> Any:
        first = nnx.remat(lambda m, x: m(x))(m, x)
        return first, nnx.grad(lambda m: m(x).sum())(m)["fc2"]["bias"].get_value()

    return step(m, x)


AS_ARGUMENT: dict[str, Callable[[Any, jax.Array], Any]] = {
    "nnx.jit": lambda m, x: nnx.jit(lambda m, x: m(x))(m, x),
    "nnx.jit-keyword": lambda m, x: nnx.jit(lambda x, *, m: m(x))(x, m=m),
    "nnx.jit-container": lambda m, x: nnx.jit(lambda pair: pair[0]["m"](pair[1]))(({"m": m}, x)),
    "nnx.jit-twice": lambda m, x: nnx.jit(lambda m, n, x: m(x) + n(x))(m, m, x),
    "nnx.vmap": lambda m, x: nnx.vmap(lambda m, x: m(x), in_axes=(None, 0))(m, x),
    "nnx.remat": lambda m, x: nnx.remat(lambda m, x: m(x))(m, x),
    "nnx.jit-nnx.jit": lambda m, x: nnx.jit(lambda m, x: nnx.jit(lambda m, x: m(x))(m, x))(m, x),
    "nnx.jit-nnx.remat": lambda m, x: nnx.jit(lambda m, x: nnx.remat(lambda m, x: m(x))(m, x))(m, x),
    "nnx.jit-nnx.vmap": lambda m, x: nnx.jit(lambda m, x: nnx.vmap(lambda m, x: m(x), in_axes=(None, 0))(m, x))(m, x),
    "nnx.vmap-nnx.remat": lambda m, x: nnx.vmap(nnx.remat(lambda m, x: m(x)), in_axes=(None, 0))(m, x),
    "nnx.jit-jax.grad": grads_of_the_input,
    "nnx.jit-jax.vmap": lambda m, x: nnx.jit(lambda m, x: jax.vmap(lambda r: m(r))(x))(m, x),
    "nnx.jit-jax.jit": lambda m, x: nnx.jit(lambda m, x: jax.jit(lambda x: m(x))(x))(m, x),
    "nnx.jit-jax.scan": lambda m, x: nnx.jit(lambda m, x: jax.lax.scan(lambda c, r: (c, m(r)), 0, x))(m, x),
    "nnx.jit-jax.checkpoint": lambda m, x: nnx.jit(lambda m, x: jax.checkpoint(lambda x: m(x))(x))(m, x),
    "nnx.jit-remat-grad": remat_then_grad,
    "nnx.jit-materialize": lambda m, x: nnx.jit(lambda m, x: (lm.materialize(m, x), m(x))[1])(m, x),
}


@pytest.mark.parametrize("context", AS_ARGUMENT.values(), ids=AS_ARGUMENT)
def test_as_argument(context: Callable[[Any, jax.Array], Any]) -> None:
    lazy, want = lazy_mlp(), plain_mlp()
    got = context(lazy, X)
    assert_same_model(lazy, want)
    close(got, context(want, X))
    close(context(lazy, X), got)
    assert_same_bits(lazy(X), want(X))


def test_nnx_jit_traces_at_most_twice_and_once_when_materialized() -> None:
    for ready, most in ((False, 2), (True, 1)):
        traces: list[Any] = []
        model = lazy_mlp()
        if ready:
            lm.materialize(model, spec(2, 8))
        step = nnx.jit(lambda m, x, traces=traces: traces.append(x.shape) or m(x))
        for _ in range(5):
            step(model, X)
        assert len(traces) <= most


def test_a_jitted_explicit_model_is_not_traced_again() -> None:
    traces: list[Any] = []
    step = nnx.jit(lambda m, x: traces.append(x.shape) or m(x))
    step(plain_mlp(), X)
    lazy = lazy_mlp()
    lazy(X)
    step(lazy, X)
    assert len(traces) == 1


def test_a_model_that_returns_itself() -> None:
    lazy = lazy_mlp()
    same = nnx.jit(lambda m, x: (m(x), m)[1])(lazy, X)
    assert same is lazy
    assert_same_model(lazy, plain_mlp())


def test_batch_statistics_move_with_the_first_call() -> None:
    def build(norm: Any, linear: Any) -> Any:
        return nnx.Sequential(linear, norm)

    r = nnx.Rngs(0)
    want = build(nnx.BatchNorm(5, rngs=r), nnx.Linear(8, 5, rngs=nnx.Rngs(1)))
    want(X)
    for context in (lambda m: m(X), lambda m: nnx.jit(lambda m, x: m(x))(m, X)):
        lazy = build(lm.LazyBatchNorm(rngs=nnx.Rngs(0)), lm.LazyLinear(5, rngs=nnx.Rngs(1)))
        context(lazy)
        close(lazy.layers[1].mean.get_value(), want.layers[1].mean.get_value())
        assert nnx.graphdef(lazy) == nnx.graphdef(want)


# ---------------------------------------------------------------- refused


def split_and_merge(m: Any, x: jax.Array) -> Any:
    graphdef, state = nnx.split(m)
    return jax.jit(lambda s, x: nnx.merge(graphdef, s)(x))(state, x)


def scan_carry(m: Any, x: jax.Array) -> Any:
    return jax.lax.scan(lambda m, r: (m, m(r)), m, x)


def grad_inside_jit(m: Any, x: jax.Array) -> Any:
    return nnx.jit(lambda m, x: nnx.grad(lambda m: m(x).sum())(m))(m, x)


def some_gradients(m: Any, x: jax.Array) -> Any:
    wrt = nnx.DiffState(0, nnx.PathContains("fc2"))
    return nnx.grad(lambda m: m(x).sum(), argnums=wrt)(m)


def custom_vjp_of_the_model(m: Any, x: jax.Array) -> Any:
    f = nnx.custom_vjp(lambda m, x: m(x))
    f.defvjp(lambda m, x: (m(x), (m, x)), lambda res, ct: (ct[0], jnp.ones_like(res[1])))
    return f(m, x)


def in_remat(m: Any, x: jax.Array) -> Any:
    return nnx.remat(lambda m, x: m(x))(m, x)


LOST: dict[str, Callable[[Any, jax.Array], Any]] = {
    "jax.jit": lambda m, x: jax.jit(lambda m, x: m(x))(m, x),
    "split-merge": split_and_merge,
    "jax.vmap": lambda m, x: jax.vmap(lambda m, r: m(r), in_axes=(None, 0))(m, x),
    "jax.grad": lambda m, x: jax.grad(lambda m: m(x).sum())(m),
    "jax.checkpoint": lambda m, x: jax.checkpoint(lambda m, x: m(x))(m, x),
    "jax.scan-carry": scan_carry,
    "jax.jit-jax.grad": lambda m, x: jax.jit(lambda m, x: jax.grad(lambda m: m(x).sum())(m))(m, x),
    "nnx.grad": lambda m, x: nnx.grad(lambda m: m(x).sum())(m),
    "nnx.value_and_grad": lambda m, x: nnx.value_and_grad(lambda m: m(x).sum())(m),
    "nnx.grad-some": some_gradients,
    "nnx.jit-nnx.grad": grad_inside_jit,
    "nnx.custom_vjp": custom_vjp_of_the_model,
    "nnx.cached_partial": lambda m, x: nnx.cached_partial(nnx.jit(lambda m, x: m(x)), m)(x),
    # blocks inside: the transform next to the layer carries its parameters out, those around lose them
    "nnx.grad-nnx.remat": lambda m, x: nnx.grad(lambda m: in_remat(m, x).sum())(m),
    "nnx.grad-nnx.jit": lambda m, x: nnx.grad(lambda m: nnx.jit(lambda m, x: m(x))(m, x).sum())(m),
    "nnx.value_and_grad-nnx.vmap": lambda m, x: nnx.value_and_grad(
        lambda m: nnx.vmap(lambda m, x: m(x), in_axes=(None, 0))(m, x).sum())(m),
    "nnx.jit-nnx.grad-nnx.remat": lambda m, x: nnx.jit(nnx.grad(lambda m, x: in_remat(m, x).sum()))(m, x),
    "nnx.grad-nnx.jit-nnx.remat": lambda m, x: nnx.grad(lambda m: nnx.jit(in_remat)(m, x).sum())(m),
    "nnx.cached_partial-nnx.remat": lambda m, x: nnx.cached_partial(nnx.jit(in_remat), m)(x),
    "jax.jit-nnx.remat": lambda m, x: jax.jit(in_remat)(m, x),
    "jax.grad-nnx.remat": lambda m, x: jax.grad(lambda m: in_remat(m, x).sum())(m),
    "split-merge-nnx.remat": lambda m, x: jax.jit(
        lambda s, x: in_remat(nnx.merge(nnx.graphdef(m), s), x))(nnx.state(m), x),
}


@pytest.mark.parametrize("context", LOST.values(), ids=LOST)
def test_refused_and_untouched(context: Callable[[Any, jax.Array], Any]) -> None:
    lazy = lazy_mlp()
    with pytest.raises(lm.UninitializedError, match=r"fc1(.|\n)*write:  lm\.materialize\(model, x\)"):
        context(lazy, X)
    assert_untouched(lazy)


@pytest.mark.parametrize("context", LOST.values(), ids=LOST)
def test_what_was_refused_works_once_materialized(context: Callable[[Any, jax.Array], Any]) -> None:
    lazy = lazy_mlp()
    lm.materialize(lazy, spec(2, 8))
    got, want = context(lazy, X), context(plain_mlp(), X)
    close(jax.tree.leaves(got), jax.tree.leaves(want))


def test_nnx_eval_shape_of_a_call() -> None:
    lazy = lazy_mlp()
    try:
        out = nnx.eval_shape(lambda m, x: m(x), lazy, spec(2, 8))
    except lm.UninitializedError as error:
        assert "lm.infer_shapes(model, x)" in str(error)
    else:
        assert (out.shape, out.dtype) == ((2, 4), jnp.float32)
    assert_untouched(lazy)


NNX_LOOPS: dict[str, Callable[[Any, jax.Array], Any]] = {
    "fori_loop": lambda m, x: nnx.fori_loop(0, 2, lambda i, c: (c[0], c[0](c[1])), (m, x)),
    "while_loop": lambda m, x: nnx.while_loop(lambda c: c[2] < 2, lambda c: (c[0], c[0](c[1]), c[2] + 1), (m, x, 0)),
    "scan-carry": lambda m, x: nnx.scan(lambda c, _: ((c[0], c[0](c[1])), 0), length=2)((m, x), None),
    "scan-broadcast": lambda m, x: nnx.scan(
        lambda m, c, _: (m(c), 0), in_axes=(None, nnx.Carry, None), out_axes=(nnx.Carry, 0), length=2)(m, x, None),
    "cond": lambda m, x: nnx.cond(x.sum() > 0, lambda m, x: m(x), lambda m, x: 2 * m(x), m, x),
    "switch": lambda m, x: nnx.switch(1, [lambda m, x: m(x), lambda m, x: 2 * m(x)], m, x),
    "cond-one-branch": lambda m, x: nnx.cond(x.sum() > 0, lambda m, x: m(x), lambda m, x: x, m, x),
}


@pytest.mark.parametrize("context", NNX_LOOPS.values(), ids=NNX_LOOPS)
def test_nnx_control_flow_works_or_says_what_to_write(context: Callable[[Any, jax.Array], Any]) -> None:
    x = array(3, 8)

    def output(result: Any) -> jax.Array:
        return next(v for v in jax.tree.leaves(result) if getattr(v, "shape", None) == (3, 8))

    lazy, want = lazy_mlp(out=8), plain_mlp(out=8)
    try:
        got = output(context(lazy, x))
    except lm.UninitializedError as error:
        assert "fc1" in str(error) and "lm.materialize(model, x)" in str(error)
        assert lm.uninitialized_paths(lazy) == PATHS
        lm.materialize(lazy, x)
        got = output(context(lazy, x))
    assert_same_model(lazy, want)
    close(got, output(context(want, x)))


# ---------------------------------------------------------------- threads, batches, leaks


def test_two_threads_at_once() -> None:
    want = plain_mlp()
    expected = want(X)
    for _ in range(30):
        lazy, out = lazy_mlp(), [None, None]
        barrier = threading.Barrier(2)

        def work(i: int, lazy: Any = lazy, out: Any = out, barrier: Any = barrier) -> None:
            barrier.wait()
            try:
                out[i] = lazy(X)
            except BaseException as error:
                out[i] = error

        threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert_same_bits(out, [expected, expected])
        assert_same_model(lazy, want)


def test_a_thread_that_fails_does_not_take_back_the_others_work() -> None:
    started = threading.Event()

    class Slow(lm.LazyLinear):
        def __call__(self, inputs: jax.Array) -> jax.Array:  # pyright: ignore[reportIncompatibleMethodOverride]
            y = super().__call__(inputs)
            if inputs.shape[0] == 1:
                started.set()
                time.sleep(0.2)  # long enough for the other thread to come through
                raise OSError("broken")
            return y

    layer, errors = Slow(4, rngs=nnx.Rngs(0)), []

    def fail() -> None:
        try:
            layer(X[:1])
        except OSError as error:
            errors.append(error)

    thread = threading.Thread(target=fail)
    thread.start()
    started.wait()
    want = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
    assert_same_bits(layer(X), want(X))
    thread.join()
    assert len(errors) == 1 and not lm.is_lazy(layer)
    assert_same_bits(layer.kernel.get_value(), want.kernel.get_value())


def test_transforms_in_two_threads() -> None:
    lazy, want, out = lazy_mlp(), plain_mlp(), [None, None]
    contexts = [CLOSED_OVER["jax.jit"], CLOSED_OVER["vmap"]]
    threads = [threading.Thread(target=lambda i=i, c=c: out.__setitem__(i, c(lazy, X))) for i, c in enumerate(contexts)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    close(out, [want(X)] * 2)
    assert_same_model(lazy, want)


@pytest.mark.parametrize("context", ["python", "jax.jit", "vmap"])
def test_an_empty_batch(context: str) -> None:
    lazy = lazy_mlp()
    assert CLOSED_OVER[context](lazy, array(0, 8)).shape == (0, 4)
    assert_same_model(lazy, plain_mlp())


@pytest.fixture
def leak_checks() -> Iterator[None]:
    with jax.check_tracer_leaks():
        yield


@pytest.mark.usefixtures("leak_checks")
@pytest.mark.parametrize("name", ["jax.jit", "vmap", "grad", "scan", "checkpoint", "eval_shape", "shard_map",
                                  "nnx.jit"])
def test_no_tracer_leaks_from_a_closure(name: str) -> None:
    lazy = lazy_mlp()
    CLOSED_OVER[name](lazy, X)
    assert_same_model(lazy, plain_mlp())


@pytest.mark.slow
@pytest.mark.usefixtures("leak_checks")
@pytest.mark.parametrize("name", ["nnx.jit", "nnx.vmap", "nnx.remat", "nnx.jit-nnx.remat"])
def test_no_tracer_leaks_from_an_argument(name: str) -> None:
    lazy = lazy_mlp()
    AS_ARGUMENT[name](lazy, X)
    assert_same_model(lazy, plain_mlp())


@pytest.mark.usefixtures("leak_checks")
@pytest.mark.parametrize("find", [lm.materialize, lm.infer_shapes, lm.summary], ids=lambda f: f.__name__)
def test_no_tracer_leaks_from_an_abstract_run(find: Any) -> None:
    lazy = lazy_mlp()
    find(lazy, X)
    lazy(X)
    assert_same_model(lazy, plain_mlp())


def test_the_helpers_model_is_what_it_says() -> None:
    assert type(plain_mlp()) is MLP and type(plain_mlp().fc1) is nnx.Linear and type(lazy_mlp().fc1) is lm.LazyLinear
