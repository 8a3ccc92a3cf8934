"""Copies of a layer made before its first call: each is sized on its own, and equals the explicit layer."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import pytest
from flax import nnx
from helpers import assert_same_bits, assert_same_model, spec
from layers import MAIN, TABLE, Row

import lazymods as lm

Copy = Callable[[Any], Any]


def split_by_filter(layer: Any) -> Any:
    graphdef, params, rest = nnx.split(layer, nnx.Param, ...)
    return nnx.merge(graphdef, rest, params, copy=True)


COPIES: dict[str, Copy] = {
    "nnx.clone": nnx.clone,
    "copy.deepcopy": copy.deepcopy,
    "pickle": lambda layer: pickle.loads(pickle.dumps(layer)),
    "nnx.split": lambda layer: nnx.merge(*nnx.split(layer), copy=True),
    "nnx.split by filter": split_by_filter,
}
copied = pytest.mark.parametrize("make_copy", COPIES.values(), ids=COPIES)

# beside one of each family: what is held in other ways than as Variables of the layer itself
OTHERS = ("linear-metadata", "linear-general-batch-axes", "einsum-ellipsis", "conv-mask", "conv2d-unbatched",
          "batch-norm1d", "group-norm-size", "attention-dropout", "lora-lazy-base", "lora-ready-base",
          "spectral-norm-net", "spectral-norm-attention", "embed-no-sizes")
ROWS = [*MAIN, *(r for r in TABLE if r.name in OTHERS)]
# Flax's own layers of these hold functions that pickle refuses (jitted tanh and relu), and that deepcopy copies
HOLDS_JITTED = [r for r in ROWS if r.name.endswith(("-cell", "rnn-gru", "bidirectional", "-net"))]


def cells(rows: list[Row]) -> Any:
    """Every row with every copy that Flax's own layer allows."""
    params = [
        pytest.param(row, make_copy, id=f"{row}-{name}")
        for row in rows
        for name, make_copy in COPIES.items()
        if not (row in HOLDS_JITTED and name in ("pickle", "copy.deepcopy"))
        and not (row.name == "conv-mask" and name == "pickle")  # below
    ]
    return pytest.mark.parametrize(("row", "make_copy"), params)


def check_sized(layer: Any, row: Row) -> None:
    """Size a layer, by a call if that is possible, and compare it with the explicit one."""
    want = row.explicit(nnx.Rngs(0))
    if row.sized_by_file:
        lm.load_state_dict(layer, lm.state_dict(want))
    assert_same_bits(row.call(layer), row.call(want))
    assert_same_model(layer, want)


@cells(ROWS)
def test_copy_and_original_are_sized_on_their_own(row: Row, make_copy: Copy) -> None:
    layer = row.lazy(nnx.Rngs(0))
    graphdef, paths = nnx.graphdef(layer), lm.uninitialized_paths(layer)
    twin = make_copy(layer)
    assert type(twin) is type(layer)
    assert nnx.graphdef(twin) == graphdef
    assert sorted(lm.uninitialized_paths(twin)) == sorted(paths)
    check_sized(twin, row)
    assert nnx.graphdef(layer) == graphdef
    assert lm.uninitialized_paths(layer) == paths
    check_sized(layer, row)


@cells(MAIN)
def test_copy_of_a_sized_layer_is_flax_own(row: Row, make_copy: Copy) -> None:
    layer, want = row.twins()
    lm.materialize(layer, *row.args, **row.kwargs)
    twin = make_copy(layer)
    assert_same_model(twin, want)
    assert_same_bits(row.call(twin), row.call(want))


@pytest.mark.slow
@pytest.mark.parametrize("row", HOLDS_JITTED, ids=str)
def test_what_flax_cannot_pickle(row: Row) -> None:
    layer, want = row.twins()
    for twin in (want, layer):
        with pytest.raises(pickle.PicklingError):
            pickle.dumps(twin)
    check_sized(layer, row)


def test_pickle_with_an_array_among_the_options() -> None:
    """Arrays have no hash: while lazy, the copy's GraphDef is another one."""
    row = next(r for r in ROWS if r.name == "conv-mask")
    layer = row.lazy(nnx.Rngs(0))
    check_sized(pickle.loads(pickle.dumps(layer)), row)
    check_sized(layer, row)


@pytest.mark.slow
@pytest.mark.parametrize("row", HOLDS_JITTED, ids=str)
def test_deepcopy_of_a_layer_with_functions(row: Row) -> None:
    """The copy has functions of its own, and so another GraphDef, as that of Flax's own layer."""
    layer, want = row.twins()
    twin, explicit_twin = copy.deepcopy(layer), copy.deepcopy(want)
    assert_same_bits(row.call(twin), row.call(explicit_twin))
    assert type(twin) is type(want)
    assert not lm.has_uninitialized_params(twin)
    assert_same_bits(nnx.to_pure_dict(nnx.state(twin)), nnx.to_pure_dict(nnx.state(explicit_twin)))
    check_sized(layer, row)


@pytest.mark.parametrize("row", MAIN, ids=str)
def test_merge_without_a_copy_shares_the_variables(row: Row) -> None:
    """``nnx.merge`` hands on the Variables themselves: what sizes one layer gives the other its parameters."""
    layer = row.lazy(nnx.Rngs(0))
    twin = nnx.merge(*nnx.split(layer))
    lm.materialize(twin, *row.args, **row.kwargs)
    lm.materialize(layer, *row.args, **row.kwargs)
    for sized in (twin, layer):
        assert_same_model(sized, row.explicit(nnx.Rngs(0)))
    shared = {id(v) for _, v in nnx.iter_graph(layer) if isinstance(v, nnx.Variable)}
    assert shared == {id(v) for _, v in nnx.iter_graph(twin) if isinstance(v, nnx.Variable)}


@copied
def test_copy_keeps_what_was_changed_before(make_copy: Copy) -> None:
    layer = lm.LazyBatchNorm(dtype=jnp.float32, rngs=nnx.Rngs(0))
    layer.eval()
    layer.momentum = 0.5
    layer.scale.dtype = "float16"  # pyright: ignore[reportOptionalMemberAccess]
    layer.bias.set_metadata(frozen=True)  # pyright: ignore[reportOptionalMemberAccess]
    twin = make_copy(layer)
    assert (twin.use_running_average, twin.momentum) == (True, 0.5)
    lm.materialize(twin, spec(2, 3))
    assert (twin.use_running_average, twin.momentum, twin.num_features) == (True, 0.5, 3)
    assert (twin.scale.dtype, twin.bias.dtype) == ("float16", "float32")
    assert twin.bias.get_metadata("frozen") is True
