"""Constructors that draw more keys at some sizes than at others, in front of other layers: each gets its explicit key.

The twin is always the explicit model of the same seed; the keys of what is random are compared as well.
"""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from deciding import Shortcut
from flax import nnx

import lazymods as lm
from lazymods._initial import draws


class Extra(nnx.Module):
    """Draws more keys at one size, from a stream that it does not touch at others."""

    def __init__(self, n: int, m: int, *, rngs: nnx.Rngs) -> None:
        self.fc = nnx.Linear(n, m, rngs=rngs)
        self.drop = nnx.Dropout(0.5, deterministic=True, rngs=rngs) if n == 4 else None
        self.more = nnx.Linear(m, m, rngs=rngs) if n == 4 else None

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.fc(x)
        return y if self.more is None or self.drop is None else self.more(self.drop(y))


class Heads(nnx.Module):
    """As many layers as features."""

    def __init__(self, n: int, m: int, *, rngs: nnx.Rngs) -> None:
        self.heads = nnx.List([nnx.Linear(n, m, rngs=rngs) for _ in range(n)])

    def __call__(self, x: jax.Array) -> jax.Array:
        return sum((head(x) for head in self.heads), jnp.zeros(()))


class Tied(nnx.Module):
    """Two layers, or one where the widths are equal."""

    def __init__(self, n: int, m: int, *, rngs: nnx.Rngs) -> None:
        self.a = nnx.Linear(n, m, rngs=rngs)
        self.b = self.a if n == m else nnx.Linear(m, m, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.b(self.a(x))


CLASSES: dict[str, type] = {"shortcut": Shortcut, "extra": Extra, "heads": Heads, "tied": Tied}


def n_of_x(config: Any, x: Any) -> dict[str, int]:
    return {"n": x.shape[-1]}


LAZY = {cls: lm.lazy(cls, infer=n_of_x) for cls in CLASSES.values()}
WIDTHS = [4, 6]  # where the classes decide otherwise, and where they do what they do at most sizes


class Maker:
    """Makes layers, lazy or explicit, from one description of a model."""

    def __init__(self, lazy: bool, cls: type) -> None:
        self.is_lazy, self.cls = lazy, cls

    def block(self, n: int, m: int, rngs: nnx.Rngs) -> Any:
        return LAZY[self.cls](m=m, rngs=rngs) if self.is_lazy else self.cls(n, m, rngs=rngs)

    def linear(self, n: int, m: int, rngs: nnx.Rngs) -> Any:
        return lm.LazyLinear(m, rngs=rngs) if self.is_lazy else nnx.Linear(n, m, rngs=rngs)

    def norm(self, n: int, rngs: nnx.Rngs) -> Any:
        return lm.LazyBatchNorm(rngs=rngs) if self.is_lazy else nnx.BatchNorm(n, rngs=rngs)


def dropout(rngs: nnx.Rngs) -> nnx.Dropout:
    return nnx.Dropout(0.5, deterministic=True, rngs=rngs)


class Nest(nnx.Module):
    """Blocks inside modules and lists, which hold the rngs themselves."""

    def __init__(self, make: Maker, n: int, rngs: nnx.Rngs) -> None:
        self.rngs = rngs
        self.first = nnx.Sequential(make.block(n, 4, rngs), dropout(rngs))
        self.rest = nnx.List([make.block(4, 4, rngs), make.linear(4, 5, rngs), make.block(5, 4, rngs)])
        self.head = make.linear(4, 3, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.first(x)
        for layer in self.rest:
            x = layer(x)
        return self.head(x)


MODELS: dict[str, Callable[[Maker, int, nnx.Rngs], Any]] = {
    "one layer after": lambda make, n, rngs: nnx.Sequential(make.block(n, 4, rngs), make.linear(4, 3, rngs)),
    "several after": lambda make, n, rngs: nnx.Sequential(
        make.block(n, 4, rngs), make.norm(4, rngs), make.linear(4, 4, rngs), make.block(4, 4, rngs)
    ),
    "dropout after": lambda make, n, rngs: nnx.Sequential(
        make.block(n, 4, rngs), dropout(rngs), make.block(4, 4, rngs), dropout(rngs), make.linear(4, 3, rngs)
    ),
    "nested": Nest,
}
STREAMS: dict[str, Callable[[], nnx.Rngs]] = {
    "one stream": lambda: nnx.Rngs(0),
    "two streams": lambda: nnx.Rngs(0, dropout=1),
    "named streams": lambda: nnx.Rngs(params=0, dropout=1, other=2),
}


def values(model: Any) -> dict[Any, Any]:
    found = {}
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        raw = variable.get_raw_value()
        found[path] = jax.random.key_data(raw) if jnp.issubdtype(raw.dtype, jax.dtypes.prng_key) else raw
    return found


def assert_same(model: Any, want: Any) -> None:
    assert nnx.graphdef(model) == nnx.graphdef(want)
    got, expected = values(model), values(want)
    assert got.keys() == expected.keys()
    for path, value in got.items():
        np.testing.assert_array_equal(value, expected[path], err_msg=str(path))


def both(cls: type, model: str, n: int, streams: str = "one stream") -> tuple[Any, Any, nnx.Rngs, nnx.Rngs]:
    rngs, explicit_rngs = STREAMS[streams](), STREAMS[streams]()
    return (
        MODELS[model](Maker(True, cls), n, rngs),
        MODELS[model](Maker(False, cls), n, explicit_rngs),
        rngs,
        explicit_rngs,
    )


PLACES = [(m, s) for m in MODELS for s in STREAMS if m == "dropout after" or s == "one stream"]


@pytest.mark.slow  # by the number of its cases
@pytest.mark.parametrize("n", WIDTHS)
@pytest.mark.parametrize("way", ["call", "spec", "lm.jit", "load then call", "part of a load"])
@pytest.mark.parametrize(("model", "streams"), PLACES)
@pytest.mark.parametrize("cls", CLASSES)
def test_every_way_gives_the_explicit_keys(cls: str, model: str, streams: str, way: str, n: int) -> None:
    got, want, rngs, explicit_rngs = both(CLASSES[cls], model, n, streams)
    x = jnp.ones((2, n))
    if way == "spec":
        before = lm.infer_shapes(got, x).total_parameters
        assert before == lm.materialize(got, x).total_parameters
    elif way == "lm.jit":
        function = lm.jit(lambda m, x: m(x))
        np.testing.assert_array_equal(function(got, x), function(want, x))
    elif way == "load then call":
        lm.load_state_dict(got, lm.state_dict(want))
        np.testing.assert_array_equal(got(x), want(x))
    elif way == "part of a load":
        part = {k: v for k, v in lm.state_dict(want).items() if ".0." in k or k.startswith("first.")}
        lm.load_state_dict(got, part, strict=False)
        np.testing.assert_array_equal(got(x), want(x))
    if way in ("call", "spec"):
        np.testing.assert_array_equal(got(x), want(x))
    assert_same(got, want)
    assert_same(rngs, explicit_rngs)  # what is drawn from now on is the same as well


@pytest.mark.slow
@pytest.mark.parametrize("n", WIDTHS)
@pytest.mark.parametrize("copied", [copy.deepcopy, nnx.clone, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies(copied: Callable[[Any], Any], n: int) -> None:
    got, want, _, _ = both(Shortcut, "nested", n)
    other, x = copied(got), jnp.ones((2, n))
    lm.materialize(other, x)
    assert_same(other, want)
    assert_same(lm.materialize(got, x) and got, want)


@pytest.mark.slow
@pytest.mark.parametrize("n", WIDTHS)
@pytest.mark.parametrize("axis", [0, -1])
def test_a_stack(axis: int, n: int) -> None:
    def build(lazy: bool) -> Any:
        make = Maker(lazy, Shortcut)
        axes = nnx.StateAxes({nnx.Param: axis, ...: 0})
        stack = nnx.vmap(lambda rngs: MODELS["one layer after"](make, n, rngs), out_axes=axes)
        return nnx.split_rngs(splits=3)(stack)(nnx.Rngs(0))

    got, want = build(True), build(False)
    lm.load_state_dict(got, {k: v for k, v in lm.state_dict(want).items() if ".0." in k}, strict=False)
    lm.load_state_dict(got, {"layers.1.bias": want.layers[1].bias[...]}, strict=False)  # the kernel is made
    assert lm.is_lazy(got.layers[1])
    kernel = want.layers[1].kernel
    got.layers[1].kernel.materialize(kernel.shape)
    np.testing.assert_array_equal(got.layers[1].kernel, kernel)


@pytest.mark.slow
@pytest.mark.parametrize("n", WIDTHS)
def test_built_in_a_compiled_function(n: int) -> None:
    @nnx.jit(static_argnums=0)
    def build(lazy: bool) -> Any:
        return MODELS["several after"](Maker(lazy, Shortcut), n, nnx.Rngs(0))

    got, want = build(True), build(False)
    lm.materialize(got, jnp.ones((2, n)))
    assert_same(got, want)


def test_what_is_built_after_a_first_call() -> None:
    rngs, explicit_rngs, x = nnx.Rngs(0), nnx.Rngs(0), jnp.ones((2, 4))
    first = LAZY[Shortcut](m=4, rngs=rngs)
    first(x)
    got = nnx.List([first, nnx.Linear(4, 4, rngs=rngs), lm.LazyLinear(3, rngs=rngs), LAZY[Shortcut](m=4, rngs=rngs)])
    make = Maker(False, Shortcut)
    want = nnx.List([
        make.block(4, 4, explicit_rngs),
        *(nnx.Linear(4, m, rngs=explicit_rngs) for m in (4, 3)),
        make.block(4, 4, explicit_rngs),
    ])
    for layer in got[1:]:
        layer(x)
    assert_same(got, want)
    assert_same(rngs, explicit_rngs)


# ---------------------------------------------------------------- what can't be put right


class Explicit(nnx.Module):
    """An explicit layer after one that may draw otherwise."""

    def __init__(self, make: Maker, n: int, rngs: nnx.Rngs) -> None:
        self.block = make.block(n, 4, rngs)
        self.fc = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.fc(self.block(x))


FIRST: dict[str, Callable[[Any, jax.Array], Any]] = {
    "call": lambda m, x: m(x),
    "spec": lm.materialize,
    "lm.jit": lambda m, x: lm.jit(lambda m, x: m(x))(m, x),
    "nnx.jit": lambda m, x: nnx.jit(lambda m, x: m(x))(m, x),
}


@pytest.mark.parametrize("way", FIRST)
def test_an_explicit_layer_that_has_the_key_of_another_is_refused(way: str) -> None:
    rngs = nnx.Rngs(0)
    model = Explicit(Maker(True, Shortcut), 4, rngs)
    before = values(rngs), values(model.fc), lm.uninitialized_paths(model)
    with pytest.raises(lm.ConfigurationError) as caught:
        FIRST[way](model, jnp.ones((2, 4)))
    assert str(caught.value).splitlines() == [
        "block (LazyShortcut)",
        "  got:    sizes at which it draws 2 keys from the stream 'default' of its rngs, after others drew from it as "
        "if it had drawn 3",
        "  needed: the keys that each would get after the explicit layer; what has its value keeps the key that it got",
        "  write:  lm.materialize(model, x)  # before anything else draws; or rngs=rngs.fork()  # for this layer",
    ]
    jax.tree.map(np.testing.assert_array_equal, before[:2], (values(rngs), values(model.fc)))
    assert lm.uninitialized_paths(model) == before[2]
    assert model.block.fc.kernel.pending.turns[0].ledger.extra == [None]


@pytest.mark.parametrize("way", FIRST)
def test_at_the_sizes_that_were_thought_it_is_not_refused(way: str) -> None:
    model, want = (Explicit(Maker(lazy, Shortcut), 6, nnx.Rngs(0)) for lazy in (True, False))
    FIRST[way](model, jnp.ones((2, 6)))
    assert_same(model, want)


@pytest.mark.parametrize("n", WIDTHS)
@pytest.mark.parametrize("way", FIRST)
def test_rngs_of_its_own(way: str, n: int) -> None:
    def build(lazy: bool) -> Any:
        rngs = nnx.Rngs(0)
        block = Maker(lazy, Shortcut).block(n, 4, rngs.fork())
        return nnx.Sequential(block, nnx.Linear(4, 4, rngs=rngs), dropout(rngs))

    model, want = build(True), build(False)
    FIRST[way](model, jnp.ones((2, n)))
    assert_same(model, want)


def test_a_load_needs_no_keys() -> None:
    model, want = (Explicit(Maker(lazy, Shortcut), 4, nnx.Rngs(0)) for lazy in (True, False))
    lm.load_state_dict(model, lm.state_dict(want))
    assert_same(model, want)


PARTS: dict[str, tuple[str, ...]] = {
    "the block": ("block.",),
    "part of the block": ("block.fc.",),
    "the layer after": ("fc.",),
    "both": ("block.", "fc."),
    "all of the block and the constant": ("block.", "fc.bias"),
}


@pytest.mark.parametrize("n", WIDTHS)
@pytest.mark.parametrize("part", PARTS)
def test_part_of_a_load_in_front_of_an_explicit_layer(part: str, n: int) -> None:
    """What the explicit layer keeps has to be what it has in the explicit model, or it is all refused."""
    model, want, x = *(Explicit(Maker(lazy, Shortcut), n, nnx.Rngs(0)) for lazy in (True, False)), jnp.ones((2, n))
    before = values(model.fc), lm.uninitialized_paths(model)
    entries = {k: v for k, v in lm.state_dict(want).items() if k.startswith(PARTS[part])}
    if n == 4 and part not in ("both", "the layer after"):
        with pytest.raises(lm.ConfigurationError, match="after others drew from it as if it had drawn 3"):
            lm.load_state_dict(model, entries, strict=False)
        jax.tree.map(np.testing.assert_array_equal, before[0], values(model.fc))
        assert lm.uninitialized_paths(model) == before[1]
        lm.load_state_dict(model, lm.state_dict(want))
    else:
        lm.load_state_dict(model, entries, strict=False)
        if n == 4 and part == "the layer after":
            with pytest.raises(lm.ConfigurationError, match="after others drew from it"):
                model(x)
            return
    model(x)
    assert_same(model, want)


def test_a_value_made_by_hand_of_another_key_is_refused() -> None:
    class After(Shortcut):
        def __init__(self, n: int, m: int, *, rngs: nnx.Rngs) -> None:
            super().__init__(n, m, rngs=rngs)
            self.last = nnx.Linear(m, m, rngs=rngs)

    for n in WIDTHS:
        layer, want = lm.lazy(After, infer=n_of_x)(m=4, rngs=nnx.Rngs(0)), After(n, 4, rngs=nnx.Rngs(0))
        layer.last.kernel.materialize((4, 4))  # nothing says yet how many keys are drawn before this one's
        if n == 4:
            with pytest.raises(lm.ConfigurationError, match="sizes at which it draws 4 keys"):
                layer(jnp.ones((2, n)))
            continue
        layer(jnp.ones((2, n)))
        assert_same(layer, want)
    layer = lm.lazy(After, infer=n_of_x)(m=4, rngs=nnx.Rngs(0))
    layer.fc.kernel.materialize((4, 4))  # this shape says it
    layer(jnp.ones((2, 4)))
    assert_same(layer, After(4, 4, rngs=nnx.Rngs(0)))


def test_a_draw_by_hand_and_a_used_dropout_are_refused() -> None:
    def used(rngs: nnx.Rngs) -> Any:
        layer = nnx.Dropout(0.5, rngs=rngs)
        layer(jnp.ones((2, 4)))
        return layer

    for other in (lambda rngs: rngs(), used):
        rngs = nnx.Rngs(0)
        block = LAZY[Shortcut](m=4, rngs=rngs)
        model = nnx.List([block, nnx.Sequential(*[o for o in [other(rngs)] if isinstance(o, nnx.Module)])])
        with pytest.raises(lm.ConfigurationError, match="after others drew from it"):
            lm.materialize(Run(model), jnp.ones((2, 4)))
        assert lm.is_lazy(block)


class Run(nnx.Module):
    def __init__(self, layers: Any) -> None:
        self.layers = layers

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.layers[0](x)


def test_layers_that_were_called_out_of_order() -> None:
    for n, refused in ((6, False), (4, True)):
        model, want, _, _ = both(Shortcut, "one layer after", n)
        model.layers[1](jnp.ones((2, 4)))  # before it is known how often the layer in front of it draws
        if refused:
            with pytest.raises(lm.ConfigurationError, match="draws 2 keys"):
                model(jnp.ones((2, n)))
            assert lm.is_lazy(model.layers[0])
        else:
            model(jnp.ones((2, n)))
            assert_same(model, want)


def test_a_copy_of_other_sizes_is_refused() -> None:
    model, want, _, _ = both(Shortcut, "one layer after", 4)
    other = nnx.clone(model)
    model.layers[0](jnp.ones((2, 4)))
    with pytest.raises(lm.ConfigurationError, match="draws 3 keys"):
        other.layers[0](jnp.ones((2, 6)))
    model.layers[1](jnp.ones((2, 4)))
    assert_same(model, want)


# ---------------------------------------------------------------- all or nothing


class Refuses(Shortcut):
    def __call__(self, x: jax.Array) -> jax.Array:
        raise RuntimeError("not today")


@pytest.mark.parametrize("way", FIRST)
def test_what_fails_leaves_all_keys_as_they_were(way: str) -> None:
    rngs = nnx.Rngs(0)
    block = lm.lazy(Refuses, infer=lambda config, x: {"n": x.shape[-1]})(m=4, rngs=rngs)
    model = nnx.Sequential(block, dropout(rngs), lm.LazyLinear(3, rngs=rngs))
    before = values(rngs), values(model.layers[1])
    for _ in range(2):
        with pytest.raises(lm.ConfigurationError if way == "nnx.jit" else RuntimeError):
            FIRST[way](model, jnp.ones((2, 4)))
        assert lm.is_lazy(block) and lm.is_lazy(model.layers[2])
        jax.tree.map(np.testing.assert_array_equal, before, (values(rngs), values(model.layers[1])))
        assert block.fc.kernel.pending.turns[0].ledger.extra == [None]


def test_reports_change_nothing() -> None:
    model, want, rngs, _ = both(Shortcut, "dropout after", 4)
    before = values(rngs)
    for report in (lm.infer_shapes, lm.summary):
        report(model, jnp.ones((2, 4)))
        jax.tree.map(np.testing.assert_array_equal, before, values(rngs))
    model(jnp.ones((2, 4)))
    assert_same(model, want)


def test_nothing_is_kept_of_rngs_that_are_gone_or_of_a_trace() -> None:
    rngs = nnx.Rngs(0)
    LAZY[Shortcut](m=4, rngs=rngs)
    stream = weakref.ref(rngs.default)
    known = len(draws.LEDGERS)
    del rngs
    gc.collect()
    assert stream() is None and len(draws.LEDGERS) < known
    with jax.checking_leaks():
        nnx.split_rngs(splits=2)(nnx.vmap(lambda rngs: LAZY[Shortcut](m=4, rngs=rngs)))(nnx.Rngs(0))


def test_layers_that_decide_nothing_have_no_turn() -> None:
    gc.collect()
    rngs = nnx.Rngs(0)
    assert lm.LazyLinear(3, rngs=rngs).kernel.pending.turns is None
    LAZY[Shortcut](m=4, rngs=rngs)
    assert lm.LazyLinear(3, rngs=rngs).kernel.pending.turns is not None
