"""Constructors that take ``**kwargs`` or ``*dims``: a lazy class takes what the class itself takes."""

from __future__ import annotations

import itertools
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from helpers import assert_same_model

import lazymods as lm


class HandsOn(nnx.Module):
    """Hands its options on to its layer."""

    def __init__(self, din: int, dout: int, *, rngs: nnx.Rngs, **kwargs: Any) -> None:
        self.fc = nnx.Linear(din, dout, rngs=rngs, **kwargs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.fc(x)


class HandsOnAll(nnx.Module):
    """Hands on the rngs as well, without naming them."""

    def __init__(self, din: int, dout: int, **options: Any) -> None:
        self.fc = nnx.Linear(din, dout, **options)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.fc(x)


class NoBias(nnx.Linear):
    """Fixes an option of its base, names its sizes its own way, and hands on the rest."""

    def __init__(self, din: int, dout: int, *, rngs: nnx.Rngs, **kwargs: Any) -> None:
        super().__init__(din, dout, use_bias=False, rngs=rngs, **kwargs)


class Defaults(nnx.Linear):
    """Has another default for an option that it does not name."""

    def __init__(self, din: int, *, rngs: nnx.Rngs, **kwargs: Any) -> None:
        kwargs.setdefault("use_bias", False)
        super().__init__(din, rngs=rngs, **kwargs)


class Counts(nnx.Linear):
    """Asks what it was given."""

    def __init__(self, in_features: int, out_features: int, *, rngs: nnx.Rngs, **kwargs: Any) -> None:
        self.given = sorted(kwargs)
        kwargs.pop("note", None)
        super().__init__(in_features, out_features, rngs=rngs, **kwargs)


class PassesAll(nnx.Linear):
    """Takes whatever its base takes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)


class Keywords(nnx.Linear):
    """Takes whatever its base takes, by keyword."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)


class Hidden(nnx.Module):
    """Any number of hidden layers."""

    def __init__(self, din: int, *hidden: int, use_bias: bool = True, rngs: nnx.Rngs) -> None:
        pairs = itertools.pairwise((din, *hidden))
        self.layers = nnx.List([nnx.Linear(a, b, use_bias=use_bias, rngs=rngs) for a, b in pairs])

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = layer(x)
        return x


class Dims(nnx.Module):
    """The size of the input is the first of all sizes."""

    def __init__(self, *dims: int, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(dims[0], dims[-1], rngs=rngs)
        self.rest = nnx.List([nnx.Linear(dims[-1], d, rngs=rngs) for d in dims[1:]])

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.first(x)
        return jnp.concatenate([layer(x) for layer in self.rest], -1)


class AfterRngs(nnx.Module):
    """Takes its rngs by position, before any number of sizes."""

    def __init__(self, din: int, rngs: nnx.Rngs, *hidden: int) -> None:
        self.layers = nnx.List([nnx.Linear(din, d, rngs=rngs) for d in hidden])

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.concatenate([layer(x) for layer in self.layers], -1)


def din(config: Any, x: Any) -> dict[str, Any]:
    return {"din": x.shape[-1]}


def in_features(config: Any, x: Any) -> dict[str, Any]:
    return {"in_features": x.shape[-1]}


def dims(config: Any, x: Any) -> dict[str, Any]:
    return {"dims": (x.shape[-1], 3, 5)}


def ones(key: Any, shape: Any, dtype: Any = jnp.float32, **_: Any) -> jax.Array:
    return jnp.ones(shape, dtype)


LazyHandsOn = lm.lazy(HandsOn, infer=din)
LazyHandsOnAll = lm.lazy(HandsOnAll, infer=din)
LazyNoBias = lm.lazy(NoBias, infer=din)
LazyDefaults = lm.lazy(Defaults, infer=din)
LazyCounts = lm.lazy(Counts, infer=in_features)
LazyPassesAll = lm.lazy(PassesAll, infer=in_features)
LazyKeywords = lm.lazy(Keywords, infer=in_features)
LazyHidden = lm.lazy(Hidden, infer=din)
LazyDims = lm.lazy(Dims, infer=dims)
LazyAfterRngs = lm.lazy(AfterRngs, infer=din)

CASES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "an option": (LazyHandsOn, lambda r: HandsOn(4, 3, use_bias=False, rngs=r), {"dout": 3, "use_bias": False}),
    "no option": (LazyHandsOn, lambda r: HandsOn(4, 3, rngs=r), {"dout": 3}),
    "an initializer": (LazyHandsOn, lambda r: HandsOn(4, 3, bias_init=ones, rngs=r), {"dout": 3, "bias_init": ones}),
    "rngs handed on": (LazyHandsOnAll, lambda r: HandsOnAll(4, 3, rngs=r), {"dout": 3}),
    "fixed": (LazyNoBias, lambda r: NoBias(4, 3, rngs=r), {"dout": 3}),
    "fixed, and an option": (
        LazyNoBias,
        lambda r: NoBias(4, 3, dtype=jnp.float32, param_dtype=jnp.float16, rngs=r),
        {"dout": 3, "dtype": jnp.float32, "param_dtype": jnp.float16},
    ),
    "another default": (LazyDefaults, lambda r: Defaults(4, out_features=3, rngs=r), {"out_features": 3}),
    "not the default": (
        LazyDefaults,
        lambda r: Defaults(4, out_features=3, use_bias=True, rngs=r),
        {"out_features": 3, "use_bias": True},
    ),
    "nothing is handed in": (LazyCounts, lambda r: Counts(4, 3, rngs=r), {"out_features": 3}),
    "a note of its own": (LazyCounts, lambda r: Counts(4, 3, note=1, rngs=r), {"out_features": 3, "note": 1}),
    "all": (LazyPassesAll, lambda r: PassesAll(4, 3, use_bias=False, rngs=r), {"out_features": 3, "use_bias": False}),
    "keywords": (LazyKeywords, lambda r: Keywords(in_features=4, out_features=3, rngs=r), {"out_features": 3}),
    "no hidden": (LazyHidden, lambda r: Hidden(4, rngs=r), {}),
    "hidden": (LazyHidden, lambda r: Hidden(4, 8, 3, rngs=r), {"hidden": (8, 3)}),
    "hidden, an option": (
        LazyHidden,
        lambda r: Hidden(4, 8, use_bias=False, rngs=r),
        {"hidden": [8], "use_bias": False},
    ),
    "dims": (LazyDims, lambda r: Dims(4, 3, 5, rngs=r), {}),
    "after rngs": (LazyAfterRngs, lambda r: AfterRngs(4, r, 3, 2), {"hidden": (3, 2)}),
}


WAYS = ["call", "spec", "lm.jit", "load", "pickle"]
# how many sizes there are does not follow from entries
SIZED = [(name, way) for name in CASES for way in WAYS if (name, way) not in (("dims", "load"), ("no hidden", "load"))]


@pytest.mark.parametrize(("name", "way"), SIZED)
def test_every_way_gives_what_the_constructor_makes(name: str, way: str) -> None:
    cls, explicit, given = CASES[name]
    want, rngs, others, x = explicit(nnx.Rngs(0)), nnx.Rngs(0), nnx.Rngs(0), jnp.ones((2, 4))
    lazy = cls(**given, rngs=rngs)
    if way == "pickle":
        lazy = pickle.loads(pickle.dumps(lazy))
    if way in ("call", "pickle"):
        assert jnp.array_equal(lazy(x), want(x))
    elif way == "spec":
        lm.materialize(lazy, jax.ShapeDtypeStruct(x.shape, x.dtype))
    elif way == "lm.jit":
        lm.jit(lambda m, x: m(x))(lazy, x)
    else:
        lm.load_state_dict(lazy, lm.state_dict(want))
    assert not lm.is_lazy(lazy)
    assert_same_model(lazy, want)
    explicit(others)
    assert way == "pickle" or rngs.params.count[...] == others.params.count[...]


@pytest.mark.parametrize(("cls", "given"), [(LazyHandsOn, {"dout": 3}), (LazyPassesAll, {"out_features": 3})])
def test_an_option_that_nobody_takes_is_refused_by_name(cls: Any, given: dict[str, Any]) -> None:
    with pytest.raises(lm.ConfigurationError, match="unexpected keyword argument 'use_biass'"):
        cls(**given, use_biass=False, rngs=nnx.Rngs(0))


@pytest.mark.slow
def test_an_option_that_the_class_fixes_is_refused_as_by_the_class() -> None:
    with pytest.raises(TypeError, match="multiple values for keyword argument 'use_bias'"):
        NoBias(4, 3, use_bias=True, rngs=nnx.Rngs(0))
    with pytest.raises(lm.ConfigurationError, match="multiple values for keyword argument 'use_bias'"):
        LazyNoBias(dout=3, use_bias=True, rngs=nnx.Rngs(0))


def test_infer_sees_what_was_given_and_no_default_that_the_class_may_not_have() -> None:
    seen: list[dict[str, Any]] = []

    def infer(config: Any, x: Any) -> dict[str, int]:
        seen.append(dict(config))
        return {"din": x.shape[-1]}

    lm.lazy(NoBias, infer=infer)(dout=3, dtype=jnp.float16, rngs=nnx.Rngs(0))(jnp.ones((2, 4)))
    assert seen == [{"dout": 3, "dtype": jnp.float16}]


def test_sizes_by_position_are_refused_with_the_line_that_names_them() -> None:
    with pytest.raises(lm.ConfigurationError, match=r"arguments as in LazyHidden\(din=\.\.\., hidden=\.\.\.,"):
        LazyHidden(8, 3, rngs=nnx.Rngs(0))  # pyright: ignore[reportCallIssue]


LOADS: dict[str, tuple[Any, Any, str]] = {
    "dims": (LazyDims, lambda r: Dims(4, 3, 5, rngs=r), "LazyDims(dims=...)"),
    "hidden": (LazyHidden, lambda r: Hidden(4, 8, 3, rngs=r), "LazyHidden(hidden=...)"),
}


@pytest.mark.parametrize("name", LOADS)
def test_a_file_for_more_sizes_than_are_known_is_refused_with_their_name(name: str) -> None:
    cls, explicit, call = LOADS[name]
    layer, want = cls(rngs=nnx.Rngs(0)), explicit(nnx.Rngs(1))
    with pytest.raises(lm.StateDictError) as caught:
        lm.load_state_dict(layer, lm.state_dict(want))
    problems = caught.value.problems
    assert {p.write for p in problems} == {f"{call}  # the sizes of the file; or model(x) before the load"}
    assert lm.is_lazy(layer)
    if name == "dims":
        layer(jnp.ones((2, 4)))
    else:
        layer = cls(hidden=(8, 3), rngs=nnx.Rngs(0))
    lm.load_state_dict(layer, lm.state_dict(want))
    assert_same_model(layer, want)
