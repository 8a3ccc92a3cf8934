"""Which reader a path gets: by its content, then by its name."""

import gc
import os
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest
from checkpoint_files import assert_same, refusal, values, zipped
from safetensors.numpy import save_file

import lazymods as lm
from lazymods.state.files import folders
from lazymods.state.files.opening import open_checkpoint
from lazymods.state.files.stored import Checkpoint

GOOD = {"x": np.arange(3.0)}


@pytest.mark.parametrize("name", ["m.safetensors", "m.dat", "m", "m.bin", "m.npz", "m.index"])
def test_safetensors_under_any_name(tmp_path: Path, name: str) -> None:
    save_file(GOOD, tmp_path / name)
    assert_same(values(tmp_path / name), GOOD)


@pytest.mark.parametrize("name", ["m.npz", "m.dat", "m", "m.pt", "m.safetensors"])
def test_npz_under_any_name(tmp_path: Path, name: str) -> None:
    with open(tmp_path / name, "wb") as file:
        np.savez(file, x=GOOD["x"])
    assert_same(values(tmp_path / name), GOOD)


@pytest.mark.parametrize("legacy", [False, True])
def test_torch_under_its_names_only(tmp_path: Path, legacy: bool) -> None:
    torch = pytest.importorskip("torch", reason="torch is an extra")
    path = tmp_path / "m.pt"
    torch.save({"x": torch.arange(3.0, dtype=torch.float64)}, path, _use_new_zipfile_serialization=not legacy)
    for name in ("m.pth", "m.bin", "m.ckpt", "m.pth.tar"):
        shutil.copy(path, tmp_path / name)
        assert_same(values(tmp_path / name), GOOD)
    for name in ("m.safetensors", "m.dat", "m", "m.tar", "m.pkl"):
        shutil.copy(path, tmp_path / name)
        refusal(tmp_path / name, "not run", f"path.rename('{Path(name).stem}.pt')")
    shutil.copy(path, tmp_path / "m.npz")
    refusal(tmp_path / "m.npz")


@pytest.mark.parametrize("is_on", [True, False])
def test_the_collector_is_left_as_it_was(tmp_path: Path, is_on: bool) -> None:
    save_file(GOOD, tmp_path / "good")
    (tmp_path / "bad").write_bytes(b"bad")
    was_on = gc.isenabled()
    try:
        (gc.enable if is_on else gc.disable)()
        open_checkpoint(tmp_path / "good")
        assert gc.isenabled() == is_on
        refusal(tmp_path / "bad")
        assert gc.isenabled() == is_on
    finally:
        (gc.enable if was_on else gc.disable)()


def test_links_and_kinds_of_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file(GOOD, tmp_path / "blob")
    (tmp_path / "m.safetensors").symlink_to("blob")
    assert_same(values(tmp_path / "m.safetensors"), GOOD)
    monkeypatch.chdir(tmp_path)
    for path in ("m.safetensors", Path("m.safetensors"), str(tmp_path / "blob")):
        assert list(open_checkpoint(path).tensors) == ["x"]


def test_no_such_path(tmp_path: Path) -> None:
    (tmp_path / "dangling").symlink_to("nowhere")
    for name in ("no.safetensors", "no.pt", "no.index.json", "no", "dangling"):
        with pytest.raises(FileNotFoundError, match=name):
            open_checkpoint(tmp_path / name)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    refusal(tmp_path / "pipe", "neither a file nor a folder")


def test_archives_of_something_else(tmp_path: Path) -> None:
    for name in ("m.dat", "m.safetensors"):
        refusal(zipped(tmp_path / name, {"readme.txt": b"hello"}), "a zip archive", "entries that end with .npy")
    refusal(zipped(tmp_path / "m.npz", {"readme.txt": b"hello"}), "readme.txt")
    with zipfile.ZipFile(tmp_path / "m.zip", "w"):
        pass
    refusal(tmp_path / "m.zip", "a zip archive")


def test_names_that_cannot_be_printed(tmp_path: Path) -> None:
    path = tmp_path / "m\n\udcff\x1b[1m.safetensors"
    path.write_bytes(b"")
    message = refusal(path, named="safetensors")
    assert message.isprintable() or "\x1b" not in message
    message.encode()


def test_a_refusal_is_in_one_line_however_long_what_it_shows(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    header = '{"' + "a\\n" * 10_000 + '": [' + "1," * 10_000 + "1]}"
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode())
    message = refusal(path)
    assert len(message) < 1000
    assert len(message.splitlines()) == 4


@pytest.mark.parametrize("name", ["folder", "folder/m.safetensors"])
def test_an_opened_checkpoint_stays_when_the_program_changes_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkdir("folder")
    save_file(GOOD, "folder/m.safetensors")
    with lm.open(name) as opened:
        monkeypatch.chdir("/")
        assert opened["x"].tolist() == [0, 1, 2]
        state = {"x": np.zeros(3)}
        lm.load(state, opened)
        assert state["x"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("name", ["~/m", "~/m.npz", "~"])
def test_a_path_of_a_shell_is_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/somebody")
    for use in (lambda: lm.save(GOOD, name), lambda: lm.load(dict(GOOD), name)):
        with pytest.raises(lm.CheckpointError, match="begins with ~") as caught:
            use()
        assert caught.value.problems[0].write == f"path = {name.replace('~', '/home/somebody')!r}"
    assert os.listdir(tmp_path) == []
    os.mkdir("~")  # whoever has made it means it
    lm.save(GOOD, "~/m.npz")
    assert os.listdir("~") == ["m.npz"]


def test_a_folder_that_a_save_replaces_is_opened_from_its_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("old", 1.0), ("new", 2.0)):
        os.mkdir(tmp_path / name)
        save_file({"x": np.full(3, value)}, tmp_path / name / "m.safetensors")
    open_safetensors = folders.open_safetensors

    def replaced_first(path: Path) -> Checkpoint:
        if os.path.exists(tmp_path / "new"):
            os.rename(tmp_path / "old", tmp_path / "older")
            os.rename(tmp_path / "new", tmp_path / "old")
            shutil.rmtree(tmp_path / "older")
            raise FileNotFoundError(path)  # as of the parts of a folder that is being removed
        return open_safetensors(path)

    monkeypatch.setattr(folders, "open_safetensors", replaced_first)
    with lm.open(tmp_path / "old") as opened:
        assert opened["x"].tolist() == [2, 2, 2]
