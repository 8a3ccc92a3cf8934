"""Warnings of a load, at the line of the user's that calls it."""

from __future__ import annotations

import inspect
import warnings


def warn(text: str) -> None:
    """Warn at the line that called :func:`load`."""
    frame, level = inspect.currentframe(), 1
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "lazymods":
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)
