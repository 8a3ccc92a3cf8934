"""What stands in for the objects of a PyTorch file that are no tensors, and the state dict of those that are modules.

A stand-in is inert: the name of a class or function, and what the pickle gives it. Whole modules, and those of
TorchScript, hold their tensors in their attributes; they become mappings with the names of ``state_dict()``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

MAX_DEPTH = 64
"""How deep mappings may be nested."""

_SCRIPT = "__torch__."


class Opaque:
    """Something that is no tensor.

    Attributes:
        what: The name of its class, or of the function that makes it.
        state: What the pickle gives it for its attributes.
        items: What the pickle gives it for its items, by name.
    """

    __slots__ = ("items", "state", "what")

    def __init__(self, what: str) -> None:
        self.what: str = what
        self.state: Any = None
        self.items: dict[str, Any] = {}

    def __eq__(self, other: object) -> bool:
        """Compare what they are."""
        return isinstance(other, Opaque) and other.what == self.what

    __hash__ = object.__hash__

    def __repr__(self) -> str:
        """Show what it is."""
        return f"Opaque({self.what!r})"


class ModuleState(dict[str, Any]):
    """The state dict of a module, by the names of its attributes."""


def as_mappings(tree: Any) -> Any:
    """Return what a pickle describes with mappings for the modules in it."""
    return _converted(tree, {}, 0)


def _converted(value: Any, done: dict[int, Any], depth: int) -> Any:
    if not isinstance(value, (dict, Opaque)) or depth > MAX_DEPTH:
        return value
    if id(value) not in done:
        done[id(value)] = value  # also of what holds itself
        done[id(value)] = _of_object(value, done, depth) if isinstance(value, Opaque) else _of_dict(value, done, depth)
    return done[id(value)]


def _of_dict(value: dict[Any, Any], done: dict[int, Any], depth: int) -> dict[Any, Any]:
    new = {k: _converted(v, done, depth + 1) for k, v in value.items() if isinstance(v, (dict, Opaque))}
    return value | new if any(new[k] is not value[k] for k in new) else value


def _of_object(value: Opaque, done: dict[int, Any], depth: int) -> Any:
    if value.items:  # of a class of dicts
        return _of_dict(value.items, done, depth)
    attributes = _module_attributes(value)
    if attributes is None:
        return value
    out = ModuleState()
    for name, child in attributes:
        found = _converted(child, done, depth + 1)
        if not isinstance(found, (Opaque, dict)) or (isinstance(found, ModuleState) and found):
            out[name] = found
    return out


def _module_attributes(value: Opaque) -> Iterator[tuple[str, Any]] | None:
    """Give the parameters, buffers and modules of a module by name; None if it is none."""
    state = value.state
    if not isinstance(state, dict):
        return None
    if value.what.startswith(_SCRIPT):
        return ((name, child) for name, child in state.items() if type(name) is str and not _is_plain(child))
    parts = [state.get(key) for key in ("_parameters", "_buffers", "_modules")]
    if not all(isinstance(part, dict) for part in parts):
        return None
    hidden = state.get("_non_persistent_buffers_set")
    hidden = hidden if isinstance(hidden, set) else set()
    return (
        (name, child)
        for part in parts
        if part is not None
        for name, child in part.items()
        if type(name) is str and child is not None and not (part is parts[1] and name in hidden)
    )


def _is_plain(value: Any) -> bool:
    return value is None or type(value) in (str, bytes, int, float, complex, bool, list, tuple, set, dict)
