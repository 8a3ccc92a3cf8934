"""The first law, for every layer of the table: however a lazy layer is sized, it becomes Flax's explicit one."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import assert_same_bits, assert_same_model
from layers import TABLE, Row

import lazymods as lm


def attribute_order(model: Any) -> list[Any]:
    """The attributes of every object, in the order in which they were set."""
    return [(path, list(vars(node))) for path, node in nnx.iter_graph(model) if isinstance(node, nnx.Pytree)]


def give_values(model: Any) -> None:
    """Put other numbers in place of everything that a file would hold."""
    rng = np.random.default_rng(1)
    state = nnx.state(model, nnx.Not(nnx.RngState))
    nnx.update(model, jax.tree.map(lambda a: jnp.asarray(rng.uniform(0.5, 1.5, a.shape), a.dtype), state))


def by_call(layer: Any, want: Any, row: Row) -> None:
    assert_same_bits(row.call(layer), row.call(want))


def by_spec(layer: Any, want: Any, row: Row) -> None:
    report = lm.materialize(layer, *row.args, **row.kwargs)
    assert not report.unreached


def by_load(layer: Any, want: Any, row: Row) -> None:
    give_values(want)
    assert lm.load_state_dict(layer, lm.state_dict(want)) == ([], [], [])


Way = Callable[[Any, Any, Row], None]
WAYS: dict[str, Way] = {"call": by_call, "spec": by_spec, "load": by_load}


def cells() -> list[Any]:
    """Every row with every way that can size it."""
    return [
        pytest.param(row, way, id=f"{row}-{name}")
        for row in TABLE
        for name, way in WAYS.items()
        if (row.has_entries if name == "load" else not row.sized_by_file)
    ]


@pytest.mark.parametrize(("row", "way"), cells())
def test_sized_layer_equals_explicit(row: Row, way: Way) -> None:
    rngs, explicit_rngs = nnx.Rngs(0), nnx.Rngs(0)
    layer, want = row.lazy(rngs), row.explicit(explicit_rngs)
    assert lm.has_uninitialized_params(layer) == row.has_entries
    assert_same_bits(nnx.state(rngs), nnx.state(explicit_rngs))
    way(layer, want, row)
    assert_same_model(layer, want)
    assert attribute_order(layer) == attribute_order(want)
    assert_same_bits(row.call(layer, seed=1), row.call(want, seed=1))
    assert_same_model(layer, want)
    assert_same_bits(nnx.state(rngs), nnx.state(explicit_rngs))


@pytest.mark.parametrize("row", [r for r in TABLE if not r.has_entries], ids=str)
def test_layer_without_entries_is_sized_by_the_call_after_a_load(row: Row) -> None:
    layer, want = row.twins()
    assert lm.load_state_dict(layer, lm.state_dict(want)) == ([], [], [])
    assert lm.is_lazy(layer)
    by_call(layer, want, row)
    assert_same_model(layer, want)


@pytest.mark.parametrize("row", [r for r in TABLE if r.sized_by_file], ids=str)
def test_layer_sized_by_a_file_alone(row: Row) -> None:
    layer = row.lazy(nnx.Rngs(0))
    for attempt in (lambda: row.call(layer), lambda: lm.materialize(layer, *row.args)):
        with pytest.raises(lm.ShapeInferenceError, match="num_embeddings"):
            attempt()
        assert lm.uninitialized_paths(layer) == ["embedding"]


STREAMS: dict[str, Callable[[], Any]] = {
    "default and params": lambda: nnx.Rngs(0, params=5),
    "no default": lambda: nnx.Rngs(params=1, dropout=2),
    "drawn from before": lambda: drawn(nnx.Rngs(3), 4),
    "another kind of key": lambda: nnx.Rngs(params=jax.random.key(0, impl="rbg"), default=1),
}


def drawn(rngs: nnx.Rngs, times: int) -> nnx.Rngs:
    for _ in range(times):
        rngs.params()
    return rngs


@pytest.mark.parametrize("streams", STREAMS.values(), ids=STREAMS)
@pytest.mark.parametrize("name", ["linear", "attention-dropout", "spectral-norm-linear", "lora-lazy-base"])
def test_rngs_are_drawn_from_as_by_the_explicit_layer(name: str, streams: Callable[[], Any]) -> None:
    row = next(r for r in TABLE if r.name == name)
    rngs, explicit_rngs = streams(), streams()
    layer, want = row.lazy(rngs), row.explicit(explicit_rngs)
    assert_same_bits(nnx.state(rngs), nnx.state(explicit_rngs))
    rngs.params()  # a draw in between changes nothing: the layer's keys are its own
    explicit_rngs.params()
    by_call(layer, want, row)
    assert_same_model(layer, want)
    assert_same_bits(nnx.state(rngs), nnx.state(explicit_rngs))
