"""lm.Stack against the nnx.List of explicit blocks that it stands for: values, keys, gradients, state, arguments."""

from __future__ import annotations

import copy
import pickle
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from stacks import (
    BLOCKS,
    WIDTH,
    Attending,
    Dense,
    H,
    Model,
    N,
    Normed,
    X,
    assert_same,
    layered,
    loss,
    pair,
    run,
    through,
)

import lazymods as lm

# ---------------------------------------------------------------- values


def settled(way: str, model: Any, want: Any) -> tuple[Any, bool]:
    """Give a model its parameters in some way; say whether values may differ by rounding."""
    if way == "call":
        np.testing.assert_array_equal(model(X), want(X))
    elif way == "spec":
        lm.materialize(model, jax.ShapeDtypeStruct(X.shape, X.dtype))
    elif way == "load":
        lm.load_state_dict(model, lm.state_dict(want, include_rng=True))
    elif way in ("copy", "pickle"):
        model = copy.deepcopy(nnx.clone(model)) if way == "copy" else pickle.loads(pickle.dumps(model))
        lm.materialize(model, X)
    else:
        compile = nnx.jit if way == "nnx.jit" else lm.jit
        np.testing.assert_allclose(compile(run)(model, X), compile(run)(want, X), rtol=1e-5, atol=1e-6)
        return model, True
    return model, False


@pytest.mark.parametrize("way", ["call", "spec", "load", "copy", "nnx.jit", "lm.jit", "pickle"])
@pytest.mark.parametrize("form", ["lazy", "ready"])
@pytest.mark.parametrize("name", BLOCKS)
def test_every_way_gives_the_list(name: str, form: str, way: str) -> None:
    if way == "pickle" and name != "keeping":
        pytest.skip("a lambda or an initializer of the block does not pickle, in a list neither")
    model, want = Model(BLOCKS[name], form), Model(BLOCKS[name], "list")
    model, rounding = settled(way, model, want)
    assert not lm.has_uninitialized_params(model)
    assert_same(model, want, rounding=rounding)
    np.testing.assert_allclose(model(X), want(X), rtol=1e-5, atol=1e-6)
    assert_same(model, want, rounding=True)


@pytest.mark.slow
@pytest.mark.parametrize("compile", [nnx.jit, lm.jit, lambda f: f], ids=["nnx.jit", "lm.jit", "plain"])
@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("name", BLOCKS)
def test_gradients_and_statistics_are_those_of_the_list(name: str, remat: bool, compile: Any) -> None:
    model, want = Model(BLOCKS[name], "ready", remat=remat), Model(BLOCKS[name], "list")
    lm.materialize(model, X)
    got, expected = (compile(nnx.grad(loss))(m, X) for m in (model, want))
    layered(got, expected)
    assert_same(model, want, rounding=True)


@pytest.mark.slow
@pytest.mark.parametrize("compile", [nnx.jit, lm.jit], ids=["nnx.jit", "lm.jit"])
def test_steps_of_a_lazy_optimizer(compile: Any) -> None:
    def step(model: Any, optimizer: Any, x: jax.Array) -> jax.Array:
        value, gradient = nnx.value_and_grad(loss)(model, x)
        optimizer.update(model, gradient)
        return value

    model, want = Model(Dense, "lazy"), Model(Dense, "list")
    tx = optax.sgd(1e-2, momentum=0.9)
    if compile is nnx.jit:
        lm.materialize(model, X)
    optimizers = lm.LazyOptimizer(model, tx, wrt=nnx.Param), nnx.Optimizer(want, tx, wrt=nnx.Param)
    steps = [compile(step), compile(step)]
    for _ in range(3):
        got, expected = (s(m, o, X) for s, m, o in zip(steps, (model, want), optimizers, strict=True))
        np.testing.assert_allclose(got, expected, rtol=1e-5)
    assert_same(model, want, rounding=True)


@pytest.mark.slow
def test_other_transforms() -> None:
    for form in ("lazy", "ready"):
        model, want = Model(Normed, form), Model(Normed, "list")
        for m in (model, want):
            m.eval()
        for transform in (jax.jit, lambda f: jax.vmap(lambda x: f(x[None])), lambda f: jax.grad(lambda x: f(x).sum())):
            got, expected = (transform(lambda x, m=m: m(x))(X) for m in (model, want))
            np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
        assert_same(model, want)


@pytest.mark.slow
def test_a_model_taken_apart_for_jax_jit() -> None:
    def called(model: Any) -> Any:
        graph, state = nnx.split(model)

        @jax.jit
        def call(state: Any, x: jax.Array) -> Any:
            merged = nnx.merge(graph, state)
            return merged(x), nnx.state(merged)

        y, after = call(state, X)
        nnx.update(model, after)
        return y

    model, want = Model(Normed, "lazy"), Model(Normed, "list")
    with pytest.raises(lm.UninitializedError):
        called(model)
    lm.materialize(model, X)
    np.testing.assert_allclose(called(model), called(want), rtol=1e-5)
    assert_same(model, want, rounding=True)


@pytest.mark.slow
def test_an_ensemble_of_stacks() -> None:
    def built(form: str) -> Any:
        def make(rngs: nnx.Rngs) -> Any:
            if form == "stack":
                return lm.Stack(lambda rngs: Normed(rngs, True), 2, rngs=rngs)
            return nnx.List([Normed(rngs, False) for _ in range(2)])

        return nnx.split_rngs(splits=3)(nnx.vmap(make))(nnx.Rngs(0))

    x = jnp.arange(4.0 * WIDTH).reshape(4, WIDTH)
    stacks, lists = built("stack"), built("list")
    got, want = (nnx.vmap(through, in_axes=(0, None))(m, x) for m in (stacks, lists))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    for i, blocks in enumerate(lists):
        np.testing.assert_allclose(stacks.blocks_as_one.fc.kernel[:, i], blocks.fc.kernel[...], rtol=1e-6)
        np.testing.assert_allclose(stacks.blocks_as_one.bn.mean[:, i], blocks.bn.mean[...], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form", ["lazy", "ready"])
def test_blocks_of_lazy_tensors(form: str) -> None:
    model, want = Model(Dense, form), Model(Dense, "list")
    for _ in range(2):
        with lm.lazytensor.lazy():
            got = model(X)
        np.testing.assert_allclose(got, want(X), rtol=1e-5, atol=1e-6)
    assert_same(model, want, rounding=True)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"check": True}, {"donate_state": True}], ids=str)
def test_lm_jit_with_options(options: dict[str, Any]) -> None:
    def decides(model: Any, x: jax.Array) -> jax.Array:
        y = model(x)
        return y * 2.0 if y.sum() > 0 else y - model(x)

    model, want = Model(Dense, "lazy"), Model(Dense, "list")
    step = lm.jit(decides, **options)
    for _ in range(2):
        np.testing.assert_allclose(step(model, X), decides(want, X), rtol=1e-5, atol=1e-6)
    assert_same(model, want, rounding=True)


@pytest.mark.slow
def test_a_program_has_the_block_once() -> None:
    for n in (2, 20):
        stack = lm.Stack(lambda rngs: Dense(rngs, True), n, rngs=nnx.Rngs(0))
        stack.eval()
        text = str(jax.make_jaxpr(lambda x, stack=stack: stack(x))(jnp.ones((4, WIDTH))))
        assert text.count("scan[") == 1 and text.count("dot_general[") == 2


def test_threads_size_it_once() -> None:
    model, want = Model(Dense, "lazy"), Model(Dense, "list")
    for m in (model, want):
        m.eval()
    outputs: list[Any] = []
    threads = [threading.Thread(target=lambda: outputs.append(model(X))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outputs) == 4
    for got in outputs:
        np.testing.assert_array_equal(got, want(X))
    assert_same(model, want)


# ---------------------------------------------------------------- arguments, caches, what is shared


@pytest.mark.slow
@pytest.mark.parametrize("compile", [lambda f: f, nnx.jit, lm.jit], ids=["plain", "nnx.jit", "lm.jit"])
def test_what_each_block_gets_besides(compile: Any) -> None:
    """Also rngs, which draw in one block after the other."""
    mask = nnx.make_causal_mask(jnp.ones((2, 5)))
    call = compile(lambda m, x, rngs: through(m, x, mask, rngs=rngs, scale=jnp.float32(2.0)))
    results = []
    for blocks in pair(Attending):
        rngs = nnx.Rngs(7)
        results.append([call(blocks, H, rngs) for _ in range(2)])
        assert rngs.default.count[...] == 2 * N
    np.testing.assert_allclose(results[0], results[1], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["each", "everywhere"])
def test_caches_for_decoding(how: str) -> None:
    def begin(blocks: Any) -> None:
        if how == "each" and isinstance(blocks, lm.Stack):
            blocks.each(lambda block: block.attention.init_cache((2, 5, WIDTH)))
            return
        for _, node in nnx.iter_graph(blocks):
            if isinstance(node, nnx.MultiHeadAttention):
                node.init_cache((2, 5, WIDTH))

    stack, blocks = pair(Attending)
    plain = lambda m, x: through(m, x, decode=True)  # noqa: E731
    compiled = nnx.jit(plain)
    whole = through(blocks, H, nnx.make_causal_mask(jnp.ones((2, 5))))
    for _ in range(2):
        begin(stack)
        begin(blocks)
        for i in range(5):
            call = (plain, compiled, lm.jit(plain))[min(i, 2)]
            got, want = (call(m, H[:, i : i + 1]) for m in (stack, blocks))
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(got, whole[:, i : i + 1], rtol=1e-4, atol=1e-5)
        assert stack.blocks_as_one.attention.cached_key.shape == (N, 2, 5, 2, WIDTH // 2)
        keys = [m[1].attention.cached_key[...] for m in (stack, blocks)]
        np.testing.assert_allclose(*keys, rtol=1e-5, atol=1e-6)  # a GPU rounds the list's program otherwise


@pytest.mark.slow
def test_intermediates_of_all_blocks() -> None:
    class Sowing(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.fc = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            x = self.fc(x)
            self.perturbed = nnx.Intermediate(x)
            return x

    for compile in (lambda f: f, nnx.jit, lm.jit):
        stack, blocks = pair(Sowing)
        call = compile(through)
        for _ in range(2):
            np.testing.assert_allclose(call(stack, H), call(blocks, H), rtol=1e-5, atol=1e-6)
        for got, want in zip(stack, blocks, strict=True):
            np.testing.assert_allclose(got.perturbed[...], want.perturbed[...], rtol=1e-5, atol=1e-6)
        assert next(iter(nnx.to_flat_state(nnx.pop(stack, nnx.Intermediate))))[0] == ("blocks_as_one", "perturbed")
        np.testing.assert_allclose(call(stack, H), call(blocks, H), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 3])
def test_what_all_blocks_share_stays_one(n: int) -> None:
    kept = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(5))

    class Sharing(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.rngs, self.kept = rngs, kept
            self.drop = nnx.Dropout(0.5)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.drop(self.kept(x), rngs=self.rngs)

    rngs = nnx.Rngs(0)
    stack = lm.Stack(Sharing, n, rngs=rngs)
    other = nnx.Rngs(0)
    blocks = nnx.List([Sharing(other) for _ in range(n)])
    assert stack.blocks_as_one.rngs is rngs
    np.testing.assert_array_equal(stack(H), through(blocks, H))
    assert rngs.default.count[...] == other.default.count[...] == n
    if n > 1:
        assert stack.blocks_as_one.kept is kept
        got, want = (nnx.grad(lambda m: jnp.sum(through(m, H) ** 2))(m) for m in (stack, blocks))
        np.testing.assert_allclose(
            got["blocks_as_one"]["kept"]["kernel"][...], want[0]["kept"]["kernel"][...], rtol=1e-4
        )
