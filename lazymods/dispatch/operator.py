"""An operator: kernels by key, and the function that picks one."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any, TypeVar, overload

import jax
from flax import nnx
from jax.core import Tracer

from lazymods import _compat
from lazymods.dispatch import table
from lazymods.dispatch.arguments import Layout, split
from lazymods.dispatch.call import Call, slots
from lazymods.dispatch.holdings import held
from lazymods.dispatch.keys import EXPLICIT, IMPLICIT, KEYS, is_pair
from lazymods.dispatch.places import in_lazy_block, is_auto_mesh, key_here, platform_key
from lazymods.dispatch.primitives import Program, shaped
from lazymods.dispatch.programs import Anywhere, on_platform
from lazymods.dispatch.refusals import names, refused
from lazymods.dispatch.table import Listing

Kernel = TypeVar("Kernel")

_REGISTERED = jax.make_user_context(0)
"""A number that is part of the key of every program that JAX compiles: it counts what was registered too late."""

_lock = threading.Lock()


class Operator:
    """A function with a kernel for each platform, chosen when a program is compiled.

    Kernels are functions of arrays, and of anything else, which they get as it is. Those of ``Autograd`` keys are pairs
    ``(forward, backward)``, as ``jax.custom_vjp.defvjp`` takes them. The kernel of ``Meta`` gets
    ``jax.ShapeDtypeStruct`` for arrays, and returns them.

    Args:
        name: How errors and profiles call it.

    Raises:
        RegistrationError: If ``name`` is no text, or empty.

    Example:
        >>> import jax, jax.numpy as jnp, lazymods as lm
        >>> double = lm.dispatch.Operator("double")
        >>> @double.register("CompositeImplicitAutograd")
        ... def anywhere(x):
        ...     return x + x
        >>> double(jnp.arange(3.0))
        Array([0., 2., 4.], dtype=float32)
        >>> double.dispatch_table()["AutogradCPU"]
        Entry(key='CompositeImplicitAutograd', kind='math kernel')
    """

    def __init__(self, name: str) -> None:
        if not isinstance(name, str) or not name:
            raise refused(str(name), repr(name), "a name, by which errors call it", "Operator('my_operator')")
        self.name: str = name
        self.__name__ = re.sub(r"\W", "_", name)
        self._kernels: dict[str, Any] = {}  # never changed: replaced
        self._traced = False  # whether a program may have been compiled with these

    @overload
    def register(self, key: str, kernel: Kernel) -> Kernel: ...

    @overload
    def register(self, key: str) -> Callable[[Kernel], Kernel]: ...

    def register(self, key: str, kernel: Any = None) -> Any:
        """Register a kernel. Programs that were compiled with the operator before are compiled anew.

        Args:
            key: One of :meth:`keys`.
            kernel: A function; a pair of them for an Autograd key. If it is left out, this is a decorator.

        Returns:
            The kernel.

        Raises:
            RegistrationError: If the key is unknown or has a kernel, if the operator has the other composite, or if the
                kernel is no function, or no pair for an Autograd key.
        """
        self._check_key(key)
        if kernel is None:
            return lambda function: self.register(key, function)
        self._check_kernel(key, kernel)
        with _lock:
            self._check_key(key)
            kernels = {**self._kernels, key: kernel}
            self._kernels = {k: kernels[k] for k in KEYS if k in kernels}
            if self._traced:
                self._traced = False
                _REGISTERED.set_global(_REGISTERED.get_global() + 1)
        return kernel

    def _check_key(self, key: str) -> None:
        had = self._kernels
        if key not in KEYS:
            what, needed = f"the key {key!r}", f"one of {names(KEYS)}"
            raise refused(self.name, what, needed, f"op.register({_nearest(key)!r}, kernel)")
        if key in had:
            what = f"a second kernel for {key}; registered: {names(had)}"
            line = "lm.dispatch.Operator(name)  # one of its own; or another key"
            raise refused(self.name, what, "one kernel a key", line)
        for one, other in ((EXPLICIT, IMPLICIT), (IMPLICIT, EXPLICIT)):
            if key == one and other in had:
                what = f"a kernel for {key}; registered: {names(had)}"
                needed = f"one composite: {EXPLICIT} leaves gradients to Autograd kernels, {IMPLICIT} has its own"
                raise refused(self.name, what, needed, "lm.dispatch.Operator(name)  # with one of the two")

    def _check_kernel(self, key: str, kernel: Any) -> None:
        if is_pair(key):
            fits = isinstance(kernel, (tuple, list)) and len(kernel) == 2 and all(map(callable, kernel))
            needed = "a pair (forward, backward), as jax.custom_vjp.defvjp takes them: the derivative needs both"
            write = f"op.register({key!r}, (forward, backward))"
        else:
            fits, needed, write = callable(kernel), "a function of the operator's arguments", f"op.register({key!r}, f)"
        if not fits:
            what = f"{type(kernel).__name__} as the kernel of {key}; registered: {names(self._kernels)}"
            raise refused(self.name, what, needed, write)

    # ------------------------------------------------------------ what it has

    def keys(self) -> Sequence[str]:
        """Return all keys that a kernel can be registered for, each runtime key before its Autograd key."""
        return _Keys(KEYS)

    def registrations(self) -> Listing:
        """Return the kernels by registered key; it prints one line a key."""
        kernels = self._kernels
        return Listing(f"registrations of {self.name}", kernels, {k: _named(v) for k, v in kernels.items()})

    def dispatch_table(self) -> Listing:
        """Return for each runtime key which kernel runs, and why; it prints one line a key.

        Returns:
            A mapping to entries with ``.key``, the registered key whose kernel is used, or None, and ``.kind``.

        References:
            "Let's talk about the PyTorch dispatcher", and the computed table of ``torch._python_dispatcher``.
        """
        return table.dispatch_table(self.name, self._kernels)

    def __repr__(self) -> str:
        return f"Operator({self.name!r}, registered: {names(self._kernels)})"

    def __copy__(self) -> Operator:
        return self  # as a function is: a copy of a model calls the same operator

    def __deepcopy__(self, memo: dict[int, Any]) -> Operator:
        return self

    # ------------------------------------------------------------ calling it

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the kernel of the platform.

        Args:
            *args: Arrays, pytrees of them, and anything else.
            **kwargs: The same by name.

        Returns:
            What the kernel returns, as arrays.

        Raises:
            NoKernelError: If there is none for the platform.
            RegistrationError: If kernels differ in the shapes or dtypes that they return.
        """
        try:
            operands, layout = split(self.name, args, kwargs)
            key = platform_key(operands)
            if key is None:
                self._traced = True  # before the kernels are read: another thread may register one meanwhile
            call = Call(self.name, MappingProxyType(self._kernels), layout, slots(operands))
            holding = list(held(call.kernels.values()))
            _refuse_held(call, holding, compiled=key is None)
            if key is not None:
                return on_platform(call, key)(*operands)
            if not call.kernels.keys().isdisjoint(("Lazy", "AutogradLazy")) and in_lazy_block():
                return on_platform(call, "Lazy")(*operands)
            if not holding and call.meta is not None and is_auto_mesh() and not _belongs_here(layout):
                leaves = shaped(_Compiled(self.__name__, call), operands, call.meta.leaves())
                return jax.tree.unflatten(jax.tree.structure(call.meta.shapes), leaves)
            return _compiled(self.__name__, call)(*operands)
        except Exception as error:
            _compat.hide_frames(error)
            raise


def _belongs_here(layout: Layout) -> bool:
    """Whether kernels are to be traced at once, with the call: the axes that they may name are there only now.

    Nor can be put off what they do to a mutable array: it is a part of the program around.
    """
    return layout.has_references() or _compat.named_axes.are_there()


def _refuse_held(call: Call, holding: Sequence[Any], compiled: bool) -> None:
    """Refuse what kernels hold beside their arguments, where it would be an old value or have no gradient."""
    registered = f"registered: {names(call.kernels)}"
    if any(map(is_pair, call.kernels)) and any(isinstance(x, Tracer) for x in holding):
        what = f"kernels with a pair for their derivative, which hold a traced value in a closure; {registered}"
        needed = "kernels of their arguments alone: no gradient would come to that value"
        raise refused(call.name, what, needed, "op(x, value)  # the value as one more argument of the operator")
    node = next((x for x in holding if isinstance(x, (nnx.Pytree, nnx.Variable))), None)
    if compiled and node is not None:
        what = f"a kernel that holds a {type(node).__name__}, in a program that is compiled; {registered}"
        needed = "kernels of their arguments alone: the program would go on with the parameters of now"
        raise refused(call.name, what, needed, "op(x, kernel)  # the parameters as arguments of the operator")


def _compiled(name: str, call: Call) -> Callable[..., Any]:
    """Return a call as a compiled function of its own: a choice of platforms is lowered whole, under its name."""
    function = Anywhere(call, key_here()).function()

    def operator(*operands: Any) -> Any:
        return function(*operands)

    operator.__name__ = operator.__qualname__ = name
    return jax.jit(operator)


class _Compiled(Program):
    """A call as a program; see :mod:`lazymods.dispatch.primitives`."""

    def __init__(self, name: str, call: Call, axes: tuple[Any, ...] = ()) -> None:
        self.name, self._name, self._call, self._axes = call.name, name, call, axes

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Compiled) and (self._call, self._axes) == (other._call, other._axes)

    def __hash__(self) -> int:
        return hash((self._call, self._axes))

    def __call__(self, *operands: Any) -> list[Any]:
        function = _compiled(self._name, self._call)
        for axes, size in self._axes:
            function = jax.vmap(function, in_axes=axes, axis_size=size)
        return jax.tree.leaves(function(*operands))

    def mapped(self, axes: Sequence[int | None], size: int) -> _Compiled:
        return _Compiled(self._name, self._call, (*self._axes, (tuple(axes), size)))


class _Keys(tuple[str, ...]):
    """Keys that print one a line."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "\n".join(self)


def _nearest(key: object) -> str:
    return next((k for k in KEYS if isinstance(key, str) and k.lower() == key.lower()), IMPLICIT)


def _named(kernel: Any) -> str:
    if isinstance(kernel, (tuple, list)):
        return f"({', '.join(map(_named, kernel))})"
    return getattr(kernel, "__qualname__", None) or repr(kernel)
