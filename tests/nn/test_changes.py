"""What is changed on a lazy layer before its first call is kept: dtypes, modes, attributes."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import array, assert_same_bits, assert_same_model, raw
from layers import MAIN, TABLE, Row, variables

import lazymods as lm

# ---------------------------------------------------------------- dtype at materialize


def note_dtype(model: Any, dtype: Any) -> None:
    """Let an explicit model note the dtype, as if it had been made with ``param_dtype``."""
    module: Any
    for _, module in nnx.iter_modules(model):
        if isinstance(module, nnx.RNNCellBase):
            continue  # its carry is of that dtype, which must be that of what it makes of the inputs
        if hasattr(module, "param_dtype") and jax.tree.leaves(nnx.state(module, nnx.Param)):
            module.param_dtype = getattr(jnp, jnp.dtype(dtype).name)
            if isinstance(module, nnx.Embed):
                module.dtype = jnp.dtype(dtype)


# not SpectralNorm: Flax's own warns in its forward if the kernel has another dtype than the statistics
@pytest.mark.parametrize("dtype", [jnp.bfloat16, "float16"], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("row", [r for r in MAIN if r.family != "SpectralNorm"], ids=str)
def test_dtype_of_materialize(row: Row, dtype: Any) -> None:
    """Parameters are drawn as the explicit layer draws them, then cast; statistics and random state keep theirs."""
    layer, want = row.twins()
    note_dtype(want, dtype)
    with jax.numpy_dtype_promotion("standard"):  # the inputs are float32
        lm.materialize(layer, *row.args, dtype=dtype, **row.kwargs)
    assert nnx.graphdef(layer) == nnx.graphdef(want)
    got, expected = variables(layer), variables(want)
    assert list(got) == list(expected)
    for path, v in expected.items():
        value = raw(v)
        if isinstance(v, nnx.Param):
            value = np.asarray(jnp.asarray(value).astype(dtype))
        assert_same_bits(raw(got[path]), value)


@pytest.mark.parametrize("change", [
    lambda v: setattr(v, "dtype", jnp.float16),
    lambda v: setattr(v, "dtype", "float16"),
    lambda v: setattr(v, "dtype", np.dtype("float16")),
], ids=["jnp", "name", "numpy"])
def test_dtype_set_on_one_parameter(change: Callable[[Any], None]) -> None:
    layer, want = lm.LazyLinear(4, dtype=jnp.float32, rngs=nnx.Rngs(0)), nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    change(layer.kernel)
    layer(array(2, 3))
    assert_same_bits(layer.kernel[...], want.kernel[...].astype(jnp.float16))
    assert want.bias is not None
    assert_same_bits(layer.bias[...], want.bias[...])  # pyright: ignore[reportOptionalSubscript]


# ---------------------------------------------------------------- modes and attributes


MODES: dict[str, Callable[[Any], None]] = {
    "train": lambda m: m.train(),
    "eval": lambda m: m.eval(),
    "set_attributes": lambda m: m.set_attributes(deterministic=True, raise_if_not_found=False),
}
MODAL = ("batch-norm", "batch-norm-at-call", "attention-dropout", "spectral-norm-linear", "spectral-norm-net", "linear")
SIZED: dict[str, Callable[[Any, Row], Any]] = {
    "call": lambda layer, row: None,
    "spec": lambda layer, row: lm.materialize(layer, *row.args, **row.kwargs),
    "load": lambda layer, row: lm.load_state_dict(layer, lm.state_dict(row.explicit(nnx.Rngs(0)))),
}


@pytest.mark.parametrize("size", SIZED.values(), ids=SIZED)
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize("row", [r for r in TABLE if r.name in MODAL], ids=str)
def test_mode_set_before_is_kept(row: Row, mode: Callable[[Any], None], size: Callable[[Any, Row], Any]) -> None:
    layer, want = row.twins()
    mode(layer)
    mode(want)
    size(layer, row)
    assert_same_bits(row.call(layer), row.call(want))
    assert_same_model(layer, want)
    for twin in (layer, want):
        twin.train()
    assert_same_bits(row.call(layer), row.call(want))
    assert_same_model(layer, want)


@pytest.mark.parametrize("size", SIZED.values(), ids=SIZED)
def test_attributes_set_before_are_kept(size: Callable[[Any, Row], Any]) -> None:
    row = next(r for r in TABLE if r.name == "batch-norm-axis-1")
    layer, want = row.twins()
    for twin in (layer, want):
        twin.momentum = 0.25
        twin.note = "mine"
        twin.extra = nnx.Param(jnp.ones(2))
    size(layer, row) if size is not SIZED["load"] else lm.load_state_dict(layer, lm.state_dict(want))
    assert_same_bits(row.call(layer), row.call(want))
    assert_same_model(layer, want)
    assert (layer.momentum, layer.note) == (0.25, "mine")
