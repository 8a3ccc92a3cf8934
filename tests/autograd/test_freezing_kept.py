"""The flag of frozen parameters: what keeps it, what it saves, and how it is shown."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import lazymods as lm

X = jax.random.normal(jax.random.key(0), (6, 4))


class Net(nnx.Module):
    """Two linear layers, one of them in a list, and a batch norm."""

    def __init__(self, lazy: bool = False) -> None:
        rngs = nnx.Rngs(0)
        self.first = lm.LazyLinear(5, rngs=rngs) if lazy else nnx.Linear(4, 5, rngs=rngs)
        self.norm = lm.LazyBatchNorm(rngs=rngs) if lazy else nnx.BatchNorm(5, rngs=rngs)
        self.rest = nnx.List([lm.LazyLinear(2, rngs=rngs) if lazy else nnx.Linear(5, 2, rngs=rngs)])

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.rest[0](jnp.tanh(self.norm(self.first(x))))


def loss(model: Net, x: jax.Array = X) -> jax.Array:
    return ((model(x) - 1) ** 2).mean()


def freeze(model: Net) -> None:
    lm.autograd.requires_grad_(model.rest, False)  # a part that is no layer
    scale: Any = model.norm.scale
    lm.autograd.requires_grad_(scale, False)


def frozen(lazy: bool) -> Net:
    model = Net(lazy)
    freeze(model)
    return model


def names(model: Any) -> set[str]:
    return {".".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(model, lm.trainable))}


TRAINED = {"first.kernel", "first.bias", "norm.bias"}


# ---------------------------------------------------------------- what keeps the flag


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("suffix", ["", ".safetensors", ".npz"])
def test_a_load_keeps_the_flag_of_the_model_that_it_fills(tmp_path: Path, suffix: str, lazy: bool) -> None:
    lm.save(Net(), tmp_path / f"net{suffix}")
    model = frozen(lazy)
    lm.load(model, tmp_path / f"net{suffix}")
    assert names(model) == TRAINED
    np.testing.assert_array_equal(model.rest[0].kernel[...], Net().rest[0].kernel[...])


FIRST_CALLS: dict[str, Callable[[Any], Any]] = {
    "nnx.jit": nnx.jit,
    "nnx.remat": nnx.remat,
    "lm.jit": lm.jit,
    "lm.jit, checked": lambda f: lm.jit(f, check=True),
    "lazy tensors": lambda f: lm.lazytensor.lazy()(f),
}


@pytest.mark.parametrize("way", FIRST_CALLS)
def test_a_first_call_under_a_transform_keeps_the_flag(way: str) -> None:
    model = frozen(lazy=True)
    FIRST_CALLS[way](lambda model, x: model(x))(model, X)
    assert type(model.rest[0]) is nnx.Linear
    assert names(model) == TRAINED


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("first", [False, True], ids=["after the call", "before the call"])
@pytest.mark.parametrize("decides", [False, True])
def test_lm_jit_carries_out_a_flag_that_is_set_inside(lazy: bool, first: bool, decides: bool) -> None:
    @lm.jit
    def f(model: Net, x: jax.Array) -> jax.Array:
        if first:
            freeze(model)
        y = model(x)
        if not first:
            freeze(model)
        return y * 2 if decides and x.sum() > 0 else y

    model, other = Net(lazy), Net()
    for _ in range(2):
        f(model, X)
        assert names(model) == TRAINED
        other(X)
    for got, want in zip(jax.tree.leaves(nnx.state(model)), jax.tree.leaves(nnx.state(other)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-8)


def test_lm_jit_carries_out_all_metadata_that_a_lazy_layer_is_told() -> None:
    layer = lm.LazyLinear(3, rngs=nnx.Rngs(0))
    kernel: Any = layer.kernel
    kernel.set_metadata("old", 1)
    lm.autograd.requires_grad_(layer, False)

    @lm.jit
    def f(layer: Any, x: jax.Array) -> jax.Array:
        layer.kernel.set_metadata("new", 2)
        layer.kernel.del_metadata("old")
        lm.autograd.requires_grad_(layer)
        return layer(x)

    f(layer, X)
    metadata = layer.kernel.get_metadata()
    assert metadata["new"] == 2
    assert "old" not in metadata and "requires_grad" not in metadata


# ---------------------------------------------------------------- what it saves


TRAINERS: dict[str, Callable[[Any], Any]] = {
    "plain": lambda f: f,
    "nnx.jit": nnx.jit,
    "lm.jit": lm.jit,
}


@pytest.mark.parametrize("how", TRAINERS)
def test_a_lazy_optimizer_has_no_state_for_what_is_frozen_and_leaves_it_alone(how: str) -> None:
    def step(model: Net, optimizer: Any) -> jax.Array:
        value, grads = lm.autograd.value_and_grad(loss)(model)
        with jax.numpy_dtype_promotion("standard"):  # adam's
            optimizer.update(model, grads)
        return value

    tx = optax.adamw(0.1, weight_decay=0.1)
    model, other = frozen(lazy=True), frozen(lazy=False)
    optimizer = lm.LazyOptimizer(model, tx, wrt=lm.trainable)
    explicit = nnx.Optimizer(other, tx, wrt=lm.trainable)
    if how != "lm.jit":
        lm.materialize(model, X)
    jit = TRAINERS[how]
    for _ in range(3):
        np.testing.assert_allclose(jit(step)(model, optimizer), jit(step)(other, explicit), rtol=1e-6)
    new = Net()
    for name in ("kernel", "bias"):
        np.testing.assert_array_equal(getattr(model.rest[0], name)[...], getattr(new.rest[0], name)[...])
    scale: Any = model.norm.scale
    np.testing.assert_array_equal(scale[...], jnp.ones(5))
    assert not np.array_equal(model.first.kernel[...], new.first.kernel[...])
    held = sorted(x.shape for x in jax.tree.leaves(nnx.state(optimizer, nnx.OptState)) if x.shape)
    assert held == sorted(2 * [(4, 5), (5,), (5,)])  # two moments of what is trained
    assert names(model) == TRAINED


@pytest.mark.slow
def test_a_frozen_parameter_has_no_gradient_in_the_program() -> None:
    model = frozen(lazy=False)
    grads: Any = lm.autograd.grad(loss)(model)
    assert {".".join(map(str, path)) for path, _ in nnx.to_flat_state(grads)} == TRAINED
    want: Any = nnx.grad(loss)(Net())
    np.testing.assert_array_equal(grads["first"]["kernel"][...], want["first"]["kernel"][...])
    layers = nnx.List([nnx.Linear(4, 4, rngs=nnx.Rngs(i)) for i in range(2)])

    def products() -> int:
        graphdef, state = nnx.split(layers)
        gradient = lm.autograd.grad(lambda layers: layers[1](layers[0](X)).sum())
        program = jax.make_jaxpr(lambda state: jax.tree.leaves(gradient(nnx.merge(graphdef, state))))(state)
        return str(program).count("dot_general")

    before = products()
    lm.autograd.requires_grad_(layers[0], False)
    assert products() == before - 2  # neither of the first kernel, nor of its output


# ---------------------------------------------------------------- how it is shown


@pytest.mark.parametrize("lazy", [False, True])
def test_the_summary_counts_what_is_trained_and_what_is_frozen(lazy: bool) -> None:
    model = Net(lazy)
    before = lm.summary(model, X)
    assert "frozen" not in str(before)
    assert (before.trained_parameters, before.frozen_parameters) == (47, 0)
    freeze(model)
    report = lm.summary(model, X)
    assert (report.trained_parameters, report.frozen_parameters) == (30, 17)
    assert report.total_parameters == 57  # with the statistics
    was, now = (" ".join(str(shown).split()) for shown in (before, report))  # the last line may be folded
    assert now == was.replace("57 parameters, 228 B;", "57 parameters, 228 B; 30 trained, 17 frozen;")
    assert "30 trained, 17 frozen" in report._repr_html_()
    told = {f"{row.path}.{p.name}": p.trained for row in report.rows for p in row.parameters}
    assert {name for name, trained in told.items() if trained} == TRAINED
    assert told["norm.mean"] is None and told["norm.scale"] is False


def test_what_is_shared_is_counted_once() -> None:
    layer = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    lm.autograd.requires_grad_(layer, False)
    report = lm.summary(nnx.List([layer, layer]))
    assert (report.trained_parameters, report.frozen_parameters) == (0, 8)
