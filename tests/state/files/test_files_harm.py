"""Files that hang, cost more than they are, or speak to the terminal; and everything that is wrong told at once."""

import json
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from safetensors.numpy import save_file

import lazymods as lm
from lazymods.__main__ import main


def linear() -> nnx.Linear:
    return nnx.Linear(2, 2, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("make", [os.mkfifo, lambda p: os.symlink("nowhere", p)], ids=["pipe", "dangling link"])
@pytest.mark.parametrize("name", ["manifest.ocdbt", "d/0123456789abcdef0123456789abcdef"])
def test_only_files_in_an_orbax_folder(tmp_path: Path, make: object, name: str) -> None:
    lm.save(linear(), tmp_path / "m")
    (tmp_path / "m" / name).unlink(missing_ok=True)
    make(tmp_path / "m" / name)  # type: ignore[operator]
    with pytest.raises(lm.CheckpointError, match=f"m: {name}"):
        lm.load(linear(), tmp_path / "m")


def test_what_others_put_into_an_orbax_folder_is_not_looked_at(tmp_path: Path) -> None:
    """Such as a link to the data, with thousands of files and links that lead nowhere."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "link").symlink_to("nowhere")
    for options, _ in LAYOUTS.values():
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options)) as checkpointer:
            checkpointer.save(tmp_path / "m", {"kernel": jnp.ones((2, 2)), "bias": jnp.zeros(2)}, force=True)
        (tmp_path / "m" / "data").symlink_to("../data")
        os.mkfifo(tmp_path / "m" / "pipe")
        layer = linear()
        lm.load(layer, tmp_path / "m")
        np.testing.assert_array_equal(layer.kernel[...], np.ones((2, 2)))
        with pytest.raises(lm.CheckpointError, match="with something else in it"):
            lm.save(layer, tmp_path / "m")


# options of Orbax, and a description that there is then
LAYOUTS: dict[str, tuple[dict[str, Any], str]] = {
    "ocdbt": ({}, "manifest.ocdbt"),
    "files": ({"use_ocdbt": False}, ".zarray"),
    "zarr3": ({"use_ocdbt": False, "use_zarr3": True}, "zarr.json"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_file_of_an_orbax_folder_may_be_sparse(tmp_path: Path, layout: str) -> None:
    """Of 1 TB and nothing in it: tensorstore, which reads some whole, would end the process with SIGABRT."""
    options, description = LAYOUTS[layout]
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options)) as checkpointer:
        checkpointer.save(tmp_path / "m", {"kernel": jnp.ones((2, 2)), "bias": jnp.zeros(2)})
    # what a load has no use for
    unread = ("_CHECKPOINT_METADATA", "_sharding", "array_metadatas", "commit_success.txt", "descriptor")
    files = sorted(p for p in (tmp_path / "m").rglob("*") if p.is_file() and not {*p.parts} & {*unread})
    assert description in {file.name for file in files}
    for file in files:
        length = file.stat().st_size
        os.truncate(file, 1 << 40)
        with pytest.raises(lm.CheckpointError, match=re.escape(file.name)):
            lm.load(linear(), tmp_path / "m")
        os.truncate(file, length)
    assert lm.load(linear(), tmp_path / "m").missing == []  # as it was


def test_arrays_that_do_not_fit_are_not_read(tmp_path: Path) -> None:
    n = 1 << 40
    header = json.dumps({"mask": {"dtype": "BOOL", "shape": [n], "data_offsets": [0, n]}}).encode()
    (tmp_path / "a.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(tmp_path / "a.safetensors", 8 + len(header) + n)  # a hole: it takes no room
    with pytest.raises(lm.StateDictError) as caught:
        lm.load(nnx.Dict(mask=nnx.Variable(jnp.zeros(3, bool))), tmp_path / "a.safetensors")
    assert caught.value.mismatched == ["mask"]


def test_check_computes_the_sums_and_reads_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    npz = tmp_path / "a.npz"
    np.savez(npz, kernel=np.ones((2, 4), np.float32), bias=np.zeros(4, np.float32))
    assert main(["check", str(npz)]) == 0
    raw = bytearray(npz.read_bytes())
    raw[raw.find(np.ones(4, np.float32).tobytes())] ^= 1
    npz.write_bytes(raw)
    assert main(["check", str(npz)]) == 1
    with pytest.raises(lm.CheckpointError, match="CRC"):
        lm.load(lm.LazyLinear(4, rngs=nnx.Rngs(0)), npz)
    lm.save(nnx.Linear(64, 64, rngs=nnx.Rngs(0)), tmp_path / "m")
    largest = max((p for p in (tmp_path / "m").glob("ocdbt.process_0/d/*")), key=lambda p: p.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)
    assert main(["check", str(tmp_path / "m")]) == 1
    assert "m: kernel" in capsys.readouterr().err


def test_names_do_not_reach_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evil = tmp_path / "\x1b]0;PWNED\x07.safetensors"
    save_file({"\x1b[31mx": np.zeros(1, np.float32)}, evil)
    for layout in ("flax", "torch"):
        with pytest.raises(lm.StateDictError) as caught:
            lm.load(linear(), evil, layout=layout)
        assert str(caught.value).replace("\n", "").isprintable()
    (tmp_path / "\x1b[31mx.dat").write_bytes(pickle.dumps({}))
    with pytest.raises(lm.CheckpointError) as refused:
        lm.load(linear(), tmp_path / "\x1b[31mx.dat")
    assert str(refused.value).replace("\n", "").isprintable()
    assert main(["check", str(evil)]) == 0
    assert capsys.readouterr().out.replace("\n", "").isprintable()


def test_a_header_that_would_take_many_times_its_size(tmp_path: Path) -> None:
    header = b'{"a":[' + b"{}," * 100_000 + b"{}]}"
    (tmp_path / "a.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(lm.CheckpointError, match="many times its size"):
        lm.load(linear(), tmp_path / "a.safetensors")


@pytest.mark.parametrize("kind", [np.frombuffer(b"evil", np.uint8), np.ones(2), np.zeros(0, np.uint8)], ids=str)
def test_unknown_kinds_of_keys(tmp_path: Path, kind: np.ndarray) -> None:
    model = nnx.Dict(r=nnx.Rngs(0))
    lm.save(model, tmp_path / "r.npz", include_rng=True)
    with np.load(tmp_path / "r.npz") as file:
        entries: dict[str, Any] = {n: kind if n.endswith(".impl") else v for n, v in file.items()}
    np.savez(tmp_path / "s.npz", **entries)
    with pytest.raises(lm.CheckpointError, match=r"default\.key\.impl"):
        lm.load(model, tmp_path / "s.npz")


def test_every_missing_shard_and_tensor_is_told(tmp_path: Path) -> None:
    save_file({"a": np.zeros(1, np.float32)}, tmp_path / "1.safetensors")
    names = {"a": 1, "b": 1, "c": 1, "d": 2, "e": 3}
    index = {"weight_map": {name: f"{shard}.safetensors" for name, shard in names.items()}}
    (tmp_path / "m.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(lm.CheckpointError) as caught:
        lm.load(linear(), tmp_path / "m.safetensors.index.json")
    text = str(caught.value)
    assert len(caught.value.problems) == 4
    assert all(word in text for word in ("json: b", "json: c", "no file 2.safetensors", "no file 3.safetensors"))


def test_the_cause_comes_first_and_names_are_told_together(tmp_path: Path) -> None:
    model = nnx.Dict(h=nnx.List([nnx.Dict(q=linear(), k=linear()) for _ in range(32)]))
    # longer than any prefix that is taken off without being told
    state = {f"a.b.c.d.e.{name}": np.asarray(value) for name, value in lm.state_dict(model).items()}
    save_file(state, tmp_path / "m.safetensors")
    with pytest.raises(lm.StateDictError) as caught:
        lm.load(model, tmp_path / "m.safetensors")
    lines = str(caught.value).splitlines()
    assert lines[1:3] == [
        "  cause:  the file's names begin with 'a.b.c.d.e.', the model's do not",
        '  write:  rename=[(r"^a\\.b\\.c\\.d\\.e\\.", "")]',
    ]
    assert "h.{0..31}.q.kernel" in lines
    assert len(lines) <= 40
    assert sorted(caught.value.missing) == sorted(lm.state_dict(model))
    assert sorted(caught.value.unexpected) == sorted(state)
    assert len(caught.value.problems) == 256
    with pytest.warns(UserWarning, match=r"nothing was loaded.*begin with 'a\.b\.c\.d\.e\.'"):
        lm.load(model, tmp_path / "m.safetensors", strict=False)


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".safetensors", ".npz"])
def test_who_writes_to_a_mapped_parameter_writes_to_a_copy(suffix: str, tmp_path: Path) -> None:
    """As PyTorch does through DLPack: the process lives on, and the file is as it was."""
    path = tmp_path / f"m{suffix}"
    lm.save({"x": jnp.ones((64, 64))}, path)
    raw = path.read_bytes()
    code = f"""
import ctypes, jax.numpy as jnp, lazymods as lm
state, other = {{"x": jnp.zeros((64, 64))}}, {{"x": jnp.zeros((64, 64))}}
lm.load(state, {str(path)!r})
ctypes.memset(state["x"].unsafe_buffer_pointer(), 0, 4)
lm.load(other, {str(path)!r})
print(int(state["x"].sum()), int(other["x"].sum()))
"""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.split() == ["4095", "4096"]
    assert path.read_bytes() == raw
