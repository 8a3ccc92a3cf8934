"""Shadow mode: what a compiled run gave and left behind, compared with what plain Python did on a copy.

:func:`compare` walks both sides at once and raises at the first place where they differ. What is counted or chosen
is compared exactly: classes, names and their order, metadata, static values by type and value, which places share an
object, shapes, dtypes, integers, booleans and random keys. Floats in arrays are compared to rounding, since a compiled
program may fuse and reorder them: ``ROUNDING`` in :mod:`lazymods._objects.comparing` says how far, and where that is
not enough, runs with noise in the inputs do (:mod:`lazymods._objects.noise`). What has no content that is known, such
as an iterator, is only asked for its class, and for ``==`` where the class defines it.

The copy must keep the order of attributes: ``copy.deepcopy`` of an ``nnx.Module`` sorts them (flax 0.12.8 and 0.12.12).

A number or an array of numpy of plain Python may be a ``jax.Array`` of the compiled run: ``jax.jit`` does that.
"""

from __future__ import annotations

import collections
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from lazymods import _compat
from lazymods._errors import LazyError, Problem, describe
from lazymods._graph import is_placeholder
from lazymods._objects.comparing import (
    Name,
    class_of,
    is_value,
    listed,
    same_static,
    sets_differ,
    shown,
    values_differ,
)
from lazymods._objects.noise import near
from lazymods._objects.tokens import TokenKind, kind_of
from lazymods._objects.traced_state import held_by

_WRITE = (
    "f(x)  # without lm.jit, if it depends on what no program can see (time, files, random numbers of Python); "
    "else report it as a fault of lazymods, with f"
)


Named = Sequence[tuple[str, Any]]  # objects by a label, such as ``"output"`` or ``"argument model"``


def compare(
    name: str, want: Named, got: Named, noisy: Callable[[], Sequence[Named]] = tuple
) -> None:
    """Compare what a plain run and a compiled run gave and left behind.

    Args:
        name: The function, for the message.
        want: What the plain run gave and left behind.
        got: The same of the compiled run; its objects are other ones, save for what has no copy.
        noisy: Returns the same of further plain runs: of one without noise, to see whether that is the same again,
            and of some with noise in the inputs. Called where a float is further off than rounding allows: it may be
            as far off as those are, and some more.

    Raises:
        LazyError: The first difference, by path.
    """
    difference = _difference(want, got, _Noisy(noisy))
    if difference is not None:
        path, is_now, was = difference
        got_now, needed = f"{is_now}, in the compiled run", f"{was}, as in plain Python"
        raise LazyError(Problem(f"{path} ({name})", got_now, needed, _WRITE))


Difference = tuple[str, str, str]  # path, what the compiled run has, what plain Python has
Step = tuple[str, Any, Any]  # path, and what is there on both sides


def _difference(want: Named, got: Named, noisy: _Noisy) -> Difference | None:
    labels, others = [label for label, _ in want], [label for label, _ in got]
    if labels != others:
        return "arguments and results", listed(others), listed(labels)
    twins = _Twins()
    todo: list[Step] = [(label, a, b) for (label, a), (_, b) in zip(want, got, strict=True)]
    todo.reverse()
    while todo:  # no recursion: a chain of objects may be longer than Python's stack
        path, a, b = todo.pop()
        found = twins.differ(path, a, b)
        if found is None and twins.new:
            valued = is_value(a) or is_value(b)
            found = values_differ(a, b) if valued else _look(path, a, b, todo)
            if found is not None and valued:
                found = values_differ(a, b, noisy.at(path, a))
        if found is not None:
            return (path, *found)
    return None


class _Noisy:
    """What runs with noise gave, by path; they are done when that is asked for first."""

    def __init__(self, run: Callable[[], Sequence[Named]]) -> None:
        self._run = run
        self._found: list[dict[str, Any]] | None = None

    def at(self, path: str, want: Any) -> list[Any]:
        """Return what those runs have in a place; nothing if one without noise does not have what the first had."""
        if self._found is None:
            self._found = [_values_of(one) for one in self._run()]
        found = [values.get(path) for values in self._found]
        return [*near(want, found)]


def _values_of(of_run: Named) -> dict[str, Any]:
    """Return all numbers and arrays by path."""
    found: dict[str, Any] = {}
    twins = _Twins()
    todo: list[Step] = [(label, value, value) for label, value in reversed(of_run)]
    while todo:
        path, value, _ = todo.pop()
        twins.differ(path, value, value)
        if twins.new and is_value(value):
            found.setdefault(path, value)
        elif twins.new:
            _look(path, value, value, todo)
    return found


class _Twins:
    """Which object of one side is which of the other: what is one object there must be one here.

    Attributes:
        new: Whether the pair seen last had not been seen before.
    """

    def __init__(self) -> None:
        self._there: dict[int, tuple[Any, str]] = {}
        self._here: dict[int, tuple[Any, str]] = {}
        self.new = True

    def differ(self, path: str, a: Any, b: Any) -> tuple[str, str] | None:
        self.new = True
        if not _has_identity(a) or not _has_identity(b):
            return None
        there, here = self._there.get(id(a)), self._here.get(id(b))
        if there is None and here is None:
            self._there[id(a)], self._here[id(b)] = (b, path), (a, path)
            return None
        self.new = False
        if there is not None and there[0] is b:
            return None
        if there is not None:
            return f"the object of {here[1]}" if here else "an object of its own", f"the object of {there[1]}"
        return f"the object of {here[1] if here else path}", "an object of its own"


_WITH_IDENTITY = (
    TokenKind.VARIABLE,
    TokenKind.NODE,
    TokenKind.OBJECT,
    TokenKind.DICT,
    TokenKind.LIST,
    TokenKind.SET,
    TokenKind.QUEUE,
)


def _has_identity(value: Any) -> bool:
    """Whether Python can tell two objects of this kind apart by changing one of them."""
    return kind_of(value) in _WITH_IDENTITY or isinstance(value, (np.ndarray, *_compat.REFERENCES))


def _look(path: str, a: Any, b: Any, todo: list[Step]) -> tuple[str, str] | None:
    """Compare two objects without what they hold; note that in ``todo``, in reverse."""
    if type(a) is not type(b):
        return class_of(b), class_of(a)
    kind = kind_of(a)
    if kind is TokenKind.ATOM or isinstance(a, (jax.ShapeDtypeStruct, frozenset)):
        return _atoms_differ(path, a, b, todo)
    if kind is TokenKind.SET:
        return sets_differ(a, b)
    parts = list(_parts(path, kind, a))
    others = list(_parts(path, kind, b))
    found = _keys_differ([p.key for p in parts], [p.key for p in others])
    if found is not None:
        return found
    todo.extend((p.path, p.value, o.value) for p, o in zip(reversed(parts), reversed(others), strict=True))
    return None


class _Part(NamedTuple):
    """What a value holds: by which key, where that is, and what."""

    key: Any
    path: str
    value: Any


def _parts(path: str, kind: TokenKind, value: Any) -> Iterator[_Part]:
    """Return what a value holds, in its order."""
    if kind is TokenKind.VARIABLE:
        yield from _of_variable(path, value)
    elif kind in _NAMED:
        yield from (_Part(name, f"{path}.{name}", getattr(value, name)) for name in _NAMED[kind])
    elif kind in (TokenKind.NODE, TokenKind.OBJECT):
        yield from _of_object(path, kind, value)
    elif kind in (TokenKind.DICT, TokenKind.PROXY):
        yield from (_Part(key, f"{path}[{key!r}]", held) for key, held in value.items())
    else:
        yield from _of_sequence(path, value)
    # a class of the user's
    if kind in (TokenKind.DICT, TokenKind.LIST, TokenKind.TUPLE, TokenKind.QUEUE) and type(value).__dictoffset__:
        yield from (_Part(Name("attribute", n), f"{path}.{n}", held) for n, held in vars(value).items())


_PRIVATE = (_compat.STATE, _compat.NODES)
_NAMED = {TokenKind.METHOD: ("__func__", "__self__"), TokenKind.PARTIAL: ("func", "args", "keywords")}


def _of_object(path: str, kind: TokenKind, value: Any) -> Iterator[_Part]:
    for name, held in held_by(value, kind).items():
        if name not in _PRIVATE:
            yield _Part(name, f"{path}.{name}", held)
    if kind is TokenKind.NODE:
        attributes = vars(value)
        for name, is_data in sorted(dict(attributes.get(_compat.NODES, {})).items()):
            if name not in _PRIVATE and not is_value(attributes.get(name)):  # a number may become an array, and data
                yield _Part(Name("data", name), f"{path}.{name} (is data)", is_data)


def _of_variable(path: str, variable: nnx.Variable[Any]) -> Iterator[_Part]:
    raw = variable.get_raw_value()
    if is_placeholder(variable):
        yield _Part("value", path, f"a placeholder of {describe(variable)}")
    else:
        yield _Part("value", path, raw)
    metadata = variable.get_metadata()
    for name in sorted(metadata):
        yield _Part(name, f"{path}.get_metadata()[{name!r}]", metadata[name])


def _of_sequence(path: str, value: Any) -> Iterator[_Part]:
    fields = getattr(value, "_fields", None)
    if isinstance(value, tuple) and fields and len(fields) == len(value):
        yield from (_Part(name, f"{path}.{name}", held) for name, held in zip(fields, value, strict=True))
        return
    if isinstance(value, collections.deque):
        yield _Part("maxlen", f"{path}.maxlen", value.maxlen)
    yield from (_Part(number, f"{path}[{number}]", held) for number, held in enumerate(value))


# ---------------------------------------------------------------- static values


def _keys_differ(want: list[Any], got: list[Any]) -> tuple[str, str] | None:
    if _same_keys(want, got):
        return None
    counted = all(isinstance(key, int) for key in (*want, *got)) and want[: len(got)] == got[: len(want)]
    if counted:
        return f"{len(got)} items", f"{len(want)} items"
    missing = [key for key in want if not any(same_static(key, k) for k in got)]
    added = [key for key in got if not any(same_static(key, k) for k in want)]
    if missing or added:
        return f"{listed(added)} more and {listed(missing)} less", f"{listed(want)}"
    return f"{listed(got)}, in this order", f"{listed(want)}, in this order"


def _same_keys(want: list[Any], got: list[Any]) -> bool:
    return len(want) == len(got) and all(map(same_static, want, got))


def _atoms_differ(path: str, a: Any, b: Any, todo: list[Step]) -> tuple[str, str] | None:
    """Compare what is looked at from outside; of functions and registered pytrees, note what they hold."""
    if a is b:
        return None
    if isinstance(a, types.FunctionType):
        if not same_static(a, b):
            return shown(b), shown(a)
        held, others = _of_function(a), _of_function(b)
    else:
        held, others = _of_pytree(a), _of_pytree(b)
        if held is None or others is None:
            return None if same_static(a, b) else (shown(b), shown(a))
    if len(held) != len(others):
        return f"{len(others)} items", f"{len(held)} items"
    todo.extend((f"{path}{p}", x, y) for (p, x), (_, y) in zip(reversed(held), reversed(others), strict=True))
    return None


def _of_function(f: types.FunctionType) -> list[tuple[str, Any]]:
    """Return what a function closes over, and its defaults."""
    found: list[tuple[str, Any]] = []
    for name, cell in zip(f.__code__.co_freevars, f.__closure__ or (), strict=True):
        try:
            found.append((f" (its {name})", cell.cell_contents))
        except ValueError:  # a name without a value yet
            found.append((f" (its {name})", None))
    return [*found, (".__defaults__", f.__defaults__), (".__kwdefaults__", f.__kwdefaults__)]


def _of_pytree(value: Any) -> list[tuple[str, Any]] | None:
    """Return what an object of a library holds, if JAX knows."""
    try:
        flat = jax.tree_util.default_registry.flatten_one_level(value)
    except Exception:  # a class whose flattening fails for this object
        return None
    if flat is None:
        return None
    children = [(f".<{number}>", child) for number, child in enumerate(flat[0])]
    return [*children, (".<static>", flat[1])]
