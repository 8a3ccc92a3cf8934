"""A gradient as one operation: ``value_and_grad``, recorded in a fraction of the time.

Recording a backward pass operation by operation takes most of the time of recording a step. A pure function can be
differentiated and compiled as a whole, once: what it is called with, and what it reaches, are inputs or part of the key
(:mod:`lazymods.lazytensor.reach`), so that a function that is defined anew in every step is still the same. A function
that reaches more than can be seen is recorded operation by operation. Kept programs hold no models and no arrays.
"""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from flax import nnx

from lazymods import _compat
from lazymods._errors import NOT_TRACEABLE, LazyError, Problem
from lazymods._frames import entry
from lazymods._refusals import refuse_uncallable
from lazymods.lazytensor import reach
from lazymods.lazytensor.reach import Looked, UnknownError, is_input, is_object

_programs: OrderedDict[Any, Any] = OrderedDict()
_MOST = 256


class _Local(threading.local):
    call: Any = None  # the _Call that this thread is in: a program asks for it when it is traced


_LOCAL = _Local()


@entry
def value_and_grad(f: Callable[..., Any], argnums: Any = 0, *, has_aux: bool = False) -> Callable[..., Any]:
    """Return a function that computes a value and its gradients as one operation.

    It is ``nnx.value_and_grad``, compiled, and cached by the code of ``f`` and of what it calls. Models,
    arrays and floats that these name or close over are inputs, and what ``f`` does to Variables is done to them; other
    constants are part of the key. What ``f`` computes of a float is an array, as under ``jax.jit``. If ``f`` reaches
    anything else (attributes of plain objects, lists, functions of ``lm.jit``, ``np.random``), writes names, decides on
    values, or returns what no program can give, then nothing is cached, and it is ``nnx.value_and_grad``.

    Args:
        f: Returns a scalar, or a pair of a scalar and something else.
        argnums: Which arguments to differentiate: int, tuple of ints, or ``nnx.DiffState``.
        has_aux: Whether ``f`` returns a pair.

    Returns:
        A function of the same arguments that returns ``(value, gradients)``.

    Raises:
        ArgumentError: ``f`` can't be called.
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
    refuse_uncallable("lm.lazytensor.value_and_grad", f)
    if isinstance(argnums, list):  # as nnx.value_and_grad takes it; part of a key here
        argnums = tuple(argnums)

    @functools.wraps(f)
    def compute(*args: Any, **kwargs: Any) -> Any:
        try:
            try:
                call = _Call(f, args, kwargs)
            except UnknownError:
                return nnx.value_and_grad(f, argnums=argnums, has_aux=has_aux)(*args, **kwargs)
            try:
                return call.run(argnums, has_aux)
            except _NoProgramError:
                return nnx.value_and_grad(f, argnums=argnums, has_aux=has_aux)(*args, **kwargs)
        except Exception as error:
            _compat.hide_frames(error)
            raise

    return compute


class _Call:
    """A call, taken apart: what is hashable about it, and its inputs."""

    def __init__(self, f: Any, args: Any, kwargs: Any) -> None:
        self.looked: Looked = reach.look(f)
        leaves, self.tree = jax.tree.flatten((args, kwargs, self.looked.inputs), is_leaf=is_object)
        self.objects = [x for x in leaves if is_object(x)]
        self.arrays = [x for x in leaves if is_input(x)]
        self.static = [_OBJECT if is_object(x) else _INPUT if is_input(x) else x for x in leaves]
        self.fixed = tuple([x if x is _OBJECT or x is _INPUT else reach.fixed(x) for x in self.static])
        self.held = reach.of_objects(self.objects)
        self.graph, state = nnx.split(self.objects)
        self.values, self.structure = jax.tree.flatten(state)

    def run(self, argnums: Any, has_aux: bool) -> Any:
        tree = (self.tree, repr(self.tree))  # which tells True from 1 in the static fields of pytrees
        impl = jax.config.jax_default_prng_impl  # type: ignore[attr-defined]  # in no key of jax.jit
        key = (self.looked.key, tree, self.fixed, self.held, self.graph, self.structure, argnums, has_aux, impl)
        program = _programs.get(key)
        if program is _NONE:
            raise _NoProgramError
        if program is None:
            program = _programs[key] = jax.jit(functools.partial(_body, argnums, has_aux))
            if len(_programs) > _MOST:
                _programs.popitem(last=False)
        _programs.move_to_end(key)
        before, _LOCAL.call = _LOCAL.call, self
        try:
            out, changed = program(self.values, self.arrays)
        except (_NoProgramError, *NOT_TRACEABLE):
            _programs[key] = _NONE
            raise _NoProgramError from None
        finally:
            _LOCAL.call = before
        if changed:
            new = [changed.get(i, v) for i, v in enumerate(self.values)]
            nnx.update(self.objects, jax.tree.unflatten(self.structure, new))
        return jax.tree.map(self._plain, out, is_leaf=_is_static)

    def _plain(self, leaf: Any) -> Any:
        if isinstance(leaf, _Given):
            return self.arrays[leaf.number]
        return leaf.value if isinstance(leaf, _Value) else leaf

    def rebuilt(self, objects: list[Any], arrays: Any) -> tuple[Any, Any, Any]:
        """Return function and arguments with other inputs."""
        given, inputs = iter(objects), iter(arrays)
        leaves = [next(given) if s is _OBJECT else next(inputs) if s is _INPUT else s for s in self.static]
        args, kwargs, held = jax.tree.unflatten(self.tree, leaves)
        return self.looked.build(held), args, kwargs


_OBJECT, _INPUT, _NONE = object(), object(), object()


# ---------------------------------------------------------------- what is returned and is no array


class _NoProgramError(Exception):
    """The function returns something that no program can give."""


@jax.tree_util.register_static
class _Value(NamedTuple):
    """A number, a text or the like that the function returns: the same at each call of its program."""

    kind: type
    value: Any


@jax.tree_util.register_static
class _Given(NamedTuple):
    """An input that the function returns as it is, by number: a Python number stays one."""

    number: int


def _is_static(leaf: Any) -> bool:
    return isinstance(leaf, (_Value, _Given))


def _output(numbers: dict[int, int], leaf: Any) -> Any:
    """Return what a program can give for something that a function returns; ``numbers`` are those of its inputs."""
    if id(leaf) in numbers:
        return _Given(numbers[id(leaf)])
    if isinstance(leaf, jax.Array):
        return leaf
    if type(leaf) in (bool, int, float, complex, str, bytes):
        return _Value(type(leaf), leaf)
    raise _NoProgramError


def _body(argnums: Any, has_aux: bool, values: Any, arrays: Any) -> tuple[Any, dict[int, Any]]:
    """Compute value and gradients; return also the leaves of the state that have changed, by number."""
    call: _Call = _LOCAL.call
    objects = nnx.merge(call.graph, jax.tree.unflatten(call.structure, values))
    f, args, kwargs = call.rebuilt(objects, arrays)
    out = nnx.value_and_grad(f, argnums=argnums, has_aux=has_aux)(*args, **kwargs)
    after, state = nnx.split(objects)
    if after != call.graph:
        got = "a function that adds attributes to a module, removes some, or changes static ones"
        needed = "a function that changes values of Variables only: it is one operation, compiled once"
        raise LazyError(Problem("lm.lazytensor.value_and_grad", got, needed, "nnx.value_and_grad(f)"))
    new = jax.tree.leaves(state)
    (value, *aux), gradients = out if has_aux else ((out[0],), out[1])
    numbers = {id(given): number for number, given in enumerate(arrays)}
    aux = jax.tree.map(functools.partial(_output, numbers), aux, is_leaf=is_object)
    out = ((value, *aux), gradients) if has_aux else out
    return out, {i: leaf for i, leaf in enumerate(new) if leaf is not values[i]}
