"""Hooks on any nnx module, with PyTorch's names and arguments.

A module with forward or backward hooks has an intercepting class: a subclass of its own class, made once for each,
whose ``__call__`` runs the hooks. Removing the last hook gives the module its own class back, so a module
without hooks pays nothing. The hooks are a static attribute of the module: copies, pickles and NNX transforms
keep them. A transform brings an object up to date only with one of its own class: a hook that is registered or removed
inside of one is so outside as well.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from flax import nnx

from lazymods import _compat, _graph
from lazymods._errors import LazyError, Problem
from lazymods._frames import entry
from lazymods._graph import HOOKS, REMOVED_HOOKS, STATE, hooks_of
from lazymods._layer import first_call, lifecycle
from lazymods._model.backward_hooks import AFTER, BEFORE, is_running, run_with_hooks
from lazymods._refusals import wrong_argument

ids = itertools.count()  # of hooks
_AT_CALLS = frozenset(("forward_pre", "forward", BEFORE, AFTER))
_LOCK = lifecycle.LOCK  # a module's hooks and its class change together, as when a lazy layer becomes its class


class Hook(NamedTuple):
    """One registered hook."""

    id: int
    kind: str
    function: Callable[..., Any]
    with_kwargs: bool = False
    early: bool = False
    always: bool = False


class RemovableHandle:
    """Removes a hook; also a context manager that removes it at the end.

    Args:
        modules: The module that the hook is on, outside of and inside the transforms that are running.
        hook: The hook.
    """

    def __init__(self, modules: Iterable[nnx.Module], hook: Hook) -> None:
        self._modules = [weakref.ref(module) for module in modules]
        self._id = hook.id

    def remove(self) -> None:
        """Remove the hook; removing it twice does nothing.

        Raises:
            LazyError: If a compiled function that has the module as an argument is running, and this is called by it.
        """
        with _LOCK:
            modules = [module for reference in self._modules if (module := reference()) is not None]
            _refuse_while_running("removal", modules)
            if is_running():
                REMOVED_HOOKS.add(self._id)
            for module in modules:
                for same in _compat.incarnations(module):  # it may be an argument of a transform that is running
                    _set_hooks(same, tuple(h for h in hooks_of(same) if h.id != self._id))

    def __enter__(self) -> RemovableHandle:
        """Return the handle."""
        return self

    def __exit__(self, *error: object) -> None:
        """Remove the hook."""
        self.remove()


def _refuse_while_running(what: str, modules: Iterable[nnx.Module]) -> None:
    """Refuse to change the hooks of a module that a compiled function is about to give back as it was.

    Raises:
        LazyError: If a callback of such a function asks for that.
    """
    if is_running() or _compat.current_trace() is not _compat.eval_trace():
        return  # in a hook, or while it is traced: then it is so at the end as well
    for module in filter(_compat.will_update, modules):
        got = f"the {what} of a hook by a callback of a compiled function that has the module as an argument"
        needed = "that before the call or after it: the function gives the module back with the hooks that it had"
        name = _graph.place(module, unhooked_class(type(module)).__name__)
        raise LazyError(Problem(name, got, needed, "handle.remove()  # this line, where the function has returned"))


def register(module: nnx.Module, hook: Hook, *, first: bool = False) -> RemovableHandle:
    """Put a hook on a module.

    Args:
        module: Any nnx module.
        hook: The hook.
        first: Before all that are there.

    Returns:
        A handle whose ``remove()`` removes it.

    Raises:
        ArgumentError: If ``module`` is no nnx module, or what the hook runs is not callable.
        LazyError: If a compiled function that has the module as an argument is running, and this is called by it.
    """
    if not isinstance(module, nnx.Module):
        raise wrong_argument("module", module, "hooks go on an nnx.Module", "lm.register_forward_hook(module, hook)")
    if not callable(hook.function):
        raise wrong_argument("hook", hook.function, "a hook is a function", "lm.register_forward_hook(module, hook)")
    with _LOCK:
        _refuse_while_running("registration", [module])
        modules = _compat.incarnations(module)
        for same in modules:
            hooks = hooks_of(same)
            _set_hooks(same, (hook, *hooks) if first else (*hooks, hook))
    return RemovableHandle(modules, hook)


def _set_hooks(module: nnx.Module, hooks: tuple[Hook, ...]) -> None:
    running = not hooks and isinstance(module, Hooked) and is_running()
    if hooks or running:  # at its end a transform wants the class that the module had after the forward pass
        object.__setattr__(module, HOOKS, hooks)
    else:
        vars(module).pop(HOOKS, None)
    if running:
        return
    calls = any(h.kind in _AT_CALLS for h in hooks)
    own = unhooked_class(type(module))
    wanted = hooked_class(own) if calls else own
    if type(module) is not wanted:
        _compat.set_class(module, wanted)


def _inside_transform() -> bool:
    return _compat.current_trace() is not _compat.eval_trace() or _compat.transforms_running()


# ---------------------------------------------------------------- the intercepting class


class Hooked(nnx.Module):
    """Mixed into a class whose instances have forward or backward hooks."""

    _lazymods_own: type

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the hooks around the forward of the module's own class."""
        hooks = hooks_of(self)
        if not hooks and not _inside_transform():  # the last one was removed inside one
            with _LOCK:
                _set_hooks(self, ())
        pre = [h for h in hooks if h.kind == "forward_pre"]
        waiting = [h for h in hooks if h.kind == "forward"]
        backward = [h for h in hooks if h.kind in (BEFORE, AFTER)]
        try:
            for hook in (h for h in pre if h.early):
                args, kwargs = _run_pre(self, hook, args, kwargs)
            with first_call.initialized(self, args, kwargs) if STATE in vars(self) else contextlib.nullcontext():
                for hook in (h for h in pre if not h.early):
                    args, kwargs = _run_pre(self, hook, args, kwargs)
                forward = functools.partial(Hooked._forward, self, waiting, kwargs)
                return run_with_hooks(self, backward, forward, args) if backward else forward(*args)
        except Exception as error:
            for hook in (h for h in waiting if h.always):
                try:
                    _run_post(self, hook, args, kwargs, None)
                except Exception as second:  # the first error is the one to tell
                    error.add_note(f"an always_call hook failed as well: {second!r}")
            _compat.hide_frames(error)
            raise

    def _forward(self, waiting: list[Hook], kwargs: dict[str, Any], *args: Any) -> Any:
        """Call the module's own class, then the forward hooks, each of which leaves the list before it runs."""
        output = unhooked_class(type(self)).__call__(self, *args, **kwargs)
        while waiting:
            output = _run_post(self, waiting.pop(0), args, kwargs, output)
        return output

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Pickle by the module's own class, which can be imported."""
        return _restore, (unhooked_class(type(self)),), self.__getstate__()  # type: ignore[attr-defined]


def _run_pre(module: Any, hook: Hook, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    if hook.with_kwargs:
        result = hook.function(module, args, kwargs)
        if result is None:
            return args, kwargs
        if not (isinstance(result, tuple) and len(result) == 2):
            needed = "None, or the pair of positional arguments and those by name"
            raise wrong_argument("a forward pre-hook with kwargs", result, needed, "return args, kwargs")
        return result
    result = hook.function(module, args)
    if result is None:
        return args, kwargs
    return (result if isinstance(result, tuple) else (result,)), kwargs


def _run_post(module: Any, hook: Hook, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    call = (module, args, kwargs, output) if hook.with_kwargs else (module, args, output)
    result = hook.function(*call)
    return output if result is None else result


@functools.cache
def hooked_class(cls: type) -> type:
    """Return the intercepting subclass of a class; it becomes the intercepting subclass of what ``cls`` becomes."""
    target = getattr(cls, "cls_to_become", None)
    namespace = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "_lazymods_own": cls,
        "cls_to_become": None if target is None else hooked_class(target),
    }
    return _compat.put_in_front(Hooked, cls, cls.__name__, namespace)


def unhooked_class(cls: type) -> type:
    """Return a module's own class."""
    return cls._lazymods_own if issubclass(cls, Hooked) else cls


def _restore(cls: type) -> Any:
    return object.__new__(hooked_class(cls))


# ---------------------------------------------------------------- forward hooks (public)


@entry
def register_forward_pre_hook(
    module: nnx.Module, hook: Callable[..., Any], *, prepend: bool = False, with_kwargs: bool = False
) -> RemovableHandle:
    """Run a hook before every call of a module.

    On a lazy layer, hooks see the initialized layer, as in PyTorch; with ``prepend`` they run before the sizes
    are inferred, and may change what they are inferred from.

    Args:
        module: Any nnx module.
        hook: ``hook(module, args) -> None | args``; with ``with_kwargs``,
            ``hook(module, args, kwargs) -> None | (args, kwargs)``.
        prepend: Run before all hooks that are registered, and before a lazy layer is initialized.
        with_kwargs: Give the hook the keyword arguments as well.

    Returns:
        A handle whose ``remove()`` removes the hook.

    Raises:
        ArgumentError: If ``module`` is no nnx module or ``hook`` is not callable.
    """
    entry = Hook(next(ids), "forward_pre", hook, with_kwargs, early=prepend)
    return register(module, entry, first=prepend)


@entry
def register_forward_hook(
    module: nnx.Module,
    hook: Callable[..., Any],
    *,
    prepend: bool = False,
    with_kwargs: bool = False,
    always_call: bool = False,
) -> RemovableHandle:
    """Run a hook after every call of a module.

    Args:
        module: Any nnx module.
        hook: ``hook(module, args, output) -> None | output``; with ``with_kwargs``,
            ``hook(module, args, kwargs, output) -> None | output``.
        prepend: Run before all forward hooks that are registered.
        with_kwargs: Give the hook the keyword arguments as well.
        always_call: Run the hook even if the forward raised; ``output`` is None then.

    Returns:
        A handle whose ``remove()`` removes the hook.

    Raises:
        ArgumentError: If ``module`` is no nnx module or ``hook`` is not callable.
    """
    entry = Hook(next(ids), "forward", hook, with_kwargs, always=always_call)
    return register(module, entry, first=prepend)


# ---------------------------------------------------------------- state dict hooks (public)


@entry
def register_state_dict_pre_hook(module: nnx.Module, hook: Callable[..., Any]) -> RemovableHandle:
    """Run ``hook(module, prefix, keep_vars)`` before :func:`lazymods.state_dict` collects a module's entries.

    Args:
        module: Any nnx module.
        hook: Returns nothing; ``prefix`` is the module's dotted path with a dot at its end, ``keep_vars`` is True.

    Returns:
        A handle whose ``remove()`` removes the hook.

    Raises:
        ArgumentError: If ``module`` is no nnx module or ``hook`` is not callable.
    """
    return register(module, Hook(next(ids), "state_dict_pre", hook))


@entry
def register_state_dict_post_hook(module: nnx.Module, hook: Callable[..., Any]) -> RemovableHandle:
    """Run ``hook(module, state_dict, prefix, local_metadata)`` after a module's entries are in the state dict.

    Args:
        module: Any nnx module.
        hook: May edit ``state_dict`` in place; returns nothing.

    Returns:
        A handle whose ``remove()`` removes the hook.

    Raises:
        ArgumentError: If ``module`` is no nnx module or ``hook`` is not callable.
    """
    return register(module, Hook(next(ids), "state_dict_post", hook))


@entry
def register_load_state_dict_pre_hook(module: nnx.Module, hook: Callable[..., Any]) -> RemovableHandle:
    """Run a hook before :func:`lazymods.load_state_dict` reads a module's entries.

    It runs before lazymods looks at the entries, so it may rename and reshape those of a lazy layer.

    Args:
        module: Any nnx module.
        hook: ``hook(module, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys,
            error_msgs)``; may edit ``state_dict``, a copy, in place; texts appended to ``error_msgs`` are raised.

    Returns:
        A handle whose ``remove()`` removes the hook.

    Raises:
        ArgumentError: If ``module`` is no nnx module or ``hook`` is not callable.
    """
    return register(module, Hook(next(ids), "load_state_dict_pre", hook))


@entry
def register_load_state_dict_post_hook(module: nnx.Module, hook: Callable[..., Any]) -> RemovableHandle:
    """Run ``hook(module, incompatible_keys)`` after a load, children before parents.

    Args:
        module: Any nnx module.
        hook: May edit ``incompatible_keys.missing`` and ``.unexpected`` in place, which decides whether a strict
            load raises; returns nothing.

    Returns:
        A handle whose ``remove()`` removes the hook.

    Raises:
        ArgumentError: If ``module`` is no nnx module or ``hook`` is not callable.
    """
    return register(module, Hook(next(ids), "load_state_dict_post", hook))
