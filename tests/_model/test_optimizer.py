"""LazyOptimizer: made before or after the sizes, it ends as Flax's own Optimizer, with the same state."""
# pyright: reportOptionalMemberAccess=false

import copy
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import ON_CPU, array, assert_same_bits, assert_same_model, lazy_mlp, plain_mlp, raw, spec

import lazymods as lm

X, Y = array(4, 8), array(4, 4, seed=1)
TX: dict[str, Callable[[], Any]] = {
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9),
    "adam": lambda: optax.adam(1e-2),
    "adamw": lambda: optax.adamw(1e-2),
    "chain": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adam(optax.linear_schedule(1e-2, 0.0, 10))),
    "masked": lambda: optax.masked(optax.adam(1e-2), lambda tree: jax.tree.map(lambda a: a.ndim > 1, tree)),
}
transformations = pytest.mark.parametrize("tx", TX.values(), ids=TX)


@pytest.fixture(autouse=True)
def optax_promotes() -> Iterator[None]:
    """Allow what optax does: its bias correction (``1 - decay**count``) mixes a Python float with an integer array."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def loss(model: Any) -> jax.Array:
    return ((model(X) - Y) ** 2).mean()


def step(model: Any, optimizer: Any) -> jax.Array:
    value, grads = nnx.value_and_grad(loss)(model)
    optimizer.update(model, grads)
    return value


def assert_same_optimizer(got: Any, want: Any) -> None:
    assert type(got) is type(want) is nnx.Optimizer
    a, b = (dict(nnx.to_flat_state(nnx.state(o))) for o in (got, want))
    assert list(a) == list(b)
    for path in b:
        assert type(a[path]) is type(b[path]) and raw(a[path]).tobytes() == raw(b[path]).tobytes(), path
    assert nnx.graphdef(got) == nnx.graphdef(want)
    assert set(vars(got)) == set(vars(want))


BEFORE: dict[str, Callable[[Any], Any]] = {
    "call": lambda m: m(X),
    "materialize": lambda m: lm.materialize(m, spec(4, 8)),
    "load": lambda m: lm.load_state_dict(m, lm.state_dict(plain_mlp())),
    "nnx.jit": lambda m: nnx.jit(lambda m, x: m(x))(m, X),
}


@pytest.mark.slow
@pytest.mark.parametrize("settle", BEFORE.values(), ids=BEFORE)
def test_made_before_the_sizes(settle: Callable[[Any], Any]) -> None:
    lazy, want = lazy_mlp(), plain_mlp()
    optimizer = lm.LazyOptimizer(lazy, optax.adam(1e-2), wrt=nnx.Param)
    assert type(optimizer) is lm.LazyOptimizer and isinstance(optimizer, nnx.Optimizer)
    settle(lazy)
    reference = nnx.Optimizer(want, optax.adam(1e-2), wrt=nnx.Param)
    reference.tx = optimizer.tx  # its functions are compared by identity
    for _ in range(3):
        assert_same_bits(step(lazy, optimizer), step(want, reference))
    assert_same_model(lazy, want)
    assert_same_optimizer(optimizer, reference)


@transformations
def test_equals_flax_for_every_transformation(tx: Callable[[], Any]) -> None:
    one = tx()
    lazy, want = lazy_mlp(), plain_mlp()
    optimizer = lm.LazyOptimizer(lazy, one, wrt=nnx.Param)
    lazy(X)
    reference = nnx.Optimizer(want, one, wrt=nnx.Param)
    for _ in range(2):
        step(lazy, optimizer)
        step(want, reference)
    assert_same_model(lazy, want)
    assert_same_optimizer(optimizer, reference)


@transformations
def test_made_after_the_sizes_it_is_flax_own_at_once(tx: Callable[[], Any]) -> None:
    one, model = tx(), plain_mlp()
    assert_same_optimizer(lm.LazyOptimizer(model, one, wrt=nnx.Param), nnx.Optimizer(model, one, wrt=nnx.Param))


@pytest.mark.parametrize("tx", [TX["sgd"], TX["adam"]], ids=["sgd", "adam"])
def test_a_whole_train_step_under_nnx_jit(tx: Callable[[], Any]) -> None:
    one, losses = tx(), []
    for model, make in ((lazy_mlp(), lm.LazyOptimizer), (plain_mlp(), nnx.Optimizer)):
        optimizer = make(model, one, wrt=nnx.Param)
        model(X)
        run = nnx.jit(step)
        losses.append([float(run(model, optimizer)) for _ in range(4)])
        losses[-1].extend(np.asarray(v).sum() for v in lm.state_dict(model).values())
        assert type(optimizer) is nnx.Optimizer
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5, atol=1e-6)


def test_nnx_jit_traces_a_train_step_at_most_twice() -> None:
    traces: list[int] = []
    model = lazy_mlp()
    optimizer = lm.LazyOptimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    model(X)
    run = nnx.jit(lambda m, o: traces.append(1) or step(m, o))
    for _ in range(4):
        run(model, optimizer)
    assert len(traces) <= 2


def test_a_first_call_and_a_first_update_in_one_jitted_step() -> None:
    one = optax.adam(1e-2)

    @nnx.jit
    def run(model: Any, optimizer: Any) -> jax.Array:
        model(X)
        return step(model, optimizer)

    lazy, want = lazy_mlp(), plain_mlp()
    optimizer = lm.LazyOptimizer(lazy, one, wrt=nnx.Param)
    reference = nnx.Optimizer(want, one, wrt=nnx.Param)
    for _ in range(3):
        rounding = 1e-5 if ON_CPU else 1e-3  # an accelerator's matrix units round to tf32
        np.testing.assert_allclose(run(lazy, optimizer), run(want, reference), rtol=rounding)
    assert type(optimizer) is nnx.Optimizer and nnx.graphdef(optimizer) == nnx.graphdef(reference)
    assert int(optimizer.step[...]) == 3


def test_only_what_is_trained_must_be_ready() -> None:
    class Frozen(nnx.Variable[Any]):
        pass

    class Model(nnx.Module):
        def __init__(self) -> None:
            self.fc, self.side = lm.LazyLinear(4, rngs=nnx.Rngs(0)), nnx.Dict(w=nnx.data(Frozen(jnp.ones(2))))
            self.norm = lm.LazyBatchNorm(rngs=nnx.Rngs(0))

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.fc(x)

    model = Model()
    optimizer = lm.LazyOptimizer(model, optax.sgd(0.1), wrt=nnx.All(nnx.Param, nnx.PathContains("fc")))
    model(X)
    assert lm.uninitialized_paths(model)[0].startswith("norm.")
    before = model.fc.bias.get_value()
    grads = nnx.grad(lambda m: m(X).sum(), argnums=nnx.DiffState(0, optimizer.wrt))(model)
    optimizer.update(model, grads)
    assert type(optimizer) is nnx.Optimizer
    np.testing.assert_allclose(model.fc.bias.get_value(), before - 0.1 * X.shape[0], rtol=1e-6)


# ---------------------------------------------------------------- refusals


def test_an_update_of_a_lazy_model_is_refused_and_changes_nothing() -> None:
    model = lazy_mlp()
    optimizer = lm.LazyOptimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    model.fc1(X)
    with pytest.raises(lm.UninitializedError) as caught:
        optimizer.update(model, {})
    assert str(caught.value).splitlines() == [
        "LazyOptimizer",
        "  got:    an update while fc2.kernel, fc2.bias are uninitialized",
        "  needed: parameters with values, to make the optimizer's state from",
        "  write:  lm.materialize(model, x)  # before; a layer that the loss does not reach: call it once, remove "
        "it, or leave it out of wrt",
    ]
    assert type(optimizer) is lm.LazyOptimizer and int(optimizer.step[...]) == 0
    model(X)
    step(model, optimizer)
    assert type(optimizer) is nnx.Optimizer and int(optimizer.step[...]) == 1


def test_state_is_pending() -> None:
    optimizer = lm.LazyOptimizer(lazy_mlp(), optax.adam(1e-2), wrt=nnx.Param)
    assert not hasattr(optimizer, "opt_state")
    with pytest.raises(lm.UninitializedError, match=r"a use of \.opt_state"):
        _ = optimizer.opt_state
    with pytest.raises(AttributeError, match="no attribute 'momentum'"):
        _ = optimizer.momentum


def test_an_update_that_fails_leaves_it_usable() -> None:
    model, want = lazy_mlp(), plain_mlp()
    optimizer = lm.LazyOptimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    model(X)
    with pytest.raises(Exception):  # noqa: B017  whatever optax says of gradients that are none
        optimizer.update(model, {"fc1": 3})
    reference = nnx.Optimizer(want, optimizer.tx, wrt=nnx.Param)
    step(model, optimizer)
    step(want, reference)
    assert_same_model(model, want)
    assert_same_optimizer(optimizer, reference)


@pytest.mark.parametrize("tx", [TX["adam"], TX["momentum"]], ids=["adam", "momentum"])
def test_flax_own_optimizer_names_what_is_lazy(tx: Callable[[], Any]) -> None:
    with pytest.raises(lm.UninitializedError, match=r"fc\d\.(kernel|bias)"):
        nnx.Optimizer(lazy_mlp(), tx(), wrt=nnx.Param)


@pytest.mark.parametrize("copier", [copy.deepcopy, nnx.clone, lambda o: nnx.merge(*nnx.split(o))],
                         ids=["deepcopy", "clone", "split-merge"])
def test_copies_before_the_first_update(copier: Callable[[Any], Any]) -> None:
    model, want = lazy_mlp(), plain_mlp()
    optimizer = lm.LazyOptimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    twin = copier(optimizer)
    model(X)
    reference = nnx.Optimizer(want, twin.tx, wrt=nnx.Param)
    step(model, twin)
    step(want, reference)
    assert_same_model(model, want)
    assert type(twin) is nnx.Optimizer and type(optimizer) is lm.LazyOptimizer


def test_is_lazy_until_it_has_state() -> None:
    model = lazy_mlp()
    optimizer = lm.LazyOptimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    assert lm.is_lazy(optimizer)
    model(X)
    step(model, optimizer)
    assert not lm.is_lazy(optimizer)
