"""Field reports of PyTorch's lazy modules, where no row states the same already (README.md says which)."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from helpers import array, assert_same_bits, assert_same_model, lazy_mlp, plain_mlp, spec

import lazymods as lm

LOADED: dict[str, tuple[Callable[[nnx.Rngs], Any], Callable[[nnx.Rngs], Any], str]] = {
    "Linear": (lambda r: lm.LazyLinear(16, rngs=r), lambda r: nnx.Linear(4, 16, rngs=r), "in_features=4"),
    "Conv2d": (lambda r: lm.LazyConv2d(8, 3, rngs=r), lambda r: nnx.Conv(5, 8, (3, 3), rngs=r), "in_features=5"),
    "grouped_Conv2d": (lambda r: lm.LazyConv2d(8, 3, feature_group_count=2, rngs=r),
                       lambda r: nnx.Conv(6, 8, (3, 3), feature_group_count=2, rngs=r), "in_features=6"),
    "ConvTranspose2d": (lambda r: lm.LazyConvTranspose2d(8, 3, rngs=r),
                        lambda r: nnx.ConvTranspose(3, 8, (3, 3), rngs=r), "in_features=3"),
    "transposed_kernel": (lambda r: lm.LazyConvTranspose2d(8, 3, transpose_kernel=True, rngs=r),
                          lambda r: nnx.ConvTranspose(3, 8, (3, 3), transpose_kernel=True, rngs=r), "in_features=3"),
    "BatchNorm2d": (lambda r: lm.LazyBatchNorm2d(rngs=r), lambda r: nnx.BatchNorm(7, rngs=r), "num_features=7"),
    "GroupNorm": (lambda r: lm.LazyGroupNorm(num_groups=2, rngs=r), lambda r: nnx.GroupNorm(6, num_groups=2, rngs=r),
                  "group_size=3"),
}


@pytest.mark.slow
@pytest.mark.parametrize("lazy, explicit, size", LOADED.values(), ids=LOADED)
def test_a_load_finishes_the_layer(lazy: Any, explicit: Any, size: str) -> None:
    layer, want = lazy(nnx.Rngs(0)), explicit(nnx.Rngs(1))
    lm.load_state_dict(layer, lm.state_dict(want))
    assert type(layer) is type(want)
    assert size in repr(layer)
    assert_same_model(layer, want)


class Wide(lm.LazyModuleMixin, nnx.Module):
    """Its width is a keyword argument's."""

    def __init__(self) -> None:
        self.w = lm.UninitializedParameter((None,), init=nnx.initializers.ones)

    def initialize_parameters(self, *, x: Any, context: Any = None) -> None:
        self.w.materialize((x if context is None else context).shape[-1:])

    def __call__(self, *, x: jax.Array, context: jax.Array | None = None) -> jax.Array:
        return (x if context is None else context) + self.w[None]


@pytest.mark.parametrize("run", [lambda m, **k: m(**k), nnx.jit(lambda m, **k: m(**k))], ids=["python", "nnx.jit"])
def test_keyword_only_first_call(run: Any) -> None:
    layer, context = Wide(), array(2, 5)
    assert_same_bits(run(layer, x=array(2, 3), context=context), context + 1.0)
    assert layer.w.shape == (5,)
    abstract = Wide()
    lm.materialize(abstract, x=spec(2, 3))
    assert abstract.w.shape == (3,)


def test_several_pre_hooks_and_one_that_removes_itself() -> None:
    layer, order, x = lm.LazyLinear(4, rngs=nnx.Rngs(0)), [], array(2, 3)
    handles = [lm.register_forward_pre_hook(layer, lambda m, args: order.append("first"))]

    def once(module: Any, args: Any) -> None:
        order.append("once")
        handles[1].remove()

    handles.append(lm.register_forward_pre_hook(layer, once))
    handles.append(lm.register_forward_pre_hook(layer, lambda m, args: order.append("last")))
    want = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    for _ in range(2):
        assert_same_bits(layer(x), want(x))
    assert order == ["first", "once", "last", "first", "last"]
    for handle in handles:
        handle.remove()
    assert_same_model(layer, want)


@pytest.mark.parametrize("made", ["before", "after"])
def test_parameters_made_after_the_optimizer_are_trained(made: str) -> None:
    def train(model: Any, optimizer: Any) -> Any:
        optimizer.update(model, nnx.grad(lambda m: m(array(2, 8)).sum())(model))
        return model

    model, want = lazy_mlp(), plain_mlp()
    make = lm.LazyOptimizer
    optimizer = make(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param) if made == "before" else None
    model(array(2, 8))
    optimizer = optimizer or make(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)
    train(want, nnx.Optimizer(want, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param))
    assert_same_model(train(model, optimizer), want)


@pytest.mark.parametrize("plan", [lambda m: nnx.get_partition_spec(nnx.state(m)),
                                  lambda m: nnx.get_named_sharding(nnx.state(m), jax.make_mesh((1,), ("d",))),
                                  lambda m: sum(p.nbytes for _, p in nnx.to_flat_state(nnx.state(m)))],
                         ids=["partition_spec", "named_sharding", "bytes"])
def test_planners_get_an_error_or_the_shapes(plan: Callable[[Any], Any]) -> None:
    model = lazy_mlp()
    with pytest.raises(lm.UninitializedError, match=r"fc1\.(bias|kernel)(.|\n)*lm\.materialize"):
        plan(model)
    report = lm.infer_shapes(model, spec(2, 8))
    assert report.total_bytes == 4 * (8 * 16 + 16 + 16 * 4 + 4)
    assert {row.path: row.nbytes for row in report.rows} == {"fc1": 4 * (8 * 16 + 16), "fc2": 4 * (16 * 4 + 4)}
    lm.materialize(model, spec(2, 8))
    plan(model)


WRAPPED: dict[str, Callable[[Any, jax.Array], Any]] = {
    "dunder_call": lambda m, x: m.__call__(x),
    "unbound": lambda m, x: type(m).__call__(m, x),
    "jax.checkpoint": lambda m, x: jax.checkpoint(m)(x),
    "nnx.remat": lambda m, x: nnx.remat(m)(x),
    "nnx.remat_unbound": lambda m, x: nnx.remat(type(m).__call__)(m, x),
    "nnx.jit_unbound": lambda m, x: nnx.jit(type(m).__call__)(m, x),
    "jax.jit_bound": lambda m, x: jax.jit(m.__call__)(x),
}


@pytest.mark.parametrize("run", WRAPPED.values(), ids=WRAPPED)
@pytest.mark.parametrize("what", ["layer", "model"])
def test_every_way_to_call_initializes(run: Callable[[Any, Any], Any], what: str) -> None:
    model, want, x = lazy_mlp(), plain_mlp(), array(2, 8)
    if what == "layer":
        model, want = model.fc1, want.fc1
    assert jnp.allclose(run(model, x), want(x), rtol=1e-6)
    assert_same_model(model, want)


class Encoder(nnx.Module):
    """A model that is entered by a method of its own."""

    def __init__(self, size: int | None, rngs: nnx.Rngs) -> None:
        self.fc = lm.LazyLinear(4, rngs=rngs) if size is None else nnx.Linear(size, 4, rngs=rngs)

    def encode(self, x: jax.Array) -> jax.Array:
        return jnp.tanh(self.fc(x))


def test_a_method_other_than_call() -> None:
    model, want, x = Encoder(None, nnx.Rngs(0)), Encoder(3, nnx.Rngs(0)), array(2, 3)
    assert_same_bits(model.encode(x), want.encode(x))
    assert_same_model(model, want)


def test_the_common_base_matches_before_and_after() -> None:
    layer = lm.LazyLinear(4, rngs=nnx.Rngs(0))
    assert isinstance(layer, nnx.Linear) and isinstance(layer, lm.LazyLinear)
    layer(array(2, 3))
    assert isinstance(layer, nnx.Linear) and not isinstance(layer, lm.LazyLinear)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_value_written_under_weight_norm_is_used(when: str) -> None:
    kernel, x = array(3, 4, seed=9), array(2, 3)
    model = lm.LazyWeightNorm(lm.LazyLinear(4, use_bias=False, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(1))
    if when == "after":
        lm.materialize(model, x)
    model.layer_instance.kernel[...] = kernel  # pyright: ignore[reportAttributeAccessIssue]
    got = model(x)
    unit = kernel / jnp.linalg.norm(kernel, axis=0, keepdims=True)
    assert jnp.allclose(got, x @ unit, rtol=1e-5, atol=1e-6)
    assert type(model) is nnx.WeightNorm and type(model.layer_instance) is nnx.Linear


def by_type(size: dict[str, int] | None, seed: int) -> Any:
    r, names = nnx.Rngs(seed), ("paper", "author")
    return nnx.Dict({n: lm.LazyLinear(4, rngs=r) if size is None else nnx.Linear(size[n], 4, rngs=r) for n in names})


def test_a_container_of_layers_is_loaded_called_and_loaded_again() -> None:
    model, want, other = by_type(None, 0), by_type({"paper": 3, "author": 5}, 1), by_type({"paper": 3, "author": 5}, 2)
    lm.load_state_dict(model, lm.state_dict(want))
    for name, size in (("paper", 3), ("author", 5)):
        assert_same_bits(model[name](array(2, size)), want[name](array(2, size)))
    assert_same_model(model, want)
    lm.load_state_dict(model, lm.state_dict(other))  # an ordinary load of ready layers now
    assert_same_model(model, other)
    with pytest.raises(lm.StateDictError, match=r"author\.kernel \(Param\)"):
        lm.load_state_dict(model, lm.state_dict(by_type({"paper": 3, "author": 6}, 1)))
    assert_same_model(model, other)


def test_a_failed_call_leaves_statistics_and_counters() -> None:
    class Net(nnx.Module):
        def __init__(self, lazy: bool) -> None:
            r = nnx.Rngs(0)
            self.norm = lm.LazyBatchNorm2d(rngs=r) if lazy else nnx.BatchNorm(3, rngs=r)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.norm(x)

    model, want, x = Net(True), Net(False), array(2, 4, 5, 3)
    for wrong in (array(2, 3), array(2, 5, 3), jnp.ones((2, 4, 5, 7), jnp.int32)):
        with pytest.raises(lm.ShapeInferenceError, match=r"norm \(LazyBatchNorm2d\)"):
            model(wrong)
        assert sorted(lm.uninitialized_paths(model)) == ["norm.bias", "norm.mean", "norm.scale", "norm.var"]
    assert_same_bits(model(x), want(x))
    assert_same_model(model, want)
