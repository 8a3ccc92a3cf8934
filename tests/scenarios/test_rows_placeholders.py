"""Rows 1-14, 64-67, 73-75 and 169-189: what a placeholder is, knows, allows and refuses."""

import copy
import operator
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import array, assert_same_bits, assert_same_model

import lazymods as lm

PARAM_OR_BUFFER = [(lm.UninitializedParameter, nnx.Param), (lm.UninitializedBuffer, nnx.BatchStat)]


class Slot(lm.LazyModuleMixin, nnx.Module):
    """A lazy module written by hand with one placeholder, as in PyTorch's tests."""

    def __init__(self, cls: Any = lm.UninitializedParameter, **options: Any) -> None:
        self.slot = cls(**options)

    def initialize_parameters(self, x: Any) -> None:
        self.slot.materialize((x.shape[-1],))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.slot[...]


class Ready(nnx.Module):
    """The same module with a value."""

    def __init__(self, cls: Any) -> None:
        self.slot = cls(jnp.full((5, 5), 2.0))


def by_row(*rows: Any) -> Any:
    ids = [f"row_{row}-{name}" for row, name in zip(rows, ("param", "buffer"), strict=True)]
    return pytest.mark.parametrize("cls, target", PARAM_OR_BUFFER, ids=ids)


@by_row("1", "6")
def test_a_module_with_a_placeholder_is_uninitialized(cls: Any, target: Any) -> None:
    module = Slot(cls)
    assert module.has_uninitialized_params() and lm.has_uninitialized_params(module)
    assert lm.uninitialized_paths(module) == ["slot"]
    assert isinstance(module.slot, target)


@by_row("2", "7")
def test_the_state_dict_holds_the_placeholder_itself(cls: Any, target: Any) -> None:
    module = Slot(cls)
    sd = lm.state_dict(module)
    assert list(sd) == ["slot"] and sd["slot"] is module.slot


@by_row("3", "8")
def test_placeholder_into_value_is_refused(cls: Any, target: Any) -> None:
    ready = Ready(target)
    with pytest.raises(lm.UninitializedError, match="uninitialized entry of shape") as error:
        lm.load_state_dict(ready, lm.state_dict(Slot(cls)))
    assert isinstance(error.value, RuntimeError) and "f32[5,5]" in str(error.value)
    assert_same_bits(ready.slot[...], jnp.full((5, 5), 2.0))


@by_row("4", "9")
def test_value_into_placeholder(cls: Any, target: Any) -> None:
    module = Slot(cls)
    slot = module.slot
    lm.load_state_dict(module, {"slot": jnp.ones((5, 5))})
    assert module.slot is slot and type(slot) is target
    assert_same_bits(slot[...], jnp.ones((5, 5)))


@by_row("5", "10")
def test_placeholder_into_placeholder_twice(cls: Any, target: Any) -> None:
    module = Slot(cls)
    for _ in range(2):
        assert lm.load_state_dict(module, lm.state_dict(Slot(cls))) == ([], [], [])
        assert lm.uninitialized_paths(module) == ["slot"]


@by_row("11", "12")
def test_compiling_a_lazy_module_says_what_to_do(cls: Any, target: Any) -> None:
    module = Slot(cls)
    for compiled in (jax.jit(lambda m, x: m(x)), jax.jit(lambda m, x: m.slot[...] + x)):
        with pytest.raises(lm.UninitializedError, match=r"lm\.materialize\(model, "):
            compiled(module, jnp.ones(3))
    assert lm.uninitialized_paths(module) == ["slot"]


@by_row("13", "14")
def test_sharing_memory_is_refused(cls: Any, target: Any) -> None:
    slot = Slot(cls).slot
    for share in (np.from_dlpack, lambda p: p.sharding, lambda p: p.addressable_shards, lambda p: p.devices(),
                  lambda p: p.unsafe_buffer_pointer()):
        with pytest.raises(lm.UninitializedError, match="uninitialized parameter"):
            share(slot)


# ---------------------------------------------------------------- dtype and device


def test_default_dtype() -> None:
    p = lm.UninitializedParameter()
    p.materialize((10,))
    assert p.dtype == jnp.float32 and type(p) is nnx.Param


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.complex64, jnp.int32], ids=str)
def test_the_dtype_set_while_lazy_is_the_one_used(dtype: Any) -> None:
    p = lm.UninitializedParameter((None,), init=nnx.initializers.ones)
    p.dtype = dtype
    assert p.dtype == dtype
    p.materialize((10,))
    assert_same_bits(p[...], jnp.ones(10, dtype))


def test_default_device() -> None:
    p = lm.UninitializedParameter()
    p.materialize((10,))
    assert p[...].devices() == {jnp.zeros(()).device}


TWO_DEVICES = """
import jax, jax.numpy as jnp, lazymods as lm
from flax import nnx
second = jax.devices()[1]
layer = lm.LazyLinear(4, rngs=nnx.Rngs(0))
report = lm.materialize(layer, jax.ShapeDtypeStruct((2, 3), jnp.float32), device=second)
assert all(v.devices() == {second} for v in lm.state_dict(layer).values())
want = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
assert jnp.array_equal(jax.device_get(layer.kernel[...]), jax.device_get(want.kernel[...]))
placed = lm.UninitializedParameter((None,))
with jax.default_device(second):
    placed.materialize((3,))
assert placed[...].devices() == {second}
"""


@pytest.mark.slow
def test_the_device_chosen_while_lazy() -> None:
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", TWO_DEVICES], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# ---------------------------------------------------------------- refused


def kernel() -> Any:
    return lm.LazyLinear(10, rngs=nnx.Rngs(0)).kernel


REFUSED: dict[str, Callable[[Any], Any]] = {
    "row_74-jnp.add": lambda p: jnp.add(p, p),
    "row_75-add": lambda p: p + p,
    "row_172-size": lambda p: p.size,
    "row_172-jnp.size": jnp.size,
    "row_172-nbytes": lambda p: p.nbytes,
    "row_172-value": lambda p: p.get_value(),
    "row_172-T": lambda p: p.T,
    "row_174-copy_": lambda p: operator.setitem(p, (slice(None), 0), 1.0),
    "row_176-np.asarray": np.asarray,
    "row_176-tolist": lambda p: p.tolist(),
    "row_176-item": lambda p: p.item(),
    "row_176-len": len,
    "row_176-iter": list,
    "row_176-contains": lambda p: 1.0 in p,
    "row_176-eq": lambda p: p == 1,
    "row_176-ne": lambda p: p != 1,
    "row_176-index": lambda p: p[0],
    "row_176-at": lambda p: p.at[0].set(1.0),
    "row_176-reshape": lambda p: p.reshape(-1),
    "row_176-view": lambda p: p.view(jnp.int32),
    "row_176-float": float,
    "row_176-int": int,
    "row_179-jnp.sum": jnp.sum,
    "row_179-matmul": lambda p: jnp.ones((2, 3)) @ p,
    "row_179-neg": operator.neg,
    "row_179-abs": abs,
    "row_179-iadd": lambda p: operator.iadd(p, 1.0),
    "row_179-compare": lambda p: p > 0,
    "row_179-where": lambda p: jnp.where(True, p, p),
    "row_179-np.empty_like": np.empty_like,
    "row_180-init": lambda p: operator.setitem(p, ..., nnx.initializers.ones(jax.random.key(0), (p.size,))),
}


@pytest.mark.parametrize("use", REFUSED.values(), ids=REFUSED)
def test_refused(use: Callable[[Any], Any]) -> None:
    p = kernel()
    with pytest.raises(lm.UninitializedError) as error:
        use(p)
    assert isinstance(error.value, RuntimeError)
    message = str(error.value)
    assert "kernel (UninitializedParameter of LazyLinear)" in message and "(?, 10)" in message
    assert "lm.materialize(model, jax.ShapeDtypeStruct(x.shape, x.dtype))" in message
    assert type(p) is lm.UninitializedParameter and p.shape == (None, 10)


def ones_of(p: Any) -> Any:
    return nnx.initializers.ones(jax.random.key(0), p.shape)


@pytest.mark.parametrize("use", [jnp.empty_like, jnp.zeros_like, ones_of],
                         ids=["row_73-empty_like", "row_73-zeros_like", "row_180-init_of_a_partial_shape"])
def test_a_partial_shape_is_refused_by_jax(use: Callable[[Any], Any]) -> None:
    with pytest.raises((TypeError, lm.UninitializedError), match=r"None, 10|\?, 10"):
        use(kernel())


# ---------------------------------------------------------------- known and allowed


@pytest.mark.parametrize("cls, target", PARAM_OR_BUFFER, ids=["param", "buffer"])
def test_a_placeholder_is_constructed(cls: Any, target: Any) -> None:
    init = nnx.initializers.ones
    p = cls((None, 3), dtype="float16", init=init, key=jax.random.key(0), tag="here", out_sharding=None)
    assert isinstance(p, lm.UninitializedVariable) and isinstance(p, target)
    assert p.shape == (None, 3) and p.dtype == jnp.float16 and p.tag == "here"
    p.materialize((2, 3))
    assert type(p) is target and p.tag == "here"
    assert_same_bits(p[...], jnp.ones((2, 3), jnp.float16))


def test_the_repr_of_a_placeholder() -> None:
    assert repr(kernel()) == "UninitializedParameter(shape=(?, 10), dtype=float32)"
    assert repr(lm.UninitializedBuffer((3, None), dtype=jnp.int32)) == "UninitializedBuffer(shape=(3, ?), dtype=int32)"


def test_shape_is_what_is_known_of_it() -> None:
    assert kernel().shape == (None, 10) and kernel().ndim == 2
    unknown = lm.UninitializedParameter()
    for read in (lambda: unknown.shape, lambda: unknown.ndim):
        with pytest.raises(lm.UninitializedError, match=r"lm\.materialize"):
            read()


def test_a_known_size_is_no_leak() -> None:
    bias = lm.LazyLinear(10, param_dtype=jnp.float16, rngs=nnx.Rngs(0)).bias
    assert bias is not None
    assert (bias.shape, bias.size, bias.nbytes, len(bias)) == ((10,), 10, 20, 10)
    with pytest.raises(lm.UninitializedError):  # no value all the same
        bias[...]


def test_what_a_placeholder_allows() -> None:
    p = kernel()
    assert p.dtype == jnp.float32 and p.dtype.itemsize == 4
    assert jnp.issubdtype(p.dtype, jnp.floating) and not jnp.issubdtype(p.dtype, jnp.complexfloating)
    assert p.get_metadata("out_sharding", None) is None
    assert isinstance(p, nnx.Param) and lm.is_lazy(p) and p


DTYPES = {"type": jnp.bfloat16, "name": "bfloat16", "dtype": np.dtype("bfloat16"), "half": "float16", "python": complex,
          "complex": jnp.complex64, "int8": np.int8}


@pytest.mark.parametrize("spelling", DTYPES.values(), ids=DTYPES)
def test_every_conversion_keeps_it_lazy(spelling: Any) -> None:
    p = kernel()
    wanted = jax.dtypes.canonicalize_dtype(spelling)
    cast = p.astype(spelling)
    assert type(cast) is lm.UninitializedParameter and cast.shape == (None, 10) and cast.dtype == wanted
    assert p.dtype == jnp.float32
    p.dtype = spelling
    assert type(p) is lm.UninitializedParameter and p.dtype == wanted
    p.materialize((3, 10))
    assert_same_bits(p[...], nnx.Linear(3, 10, rngs=nnx.Rngs(0)).kernel[...].astype(wanted))


def is_trained(path: Any, variable: Any) -> bool:
    return isinstance(variable, nnx.Param) and not variable.get_metadata("frozen", False)


def test_frozen_while_lazy() -> None:
    layer, x = lm.LazyLinear(4, rngs=nnx.Rngs(0)), array(2, 3)
    layer.kernel.set_metadata(frozen=True)
    assert [p for p, _ in nnx.to_flat_state(nnx.state(layer, is_trained))] == [("bias",)]
    layer(x)
    grads = nnx.grad(lambda m: m(x).sum(), argnums=nnx.DiffState(0, is_trained))(layer)
    assert [p for p, _ in nnx.to_flat_state(grads)] == [("bias",)]


def test_a_lazy_state_has_nothing_to_place() -> None:
    layer = lm.LazyLinear(4, rngs=nnx.Rngs(0))
    moved = jax.device_put(nnx.state(layer), jax.devices()[0])
    assert jax.tree.leaves(moved) == []
    nnx.update(layer, moved)
    layer(array(2, 3))
    assert_same_model(layer, nnx.Linear(3, 4, rngs=nnx.Rngs(0)))


def test_materialize_in_place() -> None:
    layer = lm.LazyLinear(10, kernel_metadata={"tag": "left"}, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    p = layer.kernel
    p.materialize((3, 10))
    assert layer.kernel is p and type(p) is nnx.Param and p.tag == "left"
    assert_same_bits(p[...], nnx.Linear(3, 10, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0)).kernel[...])


def test_materialize_twice_is_an_error() -> None:
    p = kernel()
    p.materialize((3, 10), jnp.ones((3, 10)))
    with pytest.raises(AttributeError, match="materialize"):
        p.materialize((3, 10))
    assert_same_bits(p[...], jnp.ones((3, 10)))


COPIES: dict[str, Callable[[Any], Any]] = {
    "row_183-copy": copy.copy,
    "row_183-method": lambda p: p.copy(),
    "row_184-deepcopy": copy.deepcopy,
    "row_185-pickle": lambda p: pickle.loads(pickle.dumps(p)),
}


def uniform(key: Any, shape: Any, dtype: Any = jnp.float32) -> jax.Array:
    return jax.random.uniform(key, shape, dtype)


@pytest.mark.parametrize("cls, target", PARAM_OR_BUFFER, ids=["param", "buffer"])
@pytest.mark.parametrize("copier", COPIES.values(), ids=COPIES)
def test_copies_keep_everything(copier: Callable[[Any], Any], cls: Any, target: Any) -> None:
    p = cls((None, 3), dtype=jnp.bfloat16, init=uniform, key=jax.random.key(1), frozen=True)
    twin = copier(p)
    assert type(twin) is cls and twin is not p
    assert (twin.shape, twin.dtype, twin.get_metadata()) == (p.shape, p.dtype, p.get_metadata())
    twin.materialize((2, 3))
    assert lm.is_lazy(p)
    assert_same_bits(twin[...], uniform(jax.random.key(1), (2, 3), jnp.bfloat16))


def test_an_initializer_that_does_not_pickle_is_named() -> None:
    p = lm.UninitializedParameter((None, 3), init=lambda key, shape, dtype: jnp.ones(shape, dtype))
    layer = lm.LazyLinear(3, kernel_init=lambda key, shape, dtype: jnp.ones(shape, dtype), rngs=nnx.Rngs(0))
    for lazy in (layer, p):
        with pytest.raises(lm.SerializationError, match=r"init.*<lambda>"):
            pickle.dumps(lazy)


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), nnx.clone],
                         ids=["row_184-deepcopy", "row_185-pickle", "row_184-clone"])
def test_copies_keep_ties(copier: Callable[[Any], Any]) -> None:
    p = lm.UninitializedParameter((None,))
    twin = copier(nnx.List([p, nnx.List([p])]))
    assert twin[0] is twin[1][0] and twin[0] is not p


def test_dtype_before_materialize_leaves_counters_alone() -> None:
    model = nnx.Sequential(lm.LazyLinear(4, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(1)))
    lm.materialize(model, array(2, 3, dtype=jnp.float16), dtype=jnp.float16)
    assert {v.dtype for v in lm.state_dict(model).values()} == {jnp.dtype(jnp.float16)}
    assert lm.state_dict(model, include_rng=True)["layers.1.rngs.count"].dtype == jnp.uint32


def test_one_object_in_two_modules_is_one_slot() -> None:
    a, b = Slot(), Slot()
    b.slot = a.slot
    both = nnx.List([a, b])
    assert list(lm.state_dict(both)) == ["0.slot", "1.slot"]
    a(jnp.ones(3))
    assert not lm.has_uninitialized_params(both) and b.slot is a.slot
    assert len(nnx.to_flat_state(nnx.state(both, nnx.Param))) == 1


@pytest.mark.parametrize("error, builtin", [(lm.UninitializedError, RuntimeError), (lm.ShapeInferenceError, ValueError),
                                            (lm.StateDictError, RuntimeError)], ids=lambda e: e.__name__)
def test_kinds_of_errors(error: type[Exception], builtin: type[Exception]) -> None:
    assert issubclass(error, lm.LazyError) and issubclass(error, builtin)
