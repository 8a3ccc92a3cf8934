"""no_grad, enable_grad, inference_mode: PyTorch's own answers, and stop_gradient by hand, are the oracle."""

import asyncio
import gc
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend.core import get_opaque_trace_state

import lazymods as lm

ag = lm.autograd
X = jnp.array([1.0, -2.0, 3.0])
constant = jax.lax.stop_gradient


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
    "lm.jit": lm.jit,
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


# ---------------------------------------------------------------- uses


def test_one_object_is_used_again_and_inside_of_itself() -> None:
    off, on = ag.no_grad(), ag.enable_grad()

    @off
    def decorated(x: jax.Array, depth: int) -> jax.Array:
        return x * 2 if depth == 0 else decorated(x, depth - 1) + x

    def f(x: jax.Array) -> jax.Array:
        with off, on, off, on:
            y = x**2
        with off, off:
            z = x * 5
        return (y + z * x + decorated(x, 3) * x).sum()

    assert_same(jax.grad(f)(X), 2 * X + 5 * X + 5 * X)


def test_decorators_without_parentheses_and_of_methods() -> None:
    class Model(nnx.Module):
        def __init__(self) -> None:
            self.weight = nnx.Param(jnp.array(3.0))

        @ag.no_grad
        def frozen(self, x: jax.Array) -> jax.Array:
            """Multiply."""
            return x * self.weight[...]

        @ag.inference_mode
        def inference(self, x: jax.Array) -> jax.Array:
            return self.tracked(x)

        @ag.enable_grad
        def tracked(self, x: jax.Array) -> jax.Array:
            return x * self.weight[...]

    model = Model()
    assert Model.frozen.__name__ == "frozen"
    assert Model.frozen.__doc__ == "Multiply."
    assert_same(jax.grad(lambda x: (model.frozen(x) * x).sum())(X), 3 * X)
    assert_same(jax.grad(lambda x: (model.inference(x) * x).sum())(X), 3 * X)
    assert_same(jax.grad(lambda x: (model.tracked(x) * x).sum())(X), 6 * X)
    assert_same(jax.grad(lambda x: (ag.no_grad(model.tracked)(x) * x).sum())(X), 6 * X)


def test_an_exception_leaves_no_mode_behind() -> None:
    @ag.no_grad()
    def fails(x: jax.Array) -> jax.Array:
        raise KeyError

    def f(x: jax.Array) -> jax.Array:
        for attempt in (lambda: fails(x), lambda: next(ag.inference_mode()(generator_that_fails)(x))):
            with pytest.raises(KeyError):
                attempt()
        return (x**2).sum()

    def generator_that_fails(x: jax.Array) -> Iterator[jax.Array]:
        raise KeyError
        yield x

    assert_same(jax.grad(f)(X), 2 * X)
    with pytest.raises(KeyError):
        jax.grad(lambda x: fails(x).sum())(X)
    assert_same(jax.grad(lambda x: (x**2).sum())(X), 2 * X)


@ag.no_grad()
def tripled(x: jax.Array) -> Iterator[jax.Array]:
    """Give three times what is sent, starting with x; of an error, minus x."""
    while True:
        try:
            x = yield x * 3
        except ValueError:
            x = yield x * -1


def test_a_decorated_generator_is_in_the_mode_while_it_runs_and_not_while_it_waits() -> None:
    def f(x: jax.Array) -> jax.Array:
        steps: Any = tripled(x)
        first = next(steps)
        y = x**2
        second = steps.send(y)
        third = steps.throw(ValueError())
        steps.close()
        return (y + first * x + second * x + third * x).sum()

    assert_same(jax.grad(f)(X), 2 * X + 3 * X + 3 * X**2 - X**2)
    steps: Any = tripled(X)  # begun where nothing is differentiated
    next(steps)
    assert_same(jax.grad(lambda x: (x * steps.send(x), steps.close())[0].sum())(X), 3 * X)


def test_a_decorated_generator_returns_and_cleans_up_in_its_mode() -> None:
    made: list[Any] = []
    returned: list[Any] = []

    @ag.no_grad()
    def steps(x: jax.Array) -> Iterator[jax.Array]:
        try:
            yield x
            return x * 3
        finally:
            made.append(x * 3)

    def f(x: jax.Array) -> jax.Array:
        def both() -> Any:
            returned.append((yield from steps(x)))

        returned.clear()
        list(both())
        return (returned.pop() * x + made.pop() * x).sum()

    assert_same(jax.grad(f)(X), 6 * X)

    def closed(x: jax.Array) -> jax.Array:
        waiting: Any = steps(x)
        next(waiting)
        waiting.close()
        return (made.pop() * x).sum()

    assert_same(jax.grad(closed)(X), 3 * X)


def test_a_block_that_a_generator_leaves_late_changes_nothing_there() -> None:
    kept: list[Any] = []

    def steps(x: jax.Array) -> Iterator[jax.Array]:
        with ag.no_grad():
            yield x * 3

    def f(x: jax.Array) -> jax.Array:
        waiting = steps(x)
        kept.append(waiting)
        return next(waiting).sum()

    before = get_opaque_trace_state()
    with jax.check_tracer_leaks(False):  # this is one
        jax.grad(f)(X)
        kept.pop().close()
        assert get_opaque_trace_state() == before
        jax.grad(f)(X)
        assert_same(jax.grad(lambda x: (kept.pop().close() or x**2).sum())(X), 2 * X)


def test_coroutines_and_asynchronous_generators() -> None:
    @ag.no_grad()
    async def coroutine(x: jax.Array) -> jax.Array:
        await asyncio.sleep(0)
        return x * 3

    @ag.no_grad()
    async def generator(x: jax.Array) -> AsyncIterator[jax.Array]:
        for i in range(3):
            await asyncio.sleep(0)
            yield x * i

    async def run(x: jax.Array) -> jax.Array:
        total = x**2
        for part in await asyncio.gather(coroutine(x), coroutine(x), tracked(x)):
            total = total + part * x
        async for part in generator(x):
            total = total + part * x + x
        return total

    async def tracked(x: jax.Array) -> jax.Array:
        await asyncio.sleep(0)
        return x * x

    want = 2 * X + 6 * X + 3 * X**2 + 3 * X + 3
    assert_same(jax.grad(lambda x: asyncio.run(run(x)).sum())(X), want)


def test_each_thread_has_a_mode_of_its_own() -> None:
    ready, errors = threading.Barrier(4), []

    def work(i: int, mode: Any) -> None:
        def f(x: jax.Array) -> jax.Array:
            with mode:
                ready.wait(30)
                y = x * i
                ready.wait(30)
            return (x * y).sum()

        try:
            for _ in range(5):
                assert_same(jax.grad(f)(X), (i if i % 2 else 2 * i) * X)
        except BaseException as error:
            errors.append(error)
            ready.abort()

    off, on = ag.no_grad(), ag.enable_grad()
    threads = [threading.Thread(target=work, args=(i, off if i % 2 else on)) for i in range(1, 5)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert errors == []


def test_nothing_is_kept_of_a_block() -> None:
    mode = ag.no_grad()
    kept: list[Any] = []

    class Held:
        pass

    def f(x: jax.Array) -> jax.Array:
        held = Held()
        kept.append(weakref.ref(held))

        @mode
        def inner(x: jax.Array, held: Any = held) -> jax.Array:
            return x * 3

        return (inner(x) * x).sum()

    with jax.checking_leaks():
        assert_same(jax.grad(f)(X), 3 * X)
        assert_same(jax.grad(jax.jit(f))(X), 3 * X)
        assert_same(jax.jit(jax.grad(f))(X), 3 * X)
    gc.collect()
    assert [reference() for reference in kept] == [None] * len(kept)


# ---------------------------------------------------------------- errors


def test_what_is_no_mode_is_refused() -> None:
    with pytest.raises(lm.ArgumentError) as error:
        ag.inference_mode("off")  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue, reportArgumentType]
    assert str(error.value) == (
        "lm.autograd.inference_mode\n  got:    'off'\n"
        "  needed: True, or False, which ends inference mode for a block\n"
        "  write:  with lm.autograd.inference_mode(): ..."
    )


def test_what_cannot_be_decorated_is_refused() -> None:
    with pytest.raises(lm.ArgumentError, match="what can be called"):
        ag.no_grad()(jnp.ones(2))  # type: ignore[type-var]  # pyright: ignore[reportArgumentType]
    with pytest.raises(lm.ArgumentError) as error:
        ag.inference_mode(False)(nnx.Linear)
    assert str(error.value) == (
        "lm.autograd.inference_mode(False)\n  got:    the class Linear\n"
        "  needed: a function: of a class it would be the construction that runs in the mode\n"
        "  write:  @lm.autograd.inference_mode(False) above the methods that are to run in it"
    )
