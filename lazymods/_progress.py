"""What takes over a second says so: one line on stderr, in a terminal or a notebook, that goes away at the end.

A thread waits for the second and draws the line, so that what is short pays nothing but that thread, and only where
somebody would see it. There is one line at a time, that of the outermost. Streams stay as they are: what else prints
meanwhile is neither held up nor changed.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

DELAY = 1.0  # seconds before anything is shown
_EVERY = 0.1  # seconds from one drawing to the next
_ONE = threading.Lock()  # held by whoever may draw

Advance = Callable[[int], None]


@contextlib.contextmanager
def telling(title: str, total: int | None = None, shown: bool | None = None) -> Iterator[Advance | None]:
    """Tell what is going on, if it takes long.

    Args:
        title: What is being done.
        total: How many bytes there are, for a bar.
        shown: Whether to show it at once, wherever stderr goes; None: after a second, if somebody sees it.

    Yields:
        What to call with a number of bytes that are done, or None if nothing is shown.
    """
    draw = _drawing() if shown is None else _Bar if shown else None
    if draw is None or not _ONE.acquire(blocking=False):
        yield None
        return
    line = _Line(title, total, draw, transient=shown is None)
    try:
        line.start()
        yield line.advance
    finally:
        line.stop()
        _ONE.release()


def _drawing() -> Callable[..., Any] | None:
    """Return how a line is drawn where stderr goes; None if nobody sees it."""
    kernel = sys.modules.get("ipykernel.iostream")
    if kernel is not None and isinstance(sys.stderr, kernel.OutStream):
        return _Text
    is_terminal = sys.stderr is not None and not sys.stderr.closed and sys.stderr.isatty()
    return _Bar if is_terminal else None


class _Line:
    """The line of one thing that is going on."""

    def __init__(self, title: str, total: int | None, draw: Callable[..., Any], transient: bool) -> None:
        self._title, self._total, self._draw, self._transient = title, total, draw, transient
        self._done, self._count, self._lock = threading.Event(), 0, threading.Lock()
        self._began = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="lazymods progress", daemon=True)

    def advance(self, count: int) -> None:
        with self._lock:
            self._count += count

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._done.set()
        self._thread.join()  # the line is gone before anything else is said

    def _run(self) -> None:
        if self._transient and self._done.wait(DELAY):
            return
        with contextlib.suppress(OSError, ValueError):  # stderr was closed: there is nobody to tell
            with self._draw(self._total, self._transient) as draw:
                while True:
                    draw(f"{self._title}, {time.monotonic() - self._began:.0f} s", self._count)
                    if self._done.wait(_EVERY):
                        break
                if not self._transient and self._total is not None:
                    draw(self._title, self._total)  # whatever could be mapped instead of copied


@contextlib.contextmanager
def _Bar(total: int | None, transient: bool) -> Iterator[Callable[[str, int], None]]:  # noqa: N802  one of two kinds
    """Draw with rich, for a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TextColumn, TransferSpeedColumn

    columns: list[Any] = [SpinnerColumn(), TextColumn("{task.description}", markup=False)]
    columns += [] if total is None else [BarColumn(), DownloadColumn(), TransferSpeedColumn()]
    console = Console(file=sys.stderr)
    with Progress(
        *columns, console=console, transient=transient, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
    ) as bar:
        task = bar.add_task("", total=total)
        yield lambda text, count: bar.update(task, description=text, completed=count, refresh=True)


@contextlib.contextmanager
def _Text(total: int | None, transient: bool) -> Iterator[Callable[[str, int], None]]:  # noqa: N802  one of two kinds
    """Draw by returning to the start of the line, which is what the output of a notebook's cell understands."""
    width = 0

    def draw(text: str, count: int) -> None:
        nonlocal width
        share = "" if not total else f" ({min(100 * count // total, 100)}%)"
        sys.stderr.write(f"\r{text + share:<{width}}")
        sys.stderr.flush()
        width = max(width, len(text + share))

    yield draw
    sys.stderr.write(f"\r{'':<{width}}\r")
    sys.stderr.flush()
