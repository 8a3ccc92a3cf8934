"""A whole training state: step n + 1 after a resume is step n + 1 without one, bit for bit."""

import copy
import gc
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import array, assert_same_bits, raw

import lazymods as lm
from lazymods.state import load, training


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.fc1 = lm.LazyLinear(8, rngs=rngs)
        self.norm = lm.LazyBatchNorm(rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.fc2 = lm.LazyLinear(1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.fc2(self.drop(jax.nn.relu(self.norm(self.fc1(x)))))


TX = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.cosine_decay_schedule(1e-2, 100)))


def new_state(seed: int, *, lazy_optimizer: bool = True) -> dict[str, Any]:
    model, rngs = Net(nnx.Rngs(seed)), nnx.Rngs(noise=seed + 1)
    if not lazy_optimizer:
        lm.materialize(model, X)
    optimizer = (lm.LazyOptimizer if lazy_optimizer else nnx.Optimizer)(model, TX, wrt=nnx.Param)
    return {"model": model, "optimizer": optimizer, "rngs": rngs, "step": 0, "best": 0.5}


X = array(4, 3)


def train_step(state: dict[str, Any]) -> jax.Array:
    x = X + jax.random.normal(state["rngs"].noise(), X.shape)
    loss, grads = nnx.value_and_grad(lambda m: (m(x) ** 2).mean())(state["model"])
    state["optimizer"].update(state["model"], grads)
    state["step"] += 1
    return loss


def arrays(state: dict[str, Any]) -> dict[str, Any]:
    return lm.state_dict({k: v for k, v in state.items() if not isinstance(v, (int, float))}, include_rng=True)


@pytest.fixture(params=[0, 1 << 20])
def large(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """From how many bytes on an array of a new state is given up for a load."""
    monkeypatch.setattr(training, "_LARGE", request.param)
    return request.param


@pytest.fixture(autouse=True)
def standard_promotion():
    """Optax's adam raises a Python float to an int32 count, which strict promotion refuses."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".safetensors", ".npz", ""])
@pytest.mark.parametrize("lazy_optimizer", [True, False])
def test_resume(tmp_path: Path, suffix: str, lazy_optimizer: bool, large: int) -> None:
    path = tmp_path / f"state{suffix}"
    state = new_state(0)
    state["model"](X)
    for _ in range(3):
        train_step(state)
    lm.save(state, path)
    resumed = new_state(7, lazy_optimizer=lazy_optimizer)
    result = lm.load(resumed, path)
    assert tuple(result) == ([], [], [])
    assert type(resumed["optimizer"]) is nnx.Optimizer
    assert (resumed["step"], resumed["best"]) == (3, 0.5)
    assert (type(resumed["step"]), type(resumed["best"])) == (int, float)
    for _ in range(2):
        a, b = train_step(state), train_step(resumed)
        assert_same_bits(a, b)
    left, right = arrays(state), arrays(resumed)
    assert list(left) == list(right)
    for name, value in left.items():
        assert_same_bits(value, right[name])


def test_a_module_alone_leaves_random_state_out_unless_asked(tmp_path: Path) -> None:
    model = Net(nnx.Rngs(0))
    model(X)
    lm.save(model, tmp_path / "plain.safetensors")
    lm.save(model, tmp_path / "with.safetensors", include_rng=True)
    random = [n for n in lm.state_dict(model, include_rng=True) if n not in lm.state_dict(model)]
    assert sorted(random) == ["drop.rngs.count", "drop.rngs.key", "drop.rngs.key.impl"]
    want = lm.state_dict(model, include_rng=True)
    for file, equal in (("plain", False), ("with", True)):
        fresh = Net(nnx.Rngs(5))
        lm.load(fresh, tmp_path / f"{file}.safetensors")
        got = lm.state_dict(fresh, include_rng=True)
        assert bool(np.all(raw(got["drop.rngs.key"]) == raw(want["drop.rngs.key"]))) == equal


@pytest.mark.parametrize("suffix", [".safetensors", ".npz", ""])
def test_random_streams_alone_come_back(tmp_path: Path, suffix: str) -> None:
    rngs = nnx.Rngs(params=1, noise=2)
    rngs.noise()
    for source, make in ((rngs, lambda: nnx.Rngs(params=0, noise=0)), (rngs.noise, lambda: nnx.Rngs(noise=0).noise)):
        lm.save(source, tmp_path / f"r{suffix}")
        lm.load(fresh := make(), tmp_path / f"r{suffix}")
        want, got = (nnx.state(r, nnx.RngState) for r in (source, fresh))
        for path, value in nnx.to_flat_state(want):
            assert_same_bits(dict(nnx.to_flat_state(got))[path].get_value(), value.get_value())


@pytest.mark.slow
def test_an_optimizer_without_a_state_is_not_saved(tmp_path: Path) -> None:
    state = new_state(0)
    state["model"](X)
    with pytest.raises(lm.UninitializedError) as told:
        lm.save(state, tmp_path / "s.npz")
    assert str(told.value) == (
        "dict is not ready to be saved\n"
        "optimizer (LazyOptimizer)\n"
        "  got:    an optimizer without a state\n"
        "  needed: its state, which is made of the parameters: a file holds values only\n"
        "  write:  optimizer.make_state(model)  # or its first update, before lm.save"
    )
    state["optimizer"].make_state(state["model"])
    lm.save(state, tmp_path / "s.npz")
    resumed = new_state(1)
    lm.load(resumed, tmp_path / "s.npz")
    assert_same_bits(train_step(state), train_step(resumed))


@pytest.mark.slow
def test_what_the_file_has_not_of_a_state_is_what_an_optimizer_begins_with(tmp_path: Path, large: int) -> None:
    state = new_state(0)
    lm.materialize(state["model"], X)
    train_step(state)
    names = [n for n in lm.state_dict(state) if ".nu.fc1." not in n and ".mu.fc2.kernel" not in n]
    lm.save({n: v for n, v in lm.state_dict(state).items() if n in names}, tmp_path / "some.safetensors")
    fresh = new_state(1)
    result = lm.load(fresh, tmp_path / "some.safetensors", strict=False)
    assert len([n for n in result.missing if n.startswith("optimizer")]) == 3
    got, want = lm.state_dict(fresh["optimizer"]), lm.state_dict(state["optimizer"])
    assert list(got) == list(want)
    for name, value in got.items():
        assert_same_bits(value, want[name] if f"optimizer.{name}" in names else np.zeros_like(want[name]))
    train_step(fresh)


@pytest.mark.slow
def test_a_new_state_is_not_there_beside_the_one_that_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    width = 700  # kernels of 1.96 MB

    def state_of(seed: int) -> dict[str, Any]:
        model = nnx.Sequential(*(lm.LazyLinear(width, use_bias=False, rngs=nnx.Rngs(seed)) for _ in range(2)))
        return {"model": model, "optimizer": lm.LazyOptimizer(model, optax.adam(1e-3), wrt=nnx.Param)}

    saved, fresh = state_of(0), state_of(1)
    x = array(2, width)
    lm.materialize(saved["model"], x)
    _, grads = nnx.value_and_grad(lambda m: (m(x) ** 2).mean())(saved["model"])
    saved["optimizer"].update(saved["model"], grads)
    lm.save(saved, tmp_path / "state.safetensors")
    del grads
    gc.collect()  # what other tests have left
    most, write, before = [0], load._write, sum(a.nbytes for a in jax.live_arrays())

    def watched(*args: Any) -> None:
        write(*args)
        most[0] = max(most[0], sum(a.nbytes for a in jax.live_arrays()) - before)

    monkeypatch.setattr(load, "_write", watched)
    lm.load(fresh, tmp_path / "state.safetensors")
    whole = 3 * 2 * width * width * 4  # parameters and two moments
    assert whole <= most[0] <= 1.05 * whole


def test_a_failed_load_leaves_all_of_the_state_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    state = new_state(0)
    state["model"](X)
    train_step(state)
    del state["best"]
    lm.save(state, path)
    resumed = new_state(7)
    rngs = jax.random.key_data(resumed["rngs"].noise.key[...])
    with pytest.raises(lm.StateDictError, match="best"):
        lm.load(resumed, path)
    assert lm.is_lazy(resumed["model"].fc1) and lm.is_lazy(resumed["optimizer"]) and resumed["step"] == 0
    assert_same_bits(jax.random.key_data(resumed["rngs"].noise.key[...]), rngs)
    assert lm.load(resumed, path, strict=False).missing == ["best"]
    assert (resumed["step"], resumed["best"]) == (1, 0.5)


@pytest.mark.parametrize("lazy", [False, True])
def test_a_load_that_fails_at_the_optimizer_leaves_stacks_as_they_were(tmp_path: Path, lazy: bool) -> None:
    def blocks(seed: int, lazy: bool = False) -> nnx.Sequential:
        def block(rngs: nnx.Rngs) -> Any:
            return lm.LazyLinear(3, rngs=rngs) if lazy else nnx.Linear(3, 3, rngs=rngs)

        return nnx.Sequential(lm.Stack(block, 2, rngs=nnx.Rngs(seed)))

    lm.save({"a": blocks(1), "b": blocks(2), "optimizer": {"odd": jnp.ones(3)}}, tmp_path / "s.npz")
    optimizer = lm.LazyOptimizer(lm.LazyLinear(2, rngs=nnx.Rngs(0)), TX, wrt=nnx.Param)
    state = {"a": blocks(3, lazy), "b": blocks(4, lazy), "optimizer": optimizer}
    with pytest.raises(lm.UninitializedError, match="beside 2 modules"):
        lm.load(state, tmp_path / "s.npz")
    if lazy:
        lm.materialize(state["a"], X)  # as it would have been
    assert_same_bits(lm.state_dict(state)["a.layers.0.1.kernel"], lm.state_dict(blocks(3))["layers.0.1.kernel"])


@pytest.mark.slow
def test_an_optimizer_without_a_state_beside_two_models(tmp_path: Path) -> None:
    model, other = nnx.Linear(3, 1, rngs=nnx.Rngs(0)), nnx.Linear(2, 5, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(other, TX, wrt=nnx.Param)
    optimizer.update(other, nnx.grad(lambda m: m(jnp.ones((1, 2))).sum())(other))
    lm.save({"a": model, "b": other, "optimizers": [optimizer]}, tmp_path / "s.safetensors")
    a, b = lm.LazyLinear(1, rngs=nnx.Rngs(0)), lm.LazyLinear(5, rngs=nnx.Rngs(0))
    resumed = {"a": a, "b": b, "optimizers": [lm.LazyOptimizer(b, TX, wrt=nnx.Param)]}
    lm.load(resumed, tmp_path / "s.safetensors")
    found, wanted = (jax.tree.leaves(nnx.state(o)) for o in (resumed["optimizers"][0], optimizer))
    for x, y in zip(found, wanted, strict=True):
        assert_same_bits(x, y)
    lm.save({"a": other, "b": other, "optimizer": nnx.Optimizer(model, TX, wrt=nnx.Param)}, tmp_path / "s.npz")
    a, b = lm.LazyLinear(5, rngs=nnx.Rngs(0)), nnx.Linear(2, 5, rngs=nnx.Rngs(0))
    state = {"a": a, "b": b, "optimizer": lm.LazyOptimizer(a, TX, wrt=nnx.Param)}
    for resumed, error, told in (
        (state, lm.StateDictError, r"needed: shape \(2, 5\)"),  # it is the optimizer of a
        (copy.deepcopy(state), lm.UninitializedError, "beside 2 modules: a, b"),
    ):
        with pytest.raises(error, match=told):
            lm.load(resumed, tmp_path / "s.npz")
        assert lm.is_lazy(resumed["a"]) and lm.is_lazy(resumed["optimizer"])


@pytest.mark.slow
def test_optimizers_of_parts_of_a_module(tmp_path: Path) -> None:
    def make(seed: int) -> dict[str, Any]:
        both = nnx.List([lm.LazyLinear(3, rngs=nnx.Rngs(seed)), lm.LazyLinear(1, rngs=nnx.Rngs(seed))])
        made = {"both": both} | {name: lm.LazyOptimizer(both[i], TX, wrt=nnx.Param) for i, name in enumerate("ab")}
        return made

    def step(state: dict[str, Any]) -> jax.Array:
        loss, grads = nnx.value_and_grad(lambda m: (m[1](m[0](X)) ** 2).mean())(state["both"])
        for i, name in enumerate("ab"):
            state[name].update(state["both"][i], grads[i])
        return loss

    state, resumed = make(0), make(1)
    state["both"][1](state["both"][0](X))
    step(state)
    lm.save(state, tmp_path / "s.npz")
    lm.load(resumed, tmp_path / "s.npz")
    for _ in range(2):
        assert_same_bits(step(state), step(resumed))


def test_a_number_that_is_none_in_the_file(tmp_path: Path) -> None:
    lm.save({"step": jnp.arange(2), "model": nnx.Linear(3, 1, rngs=nnx.Rngs(0))}, tmp_path / "s.npz")
    with pytest.raises(lm.StateDictError, match=r"step \(int\)\n  got:    i32\[2\]"):
        lm.load({"step": 3, "model": lm.LazyLinear(1, rngs=nnx.Rngs(0))}, tmp_path / "s.npz")
