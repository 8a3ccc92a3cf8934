"""First calls of other kinds: by keyword, by another method, with caches, masks and named axes, in views, on a mesh."""
# pyright: reportAttributeAccessIssue=false

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import array, assert_same_bits, assert_same_model, filled, spec
from jax import export
from jax.sharding import PartitionSpec
from layers import MAIN, Row

import lazymods as lm

main_rows = pytest.mark.parametrize("row", MAIN, ids=str)


# ---------------------------------------------------------------- the same call, written differently


@pytest.mark.slow
@main_rows
def test_inputs_by_keyword(row: Row) -> None:
    layer, want = row.twins()
    names = list(inspect.signature(type(want).__call__).parameters)[1:]
    inputs = dict(zip(names, row.inputs(), strict=False))
    assert len(inputs) == len(row.args)
    assert_same_bits(layer(**inputs, **row.kwargs), want(**inputs, **row.kwargs))
    assert_same_model(layer, want)


@main_rows
def test_numpy_inputs(row: Row) -> None:
    layer, want = row.twins()
    inputs = jax.tree.map(np.asarray, row.inputs())
    assert_same_bits(layer(*inputs, **row.kwargs), want(*inputs, **row.kwargs))
    assert_same_model(layer, want)


def with_batch(row: Row, size: Any) -> Any:
    """The row's specs with another size of the first axis."""
    return jax.tree.map(lambda s: jax.ShapeDtypeStruct((size, *s.shape[1:]), s.dtype), row.args)


@main_rows
def test_empty_batch(row: Row) -> None:
    layer, want = row.twins()
    inputs = filled(with_batch(row, 0))
    assert_same_bits(layer(*inputs, **row.kwargs), want(*inputs, **row.kwargs))
    assert_same_model(layer, want)


@pytest.mark.parametrize("row", [r for r in MAIN if not r.mutates], ids=str)
def test_symbolic_batch(row: Row) -> None:
    layer, want = row.twins()
    (batch,) = export.symbolic_shape("b")

    def outputs(model: Any) -> Any:
        forward = jax.jit(lambda *args: model(*args, **row.kwargs))
        return export.export(forward)(*with_batch(row, batch)).out_avals

    assert outputs(layer) == outputs(want)
    assert_same_model(layer, want)


# ---------------------------------------------------------------- another method first


def decode(layer: Any) -> Any:
    layer.init_cache((2, 4, 8))
    return [layer(array(2, 1, 8, seed=i)) for i in range(3)]


def sown(layer: Any) -> Any:
    out, weights = nnx.capture(layer, nnx.Intermediate)(array(2, 5, 8), sow_weights=True)
    return out, nnx.to_pure_dict(weights)


def run_rnn(**kwargs: Any) -> Callable[[Any], Any]:
    return lambda layer: layer(array(2, 5, 3), **kwargs)


OTHER: dict[str, tuple[Callable[..., Any], Callable[..., Any], Callable[[Any], Any]]] = {
    "init_cache and decode": (
        lambda r: lm.LazyMultiHeadAttention(2, decode=True, rngs=r),
        lambda r: nnx.MultiHeadAttention(2, 8, decode=True, rngs=r),
        decode,
    ),
    "attend": (
        lambda r: lm.LazyEmbed(6, 4, rngs=r),
        lambda r: nnx.Embed(6, 4, rngs=r),
        lambda layer: layer.attend(array(2, 4)),
    ),
    "initialize_carry": (
        lambda r: lm.LazyLSTMCell(4, rngs=r),
        lambda r: nnx.LSTMCell(3, 4, rngs=r),
        lambda layer: layer.initialize_carry((2, 3), nnx.Rngs(1), nnx.initializers.normal()),
    ),
    "sown weights": (
        lambda r: lm.LazyMultiHeadAttention(2, decode=False, rngs=r),
        lambda r: nnx.MultiHeadAttention(2, 8, decode=False, rngs=r),
        sown,
    ),
    "attention with a mask": (
        lambda r: lm.LazyMultiHeadAttention(2, decode=False, rngs=r),
        lambda r: nnx.MultiHeadAttention(2, 8, decode=False, rngs=r),
        lambda layer: layer(array(2, 5, 8), mask=nnx.make_causal_mask(jnp.ones((2, 5)))),
    ),
    "batch norm with a mask": (
        lambda r: lm.LazyBatchNorm(rngs=r),
        lambda r: nnx.BatchNorm(3, rngs=r),
        lambda layer: layer(array(4, 3), mask=jnp.arange(4)[:, None] < 2),
    ),
    "another equation": (
        lambda r: lm.LazyEinsum("nd,df->nf", sizes={"f": 4}, rngs=r),
        lambda r: nnx.Einsum("nd,df->nf", (3, 4), rngs=r),
        lambda layer: layer(array(2, 5, 3), "bnd,df->bnf"),
    ),
    "rnn with lengths": (
        lambda r: nnx.RNN(lm.LazyLSTMCell(4, rngs=r)),
        lambda r: nnx.RNN(nnx.LSTMCell(3, 4, rngs=r)),
        run_rnn(seq_lengths=jnp.asarray([2, 5]), return_carry=True),
    ),
    "rnn with rngs": (
        lambda r: nnx.RNN(lm.LazySimpleCell(4, rngs=r), rngs=False),
        lambda r: nnx.RNN(nnx.SimpleCell(3, 4, rngs=r), rngs=False),
        run_rnn(rngs=nnx.Rngs(2)),
    ),
}


@pytest.mark.parametrize(("lazy", "explicit", "use"), OTHER.values(), ids=OTHER)
def test_other_first_uses(lazy: Any, explicit: Any, use: Callable[[Any], Any]) -> None:
    layer, want = lazy(nnx.Rngs(0)), explicit(nnx.Rngs(0))
    assert_same_bits(use(layer), use(want))
    assert_same_model(layer, want)


def test_rnn_with_a_carry_of_the_users_own() -> None:
    """``nnx.RNN`` calls the cell in a loop then, and never before it: refused, with the line that sizes it."""
    carries = array(2, 4), (array(2, 4), array(2, 4, seed=1))
    r, s = nnx.Rngs(0), nnx.Rngs(0)
    lazy = nnx.Bidirectional(nnx.RNN(lm.LazyGRUCell(4, rngs=r)), nnx.RNN(lm.LazyLSTMCell(4, rngs=r)))
    want = nnx.Bidirectional(nnx.RNN(nnx.GRUCell(3, 4, rngs=s)), nnx.RNN(nnx.LSTMCell(3, 4, rngs=s)))
    before = nnx.graphdef(lazy)
    with pytest.raises(lm.UninitializedError, match=r"lm\.materialize\(model, x\)"):
        lazy(array(2, 5, 3), initial_carry=carries)
    assert nnx.graphdef(lazy) == before
    lm.materialize(lazy, spec(2, 5, 3), initial_carry=carries)
    assert_same_model(lazy, want)
    assert_same_bits(lazy(array(2, 5, 3), initial_carry=carries), want(array(2, 5, 3), initial_carry=carries))


def test_named_axis() -> None:
    """Statistics over a mapped axis: the mean of all batches, in one copy."""
    run = nnx.vmap(lambda m, x: m(x), in_axes=(None, 0), axis_name="devices")
    layer = lm.LazyBatchNorm(axis_name="devices", rngs=nnx.Rngs(0))
    want = nnx.BatchNorm(3, axis_name="devices", rngs=nnx.Rngs(0))
    x = array(4, 2, 3)
    for _ in range(2):
        assert_same_bits(run(layer, x), run(want, x))
        assert_same_model(layer, want)


# ---------------------------------------------------------------- views


@pytest.mark.parametrize("first", ["view", "model"])
@pytest.mark.parametrize("name", ["batch-norm-eval", "attention"])
def test_view_shares_what_the_first_call_makes(name: str, first: str) -> None:
    row = next(r for r in MAIN if r.name == name)
    options = {"use_running_average": False} if name == "batch-norm-eval" else {"deterministic": True}
    layer, want = row.twins()
    view, explicit_view = nnx.view(layer, **options), nnx.view(want, **options)
    pairs = [(view, explicit_view), (layer, want)]
    for lazy, explicit in pairs if first == "view" else pairs[::-1]:
        assert_same_bits(row.call(lazy), row.call(explicit))
    for lazy, explicit in pairs:
        assert_same_model(lazy, explicit)
    shared = {id(v) for _, v in nnx.iter_graph(view) if isinstance(v, nnx.Param)}
    assert shared == {id(v) for _, v in nnx.iter_graph(layer) if isinstance(v, nnx.Param)}


# ---------------------------------------------------------------- sharding metadata


PARTITIONED: dict[str, dict[str, Any]] = {
    "with_partitioning": {"kernel_init": nnx.with_partitioning(nnx.initializers.he_normal(), (None, "model"))},
    "with_metadata": {"kernel_init": nnx.with_metadata(nnx.initializers.he_normal(), out_sharding=(None, "model"))},
    "kernel_metadata": {"kernel_metadata": {"out_sharding": (None, "model")}},
}


@pytest.fixture
def mesh() -> Any:
    with jax.set_mesh(jax.make_mesh((1,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))):
        yield


@pytest.mark.parametrize("first", ["call", "spec"])
@pytest.mark.parametrize("options", PARTITIONED.values(), ids=PARTITIONED)
@pytest.mark.usefixtures("mesh")
def test_partitioned_initializers_on_a_mesh(options: dict[str, Any], first: str) -> None:
    layer, want = lm.LazyLinear(4, **options, rngs=nnx.Rngs(0)), nnx.Linear(3, 4, **options, rngs=nnx.Rngs(0))
    assert layer.kernel.get_metadata("out_sharding") == (None, "model")
    x = array(2, 3)
    if first == "spec":
        lm.materialize(layer, spec(2, 3))
    assert_same_bits(layer(x), want(x))
    assert_same_model(layer, want)
    assert layer.kernel[...].sharding == want.kernel[...].sharding
    assert layer.kernel[...].sharding.spec == PartitionSpec(None, "model")


# ---------------------------------------------------------------- Flax's other kinds of Variables


@pytest.mark.parametrize("kind", ["ref", "hijax"])
def test_kinds_of_variables_equal_explicit_or_are_refused_by_name(kind: str) -> None:
    x = array(2, 3)
    with nnx.var_defaults(**{kind: True}):
        rngs = nnx.Rngs(0)
        want = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
        try:
            layer = lm.LazyLinear(4, rngs=rngs)
        except lm.LazyError as refusal:
            assert kind in str(refusal)
        else:
            assert_same_bits(layer(x), want(x))
            assert type(layer) is nnx.Linear
            assert nnx.graphdef(layer) == nnx.graphdef(want)
