"""The call of a stack: its block once for each layer, on the output of the one before.

Inside a program the block is traced once, for all layers, as the body of a ``jax.lax.scan``. Where operations are
executed at once (also in ``jax.grad`` and ``jax.vmap`` outside of ``jax.jit``) the layers are called one after the
other: a scan would be compiled at each call. The body calls a copy of the block, and what a call changes in that is
written to the stack afterwards: values, new Variables and attributes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lazymods import _compat, _graph
from lazymods._errors import LazyError, Problem, ShapeInferenceError, describe
from lazymods._graph import ARRAY, NODE, OTHER, VARIABLE, kind_of
from lazymods._initial import shards
from lazymods._layer import stacked_values
from lazymods._layer.blocks import LAYERS, has_no_layers, raw_of, with_axis, without_axis
from lazymods._layer.copying import copied, rebuilt
from lazymods._layer.lifecycle import TRANSIENT
from lazymods._layer.settings import same_setting

Remat = bool | Callable[..., Any]

_PLAIN = (int, float, complex, str, bytes, np.generic, type(None))


class _Setting(NamedTuple):
    """An attribute that holds no values, and what it is set to."""

    node: Any
    name: str
    value: Any


class BlockCall:
    """One call of a stack.

    Args:
        whole: The block that holds the values of all layers.
        n: The number of layers.
        shared: What all layers share: objects and Variables in ``whole``.
        args: What each block takes besides the output of the one before.
        kwargs: Keyword arguments, likewise.
        remat: Whether the backward pass computes each block again; or a policy that says what of it is kept.
    """

    def __init__(
        self, whole: Any, n: int, shared: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any], remat: Remat
    ) -> None:
        self._whole, self._n, self._remat = whole, n, remat
        self._leaves, self._tree = jax.tree.flatten((args, kwargs), is_leaf=_graph.is_object)
        given = [v for v in self._leaves if _graph.is_object(v)]
        self._roots = [whole, *given]
        shared_ids = {id(v) for v in _owners([*shared, *given])}
        owners = _owners(self._roots)
        self._stacked = [o for o in owners if id(o) not in shared_ids]
        self._shared = [o for o in owners if id(o) in shared_ids and kind_of(o) is VARIABLE]
        self._common = {id(node) for v in (*shared, *given) for _, node in _graph.nodes(v)}
        self._copies: dict[int, Any] = {}
        self._after: list[Any] = []
        self._changed: set[int] = set()
        self._before: list[_Setting] = []

    def run(self, x: Any) -> Any:
        """Call all blocks, and write what they have changed.

        Raises:
            ShapeInferenceError: If a block returns something of another shape or dtype than it takes.
            LazyError: If the blocks change what they share in a way that can't be carried from one to the next, or a
                value on the stack has not the axis of the layers.
        """
        self._check_axes()
        slices = [self._values_of(owner) for owner in self._stacked]
        carried = [raw_of(v) for v in self._shared]
        scanning = not _compat.runs_at_once(_compat.current_trace())
        try:
            x, carried, found = (self._scanned if scanning else self._in_turn)(x, carried, slices)
            if _graph.has_uninitialized_params(self._whole):  # an abstract run, which starts again
                self._put_back()
            else:
                self._write(carried, found)
        except BaseException:
            self._put_back()
            raise
        return x

    def _scanned(self, x: Any, carried: list[Any], slices: list[Any]) -> tuple[Any, list[Any], dict[str, Any]]:
        slices = jax.tree.map(stacked_values.on_all_devices, slices)
        (y, after), found = self._scan(x, carried, slices, self._n)
        changed = self._settings() if self._n > 1 else {}
        if not changed:
            return y, after, found
        first, others = (jax.tree.map(lambda a, part=part: a[part], slices) for part in (slice(1), slice(1, None)))
        (x, carried), found = self._scan(x, carried, first, 1)  # which alone finds what was set before
        self._set(changed)
        (x, carried), more = self._scan(x, carried, others, self._n - 1)
        self._check_settled()
        return x, carried, _together([found, more], jnp.concatenate)

    def _scan(self, x: Any, carried: list[Any], slices: list[Any], length: int) -> Any:
        step = self._function(prevent_cse=False)
        return jax.lax.scan(lambda c, s: step(*c, s), (x, carried), slices, length=length)

    def _in_turn(self, x: Any, carried: list[Any], slices: list[Any]) -> tuple[Any, list[Any], dict[str, Any]]:
        rows = list(zip(*[stacked_values.rows(s, self._n) for s in slices], strict=True)) or [()] * self._n
        step = self._function(prevent_cse=True)
        outputs: list[dict[str, Any]] = []
        settings: list[dict[tuple[int, str], _Setting]] = []
        for row in rows:
            (x, carried), new = step(x, carried, list(row))
            outputs.append(new)
            settings.append(self._settings(shared=False))
            if len(outputs) > 1:
                self._check_settled()
            elif changed := self._settings():
                self._set(changed)
                step = self._function(prevent_cse=True)  # JAX would go on with what the first one did
        _check_equal(settings)
        return x, carried, _together(outputs, stacked_values.stack)

    def _function(self, *, prevent_cse: bool) -> Callable[..., Any]:
        def step(x: Any, carried: list[Any], values: list[Any]) -> Any:
            return self._step(x, carried, values)

        policy = self._remat if callable(self._remat) else None
        return jax.checkpoint(step, prevent_cse=prevent_cse, policy=policy) if self._remat else step

    def _check_axes(self) -> None:
        """Refuse what was set on the stack by hand without the axis of the layers."""
        stacked = {id(o) for o in self._stacked if not has_no_layers(o)}
        problems = []
        for entry in _graph.entries(self._whole):
            where = f"{entry.name} in the blocks of a Stack"
            if id(entry.value) in stacked and _graph.is_placeholder(entry.value):
                if entry.value.pending.stacking.sizes[:1] != (self._n,):
                    got = "a lazy layer for all blocks at once: set on the stack, or made by initialize_parameters"
                    needed = "one that each block makes for itself, with keys of its own"
                    write = "self.layer = lm.LazyLinear(4, rngs=rngs)  # in the constructor of the block"
                    problems.append(Problem(where, got, needed, write))
                continue
            shapes = [jnp.shape(a) for a in jax.tree.leaves(raw_of(entry.value))] if id(entry.value) in stacked else []
            if any(shape[:1] != (self._n,) for shape in shapes):
                got, needed = f"a value of shape {shapes[0]}", f"an axis of the {self._n} layers in front"
                write = "stack.each(lambda block: ...)  # sets it in each block"
                problems.append(Problem(where, got, needed, write))
        if problems:
            raise LazyError(*problems)

    # ------------------------------------------------------------ one block

    def _values_of(self, owner: Any) -> Any:
        """Return the values for all layers; what was set on the stack without their axis is for each of them."""
        raw = raw_of(owner)
        if has_no_layers(owner):
            return jax.tree.map(lambda a: jnp.broadcast_to(a, (self._n, *jnp.shape(a))), raw)
        return raw

    def _step(self, x: Any, carried: list[Any], values: list[Any]) -> tuple[tuple[Any, list[Any]], dict[str, Any]]:
        """Call one block; return its output, what is shared, and the values that have changed or are new, by name."""
        given = {id(o): v for o, v in zip([*self._shared, *self._stacked], [*carried, *values], strict=True)}
        sliced = set(map(id, self._stacked))
        memo: dict[int, Any] = {}

        def leaf(owner: Any) -> Any:
            value = given.get(id(owner), owner)
            if kind_of(owner) is ARRAY:
                return value
            metadata = dict(_compat.raw_metadata(owner))
            return _compat.new_variable(type(owner), value, without_axis(metadata) if id(owner) in sliced else metadata)

        block, *objects = [copied(root, leaf, memo) for root in self._roots]
        places = iter(objects)
        args, kwargs = self._tree.unflatten([next(places) if _graph.is_object(v) else v for v in self._leaves])
        y = block(x, *args, **kwargs)
        _check_carry(x, y, type(block).__name__)
        self._copies, self._after = memo, [block, *objects]
        after = [raw_of(memo[id(v)]) for v in self._shared]
        self._changed |= {i for i, (a, b) in enumerate(zip(after, carried, strict=True)) if not _is_same(a, b)}
        return (y, after), self._news(given)

    def _news(self, given: dict[int, Any]) -> dict[str, Any]:
        """Return the values of stacked Variables that a call has changed, and of what is new, by name."""
        origins = {id(c): o for o, c in ((o, self._copies.get(id(o))) for o in self._stacked) if c is not None}
        known = set(map(id, self._copies.values()))
        common = {id(e.value) for i in self._common if i in self._copies for e in _graph.entries(self._copies[i])}
        found: dict[str, Any] = {}
        for number, root in enumerate(self._after):
            for entry in _graph.entries(root):
                value = entry.value
                origin = origins.get(id(value))
                if origin is not None:
                    if kind_of(value) is VARIABLE and not _is_same(raw_of(value), given[id(origin)]):
                        found[f"{number}.{entry.name}"] = raw_of(value)
                elif id(value) not in known:
                    if id(value) in common:
                        raise _not_carried(entry.name, "a new Variable or array in what the blocks share")
                    found[f"{number}.{entry.name}"] = raw_of(value)
        return found

    # ------------------------------------------------------------ attributes that hold no values

    def _settings(self, *, shared: bool = True) -> dict[tuple[int, str], _Setting]:
        """Return the attributes without values that the last call has set: of what the blocks share, or of others."""
        found = {}
        for node, copy in self._pairs() if not _graph.lazy_nodes(self._whole) else ():
            if kind_of(node) is NODE and (id(node) in self._common) is shared:
                held, now = _graph.attributes(node), _graph.attributes(copy)
                for name in held | now:
                    before, after = held.get(name, _graph.MISSING), now.get(name, _graph.MISSING)
                    if kind_of(after) is OTHER and _is_told_apart(before, after) and not _is_alike(before, after):
                        found[id(node), name] = _Setting(node, name, after)
        return found

    def _set(self, settings: dict[tuple[int, str], _Setting]) -> None:
        for node, name, value in settings.values():
            self._before.append(_Setting(node, name, vars(node).get(name, _graph.MISSING)))
            _set_attribute(node, name, value)

    def _put_back(self) -> None:
        while self._before:
            _set_attribute(*self._before.pop())

    def _check_settled(self) -> None:
        """Refuse what a call changes in what the blocks share, and the next call once more, as a count."""
        for _, name, _ in self._settings().values():
            raise _not_carried(name, "an attribute of what the blocks share, which a call changes each time")

    # ------------------------------------------------------------ writing

    def _write(self, carried: list[Any], found: dict[str, Any]) -> None:
        """Write to the stack what has become of the block."""
        for i in sorted(self._changed):
            self._shared[i].set_raw_value(carried[i])
        originals = {id(c): o for o, c in self._pairs()}
        values: dict[int, Any] = {}
        for number, root in enumerate(self._after):
            for entry in _graph.entries(root):
                value = found.get(f"{number}.{entry.name}", _graph.MISSING)
                if value is not _graph.MISSING:
                    values[id(entry.value)] = value
        for owner in filter(has_no_layers, self._stacked):  # a new one has the axis: nnx.jit carries out no metadata
            copy = id(self._copies[id(owner)])
            values.setdefault(copy, self._values_of(owner))
            del originals[copy]
        for copy, value in values.items():
            owner = originals.get(copy)
            if isinstance(owner, nnx.Variable):
                owner.set_raw_value(_where_it_was(owner.get_raw_value(), value))
        self._write_objects(originals, values)

    def _pairs(self) -> list[tuple[Any, Any]]:
        """Return objects and Variables of the stack with their copies in the last call."""
        objects = [node for root in self._roots for _, node in _graph.nodes(root)]
        return [(o, self._copies[id(o)]) for o in (*objects, *_owners(self._roots)) if id(o) in self._copies]

    def _write_objects(self, originals: dict[int, Any], values: dict[int, Any]) -> None:
        memo = dict(originals)

        def leaf(value: Any) -> Any:
            new = values.get(id(value), value)
            if kind_of(value) is ARRAY:
                return new
            metadata = with_axis(_compat.raw_metadata(value))
            if isinstance(value, TRANSIENT):
                metadata[LAYERS] = self._n
            return _compat.new_variable(type(value), new, metadata)

        for node, copy in [(o, c) for o, c in self._pairs() if kind_of(o) is NODE]:
            held, now = _graph.attributes(node), _graph.attributes(copy)
            for name in [n for n in held if n not in now]:
                delattr(node, name)
            for name, value in now.items():
                new = self._restored(held.get(name, _graph.MISSING), value, memo, leaf)
                if new is not held.get(name, _graph.MISSING):
                    setattr(node, name, new)

    def _restored(self, before: Any, after: Any, memo: dict[int, Any], leaf: Callable[[Any], Any]) -> Any:
        """Return what is in the stack for what an attribute of the copy holds after the call."""
        kind = kind_of(after)
        if kind is OTHER:
            return before if type(before) is type(after) and before is after else after
        if kind <= NODE and self._copies.get(id(before)) is after and not has_no_layers(before):
            return before
        if kind <= NODE or before is _graph.MISSING or kind_of(before) is not kind:
            return copied(after, leaf, memo)
        held, now = dict(_graph.children(before)), dict(_graph.children(after, kind))
        new = {k: self._restored(held.get(k, _graph.MISSING), v, memo, leaf) for k, v in now.items()}
        if list(held) == list(new) and all(held[k] is v for k, v in new.items()):
            return before
        return rebuilt(after, kind, new)


def _where_it_was(before: Any, value: Any) -> Any:
    """Bring what the layers have made to where the stack has it on a mesh."""
    typed = stacked_values.split_layers(before) if _compat.is_tracer(before) else None
    if typed is not None and jnp.shape(value) == jnp.shape(before):
        return jax.sharding.reshard(value, typed)
    place = stacked_values.place_of(before)
    is_here = isinstance(place, jax.sharding.NamedSharding) and stacked_values.place_of(value) is not None
    return shards.put(value, place) if is_here and value.shape == before.shape else value


def _owners(roots: list[Any]) -> list[Any]:
    """Return each Variable and array of some objects once."""
    found = {id(r): r for r in roots if kind_of(r) is VARIABLE}
    return list((found | {id(e.value): e.value for e in _graph.entries(roots)}).values())


def _together(outputs: list[dict[str, Any]], join: Callable[[list[Any]], Any]) -> dict[str, Any]:
    """Put together what the blocks have changed, one or several called after the other."""
    trees = [jax.tree.flatten(o) for o in outputs]
    if any(tree != trees[0][1] for _, tree in trees):
        names = sorted({name for o in outputs for name in o})
        raise _not_carried(", ".join(n.partition(".")[2] for n in names), "values that some blocks change only")
    return trees[0][1].unflatten([join(list(v)) for v in zip(*[t[0] for t in trees], strict=True)])


def _check_equal(settings: list[dict[tuple[int, str], _Setting]]) -> None:
    """Refuse numbers and texts that each block sets to another: the stack has one for all."""
    for key, (_, name, value) in [item for each in settings for item in each.items()]:
        others = [each[key].value if key in each else _graph.MISSING for each in settings]
        if isinstance(value, _PLAIN) and not all(_is_alike(value, other) for other in others):
            raise _not_carried(name, "an attribute that not all blocks set to the same")


def _set_attribute(node: Any, name: str, value: Any) -> None:
    if value is _graph.MISSING:
        delattr(node, name)
    else:
        setattr(node, name, value)


def _is_told_apart(a: Any, b: Any) -> bool:
    """Whether one of two is nothing, a number or a text: of other objects a call may make another each time."""
    return any(value is _graph.MISSING or isinstance(value, _PLAIN) for value in (a, b))


def _is_alike(a: Any, b: Any) -> bool:
    is_nan = isinstance(a, float) and isinstance(b, float) and a != a and b != b
    return is_nan or same_setting(a, b)


def _is_same(a: Any, b: Any) -> bool:
    """Whether two values consist of the same arrays."""
    one, two = (jax.tree.flatten(v) for v in (a, b))
    return one[1] == two[1] and all(x is y for x, y in zip(one[0], two[0], strict=True))


def _check_carry(x: Any, y: Any, name: str) -> None:
    taken, given = jax.tree.flatten(x), jax.tree.flatten(y)
    shapes = [[(jnp.shape(v), _compat.dtype_of(v)) for v in leaves] for leaves, _ in (taken, given)]
    if taken[1] != given[1] or shapes[0] != shapes[1]:
        got = f"{_show(y)}, from {_show(x)}"
        needed = "an output of the structure, shape and dtype of the input: the next block takes it"
        raise ShapeInferenceError(Problem(f"a block ({name}) of a Stack", got, needed, "return y.astype(x.dtype)"))


def _show(tree: Any) -> str:
    return ", ".join(describe(v) for v in jax.tree.leaves(tree)) or "nothing"


def _not_carried(name: str, got: str) -> LazyError:
    needed = "the same change in each block, to Variables that it had before"
    line = "blocks = nnx.List([make_block(rngs) for _ in range(n)])  # in place of the Stack"
    return LazyError(Problem(f"{name} in a block of a Stack", got, needed, line))
