"""Whole models: the bits of explicit ones, few compiles, little memory, and nothing half-done."""

import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from helpers import assert_same_bits, assert_same_model, spec
from jax.nn import initializers as I  # noqa: N812

import lazymods as lm


@contextmanager
def compiles() -> Iterator[list[str]]:
    """Programs that XLA compiles in the body."""
    seen: list[str] = []

    def listen(event: str, duration_secs: float, **_: Any) -> None:
        if "backend_compile" in event:
            seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seen
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


class Net(nnx.Module):
    """Layers of many kinds; explicit ones if ``sizes`` are given."""

    def __init__(self, lazy: bool, *, rngs: nnx.Rngs, **options: Any):
        if lazy:
            self.conv = lm.LazyConv(12, (3, 3), rngs=rngs, **options)
            self.norm = lm.LazyBatchNorm(rngs=rngs)
            self.attention = lm.LazyMultiHeadAttention(4, decode=False, rngs=rngs, **options)
            self.general = lm.LazyLinearGeneral((3, 5), rngs=rngs, **options)
            self.out = lm.LazyLinear(600, kernel_init=I.orthogonal(), rngs=rngs)
        else:
            self.conv = nnx.Conv(3, 12, (3, 3), rngs=rngs, **options)
            self.norm = nnx.BatchNorm(12, rngs=rngs)
            self.attention = nnx.MultiHeadAttention(4, 12, decode=False, rngs=rngs, **options)
            self.general = nnx.LinearGeneral(12, (3, 5), rngs=rngs, **options)
            self.out = nnx.Linear(5, 600, kernel_init=I.orthogonal(), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.norm(self.conv(x), use_running_average=True)
        return self.out(self.general(self.attention(x.reshape(x.shape[0], -1, x.shape[-1]))))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("whole", [True, False], ids=["materialize", "first call"])
def test_models_get_the_bits_of_explicit_ones(dtype: str, whole: bool) -> None:
    options = {"param_dtype": jnp.dtype(dtype), "dtype": jnp.dtype(dtype)}
    lazy, explicit = Net(True, rngs=nnx.Rngs(3), **options), Net(False, rngs=nnx.Rngs(3), **options)
    x = jnp.zeros((2, 4, 4, 3), dtype)
    with jax.numpy_dtype_promotion("standard"):
        if whole:
            lm.materialize(lazy, x)
        else:
            lazy(x)
    assert_same_model(lazy, explicit)


@pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg"])
def test_other_kinds_of_keys_are_left_to_jax(impl: str) -> None:
    def rngs() -> nnx.Rngs:
        return nnx.Rngs(jax.random.key(0, impl=impl))

    layer = lm.LazyLinear(4, rngs=rngs())
    lm.materialize(layer, spec(2, 3))
    assert_same_model(layer, nnx.Linear(3, 4, rngs=rngs()))


def test_without_partitionable_bits() -> None:
    with jax.threefry_partitionable(False):
        layer = lm.LazyLinear(4, rngs=nnx.Rngs(0))
        lm.materialize(layer, spec(2, 3))
        assert_same_model(layer, nnx.Linear(3, 4, rngs=nnx.Rngs(0)))


def test_in_double_precision() -> None:
    with jax.enable_x64(True):
        layer = lm.LazyLinear(40, param_dtype=jnp.float64, rngs=nnx.Rngs(0))
        lm.materialize(layer, spec(2, 300, dtype=jnp.float64))
        assert_same_model(layer, nnx.Linear(300, 40, param_dtype=jnp.float64, rngs=nnx.Rngs(0)))


def test_a_dtype_that_was_changed_is_cast_after_the_draw() -> None:
    layer = lm.LazyLinear(40, rngs=nnx.Rngs(0))
    with jax.numpy_dtype_promotion("standard"):
        lm.materialize(layer, spec(2, 300), dtype=jnp.bfloat16)
    explicit = nnx.Linear(300, 40, rngs=nnx.Rngs(0))
    assert_same_bits(layer.kernel.get_value(), explicit.kernel.get_value().astype(jnp.bfloat16))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_init_backend_draws_on_the_cpu_for_any_device(dtype: str) -> None:
    options = {"param_dtype": jnp.dtype(dtype), "dtype": jnp.dtype(dtype)}
    cpu = jax.local_devices(backend="cpu")[0]
    with jax.default_device(cpu):
        explicit = Net(False, rngs=nnx.Rngs(3), **options)
    net = Net(True, rngs=nnx.Rngs(3), **options)
    with jax.numpy_dtype_promotion("standard"):
        lm.materialize(net, jax.ShapeDtypeStruct((2, 4, 4, 3), dtype), init_backend="cpu")
    assert_same_model(net, explicit)
    for leaf in jax.tree.leaves(nnx.state(net)):
        assert leaf.devices() == {jax.devices()[0]} and not leaf.committed


def test_init_backend_goes_with_a_device() -> None:
    layer = lm.LazyLinear(4, rngs=nnx.Rngs(0))
    lm.materialize(layer, spec(2, 3), init_backend="cpu", device=jax.devices()[0])
    assert layer.kernel.get_value().devices() == {jax.devices()[0]} and layer.kernel.get_value().committed


def test_an_unknown_init_backend_changes_nothing() -> None:
    layer = lm.LazyLinear(4, rngs=nnx.Rngs(0))
    with pytest.raises(RuntimeError, match="abacus"):
        lm.materialize(layer, spec(2, 3), init_backend="abacus")
    assert type(layer) is lm.LazyLinear and lm.uninitialized_paths(layer) == ["kernel", "bias"]


def test_a_model_built_under_jit_keeps_no_array_of_another_trace() -> None:
    @nnx.jit
    def make(x: jax.Array) -> Any:
        layer = lm.LazyLinear(4, rngs=nnx.Rngs(0))
        layer(x)
        return layer

    assert_same_bits(make(jnp.zeros((2, 3))).kernel.get_value(), nnx.Linear(3, 4, rngs=nnx.Rngs(0)).kernel.get_value())


def test_parameters_are_uncommitted_and_strongly_typed() -> None:
    layer = lm.LazyLinear(4, rngs=nnx.Rngs(0))
    lm.materialize(layer, spec(2, 3))
    for value in (layer.kernel.get_value(), layer.bias.get_value()):  # pyright: ignore[reportOptionalMemberAccess]
        assert not value.committed and not value.weak_type


def test_nothing_is_written_when_a_layer_fails() -> None:
    def fail(key: Any, shape: Any, dtype: Any) -> Any:
        if shape == (4, 6):
            raise ValueError("no such shape")
        return jnp.zeros(shape, dtype)

    broken = nnx.Sequential(lm.LazyLinear(4, rngs=nnx.Rngs(0)), lm.LazyLinear(6, kernel_init=fail, rngs=nnx.Rngs(1)))
    with pytest.raises(ValueError, match="no such shape"):
        lm.materialize(broken, spec(2, 3))
    assert lm.uninitialized_paths(broken) and type(broken.layers[0]) is lm.LazyLinear


class Widths(nnx.Module):
    def __init__(self, widths: list[int], *, rngs: nnx.Rngs):
        self.layers = nnx.List([lm.LazyLinear(w, rngs=rngs) for w in widths])

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.slow
def test_a_thousand_widths_need_no_more_than_four_compiles() -> None:
    widths = list(range(8, 1008))  # where the last axis is shorter, jax 0.12 leaves some to the initializer
    with compiles() as seen:
        model = Widths(widths, rngs=nnx.Rngs(0))
        lm.materialize(model, spec(1, 5))
    assert len(seen) <= 4
    rngs = nnx.Rngs(0)
    for n, (d_in, d_out) in enumerate(zip([5, *widths], widths, strict=False)):
        if n % 250 == 1:
            assert_same_bits(model.layers[n].kernel.get_value(), nnx.Linear(d_in, d_out, rngs=rngs).kernel.get_value())
        else:
            for _ in ("kernel", "bias"):  # each draws
                rngs.params()


MEMORY = """
    import resource, jax, jax.numpy as jnp, numpy as np
    from flax import nnx
    import lazymods as lm

    class Net(nnx.Module):
        def __init__(self, width, *, rngs):
            self.layers = nnx.List([lm.LazyLinear(width, rngs=rngs) for _ in range(8)])
        def __call__(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    def peak():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    lm.materialize(Net(512, rngs=nnx.Rngs(0)), jax.ShapeDtypeStruct((1, 512), jnp.float32))  # compiles
    before = peak()
    net = Net(2560, rngs=nnx.Rngs(0))
    lm.materialize(net, jax.ShapeDtypeStruct((1, 2560), jnp.float32))
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(net, nnx.Param)))
    print((peak() - before) / size)
"""


@pytest.mark.slow
def test_peak_memory_is_that_of_the_parameters() -> None:
    out = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(MEMORY)], capture_output=True, text=True, check=True, timeout=300
    )
    assert float(out.stdout) < 1.15


def test_the_values_of_small_parameters_do_not_overlap() -> None:
    model = Widths([3] * 20, rngs=nnx.Rngs(0))
    lm.materialize(model, spec(1, 3))
    rngs = nnx.Rngs(0)
    for layer in model.layers:
        assert_same_model(layer, nnx.Linear(3, 3, rngs=rngs))
