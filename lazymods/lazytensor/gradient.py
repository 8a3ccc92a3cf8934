"""A gradient as one operation: ``value_and_grad``, recorded in a fraction of the time.

Recording a backward pass operation by operation takes most of the time of recording a step. A pure function can be
differentiated and compiled as a whole, once: what it is called with, and what its closure holds, are its inputs, so
that a function that is defined anew in every step is still the same.
"""

from __future__ import annotations

import functools
import types
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import nnx

from lazymods._errors import LazyError, Problem

_programs: OrderedDict[Any, Any] = OrderedDict()
_MOST = 256


def value_and_grad(f: Callable[..., Any], argnums: Any = 0, *, has_aux: bool = False) -> Callable[..., Any]:
    """Return a function that computes a value and its gradients as one operation.

    It is ``nnx.value_and_grad``, compiled, and cached by the code of ``f``: modules may be arguments, in the closure,
    or globals that ``f`` names, and what ``f`` does to their Variables is done to them. Arrays and floats there are
    inputs, anything else is part of the program. As for ``jax.jit``, ``f`` must not depend on other things that change.

    Args:
        f: Returns a scalar, or a pair of a scalar and something else.
        argnums: Which arguments to differentiate: int, tuple of ints, or ``nnx.DiffState``.
        has_aux: Whether ``f`` returns a pair.

    Returns:
        A function of the same arguments that returns ``(value, gradients)``.

    Raises:
        LazyError: ``f`` added attributes to a module or removed some.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> import lazymods as lm
        >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
        >>> with lm.lazytensor.lazy():
        ...     x = jnp.ones((3, 2))
        ...     loss, grads = lm.lazytensor.value_and_grad(lambda m: (m(x) ** 2).mean())(model)
        >>> grads["kernel"].shape
        (2, 1)
    """

    @functools.wraps(f)
    def compute(*args: Any, **kwargs: Any) -> Any:
        captured = _captured(f)
        leaves, tree = jax.tree.flatten((args, kwargs, captured), is_leaf=_is_object)
        objects = [x for x in leaves if _is_object(x)]
        arrays = [x for x in leaves if _is_input(x)]
        static = tuple([_static(x) for x in leaves])
        graph, state = nnx.split(objects)
        values, structure = jax.tree.flatten(state)
        shell = _Shell(f)
        key = (shell, tree, static, graph, structure, argnums, has_aux)
        program = _programs.get(key)
        if program is None:
            body = functools.partial(_body, shell, argnums, has_aux, tree, static, graph, structure)
            program = _programs[key] = jax.jit(body)
            if len(_programs) > _MOST:
                _programs.popitem(last=False)
        _programs.move_to_end(key)
        out, changed = program(values, arrays)
        if changed:
            nnx.update(objects, jax.tree.unflatten(structure, [changed.get(i, v) for i, v in enumerate(values)]))
        return out

    return compute


def _is_object(value: Any) -> bool:
    return isinstance(value, (nnx.Pytree, nnx.Variable))


def _is_input(value: Any) -> bool:
    return isinstance(value, (jax.Array, np.ndarray, np.generic, float, complex))


class _Static:
    """A part of the program: equal to another one if type and value are, or if it is the same thing."""

    __slots__ = ("_key", "value")

    def __init__(self, value: Any) -> None:
        self.value = value
        plain = isinstance(value, (bool, int, str, bytes, type(None), np.dtype, type))
        self._key = (type(value), value if plain else id(value))

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Static) and self._key == other._key


_OBJECT, _INPUT = object(), object()


def _static(value: Any) -> Any:
    return _OBJECT if _is_object(value) else _INPUT if _is_input(value) else _Static(value)


class _Shell:
    """A function without what it holds: equal for a function that is defined anew."""

    __slots__ = ("code", "inner", "namespace")

    def __init__(self, f: Any) -> None:
        self.code: Any
        self.inner: Any = None
        self.namespace: dict[str, Any] = {}
        if isinstance(f, functools.partial):
            self.code, self.inner = functools.partial, _Shell(f.func)
        elif isinstance(f, types.FunctionType):
            self.code, self.namespace = f.__code__, f.__globals__
        else:
            self.code = None if _is_object(f) else _Static(f)

    def __hash__(self) -> int:
        return hash((self.code, self.inner))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Shell) and (self.code, self.inner) == (other.code, other.inner)

    def around(self, captured: Any) -> Any:
        """Return the function, with what it holds."""
        if self.code is functools.partial:
            inner, args, keywords = captured
            return functools.partial(self.inner.around(inner), *args, **keywords)
        if not isinstance(self.code, types.CodeType):
            return self.code.value if isinstance(self.code, _Static) else captured
        cells, mutable, defaults, keyword_defaults = captured
        closure = tuple([c.value if isinstance(c, _Static) else types.CellType(c) for c in cells])
        made = types.FunctionType(self.code, {**self.namespace, **mutable}, None, defaults, closure)
        made.__kwdefaults__ = keyword_defaults
        return made


def _captured(f: Any) -> Any:
    """Return what a function holds besides its code, as a pytree."""
    if isinstance(f, functools.partial):
        return (_captured(f.func), f.args, f.keywords)
    if not isinstance(f, types.FunctionType):
        return f if _is_object(f) else None
    cells = [cell.cell_contents if _is_full(cell) else _Static(cell) for cell in f.__closure__ or ()]
    named = {name: f.__globals__.get(name) for name in f.__code__.co_names}
    mutable = {n: v for n, v in named.items() if _is_object(v) or isinstance(v, (jax.Array, np.ndarray))}
    return (cells, mutable, f.__defaults__, f.__kwdefaults__)


def _is_full(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:  # a name that has no value yet
        return False
    return True


def _body(
    shell: _Shell,
    argnums: Any,
    has_aux: bool,
    tree: Any,
    static: Any,
    graph: Any,
    structure: Any,
    values: Any,
    arrays: Any,
) -> tuple[Any, dict[int, Any]]:
    """Compute value and gradients; return also the leaves of the state that have changed, by number."""
    objects = nnx.merge(graph, jax.tree.unflatten(structure, values))
    given, inputs = iter(objects), iter(arrays)
    leaves = [next(given) if s is _OBJECT else next(inputs) if s is _INPUT else s.value for s in static]
    args, kwargs, captured = jax.tree.unflatten(tree, leaves)
    out = nnx.value_and_grad(shell.around(captured), argnums=argnums, has_aux=has_aux)(*args, **kwargs)
    after, state = nnx.split(objects)
    if after != graph:
        got = "a function that adds attributes to a module, removes some, or changes static ones"
        needed = "a function that changes values of Variables only: it is one operation, compiled once"
        raise LazyError(Problem("lm.lazytensor.value_and_grad", got, needed, "nnx.value_and_grad(f)"))
    new = jax.tree.leaves(state)
    return out, {i: leaf for i, leaf in enumerate(new) if leaf is not values[i]}
