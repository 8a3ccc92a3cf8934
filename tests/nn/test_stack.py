"""lm.Stack against the nnx.List of explicit blocks that it stands for: values, keys, names, gradients, state."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import lazymods as lm

N, WIDTH = 3, 8


class Dense(nnx.Module):
    """Norm, two layers of other widths, dropout, a residual."""

    def __init__(self, rngs: nnx.Rngs, lazy: bool) -> None:
        self.norm: Any = lm.LazyLayerNorm(rngs=rngs) if lazy else nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up: Any = lm.LazyLinear(16, rngs=rngs) if lazy else nnx.Linear(WIDTH, 16, rngs=rngs)
        self.act = lambda x: jax.nn.relu(x)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.down: Any = lm.LazyLinear(WIDTH, rngs=rngs) if lazy else nnx.Linear(16, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(self.drop(self.act(self.up(self.norm(x)))))


class Normed(nnx.Module):
    """Statistics."""

    def __init__(self, rngs: nnx.Rngs, lazy: bool) -> None:
        init = nnx.initializers.normal(0.3)  # another function in each block
        linear: Any = lm.LazyLinear if lazy else lambda n, **given: nnx.Linear(WIDTH, n, **given)
        self.fc = linear(WIDTH, kernel_init=init, rngs=rngs)
        self.bn: Any = lm.LazyBatchNorm(rngs=rngs) if lazy else nnx.BatchNorm(WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.bn(self.fc(x))


class Keeping(nnx.Module):
    """Rngs that all blocks share, and parameters in containers."""

    def __init__(self, rngs: nnx.Rngs, lazy: bool) -> None:
        linear: Any = lm.LazyLinear if lazy else lambda n, **given: nnx.Linear(WIDTH, n, **given)
        self.layers = nnx.List([linear(WIDTH, rngs=rngs), linear(WIDTH, use_bias=False, rngs=rngs)])
        self.pair = nnx.data({"a": nnx.Param(jax.random.normal(rngs.params(), (WIDTH,))), "b": jnp.ones(())})
        self.drop = nnx.Dropout(0.25)
        self.rngs = rngs

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = layer(x)
        return self.drop(x * self.pair["a"][None] * self.pair["b"], rngs=self.rngs)


BLOCKS: dict[str, Callable[..., Any]] = {"dense": Dense, "normed": Normed, "keeping": Keeping}


class Model(nnx.Module):
    """A stack or a list of blocks between other layers."""

    def __init__(self, block: Callable[..., Any], form: str, *, remat: bool = False, seed: int = 0) -> None:
        rngs = nnx.Rngs(seed)
        is_list = form == "list"
        self.first: Any = nnx.Linear(5, WIDTH, rngs=rngs) if is_list else lm.LazyLinear(WIDTH, rngs=rngs)
        if is_list:
            self.blocks: Any = nnx.List([block(rngs, False) for _ in range(N)])
        else:
            self.blocks = lm.Stack(lambda rngs: block(rngs, form == "lazy"), N, remat=remat, rngs=rngs)
        self.last: Any = nnx.Linear(WIDTH, 2, rngs=rngs) if is_list else lm.LazyLinear(2, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(through(self.blocks, self.first(x)))


def through(blocks: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a stack, or the blocks of a list in turn."""
    if isinstance(blocks, lm.Stack):
        return blocks(x, *args, **kwargs)
    for block in blocks:
        x = block(x, *args, **kwargs)
    return x


X = jax.random.normal(jax.random.key(1), (4, 5))
H = jax.random.normal(jax.random.key(2), (2, 5, WIDTH))


def run(model: Any, x: jax.Array) -> jax.Array:
    return model(x)


def loss(model: Any, x: jax.Array) -> jax.Array:
    return jnp.mean(model(x) ** 2)


def pair(make: Callable[[nnx.Rngs], Any], n: int = N, **options: Any) -> tuple[Any, Any]:
    """A stack, and the list of the same blocks."""
    rngs = nnx.Rngs(0)
    return lm.Stack(make, n, rngs=nnx.Rngs(0), **options), nnx.List([make(rngs) for _ in range(n)])


def assert_same(model: Any, want: Any, *, rounding: bool = False) -> None:
    """All entries, random state among them, are those of the list."""
    got, expected = (lm.state_dict(m, include_rng=True) for m in (model, want))
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert got[name].dtype == value.dtype
        if rounding:
            np.testing.assert_allclose(got[name], value, rtol=1e-4, atol=1e-5, err_msg=name)
        else:
            np.testing.assert_array_equal(got[name], value, err_msg=name)


def layered(state: Any, want: Any) -> None:
    """A state of a stack is that of the list, stacked."""
    flat = nnx.to_flat_state(want)
    for path, value in nnx.to_flat_state(state):
        at = path.index("blocks_as_one") if "blocks_as_one" in path else None
        where = [path] if at is None else [(*path[:at], i, *path[at + 1 :]) for i in range(N)]
        expected = [dict(flat)[p][...] for p in where]
        expected = expected[0] if at is None else jnp.stack(expected)
        np.testing.assert_allclose(value[...], expected, rtol=1e-4, atol=1e-5, err_msg=str(path))


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


@pytest.mark.parametrize("compile", [nnx.jit, lm.jit, lambda f: f], ids=["nnx.jit", "lm.jit", "plain"])
@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("name", BLOCKS)
def test_gradients_and_statistics_are_those_of_the_list(name: str, remat: bool, compile: Any) -> None:
    model, want = Model(BLOCKS[name], "ready", remat=remat), Model(BLOCKS[name], "list")
    lm.materialize(model, X)
    got, expected = (compile(nnx.grad(loss))(m, X) for m in (model, want))
    layered(got, expected)
    assert_same(model, want, rounding=True)


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


def test_other_transforms() -> None:
    for form in ("lazy", "ready"):
        model, want = Model(Normed, form), Model(Normed, "list")
        model.eval(), want.eval()
        for transform in (jax.jit, lambda f: jax.vmap(lambda x: f(x[None])), lambda f: jax.grad(lambda x: f(x).sum())):
            got, expected = (transform(lambda x, m=m: m(x))(X) for m in (model, want))
            np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
        assert_same(model, want)


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


def test_a_program_has_the_block_once() -> None:
    for n in (2, 20):
        stack = lm.Stack(lambda rngs: Dense(rngs, True), n, rngs=nnx.Rngs(0))
        stack.eval()
        text = str(jax.make_jaxpr(lambda x, stack=stack: stack(x))(jnp.ones((4, WIDTH))))
        assert text.count("scan[") == 1 and text.count("dot_general[") == 2


def test_threads_size_it_once() -> None:
    model, want = Model(Dense, "lazy"), Model(Dense, "list")
    model.eval(), want.eval()
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


class Attending(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.attention = nnx.MultiHeadAttention(2, WIDTH, decode=False, rngs=rngs)
        self.drop = nnx.Dropout(0.3)

    def __call__(self, x: Any, mask: Any = None, *, rngs: Any = None, scale: Any = None, decode: bool = False) -> Any:
        y = self.attention(x, mask=mask, decode=decode)
        y = y if scale is None else y * scale
        return x + (y if rngs is None else self.drop(y, rngs=rngs))


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
    np.testing.assert_allclose(results[0], results[1], rtol=1e-5, atol=1e-6)


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
        begin(stack), begin(blocks)
        for i in range(5):
            call = (plain, compiled, lm.jit(plain))[min(i, 2)]
            got, want = (call(m, H[:, i : i + 1]) for m in (stack, blocks))
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(got, whole[:, i : i + 1], rtol=1e-4, atol=1e-5)
        assert stack.blocks_as_one.attention.cached_key.shape == (N, 2, 5, 2, WIDTH // 2)
        np.testing.assert_array_equal(stack[1].attention.cached_key[...], blocks[1].attention.cached_key[...])


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
        assert [*nnx.to_flat_state(nnx.pop(stack, nnx.Intermediate))][0][0] == ("blocks_as_one", "perturbed")
        np.testing.assert_allclose(call(stack, H), call(blocks, H), rtol=1e-5, atol=1e-6)


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


# ---------------------------------------------------------------- names and files


@pytest.mark.parametrize("name", ["m.safetensors", "m.npz", "m"])
@pytest.mark.parametrize("form", ["lazy", "ready"])
def test_checkpoints_go_both_ways(tmp_path: Any, form: str, name: str) -> None:
    want = Model(Normed, "list", seed=3)
    lm.save(want, tmp_path / name)
    model = Model(Normed, form)
    if form == "ready":
        lm.materialize(model, X)
    kernel = model.blocks.blocks_as_one.fc.kernel
    assert lm.load(model, tmp_path / name).matched["blocks.2.fc.kernel"] == ("blocks.2.fc.kernel",)
    assert model.blocks.blocks_as_one.fc.kernel is kernel
    for got, expected in zip(lm.state_dict(model).items(), lm.state_dict(want).items(), strict=True):
        assert got[0] == expected[0]
        np.testing.assert_array_equal(got[1], expected[1])
    lm.save(model, tmp_path / f"back-{name}")
    other = Model(Normed, "list")
    lm.load(other, tmp_path / f"back-{name}")
    np.testing.assert_array_equal(other.blocks[2].fc.kernel[...], want.blocks[2].fc.kernel[...])


def test_an_export_to_pytorch() -> None:
    model, want = Model(Normed, "lazy"), Model(Normed, "list")
    lm.materialize(model, X)
    got, expected = lm.export_torch(model), lm.export_torch(want)
    assert list(got) == list(expected) and "blocks.2.fc.weight" in got
    for name, value in expected.items():
        np.testing.assert_array_equal(got[name], value)


@pytest.mark.parametrize("form", ["lazy", "ready"])
def test_a_file_of_pytorch(tmp_path: Any, form: str) -> None:
    torch = pytest.importorskip("torch")
    want = Model(Normed, "list", seed=3)
    torch.save({f"module.{k}": torch.tensor(v) for k, v in lm.export_torch(want).items()}, tmp_path / "m.pt")
    model = Model(Normed, form)
    if form == "ready":
        lm.materialize(model, X)
    lm.load(model, tmp_path / "m.pt", layout="torch")
    for name, value in lm.state_dict(want).items():
        np.testing.assert_array_equal(lm.state_dict(model)[name], value)


def test_names_of_a_lazy_stack() -> None:
    model, want = Model(Dense, "lazy"), Model(Dense, "list")
    entries = lm.state_dict(model)
    assert list(entries) == list(lm.state_dict(want))
    assert repr(entries["blocks.1.up.kernel"]) == "UninitializedParameter(shape=(?, 16), dtype=float32)"
    assert "blocks.up.kernel" in lm.uninitialized_paths(model)
    lm.load_state_dict(model, entries)
    assert lm.is_lazy(model.blocks.blocks_as_one.up)
    rows = {row.path: row for row in lm.infer_shapes(model, X).rows}
    assert {p.name: p.shape for p in rows["blocks.up"].parameters} == {"kernel": (N, 8, 16), "bias": (N, 16)}
    with pytest.raises(lm.UninitializedError, match=r"blocks\.up\.kernel"):
        lm.save(model, "never.safetensors")


def test_a_stack_that_gets_some_entries_is_sized_by_them() -> None:
    model, want, other = Model(Dense, "lazy"), Model(Dense, "list"), Model(Dense, "list", seed=3)
    some = {k: v for k, v in lm.state_dict(other).items() if not k.startswith("blocks.1.")}
    result = lm.load_state_dict(model, some, strict=False)
    assert result.missing == [k for k in lm.state_dict(want) if k.startswith("blocks.1.")]
    expected = lm.state_dict(want) | some
    for name, value in lm.state_dict(model).items():
        np.testing.assert_array_equal(value, expected[name], err_msg=name)


def test_a_ready_stack_keeps_what_a_load_leaves_out() -> None:
    model, want = Model(Dense, "ready"), Model(Dense, "list")
    lm.materialize(model, X)
    new = jnp.full((8, 16), 2.0)
    lm.load_state_dict(model, {"blocks.1.up.kernel": new}, strict=False)
    expected = lm.state_dict(want) | {"blocks.1.up.kernel": new}
    for name, value in lm.state_dict(model).items():
        np.testing.assert_array_equal(value, expected[name], err_msg=name)


@pytest.mark.parametrize("form", ["lazy", "ready"])
def test_a_load_that_fails_changes_nothing(form: str) -> None:
    model = Model(Dense, form)
    if form == "ready":
        lm.materialize(model, X)
    before = {k: v if lm.is_lazy(v) else np.asarray(v) for k, v in lm.state_dict(model).items()}
    entries = lm.state_dict(Model(Dense, "list", seed=3)) | {"blocks.2.up.kernel": jnp.ones((8, 17))}
    with pytest.raises(lm.StateDictError, match=r"blocks\.2\.up\.kernel"):
        lm.load_state_dict(model, entries)
    lm.register_load_state_dict_post_hook(model, lambda module, result: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        lm.load_state_dict(model, lm.state_dict(Model(Dense, "list", seed=3)))
    after = lm.state_dict(model)
    assert list(after) == list(before)
    for name, value in before.items():
        if lm.is_lazy(value):
            assert lm.is_lazy(after[name])
        else:
            np.testing.assert_array_equal(after[name], value)


def test_hooks_of_a_load_see_what_was_loaded() -> None:
    model, other = Model(Dense, "lazy"), Model(Dense, "list", seed=3)
    seen: dict[str, Any] = {}
    lm.register_load_state_dict_post_hook(model, lambda module, result: seen.update(lm.state_dict(module)))
    lm.load_state_dict(model, lm.state_dict(other))
    for name, value in lm.state_dict(other).items():
        np.testing.assert_array_equal(seen[name], value)


# ---------------------------------------------------------------- blocks


def test_blocks_are_copies() -> None:
    stack, blocks = pair(lambda rngs: nnx.Linear(WIDTH, WIDTH, rngs=rngs))
    assert len(stack) == len(list(stack)) == N and len(stack[1:]) == 2
    for i in (0, -1):
        np.testing.assert_array_equal(stack[i](H), blocks[i](H))
    with pytest.raises(IndexError):
        stack[N]
    kernel = stack.blocks_as_one.kernel
    block = stack[0]
    block.kernel[...] = block.kernel[...] * 2
    np.testing.assert_array_equal(stack[0].kernel[...], blocks[0].kernel[...])
    stack[1] = block
    assert stack.blocks_as_one.kernel is kernel
    np.testing.assert_array_equal(kernel[...], jnp.stack([b.kernel[...] for b in (blocks[0], block, blocks[2])]))
    stack.each(lambda b: setattr(b, "extra", nnx.Param(b.bias[...] + 1)))
    assert stack.blocks_as_one.extra.shape == (N, WIDTH)
    assert list(lm.state_dict(stack))[:3] == ["0.kernel", "0.bias", "0.extra"]


def test_modes_and_frozen_parameters() -> None:
    model, want = Model(Dense, "lazy"), Model(Dense, "list")
    for m in (model, want):
        lm.autograd.requires_grad_(m.blocks, False)
        m.eval()
    lm.materialize(model, X)
    np.testing.assert_array_equal(model(X), want(X))
    got, expected = (lm.jit(lm.autograd.grad(loss))(m, X) for m in (model, want))
    assert [p for p, _ in nnx.to_flat_state(got)] == [p for p, _ in nnx.to_flat_state(expected)]
    layered(got, expected)


def test_shardings_get_an_axis_for_the_layers() -> None:
    def make(rngs: nnx.Rngs) -> Any:
        return nnx.Linear(WIDTH, WIDTH, kernel_metadata={"out_sharding": ("a", "b")}, rngs=rngs)

    with nnx.use_eager_sharding(False):
        stack = lm.Stack(make, N, rngs=nnx.Rngs(0))
        assert stack.blocks_as_one.kernel.out_sharding == (None, "a", "b")
        assert stack[0].kernel.out_sharding == ("a", "b")


# ---------------------------------------------------------------- refusals


class Odd(nnx.Module):
    built = 0

    def __init__(self, rngs: nnx.Rngs) -> None:
        Odd.built += 1
        self.fc = nnx.Linear(WIDTH, WIDTH + Odd.built, rngs=rngs)
        self.drop = nnx.Dropout(0.1 * Odd.built)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.drop(self.fc(x))


def test_unequal_blocks_are_refused() -> None:
    Odd.built = 0
    with pytest.raises(lm.LazyError) as caught:
        lm.Stack(Odd, 2, rngs=nnx.Rngs(0))
    needed = "  needed: the same in each block: they may differ in the values of their Variables and arrays alone"
    write = "  write:  nnx.List([make_block(rngs) for _ in range(n)])"
    places = {
        "drop.rate": "0.1 and 0.2",
        "fc.bias": "f32[9] and f32[10]",
        "fc.kernel": "f32[8,9] and f32[8,10]",
        "fc.out_features": "9 and 10",
    }
    lines = [line for where, got in places.items() for line in (where, f"  got:    {got}", needed, write)]
    assert str(caught.value).splitlines() == ["These blocks are not equal, so they can't be one:", *lines]


@pytest.mark.parametrize("compile", [lambda f: f, nnx.jit], ids=["plain", "nnx.jit"])
@pytest.mark.parametrize("lazy", [False, True])
def test_a_block_must_return_what_it_takes(lazy: bool, compile: Any) -> None:
    def make(rngs: nnx.Rngs) -> Any:
        if lazy:
            return lm.LazyLinear(WIDTH, dtype=jnp.bfloat16, rngs=rngs)
        return nnx.Linear(WIDTH, WIDTH, dtype=jnp.bfloat16, rngs=rngs)

    stack = lm.Stack(make, 2, rngs=nnx.Rngs(0))
    with pytest.raises(lm.ShapeInferenceError) as caught:
        compile(run)(stack, H)
    assert str(caught.value).splitlines() == [
        f"a block ({'LazyLinear' if lazy else 'Linear'}) of a Stack",
        "  got:    bf16[2,5,8], from f32[2,5,8]",
        "  needed: an output of the structure, shape and dtype of the input: the next block takes it",
        "  write:  return y.astype(x.dtype)",
    ]
    assert lm.is_lazy(stack.blocks_as_one) is lazy
    assert stack(H.astype(jnp.bfloat16)).dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("n", "make", "lines"),
    [
        (0, Attending, ["n=", "  got:    0", "  needed: a number of blocks, at least one"]),
        (2.5, Attending, ["n=", "  got:    2.5", "  needed: a number of blocks, at least one"]),
        (
            2,
            lambda rngs: jnp.tanh,
            [
                "make_block=",
                "  got:    a function that returns a ufunc",
                "  needed: a function of rngs that returns a block, a module that can be called",
            ],
        ),
    ],
)
def test_arguments_that_make_no_stack(n: Any, make: Any, lines: list[str]) -> None:
    with pytest.raises(lm.ArgumentError) as caught:
        lm.Stack(make, n, rngs=nnx.Rngs(0))
    assert str(caught.value).splitlines()[:3] == lines


def test_a_first_call_that_fails_leaves_it_lazy() -> None:
    class Failing(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.fc: Any = lm.LazyLinear(WIDTH, rngs=rngs)
            self.fail = True

        def __call__(self, x: jax.Array) -> jax.Array:
            y = self.fc(x)
            if self.fail and not isinstance(y, jax.core.Tracer):
                raise RuntimeError("now")
            return y

    stack, blocks = pair(Failing)
    with pytest.raises(RuntimeError, match="now"):
        stack(H)
    assert lm.is_lazy(stack.blocks_as_one.fc) and lm.has_uninitialized_params(stack)
    stack.blocks_as_one.fail = False
    for block in blocks:
        block.fail = False
    np.testing.assert_array_equal(stack(H), through(blocks, H))
