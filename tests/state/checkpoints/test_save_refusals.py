"""What a save refuses by name, and what it does while another one is faster."""

import collections
import enum
import os
import shutil
from fractions import Fraction
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

import lazymods as lm
from lazymods.state.files import orbax

each_format = pytest.mark.parametrize("suffix", [".safetensors", ".npz", ""])


def _donate(array: Any) -> None:
    jax.jit(lambda x: x, donate_argnums=0)(array)
    array.delete()


@each_format
def test_donated_arrays_are_refused_by_names(suffix: str, tmp_path: Path) -> None:
    model: Any = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    key = jax.random.key(0)
    for array in (model.kernel.get_value(), model.bias.get_value(), key):
        _donate(array)
    with pytest.raises(lm.CheckpointError) as told:
        lm.save({"model": model, "deep": [key], "good": jnp.ones(2)}, tmp_path / f"s{suffix}")
    text = str(told.value)
    assert all(f"s{suffix}: {name}\n" in text for name in ("model.kernel", "model.bias", "deep.0"))
    assert "good" not in text and "deleted or donated" in text and not list(tmp_path.iterdir())


def test_a_donated_key_is_refused_by_its_name() -> None:
    key = jax.random.key(0)
    key.delete()
    with pytest.raises(lm.StateDictError, match=r"r\.key\n.*deleted or donated"):
        lm.state_dict({"r": {"key": key}}, include_rng=True)


@each_format
def test_traced_values_are_refused_by_names(suffix: str, tmp_path: Path) -> None:
    def save(x: jax.Array) -> None:
        lm.save({"good": np.ones(2), "traced": x}, tmp_path / f"s{suffix}")

    with pytest.raises(lm.CheckpointError, match=rf"s{suffix}: traced\n.*f32\[3\], a traced value"):
        jax.jit(save)(jnp.ones(3))
    assert not list(tmp_path.iterdir())


def test_a_donated_model_can_be_loaded_into(tmp_path: Path) -> None:
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    kernel = np.array(model.kernel[...])
    lm.save(model, tmp_path / "s.npz")
    _donate(model.kernel.get_value())
    lm.load(model, tmp_path / "s.npz")
    np.testing.assert_array_equal(model.kernel[...], kernel)


@pytest.mark.parametrize("state", [{}, {"list": []}, {"best": None}, nnx.Dropout(0.5, rngs=nnx.Rngs(0))], ids=repr)
def test_an_orbax_folder_without_entries_is_refused_with_the_reason(state: Any, tmp_path: Path) -> None:
    with pytest.raises(lm.CheckpointError, match=r"s\n.*nothing: .*\n.*Orbax stores no folder without one"):
        lm.save(state, tmp_path / "s")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("vanishes", [False, True], ids=["half removed", "not there"])
def test_a_save_looks_again_at_what_another_one_replaces(
    vanishes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, other, looks = tmp_path / "s", tmp_path / "other", []
    lm.save({"a": np.ones(2)}, path)
    lm.save({"a": np.zeros(2)}, other)
    ordinary = orbax.refuse_to_replace

    def looks_late(folder: Path) -> str | None:
        looks.append(folder)
        if len(looks) > 1:
            return ordinary(folder)
        shutil.rmtree(folder)
        os.rename(other, folder)
        if vanishes:
            raise FileNotFoundError(folder)
        return "an Orbax folder that does not open"

    monkeypatch.setattr(orbax, "refuse_to_replace", looks_late)
    lm.save({"a": np.full(2, 7.0)}, path)
    state = {"a": np.zeros(2)}
    lm.load(state, path)
    assert state["a"].tolist() == [7, 7] and len(looks) > 1


@pytest.mark.parametrize(
    ("suffix", "held"),
    [
        (".safetensors", {"c": np.ones(2, ml_dtypes.uint4), "__metadata__": np.ones(2)}),
        (".npz", {"__dtypes__": np.ones(2), "n" * 70_000: np.ones(1)}),
        ("", {"c": np.ones(2, ml_dtypes.uint4), "a..b": np.ones(2), "empty": np.ones(0)}),
    ],
)
def test_all_that_is_wrong_is_told_at_once(suffix: str, held: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(lm.CheckpointError) as told:
        lm.save({"good": 1, "call": print, **held}, tmp_path / f"s{suffix}")
    assert len(told.value.problems) == 1 + len(held) and not list(tmp_path.iterdir())


@each_format
@pytest.mark.parametrize("name", ["\udc80", "__weak_types__"], ids=["half a pair", "a note"])
def test_a_second_name_of_a_tie_that_a_file_cannot_note(name: str, suffix: str, tmp_path: Path) -> None:
    """Names of ties stand in the notes of a file, where a load would not find these."""
    variable = nnx.Param(jnp.ones(3))
    if (suffix, name) != (".safetensors", "__weak_types__"):
        with pytest.raises(lm.CheckpointError, match="a name"):
            lm.save({"a": variable, name: variable}, tmp_path / f"s{suffix}")
        assert not list(tmp_path.iterdir())
        return
    lm.save({"a": variable, name: variable, "weak": jnp.full(2, 0.5)}, tmp_path / "s.safetensors")
    other = nnx.Param(jnp.zeros(3))
    assert not any(lm.load({"a": other, name: other, "weak": jnp.zeros(2)}, tmp_path / "s.safetensors"))
    assert other[...].tolist() == [1, 1, 1]


def test_all_names_that_meet_are_told_at_once() -> None:
    with pytest.raises(lm.StateDictError) as told:
        lm.state_dict({"a.b": 1, "a": {"b": 2}, "c.d": 3, "c": {"d": 4}})
    assert [problem.where for problem in told.value.problems] == ["a.b", "c.d"]


# ---------------------------------------------------------------- paths


@pytest.mark.parametrize("url", ["gs://bucket/run/m", "s3://bucket/m.npz", "file:///tmp/m.safetensors", Path("gs://b/m")])
def test_urls_are_refused(url: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They would be folders beside the program, and lost with the machine."""
    monkeypatch.chdir(tmp_path)
    layer = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    with pytest.raises(lm.CheckpointError, match="got:    a URL"):
        lm.save(layer, url)
    with pytest.raises(lm.CheckpointError, match="got:    a URL"):
        lm.load(layer, url)
    assert not list(tmp_path.iterdir())


def test_a_url_in_full() -> None:
    with pytest.raises(lm.CheckpointError) as told:
        lm.save(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), "gs://bucket/m")
    assert str(told.value) == (
        "gs://bucket/m\n"
        "  got:    a URL\n"
        "  needed: a path of this machine: a checkpoint of another place has to be copied, or mounted\n"
        "  write:  lm.load(model, 'model.safetensors')  # a copy on this machine (gsutil, aws s3, ...)"
    )


def test_a_folder_with_a_colon_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run:").mkdir()
    layer = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    for path in ("run:/m.npz", "step:3.npz", "a/b:/c.npz", str(tmp_path / "run:" / "n.npz"), b"bytes.npz"):
        Path(os.fsdecode(path)).parent.mkdir(exist_ok=True, parents=True)
        lm.save(layer, path)  # type: ignore[arg-type]
        lm.load(layer, path)  # type: ignore[arg-type]


@each_format
def test_names_that_no_file_has(suffix: str, tmp_path: Path) -> None:
    layer = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    with pytest.raises(lm.SaveError, match="File name too long"):
        lm.save(layer, tmp_path / f"{'a' * 300}{suffix}")
    with pytest.raises(FileNotFoundError, match="no checkpoint at"):
        lm.load(layer, tmp_path / f"{'a' * 300}{suffix}")
    for use in (lm.save, lm.load):
        with pytest.raises(lm.CheckpointError, match="a path with a zero byte"):
            use(layer, f"{tmp_path}/a\0b{suffix}")
    odd = tmp_path / f"a\udcff{suffix}"  # as os.listdir gives a name that is no UTF-8
    if suffix:
        lm.save(layer, odd)
        lm.load(layer, odd)
        return
    with pytest.raises(lm.CheckpointError, match="a path that is no UTF-8"):
        lm.save(layer, odd)
    assert not list(tmp_path.iterdir())
    lm.save(layer, tmp_path / "m")
    (tmp_path / "m").rename(odd)
    with pytest.raises(lm.CheckpointError, match="a path that is no UTF-8"):
        lm.load(layer, odd)


def test_a_path_without_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a variable that is not set: the working directory is not meant, whatever is in it."""
    monkeypatch.chdir(tmp_path)
    layer = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    lm.save(layer, "m.safetensors")
    for use in (lm.save, lm.load):
        for path in ("", b""):
            with pytest.raises(lm.CheckpointError, match=r"''\n  got:    an empty path\n"):
                use(layer, path)  # type: ignore[operator]
    assert [p.name for p in tmp_path.iterdir()] == ["m.safetensors"]
    lm.load(layer, ".")


def test_the_working_directory_has_a_name_in_a_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(lm.CheckpointError, match=r"^\.\n  got:    a folder without a checkpoint, which holds nothing"):
        lm.load(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), ".")


class Whole(int):
    """A number of a type of one's own."""


OF_OTHER_TYPES = {
    "subclass": (Whole(4), "4, of type Whole"),
    "masked": (np.ma.masked_array([1, 2], [False, True]), r"i64\[2\], of type MaskedArray"),
    "matrix": (np.arange(2).view(np.matrix), r"i64\[1,2\], of type matrix"),
    "set": ({1}, "set"),
}


@pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
@pytest.mark.parametrize("value, got", OF_OTHER_TYPES.values(), ids=OF_OTHER_TYPES)
def test_the_type_is_told_where_it_is_the_reason(value: Any, got: str, tmp_path: Path) -> None:
    with pytest.raises(lm.CheckpointError, match=rf"got:    {got}\n  needed: an array, a random key, a number or "):
        lm.save({"v": value}, tmp_path / "s.npz")


# ---------------------------------------------------------------- lines to write


class Colour(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    LOW = 4


WITH_A_LINE: dict[str, tuple[Any, Any]] = {
    "enumeration": (Colour.RED, "red"),
    "number of one's own": (Whole(4), 4),
    "whole numbers by name": (Level.LOW, 4),
    "path": (Path("a/b"), "a/b"),
    "fraction": (Fraction(1, 3), "1/3"),
    "set": ({2, 1}, [1, 2]),
    "queue": (collections.deque([1, 2], maxlen=2), [1, 2]),
    "range": (range(2), [0, 1]),
    "bytes": (bytearray(b"ab"), [97, 98]),
    "moments": (np.array(["1970-01-03"], "M8[D]"), [2]),
    "texts": (np.array(["a", "b"]), ["a", "b"]),
    "records": (np.array([(1, 2.0)], [("a", "i4"), ("b", "f8")]), [(1, 2.0)]),
    "long double": (np.longdouble(1.5), 1.5),
}


@pytest.mark.parametrize(("value", "wanted"), WITH_A_LINE.values(), ids=WITH_A_LINE)
def test_the_line_to_write_for_a_value_works(value: Any, wanted: Any, tmp_path: Path) -> None:
    state = {"v": value}
    with pytest.raises(lm.CheckpointError) as told:
        lm.save(state, tmp_path / "s.npz")
    exec(told.value.problems[0].write, {"state": state, "name": "v", "np": np})
    got = state["v"].tolist() if isinstance(state["v"], (np.ndarray, np.generic)) else state["v"]
    assert got == wanted
    lm.save(state, tmp_path / "s.npz")


def test_the_line_for_a_mask_keeps_it(tmp_path: Path) -> None:
    state = {"v": np.ma.masked_array([1, 2], [False, True])}
    with pytest.raises(lm.CheckpointError) as told:
        lm.save(state, tmp_path / "s.npz")
    exec(told.value.problems[0].write, {"state": state, "name": "v", "np": np})
    lm.save(state, tmp_path / "s.npz")
    assert np.load(tmp_path / "s.npz")["v.mask"].tolist() == [False, True]


@pytest.mark.parametrize("value", [1 + 2j, np.ones(2, ml_dtypes.int4), np.ones(2, np.complex128)])
def test_what_safetensors_lacks_is_saved_by_the_line(value: Any, tmp_path: Path) -> None:
    """Floats in its place would be other numbers, or of another type."""
    state = {"v": value}
    with pytest.raises(lm.CheckpointError) as told:
        lm.save(state, tmp_path / "s.safetensors")
    exec(told.value.problems[0].write, {"model": state, "lm": lm})
    fresh = {"v": type(value)(0) if isinstance(value, complex) else np.zeros_like(value)}
    lm.load(fresh, tmp_path / "s.npz")
    assert np.array_equal(fresh["v"], value) and type(fresh["v"]) is type(value)


def test_names_that_end_in_a_number_stay_apart(tmp_path: Path) -> None:
    """One of two would take the other's place."""
    lines = []
    for name in ("run_0.1", "run_0.2"):
        with pytest.raises(ValueError, match="without a suffix") as told:
            lm.save({"v": 1}, tmp_path / name)
        lines.append(told.value.problems[0].write)  # type: ignore[attr-defined]
    assert lines == [f"lm.save(model, {str(tmp_path / f'run_0.{i}.safetensors')!r})" for i in (1, 2)]
