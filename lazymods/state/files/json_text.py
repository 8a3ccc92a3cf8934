"""JSON out of files, read strictly, and not where it would take far more memory than it has bytes."""

from __future__ import annotations

import collections
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lazymods._errors import CheckpointError, one_line
from lazymods.state.files.stored import Array, printable, refuse

MIN_JSON_PARTS = 10_000
BYTES_OF_JSON_PART = 6  # the shortest entry of a safetensors header has 7 braces, brackets and colons in 50 bytes


def read_json(
    file: Path, raw: bytes, what: str, tensor: str = "", short: Callable[[dict[str, Any]], Any] | None = None
) -> Any:
    """Parse JSON strictly: UTF-8, each name once, no NaN, no half of a surrogate pair in a name or a text.

    Args:
        file: Where it is from.
        raw: The text's bytes.
        what: What the text is, such as ``a header``.
        tensor: The entry that holds it, if any.
        short: Returns what stands for an object of it, the innermost first; None: objects stay dicts.

    Raises:
        CheckpointError: If it is no such JSON.
    """
    # what is parsed takes at most some times the text's size: names and texts are long, and containers few
    if _is_dense(raw, len(raw)) and _is_dense(_without_texts(raw), len(raw)):
        got = f"{what} of {len(raw):,} bytes that is made of {_parts_of(raw):,} parts"
        raise refuse(file, got, "names and texts mostly: parsed it would take many times its size", tensor=tensor)
    try:
        text = raw.decode("utf-8")
        del raw  # a header may have 100 MB
        return _Parser(file, text, what, short).parsed()
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:
        got = f"{what} that is no JSON ({printable(one_line(error))})"
        raise refuse(file, got, "JSON, in UTF-8", tensor=tensor) from error


_BLANKS = r"[ \t\n\r]*"
_BEGIN = re.compile(rf"\{{{_BLANKS}(\}}?){_BLANKS}")
_COLON = re.compile(rf"{_BLANKS}:{_BLANKS}")
_END = re.compile(rf"{_BLANKS}(?:,|(\}})){_BLANKS}")


class _Parser:
    """Parses a text, as :func:`read_json` says."""

    def __init__(self, file: Path, text: str, what: str, short: Callable[[dict[str, Any]], Any] | None) -> None:
        self._file, self._text, self._what, self._short = file, text, what, short
        self._escaped = "\\u" in text  # half of a pair can't be written in another way
        self._decoder = json.JSONDecoder(object_pairs_hook=self._object, parse_constant=_no_json)

    def parsed(self) -> Any:
        """Return what it says.

        Raises:
            ValueError: If it is no JSON.
            CheckpointError: If a name stands in it twice.
        """
        if not self._text.startswith("{"):
            return self._decoder.decode(self._text)
        out: dict[str, Any] = {}
        for name, value in self._items():
            self._refuse_halves((name, value))
            if name in out:
                raise self._twice(name)
            out[name] = value
        return out if self._short is None else self._short(out)

    def _items(self) -> Iterator[tuple[str, Any]]:
        """Yield names and values of the outermost object: a list of a million takes more than what is made of them."""
        text, read = self._text, self._decoder.raw_decode
        at, end = _BEGIN.match(text), 0
        while at is not None and not at[1]:
            name, end = read(text, at.end())
            colon = _COLON.match(text, end) if isinstance(name, str) else None
            if colon is None:
                raise json.JSONDecodeError("Expecting a name and ':' delimiter", text, at.end())
            value, end = read(text, colon.end())
            yield name, value
            at = _END.match(text, end)
        if at is None or at.end() != len(text):
            raise json.JSONDecodeError("Expecting ',' delimiter", text, end)

    def _object(self, pairs: list[tuple[str, Any]]) -> Any:
        self._refuse_halves(itertools.chain.from_iterable(pairs))
        out = dict(pairs)
        if len(out) != len(pairs):
            raise self._twice(_first_duplicate([name for name, _ in pairs]))
        return out if self._short is None else self._short(out)

    def _refuse_halves(self, texts: Iterable[Any]) -> None:
        for text in texts if self._escaped else ():
            if isinstance(text, str):
                text.encode()

    def _twice(self, name: str) -> CheckpointError:
        return refuse(self._file, f"a name that stands twice in {self._what}", "each name once", tensor=name)


def _no_json(text: str) -> Any:
    raise ValueError(f"{text} is no JSON")


def _is_dense(raw: bytes, length: int) -> bool:
    """Whether JSON of a length has more parts than names and texts leave room for."""
    too_many = _parts_of(raw) > MIN_JSON_PARTS + length // BYTES_OF_JSON_PART
    return too_many or raw.count(b",") > MIN_JSON_PARTS + length // 3


def _parts_of(raw: bytes) -> int:
    return raw.count(b"{") + raw.count(b"[") + raw.count(b":")


def _without_texts(raw: bytes) -> bytes:
    """Return JSON without what its names and texts hold."""
    raw = raw.replace(rb"\\", b"").replace(rb'\"', b"")  # the quotes that end none
    characters = np.frombuffer(raw, np.uint8)
    is_inside = np.cumsum(characters == ord('"'), dtype=np.uint8) & 1  # after an odd number of quotes
    return characters[is_inside == 0].tobytes()


def _first_duplicate(names: list[str]) -> str:
    return next((name for name, count in collections.Counter(names).items() if count > 1), "")


def read_texts(file: Path, raw: bytes, entry: str) -> Mapping[str, str]:
    """Read what :func:`texts_as_array` has written.

    Raises:
        CheckpointError: If it is no JSON object of texts.
    """
    texts = read_json(file, raw, "an entry", entry)
    if not isinstance(texts, dict) or not all(isinstance(text, str) for text in texts.values()):
        raise refuse(file, printable(repr(texts)), "a JSON object of texts", tensor=entry)
    return texts


def texts_as_array(texts: Mapping[str, str]) -> Array:
    """Return texts by name as an array of the bytes of their JSON, for formats that hold arrays only."""
    return np.frombuffer(json.dumps(dict(texts)).encode(), np.uint8)
