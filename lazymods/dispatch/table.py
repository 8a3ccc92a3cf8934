"""The table that a set of registrations makes: for each runtime key, the registered key whose kernel is used.

The rules are those of PyTorch's dispatcher, in this order: what is registered for the key itself; for a backend the
explicit composite; the implicit composite, for a backend, and for an Autograd key whose backend has no kernel of its
own; for an Autograd key the Autograd alias; else an Autograd key falls through, which means that JAX differentiates the
kernel of its backend, and a backend has nothing. ``FPGA`` stands for many platforms: where one of them has a kernel of
its own, the implicit composite can't be the derivative of all, and ``AutogradOther`` is ambiguous.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

from lazymods._tables import Shown, Table
from lazymods.dispatch.keys import AUTOGRAD, BACKEND_OF, EXPLICIT, IMPLICIT, RUNTIME

KERNEL = "kernel"
DEFAULT = "default backend kernel"
MATH = "math kernel"
PAIR = "autograd kernel"
AMBIGUOUS = "ambiguous autogradother"
FALLBACK = "backend fallback"
MISSING = "missing"


class Entry(NamedTuple):
    """What runs for one runtime key.

    Attributes:
        key: The registered key whose kernel is used; None if there is none.
        kind: By which rule: ``kernel``, ``default backend kernel``, ``math kernel``, ``autograd kernel``,
            ``ambiguous autogradother``, ``backend fallback`` or ``missing``.
    """

    key: str | None
    kind: str

    def __str__(self) -> str:
        """Render as ``CompositeImplicitAutograd [math kernel]``, or the kind alone."""
        return f"[{self.kind}]" if self.key is None else f"{self.key} [{self.kind}]"


def entry(key: str, registered: Collection[str]) -> Entry:
    """Say what runs for one runtime key.

    Args:
        key: The runtime key.
        registered: All keys that have a kernel.

    Returns:
        Its entry of the table.
    """
    if key in registered:
        return Entry(key, KERNEL)
    backend = BACKEND_OF.get(key)
    if backend is None:
        if EXPLICIT in registered:
            return Entry(EXPLICIT, DEFAULT)
        return Entry(IMPLICIT, MATH) if IMPLICIT in registered else Entry(None, MISSING)
    if IMPLICIT in registered and backend not in registered:
        return Entry(IMPLICIT, MATH)  # never beside the explicit composite: one excludes the other
    if IMPLICIT in registered and key == "AutogradOther":
        return Entry(None, AMBIGUOUS)
    return Entry(AUTOGRAD, PAIR) if AUTOGRAD in registered else Entry(None, FALLBACK)


class Listing(Shown, Mapping[str, Any]):
    """A mapping by key that prints as a table, one line a key, and renders in a notebook.

    Args:
        title: What it is.
        rows: What it maps.
        texts: What is shown of each value; what ``str`` says if it is left out.
    """

    def __init__(self, title: str, rows: Mapping[str, Any], texts: Mapping[str, str] | None = None) -> None:
        self._title = title
        self._rows = dict(rows)
        self._texts = {key: str(value) for key, value in rows.items()} if texts is None else dict(texts)

    def __getitem__(self, key: str) -> Any:
        """Return what a key has."""
        return self._rows[key]

    def __iter__(self) -> Iterator[str]:
        """Go through the keys."""
        return iter(self._rows)

    def __len__(self) -> int:
        """Count the keys."""
        return len(self._rows)

    def _table(self) -> Table:
        return Table(("key", "kernel"), list(self._texts.items()), before=[self._title])

    def __repr__(self) -> str:
        """Render one line a key, the key first."""
        width = max(map(len, self._texts), default=0)
        return "\n".join(f"{key:<{width}}  {text}" for key, text in self._texts.items()) or f"{self._title}: nothing"

    __str__ = __repr__


def dispatch_table(name: str, registered: Collection[str]) -> Listing:
    """Return the table of all runtime keys, as a mapping to :class:`Entry`.

    Args:
        name: The operator's.
        registered: All keys that have a kernel.

    Returns:
        The table, in the order of the keys.
    """
    return Listing(f"dispatch table of {name}", {key: entry(key, registered) for key in RUNTIME})
