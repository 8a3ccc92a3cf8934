"""lm.autograd: which parameters get a gradient, and by which convention; nnx, jax and closed forms are the oracle."""

import copy
import functools
import pickle
from collections.abc import Callable
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
    """Two linear layers and a batch norm."""

    def __init__(self, lazy: bool = False) -> None:
        rngs = nnx.Rngs(0)
        self.first = lm.LazyLinear(5, rngs=rngs) if lazy else nnx.Linear(4, 5, rngs=rngs)
        self.norm = lm.LazyBatchNorm(rngs=rngs) if lazy else nnx.BatchNorm(5, rngs=rngs)
        self.last = lm.LazyLinear(2, rngs=rngs) if lazy else nnx.Linear(5, 2, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(jnp.tanh(self.norm(self.first(x))))


def loss(model: Net, x: jax.Array = X) -> jax.Array:
    return ((model(x) - 1) ** 2).mean()


def names(model: Any) -> set[str]:
    return {".".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(model, lm.trainable))}


ALL = {"first.kernel", "first.bias", "norm.scale", "norm.bias", "last.kernel", "last.bias"}
LAST = {"last.kernel", "last.bias"}


def assert_same(got: Any, want: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a, b)


# ---------------------------------------------------------------- freezing


def test_parameters_are_trained_until_they_are_frozen_and_again_afterwards() -> None:
    model = Net()
    assert names(model) == ALL
    assert lm.autograd.requires_grad_(model.last, False) is model.last
    assert names(model) == ALL - LAST
    bias: Any = model.first.bias
    lm.autograd.requires_grad_(bias, False)
    assert names(model) == ALL - LAST - {"first.bias"}
    lm.autograd.requires_grad_(model)
    assert names(model) == ALL
    assert nnx.graphdef(model) == nnx.graphdef(Net())  # nothing is left behind


WAYS: dict[str, Callable[[Net], Any]] = {
    "materialize": lambda model: lm.materialize(model, X),
    "call": lambda model: model(X),
    "jit": lambda model: lm.jit(lambda model: model(X))(model),
    "load": lambda model: lm.load_state_dict(model, lm.state_dict(Net())),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_layer_that_was_frozen_while_it_was_lazy_is_frozen_when_it_is_ready(way: str) -> None:
    model = Net(lazy=True)
    lm.autograd.requires_grad_(model.last, False)
    assert names(model) == ALL - LAST
    WAYS[way](model)
    assert not lm.has_uninitialized_params(model)
    assert names(model) == ALL - LAST


COPIES: dict[str, Callable[[Net], Net]] = {
    "clone": nnx.clone,
    "merge": lambda model: nnx.merge(*nnx.split(model)),
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
}


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("way", COPIES)
def test_copies_keep_the_flag(way: str, lazy: bool) -> None:
    model = Net(lazy)
    lm.autograd.requires_grad_(model.last, False)
    assert names(COPIES[way](model)) == ALL - LAST


@pytest.mark.parametrize("jit", [nnx.jit, lm.jit])
def test_a_compiled_function_sees_the_flag_change(jit: Any) -> None:
    model = Net()
    grads = jit(lambda model: nnx.grad(loss, argnums=nnx.DiffState(0, lm.trainable))(model))
    for frozen in ([], ["last"], ["last", "norm"], []):
        lm.autograd.requires_grad_(model)
        for name in frozen:
            lm.autograd.requires_grad_(getattr(model, name), False)
        got = {path[0] for path, _ in nnx.to_flat_state(grads(model))}
        assert got == {"first", "norm", "last"} - set(frozen)


@pytest.mark.slow
def test_an_optimizer_of_what_is_trained_leaves_the_rest() -> None:
    model = Net()
    lm.autograd.requires_grad_(model.last, False)
    optimizer = nnx.Optimizer(model, optax.adamw(0.1, weight_decay=0.1), wrt=lm.trainable)
    before = jax.tree.map(jnp.copy, nnx.state(model, nnx.Param))
    with jax.numpy_dtype_promotion("standard"):  # adam's
        optimizer.update(model, lm.autograd.grad(loss)(model))
    after = nnx.state(model, nnx.Param)
    for (path, old), (_, new) in zip(nnx.to_flat_state(before), nnx.to_flat_state(after), strict=True):
        assert np.array_equal(old[...], new[...]) == (path[0] == "last"), path


def test_other_variables_are_never_trained() -> None:
    assert not lm.trainable((), nnx.BatchStat(jnp.zeros(2)))
    assert not lm.trainable((), jnp.zeros(2))
    assert lm.trainable((), nnx.LoRAParam(jnp.zeros(2)))  # a kind of nnx.Param


@pytest.mark.parametrize("target", [jnp.zeros(2), nnx.BatchStat(jnp.zeros(2)), None, {"a": 1}])
def test_what_has_no_parameters_is_refused(target: Any) -> None:
    with pytest.raises(lm.ArgumentError, match="other values are never trained"):
        lm.autograd.requires_grad_(target, False)


# ---------------------------------------------------------------- gradients


ONLY_LAST = nnx.All(nnx.Param, nnx.PathContains("last"))
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "array": {"argnums": 1},
    "several": {"argnums": (1, 0)},
    "filter": {"argnums": nnx.DiffState(0, ONLY_LAST)},
    "filter and array": {"argnums": (nnx.DiffState(0, ONLY_LAST), 1)},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("jit", [lambda f: f, nnx.jit, lm.jit])
def test_gradients_and_mutations_are_those_of_nnx(options: dict[str, Any], jit: Any) -> None:
    model, other = Net(), Net()
    assert_same(jit(lm.autograd.grad(loss, **options))(model, X), jit(nnx.grad(loss, **options))(other, X))
    assert_same(
        jit(lm.autograd.value_and_grad(loss, **options))(model, X),
        jit(nnx.value_and_grad(loss, **options))(other, X),
    )
    assert_same(nnx.state(model), nnx.state(other))


@pytest.mark.slow
def test_places_from_the_end_are_those_that_are_given() -> None:
    def of_both(x: jax.Array, model: Net, scale: float = 2.0) -> jax.Array:
        return loss(model, x) * scale

    model = Net()
    lm.autograd.requires_grad_(model.first, False)
    want = nnx.grad(of_both, argnums=nnx.DiffState(1, lm.trainable))(X, Net())
    del want["first"]
    assert_same(lm.autograd.grad(of_both, argnums=-1)(X, model), want)
    assert_same(lm.autograd.grad(of_both, argnums=nnx.DiffState(-1, lm.trainable))(X, model), want)
    value, (by_model, by_x) = lm.autograd.value_and_grad(of_both, argnums=(-1, 0))(X, model)
    assert_same(by_model, want)
    assert_same((value, by_x), jax.value_and_grad(lambda x: of_both(x, Net()))(X))
    with pytest.raises(lm.ArgumentError, match="with 1 twice"):
        lm.autograd.grad(of_both, argnums=(1, -1))(X, model)


def test_hooks_of_the_last_argument() -> None:
    model = Net()
    lm.autograd.register_hook(model.last.kernel, lambda grad: grad * 0)
    grads = lm.autograd.grad(lambda x, model: loss(model, x), argnums=-1)(X, model)
    assert_same(grads["last"]["kernel"][...], jnp.zeros((5, 2)))


def test_a_partial_function_and_arguments_by_keyword_alone() -> None:
    def scaled(model: Net, x: jax.Array, scale: float) -> jax.Array:
        return loss(model, x) * scale

    def by_keyword(model: Net, x: jax.Array = X, *, scale: float = 3.0) -> jax.Array:
        return loss(model, x) * scale

    want = nnx.grad(lambda model: loss(model) * 3)(Net())
    assert_same(lm.autograd.grad(functools.partial(scaled, scale=3.0))(Net(), X), want)
    assert_same(lm.autograd.grad(functools.partial(scaled, x=X, scale=3.0))(Net()), want)
    assert_same(lm.autograd.value_and_grad(by_keyword)(Net())[1], want)
    assert_same(lm.autograd.grad(by_keyword)(Net(), x=X), want)
    assert_same(lm.autograd.grad(by_keyword)(Net(), scale=6.0), jax.tree.map(lambda g: 2 * g, want))


def test_what_else_a_function_returns_is_handed_on() -> None:
    def with_aux(x: jax.Array) -> Any:
        return (x**2).sum(), {"twice": 2 * x}

    x = jnp.array([1.0, 2.0])
    assert_same(lm.autograd.grad(with_aux, has_aux=True)(x), (2 * x, {"twice": 2 * x}))
    want = ((jnp.float32(5), {"twice": 2 * x}), 2 * x)
    assert_same(lm.autograd.value_and_grad(with_aux, has_aux=True)(x), want)
    z = jax.lax.complex(x, 3 * x)
    got = lm.autograd.grad(lambda z: ((z * z.conj()).real.sum(), z), has_aux=True, conjugate=True)(z)
    assert_same(got, (2 * z, z))  # what is handed on is not conjugated


def test_frozen_parameters_get_no_gradient() -> None:
    model = Net()
    lm.autograd.requires_grad_(model.norm, False)
    got, want = lm.autograd.grad(loss)(model), nnx.grad(loss)(Net())
    assert set(got) == {"first", "last"}
    assert_same(got["first"], want["first"])
    assert_same(got["last"], want["last"])


# d/dz* of real functions of z, by Wirtinger's calculus, times 2: the direction of steepest ascent
COMPLEX: list[tuple[Callable[[jax.Array], jax.Array], Callable[[jax.Array], jax.Array]]] = [
    (lambda z: (z * z.conj()).real.sum(), lambda z: 2 * z),
    (lambda z: z.real.sum(), lambda z: jnp.ones_like(z)),
    (lambda z: z.imag.sum(), lambda z: jnp.full_like(z, 1j)),
    (lambda z: jnp.abs(z).sum(), lambda z: z / jnp.abs(z).astype(z.dtype)),
    (lambda z: (z * z).real.sum(), lambda z: 2 * z.conj()),
]


@pytest.mark.parametrize("case", range(len(COMPLEX)))
@pytest.mark.parametrize("jit", [lambda f: f, jax.jit, lm.jit])
def test_a_conjugate_gradient_is_the_direction_of_steepest_ascent(case: int, jit: Any) -> None:
    f, ascent = COMPLEX[case]
    z = jnp.array([1 + 2j, -0.5 + 0.3j])
    np.testing.assert_allclose(jit(lm.autograd.grad(f, conjugate=True))(z), ascent(z), rtol=1e-6)
    np.testing.assert_allclose(jit(lm.autograd.value_and_grad(f, conjugate=True))(z)[1], ascent(z), rtol=1e-6)
    assert_same(jit(lm.autograd.grad(f))(z), jit(jax.grad(f))(z))


@pytest.mark.slow
def test_a_complex_layer_is_trained_by_conjugate_gradients() -> None:
    layer = nnx.Linear(3, 2, rngs=nnx.Rngs(0), dtype=jnp.complex64, param_dtype=jnp.complex64)
    x = jnp.array([[1 + 1j, 2 - 1j, 0.5j]], jnp.complex64)
    optimizer = nnx.Optimizer(layer, optax.sgd(0.02), wrt=lm.trainable)

    def distance(layer: nnx.Linear) -> jax.Array:
        return (jnp.abs(layer(x) - (3 - 2j)) ** 2).sum()

    first = distance(layer)
    for _ in range(60):
        optimizer.update(layer, lm.autograd.grad(distance, conjugate=True)(layer))
    assert distance(layer) < 1e-3 * first


def test_a_lazy_layer_has_no_gradient_before_it_has_parameters() -> None:
    model = Net(lazy=True)
    with pytest.raises(lm.UninitializedError, match="materialize"):
        lm.autograd.grad(loss)(model)
    assert lm.has_uninitialized_params(model)
