"""Walking a model: every Variable and raw array by path, in the order in which attributes were defined."""

from __future__ import annotations

import enum
import functools
import sys
import threading
import types
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.core import Tracer

from lazymods import _compat
from lazymods._errors import located
from lazymods._initial.pending import PendingInit
from lazymods._refusals import refuse_class

STATE = _compat.own_name("state")  # the attribute that makes a layer lazy
HOOKS = _compat.own_name("hooks")  # the attribute that holds a module's hooks
TOGETHER = "blocks_as_one"  # the attribute of a lm.Stack with the block that holds the values of all; no name has it
REQUIRES_GRAD = "requires_grad"  # metadata of a parameter, by PyTorch's name; one without it is trained
REMOVED_HOOKS: set[int] = set()  # ids of those that a backward hook removed: a transform may give them back
Path = tuple[Any, ...]
_PRIVATE = frozenset((STATE, HOOKS, _compat.STATE, _compat.NODES))


class _Local(threading.local):
    session: Any = None  # the AbstractCall that this thread is in, if any
    stage: Any = None  # what the trace of an lm.jit function in this thread does with lazy layers, if there is one
    initializing: int = 0  # how many initialize_parameters of layers this thread is in
    apart: Any = None  # the blocks of stacks, while names lead to each of them
    updated: Any = None  # where it is noted which LazyOptimizer makes its state for which model, if anywhere


LOCAL = _Local()


class Entry(NamedTuple):
    """A Variable or raw array: where it is, and what holds it."""

    path: Path
    holder: Any
    key: Any
    value: Any

    @property
    def name(self) -> str:
        """The dotted path."""
        return dotted(self.path)


def dotted(path: Path) -> str:
    """Join a path with dots; tuple keys are joined as well: ``batch_stats.kernel.u``."""
    parts = [p if type(p) is str else dotted(p) if isinstance(p, tuple) else str(p) for p in path if p != TOGETHER]
    return ".".join(parts)


def attributes(node: Any) -> dict[str, Any]:
    """The attributes of an nnx object without those that are private to nnx and lazymods."""
    return {k: v for k, v in vars(node).items() if k not in _PRIVATE}


class NodeKind(enum.IntEnum):
    """What a value is to a walk."""

    VARIABLE = 0
    ARRAY = 1
    NODE = 2  # an nnx object
    MAPPING = 3  # one that nobody can change, such as a FrozenDict, is a PYTREE if JAX knows it
    SEQUENCE = 4
    PYTREE = 5  # an object of another class that JAX knows as a pytree, such as a flax.struct dataclass
    OTHER = 6


VARIABLE, ARRAY, NODE, MAPPING, SEQUENCE, PYTREE, OTHER = NodeKind
_LEAVES = (
    *(int, float, complex, str, bytes, type, type(None), np.generic, np.dtype, functools.partial),
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType),
)


def kind_of(value: Any) -> NodeKind:
    """Tell what a value is to a walk; by its type alone, where that says it."""
    kind = _kind_of_type(type(value))
    if kind is None:
        return _kind_of_instance(value)
    if kind is PYTREE and jax.tree_util.all_leaves((value,)):  # registered late, perhaps
        return MAPPING if isinstance(value, Mapping) else OTHER
    return kind


@functools.lru_cache(maxsize=4096)  # isinstance() asks the metaclasses of Variables and arrays, every time
def _kind_of_type(cls: type) -> NodeKind | None:
    if issubclass(cls, nnx.Variable):
        return VARIABLE
    if issubclass(cls, nnx.Pytree):
        return NODE
    if issubclass(cls, (np.ndarray, jax.ShapeDtypeStruct)):
        return ARRAY
    if issubclass(cls, MutableMapping):
        return MAPPING
    if issubclass(cls, (list, tuple)):  # those of the interpreter, as of time.gmtime(), hold more than their items
        return OTHER if hasattr(cls, "n_sequence_fields") else SEQUENCE
    if issubclass(cls, _LEAVES):
        return OTHER
    # tracers and Variables of hijax answer for what they stand for, as their metaclasses see it
    return None if issubclass(cls, Tracer) or hasattr(cls, "aval") or hasattr(cls, "_var_type") else PYTREE


def _kind_of_instance(value: Any) -> NodeKind:
    if isinstance(value, nnx.Variable):
        return VARIABLE
    return ARRAY if isinstance(value, jax.Array) else OTHER


def children(value: Any, kind: NodeKind | None = None) -> Iterable[tuple[Any, Any]]:
    """What an nnx object, mapping, list, tuple or registered pytree holds, by key; ``kind``: its own, if known."""
    kind = kind_of(value) if kind is None else kind
    if kind is NODE:
        if LOCAL.apart is not None and LOCAL.apart.opens(value):
            return LOCAL.apart.blocks_of(value)
        return [item for item in vars(value).items() if item[0] not in _PRIVATE]
    if kind is MAPPING:
        return list(value.items())
    if kind is PYTREE:
        return pytree_children(value)
    if kind is not SEQUENCE:
        return ()
    fields = getattr(value, "_fields", None)  # optax states are named tuples
    return zip(fields, value, strict=True) if fields and isinstance(value, tuple) else enumerate(value)


def pytree_children(value: Any) -> list[tuple[Any, Any]]:
    """What an object of a registered class holds, by the keys that ``nnx.state`` gives: ``a`` of ``pair.a``."""
    found, _ = jax.tree_util.tree_flatten_with_path(value, is_leaf=lambda x: x is not value)
    return [(name_of(path[0]), child) for path, child in found]


def name_of(key: Any) -> Any:
    """Return what a key of JAX's paths is called in a path of a model."""
    for attribute in ("name", "key", "idx"):  # GetAttrKey, DictKey and FlattenedIndexKey, SequenceKey
        if hasattr(key, attribute):
            return getattr(key, attribute)
    return str(key)


def entries(model: Any) -> Iterator[Entry]:
    """Every Variable and raw array, one that is shared under each of its names."""
    yield from _entries(model, (), ())


def _entries(holder: Any, path: Path, above: tuple[int, ...]) -> Iterator[Entry]:
    if id(holder) in above:  # a cycle
        return
    above = (*above, id(holder))
    for key, value in children(holder):
        kind = kind_of(value)
        if kind <= ARRAY:
            yield Entry((*path, key), holder, key, value)
        elif kind in (NODE, PYTREE) or (kind < OTHER and value):
            yield from _entries(value, (*path, key), above)


def nodes(model: Any) -> list[tuple[Path, Any]]:
    """Every nnx object, ``model`` first, one that is shared under its first name only."""
    found: list[tuple[Path, Any]] = []
    _collect_nodes(model, kind_of(model), (), (), set(), found)
    return found


def named_nodes(model: Any) -> list[tuple[Path, Any]]:
    """Every nnx object, ``model`` first, one that is shared under each of its names."""
    found: list[tuple[Path, Any]] = []
    _collect_nodes(model, kind_of(model), (), (), None, found)
    return found


def _collect_nodes(
    value: Any, kind: NodeKind, path: Path, above: tuple[int, ...], seen: set[int] | None, found: list[tuple[Path, Any]]
) -> None:
    if (seen is not None and id(value) in seen) or id(value) in above:  # a cycle
        return
    if kind is NODE:
        found.append((path, value))
        if seen is not None:
            seen.add(id(value))
    above = (*above, id(value))
    for key, child in children(value, kind):
        kind = kind_of(child)
        if NODE <= kind < OTHER and (kind is NODE or kind is PYTREE or child):
            _collect_nodes(child, kind, (*path, key), above, seen, found)


MISSING = object()  # what get_child and at return where there is nothing


def get_child(holder: Any, key: Any) -> Any:
    """What an nnx object or container holds at a key of :func:`children`, or MISSING.

    An ``nnx.List`` has attributes such as ``"0"``, and keys such as 0 in states.
    """
    if isinstance(holder, nnx.Pytree):
        if LOCAL.apart is not None and LOCAL.apart.opens(holder):
            return dict(LOCAL.apart.blocks_of(holder)).get(str(key), MISSING)
        return vars(holder).get(str(key) if isinstance(key, int) else key, MISSING)
    if isinstance(holder, Mapping):
        return holder.get(key, MISSING)
    if isinstance(holder, (list, tuple)) and isinstance(key, str):  # a NamedTuple
        return getattr(holder, key, MISSING)
    if isinstance(holder, (list, tuple)):
        return holder[key] if key < len(holder) else MISSING
    return dict(children(holder)).get(key, MISSING)


def at(model: Any, path: Path) -> Any:
    """What a model holds at a path, or MISSING."""
    for key in path:
        model = get_child(model, key)
    return model


def variables(model: Any) -> list[nnx.Variable[Any]]:
    """Every Variable once."""
    return list({id(e.value): e.value for e in entries(model) if isinstance(e.value, nnx.Variable)}.values())


def is_trained(variable: nnx.Param[Any]) -> bool:
    """Whether a parameter has not been frozen."""
    return not variable.has_metadata(REQUIRES_GRAD) or bool(variable.get_metadata(REQUIRES_GRAD))


def is_object(value: Any) -> bool:
    """Whether a value is an nnx object or a Variable."""
    return isinstance(value, (nnx.Pytree, nnx.Variable))


def is_placeholder(value: Any) -> bool:
    """Whether a value is a Variable without a value."""
    return kind_of(value) is VARIABLE and type(value.get_raw_value()) is PendingInit


def is_lazy_node(node: Any) -> bool:
    """Whether an nnx object is a lazy layer that has not become its class yet."""
    return kind_of(node) is NODE and STATE in vars(node)


def lazy_nodes(model: Any) -> list[tuple[Path, Any]]:
    """Every lazy layer, children before parents."""
    return [(p, n) for p, n in nodes(model) if is_lazy_node(n)][::-1]


def hooks_of(module: Any, kind: str | None = None) -> tuple[Any, ...]:
    """Return a module's hooks in the order in which they run."""
    hooks = vars(module).get(HOOKS, ())
    if hooks and REMOVED_HOOKS:
        hooks = tuple(h for h in hooks if h.id not in REMOVED_HOOKS)
    return hooks if kind is None else tuple(h for h in hooks if h.kind == kind)


def run_hooks(module: Any, kind: str, *args: Any) -> None:
    """Run a module's hooks of a kind.

    Raises:
        RuntimeError: If a hook returns a value: it would be lost.
    """
    for hook in hooks_of(module, kind):
        if hook.function(module, *args) is not None:
            raise RuntimeError(f"a {kind} hook of {type(module).__name__} returned a value; edit in place instead")


# ---------------------------------------------------------------- naming a place in a message


def place(target: Any, name: str, label: str = "") -> str:
    """Name an object by its path in the model that the callers hold: ``fc1 (LazyLinear)``.

    A layer does not know where it hangs. For a message, the callers' local variables are searched for modules
    that hold it, or for a placeholder one with the same pending init, since transforms and optimizers see copies. The
    longest path wins; without one the label and the name must do.
    """
    best = max((path for path, _ in holders(target)), key=len, default=())
    return located(dotted(best) or label, name)


def holders(target: Any) -> Iterator[tuple[Path, Any]]:
    """Find the nnx objects that hold another, as far as callers have them as local variables; each with the path."""
    frame = sys._getframe(1)  # noqa: SLF001
    seen: set[int] = set()
    while frame is not None:
        # reading the locals of JAX's own frames would keep their tracers alive
        inside_jax = frame.f_globals.get("__name__", "").partition(".")[0] in ("jax", "jaxlib")
        for value in () if inside_jax else list(frame.f_locals.values()):
            if isinstance(value, nnx.Pytree) and value is not target and id(value) not in seen:
                seen.add(id(value))
                path = _path_to(target, value)
                if path:
                    yield path, value
        frame = frame.f_back


def is_called_from(package: str) -> bool:
    """Whether any of the callers is in a package."""
    frame = sys._getframe(1)  # noqa: SLF001
    while frame is not None and not f"{frame.f_globals.get('__name__', '')}.".startswith(f"{package}."):
        frame = frame.f_back
    return frame is not None


def _path_to(target: Any, model: Any) -> Path:
    if isinstance(target, nnx.Variable):
        pending = target.get_raw_value()
        for entry in entries(model):
            if entry.value is target or (is_placeholder(entry.value) and entry.value.get_raw_value() == pending):
                return entry.path
        return ()
    return next((path for path, node in nodes(model) if node is target), ())


# ---------------------------------------------------------------- questions (public)


def is_lazy(x: Any) -> bool:
    """Say whether a layer or parameter is still uninitialized.

    Args:
        x: An nnx module or Variable; anything else is not lazy.

    Returns:
        True for a placeholder and for a lazy layer that has not become its class.

    Example:
        >>> import lazymods as lm
        >>> from flax import nnx
        >>> lm.is_lazy(lm.LazyLinear(4, rngs=nnx.Rngs(0))), lm.is_lazy(nnx.Linear(3, 4, rngs=nnx.Rngs(0)))
        (True, False)
    """
    return is_placeholder(x) or is_lazy_node(x)


def has_uninitialized_params(model: Any) -> bool:
    """Say whether any parameter or buffer of a model is uninitialized.

    Args:
        model: An nnx module, or any nnx object.

    Raises:
        ArgumentError: If it is a class.
    """
    refuse_class(model)
    return any(is_placeholder(e.value) for e in entries(model))


def uninitialized_paths(model: Any) -> list[str]:
    """List the dotted paths of all uninitialized parameters and buffers, in definition order.

    Args:
        model: An nnx module, or any nnx object.

    Returns:
        The paths, ``fc1.kernel``; a parameter that is shared is listed under each of its names.

    Raises:
        ArgumentError: If it is a class.

    Example:
        >>> import lazymods as lm
        >>> from flax import nnx
        >>> lm.uninitialized_paths(nnx.List([lm.LazyLinear(4, rngs=nnx.Rngs(0))]))
        ['0.kernel', '0.bias']
    """
    refuse_class(model)
    return [e.name for e in entries(model) if is_placeholder(e.value)]
