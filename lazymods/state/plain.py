"""What a state holds that is no array: numbers, which keep their types, and texts.

A file holds a number as an array without axes. What no array can hold stands in it as the bytes of a JSON document, in
an entry of its own: ``run_name.json``, as the implementation of a random key stands in ``key.impl``.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping, Sequence, Set
from typing import Any

import jax
import numpy as np

from lazymods._graph import ARRAY, kind_of
from lazymods.state.entries import JSON, Place, base_name
from lazymods.state.values import as_array, is_number, is_storable

Array = np.ndarray[Any, Any]

_KINDS = {bool: "b", int: "iu", float: "f", complex: "c"}
_LONG = np.iinfo(np.int64)


def stored(name: str, value: Any) -> tuple[str, Any] | None:
    """Return the name and array under which a file holds a value; None if no file can."""
    if type(value) is int and not _LONG.min <= value <= _LONG.max:
        return f"{name}.{JSON}", _encoded({"int": hex(value)})
    if is_number(value):
        return name, np.asarray(value, {bool: np.bool_, int: np.int64}.get(type(value)))
    if type(value) is str:
        return f"{name}.{JSON}", _encoded(value)
    if type(value) is bytes:
        return f"{name}.{JSON}", _encoded({"bytes": value.hex()})
    if isinstance(value, jax.Array):
        return name, value
    if isinstance(value, np.ndarray) and type(value) in (np.ndarray, np.memmap) and is_storable(value.dtype):
        return name, value
    if kind_of(value) is not ARRAY and hasattr(value, "__array__"):  # of another library, out of a hook
        array = as_array(value)
        return None if array is None or not is_storable(array.dtype) else (name, array)
    return None


_OF_DTYPES = {**dict.fromkeys("USOV", "tolist()"), **dict.fromkeys("Mm", "astype(np.int64)")}
_OF_DTYPES |= {"f": "astype(np.float64)", "c": "astype(np.complex128)"}  # of more than 64 bits a part
_OF_TYPES: tuple[tuple[type, str], ...] = (
    (enum.Enum, "{}.value"),
    (str, "str({})"),
    (bytes, "bytes({})"),
    (int, "int({})"),
    (float, "float({})"),
    (Set, "sorted({})"),
    (Sequence, "list({})"),
    (np.ma.MaskedArray, "dict(values={0}.filled(0), mask=np.ma.getmaskarray({0}))"),
)


def line_for(value: Any) -> str:
    """Return what to write for a value that no file can hold, where a state has it."""
    if callable(value) or isinstance(value, jax.ShapeDtypeStruct):
        return "del state[name]"
    if isinstance(value, (np.ndarray, np.generic)) and not isinstance(value, np.ma.MaskedArray):
        kind = None if is_storable(value.dtype) else _OF_DTYPES.get(value.dtype.kind)
        return f"state[name] = state[name].{kind}" if kind else "state[name] = np.asarray(state[name])"
    made = next((made for cls, made in _OF_TYPES if isinstance(value, cls)), "str({})")
    return f"state[name] = {made.format('state[name]')}"


def _encoded(value: Any) -> Array:
    return np.frombuffer(json.dumps(value).encode(), np.uint8)


def decoded(given: Mapping[str, Any], places: Mapping[str, Place]) -> dict[str, Any]:
    """Return entries with the JSON ones read, under the names of what they are for: what fits there, the plan says.

    One that cannot be read stays as it is.
    """
    out: dict[str, Any] = {}
    for name, value in given.items():
        place = None if name in places or not name.endswith(f".{JSON}") else places.get(base_name(name))
        read = None if place is None or place.name in given else _decoded(value)
        if place is None or read is None:
            out[name] = value
        else:
            out[place.name] = read
    return out


def _decoded(value: Any) -> Any:
    if not isinstance(value, (np.ndarray, jax.Array)):
        return None
    if value.dtype != np.uint8 or value.ndim != 1:
        return None
    try:
        found = json.loads(np.asarray(value).tobytes())
        if isinstance(found, dict) and found.keys() == {"int"}:
            return int(found["int"], 16)
        if isinstance(found, dict) and found.keys() == {"bytes"}:
            return bytes.fromhex(found["bytes"])
    except (ValueError, TypeError, RecursionError):
        return None
    return found if isinstance(found, str) else None


def as_number(value: Any, current: Any) -> Any:
    """Return an array without axes as a number: of the type that is there, if that holds any such value; else its own.

    Args:
        value: The array.
        current: The number whose place it takes.
    """
    array = np.asarray(value)
    kind = array.dtype.kind
    if kind in _KINDS.get(type(current), "") or (
        type(current) in _KINDS and kind in "biufc" and array.dtype.itemsize == (16 if kind == "c" else 8)
    ):
        return array.item()
    return bool(array) if type(current) in _KINDS and kind == "b" else array[()]
