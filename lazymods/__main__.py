"""``python -m lazymods``: look at checkpoint files without loading them.

python -m lazymods inspect FILE    names, shapes, dtypes and bytes of its tensors
python -m lazymods check FILE      whether it is sound: all of it is read, and what has checksums is summed up; exit
                                   status 1 and the reason if it is not
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence

import numpy as np

from lazymods._errors import CheckpointError, harmless
from lazymods.state.files.opening import open_checkpoint
from lazymods.state.files.stored import Checkpoint, StoredTensor, printable


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
        checkpoint = open_checkpoint(options.file)
        if options.command == "check":
            _read_all(checkpoint)
    except (CheckpointError, OSError, ImportError) as error:
        print(harmless(str(error)), file=sys.stderr)
        return 1
    if options.command == "inspect":
        print("\n".join(_rows(checkpoint)))
    print(_total(checkpoint))
    return 0


def _read_all(checkpoint: Checkpoint) -> None:
    """Read every value, one tensor at a time, and compute every checksum that the format has.

    Raises:
        CheckpointError: If something is damaged.
    """
    checkpoint.check_sums()
    for tensor in checkpoint.tensors.values():
        if isinstance(tensor, StoredTensor):
            values = tensor.read()
            values.reshape(-1).view(np.uint8).max(initial=0) if values.flags.c_contiguous else values.tobytes()


def _rows(checkpoint: Checkpoint) -> list[str]:
    rows = [("name", "shape", "dtype", "bytes")]
    for name, tensor in checkpoint.tensors.items():
        if isinstance(tensor, StoredTensor):
            shape = str(tuple(tensor.shape))
            rows.append((printable(name), shape, tensor.dtype.name, f"{tensor.nbytes:,}"))
        else:
            rows.append((printable(name), "", type(tensor).__name__, ""))
    rows += [(printable(alias), f"= {printable(kept)}", "", "") for alias, kept in checkpoint.aliases.items()]
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    lines = [f"{n:<{widths[0]}}  {s:<{widths[1]}}  {d:<{widths[2]}}  {b:>{widths[3]}}".rstrip() for n, s, d, b in rows]
    return [*lines, ""]


def _total(checkpoint: Checkpoint) -> str:
    tensors = [t for t in checkpoint.tensors.values() if isinstance(t, StoredTensor)]
    total = sum(t.nbytes for t in tensors)
    return f"{printable(str(checkpoint.path), 5000)}: {checkpoint.format}, {len(tensors)} tensors, {total:,} bytes"


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
        return 1
    return status


if __name__ == "__main__":
    sys.exit(run())
