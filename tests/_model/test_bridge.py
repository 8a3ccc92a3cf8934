"""Modules that look at their own attributes: linen modules in NNX, and ``nnx.Dict``, whose items are attributes."""

import copy
from collections.abc import Callable
from typing import Any

import jax
import pytest
from flax import linen, nnx
from helpers import array, assert_same_bits, spec

import lazymods as lm

X = array(5, 4)


def wrapped(module: Any = None) -> Any:
    """A linen module in NNX, initialized as Flax's guide does it."""
    made = nnx.bridge.ToNNX(linen.Dense(3) if module is None else module, rngs=nnx.Rngs(0))
    return nnx.bridge.lazy_init(made, X)


class Mixed(nnx.Module):
    def __init__(self, head: Any) -> None:
        self.body = wrapped()
        self.head = head

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(self.body(x))


def explicit() -> Mixed:
    return Mixed(nnx.Linear(3, 2, rngs=nnx.Rngs(1)))


def lazy() -> Mixed:
    return Mixed(lm.LazyLinear(2, rngs=nnx.Rngs(1)))


def test_shapes_of_a_linen_module_are_found() -> None:
    report = lm.infer_shapes(wrapped(), spec(5, 4))
    assert (report.output.shape, report.total_parameters) == ((5, 3), 4 * 3 + 3)


def test_a_summary_counts_the_parameters_of_a_linen_module() -> None:
    row, head = lm.summary(explicit(), X).rows
    assert (row.path, row.layer, row.size) == ("body", "ToNNX", 15)
    assert (head.path, head.layer, head.size) == ("head", "Linear", 8)


def test_a_lazy_layer_after_a_linen_module_is_materialized() -> None:
    model = lazy()
    lm.materialize(model, spec(5, 4))
    assert type(model.head) is nnx.Linear
    assert_same_bits(model(X), explicit()(X))


@pytest.mark.parametrize("sized", ["first call", "lm.jit"])
def test_a_lazy_layer_after_a_linen_module_is_sized_by_a_call(sized: str) -> None:
    model = lazy()
    got = model(X) if sized == "first call" else lm.jit(lambda m, x: m(x))(model, X)
    assert_same_bits(got, explicit()(X) if sized == "first call" else nnx.jit(lambda m, x: m(x))(explicit(), X))


def test_hooks_run_around_a_linen_module() -> None:
    model, seen = wrapped(), []
    want = model(X + 1) * 2
    before = lm.register_forward_pre_hook(model, lambda module, args: (args[0] + 1,))
    after = lm.register_forward_hook(model, lambda module, args, output: seen.append(args) or output * 2)
    assert_same_bits(model(X), want)
    assert len(seen) == 1
    assert_same_bits(nnx.jit(lambda m, x: m(x))(model, X), nnx.jit(lambda m, x: m(x + 1) * 2)(wrapped(), X))
    before.remove()
    after.remove()
    assert type(model) is nnx.bridge.ToNNX
    assert_same_bits(model(X), wrapped()(X))


def test_a_hooked_linen_module_is_copied_with_its_hooks() -> None:
    model = wrapped()
    lm.register_forward_hook(model, _twice)
    want = wrapped()(X) * 2
    for made in (nnx.clone(model), copy.deepcopy(model), nnx.merge(*nnx.split(model))):
        assert_same_bits(made(X), want)


def _twice(module: Any, args: tuple[Any, ...], output: Any) -> Any:
    return output * 2


def test_a_linen_module_that_updates_its_state_does_so_under_hooks() -> None:
    model, twin = (wrapped(linen.BatchNorm(use_running_average=False)) for _ in range(2))
    lm.register_forward_hook(model, lambda *_: None)
    want, got = twin(X, mutable=["batch_stats"]), model(X, mutable=["batch_stats"])
    assert_same_bits(got, want)
    assert_same_bits(model.mean[...], twin.mean[...])
    assert float(abs(twin.mean[...]).max()) > 0


# ---------------------------------------------------------------- nnx.Dict


def test_the_items_of_a_hooked_dict_of_flax_are_the_users() -> None:
    held = nnx.Dict(a=lm.LazyLinear(2, rngs=nnx.Rngs(0)), b=nnx.Linear(2, 2, rngs=nnx.Rngs(1)))
    lm.register_state_dict_pre_hook(held, lambda *_: None)
    assert list(held) == ["a", "b"]
    assert len(held) == 2


class Branches(nnx.Module):
    def __init__(self, make: Callable[[int], Any]) -> None:
        self.branches = nnx.Dict(a=make(0), b=make(1))

    def __call__(self, x: jax.Array) -> jax.Array:
        for name in self.branches:
            x = self.branches[name](x)
        return x


def test_a_forward_may_go_through_a_dict_of_flax_in_an_abstract_run() -> None:
    model = Branches(lambda seed: lm.LazyLinear(4, rngs=nnx.Rngs(seed)))
    for branch in model.branches.values():
        lm.register_forward_hook(branch, lambda *_: None)
    lm.register_state_dict_pre_hook(model.branches, lambda *_: None)
    lm.materialize(model, spec(5, 4))
    assert_same_bits(model(X), Branches(lambda seed: nnx.Linear(4, 4, rngs=nnx.Rngs(seed)))(X))


class Two(nnx.Module):
    def __init__(self, lazy: bool, rngs: nnx.Rngs) -> None:
        self.a = lm.LazyLinear(3, rngs=rngs) if lazy else nnx.Linear(4, 3, rngs=rngs)
        self.b = lm.LazyLinear(2, rngs=rngs) if lazy else nnx.Linear(3, 2, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.b(self.a(x))


def test_a_lazy_model_in_linen_is_made_by_a_function_that_sizes_it() -> None:
    def make(rngs: nnx.Rngs) -> Two:
        model = Two(True, rngs)
        lm.materialize(model, spec(5, 4))
        return model

    got, want = nnx.bridge.to_linen(make), nnx.bridge.to_linen(Two, False)
    variables = got.init(jax.random.key(0), X)
    assert_same_bits(variables, want.init(jax.random.key(0), X))
    assert_same_bits(got.apply(variables, X), want.apply(variables, X))


def test_a_lazy_model_in_linen_that_nobody_has_sized_is_refused_with_that_line() -> None:
    with pytest.raises(lm.UninitializedError) as caught:
        nnx.bridge.to_linen(Two, True).init(jax.random.key(0), X)
    assert str(caught.value).splitlines() == [
        "a.bias (UninitializedParameter of LazyLinear)",
        "  got:    a use of its value, while it is an uninitialized parameter of shape (3,)",
        "  needed: its sizes, which follow from the first input, from a shape spec or from a checkpoint",
        "  write:  nnx.bridge.to_linen(make)  # make(rngs) returns the model after lm.materialize(model, spec)",
    ]
