"""``infer_shapes`` and ``materialize`` on whole models: nothing runs, nothing but the parameters changes."""
# pyright: reportOptionalMemberAccess=false

import itertools
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import array, assert_same_bits, assert_same_model, assert_unchanged, contents, lazy_mlp, plain_mlp, spec

import lazymods as lm

PATHS = ["fc1.kernel", "fc1.bias", "fc2.kernel", "fc2.bias"]
both = pytest.mark.parametrize("find", [lm.infer_shapes, lm.materialize, lm.summary], ids=lambda f: f.__name__)


class ConvNet(nnx.Module):
    """Convolution, statistics, dropout, and a flatten whose width nobody wants to compute."""

    def __init__(self, lazy: bool, *, rngs: nnx.Rngs):
        r = rngs
        self.conv = lm.LazyConv(4, (3, 3), rngs=r) if lazy else nnx.Conv(3, 4, (3, 3), rngs=r)
        self.norm = lm.LazyBatchNorm(rngs=r) if lazy else nnx.BatchNorm(4, rngs=r)
        self.drop: Any = nnx.Dropout(0.5, rngs=r)
        self.head = lm.LazyLinear(10, rngs=r) if lazy else nnx.Linear(4 * 2 * 2, 10, rngs=r)
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x: jax.Array) -> jax.Array:
        self.calls[...] += 1
        x = nnx.max_pool(jax.nn.relu(self.norm(self.conv(x))), (2, 2), (2, 2))
        return self.head(self.drop(x.reshape(x.shape[0], -1)))


class Recurrent(nnx.Module):
    """Layers that are first met inside scans, one nested in another, with a carry that is made before the call."""

    def __init__(self, lazy: bool, *, rngs: nnx.Rngs):
        r = rngs
        lstm: Any = lm.LazyLSTMCell if lazy else partial(nnx.LSTMCell, 3)
        gru: Any = lm.LazyGRUCell if lazy else partial(nnx.GRUCell, 4)
        self.rnn: Any = nnx.RNN(lstm(4, rngs=r), rngs=r)
        there, back = nnx.RNN(gru(3, rngs=r), rngs=r), nnx.RNN(gru(3, rngs=r), rngs=r)
        self.both: Any = nnx.Bidirectional(there, back, rngs=r)
        self.head = lm.LazyLinear(2, rngs=r) if lazy else nnx.Linear(6, 2, rngs=r)

    def __call__(self, x: jax.Array) -> jax.Array:
        carry = self.rnn.cell.initialize_carry(x[:, 0].shape, nnx.Rngs(5))
        return self.head(self.both(self.rnn(x, initial_carry=carry)))


class Branches(nnx.Module):
    """``unused`` is never called, ``aux`` only when asked."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.trunk = lm.LazyLinear(6, rngs=rngs)
        self.unused = lm.LazyLinear(3, rngs=rngs)
        self.aux = nnx.Dict(head=lm.LazyLinear(2, rngs=rngs))

    def __call__(self, x: jax.Array, *, with_aux: bool = False) -> Any:
        y = self.trunk(x)
        return {"y": y, "aux": [self.aux.head(y), None]} if with_aux else y


# ---------------------------------------------------------------- shapes without anything else


@pytest.mark.parametrize("x", [spec(2, 8), array(2, 8), np.ones((2, 8), np.float32)], ids=["spec", "jax", "numpy"])
def test_infer_shapes_changes_nothing(x: Any) -> None:
    model = lazy_mlp()
    before = contents(model)
    report = lm.infer_shapes(model, x)
    assert (report.output.shape, report.output.dtype) == ((2, 4), jnp.float32)
    assert_unchanged(model, before)
    model(array(2, 5))
    assert_same_model(model, plain_mlp(5))


@pytest.mark.slow
@both
def test_statistics_rngs_and_counters_stay(find: Callable[..., Any]) -> None:
    model, want = ConvNet(True, rngs=nnx.Rngs(0)), ConvNet(False, rngs=nnx.Rngs(0))
    for x in (spec(5, 4, 4, 3), array(5, 4, 4, 3)):
        assert find(model, x).output.shape == (5, 10)
    if find is lm.materialize:
        assert_same_model(model, want)
    else:
        assert lm.has_uninitialized_params(model)
    assert int(model.calls[...]) == 0 and int(model.drop.rngs.count[...]) == int(want.drop.rngs.count[...])
    x = array(5, 4, 4, 3)
    assert_same_bits(model(x), want(x))
    assert_same_model(model, want)


def test_infer_shapes_allocates_nothing() -> None:
    n = 100_000  # a kernel would take 40 GB
    before = sum(a.nbytes for a in jax.live_arrays())
    report = lm.infer_shapes(lazy_mlp(hidden=n, out=n), spec(4, n))
    assert report.output.shape == (4, n) and report.total_parameters == 2 * (n * n + n)
    assert sum(a.nbytes for a in jax.live_arrays()) - before < 10_000


def test_a_huge_batch_makes_no_activations() -> None:
    model = lazy_mlp()
    lm.materialize(model, spec(10**9, 8))
    assert_same_model(model, plain_mlp())


@both
def test_nothing_is_executed(find: Callable[..., Any]) -> None:
    ran: list[Any] = []

    class Noisy(nnx.Module):
        def __init__(self) -> None:
            self.fc = lm.LazyLinear(3, rngs=nnx.Rngs(0))

        def __call__(self, x: jax.Array) -> jax.Array:
            jax.debug.callback(lambda v: ran.append(v), x.sum())
            return self.fc(x)

    find(Noisy(), array(2, 4))
    jax.effects_barrier()
    assert ran == []


@pytest.mark.slow
@both
def test_recurrent_layers_are_met_inside_scans(find: Callable[..., Any]) -> None:
    model, want = (Recurrent(lazy, rngs=nnx.Rngs(0)) for lazy in (True, False))
    assert find(model, spec(2, 5, 3)).output.shape == (2, 5, 2)
    x = array(2, 5, 3)
    np.testing.assert_allclose(model(x), want(x), rtol=1e-5, atol=1e-6)
    assert_same_model(model, want)


# ---------------------------------------------------------------- materialize


@pytest.mark.parametrize("x", [spec(2, 8), array(2, 8), np.ones((2, 8), np.float32)], ids=["spec", "jax", "numpy"])
def test_materialize_equals_explicit(x: Any) -> None:
    model = lazy_mlp()
    assert isinstance(lm.materialize(model, x), lm.ShapeReport)
    assert_same_model(model, plain_mlp())


def test_materialize_twice_and_of_a_ready_model_is_harmless() -> None:
    model = lazy_mlp()
    for shape in ((2, 8), (9, 8)):
        lm.materialize(model, spec(*shape))
        assert_same_model(model, plain_mlp())


def test_a_half_lazy_model() -> None:
    model: Any = lazy_mlp()
    want: Any = plain_mlp()
    model.fc1(array(2, 8))
    model.fc1.bias[...] = jnp.ones(16)
    lm.materialize(model, spec(2, 8))
    want.fc1.bias[...] = jnp.ones(16)
    assert_same_model(model, want)


def test_a_half_filled_layer() -> None:
    model, want = lazy_mlp(), plain_mlp()
    model.fc1.kernel.materialize((8, 16), jnp.ones((8, 16)))
    want.fc1.kernel[...] = jnp.ones((8, 16))
    lm.materialize(model, spec(2, 8))
    assert_same_model(model, want)


def test_layers_that_the_call_does_not_reach_stay_lazy_and_are_listed() -> None:
    model = Branches(rngs=nnx.Rngs(0))
    report = lm.materialize(model, spec(2, 8))
    assert type(model.trunk) is nnx.Linear and report.unreached == ("unused", "aux.head")
    assert lm.uninitialized_paths(model) == ["unused.kernel", "unused.bias", "aux.head.kernel", "aux.head.bias"]
    assert "not reached, still lazy: unused, aux.head" in str(report)
    assert lm.materialize(model, spec(2, 8), with_aux=True).unreached == ("unused",)
    assert model.aux.head.in_features == 6


def test_keywords_and_outputs_of_any_structure() -> None:
    report = lm.infer_shapes(Branches(rngs=nnx.Rngs(0)), x=spec(2, 8), with_aux=True)
    assert report.output == {"y": spec(2, 6), "aux": [spec(2, 2), None]}


def test_rngs_among_the_arguments() -> None:
    class Noise(nnx.Module):
        def __init__(self) -> None:
            self.fc = lm.LazyLinear(3, rngs=nnx.Rngs(0))

        def __call__(self, x: jax.Array, *, rngs: nnx.Rngs) -> jax.Array:
            y = self.fc(x)
            return y + jax.random.normal(rngs.params(), y.shape)

    for find in (lm.infer_shapes, lm.materialize, lm.summary):
        model, rngs = Noise(), nnx.Rngs(3)
        assert find(model, spec(2, 4), rngs=rngs).output.shape == (2, 3)
        assert_same_bits(rngs.params(), nnx.Rngs(3).params())


class Applies(nnx.Module):
    def __init__(self) -> None:
        self.fc = lm.LazyLinear(3, rngs=nnx.Rngs(0))

    def __call__(self, x: jax.Array, other: Any) -> jax.Array:
        return other(self.fc(x))


def test_a_ready_module_among_the_arguments() -> None:
    other = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
    model = Applies()
    assert lm.materialize(model, spec(2, 4), other).output.shape == (2, 3)
    assert type(model.fc) is nnx.Linear
    assert_same_bits(other.mean.get_value(), jnp.zeros(3))


def test_a_lazy_module_among_the_arguments_is_not_passed_over_in_silence() -> None:
    model, other = Applies(), lm.LazyLinear(2, rngs=nnx.Rngs(1))
    try:
        report = lm.materialize(model, spec(2, 4), other)
    except lm.LazyError as error:
        assert "LazyLinear" in str(error) and lm.is_lazy(model.fc)
    else:
        assert not lm.is_lazy(other) or report.unreached


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.bfloat16, "float16", np.dtype("float16")], ids=str)
def test_dtype_is_that_of_floating_parameters(dtype: Any) -> None:
    model, want = ConvNet(True, rngs=nnx.Rngs(0)), ConvNet(False, rngs=nnx.Rngs(0))
    with jax.numpy_dtype_promotion("standard"):  # the input is of another dtype then
        report = lm.materialize(model, spec(5, 4, 4, 3), dtype=dtype)
    for name, value in lm.state_dict(model).items():
        is_param = name.split(".")[0] in ("conv", "head") or name in ("norm.scale", "norm.bias")
        expected = lm.state_dict(want)[name]
        assert_same_bits(value, expected.astype(dtype) if is_param else expected)
    told = {np.dtype(p.dtype) for row in report.rows if row.path == "conv" for p in row.parameters}
    assert told == {jnp.dtype(dtype)}


@pytest.mark.slow
def test_device() -> None:
    code = """
import jax, jax.numpy as jnp, lazymods as lm
from flax import nnx
from helpers import lazy_mlp, plain_mlp, spec, assert_same_bits
first, second = jax.devices()
model = lazy_mlp()
lm.materialize(model, spec(2, 8), device=second)
assert all(v.devices() == {second} for v in lm.state_dict(model).values())
assert_same_bits([*lm.state_dict(model).values()], [*lm.state_dict(plain_mlp()).values()])
other = lazy_mlp()
lm.materialize(other, spec(2, 8))
assert all(v.devices() == {first} for v in lm.state_dict(other).values())
print("done")
"""
    env = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    path = ":".join(p for p in sys.path if p)
    done = subprocess.run([sys.executable, "-c", code], env=env | {"PYTHONPATH": path}, capture_output=True, text=True,
                          timeout=120, check=False)
    assert done.stdout == "done\n", done.stderr


# ---------------------------------------------------------------- abstract models


def test_a_model_made_abstract_by_eval_shape() -> None:
    for build in (lazy_mlp, plain_mlp):
        report = lm.infer_shapes(nnx.eval_shape(build), spec(2, 8))
        assert report.output.shape == (2, 4) and report.total_parameters == 8 * 16 + 16 + 16 * 4 + 4
    ready = nnx.eval_shape(plain_mlp)
    lm.materialize(ready, spec(2, 8))
    assert nnx.graphdef(ready) == nnx.graphdef(nnx.eval_shape(plain_mlp))


def test_materialize_a_lazy_model_whose_keys_are_abstract() -> None:
    """It has no key to draw from: its parameters become abstract as well, or an error says so."""
    model, want = nnx.eval_shape(lazy_mlp), nnx.eval_shape(plain_mlp)
    try:
        lm.materialize(model, spec(2, 8))
    except lm.LazyError as error:
        assert "abstract" in str(error) or "eval_shape" in str(error)
        assert sorted(lm.uninitialized_paths(model)) == sorted(PATHS)
    else:
        assert nnx.graphdef(model) == nnx.graphdef(want)
        assert jax.tree.map(lambda a: a.shape, nnx.state(model)) == jax.tree.map(lambda a: a.shape, nnx.state(want))


@both
def test_values_that_are_no_arrays(find: Callable[..., Any]) -> None:
    class Counts(nnx.Module):
        def __init__(self) -> None:
            self.fc = lm.LazyLinear(3, rngs=nnx.Rngs(0))
            self.steps, self.rate = nnx.Variable(0), nnx.data(0.5)
            self.table = nnx.Variable({"a": 1, "b": [jnp.ones(2), np.zeros(3, np.float32)]})

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.fc(x) * self.rate

    model = Counts()
    assert find(model, spec(2, 4)).output.shape == (2, 3)
    assert model.steps.get_value() == 0 and model.rate == 0.5 and model.table.get_value()["a"] == 1
    assert_same_bits(model(array(2, 4)), nnx.Linear(4, 3, rngs=nnx.Rngs(0))(array(2, 4)) * 0.5)


@both
def test_variables_that_the_forward_makes_stay_behind(find: Callable[..., Any]) -> None:
    class Sows(nnx.Module):
        def __init__(self) -> None:
            self.fc = lm.LazyLinear(3, rngs=nnx.Rngs(0))
            self.blocks = nnx.List([])

        def __call__(self, x: jax.Array) -> jax.Array:
            y = self.fc(x)
            self.extra = nnx.Cache(y)
            self.blocks.append(nnx.Intermediate(y))
            return y

    model = Sows()
    assert find(model, spec(2, 4)).output.shape == (2, 3)
    assert not hasattr(model, "extra") and len(model.blocks) == 0


class Inner(nnx.Module):
    """Calls its layers inside NNX transforms of its own."""

    def __init__(self, lazy: bool, *, rngs: nnx.Rngs):
        make: Any = lm.LazyLinear if lazy else partial(nnx.Linear, 4)
        self.a, self.b, self.c, self.d = (make(4, rngs=rngs) for _ in range(4))
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.remat(lambda m, x: m(x))(self.a, x)
        x = nnx.jit(lambda m, x: m(x))(self.b, x)
        x = nnx.vmap(lambda m, x: m(x), in_axes=(None, 0))(self.c, x)
        x, _ = nnx.scan(lambda c, _: (self.d(c), None), length=2)(x, None)
        return self.drop(x)


@both
def test_layers_that_are_first_met_inside_transforms(find: Callable[..., Any]) -> None:
    model, want = (Inner(lazy, rngs=nnx.Rngs(0)) for lazy in (True, False))
    assert find(model, spec(2, 4)).output.shape == (2, 4)
    lm.materialize(model, spec(2, 4))
    assert_same_model(model, want)


def test_an_abstract_model_with_random_state() -> None:
    model = nnx.eval_shape(lambda: Inner(True, rngs=nnx.Rngs(0)))
    assert lm.infer_shapes(model, spec(2, 4)).output.shape == (2, 4)


def test_dtype_of_what_is_not_reached_stays() -> None:
    model = Branches(rngs=nnx.Rngs(0))
    lm.materialize(model, spec(2, 8, dtype=jnp.bfloat16), dtype=jnp.bfloat16)
    assert model.trunk.kernel.dtype == jnp.bfloat16
    assert model.unused.kernel.dtype == model.unused.bias.dtype == jnp.float32


class Energy(nnx.Module):
    """Returns a gradient with respect to its layers' input, and one with respect to the layers."""

    def __init__(self, lazy: bool, *, rngs: nnx.Rngs):
        widths = [3, 3, 5, 4, 6, 2, 7, 1]
        make: Any = (lambda _, n: lm.LazyLinear(n, rngs=rngs)) if lazy else partial(nnx.Linear, rngs=rngs)
        self.layers = nnx.Sequential(*(make(m, n) for m, n in itertools.pairwise(widths)))

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        RUNS.append(None)
        force = nnx.grad(lambda layers, x: (layers(x) ** 2).sum(), argnums=1)(self.layers, x)
        slopes = nnx.grad(lambda layers: (layers(x) ** 2).sum())(self.layers)
        return force, jnp.stack([jnp.linalg.norm(leaf) for leaf in jax.tree.leaves(slopes)]).sum()


RUNS: list[None] = []


@pytest.mark.slow
def test_all_layers_inside_gradients_are_sized_by_two_runs() -> None:
    model, want = (Energy(lazy, rngs=nnx.Rngs(0)) for lazy in (True, False))
    RUNS.clear()
    lm.materialize(model, spec(2, 3))
    assert len(RUNS) == 2  # not one for each layer
    assert_same_model(model, want)
    assert_same_bits(model(array(2, 3)), want(array(2, 3)))


def test_an_error_inside_a_gradient_is_that_of_the_model() -> None:
    class Wrong(Energy):
        def __call__(self, x: jax.Array) -> Any:
            super().__call__(x)
            raise KeyError("the model's own")

    model = Wrong(True, rngs=nnx.Rngs(0))
    with pytest.raises(KeyError, match="the model's own"):
        lm.materialize(model, spec(2, 3))
    assert lm.has_uninitialized_params(model)


class Settings:
    def __init__(self) -> None:
        self.calls, self.seen = 0, {"first": 1}


class Writing(nnx.Module):
    """Its forward writes to plain containers and objects, as a counter or a log does."""

    def __init__(self) -> None:
        self.layer = lm.LazyLinear(3, rngs=nnx.Rngs(0))
        self.table: Any = nnx.static({"a": 1, "b": 2.0})
        self.log: Any = nnx.static([])
        self.names: Any = nnx.static({"x"})
        self.settings: Any = Settings()
        self.pair: Any = nnx.static(({"k": []},))

    def __call__(self, x: jax.Array) -> jax.Array:
        self.table["b"], self.table["c"] = self.table.pop("a", 0), 5
        y = self.layer(x)
        self.log.append(y)
        self.names.add("y")
        self.settings.calls += 1
        self.settings.seen["last"] = y
        self.pair[0]["k"].append(y)
        return y


@pytest.mark.parametrize("ask", [lm.infer_shapes, lm.materialize, lm.summary])
def test_a_run_without_values_leaves_plain_containers_as_they_are(ask: Any) -> None:
    model = Writing()
    log, settings = model.log, model.settings
    ask(model, jnp.ones((2, 4)))
    assert model.table == {"a": 1, "b": 2.0} and list(model.table) == ["a", "b"]
    assert model.log is log == [] and model.names == {"x"} and model.pair == ({"k": []},)
    assert model.settings is settings and settings.calls == 0 and settings.seen == {"first": 1}
    assert model(jnp.ones((2, 4))).shape == (2, 3) and settings.calls == 1 and len(log) == 1


def test_a_lazy_optimizer_is_sized_without_an_effect_of_the_function() -> None:
    class Table(nnx.Module):
        def __init__(self) -> None:
            self.table: Any = nnx.static({"a": 1, "b": 2.0})

    def step(x: jax.Array, model: Any, layer: Any, optimizer: Any) -> jax.Array:
        y = x + float(model.table["b"])
        model.table["b"] = model.table["a"]
        return y

    def run(wrap: Any) -> Any:
        layer, model = lm.LazyLinear(3, rngs=nnx.Rngs(0)), Table()
        optimizer = lm.LazyOptimizer(layer, optax.sgd(0.1), wrt=nnx.Param)
        return wrap(step)(jnp.zeros(2), model, layer, optimizer).tolist(), model.table

    assert run(lm.jit) == run(lambda step: step) == ([2.0, 2.0], {"a": 1, "b": 1})
