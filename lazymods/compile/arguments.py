"""The arguments of a call: arrays, nnx objects and static values, anywhere in any pytree."""

from __future__ import annotations

import functools
import inspect
import itertools
import types
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from lazymods._compat import jit as _compat_jit
from lazymods._errors import ConfigurationError, Problem
from lazymods._objects.tokens import TokenKind, kind_of_type
from lazymods._objects.traced_state import TracedState
from lazymods._refusals import ArgumentError, reason_against, refusal, unreadable, used_up
from lazymods.compile.given import Given, fresh, layout, orders_of, put_in_order

_STATIC, _AGAIN = -1, -2  # kinds of leaves: static; the same object as input number _AGAIN - kind
_INPUTS = (int, float, bool, complex, np.generic, jax.ShapeDtypeStruct)  # beside arrays


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
        leaves: Returns of each leaf of ``(args, kwargs)`` the path, the value, and whether it is among the arrays.
        moved: The names of arguments that were given by keyword, and are taken as given by position.
        given: Returns the containers among the arguments, as they are.
        keeps_statics: Whether static arguments are as they were: a trace may have written to an object.
    """

    arrays: list[Any]
    roots: list[Any]
    variables: list[Any]
    key: Hashable
    statics: bool
    rebuild: Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]
    leaves: Callable[[], list[tuple[Any, Any, bool]]]
    given: Callable[[], Given]
    keeps_statics: Callable[[], bool]
    moved: tuple[str, ...] = ()


def is_input(cls: type) -> bool:
    """Whether values of a class are arrays or numbers."""
    return kind_of_type(cls) is TokenKind.ARRAY or issubclass(cls, _INPUTS)


def is_whole(value: Any) -> bool:
    """Whether a value is an nnx object or a Variable, which pytrees of arguments are not looked into."""
    return _is_whole_type(type(value))


@functools.lru_cache(maxsize=4096)
def _is_whole_type(cls: type) -> bool:
    """Whether JAX shall not look into values of a class; it warns of an iterator, which is refused by name."""
    return kind_of_type(cls) in (TokenKind.NODE, TokenKind.VARIABLE) or issubclass(cls, Iterator)


_Moved = tuple[int, tuple[str, ...]]  # how many arguments were given by position, and the names of those after them


class _Static:
    """In a tree of arguments, stands for a static value."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


def _statics_of(args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    return [a.value for a in (*args, *(kwargs[k] for k in sorted(kwargs))) if type(a) is _Static]


def _statics_key(args: Sequence[Any], kwargs: dict[str, Any]) -> Hashable:
    return TracedState(_statics_of(args, kwargs), static=True).key


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
        self._function, self._code = function, _code_of(function)
        self._parameters = _parameters_of(function, self._code)
        self.positions: tuple[int, ...] = ()
        self._keeps_order = _takes_any_keyword(function)
        if static_argnames:
            parameters = [p for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_POSITIONAL]
            names = [p.name for p in parameters]
            missing = [n for n in static_argnames if n not in names]
            if missing and not any(p.kind is p.VAR_KEYWORD for p in parameters):
                raise ConfigurationError(
                    Problem(
                        _name(function),
                        f"static_argnames={static_argnames!r}",
                        f"names of its parameters, which are {', '.join(names) or 'none'}",
                        f"lm.jit(..., static_argnames={tuple(n for n in static_argnames if n not in missing)!r})",
                    )
                )
            by_position = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
            self.positions = tuple(i for i, n in enumerate(by_position) if n in static_argnames)

    def split(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Take the arguments of a call apart.

        Raises:
            ArgumentError: If one is neither an array nor an nnx object, and not declared static.
        """
        count = len(args)
        args, kwargs, moved = self.spelled(args, kwargs)
        given = (args, kwargs)
        args, kwargs, statics = self._marked(args, kwargs) if self.names else (args, kwargs, ())
        leaves, treedef = _flatten((args, kwargs), (count, moved))
        arrays, roots, variables, kinds = [], [], [], []
        references: dict[int, int] = {}
        for leaf in leaves:
            cls = type(leaf)
            kind = kind_of_type(cls)
            if kind is TokenKind.NODE:
                roots.append(leaf)
            elif kind is TokenKind.VARIABLE:
                variables.append(leaf)
            elif kind is TokenKind.ARRAY or isinstance(leaf, _INPUTS):
                if _compat_jit.is_reference(leaf):  # jax takes each mutable array once
                    first = references.setdefault(id(leaf), len(arrays))
                    if first < len(arrays):
                        kinds.append(_AGAIN - first)
                        continue
                reason = None if cls is _compat_jit.ARRAY else reason_against(leaf)
                if reason is not None:
                    raise self._refused((args, kwargs), leaf, (count, moved), reason)
                arrays.append(leaf)
                kind = TokenKind.ARRAY
            elif cls is not _Static:
                raise self._refused((args, kwargs), leaf, (count, moved))
            kinds.append(int(kind) if cls is not _Static else _STATIC)
        names = tuple(kwargs) if self._keeps_order else ()
        # a treedef compares with ==; a static argument's value stands in the key by its token
        key = (treedef, tuple(kinds), statics, tuple(layout(_pytrees(args, kwargs))), names)
        rebuild = _Rebuild(leaves, treedef, kinds, (args, kwargs), given, statics)
        looks = rebuild.leaves, rebuild.given, rebuild.keeps_statics
        return Arguments(arrays, roots, variables, key, bool(self.names), rebuild, *looks, moved)

    def _marked(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], Hashable]:
        """Let static arguments be no leaves; return also what stands for their values in a key."""
        wrapped = [_Static(a) if i in self.positions else a for i, a in enumerate(args)]
        named = {k: _Static(v) if k in self.names else v for k, v in kwargs.items()}
        for value in _statics_of(wrapped, named):
            if isinstance(value, Iterator):
                raise used_up(f"a static argument of {_name(self._function)}", value)
        return tuple(wrapped), named, _statics_key(wrapped, named)

    def spelled(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], tuple[str, ...]]:
        """Let arguments be given by position where they can be: one is the same input however it is given.

        Returns:
            The arguments by position, those by keyword, and the names of those that were by keyword before.
        """
        following = self._parameters[len(args) :] if kwargs and _code_of(self._function) is self._code else ()
        moved = tuple(itertools.takewhile(kwargs.__contains__, following))
        if moved:
            args, kwargs = (*args, *map(kwargs.__getitem__, moved)), {k: v for k, v in kwargs.items() if k not in moved}
        return args, kwargs, moved

    def masked(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a call with None in the places of those that are static."""
        named = {k: None if k in self.names else v for k, v in kwargs.items()}
        return tuple(None if i in self.positions else a for i, a in enumerate(args)), named

    def without_statics(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a call without those that are static."""
        named = {k: v for k, v in kwargs.items() if k not in self.names}
        return tuple(a for i, a in enumerate(args) if i not in self.positions), named

    def _refused(self, given: Any, leaf: Any, moved: _Moved, reason: Exception | None = None) -> ArgumentError:
        paths = jax.tree_util.tree_leaves_with_path(given, is_leaf=is_whole)
        where = next((path_name(path, moved) for path, value in paths if value is leaf), "an argument")
        return refusal(where, leaf, reason)


def _flatten(given: Any, moved: _Moved) -> tuple[list[Any], Any]:
    """Take a pytree of arguments apart; say which of them is none."""
    try:
        return jax.tree.flatten(given, is_leaf=is_whole)
    except Exception as error:
        args, kwargs = given
        for name, value in (*enumerate(args), *kwargs.items()):
            try:
                jax.tree.flatten(value, is_leaf=is_whole)
            except Exception as reason:
                own = moved[1][name - moved[0]] if isinstance(name, int) and moved[1] and name >= moved[0] else name
                raise unreadable(f"argument {own}", value, reason) from error
        raise


class _Rebuild:
    """Puts arrays back into the places of a call's arguments."""

    __slots__ = ("_given", "_kinds", "_leaves", "_marked", "_statics", "_treedef")

    def __init__(
        self, leaves: list[Any], treedef: Any, kinds: list[int], marked: Any, given: Any, statics: Hashable
    ) -> None:
        self._leaves, self._treedef, self._kinds = leaves, treedef, kinds
        self._marked, self._given, self._statics = marked, given, statics

    def __call__(self, arrays: Sequence[Any], of: Callable[[Any], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        waiting = iter(arrays)
        leaves = []
        for leaf, kind in zip(self._leaves, self._kinds, strict=True):
            again = kind <= _AGAIN
            leaves.append(next(waiting) if kind == TokenKind.ARRAY else arrays[_AGAIN - kind] if again else of(leaf))
        args, kwargs = self._treedef.unflatten(leaves)
        put_in_order(_pytrees(args, kwargs), orders_of(_pytrees(*self._marked)), leaves)
        return (
            tuple(of(fresh(a.value)) if type(a) is _Static else a for a in args),
            {k: of(fresh(v.value)) if type(v := kwargs[k]) is _Static else v for k in self._given[1]},
        )

    def keeps_statics(self) -> bool:
        """Whether static arguments are as they were: a trace may have written to an object."""
        return _statics_key(*self._marked) == self._statics

    def given(self) -> Given:
        """Return the containers among the arguments, as they are."""
        return Given(*self._given)

    def leaves(self) -> list[tuple[Any, Any, bool]]:
        """Return the path of each leaf, its value, and whether it is an input."""
        found = zip(jax.tree_util.tree_leaves_with_path(self._marked, is_leaf=is_whole), self._kinds, strict=True)
        values = ((path, leaf.value if type(leaf) is _Static else leaf, kind) for (path, leaf), kind in found)
        return [(path, value, kind == TokenKind.ARRAY) for path, value, kind in values]


def _pytrees(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return the arguments in an order that does not depend on that of keywords."""
    return [*args, *(kwargs[name] for name in sorted(kwargs))]


def _takes_any_keyword(function: Any) -> bool:
    """Whether a function may see in which order its keyword arguments came."""
    try:
        parameters = inspect.signature(function, follow_wrapped=False).parameters.values()
    except (TypeError, ValueError):
        return True
    return any(p.kind is p.VAR_KEYWORD for p in parameters)


def path_name(path: Sequence[Any], moved: _Moved = (0, ())) -> str:
    """Name a place in ``(args, kwargs)`` as it was given: ``argument 0['image']``, ``argument x``."""
    where, *rest = path
    first, rest = rest[0], rest[1:]
    count, names = moved
    own = first.idx if where.idx == 0 else first.key
    if names and where.idx == 0 and own >= count:
        own = names[own - count]
    return f"argument {own}{jax.tree_util.keystr(tuple(rest))}"


def _code_of(function: Any) -> types.CodeType | None:
    """Return the code that runs when something is called; None if that is not known, as of a partial function."""
    if kind_of_type(type(function)) is TokenKind.NODE:
        function = inspect.getattr_static(type(function), "__call__", None)
    function = getattr(function, "__func__", function)
    return function.__code__ if isinstance(function, types.FunctionType) else None


def _parameters_of(function: Any, code: types.CodeType | None) -> tuple[str, ...]:
    """Return the names of the arguments that may be given by position or by keyword, after those of positions only.

    They are the code's own: the signature of a wrapper is that of what it wraps, to which it may do anything.
    """
    if code is None:
        return ()
    is_bound = not isinstance(function, types.FunctionType)
    only = max(code.co_posonlyargcount, is_bound)
    names = (*[""] * only, *code.co_varnames[only : code.co_argcount])
    return names[is_bound:]


def _name(function: Any) -> str:
    return getattr(function, "__qualname__", None) or type(function).__qualname__
