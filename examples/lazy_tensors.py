"""Eager code, recorded and compiled: a branch on a value, then a convolutional net trained on real digits."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

import lazymods as lm
from lazymods import lazytensor as lt


def add_two_maybe(t, maybe):
    return t + 2 if maybe else t


class Net(nnx.Module):
    def __init__(self, *, rngs):
        self.conv1 = lm.LazyConv(16, (3, 3), rngs=rngs)
        self.conv2 = lm.LazyConv(32, (3, 3), rngs=rngs)
        self.fc1 = lm.LazyLinear(64, rngs=rngs)
        self.fc2 = lm.LazyLinear(10, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.conv2(nnx.relu(self.conv1(x))))
        x = nnx.max_pool(x, (2, 2), strides=(2, 2)).reshape(x.shape[0], -1)
        return self.fc2(nnx.relu(self.fc1(x)))


def main(steps=120):
    with lt.lazy():
        branches = [add_two_maybe(jnp.ones(1), jnp.array([flag])).item() for flag in (False, True)]
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))
    x, y = (x / 16).astype(np.float32).reshape(-1, 8, 8, 1)[order], y.astype(np.int32)[order]
    model = Net(rngs=nnx.Rngs(0))
    lm.materialize(model, jax.ShapeDtypeStruct((64, 8, 8, 1), jnp.float32))
    schedule = optax.piecewise_constant_schedule(5e-3, {80: 0.3})
    optimizer = nnx.Optimizer(model, optax.adam(schedule), wrt=nnx.Param)
    for step in range(steps):
        start = step % 22 * 64
        images, labels = x[start : start + 64], y[start : start + 64]
        with lt.lazy():
            loss, grads = nnx.value_and_grad(
                lambda m: optax.softmax_cross_entropy_with_integer_labels(m(images), labels).mean()  # noqa: B023
            )(model)
            optimizer.update(model, grads)
            lt.mark_step()
        if step % 10 == 0:
            print(f"step {step:3d}  loss {loss:.3f}")
    accuracy = (model(x[1408:]).argmax(-1) == y[1408:]).mean()
    print(f"accuracy {accuracy:.3f}\n{lt.metrics.summary()}")
    return branches, float(accuracy)


if __name__ == "__main__":
    main()
