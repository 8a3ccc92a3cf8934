"""What a PyTorch user types (in the comments) and what to type here: a small convolutional net on digits."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from sklearn.datasets import load_digits

import lazymods as lm


def make_model(seed: int) -> nnx.Sequential:
    rngs = nnx.Rngs(seed)  # torch.manual_seed(seed)
    return nnx.Sequential(  # nn.Sequential(
        lm.LazyConv2d(16, 3, padding="VALID", rngs=rngs),  # nn.LazyConv2d(16, 3),
        lm.LazyBatchNorm2d(momentum=0.9, rngs=rngs),  # nn.LazyBatchNorm2d(momentum=0.1),
        jax.nn.relu,  # nn.ReLU(),
        lambda x: x.reshape(len(x), -1),  # nn.Flatten(),
        lm.LazyLinear(10, rngs=rngs),  # nn.LazyLinear(10))
    )


@nnx.jit
def train_step(model: nnx.Sequential, optimizer: nnx.Optimizer, x: jax.Array, y: jax.Array) -> jax.Array:
    def loss_fn(model: nnx.Sequential) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()  # F.cross_entropy(model(x), y)

    loss, grads = nnx.value_and_grad(loss_fn)(model)  # optimizer.zero_grad(); loss.backward()
    optimizer.update(model, grads)  # optimizer.step()
    return loss


def main() -> dict[str, object]:
    """Return what was seen on the way, by name."""
    images, labels = load_digits(return_X_y=True)
    x = jnp.asarray(images.reshape(-1, 8, 8, 1) / 16, "float32")  # images.reshape(-1, 1, 8, 8) / 16
    y, seen = jnp.asarray(labels, "int32"), {}
    model = make_model(0)
    seen["lazy"] = lm.has_uninitialized_params(model)  # any(is_lazy(p) for p in model.parameters())
    optimizer = lm.LazyOptimizer(model, optax.adam(3e-3), wrt=nnx.Param)  # after the dry run: Adam(model.parameters())
    lm.materialize(model, x[:1])  # model(x[:1]), the dry run, which there moves the batch statistics as well
    seen["flat"] = lm.state_dict(model)["layers.4.kernel"].shape[0]  # model.state_dict()["4.weight"].shape[1]
    seen["parameters"] = sum(p.size for p in jax.tree.leaves(nnx.state(model, nnx.Param)))  # p.numel()
    model.train()  # model.train()
    for i in [*range(0, 1440, 32)] * 4:  # for x, y in loader:
        train_step(model, optimizer, x[i : i + 32], y[i : i + 32])
    model.eval()  # model.eval()
    handle = lm.register_forward_hook(model, lambda module, args, output: seen.update(hooked=output.shape))
    predicted = model(x[1440:]).argmax(-1)  # with torch.no_grad(): model(x).argmax(1)
    handle.remove()  # handle.remove()
    seen["accuracy"] = float((predicted == y[1440:]).mean())
    fresh = make_model(1)
    seen["loaded"] = repr(lm.load_state_dict(fresh, lm.state_dict(model)))  # fresh.load_state_dict(model.state_dict())
    fresh.eval()
    seen["same"] = bool((fresh(x[1440:]).argmax(-1) == predicted).all())
    return seen


if __name__ == "__main__":
    print(main())
