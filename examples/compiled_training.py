"""A lazy network on handwritten digits, compiled by lm.jit: one trace, although the network is lazy."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

import lazymods as lm


class Net(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.hidden = lm.LazyLinear(64, rngs=rngs)
        self.norm = lm.LazyBatchNorm(rngs=rngs)
        self.drop = nnx.Dropout(0.2, rngs=rngs)
        self.out = lm.LazyLinear(10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(self.drop(nnx.relu(self.norm(self.hidden(x)))))


@lm.jit(donate_state=True)
def train_step(model: Net, optimizer: nnx.Optimizer, x: jax.Array, y: jax.Array) -> jax.Array:
    def loss(model: Net) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()

    value, grads = nnx.value_and_grad(loss)(model)
    optimizer.update(model, grads)
    return value


def main(epochs: int = 8) -> tuple[float, dict[str, float]]:
    x, y = load_digits(return_X_y=True)
    x, y = jnp.asarray(x / 16, jnp.float32), jnp.asarray(y, jnp.int32)
    model = Net(rngs=nnx.Rngs(0))
    predict = lm.jit(model)  # the same object: it sees what training does to it
    predict(x[:64])  # sizes the layers
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    before = lm.metrics()
    loss = jnp.inf
    for epoch in range(epochs):
        order = np.random.default_rng(epoch).permutation(1408)
        for batch in order.reshape(-1, 64):
            loss = train_step(model, optimizer, x[batch], y[batch])
        print(f"epoch {epoch}: loss {loss:.3f}")
    model.eval()
    accuracy = float(jnp.mean(predict(x[1408:]).argmax(-1) == y[1408:]))
    after = lm.metrics()
    print(f"accuracy {accuracy:.3f}\n{lm.explain()}")
    return accuracy, {name: after[name] - before[name] for name in ("traces", "cache_hits")}


if __name__ == "__main__":
    main()
