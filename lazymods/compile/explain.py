"""Why the last trace happened, in paths of the model and of the arguments.

What a trace was for is kept as one line of text for each part that it depends on, by path. Two such situations are
compared part by part, so an explanation names what a user can see, not how lazymods or Flax store it.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
from flax import nnx

from lazymods import _compat
from lazymods._error_lists import collapsed
from lazymods._errors import describe
from lazymods._graph import attributes
from lazymods._initial.pending import PendingInit
from lazymods._objects.tokens import SameObject, TokenKind, kind_of, show, token
from lazymods._objects.traced_state import Reads, held_by

_MAX_LINES = 20  # of an explanation
_MAX_TEXT = 60  # of a static value
_OF_FLAX = frozenset(("eager_sharding", "hijax", "ref"))  # metadata that every Variable has


@dataclasses.dataclass(frozen=True)
class Fact:
    """What one part of a situation was.

    Attributes:
        text: How it is shown.
        mark: What tells it from another of the same text; hashable, without a reference to the part.
        is_whole: Whether it is told with other parts below it by path: if it comes or goes, so do they.
        order: The names of the parts below it, if their order counts.
        owners: Of each object of the user's own classes above it the class, and the attribute that leads here.
    """

    text: str
    mark: Any
    is_whole: bool = False
    order: tuple[Any, ...] | None = None
    owners: tuple[tuple[type, str], ...] = ()


@dataclasses.dataclass(frozen=True)
class TraceKey:
    """What a trace was for, without the objects.

    Attributes:
        facts: By path.
        keys: What is known of some parts as a whole only, by name.
        context: The settings of JAX.
    """

    facts: Mapping[str, Fact]
    keys: Mapping[str, Any]
    context: Any


@dataclasses.dataclass(frozen=True)
class Explanation:
    """Why a function was traced; its ``str`` says it, in at most 20 lines.

    Attributes:
        function: The name of the function.
        reasons: Every difference from the earlier trace that is most alike, by path: ``model.l1: Linear -> Mine``.
            Paths that differ in numbers only, and in the same way, are one reason.
    """

    function: str
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        """Name the function, then one reason a line."""
        shown = list(self.reasons)
        if len(shown) > _MAX_LINES - 1:
            shown[_MAX_LINES - 2 :] = [f"and {len(shown) - _MAX_LINES + 2} more: see explain().reasons"]
        return "\n".join([f"lm.jit traced {self.function}:", *(f"  {r}" for r in shown)])

    __repr__ = __str__


_last: list[Explanation] = [Explanation("nothing", ("nothing was traced so far",))]


def explain() -> Explanation:
    """Say why the last trace of an ``lm.jit`` function happened.

    Returns:
        An object whose ``str`` names the function and each difference from its earlier trace that is most alike, by the
        names of the parameters and the paths of the models: shapes and dtypes, static attributes, classes, what was
        added, removed or shared.

    Example:
        >>> import jax.numpy as jnp
        >>> import lazymods as lm
        >>> double = lm.jit(lambda x: x * 2)
        >>> _ = double(jnp.ones((5, 6))), double(jnp.ones((3, 6)))
        >>> print(lm.explain())
        lm.jit traced <lambda>:
          x: f32[5,6] -> f32[3,6]
    """
    return _last[0]


def note_trace(function: str, now: TraceKey, earlier: Sequence[TraceKey], reads: Reads) -> None:
    """Keep why a function is traced: what tells ``now`` from the most alike of the earlier situations.

    Args:
        function: The name of the function.
        now: What it is traced for.
        earlier: What it was traced for before.
        reads: What it has read of objects: other attributes of theirs don't count.
    """
    if not earlier:
        reasons: list[str] = ["its first call"]
    else:
        reasons = min((_differences(then, now, reads) for then in reversed(earlier)), key=len)
    _last[0] = Explanation(function, tuple(reasons) or ("its compiled program was dropped from the cache",))


def note_path(function: str) -> None:
    """Keep that a function was traced since its Python decided on values as it never did before."""
    _last[0] = Explanation(function, ("Python decided on the value of an array as it did not before: a new path",))


def _differences(then: TraceKey, now: TraceKey, reads: Reads) -> list[str]:
    paths: dict[str, list[str]] = {}  # by what is said of them
    gone: tuple[str, ...] = ()
    for path in {**then.facts, **now.facts}:
        old, new = then.facts.get(path), now.facts.get(path)
        known = new or old
        if old == new or known is None or path.startswith(gone) or not _is_read(known, reads):
            continue
        if old is None or new is None or old.is_whole != new.is_whole:
            gone += (f"{path}.", f"{path}[", f"{path} ")
        change = _change(old, new)
        if change is not None:
            paths.setdefault(change, []).append(path)
    reasons = [f"{path}: {change}" for change, found in paths.items() for path in collapsed(found)]
    if then.context != now.context:
        reasons.append("a setting of JAX: precision, x64, mesh, default device, checks or the like")
    if not reasons:
        reasons = [f"{name}: not as before" for name, key in now.keys.items() if then.keys.get(name) != key]
    return reasons


def _is_read(fact: Fact, reads: Reads) -> bool:
    known = ((reads.of(cls), name) for cls, name in fact.owners)
    return all(names is None or name in names for names, name in known)


def _change(old: Fact | None, new: Fact | None) -> str | None:
    """Say what became of a part; None if only parts below it came or went."""
    if old is None or new is None:
        return f"added ({new.text})" if new is not None else f"removed ({old.text if old is not None else ''})"
    if old.text != new.text:
        return f"{old.text} -> {new.text}"
    if old.mark != new.mark:
        return f"another {new.text} than before"
    same = set(old.order or ()) == set(new.order or ())
    return "in another order" if same else None


# ---------------------------------------------------------------- what a situation is made of


def named(function: Any, leaves: Iterable[tuple[Sequence[Any], Any, bool]]) -> Iterator[tuple[str, Any, bool]]:
    """Name the leaves of ``(args, kwargs)`` as the function does: ``x``, ``batch['image']``, ``args[2]``.

    Args:
        function: What is called with them.
        leaves: Of each the path as JAX gives it, the value, and whether it is an array or a number that is an input.
    """
    names, rest = _parameters(function)
    for (side, first, *inner), leaf, is_input in leaves:
        if side.idx == 1:
            own = first.key
        elif first.idx < len(names):
            own = names[first.idx]
        else:
            own = f"{rest}[{first.idx - len(names)}]" if rest else f"argument {first.idx}"
        yield f"{own}{jax.tree_util.keystr(tuple(inner))}", leaf, is_input


def _parameters(function: Callable[..., Any]) -> tuple[list[str], str]:
    """Return the names of the parameters that take arguments by position, and of the one that takes the rest."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # such as a function in C without a signature
        return [], ""
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return names, next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "")


def facts_of(given: Iterable[tuple[str, Any, bool]], reached: Iterable[tuple[str, Any, bool]]) -> dict[str, Fact]:
    """Describe values and everything below them by path.

    Args:
        given: Names and values of arguments; whether it is an input of a program, whatever its value.
        reached: Names and values of what the function reaches besides; whether only the value's identity counts.
    """
    walk = _Walk()
    for name, value, is_input in given:
        if is_input:
            walk.note_array(value, name, ())
        else:
            walk.visit(value, name, ())
    for name, value, by_identity in reached:
        own = f"{name} (not an argument)" if name in walk.facts else name
        if by_identity:
            walk.facts[own] = Fact(_shown(value), SameObject(value))
        else:
            walk.visit(value, own, ())
    return walk.facts


class _Walk:
    def __init__(self) -> None:
        self.facts: dict[str, Fact] = {}
        self._seen: dict[int, str] = {}

    def visit(self, value: Any, path: str, owners: tuple[tuple[type, str], ...]) -> None:
        kind = kind_of(value)
        if kind is TokenKind.ATOM:
            self.facts[path] = Fact(_shown(value), token(value), owners=owners)
        elif kind is TokenKind.ARRAY:
            self.note_array(value, path, owners)
        elif kind not in (TokenKind.TUPLE, TokenKind.METHOD, TokenKind.PARTIAL) and id(value) in self._seen:
            self.facts[path] = Fact(f"the same object as {self._seen[id(value)]}", None, owners=owners)
        else:
            self._seen[id(value)] = path
            if kind is TokenKind.VARIABLE:
                self.note_array(value, path, owners)
                self.facts[f"{path} (type)"] = Fact(type(value).__name__, SameObject(type(value)), owners=owners)
            else:
                mark, order = _mark_of(value, kind)
                self.facts[path] = Fact(type(value).__name__, (SameObject(type(value)), mark), True, order, owners)
            for name, inner, part in _parts_of(value, kind, path):
                own = (*owners, (type(value), name)) if kind is TokenKind.OBJECT else owners
                self.visit(part, inner, own)

    def note_array(self, value: Any, path: str, owners: Any) -> None:
        """Describe an array, a number or a Variable by its type: shape, dtype, whether that gives way, the mesh."""
        raw = value.get_raw_value() if isinstance(value, nnx.Variable) else value
        if isinstance(raw, (bool, int, float, complex)):
            self.facts[path] = Fact(type(raw).__name__, type(raw), raw is not value, owners=owners)
        elif kind_of(raw) is TokenKind.ARRAY:
            kind: Any = jax.typeof(raw)
            weak = " (weak type)" if getattr(kind, "weak_type", False) else ""
            self.facts[path] = Fact(describe(raw) + weak + _place(kind), kind, raw is not value, owners=owners)
        else:  # a placeholder, or a Variable that holds no array
            text = repr(value) if isinstance(raw, PendingInit) else describe(raw)
            self.facts[path] = Fact(text, None, raw is not value, owners=owners)


def _place(kind: Any) -> str:
    """Return what the type of an array says of where it is: its mesh, and how it lies along explicit axes."""
    sharding = kind.sharding
    if sharding.mesh.empty:
        return ""
    spec = f"{sharding.spec} " if any(sharding.spec) else ""
    return f" {spec}on a mesh of {', '.join(f'{name}={size}' for name, size in sharding.mesh.shape.items())}"


def _mark_of(value: Any, kind: TokenKind) -> tuple[Any, tuple[Any, ...] | None]:
    """Return what a value is besides its class and its parts, and the order of its parts if it counts."""
    if kind is TokenKind.METHOD:
        return SameObject(value.__func__), None
    if kind is TokenKind.SET:
        return frozenset(map(token, value)), None
    if kind is TokenKind.NODE:
        return None, tuple(attributes(value))
    return None, tuple(map(token, value)) if kind is TokenKind.DICT and not isinstance(value, nnx.State) else None


def _parts_of(value: Any, kind: TokenKind, path: str) -> list[tuple[Any, str, Any]]:
    """Return names, paths and values of what is in a value."""
    items: list[tuple[Any, Any]]
    if kind is TokenKind.METHOD:
        items = [("__self__", value.__self__)]
    elif kind is TokenKind.PARTIAL:
        items = [(name, getattr(value, name)) for name in ("func", "args", "keywords")]
    elif kind is TokenKind.VARIABLE:
        items = [item for item in sorted(_compat.raw_metadata(value).items()) if item[0] not in _OF_FLAX]
    elif kind is TokenKind.SET:
        items = []
    elif kind in (TokenKind.DICT, TokenKind.PROXY):
        return [(key, f"{path}[{key!r}]", part) for key, part in list(value.items())]
    elif kind is TokenKind.TUPLE and hasattr(value, "_fields"):
        items = [(name, getattr(value, name)) for name in value._fields]
    elif kind in (TokenKind.NODE, TokenKind.OBJECT):
        held = attributes(value) if kind is TokenKind.NODE else held_by(value, kind)
        items = list(held.items())
    else:
        return [(i, f"{path}[{i}]", part) for i, part in enumerate(list(value))]
    return [(name, f"{path}.{name}", part) for name, part in items]


def _shown(value: Any) -> str:
    text = show(token(value)) if not callable(value) else getattr(value, "__qualname__", None) or repr(value)
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}..."
