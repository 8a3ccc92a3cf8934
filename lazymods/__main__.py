"""``python -m lazymods``: look at checkpoint files without loading them.

python -m lazymods inspect FILE    names, shapes, dtypes and bytes of its tensors
python -m lazymods check FILE      whether it is sound: all of it is read, and what has checksums is summed up; exit
                                   status 1 and the reason if it is not
"""

from __future__ import annotations

import argparse
import io
import math
import os
import sys
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from lazymods._errors import CheckpointError, harmless, short_dtype
from lazymods._tables import Table, columns
from lazymods.state.files.opening import read_checkpoint
from lazymods.state.files.stored import Array, Checkpoint, StoredTensor, check_booleans, printable


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: Its arguments; None: those of the process.

    Returns:
        The exit status: 0, or 1 for a file that is missing or unsound.
    """
    parser = argparse.ArgumentParser(prog="python -m lazymods", description="Look at checkpoint files.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (
        ("inspect", "list names, shapes, dtypes and bytes of the tensors"),
        ("check", "read all of a file, sum up what has checksums, and say whether it is sound"),
    ):
        commands.add_parser(name, help=text, description=text).add_argument("file", help="a file or folder")
    options = parser.parse_args(arguments)
    try:
        read = _read_all if options.command == "check" else lambda checkpoint: checkpoint
        checkpoint = read_checkpoint(options.file, read)
    except (CheckpointError, OSError, ImportError) as error:
        print(harmless(str(error)), file=sys.stderr)
        return 1
    if options.command == "inspect":
        table = _table(checkpoint)
        if sys.stdout.isatty():
            from rich.console import Console

            Console().print(table.rich(columns()))
        else:  # names are whole, however wide the table
            print(table.text(sys.maxsize))
    else:
        print(_total(checkpoint))
    return 0


def _read_all(checkpoint: Checkpoint) -> Checkpoint:
    """Read every value, one tensor at a time, and compute every checksum that the format has; return the checkpoint.

    Raises:
        CheckpointError: If something is damaged.
    """
    checkpoint.check_sums()
    for name, tensor in checkpoint.tensors.items():
        for values in _pieces(checkpoint, tensor) if isinstance(tensor, StoredTensor) else ():
            check_booleans(tensor.file, name, values)
            values.reshape(-1).view(np.uint8).max(initial=0) if values.flags.c_contiguous else values.tobytes()
    return checkpoint


def _pieces(checkpoint: Checkpoint, tensor: StoredTensor) -> Iterable[Array]:
    """Return the values of a tensor; those of a packed one, or their bytes, by pieces, one of which is in memory."""
    pieces: Callable[[], Iterable[Array]] | None = getattr(tensor.source, "pieces", None)
    if pieces is not None:
        return pieces()
    checkpoint.check_unpacked([tensor])
    return [tensor.read()]


def _table(checkpoint: Checkpoint) -> Table:
    rows, marked = [], []
    for name, tensor in checkpoint.tensors.items():
        if isinstance(tensor, StoredTensor):
            shape = ",".join(map(str, tensor.shape))
            rows.append((printable(name), f"{short_dtype(tensor.dtype)}[{shape}]", f"{tensor.nbytes:,}"))
        else:
            marked.append(len(rows))
            rows.append((printable(name), type(tensor).__name__, ""))
    rows += [(printable(alias), f"= {printable(kept)}", "") for alias, kept in checkpoint.aliases.items()]
    folded = (("name", 20), ("name", 12))
    return Table(("name", "array", "bytes"), rows, ("bytes",), folded, marked=marked, totals=_total(checkpoint))


def _total(checkpoint: Checkpoint) -> str:
    tensors = [t for t in checkpoint.tensors.values() if isinstance(t, StoredTensor)]
    total = sum(t.nbytes for t in tensors)
    parameters = sum(math.prod(t.shape) for t in tensors)
    title = f"{printable(str(checkpoint.path), 5000)}: {checkpoint.format}"
    return f"{title}, {len(tensors)} tensors, {parameters:,} elements, {total:,} bytes"


_STOPPED = 141  # as of what SIGPIPE ends, and not that of an unsound file


def run() -> int:
    """Run the command as a program: where names can't be shown they are escaped; who stops listening is left alone."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more when it ends
        return _STOPPED
    return status


if __name__ == "__main__":
    sys.exit(run())
