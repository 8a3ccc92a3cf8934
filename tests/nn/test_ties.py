"""Parameters that layers share, and parameters of the user's own, set before the first call."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from helpers import array, assert_same_bits, assert_same_model, spec
from layers import MAIN, Row, variables

import lazymods as lm

main_rows = pytest.mark.parametrize("row", MAIN, ids=str)


def put(model: Any, path: tuple[Any, ...], value: Any) -> None:
    *above, key = path
    for k in above:
        model = model[k] if isinstance(model, (dict, nnx.Dict, nnx.List)) else getattr(model, k)
    if isinstance(model, dict):
        model[key] = value
    else:
        setattr(model, key, value)


@main_rows
def test_parameter_given_before_is_kept(row: Row) -> None:
    """A Variable of the user's own in place of the last one: the first call initializes the others."""
    layer, want = row.twins()
    path, donor = list(variables(row.explicit(nnx.Rngs(5))).items())[-1]
    for twin in (layer, want):
        put(twin, path, type(donor)(donor[...], mine=True))
    assert_same_bits(row.call(layer), row.call(want))
    assert_same_model(layer, want)


class Pair(nnx.Module):
    """Two layers of one kind, every Variable of the second being the first's."""

    def __init__(self, make: Callable[[nnx.Rngs], Any]) -> None:
        self.a, self.b = make(nnx.Rngs(0)), make(nnx.Rngs(1))
        for path, v in variables(self.a).items():
            put(self.b, path, v)


ORDERS: dict[str, Callable[[Pair, Row], Any]] = {
    "first": lambda pair, row: (row.call(pair.a), row.call(pair.b)),
    "second": lambda pair, row: (row.call(pair.b), row.call(pair.a)),
}


@pytest.mark.parametrize("call_both", ORDERS.values(), ids=ORDERS)
@main_rows
def test_tied_layers(row: Row, call_both: Callable[[Pair, Row], Any]) -> None:
    pair, want = Pair(row.lazy), Pair(row.explicit)
    assert_same_bits(call_both(pair, row), call_both(want, row))
    assert_same_model(pair, want)
    assert {id(v) for v in variables(pair.a).values()} == {id(v) for v in variables(pair.b).values()}


@main_rows
def test_tied_layers_are_loaded_under_either_name(row: Row) -> None:
    pair, want = Pair(row.lazy), Pair(row.explicit)
    entries = lm.state_dict(want)
    given = {k: v for k, v in entries.items() if k.startswith("b.") or f"b.{k[2:]}" not in entries}
    lm.load_state_dict(pair, given, strict=False)
    assert_same_bits(row.call(pair.b), row.call(want.b))
    assert_same_bits(row.call(pair.a), row.call(want.a))
    assert_same_model(pair, want)


def test_one_parameter_in_two_kinds_of_layers() -> None:
    """An embedding whose table is the kernel of a linear map; the map's shape comes from the table."""

    class Tied(nnx.Module):
        def __init__(self, embed: Any, readout: Any) -> None:
            self.embed, self.readout = embed, readout
            self.readout.kernel = self.embed.embedding

        def __call__(self, tokens: jax.Array) -> jax.Array:
            return self.readout(self.embed(tokens) @ self.embed.embedding[...].T)

    tokens = array(6, dtype=jnp.int32)
    lazy = Tied(lm.LazyEmbed(6, 4, rngs=nnx.Rngs(0)), lm.LazyLinear(4, rngs=nnx.Rngs(1)))
    want = Tied(nnx.Embed(6, 4, rngs=nnx.Rngs(0)), nnx.Linear(6, 4, rngs=nnx.Rngs(1)))
    lm.materialize(lazy, spec(6, dtype=jnp.int32))
    assert lazy.embed.embedding is lazy.readout.kernel
    assert_same_bits(lazy(tokens), want(tokens))
    assert_same_model(lazy, want)


@main_rows
def test_one_layer_in_two_places(row: Row) -> None:
    layer, want = row.twins()
    twice, explicit_twice = nnx.Dict(a=layer, b=layer), nnx.Dict(a=want, b=want)
    lm.load_state_dict(twice, lm.state_dict(explicit_twice))
    assert twice.a is twice.b
    assert_same_bits(row.call(twice.b), row.call(explicit_twice.b))
    assert_same_model(twice, explicit_twice)
