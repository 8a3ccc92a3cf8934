"""What a function keeps between forward and backward, by layer, found without computing anything.

The function is differentiated by ``jax.vjp`` in a trace of shapes. What the backward pass of that holds is what is
kept. Each array is told by where it was made: the innermost module that was being called, and named scopes within.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.extend.core import Literal

from lazymods import _compat, _graph
from lazymods._errors import LazyError, Problem, describe
from lazymods._frames import entry
from lazymods._graph import dotted
from lazymods._model import hooks
from lazymods._model.abstract_call import AbstractCall
from lazymods._refusals import refuse_uncallable
from lazymods._tables import Shown, Table
from lazymods.autograd.freezing import trainable

_WHERE = "lm.autograd.saved_bytes"
_SCOPE = "lazymods_module_"
_ARGUMENT = "(argument)"


@dataclasses.dataclass(frozen=True)
class SavedArray:
    """One array that is kept.

    Attributes:
        layer: The dotted path of the module in whose call it was made, and named scopes within, after slashes; '' if
            it was in none.
        source: The operation that made it, or the argument or parameter that it is.
        array: Its dtype and shape, as in a jaxpr.
        nbytes: Its bytes.
        is_argument: Whether it is an argument or a parameter, which is there anyway.
        is_on_host: Whether it is in the memory of the host (:func:`lazymods.autograd.save_on_cpu`).
    """

    layer: str
    source: str
    array: str
    nbytes: int
    is_argument: bool
    is_on_host: bool = False

    @property
    def group(self) -> str:
        """Its layer, or '(argument)'."""
        return _ARGUMENT if self.is_argument else self.layer


@dataclasses.dataclass(frozen=True, repr=False)
class SavedReport(Shown):
    """What is kept between forward and backward; it prints as a table of layers.

    Attributes:
        rows: The arrays, in the order in which they are made.
    """

    rows: tuple[SavedArray, ...]

    @property
    def total(self) -> int:
        """The bytes of all arrays."""
        return sum([row.nbytes for row in self.rows])

    @property
    def of_arguments(self) -> int:
        """The bytes of those that are arguments or parameters."""
        return sum([row.nbytes for row in self.rows if row.is_argument])

    @property
    def on_host(self) -> int:
        """The bytes of those that are in the memory of the host."""
        return sum([row.nbytes for row in self.rows if row.is_on_host])

    @property
    def by_layer(self) -> dict[str, int]:
        """The bytes of each layer; of arguments and parameters under '(argument)'."""
        found: dict[str, int] = {}
        for row in self.rows:
            found[row.group] = found.get(row.group, 0) + row.nbytes
        return found

    def _table(self) -> Table:
        heads = ("layer", "arrays", "bytes", "largest")
        parts = [f"total: {self.total:,} bytes in {len(self.rows)} arrays"]
        parts += [f"{self.of_arguments:,} of them arguments and parameters"] if self.of_arguments else []
        parts += [f"{self.on_host:,} of them on the host"] if self.on_host else []
        rows = [self._cells(layer) for layer in self.by_layer]
        return Table(heads, rows, ("arrays", "bytes"), (("largest", 20), ("layer", 20)), totals="; ".join(parts))

    def _cells(self, layer: str) -> tuple[str, str, str, str]:
        rows = [row for row in self.rows if row.group == layer]
        largest = max(rows, key=lambda row: row.nbytes)
        name = layer or "(no module)"
        return name, str(len(rows)), f"{self.by_layer[layer]:,}", f"{largest.array} {largest.source}"


@entry
def saved_bytes(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> SavedReport:
    """Find what a function keeps between forward and backward, by layer; nothing is computed and nothing changes.

    It is differentiated with respect to the trained parameters of the modules among its arguments
    (:data:`lazymods.trainable`), or, if there are none, to all floats, as ``jax.ad_checkpoint`` has it. What blocks of
    :func:`lazymods.autograd.saved_tensors_hooks` and ``jax.checkpoint`` keep instead is what counts.

    Args:
        fn: Returns floats in any pytree, as a loss. A module stands for its call.
        *args: Its arguments; a ``jax.ShapeDtypeStruct`` may stand for any array. Models may be lazy: they stay so.
        **kwargs: Keyword arguments.

    Returns:
        A report with ``total``, ``by_layer``, and a row for each array. It prints as a table.

    Raises:
        ArgumentError: If ``fn`` can't be called.
        LazyError: If there is nothing to differentiate: no float among arguments and parameters, or among results.
        ShapeInferenceError: If a lazy layer can't be sized.

    Example:
        >>> import jax.numpy as jnp, lazymods as lm
        >>> def f(x):
        ...     return jnp.sin(jnp.exp(x)).sum()
        >>> report = lm.autograd.saved_bytes(f, jnp.ones(1000))
        >>> report.total, [row.source for row in report.rows]
        (8000, ['exp', 'cos'])
    """
    refuse_uncallable(_WHERE, fn)
    call = _call_module if isinstance(fn, nnx.Module) else fn
    return _report(_Arguments(call, (fn, *args) if isinstance(fn, nnx.Module) else args, kwargs))


def _call_module(module: Any, *args: Any, **kwargs: Any) -> Any:
    return module(*args, **kwargs)


class _Arguments:
    """The arguments of a function, taken apart into arrays, and what stays as it is.

    Attributes:
        arrays: Types of all arrays, by place: of the arguments, and of the modules among them.
        names: Their names, by place.
        by: The places of those that the function is differentiated by.
        layers: After a call, the dotted paths of the modules that were called, by number.
    """

    def __init__(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._fn = fn
        found, self._structure = jax.tree.flatten_with_path((args, kwargs), is_leaf=_is_object)
        leaves = [leaf for _, leaf in found]
        self._places = [i for i, leaf in enumerate(leaves) if _is_object(leaf)]
        self._called = [_name_of_argument(fn, path) for path, _ in found]
        objects = [leaves[i] for i in self._places]
        if _graph.lazy_nodes(objects) or any(map(_graph.is_placeholder, objects)):
            run = AbstractCall([], args, kwargs, run=lambda _, *args, **kwargs: fn(*args, **kwargs)).run()
            objects = [run.twin(x) for x in objects]
        self._graph, state = nnx.split(tuple(objects))
        flat = nnx.to_flat_state(state)
        self._paths = [path for path, _ in flat]
        plain = [None if _is_object(leaf) else leaf for leaf in leaves]
        names = [self._called[i] for i, leaf in enumerate(plain) if leaf is not None]
        trained = [False] * len(names)
        for path, variable in flat:
            count = len(jax.tree.leaves(variable))
            names += [self._name(path)] * count
            trained += [trainable(path, variable)] * count
        self._leaves, self._tree = jax.tree.flatten((plain, [variable for _, variable in flat]))
        self.arrays = {i: _spec(leaf) for i, leaf in enumerate(self._leaves) if _is_array(leaf)}
        self.names = names
        self.by = [i for i, x in self.arrays.items() if jnp.issubdtype(x.dtype, jnp.inexact)]
        if objects:
            self.by = [i for i in self.by if trained[i]]
        self.layers: list[str] = []

    def _name(self, path: Sequence[Any]) -> str:
        argument = self._called[self._places[path[0]]] if len(self._places) > 1 else ""
        return ".".join([part for part in (argument, dotted(tuple(path[1:]))) if part])

    def call(self, arrays: dict[int, Any]) -> list[Any]:
        """Call the function with these arrays; return the floats among its results."""
        plain, variables = jax.tree.unflatten(self._tree, [arrays.get(i, leaf) for i, leaf in enumerate(self._leaves)])
        objects = nnx.merge(self._graph, nnx.from_flat_state(list(zip(self._paths, variables, strict=True))))
        for i, x in zip(self._places, objects, strict=True):
            plain[i] = x
        args, kwargs = jax.tree.unflatten(self._structure, plain)
        with self._told(objects):
            out = self._fn(*args, **kwargs)
        return [x for x in jax.tree.leaves(out) if _is_array(x) and jnp.issubdtype(x.dtype, jnp.inexact)]

    @contextlib.contextmanager
    def _told(self, objects: Sequence[Any]) -> Iterator[None]:
        """Let each operation be in a named scope that says in the call of which module it is."""
        self.layers = []
        with contextlib.ExitStack() as handles:
            for number, top in enumerate(objects):
                for path, node in _graph.nodes(top):
                    if isinstance(node, nnx.Module) and callable(node):
                        self._tell(node, self._name((number, *path)), handles)
            yield

    def _tell(self, node: Any, name: str, handles: contextlib.ExitStack) -> None:
        scope, entered = f"{_SCOPE}{len(self.layers)}", []
        self.layers.append(name)

        def enter(*_: Any) -> None:
            entered.append(jax.named_scope(scope))
            entered[-1].__enter__()

        def leave(*_: Any) -> None:
            entered.pop().__exit__(None, None, None)

        handles.callback(hooks.register_forward_pre_hook(node, enter, prepend=True).remove)
        handles.callback(hooks.register_forward_hook(node, leave, always_call=True).remove)

    def layer(self, scopes: str) -> str:
        """Return the layer that scopes tell, and the named scopes of the user's within it."""
        parts = [part for part in re.sub(r"\w+\(|\)", "", scopes).split("/") if part]
        numbers = [i for i, part in enumerate(parts) if part.startswith(_SCOPE)]
        if not numbers:
            return "/".join(parts)
        return "/".join([self.layers[int(parts[numbers[-1]].removeprefix(_SCOPE))], *parts[numbers[-1] + 1 :]])


def _is_object(value: Any) -> bool:
    return _graph.is_object(value) and not isinstance(value, nnx.State)


def _is_array(value: Any) -> bool:
    return isinstance(value, (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct))


def _spec(value: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(value.shape, value.dtype)


def _name_of_argument(fn: Callable[..., Any], path: Sequence[Any]) -> str:
    """Return the name of an argument by its place in ``(args, kwargs)``: ``batch['x'][0]``."""
    key: Any = path[1]
    name = getattr(key, "key", None)
    if name is None:
        try:
            name = list(inspect.signature(fn).parameters)[key.idx]
        except (TypeError, ValueError, IndexError):
            name = f"args[{key.idx}]"
    return name + jax.tree_util.keystr(tuple(path[2:]))


def _report(arguments: _Arguments) -> SavedReport:
    if not arguments.by:
        raise LazyError(_nothing("no float among the arguments, and no trained parameter"))
    others = {i: x for i, x in arguments.arrays.items() if i not in set(arguments.by)}

    def kept(by: dict[int, Any], others: dict[int, Any]) -> list[Any]:
        out, back = jax.vjp(lambda by: arguments.call({**by, **others}), by)
        if not out:
            raise LazyError(_nothing("no float among the results"))
        return jax.tree.leaves(back)

    by = {i: arguments.arrays[i] for i in arguments.by}
    jaxpr = _compat.tracing.open_jaxpr(jax.make_jaxpr(kept)(by, others))[0]
    places = [*by, *others]
    inputs = dict(zip(jaxpr.invars[-len(places) :], [arguments.names[i] for i in places], strict=True))
    rows: dict[Any, SavedArray] = {}
    for var in jaxpr.outvars:
        key = id(var) if isinstance(var, Literal) else var
        if key not in rows:
            rows[key] = _row(var, jaxpr, inputs, arguments)
    order = {var: i for i, var in enumerate([v for e in jaxpr.eqns for v in e.outvars])}
    return SavedReport(tuple([rows[key] for key in sorted(rows, key=lambda key: order.get(key, -1))]))


def _row(var: Any, jaxpr: Any, inputs: dict[Any, str], arguments: _Arguments) -> SavedArray:
    size = math.prod(var.aval.shape) * var.aval.dtype.itemsize
    origin, equation, scopes = _origin(var, jaxpr)
    if equation is not None:
        is_on_host = getattr(var.aval, "memory_space", None) == jax.memory.Space.Host
        return SavedArray(arguments.layer(scopes), _source(equation), describe(var.aval), size, False, is_on_host)
    name = None if isinstance(origin, Literal) else inputs.get(origin)
    return SavedArray("", name or "a constant", describe(var.aval), size, name is not None)


def _origin(var: Any, jaxpr: Any) -> tuple[Any, Any, str]:
    """Return the variable that it is outside of all, or the operation that made it, and the scopes of that."""
    for equation in jaxpr.eqns:
        if isinstance(var, Literal) or var not in equation.outvars:
            continue
        scopes = _compat.scopes_of(equation)
        if equation.primitive.name == "reduce_precision":  # what jax puts around what a checkpoint keeps
            return _origin(equation.invars[0], jaxpr)
        if equation.primitive.name not in ("jit", "pjit", "closed_call", "core_call"):
            return var, equation, scopes
        inner = _compat.tracing.open_jaxpr(equation.params["jaxpr"])[0]
        origin, made, within = _origin(inner.outvars[list(equation.outvars).index(var)], inner)
        if made is not None:
            return origin, made, f"{scopes}/{within}"
        if isinstance(origin, Literal) or origin not in inner.invars:
            return origin, None, scopes
        return _origin(equation.invars[list(inner.invars).index(origin) - len(inner.invars)], jaxpr)
    return var, None, ""


def _source(equation: Any) -> str:
    name = equation.params.get("name") if equation.primitive.name == "name" else None
    return equation.primitive.name if name is None else f"{name} (checkpoint_name)"


def _nothing(got: str) -> Problem:
    needed = "a function that floats go into and come out of: what it keeps is for its gradient"
    return Problem(_WHERE, got, needed, f"{_WHERE}(loss, model, x)  # with a loss that returns a float")
