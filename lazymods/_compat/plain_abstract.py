"""Abstract evaluation by ``jax.eval_shape``: the twin of :mod:`lazymods._compat.abstract`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax


def call_abstractly(fun: Callable[..., Any], specs: Any, producers: dict[int, Any] | None = None) -> Any:
    """Find the shapes and dtypes that ``fun`` returns for those of a pytree; which operation made what is not told."""
    return jax.eval_shape(fun, specs)


def zeros(shape: Sequence[int], dtype: Any) -> Any:
    """Return zeros in the current trace."""
    return jax.lax.full(shape, 0, dtype)


def recorded(fun: Callable[[Any], Any], dtype: Any) -> Any:
    """Tell nothing of what an initializer does: it is called.

    Raises:
        NotImplementedError: Always.
    """
    raise NotImplementedError
