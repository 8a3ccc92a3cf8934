"""What an initializer of a user returns, asked without a value: another dtype than it is told, or an array of numpy.

An explicit layer holds whatever its initializer returns. A lazy one knows that when the initializer has run; a load and
an abstract run, in which none does, have to ask it. Only functions are asked that can keep no state of their own: for
any other, a call more than the explicit layer makes would change what it returns next.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from lazymods import _compat
from lazymods._initial.stacking import Shape


def returned_instead(init: Callable[..., Any], shape: Shape, dtype: Any) -> Any:
    """Return what an initializer makes in place of a JAX array of some dtype: an array without values, or one of numpy.

    Returns:
        None if it makes just that, or if it cannot be asked.
    """
    if _compat.is_jax_initializer(init) or not _keeps_no_state(init, set()):
        return None
    try:
        _, out, _ = _compat.abstract.recorded(lambda key: init(key, shape, dtype), _compat.threefry_dtype())
    except Exception:  # whatever is wrong, a call with a key says it better
        return None
    is_other = isinstance(out, np.ndarray) or (isinstance(out, jax.Array) and out.dtype != dtype)
    return out if is_other and out.shape == shape else None


_CONSTANTS = (int, float, complex, str, bytes, type(None), np.dtype, np.generic, type)
_MODULES = ("jax", "flax", "numpy", "math", "functools", "operator")


def _keeps_no_state(value: Any, seen: set[int]) -> bool:
    """Whether it is a constant, or a function that uses nothing but such things."""
    if id(value) in seen or isinstance(value, _CONSTANTS):
        return True
    seen.add(id(value))
    if isinstance(value, types.ModuleType):
        return value.__name__.partition(".")[0] in _MODULES and value is not np.random
    if isinstance(value, types.BuiltinFunctionType):
        return isinstance(value.__self__, (types.ModuleType, type(None)))
    if isinstance(value, types.FunctionType) and value.__module__.partition(".")[0] in ("jax", "flax"):
        return True
    if isinstance(value, tuple):
        return all(_keeps_no_state(v, seen) for v in value)
    if isinstance(value, functools.partial):
        return all(_keeps_no_state(v, seen) for v in (value.func, *value.args, *value.keywords.values()))
    return isinstance(value, types.FunctionType) and all(_keeps_no_state(v, seen) for v in _used_by(value))


def _used_by(function: types.FunctionType) -> Iterator[Any]:
    """What a function closes over, its defaults, and the globals that its code names."""
    yield from (cell.cell_contents for cell in function.__closure__ or ())
    yield from (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    codes = [function.__code__]
    for code in codes:
        codes += [c for c in code.co_consts if isinstance(c, types.CodeType)]
        used = [function.__globals__[n] for n in code.co_names if n in function.__globals__]
        yield from used
        if np in used and "random" in code.co_names:
            yield np.random
