"""Objects with ``__slots__``: what they hold, as a dict, and what of an object Python cannot see at all."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable, Mapping
from typing import Any

_POINTER = tuple.__itemsize__
_HEAP = 1 << 9  # Py_TPFLAGS_HEAPTYPE: classes that Python code has made


@functools.lru_cache(maxsize=4096)
def slots_of(cls: type) -> dict[str, types.MemberDescriptorType]:
    """Return the slots that Python code has declared in a class and its bases, by name; don't change the dict.

    A slot that another class's slot of the same name hides is there as ``Base.name``.
    """
    found: dict[str, types.MemberDescriptorType] = {}
    for base in cls.__mro__:
        if "__slots__" in vars(base):
            for name, slot in vars(base).items():
                if isinstance(slot, types.MemberDescriptorType):
                    found.setdefault(name if name not in found else f"{base.__qualname__}.{name}", slot)
    return found


@functools.lru_cache(maxsize=4096)
def has_hidden_state(cls: type) -> bool:
    """Whether objects of a class hold more than attributes and slots, as an ``int`` or a class written in C does.

    It is what ``object.__getstate__`` asks before it lets an object be pickled by its attributes alone.
    """
    pointers = len(slots_of(cls)) + (cls.__dictoffset__ > 0) + (cls.__weakrefoffset__ > 0)
    return cls.__itemsize__ != 0 or cls.__basicsize__ > object.__basicsize__ + pointers * _POINTER


def new_object(cls: type) -> Any:
    """Return an object of a class without running its constructor or its own ``__new__``."""
    base: Any = next(base for base in cls.__mro__ if not base.__flags__ & _HEAP)
    return base.__new__(cls)


def new_tuple(cls: Any, parts: Iterable[Any]) -> Any:
    """Return a tuple of a class without running its own ``__new__``, which may want other arguments."""
    return cls(parts) if hasattr(cls, "n_sequence_fields") else tuple.__new__(cls, parts)  # one of the interpreter's


class Attributes(dict[str, Any]):
    """What the slots and attributes of an object hold; :meth:`clear` and :meth:`update` are done to the object too.

    Args:
        thing: An object of a class that has slots.
    """

    def __init__(self, thing: Any) -> None:
        self._thing, self._slots = thing, slots_of(type(thing))
        whole = type(thing).__dictoffset__
        self._attributes: dict[str, Any] = object.__getattribute__(thing, "__dict__") if whole else {}
        for name, slot in self._slots.items():
            try:
                super().__setitem__(name, slot.__get__(thing))
            except AttributeError:  # it is empty
                continue
        super().update(self._attributes)

    def clear(self) -> None:
        """Empty the slots, and delete the attributes."""
        for name in self.keys() & self._slots.keys():
            self._slots[name].__delete__(self._thing)
        self._attributes.clear()
        super().clear()

    def remove(self, name: str) -> None:
        """Empty a slot, or delete an attribute."""
        if name in self._slots:
            self._slots[name].__delete__(self._thing)
        else:
            del self._attributes[name]
        del self[name]

    def update(self, contents: Mapping[str, Any]) -> None:  # type: ignore[override]
        """Let slots and attributes hold these values, also those of a frozen dataclass."""
        for name, value in contents.items():
            if name in self._slots:
                self._slots[name].__set__(self._thing, value)
            else:
                self._attributes[name] = value
        super().update(contents)
