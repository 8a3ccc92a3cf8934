"""Python decisions inside ``lm.jit``, beside the same function run eagerly."""

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import lazymods as lm
from lazymods.compile.records import Effects


class Net(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.first = nnx.Linear(3, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.last = nnx.Linear(8, 2, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.norm(self.first(x))
        x = nnx.relu(x) if x.max() > 1 else self.drop(x)
        return self.last(x)


def inputs(n: int) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=(4, 3)) * rng.choice([0.1, 3.0]), jnp.float32) for _ in range(n)]


def states(run: Callable[[Any], Any]) -> list[Any]:
    """Outputs and final state of a loop whose step goes through ``run``."""
    net = Net(rngs=nnx.Rngs(0))
    outputs = run(net)
    return jax.tree.map(np.asarray, [outputs, nnx.to_pure_dict(nnx.state(net, nnx.Not(nnx.RngKey)))])


def assert_close(a: Any, b: Any) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), a, b)


@pytest.mark.slow
@pytest.mark.parametrize("closed", [False, True])
def test_models_that_decide_are_as_in_plain_python(closed: bool) -> None:
    def loop(jit: Any) -> Any:
        def run(net: Net) -> list[Any]:
            step = jit(lambda x: net(x)) if closed else jit(lambda net, x: net(x))
            return [step(x) if closed else step(net, x) for x in inputs(8)]

        return run

    assert_close(states(loop(lm.jit)), states(loop(lambda f: f)))


@pytest.mark.slow
def test_a_train_step_that_skips_what_is_not_finite() -> None:
    def step(net: Net, optimizer: nnx.Optimizer, x: jax.Array) -> jax.Array:
        loss, grads = nnx.value_and_grad(lambda net: (net(x) ** 2).mean())(net)
        if jnp.isfinite(loss):
            optimizer.update(net, grads)
        return loss

    def loop(jit: Any) -> Any:
        def run(net: Net) -> list[Any]:
            optimizer, f = nnx.Optimizer(net, optax.sgd(1e-2, momentum=0.9), wrt=nnx.Param), jit(step)
            losses = []
            for i, x in enumerate(inputs(6)):
                losses.append(jnp.nan_to_num(f(net, optimizer, x * (jnp.inf if i == 3 else 1)), nan=-1.0))
            return losses

        return run

    def eager_statistics_stay(run: Any) -> Any:
        outputs, state = states(run)
        return outputs, {k: v for k, v in state.items() if k != "norm"}

    assert_close(eager_statistics_stay(loop(lm.jit)), eager_statistics_stay(loop(lambda f: f)))


def test_equal_models_share_the_paths() -> None:
    traces = []

    @lm.jit
    def f(net: Net, x: jax.Array) -> jax.Array:
        y = net.first(x)
        if y.sum() > 0:
            traces.append("more")
            return y
        traces.append("less")
        return -y

    a, b = Net(rngs=nnx.Rngs(0)), Net(rngs=nnx.Rngs(1))
    for net in (a, b, a, b):
        for x in inputs(6):
            expected = net.first(x)
            np.testing.assert_allclose(f(net, x), expected if expected.sum() > 0 else -expected, rtol=1e-5)
    assert sorted(traces) == ["less", "more"] and f.cache_info().currsize == 1


def test_no_model_lives_on_in_the_paths() -> None:
    f = lm.jit(lambda net, x: net.first(x) if net.first(x).sum() > 0 else x)
    net = Net(rngs=nnx.Rngs(0))
    f(net, inputs(1)[0])
    f(net, -inputs(1)[0])
    alive = [weakref.ref(net), weakref.ref(net.first.kernel.get_value())]
    del net
    gc.collect()
    assert [ref() for ref in alive] == [None, None]


def test_a_lazy_model_that_decides_is_initialized_by_its_first_call() -> None:
    class Lazy(nnx.Module):
        def __init__(self, *, rngs: nnx.Rngs):
            self.layer = lm.LazyLinear(4, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            x = self.layer(x)
            return x if x.sum() > 0 else -x

    model, explicit = Lazy(rngs=nnx.Rngs(0)), nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    f = lm.jit(model)
    for x in inputs(4):
        expected = explicit(x)
        np.testing.assert_allclose(f(x), expected if expected.sum() > 0 else -expected, rtol=1e-5)
    assert type(model.layer) is nnx.Linear
    np.testing.assert_array_equal(model.layer.kernel.get_value(), explicit.kernel.get_value())


def test_an_error_on_a_new_path_changes_nothing() -> None:
    @lm.jit
    def f(net: Any, x: jax.Array) -> jax.Array:
        net.first.bias.set_value(net.first.bias.get_value() + 1)
        if x.sum() > 0:
            return x
        raise ValueError("negative")

    net: Any = Net(rngs=nnx.Rngs(0))
    f(net, jnp.ones(2))
    for _ in range(2):
        with pytest.raises(ValueError, match="negative"):
            f(net, -jnp.ones(2))
        np.testing.assert_array_equal(net.first.bias.get_value(), np.ones(8))
    f(net, jnp.ones(2))
    np.testing.assert_array_equal(net.first.bias.get_value(), 2 * np.ones(8))


def test_paths_are_found_by_keyword_arguments_too() -> None:
    f = lm.jit(lambda x, scale: x * scale if x.sum() > 0 else -x)
    for sign in (1, 1, -1, 1, -1):
        x = sign * jnp.ones(2)
        np.testing.assert_array_equal(f(x, scale=jnp.float32(3)), x * 3 if sign > 0 else -x)


def test_a_boolean_index_is_a_decision() -> None:
    f = lm.jit(lambda x: x[x > 0])
    for values in ([1.0, -1.0, 2.0], [-1.0, -1.0, 2.0], [1.0, -1.0, 2.0]):
        x = jnp.array(values)
        np.testing.assert_array_equal(f(x), x[x > 0])


def test_explain_names_a_new_path() -> None:
    f = lm.jit(lambda x: x if x.sum() > 0 else -x)
    f(jnp.ones(2))
    f(-jnp.ones(2))
    assert "a new path" in str(lm.explain())


def test_inside_of_jax_jit_a_decision_is_an_error_of_jax() -> None:
    f = lm.jit(lambda x: x if x.sum() > 0 else -x)
    with pytest.raises(jax.errors.TracerBoolConversionError):
        jax.jit(lambda x: f(x))(jnp.ones(2))
    np.testing.assert_array_equal(f(-jnp.ones(2)), np.ones(2))


def test_what_a_path_writes_twice_is_donated_once() -> None:
    class Two(nnx.Module):
        def __init__(self) -> None:
            self.a, self.b = nnx.Variable(jnp.zeros(3)), nnx.Variable(jnp.ones(3))

    @lm.jit
    def both(m: Two, x: jax.Array) -> None:
        y = x * 2 if x.sum() > 0 else x
        m.a.set_value(y)
        m.b.set_value(y)

    @lm.jit(donate_state=True)
    def grow(m: Two) -> None:
        m.a[...], m.b[...] = m.a[...] + 1, m.b[...] + 2

    model = Two()
    for _ in range(4):
        grow(model)
    for _ in range(3):
        both(model, jnp.ones(3))
        grow(model)
        np.testing.assert_array_equal(model.a[...], np.full(3, 3.0))
        np.testing.assert_array_equal(model.b[...], np.full(3, 4.0))


def test_two_threads_find_the_same_path() -> None:
    model = nnx.Dict(a=nnx.Variable(jnp.int32(0)), b=nnx.Variable(jnp.int32(0)))
    both, waits = threading.Barrier(2), []

    @lm.jit(max_paths=100)
    def f(x: jax.Array) -> jax.Array:
        number = int(x)
        if waits:
            both.wait(60)
        model["a" if number % 2 else "b"].set_value(x * 10)
        return x + 1

    for number in (0, 0):
        f(jnp.int32(number))
    waits.append(1)
    threads = [threading.Thread(target=f, args=(jnp.int32(1),)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    waits.clear()
    # a plan knows by the record what a path writes: one that was found twice must not go away and leave its id
    records = {id(thing) for thing in gc.get_objects() if type(thing) is Effects}
    writers = f._fast.plan._writers  # type: ignore[union-attr]
    assert {key if isinstance(key, int) else id(key) for key in writers} <= records
    for number in range(2, 40):
        f(jnp.int32(number))
        assert int(model["a" if number % 2 else "b"][...]) == 10 * number


def rounded(x: jax.Array) -> Any:
    y = x * 2
    try:
        n = int(y)
    except (ValueError, OverflowError) as error:
        return x * 0 + 1, type(error).__name__
    return y + n, n


def test_a_number_that_python_can_not_make_is_a_decision() -> None:
    f = lm.jit(rounded)
    for _ in range(2):
        for number in (float("nan"), 2.0, float("inf"), 3.0):
            got, want = f(jnp.float32(number)), rounded(jnp.float32(number))
            np.testing.assert_array_equal(got[0], want[0])
            assert got[1] == want[1]
    with pytest.raises(ValueError, match="NaN"):
        lm.jit(lambda x: int(x * 2))(jnp.float32(float("nan")))
