"""Random keys that a class keeps in a Variable, or as they are: a lazy layer loads them as a ready one does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import lazymods as lm
from lazymods._graph import dotted


class Noise(nnx.Module):
    """Keeps keys of its own beside a layer."""

    def __init__(self, n: int, seed: int = 3, impl: str = "threefry2x32", *, rngs: nnx.Rngs) -> None:
        self.fc = nnx.Linear(n, 2, rngs=rngs)
        self.noise_key = nnx.Variable(jax.random.key(seed, impl=impl))
        self.keys = nnx.Variable(jax.random.split(jax.random.key(seed), 3))
        self.each = nnx.Variable(jax.random.split(jax.random.key(seed), n))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.fc(x) + jax.random.normal(self.noise_key[...], (2,))[None]


class Raw(nnx.Module):
    """Keeps a key without a Variable: random state, which a load may lack."""

    def __init__(self, n: int, seed: int = 3, *, rngs: nnx.Rngs) -> None:
        self.fc = nnx.Linear(n, 2, rngs=rngs)
        self.key = nnx.data(jax.random.key(seed))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.fc(x)


class Decides(nnx.Module):
    """Has as many layers as features, and a key."""

    def __init__(self, n: int, *, rngs: nnx.Rngs) -> None:
        self.heads = nnx.List([nnx.Linear(n, 2, rngs=rngs) for _ in range(n)])
        self.noise_key = nnx.Variable(jax.random.key(n))

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.stack([head(x) for head in self.heads])


def n(config: Any, x: Any) -> dict[str, int]:
    return {"n": x.shape[-1]}


LazyNoise, LazyRaw, LazyDecides = (lm.lazy(cls, infer=n) for cls in (Noise, Raw, Decides))


def data_of(model: Any) -> dict[str, Any]:
    """The model's values by path, keys as their data."""
    found = {}
    for path, leaf in nnx.to_flat_state(nnx.state(model)):
        value = leaf.get_raw_value() if isinstance(leaf, nnx.Variable) else leaf
        is_key = jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
        found[path] = np.asarray(jax.random.key_data(value) if is_key else value)
    return found


def assert_equal(model: Any, want: Any) -> None:
    assert nnx.graphdef(model) == nnx.graphdef(want)
    got, wanted = data_of(model), data_of(want)
    assert got.keys() == wanted.keys()
    for path, value in wanted.items():
        np.testing.assert_array_equal(got[path], value, err_msg=str(path))


@pytest.mark.parametrize("way", ["state dict", "keys", "file", "npz", "orbax"])
@pytest.mark.parametrize(
    ("lazy", "cls", "given"),
    [
        (LazyNoise, Noise, {}),
        (LazyNoise, Noise, {"impl": "rbg"}),
        (LazyDecides, Decides, {}),
    ],
)
def test_a_load_writes_them(lazy: Any, cls: Any, given: dict[str, Any], way: str, tmp_path: Path) -> None:
    other: dict[str, Any] = {"seed": 7} if cls is Noise else {}
    want, model = cls(4, **given, **other, rngs=nnx.Rngs(0)), lazy(**given, rngs=nnx.Rngs(1))
    if way == "state dict":
        lm.load_state_dict(model, lm.state_dict(want))
    elif way == "keys":
        keys = {k: getattr(want, k)[...] for k in ("noise_key", "keys", "each") if hasattr(want, k)}
        lm.load_state_dict(model, {k: v for k, v in lm.state_dict(want).items() if ".impl" not in k} | keys)
    else:
        path = tmp_path / {"file": "m.safetensors", "npz": "m.npz", "orbax": "m"}[way]
        lm.save(want, path)
        lm.load(model, path)
    assert not lm.is_lazy(model)
    assert_equal(model, want)


def test_a_lazy_state_dict_goes_into_a_lazy_layer() -> None:
    model = LazyNoise(rngs=nnx.Rngs(0))
    lm.load_state_dict(model, lm.state_dict(LazyNoise(rngs=nnx.Rngs(1))))
    assert lm.is_lazy(model)
    model(jnp.ones((2, 4)))
    assert_equal(model, Noise(4, rngs=nnx.Rngs(0)))


def test_a_raw_key_may_be_missing_and_is_loaded_if_it_is_there() -> None:
    want = Raw(4, seed=7, rngs=nnx.Rngs(0))
    model = LazyRaw(rngs=nnx.Rngs(1))
    lm.load_state_dict(model, lm.state_dict(want))
    lm.load_state_dict(ready := Raw(4, rngs=nnx.Rngs(1)), lm.state_dict(want))
    assert_equal(model, ready)
    model = LazyRaw(rngs=nnx.Rngs(1))
    lm.load_state_dict(model, lm.state_dict(want, include_rng=True))
    assert_equal(model, want)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("noise_key", np.zeros(3, np.uint32), r"needed: shape \(2,\)"),
        ("keys", np.zeros((4, 2), np.uint32), r"needed: shape \(3, 2\)"),
        ("each", np.zeros((4, 3), np.uint32), r"needed: shape \(\?, 2\)"),
        ("each", np.zeros((5, 2), np.uint32), "axis 0 of each is 5, but other entries make it 4"),
        ("noise_key", np.zeros(2, np.float32), "needed: the data of a threefry2x32 key, uint32"),
        ("noise_key", jax.random.key(0, impl="rbg"), "of a rbg key"),
        ("noise_key.impl", np.frombuffer(b"rbg", np.uint8), "of a rbg key"),
    ],
)
def test_other_keys_are_refused_and_nothing_is_loaded(name: str, value: Any, message: str) -> None:
    model = LazyNoise(rngs=nnx.Rngs(1))
    entries = lm.state_dict(Noise(4, rngs=nnx.Rngs(0)))
    with pytest.raises(lm.StateDictError, match=message):
        lm.load_state_dict(model, entries | {name: value})
    assert lm.is_lazy(model)
    model(jnp.ones((2, 4)))
    assert_equal(model, Noise(4, rngs=nnx.Rngs(1)))


def test_a_layer_without_a_key_gets_its_own() -> None:
    want, model = Noise(4, rngs=nnx.Rngs(0)), LazyNoise(rngs=nnx.Rngs(1))
    entries = {k: v for k, v in lm.state_dict(want).items() if "key" not in k}
    lm.load_state_dict(model, entries, strict=False)
    with pytest.raises(lm.StateDictError, match="noise_key"):
        lm.load_state_dict(LazyNoise(rngs=nnx.Rngs(1)), entries)
    model(jnp.ones((2, 4)))
    assert_equal(model, want)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
@pytest.mark.parametrize("lazy", [False, True])
def test_variables_of_keys_are_entries_as_their_keys_are(lazy: bool, impl: str) -> None:
    """``nnx.state`` of another model is a mapping of Variables."""

    def make(seed: int, lazy: bool = False) -> Any:
        given = {"seed": seed, "impl": impl, "rngs": nnx.Rngs(seed)}
        return LazyNoise(**given) if lazy else Noise(3, **given)

    model = make(9, lazy)
    lm.load(model, nnx.state(make(5)))
    assert_equal(model, make(5))
    model = make(9, lazy)
    lm.load_state_dict(model, {dotted(path): variable for path, variable in nnx.to_flat_state(nnx.state(make(6)))})
    assert_equal(model, make(6))
