"""What takes over a second tells so, where somebody sees it, on one line that goes away."""

import io
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import lazymods as lm
from lazymods import _progress
from lazymods._progress import telling

X = jnp.ones((2, 3))


class Terminal(io.StringIO):
    """A stream that says that it is a terminal, and when something was written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.written = threading.Event()

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        written = super().write(text)
        if ", 0 s" in text:
            self.written.set()
        return written


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A terminal in place of stderr, where lines come at once."""
    stream = Terminal()
    monkeypatch.setattr(_progress, "sys", types.SimpleNamespace(stderr=stream, modules={}))  # pytest sets sys.stderr
    monkeypatch.setattr(_progress, "DELAY", 0.0)
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    return stream


def drawing_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "lazymods progress"]


def test_one_line_that_goes_away(terminal: Terminal) -> None:
    with telling("doing things", 100) as advance:
        assert advance is not None
        advance(40)
        assert terminal.written.wait(20)
    text = terminal.getvalue()
    assert "doing things, 0 s" in text
    assert text.endswith("\x1b[2K")  # the line is erased
    assert not drawing_threads()


def test_nothing_of_what_is_short(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_progress, "DELAY", 3600.0)
    with telling("doing things"):
        pass
    assert terminal.getvalue() == ""
    assert not drawing_threads()


def test_nothing_where_nobody_sees_it(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_progress, "DELAY", 0.0)
    with telling("doing things") as advance:
        assert advance is None and not drawing_threads()
    with telling("doing things", shown=False) as advance:
        assert advance is None
    assert capsys.readouterr() == ("", "")


def test_the_outermost_tells(terminal: Terminal) -> None:
    with telling("outside"), telling("inside") as advance:
        assert advance is None
        assert terminal.written.wait(20)
    assert "outside" in terminal.getvalue() and "inside" not in terminal.getvalue()


def test_an_error_comes_after_the_line_is_gone(terminal: Terminal) -> None:
    with pytest.raises(KeyError), telling("doing things"):
        assert terminal.written.wait(20)
        raise KeyError
    assert terminal.getvalue().endswith("\x1b[2K") and not drawing_threads()
    with telling("again") as advance:
        assert advance is not None


def test_a_stream_that_is_closed_meanwhile(terminal: Terminal) -> None:
    with telling("doing things"):
        assert terminal.written.wait(20)
        terminal.close()
    assert not drawing_threads()


def test_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_progress, "DELAY", 0.0)
    stream = Terminal()
    monkeypatch.setitem(sys.modules, "ipykernel.iostream", types.SimpleNamespace(OutStream=Terminal))  # type: ignore[arg-type]
    monkeypatch.setattr(sys, "stderr", stream)
    with telling("doing things"):
        assert stream.written.wait(20)
    lines = stream.getvalue().split("\r")
    assert "doing things, 0 s" in lines and lines[-1] == "" and lines[-2].strip() == "" and "\x1b" not in lines


def _materialize(folder: Path) -> Any:
    return lm.materialize(lm.LazyLinear(4, kernel_init=waiting, rngs=nnx.Rngs(0)), X)


def _compile(folder: Path) -> Any:
    return lm.jit(lambda x: x * 2)(X)


def _save(folder: Path) -> Any:
    return lm.save(nnx.Linear(3, 4, rngs=nnx.Rngs(0)), folder / "m.safetensors")


def _load(folder: Path) -> Any:
    lm.save(nnx.Linear(3, 4, rngs=nnx.Rngs(0)), folder / "m.npz")
    return lm.load(lm.LazyLinear(4, rngs=nnx.Rngs(0)), folder / "m.npz")


def waiting(key: jax.Array, shape: Any, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.ones(shape, dtype)


@pytest.mark.parametrize(
    "run, title",
    [
        (_materialize, "initializing parameters"),
        (_compile, "compiling <lambda>"),
        (_save, "saving m.safetensors"),
        (_load, "loading m.npz"),
    ],
)
def test_what_tells(
    run: Callable[[Path], Any], title: str, tmp_path: Path, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[str, bool]] = []
    start, stop = _progress._Line.start, _progress._Line.stop

    def started(line: Any) -> None:
        told.append((line._title, line._total is not None))
        start(line)
        assert terminal.written.wait(20)

    monkeypatch.setattr(_progress._Line, "start", started)
    run(tmp_path)
    assert title in [name for name, _ in told]
    assert stop is _progress._Line.stop and terminal.getvalue().endswith("\x1b[2K")


def test_a_program_with_callbacks_is_left_alone(terminal: Terminal, capfd: pytest.CaptureFixture[str]) -> None:
    @lm.jit
    def f(x: Any) -> Any:
        jax.debug.callback(lambda x: print("called"), x)
        return x + 1

    f(X)
    jax.effects_barrier()
    assert terminal.getvalue() == ""
    assert "called" in capfd.readouterr().out
