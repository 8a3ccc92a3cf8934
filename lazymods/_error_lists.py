"""Long lists of problems in few lines: names that differ in their numbers only are told as one, ``h.{0..31}.q.kernel``.

Nothing is lost: an error keeps every problem in ``error.problems``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TypeVar

MAX_LINES = 40
"""How many lines an error shows at most."""

_MAX_NAMES = 8  # in one place of an error
_MAX_WIDTH = 110
_NUMBER = re.compile(r"(?<![^.])\d+(?![^. ])")  # a whole part of a dotted name

Key = TypeVar("Key")


def collapsed(names: Iterable[str]) -> list[str]:
    """Return names in their order, those that differ in the numbers of their parts only as one."""
    groups: dict[str, list[list[int]]] = {}
    for name in names:
        numbers = [int(number) for number in _NUMBER.findall(name)]
        groups.setdefault(_NUMBER.sub("{}", name), []).append(numbers)
    out = []
    for pattern, found in groups.items():
        parts = pattern.split("{}")
        if len(parts) - 1 != len(found[0]):  # braces of the name itself
            out.extend([pattern] if len(found) == 1 else [f"{pattern} ({len(found)} times)"])
            continue
        spans = [_span(sorted(set(column))) for column in zip(*found, strict=True)]
        out.append(parts[0] + "".join(span + part for span, part in zip(spans, parts[1:], strict=True)))
    return out


def _span(numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return str(numbers[0])
    if len(numbers) == numbers[-1] - numbers[0] + 1:
        return f"{{{numbers[0]}..{numbers[-1]}}}"
    shown = ",".join(map(str, numbers[:6])) + (",..." if len(numbers) > 6 else "")
    return f"{{{shown}}}"


def shown_names(names: Sequence[str]) -> str:
    """Return names for one place of an error: collapsed, the first of them if there are many, with their number."""
    short = [name if len(name) <= _MAX_WIDTH else f"{name[:_MAX_WIDTH]}..." for name in collapsed(names)]
    lines = "\n".join(short[:_MAX_NAMES])
    more = f"\nand {len(short) - _MAX_NAMES} more of this kind" if len(short) > _MAX_NAMES else ""
    return lines + more


def cause_of(missing: Sequence[str], unexpected: Sequence[str]) -> tuple[str, str] | None:
    """Say why names of a model and of a file do not meet, if one prefix or stack explains most of them.

    Returns:
        What is the case, and the ``rename`` that mends it; None if none does.
    """
    ours = {name.rpartition(".")[0] for name in missing}
    theirs = {name.rpartition(".")[0] for name in unexpected}
    ours, theirs = ours - {""}, theirs - {""}
    for longer, shorter, is_theirs in ((theirs, ours, True), (ours, theirs, False)):
        (prefix, *others), count = _common_prefixes(longer, shorter)
        if prefix and 2 * count > min(len(longer), len(shorter)):
            if is_theirs:
                line = f'rename=[(r"^{re.escape(prefix)}", "")]'
                several = "".join(f" or {other!r}" for other in others[:3])
                line += f"  # or{several.removeprefix(' or')}: whichever part is meant" if others else ""
                return f"the file's names begin with {prefix!r}{several}, the model's do not", line
            return f"the model's names begin with {prefix!r}, the file's do not", f'rename=[(r"^", {prefix!r})]'
    prefix = _numbered(ours, theirs)
    if prefix is not None:
        line = rf'rename=[lm.rules.Stack(r"^{re.escape(prefix[:-1])}[.](\d+)[.]", into="{prefix}")]'
        return f"the file has numbered modules in {prefix[:-1]!r}, where the model has one, a stack of them", line
    prefix = _numbered(theirs, ours)
    if prefix is not None:
        line = rf'rename=[lm.rules.Unstack(r"\b{re.escape(prefix[:-1])}[.]", into="{prefix}{{i}}.")]'
        return f"the model has numbered modules in {prefix[:-1]!r}, where the file has one, a stack of them", line
    return None


def _numbered(ours: set[str], theirs: set[str]) -> str | None:
    """Return what the names of numbered modules begin with of which the other side has one, for most of its names."""
    found: dict[str, tuple[set[str], set[str]]] = {}
    for name in theirs:
        for match in _NUMBER.finditer(name):
            before, after = name[: match.start()], name[match.end() + 1 :]
            whole = (before + after).rstrip(".")
            if before and whole in ours:
                modules, numbers = found.setdefault(before, (set(), set()))
                modules.add(whole)
                numbers.add(match[0])
    prefix = max(found, key=lambda prefix: len(found[prefix][0]), default="")
    if not prefix or 2 * len(found[prefix][0]) <= len(ours) or len(found[prefix][1]) < 2:
        return None
    return prefix


def _common_prefixes(longer: set[str], shorter: set[str]) -> tuple[list[str], int]:
    """Return the prefixes by which the most names of one set are names of the other one, and how many."""
    counts: dict[str, int] = {"": 0}
    for name in longer:
        at = name.find(".")
        while at >= 0:
            if name[at + 1 :] in shorter:
                prefix = name[: at + 1]
                counts[prefix] = counts.get(prefix, 0) + 1
            at = name.find(".", at + 1)
    most = max(counts.values())
    return sorted(prefix for prefix, count in counts.items() if count == most), most
