"""Calls whose arrays are known are started without jax.jit's look at them: what must be seen all the same."""

import gc
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

import lazymods as lm
from lazymods._compat import jit as _compat_jit
from tests.helpers import array

X = array(4, 4)

pytestmark = pytest.mark.usefixtures("standard_promotion")


def linear(seed: int = 0) -> Any:
    return nnx.Linear(4, 4, bias_init=nnx.initializers.ones, rngs=nnx.Rngs(seed))


def launcher(call: Any) -> Any:
    return call._fast.plan._launch


def forbid(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a call fail that is left to jax.jit."""

    def launch(leaves: Any) -> None:
        raise AssertionError("left to jax.jit")

    monkeypatch.setattr(launcher(call)._program, "launch", launch)


def ready(function: Any, *args: Any, calls: int = 3, **options: Any) -> Any:
    call = lm.jit(function, **options)
    for _ in range(calls):
        call(*args)
    return call


def check(call: Any, model: Callable[..., Any], x: Any) -> None:
    np.testing.assert_allclose(call(x), model(jnp.asarray(x)), rtol=1e-6)


# ---------------------------------------------------------------- what takes the fast path


def test_known_arrays_are_not_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = linear()
    call = ready(model, X)
    forbid(call, monkeypatch)
    check(call, model, X)
    check(call, model, X + 1)  # a new batch of the same kind
    with pytest.raises(AssertionError, match="left to"):
        call(np.asarray(X))


def test_arrays_of_numpy_are_put_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    model = linear()
    given = np.arange(16, dtype=np.float32).reshape(4, 4)
    call = ready(model, given)
    launch = launcher(call)._program.launch
    forbid(call, monkeypatch)
    for x in (given, given * 2, given.T, given[::-1], np.asfortranarray(given)):
        check(call, model, x)
    monkeypatch.setattr(launcher(call)._program, "launch", launch)
    others = [given.astype(np.float64), given.astype(np.int32), given[:2], jnp.asarray(given)]
    for x in (*others, *others[::-1], given, given):
        check(call, model, x)
    with jax.enable_x64(True):
        assert call(given.astype(np.float64)).dtype == jnp.float64


@pytest.mark.parametrize("calls", range(5))
def test_the_transfer_guard_is_asked_at_every_call(calls: int) -> None:
    given = np.asarray(X)
    call = ready(linear(), given, calls=calls)
    for _ in range(2):
        with jax.transfer_guard("disallow"), pytest.raises(jax.errors.JaxRuntimeError, match="Disallowed"):
            call(given)


@pytest.mark.parametrize("calls", range(5))
def test_another_byte_order_is_refused_at_every_call(calls: int) -> None:
    """``jax.jit`` refuses it at its first call only, and later reads the bytes in the wrong order."""
    model, swapped = linear(), np.asarray(X).astype(">f4")
    call = ready(model, np.asarray(X), calls=calls)
    for _ in range(2):
        with pytest.raises(TypeError, match="not a valid JAX array type"):
            call(swapped)
    for _ in range(calls):
        call(X)
    model.kernel.set_value(swapped)
    for _ in range(2):
        with pytest.raises(TypeError, match="not a valid JAX array type"):
            call(X)


@pytest.mark.parametrize("donate", [False, True])
def test_what_a_step_wrote_is_known(donate: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def step(model: nnx.Module, optimizer: nnx.Optimizer, x: jax.Array) -> jax.Array:
        loss, grads = nnx.value_and_grad(lambda m: (m(x) ** 2).mean())(model)
        optimizer.update(model, grads)
        return loss

    def objects() -> tuple[Any, nnx.Optimizer]:
        model = linear()
        return model, nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)

    other, model = objects(), objects()
    want = [nnx.jit(step)(*other, X) for _ in range(8)]
    call = lm.jit(step, donate_state=donate)
    got = [call(*model, X) for _ in range(4)]
    forbid(call, monkeypatch)
    got += [call(*model, X) for _ in range(4)]
    np.testing.assert_allclose(got, want, rtol=1e-6)
    np.testing.assert_allclose(model[0].kernel[...], other[0].kernel[...], rtol=1e-5)


def test_no_second_compile() -> None:
    compiled: list[str] = []

    def listen(event: str, duration_secs: float, **_: Any) -> None:
        compiled.append(event)

    model = linear()
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        call = lm.jit(lambda model, x: jnp.tanh(model(x)))
        for _ in range(5):
            call(model, X)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert launcher(call)._ready is not None
    assert compiled.count("/jax/core/compile/backend_compile_duration") == 1


def test_a_few_new_arrays_are_looked_at_and_many_when_they_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = nnx.Sequential(*(linear(seed) for seed in range(8)))
    call = ready(model, X)
    left: list[int] = []
    launch = launcher(call)._program.launch

    def note(leaves: Any) -> Any:
        left.append(len(leaves))
        return launch(leaves)

    monkeypatch.setattr(launcher(call)._program, "launch", note)
    model.layers[3].bias[...] = jnp.zeros(4)
    check(call, model, X)
    assert not left
    for _ in range(3):
        nnx.update(model, jax.tree.map(lambda v: v * 2, nnx.state(model)))
        for _ in range(3):
            check(call, model, X)
    assert len(left) == 3  # the first call of each three


def test_arrays_of_another_kind_that_stay_become_known(monkeypatch: pytest.MonkeyPatch) -> None:
    model = linear()
    call = ready(model, X)
    device = jax.devices()[0]
    nnx.update(model, jax.device_put(nnx.state(model), device))
    for _ in range(4):
        assert call(X).committed
    forbid(call, monkeypatch)
    check(call, model, X)


# ---------------------------------------------------------------- what has to be seen


@pytest.mark.parametrize("write", [lambda v, a: v.set_value(a), lambda v, a: object.__setattr__(v, "_raw_value", a)])
@pytest.mark.parametrize(
    "new",
    [jnp.eye(4) * 3, jnp.arange(16, dtype=jnp.int32).reshape(4, 4), jnp.ones((4, 2)), np.eye(4, dtype=np.float32)],
    ids=["values", "dtype", "shape", "numpy"],
)
def test_a_new_value_of_a_variable(write: Callable[..., None], new: Any) -> None:
    model = nnx.Linear(4, 4, use_bias=False, rngs=nnx.Rngs(0))
    call = ready(model, X)
    write(model.kernel, new)
    for _ in range(4):
        check(call, model, X)


@pytest.mark.parametrize(
    "x",
    [
        jnp.arange(16, dtype=jnp.int32).reshape(4, 4),
        jnp.ones((2, 4)),
        jnp.ones((4, 4), jnp.float16),
        jnp.full((4, 4), 2.0),  # a weak type
        np.ones((4, 4)),
        [[1.0, 2.0, 3.0, 4.0]],
    ],
    ids=["int32", "shape", "float16", "weak", "numpy", "list"],
)
def test_another_input(x: Any) -> None:
    model = linear()

    def run(x: Any) -> Any:
        return model(jnp.asarray(x))

    call = ready(run, X)
    for value in (x, X, x, x, X, X, X, x):
        got, want = call(value), run(value)
        assert (got.dtype, got.weak_type) == (want.dtype, want.weak_type)
        np.testing.assert_allclose(got, want, rtol=2e-3 if got.dtype == jnp.float16 else 1e-6)


def test_deleted_arrays_are_named() -> None:
    model = linear()
    call = ready(model, X)
    model.bias[...].delete()
    with pytest.raises(RuntimeError, match=r"deleted with shape=float32\[4\]"):
        call(X)
    model.bias.set_value(jnp.zeros(4))
    check(call, model, X)


def test_an_argument_that_is_donated_state_is_copied() -> None:
    class Sum(nnx.Module):
        def __init__(self) -> None:
            self.total = nnx.Variable(jnp.zeros(4))
            self.last = nnx.Variable(jnp.zeros(4))
            self.rest = nnx.List([nnx.Param(jnp.ones(4)) for _ in range(16)])  # so that two are few

        def __call__(self, x: jax.Array) -> jax.Array:
            self.total[...] = self.total[...] + x * sum(r[...] for r in self.rest)
            self.last[...] = self.last[...] * 0.5 + x
            return self.total[...] * 1

    model, twin = Sum(), Sum()
    call = lm.jit(model, donate_state=True)
    for _ in range(4):
        np.testing.assert_allclose(call(jnp.ones(4)), twin(jnp.ones(4)))
    assert launcher(call)._ready is not None
    for _ in range(3):
        np.testing.assert_allclose(call(model.total.get_value()), twin(twin.total[...]))
    for one in (model, twin):
        one.last.set_value(one.total.get_value())  # both are one array
    for _ in range(4):
        np.testing.assert_allclose(call(jnp.ones(4)), twin(jnp.ones(4)))
        np.testing.assert_allclose(model.last[...], twin.last[...])


def test_settings_of_jax() -> None:
    model = linear()
    call = ready(lambda x: jnp.log(model(x)), X)
    assert launcher(call)._ready is not None
    bad = jnp.full((4, 4), -jnp.inf)
    with jax.debug_nans(True), pytest.raises(FloatingPointError):
        call(bad)
    seen: list[Any] = []
    with jax.disable_jit():
        plain = lm.jit(lambda m, x: seen.append(1) or m(x))
        for _ in range(3):
            plain(model, X)
    assert len(seen) == 3
    for _ in range(3):
        plain(model, X)
    with jax.disable_jit():
        plain(model, X)
    assert len(seen) == 5
    with jax.enable_x64(True):
        wide = jnp.ones((4, 4))
        assert call(wide).dtype == jnp.float64
    np.testing.assert_allclose(call(X), jnp.log(model(X)), rtol=1e-6)


def test_callbacks_are_called_each_time() -> None:
    seen: list[float] = []
    model = linear()

    def run(x: jax.Array) -> jax.Array:
        jax.debug.callback(lambda v: seen.append(float(v)), x.sum(), ordered=True)
        return model(x)

    call = lm.jit(run)
    for number in range(5):
        call(jnp.full((4, 4), float(number)))
    jax.effects_barrier()
    assert seen == [0.0, 16.0, 32.0, 48.0, 64.0]


def test_constants_and_values_without_use() -> None:
    table = jnp.arange(16.0).reshape(4, 4)

    class Odd(nnx.Module):
        def __init__(self) -> None:
            self.unused = nnx.Param(jnp.ones((3, 3)))
            self.scale = nnx.Param(jnp.full((1, 4), 2.0))

        def __call__(self, x: jax.Array) -> jax.Array:
            return x * self.scale + table * self.unused.shape[0]

    model = Odd()
    call = ready(model, X)
    check(call, model, X)
    model.unused.set_value(jnp.ones((5, 5)))
    for _ in range(4):
        check(call, model, X)


@pytest.mark.parametrize(
    "value",
    [None, {}, (), {"a": jnp.ones(2), "b": jnp.ones(3)}, [jnp.ones(2)], 3.0, np.ones(3), np.float32(2)],
    ids=repr,
)
@pytest.mark.parametrize("is_used", [True, False])
def test_a_variable_may_hold_anything(value: Any, is_used: bool) -> None:
    class Holder(nnx.Module):
        def __init__(self, value: Any) -> None:
            self.weight, self.held = nnx.Param(jnp.ones(3)), nnx.Variable(value)

        def __call__(self, x: jax.Array) -> jax.Array:
            held = self.held.get_raw_value()
            out = x * self.weight + (1 if held is None else 2)
            return out + sum(jnp.sum(leaf) for leaf in jax.tree.leaves(held)) if is_used else out

    x = jnp.ones(3)
    model = Holder(value)
    check(ready(model, x, calls=5), model, x)
    model = Holder(jnp.ones(4))
    call = ready(model, x)
    for _ in range(2):
        for held in (value, jnp.ones(4), value):
            object.__setattr__(model.held, "_raw_value", held)  # as flax does in nnx.update
            for _ in range(3):
                check(call, model, x)


def test_an_argument_may_be_none() -> None:
    model = linear()
    run = lm.jit(lambda model, x, y, z: model(x) + (0 if y is None else y) + (0 if z["y"] is None else z["y"]))
    want = model(X)
    for y, z in [(None, None), (1.0, None), (X, X), (None, X), (X, None), (None, None)] * 3:
        added = sum(v for v in (y, z) if v is not None)
        np.testing.assert_allclose(run(model, X * 1, y, {"y": z}), want + added, rtol=1e-6)
    for _ in range(3):
        for y in (jnp.zeros((4, 4)), None):
            np.testing.assert_allclose(run(model, X * 1, y, {"y": y}), want, rtol=1e-6)


def test_arrays_are_not_kept_alive() -> None:
    model = linear()
    call = ready(model, X, calls=5)
    x = X * 2
    call(x)
    gone = [weakref.ref(model.kernel.get_raw_value()), weakref.ref(x)]
    del x
    model.kernel.set_value(jnp.zeros((4, 4)))
    assert [ref() for ref in gone] == [None, None]
    out = weakref.ref(call(X))
    gc.collect()
    assert out() is None


def test_random_keys_and_counters_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def make() -> nnx.Dropout:
        return nnx.Dropout(0.5, rngs=nnx.Rngs(7))

    model, twin = make(), make()
    call = lm.jit(model)
    for number in range(8):
        if number == 4:
            forbid(call, monkeypatch)
        np.testing.assert_array_equal(call(X), twin(X))


def test_threads_share_a_launcher() -> None:
    model = linear()
    call = ready(model, X)
    inputs = [array(4, 4, seed=n) for n in range(4)]
    wants = [np.asarray(model(x)) for x in inputs]

    def work(number: int) -> list[int]:
        bad = []
        for turn in range(200):
            x = inputs[number] if turn % 7 else jax.device_put(inputs[number], jax.devices()[0])
            if not np.allclose(call(x), wants[number], rtol=1e-6):
                bad.append(turn)
        return bad

    with ThreadPoolExecutor(4) as threads:
        assert [*threads.map(work, range(4))] == [[]] * 4


VALUES = [
    lambda: jnp.ones((4, 4)),
    lambda: jnp.eye(4),
    lambda: jnp.eye(4, dtype=jnp.int32),
    lambda: jnp.eye(4, dtype=jnp.float16),
    lambda: np.eye(4, dtype=np.float32),
    lambda: jax.device_put(jnp.eye(4) * 2, jax.devices()[0]),
]


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 5)), min_size=3, max_size=25), st.booleans())
def test_any_order_of_writes_and_calls(does: list[tuple[int, int]], donate: bool) -> None:
    class Net(nnx.Module):
        def __init__(self) -> None:
            self.first, self.second = nnx.Param(jnp.ones((4, 4))), nnx.Param(jnp.ones((4, 4)))
            self.seen = nnx.Variable(jnp.zeros((4, 4)))

        def __call__(self, x: Any) -> jax.Array:
            self.seen[...] = (self.seen[...] * 0.5 + x).astype(jnp.float32)
            return jnp.asarray(x) @ self.first[...] + self.second[...] * self.seen[...]

    model, twin = Net(), Net()
    call = lm.jit(model, donate_state=donate)
    outs: list[Any] = []
    for what, which in does:
        for net, run in ((model, call), (twin, twin)):
            if what == 0:
                net.first.set_value(VALUES[which]())
            elif what == 1:
                object.__setattr__(net.second, "_raw_value", VALUES[which]())
            elif what == 2:
                net.second.set_value(net.first.get_value())
            else:
                outs.append(np.asarray(run(VALUES[which]()), np.float32))
        if what > 2:
            np.testing.assert_allclose(outs[-2], outs[-1], rtol=1e-5)
    np.testing.assert_allclose(model.seen[...], twin.seen[...], rtol=1e-5)


@pytest.mark.parametrize(
    ("other", "same"),
    [
        (jnp.zeros(3), True),
        (jnp.ones(4), False),
        (jnp.ones(3, jnp.int32), False),
        (jax.device_put(jnp.ones(3), jax.devices()[0]), False),
        (jnp.asarray(1.0) * jnp.ones(3), True),
        (jax.jit(lambda: 1.0 * jnp.full(3, 1.0))(), False),
    ],
    ids=["values", "shape", "dtype", "committed", "computed", "weak"],
)
def test_what_jax_looks_at_tells_arrays_apart(other: jax.Array, same: bool) -> None:
    assert (_compat_jit.kind_of_array(other) == _compat_jit.kind_of_array(jnp.ones(3))) is same
