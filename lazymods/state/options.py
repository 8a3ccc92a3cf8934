"""Arguments of loads, saves and rules that are none: each is named, with what it was given."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any

from lazymods._errors import Problem
from lazymods._refusals import MAX_SHOWN, ArgumentError, wrong_argument


def expression(where: str, pattern: Any) -> re.Pattern[str]:
    """Return a regular expression, compiled.

    Args:
        where: The function, and the argument that it was given as.
        pattern: The expression: a text, or one that is compiled already.

    Raises:
        ArgumentError: If it is none.
    """
    if isinstance(pattern, str):
        try:
            return compiled(pattern)
        except re.error as error:
            got, line = f"{pattern!r}: {error}", f"{re.escape(pattern)!r}  # for the text itself"
            needed = "a regular expression, as Python's re has them"
            raise ArgumentError(Problem(where, got[:MAX_SHOWN], needed, line)) from error
    if isinstance(pattern, re.Pattern) and isinstance(pattern.pattern, str):
        return pattern
    raise wrong_argument(where, pattern, "a regular expression, as a text", 'r"^layers[.]"')


def replacement(where: str, pattern: re.Pattern[str], new: Any) -> None:
    """Refuse what ``re.sub`` cannot put in the place of a regular expression.

    Raises:
        ArgumentError: If it is no text, or names a group that the expression has not.
    """
    if not isinstance(new, str):
        needed = f"a text to put in the place of {pattern.pattern!r}"
        raise wrong_argument(where, new, needed, f"({pattern.pattern!r}, '...')")
    try:
        pattern.sub(new, "")  # which reads all of it, whether the expression fits or not
    except (re.error, IndexError) as error:
        got = f"{new!r} for {pattern.pattern!r}: {error}"
        needed = f"what re.sub takes: the expression has {pattern.groups} groups"
        line = f"{new.replace(chr(92), chr(92) * 2)!r}  # for the text itself"
        raise ArgumentError(Problem(where, got[:MAX_SHOWN], needed, line)) from error


@functools.lru_cache(maxsize=1024)
def compiled(pattern: str) -> re.Pattern[str]:
    """Return a regular expression, compiled once."""
    return re.compile(pattern)


def patterns(where: str, given: Any) -> list[re.Pattern[str]]:
    """Return the regular expressions of an argument that takes one or several.

    Raises:
        ArgumentError: If one is none.
    """
    if isinstance(given, (str, re.Pattern)):
        return [expression(where, given)]
    if not isinstance(given, Sequence) and not isinstance(given, (set, frozenset)):
        raise wrong_argument(where, given, "a regular expression, or several", 'r"^head[.]"')
    return [expression(where, pattern) for pattern in given]
