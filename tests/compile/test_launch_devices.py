"""Calls whose arrays are known, on several devices and in other layouts: jax.jit moves what is not in its place."""

import os
import subprocess
import sys

import pytest

DEVICES = """
import jax, jax.numpy as jnp, numpy as np, optax, lazymods as lm
from flax import nnx
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
devices = jax.devices()
x = jnp.arange(16.0).reshape(4, 4)

def linear():
    return nnx.Linear(4, 4, rngs=nnx.Rngs(0))

def ready(model, x):
    call = lm.jit(model)
    for _ in range(4):
        call(x)
    assert call._fast.plan._launch._ready is not None
    return call

model = linear()
want = np.asarray(model(x))
turned = jax.device_put(x, Format(Layout((1, 0)), SingleDeviceSharding(devices[0])))
assert turned.format.layout != x.format.layout
call = ready(model, x)
for value in (turned, x, x, turned, turned, turned, x):
    np.testing.assert_allclose(call(value), want, rtol=1e-6)

call = lm.jit(model)
for _ in range(5):
    np.testing.assert_allclose(call(turned), want, rtol=1e-6)

call = ready(model, x)
with jax.default_device(devices[2]):
    assert call(x).devices() == {devices[2]}
assert call(x).devices() == {devices[0]}
call = ready(model, np.asarray(x))
with jax.default_device(devices[2]):
    assert call(np.asarray(x)).devices() == {devices[2]}
for sharding in (devices[1], NamedSharding(Mesh(np.array(devices), ("a",)), PartitionSpec("a"))):
    moved = linear()
    nnx.update(moved, jax.device_put(nnx.state(moved), sharding))
    call = lm.jit(moved)
    for _ in range(6):
        np.testing.assert_allclose(call(np.asarray(x)), want, rtol=1e-6)

call = ready(model, x)
there = jax.device_put(x, devices[3])
for value, device, committed in [(there, 3, True)] * 4 + [(x, 0, False)] * 2:
    out = call(value)
    assert (out.devices(), out.committed) == ({devices[device]}, committed)
    np.testing.assert_allclose(out, want, rtol=1e-6)

rows = NamedSharding(Mesh(np.array(devices), ("a",)), PartitionSpec("a"))
spread = linear()
nnx.update(spread, jax.tree.map(lambda v: jax.device_put(v, rows), nnx.state(spread)))
call = ready(spread, jax.device_put(x, rows))
out = call(jax.device_put(x, rows))
assert out.sharding.is_equivalent_to(rows, 2)
np.testing.assert_allclose(out, want, rtol=1e-6)
for _ in range(3):
    np.testing.assert_allclose(call(x), want, rtol=1e-6)

class Total(nnx.Module):
    def __init__(self):
        everywhere = NamedSharding(rows.mesh, PartitionSpec())
        self.weights = nnx.List([nnx.Param(jax.device_put(x + n, everywhere)) for n in range(16)])
        self.total = nnx.Variable(self.weights[0].get_value())
    def __call__(self, x):
        before = self.total[...] * 1
        self.total.set_value(sum(w[...] for w in self.weights))
        return before

model, twin = Total(), Total()
call = lm.jit(model)
for turn in range(8):
    np.testing.assert_allclose(call(model.weights[1].get_value()), twin(x))
    if turn in (1, 2, 5):  # an output is of another kind than what was there before
        for one in (model, twin):
            one.total.set_value(jax.device_put(x, rows))

def step(model, optimizer, x):
    loss, grads = nnx.value_and_grad(lambda m: (m(x) ** 2).mean())(model)
    optimizer.update(model, grads)
    return loss

def objects(sharding):
    model = linear()
    nnx.update(model, jax.tree.map(lambda v: jax.device_put(v, sharding), nnx.state(model)))
    return model, nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)

for sharding in (rows, devices[1]):
    mine, other = objects(sharding), objects(sharding)
    run, eager = lm.jit(step), nnx.jit(step)
    for value in [jax.device_put(x, sharding)] * 6:
        np.testing.assert_allclose(run(*mine, value), eager(*other, value), rtol=1e-5)
    assert run._fast.plan._launch._ready is not None
    if sharding is not rows:  # jax.jit moves what is not committed
        np.testing.assert_allclose(run(*mine, x), eager(*other, x), rtol=1e-5)
print("done")
"""


@pytest.mark.slow
def test_several_devices_and_layouts() -> None:
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    ran = subprocess.run([sys.executable, "-c", DEVICES], capture_output=True, text=True, env=env, check=False)
    assert ran.stdout == "done\n", ran.stderr
