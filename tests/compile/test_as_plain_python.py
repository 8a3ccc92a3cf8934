"""What ``lm.jit`` gives and leaves behind is what plain Python does: faults that were found, each with its kind."""

import copy
import functools
import pickle
import random
import threading
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import lazymods as lm

X = jnp.arange(6.0).reshape(2, 3)

pytestmark = pytest.mark.usefixtures("standard_promotion")


def net() -> nnx.Linear:
    return nnx.Linear(3, 2, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("number", [0.25, 2, True, np.float32(0.5), np.int32(3)], ids=repr)
def test_a_number_is_an_input_of_a_function_that_decides(number: Any) -> None:
    def step(w: jax.Array, rate: Any) -> jax.Array:
        return w * 0 if jnp.abs(w).max() > 10 else w - rate * w

    f, w = lm.jit(step), jnp.ones(2)
    for rate in (type(number)(1), number, type(number)(0)):
        np.testing.assert_allclose(f(w, rate), step(w, rate))


def test_python_decides_on_a_number_that_is_an_argument() -> None:
    f = lm.jit(lambda x, n: x if n <= 0 else x * 2)
    assert [float(f(jnp.float32(1), n)) for n in (0, 1, 0, 1)] == [1, 2, 1, 2]


@pytest.mark.parametrize("decides", [False, True])
def test_a_typed_key_is_an_argument(decides: bool) -> None:
    def draw(key: jax.Array, x: jax.Array) -> jax.Array:
        y = jax.random.normal(key, (2,)) + x.sum()
        return -y if decides and x.sum() < 0 else y

    f = lm.jit(draw)
    for seed in (0, 1):
        np.testing.assert_allclose(f(jax.random.key(seed), X), draw(jax.random.key(seed), X), rtol=1e-6)


@pytest.mark.parametrize(
    "make", [lambda x: (x * i for i in range(2)), lambda x: lambda: x * 2], ids=["iterator", "closure"]
)
def test_what_no_call_can_return_again_is_refused(make: Any) -> None:
    f = lm.jit(make)
    for _ in range(2):
        with pytest.raises(lm.LazyError, match="a result of the compiled function"):
            f(X)


def inner_step(model: nnx.Linear, optimizer: nnx.Optimizer[Any], x: jax.Array) -> None:
    grads = nnx.grad(lambda m: (m(x) ** 2).mean())(model)
    optimizer.update(model, grads)


def in_scan(model: nnx.Linear, optimizer: nnx.Optimizer[Any], x: jax.Array) -> None:
    def body(carry: Any, x: jax.Array) -> Any:
        inner_step(carry[0], carry[1], x)
        return carry

    nnx.scan(body, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)((model, optimizer), x[None])


def in_cond(model: Any, optimizer: nnx.Optimizer[Any], x: jax.Array) -> None:
    branches: Any = (inner_step, lambda *_: None)
    nnx.cond(x.sum() > 0, *branches, model, optimizer, x)


@pytest.mark.parametrize("step", [nnx.jit(inner_step), in_scan, in_cond], ids=["nnx.jit", "nnx.scan", "nnx.cond"])
def test_an_optimizer_inside_a_transform_keeps_its_state(step: Any) -> None:
    ours, plain = net(), net()
    tx = optax.chain(optax.clip(1.0), optax.adam(0.1, eps=1e-3))
    optimizer, other = nnx.Optimizer(ours, tx, wrt=nnx.Param), nnx.Optimizer(plain, tx, wrt=nnx.Param)
    f = lm.jit(lambda model, optimizer, x: step(model, optimizer, x))
    for i in range(3):
        f(ours, optimizer, X + i)
        step(plain, other, X + i)
    got, want = nnx.to_pure_dict(nnx.state((ours, optimizer))), nnx.to_pure_dict(nnx.state((plain, other)))
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), got, want)


class Changing(nnx.Module):
    def __init__(self) -> None:
        self.scale: Any = 1
        self.w = nnx.Param(jnp.ones(2, jnp.int32))


def alternate_type(m: Changing) -> jax.Array:
    m.scale = 1.0 if type(m.scale) is int else 1
    return m.w[...] * m.scale


def alternate_metadata(m: Changing) -> jax.Array:
    phase = m.w.get_metadata().get("phase", 0)
    m.w.set_metadata("phase", 1 - phase)
    return m.w[...] * (10 if phase else 1)


@pytest.mark.parametrize("change", [alternate_type, alternate_metadata])
def test_what_a_call_changes_is_seen_by_the_next(change: Any) -> None:
    ours, plain = Changing(), Changing()
    f = lm.jit(change)
    for _ in range(4):
        got, want = f(ours), change(plain)
        np.testing.assert_array_equal(got, want)
        assert got.dtype == want.dtype


class Trainer:
    """A model with a counter and a list beside it."""

    def __init__(self) -> None:
        self.model, self.steps_done, self.losses, self.rate = net(), 0, [], 0.5
        self.step = lm.jit(self._step)

    def _step(self, x: jax.Array) -> jax.Array:
        self.model.kernel[...] -= self.rate * self.model(x).mean()
        return self.model(x).sum()

    def fit(self, steps: int) -> None:
        for _ in range(steps):
            self.losses.append(float(self.step(X)))
            self.steps_done += 1


def test_attributes_that_are_not_read_are_no_part_of_the_program() -> None:
    trainer, before = Trainer(), lm.metrics()["traces"]
    trainer.fit(5)
    assert lm.metrics()["traces"] - before == 1
    trainer.rate = 0.25
    want = copy.deepcopy(trainer)
    np.testing.assert_allclose(trainer.step(X), want._step(X), rtol=1e-5)
    assert lm.metrics()["traces"] - before == 2


def test_a_copy_of_a_trainer_has_a_step_of_its_own() -> None:
    trainer = Trainer()
    trainer.fit(1)
    other = copy.deepcopy(trainer)
    before = np.array(trainer.model.kernel[...])
    other.fit(1)
    np.testing.assert_array_equal(trainer.model.kernel[...], before)
    assert not np.array_equal(other.model.kernel[...], before)


@lm.jit
def at_module_level(x: jax.Array) -> jax.Array:
    return x * 2


def test_what_a_module_holds_by_name_is_pickled_by_name() -> None:
    assert pickle.loads(pickle.dumps(at_module_level)) is at_module_level


@pytest.mark.parametrize("how", ["argument", "closure", "bound"])
def test_another_thread_may_use_the_model_while_it_is_traced(how: str) -> None:
    model, tracing, done = net(), threading.Event(), threading.Event()
    want, seen = model(X), []

    def body(m: nnx.Linear, x: jax.Array) -> jax.Array:
        tracing.set()
        done.wait(20)
        return m(x)

    class Holder:
        def __init__(self) -> None:
            self.model = model

        def call(self, x: jax.Array) -> jax.Array:
            return body(self.model, x)

    calls = {
        "argument": lambda: lm.jit(body)(model, X),
        "closure": lambda: lm.jit(lambda x: body(model, x))(X),
        "bound": lambda: lm.jit(Holder().call)(X),
    }

    def read() -> None:
        tracing.wait(20)
        try:
            seen.append(np.asarray(model(X)))
        finally:
            done.set()

    thread = threading.Thread(target=read)
    thread.start()
    got = calls[how]()
    thread.join()
    np.testing.assert_array_equal(seen[0], want)
    np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize(
    "around", [lambda f: f, lm.jit, lambda f: jax.grad(lambda x: f(x).sum())], ids=["plain", "lm", "grad"]
)
def test_a_function_that_decides_inside_another_engine(around: Any) -> None:
    def decide(x: jax.Array) -> jax.Array:
        return x * 2 if x.sum() > 0 else -x

    for x in (X, -X):
        want = around(decide)(x) if around is not lm.jit else decide(x) + 1
        f = lm.jit(decide)
        got = lm.jit(lambda x, f=f: f(x) + 1)(x) if around is lm.jit else around(f)(x)
        np.testing.assert_allclose(got, want)


def test_the_check_finds_what_no_program_can_see() -> None:
    f = lm.jit(lambda x: x * random.random(), check=True)
    with pytest.raises(lm.LazyError, match="output"):
        f(X)


def test_the_check_passes_gradients_of_integers() -> None:
    def grads(x: jax.Array, n: jax.Array) -> Any:
        return jax.grad(lambda x, n: (x * n).sum(), argnums=(0, 1), allow_int=True)(x, n)

    def passed_on(x: jax.Array, n: jax.Array, g: Any) -> Any:
        return [g, *grads(x, n)], x * 2

    x, n = jnp.ones(3), jnp.arange(3)
    got, empty = lm.jit(grads, check=True)(x, n)
    np.testing.assert_allclose(got, [0.0, 1.0, 2.0])
    for given in (empty, np.zeros(3, jax.dtypes.float0)):
        (first, *_), twice = lm.jit(passed_on, check=True)(x, n, given)
        assert first.dtype == jax.dtypes.float0
        np.testing.assert_allclose(twice, 2 * np.ones(3))


def test_the_check_passes_what_is_right() -> None:
    model, optimizer = net(), None
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    f = lm.jit(inner_step, check=True)
    before = np.array(model.kernel[...])
    for i in range(3):
        f(model, optimizer, X + i)
    assert not np.array_equal(model.kernel[...], before)


class Scaled:
    """Reads its scale on one of two paths only."""

    def __init__(self) -> None:
        self.model, self.scale = net(), 3.0

    def step(self, x: jax.Array) -> jax.Array:
        y = self.model(x)
        return y if x.sum() > 0 else y * self.scale


def test_a_path_that_is_new_after_many_calls_may_read_more() -> None:
    trainer = Scaled()
    f = lm.jit(trainer.step)
    for x in (X, X, X, -X, X, -X):
        np.testing.assert_allclose(f(x), trainer.step(x), rtol=1e-6)
    trainer.scale = 5.0
    np.testing.assert_allclose(f(-X), trainer.step(-X), rtol=1e-6)


def test_a_path_that_is_new_after_many_calls_may_reach_a_hidden_model() -> None:
    @functools.lru_cache
    def find() -> nnx.Linear:
        return nnx.Linear(3, 2, rngs=nnx.Rngs(1))

    model, hidden = net(), find()
    f = lm.jit(lambda m, x: m(x) if x.sum() > 0 else find()(x))
    for x in (X, X, X, -X, X, -X):
        np.testing.assert_allclose(f(model, x), (model if x.sum() > 0 else hidden)(x), rtol=1e-6)
    hidden.kernel[...] = hidden.kernel[...] * 2
    np.testing.assert_allclose(f(model, -X), hidden(-X), rtol=1e-6)


def test_a_path_that_is_new_after_many_calls_may_meet_a_lazy_layer() -> None:
    def make(last: nnx.Module) -> nnx.List:
        return nnx.List([net(), last])

    ours = make(lm.LazyLinear(2, rngs=nnx.Rngs(1)))
    plain = make(nnx.Linear(2, 2, rngs=nnx.Rngs(1)))

    def call(m: Any, x: jax.Array) -> jax.Array:
        y = m[0](x)
        return y if x.sum() > 0 else m[1](y)

    f = lm.jit(call)
    for x in (X, X, X, -X, -X, X):
        np.testing.assert_allclose(f(ours, x), call(plain, x), rtol=1e-6)
    assert type(ours[1]) is nnx.Linear


def test_a_lazy_model_inside_a_gradient_can_be_lowered() -> None:
    model = lm.LazyLinear(2, rngs=nnx.Rngs(1))
    low = lm.lower(lambda m, x: nnx.grad(lambda m: m(x).sum())(m), model, X)
    assert [v.aval.shape for v in low.jaxpr.jaxpr.outvars] == [(2,), (3, 2)]
    assert lm.is_lazy(model)


def test_to_lower_a_lazy_model_that_decides_is_an_error_of_jax() -> None:
    model = lm.LazyLinear(2, rngs=nnx.Rngs(1))

    def decide(m: Any, x: jax.Array) -> jax.Array:
        y = nnx.jit(lambda m, x: m(x))(m, x)
        return y if y.sum() > 0 else -y

    with pytest.raises(jax.errors.TracerBoolConversionError):
        lm.lower(decide, model, X)
    assert lm.is_lazy(model)


def test_attributes_that_a_transform_sorts_are_sorted_each_time() -> None:
    class Net(nnx.Module):
        def __init__(self) -> None:
            self.z, self.b, self.a = net(), nnx.Param(jnp.ones(2)), nnx.Param(jnp.ones(2))

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.z(x) * self.a[...].sum() * self.b[...].sum()

    def orders(wrap: Any) -> list[list[str]]:
        model, label, found = Net(), nnx.Variable(jnp.ones(3), note="a"), []
        step = wrap(lambda m, label, x: nnx.grad(lambda m: m(x).sum())(m)["a"][...])
        for number in range(4):
            if number % 2:  # it comes last then
                del model.b
                model.b = nnx.Param(jnp.ones(2) * number)
            if number == 2:
                label.set_metadata("note", 1)
            step(model, label, X)
            found.append(list(vars(model)))
        return found

    assert orders(lm.jit) == orders(lambda step: step)


KEPT: dict[str, Any] = {"list": [], "dict": {}, "object": types.SimpleNamespace()}
STORES: dict[str, Any] = {
    "list": lambda kept, x: kept.append(x * 2),
    "dict": lambda kept, x: kept.update(a=x * 2),
    "object": lambda kept, x: setattr(kept, "a", x * 2),
}


@pytest.mark.parametrize("decides", [False, True])
@pytest.mark.parametrize("kind", STORES)
def test_an_array_of_a_trace_is_stored_in_no_constant(kind: str, decides: bool) -> None:
    kept, store, traces = KEPT[kind], STORES[kind], [0]

    def step(x: jax.Array) -> jax.Array:
        traces[0] += 1
        store(kept, x)
        return x if not decides or x.sum() > 0 else -x

    f = lm.jit(step)
    for count in (1, 2):
        with pytest.raises(lm.LazyError, match="kept\n  got:    a compiled function that stores an array there"):
            f(X)
        assert not (vars(kept) if kind == "object" else kept) and traces[0] >= count


def test_an_error_of_the_function_is_not_hidden_by_what_it_has_stored() -> None:
    kept: list[Any] = [1]

    def step(x: jax.Array) -> jax.Array:
        kept.append(x * 2)
        raise KeyError("its own")

    with pytest.raises(KeyError, match="its own"):
        lm.jit(step)(X)
    assert kept == [1]


class Ordered(nnx.Module):
    def __init__(self) -> None:
        self.c, self.a, self.b = (nnx.Param(jnp.array(n)) for n in (1.0, 2.0, 3.0))

    def chained(self) -> jax.Array:
        y = jnp.array(1.0)
        for value in [*vars(self).values()]:
            y = y * 2 + value[...] if isinstance(value, nnx.Param) else y
        return y


def chained_and_sorted(model: Ordered) -> jax.Array:
    y = model.chained()
    nnx.grad(lambda m: m.a[...] * m.b[...])(model)  # it sorts the attributes
    return y


def moved_to_the_end(model: Ordered) -> jax.Array:
    name = next(name for name, value in model.__dict__.items() if isinstance(value, nnx.Param))
    value = getattr(model, name)
    delattr(model, name)
    setattr(model, name, value)
    return value[...]


@pytest.mark.parametrize("f", [chained_and_sorted, moved_to_the_end])
def test_a_function_that_asks_for_attributes_in_their_order(f: Any) -> None:
    plain, compiled, g = Ordered(), Ordered(), lm.jit(f)
    for _ in range(4):
        np.testing.assert_array_equal(g(compiled), f(plain))
        params = [[n for n in vars(m) if not n.startswith("_")] for m in (compiled, plain)]
        assert params[0] == params[1]


class Named(nnx.Module):
    def __init__(self) -> None:
        self.parts = nnx.Dict(c=nnx.Param(jnp.array(1.0)), a=nnx.Param(jnp.array(2.0)), b=nnx.Param(jnp.array(3.0)))


def items_and_sorted(model: Named) -> jax.Array:
    y = jnp.array(1.0)
    for part in model.parts.values():
        y = y * 2 + part[...]
    nnx.grad(lambda m: m.parts.a[...] * m.parts.b[...])(model)
    return y


def keys_and_sorted(rngs: nnx.Rngs) -> jax.Array:
    keys = [rngs[name]() for name in rngs]
    nnx.jit(lambda rngs: None)(rngs)
    return jax.random.key_data(keys[0])


def test_a_function_that_goes_through_streams_in_their_order() -> None:
    plain, compiled, g = nnx.Rngs(b=1, a=2), nnx.Rngs(b=1, a=2), lm.jit(keys_and_sorted)
    for _ in range(3):
        np.testing.assert_array_equal(g(compiled), keys_and_sorted(plain))


def test_a_function_that_goes_through_a_dict_of_flax_in_its_order() -> None:
    plain, compiled, g = Named(), Named(), lm.jit(items_and_sorted)
    assert [float(g(compiled)) for _ in range(3)] == [float(items_and_sorted(plain)) for _ in range(3)] == [19, 23, 23]
    assert list(compiled.parts) == list(plain.parts) == ["a", "b", "c"]
