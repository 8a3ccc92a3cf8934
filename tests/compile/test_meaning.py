"""What lm.jit does to models and returns, in the cases that random programs don't reach."""

import contextvars
import threading
import types
from collections.abc import Callable
from typing import Any

import flax.errors
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.core import Tracer
from jax.experimental import io_callback

import lazymods as lm


def linear(seed: int = 0) -> nnx.Linear:
    return nnx.Linear(3, 4, rngs=nnx.Rngs(seed))


def norm() -> nnx.BatchNorm:
    return nnx.BatchNorm(3, rngs=nnx.Rngs(0))


X = jnp.arange(6.0).reshape(2, 3)
BY_NAME = {"model": linear()}
HIDDEN: contextvars.ContextVar[Any] = contextvars.ContextVar("HIDDEN")


def close(got: Any, want: Any) -> None:
    np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------- where models are found


class Trainer:
    shared = linear(7)

    def __init__(self) -> None:
        self.model = linear()
        self.optimizer = nnx.Optimizer(self.model, optax.sgd(0.1), wrt=nnx.Param)
        self.weight = 1.0

    def step(self, x: jax.Array) -> jax.Array:
        loss, grads = nnx.value_and_grad(lambda m: (m(x) ** 2).mean() * self.weight)(self.model)
        self.optimizer.update(self.model, grads)
        return loss

    def predict(self, x: jax.Array) -> jax.Array:
        return Trainer.shared(x)


def test_a_bound_method_sees_everything_of_its_object_change() -> None:
    mine, plain = Trainer(), Trainer()
    step = lm.jit(mine.step)
    for weight in (1.0, 1.0, 3.0):
        mine.weight = plain.weight = weight
        close(step(X), plain.step(X))
    mine.model, plain.model = linear(3), linear(3)
    close(step(X), plain.step(X))
    close(mine.model.kernel[...], plain.model.kernel[...])


def test_a_model_in_a_global_dict_and_in_a_class() -> None:
    by_name, by_class = lm.jit(lambda x: BY_NAME["model"](x)), lm.jit(Trainer().predict)
    close(by_name(X), BY_NAME["model"](X)), close(by_class(X), Trainer.shared(X))
    BY_NAME["model"], Trainer.shared = linear(1), linear(2)
    close(by_name(X), BY_NAME["model"](X)), close(by_class(X), Trainer.shared(X))


def test_a_closure_may_get_its_model_later() -> None:
    model: Any = None

    @lm.jit
    def call(x: jax.Array) -> jax.Array:
        return x if model is None else model(x)

    close(call(X), X)
    model = linear()
    close(call(X), model(X))


def test_a_model_that_is_hidden_is_an_error_not_a_constant() -> None:
    HIDDEN.set(nnx.Linear(3, 4, use_bias=False, rngs=nnx.Rngs(0)))
    with pytest.raises(lm.LazyError) as caught:
        lm.jit(lambda x: HIDDEN.get()(x))(X)
    name = "test_a_model_that_is_hidden_is_an_error_not_a_constant.<locals>.<lambda>"
    assert str(caught.value) == (
        f"{name}: Param\n"
        "  got:    f32[3,4], read from a model that the function finds in a way of its own\n"
        "  needed: models as arguments, or in closures, globals, defaults, attributes and containers of those: a model "
        "that lm.jit does not see would be a constant of the program\n"
        "  write:  lm.jit(lambda model, x: model(x))  # with the model as an argument"
    )


def test_an_array_of_a_model_may_be_a_constant() -> None:
    kernel = linear().kernel[...]
    close(lm.jit(lambda x: x @ kernel)(X), X @ kernel)


def test_a_method_of_a_module_and_the_module_itself() -> None:
    class Net(nnx.Module):
        def __init__(self) -> None:
            self.layer = linear()

        @lm.jit
        def __call__(self, x: jax.Array) -> jax.Array:  # pyright: ignore[reportIncompatibleMethodOverride]
            return self.layer(x)

    net = Net()
    close(net(X), net.layer(X))
    close(lm.jit(net)(X), net.layer(X))  # pyright: ignore[reportCallIssue]


# ---------------------------------------------------------------- what is written


def test_raw_arrays_and_tuples_of_arrays_are_state() -> None:
    class Buffers(nnx.Module):
        def __init__(self) -> None:
            self.total = nnx.data(jnp.zeros(3))
            self.pair = nnx.data((jnp.ones(2), 3))

        def __call__(self, x: jax.Array) -> jax.Array:
            self.total = self.total + x
            self.pair = (self.pair[0] * self.pair[1], self.pair[1])
            return self.total

    runs = []
    model: Any = Buffers()
    plain: Any = Buffers()
    call = lm.jit(lambda m, x: (runs.append(1), m(x))[1])
    for _ in range(3):
        close(call(model, jnp.ones(3)), plain(jnp.ones(3)))
    close(model.pair[0], plain.pair[0])
    assert len(runs) == 1 and model.pair[1] == 3
    model.pair = plain.pair = nnx.data((jnp.ones(2), 5))
    call(model, jnp.ones(3)), plain(jnp.ones(3))
    close(model.pair[0], plain.pair[0])


def test_a_variable_as_argument() -> None:
    variable = nnx.Param(jnp.ones(3))
    add = lm.jit(lambda v, x: v.set_value(v[...] + x))
    for _ in range(3):
        assert add(variable, 2.0) is None
    close(variable[...], jnp.full(3, 7.0))


def test_new_objects_are_new_at_each_call() -> None:
    make = lm.jit(lambda m: setattr(m, "extra", nnx.List([nnx.Param(m.kernel[...] * 2)])))
    first: Any = linear(0)
    second: Any = linear(1)
    make(first), make(second)
    assert first.extra is not second.extra
    close(second.extra[0][...], second.kernel[...] * 2)


def test_python_values_are_returned_as_they_are() -> None:
    out = lm.jit(lambda x: (x.ndim, "text", None, True, {"half": x / 2}))(X)
    assert out[:4] == (2, "text", None, True) and type(out[3]) is bool
    close(out[4]["half"], X / 2)


def test_donation_copies_an_array_that_two_variables_hold() -> None:
    model = nnx.List([nnx.Param(jnp.ones(3)), nnx.Param(jnp.ones(3))])

    @lm.jit(donate_state=True)
    def add(m: Any) -> None:
        for variable in m:
            variable[...] += 1

    add(model), add(model)
    model[0].set_raw_value(model[1].get_raw_value())
    add(model), add(model)
    close(model[0][...], jnp.full(3, 5.0)), close(model[1][...], jnp.full(3, 5.0))


def test_donation_after_a_program_that_lets_two_variables_hold_one_array() -> None:
    model = nnx.List([nnx.Param(jnp.ones(3)), nnx.Param(jnp.zeros(3))])
    share = lm.jit(lambda m: m[1].set_value(m[0][...]))
    add = lm.jit(lambda m: [v.set_value(v[...] + 1) for v in m] and None, donate_state=True)
    for _ in range(3):
        share(model), add(model)
    close(model[0][...], jnp.full(3, 4.0)), close(model[1][...], jnp.full(3, 4.0))


# ---------------------------------------------------------------- other transforms


def test_inside_transforms_of_jax() -> None:
    model = linear()
    call = lm.jit(lambda m, x: m(x))
    close(jax.jit(lambda x: call(model, x))(X), model(X))
    close(jax.vmap(lambda row: call(model, row))(X), model(X))
    close(jax.grad(lambda x: call(model, x).sum())(X), jax.grad(lambda x: model(x).sum())(X))


def test_inside_transforms_of_nnx_and_itself() -> None:
    def loss(m: Any, x: jax.Array) -> jax.Array:
        return (m(x) ** 2).sum()

    model, inner = linear(), lm.jit(loss)
    got, want = nnx.grad(lambda m: inner(m, X))(model), nnx.grad(lambda m: loss(m, X))(model)
    jax.tree.map(close, nnx.to_pure_dict(got), nnx.to_pure_dict(want))
    mine, plain = norm(), norm()
    inner = lm.jit(lambda m, x: m(x))
    nnx.jit(lambda m, x: inner(m, x))(mine, X), lm.jit(lambda m, x: inner(m, x) + inner(m, x))(mine, X)
    plain(X), plain(X), plain(X)
    close(mine.mean[...], plain.mean[...])


def test_state_outside_of_a_trace_is_not_written_from_inside() -> None:
    model = norm()
    call = lm.jit(lambda x: model(x))
    with pytest.raises(flax.errors.TraceContextError):
        jax.jit(lambda x: call(x))(X)
    assert not isinstance(model.mean.get_raw_value(), Tracer)
    close(call(X), norm()(X))


def test_settings_of_jax_are_part_of_a_signature() -> None:
    runs: list[int] = []
    double = lm.jit(lambda x: (runs.append(1), x * 2)[1])
    assert double(np.ones(3)).dtype == jnp.float32
    with jax.enable_x64(True):
        assert double(np.ones(3)).dtype == jnp.float64
    assert double(np.ones(3)).dtype == jnp.float32
    with jax.default_matmul_precision("float32"):
        double(np.ones(3))
    assert len(runs) == 3


def test_without_jit_python_runs() -> None:
    runs: list[int] = []
    double = lm.jit(lambda x: (runs.append(1), x * 2)[1])
    double(X), double(X)
    with jax.disable_jit():
        double(X), double(X)
    assert len(runs) == 3


_inner = jax.jit(lambda x: jnp.log(x) * 2)
WITH_NANS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "one operation": jnp.log,
    "a function of jax.jit": lambda x: _inner(x),
    "under vmap": lambda x: jax.vmap(_inner)(x),
    "under scan": lambda x: jax.lax.scan(lambda c, y: (c, jnp.log(y)), x[0], x)[1],
    "after a decision": lambda x: jnp.log(x) if x.sum() < 1e9 else x,
    "after a decision, by jax.jit": lambda x: _inner(x) if x.sum() < 1e9 else x,
}


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("f", WITH_NANS.values(), ids=WITH_NANS)
def test_debug_nans_reach_the_caller(f: Callable[[jax.Array], jax.Array], check: bool) -> None:
    call = lm.jit(f, check=check)
    np.testing.assert_allclose(call(X + 1), f(X + 1), rtol=1e-6)
    with jax.debug_nans(True):
        for _ in range(2):
            with pytest.raises(FloatingPointError):
                call(-X - 1)
            np.testing.assert_allclose(call(X + 1), f(X + 1), rtol=1e-6)


def test_threads_with_one_model_while_one_of_them_traces() -> None:
    model, wrong = linear(), []
    call, want = lm.jit(lambda m, x: m(x)), np.asarray(linear()(X))

    def work(number: int) -> None:
        for turn in range(100):
            if number == 0 and turn % 20 == 0:
                call(model, jnp.ones((3 + turn, 3)))
            if not np.allclose(call(model, X), want, rtol=1e-5):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


# ---------------------------------------------------------------- lazy models


class Lazy(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.first, self.norm, self.last = (
            lm.LazyLinear(5, rngs=rngs),
            lm.LazyBatchNorm(rngs=rngs),
            lm.LazyLinear(2, rngs=rngs),
        )

    def __call__(self, x: jax.Array, fail: bool = False) -> jax.Array:
        out = self.last(self.norm(self.first(x)))
        if fail:
            raise KeyError("on purpose")
        return out


def test_a_first_call_that_fails_leaves_the_model_lazy() -> None:
    model = Lazy()
    with pytest.raises(KeyError, match="on purpose"):
        lm.jit(lambda m, x: m(x, fail=True))(model, X)
    assert lm.uninitialized_paths(model) == lm.uninitialized_paths(Lazy()) != []
    close(lm.jit(lambda m, x: m(x))(model, X), Lazy()(X))


def test_a_program_that_fails_at_its_first_call_leaves_the_model_lazy() -> None:
    def refuse(_: Any) -> np.ndarray[Any, Any]:
        raise ValueError("on purpose")

    @lm.jit
    def call(m: Any, x: jax.Array) -> jax.Array:
        return jax.pure_callback(refuse, jax.ShapeDtypeStruct((2, 2), jnp.float32), m(x))

    model = Lazy()
    with pytest.raises(Exception, match="on purpose"):
        call(model, X)
    assert lm.has_uninitialized_params(model)


@pytest.mark.parametrize("donate", [False, True], ids=["kept", "donated"])
@pytest.mark.parametrize("decides", [False, True], ids=["plain", "deciding"])
@pytest.mark.parametrize("called", [jax.pure_callback, io_callback, "debug"], ids=["pure", "io", "debug"])
def test_a_callback_that_fails_while_the_program_runs_leaves_the_state_as_before(
    called: Any, decides: bool, donate: bool
) -> None:
    fails = False

    def check(value: Any) -> Any:
        if fails:
            raise ValueError("on purpose")
        return np.asarray(value) * 2

    @lm.jit(donate_state=donate)
    def step(model: Any, x: jax.Array) -> jax.Array:
        if decides and x.sum() < 0:
            return x
        bias = model.bias[...]
        if called == "debug":
            jax.debug.callback(check, bias)
            bias = bias * 2
        else:
            bias = called(check, jax.ShapeDtypeStruct(bias.shape, bias.dtype), bias)
        model.kernel[...] += 1.0
        model.bias[...] = bias + 1.0
        return x * 3

    model: Any = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    kernel = np.asarray(model.kernel[...])
    x = jnp.ones((2,))
    for _ in range(2):
        step(model, x)
    jax.effects_barrier()
    for _ in range(2):
        fails = True
        with pytest.raises(Exception, match="on purpose"):
            step(model, x)
        close(model.kernel[...], kernel + 2)
        close(model.bias[...], np.full(3, 3.0))
    fails = False
    close(step(model, x), x * 3)
    close(model.bias[...], np.full(3, 7.0))


def test_parameters_made_in_a_trace_are_inputs_of_its_program() -> None:
    model = Lazy()
    call = lm.jit(lambda m, x: m(x))
    call(model, X)
    model.last.kernel[...] *= 0
    close(call(model, X), jnp.zeros((2, 2)))
    assert call.cache_info().currsize == 1


@pytest.mark.parametrize("form", ["plain", "decides", "inside"])
def test_new_keys_are_of_the_implementation_that_is_set(form: str) -> None:
    def f(x: jax.Array) -> jax.Array:
        return jax.random.key(1) if form != "decides" or x.sum() > 0 else jax.random.key(2)

    g = lm.jit(f)
    call = lm.jit(lambda x: g(x)) if form == "inside" else g
    for impl in ("threefry2x32", "rbg", "threefry2x32", "rbg"):
        with jax.default_prng_impl(impl):
            for _ in range(3):
                assert call(X).dtype == jax.random.key(1).dtype
    assert call.cache_info().currsize == 2


class Averaged:
    def __init__(self) -> None:
        self.scale, self.average, self.more = nnx.Param(jnp.zeros(3)), jnp.ones(3), {"last": jnp.ones(3)}


def test_an_array_of_an_object_may_be_the_state_that_is_donated() -> None:
    held = Averaged()

    @lm.jit(donate_state=True)
    def step() -> jax.Array:
        held.scale[...] += 1
        return (held.average + held.more["last"]).sum()

    got = []
    for i in range(6):
        got.append(float(step()))
        if i == 2:
            held.average = held.scale[...]
        if i == 4:
            held.more["last"] = held.scale[...]
    assert got == [6, 6, 6, 12, 12, 24]
    assert held.average.tolist() == [3] * 3 and held.more["last"].tolist() == [5] * 3


@pytest.mark.parametrize("kind", ["dict", "list", "object"])
def test_an_array_of_a_model_in_a_container_is_a_constant(kind: str) -> None:
    model = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
    first = model.kernel[...]
    held: Any = {"dict": {"w": first}, "list": [(None, [first])], "object": types.SimpleNamespace(w=first)}[kind]
    f = lm.jit(lambda x: model(x) + x @ jax.tree.leaves(vars(held) if kind == "object" else held)[-1])
    for _ in range(2):
        close(f(X), model(X) + X @ first)
        model.kernel[...] *= 2


def test_attributes_of_a_function_do_not_hide_what_lm_jit_has() -> None:
    def double(x: jax.Array) -> jax.Array:
        return x * 2

    double.bind = double.lower = double.note = "its own"  # type: ignore[attr-defined]
    f: Any = lm.jit(double)
    close(f(X), X * 2)
    assert f.note == "its own" and len(f.lower(X).jaxpr.jaxpr.eqns) > 0
