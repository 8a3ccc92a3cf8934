"""What backward hooks leave alone, how they go, and what is refused."""

import gc
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hooked_modules import CASES, TRANSFORMS, A, Noisy, Ours, W, arrays, ours, record, same

import lazymods as lm

ag = lm.autograd


READY = [(t, False) for t in ("nnx.grad", "nnx.jit", "lm.jit", "lm.jit check", "nnx.remat", "nnx.jit inside")]


@pytest.mark.slow
@pytest.mark.parametrize("transform, lazy", [*READY, ("lm.jit", True), ("lm.jit check", True)])
def test_statistics_and_random_state_are_as_without_hooks(transform: str, lazy: bool) -> None:
    models, found = [Noisy(lazy), Noisy(lazy)], []
    for module in (models[0], models[0].norm, models[0].linear, models[0].dropout):
        ag.register_full_backward_hook(module, lambda m, gi, go: None)
        ag.register_full_backward_pre_hook(module, lambda m, go: tuple(go))
    for model in models:
        step = TRANSFORMS[transform](lambda model, x: (model(x) ** 2).sum())
        found.append([step(model, jnp.asarray(A)) for _ in range(2)])
    for a, b in zip(arrays(models[0]), arrays(models[1]), strict=True):
        np.testing.assert_array_equal(a, b)
    same(jax.tree.leaves(found[0]), jax.tree.leaves(found[1]))
    assert int(models[0].calls[...]) == 2


def test_a_hook_gets_the_module_or_its_copy_with_values() -> None:
    module, got = Ours(lambda w, x: x @ w), []
    ag.register_full_backward_hook(module, lambda m, gi, go: got.append(m))
    x = jnp.asarray(A)
    jax.grad(lambda x: module(x).sum())(x)
    assert got[0] is module
    nnx.grad(lambda m, x: m(x).sum())(module, x)
    assert isinstance(got[1], Ours) and got[1] is not module
    np.testing.assert_array_equal(got[1].w[...], W)
    module, values = Ours(lambda w, x: x @ w), []
    ag.register_full_backward_hook(module, lambda m, gi, go: record(values, m.w[...]))
    for transform in ("nnx.jit", "lm.jit", "nnx.remat"):
        TRANSFORMS[transform](lambda m, x: m(x).sum())(module, x)
    jax.effects_barrier()
    assert len(values) == 3
    same(values, [(W,)] * 3)


def test_hooks_on_lazy_layers_stay() -> None:
    layer, seen = lm.LazyLinear(2, rngs=nnx.Rngs(0)), []
    handle = ag.register_full_backward_hook(layer, lambda m, gi, go: seen.append(type(m).__name__))
    jax.grad(lambda x: layer(x).sum())(jnp.asarray(A))
    assert seen == ["Linear"] and isinstance(layer, nnx.Linear)
    handle.remove()
    assert type(layer) is nnx.Linear


def test_forward_hooks_run_between_the_marks() -> None:
    module, seen = Ours(lambda w, x: x @ w), []
    lm.register_forward_pre_hook(module, lambda m, args: (args[0] * 2,))
    lm.register_forward_hook(module, lambda m, args, out: out * 3)
    ag.register_full_backward_hook(module, lambda m, gi, go: record(seen, gi[0], go[0]))
    found = jax.grad(lambda x: module(x).sum())(jnp.asarray(A))
    ones = np.ones_like(A)
    same(seen, [(3 * ones @ W.T, ones)])
    same(found, 6 * ones @ W.T)


# ---------------------------------------------------------------- removal


def test_removal() -> None:
    module, calls = Ours(lambda w, x: x @ w), []
    handles = [ag.register_full_backward_hook(module, lambda m, gi, go, i=i: calls.append(i)) for i in range(3)]
    first = ag.register_full_backward_hook(module, lambda m, gi, go: calls.append("first"), prepend=True)
    run = lambda: jax.grad(lambda x: module(x).sum())(jnp.asarray(A))  # noqa: E731
    run()
    assert calls == ["first", 0, 1, 2]
    for handle in (handles[1], handles[1], first):
        handle.remove()
    calls.clear()
    run()
    assert calls == [0, 2]
    for handle in handles:
        handle.remove()
    assert type(module) is Ours and set(vars(module)) == set(vars(Ours(len)))


@pytest.mark.parametrize("transform", ["nnx.grad", "lm.autograd.grad", "nnx.jit", "lm.jit", "plain"])
def test_a_hook_may_remove_itself_and_the_next_one_runs_once_more(transform: str) -> None:
    module, calls = Ours(lambda w, x: x @ w), []

    def once(m: Any, gi: Any, go: Any) -> None:
        calls.append("once")
        handle.remove()
        later.remove()

    handle = ag.register_full_backward_hook(module, once)
    later = ag.register_full_backward_hook(module, lambda m, gi, go: calls.append("later"))
    x = jnp.asarray(A)
    for _ in range(3):
        if transform == "plain":
            jax.grad(lambda x: module(x).sum())(x)
        else:
            TRANSFORMS[transform](lambda m, x: m(x).sum())(module, x)
    assert calls == ["once", "later"]
    module(x)
    assert type(module) is Ours


def test_a_removed_hook_leaves_compiled_code() -> None:
    module, x = Ours(lambda w, x: x @ w), jnp.asarray(A)
    for jit in (nnx.jit, lm.jit):
        step = jit(lambda m, x: nnx.grad(lambda x: m(x).sum())(x))
        want = step(module, x)
        with ag.register_full_backward_hook(module, lambda m, gi, go: (gi[0] * 2,)):
            same(step(module, x), 2 * want)
        same(step(module, x), want)


def test_nothing_is_kept() -> None:
    class Big(Ours):
        pass

    module = Big(lambda w, x: x @ w)
    handle = ag.register_full_backward_hook(module, lambda m, gi, go: None)
    x = jnp.asarray(A)
    for transform in ("nnx.grad", "nnx.jit", "lm.jit", "nnx.remat"):
        TRANSFORMS[transform](lambda m, x: m(x).sum())(module, x)
    gone = weakref.ref(module)
    del module
    gc.collect()
    assert gone() is None
    handle.remove()


@pytest.mark.slow
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_no_tracer_leaks(transform: str) -> None:
    with jax.checking_leaks():
        ours(CASES["two inputs"], TRANSFORMS[transform])
        ours(CASES["no input differentiated"], TRANSFORMS[transform])


# ---------------------------------------------------------------- bad input


def failing(hook: Any, *, pre: bool = False, wrt_input: bool = True) -> str:
    module = Ours(lambda w, x: x @ w)
    (ag.register_full_backward_pre_hook if pre else ag.register_full_backward_hook)(module, hook)
    with pytest.raises(lm.LazyError) as error:
        if wrt_input:
            jax.grad(lambda x: module(x).sum())(jnp.asarray(A))
        else:
            nnx.grad(lambda m: m(jnp.asarray(A)).sum())(module)
    return str(error.value)


def wrong(m: Any, gi: Any, go: Any = None) -> Any:
    return gi[0][:1]


def test_another_shape_is_refused() -> None:
    assert failing(wrong) == (
        "the hook wrong of Ours\n"
        "  got:    f32[1,3], returned by it\n"
        "  needed: (f32[2,3],), as the grad_input that it was given, or None to leave that as it is\n"
        "  write:  return (new_gradient,)  # a tuple also for one, with the shape and the dtype of each"
    )
    assert "needed: (f32[2,3],), as the grad_output" in failing(wrong, pre=True)


@pytest.mark.parametrize(
    "value", [lambda g: (g[0], g[0]), lambda g: (), lambda g: (g[0].astype(jnp.bfloat16),), lambda g: (g[0][0],),
              lambda g: ("text",), lambda g: ({"a": g[0]},), lambda g: 3, lambda g: (np.asarray(g[0], np.float64),)]
)  # fmt: skip
@pytest.mark.parametrize("pre", [False, True])
def test_other_gradients_are_refused(pre: bool, value: Any) -> None:
    hook = (lambda m, go: value(go)) if pre else (lambda m, gi, go: value(gi))
    assert "or None to leave that as it is" in failing(hook, pre=pre)


def test_a_gradient_that_is_not_there_is_not_replaced() -> None:
    text = failing(lambda m, gi, go: (go[0],), wrt_input=False)
    assert "needed: None: no input of this call is differentiated, so there is no gradient to replace" in text
    module = Ours(lambda w, x: x @ w)
    ag.register_full_backward_hook(module, lambda m, gi, go: (None,))
    nnx.grad(lambda m: m(jnp.asarray(A)).sum())(module)


@pytest.mark.parametrize("register", [ag.register_full_backward_hook, ag.register_full_backward_pre_hook])
def test_what_is_no_module_or_no_function_is_refused(register: Any) -> None:
    with pytest.raises(lm.ArgumentError) as error:
        register(nnx.Param(jnp.ones(2)), len)
    name = f"lm.autograd.{register.__name__}"
    assert str(error.value) == (
        f"{name}\n  got:    Param\n  needed: an nnx.Module: the hook runs in the backward pass of its calls\n"
        f"  write:  {name}(model.layer, fn)  # for a Variable, lm.autograd.register_hook(variable, fn)"
    )
    with pytest.raises(lm.ArgumentError, match=f"{name}\n  got:    an int"):
        register(Ours(len), 3)


@pytest.mark.slow
def test_a_hook_that_fails_is_told_and_leaves_the_model_as_it_was() -> None:
    def hook(m: Any, gi: Any, go: Any) -> None:
        raise OSError("inside")

    model = Noisy()
    handle = ag.register_full_backward_hook(model, hook)
    for transform in ("nnx.grad", "nnx.jit", "lm.jit"):
        with pytest.raises(OSError, match="inside"):
            TRANSFORMS[transform](lambda m, x: m(x).sum())(model, jnp.asarray(A))
    handle.remove()
    for a, b in zip(arrays(model), arrays(Noisy()), strict=True):
        np.testing.assert_array_equal(a, b)
    TRANSFORMS["nnx.grad"](lambda m, x: m(x).sum())(model, jnp.asarray(A))


# ---------------------------------------------------------------- by what runs while a compiled function does

CALLED: dict[str, Any] = {
    "forward": (lm.register_forward_hook, lambda m, x: m(x).sum()),
    "backward": (ag.register_full_backward_hook, lambda m, x: jax.grad(lambda x: m(x).sum())(x)),
}


@pytest.mark.parametrize("twice", [False, True], ids=["first call", "second call"])
@pytest.mark.parametrize("what", ["removal", "registration"])
@pytest.mark.parametrize("kind", CALLED)
def test_a_callback_of_nnx_jit_does_not_change_hooks(kind: str, what: str, twice: bool) -> None:
    """At its end nnx.jit gives a module what it had: it would fail, as the module is of another class by then."""
    register, function = CALLED[kind]
    module, x, told, asked = Ours(lambda w, x: x @ w), jnp.asarray(A), [], []

    def change(_: Any) -> None:
        if asked:
            try:
                handle.remove() if what == "removal" else register(module, lambda *_: None)
            except lm.LazyError as error:
                told.append(str(error))

    handle = register(module, lambda *_: jax.debug.callback(change, x))
    jitted = nnx.jit(function)
    asked += [] if twice else [1]
    want = jitted(module, x)
    asked.append(1)
    for _ in range(2):
        same([jitted(module, x)], [want])
    jax.effects_barrier()
    assert set(told) == {
        "Ours\n"
        f"  got:    the {what} of a hook by a callback of a compiled function that has the module as an argument\n"
        "  needed: that before the call or after it: the function gives the module back with the hooks that it had\n"
        "  write:  handle.remove()  # this line, where the function has returned"
    }
    handle.remove()
    assert type(module) is Ours and len(told) == (2 if twice else 3)
    same([jitted(module, x)], [want])
    jax.effects_barrier()
    assert len(told) == (2 if twice else 3)


@pytest.mark.parametrize("kind", CALLED)
def test_a_callback_of_lm_jit_may_change_hooks(kind: str) -> None:
    register, function = CALLED[kind]
    module, x, ran = Ours(lambda w, x: x @ w), jnp.asarray(A), []

    def remove(_: Any) -> None:
        ran.append(1)
        handle.remove()

    handle = register(module, lambda *_: jax.debug.callback(remove, x))
    jitted = lm.jit(function)
    want = jitted(module, x)
    jax.effects_barrier()
    assert type(module) is Ours and ran == [1]
    same([jitted(module, x)], [want])
    jax.effects_barrier()
    assert ran == [1]
