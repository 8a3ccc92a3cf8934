"""Two names of one file system swapped in one step, where the system can: Linux, by ``renameat2``."""

from __future__ import annotations

import ctypes
import errno
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

_AT_FDCWD = -100  # paths are relative to the working directory, as everywhere
_RENAME_EXCHANGE = 2
_UNABLE = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EPERM)  # an old kernel, a file system without it, a sandbox


def exchange(one: Path, other: Path) -> bool:
    """Swap what two names stand for, at once for everybody who looks.

    Returns:
        False if this system or file system cannot; then nothing has changed.

    Raises:
        OSError: If one of the two is not there, or may not be moved.
    """
    renameat2 = _renameat2()
    if renameat2 is None:
        return False
    if renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in _UNABLE:
        return False
    raise OSError(code, os.strerror(code), str(one), None, str(other))


@functools.cache
def _renameat2() -> Callable[..., Any] | None:
    if os.name != "posix":
        return None
    function = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)  # in glibc from 2.28 on
    if function is not None:
        function.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
    return function
