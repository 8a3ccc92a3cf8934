"""A lazy version of a class that is not Flax's: by ``lm.lazy`` in one line, and by hand with the mixin."""

import jax
import optax
from flax import nnx
from sklearn.datasets import load_digits

import lazymods as lm


class Prototypes(nnx.Module):  # stands for a class of someone else's: a score is the distance to a center
    def __init__(self, features: int, classes: int, *, rngs: nnx.Rngs):
        self.features = features
        self.centers = nnx.Param(jax.random.normal(rngs.params(), (classes, features)))

    def __call__(self, x: jax.Array) -> jax.Array:
        return -jax.numpy.square(x[:, None, :] - self.centers[None]).sum(-1)


LazyPrototypes = lm.lazy(Prototypes, infer=lambda config, x: {"features": x.shape[-1]})


class PrototypesByHand(lm.LazyModuleMixin, Prototypes):
    cls_to_become = Prototypes  # None: the class stays
    def __init__(self, *, classes: int, rngs: nnx.Rngs):
        self.centers = lm.UninitializedParameter((classes, None), init=jax.random.normal, key=rngs.params())

    def initialize_parameters(self, x: jax.Array) -> None:  # before the first call; reads shapes and dtypes only
        self.centers.materialize((self.centers.shape[0], x.shape[-1]))
        self.infer_attributes_from_state()

    def infer_attributes_from_state(self) -> None:  # also runs after a load has filled the parameters
        self.features = self.centers.shape[1]


@nnx.jit
def train_step(model: Prototypes, optimizer: nnx.Optimizer, x: jax.Array, y: jax.Array) -> None:
    grads = nnx.grad(lambda m: optax.softmax_cross_entropy_with_integer_labels(m(x), y).mean())(model)
    optimizer.update(model, grads)


def main() -> list[tuple[Prototypes, float]]:
    """Return, for each of the two, the trained model as read back into a lazy one, and its accuracy on other digits."""
    images, labels = load_digits(return_X_y=True)
    x, y = jax.numpy.array(images / 16, "float32"), jax.numpy.array(labels, "int32")
    results = []
    for cls in (LazyPrototypes, PrototypesByHand):
        model, fresh = (cls(classes=10, rngs=nnx.Rngs(seed)) for seed in (0, 1))
        model(x[:1])  # it is Prototypes(64, 10) now, and nothing else
        optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
        for _ in range(100):
            train_step(model, optimizer, x[::2], y[::2])
        lm.load_state_dict(fresh, lm.state_dict(model))  # and so is this one
        results.append((fresh, float((fresh(x[1::2]).argmax(-1) == y[1::2]).mean())))
    return results


if __name__ == "__main__":
    for layer, accuracy in main():
        print(f"{type(layer).__name__}({layer.features}, 10): accuracy on held-out digits {accuracy:.4f}")
