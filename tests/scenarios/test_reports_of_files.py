"""Field reports of safetensors and PyTorch files."""

import json
import os
import pickle
import struct
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from helpers import assert_same_bits, lazy_mlp, plain_mlp
from safetensors.numpy import load_file, save_file

import lazymods as lm
from lazymods.state.files import safetensors


def lazy() -> Any:
    return lm.LazyLinear(4, rngs=nnx.Rngs(0))


def tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "kernel": rng.standard_normal((3, 4)).astype(np.float32),
        "bias": rng.standard_normal(4).astype(np.float32),
    }


def packed(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def refused(path: Path, *words: str) -> None:
    """The file is refused by name, and the layer takes a good one afterwards."""
    layer = lazy()
    with pytest.raises(lm.CheckpointError) as caught:
        lm.load(layer, path)
    for word in (path.name, *words):
        assert word in str(caught.value), word
    assert lm.uninitialized_paths(layer) == ["kernel", "bias"]
    lm.load_state_dict(layer, tensors())
    assert_same_bits(layer.kernel[...], tensors()["kernel"])


# ---------------------------------------------------------------- dtypes


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2])
def test_small_floats_need_no_torch(tmp_path: Path, dtype: Any) -> None:
    bits = np.arange(256, dtype=np.uint8).view(dtype)
    names = {"bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"}
    header = {"a": entry(names[np.dtype(dtype).name], [bits.size], 0, 256)}
    (tmp_path / "m.safetensors").write_bytes(packed(header, bits.tobytes()))
    model = nnx.Dict(a=nnx.Param(jnp.zeros(bits.size, dtype)))
    lm.load(model, tmp_path / "m.safetensors")
    assert np.asarray(model.a[...]).tobytes() == bits.tobytes()


@pytest.mark.parametrize("dtype", ["F4", "F6_E2M3", "F6_E3M2", "I4"])
def test_packed_types_are_refused_by_name(tmp_path: Path, dtype: str) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(packed({"kernel": entry(dtype, [3, 4], 0, 6), "bias": entry("F32", [4], 6, 22)}, b"\0" * 22))
    refused(path, dtype, "kernel")


@pytest.mark.parametrize("suffix", [".safetensors", ".npz"])
def test_views_are_copied(tmp_path: Path, suffix: str) -> None:
    value = np.arange(12.0, dtype=np.float32).reshape(4, 3).T
    lm.save(nnx.Dict(a=nnx.Variable(value)), tmp_path / f"m{suffix}")
    with np.load(tmp_path / "m.npz") if suffix == ".npz" else _Closing(load_file(tmp_path / "m.safetensors")) as read:
        np.testing.assert_array_equal(read["a"], value)


class _Closing(dict[str, Any]):
    def __enter__(self) -> dict[str, Any]:
        return self

    def __exit__(self, *args: object) -> None:
        pass


@pytest.mark.parametrize("suffix", [".safetensors", ".npz"])
def test_keys_are_left_out_and_what_no_format_holds_is_named(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"m{suffix}"
    lm.save(nnx.Dict(drop=nnx.Dropout(0.5, rngs=nnx.Rngs(0)), a=nnx.Param(jnp.ones(2))), path)
    assert set(load_file(path) if suffix == ".safetensors" else np.load(path)) == {"a"}
    if suffix == ".safetensors":
        with pytest.raises(lm.CheckpointError, match=r"m\.safetensors: a\n  got:    i4\[2\]"):
            lm.save(nnx.Dict(a=nnx.Param(jnp.ones(2, jnp.int4))), path)


# ---------------------------------------------------------------- headers


@pytest.mark.parametrize(
    "content, word",
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n", "Git LFS pointer"),
        (b"<!DOCTYPE html><html>404</html>", "HTML"),
        (b"\n <html>", "HTML"),
        (b'<?xml version="1.0"?><Error/>', "XML"),
        (b"", "0 bytes"),
        (pickle.dumps({"kernel": 1}), "pickle"),
        (b"GGUF" + b"\0" * 60, "GGUF"),
        (b"\x93NUMPY\x01\x00" + b" " * 60, "npy"),
    ],
)
def test_what_is_no_checkpoint_is_recognized(tmp_path: Path, content: bytes, word: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    refused(path, word)


@pytest.mark.parametrize("keep", [0.1, 0.5, 0.99])
def test_a_cut_download_tells_both_sizes(tmp_path: Path, keep: float) -> None:
    save_file(tensors(), tmp_path / "whole.safetensors")
    raw = (tmp_path / "whole.safetensors").read_bytes()
    cut = raw[: int(len(raw) * keep)]
    (tmp_path / "cut.safetensors").write_bytes(cut)
    refused(tmp_path / "cut.safetensors", "bytes")


def test_the_limit_of_the_header_can_be_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file(tensors(), tmp_path / "m.safetensors")
    monkeypatch.setattr(safetensors, "MAX_HEADER_BYTES", 64)
    refused(tmp_path / "m.safetensors", "64 bytes")
    monkeypatch.setattr(safetensors, "MAX_HEADER_BYTES", 1000)
    lm.load(lazy(), tmp_path / "m.safetensors")


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 2**31])
def test_a_length_is_compared_with_the_file_first(tmp_path: Path, length: int) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(struct.pack("<Q", length) + b"{}" * 40)
    refused(path, f"{length:,}")


def test_an_unknown_dtype_hides_nothing(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(packed({"kernel": entry("Q4", [3, 4], 10**6, 10**6 + 6)}, b"\0" * 6))
    refused(path, "Q4", "kernel")


@pytest.mark.parametrize(
    "spans",
    [
        [(0, 48), (40, 56)],
        [(0, 48), (56, 72)],
        [(0, 48), (48, 64), "tail"],
        [(8, 56), (56, 72)],
        [(0, 48), (10**9, 10**9 + 16)],
    ],
    ids=["overlap", "hole", "tail", "hole at the start", "out of range"],
)
def test_offsets_that_do_not_tile_the_file(tmp_path: Path, spans: list[Any]) -> None:
    (a, b), (c, d), *tail = spans
    header = {"kernel": entry("F32", [3, 4], a, b), "bias": entry("F32", [4], c, d)}
    path = tmp_path / "m.safetensors"
    path.write_bytes(packed(header, b"\0" * (min(max(b, d), 80) + 4 * len(tail))))
    refused(path)


# ---------------------------------------------------------------- folders, pickles


@pytest.mark.parametrize("name", ["../x.safetensors", "/x.safetensors", "a/x.safetensors", "..\\x.safetensors", "C:x"])
def test_an_index_stays_in_its_folder(tmp_path: Path, name: str) -> None:
    save_file(tensors(), tmp_path / "x.safetensors")
    (tmp_path / "model").mkdir()
    index = tmp_path / "model" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(tensors(), name)}))
    refused(index, "kernel")


class Opens:
    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> Any:
        return open, (self.path, "w")


@pytest.mark.parametrize("suffix", [".pt", ".bin", ".safetensors", ".npz", ".dat"])
@pytest.mark.parametrize("zipped", [True, False])
def test_no_code_of_a_file_runs(tmp_path: Path, suffix: str, zipped: bool) -> None:
    marker, path = tmp_path / "marker", tmp_path / f"m{suffix}"
    raw = pickle.dumps({"kernel": Opens(marker)}, protocol=2)
    if zipped:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("m/data.pkl", raw)
            archive.writestr("m/version", "3\n")
    else:
        path.write_bytes(raw)
    with pytest.raises((lm.CheckpointError, ImportError)):  # torch is an extra
        lm.load(lazy(), path)
    assert not marker.exists()


def test_the_tar_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "old.pt"
    with tarfile.open(path, "w") as tar:
        for name in ("storages", "tensors", "pickle"):
            tar.addfile(tarfile.TarInfo(name))
    refused(path, "tar")


@pytest.mark.parametrize("name", ["m.pt", "m.npz"])
def test_a_cut_archive_is_incomplete(tmp_path: Path, name: str) -> None:
    arrays: dict[str, Any] = dict(tensors())
    np.savez(tmp_path / "whole.npz", **arrays)
    raw = (tmp_path / "whole.npz").read_bytes()
    (tmp_path / name).write_bytes(raw[: len(raw) // 2])
    refused(tmp_path / name, "truncated")


# ---------------------------------------------------------------- loading


def test_the_bytes_are_read_once_on_the_host(tmp_path: Path) -> None:
    """Mapped, or copied once: the peak beside the mapped file is measured in tests/benchmarks/load.py."""
    lm.save(plain_mlp(), tmp_path / "m.safetensors")
    model = lazy_mlp()
    lm.load(model, tmp_path / "m.safetensors")
    for name, value in load_file(tmp_path / "m.safetensors").items():
        assert_same_bits(lm.state_dict(model)[name], value)


def test_other_shapes_are_a_choice_of_their_own(tmp_path: Path) -> None:
    save_file(tensors() | {"bias": np.ones(5, np.float32)}, tmp_path / "m.safetensors")
    with pytest.raises(lm.StateDictError):
        lm.load(lazy(), tmp_path / "m.safetensors", strict=False)
    layer = lazy()
    assert lm.load(layer, tmp_path / "m.safetensors", mismatched="skip") == ([], [], ["bias"])
    assert_same_bits(layer.kernel[...], tensors()["kernel"])


def test_a_failed_load_leaves_the_whole_model(tmp_path: Path) -> None:
    entries = {n: np.array(v) for n, v in lm.state_dict(plain_mlp()).items()}
    entries["fc2.bias"] = np.ones(9, np.float32)
    save_file(entries, tmp_path / "m.safetensors")
    model = lazy_mlp()
    with pytest.raises(lm.StateDictError, match=r"fc2\.bias"):
        lm.load(model, tmp_path / "m.safetensors")
    assert lm.uninitialized_paths(model) == ["fc1.kernel", "fc1.bias", "fc2.kernel", "fc2.bias"]
    assert os.listdir(tmp_path) == ["m.safetensors"]
