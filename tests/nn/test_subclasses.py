"""A user's subclass of a lazy layer keeps its class and methods, and has the explicit layer's parameters."""

from typing import Any

import jax
import pytest
from flax import nnx
from helpers import assert_same_bits, raw
from layers import TABLE, Row

import lazymods as lm
from lazymods import nn as lazy_nn

# one row of each lazy class, the main one if there is one
ROWS = list({r.lazy_class: r for r in sorted(TABLE, key=lambda r: r.main) if r.lazy_class and r.has_entries}.values())


def subclass(cls: Any) -> Any:
    """A method, a forward around the layer's own, an attribute."""

    class Mine(cls):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.calls = 0

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return jax.tree.map(lambda y: -y, super().__call__(*args, **kwargs))

        def describe(self) -> str:
            return f"mine, {self.calls} calls"

    return Mine


def flat(model: Any) -> Any:
    return {path: raw(v) for path, v in nnx.to_flat_state(nnx.state(model))}


@pytest.mark.parametrize("first", ["call", "spec", "load"])
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_subclass_keeps_class_and_methods(row: Row, first: str) -> None:
    assert row.of_class is not None
    mine = subclass(row.lazy_class)
    layer, want = row.of_class(mine, nnx.Rngs(0)), row.explicit(nnx.Rngs(0))
    if first == "spec":
        lm.materialize(layer, *row.args, **row.kwargs)
    elif first == "load":
        assert lm.load_state_dict(layer, lm.state_dict(want)) == ([], [], [])
    assert type(layer) is mine
    assert lm.is_lazy(layer) == (first == "call")
    for _ in range(2):
        assert_same_bits(row.call(layer), jax.tree.map(lambda y: -y, row.call(want)))
    assert type(layer) is mine
    assert not lm.is_lazy(layer)
    assert layer.describe() == "mine, 2 calls"
    assert_same_bits(flat(layer), flat(want))


def test_rows_are_of_all_lazy_classes() -> None:
    assert {r.lazy_class for r in ROWS} == {c for name, c in vars(lazy_nn).items() if name.startswith("Lazy")}
