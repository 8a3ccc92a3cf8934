"""Forward hooks on any module: order, arguments, removal, failure, and the transforms and copies that keep them."""

import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import array, assert_same_bits, assert_same_model, lazy_mlp, plain_mlp, spec

import lazymods as lm

X = array(2, 3)


def add_one(module: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return (args[0] + 1, *args[1:])


def double(module: Any, args: tuple[Any, ...], output: Any) -> Any:
    return output * 2


def lazy() -> Any:
    return lm.LazyLinear(4, rngs=nnx.Rngs(0))


def plain() -> Any:
    return nnx.Linear(3, 4, rngs=nnx.Rngs(0))


both = pytest.mark.parametrize("make", [lazy, plain], ids=["lazy", "plain"])


class Add(nnx.Module):
    def __call__(self, x: jax.Array, *, shift: float = 0.0) -> jax.Array:
        return x + shift


class Fails(nnx.Module):
    def __call__(self, x: jax.Array) -> jax.Array:
        raise OSError("broken")


# ---------------------------------------------------------------- order and arguments


@both
def test_pre_hook_changes_the_input(make: Callable[[], Any]) -> None:
    layer = make()
    lm.register_forward_pre_hook(layer, add_one)
    for _ in range(2):
        assert_same_bits(layer(X), plain()(X + 1))


@both
def test_a_pre_hook_may_return_what_is_no_tuple(make: Callable[[], Any]) -> None:
    layer = make()
    lm.register_forward_pre_hook(layer, lambda m, args: args[0] + 1)
    assert_same_bits(layer(X), plain()(X + 1))


@both
def test_forward_hook_changes_the_output(make: Callable[[], Any]) -> None:
    layer = make()
    lm.register_forward_hook(layer, double)
    for _ in range(2):
        assert_same_bits(layer(X), 2 * plain()(X))


@both
def test_all_run_once_per_call_in_order(make: Callable[[], Any]) -> None:
    layer, seen = make(), []
    for name in "ab":
        lm.register_forward_pre_hook(layer, lambda m, a, name=name: seen.append(f"pre-{name}"))
        lm.register_forward_hook(layer, lambda m, a, o, name=name: seen.append(f"post-{name}"))
    lm.register_forward_pre_hook(layer, lambda m, a: seen.append("pre-0"), prepend=True)
    lm.register_forward_hook(layer, lambda m, a, o: seen.append("post-0"), prepend=True)
    lm.register_forward_pre_hook(layer, lambda m, a: seen.append("pre-first"), prepend=True)
    for _ in range(3):
        layer(X)
    assert seen == ["pre-first", "pre-0", "pre-a", "pre-b", "post-0", "post-a", "post-b"] * 3


@both
def test_each_sees_what_the_one_before_returned(make: Callable[[], Any]) -> None:
    layer = make()
    seen: list[Any] = []
    lm.register_forward_pre_hook(layer, add_one)
    lm.register_forward_pre_hook(layer, lambda m, args: seen.append(args[0]))
    lm.register_forward_hook(layer, double)
    lm.register_forward_hook(layer, lambda m, args, out: seen.extend([args[0], out]))
    layer(X)
    for got, want in zip(seen, [X + 1, X + 1, 2 * plain()(X + 1)], strict=True):
        assert_same_bits(got, want)


def test_with_kwargs() -> None:
    layer, seen = Add(), []
    lm.register_forward_pre_hook(layer, lambda m, a, kwargs: (a, {"shift": kwargs["shift"] + 4}), with_kwargs=True)
    lm.register_forward_hook(layer, lambda m, args, kwargs, out: seen.append((len(args), kwargs)), with_kwargs=True)
    assert_same_bits(layer(jnp.zeros(2), shift=1.0), jnp.full(2, 5.0))
    assert seen == [(1, {"shift": 5.0})]


def test_without_kwargs_keywords_pass_by() -> None:
    layer = Add()
    lm.register_forward_pre_hook(layer, lambda m, args: (args[0] * 10,))
    lm.register_forward_hook(layer, lambda m, args, out: out + 1)
    assert_same_bits(layer(jnp.ones(2), shift=1.0), jnp.full(2, 12.0))


@pytest.mark.parametrize("returned", [3, (1,), (1, 2, 3), [(), {}]], ids=str)
def test_a_pre_hook_with_kwargs_that_returns_something_else(returned: Any) -> None:
    layer = Add()
    lm.register_forward_pre_hook(layer, lambda m, args, kwargs: returned, with_kwargs=True)
    with pytest.raises(lm.ArgumentError, match="needed: None, or the pair of positional arguments"):
        layer(X)


def test_outputs_of_any_kind() -> None:
    class Pair(nnx.Module):
        def __call__(self, x: Any) -> Any:
            return {"x": x, "none": None}

    layer = Pair()
    lm.register_forward_hook(layer, lambda m, args, out: out | {"y": 2})
    assert layer(1) == {"x": 1, "none": None, "y": 2}


# ---------------------------------------------------------------- on a lazy layer


def test_hooks_see_the_layer_ready_and_with_prepend_lazy() -> None:
    layer = lazy()
    seen: list[tuple[str, bool, bool]] = []

    def look(when: str) -> Callable[..., None]:
        return lambda m, *_: seen.append((when, lm.is_lazy(m), hasattr(m, "in_features")))

    lm.register_forward_pre_hook(layer, look("pre"))
    lm.register_forward_pre_hook(layer, look("early"), prepend=True)
    lm.register_forward_hook(layer, look("post"))
    layer(X)
    layer(X)
    assert seen == [("early", True, False), ("pre", False, True), ("post", False, True),
                    ("early", False, True), ("pre", False, True), ("post", False, True)]


def test_a_prepended_hook_decides_the_width() -> None:
    layer = lazy()
    lm.register_forward_pre_hook(layer, lambda m, args: (args[0][..., :2],), prepend=True)
    layer(X)
    assert layer.in_features == 2


def test_a_later_hook_that_changes_the_width_is_refused_and_nothing_stays() -> None:
    layer = lazy()
    handle = lm.register_forward_pre_hook(layer, lambda m, args: (args[0][..., :2],))
    with pytest.raises(lm.ShapeInferenceError):
        layer(X)
    assert lm.is_lazy(layer)
    handle.remove()
    layer(X)
    assert_same_model(layer, plain())


@pytest.mark.parametrize("first", [lambda m: lm.materialize(m, spec(2, 3)), lambda m: lm.infer_shapes(m, spec(2, 3)),
                                   lambda m: lm.summary(m, spec(2, 3))], ids=["materialize", "infer_shapes", "summary"])
def test_abstract_runs_keep_hooks(first: Callable[[Any], Any]) -> None:
    layer = lazy()
    lm.register_forward_hook(layer, double)
    first(layer)
    assert_same_bits(layer(X), 2 * plain()(X))


def test_the_class_it_becomes() -> None:
    layer = lazy()
    handle = lm.register_forward_hook(layer, double)
    assert isinstance(layer, lm.LazyLinear) and type(layer).__name__ == "LazyLinear"
    layer(X)
    assert isinstance(layer, nnx.Linear) and not isinstance(layer, lm.LazyLinear) and type(layer).__name__ == "Linear"
    handle.remove()
    assert_same_model(layer, plain())
    assert set(vars(layer)) == set(vars(plain()))


# ---------------------------------------------------------------- removal


@both
def test_remove(make: Callable[[], Any]) -> None:
    layer = make()
    handle = lm.register_forward_hook(layer, double)
    layer(X)
    handle.remove()
    handle.remove()
    assert_same_bits(layer(X), plain()(X))
    assert_same_model(layer, plain())


def test_remove_before_the_first_call() -> None:
    layer = lazy()
    for handle in (lm.register_forward_pre_hook(layer, add_one), lm.register_forward_hook(layer, double)):
        handle.remove()
    assert type(layer) is lm.LazyLinear and nnx.graphdef(layer) == nnx.graphdef(lazy())
    assert_same_bits(layer(X), plain()(X))
    assert_same_model(layer, plain())


@both
def test_one_of_two(make: Callable[[], Any]) -> None:
    layer = make()
    first, second = (lm.register_forward_hook(layer, double) for _ in range(2))
    assert_same_bits(layer(X), 4 * plain()(X))
    first.remove()
    assert_same_bits(layer(X), 2 * plain()(X))
    second.remove()
    assert type(layer) is nnx.Linear


@both
def test_a_handle_is_a_context_manager(make: Callable[[], Any]) -> None:
    layer = make()
    with lm.register_forward_hook(layer, double) as handle:
        assert isinstance(handle, lm.RemovableHandle)
        assert_same_bits(layer(X), 2 * plain()(X))
    assert_same_bits(layer(X), plain()(X))
    with pytest.raises(OSError, match="inside"), lm.register_forward_hook(layer, double):
        raise OSError("inside")
    assert type(layer) is nnx.Linear


@both
def test_a_hook_may_remove_itself_while_running(make: Callable[[], Any]) -> None:
    layer, seen = make(), []

    def once(module: Any, args: Any) -> None:
        seen.append("once")
        handle.remove()

    handle = lm.register_forward_pre_hook(layer, once)
    lm.register_forward_pre_hook(layer, lambda m, args: seen.append("always"))
    layer(X)
    layer(X)
    assert seen == ["once", "always", "always"]


@both
def test_the_last_hook_may_remove_itself(make: Callable[[], Any]) -> None:
    layer = make()
    handles: list[Any] = []

    def once(module: Any, *_: Any) -> None:
        handles.pop().remove()

    handles.append(lm.register_forward_hook(layer, once))
    layer(X)
    assert_same_model(layer, plain())


def test_a_hook_that_is_registered_while_running_waits_for_the_next_call() -> None:
    layer, seen = plain(), []


    def register(module: Any, args: Any) -> None:
        if not seen:
            lm.register_forward_hook(module, lambda m, a, o: seen.append(1))

    lm.register_forward_pre_hook(layer, register)
    layer(X)
    assert seen == []
    layer(X)
    assert seen == [1]


def test_a_handle_does_not_keep_the_module_alive() -> None:
    layer = plain()
    handle = lm.register_forward_hook(layer, double)
    del layer
    gc.collect()
    handle.remove()


# ---------------------------------------------------------------- failures


def test_always_call_sees_a_failed_forward() -> None:
    layer, seen = Fails(), []
    lm.register_forward_hook(layer, lambda m, args, out: seen.append("usual"))
    lm.register_forward_hook(layer, lambda m, args, out: seen.append(out), always_call=True)
    lm.register_forward_hook(layer, lambda m, args, kwargs, out: seen.append((kwargs, out)), with_kwargs=True,
                             always_call=True)
    with pytest.raises(OSError, match="broken"):
        layer(X)
    assert seen == [None, ({}, None)]


def test_always_call_runs_once_when_all_goes_well() -> None:
    layer, seen = plain(), []
    lm.register_forward_hook(layer, lambda m, args, out: seen.append(out.shape), always_call=True)
    layer(X)
    assert seen == [(2, 4)]


def test_always_call_sees_a_hook_that_failed() -> None:
    for register in (lm.register_forward_pre_hook, lm.register_forward_hook):
        layer, seen = plain(), []

        def fail(*_: Any) -> None:
            raise OSError("hook")

        register(layer, fail)
        lm.register_forward_hook(layer, lambda m, args, out, seen=seen: seen.append("ran"), always_call=True)
        with pytest.raises(OSError, match="hook"):
            layer(X)
        assert seen == ["ran"], register.__name__


def test_the_first_error_is_the_one_that_is_raised() -> None:
    layer = Fails()

    def fail_too(*_: Any) -> None:
        raise KeyError("cleanup")

    lm.register_forward_hook(layer, fail_too, always_call=True)
    with pytest.raises(OSError, match="broken"):
        layer(X)


@pytest.mark.parametrize("early", [False, True], ids=["usual", "prepend"])
def test_a_pre_hook_that_raises_leaves_a_lazy_layer_lazy(early: bool) -> None:
    layer = lazy()

    def fail(*_: Any) -> None:
        raise OSError("hook")

    handle = lm.register_forward_pre_hook(layer, fail, prepend=early)
    for _ in range(2):
        with pytest.raises(OSError, match="hook"):
            layer(X)
        assert lm.is_lazy(layer) and lm.uninitialized_paths(layer) == ["kernel", "bias"]
    handle.remove()
    layer(X)
    assert_same_model(layer, plain())


@pytest.mark.parametrize("register", [lm.register_forward_pre_hook, lm.register_forward_hook,
                                      lm.register_state_dict_pre_hook, lm.register_state_dict_post_hook,
                                      lm.register_load_state_dict_pre_hook, lm.register_load_state_dict_post_hook],
                         ids=lambda f: f.__name__)
def test_what_takes_no_hook(register: Any) -> None:
    for module in (nnx.Param(jnp.ones(2)), 3, {}, nnx.Linear):
        with pytest.raises(TypeError, match=r"hooks go on an nnx\.Module"):
            register(module, double)
    layer = plain()
    with pytest.raises(TypeError, match="a hook is a function"):
        register(layer, 3)
    assert type(layer) is nnx.Linear


# ---------------------------------------------------------------- models and containers


def test_on_containers() -> None:
    layer, seen = lazy(), []
    model = nnx.Sequential(layer, nnx.relu)
    lm.register_forward_pre_hook(model, add_one)
    lm.register_forward_hook(layer, lambda m, args, out: seen.append(args[0]))
    want = nnx.Sequential(plain(), nnx.relu)
    assert_same_bits(model(X), want(X + 1))
    assert_same_bits(seen, [X + 1])


def test_on_a_container_that_is_not_called() -> None:
    layers = nnx.List([plain()])
    handle = lm.register_state_dict_post_hook(layers, lambda m, sd, prefix, meta: sd.clear())
    assert lm.state_dict(layers) == {}
    handle.remove()
    assert list(lm.state_dict(layers)) == ["0.kernel", "0.bias"]


@pytest.mark.slow
def test_on_one_layer_of_a_lazy_model() -> None:
    model, want, x = lazy_mlp(), plain_mlp(), array(2, 8)
    with lm.register_forward_hook(model.fc1, double):
        assert_same_bits(model(x), want.fc2(jax.nn.relu(2 * want.fc1(x))))
    assert_same_model(model, want)


@pytest.mark.slow
def test_inside_a_recurrent_scan() -> None:
    def build(cell: Any) -> Any:
        return nnx.RNN(cell, rngs=nnx.Rngs(1))

    model = build(lm.LazySimpleCell(4, rngs=nnx.Rngs(0)))
    want, x = build(nnx.SimpleCell(3, 4, rngs=nnx.Rngs(0))), array(2, 5, 3)
    lm.register_forward_hook(model.cell, lambda m, args, out: (out[0], 10 * out[1]))
    np.testing.assert_allclose(model(x), 10 * want(x), rtol=1e-5, atol=1e-6)


def test_a_module_without_hooks_pays_nothing() -> None:
    a, b = plain(), plain()
    lm.register_forward_hook(b, double)
    assert type(a) is nnx.Linear and a.__call__.__func__ is nnx.Linear.__call__
    lm.register_state_dict_post_hook(a, lambda *_: None)
    assert type(a) is nnx.Linear  # hooks of other kinds leave the call alone
    assert_same_bits(a(X), plain()(X))


def test_training_a_module_with_hooks() -> None:
    model, want = lazy_mlp(), plain_mlp()
    x = array(4, 8)
    model(x)
    lm.register_forward_hook(model.fc2, double)
    for m, scale in ((model, 1.0), (want, 2.0)):
        optimizer = nnx.Optimizer(m, optax.sgd(0.1), wrt=nnx.Param)
        optimizer.update(m, nnx.grad(lambda m, s=scale: (s * m(x)).sum())(m))
    assert_same_bits(nnx.state(model, nnx.Param), nnx.state(want, nnx.Param))


# ---------------------------------------------------------------- copies and transforms

COPIERS: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "clone": nnx.clone,
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
    "split-merge": lambda m: nnx.merge(*nnx.split(m)),
    "tree-map": lambda m: jax.tree.map(lambda a: a, m),
}


@pytest.mark.parametrize("copier", COPIERS.values(), ids=COPIERS)
@both
def test_copies_keep_hooks_of_their_own(make: Callable[[], Any], copier: Callable[[Any], Any]) -> None:
    layer = make()
    handle = lm.register_forward_hook(layer, double)
    twin = copier(layer)
    handle.remove()
    assert_same_bits(twin(X), 2 * plain()(X))
    assert_same_bits(layer(X), plain()(X))
    assert type(layer) is nnx.Linear


CONTEXTS: dict[str, Callable[[Any, Any], Any]] = {
    "nnx.jit": lambda m, x: nnx.jit(lambda m, x: m(x))(m, x),
    "nnx.vmap": lambda m, x: nnx.vmap(lambda m, x: m(x), in_axes=(None, 0))(m, x),
    "nnx.remat": lambda m, x: nnx.remat(lambda m, x: m(x))(m, x),
    "jax.jit": lambda m, x: jax.jit(lambda x: m(x))(x),
    "vmap": lambda m, x: jax.vmap(lambda row: m(row))(x),
    "scan": lambda m, x: jax.lax.scan(lambda c, row: (c, m(row)), 0, x)[1],
    "split-merge": lambda m, x: (m(x), nnx.merge(*nnx.split(m))(x))[1],
}


@pytest.mark.parametrize("context", CONTEXTS.values(), ids=CONTEXTS)
@both
def test_transforms_keep_hooks(make: Callable[[], Any], context: Callable[[Any, Any], Any]) -> None:
    layer = make()
    handles = [lm.register_forward_pre_hook(layer, add_one), lm.register_forward_hook(layer, double)]
    for _ in range(2):
        np.testing.assert_allclose(context(layer, X), 2 * plain()(X + 1), rtol=1e-5, atol=1e-6)
    assert_same_bits(layer(X), 2 * plain()(X + 1))
    for handle in handles:
        handle.remove()
    assert_same_model(layer, plain())


def test_nnx_jit_traces_a_hooked_layer_no_more_often() -> None:
    layer, traces = lazy(), []
    lm.register_forward_hook(layer, lambda m, args, out: traces.append(out.shape))
    step = nnx.jit(lambda m, x: m(x))
    for _ in range(4):
        step(layer, X)
    assert len(traces) <= 2
    ready = plain()
    lm.register_forward_hook(ready, double)
    graphdef = nnx.graphdef(ready)
    step(ready, X)
    assert nnx.graphdef(ready) == graphdef
