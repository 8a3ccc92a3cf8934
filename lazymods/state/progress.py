"""A progress bar for long loads."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

LONG = 1 << 30  # bytes from which a load is long


@contextlib.contextmanager
def progress_bar(progress: bool | None, title: str, total: int) -> Iterator[Callable[[int], None] | None]:
    """Show a bar on stderr while bytes are copied; it is full at the end, whatever could be mapped instead.

    Args:
        progress: Whether to; None: on a terminal, for at least a GiB.
        title: What is being done.
        total: How many bytes there are.

    Yields:
        What to call with the number of bytes copied, or None without a bar.
    """
    if progress is None:
        progress = total >= LONG and sys.stderr.isatty()
    if not progress:
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as bar:
        task = bar.add_task(title, total=total)
        yield lambda count: bar.advance(task, count)
        bar.update(task, completed=total)
