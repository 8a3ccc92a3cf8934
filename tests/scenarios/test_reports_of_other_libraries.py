"""Field reports of lazily built layers of Haiku, Equinox and Keras, where no row states the same already."""

import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import array, assert_same_bits, assert_same_model, lazy_mlp, plain_mlp, spec
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import lazymods as lm


def test_load_before_the_first_call_builds_from_the_shapes() -> None:
    model, want = lazy_mlp(), plain_mlp(seed=3)
    as_file = {k: np.asarray(v) for k, v in lm.state_dict(want).items()}
    assert lm.load_state_dict(model, as_file) == ([], [], [])
    assert_same_model(model, want)


class Parent(lm.LazyModuleMixin, nnx.Module):
    """Makes its child when it is initialized."""

    def __init__(self, seed: int) -> None:
        self.rngs = nnx.Rngs(seed)
        self.w = lm.UninitializedParameter((None,), init=nnx.initializers.ones)

    def initialize_parameters(self, x: Any) -> None:
        self.w.materialize(x.shape[-1:])
        self.child = lm.LazyLinear(4, rngs=self.rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.child(x + self.w[None])


@pytest.mark.parametrize("first", [lambda m, x: m(x), nnx.jit(lambda m, x: m(x)), lm.materialize],
                         ids=["call", "nnx.jit", "materialize"])
def test_children_made_at_the_first_call_are_saved_and_loaded(first: Callable[[Any, Any], Any]) -> None:
    model, fresh, x = Parent(0), Parent(1), array(2, 3)
    first(model, x)
    sd = lm.state_dict(model)
    assert sorted(sd) == ["child.bias", "child.kernel", "w"]
    with pytest.raises(lm.StateDictError, match=r"child\.kernel"):  # there is no child yet
        lm.load_state_dict(fresh, sd)
    lm.materialize(fresh, spec(2, 3))
    assert lm.load_state_dict(fresh, sd) == ([], [], [])
    assert_same_bits(fresh(x), model(x))
    assert_same_bits(model(x), nnx.Linear(3, 4, rngs=nnx.Rngs(0))(x + 1.0))


def test_a_partial_load_reaches_nested_models() -> None:
    model = nnx.Dict({"encoder": nnx.Dict({"inner": lazy_mlp()}), "head": lm.LazyLinear(2, rngs=nnx.Rngs(0))})
    want = plain_mlp(seed=3)
    entries = {f"encoder.inner.{k}": v for k, v in lm.state_dict(want).items()}
    result = lm.load_state_dict(model, entries | {"fc1.kernel": jnp.ones(1)}, strict=False)
    assert (sorted(result.missing), result.unexpected) == (["head.bias", "head.kernel"], ["fc1.kernel"])
    assert_same_bits(model["encoder"]["inner"](array(2, 8)), want(array(2, 8)))  # pyright: ignore[reportIndexIssue]
    assert lm.is_lazy(model["head"])


@pytest.mark.parametrize("use", [lm.materialize, lm.infer_shapes], ids=["materialize", "infer_shapes"])
def test_shapes_are_enough(use: Callable[..., Any]) -> None:
    ran: list[int] = []

    class Net(nnx.Module):
        def __init__(self) -> None:
            self.fc = lm.LazyLinear(4, rngs=nnx.Rngs(0))

        def __call__(self, x: jax.Array) -> jax.Array:
            jax.debug.callback(lambda: ran.append(1))  # runs with the forward, and not when that is traced
            return self.fc(x)

    model = Net()
    report = use(model, spec(2**40, 3))  # 12 TiB, if it were an array
    jax.effects_barrier()
    assert ran == [] and report.output.shape == (2**40, 4)
    lm.materialize(model, array(2, 3))
    jax.effects_barrier()
    assert ran == []
    assert_same_model(model.fc, nnx.Linear(3, 4, rngs=nnx.Rngs(0)))


def test_built_inside_jit_with_shardings() -> None:
    sharding = NamedSharding(jax.make_mesh((1,), ("d",)), P("d"))

    def build() -> nnx.State:
        model = lazy_mlp()
        lm.materialize(model, spec(2, 8))
        return nnx.state(model)

    state = jax.jit(build, out_shardings=sharding)()
    want = plain_mlp()
    flat = dict(nnx.to_flat_state(state))
    assert set(flat) == set(dict(nnx.to_flat_state(nnx.state(want))))
    for path, value in nnx.to_flat_state(nnx.state(want)):
        assert flat[path][...].sharding.is_equivalent_to(sharding, value.ndim)
        np.testing.assert_allclose(flat[path][...], value[...], rtol=1e-5)


def test_a_failed_trace_leaves_no_tracer() -> None:
    model = lazy_mlp()

    def fails(x: jax.Array) -> jax.Array:
        out = model(x)
        raise KeyError("after the first call")
        return out

    with pytest.raises(KeyError, match="after the first call"):
        jax.jit(fails)(array(2, 8))
    assert_same_model(model, plain_mlp())  # looks for tracers


@pytest.mark.parametrize("order", ["build_optimizer_step", "optimizer_build_step", "build_twice"])
def test_the_order_of_build_and_optimizer_does_not_matter(order: str) -> None:
    model, want, x, tx = lazy_mlp(), plain_mlp(), array(2, 8), optax.sgd(0.1, momentum=0.9)
    optimizer: Any = lm.LazyOptimizer(model, tx, wrt=nnx.Param) if order.startswith("optimizer") else None
    lm.materialize(model, spec(2, 8))
    if order == "build_twice":
        lm.materialize(model, spec(3, 8))
    optimizer = optimizer or nnx.Optimizer(model, tx, wrt=nnx.Param)
    explicit = nnx.Optimizer(want, tx, wrt=nnx.Param)

    @nnx.jit
    def step(m: Any, o: Any) -> None:
        o.update(m, nnx.grad(lambda m: m(x).sum())(m))

    for _ in range(2):
        step(model, optimizer)
        step(want, explicit)
    assert_same_model(model, want)
    assert_same_model(optimizer, explicit)


LEAK_FREE: dict[str, Callable[[Any, jax.Array], Any]] = {
    "python": lambda m, x: m(x),
    "nnx.jit": lambda m, x: nnx.jit(lambda m, x: m(x))(m, x),
    "nnx.vmap": lambda m, x: nnx.vmap(lambda m, x: m(x), in_axes=(None, 0))(m, x),
    "nnx.remat": lambda m, x: nnx.remat(lambda m, x: m(x))(m, x),
    "materialize": lambda m, x: lm.materialize(m, x),
    "infer_then_call": lambda m, x: (lm.infer_shapes(m, x), m(x)),
    "summary_then_call": lambda m, x: (lm.summary(m, x), m(x)),
    "refused_then_call": lambda m, x: (refused(m, x), m(x)),
}


def refused(model: Any, x: jax.Array) -> None:
    with pytest.raises(lm.UninitializedError, match="fc1"):
        jax.jit(lambda m, x: m(x))(model, x)


@pytest.mark.parametrize("run", LEAK_FREE.values(), ids=LEAK_FREE)
def test_the_leak_checker_finds_nothing(run: Callable[[Any, Any], Any]) -> None:
    model, want = lazy_mlp(), plain_mlp()
    with jax.checking_leaks():
        run(model, array(2, 8))
    assert_same_model(model, want)


def never(key: Any, shape: Any, dtype: Any = jnp.float32) -> jax.Array:
    raise AssertionError("the initializer of a parameter that is loaded")


def test_a_loaded_layer_needs_no_initializer() -> None:
    by_hand = nnx.Dict({"w": lm.UninitializedParameter((None, 2))})  # neither init nor key
    lm.load_state_dict(by_hand, {"w": jnp.ones((3, 2))})
    assert_same_bits(by_hand["w"][...], jnp.ones((3, 2)))
    p = lm.UninitializedParameter((None, 2), init=never)
    lm.load_state_dict(nnx.Dict({"w": p}), {"w": jnp.ones((3, 2))})
    assert_same_bits(p[...], jnp.ones((3, 2)))


class ConvStack(nnx.Module):
    """Convolutions with batch norm over a named axis, then a linear layer, for one image."""

    def __init__(self, lazy: bool) -> None:
        r = nnx.Rngs(0)
        self.conv = lm.LazyConv2d(4, 3, strides=2, rngs=r) if lazy else nnx.Conv(1, 4, (3, 3), strides=2, rngs=r)
        self.norm = lm.LazyBatchNorm(axis_name="batch", rngs=r) if lazy else nnx.BatchNorm(4, axis_name="batch", rngs=r)
        self.head = lm.LazyLinear(3, rngs=r) if lazy else nnx.Linear(64, 3, rngs=r)

    def __call__(self, image: jax.Array) -> jax.Array:
        return self.head(jax.nn.relu(self.norm(self.conv(image))).reshape(-1))


def over_batch(model: Any, images: jax.Array) -> Any:
    return nnx.vmap(lambda m, x: m(x), in_axes=(None, 0), axis_name="batch")(model, images)


@pytest.mark.slow
@pytest.mark.parametrize("first", [over_batch, nnx.jit(over_batch)], ids=["vmap", "jit_of_vmap"])
def test_stateful_norm_in_a_named_vmap_then_linear(first: Callable[[Any, Any], Any]) -> None:
    model, want, images = ConvStack(True), ConvStack(False), array(4, 8, 8, 1)
    assert jnp.allclose(first(model, images), over_batch(want, images), rtol=1e-4, atol=1e-5)
    assert model.head.in_features == 64 and type(model.norm) is nnx.BatchNorm
    assert nnx.graphdef(model) == nnx.graphdef(want)
    assert jnp.allclose(model.norm.mean[...], want.norm.mean[...], rtol=1e-4, atol=1e-6)
    assert jnp.abs(model.norm.mean[...]).max() > 0
    assert_same_bits(model.head.kernel[...], want.head.kernel[...])


def test_the_first_call_keeps_what_was_loaded() -> None:
    model, want, x = ConvStack(True), ConvStack(False), array(4, 8, 8, 1)
    want.norm.mean[...] = array(4)
    entries = lm.state_dict(want)
    lm.load_state_dict(model, entries)
    model.norm.use_running_average = want.norm.use_running_average = True
    assert jnp.allclose(over_batch(model, x), over_batch(want, x), rtol=1e-5, atol=1e-6)
    assert_same_bits(lm.state_dict(model), entries)


def test_a_first_call_in_another_thread_s_trace() -> None:
    model, want, x, out = lazy_mlp(), plain_mlp(), array(2, 8), []
    thread = threading.Thread(target=lambda: out.append(jax.jit(lambda x: model(x))(x)))
    thread.start()
    thread.join()
    assert jnp.allclose(out[0], want(x), rtol=1e-6)
    assert_same_model(model, want)
