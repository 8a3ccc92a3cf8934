"""``lm.jit``, as a function and as a decorator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar, overload

from lazymods._refusals import refuse_uncallable, wrong_argument
from lazymods.compile.function import JitFunction

P = ParamSpec("P")
R = TypeVar("R")


@overload
def jit(
    function: Callable[P, R],
    *,
    donate_state: bool = False,
    static_argnames: str | Sequence[str] = (),
    max_paths: int = 16,
    check: bool = False,
) -> JitFunction[P, R]: ...


@overload
def jit(
    *,
    donate_state: bool = False,
    static_argnames: str | Sequence[str] = (),
    max_paths: int = 16,
    check: bool = False,
) -> Callable[[Callable[P, R]], JitFunction[P, R]]: ...


def jit(
    function: Any = None,
    *,
    donate_state: bool = False,
    static_argnames: str | Sequence[str] = (),
    max_paths: int = 16,
    check: bool = False,
) -> Any:
    """Compile a function or module: the meaning of NNX, with the overhead of ``jax.jit`` on a flat list of arrays.

    Modules, optimizers, metrics and rngs may be arguments, anywhere in a pytree, or closed over. What the function
    does to them is done: new values, new Variables, other submodules, modes, shared references. Any change between
    two calls is seen: of structure, class, static attributes by type and value, sharing, shapes, dtypes and the
    settings of JAX. Each combination is traced and compiled once, for models of equal structure together.

    The first call of a lazy model compiles once as well: its parameters are made, and are inputs of the program. If its
    layers are first called inside a transform such as ``nnx.grad``, an abstract evaluation sizes them first.

    The function is traced on copies: what fails changes nothing, and other threads may use the model meanwhile.

    Dicts and lists among the arguments are the caller's: the order of their keys counts, and what the function writes
    to them is written. Other pytrees, such as a dataclass that JAX knows, can't be written to, nor can a container that
    is among the arguments in several places.

    Numbers and texts that the function closes over by themselves are constants, as for ``jax.jit``; those in an
    object that holds a model, such as ``self.rate`` next to ``self.model``, are seen to change if the function reads
    them.

    Args:
        function: A function, a method, or a module, which is then called. Left out, ``jit`` is a decorator.
        donate_state: Donate the state that is written: its old arrays are deleted and their memory is used again.
        static_argnames: Parameters that the program depends on by value, a name or several.
        max_paths: How many ways through Python decisions on array values one input signature may have.
        check: Run every call also in plain Python, on a deep copy made before, and compare outputs, state, structure,
            order, metadata, static attributes, sharing and random state: exactly, and floats in arrays to rounding.
            A call then takes longer than both together. ``LAZYMODS_CHECK=1`` in the environment turns it on
            for all functions that are made.

    Returns:
        A function of the same arguments. It is a method when it is defined in a class. Its ``cache_info()`` says
        how many compiled signatures it keeps, see :func:`set_cache_size`.

    Raises:
        ArgumentError: If ``function`` can't be called.
        ConfigurationError: If ``static_argnames`` names no parameter.
        ArgumentError: If ``max_paths`` is less than 1.
        LazyError: At a call: it writes to an argument that it can't write to. With ``check``: the first difference
            from plain Python, by path.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> import lazymods as lm
        >>> from flax import nnx
        >>> model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
        >>> optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
        >>> @lm.jit
        ... def step(model, optimizer, x):
        ...     loss, grads = nnx.value_and_grad(lambda m: (m(x) ** 2).mean())(model)
        ...     optimizer.update(model, grads)
        ...     return loss
        >>> first, second = step(model, optimizer, jnp.ones((2, 3))), step(model, optimizer, jnp.ones((2, 3)))
        >>> bool(second < first), step.cache_info().currsize
        (True, 1)
    """
    if max_paths < 1:
        needed = "a function has at least 1 path"
        raise wrong_argument("lm.jit(max_paths=...)", max_paths, needed, "lm.jit(f, max_paths=16)")
    names = (static_argnames,) if isinstance(static_argnames, str) else tuple(static_argnames)

    def compiled(function: Any) -> JitFunction:
        refuse_uncallable("lm.jit", function)
        return JitFunction(function, donate_state, names, max_paths, check)

    return compiled if function is None else compiled(function)
