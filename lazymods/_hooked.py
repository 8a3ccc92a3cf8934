"""The hooks that a module has; what runs those of a forward is in ``_hooks``, imported where some are registered."""

from __future__ import annotations

from typing import Any

from lazymods._graph import HOOKS


def hooks_of(module: Any, kind: str | None = None) -> tuple[Any, ...]:
    """Return a module's hooks in the order in which they run."""
    hooks = vars(module).get(HOOKS, ())
    return hooks if kind is None else tuple(h for h in hooks if h.kind == kind)


def run_hooks(module: Any, kind: str, *args: Any) -> None:
    """Run a module's hooks of a kind.

    Raises:
        RuntimeError: If a hook returns a value: it would be lost.
    """
    for hook in hooks_of(module, kind):
        if hook.function(module, *args) is not None:
            raise RuntimeError(f"a {kind} hook of {type(module).__name__} returned a value; edit in place instead")
