"""Gradients switched on and off for a block or a function: PyTorch's ``no_grad``, ``enable_grad``, ``inference_mode``.

What is computed where they are off is a constant to whatever differentiates around it: ``jax.grad``, ``nnx.grad``,
``jax.jvp``, of the function that has the block or of a compiled one. A ``jax.grad`` that is begun inside is a gradient
like any other, as in ``torch.func``. Each thread has a mode of its own; a thread begins with gradients on.
"""

from __future__ import annotations

import functools
import inspect
import threading
import types
from collections.abc import AsyncGenerator, Callable, Generator
from typing import Any, TypeVar, overload

from lazymods import _compat
from lazymods._errors import Problem, describe
from lazymods._refusals import ArgumentError, refuse_uncallable

Function = TypeVar("Function", bound=Callable[..., Any])


class GradMode:
    """A mode, as a context manager and as a decorator; it can be used any number of times, also inside of itself.

    It keeps nothing of the blocks that it began: those are with the thread.
    """

    def __init__(self, name: str, grad: bool, inference: bool | None) -> None:
        self._name, self._grad, self._inference = name, grad, inference

    def __repr__(self) -> str:
        """Show how it was made."""
        return f"lm.autograd.{self._name}"

    def __enter__(self) -> None:
        """Begin a block."""
        mode = _compat.Mode(self._grad, self._inference)
        _open.blocks.append((self, _compat.open_block(mode)))

    def __exit__(self, *_: object) -> None:
        """End the last block that this began in this thread."""
        blocks = _open.blocks
        last = next((i for i in reversed(range(len(blocks))) if blocks[i][0] is self), None)
        block = None if last is None else blocks.pop(last)[1]
        if block is not None:
            _compat.close_block(block)

    def __call__(self, fn: Function) -> Function:
        """Return a function that runs in this mode; of a generator or a coroutine, each of its steps.

        Args:
            fn: A function, a generator function, an ``async`` one of either, or a module.

        Returns:
            The function.

        Raises:
            ArgumentError: If ``fn`` can't be called, or is a class.
        """
        if inspect.isclass(fn):
            needed = "a function: of a class it would be the construction that runs in the mode"
            write = f"with {self!r}: model(x)  # or as a decorator of the methods that are to run in it"
            raise ArgumentError(Problem(repr(self), f"the class {fn.__name__}", needed, write))
        refuse_uncallable(repr(self), fn)
        around = next((wrap for is_kind, wrap in _KINDS if is_kind(fn)), _around_function)
        wrapped: Any = functools.wraps(fn)(around(self, fn))
        return wrapped


# ---------------------------------------------------------------- decorated functions


def _around_function(mode: GradMode, fn: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            with mode:
                return fn(*args, **kwargs)
        except Exception as error:
            _compat.hide_frames(error)
            raise

    return wrapped


def _around_generator(mode: GradMode, fn: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        return (yield from _in_mode(mode, fn(*args, **kwargs)))

    return wrapped


def _around_coroutine(mode: GradMode, fn: Callable[..., Any]) -> Callable[..., Any]:
    async def wrapped(*args: Any, **kwargs: Any) -> Any:
        return await _awaited(mode, fn(*args, **kwargs))

    return wrapped


def _around_async_generator(mode: GradMode, fn: Callable[..., Any]) -> Callable[..., Any]:
    async def wrapped(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
        steps = fn(*args, **kwargs)
        step = steps.asend(None)
        while True:
            try:
                made = await _awaited(mode, step)
            except StopAsyncIteration:
                return
            try:
                sent = yield made
            except GeneratorExit:
                await _awaited(mode, steps.aclose())
                raise
            except BaseException as error:
                step = steps.athrow(error)
            else:
                step = steps.asend(sent)

    return wrapped


_KINDS: tuple[tuple[Callable[[Any], bool], Callable[..., Any]], ...] = (
    (inspect.isasyncgenfunction, _around_async_generator),
    (inspect.iscoroutinefunction, _around_coroutine),
    (inspect.isgeneratorfunction, _around_generator),
)


def _in_mode(mode: GradMode, steps: Any) -> Generator[Any, Any, Any]:
    """Run each step of a generator or a coroutine in a mode, and nothing that happens between them."""
    try:
        with mode:
            made = steps.send(None)
        while True:
            try:
                sent = yield made
            except GeneratorExit:
                with mode:
                    steps.close()
                raise
            except BaseException as error:
                with mode:
                    made = steps.throw(error)
            else:
                with mode:
                    made = steps.send(sent)
    except StopIteration as stop:
        return stop.value


_awaited: Callable[..., Any] = types.coroutine(_in_mode)  # which is what coroutines may wait for


class _Open(threading.local):
    """The blocks that are open in this thread, each with what began it, the outermost first."""

    def __init__(self) -> None:
        self.blocks: list[tuple[GradMode, Any]] = []


_open = _Open()


@overload
def no_grad() -> GradMode: ...
@overload
def no_grad(fn: Function) -> Function: ...
def no_grad(fn: Callable[..., Any] | None = None) -> Any:
    """Switch gradients off for a block or a function: what is computed there is a constant.

    Values that are only passed through are as they were. Also in forward mode, and also in a function that is compiled
    with the block inside and differentiated later. Where nothing is differentiated it does nothing and costs nothing.

    Args:
        fn: A function, where this is used as a decorator without parentheses.

    Returns:
        A context manager and decorator, that can be used again; of ``fn``, the function.

    Raises:
        ArgumentError: If ``fn`` can't be called, or is a class.

    References:
        ``torch.no_grad``.

    Example:
        >>> import jax, jax.numpy as jnp, lazymods as lm
        >>> def f(x):
        ...     with lm.autograd.no_grad():
        ...         y = x * 3
        ...     return (x * y).sum()
        >>> jax.grad(f)(jnp.array([1.0, 2.0]))  # y is a constant
        Array([3., 6.], dtype=float32)
    """
    mode = GradMode("no_grad()", grad=False, inference=None)
    return mode if fn is None else mode(fn)


@overload
def enable_grad() -> GradMode: ...
@overload
def enable_grad(fn: Function) -> Function: ...
def enable_grad(fn: Callable[..., Any] | None = None) -> Any:
    """Switch gradients on again inside of :func:`no_grad`; inside of :func:`inference_mode` it does nothing.

    Args:
        fn: A function, where this is used as a decorator without parentheses.

    Returns:
        A context manager and decorator, that can be used again; of ``fn``, the function.

    Raises:
        ArgumentError: If ``fn`` can't be called, or is a class.

    References:
        ``torch.enable_grad``.

    Example:
        >>> import jax, jax.numpy as jnp, lazymods as lm
        >>> def f(x):
        ...     with lm.autograd.no_grad():
        ...         with lm.autograd.enable_grad():
        ...             y = x**2
        ...     return y.sum()
        >>> jax.grad(f)(jnp.array([1.0, 2.0]))
        Array([2., 4.], dtype=float32)
    """
    mode = GradMode("enable_grad()", grad=True, inference=None)
    return mode if fn is None else mode(fn)


@overload
def inference_mode(mode: bool = True) -> GradMode: ...
@overload
def inference_mode(mode: Function) -> Function: ...
def inference_mode(mode: Any = True) -> Any:
    """Switch gradients off for a block or a function so that nothing inside of it switches them on.

    PyTorch's refuses to differentiate through what was computed in it; here it is a constant.

    Args:
        mode: False ends inference mode for the block, and switches gradients on. Or a function, where this is used as
            a decorator without parentheses.

    Returns:
        A context manager and decorator, that can be used again; of a function, the function.

    Raises:
        ArgumentError: If ``mode`` is neither a bool nor a function.

    References:
        ``torch.inference_mode``.

    Example:
        >>> import jax, jax.numpy as jnp, lazymods as lm
        >>> @lm.autograd.inference_mode()
        ... def target(x):
        ...     with lm.autograd.enable_grad():
        ...         return x**2
        >>> jax.grad(lambda x: (x - target(x)).sum())(jnp.array([1.0, 2.0]))
        Array([1., 1.], dtype=float32)
    """
    if isinstance(mode, bool):
        return GradMode(f"inference_mode({'' if mode else False})", grad=not mode, inference=mode)
    if not callable(mode):
        needed = "True, or False, which ends inference mode for a block"
        write = "with lm.autograd.inference_mode(): ..."
        raise ArgumentError(Problem("lm.autograd.inference_mode", describe(mode), needed, write))
    return GradMode("inference_mode()", grad=False, inference=True)(mode)
