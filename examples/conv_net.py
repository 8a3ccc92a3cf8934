"""Convolutions, batch norms, flatten, linear: no input width is written, nor worked out by hand."""

import jax
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

import lazymods as lm


class ConvNet(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.conv1 = lm.LazyConv2d(16, (3, 3), rngs=rngs)
        self.norm1 = lm.LazyBatchNorm2d(rngs=rngs)
        self.conv2 = lm.LazyConv2d(32, (3, 3), padding="VALID", rngs=rngs)
        self.norm2 = lm.LazyBatchNorm2d(rngs=rngs)
        self.out = lm.LazyLinear(10, rngs=rngs)

    def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
        x = jax.nn.relu(self.norm1(self.conv1(x), use_running_average=not train))
        x = nnx.max_pool(x, (2, 2), strides=(2, 2))
        x = jax.nn.relu(self.norm2(self.conv2(x), use_running_average=not train))
        return self.out(x.reshape(len(x), -1))  # height * width * channels: nobody has to know


@nnx.jit
def train_step(model: ConvNet, optimizer: nnx.Optimizer, x: jax.Array, y: jax.Array) -> None:
    def loss(model: ConvNet) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(model(x, train=True), y).mean()

    optimizer.update(model, nnx.grad(loss)(model))


def main() -> tuple[float, int]:
    """Return the accuracy on held-out digits, and the width of the last layer's input."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    x = jax.numpy.array(images[order].reshape(-1, 8, 8, 1) / 16, "float32")
    y = jax.numpy.array(labels[order], "int32")
    x, x_test, y, y_test = x[:1440], x[1440:], y[:1440], y[1440:]

    model = ConvNet(rngs=nnx.Rngs(0))
    spec = jax.ShapeDtypeStruct((32, 8, 8, 1), "float32")
    print(lm.materialize(model, spec, train=True))  # runs no layer: the batch statistics are untouched
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    for _ in range(5):
        for i in range(0, len(x), 32):
            train_step(model, optimizer, x[i : i + 32], y[i : i + 32])

    predicted = model(x_test, train=False).argmax(-1)
    accuracy = float((predicted == y_test).mean())
    print(f"accuracy on {len(x_test)} held-out digits: {accuracy:.4f}")
    return accuracy, model.out.in_features


if __name__ == "__main__":
    main()
