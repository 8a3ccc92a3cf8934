"""Entries of lazymods: what a user calls shows the user's frames in the traceback of an error, and none of lazymods.

An entry that is called often has the ``try`` in itself, which costs nothing as long as nothing is raised.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from lazymods import _compat

P = ParamSpec("P")
R = TypeVar("R")


def entry(function: Callable[P, R]) -> Callable[P, R]:
    """Make a function an entry: its errors come without the frames of lazymods."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            _compat.hide_frames(error)
            raise

    return call
