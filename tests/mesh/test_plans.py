"""Plans: what a device holds of parameters, gradients and an optimizer's state, counted from shapes by hand."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import lazy_mlp, spec
from jax.sharding import AbstractMesh, NamedSharding
from on_mesh import P, arrays, assert_placed, mesh_of

import lazymods as lm

POD = AbstractMesh((4, 2), ("data", "model"))
RULES = [("fc1.kernel", P("data", "model")), ("fc2.kernel", P("model")), ("fc1.bias", P("data"))]
X = spec(2, 64)
# bytes on a device of lazy_mlp(hidden=128, out=32) on S(2, 64), float32
KERNEL1, BIAS1, KERNEL2, BIAS2 = 64 * 128 * 4 // 8, 128 * 4 // 4, 128 * 32 * 4 // 2, 32 * 4
ALL = KERNEL1 + BIAS1 + KERNEL2 + BIAS2
STEPS = 4  # the counter of nnx.Optimizer
TRANSFORMS = {
    "sgd": (optax.sgd(0.1), 0, STEPS),
    "momentum": (optax.sgd(0.1, momentum=0.9), ALL, STEPS),
    "adam": (optax.adam(1e-3), 2 * ALL, STEPS + 4),
    "adam in bfloat16": (optax.adam(1e-3, mu_dtype=jnp.bfloat16), ALL + ALL // 2, STEPS + 4),
    "chain": (optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)), 2 * ALL, STEPS + 4),
    "several steps": (optax.MultiSteps(optax.adam(1e-3), 2), 3 * ALL, STEPS + 4 + 8),  # two counters of its own
    "masked": (
        optax.masked(optax.adam(1e-3), lambda p: jax.tree.map(lambda x: x.ndim > 1, p)),
        2 * (KERNEL1 + KERNEL2),
        STEPS + 4,
    ),
    "two": (
        optax.multi_transform(
            {"adam": optax.adam(1e-3), "sgd": optax.sgd(0.1, momentum=0.9)},
            lambda p: jax.tree.map(lambda x: "adam" if x.ndim > 1 else "sgd", p),
        ),
        2 * (KERNEL1 + KERNEL2) + BIAS1 + BIAS2,
        STEPS + 4,
    ),
}


def model():
    return lazy_mlp(hidden=128, out=32)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_bytes_of_an_optimizer(name):
    tx, kept, apart = TRANSFORMS[name]
    report = lm.infer_shapes(model(), X, mesh=POD, rules=RULES, optimizer=tx)
    assert report.total_bytes_per_device == report.total_gradient_bytes_per_device == ALL
    assert report.total_optimizer_bytes_per_device == kept + apart
    assert report.optimizer_bytes_apart == apart
    rows = {row.path: row for row in report.rows if row.parameters}
    assert [rows[n].gradient_bytes_per_device for n in ("fc1", "fc2")] == [KERNEL1 + BIAS1, KERNEL2 + BIAS2]
    if name == "adam":
        assert rows["fc2"].optimizer_bytes_per_device == 2 * (KERNEL2 + BIAS2)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_the_plan_is_what_the_optimizer_holds(name):
    tx, mesh, made = TRANSFORMS[name][0], mesh_of(data=4, model=2), model()
    plan = lm.infer_shapes(made, X, mesh=mesh, rules=RULES, optimizer=tx)
    lm.materialize(made, X, mesh=mesh, rules=RULES)
    optimizer = lm.LazyOptimizer(made, tx, wrt=nnx.Param)
    held = sum(a.addressable_shards[0].data.nbytes for a in arrays(optimizer).values() if isinstance(a, jax.Array))
    assert held == plan.total_optimizer_bytes_per_device


def test_without_a_mesh_all_is_on_one_device():
    report = lm.infer_shapes(model(), X, optimizer=optax.adam(1e-3))
    whole = 4 * (64 * 128 + 128 + 128 * 32 + 32)
    assert report.total_bytes_per_device == report.total_bytes == whole
    assert report.total_optimizer_bytes_per_device == 2 * whole + STEPS + 4
    assert "sharding" not in str(report).splitlines()[0]
    assert report.footer().count("on the device (parameters 48.6 KiB, gradients 48.6 KiB, optimizer 97.3 KiB)") == 1


def test_a_report_without_an_optimizer_has_none():
    report = lm.infer_shapes(model(), X, mesh=POD)
    assert report.total_gradient_bytes_per_device is report.total_optimizer_bytes_per_device is None
    assert report.rows[0].gradient_bytes_per_device is report.rows[0].optimizer_bytes_per_device is None


def test_frozen_parameters_have_no_gradients():
    net = model()
    lm.autograd.requires_grad_(net.fc1, False)
    for optimizer in (optax.adam(1e-3), lm.LazyOptimizer(net, optax.adam(1e-3), wrt=lm.trainable)):
        report = lm.infer_shapes(net, X, mesh=POD, rules=RULES, optimizer=optimizer)
        assert report.total_gradient_bytes_per_device == KERNEL2 + BIAS2
        assert report.total_optimizer_bytes_per_device == 2 * (KERNEL2 + BIAS2) + STEPS + 4
    everything = lm.LazyOptimizer(net, optax.adam(1e-3), wrt=nnx.Param)
    report = lm.infer_shapes(net, X, mesh=POD, rules=RULES, optimizer=everything)
    assert report.total_gradient_bytes_per_device == ALL


def test_tied_parameters_count_once():
    class Tied(nnx.Module):
        def __init__(self):
            self.a, self.b = (lm.LazyLinear(64, use_bias=False, rngs=nnx.Rngs(0)) for _ in range(2))
            self.b.kernel = self.a.kernel

        def __call__(self, x):
            return self.b(self.a(x))

    report = lm.infer_shapes(Tied(), X, mesh=POD, rules=[("b.kernel", P("model")), ("a.kernel", P("data"))],
                             optimizer=optax.adam(1e-3))  # fmt: skip
    one = 64 * 64 * 4 // 4
    assert report.total_bytes_per_device == report.total_gradient_bytes_per_device == one
    assert report.total_optimizer_bytes_per_device == 2 * one + STEPS + 4


def test_a_shared_layer_counts_once_whatever_its_names():
    class Shared(nnx.Module):
        def __init__(self):
            self.z = lm.LazyLinear(64, use_bias=False, rngs=nnx.Rngs(0))
            self.a = self.z  # the first name to nnx.state, which sorts them

        def __call__(self, x):
            return self.z(self.a(x))

    plan = lm.infer_shapes(Shared(), X, mesh=POD, rules=[("^z", P("data"))], optimizer=optax.adam(1e-3))
    one = 64 * 64 * 4 // 4
    assert plan.total_bytes_per_device == plan.total_gradient_bytes_per_device == one
    assert plan.total_optimizer_bytes_per_device == 2 * one + STEPS + 4


def test_layers_that_are_not_reached_are_unknown():
    class Half(nnx.Module):
        def __init__(self):
            self.a, self.b = lm.LazyLinear(64, rngs=nnx.Rngs(0)), lm.LazyLinear(64, rngs=nnx.Rngs(1))

        def __call__(self, x):
            return self.a(x)

    report = lm.infer_shapes(Half(), X, mesh=POD, rules=[("kernel", P("data"))], optimizer=optax.adam(1e-3))
    known = 64 * 64 * 4 // 4 + 64 * 4 + 64 * 4  # the bias of the other one is known as well
    assert report.total_bytes_per_device == report.total_gradient_bytes_per_device == known
    rows = {row.path: row for row in report.rows}
    assert rows["b"].bytes_per_device is None
    assert rows["b"].parameters[0].sharding is None
    assert lm.summary(Half(), mesh=POD, rules=[("kernel", P("data"))]).rows[0].parameters[0].sharding is None


def test_the_table():
    report = lm.infer_shapes(model(), X, mesh=POD, rules=RULES, optimizer=optax.adam(1e-3))
    heads, rows = report.cells()
    assert heads[-4:] == ["sharding", "on a device", "gradients", "optimizer"]
    assert rows[0][-4:] == ["P('data', 'model')\nP('data')", "4.1 KiB", "4.1 KiB", "8.2 KiB"]
    assert "49.0 KiB on each of 8 devices (parameters 12.2 KiB, gradients 12.2 KiB, optimizer 24.5 KiB)" in str(report)
    assert all(f">{head}</th>" in report._repr_html_() for head in heads[-4:])
    assert "optimizer" not in str(lm.infer_shapes(model(), X, mesh=POD))


@pytest.mark.parametrize("optimizer", ["adam", optax.adam, nnx.Param])
def test_what_is_no_optimizer(optimizer):
    with pytest.raises(lm.ArgumentError, match="optimizer="):
        lm.infer_shapes(model(), X, optimizer=optimizer)


def test_rules_without_a_mesh():
    for function in (lm.infer_shapes, lm.summary):
        with pytest.raises(lm.ArgumentError, match="rules without a mesh"):
            function(model(), X, rules=RULES)


# ---------------------------------------------------------------- the state of an optimizer that is there


@pytest.mark.parametrize("made", ["before", "after"])
def test_state_is_where_its_parameter_is(made):
    mesh, net = mesh_of(data=4, model=2), model()
    tx = optax.adam(1e-2)
    early = lm.LazyOptimizer(net, tx, wrt=nnx.Param) if made == "before" else None
    lm.materialize(net, X, mesh=mesh, rules=RULES)
    optimizer = early or lm.LazyOptimizer(net, tx, wrt=nnx.Param)
    if early is not None:
        early.make_state(net)
    places: dict[str, Any] = {name: array.sharding for name, array in arrays(net).items()}
    assert type(optimizer) is nnx.Optimizer
    for name, array in arrays(optimizer).items():
        own = next((s.spec for parameter, s in places.items() if name.endswith(parameter)), P())
        assert_placed(array, mesh, own, name)
        np.testing.assert_array_equal(array, np.zeros(array.shape, array.dtype))


def test_what_adafactor_keeps_in_other_shapes_is_on_each_device():
    mesh, net, tx = mesh_of(data=4, model=2), model(), optax.adafactor(1e-2, min_dim_size_to_factor=8)
    plan = lm.infer_shapes(net, X, mesh=mesh, rules=RULES, optimizer=tx)
    lm.materialize(net, X, mesh=mesh, rules=RULES)
    optimizer = lm.LazyOptimizer(net, tx, wrt=nnx.Param)
    found = arrays(optimizer)
    assert all(isinstance(a.sharding, NamedSharding) and a.sharding.mesh == mesh for a in found.values())
    assert plan.total_optimizer_bytes_per_device == sum(a.addressable_shards[0].data.nbytes for a in found.values())


def test_what_sm3_keeps_for_each_axis_is_on_each_device():
    mesh, net, tx = mesh_of(data=4, model=2), model(), optax.sm3(1e-2)
    plan = lm.infer_shapes(net, X, mesh=mesh, rules=RULES, optimizer=tx)
    lm.materialize(net, X, mesh=mesh, rules=RULES)
    optimizer = lm.LazyOptimizer(net, tx, wrt=nnx.Param)
    found = jax.tree.leaves(nnx.state(optimizer))
    assert all(isinstance(a.sharding, NamedSharding) and a.sharding.mesh == mesh for a in found)
    axes = 4 * (64 + 128 + 128 + 32)  # an accumulator for each axis of a kernel; that of a bias is as large as it
    assert plan.total_optimizer_bytes_per_device == ALL + axes + BIAS1 + BIAS2 + STEPS
    assert plan.total_optimizer_bytes_per_device == sum(a.addressable_shards[0].data.nbytes for a in found)


def test_an_optimizer_of_a_model_on_one_device_stays_there():
    net = model()
    lm.materialize(net, X)
    optimizer = lm.LazyOptimizer(net, optax.adam(1e-2), wrt=nnx.Param)
    assert {len(a.devices()) for a in arrays(optimizer).values()} == {1}
