"""What stands for random streams and initializers while a constructor is read: it records what they are asked for.

A draw from a stream is one equation of the program that is traced, ``lazy_fold``; a call of an initializer another,
``lazy_init``. Both are recorded only where the constructor itself asks. In a transform of its own, and from copies that
transforms make, streams and initializers do what they always do. :func:`draws_of` tells from the program how often was
drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import ShapedArray
from jax.extend.core import Primitive

from lazymods import _compat
from lazymods._errors import ConfigurationError, Problem
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


# ---------------------------------------------------------------- how often a constructor has drawn

# Each draw adds one to the counter of a stream. The constructor may draw by copies of the stream that have its counter,
# and in transforms of its own: nnx.jit, nnx.remat, a loop, a branch. So it is not counted who draws, but followed where
# the last value of the counter comes from.

_CALLS = ("jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint", "custom_jvp_call")
_SAME = ("copy", "copy_p", "stop_gradient", "convert_element_type", "optimization_barrier")

_Origin = tuple[int, int]  # which input a value comes from, and by how much it is more


def draws_of(name: str, jaxpr: Any, streams: Sequence[str], starts: Sequence[int]) -> list[dict[str, int]]:
    """Return how often each run of a constructor draws from each stream, by where its key and counter end up.

    Args:
        name: The class.
        jaxpr: The program, whose first inputs are the key and the counter of each stream.
        streams: The names of the streams.
        starts: For each run, which of the outputs is the key of the first stream; its counter comes next.

    Raises:
        ConfigurationError: If a constructor does anything else to a stream.
    """
    producers = _producers(jaxpr)
    runs = []
    for start in starts:
        drawn: dict[str, int] = {}
        for i, stream in enumerate(streams):
            key, count = (_origin(jaxpr.outvars[start + n], jaxpr, producers) for n in (2 * i, 2 * i + 1))
            if key != (2 * i, 0) or count is None or count[0] != 2 * i + 1 or count[1] < 0:
                got = "a constructor that sets the key or the counter of its rngs"
                needed = "keys that it draws: what comes after it goes on with the stream from there"
                write = "rngs = nnx.clone(rngs)  # in the constructor, before they are set"
                raise ConfigurationError(Problem(name, got, needed, write))
            drawn[stream] = count[1]
        runs.append(drawn)
    return runs


def _producers(jaxpr: Any) -> dict[Any, Any]:
    return {v: equation for equation in jaxpr.eqns for v in equation.outvars}


def _origin(variable: Any, jaxpr: Any, producers: Mapping[Any, Any]) -> _Origin | None:
    """Return the input of a program that a value is, but for a number that is added."""
    more = 0
    while not hasattr(variable, "val") and variable in producers:
        equation = producers[variable]
        step = _step(equation, equation.outvars.index(variable))
        if step is None:
            return None
        variable, more = equation.invars[step[0]], more + step[1]
    return (jaxpr.invars.index(variable), more) if not hasattr(variable, "val") and variable in jaxpr.invars else None


def _step(equation: Any, output: int) -> _Origin | None:
    """Return the input of an equation that one of its outputs is, but for a number that is added."""
    name, params, inputs = equation.primitive.name, equation.params, equation.invars
    if name in _SAME:
        return output, 0
    if name in ("add", "sub") and hasattr(inputs[1], "val"):
        return 0, int(inputs[1].val) * (1 if name == "add" else -1)
    if name == "add" and hasattr(inputs[0], "val"):
        return 1, int(inputs[0].val)
    if name in _CALLS:
        inner = next(params[k] for k in ("jaxpr", "call_jaxpr") if k in params)
        return _inside(inner, output, len(inputs))
    if name == "cond":  # its first input says which branch
        found = {_inside(branch, output, len(inputs) - 1) for branch in params["branches"]}
        origin = found.pop()
        return None if found or origin is None else (origin[0] + 1, origin[1])
    if name == "scan" and output < params["num_carry"]:
        origin = _inside(params["jaxpr"], output, len(inputs))
        carried = origin is not None and origin[0] == params["num_consts"] + output
        return (origin[0], origin[1] * params["length"]) if origin is not None and carried else None
    return None


def _inside(program: Any, output: int, count: int) -> _Origin | None:
    jaxpr = getattr(program, "jaxpr", program)
    return _origin(jaxpr.outvars[output], jaxpr, _producers(jaxpr)) if len(jaxpr.invars) == count else None
