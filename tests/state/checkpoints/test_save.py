"""``save``: whole or not at all, aligned, ties once."""

import json
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from helpers import assert_same_bits, lazy_mlp, plain_mlp
from safetensors.numpy import load_file

import lazymods as lm
from lazymods.state.files import json_text, safetensors


def header(path: Path) -> tuple[dict[str, Any], int]:
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), 8 + length


def params(**values: Any) -> nnx.Dict:
    return nnx.Dict({name: nnx.Param(value) for name, value in values.items()})


# ---------------------------------------------------------------- what is written


def test_every_tensor_whose_size_allows_is_aligned(tmp_path: Path) -> None:
    model = params(odd=jnp.ones(3), even=jnp.ones(16), half=jnp.ones((5, 7), jnp.bfloat16), big=jnp.ones((32, 16)))
    lm.save(model, tmp_path / "m.safetensors")
    entries, start = header(tmp_path / "m.safetensors")
    assert start % 64 == 0
    assert list(entries) == ["odd", "even", "half", "big"]  # in definition order, wherever the bytes are
    for name in ("even", "big"):
        assert (start + entries[name]["data_offsets"][0]) % 64 == 0


@pytest.mark.parametrize(
    "value",
    [
        np.asfortranarray(np.arange(12.0, dtype=np.float32).reshape(3, 4)),
        np.arange(24.0, dtype=np.float32)[::2],
        np.arange(4, dtype=">i4"),
        np.float32(2.5).reshape(()),
        np.zeros((0, 3), np.float32),
    ],
    ids=["fortran", "strided", "big-endian", "scalar", "empty"],
)
@pytest.mark.parametrize("suffix", [".safetensors", ".npz"])
def test_arrays_of_any_layout(tmp_path: Path, value: np.ndarray, suffix: str) -> None:
    model = nnx.Dict(a=nnx.Variable(value))
    path = tmp_path / f"m{suffix}"
    lm.save(model, path)
    read = load_file(path) if suffix == ".safetensors" else np.load(path)
    assert read["a"].shape == value.shape
    assert read["a"].dtype == value.dtype.newbyteorder("=")
    np.testing.assert_array_equal(read["a"], value)


def test_ties_are_written_once_and_no_load_changes_what_the_model_shares(tmp_path: Path) -> None:
    def make(tied: bool) -> Any:
        model = nnx.List([nnx.Linear(4, 4, rngs=nnx.Rngs(i)) for i in range(2)])
        if tied:
            model[1].kernel = model[0].kernel
        return model

    for suffix in (".safetensors", ".npz", ""):
        path = tmp_path / f"tied{suffix}"
        source = make(tied=True)
        lm.save(source, path)
        if suffix == ".safetensors":
            assert header(path)[0]["__metadata__"] == {"1.kernel": "0.kernel"}
            assert set(load_file(path)) == {"0.kernel", "0.bias", "1.bias"}
        model = make(tied=False)
        with pytest.warns(UserWarning, match=r"1\.kernel and 0\.kernel are one parameter in the file and two"):
            lm.load(model, path)
        assert model[1].kernel is not model[0].kernel
        assert_same_bits(model[0].kernel[...], source[0].kernel[...])
        assert_same_bits(model[1].kernel[...], source[0].kernel[...])
        model = make(tied=True)
        lm.load(model, path)
        assert model[1].kernel is model[0].kernel
        assert_same_bits(model[1].kernel[...], source[0].kernel[...])


def test_equal_values_are_not_ties(tmp_path: Path) -> None:
    value = jnp.ones(3)
    lm.save(params(a=value, b=value), tmp_path / "m.safetensors")
    assert set(header(tmp_path / "m.safetensors")[0]) == {"a", "b"}


@pytest.mark.parametrize("suffix", [".safetensors", ".npz", ""])
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.float16, np.int8, np.bool_])
def test_small_dtypes_come_back_bit_for_bit(tmp_path: Path, suffix: str, dtype: Any) -> None:
    bits = np.random.default_rng(0).integers(0, 2, 64).astype(np.uint8)
    value = bits.view(dtype) if np.dtype(dtype).itemsize == 1 else np.arange(-32, 32).astype(dtype)
    lm.save(params(a=jnp.asarray(value)), tmp_path / f"m{suffix}")
    model = params(a=jnp.zeros(value.shape, dtype))
    lm.load(model, tmp_path / f"m{suffix}")
    assert_same_bits(model.a[...], value)


def test_what_the_format_cannot_hold_is_named(tmp_path: Path) -> None:
    with pytest.raises(lm.CheckpointError, match=r"m\.safetensors: a") as caught:
        lm.save(params(a=jnp.zeros(4, jnp.int4)), tmp_path / "m.safetensors")
    assert "i4[4]" in str(caught.value)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("suffix", [".safetensors", ".npz"])
def test_names_of_many_signs_come_back(suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A load refuses JSON of more parts than it has room for names; what stands in a name is no part."""
    monkeypatch.setattr(json_text, "MIN_JSON_PARTS", 10)

    def make(k: int) -> dict[str, Any]:
        held = {f"{i}" + ":[{,ä" * 20: nnx.Param(jnp.full(2, i * k)) for i in range(20)}
        return held | {f"tied {name}": variable for name, variable in held.items()}

    lm.save(make(1), tmp_path / f"s{suffix}")
    lm.load(state := make(0), tmp_path / f"s{suffix}")
    assert [float(variable[0]) for variable in state.values()] == [*range(20)] * 2


def test_a_header_that_no_reader_takes_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors, "MAX_HEADER_BYTES", 1000)
    with pytest.raises(lm.CheckpointError, match=r"m\.safetensors\n  got:    20 arrays, .* take [\d,]+ bytes"):
        lm.save({f"entry{i}": jnp.ones(3) for i in range(20)}, tmp_path / "m.safetensors")
    assert os.listdir(tmp_path) == []


def test_a_suffix_that_nothing_writes(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"\.safetensors or \.npz"):
        lm.save(plain_mlp(), tmp_path / "model.h5")


def test_lazy_models_are_refused_in_full_text(tmp_path: Path) -> None:
    with pytest.raises(lm.UninitializedError) as caught:
        lm.save(nnx.Dict(fc=lm.LazyLinear(2, use_bias=False, rngs=nnx.Rngs(0))), tmp_path / "m.safetensors")
    assert str(caught.value) == (
        "Dict is not ready to be saved\n"
        "fc.kernel (UninitializedParameter)\n"
        "  got:    an uninitialized parameter, UninitializedParameter(shape=(?, 2), dtype=float32)\n"
        "  needed: a value: a file holds values only\n"
        "  write:  lm.materialize(model, jax.ShapeDtypeStruct(x.shape, x.dtype))  # or model(x), first"
    )


# ---------------------------------------------------------------- whole or not at all


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "link.safetensors").symlink_to("blobs/file.safetensors")
    lm.save(plain_mlp(), tmp_path / "link.safetensors")
    assert (tmp_path / "link.safetensors").is_symlink()
    assert (tmp_path / "blobs" / "file.safetensors").is_file()


def test_the_format_is_that_of_the_name_that_was_given(tmp_path: Path) -> None:
    """As in the cache of the Hugging Face hub, whose links lead to files named by their hashes."""
    (tmp_path / "blob").write_text("the old one")
    (tmp_path / "link.safetensors").symlink_to("blob")
    (tmp_path / "latest").symlink_to("step.npz")
    for name in ("link.safetensors", "latest"):
        lm.save({"a": jnp.ones(3)}, tmp_path / name)
        assert (tmp_path / name).is_symlink()
    assert load_file(tmp_path / "blob")["a"].tolist() == np.load(tmp_path / "step.npz")["a"].tolist() == [1, 1, 1]


def test_permissions_are_those_of_a_new_file(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("")
    lm.save(plain_mlp(), tmp_path / "m.safetensors")
    assert (tmp_path / "m.safetensors").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_saving_does_not_write_into_what_was_loaded(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    source = plain_mlp()
    lm.save(source, path)
    model = lazy_mlp()
    lm.load(model, path)
    before = {n: np.array(v) for n, v in lm.state_dict(model).items()}
    jax.tree.map(lambda v: v + 1, nnx.state(source))
    source.fc1.kernel[...] = source.fc1.kernel[...] + 1
    lm.save(source, path)
    for name, value in lm.state_dict(model).items():
        assert_same_bits(value, before[name])
