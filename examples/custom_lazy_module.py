"""A lazy version of a class that is not Flax's: by ``lm.lazy`` in one line, and by hand with the mixin."""

import jax
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

import lazymods as lm


class Prototypes(nnx.Module):  # stands for a class from someone else's library: scores by the distance to a center
    def __init__(self, features: int, classes: int, *, rngs: nnx.Rngs):
        self.features = features
        self.centers = nnx.Param(jax.random.normal(rngs.params(), (classes, features)))

    def __call__(self, x: jax.Array) -> jax.Array:
        return -jax.numpy.square(x[:, None, :] - self.centers[None]).mean(-1)


LazyPrototypes = lm.lazy(Prototypes, infer=lambda config, x: {"features": x.shape[-1]})


class PrototypesByHand(lm.LazyModuleMixin, Prototypes):
    cls_to_become = Prototypes

    def __init__(self, *, classes: int, rngs: nnx.Rngs):
        self.centers = lm.UninitializedParameter((classes, None), init=jax.random.normal, key=rngs.params())

    def initialize_parameters(self, x: jax.Array) -> None:  # before the first call; reads shapes and dtypes only
        self.centers.materialize((self.centers.shape[0], x.shape[-1]))
        self.infer_attributes_from_state()

    def infer_attributes_from_state(self) -> None:  # also runs after a load has filled the parameters
        self.features = self.centers.shape[1]


def main() -> dict[str, tuple[Prototypes, float]]:
    """Train a model with each: its last layer, read back into a lazy model, and its accuracy on held-out digits."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    x, y = jax.numpy.array(images[order] / 16, "float32"), jax.numpy.array(labels[order], "int32")
    results = {}
    for cls in (LazyPrototypes, PrototypesByHand):
        model, fresh = (nnx.List([cls(classes=10, rngs=nnx.Rngs(seed))]) for seed in (0, 1))
    return results
