"""Field reports of Flax NNX and state dicts, where no row states the same already (README.md says which)."""

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


class ConvNet(nnx.Module):
    """Convolution, flatten, linear: the sizes that people ask for."""

    def __init__(self, lazy: bool) -> None:
        r = nnx.Rngs(0)
        self.conv = lm.LazyConv(4, (3, 3), strides=2, rngs=r) if lazy else nnx.Conv(1, 4, (3, 3), strides=2, rngs=r)
        self.norm = lm.LazyBatchNorm(rngs=r) if lazy else nnx.BatchNorm(4, rngs=r)
        self.head = lm.LazyLinear(3, rngs=r) if lazy else nnx.Linear(4 * 4 * 4, 3, rngs=r)
        self.drop = nnx.Dropout(0.5, rngs=r)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = jax.nn.relu(self.norm(self.conv(x)))
        return self.head(self.drop(x.reshape(x.shape[0], -1)))


IMAGES = array(2, 8, 8, 1)


@pytest.mark.slow
def test_convolution_flatten_linear_without_a_size() -> None:
    model, want = ConvNet(True), ConvNet(False)
    with pytest.raises(lm.UninitializedError, match=r"head\.kernel(.|\n)*lm\.materialize"):
        model.head.kernel[...]
    assert_same_bits(model(IMAGES), want(IMAGES))
    assert model.head.in_features == 64
    assert_same_model(model, want)


@pytest.mark.parametrize("run", [lambda m, x: m(x), nnx.jit(lambda m, x: m(x))], ids=["python", "nnx.jit"])
def test_variables_made_after_the_first_call_are_kept(run: Callable[[Any, Any], Any]) -> None:
    class Remembering(nnx.Module):
        def __init__(self) -> None:
            self.fc = lm.LazyLinear(4, rngs=nnx.Rngs(0))
            self.calls = 0

        def __call__(self, x: jax.Array) -> jax.Array:
            out = self.fc(x)
            self.calls += 1
            if self.calls == 2:
                self.seen = nnx.BatchStat(out)
            return out

    model, x = Remembering(), array(2, 3)
    run(model, x)
    out = run(model, x)
    assert sorted(lm.state_dict(model)) == ["fc.bias", "fc.kernel", "seen"]
    assert jnp.allclose(model.seen[...], out)


@pytest.mark.parametrize("lazy", [True, False], ids=["lazy", "ready"])
def test_the_names_are_literal(lazy: bool) -> None:
    """Names that a later version must write and read as well."""
    names = ["conv.kernel", "conv.bias", "norm.scale", "norm.bias", "norm.mean", "norm.var", "head.kernel", "head.bias"]
    assert sorted(lm.state_dict(ConvNet(lazy))) == sorted(names)


def test_training_goes_on_with_the_same_dropout_masks() -> None:
    model, x = ConvNet(True), IMAGES
    for _ in range(3):
        model(x)
    with_rng, without = lm.state_dict(model, include_rng=True), lm.state_dict(model)
    resumed, forgetful = ConvNet(True), ConvNet(True)
    counts = [lm.state_dict(forgetful, include_rng=True)["drop.rngs.count"], with_rng["drop.rngs.count"]]
    assert int(counts[1]) == int(counts[0]) + 3  # one draw a call
    lm.load_state_dict(resumed, with_rng)
    lm.load_state_dict(forgetful, without)
    fourth = model(x)
    assert_same_bits(resumed(x), fourth)
    assert jnp.abs(forgetful(x) - fourth).max() > 0  # its counter began anew


class Containers(nnx.Module):
    """A layer in every container that NNX has."""

    def __init__(self, size: int | None, seed: int) -> None:
        r = nnx.Rngs(seed)

        def layer() -> Any:
            return lm.LazyLinear(2, rngs=r) if size is None else nnx.Linear(size, 2, rngs=r)

        self.list = nnx.List([layer(), nnx.List([layer()])])
        self.dict = nnx.Dict({"a": layer(), "b": nnx.Dict({"c": layer()})})
        self.sequential = nnx.Sequential(layer(), jnp.tanh)
        self.plain_list = nnx.data([layer()])
        self.plain_dict = nnx.data({3: layer(), 7: layer()})
        self.plain_tuple = nnx.data((layer(), {"d": layer()}))


def test_every_container_both_ways() -> None:
    model, want = Containers(None, 0), Containers(3, 1)
    sd = lm.state_dict(want)
    layers = ["list.0", "list.1.0", "dict.a", "dict.b.c", "sequential.layers.0", "plain_list.0", "plain_dict.3",
              "plain_dict.7", "plain_tuple.0", "plain_tuple.1.d"]
    assert sorted(sd) == sorted(f"{name}.{p}" for name in layers for p in ("kernel", "bias"))
    assert lm.load_state_dict(model, sd) == ([], [], [])
    assert_same_bits(lm.state_dict(model), sd)
    assert not lm.has_uninitialized_params(model) and type(model.plain_tuple[1]["d"]) is nnx.Linear


def test_what_a_map_of_names_leaves_over_is_told() -> None:
    model, want = nnx.Dict({"layers": nnx.List([lazy_mlp(), lazy_mlp()])}), plain_mlp(seed=3)

    def unfuse(module: Any, sd: Any, prefix: str, *_: Any) -> None:
        for name in [n for n in sd if n.startswith("layers_")]:
            sd[name.replace("layers_", "layers.", 1)] = sd.pop(name)

    lm.register_load_state_dict_pre_hook(model, unfuse)
    entries = {f"layers_{i}.{k}": v for i in range(2) for k, v in lm.state_dict(want).items()}
    result = lm.load_state_dict(model, entries | {"layer_2.kernel": jnp.ones(1)}, strict=False)
    assert result == ([], ["layer_2.kernel"], [])
    assert_same_bits(model["layers"][1](array(2, 8)), want(array(2, 8)))


def with_gradient_of_threes(model: Any) -> Any:
    @jax.custom_vjp
    def f(x: jax.Array) -> jax.Array:
        return model(x)

    f.defvjp(lambda x: (model(x), None), lambda _, g: (jnp.full((2, 8), 3.0),))
    return f


def test_first_call_inside_a_custom_vjp() -> None:
    model, want, x = lazy_mlp(), plain_mlp(), array(2, 8)
    assert_same_bits(jax.grad(lambda x: with_gradient_of_threes(model)(x).sum())(x), jnp.full((2, 8), 3.0))
    assert_same_model(model, want)


def test_argument_of_nnx_custom_vjp() -> None:
    @nnx.custom_vjp
    def f(model: Any, x: jax.Array) -> jax.Array:
        return model(x)

    f.defvjp(lambda m, x: (f(m, x), x), lambda x, g: (g[0][0], g[1]))
    layer, want, x = lm.LazyLinear(3, rngs=nnx.Rngs(0)), nnx.Linear(3, 3, rngs=nnx.Rngs(0)), array(2, 3)
    try:
        f(layer, x)
    except lm.UninitializedError as error:
        assert "lm.materialize" in str(error)
        assert lm.is_lazy(layer)
    assert_same_bits(layer(x), want(x))
    assert_same_model(layer, want)


def test_a_plain_list_of_layers_gets_flax_s_advice() -> None:
    class Plain(nnx.Module):
        def __init__(self, lazy: bool) -> None:
            self.layers = [lm.LazyLinear(4, rngs=nnx.Rngs(0)) if lazy else nnx.Linear(3, 4, rngs=nnx.Rngs(0))]

    for lazy in (False, True):
        with pytest.raises(ValueError, match=r"nnx\.List"):
            Plain(lazy)


class Tied(nnx.Module):
    """An embedding whose table is the output layer's kernel."""

    def __init__(self, lazy: bool, seed: int = 0) -> None:
        r = nnx.Rngs(seed)
        self.embed = lm.LazyEmbed(6, 4, rngs=r) if lazy else nnx.Embed(6, 4, rngs=r)
        self.out = nnx.Linear(4, 6, use_bias=False, rngs=r)
        self.fc = lm.LazyLinear(4, rngs=r) if lazy else nnx.Linear(4, 4, rngs=r)
        self.readout = nnx.Dict({"table": self.embed.embedding})

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.fc(self.embed(tokens)) @ self.readout.table[...].T


TOKENS = jnp.array([0, 3, 5])


def the_loss(model: Any, tokens: jax.Array) -> jax.Array:
    return jnp.square(model(tokens)).sum()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["jit", "load", "state_map"])
def test_a_tied_embedding_stays_one_variable(how: str) -> None:
    model, want = Tied(True), Tied(False)
    if how == "jit":
        nnx.jit(lambda m, t: m(t))(model, TOKENS)
    elif how == "load":
        lm.load_state_dict(model, lm.state_dict(want))
    else:
        model(TOKENS)
        nnx.update(model, jax.tree.map(lambda a: a, nnx.state(model)))
    assert model.embed.embedding is model.readout.table
    assert_same_model(model, want)
    for m in (model, want):
        optimizer = nnx.Optimizer(m, optax.sgd(0.1), wrt=nnx.Param)
        optimizer.update(m, nnx.grad(the_loss)(m, TOKENS))
    assert model.embed.embedding is model.readout.table
    assert_same_model(model, want)


def test_a_dry_run_changes_no_statistics_and_no_counters() -> None:
    model, want = ConvNet(True), ConvNet(False)
    lm.infer_shapes(model, IMAGES)
    lm.materialize(model, IMAGES)  # in training mode, with an array
    assert_same_bits(model.norm.mean[...], jnp.zeros(4))
    assert_same_bits(model.norm.var[...], jnp.ones(4))
    assert_same_model(model, want)  # the random counters as well


def test_a_deep_stack_at_the_highest_precision() -> None:
    def stack(lazy: bool) -> Any:
        r, n = nnx.Rngs(0), 12
        make = (lambda: lm.LazyLinear(8, precision="highest", rngs=r)) if lazy else (
            lambda: nnx.Linear(8, 8, precision="highest", rngs=r))
        return nnx.Sequential(*[f for _ in range(n) for f in (make(), jnp.tanh)])

    model, want, x = stack(True), stack(False), array(2, 8)
    assert_same_bits(model(x), want(x))
    assert_same_model(model, want)


WEAK = {
    "materialize": lambda: materialized(lm.UninitializedParameter(()), 1.0),
    "materialize_vector": lambda: materialized(lm.UninitializedParameter((None,)), jnp.asarray(1.0).reshape(1)),
    "assign": lambda: assigned(lm.UninitializedParameter(()), 1.0),
    "load_lazy": lambda: loaded(lm.UninitializedParameter(())),
    "load_ready": lambda: loaded(nnx.Param(jnp.zeros((), jnp.float32))),
}


def materialized(p: Any, value: Any) -> Any:
    p.materialize(jnp.shape(value), value)
    return p


def assigned(p: Any, value: Any) -> Any:
    p[...] = value
    return p


def loaded(p: Any) -> Any:
    lm.load_state_dict(nnx.Dict({"w": p}), {"w": jnp.asarray(1.0)})
    return p


@pytest.mark.parametrize("make", WEAK.values(), ids=WEAK)
def test_values_are_strongly_typed(make: Callable[[], Any]) -> None:
    value = make().get_value()
    assert (value.dtype, value.weak_type) == (jnp.float32, False)
    np.testing.assert_array_equal(np.ravel(value), [1.0])


def test_sized_by_a_spec_it_is_traced_once() -> None:
    model, traces = lazy_mlp(), []

    def step(m: Any, x: jax.Array) -> jax.Array:
        traces.append(x.shape)
        out = m(x)
        m.fc2.bias[...] -= 0.1 * out.mean(0)
        return out

    run = nnx.jit(step)
    lm.materialize(model, spec(2, 8))
    for scale in (1.0, 2.0, 3.0):
        run(model, jnp.full((2, 8), scale, jnp.float32))
    assert traces == [(2, 8)]
