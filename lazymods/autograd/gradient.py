"""``nnx.grad`` and ``nnx.value_and_grad`` of what is trained, by either convention for complex parameters."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from lazymods import _compat
from lazymods._frames import entry
from lazymods._refusals import refuse_uncallable
from lazymods.autograd import variable_hooks
from lazymods.autograd.freezing import trainable
from lazymods.autograd.refusals import from_first, refuse_argnums, refuse_arguments, returning_scalar
from lazymods.autograd.unreached import completed

Argnums = int | nnx.DiffState | Sequence[int | nnx.DiffState]


@entry
def grad(
    fn: Callable[..., Any], argnums: Argnums = 0, *, has_aux: bool = False, conjugate: bool = False
) -> Callable[..., Any]:
    """Differentiate a function of modules, arrays and pytrees of them, with the meaning of ``nnx.grad``.

    Hooks of Variables (:func:`lazymods.autograd.register_hook`) run on what was found. Threads may differentiate one
    model, or models that share parameters: one at a time in plain Python, all at once by
    ``lm.jit(lm.autograd.grad(fn))``.

    Args:
        fn: Returns a real scalar; with ``has_aux`` a pair of that and anything else.
        argnums: The arguments to differentiate with respect to. Of a module it is the parameters that
            :data:`lazymods.trainable` tells; an ``nnx.DiffState`` says others.
        has_aux: Whether ``fn`` returns a pair.
        conjugate: Whether the gradient of a complex argument is conjugated. JAX's derivative of a real function is
            the conjugate of the direction of steepest ascent; with True it is that direction, which optimizers need
            and PyTorch gives. Real ones are as they are.

    Returns:
        A function of the arguments of ``fn`` that returns the gradient, an ``nnx.State`` for a module, or a tuple of
        them for several arguments; with ``has_aux`` a pair of that and the rest.

    Raises:
        ArgumentError: If ``fn`` can't be called. When it is called, if ``fn`` returns no real scalar, or if what
            to differentiate by is an integer, or a module of which all is frozen.
        UninitializedError: When it is called, if a lazy layer of an argument is called first in there, or is not called
            at all and has no sizes yet.

    Example:
        >>> import jax.numpy as jnp, lazymods as lm
        >>> z = jnp.array([3 + 4j])
        >>> lm.autograd.grad(lambda z: jnp.abs(z).sum(), conjugate=True)(z)
        Array([0.6+0.8j], dtype=complex64)
    """

    def gradient(value: Any, found: Any) -> Any:
        return (found, value[1]) if has_aux else found

    return _differentiated("lm.autograd.grad", fn, argnums, has_aux, conjugate, gradient)


@entry
def value_and_grad(
    fn: Callable[..., Any], argnums: Argnums = 0, *, has_aux: bool = False, conjugate: bool = False
) -> Callable[..., Any]:
    """Do what :func:`grad` does, and return the value as well.

    Args:
        fn: As for :func:`grad`.
        argnums: As for :func:`grad`.
        has_aux: As for :func:`grad`.
        conjugate: As for :func:`grad`.

    Returns:
        A function of the arguments of ``fn`` that returns what ``fn`` returns, and the gradient.

    Raises:
        ArgumentError: If ``fn`` can't be called. When it is called, if ``fn`` returns no real scalar, or if what
            to differentiate by is an integer, or a module of which all is frozen.
        UninitializedError: When it is called, if a lazy layer of an argument is called first in there, or is not called
            at all and has no sizes yet.

    Example:
        >>> import jax.numpy as jnp, lazymods as lm
        >>> lm.autograd.value_and_grad(lambda x: (x**2).sum())(jnp.array([1.0, 2.0]))
        (Array(5., dtype=float32), Array([2., 4.], dtype=float32))
    """
    return _differentiated("lm.autograd.value_and_grad", fn, argnums, has_aux, conjugate, lambda *both: both)


def _differentiated(
    where: str,
    fn: Callable[..., Any],
    argnums: Argnums,
    has_aux: bool,
    conjugate: bool,
    result: Callable[[Any, Any], Any],
) -> Callable[..., Any]:
    """Return a function of the arguments of ``fn``, which returns what ``result`` makes of the value and the gradient.

    Raises:
        ArgumentError: If ``fn`` can't be called, or ``argnums`` are none.
    """
    refuse_uncallable(where, fn)
    refuse_argnums(where, argnums)
    checked = returning_scalar(where, fn, has_aux)

    @functools.wraps(fn)
    def differentiated(*args: Any, **kwargs: Any) -> Any:
        try:
            with _alone():
                given, by_name = _by_position(fn, args, kwargs)
                places = from_first(where, argnums, len(given))
                refuse_arguments(where, places, given)
                call = functools.partial(checked, **by_name) if by_name else checked
                value, found = nnx.value_and_grad(call, argnums=_of_trained(places), has_aux=has_aux)(*given)
                if conjugate:
                    found = _conjugated(found)
                hooked = _hooked(places, given, found)
            variable_hooks.run(hooked)
            return result(value, completed(where, found))
        except Exception as error:
            _compat.hide_frames(error)
            raise

    return differentiated


def _of_trained(argnums: Argnums) -> Any:
    if isinstance(argnums, int):
        return nnx.DiffState(argnums, trainable)
    return argnums if isinstance(argnums, nnx.DiffState) else tuple(_of_trained(argnum) for argnum in argnums)


def _alone() -> contextlib.AbstractContextManager[Any]:
    """Keep other threads out of here, except in a trace: the modules there are its own."""
    return variable_hooks.ALONE if _compat.current_trace() is _compat.eval_trace() else contextlib.nullcontext()


def _by_position(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the arguments by position, and those that can only be given by keyword, which nnx.grad does not take."""
    if not kwargs:
        return args, kwargs
    bound = inspect.signature(fn).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.args, bound.kwargs


def _hooked(argnums: Argnums, args: tuple[Any, ...], found: Any) -> Any:
    """Return the Variables with hooks that a gradient was found for; while no other thread takes models apart."""
    several = not isinstance(argnums, (int, nnx.DiffState))
    places = argnums if several else (argnums,)
    numbers = [n.argnum if isinstance(n, nnx.DiffState) else n for n in places]
    return variable_hooks.hooked(zip([args[n] for n in numbers], found if several else (found,), strict=True))


def _conjugated(tree: Any) -> Any:
    return jax.tree.map(lambda x: jnp.conj(x) if jnp.iscomplexobj(x) else x, tree)
