"""no_grad and the others as they are used: decorators, generators, coroutines, threads, exceptions, wrong uses."""

import asyncio
import gc
import threading
import weakref
from collections.abc import AsyncIterator, Iterator
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


def assert_same(got: Any, want: Any) -> None:
    np.testing.assert_allclose(got, want, rtol=1e-6)


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


@pytest.mark.slow
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
        "  write:  with lm.autograd.inference_mode(False): model(x)  "
        "# or as a decorator of the methods that are to run in it"
    )


# ---------------------------------------------------------------- what is only passed on


class Two(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.used, self.other = nnx.Linear(2, 2, rngs=rngs), nnx.Linear(2, 2, rngs=rngs)


@pytest.mark.parametrize("wrap", [nnx.jit, nnx.remat, ag.recompute, lm.jit, lambda f: f])
@pytest.mark.parametrize("outer", [lambda f: f, nnx.jit, lm.jit], ids=["plain", "nnx.jit", "lm.jit"])
def test_parameters_that_a_call_only_passes_on_keep_their_gradient(wrap: Any, outer: Any) -> None:
    x = jnp.array([[1.0, 2.0], [3.0, -1.0]])
    target = wrap(lambda model, x: model.used(x))

    def loss(model: Any) -> Any:
        with ag.no_grad():
            y = target(model, x)
        return (model.other(y) ** 2).sum()

    def by_hand(model: Any) -> Any:
        return (model.other(jax.lax.stop_gradient(model.used(x))) ** 2).sum()

    got, want = outer(nnx.grad(loss))(Two()), nnx.grad(by_hand)(Two())
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


PASSING = {
    "jit": jax.jit(lambda x: (jnp.sin(x), x)),
    "nested": jax.jit(lambda x: (jnp.sin(x), jax.jit(lambda y: (y * 2, y))(x)[1])),
    "checkpoint": jax.checkpoint(lambda x: (jnp.sin(x), x)),
    "recompute": ag.recompute(lambda x: (jnp.sin(x), x)),
    "asarray": lambda x: (jnp.sin(x), jnp.asarray(x)),
    "astype": lambda x: (jnp.sin(x), x.astype(x.dtype)),
    "nothing": lambda x: (jnp.sin(x), x),
}


@pytest.mark.parametrize("run", ["grad", "jit of grad", "grad of jit", "jacfwd", "lm.jit"])
@pytest.mark.parametrize("name", PASSING)
def test_a_value_that_is_only_passed_on_keeps_its_gradient(name: str, run: str) -> None:
    def f(x: Any) -> Any:
        with ag.no_grad():
            made, kept = PASSING[name](x)
        return (made * kept).sum()

    runs: dict[str, Any] = {
        "grad": jax.grad(f),
        "jit of grad": jax.jit(jax.grad(f)),
        "grad of jit": jax.grad(jax.jit(f)),
        "jacfwd": jax.jacfwd(f),
        "lm.jit": lm.jit(jax.grad(f)),
    }
    x = jnp.array([0.5, 2.0])
    np.testing.assert_allclose(runs[run](x), np.sin([0.5, 2.0]), rtol=1e-6)


def test_so_does_one_beside_operations_that_are_switched_on() -> None:
    inner = jax.jit(lambda x: (x * 2, x))

    @jax.jit
    def mixed(x: Any) -> Any:
        doubled, kept = inner(x)
        with ag.enable_grad():
            cubed = kept**3
        return doubled, kept, cubed

    def f(x: Any) -> Any:
        with ag.no_grad():
            doubled, kept, cubed = mixed(x)
        return (doubled + 10 * kept + cubed).sum()

    x = jnp.array([0.5, 2.0])
    for run in (jax.grad(f), jax.jit(jax.grad(f)), jax.grad(jax.jit(f))):
        np.testing.assert_allclose(run(x), 10 + 3 * np.array([0.25, 4.0]), rtol=1e-6)


def test_an_array_of_numpy_that_is_passed_on_is_one_of_jax() -> None:
    def f(x: Any) -> Any:
        with ag.no_grad():
            kept = jax.jit(lambda a: a)(np.ones(2, np.float32))
            count = jnp.asarray(np.uint32(3))
        assert isinstance(kept, jax.Array) and isinstance(count, jax.Array)
        return (x * kept * count.astype(jnp.float32)).sum()

    for run in (jax.grad(f), jax.jit(jax.grad(f)), jax.grad(jax.jit(f))):
        np.testing.assert_array_equal(run(jnp.ones(2)), [3.0, 3.0])
