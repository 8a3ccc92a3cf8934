"""Of which class a tracer is: that of ``jax.Array``, as the tracer itself is an instance.

``isinstance`` with a ``typing.Union``, such as ``jax.typing.ArrayLike``, asks for the class alone, and so does
``functools.singledispatch``. Flax asks that way what is a leaf: ``nnx.pop`` would leave an array where it is, and one
that a traced function stored in an object would be a static attribute, and in no state.

The metaclass of ``jax.Array`` answers for the instances, and here for the classes too. It has no public name. Seen with
jax 0.10.2 and 0.12.0.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.core import Tracer

_ARRAYS: Any = type(jax.Array)
if _ARRAYS is type:  # whose answers can't be changed
    raise AttributeError("jax.Array has no metaclass")


def _is_subclass(cls: Any, asked: Any) -> bool:
    return type.__subclasscheck__(cls, asked) or (cls is jax.Array and type.__subclasscheck__(Tracer, asked))


def let_tracers_be_arrays() -> None:
    """Let the classes of tracers be subclasses of ``jax.Array``, to those that ask."""
    _ARRAYS.__subclasscheck__ = _is_subclass
