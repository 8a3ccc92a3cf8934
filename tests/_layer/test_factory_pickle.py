"""Pickling lazy classes: found by name, made again from their class and ``infer``, or refused by name."""

import pickle
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from helpers import array, assert_same_bits, assert_same_model

import lazymods as lm

X = array(4, 6)


def width(config: Mapping[str, Any], x: Any) -> dict[str, int]:
    return {"in_features": x.shape[-1]}


def halves(key: Any, shape: Any, dtype: Any = jnp.float32) -> jax.Array:
    """An initializer that pickles: it is found by name."""
    del key
    return jnp.full(shape, 0.5, dtype)


def squash(x: jax.Array) -> jax.Array:
    return jnp.tanh(x)


class Twos:
    """An initializer that pickles: an object of a class found by name."""

    def __init__(self, value: float = 2.0):
        self.value = value

    def __call__(self, key: Any, shape: Any, dtype: Any = jnp.float32) -> jax.Array:
        return jnp.full(shape, self.value, dtype)


LazyLinear = lm.lazy(nnx.Linear, infer=width)
Renamed = lm.lazy(nnx.Linear, infer=width)


class Doubled(LazyLinear):
    """A subclass, found by name."""

    def __call__(self, inputs: jax.Array) -> jax.Array:  # pyright: ignore[reportIncompatibleMethodOverride]
        return 2 * super().__call__(inputs)  # pyright: ignore[reportAttributeAccessIssue]


def round_trip(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


def local_class() -> Any:
    return lm.lazy(nnx.Linear, infer=width)


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("cls", [LazyLinear, Renamed, Doubled, local_class(), lm.LazyLinear],
                         ids=["module", "renamed", "subclass", "local", "built-in"])
def test_before_the_first_call(cls: Any, protocol: int) -> None:
    layer = cls(out_features=3, rngs=nnx.Rngs(0))
    twin = pickle.loads(pickle.dumps(layer, protocol))
    assert lm.is_lazy(twin) and issubclass(type(twin), nnx.Linear)
    assert lm.uninitialized_paths(twin) == ["kernel", "bias"] and twin.kernel.shape == (None, 3)
    want = nnx.Linear(6, 3, rngs=nnx.Rngs(0))
    assert_same_bits(twin(X), want(X) * (2 if cls is Doubled else 1))
    assert_same_bits(nnx.state(twin), nnx.state(want))
    assert lm.is_lazy(layer)


@pytest.mark.parametrize("cls", [LazyLinear, Renamed, Doubled, lm.LazyLinear], ids=lambda c: c.__qualname__)
def test_the_class_is_found_by_name(cls: Any) -> None:
    assert type(round_trip(cls(out_features=3, rngs=nnx.Rngs(0)))) is cls
    assert round_trip(cls) is cls


@pytest.mark.parametrize("cls", [LazyLinear, local_class(), lm.LazyLinear], ids=["module", "local", "built-in"])
def test_after_the_first_call(cls: Any) -> None:
    layer = cls(out_features=3, kernel_init=nnx.initializers.normal(), rngs=nnx.Rngs(0))
    layer(X)
    twin = round_trip(layer)
    assert_same_model(twin, nnx.Linear(6, 3, kernel_init=nnx.initializers.normal(), rngs=nnx.Rngs(0)))


def test_two_of_one_local_class_stay_of_one_class() -> None:
    cls = local_class()
    a, b = round_trip([cls(out_features=3, rngs=nnx.Rngs(0)), cls(out_features=3, rngs=nnx.Rngs(0))])
    assert nnx.graphdef(a) == nnx.graphdef(b)


INITIALIZERS: dict[str, Callable[[], dict[str, Any]]] = {
    "default": dict,
    "function": lambda: {"kernel_init": halves},
    "object": lambda: {"kernel_init": Twos(3.0), "bias_init": Twos()},
    "flax-zeros": lambda: {"kernel_init": nnx.initializers.zeros_init(), "bias_init": nnx.initializers.ones},
}


@pytest.mark.parametrize("options", INITIALIZERS.values(), ids=INITIALIZERS)
def test_initializers_that_pickle(options: Callable[[], dict[str, Any]]) -> None:
    twin = round_trip(lm.LazyLinear(3, **options(), rngs=nnx.Rngs(0)))
    want = nnx.Linear(6, 3, **options(), rngs=nnx.Rngs(0))
    assert_same_bits(twin(X), want(X))
    assert_same_bits(nnx.state(twin), nnx.state(want))


DEFAULTS: dict[str, Callable[[nnx.Rngs], Any]] = {
    "conv": lambda r: lm.LazyConv(3, (3,), rngs=r),
    "norm": lambda r: lm.LazyBatchNorm(rngs=r),
    "attention": lambda r: lm.LazyMultiHeadAttention(2, rngs=r),
    "cell": lambda r: lm.LazyLSTMCell(3, gate_fn=squash, activation_fn=squash, rngs=r),  # jax.nn's do not pickle
    "embed": lambda r: lm.LazyEmbed(5, rngs=r),
    "lora": lambda r: lm.LazyLoRALinear(3, lora_rank=2, rngs=r),
    "wrapped": lambda r: lm.LazyWeightNorm(lm.LazyLinear(3, rngs=r), rngs=r),
}


@pytest.mark.parametrize("make", DEFAULTS.values(), ids=DEFAULTS)
def test_flax_default_initializers_pickle(make: Callable[[nnx.Rngs], Any]) -> None:
    layer = make(nnx.Rngs(0))
    twin = round_trip(layer)
    assert type(twin) is type(layer) and lm.uninitialized_paths(twin) == lm.uninitialized_paths(layer)


@pytest.mark.parametrize("name", ["kernel_init", "bias_init"])
@pytest.mark.parametrize("init", [nnx.initializers.normal(), lambda key, shape, dtype: jnp.zeros(shape, dtype)],
                         ids=["flax-normal", "lambda"])
def test_an_initializer_that_does_not_pickle_is_named(init: Any, name: str) -> None:
    model = nnx.List([lm.LazyLinear(3, rngs=nnx.Rngs(0), **{name: init})])
    with pytest.raises(lm.SerializationError, match=f"LazyLinear\n  got:    {name}=<function"):
        pickle.dumps(model)
    with pytest.raises(pickle.PicklingError):
        pickle.dumps(model)
    model[0](X)  # ready, it pickles: the initializer is gone
    assert_same_bits(round_trip(model)[0].kernel.get_value(), model[0].kernel.get_value())


def test_an_infer_that_does_not_pickle_is_named() -> None:
    layer = lm.lazy(nnx.Linear, infer=lambda config, x: {"in_features": x.shape[-1]})(out_features=3, rngs=nnx.Rngs(0))
    with pytest.raises(lm.SerializationError, match="infer"):
        pickle.dumps(layer)


def test_a_local_subclass_is_not_replaced_by_its_base() -> None:
    class Zero(lm.LazyLinear):
        def __call__(self, inputs: jax.Array) -> jax.Array:  # pyright: ignore[reportIncompatibleMethodOverride]
            return 0 * super().__call__(inputs)

    layer = Zero(3, rngs=nnx.Rngs(0))
    try:
        twin = round_trip(layer)
    except (pickle.PicklingError, AttributeError) as error:
        assert "Zero" in str(error)
    else:
        assert_same_bits(twin(X), jnp.zeros((4, 3)))
