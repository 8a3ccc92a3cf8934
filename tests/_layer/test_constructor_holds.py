"""What a constructor puts where: arrays, layers and numbers in containers, Variables and functions, and their metadata.

Sized in every way it is what the explicit class holds, or it is refused by name.
"""

from __future__ import annotations

import collections
import functools
import logging
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, struct
from jax.core import Tracer

import lazymods as lm

X = jnp.arange(8.0).reshape(2, 4)
ADAM = optax.adam(0.1)


class Pair(NamedTuple):
    a: Any
    b: Any


@struct.dataclass
class Struct:
    """A pytree with a static field."""

    a: Any
    n: int = struct.field(pytree_node=False, default=0)


class Unknown(dict[str, Any]):
    """A class that JAX does not know as a pytree."""


class Scaled(nnx.Module):
    """A static attribute by which it computes."""

    def __init__(self, n: int) -> None:
        self.scale = n**-0.5

    def __call__(self, x: jax.Array) -> jax.Array:
        return x * self.scale


class Plain:
    def __init__(self, held: Any) -> None:
        self.held = held


def fan(n: int) -> Any:
    return {"fan": n}


class Slotted:
    __slots__ = ("held",)

    def __init__(self, held: Any) -> None:
        self.held = held


def ten_deep(value: Any) -> Any:
    for _ in range(10):
        value = Plain(value)
    return value


def with_attribute(value: Any) -> Callable[[Any], Any]:
    def function(x: Any) -> Any:
        return x

    vars(function)["held"] = value
    return function


def large(n: int) -> Any:
    return {"large": n}


def linear(n: int, rngs: nnx.Rngs) -> nnx.Linear:
    return nnx.Linear(n, 2 * n, rngs=rngs)


HELD: dict[str, Callable[[int, nnx.Rngs], Any]] = {
    "arrays in a tuple": lambda n, r: nnx.data((jnp.ones(n), jnp.zeros(2))),
    "arrays in a list": lambda n, r: nnx.data([jnp.ones(n), jnp.zeros(2)]),
    "arrays in a dict": lambda n, r: nnx.data({"a": jnp.ones(n), "b": jnp.zeros(2)}),
    "arrays in a named tuple": lambda n, r: nnx.data(Pair(jnp.ones(n), jnp.zeros(2))),
    "arrays in nested containers": lambda n, r: nnx.data([(jnp.ones(n),), {"a": Pair((jnp.ones(n), n), jnp.zeros(2))}]),
    "drawn arrays in a tuple": lambda n, r: nnx.data((jax.random.normal(r.params(), (n,)), jnp.zeros(2))),
    "arrays in a struct": lambda n, r: nnx.data(Struct(jnp.ones(n), 3)),
    "arrays and a size in a struct": lambda n, r: nnx.data(Struct((jnp.ones(n), jnp.ones(2)), n)),
    "a layer in a struct": lambda n, r: nnx.data(Struct(Scaled(n))),
    "a state": lambda n, r: nnx.data(nnx.state(linear(n, r))),
    "a state of layers": lambda n, r: nnx.data(nnx.state(nnx.Sequential(linear(n, r), linear(2, r)))),
    "a pure state": lambda n, r: nnx.data(nnx.as_pure(nnx.state(linear(n, r)))),
    "an optimizer": lambda n, r: nnx.Optimizer(linear(n, r), ADAM, wrt=nnx.Param),
    "an ordered dict": lambda n, r: nnx.data(collections.OrderedDict(b=jnp.ones(n), a=linear(n, r))),
    "layers in a tuple": lambda n, r: nnx.data((linear(n, r), nnx.BatchNorm(n, rngs=r), Scaled(n))),
    "layers in a list": lambda n, r: nnx.data([linear(n, r), Scaled(n)]),
    "layers in a dict": lambda n, r: nnx.data({"a": linear(n, r), "b": Scaled(n)}),
    "layers in a named tuple": lambda n, r: nnx.data(Pair(linear(n, r), Scaled(n))),
    "layers in a tuple in a list": lambda n, r: nnx.data([(linear(n, r), Scaled(n))]),
    "a layer and a size in a tuple": lambda n, r: nnx.data((linear(n, r), 3 * n, f"of {n}")),
    "a layer and a size in a list": lambda n, r: nnx.data([linear(n, r), 3 * n]),
    "as many layers as features in a list": lambda n, r: nnx.data([linear(n, r) for _ in range(n)]),
    "as many layers as features in a tuple": lambda n, r: nnx.data(tuple(linear(n, r) for _ in range(n))),
    "as many layers as features in a dict": lambda n, r: nnx.data({f"l{i}": linear(n, r) for i in range(n)}),
    "as many arrays as features": lambda n, r: nnx.data(tuple(jnp.ones(n) for _ in range(n))),
    "as many scales as features": lambda n, r: nnx.data([Scaled(n) for _ in range(n)]),
    "a layer at one size in a tuple": lambda n, r: nnx.data((linear(n, r), linear(n, r) if n == 4 else None)),
    "no layer at one size in a tuple": lambda n, r: nnx.data((linear(n, r), linear(n, r) if n != 4 else None)),
    "one layer twice at one size": lambda n, r: nnx.data([[linear(n, r)] * 2 if n == 4 else [linear(n, r)]]),
    "a list that is empty at other sizes": lambda n, r: nnx.data([linear(n, r)] if n == 4 else []),
    "a scale at one size": lambda n, r: nnx.data(Scaled(n) if n == 4 else None),
    "a scale at other sizes": lambda n, r: nnx.data(Scaled(n) if n != 4 else None),
    "Variables in a tuple": lambda n, r: nnx.data((nnx.Param(jnp.ones(n)), nnx.BatchStat(jnp.ones(2)))),
    "a number in a Variable": lambda n, r: nnx.Variable(0),
    "a number in a Variable in a list": lambda n, r: nnx.data([nnx.Variable(7), linear(n, r)]),
    "a size in an array": lambda n, r: nnx.Variable(jnp.asarray(n)),
    "metadata": lambda n, r: nnx.Param(jnp.ones(n), **fan(n), **{"rate": 1 / n, "fixed": "yes"}),
    "metadata in a tuple": lambda n, r: nnx.data((nnx.Param(jnp.ones(n), **fan(n)), nnx.BatchStat(0.0, **fan(2 * n)))),
    "metadata of a layer": lambda n, r: nnx.Linear(
        n, 3, kernel_metadata={"fan": n}, bias_init=nnx.with_metadata(nnx.initializers.ones, fan=n + 1), rngs=r
    ),
    "metadata at some sizes": lambda n, r: nnx.Param(jnp.ones(n), **(fan(1) if n < 5 else large(n))),
}


class Holder(nnx.Module):
    def __init__(self, n: int, make: Any, *, rngs: nnx.Rngs) -> None:
        self.fc = nnx.Linear(n, 3, rngs=rngs)
        self.held = HELD[make](n, rngs) if isinstance(make, str) else make(n, rngs)
        self.last = nnx.Linear(3, 3, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in jax.tree.leaves(self.held, is_leaf=lambda v: isinstance(v, (nnx.Module, nnx.Variable))):
            if isinstance(layer, Scaled):
                x = layer(x)
        return self.last(self.fc(x))


LazyHolder = lm.lazy(Holder, infer=lambda config, x: {"n": x.shape[-1]})


def leaves(model: Any) -> list[tuple[Any, Any]]:
    flat = nnx.to_flat_state(nnx.state(model))
    return [(p, v.get_raw_value() if isinstance(v, nnx.Variable) else v) for p, v in flat]


def assert_same(model: Any, want: Any) -> None:
    assert nnx.graphdef(model) == nnx.graphdef(want)
    for (path, a), (other, b) in zip(leaves(model), leaves(want), strict=True):
        assert path == other and not isinstance(a, Tracer) and type(a) is type(b)
        if isinstance(a, jax.Array) and jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_array_equal(a, b, err_msg=str(path))
    for a, b in zip(variables(model), variables(want), strict=True):
        assert type(a) is type(b) and a.get_metadata() == b.get_metadata()
    assert jax.tree.structure(model.held) == jax.tree.structure(want.held)


def variables(model: Any) -> list[Any]:
    return [v for _, v in nnx.iter_graph(model) if isinstance(v, nnx.Variable)]


WAYS: dict[str, Callable[[Any, Any], Any]] = {
    "call": lambda m, want: m(X),
    "materialize": lambda m, want: lm.materialize(m, X),
    "on a device": lambda m, want: lm.materialize(m, X, device=jax.devices()[0]),
    "lm.jit": lambda m, want: lm.jit(lambda m: m(X))(m),
    "nnx.jit": lambda m, want: nnx.jit(lambda m: m(X))(m),
    "load": lambda m, want: lm.load_state_dict(m, lm.state_dict(want)),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", HELD)
def test_it_is_what_the_class_holds(name: str, way: str) -> None:
    seed = 1 if way == "load" else 0
    model, want = LazyHolder(make=name, rngs=nnx.Rngs(seed)), Holder(4, name, rngs=nnx.Rngs(0))
    if way == "load":
        want.fc.kernel[...] = want.fc.kernel[...] + 1.0
    if way == "nnx.jit" and name.startswith("metadata"):  # Flax carries none out of a transform
        with pytest.raises(lm.UninitializedError, match="carries values out, and no metadata"):
            WAYS[way](model, want)
        assert lm.is_lazy(model)
        way = "call"
    WAYS[way](model, want)
    if way != "load":  # a transform makes an array of a number
        WAYS[way](want, want)
    assert type(model) is Holder
    assert_same(model, want)
    np.testing.assert_allclose(model(X), want(X), rtol=1e-6)


@pytest.mark.parametrize("name", HELD)
def test_what_fails_leaves_it_lazy(name: str) -> None:
    model, want = LazyHolder(make=name, rngs=nnx.Rngs(0)), Holder(4, name, rngs=nnx.Rngs(0))
    names = lm.uninitialized_paths(model)
    with pytest.raises(lm.LazyError):
        lm.load_state_dict(model, lm.state_dict(want) | {"last.kernel": np.ones((7, 7), np.float32)})
    assert lm.uninitialized_paths(model) == names
    model(X)
    assert_same(model, want)


def test_what_the_user_has_changed_stays() -> None:
    model = LazyHolder(make="metadata", rngs=nnx.Rngs(0))
    model.held.set_metadata(fan="mine", added=1)
    model(X)
    metadata = model.held.get_metadata()
    assert (metadata["fan"], metadata["added"], metadata["rate"]) == ("mine", 1, 0.25)
    model = LazyHolder(make="a layer and a size in a list", rngs=nnx.Rngs(0))
    model.held[1] = "mine"
    model.held[0].in_features = "mine as well"
    model(X)
    assert model.held[1] == "mine" and model.held[0].in_features == "mine as well"


REFUSED: dict[str, Callable[[int, nnx.Rngs], Any]] = {
    "partial": lambda n, r: functools.partial(lambda layer, x: layer(x), linear(n, r)),
    "function": lambda n, r: (lambda layer: lambda x: layer(x))(linear(n, r)),
    "default": lambda n, r: (lambda layer: lambda x, layer=layer: layer(x))(linear(n, r)),
    "method": lambda n, r: linear(n, r).__call__,
    "Plain": lambda n, r: Plain(linear(n, r)),
    "array in Plain": lambda n, r: Plain(jnp.ones(n)),
    "Cache that holds a dict": lambda n, r: nnx.Cache({"a": jnp.zeros(n)}),
    "Unknown": lambda n, r: Unknown(a=jnp.ones(n)),
    "Slotted": lambda n, r: Slotted(jnp.ones(n)),
    "Plain of a deque": lambda n, r: Plain(collections.deque([linear(n, r)])),
    "Plain ten deep": lambda n, r: ten_deep(jnp.ones(n)),
    "attribute of a function": lambda n, r: with_attribute(jnp.ones(n)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_can_not_be_read_is_refused_by_name(name: str) -> None:
    with pytest.raises(lm.ConfigurationError) as caught:
        LazyHolder(make=REFUSED[name], rngs=nnx.Rngs(0))
    [problem] = caught.value.problems
    assert problem.where == "Holder.held" and "which the constructor has made" in problem.got
    assert problem.got.startswith("a ") and "LazyModuleMixin" in problem.write


KEPT: dict[str, Callable[[int, nnx.Rngs], Any]] = {
    "a jitted function": lambda n, r: jax.jit(lambda x: x),
    "a logger": lambda n, r: Plain(logging.getLogger(__name__)),
    "a lock": lambda n, r: Plain(threading.RLock()),
    "the rngs that were given": lambda n, r: Plain(r),
    "a graph definition": lambda n, r: Plain(nnx.graphdef(linear(n, r))),
    "a layer without arrays": lambda n, r: Plain(nnx.Dropout(0.5)),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_holds_no_array_of_the_constructor_is_kept(name: str) -> None:
    lazy, explicit = LazyHolder(make=KEPT[name], rngs=nnx.Rngs(0)), Holder(4, KEPT[name], rngs=nnx.Rngs(0))
    lazy(X)
    assert type(lazy) is Holder and type(lazy.held) is type(explicit.held)


@pytest.mark.parametrize("held", [lambda n, r: nnx.Variable(n), lambda n, r: nnx.data([nnx.Variable(n / 2)])])
def test_a_variable_of_a_size_is_refused(held: Any) -> None:
    with pytest.raises(lm.ConfigurationError, match="a number which follows from a size"):
        LazyHolder(make=held, rngs=nnx.Rngs(0))


def test_functions_and_objects_without_arrays_are_kept() -> None:
    circle = Plain(None)
    circle.held = circle

    def make(n: int, rngs: nnx.Rngs) -> Any:
        dropout = functools.partial(nnx.Dropout(0.5), deterministic=True)
        return [functools.partial(jnp.sum, axis=n), Plain({"n": n}), lambda x: x * n, Slotted(n), dropout, circle]

    model = LazyHolder(make=make, rngs=nnx.Rngs(0))
    model(X)
    assert model.held[0].keywords == {"axis": 4} and model.held[1].held == {"n": 4} and model.held[2](2) == 8
    assert model.held[3].held == 4 and model.held[4](X) is X and model.held[5].held is model.held[5]
