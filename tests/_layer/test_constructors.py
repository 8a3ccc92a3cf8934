"""Constructors that decide by a size: what is there, what is tied, how many. Sized in every way as explicit ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from deciding import Default, Shortcut
from flax import nnx

import lazymods as lm


class Extra(nnx.Module):
    """Holds more at one size than at all others."""

    def __init__(self, n: int, *, rngs: nnx.Rngs) -> None:
        self.fc = nnx.Linear(n, 2, rngs=rngs)
        if n == 4:
            self.extra = nnx.Linear(n, 2, rngs=rngs)
            self.scale = nnx.Param(jnp.ones((2,)))

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.fc(x)
        return y + self.extra(x) * self.scale[None] if hasattr(self, "extra") else y


class Inside(nnx.Module):
    """A block that has blocks that decide, and attributes that wait, below it."""

    def __init__(self, n: int, *, rngs: nnx.Rngs) -> None:
        self.blocks = nnx.List([Shortcut(n, 4, rngs=rngs), Shortcut(4, 4, rngs=rngs)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = block(x)
        return x


class Loop(nnx.Module):
    """As many heads as features, with the size in their names."""

    def __init__(self, n: int, *, rngs: nnx.Rngs) -> None:
        self.heads = nnx.Dict({f"head{i}": nnx.Linear(n, 2, rngs=rngs) for i in range(n)})
        self.name = f"net-{n}"

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.stack([head(x) for head in self.heads.values()])


class Divided(nnx.Module):
    """Widths that must be divisible, and what is inside waits for the quotient."""

    def __init__(self, n: int, heads: int, *, rngs: nnx.Rngs) -> None:
        assert n % heads == 0, f"{n} features in {heads} heads"
        self.width = n // heads
        self.q = nnx.LinearGeneral(n, (heads, self.width), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.q(x)


class Tied(nnx.Module):
    """One layer for both inputs where they are as wide as each other."""

    def __init__(self, n: int, k: int, *, rngs: nnx.Rngs) -> None:
        self.a = nnx.Linear(n, 3, rngs=rngs)
        self.b = self.a if n == k else nnx.Linear(k, 3, rngs=rngs)

    def __call__(self, x: jax.Array, y: jax.Array) -> jax.Array:
        return self.a(x) + self.b(y)


class Tables(nnx.Module):
    """Raw arrays of JAX and of numpy, whose sizes follow."""

    def __init__(self, n: int, *, rngs: nnx.Rngs) -> None:
        self.mask = jnp.tril(jnp.ones((n, n)))
        self.frequencies = np.arange(n, dtype=np.float32)
        self.scale = n**-0.5
        self.w = nnx.Param(nnx.initializers.lecun_normal()(rngs.params(), (n, 2)))

    def __call__(self, x: jax.Array) -> jax.Array:
        return ((x * self.scale + self.frequencies[None]) @ self.mask) @ self.w[...]


class Identity(nnx.Module):
    """Has no parameters."""

    def __call__(self, x: jax.Array) -> jax.Array:
        return x


class Kinds(nnx.Module):
    """Submodules of another class at one size than at all others."""

    def __init__(self, n: int, m: int, *, rngs: nnx.Rngs) -> None:
        self.fc = nnx.Linear(n, m, rngs=rngs)
        self.short = nnx.Sequential(nnx.Linear(n, m, rngs=rngs)) if n != m else Identity()
        self.norm = nnx.LayerNorm(m, rngs=rngs) if n == m else Identity()

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.norm(self.fc(x) + self.short(x))


class Edges(nnx.Module):
    """A layer for a further input, if there is one, as layers of graphs have them."""

    def __init__(self, n: int, k: int | None = None, *, rngs: nnx.Rngs) -> None:
        self.source = nnx.Linear(n, 3, rngs=rngs)
        self.edge = None if k is None else nnx.Linear(k, 3, rngs=rngs)

    def __call__(self, x: Any, edge: Any = None) -> jax.Array:
        y = self.source(x)
        return y if self.edge is None else y + self.edge(edge)


class PairOfEdges(nnx.Module):
    """The same for each of a pair, or for both of it."""

    def __init__(self, n: int | tuple[int, int], k: int | None = None, *, rngs: nnx.Rngs) -> None:
        self.source = nnx.Linear(n if isinstance(n, int) else n[0], 3, rngs=rngs)
        self.target = None if isinstance(n, int) else nnx.Linear(n[1], 3, rngs=rngs)
        self.edge = None if k is None else nnx.Linear(k, 3, rngs=rngs)

    def __call__(self, x: Any, y: Any, edge: Any = None) -> jax.Array:
        y = self.source(x) + (self.source if self.target is None else self.target)(y)
        return y if self.edge is None else y + self.edge(edge)


class EdgesByDefault(Edges):
    """The same, with the layer for the further input unless ``infer`` says that there is none."""

    def __init__(self, n: int, k: int | None = 2, *, rngs: nnx.Rngs) -> None:
        super().__init__(n, k, rngs=rngs)


class Looping(nnx.Module):
    """Draws in a loop of NNX, from the rngs or, as a refusal says, from a clone."""

    def __init__(self, n: int, *, rngs: nnx.Rngs, clones: bool = True) -> None:
        def body(carry: Any) -> Any:
            rngs, i, total = carry
            return rngs, i + 1, total + jax.random.normal(rngs.params(), (n,))

        source = nnx.clone(rngs) if clones else rngs
        self.w = nnx.Param(nnx.while_loop(lambda c: c[1] < 3, body, (source, 0, jnp.zeros(n)))[2])
        self.fc = nnx.Linear(n, 2, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.fc(x * self.w[None])


def n_and_edge(config: Any, x: Any, edge: Any = None) -> dict[str, Any]:
    return {"n": x.shape[-1], "k": None if edge is None else edge.shape[-1]}


def pair_and_edge(config: Any, x: Any, y: Any, edge: Any = None) -> dict[str, Any]:
    return {"n": (x.shape[-1], y.shape[-1]), "k": None if edge is None else edge.shape[-1]}


def n(config: Any, x: Any) -> dict[str, int]:
    return {"n": x.shape[-1]}


def n_and_k(config: Any, x: Any, y: Any) -> dict[str, int]:
    return {"n": x.shape[-1], "k": y.shape[-1]}


CASES: dict[str, tuple[Any, Callable[..., Any], dict[str, int], tuple[int, ...]]] = {
    "shortcut": (Shortcut, n, {"m": 4}, (6,)),
    "no shortcut": (Shortcut, n, {"m": 4}, (4,)),
    "extra": (Extra, n, {}, (4,)),
    "no extra": (Extra, n, {}, (5,)),
    "inside, shortcut": (Inside, n, {}, (6,)),
    "inside, none": (Inside, n, {}, (4,)),
    "loop": (Loop, n, {}, (3,)),
    "divided": (Divided, n, {"heads": 3}, (6,)),
    "tied": (Tied, n_and_k, {}, (4, 4)),
    "not tied": (Tied, n_and_k, {}, (4, 5)),
    "tables": (Tables, n, {}, (4,)),
    "one kind": (Kinds, n, {"m": 4}, (6,)),
    "another kind": (Kinds, n, {"m": 4}, (4,)),
    "default": (Default, n, {}, (3,)),
    "not the default": (Default, n, {}, (5,)),
    "optional, none": (Edges, n_and_edge, {}, (4,)),
    "optional": (Edges, n_and_edge, {}, (4, 5)),
    "optional by default": (EdgesByDefault, n_and_edge, {}, (4, 5)),
    "optional by default, none": (EdgesByDefault, n_and_edge, {}, (4,)),
    "loop of NNX": (Looping, n, {}, (4,)),
    "pair": (PairOfEdges, pair_and_edge, {}, (4, 5)),
    "pair and optional": (PairOfEdges, pair_and_edge, {}, (4, 5, 6)),
}


def assert_same(model: Any, want: Any) -> None:
    assert nnx.graphdef(model) == nnx.graphdef(want)
    for (path, a), (other, b) in zip(*(nnx.to_flat_state(nnx.state(m)) for m in (model, want)), strict=True):
        assert path == other
        x, y = (v.get_raw_value() if isinstance(v, nnx.Variable) else v for v in (a, b))
        assert type(x) is type(y)
        np.testing.assert_array_equal(x, y, err_msg=str(path))


def both(name: str) -> tuple[Any, Any, tuple[jax.Array, ...]]:
    cls, infer, given, widths = CASES[name]
    inputs = tuple(jnp.ones((2, w)) for w in widths)
    return lm.lazy(cls, infer=infer)(**given, rngs=nnx.Rngs(0)), explicit(name), inputs


def explicit(name: str) -> Any:
    cls, infer, given, widths = CASES[name]
    sizes = infer({}, *(jax.ShapeDtypeStruct((2, w), jnp.float32) for w in widths))
    return cls(**sizes, **given, rngs=nnx.Rngs(0))


WAYS = ["call", "spec", "lm.jit", "load", "file"]
# a load of a file warns of a tie that the model has only at the sizes which it then finds
# and a load takes a size for an int if the constructor takes one
OF_PAIRS = ["pair", "pair and optional"]
SIZED = [(name, way) for name in CASES for way in WAYS if (name, way) != ("tied", "file")]
SIZED = [(name, way) for name, way in SIZED if name not in OF_PAIRS or way not in ("load", "file")]


@pytest.mark.parametrize(("name", "way"), SIZED)
def test_every_way_gives_what_the_constructor_makes(name: str, way: str, tmp_path: Path) -> None:
    model, want, inputs = both(name)
    if way == "call":
        np.testing.assert_array_equal(model(*inputs), want(*inputs))
    elif way == "spec":
        lm.materialize(model, *inputs)
    elif way == "lm.jit":
        function = lm.jit(lambda m, *x: m(*x))
        np.testing.assert_array_equal(function(model, *inputs), function(want, *inputs))
        np.testing.assert_array_equal(function(model, *inputs), function(want, *inputs))
    elif way == "load":
        lm.load_state_dict(model, lm.state_dict(want))
    else:
        lm.save(want, tmp_path / "model.safetensors")
        lm.load(model, tmp_path / "model.safetensors")
    assert not lm.is_lazy(model)
    assert_same(model, explicit(name))


@pytest.mark.parametrize("name", CASES)
def test_reports_tell_of_what_is_there_at_these_sizes(name: str) -> None:
    for report in (lm.infer_shapes, lm.summary):
        model, want, inputs = both(name)
        got, expected = report(model, *inputs), report(want, *inputs)
        assert (got.total_parameters, got.total_bytes) == (expected.total_parameters, expected.total_bytes)
        rows = [{r.path: (r.inputs, r.parameters) for r in of.rows if r.path} for of in (got, expected)]
        assert rows[0] == rows[1]
        assert lm.is_lazy(model)


@pytest.mark.parametrize("name", CASES)
def test_a_load_that_is_refused_leaves_the_layer_as_it_was(name: str) -> None:
    model, want, inputs = both(name)
    before = lm.uninitialized_paths(model)
    with pytest.raises(lm.StateDictError):
        lm.load_state_dict(model, lm.state_dict(want) | {"nobody": np.ones(2, np.float32)})
    assert lm.uninitialized_paths(model) == before
    model(*inputs)
    assert_same(model, explicit(name))


def test_a_loop_that_draws_from_the_rngs_is_refused() -> None:
    with pytest.raises(lm.ConfigurationError, match=r"write:  rngs = nnx\.clone\(rngs\)"):
        lm.lazy(Looping, infer=n)(rngs=nnx.Rngs(0), clones=False)


@pytest.mark.parametrize("name", OF_PAIRS)
def test_a_load_of_pairs_where_the_constructor_also_takes_an_int_is_refused_before_a_spec(name: str) -> None:
    model, want, inputs = both(name)
    with pytest.raises(lm.StateDictError, match=r"target\.kernel"):
        lm.load_state_dict(model, lm.state_dict(want))
    assert lm.is_lazy(model)
    lm.materialize(model, *inputs)
    loaded = {k: np.asarray(v) + 1 for k, v in lm.state_dict(want).items()}
    lm.load_state_dict(model, loaded)
    for key, value in lm.state_dict(model).items():
        np.testing.assert_array_equal(value, loaded[key])


GIVEN: dict[str, Callable[[Any], Any]] = {
    "call": lambda layer: layer(jnp.ones((2, 3))),
    "materialize": lambda layer: lm.materialize(layer, jnp.ones((2, 3))),
    "lm.jit": lambda layer: lm.jit(lambda m, x: m(x))(layer, jnp.ones((2, 3))),
    "load": lambda layer: lm.load_state_dict(layer, lm.state_dict(Sizes(3, 5, rngs=nnx.Rngs(1)))),
}


class Sizes(nnx.Module):
    """Two sizes, of which one has a default."""

    def __init__(self, n: int, m: int = 4, *, rngs: nnx.Rngs) -> None:
        self.n, self.m = n, m
        self.w = nnx.Param(nnx.initializers.lecun_normal()(rngs.params(), (n, m)))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x @ self.w[...]


@pytest.mark.parametrize("how", GIVEN)
def test_what_the_caller_gave_is_not_inferred(how: str) -> None:
    lazy = lm.lazy(Sizes, infer=lambda config, x: {"n": x.shape[-1], "m": 7})
    for given, sizes in (({}, (3, 7)), ({"m": 5}, (3, 5)), ({"n": 3, "m": 5}, (3, 5)), ({"m": 4}, (3, 4))):
        if how == "load" and sizes[1] != 5:
            continue
        layer = lazy(**given, rngs=nnx.Rngs(0))
        GIVEN[how](layer)
        want = Sizes(*sizes, rngs=nnx.Rngs(0))
        if how == "load":
            lm.load_state_dict(want, lm.state_dict(Sizes(3, 5, rngs=nnx.Rngs(1))))
        assert_same(layer, want)
        assert (layer.n, layer.m) == sizes


def test_a_size_that_the_caller_gave_and_the_input_lacks_is_told_as_by_the_class() -> None:
    layer = lm.lazy(Default, infer=n)(n=4, rngs=nnx.Rngs(0))
    want = Default(4, rngs=nnx.Rngs(0))
    for model in (want, layer):
        with pytest.raises((TypeError, ValueError), match="shape"):
            model(jnp.ones((2, 3)))
    assert lm.is_lazy(layer)  # its first call has failed
    layer(jnp.ones((2, 4)))
    assert_same(layer, want)


def test_a_default_that_infer_does_not_name_stays() -> None:
    layer = lm.lazy(Default, infer=lambda config, x: {})(rngs=nnx.Rngs(0))
    layer(jnp.ones((2, 3)))
    assert_same(layer, Default(rngs=nnx.Rngs(0)))
