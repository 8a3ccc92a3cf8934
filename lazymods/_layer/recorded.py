"""What stands for random streams and initializers while a constructor is read: it records what they are asked for.

A draw from a stream is one equation of the program that is traced, ``lazy_fold``; a call of an initializer another,
``lazy_init``. Both are recorded only where the constructor itself asks. In a transform of its own, and from copies that
transforms make, streams and initializers do what they always do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import ShapedArray
from jax.extend.core import Primitive

from lazymods import _compat
from lazymods._initial.keys import is_key

init_p = Primitive("lazy_init")
init_p.def_abstract_eval(lambda key, *, call, shape, dtype: ShapedArray(shape, dtype))
fold_p = Primitive("lazy_fold")
fold_p.def_abstract_eval(lambda key, count: ShapedArray(key.shape, key.dtype))


class RecordedStream(nnx.RngStream):
    """A stream of random keys that records its draws instead of folding a key for each.

    Attributes:
        root: The trace in which it does so; as a weak reference.
    """

    root: Any

    @classmethod
    def make(cls, key: Any, count: Any, *, tag: str, root: Any) -> RecordedStream:
        """Make a stream; without a constructor, for Flax checks what those set, at length."""
        data = {"key": nnx.RngKey(key, tag=tag), "count": nnx.RngCount(count, tag=tag)}
        return _compat.new_object(cls, data, {"tag": tag, "root": root})

    def __call__(self) -> Any:
        """Record a draw."""
        key, count = self.key.get_value(), self.count.get_value()
        if self.root() is not _compat.current_trace() or key.shape != ():
            return super().__call__()
        self.count.set_raw_value(jax.lax.add(count, np.uint32(1)))
        return fold_p.bind(key, count)

    def fork(self, *, split: int | tuple[int, ...] | None = None) -> nnx.RngStream:
        """Return an ordinary stream that starts from the next key."""
        key = self()
        return nnx.RngStream(key if split is None else jax.random.split(key, split), tag=self.tag)

    def split(self, k: int | tuple[int, ...]) -> nnx.RngStream:
        """Return an ordinary stream of ``k`` keys."""
        return nnx.RngStream(jax.random.split(self(), k), tag=self.tag)

    def broadcast(self, k: int | tuple[int, ...]) -> nnx.RngStream:
        """Return an ordinary stream of one key, ``k`` times."""
        key = self()
        return nnx.RngStream(jnp.broadcast_to(key, (*((k,) if isinstance(k, int) else k), *key.shape)), tag=self.tag)


class RecordedInit:
    """Stands for an initializer during a trace: records the call."""

    def __init__(self, call: Callable[..., Any], root: Any) -> None:
        self.call, self.root = call, root

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Record ``init(key, shape, dtype)``; run any other call, or one in a nested trace, as it is."""
        plain = (
            not kwargs
            and 2 <= len(args) <= 3
            and isinstance(args[0], jax.Array)
            and is_key(args[0])
            and _is_shape(args[1])
        )
        if not plain or self.root() is not _compat.current_trace():
            return self.call(*args, **kwargs)
        dtype = args[2] if len(args) == 3 else jnp.float32
        dtype = jax.dtypes.canonicalize_dtype(dtype)
        return init_p.bind(args[0], call=self.call, shape=tuple(map(int, args[1])), dtype=dtype)


def _is_shape(x: Any) -> bool:
    return isinstance(x, (tuple, list)) and all(isinstance(d, (int, np.integer)) for d in x)


def is_initializer(name: str, value: Any) -> bool:
    """Whether a constructor's argument is an initializer that may be recorded.

    One that is wrapped (``nnx.with_metadata``, ``nnx.with_partitioning``) returns more than an array: it is
    traced as it is.
    """
    return "init" in name and callable(value) and not isinstance(value, type) and not hasattr(value, "__wrapped__")
