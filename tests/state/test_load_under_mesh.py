"""Loads while a mesh is set: values lie as those of the explicit model do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import lazymods as lm

AXES = {"auto": jax.sharding.AxisType.Auto, "explicit": jax.sharding.AxisType.Explicit}


def kernel_init() -> Any:
    return nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "model"))


@pytest.mark.parametrize("way", ["arrays", "numpy", "file"])
@pytest.mark.parametrize("model", ["lazy", "ready"])
@pytest.mark.parametrize("axes", AXES)
def test_values_lie_as_those_of_the_explicit_model(axes: str, model: str, way: str, tmp_path: Path) -> None:
    mesh = jax.make_mesh((1,), ("model",), axis_types=(AXES[axes],))
    with jax.set_mesh(mesh):
        want = nnx.Linear(4, 6, kernel_init=kernel_init(), rngs=nnx.Rngs(0))
        if model == "lazy":
            layer = lm.LazyLinear(6, kernel_init=kernel_init(), rngs=nnx.Rngs(1))
        else:
            layer = nnx.Linear(4, 6, kernel_init=kernel_init(), rngs=nnx.Rngs(1))
        if way == "file":
            lm.save(want, tmp_path / "model.safetensors")
            lm.load(layer, tmp_path / "model.safetensors")
        else:
            entries = lm.state_dict(want)
            lm.load_state_dict(layer, {k: np.asarray(v) for k, v in entries.items()} if way == "numpy" else entries)
        for name in ("kernel", "bias"):
            a, b = getattr(layer, name).get_raw_value(), getattr(want, name).get_raw_value()
            np.testing.assert_array_equal(a, b)
            assert a.sharding.is_equivalent_to(b.sharding, a.ndim)
        np.testing.assert_array_equal(layer(jnp.ones((2, 4))), want(jnp.ones((2, 4))))
