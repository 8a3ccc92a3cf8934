"""The arguments of a call: arrays, nnx objects and static values, anywhere in any pytree."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from lazymods._errors import ConfigurationError, LazyError, Problem, describe
from lazymods.compile.given import Given, Orders, fresh, orders_of, put_in_order
from lazymods.compile.picture import Picture
from lazymods.compile.tokens import Kind, kind_of_type

NUMBERS = (int, float, bool, complex, np.generic)


class Arguments(NamedTuple):
    """The arguments of one call, taken apart.

    Attributes:
        arrays: Arrays and Python numbers, which are inputs of the program.
        roots: nnx objects.
        variables: Variables that are arguments themselves.
        key: How they are arranged, and the static values; hashable.
        statics: Whether some are static.
        rebuild: Puts other arrays in the same places: ``rebuild(arrays, of) -> (args, kwargs)``, where ``of`` returns
            what stands for a value that is no array.
        names: Returns what each array is called in a message.
        given: Returns the containers among the arguments, as they are.
    """

    arrays: list[Any]
    roots: list[Any]
    variables: list[Any]
    key: Hashable
    statics: bool
    rebuild: Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]
    names: Callable[[], list[str]]
    given: Callable[[], Given]


def is_input(cls: type) -> bool:
    """Whether values of a class are arrays or numbers."""
    return kind_of_type(cls) is Kind.ARRAY or issubclass(cls, NUMBERS)


def _is_whole(value: Any) -> bool:
    return kind_of_type(type(value)) in (Kind.NODE, Kind.VARIABLE)


class _Static:
    """In a tree of arguments, stands for a static value."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class Splitter:
    """Takes the arguments of a function apart.

    Args:
        function: What will be called with them.
        static_argnames: Parameters whose values are part of the program.

    Raises:
        ConfigurationError: If the function has no parameter of that name.
    """

    def __init__(self, function: Any, static_argnames: tuple[str, ...]) -> None:
        self.names = static_argnames
        self.positions: tuple[int, ...] = ()
        self._keeps_order = _takes_any_keyword(function)
        if static_argnames:
            parameters = inspect.signature(function).parameters
            missing = [n for n in static_argnames if n not in parameters]
            if missing and not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
                raise ConfigurationError(
                    Problem(
                        _name(function),
                        f"static_argnames={static_argnames!r}",
                        f"names of its parameters, which are {', '.join(parameters) or 'none'}",
                        f"lm.jit(..., static_argnames={tuple(n for n in static_argnames if n not in missing)!r})",
                    )
                )
            self.positions = tuple(i for i, n in enumerate(parameters) if n in static_argnames)

    def split(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Take the arguments of a call apart.

        Raises:
            ArgumentError: If one is neither an array nor an nnx object, and not declared static.
        """
        statics: Hashable = ()
        given = (args, kwargs)
        if self.names:
            wrapped = [_Static(a) if i in self.positions else a for i, a in enumerate(args)]
            named = {k: _Static(v) if k in self.names else v for k, v in kwargs.items()}
            static = [a.value for a in wrapped if type(a) is _Static]
            static += [kwargs[k] for k in sorted(kwargs) if k in self.names]
            statics = Picture(static, static=True).key
            args, kwargs = tuple(wrapped), named
        leaves, treedef = jax.tree.flatten((args, kwargs), is_leaf=_is_whole)
        arrays, roots, variables, kinds = [], [], [], []
        for leaf in leaves:
            cls = type(leaf)
            kind = kind_of_type(cls)
            if kind is Kind.NODE:
                roots.append(leaf)
            elif kind is Kind.VARIABLE:
                variables.append(leaf)
            elif kind is Kind.ARRAY or isinstance(leaf, NUMBERS):
                arrays.append(leaf)
                kind = Kind.ARRAY
            elif cls is not _Static:
                self._refuse(args, kwargs, leaf)
            kinds.append(int(kind) if cls is not _Static else -1)
        orders = orders_of(_pytrees(args, kwargs))
        names = tuple(kwargs) if self._keeps_order else ()
        # a treedef compares the nodes' own data with ==; a static argument's value stands in the key by its token
        key = (treedef, tuple(kinds), statics, orders, names)
        rebuild = _Rebuild(leaves, treedef, kinds, orders, given)
        return Arguments(arrays, roots, variables, key, bool(self.names), rebuild, rebuild.names, rebuild.given)

    def _refuse(self, args: tuple[Any, ...], kwargs: dict[str, Any], leaf: Any) -> None:
        for path, value in jax.tree_util.tree_leaves_with_path((args, kwargs), is_leaf=_is_whole):
            if value is leaf:
                where = path_name(path)
                raise ArgumentError(
                    Problem(
                        where,
                        f"{describe(leaf)}" if isinstance(leaf, str) else f"a {type(leaf).__name__}",
                        "arrays, numbers and nnx objects, in any pytree: they are the inputs of the compiled program",
                        "lm.jit(fn, static_argnames=...) with the parameter's name, if it is part of the program",
                    )
                )


class ArgumentError(LazyError, TypeError):
    """An argument of a compiled function is nothing that a program can take."""


ArgumentError.__module__ = "lazymods"


class _Rebuild:
    """Puts arrays back into the places of a call's arguments."""

    __slots__ = ("_given", "_kinds", "_leaves", "_orders", "_treedef")

    def __init__(self, leaves: list[Any], treedef: Any, kinds: list[int], orders: Orders, given: Any) -> None:
        self._leaves, self._treedef, self._kinds = leaves, treedef, kinds
        self._orders, self._given = orders, given

    def __call__(self, arrays: Sequence[Any], of: Callable[[Any], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        waiting = iter(arrays)
        leaves = [next(waiting) if k == Kind.ARRAY else of(v) for v, k in zip(self._leaves, self._kinds, strict=True)]
        args, kwargs = self._treedef.unflatten(leaves)
        put_in_order(_pytrees(args, kwargs), self._orders, leaves)
        return (
            tuple(of(fresh(a.value)) if type(a) is _Static else a for a in args),
            {k: of(fresh(v.value)) if type(v := kwargs[k]) is _Static else v for k in self._given[1]},
        )

    def given(self) -> Given:
        """Return the containers among the arguments, as they are."""
        return Given(*self._given)

    def names(self) -> list[str]:
        """Name the arrays, in their order: ``args[0]``, ``x['image']``."""
        numbered = self._treedef.unflatten(list(range(len(self._leaves))))
        paths = [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(numbered)]
        return [name for name, kind in zip(paths, self._kinds, strict=True) if kind == Kind.ARRAY]


def _pytrees(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return the arguments in an order that does not depend on that of keywords."""
    return [*args, *(kwargs[name] for name in sorted(kwargs))]


def _takes_any_keyword(function: Any) -> bool:
    """Whether a function may see in which order its keyword arguments came."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return True
    return any(p.kind is p.VAR_KEYWORD for p in parameters)


def path_name(path: Sequence[Any]) -> str:
    """Name a place in ``(args, kwargs)``: ``argument 0['image']``, ``argument x``."""
    where, *rest = path
    first, rest = rest[0], rest[1:]
    own = first.idx if where.idx == 0 else first.key
    return f"argument {own}{jax.tree_util.keystr(tuple(rest))}"


def _name(function: Any) -> str:
    return getattr(function, "__qualname__", None) or type(function).__qualname__
