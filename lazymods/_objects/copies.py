"""Copies of what a function can reach, and the function over them: they are traced, so nobody's objects are touched.

A trace runs the function on copies of all nnx objects, Variables and containers that it reaches. The copies keep
identities and shared references. Functions that reach a copied object by a closure, a default, a global or
``__wrapped__`` are made anew over the copies; ``jax.jit`` and the like are left out around those, since an outer
compilation holds anyway. The originals stay as they are, whatever happens, and other threads may use them meanwhile.

Of objects of the user's own classes it is noted which attributes are read (:class:`Reads`): a counter that a step
never reads is no part of its program.
"""

from __future__ import annotations

import abc
import array
import contextlib
import copy
import functools
import threading
import types
from collections.abc import Iterable, Iterator
from typing import Any

import jax
from flax import nnx

from lazymods import _compat, _graph
from lazymods._errors import LazyError, Problem
from lazymods._objects.attributes import has_hidden_state, new_object, new_tuple, slots_of
from lazymods._objects.module_attributes import attribute, swapped
from lazymods._objects.reached import dict_of, global_names, in_cell, is_jit, is_library, parts_of_callable
from lazymods._objects.tokens import TokenKind, kind_of
from lazymods._objects.traced_state import Reads, TracedState, contents_of, held_by, put_item
from lazymods._snapshot import refill


class Copies:
    """Copies of everything in a traced state.

    Args:
        traced_state: What is copied; every object and Variable in it.
        reads: Where it is noted what is read; None: nowhere.
        known: Copies that are there already, by the id of their original.

    Attributes:
        begun: By id of an original: what its twin holds when the function begins, a Variable's value among them, and
            what is in that.
    """

    def __init__(
        self, traced_state: TracedState, reads: Reads | None = None, known: dict[int, Any] | None = None
    ) -> None:
        self._reads = reads
        self._memo: dict[int, Any] = dict(known or {})
        self._originals: dict[int, Any] = {}
        self._alive: list[Any] = [traced_state]
        self._globals: dict[int, _Globals] = {}
        self._cells: list[tuple[Any, Any, str]] = []
        self._swaps: list[tuple[Any, str, Any]] = []
        self._touched: dict[int, bool] = {}
        self._noting: dict[type, _Noting] = {}
        self.begun: dict[int, Any] = {}
        self._renewed: set[int] = set()
        self._own: dict[int, dict[str, Any]] = {}  # what the function has written to a layer before its first call
        fresh = [node for node in traced_state.nodes if id(node) not in self._memo]
        for node in fresh:
            self._begin(node)
        variables = [v for v in traced_state.variables if id(v) not in self._memo]
        for variable in variables:
            raw = variable.get_raw_value()
            twin = _compat.new_variable(type(variable), raw, {})
            self._note(variable, twin)
        for node in sorted(fresh, key=_is_hashed):
            self._fill(node, traced_state.contents_before(node))
        for variable in variables:
            metadata = {k: self.of(v) for k, v in _compat.raw_metadata(variable).items()}
            twin = self._memo[id(variable)]
            _compat.write_variable(twin, type(twin), self.of(variable.get_raw_value()), metadata)

    def give(self, original: Any, key: Any, value: Any) -> None:
        """Let the copy of a Variable hold a value, or that of another object at a key."""
        if isinstance(original, nnx.Variable):
            self._memo[id(original)].set_raw_value(value)
        else:
            put_item(held_by(self._memo[id(original)]), self.of(key), value)

    def renew(self, traced_state: TracedState) -> list[Any]:
        """Copy what is new in a layer that was just initialized.

        Returns:
            The Variables that are new, or were placeholders.
        """
        there = [n for n in traced_state.nodes if id(n) in self._memo]
        new = [n for n in traced_state.nodes if id(n) not in self._memo]
        for node in new:
            self._begin(node)
        changed = [n for n in there if _graph.is_lazy_node(self._memo[id(n)]) or self._differs(n)]
        self._renewed = set(map(id, (*new, *changed)))
        variables = []
        for variable in traced_state.variables:
            if id(variable) in self._memo and not _graph.is_placeholder(self._memo[id(variable)]):
                continue
            if id(variable) not in self._memo:
                self._note(variable, _compat.new_variable(type(variable), None, {}))
            variables.append(variable)
            self._renewed.add(id(variable))
        for node in new:
            self._fill(node, traced_state.contents_before(node))
        for node in changed:
            twin, begun = self._memo[id(node)], self.begun[id(node)]
            held = held_by(twin)
            own = {k: v for k, v in held.items() if k != _compat.STATE and (k not in begun or v is not begun[k])}
            held.clear()
            self._fill(node, traced_state.contents_before(node))
            self._own[id(node)] = own
            if type(twin) is not type(node):
                _compat.set_class(twin, type(node))
        for variable in variables:
            twin, raw = self._memo[id(variable)], variable.get_raw_value()
            metadata = {k: self.of(v) for k, v in _compat.raw_metadata(variable).items()}
            _compat.write_variable(twin, type(variable), raw, metadata)
        return variables

    def _differs(self, node: Any) -> bool:
        """Whether an object holds something else than when its copy was made, as what is inside a layer then sized."""
        if kind_of(node) is not TokenKind.NODE:
            return False
        held, begun = held_by(node), self.begun[id(node)]
        names = held.keys() - {_compat.STATE}
        return names != begun.keys() - {_compat.STATE} or any(self.of(held[k]) is not begun[k] for k in names)

    def is_renewed(self, original: Any) -> bool:
        """Whether the copy of an object was made by the last :meth:`renew`."""
        return id(original) in self._renewed

    def begin(self, traced_state: TracedState, renewed: bool = False) -> None:
        """Note what all copies hold now, or only what was made by the last :meth:`renew`."""
        for node in traced_state.nodes:
            if not renewed or id(node) in self._renewed:
                self.begun[id(node)] = contents_of(self._memo[id(node)])
                if id(node) in self._own:
                    held_by(self._memo[id(node)]).update(self._own.pop(id(node)))
        for variable in traced_state.variables:
            if renewed and id(variable) not in self._renewed:
                continue
            twin = self._memo[id(variable)]
            raw = twin.get_raw_value()
            self.begun[id(variable)] = (raw, items_of(raw), dict(_compat.raw_metadata(twin)))

    def original(self, value: Any) -> Any:
        """Return what a value is the twin of; the value itself if it is no twin."""
        return self._originals.get(id(value), value)

    def by_original(self, contents: Any) -> Any:
        """Return what a twin holds under the keys of what it is the twin of."""
        if not isinstance(contents, dict) or all(type(key) is str for key in contents):
            return contents
        return {self._original_key(key): value for key, value in contents.items()}

    def _original_key(self, key: Any) -> Any:
        if kind_of(key) is not TokenKind.TUPLE:
            return self.original(key)
        parts = [self._original_key(part) for part in key]
        return key if all(a is b for a, b in zip(parts, key, strict=True)) else new_tuple(type(key), parts)

    def swap(self, owner: Any, name: str) -> None:
        """Let an attribute of a module or class hold the twin of what it holds, while :meth:`swapped` lasts."""
        value = attribute(owner, name)
        twin = self.of(value)
        if twin is not value:
            self._swaps.append((owner, name, twin))

    @contextlib.contextmanager
    def swapped(self) -> Iterator[None]:
        """Let attributes of modules and classes hold copies; at the end, look at what the function rebound."""
        try:
            with swapped(self._swaps), _noted(self._noting):
                yield
        finally:
            for names in self._globals.values():
                names.write_back()
        for cell, twin, name in self._cells:
            if in_cell(cell) is not twin:
                raise _rebinds(name)
        for names in self._globals.values():
            names.check()

    # ------------------------------------------------------------ values

    def of(self, value: Any) -> Any:
        """Return what stands for a value in the trace."""
        if id(value) in self._memo:
            return self._memo[id(value)]
        kind = kind_of(value)
        if kind is TokenKind.ATOM:
            return self._callable(value) if callable(value) and self._touches(value) else value
        if kind is TokenKind.TUPLE:
            parts = [self.of(v) for v in value]
            if all(a is b for a, b in zip(parts, value, strict=True)):
                return value
            made = new_tuple(type(value), parts)
            vars(made).update(vars(value)) if type(value).__dictoffset__ else None
            return made
        if kind is TokenKind.METHOD:
            owner, function = self.of(value.__self__), self.of(value.__func__)
            changed = owner is not value.__self__ or function is not value.__func__
            return types.MethodType(function, owner) if changed else value
        if kind is TokenKind.PARTIAL:
            return self._partial(value)
        if kind is TokenKind.PROXY:
            held = self.of(dict_of(value))
            return value if held is dict_of(value) else types.MappingProxyType(held)
        return value

    def _partial(self, value: Any) -> Any:
        function, args = self.of(value.func), self.of(value.args)
        keywords = {k: self.of(v) for k, v in value.keywords.items()}
        same = all(v is value.keywords[k] for k, v in keywords.items())
        if same and function is value.func and args is value.args:
            return value
        return type(value)(function, *args, **keywords)

    def _touches(self, value: Any) -> bool:
        """Whether a value reaches an object that was copied."""
        if id(value) in self._memo:
            return True
        kind = kind_of(value)
        if kind is TokenKind.TUPLE:
            return any(map(self._touches, value))
        if kind is TokenKind.METHOD:
            return self._touches(value.__self__) or self._touches(value.__func__)
        if kind is TokenKind.PARTIAL:
            return any(map(self._touches, (value.func, *value.args, *value.keywords.values())))
        if kind is TokenKind.PROXY:
            return self._touches(dict_of(value))
        if kind is not TokenKind.ATOM or not callable(value) or isinstance(value, type):
            return False
        known = self._touched.get(id(value))
        if known is None:
            self._touched[id(value)] = False  # for functions that reach each other
            self._alive.append(value)
            known = self._touched[id(value)] = any(map(self._touches, _reached(value)))
        return known

    # ------------------------------------------------------------ functions

    def _callable(self, value: Any) -> Any:
        """Make a function that reaches copied objects anew, over the copies."""
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if is_jit(value):
            return self.of(value.__wrapped__)
        held = getattr(value, "__dict__", None)
        if held is None or has_hidden_state(type(value)):
            return value  # its models are constants of the trace, which is refused
        twin = new_object(type(value))
        self._note(value, twin)
        vars(twin).update({k: self.of(v) for k, v in held.items()})
        return twin

    def _function(self, function: types.FunctionType) -> Any:
        cells = list(function.__closure__ or ())
        moved = [n for n, cell in enumerate(cells) if self._touches(in_cell(cell))]
        for n in moved:
            cells[n] = types.CellType()
        names = self._names(function)
        code, name = function.__code__, function.__name__
        twin = types.FunctionType(code, names, name, None, tuple(cells) if function.__closure__ else None)
        self._note(function, twin)
        for n in moved:
            cells[n].cell_contents = content = self.of(function.__closure__[n].cell_contents)  # type: ignore[index]
            self._cells.append((cells[n], content, code.co_freevars[n]))
        twin.__defaults__ = self.of(function.__defaults__)
        twin.__kwdefaults__ = {k: self.of(v) for k, v in (function.__kwdefaults__ or {}).items()} or None
        twin.__qualname__, twin.__module__, twin.__doc__ = function.__qualname__, function.__module__, function.__doc__
        vars(twin).update({k: self.of(v) for k, v in vars(function).items()})
        return twin

    def _names(self, function: types.FunctionType) -> dict[str, Any]:
        found = function.__globals__
        if is_library(function.__module__):
            return found
        moved = [n for n in global_names(function.__code__) if n in found and self._touches(found[n])]
        if not moved:
            return found
        names = self._globals.setdefault(id(found), _Globals(found))
        for name in moved:
            if name not in names.moved:
                names.moved[name] = None
                names.put(name, self.of(found[name]))
        return names

    # ------------------------------------------------------------ objects

    def _note(self, original: Any, twin: Any) -> None:
        self._memo[id(original)] = twin
        self._originals[id(twin)] = original
        self._alive += (original, twin)

    def _begin(self, node: Any) -> None:
        """Make the copy of an object, still without what it holds."""
        if id(node) in self._memo:  # the attributes of a container, which came before
            return
        twin = self._empty(node)
        self._note(node, twin)
        if kind_of(node) > TokenKind.OBJECT and type(node).__dictoffset__:
            if vars(node) is node:  # a dict whose attributes are its items
                object.__setattr__(twin, "__dict__", twin)
            else:
                self._note(vars(node), vars(twin))

    def _empty(self, node: Any) -> Any:
        kind = kind_of(node)
        if kind is TokenKind.NODE:
            return new_object(type(node))
        if kind is TokenKind.OBJECT:
            return self._empty_object(node)
        if type(node) in (dict, list, set):
            return type(node)()
        if isinstance(node, array.array):
            return array.array.__new__(type(node), node.typecode)
        twin = node.copy()
        if type(twin) is not type(node):
            twin = copy.copy(node)
        return twin

    def _empty_object(self, node: Any) -> Any:
        cls = type(node)
        if has_hidden_state(cls):
            return copy.copy(node)
        twin = new_object(cls)
        if self._reads is not None and notes_reads(cls):
            self._noting.setdefault(cls, (set(), self._reads.begin(cls)))[0].add(id(twin))
        return twin

    def _fill(self, node: Any, contents: Any) -> None:
        twin = self._memo[id(node)]
        kind = kind_of(node)
        if isinstance(contents, dict):
            items = {k if type(k) is str else self.of(k): self.of(v) for k, v in contents.items()}
            if kind is TokenKind.NODE:
                items[_compat.STATE] = _compat.new_state()
                held_by(twin, kind).update(items)
                return
            held = object_contents(twin) if kind is TokenKind.OBJECT else twin
            if kind is not TokenKind.OBJECT:
                held.clear()
            held.update(items)
        elif not slots_of(type(twin)) or kind is not TokenKind.OBJECT:
            refill(twin, [self.of(v) for v in contents])


def _is_hashed(node: Any) -> bool:
    """Whether a node is filled after others: to hash what is in it may take what that holds."""
    return kind_of(node) in (TokenKind.DICT, TokenKind.SET)


def items_of(raw: Any) -> Any:
    """Return what the value of a Variable holds if that is no array: a dict or list can be changed as it is."""
    return None if kind_of(raw) <= TokenKind.ARRAY else jax.tree.flatten(raw)


def object_contents(thing: Any) -> Any:
    """Return what an object of no container's class holds, without its being noted as read."""
    return held_by(thing, TokenKind.OBJECT)


def _reached(value: Any) -> Iterator[Any]:
    """Yield what a callable reaches: what it holds, and the globals that it names."""
    yield from parts_of_callable(value)
    if isinstance(value, types.FunctionType) and not is_library(value.__module__):
        for name in global_names(value.__code__):
            if name in value.__globals__:
                yield value.__globals__[name]


class _Globals(dict[str, Any]):
    """The globals of a function that is made anew: some names hold copies, all others what the module's hold.

    CPython asks a subclass of dict by ``__getitem__``, and writes to the dict itself.
    """

    def __init__(self, names: dict[str, Any]) -> None:
        fixed = ("__builtins__", "__name__")
        super().__init__({k: names[k] for k in fixed if k in names})
        self._names, self._fixed = names, fixed
        self.moved: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        return super().__getitem__(name) if name in self.keys() else self._names[name]

    def put(self, name: str, twin: Any) -> None:
        """Let a name hold a twin."""
        self.moved[name] = twin
        self[name] = twin

    def write_back(self) -> None:
        """Write names that the function has bound to the module; as under ``jax.jit``, when it is traced alone."""
        for name in [n for n in self.keys() if n not in self.moved and n not in self._fixed]:
            self._names[name] = self.pop(name)

    def check(self) -> None:
        """Refuse a function that has bound the name of a model to something else."""
        for name, twin in self.moved.items():
            if self.get(name) is not twin:
                raise _rebinds(name)


def _rebinds(name: str) -> LazyError:
    return LazyError(
        Problem(
            name,
            "a function that assigns this variable, which held a model or what reaches one, from outside of it",
            "an assignment that each call can do again: to an attribute, an item, or a variable of its own",
            "return new  # the new object as a result of the function",
        )
    )


# ---------------------------------------------------------------- what is read


_Noting = tuple[set[int], set[str]]  # the ids of some objects of a class, and the names that are read of them
_READING: dict[type, tuple[_Noting, ...]] = {}  # the classes that note it now
_READING_LOCK = threading.Lock()


@functools.lru_cache(maxsize=4096)
def notes_reads(cls: type) -> bool:
    """Whether it can be seen which attributes of the objects of a class are read.

    Not if the class or its metaclass has a way of its own to read or write them, or if it is a pytree of JAX.
    """
    if type(cls) not in (type, abc.ABCMeta) or is_library(cls.__module__) or has_hidden_state(cls):
        return False
    own = [vars(base).get("__getattribute__") for base in cls.__mro__[:-1]]
    if any(f is not None and getattr(f, "__module__", None) != __name__ for f in own):
        return False
    try:
        return jax.tree_util.all_leaves([new_object(cls)])
    except Exception:  # it is a pytree, and has nothing to be flattened
        return False


@contextlib.contextmanager
def _noted(noting: dict[type, _Noting]) -> Iterator[None]:
    """Let classes note what is read of some of their objects: a subclass that does so would be another ``type(x)``."""
    with _READING_LOCK:
        for cls, own in noting.items():
            if cls not in _READING:
                cls.__getattribute__ = _reading(cls)  # type: ignore[method-assign]
            _READING[cls] = (*_READING.get(cls, ()), own)
    try:
        yield
    finally:
        with _READING_LOCK:
            for cls, own in noting.items():
                _READING[cls] = tuple(other for other in _READING[cls] if other is not own)
                if not _READING[cls]:
                    del _READING[cls], cls.__getattribute__


def pass_reads_on(reads: Reads, nodes: Iterable[Any]) -> None:
    """Let the traces around a call note what its program has read of their copies."""
    for node in nodes:
        for ids, names in _READING.get(type(node), ()):
            if id(node) in ids:
                known = reads.of(type(node))
                names.update(("__dict__",) if known is None else known)


def _reading(cls: type) -> Any:
    read: Any = cls.__getattribute__

    def __getattribute__(self: Any, name: str) -> Any:  # noqa: N807
        for ids, names in _READING.get(cls, ()):
            if id(self) in ids:
                names.add(name)
        return read(self, name)

    return __getattribute__
