"""Whole models whose attributes hold lazy layers in functions, partials, bound methods and plain objects."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from held_kinds import CACHED, KINDS, Holder, Seen, explicit, lazy
from helpers import array, assert_same_bits, spec

import lazymods as lm

X = array(3, 4)
every_kind = pytest.mark.parametrize("hold", (KINDS | CACHED).values(), ids=KINDS | CACHED)


@every_kind
def test_every_way_of_sizing_gives_what_flax_gives(hold: Any) -> None:
    want = explicit(hold)[0](X)
    for size in (lambda model: model(X), lambda model: lm.materialize(model, spec(3, 4))):
        model, held = lazy(hold)
        size(model)
        assert type(held) is nnx.Linear
        assert_same_bits(nnx.state(held), nnx.state(nnx.Linear(4, 4, rngs=nnx.Rngs(0))))
        assert_same_bits(model(X), want)


@every_kind
@pytest.mark.parametrize("look", [lm.infer_shapes, lm.summary])
def test_reports_count_a_held_layer_and_change_nothing(look: Any, hold: Any) -> None:
    for make in (explicit, lazy):
        model, held = make(hold)
        kind, out = type(held), type(model.out)
        report = look(model, spec(3, 4))
        assert report.output.shape == (3, 2)
        assert report.total_parameters == sum(v.size for v in jax.tree.leaves(nnx.state(Seen())))
        assert report.unreached == ()
        assert (type(held), type(model.out)) == (kind, out)
        assert lm.is_lazy(held) == (make is lazy)


@pytest.mark.parametrize(
    ("kind", "path"),
    [("closure", "residual.layer"), ("partial", "residual.args.0"), ("plain object", "residual.layer")],
)
def test_a_row_says_where_the_layer_is(kind: str, path: str) -> None:
    model, _ = lazy(KINDS[kind])
    report = lm.materialize(model, spec(3, 4))
    [row] = [row for row in report.rows if row.path == path]
    assert (row.layer, row.lazy, dict(row.inferred)) == ("Linear", False, {"in_features": 4})
    assert [(p.name, p.shape) for p in row.parameters] == [("kernel", (4, 4)), ("bias", (4,))]
    flops = {row.path: row.flops for row in lm.summary(model, spec(3, 4)).rows}
    twin = {row.path: row.flops for row in lm.summary(Seen(), spec(3, 4)).rows}
    assert (flops[path], flops["out"]) == (twin["held"], twin["out"])
    assert flops[path] is not None
    assert lm.summary(model).total_parameters == report.total_parameters


def test_a_layer_that_is_held_and_seen_has_one_row() -> None:
    class Both(nnx.Module):
        def __init__(self) -> None:
            self.layer = lm.LazyLinear(4, rngs=nnx.Rngs(0))
            self.again = lambda x: self.layer(x)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.again(self.layer(x))

    model = Both()
    report = lm.materialize(model, spec(3, 4))
    assert [row.path for row in report.rows] == ["layer"]
    assert model(X).shape == (3, 4)


def test_one_that_the_call_does_not_reach_stays_lazy() -> None:
    held: Any = lm.LazyLinear(4, rngs=nnx.Rngs(0))

    class Spare(nnx.Module):
        def __init__(self) -> None:
            self.spare = KINDS["closure"](held)
            self.out = lm.LazyLinear(2, rngs=nnx.Rngs(1))

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.out(x)

    report = lm.materialize(Spare(), spec(3, 4))
    assert report.unreached == ("spare.layer",)
    assert lm.is_lazy(held)


@pytest.mark.parametrize("kind", ["closure", "partial", "plain object"])
def test_all_or_nothing(kind: str) -> None:
    held: Any = lm.LazyLinear(4, rngs=nnx.Rngs(0))
    model = Holder(KINDS[kind], held, nnx.Linear(9, 2, rngs=nnx.Rngs(1)))
    before = dict(nnx.state(held))
    with pytest.raises((lm.ShapeInferenceError, TypeError, ValueError)):
        lm.materialize(model, spec(3, 4))
    assert lm.is_lazy(held)
    assert lm.is_lazy(held.kernel)
    assert dict(nnx.state(held)).keys() == before.keys()
    model.out = lm.LazyLinear(2, rngs=nnx.Rngs(1))
    lm.materialize(model, spec(3, 4))
    assert_same_bits(model(X), explicit(KINDS[kind])[0](X))


def test_dtype_and_device_are_those_of_held_layers_too() -> None:
    model, held = lazy(KINDS["closure"])
    device = jax.local_devices()[0]
    lm.materialize(model, spec(3, 4, dtype=jnp.bfloat16), dtype=jnp.bfloat16, device=device)
    assert held.kernel.dtype == model.out.kernel.dtype == jnp.bfloat16
    want = nnx.Linear(4, 4, rngs=nnx.Rngs(0)).kernel[...].astype(jnp.bfloat16)
    assert_same_bits(held.kernel[...], want)
    assert held.kernel[...].devices() == {device}
    assert held.kernel[...].committed


def test_a_layer_in_the_last_of_many_hands() -> None:
    held: Any = lm.LazyLinear(4, rngs=nnx.Rngs(0))
    inner = Holder(KINDS["closure"], held, lambda x: x)
    model = Holder(lambda _: KINDS["partial"](inner), None, lm.LazyLinear(2, rngs=nnx.Rngs(1)))
    assert lm.infer_shapes(model, spec(3, 4)).output.shape == (3, 2)
    lm.materialize(model, spec(3, 4))
    assert type(held) is nnx.Linear
    twin = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    assert_same_bits(model(X), nnx.Linear(4, 2, rngs=nnx.Rngs(1))(X + (X + twin(X))))


def test_what_a_forward_does_to_plain_objects_is_undone() -> None:
    class Counts:
        def __init__(self) -> None:
            self.calls: list[Any] = []

    counts = Counts()

    class Noting(nnx.Module):
        def __init__(self) -> None:
            self.counts = counts
            self.out = lm.LazyLinear(2, rngs=nnx.Rngs(1))

        def __call__(self, x: jax.Array) -> jax.Array:
            self.counts.calls.append(x)
            return self.out(x)

    model = Noting()
    lm.infer_shapes(model, spec(3, 4))
    lm.materialize(model, spec(3, 4))
    lm.summary(model, spec(3, 4))
    assert counts.calls == []


# ---------------------------------------------------------------- what is saved


@every_kind
def test_state_dicts_hold_what_nnx_state_holds(hold: Any) -> None:
    model, _ = explicit(hold)
    names = {".".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(model))}
    assert lm.state_dict(model).keys() == names


# ---------------------------------------------------------------- values of numpy


class Running(nnx.Module):
    """Statistics that begin as an array of numpy, and are written in place."""

    def __init__(self, out: Any) -> None:
        self.mean = nnx.BatchStat(np.zeros(4, np.float32))
        self.out = out

    def __call__(self, x: jax.Array) -> jax.Array:
        self.mean[...] = 0.9 * self.mean[...] + 0.1 * x.mean(0)
        return self.out(x - self.mean[...][None])


def test_a_forward_may_write_to_an_array_of_numpy_in_a_variable() -> None:
    model = Running(lm.LazyLinear(2, rngs=nnx.Rngs(1)))
    held = model.mean.get_raw_value()
    report = lm.materialize(model, spec(3, 4))
    assert report.output.shape == (3, 2)
    assert lm.summary(model, spec(3, 4)).total_parameters == 4 + 4 * 2 + 2
    assert model.mean.get_raw_value() is held
    assert not held.any()
    assert_same_bits(model(X), Running(nnx.Linear(4, 2, rngs=nnx.Rngs(1)))(X))
