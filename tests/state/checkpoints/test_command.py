"""``python -m lazymods inspect`` and ``check``."""

import io
import os
import re
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

import lazymods as lm
from lazymods.__main__ import main


@pytest.fixture
def file(tmp_path: Path) -> Path:
    model = nnx.List([nnx.Linear(3, 4, rngs=nnx.Rngs(i)) for i in range(2)])
    model[1].bias = model[0].bias
    lm.save(model, tmp_path / "m.safetensors")
    return tmp_path / "m.safetensors"


def test_inspect(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(file)]) == 0
    assert capsys.readouterr().out == (
        "name      array     bytes\n"
        "0.kernel  f32[3,4]     48\n"
        "0.bias    f32[4]       16\n"
        "1.kernel  f32[3,4]     48\n"
        "1.bias    = 0.bias\n"
        f"{file}: safetensors, 3 tensors, 28 elements, 112 bytes\n"
    )


def test_check(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(file)]) == 0
    assert capsys.readouterr() == (f"{file}: safetensors, 3 tensors, 28 elements, 112 bytes\n", "")
    file.write_bytes(file.read_bytes()[:-1])
    assert main(["check", str(file)]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "m.safetensors" in err and "truncated" in err


def test_booleans_that_a_load_refuses_are_not_sound(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file({"mask": np.array([0, 2, 1], np.uint8).view(np.bool_)}, tmp_path / "m.safetensors")
    assert main(["check", str(tmp_path / "m.safetensors")]) == 1
    assert "m.safetensors: mask\n  got:    bytes other than 0 and 1" in capsys.readouterr().err


def test_a_missing_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(tmp_path / "none.npz")]) == 1
    assert "none.npz" in capsys.readouterr().err


def test_names_cannot_drive_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file({"a\x1b[2Jb\n": np.zeros(1, np.float32)}, tmp_path / "m.safetensors")
    assert main(["inspect", str(tmp_path / "m.safetensors")]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out and "a\\x1b[2Jb\\n" in out


def test_usage() -> None:
    with pytest.raises(SystemExit) as caught:
        main(["show", "x"])
    assert caught.value.code == 2


@pytest.mark.slow
def test_as_a_command(file: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "lazymods", "check", str(file)], capture_output=True, text=True, timeout=120, check=False
    )
    want = f"{file}: safetensors, 3 tensors, 28 elements, 112 bytes\n"
    assert (done.returncode, done.stdout) == (0, want), done.stderr


def test_an_integer_step_beside_tensors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lm.save({"a": nnx.Param(jnp.ones(2)), "step": 3}, tmp_path / "s.npz")
    assert main(["inspect", str(tmp_path / "s.npz")]) == 0
    assert "step" in capsys.readouterr().out


@pytest.mark.slow
def test_names_that_the_terminal_cannot_show(tmp_path: Path) -> None:
    save_file({"\u00e9": np.ones(2)}, tmp_path / "m")
    env = os.environ | {"PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "lazymods", "inspect", str(tmp_path / "m")]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=True)
    assert done.stdout.splitlines()[1].split() == ["\\xe9", "f64[2]", "16"]


@pytest.mark.slow
def test_a_reader_that_stops_listening(tmp_path: Path) -> None:
    save_file({f"layer{i}": np.ones(1) for i in range(5000)}, tmp_path / "m")
    command = [sys.executable, "-m", "lazymods", "inspect", str(tmp_path / "m")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141  # as of what SIGPIPE ends; 1 is that of an unsound file


def test_colours_in_a_terminal_only(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    assert main(["inspect", str(file)]) == 0
    assert "\x1b[1mname" in terminal.getvalue() and "0.kernel  f32[3,4]" in terminal.getvalue()
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    assert main(["inspect", str(file)]) == 0
    assert "\x1b[33" not in terminal.getvalue() and "0.kernel  f32[3,4]" in terminal.getvalue()


def test_long_names_are_folded_in_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for name, value in {"TERM": "xterm", "NO_COLOR": "1", "COLUMNS": "50"}.items():
        monkeypatch.setenv(name, value)
    save_file({"a_long_name_of_a_part.decoder_layers.0.kernel": np.ones(1, np.float32)}, tmp_path / "m.safetensors")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    assert main(["inspect", "m.safetensors"]) == 0
    lines = [re.sub(r"\x1b\[\d*m", "", line).rstrip() for line in terminal.getvalue().splitlines()]
    assert lines[1:3] == ["a_long_name_of_a_part.               f32[1]      4", "decoder_layers.0.kernel"]
    assert max(map(len, lines)) <= 50
