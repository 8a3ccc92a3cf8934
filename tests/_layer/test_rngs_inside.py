"""What constructors do with their rngs: what is drawn, by whom, is counted; what they copy, fork or hold is theirs.

The twin is the explicit model of the same seed. What comes after a layer shows how often it has drawn.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import assert_same_model, raw

import lazymods as lm


class Block(nnx.Module):
    """Draws once more where widths differ, in front of all else."""

    def __init__(self, n: int, m: int, *, rngs: nnx.Rngs) -> None:
        self.short = nnx.Linear(n, m, use_bias=False, rngs=rngs) if n != m else None
        self.fc = nnx.Linear(n, m, rngs=rngs)
        self.use(m, rngs)
        self.last = nnx.Linear(m, m, rngs=rngs)

    def use(self, m: int, rngs: nnx.Rngs) -> None:
        raise NotImplementedError

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.fc(x)
        return self.last(y if self.short is None else y + self.short(x))


def _of(use: Callable[[Any, int, nnx.Rngs], None]) -> type[Block]:
    return type(use.__name__.title(), (Block,), {"use": use})


USES: dict[str, type[Block]] = {}


def used(use: Callable[[Any, int, nnx.Rngs], None]) -> Callable[[Any, int, nnx.Rngs], None]:
    USES[use.__name__.replace("_", " ")] = _of(use)
    return use


# ---------------------------------------------------------------- copies that the layer holds


@used
def clones(self: Any, m: int, rngs: nnx.Rngs) -> None:
    self.held = nnx.clone(rngs)


@used
def deep_copies(self: Any, m: int, rngs: nnx.Rngs) -> None:
    self.held = copy.deepcopy(rngs)


@used
def clones_and_draws(self: Any, m: int, rngs: nnx.Rngs) -> None:
    self.held = nnx.clone(rngs)
    self.fc2 = nnx.Linear(m, m, rngs=self.held)


@used
def clones_a_stream(self: Any, m: int, rngs: nnx.Rngs) -> None:
    self.held = nnx.List([nnx.clone(rngs.params), nnx.clone(rngs.params)])
    self.held[1]()


@used
def forks(self: Any, m: int, rngs: nnx.Rngs) -> None:
    self.held = rngs.fork()


@used
def splits(self: Any, m: int, rngs: nnx.Rngs) -> None:
    self.held = rngs.split(3)


@used
def broadcasts(self: Any, m: int, rngs: nnx.Rngs) -> None:
    self.held = rngs.params.broadcast(3)


@used
def makes_others(self: Any, m: int, rngs: nnx.Rngs) -> None:
    self.held = nnx.Rngs(params=rngs.params(), dropout=rngs.params())
    self.drop = nnx.Dropout(0.5, rngs=rngs)


@used
def holds(self: Any, m: int, rngs: nnx.Rngs) -> None:
    self.held = rngs


@used
def holds_by_its_parts(self: Any, m: int, rngs: nnx.Rngs) -> None:
    self.held = nnx.merge(*nnx.split(rngs))  # another object with the very counters


# ---------------------------------------------------------------- draws by others than the stream itself


@used
def compiles(self: Any, m: int, rngs: nnx.Rngs) -> None:
    self.held = nnx.jit(lambda r: nnx.Linear(m, m, rngs=r))(rngs)


@used
def rematerializes(self: Any, m: int, rngs: nnx.Rngs) -> None:
    self.held = nnx.remat(lambda r: nnx.Linear(m, m, rngs=r))(rngs)


@used
def maps_with_one_key(self: Any, m: int, rngs: nnx.Rngs) -> None:
    self.held = nnx.vmap(lambda r, x: nnx.Linear(m, m, rngs=r), in_axes=(None, 0))(rngs, jnp.zeros(3))


@used
def maps_with_several_keys(self: Any, m: int, rngs: nnx.Rngs) -> None:
    self.held = nnx.split_rngs(splits=3)(nnx.vmap(lambda r: nnx.Linear(m, m, rngs=r)))(rngs)


@used
def draws_in_a_branch(self: Any, m: int, rngs: nnx.Rngs) -> None:
    def draw(r: nnx.Rngs) -> jax.Array:
        return jax.random.normal(r.params(), (m,))

    self.held = nnx.Param(nnx.cond(True, draw, draw, rngs))


@used
def draws_in_a_loop(self: Any, m: int, rngs: nnx.Rngs) -> None:
    def step(i: Any, carried: Any) -> Any:
        r, total = carried
        return r, total + jax.random.normal(r.params(), (m,))

    self.held = nnx.Param(nnx.fori_loop(0, 3, step, (rngs, jnp.zeros(m)))[1])


@used
def draws_by_its_parts(self: Any, m: int, rngs: nnx.Rngs) -> None:
    self.held = nnx.Linear(m, m, rngs=nnx.merge(*nnx.split(rngs)))


@used
def skips_keys(self: Any, m: int, rngs: nnx.Rngs) -> None:
    rngs.params.count[...] += 5


def n_of_x(config: Any, x: Any) -> dict[str, int]:
    return {"n": x.shape[-1]}


LAZY = {cls: lm.lazy(cls, infer=n_of_x) for cls in USES.values()}


def build(lazy: bool, cls: type[Block], n: int, rngs: nnx.Rngs) -> nnx.Sequential:
    def block(n: int) -> Any:
        return LAZY[cls](m=4, rngs=rngs) if lazy else cls(n, 4, rngs=rngs)

    return nnx.Sequential(block(n), lm.LazyLinear(4, rngs=rngs) if lazy else nnx.Linear(4, 4, rngs=rngs), block(4))


WAYS: dict[str, Callable[[Any, Any, jax.Array], Any]] = {
    "call": lambda model, want, x: model(x),
    "spec": lambda model, want, x: lm.materialize(model, jax.ShapeDtypeStruct(x.shape, x.dtype)),
    "lm.jit": lambda model, want, x: lm.jit(lambda m, x: m(x))(model, x),
    "load": lambda model, want, x: lm.load_state_dict(model, lm.state_dict(want)),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("n", [4, 6])
@pytest.mark.parametrize("use", USES)
def test_all_have_the_keys_and_counters_of_the_explicit_model(use: str, n: int, way: str) -> None:
    rngs, others = (nnx.Rngs(params=0, dropout=1) for _ in range(2))
    model, want = build(True, USES[use], n, rngs), build(False, USES[use], n, others)
    WAYS[way](model, want, jnp.ones((2, n)))
    assert_same_model(model, want)
    for name, stream in rngs.items():
        other = others[name]
        np.testing.assert_array_equal(raw(stream.count), raw(other.count))
        np.testing.assert_array_equal(raw(stream.key), raw(other.key))


@pytest.mark.parametrize("use", ["holds", "holds by its parts"])
def test_what_is_held_is_the_callers(use: str) -> None:
    rngs = nnx.Rngs(params=0, dropout=1)
    model: Any = LAZY[USES[use]](m=4, rngs=rngs)
    model(jnp.ones((2, 6)))
    assert model.held.params.count is rngs.params.count and (model.held is rngs) == (use == "holds")


def _set_the_counter(rngs: nnx.Rngs) -> None:
    rngs.params.count[...] = jnp.uint32(0)


@pytest.mark.parametrize("does", [_set_the_counter, lambda rngs: nnx.reseed(rngs, params=7)], ids=["count", "key"])
def test_a_constructor_that_sets_its_rngs_is_refused(does: Callable[[nnx.Rngs], None]) -> None:
    class Sets(nnx.Module):
        def __init__(self, n: int, *, rngs: nnx.Rngs) -> None:
            does(rngs)
            self.fc = nnx.Linear(n, 3, rngs=rngs)

    rngs = nnx.Rngs(params=0)
    with pytest.raises(lm.ConfigurationError) as caught:
        lm.lazy(Sets, infer=n_of_x)(rngs=rngs)
    assert str(caught.value).splitlines() == [
        "Sets",
        "  got:    a constructor that sets the key or the counter of its rngs",
        "  needed: keys that it draws: what comes after it goes on with the stream from there",
        "  write:  rngs = nnx.clone(rngs)  # in the constructor, before they are set",
    ]
    assert rngs.params.count[...] == 0


class Sometimes(nnx.Module):
    def __init__(self, n: int, *, rngs: nnx.Rngs) -> None:
        self.fc = nnx.Linear(n, 4, rngs=rngs)
        if n == 4:
            self.held = nnx.List([rngs])

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.fc(x)


@pytest.mark.parametrize("way", WAYS)
def test_rngs_that_are_held_at_some_sizes_only_are_refused(way: str) -> None:
    model, want = lm.lazy(Sometimes, infer=n_of_x)(rngs=nnx.Rngs(0)), Sometimes(4, rngs=nnx.Rngs(0))
    with pytest.raises(lm.LazyError) as caught:
        WAYS[way](model, want, jnp.ones((2, 4)))
    assert str(caught.value).splitlines() == [
        "held.0 of LazySometimes",
        "  got:    rngs, held at these sizes only",
        "  needed: the rngs themselves at all sizes, or at none: while the sizes are not known nothing keeps them",
        "  write:  self.held[0] = rngs.fork()  # in the constructor",
    ]
    assert lm.is_lazy(model) and not hasattr(model, "held")
    model(jnp.ones((2, 6)))
    assert_same_model(model, Sometimes(6, rngs=nnx.Rngs(0)))


class Order(nnx.Module):
    """Draws as often at all sizes, but in another order."""

    def __init__(self, n: int, m: int, *, rngs: nnx.Rngs) -> None:
        if n == m:
            self.a = nnx.Dropout(0.5, rngs=rngs)
        self.fc = nnx.Linear(n, m, rngs=rngs)
        self.b = nnx.Dropout(0.5, rngs=rngs)
        if n != m:
            self.a = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.fc(x)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("n", [4, 6])
def test_another_order_of_the_draws(n: int, way: str) -> None:
    model, want = lm.lazy(Order, infer=n_of_x)(m=4, rngs=nnx.Rngs(0)), Order(n, 4, rngs=nnx.Rngs(0))
    WAYS[way](model, want, jnp.ones((2, n)))
    assert_same_model(model, want)
