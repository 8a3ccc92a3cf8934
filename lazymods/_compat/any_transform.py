"""What can be told of nnx transforms without flax's own record of those that run.

Where operations are executed none runs that carries changes. Elsewhere a layer that was made outside may be an argument
of one, or not: that decides whether its parameters would be lost, so its first call there is refused.
"""

from __future__ import annotations

from typing import Any

from lazymods import _compat
from lazymods._compat.finding import missing
from lazymods._errors import MissingNameError


def carrying_transforms(node: Any) -> list[Any]:
    """Return no tags, if no transform can carry changes of ``node`` to an object outside.

    Raises:
        MissingNameError: If one might.
    """
    birth = _compat.birth_trace(node)
    if _compat.current_trace() is _compat.eval_trace() or birth is _compat.eval_trace():
        return []
    raise MissingNameError(missing("the first call of a layer as an argument of a transform", "transforms"))


def incarnations(node: Any) -> list[Any]:
    """Return ``node``: others can't be found."""
    return [node]


def outermost(node: Any) -> Any:
    """Return ``node``: others can't be found."""
    return node


def fixed_structure(node: Any) -> str | None:
    """Name no transform: :func:`carrying_transforms` has refused it."""
    return None


def transforms_running() -> bool:
    """Whether a transform may be running that carries changes."""
    return _compat.current_trace() is not _compat.eval_trace()


def mapping_axes(node: Any) -> list[Any]:
    """Return no axes: :func:`carrying_transforms` has refused it."""
    return []


def will_update(node: Any) -> bool:
    """Say that none does: nothing is known of the transforms that are running."""
    return False
