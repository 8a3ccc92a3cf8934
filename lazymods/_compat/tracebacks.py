"""Frames of lazymods out of tracebacks, as jax takes out its own, under jax's own setting.

Private: ``jax._src.traceback_util.include_filename`` and ``_filtering_mode``. Seen with jax 0.10.2 and 0.12.0. Where
they are gone, tracebacks are whole.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import traceback
import types

try:
    from jax._src.traceback_util import _filtering_mode, include_filename
except ImportError:
    _filtering_mode = include_filename = None


def hide_frames(error: BaseException) -> None:
    """Take the frames of lazymods, and those of jax that it calls, out of an error's traceback and out of its causes'.

    Whoever calls this is an entry of lazymods, in the ``except`` of an error that goes on to the user by ``raise``
    alone. If another entry is around, it is left to that one. ``JAX_TRACEBACK_FILTERING`` says how it is done: ``off``
    and ``remove_frames`` keep all; ``tracebackhide``, which is that of IPython, marks the frames.

    Args:
        error: The error.
    """
    if _filtering_mode is None or include_filename is None or _is_inside(sys._getframe(2)):
        return
    mode = _filtering_mode()
    if mode in ("off", "remove_frames"):
        return
    for one in _chain(error):
        frames = _frames(one.__traceback__)
        if mode == "tracebackhide":
            for frame, _, hidden in frames:
                if hidden:
                    frame.f_locals["__tracebackhide__"] = True
            continue
        kept: types.TracebackType | None = None
        for frame, trace, hidden in reversed(frames):
            if not hidden:
                kept = types.TracebackType(kept, frame, trace.tb_lasti, trace.tb_lineno)
        one.__traceback__ = kept


def _frames(trace: types.TracebackType | None) -> list[tuple[types.FrameType, types.TracebackType, bool]]:
    """Return the frames of a traceback, and whether each is to be hidden, as is what those call of Python's own."""
    found = []
    hidden = False
    while trace is not None:
        frame = trace.tb_frame
        name = frame.f_code.co_filename
        own = name.startswith(_OWN) or not include_filename(name)  # type: ignore[misc]
        hidden = own or (hidden and name.startswith(_STANDARD) and "site-packages" not in name)
        found.append((frame, trace, hidden))
        trace = trace.tb_next
    return found


def _chain(error: BaseException) -> list[BaseException]:
    """Return an error and all that it followed."""
    found = [error]
    for one in found:
        found += [e for e in (one.__cause__, one.__context__) if e is not None and not any(e is f for f in found)]
    return found


def _is_inside(caller: types.FrameType) -> bool:
    """Whether a frame is one of lazymods, or was called by one."""
    return any(frame.f_code.co_filename.startswith(_OWN) for frame, _ in traceback.walk_stack(caller))


_OWN = os.path.dirname(os.path.dirname(_is_inside.__code__.co_filename)) + os.sep
_STANDARD = sysconfig.get_path("stdlib") + os.sep
