"""``state_dict``: names in definition order, live values, what is left out, and random keys as data."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import array, assert_same_bits, lazy_mlp, plain_mlp, raw

import lazymods as lm

KEYS = ["fc1.kernel", "fc1.bias", "fc2.kernel", "fc2.bias"]


def linear(*size: int) -> Any:
    return nnx.Linear(*size, rngs=nnx.Rngs(0))


class Holds(nnx.Module):
    """Values of every kind that a module may hold."""

    def __init__(self) -> None:
        self.z = nnx.Param(jnp.ones(1))
        self.a = nnx.Variable({"x": jnp.zeros(2), "y": [1, jnp.ones(3)]})
        self.raw = nnx.data(jnp.arange(2.0))
        self.numpy = nnx.data(np.zeros(2, np.float64))
        self.pair = nnx.data((jnp.ones(1), {("k", "w"): jnp.ones(2)}))
        self.count = nnx.Variable(0)
        self.cache = nnx.Cache(jnp.zeros(2))
        self.seen = nnx.Intermediate(jnp.zeros(2))
        self.name, self.sizes, self.missing = "left", (1, 2), None


# ---------------------------------------------------------------- names and order


@pytest.mark.parametrize("make", [lazy_mlp, plain_mlp], ids=["lazy", "ready"])
def test_keys_in_definition_order(make: Callable[[], Any]) -> None:
    sd = lm.state_dict(make())
    assert type(sd) is dict and list(sd) == KEYS and all(type(k) is str for k in sd)


def test_names_of_every_kind_of_container() -> None:
    model = nnx.Dict(
        blocks=nnx.List([nnx.Dict(fc=linear(1, 1)), linear(1, 1)]),
        seq=nnx.Sequential(linear(1, 1), nnx.relu),
        norm=nnx.SpectralNorm(nnx.Linear(1, 1, use_bias=False, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(0)),
        tuple=nnx.data((nnx.Param(jnp.ones(1)), [nnx.Param(jnp.ones(1))])),
    )
    assert list(lm.state_dict(model)) == [
        "blocks.0.fc.kernel", "blocks.0.fc.bias", "blocks.1.kernel", "blocks.1.bias",
        "seq.layers.0.kernel", "seq.layers.0.bias",
        "norm.layer_instance.kernel", "norm.batch_stats.kernel.u", "norm.batch_stats.kernel.sigma",
        "tuple.0", "tuple.1.0",
    ]


def test_what_a_module_may_hold() -> None:
    sd = lm.state_dict(Holds())
    assert list(sd) == ["z", "a.x", "a.y.0", "a.y.1", "raw", "numpy", "pair.0", "pair.1.k.w", "count"]
    assert isinstance(sd["raw"], jax.Array) and isinstance(sd["numpy"], np.ndarray) and sd["count"] == 0


def test_after_an_nnx_transform_the_order_is_that_of_the_transform() -> None:
    model = nnx.jit(plain_mlp)()
    assert set(lm.state_dict(model)) == set(KEYS)
    lm.load_state_dict(model, lm.state_dict(plain_mlp(seed=5)))
    assert_same_bits(model.fc1.kernel.get_value(), plain_mlp(seed=5).fc1.kernel.get_value())


def test_two_entries_never_meet_under_one_name() -> None:
    model = nnx.Dict({"a.b": nnx.Param(jnp.ones(1)), "a": nnx.Dict(b=nnx.Param(jnp.zeros(1)))})
    with pytest.raises((lm.LazyError, ValueError), match=r"a\.b"):
        lm.state_dict(model)


def test_nothing_that_nnx_counts_as_state_is_lost() -> None:
    model = plain_mlp()
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    metrics = nnx.MultiMetric(loss=nnx.metrics.Average(), accuracy=nnx.metrics.Accuracy())
    rnn = nnx.RNN(nnx.LSTMCell(2, 3, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(1))
    nodes: list[Any] = [model, optimizer, metrics, nnx.BatchNorm(3, rngs=nnx.Rngs(0)), rnn]
    for node in nodes:
        want = {".".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(node, nnx.Not(nnx.RngState)))}
        assert set(lm.state_dict(node)) == want


# ---------------------------------------------------------------- values


def test_values_are_the_live_arrays() -> None:
    model, holds = plain_mlp(), Holds()
    assert lm.state_dict(model)["fc1.kernel"] is model.fc1.kernel.get_value()
    sd = lm.state_dict(holds)
    assert sd["raw"] is holds.raw and sd["numpy"] is holds.numpy and sd["a.x"] is holds.a.get_value()["x"]


def test_later_training_does_not_reach_a_state_dict() -> None:
    model: Any = plain_mlp()
    sd = lm.state_dict(model)
    model.fc2.bias[...] += 1
    assert_same_bits(sd["fc2.bias"], jnp.zeros(4))


def test_placeholders_appear_as_themselves() -> None:
    model = lazy_mlp()
    model.fc1(array(2, 8))
    sd = lm.state_dict(model)
    assert sd["fc2.kernel"] is model.fc2.kernel and lm.is_lazy(sd["fc2.bias"])
    assert sd["fc1.kernel"] is model.fc1.kernel.get_value()


@pytest.mark.parametrize("make", [lambda: lm.LazyLinear(2, rngs=nnx.Rngs(0)), lambda: linear(2, 2)],
                         ids=["lazy", "ready"])
def test_what_is_tied_appears_under_each_name(make: Callable[[], Any]) -> None:
    one, two = make(), make()
    two.kernel = one.kernel
    sd = lm.state_dict(nnx.Dict(a=one, b=two, c=nnx.List([one])))
    assert list(sd) == ["a.kernel", "a.bias", "b.kernel", "b.bias", "c.0.kernel", "c.0.bias"]
    assert sd["a.kernel"] is sd["b.kernel"] is sd["c.0.kernel"] and sd["a.bias"] is not sd["b.bias"]


def test_a_cycle_ends() -> None:
    one: Any = nnx.Dict(w=nnx.Param(jnp.ones(1)))
    one.back = nnx.List([one])
    assert "w" in lm.state_dict(one)


def test_a_variable_with_a_reference() -> None:
    model = nnx.Dict(w=nnx.Param(jnp.arange(2.0), ref=True))
    sd = lm.state_dict(model)
    assert_same_bits(sd["w"], jnp.arange(2.0))
    lm.load_state_dict(model, {"w": jnp.ones(2)})
    assert_same_bits(model.w.get_value(), jnp.ones(2))


# ---------------------------------------------------------------- what is left out


class LazyCache(nnx.Module):
    def __init__(self, n: int, *, rngs: nnx.Rngs):
        self.w = nnx.Param(jax.random.normal(rngs.params(), (n,)))
        self.cache, self.seen = nnx.Cache(jnp.zeros(n)), nnx.Intermediate(jnp.zeros(n))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x


def test_caches_and_intermediates_of_a_lazy_layer_are_left_out_too() -> None:
    layer = lm.lazy(LazyCache, infer=lambda config, x: {"n": x.shape[-1]})(rngs=nnx.Rngs(0))
    assert list(lm.state_dict(layer)) == ["w"]


def dropout(seed: int, impl: str | None = None) -> Any:
    rngs = nnx.Rngs(jax.random.key(seed, impl=impl))
    return nnx.Sequential(linear(8, 8), nnx.Dropout(0.5, rngs=rngs))


def test_random_state_is_left_out_unless_asked_for() -> None:
    assert list(lm.state_dict(dropout(0))) == ["layers.0.kernel", "layers.0.bias"]
    extra = list(lm.state_dict(dropout(0), include_rng=True))[2:]
    assert extra == ["layers.1.rngs.key", "layers.1.rngs.key.impl", "layers.1.rngs.count"]


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_keys_are_stored_as_data_and_implementation(impl: str) -> None:
    model = dropout(3, impl)
    sd = lm.state_dict(model, include_rng=True)
    key = model.layers[1].rngs.key.get_value()
    assert_same_bits(sd["layers.1.rngs.key"], jax.random.key_data(key))
    assert sd["layers.1.rngs.key"].dtype == jnp.uint32
    assert bytes(sd["layers.1.rngs.key.impl"]).decode() == str(jax.random.key_impl(key))
    assert all(isinstance(v, (jax.Array, np.ndarray)) for v in sd.values())


def test_many_keys_in_one_stream() -> None:
    rngs: Any = nnx.Rngs(0).split(3)
    sd = lm.state_dict(rngs, include_rng=True)
    assert [k for k in sd if k.endswith(".key")] == ["default.key"] and sd["default.key"].shape == (3, 2)


def test_a_raw_random_key_is_random_state() -> None:
    class HoldsKey(nnx.Module):
        def __init__(self) -> None:
            self.key, self.w = nnx.data(jax.random.key(0)), nnx.Param(jnp.ones(1))

    assert list(lm.state_dict(HoldsKey())) == ["w"]
    assert list(lm.state_dict(HoldsKey(), include_rng=True)) == ["key", "key.impl", "w"]


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_random_state_round_trip(impl: str) -> None:
    one, two, x = dropout(0, impl), dropout(1, impl), array(4, 8)
    for _ in range(3):
        one(x)
    lm.load_state_dict(two, lm.state_dict(one, include_rng=True))
    for _ in range(2):
        assert_same_bits(two(x), one(x))


def test_random_state_of_a_lazy_model() -> None:
    def build(lazy: bool) -> Any:
        rngs = nnx.Rngs(0)
        first = lm.LazyLinear(4, rngs=rngs) if lazy else nnx.Linear(8, 4, rngs=rngs)
        return nnx.Sequential(first, nnx.Dropout(0.5, rngs=rngs))

    a, b = (lm.state_dict(build(lazy), include_rng=True) for lazy in (True, False))
    assert list(a) == list(b)
    for name in list(a)[2:]:
        assert raw(a[name]).tobytes() == raw(b[name]).tobytes()


@pytest.mark.parametrize("kind", ["ref", "hijax"])
@pytest.mark.parametrize("state", [False, True], ids=["module", "state"])
def test_a_load_that_fails_late_leaves_what_is_written_in_place(kind: str, state: bool) -> None:
    model = nnx.Dict(w=nnx.Param(jnp.arange(2.0), **{kind: True}), plain=nnx.Param(jnp.arange(2.0)))
    target, prefix = ({"model": model}, "model.") if state else (model, "")
    entries = {f"{prefix}{name}": np.ones(2) for name in ("w", "plain")}

    def fail(module: nnx.Module, result: lm.LoadResult) -> None:
        raise RuntimeError("late")

    hook = lm.register_load_state_dict_post_hook(model, fail)
    with pytest.raises(RuntimeError, match="late"):
        lm.load_state_dict(target, entries)
    assert model.w[...].tolist() == model.plain[...].tolist() == [0, 1]
    hook.remove()
    lm.load_state_dict(target, entries)
    assert model.w[...].tolist() == model.plain[...].tolist() == [1, 1]


@pytest.mark.parametrize("kind", ["ref", "hijax"])
def test_a_variable_of_a_reference_is_an_entry(kind: str) -> None:
    source = nnx.Dict(w=nnx.Param(jnp.arange(2.0), **{kind: True}))
    model = nnx.Dict(w=nnx.Param(jnp.zeros(2)))
    lm.load(model, nnx.state(source))
    assert model.w[...].tolist() == [0, 1]
