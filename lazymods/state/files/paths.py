"""Which paths a checkpoint may have: those of files of this machine."""

from __future__ import annotations

import os
import re

from lazymods._errors import CheckpointError, Problem
from lazymods._refusals import wrong_argument
from lazymods.state.files.stored import printable

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+:)/+[^/]")  # a drive of Windows has one letter; a Path has one slash left

_OTHER = "path = 'model.safetensors'  # another path"


def check_path(path: str | os.PathLike[str]) -> None:
    """Refuse a URL or ``~``, which would be a folder of that name beside the program, and what no file is called.

    Raises:
        ArgumentError: If it is no path at all.
        CheckpointError: If it is one that no checkpoint has.
    """
    if not isinstance(path, (str, bytes, os.PathLike)):
        raise wrong_argument("the path", path, "the name of a file or folder, as a text or a Path", _OTHER)
    text = os.fsdecode(path)
    found = _URL.match(text)
    shown = printable(text, 5000)
    if found and ("://" in text or not os.path.isdir(found[1])):
        needed = "a path of this machine: a checkpoint of another place has to be copied, or mounted"
        line = "lm.load(model, 'model.safetensors')  # a copy on this machine (gsutil, aws s3, ...)"
        raise CheckpointError(Problem(shown, "a URL", needed, line))
    at_home = os.path.expanduser(text)
    if at_home != text and not os.path.lexists(text.partition(os.sep)[0]):  # else it is a folder of that name
        needed = "the path of the home directory: only a shell takes ~ for it, and here it would be a folder called so"
        line = f"path = {printable(at_home, 5000)!r}"
        raise CheckpointError(Problem(shown, "a path that begins with ~", needed, line))
    if not text:  # a Path makes the working directory of it
        raise CheckpointError(Problem(repr(text), "an empty path", "the name of a file or folder", _OTHER))
    if "\0" in text:
        raise CheckpointError(Problem(shown, "a path with a zero byte", "the name of a file", _OTHER))


def check_orbax_path(path: str | os.PathLike[str]) -> None:
    """Refuse a path that has no UTF-8, which is all that Orbax takes.

    Raises:
        CheckpointError: If it is one.
    """
    try:
        os.fspath(path).encode()
    except UnicodeEncodeError as error:
        shown = printable(str(path), 5000)
        line = "lm.save(model, 'model.safetensors')  # a path in UTF-8, or one that ends with .npz or .safetensors"
        raise CheckpointError(Problem(shown, "a path that is no UTF-8", "one that is, for Orbax", line)) from error
