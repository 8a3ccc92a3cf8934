"""A small model, its training by Flax on one device, and its pieces on a mesh."""

import functools

import jax
import numpy as np
import optax
from flax import nnx
from helpers import raw
from jax.sharding import NamedSharding
from on_mesh import P, arrays, by_pairs

RULES = [("fc1.kernel", P(None, "model")), ("fc2.kernel", P("model"))]  # XLA would split fc1.bias as well
STEPS = 3


class MLP(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.fc1, self.fc2 = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x):
        return self.fc2(jax.nn.relu(self.fc1(x)))


def batch(number):
    rng = np.random.default_rng(number)
    return rng.standard_normal((8, 8)).astype(np.float32), rng.standard_normal((8, 4)).astype(np.float32)


def train(model, optimizer, x, y):
    loss, grads = nnx.value_and_grad(lambda m: ((m(x) - y) ** 2).mean())(model)
    optimizer.update(model, grads)
    return loss


def deciding(model, optimizer, x, y):
    loss = train(model, optimizer, x, y)
    return loss if loss > 1e6 else loss * 1


def deciding_first(model, optimizer, x, y):
    return train(model, optimizer, x, y) if x.sum() > 0 else train(model, optimizer, x, y) * 1


def put(mesh, spec, array):
    return jax.device_put(array, NamedSharding(mesh, spec))


def spread(thing, mesh, rules):
    """Move an object's arrays, random state too, to where the first rule says whose expression is in the name."""
    spec_of = by_pairs(rules)
    moved = [(path, spec_of(".".join(map(str, path))), v) for path, v in nnx.to_flat_state(nnx.state(thing))]
    nnx.update(thing, nnx.from_flat_state([(p, v.replace(put(mesh, spec, v.get_value()))) for p, spec, v in moved]))
    return thing


def optimizer_of(model, tx=None):
    return nnx.Optimizer(model, tx or optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)


def trainer(mesh, rules=RULES, tx=None):
    model = spread(MLP(), mesh, rules)
    return model, optimizer_of(model, tx)


def on(mesh, number, axis="data"):
    return [put(mesh, P(axis), array) for array in batch(number)]


def places(*things):
    return {f"{n}.{k}": (a.sharding, a.committed) for n, t in enumerate(things) for k, a in arrays(t).items()}


def assert_all_close(got, want, tol=1e-5):
    found, expected = arrays(got), arrays(want)
    assert list(found) == list(expected)
    for name, array in found.items():
        np.testing.assert_allclose(raw(array), raw(expected[name]), rtol=tol, atol=tol, err_msg=name)


@functools.cache
def one_device(steps, make=None):
    """The same training by Flax on one device: losses, model, optimizer."""
    model = MLP()
    optimizer = optimizer_of(model, make and make())
    step = nnx.jit(train)
    return [float(step(model, optimizer, *batch(n))) for n in range(steps)], model, optimizer
