"""A lazy tensor is an array to everything that asks: what needs a value gets it, in a block and after it."""

import contextlib
import copy
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import lazymods as lm

lt = lm.lazytensor
X: Any = jnp.arange(1.0, 4.0)
BLOCKS = pytest.mark.parametrize("block", [lt.lazy, contextlib.nullcontext])

ASKED = {
    "sharding": lambda x: x.sharding.device_set,
    "devices": lambda x: x.devices(),
    "is_fully_addressable": lambda x: x.is_fully_addressable,
    "is_fully_replicated": lambda x: x.is_fully_replicated,
    "committed": lambda x: x.committed,
    "nbytes": lambda x: x.nbytes,
    "addressable_shards": lambda x: np.asarray(x.addressable_shards[0].data).tolist(),
    "addressable_data": lambda x: np.asarray(x.addressable_data(0)).tolist(),
    "array": lambda x: np.asarray(x).tolist(),
    "dlpack": lambda x: (np if jax.default_backend() == "cpu" else jnp).from_dlpack(x).tolist(),
    "platform": lambda x: x.platform(),
    "pointer": lambda x: x.unsafe_buffer_pointer() != 0,
}


@pytest.mark.parametrize("asked", ASKED)
def test_attributes_of_a_pending_value_are_those_of_the_array(asked):
    with lt.lazy():
        got = ASKED[asked](X * 2)
    assert got == ASKED[asked](X * 2)


def test_device_get_gives_numpy_in_a_block_and_after_it():
    with lt.lazy():
        pending = X * 2
        inside = jax.device_get({"loss": pending})["loss"]
    for got in (inside, jax.device_get(pending)):
        assert type(got) is np.ndarray
        np.testing.assert_array_equal(got, [2, 4, 6])


def test_keys_are_copied_and_iterated_as_outside():
    keys = jax.random.split(jax.random.key(0), 3)
    want = [jax.random.key_data(key).tolist() for key in keys]
    with lt.lazy():
        assert [jax.random.key_data(key).tolist() for key in keys] == want
        assert [jax.random.key_data(key).tolist() for key in copy.deepcopy(keys)] == want
        assert [jax.random.key_data(key).tolist() for key in copy.copy(keys)] == want
        pending = jax.random.split(jax.random.key(0), 3)
        assert [jax.random.key_data(key).tolist() for key in pending] == want


def test_a_model_with_rngs_is_copied_in_a_block():
    model: Any = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    want = copy.deepcopy(model)(jnp.ones(8))
    with lt.lazy():
        got = copy.deepcopy(model)(jnp.ones(8))
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("suffix", [".safetensors", ".npz", ""])
def test_a_model_is_saved_in_a_block(tmp_path, suffix):
    model, fresh = nnx.Linear(2, 2, rngs=nnx.Rngs(0)), nnx.Linear(2, 2, rngs=nnx.Rngs(1))
    want = np.asarray(model.kernel[...]) * 2
    with lt.lazy():
        model.kernel[...] = model.kernel[...] * 2
        lm.save(model, tmp_path / f"model{suffix}")
        model.kernel[...] = model.kernel[...] * 2
    lm.load(fresh, tmp_path / f"model{suffix}")
    np.testing.assert_array_equal(fresh.kernel[...], want)
    np.testing.assert_array_equal(model.kernel[...], want * 2)


def test_a_compiled_program_takes_pending_values():
    program = jax.jit(lambda x: x + 1).lower(X).compile()
    with lt.lazy():
        pending = X * 2
        inside = program(pending)
    for got in (inside, program(pending)):
        np.testing.assert_array_equal(got, [3, 5, 7])


def test_a_mesh_can_be_set_in_a_block():
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    with lt.lazy():
        before = X * 2
        with jax.set_mesh(mesh):
            during = before + 1
        after = during * 2
    np.testing.assert_array_equal(after, [6, 10, 14])
    assert jax.sharding.get_abstract_mesh().empty


@BLOCKS
@pytest.mark.parametrize("spec", [jax.P("data"), jax.P()])
def test_arrays_of_a_mesh_go_with_others(block, spec):
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    weights = X
    with block():
        for n in range(3):
            spread = jax.device_put(np.full(3, n + 1, np.float32), jax.NamedSharding(mesh, spec))
            weights = weights + spread * 2
            lt.mark_step()
    np.testing.assert_array_equal(weights, [13, 14, 15])


# ---------------------------------------------------------------- functions that jax cached


def custom(f):
    g = jax.custom_vjp(f)
    g.defvjp(lambda x: (f(x), x), lambda _, t: (t * f(jnp.float32(1)),))
    return g


WRAPPED = {
    "jit": jax.jit,
    "nested": lambda f: jax.jit(jax.jit(f)),
    "checkpoint": jax.checkpoint,
    "custom_vjp": lambda f: jax.jit(custom(f)),
    "grad": lambda f: (lambda g: jax.grad(lambda x: g(x).sum()))(jax.jit(f)),
    "grad of custom_vjp": lambda f: (lambda g: jax.grad(lambda x: g(x).sum()))(jax.jit(custom(f))),
    "vmap": lambda f: jax.vmap(jax.jit(f)),
    "scan": lambda f: jax.jit(lambda x: jax.lax.scan(lambda c, y: (c, f(y)), 0, x)[1]),
}


@pytest.mark.parametrize("wrapped", WRAPPED)
@pytest.mark.parametrize("born", ["in a block", "outside"])
def test_a_cached_function_goes_in_and_out_of_blocks(wrapped, born):
    want = WRAPPED[wrapped](lambda x: x * jnp.float32(2))(X)
    with lt.lazy() if born == "in a block" else contextlib.nullcontext():
        factor = jnp.float32(1) * 2
        function = WRAPPED[wrapped](lambda x: x * factor)
        first = function(X)
    got = [first, function(X), function(X)]
    with lt.lazy():
        got += [function(X), function(X * 1)]
    got += [function(X), jax.jit(lambda x: function(x))(X)]
    for value in got:
        np.testing.assert_allclose(value, want, rtol=1e-6)
