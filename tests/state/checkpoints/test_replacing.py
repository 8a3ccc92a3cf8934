"""What a save may replace, how it does it, and what is left of one that failed or was killed."""

import errno
import fcntl
import os
import resource
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import lazymods as lm
from lazymods.state import orbax_saving
from lazymods.state.files import replacing

sys.path.insert(0, str(Path(__file__).parents[2] / "fuzz"))
from kill_saves import kill_saves  # type: ignore[import-not-found]

SUFFIXES = [".safetensors", ".npz", ""]


def model(value: float, size: int = 4) -> nnx.Dict:
    noise = np.random.default_rng(int(value)).standard_normal(size, np.float32)  # which does not compress
    return nnx.Dict(a=nnx.Param(jnp.asarray(noise)), b=nnx.Param(jnp.full(3, value)))


def value_at(path: Path, size: int = 4) -> float:
    loaded = model(0.0, size)
    lm.load(loaded, path)
    values = set(np.asarray(loaded.b[...]).tolist())
    assert len(values) == 1
    np.testing.assert_array_equal(loaded.a[...], model(min(values), size).a[...])
    return values.pop()


def everything_in(folder: Path) -> dict[str, Any]:
    return {
        str(p.relative_to(folder)): (p.lstat().st_mode, p.lstat().st_ino, p.read_bytes() if p.is_file() else None)
        for p in folder.rglob("*")
    }


# ---------------------------------------------------------------- what is not replaced


def plain_folder(path: Path) -> None:
    path.mkdir()
    (path / "thesis.txt").write_text("precious")


def empty_folder(path: Path) -> None:
    path.mkdir()


def folder_of_hugging_face(path: Path) -> None:
    path.mkdir()
    lm.save(model(1.0), path / "model.safetensors")
    (path / "tokenizer.json").write_text("{}")


def checkpoint_with_notes(path: Path) -> None:
    lm.save(model(1.0), path.with_name("made"))
    path.with_name("made").rename(path)
    (path / "d" / "notes.txt").write_text("precious")


def checkpoint_with_a_link(path: Path) -> None:
    lm.save(model(1.0), path.with_name("made"))
    path.with_name("made").rename(path)
    (path / "latest").symlink_to("d")


def damaged_checkpoint(path: Path) -> None:
    lm.save(model(1.0), path.with_name("made"))
    path.with_name("made").rename(path)
    (path / "_METADATA").write_text("{")


def pipe(path: Path) -> None:
    os.mkfifo(path)


def dangling_loop(path: Path) -> None:
    path.symlink_to(path.name)


THINGS = [
    plain_folder,
    empty_folder,
    folder_of_hugging_face,
    checkpoint_with_notes,
    checkpoint_with_a_link,
    damaged_checkpoint,
    pipe,
    dangling_loop,
]


def test_an_empty_folder_may_be_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As tempfile.mkdtemp makes one; it keeps its mode."""
    path = tmp_path / "made"
    path.mkdir(mode=0o700)
    lm.save(model(1.0), path)
    assert value_at(path) == 1.0
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert os.listdir(tmp_path) == ["made"]
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(lm.CheckpointError, match="the working directory"):
        lm.save(model(1.0), ".")


def test_what_comes_into_an_empty_folder_meanwhile_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "made"
    path.mkdir()

    def written_meanwhile(old: Path, new: Path) -> None:
        (path / "thesis.txt").write_text("precious")

    monkeypatch.setattr(replacing, "_copy_permissions", written_meanwhile)
    with pytest.raises(lm.CheckpointError, match="no Orbax checkpoint"):
        lm.save(model(1.0), path)
    assert everything_in(tmp_path).keys() == {"made", "made/thesis.txt"}
    assert (path / "thesis.txt").read_text() == "precious"


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("make", THINGS, ids=lambda f: f.__name__)
def test_what_is_there_is_not_harmed(tmp_path: Path, make: Any, suffix: str) -> None:
    path = tmp_path / f"there{suffix}"
    if not suffix and make is empty_folder:
        pytest.skip("an empty folder may be filled by a folder")
    if suffix and make in (checkpoint_with_notes, checkpoint_with_a_link, damaged_checkpoint):
        make(tmp_path / "there")
        (tmp_path / "there").rename(path)
    else:
        make(path)
    before = everything_in(tmp_path)
    with pytest.raises(lm.CheckpointError, match="nothing else is ever replaced"):
        lm.save(model(2.0), path)
    assert everything_in(tmp_path) == before


def test_a_project_is_not_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "main.py").write_text("x")
    monkeypatch.chdir(tmp_path)
    for path in (".", "..", "/", "/dev/null"):
        with pytest.raises(lm.CheckpointError, match="nothing else is ever replaced"):
            lm.save(model(2.0), path)
    assert os.listdir(tmp_path) == ["main.py"]
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


def test_the_refusal_in_full_text(tmp_path: Path) -> None:
    checkpoint_with_notes(tmp_path / "there")
    with pytest.raises(lm.CheckpointError) as caught:
        lm.save(model(2.0), tmp_path / "there")
    assert str(caught.value) == (
        f"{tmp_path}/there\n"
        "  got:    a checkpoint's folder with something else in it, d/notes.txt\n"
        "  needed: a new path, a checkpoint that load would open, or a regular file: nothing else is ever replaced\n"
        "  write:  lm.save(model, 'model.safetensors')  # or here, once what is there has been moved away by hand"
    )


# ---------------------------------------------------------------- what is replaced


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_file_is_replaced(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"m{suffix}"
    path.write_text("")
    lm.save(model(1.0), path)
    lm.save(model(2.0), path)
    assert value_at(path) == 2.0
    assert os.listdir(tmp_path) == [path.name]


@pytest.mark.parametrize("options", [{}, {"use_ocdbt": False}, {"use_ocdbt": False, "use_zarr3": True}], ids=str)
def test_what_orbax_itself_wrote_is_replaced(tmp_path: Path, options: dict[str, Any]) -> None:
    import orbax.checkpoint as ocp

    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options)) as checkpointer:
        checkpointer.save(tmp_path / "m", {"x": {"y": jnp.ones((2, 3)), "0": jnp.ones(())}, "step": 3})
    lm.save(model(2.0), tmp_path / "m")
    assert value_at(tmp_path / "m") == 2.0
    assert os.listdir(tmp_path) == ["m"]


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("mode", [0o600, 0o640, 0o664])
def test_modes_are_kept(tmp_path: Path, suffix: str, mode: int) -> None:
    path = tmp_path / f"m{suffix}"
    mode = mode if suffix else mode | (mode & 0o444) >> 2
    lm.save(model(1.0), path)
    path.chmod(mode)
    lm.save(model(2.0), path)
    assert stat.S_IMODE(path.stat().st_mode) == mode
    assert value_at(path) == 2.0


# ---------------------------------------------------------------- failures


# Orbax 0.12 under Python 3.13 leaves a coroutine behind in the event loop that it closes after a failed write
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_file_that_may_not_grow_leaves_the_old_one(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"m{suffix}"
    lm.save(model(1.0), path)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limit[1]))
    try:
        with pytest.raises(lm.CheckpointError, match="File too large") as caught:
            lm.save(model(2.0, 100_000), path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert isinstance(caught.value, OSError)
    assert value_at(path) == 1.0
    assert os.listdir(tmp_path) == [path.name]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 200 kB."""
    path = tmp_path / "disk"
    path.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", path], capture_output=True).returncode:
        pytest.skip("only a superuser may mount a file system")
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", path], check=True)  # loaded arrays may still be mapped


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # see above
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_full_disk_leaves_the_old_one(disk: Path, suffix: str) -> None:
    path = disk / f"m{suffix}"
    lm.save(model(1.0), path)
    with pytest.raises(lm.SaveError, match="No space left on device") as caught:
        lm.save(model(2.0, 100_000), path)
    assert caught.value.errno == errno.ENOSPC
    assert value_at(path) == 1.0
    assert os.listdir(disk) == [path.name]
    lm.save(model(3.0), path)
    assert value_at(path) == 3.0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # see above
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_folder_that_is_read_only(disk: Path, suffix: str) -> None:
    path = disk / f"m{suffix}"
    lm.save(model(1.0), path)
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    for target in (path, disk / f"other{suffix}"):
        with pytest.raises(lm.SaveError, match="Read-only file system") as caught:
            lm.save(model(2.0), target)
        assert caught.value.errno == errno.EROFS
    assert value_at(path) == 1.0
    assert os.listdir(disk) == [path.name]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_folder_that_is_none(tmp_path: Path, suffix: str) -> None:
    (tmp_path / "file").write_text("precious")
    with pytest.raises(lm.CheckpointError) as caught:
        lm.save(model(1.0), tmp_path / "file" / f"m{suffix}")
    assert isinstance(caught.value, OSError)
    assert (tmp_path / "file").read_text() == "precious"


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_threads_that_save_to_one_path(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"m{suffix}"
    failed: list[BaseException] = []

    def save(value: float) -> None:
        try:
            for _ in range(3):
                lm.save(model(value), path)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=save, args=(float(i),)) for i in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert value_at(path) in {1.0, 2.0, 3.0, 4.0}
    assert os.listdir(tmp_path) == [path.name]


# ---------------------------------------------------------------- kills


@pytest.mark.slow
@pytest.mark.parametrize("kind", [".safetensors", ".npz", " state"])
def test_a_killed_save_leaves_the_old_or_the_new(tmp_path: Path, kind: str) -> None:
    assert kill_saves(tmp_path, kind, kills=8, seed=0) > 0


def test_leftovers_go_and_what_is_being_written_stays(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    dead, alive, others = (tmp_path / f".m.safetensors.{c * 16}.lazymods" for c in "abc")
    foreign = tmp_path / ".m.safetensors.notes.lazymods"
    for file in (dead, alive, foreign, others.with_name(".n.safetensors.cccccccccccccccc.lazymods")):
        file.write_text("x")
    with open(alive, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        lm.save(model(1.0), path)
        left = {p.name for p in tmp_path.iterdir()}
        assert left == {path.name, alive.name, foreign.name, ".n.safetensors.cccccccccccccccc.lazymods"}
    lm.save(model(2.0), path)
    assert not alive.exists()


def test_without_an_exchange_readers_and_the_next_save_find_the_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replacing, "exchange", lambda one, other: False)
    path = tmp_path / "m"
    lm.save(model(1.0), path)
    lm.save(model(2.0), path)  # by two renames
    assert value_at(path) == 2.0
    assert os.listdir(tmp_path) == ["m"]
    room = tmp_path / ".m.0123456789abcdef.lazymods"  # as after a kill between the two
    room.mkdir()
    (room / "lock").write_text("")
    path.rename(room / "old")
    assert value_at(path) == 2.0
    with pytest.raises(lm.CheckpointError):
        lm.save(nnx.Dict(a=nnx.Param(jnp.zeros((0, 3)))), path)
    assert value_at(path) == 2.0
    replacing.sweep(path)
    assert os.listdir(tmp_path) == ["m"]
    assert value_at(path) == 2.0


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_folder_that_this_user_may_write_to_and_not_list(
    tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save is not failed by what comes after it is in its place."""

    def refusing(ordinary: Any) -> Any:
        def call(path: Any, *args: Any, **kwargs: Any) -> Any:
            if not isinstance(path, int) and Path(os.fsdecode(path)) == tmp_path:
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
            return ordinary(path, *args, **kwargs)

        return call

    for name in ("open", "scandir"):
        monkeypatch.setattr(os, name, refusing(getattr(os, name)))
    for value in (1.0, 2.0):
        lm.save(model(value), tmp_path / f"m{suffix}")
        assert value_at(tmp_path / f"m{suffix}") == value


def test_all_saves_are_waited_for_after_one_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As at the end of the program, which must not end before the others are there."""

    def fail(work: Any) -> None:
        raise OSError(errno.EIO, "no")

    monkeypatch.setattr(orbax_saving._Work, "put_in_place", fail)
    saves = [lm.save(model(1.0), tmp_path / f"m{i}", wait=False) for i in range(3)]
    with pytest.raises(lm.SaveError):
        orbax_saving._wait_for_all()
    assert all(save is not None and save.done for save in saves) and not orbax_saving._UNFINISHED


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # see above
@pytest.mark.parametrize("limit", [0, 60, 150])
def test_a_folder_whose_descriptions_find_no_room(limit: int, tmp_path: Path) -> None:
    """Orbax raises again when it is closed: the next save waited for ever, and the rooms stayed."""
    lm.save(model(1.0), tmp_path / "m")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        with pytest.raises(lm.SaveError, match="File too large"):
            lm.save(model(2.0), tmp_path / "m")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        is_held = orbax_saving._WRITING.locked()
        if is_held:
            orbax_saving._WRITING.release()
    assert not is_held and value_at(tmp_path / "m") == 1.0
    lm.save(model(3.0), tmp_path / "m")
    assert value_at(tmp_path / "m") == 3.0 and os.listdir(tmp_path) == ["m"]


def test_what_is_written_into_a_room_after_its_end_goes(tmp_path: Path) -> None:
    room, others = tmp_path / f".m.{'a' * 16}.lazymods", tmp_path / f".m.{'b' * 16}.lazymods"
    for folder, name in ((room, "new.orbax-checkpoint-tmp"), (others, "notes")):
        (folder / name / "d").mkdir(parents=True)
        (folder / name / "d" / "file").write_text("x")
    lm.save(model(1.0), tmp_path / "m")
    assert sorted(os.listdir(tmp_path)) == [others.name, "m"]
