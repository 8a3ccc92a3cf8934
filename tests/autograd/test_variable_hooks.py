"""Hooks on the gradients of Variables; PyTorch and gradients without hooks are the oracle."""

import copy
import gc
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

ag = lm.autograd
X = jax.random.normal(jax.random.key(0), (6, 4))


class Net(nnx.Module):
    """Two linear layers."""

    def __init__(self, lazy: bool = False) -> None:
        rngs = nnx.Rngs(0)
        self.first: Any = lm.LazyLinear(5, rngs=rngs) if lazy else nnx.Linear(4, 5, rngs=rngs)
        self.last: Any = lm.LazyLinear(2, rngs=rngs) if lazy else nnx.Linear(5, 2, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(jnp.tanh(self.first(x)))


def loss(model: Any, x: jax.Array = X) -> jax.Array:
    return ((model(x) - 1) ** 2).mean()


def plain_gradient() -> Any:
    return nnx.grad(loss)(Net())


def near(got: Any, want: Any) -> None:
    np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=1e-5, atol=1e-6)


ENGINES: dict[str, Callable[[Any], Any]] = {
    "plain": lambda f: f,
    "nnx.jit": nnx.jit,
    "lm.jit": lm.jit,
    "lm.jit check": lambda f: lm.jit(f, check=True),
    "nnx.remat": nnx.remat,
    "lazy block": lambda f: lm.lazytensor.lazy()(f),
}


@pytest.mark.parametrize("engine", ENGINES)
def test_hooks_run_in_order_each_on_what_the_one_before_returned(engine: str) -> None:
    model, want = Net(), plain_gradient()
    ag.register_hook(model.last.kernel, lambda g: g * 2)
    ag.register_hook(model.last.kernel, lambda g: None)
    ag.register_hook(model.last.kernel, lambda g: g + 1)
    for which in (lambda m: ag.grad(loss)(m), lambda m: ag.value_and_grad(loss)(m)[1]):
        got = ENGINES[engine](which)(model)
        near(got["last"]["kernel"][...], want["last"]["kernel"][...] * 2 + 1)
        near(got["last"]["bias"][...], want["last"]["bias"][...])
        assert jax.tree.structure(nnx.to_pure_dict(got)) == jax.tree.structure(nnx.to_pure_dict(want))


@pytest.mark.parametrize("engine", ENGINES)
def test_registered_first_and_removed_later_is_noticed(engine: str) -> None:
    model = Net()
    run = ENGINES[engine](lambda m: ag.grad(loss)(m)["first"]["bias"][...])
    want = run(model)
    one = ag.register_hook(model.first.bias, lambda g: g + 1)
    two = ag.register_hook(model.first.bias, lambda g: g * 3)
    for handle, now in ((None, (want + 1) * 3), (one, want * 3), (two, want), (two, want)):
        if handle is not None:
            handle.remove()
        near(run(model), now)


class Shared(nnx.Module):
    """One weight in two places."""

    def __init__(self) -> None:
        self.a = nnx.Linear(3, 3, use_bias=False, rngs=nnx.Rngs(0))
        self.b = self.a
        self.kernel = self.a.kernel

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.b(jnp.tanh(self.a(x))) @ self.kernel[...]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_shared_variable_has_one_hook_run_on_the_sum(engine: str) -> None:
    torch = pytest.importorskip("torch")
    model, seen = Shared(), []
    w = torch.tensor(np.asarray(model.kernel[...]), requires_grad=True)
    want: list[Any] = []
    w.register_hook(lambda g: want.append(g.numpy()))
    x = np.asarray(X[:, :3])
    (torch.tanh(torch.tensor(x) @ w) @ w @ w).sum().backward()
    ag.register_hook(model.b.kernel, lambda g: jax.debug.callback(lambda v: seen.append(np.asarray(v)), g))
    got = ENGINES[engine](lambda m: ag.grad(lambda m: m(jnp.asarray(x)).sum())(m))(model)
    [leaf] = jax.tree.leaves(got)
    np.asarray(leaf)
    jax.effects_barrier()
    assert len(want) == 1 and len(seen) == {"lm.jit check": 2}.get(engine, 1)
    near(seen[0], want[0])
    near(leaf, want[0])


def test_what_post_accumulate_hooks_see_and_do() -> None:
    model, order = Net(), []

    def descend(variable: Any, gradient: Any) -> None:
        order.append("last")
        near(gradient, want * 5)
        variable[...] -= gradient

    want = plain_gradient()["first"]["bias"][...]
    before = model.first.bias[...]
    ag.register_post_accumulate_grad_hook(model.first.bias, descend)
    ag.register_hook(model.first.bias, lambda g: order.append("first") or g * 5)
    ag.grad(loss)(model)
    assert order == ["first", "last"]
    near(model.first.bias[...], before - 5 * want)


@pytest.mark.parametrize("engine", ["nnx.jit", "lm.jit", "lm.jit check"])
def test_an_optimizer_in_the_hooks_trains_in_compiled_code(engine: str) -> None:
    models = [Net(), Net()]
    for variable in (v for _, v in nnx.iter_graph(models[0]) if isinstance(v, nnx.Param)):
        ag.register_post_accumulate_grad_hook(variable, lambda v, g: v.set_value(v[...] - 0.1 * g))
    step = ENGINES[engine](lambda m: ag.value_and_grad(loss)(m)[0])
    for _ in range(3):
        step(models[0])
        gradient = nnx.grad(loss)(models[1])
        nnx.update(models[1], jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(models[1], nnx.Param), gradient))
    for a, b in zip(jax.tree.leaves(nnx.state(models[0])), jax.tree.leaves(nnx.state(models[1])), strict=True):
        near(a, b)


# ---------------------------------------------------------------- which gradients


def test_all_kinds_of_arguments() -> None:
    double = lambda g: g * 2  # noqa: E731
    weight = nnx.Param(jnp.array([1.0, 2.0]))
    ag.register_hook(weight, double)
    near(ag.grad(lambda w: (w[...] ** 2).sum())(weight)[...], [4, 8])
    got = ag.grad(lambda tree: (tree["w"][0][...] ** 2).sum() + tree["x"].sum())({"w": [weight], "x": jnp.ones(3)})
    near(got["w"][0][...], [4, 8])
    near(got["x"], np.ones(3))
    model, want = Net(), plain_gradient()
    ag.register_hook(model.first.kernel, double)
    for f, path in (
        (ag.grad(lambda x, m: loss(m, x), argnums=1), lambda g: g["first"]["kernel"]),
        (ag.grad(lambda x, m: loss(m, x), argnums=(1, 0)), lambda g: g[0]["first"]["kernel"]),
        (ag.grad(lambda x, m: loss(m, x), argnums=(0, nnx.DiffState(1, nnx.Param))), lambda g: g[1]["first"]["kernel"]),
        (ag.grad(lambda x, m: (loss(m, x), m), argnums=1, has_aux=True), lambda g: g[0]["first"]["kernel"]),
        (ag.value_and_grad(lambda x, m: (loss(m, x), 3), argnums=1, has_aux=True), lambda g: g[1]["first"]["kernel"]),
    ):
        near(path(f(X, model))[...], 2 * want["first"]["kernel"][...])
    by_name = ag.grad(lambda x, m: loss(m, x), argnums=1)(X, m=model)
    near(by_name["first"]["kernel"][...], 2 * want["first"]["kernel"][...])
    both = ag.grad(lambda a, b: loss(a) + loss(b), argnums=(0, 1))(model, model)
    near(both[0]["first"]["kernel"][...], 4 * want["first"]["kernel"][...])


def test_what_has_no_gradient_has_no_hook_run() -> None:
    model, seen = Net(), []
    ag.register_hook(model.first.kernel, lambda g: seen.append(1))
    ag.requires_grad_(model.first, False)
    ag.grad(loss)(model)
    ag.grad(lambda m, x: loss(m, x), argnums=1)(model, X)
    ag.grad(loss, argnums=nnx.DiffState(0, nnx.PathContains("last")))(model)
    nnx.grad(loss)(model)
    assert not seen


def test_hooks_see_the_convention_that_was_asked_for() -> None:
    weight = nnx.Param(jnp.array([3 + 4j]))
    seen: list[Any] = []
    ag.register_hook(weight, lambda g: seen.append(g))
    for conjugate in (False, True):
        got = ag.grad(lambda w: jnp.abs(w[...]).sum(), conjugate=conjugate)(weight)
        near(seen.pop(), got[...])
        near(got[...], [0.6 + 0.8j if conjugate else 0.6 - 0.8j])


# ---------------------------------------------------------------- registration, removal, copies


@pytest.mark.parametrize("engine", ["plain", "nnx.jit", "lm.jit"])
def test_changes_inside_a_hook_count_from_the_next_gradient_on(engine: str) -> None:
    """As in PyTorch: a, which removes b and registers c."""
    weight, order = nnx.Param(jnp.ones(2)), []

    def a(g: Any) -> None:
        order.append("a")
        b.remove()
        if len(order) == 1:
            ag.register_hook(weight, lambda g: order.append("c"))

    ag.register_hook(weight, a)
    b = ag.register_hook(weight, lambda g: order.append("b"))
    step = ENGINES[engine](lambda w: ag.grad(lambda w: (w[...] ** 2).sum())(w)[...])
    step(weight)
    assert order == ["a", "b"]
    step(weight)
    # what is compiled and unchanged does not run in Python again; a hook that a trace registers outside of it is lost
    assert order[2:] == (["a", "c"] if engine == "plain" else order[2:])
    assert "b" not in order[2:]


def test_a_handle_is_a_context_manager() -> None:
    weight = nnx.Param(jnp.ones(2))
    gradient = ag.grad(lambda w: w[...].sum())
    with ag.register_hook(weight, lambda g: g * 7) as handle:
        assert isinstance(handle, lm.RemovableHandle)
        near(gradient(weight)[...], [7, 7])
    near(gradient(weight)[...], [1, 1])
    assert "lazymods_gradient_hooks" not in weight.get_metadata()


def test_copies_have_the_hooks_and_handles_leave_them() -> None:
    model = Net()
    handle = ag.register_hook(model.first.bias, lambda g: g * 3)
    copies = [nnx.clone(model), copy.deepcopy(model), nnx.merge(*nnx.split(model), copy=True)]
    handle.remove()
    want = plain_gradient()["first"]["bias"][...]
    near(ag.grad(loss)(model)["first"]["bias"][...], want)
    for twin in copies:
        near(ag.grad(loss)(twin)["first"]["bias"][...], 3 * want)


@pytest.mark.parametrize("ready", ["call", "materialize", "lm.jit"])
def test_hooks_wait_for_sizes(ready: str) -> None:
    model = Net(lazy=True)
    handle = ag.register_hook(model.first.kernel, lambda g: g * 2)
    ag.register_post_accumulate_grad_hook(model.last.bias, lambda v, g: v.set_value(g))
    step = lm.jit(lambda m: ag.grad(loss)(m)) if ready == "lm.jit" else ag.grad(loss)
    if ready == "call":
        model(X)
    if ready == "materialize":
        lm.materialize(model, X)
    want = plain_gradient()
    near(step(model)["first"]["kernel"][...], 2 * want["first"]["kernel"][...])
    near(model.last.bias[...], want["last"]["bias"][...])
    handle.remove()
    assert "lazymods_gradient_hooks" not in model.first.kernel.get_metadata()


def test_an_optimizer_that_is_older_than_a_hook_goes_on() -> None:
    model = Net()
    optimizer = nnx.Optimizer(model, optax.sgd(0.1, momentum=0.5), wrt=nnx.Param)
    optimizer.update(model, ag.grad(loss)(model))
    ag.register_hook(model.first.bias, lambda g: g * 0)
    before = model.first.bias[...]
    gradient = ag.grad(loss)(model)
    assert not gradient["first"]["bias"][...].any()
    optimizer.update(model, gradient)
    assert (model.first.bias[...] != before).all()  # momentum


def test_a_hook_with_state_and_without_a_hash() -> None:
    class Clip(dict[str, Any]):
        def __call__(self, g: Any) -> Any:
            return g.clip(-self["at"], self["at"])

    model = Net()
    ag.register_hook(model.first.kernel, Clip(at=0.01))
    for engine in ("plain", "nnx.jit", "lm.jit"):
        got = ENGINES[engine](lambda m: ag.grad(loss)(m))(model)["first"]["kernel"][...]
        near(got, plain_gradient()["first"]["kernel"][...].clip(-0.01, 0.01))


@pytest.mark.slow
def test_nothing_is_kept() -> None:
    model = Net()
    handles = [ag.register_hook(v, lambda g: g) for _, v in nnx.iter_graph(model) if isinstance(v, nnx.Param)]
    gone = weakref.ref(model)
    with jax.checking_leaks():
        for engine in ("plain", "nnx.jit", "lm.jit", "nnx.remat"):
            ENGINES[engine](lambda m: ag.grad(loss)(m))(model)
    del model
    gc.collect()
    assert gone() is None
    for handle in handles:
        handle.remove()


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize("register", [ag.register_hook, ag.register_post_accumulate_grad_hook])
def test_what_is_no_variable_or_no_function_is_refused(register: Any) -> None:
    name = f"lm.autograd.{register.__name__}"
    with pytest.raises(lm.ArgumentError) as error:
        register(Net(), len)
    assert str(error.value) == (
        f"{name}\n"
        "  got:    Net\n"
        "  needed: an nnx.Variable, such as a parameter: a hook runs on its gradient\n"
        f"  write:  {name}(model.kernel, fn)  # for a module, lm.autograd.register_full_backward_hook(module, fn)"
    )
    with pytest.raises(lm.ArgumentError, match=f"{name}\n  got:    an int"):
        register(Net().first.bias, 3)


def failing(fn: Any) -> str:
    model = Net()
    ag.register_hook(model.first.bias, fn)
    with pytest.raises(lm.LazyError) as error:
        ag.grad(loss)(model)
    return str(error.value)


def halved(g: Any) -> Any:
    return g[:2]


def test_another_shape_is_refused() -> None:
    assert failing(halved) == (
        "first.bias (Param)\n"
        "  got:    f32[2], returned by the hook halved\n"
        "  needed: f32[5], as the gradient that it was given, or None to leave that as it is\n"
        "  write:  return new_grad.reshape(grad.shape).astype(grad.dtype)"
    )


@pytest.mark.parametrize(
    "fn", [lambda g: 1.0, lambda g: (g,), lambda g: {"g": g}, lambda g: "text", lambda g: g.astype(jnp.bfloat16),
           lambda g: np.asarray(g, np.float64), lambda g: np.asarray(g, np.int32), lambda g: g[:, None]]
)  # fmt: skip
def test_other_gradients_are_refused(fn: Any) -> None:
    assert "as the gradient that it was given, or None to leave that as it is" in failing(fn)


def test_numpy_arrays_are_gradients() -> None:
    model = Net()
    ag.register_hook(model.first.bias, lambda g: np.asarray(g) * np.float32(2))
    got = ag.grad(loss)(model)["first"]["bias"][...]
    assert isinstance(got, jax.Array)
    near(got, 2 * plain_gradient()["first"]["bias"][...])


def test_a_result_that_would_be_lost_is_refused() -> None:
    def late(variable: Any, gradient: Any) -> Any:
        return gradient

    model = Net()
    ag.register_post_accumulate_grad_hook(model.first.bias, late)
    with pytest.raises(lm.LazyError) as error:
        ag.grad(loss)(model)
    assert str(error.value) == (
        "first.bias (Param)\n"
        f"  got:    f32[5], returned by the post-accumulate hook {late.__qualname__}\n"
        "  needed: None: the gradient is final then, and what a hook returns would be lost\n"
        "  write:  lm.autograd.register_hook(variable, fn)  # for a hook that replaces the gradient"
    )


def test_a_variable_that_never_gets_a_value_is_told() -> None:
    class Unused(Net):
        def __init__(self) -> None:
            super().__init__()
            self.extra: Any = lm.LazyLinear(3, rngs=nnx.Rngs(0))

    model = Unused()
    ag.register_hook(model.extra.kernel, lambda g: g)
    handle = ag.register_hook(model.extra.bias, lambda g: g)
    for engine in ("plain", "nnx.jit", "lm.jit"):
        with pytest.raises(lm.UninitializedError) as error:
            ENGINES[engine](lambda m: ag.grad(loss)(m)["first"]["bias"][...])(model)
        rest = (
            "\n  got:    no value, and a hook that waits for its gradient"
            "\n  needed: a value: what has none has no gradient, and the hook would never run"
            "\n  write:  lm.materialize(model, x)  # before; or handle.remove(), for a layer that is not used"
        )
        names = [f"extra.{n} (UninitializedParameter){rest}" for n in ("bias", "kernel")]
        assert str(error.value) == "\n".join(names)
    handle.remove()


def test_a_hook_that_fails_leaves_the_rest_as_it_was() -> None:
    model = Net()

    def fail(g: Any) -> None:
        raise OSError("inside")

    handle = ag.register_hook(model.first.bias, fail)
    for engine in ("plain", "nnx.jit", "lm.jit"):
        with pytest.raises(OSError, match="inside"):
            ENGINES[engine](lambda m: ag.grad(loss)(m)["first"]["bias"][...])(model)
    handle.remove()
    near(ag.grad(loss)(model)["first"]["bias"][...], plain_gradient()["first"]["bias"][...])


@pytest.mark.parametrize(
    "hold",
    [lambda layer: nnx.Sequential(layer), lambda layer: nnx.List([layer]), lambda layer: nnx.Dict({"a": layer})],
    ids=["Sequential", "List", "Dict"],
)
def test_parameters_in_containers(hold: Any) -> None:
    layer: Any = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    model, seen = hold(layer), []
    ag.register_hook(layer.kernel, lambda g: g * 2)
    ag.register_post_accumulate_grad_hook(layer.kernel, lambda v, g: seen.append((v, np.asarray(g).ravel().tolist())))
    call: Any = {nnx.Sequential: lambda m: m, nnx.List: lambda m: m[0], nnx.Dict: lambda m: m["a"]}[type(model)]
    found = ag.grad(lambda m: call(m)(jnp.ones((1, 3))).sum())(model)
    kernel = next(leaf for leaf in jax.tree.leaves(found) if leaf.shape == (3, 1))
    np.testing.assert_array_equal(kernel, np.full((3, 1), 2.0))
    assert seen == [(layer.kernel, [2.0, 2.0, 2.0])]
