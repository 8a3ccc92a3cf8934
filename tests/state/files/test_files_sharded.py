"""Hugging Face folders: an index names files of its folder and nothing else; which file a folder is opened by."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_files import assert_same, refusal, values
from safetensors.numpy import save_file

import lazymods as lm
from lazymods.state.files import sharded
from lazymods.state.files.opening import open_checkpoint

GOOD = {
    "a.kernel": np.arange(12, dtype=np.float32).reshape(3, 4),
    "a.bias": np.arange(4, dtype=np.float32),
    "b": np.arange(3, dtype=np.int64),
}
INDEX = "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def write(folder: Path, text: Any = None, **weight_map: Any) -> Path:
    """Two shards, and an index that says so, or this text, or an edited map."""
    folder.mkdir(exist_ok=True)
    names = list(GOOD)
    save_file({name: GOOD[name] for name in names[:2]}, folder / SHARDS[0])
    save_file({names[2]: GOOD[names[2]]}, folder / SHARDS[1])
    found = {names[0]: SHARDS[0], names[1]: SHARDS[0], names[2]: SHARDS[1]} | weight_map
    index = folder / INDEX
    index.write_text(text if text is not None else json.dumps({"metadata": {"total_size": 88}, "weight_map": found}))
    return index


def test_index_and_folder(tmp_path: Path) -> None:
    index = write(tmp_path / "m")
    assert_same(values(index), GOOD)
    assert_same(values(index.parent), GOOD)
    assert open_checkpoint(index).format == "sharded safetensors"


def test_links_are_followed(tmp_path: Path) -> None:
    """The hub's cache keeps the files under blobs/, and a folder of links to them."""
    snapshot = tmp_path / "snapshots" / "0123"
    snapshot.parent.mkdir()
    index = write(snapshot)
    (tmp_path / "blobs").mkdir()
    for number, file in enumerate(sorted(snapshot.iterdir())):
        file.rename(tmp_path / "blobs" / str(number))
        file.symlink_to(f"../../blobs/{number}")
    assert_same(values(index), GOOD)
    assert_same(values(snapshot), GOOD)


def test_a_tensor_comes_from_the_shard_that_the_index_names(tmp_path: Path) -> None:
    index = write(tmp_path / "m")
    save_file({"b": GOOD["b"], "a.bias": GOOD["a.bias"] + 1}, index.parent / SHARDS[1])
    assert_same(values(index), GOOD)


def test_tensors_that_the_index_does_not_name_are_left_out(tmp_path: Path) -> None:
    index = write(tmp_path / "m")
    save_file({"b": GOOD["b"], "more": GOOD["b"]}, index.parent / SHARDS[1])
    assert_same(values(index), GOOD)


def test_every_shard_is_opened_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = write(tmp_path / "m")
    opened = []
    reader = sharded.open_safetensors
    monkeypatch.setitem(sharded._READERS, ".safetensors", lambda path: opened.append(path.name) or reader(path))
    values(index)
    assert opened == list(SHARDS)


def test_aliases_of_shards(tmp_path: Path) -> None:
    index = write(tmp_path / "m")
    save_file({"b": GOOD["b"]}, index.parent / SHARDS[1], metadata={"tied": "b", "format": "pt"})
    assert open_checkpoint(index).aliases == {"tied": "b"}
    index = write(tmp_path / "m", tied=SHARDS[1])
    save_file({"b": GOOD["b"]}, index.parent / SHARDS[1], metadata={"tied": "b"})
    np.testing.assert_array_equal(values(index)["tied"], GOOD["b"])


OUTSIDE = [
    "../x.safetensors",
    "a/x.safetensors",
    "..\\x.safetensors",
    "/x.safetensors",
    "C:x.safetensors",
    "..",
    ".",
    "",
]
OUTSIDE += ["c:\\x.safetensors", "x\0.safetensors", "x" * 300 + ".safetensors"]


@pytest.mark.parametrize("name", [*OUTSIDE, None, 3, ["x.safetensors"], {}], ids=lambda v: repr(v)[:20])
def test_names_that_are_no_plain_file_names(tmp_path: Path, name: Any) -> None:
    save_file({"b": GOOD["b"]}, tmp_path / "x.safetensors")
    index = write(tmp_path / "m", b=name)
    refusal(index, f"{INDEX}: b\n", "without any path")
    refusal(index.parent, f"{INDEX}: b\n", named=INDEX)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '{"metadata": {}}',
        '{"weight_map": []}',
        '{"weight_map": "model.safetensors"}',
        '{"weight_map": {}, "weight_map": {}}',
        '{"weight_map": {"b": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}',
        '{"weight_map": {"\\ud800": "x.safetensors"}}',
        '{"weight_map": {"b": NaN}}',
        "[" * 100_000,
        "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 4\n",
        "<html></html>",
        "\ufeff{}",
    ],
)
def test_texts_that_are_no_index(tmp_path: Path, text: str) -> None:
    refusal(write(tmp_path / "m", text))


def test_an_index_of_nothing(tmp_path: Path) -> None:
    assert values(write(tmp_path / "m", '{"weight_map": {}}')) == {}


def test_a_shard_that_is_missing(tmp_path: Path) -> None:
    index = write(tmp_path / "m")
    (index.parent / SHARDS[1]).unlink()
    assert refusal(index) == (
        f"{INDEX}\n"
        f"  got:    no file {SHARDS[1]} beside it\n"
        "  needed: every file that the index names\n"
        f"  write:  lm.load(model, '{index}')  # a sound copy of the file"
    )


def test_a_tensor_that_is_missing(tmp_path: Path) -> None:
    refusal(write(tmp_path / "m", more=SHARDS[1]), f"{INDEX}: more\n", f"no such tensor in {SHARDS[1]}")


def test_a_shard_that_is_damaged(tmp_path: Path) -> None:
    index = write(tmp_path / "m")
    file = index.parent / SHARDS[1]
    file.write_bytes(file.read_bytes()[:-1])
    refusal(index, named=SHARDS[1])


def test_a_shard_of_an_unknown_kind(tmp_path: Path) -> None:
    refusal(write(tmp_path / "m", b="model.h5"), "the file model.h5", ".safetensors, .bin")


# ---------------------------------------------------------------- folders


def one(path: Path, shift: int = 0) -> dict[str, np.ndarray]:
    save_file({"x": np.arange(3.0) + shift}, path)
    return {"x": np.arange(3.0) + shift}


def test_model_safetensors_comes_before_others(tmp_path: Path) -> None:
    want = one(tmp_path / "model.safetensors")
    one(tmp_path / "adapter_model.safetensors", 1)
    (tmp_path / "config.json").write_text("{}")
    assert_same(values(tmp_path), want)


def whole_file(path: Path, shift: int) -> dict[str, np.ndarray]:
    """Write a file of the kind that its name tells."""
    if path.suffix == ".safetensors":
        return one(path, shift)
    torch = pytest.importorskip("torch", reason="torch is an extra")
    torch.save({"x": torch.arange(3.0, dtype=torch.float64) + shift}, path)
    return {"x": np.arange(3.0) + shift}


@pytest.mark.parametrize(
    ("name", "variant", "index"),
    [
        ("model.safetensors", None, "model.safetensors.index.json"),
        ("pytorch_model.bin", None, "pytorch_model.bin.index.json"),
        ("diffusion_pytorch_model.safetensors", None, "diffusion_pytorch_model.safetensors.index.json"),
        ("model.fp16.safetensors", "fp16", "model.safetensors.index.fp16.json"),
    ],
)
def test_a_whole_file_comes_before_an_index(tmp_path: Path, name: str, variant: str | None, index: str) -> None:
    """As transformers takes it: also a stale index is left alone, and read if it is named, or alone."""
    shard = f"old-{name}"
    whole, sharded = whole_file(tmp_path / name, 0), whole_file(tmp_path / shard, 1)
    (tmp_path / index).write_text(json.dumps({"weight_map": {"x": shard}}))
    with lm.open(tmp_path, variant=variant) as opened:
        assert_same(dict(opened), whole)
    (tmp_path / name).unlink()
    with lm.open(tmp_path, variant=variant) as opened:
        assert_same(dict(opened), sharded)


def test_variants(tmp_path: Path) -> None:
    half, full = one(tmp_path / "model.fp16.safetensors", 1), one(tmp_path / "model.fp32.safetensors", 2)
    for variant, want in (("fp16", half), ("fp32", full)):
        with lm.open(tmp_path, variant=variant) as opened:
            assert_same(dict(opened), want)
    refusal(tmp_path, "files of the variants fp16, fp32 only", "variant='fp16'")
    with pytest.raises(lm.CheckpointError, match=r"no files of the variant 'fp8', but of fp16, fp32"):
        lm.open(tmp_path, variant="fp8")
    with pytest.raises(lm.CheckpointError, match=r"a file, and variant='fp16'"):
        lm.open(tmp_path / "model.fp16.safetensors", variant="fp16")
    plain = one(tmp_path / "model.safetensors")
    assert_same(values(tmp_path), plain)


def test_all_shards_without_their_index(tmp_path: Path) -> None:
    for number, name in enumerate("abc", 1):
        save_file({name: np.full(2, number)}, tmp_path / f"model-{number:05}-of-00003.safetensors")
    assert_same(values(tmp_path), {name: np.full(2, number) for number, name in enumerate("abc", 1)})
    save_file({"a": np.zeros(2)}, tmp_path / "model-00003-of-00003.safetensors")
    refusal(tmp_path, "model-00001-of-00003.safetensors and in model-00003-of-00003.safetensors", named="a")
    (tmp_path / "model-00003-of-00003.safetensors").unlink()
    refusal(tmp_path, "2 of 3 shards, without model-00003-of-00003.safetensors", "all shards: no index says")
    (tmp_path / "model-00001-of-00003.safetensors").unlink()
    refusal(tmp_path, "1 of 3 shards, without model-00001-of-00003.safetensors, model-00003-of-00003.safetensors")
    (tmp_path / "model-00002-of-00003.safetensors").rename(tmp_path / "model-00002-of-00001.safetensors")
    refusal(tmp_path, "1 of 1 shards, without model-00001-of-00001.safetensors")


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
@pytest.mark.parametrize("pattern", ["{}.fp16-{:05}-of-00002{}", "{}-{:05}-of-00002.fp16{}"])
@pytest.mark.parametrize("with_plain", [False, True])
def test_shards_of_a_variant_without_their_index(tmp_path: Path, pattern: str, suffix: str, with_plain: bool) -> None:
    """As transformers and diffusers name them; those of another variant, or of none, are other files."""
    stem = "model" if suffix == ".safetensors" else "pytorch_model"

    def write_one(file: str, arrays: dict[str, np.ndarray]) -> None:
        if suffix == ".safetensors":
            save_file(arrays, tmp_path / file)
            return
        torch = pytest.importorskip("torch", reason="torch is an extra")
        torch.save({name: torch.from_numpy(value) for name, value in arrays.items()}, tmp_path / file)

    for number, name in enumerate("ab", 1):
        write_one(pattern.format(stem, number, suffix), {name: np.full(2, number)})
        if with_plain:
            write_one(f"{stem}-{number:05}-of-00002{suffix}", {name: np.full(2, -number)})
    with lm.open(tmp_path, variant="fp16") as opened:
        assert_same(dict(opened), {"a": np.full(2, 1), "b": np.full(2, 2)})
    if with_plain:
        assert_same(values(tmp_path), {"a": np.full(2, -1), "b": np.full(2, -2)})
    missing = pattern.format(stem, 2, suffix)
    (tmp_path / missing).unlink()
    with pytest.raises(lm.CheckpointError, match=f"1 of 2 shards, without {missing}"):
        lm.open(tmp_path, variant="fp16")


def test_the_only_safetensors_file(tmp_path: Path) -> None:
    want = one(tmp_path / "weights.safetensors")
    assert_same(values(tmp_path), want)


def test_several_candidates(tmp_path: Path) -> None:
    one(tmp_path / "a.safetensors")
    one(tmp_path / "b.safetensors")
    refusal(tmp_path, "a.safetensors, b.safetensors", "which of them is meant is not known")
    for name in ("a", "b"):
        (tmp_path / f"{name}.safetensors.index.json").write_text('{"weight_map": {}}')
    refusal(tmp_path, "a.safetensors.index.json, b.safetensors.index.json")


def test_a_folder_without_a_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "empty"
    folder.mkdir()
    refusal(folder, "a folder without a checkpoint, which holds nothing")
    (folder / "config.json").write_text("{}")
    refusal(folder, "which holds config.json")


def test_torch_folders(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="torch is an extra")
    tensors = {name: torch.from_numpy(value) for name, value in GOOD.items()}
    single, several = tmp_path / "single", tmp_path / "several"
    single.mkdir()
    torch.save(tensors, single / "pytorch_model.bin")
    torch.save({}, single / "optimizer.bin")
    assert_same(values(single), GOOD)
    several.mkdir()
    weight_map = {}
    for number, name in enumerate(GOOD):
        weight_map[name] = f"pytorch_model-{number}.bin"
        torch.save({name: tensors[name]}, several / weight_map[name])
    (several / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert_same(values(several), GOOD)
    assert_same(values(several / "pytorch_model.bin.index.json"), GOOD)
    one(several / "model.safetensors")  # what runs no pickle comes first
    assert list(values(several)) == ["x"]
