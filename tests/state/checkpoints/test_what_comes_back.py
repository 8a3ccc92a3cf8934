"""What users put into a state comes back with its value, type, sharing and structure, or is refused by its name."""

import types
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx
from flax.core import FrozenDict
from flax.training.train_state import TrainState

import lazymods as lm
from lazymods._errors import short_dtype

FORMATS = (".safetensors", ".npz", "")
each_format = pytest.mark.parametrize("suffix", FORMATS)


class Scaled(nnx.Module):
    """A model whose output has the dtype of its input: its parameter is of weak type."""

    def __init__(self, scale: float) -> None:
        self.scale = nnx.Param(jnp.full(3, scale))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x * self.scale


@each_format
def test_a_weak_type_comes_back_into_a_strong_place(suffix: str, tmp_path: Path) -> None:
    """A schedule makes a weak number of what was strong at first; of another dtype it is cast, and strong."""
    run = {"lr": jnp.where(jnp.bool_(True), 0.1, 0.2), "low": jnp.asarray(0.5), "x": jnp.ones(2, jnp.bfloat16)}
    lm.save(run, tmp_path / f"s{suffix}")
    fresh = {"lr": jnp.float32(0.3), "low": jnp.bfloat16(0), "x": jnp.zeros(2, jnp.bfloat16)}
    lm.load(fresh, tmp_path / f"s{suffix}")
    assert [fresh[name].weak_type for name in fresh] == [True, False, False]
    assert fresh["low"].dtype == jnp.bfloat16
    stepped, wanted = fresh["x"] * fresh["lr"], run["x"] * run["lr"]
    assert stepped.dtype == wanted.dtype == jnp.bfloat16
    np.testing.assert_array_equal(stepped, wanted)


@each_format
def test_a_weak_type_comes_back(suffix: str, tmp_path: Path) -> None:
    saved, loaded, x = Scaled(0.3), Scaled(7.0), jnp.arange(3, dtype=jnp.bfloat16)
    lm.save(saved, tmp_path / f"s{suffix}")
    lm.load(loaded, tmp_path / f"s{suffix}")
    assert loaded(x).dtype == jnp.bfloat16
    np.testing.assert_array_equal(loaded(x), x * jnp.full(3, 0.3))


@each_format
def test_a_type_that_is_weak_no_more_comes_back(suffix: str, tmp_path: Path) -> None:
    saved, loaded = Scaled(0.3), Scaled(7.0)
    saved.scale.set_value(jnp.ones(3))  # as an update of an optimizer leaves it
    lm.save(saved, tmp_path / f"s{suffix}")
    lm.load(loaded, tmp_path / f"s{suffix}")
    assert loaded.scale[...].tolist() == [1, 1, 1] and not loaded.scale[...].weak_type


@each_format
def test_weak_numbers_of_a_state_and_ties_come_back(suffix: str, tmp_path: Path) -> None:
    def make(k: int) -> dict[str, Any]:
        scaled = Scaled(k)
        return {"i": jnp.full((), k), "c": jnp.array(1j * k), "f": jnp.array(k / 2), "a": scaled, "b": scaled}

    lm.save(make(3), tmp_path / f"s{suffix}")
    state = make(0)
    lm.load(state, tmp_path / f"s{suffix}")
    assert [(float(abs(state[n])), state[n].weak_type) for n in "icf"] == [(3, True), (3, True), (1.5, True)]
    assert state["b"].scale[...].weak_type and state["b"].scale[...].tolist() == [3, 3, 3]


def test_a_weak_entry_stays_weak_only_in_a_weak_place() -> None:
    weak, strong = Scaled(1.0), Scaled(1.0)
    strong.scale.set_value(jnp.ones(3))
    for model in (weak, strong):
        lm.load_state_dict(model, {"scale": jnp.full(3, 2.0)})
    assert weak.scale[...].weak_type and not strong.scale[...].weak_type
    lm.load_state_dict(weak, {"scale": np.ones(3, np.float32)})  # numpy has no weak types
    assert not weak.scale[...].weak_type


class Numbers(nnx.Module):
    """Parameters as users write them: of weak type, and of numpy's 64 bits."""

    def __init__(self, n: int) -> None:
        self.scale = nnx.Param(jnp.full((n,), 1e-5))
        self.table = nnx.Param(np.linspace(0, 1, n))
        self.index = nnx.BatchStat(np.arange(n))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x * self.scale + self.table.astype(x.dtype) + self.index.astype(x.dtype)


@each_format
def test_a_lazy_layer_gets_the_types_that_a_call_gives_it(suffix: str, tmp_path: Path) -> None:
    made = lm.lazy(Numbers, infer=lambda config, x: {"n": x.shape[-1]})
    called, loaded, given, x = made(), made(), made(), jnp.ones((2, 8), jnp.bfloat16)[0]
    lm.save(Numbers(8), tmp_path / f"s{suffix}")
    lm.load(loaded, tmp_path / f"s{suffix}")
    lm.load_state_dict(given, lm.state_dict(Numbers(8)))
    report = lm.materialize(called, x)
    assert report.output.dtype == called(x).dtype == jnp.bfloat16
    for model in (loaded, given):
        for name in ("scale", "table", "index"):
            got, want = getattr(model, name)[...], getattr(called, name)[...]
            assert (got.dtype, got.weak_type) == (want.dtype, want.weak_type)
            np.testing.assert_array_equal(got, want)
        assert model(x).dtype == jnp.bfloat16


NAMES = ("lr.min", "lr", "lr.min.x", "value", "x.value", "a/b", "a b", "ä", "7", "impl", "json", "x.impl")


@each_format
@pytest.mark.parametrize("names", [NAMES, NAMES[::-1]], ids=["as listed", "backwards"])
def test_any_name_comes_back(names: tuple[str, ...], suffix: str, tmp_path: Path) -> None:
    def make(k: int) -> dict[str, Any]:
        return {name: jnp.arange(2.0) + len(name) * k for name in names} | {"deep": {"value": jnp.ones(1) * k}}

    lm.save(make(1), tmp_path / f"s{suffix}")
    state = make(0)
    lm.load(state, tmp_path / f"s{suffix}")
    jax.tree.map(np.testing.assert_array_equal, state, make(1))


@pytest.mark.parametrize(
    ("suffix", "name"),
    [
        *[("", name) for name in ("", ".", "..", "a..b", ".a", "a.", "a\0b", "\ud800", "__aliases__", "n" * 70_000)],
        *[("", name) for name in ("/a", "a/", "a//b", "a\\", "a/./b")],
        *[(".npz", name) for name in ("a\0b", "\ud800", "__dtypes__", "__weak_types__", "n" * 70_000)],
        *[(".safetensors", name) for name in ("\ud800", "__metadata__")],
    ],
)
def test_a_name_that_a_format_has_not_is_refused(suffix: str, name: str, tmp_path: Path) -> None:
    path = tmp_path / f"s{suffix}"
    with pytest.raises(lm.CheckpointError, match="a name"):
        lm.save({"good": jnp.ones(2), name: jnp.ones(3)}, path)
    assert not path.exists()


# Older releases of ml_dtypes lack one-bit integers.
STRANGE = ("uint4", "uint2", "int1", "float8_e4m3", "float6_e2m3fn")
STRANGE_TO_ORBAX = [name for name in STRANGE if hasattr(ml_dtypes, name)]


@pytest.mark.parametrize("dtype", STRANGE_TO_ORBAX)
def test_a_dtype_that_orbax_has_not_is_refused_by_name(dtype: str, tmp_path: Path) -> None:
    state = {"good": jnp.ones(3), "quantized": np.ones(3, getattr(ml_dtypes, dtype))}
    with pytest.raises(lm.CheckpointError, match=r"quantized\n.*\n.*dtype that tensorstore has"):
        lm.save(state, tmp_path / "s")
    assert not (tmp_path / "s").exists()


# ---------------------------------------------------------------- sharing


@each_format
def test_a_load_fills_arrays_of_numpy_where_they_are(suffix: str, tmp_path: Path) -> None:
    def make(k: int) -> tuple[dict[str, Any], np.ndarray]:
        base = np.arange(6.0) + k
        return {"a": base, "b": base, "part": base[2:4], "in": (base, [base])}, base

    lm.save(make(0)[0], tmp_path / f"s{suffix}")
    state, base = make(9)
    lm.load(state, tmp_path / f"s{suffix}")
    assert state["a"] is base and state["b"] is base and state["in"][0] is base and state["in"][1][0] is base
    assert base.tolist() == [0, 1, 2, 3, 4, 5] and state["part"].tolist() == [2, 3]
    base[2] = 7
    assert state["part"][0] == 7


def test_arrays_that_are_one_take_no_two_values() -> None:
    array = np.zeros(2)
    state = {"a": array, "b": array}
    with pytest.raises(lm.StateDictError, match="another value than a"):
        lm.load_state_dict(state, {"a": np.ones(2), "b": np.full(2, 2.0)})
    assert array.tolist() == [0, 0]


def test_arrays_that_nobody_may_write_are_replaced(tmp_path: Path) -> None:
    mapped = np.memmap(tmp_path / "mine", np.float32, "w+", shape=(2,))
    fixed = np.zeros(2, np.float32)
    fixed.flags.writeable = False
    state = {"mapped": mapped, "view": np.asarray(mapped), "fixed": fixed}
    lm.load_state_dict(state, {name: np.ones(2, np.float32) for name in state})
    assert all(value.tolist() == [1, 1] for value in state.values())
    mapped.flush()
    assert np.fromfile(tmp_path / "mine", np.float32).tolist() == [0, 0] and fixed.tolist() == [0, 0]


@each_format
def test_arrays_of_numpy_with_memory_in_common(suffix: str, tmp_path: Path) -> None:
    """Whichever is filled last would win: both come back, or nothing is loaded."""
    path = tmp_path / f"m{suffix}"

    def overlapping() -> dict[str, np.ndarray]:
        whole = np.zeros((3, 2))
        return {"whole": whole, "part": whole[1:]}

    saved = overlapping()
    saved["whole"][...] = np.arange(6.0).reshape(3, 2)
    lm.save(saved, path)
    state = overlapping()
    lm.load(state, path)
    np.testing.assert_array_equal(state["whole"], [[0, 1], [2, 3], [4, 5]])
    assert np.shares_memory(state["whole"], state["part"])
    apart = np.zeros((2, 4))
    columns = {"whole": apart[:, ::2].T, "part": apart[:, 1::2]}  # beside each other, and no number in common
    lm.save({"whole": np.ones((2, 2)), "part": np.full((2, 2), 2.0)}, path)
    lm.load(columns, path)
    np.testing.assert_array_equal(apart, [[1, 2, 1, 2]] * 2)
    lm.save({"whole": np.ones((3, 2)), "part": np.full((2, 2), 2.0)}, path)
    state = overlapping() | {"other": jnp.zeros(2)}
    with pytest.raises(lm.StateDictError, match=r"whole \(ndarray\)[\s\S]*shares its memory") as caught:
        lm.load(state, path, strict=False)
    assert len(caught.value.problems) == 1
    assert not state["whole"].any()
    lm.save({"x": np.arange(3.0)}, path)
    spread = {"x": np.lib.stride_tricks.as_strided(np.zeros(1), (3,), (0,))}  # one number in three places
    with pytest.raises(lm.StateDictError, match="with itself, where the values differ"):
        lm.load(spread, path)
    assert not spread["x"].any()
    lm.save({"x": np.full(3, 5.0)}, path)
    lm.load(spread, path)
    assert spread["x"].tolist() == [5, 5, 5]


@pytest.mark.parametrize("kind", ["U1", "S1", "M8[D]", "m8[s]", "V8", "O", [("a", "f8")]], ids=str)
def test_numbers_go_into_arrays_of_numbers_only(kind: Any, tmp_path: Path) -> None:
    """numpy would make texts, dates and records of them."""
    lm.save({"x": np.array([12.5, -3.0])}, tmp_path / "m.npz")
    state = {"x": np.zeros(2, kind)}
    before = state["x"].tobytes()
    with pytest.raises(lm.StateDictError, match="needed: an array of numbers, as it is there"):
        lm.load(state, tmp_path / "m.npz")
    assert state["x"].tobytes() == before
    with pytest.raises(lm.StateDictError, match="an array of numbers"):  # and the other way round
        lm.load_state_dict({"x": np.zeros(2)}, state)


@pytest.mark.parametrize("lazy", [False, True], ids=["ready", "lazy"])
def test_a_failed_load_leaves_arrays_of_numpy_as_they_were(lazy: bool) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("no")

    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    made: Any = lm.LazyOptimizer if lazy else nnx.Optimizer
    state = {"array": np.zeros(2), "model": model, "optimizer": made(model, optax.sgd(0.1), wrt=nnx.Param)}
    given = lm.state_dict({**state, "array": np.ones(2)})
    if lazy:
        given = {**given, "optimizer.step": jnp.uint32(0)}
    lm.register_load_state_dict_post_hook(model, fails)
    with pytest.raises(RuntimeError):
        lm.load_state_dict(state, given)
    assert state["array"].tolist() == [0, 0]


# ---------------------------------------------------------------- structure


def test_a_frozen_dict_keeps_its_structure(tmp_path: Path) -> None:
    def make(k: int) -> dict[str, Any]:
        return {"p": FrozenDict({"b": {"w": jnp.ones(2) * k, "n": k}, "a": jnp.ones(1) * k})}

    lm.save(make(1), tmp_path / "s.npz")
    state = make(5)
    lm.load(state, tmp_path / "s.npz")
    assert jax.tree.structure(state) == jax.tree.structure(make(1))
    jax.tree.map(np.testing.assert_array_equal, state, make(1))


def test_a_mapping_that_nobody_can_change_is_replaced(tmp_path: Path) -> None:
    def make(k: int) -> dict[str, Any]:
        return {"conf": types.MappingProxyType({"a": k, "b": np.ones(2) * k})}

    lm.save(make(1), tmp_path / "s.npz")
    state = make(2)
    lm.load(state, tmp_path / "s.npz")
    assert type(state["conf"]) is types.MappingProxyType and state["conf"]["a"] == 1
    assert state["conf"]["b"].tolist() == [1, 1]


def test_a_state_that_holds_itself(tmp_path: Path) -> None:
    def make(k: int) -> dict[str, Any]:
        state: dict[str, Any] = {"w": jnp.ones(2) * k, "l": []}
        state["me"] = state
        state["l"].append(state)
        return state

    lm.save(make(1), tmp_path / "s.npz")
    state = make(2)
    lm.load(state, tmp_path / "s.npz")
    assert state["me"] is state and state["l"][0] is state and state["w"].tolist() == [1, 1]


NO_MODELS: dict[str, Any] = {
    "variable": lambda: nnx.Param(jnp.ones(2)),
    "array": lambda: jnp.ones(2),
    "number": lambda: 3,
    "class": lambda: nnx.Linear,
    "tuple": lambda: (jnp.ones(2),),
    "optax state": lambda: optax.adam(0.1).init(jnp.ones(2)),
    "train state": lambda: TrainState.create(apply_fn=print, params={"w": jnp.ones(2)}, tx=optax.sgd(0.1)),
    "none": lambda: None,
}


@pytest.mark.parametrize("make", NO_MODELS.values(), ids=NO_MODELS)
def test_what_has_no_entries_is_refused_before_anything_is_written(make: Any, tmp_path: Path) -> None:
    path = tmp_path / "s.npz"
    with pytest.raises(TypeError, match=r"an nnx module, or a dict|the class Linear"):
        lm.save(make(), path)
    assert not path.exists()
    lm.save({"a": jnp.ones(2)}, path)
    with pytest.raises(TypeError, match=r"an nnx module, or a dict|the class Linear"):
        lm.load(make(), path)
    with pytest.raises(TypeError, match=r"an nnx module, or a dict|the class Linear"):
        lm.state_dict(make())
    with pytest.raises(TypeError, match=r"an nnx module, or a dict|the class Linear"):
        lm.load_state_dict(make(), {})


# ---------------------------------------------------------------- casts


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float8_e4m3fn, jnp.float8_e5m2])
def test_a_finite_number_never_becomes_infinite(dtype: Any) -> None:
    state = {"a": jnp.ones(3, dtype)}
    for big in (np.float32(3.4e38), np.float32(-3.4e38)):
        with pytest.raises(lm.StateDictError, match=f"of a size that {short_dtype(dtype)} has"):
            lm.load_state_dict(state, {"a": np.array([1, big, 2])})
        with pytest.raises(lm.StateDictError, match=f"of a size that {short_dtype(dtype)} has"):
            lm.load_state_dict(state, {"a": np.array([np.nan, big, np.inf])})
    assert state["a"].tolist() == [1, 1, 1]


def test_what_is_infinite_stays_so_and_what_fits_is_rounded() -> None:
    state = {"a": jnp.ones(4, jnp.float16), "c": jnp.ones(1, jnp.complex64), "i": jnp.ones(1, jnp.bfloat16)}
    given = {"a": np.array([np.inf, -np.inf, np.nan, 65504.0]), "c": np.array([1e30 + 1j]), "i": np.array([2**31])}
    lm.load_state_dict(state, given)
    np.testing.assert_array_equal(state["a"], np.array([np.inf, -np.inf, np.nan, 65504.0]))
    assert complex(state["c"][0]) == complex(np.complex64(1e30 + 1j)) and float(state["i"][0]) == 2.0**31
    with pytest.raises(lm.StateDictError, match="a size that c64 has"):
        lm.load_state_dict(state, {**given, "c": np.array([1e300j])})
