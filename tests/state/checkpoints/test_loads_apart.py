"""What a load leaves alone: statistics, other models, the model itself if a warning is an error."""

import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import lazymods as lm

FORMATS = (".safetensors", ".npz", "")
each_format = pytest.mark.parametrize("suffix", FORMATS)

# ---------------------------------------------------------------- dtype=

VARIANCE = np.array([1.001, 2.003, 3.007], np.float32)  # none of which bfloat16 has
NORMS: dict[str, Any] = {
    "ready": lambda k: nnx.BatchNorm(3, rngs=nnx.Rngs(k)),
    "lazy": lambda k: lm.LazyBatchNorm(rngs=nnx.Rngs(k)),
}


@pytest.mark.parametrize("make", NORMS.values(), ids=NORMS)
@each_format
def test_a_dtype_leaves_statistics_alone(make: Any, suffix: str, tmp_path: Path) -> None:
    norm = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
    norm.var[...] = jnp.array(VARIANCE)
    lm.save(norm, tmp_path / f"s{suffix}")
    fresh = make(1)
    lm.load(fresh, tmp_path / f"s{suffix}", dtype=jnp.bfloat16)
    assert fresh.var[...].dtype == jnp.float32 and fresh.mean[...].dtype == jnp.float32
    np.testing.assert_array_equal(fresh.var[...], VARIANCE)
    assert fresh.scale[...].dtype == jnp.bfloat16 and fresh.bias[...].dtype == jnp.bfloat16


def test_a_dtype_is_for_the_parameters_of_a_training_state(tmp_path: Path) -> None:
    def make(k: int) -> dict[str, Any]:
        model = nnx.Linear(3, 2, rngs=nnx.Rngs(k))
        return {"m": model, "o": nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param), "raw": jnp.array(VARIANCE) * k}

    lm.save(make(1), tmp_path / "s.npz")
    state = make(0)
    lm.load(state, tmp_path / "s.npz", dtype=jnp.bfloat16)
    assert state["m"].kernel[...].dtype == jnp.bfloat16
    assert state["o"].opt_state[0].mu["kernel"][...].dtype == jnp.float32
    np.testing.assert_array_equal(state["raw"], VARIANCE)


# ---------------------------------------------------------------- warnings that are errors


class Two(nnx.Module):
    def __init__(self, k: int, tie: bool, lazy: bool = False) -> None:
        def make(seed: int) -> Any:
            rngs = nnx.Rngs(seed)
            return lm.LazyLinear(4, rngs=rngs) if lazy else nnx.Linear(4, 4, rngs=rngs)

        self.a, self.b = make(k), make(k + 9)
        if tie:
            self.b.kernel = self.a.kernel


@pytest.mark.parametrize("lazy", [False, True], ids=["ready", "lazy"])
@each_format
def test_a_warning_that_is_an_error_leaves_the_model_as_it_was(lazy: bool, suffix: str, tmp_path: Path) -> None:
    lm.save(Two(0, tie=True), tmp_path / f"s{suffix}")
    model = Two(1, tie=False, lazy=lazy)
    before = None if lazy else np.array(model.a.kernel[...])
    with pytest.raises(UserWarning, match="one parameter in the file and two"):
        lm.load(model, tmp_path / f"s{suffix}")
    if lazy:
        assert lm.uninitialized_paths(model) == ["a.kernel", "a.bias", "b.kernel", "b.bias"]
        assert type(model.a) is lm.LazyLinear
    else:
        np.testing.assert_array_equal(model.a.kernel[...], before)


def test_an_optimizer_without_a_state_gets_none_where_a_warning_is_an_error(tmp_path: Path) -> None:
    lm.save({"other": jnp.ones(2)}, tmp_path / "s.npz")
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    optimizer = lm.LazyOptimizer(lm.LazyLinear(2, rngs=nnx.Rngs(0)), optax.adam(0.1), wrt=nnx.Param)
    with pytest.raises(UserWarning, match="nothing was loaded"):
        lm.load({"m": model, "o": optimizer}, tmp_path / "s.npz", strict=False)
    assert lm.is_lazy(optimizer)


def test_a_warning_names_the_line_of_the_load(tmp_path: Path) -> None:
    lm.save({"m": Two(0, tie=True)}, tmp_path / "s.npz")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        lm.load({"m": Two(1, tie=False)}, tmp_path / "s.npz")
        assert [w.filename for w in told] == [__file__]

# ---------------------------------------------------------------- what is left out


@pytest.mark.parametrize("how", [{"strict": False}, {"ignore": "extra"}], ids=["not strict", "ignored"])
def test_a_damaged_entry_that_is_left_out_leaves_the_model_as_it_was(how: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "s.npz"
    np.savez_compressed(path, kernel=np.ones((2, 3)), bias=np.ones(3), extra=np.arange(5000))
    raw = bytearray(path.read_bytes())
    raw[raw.index(b"extra.npy") + 2000] ^= 0xFF  # in the middle of what it unpacks to
    path.write_bytes(raw)
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    before = np.array(model.kernel[...])
    with pytest.raises(lm.CheckpointError, match=r"s\.npz: extra"):
        lm.load(model, path, **how)
    np.testing.assert_array_equal(model.kernel[...], before)


# ---------------------------------------------------------------- arrays of others


@jax.jit
def _sum(x: jax.Array) -> jax.Array:
    return x.sum()


def test_a_step_that_donates_leaves_a_model_alone_that_was_loaded_from_it() -> None:
    online: Any = nnx.Sequential(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(0)))
    expected = np.array(online.layers[0].kernel[...])
    key = np.array(jax.random.key_data(online.layers[1].rngs.key[...]))
    targets: list[Any] = [
        nnx.Sequential(nnx.Linear(8, 8, rngs=nnx.Rngs(1)), nnx.Dropout(0.5, rngs=nnx.Rngs(1))),
        nnx.Sequential(lm.LazyLinear(8, rngs=nnx.Rngs(1)), nnx.Dropout(0.5, rngs=nnx.Rngs(1))),
    ]
    for target in targets:
        lm.load_state_dict(target, lm.state_dict(online, include_rng=True))

    @lm.jit(donate_state=True)
    def step(model: Any) -> None:
        model.layers[0].kernel[...] = model.layers[0].kernel[...] + 1
        model.layers[1].rngs()

    for _ in range(2):
        step(online)
    for target in targets:
        np.testing.assert_array_equal(target.layers[0].kernel[...], expected)
        np.testing.assert_array_equal(jax.random.key_data(target.layers[1].rngs.key[...]), key)


def test_entries_that_are_one_array_are_two_in_the_model() -> None:
    array = jnp.ones((4, 4))
    state = {"a": jnp.zeros((4, 4)), "b": jnp.zeros((4, 4)), "c": nnx.Param(jnp.zeros((4, 4)))}
    lm.load_state_dict(state, {"a": array, "b": array, "c": array})
    jax.jit(lambda x: x + 1, donate_argnums=0)(array)
    jax.jit(lambda x: x + 1, donate_argnums=0)(state["a"])
    assert float(_sum(state["b"])) == 16 and float(_sum(state["c"][...])) == 16


def test_random_keys_are_not_the_memory_of_the_entries() -> None:
    data = np.array([1, 2], np.uint32)
    state = {"k": jax.random.key(0)}
    lm.load_state_dict(state, {"k": data})
    data[...] = 0
    assert jax.random.key_data(state["k"]).tolist() == [1, 2]


def test_a_load_transfers_what_it_is_asked_to(tmp_path: Path) -> None:
    """A guard that lets explicit transfers pass lets loads pass."""

    def make(k: int) -> dict[str, Any]:
        model = nnx.Sequential(nnx.Linear(2, 2, rngs=nnx.Rngs(k)), nnx.BatchNorm(2, rngs=nnx.Rngs(k)))
        optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
        numbers = {"f": jnp.full(2, float(k)), "weak": jnp.array(k / 2), "key": jax.random.key(k)}
        return {"m": model, "o": optimizer, "r": nnx.Rngs(k), **numbers}

    lm.save(make(1), tmp_path / "s.npz")
    state, other, given = make(2), make(3), lm.state_dict(make(1), include_rng=True)
    with jax.transfer_guard("disallow"):
        lm.load(state, tmp_path / "s.npz")
        lm.load_state_dict(other, given)
    for loaded in (state, other):
        assert loaded["f"].tolist() == [1, 1] and float(loaded["weak"]) == 0.5
        assert jax.random.key_data(loaded["key"]).tolist() == [0, 1]
