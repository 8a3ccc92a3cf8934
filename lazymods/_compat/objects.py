"""nnx objects: made without their constructors, of another class than they had, with other attributes.

An nnx object keeps two things for flax among its attributes: ``STATE``, with the trace in which it was born, and
``NODES``, which of its attributes are data. Their names and classes are found in an object that has nothing else;
what their names begin with (``_pytree__``) marks an attribute as no part of the model.
Seen with flax 0.12.8, 0.12.10 and 0.12.12.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import nnx

from lazymods._compat.finding import tell


class _Blank(nnx.Module):
    """What it holds, flax gave it."""


class _Opaque(nnx.Module, pytree=False):
    """An nnx class whose instances are no pytrees."""


def _names() -> tuple[str, str, str]:
    held = vars(_Blank())
    [nodes] = [name for name, value in held.items() if isinstance(value, Mapping)]
    [state] = [name for name in held if name != nodes]
    [is_pytree] = [name for name, value in vars(_Blank).items() if value is True and vars(_Opaque).get(name) is False]
    return state, nodes, is_pytree


try:
    STATE, NODES, _IS_PYTREE = _names()
except ValueError:
    raise AttributeError("flax.nnx objects hold other things than a state and the names of data") from None

_OWN = STATE[: STATE.rfind("__") + 2]  # flax, nnx.Dict and nnx.bridge.ToNNX look past attributes that begin so
if not _OWN or not NODES.startswith(_OWN):
    raise AttributeError("flax.nnx has no prefix for the names of its own attributes")

new_state: Any = type(vars(_Blank())[STATE])
"""Return what flax keeps under ``STATE`` in a new object."""

_mapping: Any = type(vars(_Blank())[NODES])


REFERENCES: tuple[type, ...] = (jax.Ref, *filter(None, [getattr(nnx.variablelib, "HijaxVariable", None)]))
"""What is written where it is, and no program returns: mutable arrays, and what ``nnx.Variable(hijax=True)`` makes."""


def own_name(name: str) -> str:
    """Return the name for an attribute of nnx objects that is no part of the model to anybody.

    ``nnx.bridge.ToNNX`` hands all others to linen as parameters, and ``nnx.Dict`` has all others for its items.
    """
    return f"{_OWN}lazymods_{name}"


def data_names(node: Any) -> dict[str, bool]:
    """Return which attributes of an nnx object are data."""
    return dict(getattr(node, NODES))


def names_of(node: Any) -> Mapping[str, bool]:
    """Return the same as it is held, not to be changed."""
    return getattr(node, NODES)


def declared_names(cls: type) -> set[str]:
    """Return the attributes of which an nnx class says itself whether they are data (``Pytree._pytree__nodes``)."""
    return set(getattr(cls, NODES))


def set_data_names(node: Any, names: dict[str, bool]) -> None:
    """Say which attributes of an nnx object are data; one mapping is shared while it is unchanged."""
    if dict(getattr(node, NODES, {})) != names or NODES not in vars(node):
        object.__setattr__(node, NODES, _mapping(names, copy=False))


def forget_data_name(node: Any, name: str) -> None:
    """Say nothing any more of whether an attribute of an nnx object is data."""
    if name in getattr(node, NODES):
        set_data_names(node, {k: v for k, v in data_names(node).items() if k != name})


def share_data_names(node: Any, names: Mapping[str, bool]) -> None:
    """Say which attributes of an nnx object are data, by a mapping that others share: it is never changed."""
    object.__setattr__(node, NODES, names)


def mapping_of_names(names: dict[str, bool]) -> Mapping[str, bool]:
    """Return what :func:`share_data_names` takes."""
    return _mapping(names, copy=False)


def new_object(cls: type, data: Mapping[str, Any] | None = None, static: Mapping[str, Any] | None = None) -> Any:
    """Make an nnx object without running its constructor, as ``nnx.Pytree``'s metaclass begins to.

    Args:
        cls: Its class.
        data: Attributes that are data.
        static: Attributes that are not.
    """
    node = object.__new__(cls)
    object.__setattr__(node, STATE, new_state())
    object.__setattr__(node, NODES, getattr(cls, NODES))
    if data is not None and static is not None:
        vars(node).update(static, **data)
        names = data_names(node) | dict.fromkeys(static, False) | dict.fromkeys(data, True)
        set_data_names(node, names | {NODES: False})  # as when a constructor returns
    return node


def check_without(cls: type, spared: Callable[[Any, str], bool]) -> dict[str, Any]:
    """Return methods for a subclass of ``cls`` that spare some attributes of a new object flax's check of each.

    Flax searches every value for arrays, which takes longer than to make the object. Overrides ``_check_value`` of
    ``nnx.Pytree``; ``check_pytree``, which runs when a constructor returns, calls it without a ``new_status``. Where
    flax has no such method, nothing is spared.
    """
    try:
        ordinary = cls._check_value  # type: ignore[attr-defined]
    except AttributeError as error:
        tell("the construction of lazy layers", str(error), "flax's own check of each attribute")
        return {}

    def check_value(self: Any, key: str, value: Any, new_status: Any) -> None:
        if new_status is not None or not spared(self, key):
            ordinary(self, key, value, new_status)

    return {"_check_value": check_value}


def set_class(node: Any, cls: type) -> None:
    """Change an object's class so that its GraphDef equals that of an object constructed as ``cls``."""
    object.__setattr__(node, "__class__", cls)


def set_attributes(node: Any, attributes: dict[str, Any]) -> None:
    """Give an object all its attributes at once: other threads see the old ones or the new ones, whole."""
    object.__setattr__(node, "__dict__", dict(attributes))


def put_in_front(front: type, cls: type, name: str, namespace: dict[str, Any]) -> Any:
    """Make a class as if its bases were ``(front, cls)`` whose instances can become ``cls``, whatever bases that has.

    Python lets an object change between classes of one layout, and takes the layout from the first base. So that is
    ``cls`` here, and the order in which methods are found is given by a metaclass. ``front`` has ``nnx.Module`` as its
    only base, and ``cls`` is one.
    """

    def mro(self: type) -> list[type]:
        return [self, front, *cls.__mro__] if self.__bases__ == (cls, front) else type.mro(self)

    return _make_class(cls, name, (cls, front), namespace, mro)


def laid_out_as(target: type, cls: type) -> Any:
    """Return a subclass of ``cls`` whose instances can become ``target``, a base of it; ``cls`` itself if they can.

    They can't if ``target`` has a base in front of ``nnx.Module``, as ``class Lazy(LazyModuleMixin, Target)`` has its
    layout of ``LazyModuleMixin``: see :func:`put_in_front`.
    """
    if _LAID_OUT not in vars(cls):
        setattr(cls, _LAID_OUT, cls if _can_become(cls, target) else _laid_out(target, cls))
    return vars(cls)[_LAID_OUT]


_LAID_OUT = "_lazymods__laid_out"


def _can_become(cls: type, target: type) -> bool:
    try:
        made = object.__new__(cls)
    except TypeError:  # an abstract class: whoever makes an object of it is told
        return True
    try:
        set_class(made, target)
    except TypeError:
        return not issubclass(cls, target)  # it says so when the time comes
    return True


def _laid_out(target: type, cls: type) -> Any:
    def mro(self: type) -> list[type]:
        return [self, *cls.__mro__] if self.__bases__ == (target, cls) else type.mro(self)

    def reduce(self: Any, protocol: Any) -> Any:
        return _new_of, (cls,), self.__getstate__()  # as an object of the class that has a name

    namespace = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    namespace |= {"cls_to_become": target, "__reduce_ex__": reduce}
    return _make_class(cls, cls.__name__, (target, cls), namespace, mro)


def _new_of(cls: Any) -> Any:
    return cls.__new__(cls)


def _make_class(cls: type, name: str, bases: Any, namespace: dict[str, Any], mro: Any) -> Any:
    made = make_quietly(type(cls), name, bases, namespace, mro, pytree=is_pytree(cls))
    inherit_data_names(made)
    return made


def make_quietly(
    kind: type, name: str, bases: Any, namespace: dict[str, Any], mro: Any = type.mro, **given: Any
) -> Any:
    """Make an nnx class or a class of Variables of which nobody is told: users may keep registers of their classes.

    What an ``__init_subclass__`` or a metaclass of users gave its bases, the new class has from there.

    Args:
        kind: The metaclass of the base that it stands for.
        name: Its name.
        bases: Its bases.
        namespace: Its attributes.
        mro: Finds the order of methods.
        **given: What flax's own ``__init_subclass__`` takes.
    """
    root = nnx.Variable if issubclass(bases[0], nnx.Variable) else nnx.Pytree
    is_new = True

    def order(self: type) -> list[type]:
        found = mro(self)
        end = found.index(root) + 1
        return [found[0], _Root, *found[1:end], _End, *found[end:]] if is_new else found

    meta: Any = type(kind.__name__, (kind,), {"mro": order, "__module__": kind.__module__})
    made = type(root).__new__(meta, name, bases, namespace, **given)  # type: ignore[misc]  past metaclasses of users
    is_new = False
    made.__bases__ = bases  # finds the order anew
    return made


class _Root:
    """In front of all others while a class is made: goes past them to what flax does with a new class."""

    __slots__ = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        root = next(c for c in cls.__mro__ if c in (nnx.Pytree, nnx.Variable))
        vars(root)["__init_subclass__"].__func__(cls, **kwargs)


class _End:
    """Behind flax's own classes while a class is made: none of users' is told either."""

    __slots__ = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        pass


def is_pytree(cls: type) -> bool:
    """Whether instances of an nnx class are JAX pytrees."""
    return getattr(cls, _IS_PYTREE)


def inherit_data_names(cls: type) -> None:
    """Let a class know the data attributes of all its bases: ``Pytree.__init_subclass__`` takes those of the first."""
    names: dict[str, bool] = {}
    for base in reversed(cls.__mro__):
        names.update(vars(base).get(NODES, {}))
    setattr(cls, NODES, _mapping(names, copy=False))
