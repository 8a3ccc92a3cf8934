"""Hogwild: threads train one network on handwritten digits without locks, as well as one thread does alone."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

import lazymods as lm

RATE, BATCH, TRAINED = 0.1, 32, 1408


def loss(model: nnx.Module, x: jax.Array, y: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()


gradient = lm.jit(lm.autograd.grad(loss))  # one program for all threads; it changes nothing


def train(model: nnx.Module, batches: list[np.ndarray], x: jax.Array, y: jax.Array) -> None:
    parameters = nnx.to_flat_state(nnx.state(model, nnx.Param))  # the Variables themselves
    for batch in batches:
        found = dict(nnx.to_flat_state(gradient(model, x[batch], y[batch])))
        for path, parameter in parameters:
            parameter[...] -= RATE * found[path][...]  # with what others have written in the meantime


def main(workers: int = 4, epochs: int = 14) -> tuple[float, float]:
    x, y = load_digits(return_X_y=True)
    x, y = jnp.asarray(x / 16, jnp.float32), jnp.asarray(y, jnp.int32)
    orders = [np.random.default_rng(epoch).permutation(TRAINED) for epoch in range(epochs)]
    batches = list(np.concatenate(orders).reshape(-1, BATCH))
    accuracy = []
    for threads in (1, workers):
        rngs = nnx.Rngs(0)
        model = nnx.Sequential(lm.LazyLinear(64, rngs=rngs), nnx.relu, lm.LazyLinear(10, rngs=rngs))
        lm.materialize(model, x[:BATCH])
        running = [
            threading.Thread(target=train, args=(model, batches[i::threads], x, y)) for i in range(threads)
        ]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
        accuracy.append(float(jnp.mean(model(x[TRAINED:]).argmax(-1) == y[TRAINED:])))
        print(f"{threads} threads: accuracy {accuracy[-1]:.3f}")
    return accuracy[0], accuracy[1]


if __name__ == "__main__":
    main()
