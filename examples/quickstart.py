"""An MLP without input sizes: trained on handwritten digits, saved to [FILE.safetensors], and read back."""

import sys
import tempfile

import jax
import numpy as np
import optax
from flax import nnx
from rich.progress import track
from sklearn.datasets import load_digits

import lazymods as lm


class MLP(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.fc1 = lm.LazyLinear(128, rngs=rngs)
        self.fc2 = lm.LazyLinear(10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.fc2(jax.nn.relu(self.fc1(x)))


@nnx.jit
def train_step(model: MLP, optimizer: nnx.Optimizer, x: jax.Array, y: jax.Array) -> None:
    def loss(model: MLP) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()

    optimizer.update(model, nnx.grad(loss)(model))


def main(path: str | None = None) -> tuple[float, float]:
    """Return the accuracy on held-out digits of the trained model, and of the one read back."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    x, y = jax.numpy.array(images[order] / 16, "float32"), jax.numpy.array(labels[order], "int32")
    x, x_test, y, y_test = x[:1440], x[1440:], y[:1440], y[1440:]

    model = MLP(rngs=nnx.Rngs(0))
    print(lm.summary(model, x[:32]))  # what would become of it; the model stays lazy
    model(x[:32])  # the first batch settles every size
    optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)
    for _ in track(range(10), "training"):
        for i in range(0, len(x), 32):
            train_step(model, optimizer, x[i : i + 32], y[i : i + 32])

    fresh = MLP(rngs=nnx.Rngs(1))
    with tempfile.TemporaryDirectory() as folder:
        file = path or f"{folder}/mlp.safetensors"
        lm.save(model, file)
        lm.load(fresh, file)  # here the file settles every size
    accuracy, again = (float((m(x_test).argmax(-1) == y_test).mean()) for m in (model, fresh))
    print(f"accuracy on {len(x_test)} held-out digits: {accuracy:.4f}; read back: {again:.4f}")
    return accuracy, again


if __name__ == "__main__":
    main(*sys.argv[1:2])
