"""JSON out of files, read strictly, and not where it would take far more memory than it has bytes."""

from __future__ import annotations

import collections
import itertools
import json
from collections.abc import Callable, Mapping
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
    escaped = b"\\u" in raw  # half of a pair can't be written in another way

    def checked(pairs: list[tuple[str, Any]]) -> Any:
        for text in itertools.chain.from_iterable(pairs) if escaped else ():
            if isinstance(text, str):
                text.encode()
        out = dict(pairs)
        if len(out) != len(pairs):
            twice = _first_duplicate([name for name, _ in pairs])
            raise refuse(file, f"a name that stands twice in {what}", "each name once", tensor=twice)
        return out if short is None else short(out)

    def constant(text: str) -> Any:
        raise ValueError(f"{text} is no JSON")

    # what is parsed takes at most some times the text's size: names and texts are long, and containers few
    if _is_dense(raw, len(raw)) and _is_dense(_without_texts(raw), len(raw)):
        got = f"{what} of {len(raw):,} bytes that is made of {_parts_of(raw):,} parts"
        raise refuse(file, got, "names and texts mostly: parsed it would take many times its size", tensor=tensor)
    try:
        return json.loads(raw.decode("utf-8"), object_pairs_hook=checked, parse_constant=constant)
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:
        got = f"{what} that is no JSON ({printable(one_line(error))})"
        raise refuse(file, got, "JSON, in UTF-8", tensor=tensor) from error


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
