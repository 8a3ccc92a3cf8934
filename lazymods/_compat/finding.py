"""Finding private names of jax and flax, and saying so where one is gone.

A module of this package is a feature: it takes the private names that it needs when it is imported, which is at the
first use of one of its functions. One that is gone makes the import fail, and nothing else: what has a public twin goes
on by that, slower, with one warning; what has none raises :class:`~lazymods.MissingNameError`.
"""

from __future__ import annotations

import functools
import importlib
import warnings
from typing import Any

import flax
import jax

from lazymods._errors import MissingNameError, Problem

TESTED = {"jax": "0.12.0.1", "flax": "0.12.12"}  # the newest that the tests have seen


_REASONS: dict[str, Exception] = {}  # by module


def require(owner: Any, *names: str) -> None:
    """Make sure that what a module uses of an object or a class is there, before it is used.

    Raises:
        AttributeError: If it is not.
    """
    for name in names:
        if not hasattr(owner, name) and name not in getattr(owner, "__annotations__", {}):
            where = getattr(owner, "__qualname__", None) or getattr(owner, "__name__", type(owner).__qualname__)
            raise AttributeError(f"{getattr(owner, '__module__', '')}.{where} has no attribute {name!r}".lstrip("."))


def load(name: str, feature: str) -> Any:
    """Import a module of this package.

    Args:
        name: The module.
        feature: What users lose without it.

    Raises:
        MissingNameError: If a private name that it needs is gone.
    """
    try:
        return importlib.import_module(f"lazymods._compat.{name}")
    except (ImportError, AttributeError) as error:
        _REASONS[name] = error
        raise MissingNameError(problem(feature, error)) from error


def missing(feature: str, name: str) -> Problem:
    """Say that a feature needs a module that could not be imported."""
    return problem(feature, _REASONS[name])


@functools.cache  # once
def tell(feature: str, missing: str, instead: str) -> None:
    """Warn of a name that is gone, where there is another way."""
    found = problem(feature, missing)
    text = f"{feature} works by {instead}, which is slower: got {found.got}; needed {found.needed}"
    warnings.warn(f"{text}; write {found.write}", stacklevel=4)


def problem(feature: str, missing: object) -> Problem:
    """Say that a feature needs a name that is missing."""
    tested = ", ".join(f"{package} {version}" for package, version in TESTED.items())
    return Problem(
        where=feature,
        got=f"jax {jax.__version__}, flax {flax.__version__}, where {missing}",
        needed=f"a private name that is there up to {tested}, the newest versions that this lazymods was tested with",
        write="pip install --upgrade lazymods  # or " + " ".join(f"'{p}<={v}'" for p, v in TESTED.items()),
    )
